"""Many runs in many processes: in order, all of them, and never stuck."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offload.testing.scenarios import Played, play_many
from offload.testing.scenarios._summary import summed
from offload.testing.scenarios._workers import cores
from tests.support.scenario_plays import Strange, Telling, every_tenth_is_wrong, good

SUPPORT = str(Path(__file__).parents[1] / "support")

QUICK = 1.0
"""Real seconds that a run may take in these tests."""


@pytest.mark.parametrize("processes", [0, 1, 3])
def test_runs_come_in_the_order_of_their_seeds(processes: int) -> None:
    seeds = [*range(60), 1 << 40, 5]
    assert [run.seed for run in play_many(good, seeds, processes=processes)] == seeds


def test_the_sum_is_the_same_for_any_number_of_processes() -> None:
    sums = [summed(play_many(every_tenth_is_wrong, range(50), processes=processes)) for processes in (0, 1, 2)]
    assert len({one.trace_hash for one in sums}) == 1
    assert len({str(one.as_dict(0.0)["violations"]) for one in sums}) == 1
    assert sums[0].wrong == 5


def test_only_the_reports_of_wrong_runs_travel() -> None:
    runs = list(play_many(every_tenth_is_wrong, range(20), processes=1))
    assert [run.seed for run in runs if run.report is not None] == [3, 13]
    assert all(run.report is not None for run in play_many(good, range(20), processes=1, keep=True))


def test_work_is_done_in_other_processes(tmp_path: Path) -> None:
    assert len(list(play_many(Telling(tmp_path), range(40), processes=2))) == 40
    pids = {(tmp_path / str(seed)).read_text() for seed in range(40)}
    assert str(os.getpid()) not in pids


def test_a_run_that_hangs_is_a_livelock_and_the_others_go_on() -> None:
    runs = list(play_many(Strange(11, "hang"), range(30), processes=2, watchdog=QUICK))
    assert [run.seed for run in runs] == list(range(30))
    [stuck] = [run for run in runs if run.violations]
    assert stuck.seed == 11
    [violation] = stuck.violations
    assert violation.rule == "livelock"
    assert "spin" in violation.text, "it says where it was"


def test_a_run_that_hangs_once_does_not_take_its_neighbours_with_it(tmp_path: Path) -> None:
    """What comes behind it in its chunk is played by another worker."""
    runs = list(play_many(Strange(0, "hang", tmp_path / "was"), range(8), processes=1, watchdog=QUICK))
    assert [bool(run.violations) for run in runs] == [True] + [False] * 7


@pytest.mark.parametrize(("what", "said"), [("die", "exit code 3"), ("kill", "SIGKILL")])
def test_a_process_that_dies_is_a_crash_of_its_seed(what: str, said: str) -> None:
    runs = list(play_many(Strange(5, what), range(16), processes=2))
    [dead] = [run for run in runs if run.violations]
    assert dead.seed == 5
    assert dead.violations[0].rule == "crash"
    assert said in dead.violations[0].text


@pytest.mark.parametrize("processes", [0, 1])
def test_what_makes_no_sense_is_raised_to_the_caller(processes: int) -> None:
    with pytest.raises(LookupError, match="seed 4 makes no sense"):
        list(play_many(Strange(4, "raise"), range(8), processes=processes))


def test_who_stops_reading_leaves_no_process(tmp_path: Path) -> None:
    stream = play_many(Telling(tmp_path), range(10_000), processes=2)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    for told in list(tmp_path.iterdir()):
        text = told.read_text()
        assert not text or not Path(f"/proc/{text}").exists()


def test_nobody_runs_far_ahead_of_who_reads() -> None:
    """Otherwise results that nobody has read would fill the memory."""
    seen: list[Played] = []
    stream = play_many(good, range(100_000), processes=2, progress=seen.append)
    next(stream)
    assert len(seen) < 2_000
    stream.close()  # type: ignore[attr-defined]


def test_seeds_are_drawn_while_they_are_needed() -> None:
    began = time.monotonic()

    def while_there_is_time():
        seed = 0
        while time.monotonic() < began + 0.2:
            yield seed
            seed += 1

    runs = list(play_many(good, while_there_is_time(), processes=1))
    assert [run.seed for run in runs] == list(range(len(runs)))


def test_what_cannot_be_imported_elsewhere_is_an_error_at_once() -> None:
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        list(play_many(lambda seed: good(seed), range(8), processes=1))


def test_an_interrupt_ends_the_workers_and_keeps_what_there_was(tmp_path: Path) -> None:
    program = f"""
import os, signal, sys
sys.path.insert(0, {SUPPORT!r})
from pathlib import Path
from tests.support.scenario_plays import Telling
from offload.testing.scenarios._workers import play_many

runs = []
try:
    for run in play_many(Telling(Path({str(tmp_path)!r})), range(10**9), processes=2):
        runs.append(run.seed)
        if len(runs) == 20:
            os.kill(0, signal.SIGINT)
except KeyboardInterrupt:
    assert runs == list(range(len(runs)))
    print(len(runs))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, start_new_session=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 20
    assert not done.stderr


def test_a_script_without_a_main_guard_may_use_processes(tmp_path: Path) -> None:
    """Worker processes never import the main module again."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import sys
sys.path.insert(0, {SUPPORT!r})
from tests.support.scenario_plays import good
from offload.testing.scenarios._workers import play_many
print(len(list(play_many(good, range(20), processes=2))))
""")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "20\n"), done.stderr


def test_there_is_a_core() -> None:
    assert cores() >= 1
