"""Scenario files as pytest's files and items, and reports of failed runs."""

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
"""Number of violations printed for a failing test; more add little."""


class ScenarioFile(pytest.File):
    """Scenario file collected by pytest."""

    def collect(self) -> Iterable[ScenarioItem]:
        """Return one test for each seed."""
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
    """Return the text of all mistakes of a scenario, one per line."""
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
        """Run the scenario, and fail if a rule was violated.

        The run is in virtual time, except if the scenario has a page store.
        """
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
        """Return the violations, without a traceback through the harness."""
        from .scenarios._program import ScenarioError
        from .scenarios._systems import NoSuchSystem

        if isinstance(excinfo.value, ScenarioFailed):
            return str(excinfo.value)
        if isinstance(excinfo.value, ScenarioError | NoSuchSystem):
            return all_of(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Return the line of the scenario's name as the test's place."""
        return self.path, _line_of_name(self.path), f"{self.scenario.name} (seed {self.seed})"


def _line_of_name(path: Path) -> int:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        if re.match(r"""\s*("name"|'name'|name)\s*=""", line):
            return number
    return 0


def factory_said(config: pytest.Config) -> Factory | None:
    """Return the cache under test, from the command line or ini file."""
    from .scenarios._systems import factory_of

    return factory_of(_system(config))


def seams_said(config: pytest.Config) -> tuple[Seam, ...] | None:
    """Return the seams of the cache under test; ``None`` for our own.

    They are found once. A cache that cannot be opened gets all seams; its runs report the error.
    """
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
    """Return the command line that repeats a run, from pytest's directory."""
    words = ["offload", "scenario", "run", os.path.relpath(path, config.invocation_params.dir), "--seed", str(seed)]
    return shlex.join([*words, *(["--system", system] if (system := _system(config)) else [])])


class ScenarioFailed(AssertionError):
    """Run with violations; the text lists them and the repeating command.

    Attributes:
        report: report of the run.
    """

    def __init__(self, text: str, report: Report) -> None:
        super().__init__(text)
        self.report = report


def judge(config: pytest.Config, report: Report, name: str, repeat: str) -> None:
    """Fail if the run has violations, with all details to investigate them."""
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
        return f"could not be saved: {error}"  # the violations of the run matter more
    return str(path)
