"""``maru bench`` runs every row of its goals and leaves nothing behind. How fast anything is, is for itself to show."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from maru._wire import BatchRegisterRequest, BeatRequest, Code, KeyRequest, RegisterRequest
from maru.base.ending import ending
from maru.bench import command
from maru.bench._bare import Bare
from maru.bench._keys import keys_of
from maru.bench.echo import Caller, echo
from maru.bench.processes import BenchFailed, Child, home, server

FORM = {"name", "value", "unit", "limit_name", "limit_value", "ratio", "goal", "met"}
GOALS = {
    "rpc": {
        "rpc.single.lockstep.trio.tcp": "ratio >= 0.65",
        "rpc.single.lockstep.trio.ipc": "ratio >= 0.75",
        "rpc.single.lockstep.blocking.tcp": "ratio >= 0.7",
        "rpc.single.lockstep.blocking.ipc": "ratio >= 0.75",
        "rpc.single.window64.trio.tcp": "ratio >= 0.7",
        "rpc.single.window64.trio.ipc": "ratio >= 0.7",
        "rpc.single.window64.blocking.tcp": "ratio >= 0.95",
        "rpc.single.window64.blocking.ipc": "ratio >= 0.95",
        "rpc.python.trio.channel": "ratio <= 24",
        "rpc.python.blocking.channel": "ratio <= 24",
        "rpc.python.trio.tcp": "ratio <= 24",
        "rpc.python.blocking.tcp": "ratio <= 24",
        "rpc.register64.tcp": "ratio >= 0.45",
        "rpc.register64.ipc": "ratio >= 0.45",
        "rpc.lookup64.tcp": "ratio >= 0.55",
        "rpc.lookup64.ipc": "ratio >= 0.55",
        "rpc.keys.lockstep.lookup.tcp": "value >= 360000",
        "rpc.keys.lockstep.lookup.ipc": "value >= 360000",
        "rpc.keys.window16.find.tcp": "value >= 1800000",
        "rpc.keys.window16.find.ipc": "value >= 1800000",
    },
    "data": {
        "data.store.1MiB.lockstep.plain": "ratio >= 0.75",
        "data.store.1MiB.two.plain": "ratio >= 0.88",
        "data.store.1MiB.lockstep.checksums": "ratio >= 0.6",
        "data.store.64KiB.lockstep.plain": "ratio >= 0.4",
        "data.store.64KiB.two.plain": "ratio >= 0.5",
        "data.retrieve.1MiB.lockstep.plain": "ratio >= 0.7",
        "data.retrieve.1MiB.pipelined.plain": "ratio >= 0.88",
        "data.load.1MiB.lockstep.plain": "ratio >= 0.7",
        "data.load.1MiB.pipelined.plain": "ratio >= 0.88",
    },
}
"""The table of the specification: what a row must be measured against."""


def left_behind(process: int) -> set[str]:
    """What this process and its children may have left."""
    ours = f"maru-bench-{process}-"
    return {
        name for place in ("/dev/shm", tempfile.gettempdir()) for name in os.listdir(place) if name.startswith(ours)
    }


@pytest.mark.parametrize("bench", ["rpc", "data"])
def test_bench_measures_its_goals_and_leaves_nothing_behind(bench: str) -> None:
    done = CliRunner().invoke(command, [bench, "--json", "--quick", "--repeat", "1"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert not left_behind(os.getpid())
    by_name = {row["name"]: row for row in rows}
    assert len(by_name) == len(rows)
    for row in rows:
        assert row.keys() == FORM
        # The cost of Python is a difference of two measured times, which a busy machine makes negative.
        assert row["value"] > 0 or row["name"].startswith("rpc.python.")
        assert row["limit_value"] > 0 and row["limit_name"]
        assert row["ratio"] == row["value"] / row["limit_value"]
        assert (row["met"] is None) == (row["goal"] is None)
    assert {name: row["goal"] for name, row in by_name.items() if row["goal"]} == GOALS[bench]


def test_table_has_a_goal_for_every_row_that_should_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    done = CliRunner().invoke(command, ["data", "--quick", "--repeat", "1"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    for name in GOALS["data"]:
        [line] = [line for line in done.stdout.splitlines() if name in line]
        assert "met" in line or "missed" in line


def test_server_of_the_bench_writes_a_journal() -> None:
    with server(4 << 20) as running, Bare(running.addresses["ipc"]) as client:
        journal = client.ask(Code.DESCRIBE, None).sections["journal"]
        assert journal["records"] == 0
        client.greet(lease=10.0)
        assert client.ask(Code.DESCRIBE, None).sections["journal"]["records"] > 0


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_echo_carries_the_bytes_both_ways(transport: str) -> None:
    with echo() as running, Caller(running.addresses[transport]) as caller:
        caller._socket.send_multipart([b"", b"there and back"])
        assert caller._socket.recv_multipart() == [b"", b"there and back"]
        assert caller.lockstep([b"x"] * 3) > 0
        # With more on their way than there are messages, all of them are waited for.
        assert caller.pipelined([b"x"] * 3, 64) > 0
        assert caller.pipelined([b"x"] * 130, 64) > 0
        with pytest.raises(Exception, match="temporarily unavailable"):
            caller._socket.recv_multipart(1)


def test_bare_client_takes_no_error_and_no_refusal_for_a_figure() -> None:
    foreign = BatchRegisterRequest([RegisterRequest("k", 9, 0, 64)])
    with server(4 << 20) as running, Bare(running.addresses["ipc"]) as client:
        with pytest.raises(BenchFailed, match="this session is unknown"):
            client.ask(Code.BEAT, BeatRequest(b"nobody's session", 0))
        with pytest.raises(BenchFailed, match="wrong answer"):
            client.rate(Code.BATCH_REGISTER_KV, [lambda: foreign] * 5, 2, lambda reply: reply.success)
        # All answers were read: the next one is this one's.
        assert client.ask(Code.EXISTS_KV, KeyRequest("k")).exists is False


def test_child_that_does_not_start_says_why() -> None:
    with pytest.raises(BenchFailed, match="no such thing"):
        Child(["-c", "raise SystemExit('no such thing')"])


def test_child_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maru.bench.processes.PATIENCE", 0.2)
    with pytest.raises(BenchFailed, match="has printed nothing"):
        Child(["-c", "import time; time.sleep(60)"])


def test_home_goes_whatever_happens() -> None:
    with pytest.raises(ZeroDivisionError), home(1 << 20) as path:
        Path(path, "file").write_text("x")
        raise ZeroDivisionError
    assert not Path(path).exists()


def test_home_goes_although_a_signal_comes_right_behind_its_making(monkeypatch: pytest.MonkeyPatch) -> None:
    make = os.mkdir

    def interrupted(path: str, mode: int) -> None:
        make(path, mode)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt), home(1 << 20):
        pass
    assert not left_behind(os.getpid())


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_bench_takes_its_server_along(end: signal.Signals) -> None:
    bench = subprocess.Popen(
        [sys.executable, "-m", "maru.bench", "rpc", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while not left_behind(bench.pid):
        assert time.monotonic() < deadline and bench.poll() is None
        time.sleep(0.05)
    bench.send_signal(end)
    bench.communicate(timeout=60)
    assert not left_behind(bench.pid)


def test_keys_are_different_and_the_same_again() -> None:
    assert len(set(keys_of(1_000))) == 1_000
    assert keys_of(3) == keys_of(3) != keys_of(3, "others")
    assert {len(key) for key in keys_of(3)} == {64}


def test_command_line_knows_all_benches_without_importing_them() -> None:
    source = """
import sys
from maru.bench import command

assert set(command.commands) == {"rpc", "data", "all"}, command.commands
loaded = {name for name in sys.modules if name.startswith("maru.")}
here = {"maru.bench", "maru.bench._command", "maru.bench.measure", "maru.bench.shown"}
shared = ("all_bytes", "commands", "console", "ending", "errors", "files", "lazy", "printable")
measuring = {"maru.base", "maru.exception_groups"} | {f"maru.base.{name}" for name in shared} | here
assert loaded == measuring, loaded
assert not {"torch", "rich", "zmq"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", source], check=True)


def test_a_sigterm_that_comes_in_a_finalizer_ends_it_all_the_same():
    class Ending:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)
            ended.append(self)

    ended = []
    with pytest.raises(SystemExit) as left, ending("maru"):
        Ending()
        time.sleep(20)
    assert left.value.code == 128 + signal.SIGTERM
    assert len(ended) == 1  # and what was being put away was put away whole
