"""Hostile peers at every listener, a server that stands still now and then, and a good client that notices little."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import attrs
import pytest

from tests.maru.test_hostile import Attacker, corpus
from tests.support.maru_actors import BE, PublishedOwner
from tests.support.maru_hostile_peers import HostilePeers
from tests.support.maru_processes import TCP, Actor, Server, eventually, free_port, temporary_pool
from tests.support.maru_rounds import ECHO, ECHO_CLIENT, Percentiles

MIB = 1 << 20
LEASE = 30.0


@pytest.fixture
def pool():
    with temporary_pool() as path:
        yield path


@attrs.frozen
class Siege:
    """A good client's rounds, and those of a bare echo's client, whom nobody attacks: before, and beside hostile peers."""

    alone: Percentiles
    besieged: Percentiles
    echo_alone: Percentiles
    echo_besieged: Percentiles

    def __str__(self) -> str:
        return (
            f"a good client's 99th percentile: {self.alone} before; {self.besieged} under siege\n"
            f"a bare echo's on the same machine: {self.echo_alone} before; {self.echo_besieged} under siege"
        )


def besiege(pool: Path, acts: int, rounds: int, seed: int) -> Siege:
    """So many connections and frames, and a good client that goes round."""
    options = ["--max-sessions", "300", "--session-lease", "1.0", "--capacity-bytes", "64MiB", "--v1-read-grace", "1.0"]
    options += ["--max-entries", "20000", "--log-level", "error"]
    options += ["--kv-events", f"127.0.0.1:{free_port()}", "--kv-events-insecure"]
    dice = random.Random(seed)
    echo_path = str(pool.parent / "echo")
    with (
        Server(pool, *TCP, *options) as server,
        PublishedOwner(server.ipc, "theirs") as owner,
        Actor(BE, "blocking", server.ipc, {"lease": LEASE}) as good,
        Actor(ECHO, echo_path) as echo,
        Actor(ECHO_CLIENT, echo_path, echo.process.pid) as echoed,
        Attacker(server.ipc) as known,
    ):
        assert good.ask("put", ["pinned"]) == ["NEW"]
        assert good.ask("hold", "pinned") == [True]
        assert echo.hear() == "ready"
        alone = Percentiles.of(good.ask("go_round", rounds, server.process.pid))
        echo_alone = Percentiles.of(echoed.ask("go_round", rounds))
        frames = corpus(known, owner.handle["region_id"])
        where = (
            [*server.ready["endpoints"], *server.ready["kv_events"].split(", ")],
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
            good.tell("go_round", rounds, server.process.pid)
            echoed.tell("go_round", rounds)
            while hostile.total < acts:
                hostile.act()
                if dice.random() < 0.01:
                    most = max(most, server.process.private_bytes())
            siege = Siege(alone, Percentiles.of(good.hear()), echo_alone, Percentiles.of(echoed.hear()))
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
        print(f"\n{hostile.total} hostile connections and frames in {seconds:.0f} s: {hostile.counts}")
        print(
            f"memory grew by {(most - before) >> 10} KiB at most and {(after - before) >> 10} KiB in the end; {siege}"
        )
    assert "Traceback" not in server.text, server.text
    return siege


def test_two_thousand_hostile_connections_and_frames_harm_nobody(pool):
    besiege(pool, 2_000, 200, seed=int(os.environ.get("MARU_SEED", "3")))


@pytest.mark.long
def test_a_hundred_thousand_hostile_connections_and_frames_harm_nobody(pool):
    siege = besiege(pool, 100_000, 5_000, seed=int(os.environ.get("MARU_SEED", "4")))
    assert siege.besieged.served <= 3 * max(siege.alone.served, 0.002)
