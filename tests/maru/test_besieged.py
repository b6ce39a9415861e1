"""Hostile peers at every listener, a server that stands still now and then, and a good client that notices little."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.maru.test_hostile import Attacker, corpus
from tests.support.maru_actors import BE, PublishedOwner
from tests.support.maru_hostile_peers import HostilePeers
from tests.support.maru_processes import TCP, Actor, Server, eventually, temporary_pool

MIB = 1 << 20
LEASE = 30.0


@pytest.fixture
def pool():
    with temporary_pool() as path:
        yield path


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[round(0.99 * (len(seconds) - 1))]


def besiege(pool: Path, acts: int, rounds: int, seed: int) -> tuple[float, float]:
    """So many connections and frames, and a good client that goes round: its 99th percentile without them, and with them."""
    options = ["--max-sessions", "300", "--session-lease", "1.0", "--capacity-bytes", "64MiB", "--v1-read-grace", "1.0"]
    options += ["--max-entries", "20000", "--log-level", "error"]
    dice = random.Random(seed)
    with (
        Server(pool, *TCP, *options) as server,
        PublishedOwner(server.ipc, "theirs") as owner,
        Actor(BE, "blocking", server.ipc, {"lease": LEASE}) as good,
        Attacker(server.ipc) as known,
    ):
        assert good.ask("put", ["pinned"]) == ["NEW"]
        assert good.ask("hold", "pinned") == [True]
        without = p99(good.ask("go_round", rounds))
        frames = corpus(known, owner.handle["region_id"])
        where = (
            server.ready["endpoints"],
            server.ready["rm_address"],
            server.ready["descriptors"],
            server.ready["channel"],
        )
        began = time.monotonic()
        with HostilePeers(*where, frames, seed) as hostile:
            while hostile.total < acts / 10:
                hostile.act()
            before = server.process.private_bytes()  # what one hour costs is not what it costs to begin
            most = before
            took: list[float] = []
            good.tell("go_round", rounds)
            while hostile.total < acts:
                hostile.act()
                if dice.random() < 0.01:
                    most = max(most, server.process.private_bytes())
            took = good.hear()
            for _ in range(3):  # and while it stands still
                with server.stopped():
                    for _ in range(30):
                        hostile.act()
                assert eventually(lambda: good.ask("get", ["pinned"])) == ["right"]
            most = max(most, server.process.private_bytes())
        seconds = time.monotonic() - began
        assert server.process.alive
        assert good.ask("looks", "pinned") == "right"
        assert good.ask("sessions_lost") == 0
        assert most - before < 64 * MIB
        eventually(lambda: server.facts("server")["connections"] < 10)
        eventually(lambda: server.process.private_bytes() - before < 64 * MIB)
        after = server.process.private_bytes()
        with_them = p99(took)
        print(f"\n{hostile.total} hostile connections and frames in {seconds:.0f} s: {hostile.counts}")
        print(
            f"memory grew by {(most - before) >> 10} KiB at most and {(after - before) >> 10} KiB in the end; a good client's"
        )
        print(
            f"99th percentile was {without * 1e3:.1f} ms without them, {with_them * 1e3:.1f} ms with them ({len(took)} rounds)"
        )
    assert "Traceback" not in server.text, server.text
    return without, with_them


def test_two_thousand_hostile_connections_and_frames_harm_nobody(pool):
    besiege(pool, 2_000, 200, seed=int(os.environ.get("MARU_SEED", "3")))


@pytest.mark.long
def test_a_hundred_thousand_hostile_connections_and_frames_harm_nobody(pool):
    without, with_them = besiege(pool, 100_000, 5_000, seed=int(os.environ.get("MARU_SEED", "4")))
    assert with_them <= 3 * max(without, 0.002)
