"""Several clients that own pages are killed (``kill -9``) while others work: what they have left is of use, and then goes.

They are at work when they die: storing, deleting, with pages that they have filled and not registered, views of each other's
pages, and pins. What is promised is in ``docs/page-store.md``: what was acknowledged is readable as long as there is room for
it, their leases end, their pins with these, and their regions go whole when somebody needs room, or with the last key in them.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path

import pytest

from tests.maru.test_hostile import Good
from tests.maru.test_kill import assert_no_stale_file
from tests.support.maru_actors import BE, FACES, REGION, Client, client
from tests.support.maru_processes import Actor, Server, eventually, temporary_pool

VICTIMS = 4
LEASE = 10.0
BOUND = 8.0
"""Seconds within which the good client goes round, on a machine that has nothing else to do."""


@pytest.fixture
def pool():
    with temporary_pool() as path:
        yield path


class Notes:
    """What a victim has noted, up to its death."""

    def __init__(self, path: Path) -> None:
        self.acknowledged: dict[str, None] = {}
        self.doubtful: dict[str, None] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            if line[0] == "+":
                self.acknowledged[line[1:]] = None
                self.doubtful.pop(line[1:], None)
            else:
                del self.acknowledged[line[1:]]
                self.doubtful[line[1:]] = None


def kill_some(server: Server, dice: random.Random, number: int, notes: Path) -> list[Notes]:
    """As many clients as there is room for, each killed at a moment of its own; what each has noted."""
    names = [f"{number}.{victim}" for victim in range(VICTIMS)]
    with contextlib.ExitStack() as stack:
        victims = []
        for at, name in enumerate(names):
            actor = stack.enter_context(Actor(BE, FACES[at % 2], server.ipc, {"lease": LEASE}))
            actor.tell("toil", name, dice.randrange(1 << 30), names, str(notes / name))
            victims.append((dice.uniform(0.0, 0.5), actor))
        # On a busy machine they take their time, and who is killed before it has done anything leaves nothing.
        eventually(lambda: sum((notes / name).exists() and bool((notes / name).read_bytes()) for name in names) > 1)
        began = time.monotonic()
        for moment, actor in sorted(victims, key=lambda one: one[0]):
            time.sleep(max(0.0, began + moment - time.monotonic()))
            assert actor.process.alive, actor.log()
            actor.kill()
            with contextlib.suppress(ConnectionResetError):  # it had not even begun
                assert actor.unheard() == b"", "it was at work until it was killed"
    return [Notes(notes / name) for name in names]


def only_the_good_ones_are_left(server: Server) -> None:
    """The leases of the others end, and their pins with them."""
    server.skip(2 * LEASE)

    def holds() -> bool:
        facts = server.facts()
        return facts["sessions"] == 2 and facts["pinned"] == 1

    eventually(holds)


def check_what_they_left(auditor: Client, noted: list[Notes]) -> None:
    for one in noted:
        keys = list(one.acknowledged)
        assert auditor.get(keys) == ["right"] * len(keys), keys
        assert set(auditor.get(one.doubtful)) <= {"right", "missing"}


def everything_of(noted: list[Notes], number: int) -> list[str]:
    """All keys that may be there: also one that was stored, and whose answer came after the death of who asked."""
    noted_ones = [key for one in noted for key in (*one.acknowledged, *one.doubtful)]
    highest = max((int(key.rpartition("/")[2]) for key in noted_ones), default=0)
    return [f"{number}.{victim}/{at}" for victim in range(VICTIMS) for at in range(highest + 2)]


def kill_clients(pool: Path, notes: Path, rounds: int, seed: int) -> float:
    """Round after round; in every other one what they left is deleted, and else the next ones need its room.

    Returns: how long the good client took at worst to go round.
    """
    dice = random.Random(seed)
    options = ("--capacity-bytes", str((1 + VICTIMS) * REGION), "--v1-read-grace", "0.0")
    with (
        Server(pool, *options, skips=True) as server,
        Good(server) as good,
        client("blocking", server.ipc, pool_size=0, lease=60.0) as auditor,
    ):
        free = server.facts("pool")["free_bytes"]
        acknowledged = 0
        left: list[str] = []
        for number in range(rounds):
            noted = kill_some(server, dice, number, notes)
            check_what_they_left(auditor, noted)  # and so it is when their leases are over, as long as there is room
            auditor.beat()
            only_the_good_ones_are_left(server)
            check_what_they_left(auditor, noted)
            acknowledged += sum(len(one.acknowledged) for one in noted)
            assert set(auditor.get(left)) <= {"right", "missing"}
            assert_no_stale_file(server)
            left += everything_of(noted, number)
            if number % 2 or number == rounds - 1:
                assert set(auditor.delete(left)) <= {"DELETED", "MISSING"}
                left.clear()
                eventually(lambda: server.facts("pool")["free_bytes"] == free)
                facts = server.facts()
                assert (facts["regions"], facts["abandoned"], facts["sessions"]) == (1, 0, 2)
                assert_no_stale_file(server)
                assert len(server.region_files()) == 1
        print(f"\nseed {seed}: {rounds * VICTIMS} clients killed, {acknowledged} keys acknowledged and found,")
        print(f"{good.rounds} rounds of the good client, {1e3 * good.worst:.0f} ms at most")
        assert acknowledged > rounds
        return good.worst


def test_several_clients_that_own_pages_are_killed_and_nobody_else_notices(pool: Path, tmp_path: Path) -> None:
    kill_clients(pool, tmp_path, 2, seed=int(os.environ.get("MARU_SEED", "5")))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_two_hundred_clients_that_own_pages_are_killed_and_nobody_else_notices(
    pool: Path, tmp_path: Path, seed: int
) -> None:
    assert kill_clients(pool, tmp_path, 50, seed) < BOUND
