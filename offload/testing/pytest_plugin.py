"""pytest plugin ``offload``: scenario files as tests, and virtual-time fixtures.

pytest loads it by itself. Every ``*.scenario.toml`` that pytest comes across is a test: one run, or one for each seed
of ``--scenario-seeds``. A failing test prints the violations and the command that repeats the run.

Rule 1. pytest imports this module in each test run of an environment with this package. It imports nothing but pytest;
        trio and the harness are imported by the first scenario, or by the first test that asks for a fixture.
Rule 2. Other plugins treat every item as if it were a function (pytest-trio 0.8 reads ``item.obj``): our item has the
        attributes they read, and marks itself as no function.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pytest

if TYPE_CHECKING:
    from trio.testing import MockClock

    from backends.testing import FakeTier
    from offload import Pipeline

    from ._scenario_items import ScenarioFile
    from .scenarios._program import Scenario
    from .scenarios._systems import Factory
    from .scenarios._trace import Report

SUFFIX: Final = ".scenario.toml"
MakeTier: TypeAlias = "Callable[..., FakeTier]"
Play: TypeAlias = "Callable[..., Report]"


# --- options ------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the command line and of the ini file."""
    group = parser.getgroup("offload", "scenarios of trio-offload")
    group.addoption(
        "--scenario-seed",
        metavar="N",
        type=_seed,
        help="Run scenario files with this seed instead of their own; also what the fixture scenario_seed gives. "
        "Default: the file's own, and 0",
    )
    group.addoption(
        "--scenario-seeds",
        metavar="A..B",
        type=_seeds,
        help="Run each scenario file once for each of these seeds, both ends included.",
    )
    group.addoption(
        "--scenario-system",
        metavar="MODULE:FACTORY",
        help="The cache that scenario files are run with. Default: the ini option scenario_system, or the pipelines of "
        "trio-offload",
    )
    group.addoption(
        "--scenario-trace",
        metavar="DIR",
        type=Path,
        help="Write the trace of each failing scenario to this directory, for Perfetto (ui.perfetto.dev).",
    )
    parser.addini(
        "scenario_files",
        "Globs of the files that are scenarios: of their names, or, with a slash, of their paths below the root directory. "
        "Empty: none but those named on the command line.",
        type="args",
        default=[f"*{SUFFIX}"],
    )
    parser.addini("scenario_system", "What --scenario-system is without being said.", type="string", default="")


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark of scenario items."""
    config.addinivalue_line(
        "markers", "scenario: a scenario file, collected as a test (-m 'not scenario' leaves them out)"
    )


def _seed(text: str) -> int:
    if not re.fullmatch(r"\d{1,18}", text):
        raise ValueError  # argparse names the option and the value
    return int(text)


def _seeds(text: str) -> range:
    import argparse

    match = re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", text)
    if match is None or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of seeds: write A..B, both included, as in 0..999")
    return range(int(match[1]), int(match[2]) + 1)


_seed.__name__ = "seed"


# --- scenario files -----------------------------------------------------------------------------------------------


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> ScenarioFile | None:
    """Collect scenario files."""
    if not _wanted(file_path, parent):
        return None
    from ._scenario_items import ScenarioFile

    return ScenarioFile.from_parent(parent, path=file_path)


def _wanted(path: Path, parent: pytest.Collector) -> bool:
    if path.suffix != ".toml":
        return False
    if path.name.endswith(SUFFIX) and parent.session.isinitpath(path):
        return True  # named on the command line
    patterns: list[str] = parent.config.getini("scenario_files")
    if not patterns:
        return False
    below = Path(os.path.relpath(path, parent.config.rootpath)).as_posix()
    return any([fnmatch(below if "/" in pattern else path.name, pattern) for pattern in patterns])


# --- fixtures -----------------------------------------------------------------------------------------------------


@pytest.fixture
def scenario_seed(request: pytest.FixtureRequest) -> int:
    """Return the seed of ``--scenario-seed``, or 0."""
    seed: int | None = request.config.getoption("--scenario-seed")
    return seed or 0


@pytest.fixture
def virtual_clock(scenario_seed: int) -> Iterator[MockClock]:
    """Yield an autojump clock, under a deterministic scheduler.

    The clock jumps ahead when every task waits; the scheduler's order is a function of ``scenario_seed``. With
    pytest-trio the test runs by this clock, also if another fixture requested it. Without pytest-trio, call
    ``trio.run(main, clock=virtual_clock)``.
    """
    from trio.testing import MockClock

    from .scenarios._clock import deterministic

    with deterministic(scenario_seed):
        yield MockClock(autojump_threshold=0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test of pytest-trio with our clock.

    pytest-trio would find the clock only among the test's own arguments.
    """
    clock = getattr(item, "funcargs", {}).get("virtual_clock")
    if clock is not None and item.get_closest_marker("trio") is not None:
        import trio

        def run(main: Any, *args: Any, **options: Any) -> Any:
            return trio.run(main, *args, **{**options, "clock": options.get("clock") or clock})

        item.add_marker(pytest.mark.trio(run=run), append=False)
    return (yield)


@pytest.fixture
def fake_tier() -> MakeTier:
    """Return a function that makes host-memory tiers with modelled copies.

    Copies take modelled time and fail on request. ``fake_tier(capacity=64, block_bytes=64, *, holds="k{0..3}",
    latency_ms=2, bytes_per_ms=64, ...)``
    """
    from .scenarios._ledger import fake_tier

    return fake_tier


@pytest.fixture
def offload_options() -> dict[str, Any]:
    """Return the options of ``offload_pipeline``, for a module to override.

    They are the keyword arguments of ``offload.open_pipeline`` (``config``, ``policies``, ...), and fake tiers as
    ``source`` and ``destination``.
    """
    return {}


@pytest.fixture
def _with_pytest_trio(request: pytest.FixtureRequest) -> None:
    if not request.config.pluginmanager.hasplugin("trio"):
        pytest.fail("the fixture offload_pipeline needs pytest-trio: pip install pytest-trio", pytrace=False)
    if request.node.get_closest_marker("trio") is None:
        pytest.fail("the fixture offload_pipeline is for tests of pytest-trio: `async def`, and with trio_mode = true in "
                    "the ini file or the mark @pytest.mark.trio", pytrace=False)  # fmt: skip


@pytest.fixture
async def offload_pipeline(
    _with_pytest_trio: None, virtual_clock: MockClock, offload_options: dict[str, Any]
) -> AsyncIterator[Pipeline]:
    """Yield an open pipeline between two fake tiers, in virtual time.

    The invariants judge it when the test is over. ``offload_pipeline.source`` and ``.destination`` are the tiers; the
    source is empty: ``offload_pipeline.source.fill(keys)``.
    """
    from .scenarios._ledger import judged_pipeline

    async with judged_pipeline(**offload_options) as pipeline:
        yield pipeline


@pytest.fixture
def play_scenario(request: pytest.FixtureRequest) -> Play:
    """Return a function that plays a scenario, and fails on violations.

    ``play_scenario(scenario, seed=None, *, ...)``: a scenario is a value, the text of a file, or a path (relative to
    the test's file). Other arguments: ``factory``, the system to be tested (by default that of ``--scenario-system``),
    and ``judge=False``, to get the report even if it has violations.
    """

    def play_one(
        scenario: Scenario | str | Path, seed: int | None = None, *, factory: Factory | None = None, judge: bool = True
    ) -> Report:
        import trio

        from ._scenario_items import factory_said, repeated
        from ._scenario_items import judge as judge_report
        from .scenarios._files import read, read_text
        from .scenarios._play import play

        if trio.lowlevel.in_trio_run():
            raise RuntimeError("play_scenario starts its own trio run: call it from a test that is not `async def`")
        base, repeat = request.path.parent, ""
        if isinstance(scenario, Path):
            path = request.path.parent / scenario
            scenario, base = read(path), path.parent
        else:
            path = None
            scenario = read_text(scenario) if isinstance(scenario, str) else scenario
        chosen: int | None = request.config.getoption("--scenario-seed") if seed is None else seed
        report = play(scenario, chosen, factory=factory or factory_said(request.config), base=base)
        if judge:
            if path is not None and factory is None:
                repeat = repeated(request.config, path, report.seed)
            judge_report(request.config, report, f"{request.node.nodeid}-seed{report.seed}", repeat)
        return report

    return play_one
