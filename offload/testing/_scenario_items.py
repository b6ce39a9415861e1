"""Scenario files as pytest's files and items, and how a run that went wrong is told."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from maru.base.files import PERFETTO

if TYPE_CHECKING:
    from .scenarios._program import Scenario, Seam
    from .scenarios._systems import Factory
    from .scenarios._trace import Report

_SEAMS: Final = pytest.StashKey["tuple[Seam, ...]"]()
_SHOWN: Final = 12
"""Violations in the output of a failing test; more say the same."""


class ScenarioFile(pytest.File):
    """A file with a scenario."""

    def collect(self) -> Iterable[ScenarioItem]:
        """A test for each seed."""
        from .scenarios._files import read
        from .scenarios._program import ScenarioError

        try:
            scenario = read(self.path, seams_said(self.config))
        except ScenarioError as error:
            raise self.CollectError(all_of(error)) from error
        for seed in self._seeds(scenario):
            yield ScenarioItem.from_parent(self, name=f"seed{seed}", scenario=scenario, seed=seed)

    def _seeds(self, scenario: Scenario) -> range:
        seeds: range | None = self.config.getoption("--scenario-seeds")
        if seeds is not None:
            return seeds
        seed: int | None = self.config.getoption("--scenario-seed")
        seed = scenario.seed if seed is None else seed
        return range(seed, seed + 1)


def all_of(error: Any) -> str:
    """The text of all mistakes of a scenario, one a line."""
    return "\n".join([str(error), *getattr(error, "others", ())])


class ScenarioItem(pytest.Item):
    """One run of a scenario."""

    obj: Any = None  # no function: see rule 2 of the plugin

    def __init__(self, *, scenario: Scenario, seed: int, **options: Any) -> None:
        super().__init__(**options)
        self.scenario = scenario
        self.seed = seed
        self.add_marker(pytest.mark.scenario)

    def runtest(self) -> None:
        """Run it, in virtual time if that can carry it, and fail if something was wrong."""
        from .scenarios._play import play
        from .scenarios._systems import page_store_of

        factory, base = factory_said(self.config), self.path.parent
        repeat = repeated(self.config, self.path, self.seed)
        if page_store_of(self.scenario):
            from .scenarios._real_run import play_real

            report = play_real(self.scenario, self.seed, factory=factory, base=base)
            repeat += " --real"
        else:
            report = play(self.scenario, self.seed, factory=factory, base=base)
        self.user_properties += [("seed", self.seed), ("trace_hash", report.trace_hash)]
        judge(self.config, report, self.nodeid, repeat)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """What was wrong, without a traceback through the harness."""
        from .scenarios._program import ScenarioError
        from .scenarios._systems import NoSuchSystem

        if isinstance(excinfo.value, ScenarioFailed):
            return str(excinfo.value)
        if isinstance(excinfo.value, ScenarioError | NoSuchSystem):
            return all_of(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Where it stands: at its name."""
        return self.path, _line_of_name(self.path), f"{self.scenario.name} (seed {self.seed})"


def _line_of_name(path: Path) -> int:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        if re.match(r"""\s*("name"|'name'|name)\s*=""", line):
            return number
    return 0


def factory_said(config: pytest.Config) -> Factory | None:
    """The cache to be tested, as the command line or the ini file names it."""
    from .scenarios._systems import factory_of

    return factory_of(_system(config))


def seams_said(config: pytest.Config) -> tuple[Seam, ...] | None:
    """The seams of the cache to be tested, found out once; ``None`` for our own. What cannot be opened is said by its runs."""
    system = _system(config)
    if not system:
        return None
    if _SEAMS not in config.stash:
        from .scenarios._players import probe
        from .scenarios._systems import SEAMS, NeedsRealTime, NoSuchSystem

        try:
            config.stash[_SEAMS] = probe(system).seams
        except (NoSuchSystem, NeedsRealTime):
            config.stash[_SEAMS] = tuple(SEAMS)
    return config.stash[_SEAMS]


def _system(config: pytest.Config) -> str:
    return str(config.getoption("--scenario-system") or config.getini("scenario_system"))


def repeated(config: pytest.Config, path: Path, seed: int) -> str:
    """The line that repeats a run, for where pytest was started."""
    words = ["offload", "scenario", "run", os.path.relpath(path, config.invocation_params.dir), "--seed", str(seed)]
    return shlex.join([*words, *(["--system", system] if (system := _system(config)) else [])])


class ScenarioFailed(AssertionError):
    """Something was wrong with a run: the text says what, and how to repeat it.

    Attributes:
        report: of the run.
    """

    def __init__(self, text: str, report: Report) -> None:
        super().__init__(text)
        self.report = report


def judge(config: pytest.Config, report: Report, name: str, repeat: str) -> None:
    """Fail, with all that is needed to go on from there, if something was wrong."""
    if report.good:
        return
    count = len(report.violations)
    lines = [f"{report.scenario.name}, seed {report.seed}: {count} violation{'s' if count > 1 else ''}"]
    lines += [f"  {violation.rule}: {violation.text.rstrip()}" for violation in report.violations[:_SHOWN]]
    lines += [f"  and {count - _SHOWN} more"] if count > _SHOWN else []
    lines += [f"repeat it: {repeat}"] if repeat else []
    directory: Path | None = config.getoption("--scenario-trace")
    if directory is not None:
        lines.append(f"trace: {_save_trace(config.invocation_params.dir / directory, report, name)}")
    elif repeat:
        lines.append("see it: add --trace out.json to that line, or --scenario-trace DIR to pytest's")
    raise ScenarioFailed("\n".join(lines), report)


def _save_trace(directory: Path, report: Report, name: str) -> str:
    from .scenarios._perfetto import trace_events

    try:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / (re.sub(r"[^\w.-]+", "-", name).strip("-") + ".json")
        PERFETTO.write(path, json.dumps(trace_events(report)).encode())
    except OSError as error:
        return f"could not be saved: {error}"  # what was wrong with the run matters more
    return str(path)
