"""Exit codes mean one thing each, in all commands; what goes wrong is one line, and what would be ignored is refused."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import pytest
from click.testing import CliRunner, Result

import maru.cli
import offload.cli
from maru.base.ending import BadInput, CheckFailed, EnvironmentFault, ExitCode, until_interrupted
from offload.cli import Commands

TRACE: Final = "\n".join(
    json.dumps({"timestamp": at, "input_length": 2_048, "output_length": 1, "hash_ids": ids})
    for at, ids in enumerate([[0, 1, 2, 3], [0, 1, 4, 5], [6], [0, 1, 2, 3, 7]])
)
PLAIN: Final = 'format = 1\nname = "plain"\n[[step]]\nstore = { id = "a{0..2}" }\n'


@pytest.fixture(autouse=True)
def hangups_heard() -> Iterator[None]:
    """Under ``nohup`` the tests are started with SIGHUP ignored, and what is ignored stays ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.jsonl").write_text(TRACE)
    (tmp_path / "plain.scenario.toml").write_text(PLAIN)
    return tmp_path


def invoke(*arguments: object, program: click.Group = offload.cli.main) -> Result:
    return CliRunner().invoke(program, [*map(str, arguments)])


def refused(*arguments: object) -> str:
    done = invoke(*arguments)
    assert done.exit_code == ExitCode.USAGE, done.output
    assert "Traceback" not in done.output
    return done.stderr


# --- one code for each cause --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (CheckFailed("three are wrong"), 1, "Error: three are wrong\n"),
        (click.UsageError("no such thing"), 2, "Error: no such thing\n"),
        (BadInput("cannot be"), 2, "Error: cannot be\n"),
        (click.FileError("knobs.toml", "is a secret"), 2, "Error: Could not open file 'knobs.toml': is a secret\n"),
        (EnvironmentFault("nobody answers"), 3, "Error: nobody answers\n"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), 3, "Error: /x: No space left on device\n"),
        (ExceptionGroup("", [OSError(errno.EMFILE, "Too many open files")]), 3, "Error: Too many open files\n"),
        (MemoryError(), 3, "Error: there is not enough memory\n"),
        (
            ModuleNotFoundError("no", name="zstandard"),
            3,
            "Error: the package zstandard is not installed: pip install 'trio-offload[zstd]'\n",
        ),
        (KeyboardInterrupt(), 130, "program: ended by SIGINT\n"),
        (BaseExceptionGroup("", [ValueError(), KeyboardInterrupt()]), 130, "program: ended by SIGINT\n"),
        (click.exceptions.Exit(5), 5, ""),
        (SystemExit(7), 7, ""),
    ],
)
def test_an_error_is_one_line_and_its_code(error: BaseException, code: int, line: str) -> None:
    done = _raising(error)
    assert done.exit_code == code
    assert done.stderr.endswith(line)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("error", [ZeroDivisionError(), ExceptionGroup("", [OSError(errno.EMFILE, ""), KeyError()])])
def test_what_nobody_foresaw_is_a_traceback_and_a_code_of_its_own(error: BaseException) -> None:
    done = _raising(error)
    assert done.exit_code == 70
    assert "Traceback" in done.stderr and type(error).__name__ in done.stderr


def test_an_error_while_an_interrupt_unwinds_is_the_interrupt() -> None:
    @click.command
    def command() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise OSError("the directory is not empty")

    assert _running(command).exit_code == 130


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_signal_unwinds_and_is_the_exit_code_also_where_it_is_swallowed(number: signal.Signals, code: int) -> None:
    @click.command
    def command() -> None:
        with until_interrupted() as interruption:
            signal.raise_signal(number)
        assert interruption.came
        interruption.go_on()

    before = signal.getsignal(number)
    done = _running(command)
    assert (done.exit_code, done.stderr) == (code, f"program: ended by {number.name}\n")
    assert signal.getsignal(number) == before


def test_a_second_hangup_does_not_stop_the_cleaning() -> None:
    cleaned: list[str] = []

    @click.command
    def command() -> None:
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
            cleaned.append("all")

    assert _running(command).exit_code == 129
    assert cleaned == ["all"]


def test_a_process_that_nobody_ended_ends_with_its_command() -> None:
    left: list[subprocess.Popen[bytes]] = []

    @click.command
    def command() -> None:
        left.append(subprocess.Popen(["sleep", "3600"], start_new_session=True))
        signal.raise_signal(signal.SIGTERM)

    with subprocess.Popen(["sleep", "3600"]) as older:
        assert _running(command).exit_code == 143
        assert left[0].wait(60) == -signal.SIGKILL
        assert older.poll() is None, "what was there before belongs to somebody else"
        older.kill()


def _raising(error: BaseException) -> Result:
    @click.command
    def command() -> None:
        raise error

    return _running(command)


def _running(command: click.Command) -> Result:
    group = Commands("program", places={})
    group.add_command(command, "it")
    return CliRunner().invoke(group, ["it"], prog_name="program")


# --- the environment ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "code", "line"),
    [
        ("-m offload --help > /dev/full", 3, "Error: standard output: No space left on device\n"),
        (
            "-m offload scenario show plain.scenario.toml > /dev/full",
            3,
            "Error: standard output: No space left on device\n",
        ),
        ("-m offload scenario schema | true", 141, ""),
        ("-m offload scenario schema >&-", 0, ""),
        ("-m offload replay trace.jsonl > /dev/full 2> /dev/full", 3, ""),
        ("-m maru ping --server ipc://nobody.sock --timeout 0.1", 3, "there is no such socket"),
        ("-m maru query key --server ipc://nobody.sock --timeout 0.1", 3, "there is no such socket"),
        ("-m maru bench nonsense", 2, "No such command"),
    ],
)
def test_the_environment_is_one_line(here: Path, command: str, code: int, line: str) -> None:
    # The reader goes before anything is written: the interpreter takes longer to start than `true` to end.
    script = f"set -o pipefail; {sys.executable} {command}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300, cwd=here)
    assert done.returncode == code, done.stderr
    assert line in done.stderr and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert bool(done.stderr) == bool(line)


def test_too_few_descriptors_are_told_before_zeromq_ends_the_process(here: Path) -> None:
    command = f"{sys.executable} -m offload replay trace.jsonl --tier maru"
    done = subprocess.run(["bash", "-c", f"ulimit -n 16; {command}"], capture_output=True, text=True, cwd=here)
    assert done.returncode == 3
    assert done.stderr == "Error: this process may have only 16 files open, but needs 128: raise `ulimit -n`\n"


def test_a_soft_limit_of_descriptors_is_raised(here: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 128
    command = f"{sys.executable} -m offload replay trace.jsonl --tier maru"
    done = subprocess.run(["bash", "-c", f"ulimit -S -n 16; {command}"], capture_output=True, text=True, cwd=here)
    assert done.returncode == 0, done.stderr


# --- outputs are looked at before the run -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("replay", "trace.jsonl", "--record"),
        ("replay", "trace.jsonl", "--compare-eviction", "--picture"),
        ("scenario", "run", "plain.scenario.toml", "--junit"),
        ("scenario", "run", "plain.scenario.toml", "--trace"),
        ("scenario", "run", "plain.scenario.toml", "--save-trace"),
        ("scenario", "explore", "plain.scenario.toml", "--only", "x", "--save"),
        ("scenario", "shrink", "plain.scenario.toml", "--out"),
    ],
)
def test_a_place_to_write_to_is_looked_at_before_the_run(here: Path, arguments: tuple[str, ...]) -> None:
    assert "there is no directory nowhere" in refused(*arguments, "nowhere/out.svg")


def test_what_can_be_written_is_no_complaint(here: Path) -> None:
    for place in ("new.xml", "new.xml", "/dev/null"):
        assert invoke("scenario", "run", "plain.scenario.toml", "--junit", place).exit_code == 0
    assert invoke("scenario", "fuzz", "--seeds", "1..1", "--keep", "a/b/c").exit_code == 0
    assert "is a directory" in refused("scenario", "run", "plain.scenario.toml", "--junit", ".")
    assert "trace.jsonl is not a directory" in refused("scenario", "fuzz", "--keep", "trace.jsonl/below")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_what_this_user_may_not_write_is_refused(here: Path) -> None:
    here.chmod(0o500)
    assert "may not write" in refused("scenario", "run", "plain.scenario.toml", "--junit", "new.xml")


def test_a_full_disk_at_the_end_is_the_environment(here: Path) -> None:
    done = invoke("scenario", "run", "plain.scenario.toml", "--junit", "/dev/full")
    assert done.exit_code == 3
    assert "/dev/full: cannot be written: No space left on device" in done.stderr


# --- what would be ignored is refused -----------------------------------------------------------------------------

RUN: Final = "scenario", "run", "plain.scenario.toml"


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        *[
            (("replay", "trace.jsonl", "--compare-eviction", *option.split()), option.split()[0])
            for option in (
                *("--tier memory", "--capacity 1MiB", "--block-bytes 4096", "--policy presence", "--speed max"),
                *("--laps 2", "--rename 0.5", "--skip-idle", "--checksums", "--what-if 2x", "--record x.toml"),
            )
        ],
        (("replay", "trace.jsonl", "--capacities", "5%"), "--capacities"),
        (("replay", "trace.jsonl", "--picture", "x.svg"), "--picture"),
        (("replay", "trace.jsonl", "--rename", "0.5"), "--rename"),
        (("replay", "trace.jsonl", "--skip-idle", "--speed", "max"), "--skip-idle"),
        ((*RUN, "--pace", "2"), "--pace"),
        ((*RUN, "--real", "--processes", "2"), "--processes"),
        ((*RUN, "--real", "--watchdog", "2s"), "--watchdog"),
        (("scenario", "explore", "plain.scenario.toml", "--only", "x", "--pairs"), "--pairs"),
        (("scenario", "explore", "plain.scenario.toml", "--only", "x", "--actions", "cancel"), "--actions"),
        (("scenario", "show", "plain.scenario.toml", "--seed", "3"), "--seed"),
        (("scenario", "shrink", "plain.scenario.toml", "--mix", "engine"), "--mix"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(here: Path, arguments: tuple[str, ...], option: str) -> None:
    assert option in refused(*arguments)


def test_the_seed_of_a_saved_trace_is_its_own(here: Path) -> None:
    assert invoke(*RUN, "--save-trace", "one.trace").exit_code == 0
    assert invoke("scenario", "diff", "one.trace", "one.trace").exit_code == 0
    assert "--seed" in refused("scenario", "diff", "one.trace", "one.trace", "--seed", "4")


# --- replays that did not what was asked for ----------------------------------------------------------------------


def test_a_replay_that_has_room_for_nothing_says_so(here: Path) -> None:
    done = invoke("replay", "trace.jsonl", "--capacity", "4096", "--limit", "1")
    assert done.exit_code == 2
    assert done.stderr == "offload replay: nothing was stored: the first tier holds 4.0 KiB: give it more --capacity\n"


@pytest.mark.parametrize("tiers", ["--tier file:full", "--tier memory --tier file:full"])
def test_a_replay_that_could_not_store_says_why(here: Path, tiers: str) -> None:
    # Files of a KiB at most: the nearest to a full disk that needs no mount.
    command = f"ulimit -f 1; {sys.executable} -m offload replay trace.jsonl {tiers}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=here)
    assert done.returncode == 3, done.stdout
    assert "blocks were not stored: File too large" in done.stderr


def test_a_directory_that_cannot_be_is_told(here: Path) -> None:
    done = invoke("replay", "trace.jsonl", "--tier", "file:/proc/nowhere")
    assert done.exit_code == 3
    assert done.stderr.startswith("Error: '/proc/nowhere' cannot be used") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("speed", [["--speed", "realtime"], ["--skip-idle"]])
def test_a_time_without_an_end_is_refused(here: Path, speed: list[str]) -> None:
    (here / "late.jsonl").write_text(TRACE.replace('"timestamp": 3', '"timestamp": 1e14'))
    assert "Is timestamp 1e+14 really in milliseconds" in refused("replay", "late.jsonl", *speed)
    (here / "later.jsonl").write_text(TRACE.replace('"timestamp": 3', '"timestamp": 1e300'))
    assert "later.jsonl, line 4: timestamp" in refused("replay", "later.jsonl", *speed)


def test_nobody_holds_more_than_there_is(here: Path) -> None:
    done = invoke("replay", "trace.jsonl", "--what-if", "1x,1e9x,1e300x", "--json")
    assert done.exit_code == 0, done.output
    assert len(set(json.loads(done.stdout)["what_if"].values())) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("replay", "trace.jsonl", "--limit", 10**24),
        ("replay", "trace.jsonl", "--laps", 10**11),
        ("demo", "--keep", "/dev/null"),
        ("bench", "replay", "--quick", "--trace", "plain.scenario.toml"),
        ("replay", "trace.jsonl", "--tier", "{"),
        ("replay", "trace.jsonl", "--what-if", "nanx"),
    ],
)
def test_what_makes_no_sense_is_usage(here: Path, arguments: tuple[object, ...]) -> None:
    assert "Error: " in refused(*arguments)


@pytest.mark.parametrize("seconds", ["inf", "nan", "0", "-1", "soon"])
def test_no_wait_for_a_server_is_without_an_end(seconds: str) -> None:
    done = invoke("ping", "--timeout", seconds, program=maru.cli.main)
    assert done.exit_code == 2 and "--timeout" in done.stderr


def test_more_capacity_than_there_are_blocks_is_room_for_all(here: Path) -> None:
    done = invoke(
        "replay", "trace.jsonl", "--compare-eviction", "--capacities", "1e300%,99999999999999999999", "--json"
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["capacities"] == [8]


def test_the_page_store_has_the_same_codes(here: Path) -> None:
    def code(*arguments: str) -> int:
        return subprocess.run([sys.executable, "-c", "from maru.server_cli import main; main()", *arguments]).returncode

    assert code("--help") == 0
    assert code("--capacity-bytes", "much") == 2
    assert code("--config", "nowhere.toml") == 2
    assert code("--pool-path", "/proc/nowhere", "--host", "") == 3
    assert invoke("ping", "--config", "nowhere.toml", program=maru.cli.main).exit_code == 2
