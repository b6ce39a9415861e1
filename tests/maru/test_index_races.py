"""Races of the shared index between processes that are killed and stopped: a load brings what was stored, or nothing."""

from __future__ import annotations

import contextlib
import random
import time

import pytest

from tests.support.maru_actors import BE, FACES, Client, client
from tests.support.maru_processes import Actor, Server, eventually, temporary_pool

SIZE = 128 << 10
"""Of a page: a load of all pages takes milliseconds, so that a random moment falls into its copy."""
PAGES = 32
KNOBS = {"chunk_size_bytes": SIZE, "pool_size": PAGES * SIZE, "auto_expand": False, "lease": 60.0}
ROOMY = {**KNOBS, "pool_size": 2 * PAGES * SIZE}
"""Nothing is evicted."""


@pytest.fixture
def server():
    with temporary_pool() as pool, Server(pool, "--v1-read-grace", "0.0") as server:
        yield server


def settle(reader: Client, *, then: str = "nobody") -> None:
    """From here on the index says of every miss that it is one."""

    def asks_nobody() -> bool:
        counters = reader.handler.statistics().counters
        reader.call("exists", then)
        return reader.handler.statistics().counters.asked_anyway == counters.asked_anyway

    eventually(asks_nobody)


@pytest.mark.parametrize("face", FACES)
def test_what_was_answered_to_one_process_is_found_by_another_at_once_and_without_a_message(server, face):
    with Actor(BE, "blocking", server.ipc, KNOBS) as writer, client(face, server.ipc, pool_size=0) as reader:
        settle(reader)
        before = reader.handler.statistics().counters
        for number in range(PAGES):
            assert writer.ask("put", [f"k{number}"]) == ["NEW"]
            assert reader.call("exists", f"k{number}")
        after = reader.handler.statistics().counters
        assert after.found_here - before.found_here == PAGES
        assert after.asked_anyway == before.asked_anyway


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("rounds", [10, pytest.param(300, marks=pytest.mark.long)])
def test_a_reader_that_is_stopped_in_a_load_takes_no_page_for_what_it_was(server, face, rounds):
    """It is stopped at a random moment, and every page is given to another key before it goes on."""
    dice = random.Random(rounds)
    with client("blocking", server.ipc, **KNOBS) as owner, Actor(BE, face, server.ipc, {"pool_size": 0}) as reader:
        keys = [f"0 {at}" for at in range(PAGES)]
        assert owner.put(keys, SIZE) == ["NEW"] * PAGES
        reader.ask("get", keys, SIZE)  # maps the region
        for number in range(1, rounds + 1):
            reader.tell("get", keys, SIZE)
            time.sleep(dice.uniform(0.0, 0.01))
            with reader.process.stopped():
                owner.delete(keys)  # what it has pinned by message stays until it goes on
                anew = [f"{number} {at}" for at in range(PAGES)]
                owner.put(anew, SIZE)  # into the pages that came back
            looks = reader.hear()
            assert set(looks) <= {"right", "missing"}, (number, looks)
            keys = [key for key in keys + anew if owner.call("exists", key)]
            assert keys


@pytest.mark.parametrize("face", FACES)
def test_an_owner_that_is_killed_under_a_load_leaves_pages_that_are_read_until_they_go(server, face):
    dice = random.Random(3)
    with client(face, server.ipc, pool_size=0, lease=60.0) as reader:
        for number in range(4):
            keys = [f"{number} {at}" for at in range(PAGES)]
            with (
                Actor(BE, "blocking", server.ipc, ROOMY) as owner,
                Actor(BE, face, server.ipc, {"pool_size": 0}) as other,
            ):
                assert owner.ask("put", keys, SIZE) == ["NEW"] * PAGES
                assert other.ask("get", keys, SIZE) == ["right"] * PAGES
                other.tell("get", keys, SIZE)
                time.sleep(dice.uniform(0.0, 0.01))
                owner.kill()
                assert other.hear() == ["right"] * PAGES
                assert other.ask("get", keys, SIZE) == ["right"] * PAGES
                other.tell("get", keys, SIZE)
                eventually(lambda keys=keys: set(reader.delete(keys)) <= {"DELETED", "MISSING"})  # its region goes
                assert set(other.hear()) <= {"right", "missing"}
                assert other.ask("get", keys, SIZE) == ["missing"] * PAGES


TINY = 64
"""Of a page: as many keys as there can be."""


@pytest.mark.parametrize(
    ("keys", "least", "readers"), [(2_000, 64, 3), pytest.param(1_000_000, 1 << 14, 8, marks=pytest.mark.long)]
)
def test_an_index_grows_while_processes_read_and_hold_and_none_misses_what_is_there(keys, least, readers):
    knobs = {"chunk_size_bytes": TINY, "pool_size": 0, "lease": 60.0}
    size = 2 * keys * TINY  # below the watermark from which on a server evicts ahead of need
    setup = f"tests.support.maru_setups:small_index:{least}"
    dice = random.Random(keys)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(temporary_pool())
        server = stack.enter_context(Server(pool, "--capacity-bytes", str(size + (64 << 20)), setup=setup))
        owner = stack.enter_context(client("blocking", server.ipc, **{**knobs, "pool_size": size}))
        actors = [
            stack.enter_context(Actor(BE, FACES[number % len(FACES)], server.ipc, knobs)) for number in range(readers)
        ]
        began, step = time.monotonic(), max(100, keys // 200)
        for first in range(0, keys, step):
            asked = [[str(dice.randrange(first)) for _ in range(28)] for _ in actors] if first else []
            for actor, names in zip(actors, asked, strict=False):
                actor.tell("get", names, TINY)  # while the index is written, and grows
            assert owner.put(map(str, range(first, first + step)), TINY) == ["NEW"] * step
            for actor, names in zip(actors, asked, strict=False):
                assert actor.hear() == ["right"] * 28
                held = list(dict.fromkeys(names))
                assert all(actor.ask("hold", *held)) and actor.ask("looks", held[0]) == "right"
                actor.ask("let_go", *held)
        eventually(lambda: server.facts("index")["keys"] == keys)
        said = server.facts("index")
        found = [actor.ask("exist", *map(str, range(keys - 1_000, keys + 10))) for actor in actors]
        assert found == [[True] * 1_000 + [False] * 10] * readers
        print(f"\n{keys} keys, grown {said['grown']} times under {readers} readers: {time.monotonic() - began:.0f} s")
        assert said["grown"] >= 2
