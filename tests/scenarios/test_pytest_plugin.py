"""The pytest plugin, as its users meet it: with and without pytest-trio, in each of its modes.

What depends on how pytest is started runs in a process of its own; the rest in this one, which takes a tenth of the time.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

# A run inside this process forgets the modules that it was first to import, and the next one imports them anew: with half of
# them here already, there would be two of each class.
from offload.testing.scenarios import from_sync, judged_pipeline, play, unroll  # noqa: F401

pytest_plugins = ["pytester"]

GOOD = """\
format = 1
# a comment before the name

name = "one is cancelled"
seed = 7

[tier.host]
latency_ms = 2

[pipeline.main]
to = "host"
flush_ms = 2

[[step]]
store = { id = "a{0..3}" }

[[fault]]
at_hook = "sweep_claim_gap"
who = "a2"
do = "cancel"

[[expect]]
status = { a0 = "COMPLETE", a2 = "CANCELLED" }
"""
BAD = GOOD.replace('a2 = "CANCELLED"', 'a2 = "COMPLETE"')
NONSENSE = GOOD.replace('who = "a2"', 'who = "b2"')

MODES = {
    "trio mode": ["-o", "trio_mode=true"],
    "strict": ["-o", "trio_mode=false", "--strict-markers", "--strict-config"],
    "without pytest-trio": ["-p", "no:trio"],
}
"""How users run pytest."""


@pytest.fixture
def run(pytester: pytest.Pytester) -> object:
    """pytest, with warnings as errors."""
    pytester.makeini("[pytest]\n")

    def run(*arguments: str, files: dict[str, str] | None = None, process: bool = False) -> pytest.RunResult:
        for name, text in (files or {}).items():
            path = pytester.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        run = pytester.runpytest_subprocess if process else pytester.runpytest_inprocess
        return run("-W", "error", "-p", "no:cacheprovider", *arguments)

    return run


# --- scenario files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_scenario_file_is_a_test_beside_others(run, mode: str) -> None:  # type: ignore[no-untyped-def]
    files = {"one.scenario.toml": GOOD, "test_plain.py": "def test_plain():\n    pass\n"}
    run(*MODES[mode], files=files, process=True).assert_outcomes(passed=2)


def test_what_goes_wrong_is_said_with_the_line_that_repeats_it(run, pytester: pytest.Pytester) -> None:  # type: ignore[no-untyped-def]
    result = run(files={"sub/one.scenario.toml": BAD})
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*one is cancelled (seed 7)*",
            "one is cancelled, seed 7: 1 violation",
            "*expect: *a2*",
            "repeat it: offload scenario run sub/one.scenario.toml --seed 7",
            "see it: *",
            "*FAILED sub/one.scenario.toml::seed7*",
        ]
    )
    assert "Traceback" not in result.stdout.str()
    line = next(line for line in result.outlines if line.startswith("repeat it: ")).removeprefix("repeat it: offload ")
    again = subprocess.run(
        [sys.executable, "-m", "offload", *line.split()], cwd=pytester.path, capture_output=True, text=True
    )
    assert again.returncode == 1 and "a2" in again.stdout, again.stderr


def test_the_location_of_a_scenario_is_the_line_of_its_name(run) -> None:  # type: ignore[no-untyped-def]
    result = run("--junitxml=out.xml", "-o", "junit_family=xunit1", files={"one.scenario.toml": GOOD})
    case = next(ElementTree.parse(result.outlines and Path(_generated(result))).iter("testcase"))
    assert (case.get("file"), case.get("line")) == ("one.scenario.toml", "3")
    properties = {one.get("name"): one.get("value") for one in case.iter("property")}
    assert properties["seed"] == "7" and re.fullmatch("[0-9a-f]{32}", properties["trace_hash"] or "")


def _generated(result: pytest.RunResult) -> str:
    return next(line for line in result.outlines if "generated xml file" in line).split(": ")[1].split(" ")[0]


def test_the_trace_of_each_failure_is_saved(run, pytester: pytest.Pytester) -> None:  # type: ignore[no-untyped-def]
    result = run("--scenario-trace=out/traces", files={"bad.scenario.toml": BAD, "good.scenario.toml": GOOD})
    result.assert_outcomes(passed=1, failed=1)
    (trace,) = (pytester.path / "out" / "traces").iterdir()
    result.stdout.fnmatch_lines([f"trace: {trace}"])
    assert trace.name == "bad.scenario.toml-seed7.json"
    about = json.loads(trace.read_text())["otherData"]
    assert (about["name"], about["seed"]) == ("one is cancelled", 7)


def test_a_trace_that_cannot_be_saved_hides_nothing(run, pytester: pytest.Pytester) -> None:  # type: ignore[no-untyped-def]
    (pytester.path / "taken").write_text("a file")
    result = run("--scenario-trace=taken", files={"bad.scenario.toml": BAD})
    result.stdout.fnmatch_lines(["*expect: *", "trace: could not be saved: *"])
    result.assert_outcomes(failed=1)


def test_a_file_that_makes_no_sense_is_an_error_with_its_line(run) -> None:  # type: ignore[no-untyped-def]
    result = run(files={"one.scenario.toml": NONSENSE})
    result.assert_outcomes(errors=1)
    line = NONSENSE.splitlines().index('who = "b2"') + 1
    result.stdout.re_match_lines([rf".*one\.scenario\.toml:{line}: fault\[0\]\.who: .*b2"])
    assert "Traceback" not in result.stdout.str()


def test_seeds_make_a_test_each(run) -> None:  # type: ignore[no-untyped-def]
    files = {"one.scenario.toml": GOOD}
    run("--scenario-seeds=0..11", files=files).assert_outcomes(passed=12)
    result = run("--scenario-seeds=3..4", "--collect-only", "-q")
    result.stdout.fnmatch_lines(["one.scenario.toml::seed3", "one.scenario.toml::seed4"])
    result = run("--scenario-seed=99", "--collect-only", "-q")
    result.stdout.fnmatch_lines(["one.scenario.toml::seed99"])
    run("one.scenario.toml::seed4", "--scenario-seeds=0..9").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    "option", ["--scenario-seeds=9..1", "--scenario-seeds=7", "--scenario-seed=x", "--scenario-seed=-1"]
)
def test_seeds_that_are_none_are_refused(run, option: str) -> None:  # type: ignore[no-untyped-def]
    result = run(option, files={"one.scenario.toml": GOOD})
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{option.partition('=')[0]}*"])


@pytest.mark.parametrize(
    ("files", "collected"),
    [
        ("", []),
        ("wanted/*.scenario.toml", ["wanted/one"]),
        ("*.scenario.toml", ["one", "wanted/one"]),
        ("wanted/* two.toml", ["two", "wanted/one"]),
    ],
)
def test_the_ini_file_says_which_files_are_scenarios(
    run, pytester: pytest.Pytester, files: str, collected: list[str]
) -> None:  # type: ignore[no-untyped-def]
    (pytester.path / "tox.ini").write_text(f"[pytest]\nscenario_files = {files}\n")
    texts = {"one.scenario.toml": GOOD, "wanted/one.scenario.toml": GOOD, "two.toml": GOOD, "pyproject.toml": ""}
    result = run("--collect-only", "-q", files=texts)
    found = [line.partition(".scenario")[0].partition(".toml")[0] for line in result.outlines if "::" in line]
    assert sorted(found) == sorted(collected)


def test_a_file_that_is_named_is_run_whatever_the_ini_file_says(run, pytester: pytest.Pytester) -> None:  # type: ignore[no-untyped-def]
    (pytester.path / "tox.ini").write_text("[pytest]\nscenario_files =\n")
    run("one.scenario.toml", files={"one.scenario.toml": GOOD}).assert_outcomes(passed=1)


SYSTEM = """
from contextlib import asynccontextmanager

@asynccontextmanager
async def open_cache(world):
    raise RuntimeError("this cache does not open")
    yield
"""


@pytest.mark.parametrize("how", ["option", "ini"])
def test_another_system_can_be_tested(run, pytester: pytest.Pytester, how: str) -> None:  # type: ignore[no-untyped-def]
    if how == "ini":
        (pytester.path / "tox.ini").write_text("[pytest]\nscenario_system = theirs:open_cache\n")
    said = [] if how == "ini" else ["--scenario-system=theirs:open_cache"]
    result = run(*said, files={"theirs.py": SYSTEM, "one.scenario.toml": GOOD})
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*this cache does not open*", "repeat it: * --system theirs:open_cache"])


THEIRS = """
from contextlib import asynccontextmanager
from offload.testing.scenarios import Outcome

class Ticket:
    result = Outcome("COMPLETE")

    async def wait(self): ...
    async def cancel(self): ...
    def request_cancel(self): ...

@asynccontextmanager
async def open_cache(world):
    class Cache:
        async def store(self, keys, after, label):
            world.hook("their own hook", label)
            return Ticket()

        async def load(self, keys):
            return dict.fromkeys(keys)

        def audit(self):
            return {}
    yield Cache()
"""
AT_THEIRS = """
format = 1
name = "at a hook of theirs"
step = [{ store = { id = "a" } }]
fault = [{ do = "DO", at_hook = "their own hook" }]
expect = [{ count = { "their own hook" = 1 } }]
"""


def test_a_file_may_name_the_hooks_of_the_system_it_is_for(run) -> None:  # type: ignore[no-untyped-def]
    files = {"hooked.py": THEIRS, "one.scenario.toml": AT_THEIRS.replace("DO", "cancel")}
    run("--scenario-system=hooked:open_cache", files=files).assert_outcomes(passed=1)


def test_a_fault_whose_seam_the_system_lacks_is_an_error_of_the_file(run) -> None:  # type: ignore[no-untyped-def]
    files = {"hooked.py": THEIRS, "one.scenario.toml": AT_THEIRS.replace("DO", "stall")}
    result = run("--scenario-system=hooked:open_cache", files=files)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*one.scenario.toml:5: fault[[]0[]].do*copy*"])


def test_a_system_that_is_not_there_is_said(run) -> None:  # type: ignore[no-untyped-def]
    result = run("--scenario-system=nobody:open", files={"one.scenario.toml": GOOD})
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*there is no module nobody*"])
    assert "Traceback" not in result.stdout.str()


def test_scenarios_can_be_left_out_by_their_mark(run) -> None:  # type: ignore[no-untyped-def]
    files = {"one.scenario.toml": GOOD, "test_plain.py": "def test_plain():\n    pass\n"}
    run("--strict-markers", "-m", "not scenario", files=files).assert_outcomes(passed=1, deselected=1)
    run("--strict-markers", "-m", "scenario").assert_outcomes(passed=1, deselected=1)


def test_it_can_be_switched_off(run) -> None:  # type: ignore[no-untyped-def]
    files = {"one.scenario.toml": BAD, "test_plain.py": "def test_plain():\n    pass\n"}
    run("-p", "no:offload", files=files, process=True).assert_outcomes(passed=1)


@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="pytest-xdist is not installed")
def test_several_processes_share_the_seeds(run) -> None:  # type: ignore[no-untyped-def]
    result = run(
        "-n2", "--scenario-seeds=0..9", files={"good.scenario.toml": GOOD, "bad.scenario.toml": BAD}, process=True
    )
    result.assert_outcomes(passed=10, failed=10)
    result.stdout.fnmatch_lines(["repeat it: offload scenario run bad.scenario.toml --seed 9"])


# --- fixtures -----------------------------------------------------------------------------------------------------

ASYNC_TESTS = """
import pytest, trio
import offload

MARKED

async def stored(pipeline, keys, **options):
    pipeline.source.fill(keys)
    handle = await pipeline.enqueue(pipeline.source.weak(keys), precondition=offload.NO_WAIT)
    return await handle.wait()

async def test_a_pipeline_is_open_and_time_is_virtual(offload_pipeline):
    began = trio.current_time()
    await trio.sleep(3600)
    assert trio.current_time() - began == 3600
    result = await stored(offload_pipeline, [b"a", b"b"])
    assert result.completed == (b"a", b"b") or list(result.completed) == [b"a", b"b"]

async def test_bytes_of_ones_own_and_blocks_that_are_held(offload_pipeline, virtual_clock):
    source, destination = offload_pipeline.source, offload_pipeline.destination
    source.put(b"mine", b"x" * 64)
    destination.put(b"theirs", b"y" * 64)
    source.fill([b"held"])
    handle = await offload_pipeline.enqueue(source.strong([b"held"]), precondition=offload.NO_WAIT)
    await handle.wait()
    handle = await offload_pipeline.enqueue(source.weak([b"mine"]), precondition=offload.NO_WAIT)
    await handle.wait()
    assert destination.get(b"mine") == b"x" * 64

async def test_a_clock_alone(virtual_clock):
    await trio.sleep(1e6)

async def test_tiers_fail_as_told(fake_tier, virtual_clock, scenario_seed):
    source, destination = fake_tier(holds="k{0..3}"), fake_tier(capacity=2, latency_ms=5, bytes_per_ms=64)
    assert destination.latency == 5 / 1024 and destination.bytes_per_second == 64 * 1024
    assert source.contains_nowait([b"k3", b"k4"]) == {b"k3"}
    assert scenario_seed == 0
"""


def marked(mode: str) -> str:
    return ASYNC_TESTS.replace("MARKED", "" if mode == "trio mode" else "pytestmark = pytest.mark.trio")


@pytest.mark.parametrize("mode", ["trio mode", "strict"])
def test_async_tests_have_a_pipeline_tiers_and_a_clock(run, mode: str) -> None:  # type: ignore[no-untyped-def]
    run(*MODES[mode], "--durations=0", files={"test_async.py": marked(mode)}, process=True).assert_outcomes(passed=4)


BROKEN = """
import offload, pytest, trio

async def test_leaves_something_behind(offload_pipeline):
    offload_pipeline.source.fill([b"a"])
    offload_pipeline.destination.upgrade  # is there
    offload_pipeline.source.upgrade([b"a"])  # a ref that nobody releases
"""


def test_the_pipeline_is_judged_when_the_test_is_over(run) -> None:  # type: ignore[no-untyped-def]
    result = run(*MODES["trio mode"], files={"test_broken.py": BROKEN})
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*I1: *refs in *: 1*"])


OPTIONS = """
import offload, pytest, trio

@pytest.fixture
def offload_options(fake_tier):
    return {"destination": fake_tier(latency_ms=7), "policies": [lambda keys: {key: "no" for key in keys if key == b"b"}]}

async def test_they_are_used(offload_pipeline):
    pipeline = offload_pipeline
    pipeline.source.fill([b"a", b"b"])
    handle = await pipeline.enqueue(pipeline.source.weak([b"a", b"b"]), precondition=offload.NO_WAIT)
    result = await handle.wait()
    assert result.filtered == {b"b": "no"} and pipeline.destination.latency == 7 / 1024
"""


def test_the_pipeline_can_be_configured(run) -> None:  # type: ignore[no-untyped-def]
    run(*MODES["trio mode"], files={"test_options.py": OPTIONS}).assert_outcomes(passed=1)


def test_without_pytest_trio_the_pipeline_says_what_is_missing(run) -> None:  # type: ignore[no-untyped-def]
    text = "def test_it(offload_pipeline):\n    pass\n"
    result = run(*MODES["without pytest-trio"], files={"test_it.py": text})
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*needs pytest-trio*"])
    result = run(*MODES["trio mode"])
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*for tests of pytest-trio*"])


PLAIN = """
from pathlib import Path
import pytest, trio

TEXT = '''GOOD'''

def test_a_clock(virtual_clock):
    async def main():
        await trio.sleep(1e6)
        return trio.current_time()
    assert trio.run(main, clock=virtual_clock) >= 1e6

def test_a_text(play_scenario):
    report = play_scenario(TEXT)
    assert report.outcomes["a2"].status == "CANCELLED" and report.seed == 7

def test_a_path(play_scenario):
    assert play_scenario(Path("one.scenario.toml"), 3).seed == 3

def test_one_made_in_python(play_scenario):
    from offload.testing.scenarios._program import Scenario, Step, StoreStep
    scenario = Scenario(name="mine", step=[Step(store=StoreStep(id="a"))])
    assert play_scenario(scenario).good

def test_a_bad_one(play_scenario):
    wrong = TEXT.replace('a2 = "CANCELLED"', 'a2 = "FAILED"')
    assert not play_scenario(wrong, judge=False).good
    with pytest.raises(AssertionError, match="(?s)one is cancelled, seed 7: 1 violation.*a2"):
        play_scenario(wrong)

def test_the_repeating_line(play_scenario):
    Path("wrong.scenario.toml").write_text(TEXT.replace('a2 = "CANCELLED"', 'a2 = "FAILED"'))
    with pytest.raises(AssertionError, match="repeat it: offload scenario run wrong.scenario.toml --seed 7"):
        play_scenario(Path("wrong.scenario.toml"))
""".replace("GOOD", GOOD)


@pytest.mark.parametrize("mode", MODES)
def test_plain_tests_play_scenarios_and_have_a_clock(run, mode: str) -> None:  # type: ignore[no-untyped-def]
    run(
        *MODES[mode], "test_plain.py", files={"test_plain.py": PLAIN, "one.scenario.toml": GOOD}, process=True
    ).assert_outcomes(passed=6)


def test_playing_inside_a_trio_test_says_that_it_cannot_be(run) -> None:  # type: ignore[no-untyped-def]
    text = "async def test_it(play_scenario):\n    play_scenario('x')\n"
    result = run(*MODES["trio mode"], files={"test_it.py": text})
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*call it from a test that is not `async def`*"])


SEEDED = """
import trio

async def test_the_order_of_turns(virtual_clock, scenario_seed):
    turns = []
    async def one(number):
        for _ in range(4):
            await trio.lowlevel.checkpoint()
            turns.append(number)
    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(one, number)
    print("TURNS", scenario_seed, *turns)
"""


def test_the_turns_of_a_test_are_a_function_of_the_seed(run) -> None:  # type: ignore[no-untyped-def]
    def turns(*seed: str) -> str:
        result = run(*MODES["trio mode"], "-s", *seed, files={"test_seeded.py": SEEDED})
        result.assert_outcomes(passed=1)
        return next(line for line in result.outlines if "TURNS" in line)

    assert turns() == turns()
    assert turns("--scenario-seed=5") == turns("--scenario-seed=5")
    assert len({turns(f"--scenario-seed={seed}").split(maxsplit=2)[2] for seed in range(3)}) > 1


# --- what it costs ------------------------------------------------------------------------------------------------


def test_loading_it_imports_nothing_but_pytest_and_its_own_package() -> None:
    """The parent package is imported with it, which is not in its hands; the harness, torch and friends are not."""
    program = """
import sys, pytest, _pytest.pytester, offload
before = set(sys.modules)
import offload.testing.pytest_plugin
print(*sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["offload.testing", "offload.testing.pytest_plugin"]
