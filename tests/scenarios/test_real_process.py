"""Our pipelines in a process that is killed and stopped for real: what was acknowledged is found again, the rest is missed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from offload.testing.scenarios import (
    After,
    Expect,
    Fault,
    LoadStep,
    PipelineSpec,
    Scenario,
    Step,
    StoreStep,
    TierSpec,
    Window,
    play_real,
)
from offload.testing.scenarios._real_child import MessageSocket
from offload.testing.scenarios._real_process import ChildProcess, _RemotePipelines, needs_process
from tests.support.scenario_plays import unhurried


def stores(label: str, at_ms: int = 0, **rest: Any) -> Step:
    return Step(at_ms=at_ms, store=StoreStep(id=label, per=4, **rest))


def children() -> list[str]:
    found = subprocess.run(
        ["ps", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=False
    )
    return [line for line in found.stdout.splitlines() if "_real_child" in line]


def dying(kind: Any = "file") -> Scenario:
    """The process is killed while it copies b, and another one takes over."""
    return Scenario(
        name="a peer that dies",
        limit_ms=60_000,
        tier={"host": TierSpec(kind=kind, block_bytes=64 << 10, latency_ms=2)},
        pipeline={"main": PipelineSpec(to="host", flush_ms=2)},
        step=[
            stores("a"),
            stores("b", at_ms=400),
            stores("waits", at_ms=401, after=[After(do="never")]),
            stores("c", at_ms=700),
            Step(at_ms=700, load=LoadStep(keys="a.{0..3}, b.{0..3}")),
        ],
        fault=[Fault(do="peer_death", at_hook="xfer_start", of="b", for_ms=100)],
        expect=[
            Expect(status={"a": "COMPLETE", "b": "FAILED", "waits": "FAILED", "c": "COMPLETE"}, count={"fired": 1})
        ],
    )


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_after_a_kill_what_was_acknowledged_is_found_in_files_and_gone_from_memory(kind: Any, tmp_path: Path) -> None:
    report = play_real(dying(kind), workdir=tmp_path, pace=unhurried())
    assert report.good, (report.violations, report.trace)
    assert report.fired == {"peer_death at xfer_start": 1}
    assert set(report.outcomes["b"].failed.values()) == {"PeerDied"}
    assert (report.counts["loaded"], report.counts["missed"]) == ((4, 4) if kind == "file" else (0, 8))
    assert children() == [] and os.listdir(tmp_path) == []
    assert "hook xfer_end" in report.reached


def test_a_kill_in_the_middle_of_writing_and_a_process_that_stands_still(tmp_path: Path) -> None:
    scenario = Scenario(
        name="writing",
        limit_ms=60_000,
        tier={"host": TierSpec(kind="file", block_bytes=1 << 20, capacity=64)},
        pipeline={"main": PipelineSpec(to="host", flush_ms=1)},
        step=[
            stores("a"),
            *[stores(f"b{i}", at_ms=600 + 4 * i) for i in range(6)],
            stores("c", at_ms=900),
        ],
        fault=[
            Fault(do="stall", at_ms=1, for_ms=150),
            Fault(do="peer_death", at_ms=612, for_ms=50),
        ],
        expect=[Expect(status={"a": "COMPLETE", "c": "COMPLETE"}, time=[Window(event="a ended", at_least_ms=150)])],
    )
    report = play_real(scenario, workdir=tmp_path, pace=unhurried())
    assert report.good, (report.violations, report.trace)
    assert report.fired == {"stall": 1, "peer_death": 1}
    assert children() == []


def test_an_acknowledged_block_that_the_next_process_does_not_find_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = _RemotePipelines.begin

    def empty_the_directory(self: _RemotePipelines, child: ChildProcess) -> None:
        if self._child is not None:  # the second one
            for path in Path(self._world.workdir, "host").glob("*/*.kv"):
                path.unlink()
        begin(self, child)

    monkeypatch.setattr(_RemotePipelines, "begin", empty_the_directory)
    rules = {violation.rule for violation in play_real(dying(), pace=unhurried()).violations}
    assert "model" in rules


def test_only_faults_that_are_signals_need_a_process() -> None:
    assert needs_process(dying())
    assert not needs_process(Scenario(name="it", fault=[Fault(do="stall", at_ms=1)]))
    assert not needs_process(Scenario(name="it", fault=[Fault(do="peer_death", at_ms=1), Fault(do="torn", at_ms=2)]))


def test_a_peer_that_cannot_be_killed_is_said_to_be_modelled() -> None:
    scenario = Scenario(
        name="it",
        limit_ms=10_000,
        step=[stores("a")],
        fault=[Fault(do="peer_death", at_hook="xfer_start", for_ms=50), Fault(do="delay", at_ms=0)],
    )
    report = play_real(scenario)
    assert report.good, report.violations
    assert report.outcomes["a"].status == "FAILED"
    assert report.notes[0].startswith("peer_death: with faults of copies beside it")


def test_a_child_ends_when_nobody_is_there_any_more() -> None:
    program = (
        "import socket, subprocess, sys\n"
        "ours, theirs = socket.socketpair()\n"
        "program = 'offload.testing.scenarios._real_child'\n"
        "child = subprocess.Popen([sys.executable, '-m', program, str(theirs.fileno()), '.'],"
        " pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL)\n"
        "theirs.close(); ours.close()\n"
        "print(child.wait(60) is not None)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=90)
    assert done.stdout.strip() == "True"


async def test_what_the_thread_read_and_left_wakes_the_task() -> None:
    ours, theirs = socket.socketpair()
    here, there = MessageSocket(ours), MessageSocket(theirs)
    heard: list[Any] = []

    async def listen() -> None:
        while len(heard) < 3:
            heard.append(await here.wait())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        await trio.testing.wait_all_tasks_blocked()
        for number in range(4):
            there.send("message", number)
        assert here.receive() == ["message", 0]
        assert here.receive() == ["message", 1]
        here.keep(["message", 1])  # the socket has nothing to announce from here on but the last two, in one piece
        with trio.fail_after(60):
            while len(heard) < 3:
                await trio.testing.wait_all_tasks_blocked()
    assert heard == [["message", 1], ["message", 2], ["message", 3]]
    here.close()
    with pytest.raises(OSError, match=r"pipe|reset"):
        for _ in range(100):
            there.send("nobody")
    with pytest.raises(ConnectionResetError):
        there.receive()
    there.close()
