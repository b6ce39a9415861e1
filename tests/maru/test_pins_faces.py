"""FIND and UNPIN whose answers are lost on a real wire, with a real server and both faces: no page stays pinned for nobody."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import attrs
import pytest
import trio

from maru import NoAnswer
from maru._server import service_v1
from maru._wire import OWN_CODES
from maru.testing import Code, Fate, open_lossy_wire, open_test_server
from tests.support.maru_actors import FACES, PAGE, PAGES, Client, client
from tests.support.maru_processes import PATIENCE, payload

LEASE = 0.6
"""A sign of life comes every fifth of a second."""


async def off(call: Callable[..., Any], *arguments: Any) -> Any:
    """What a client of either face does, while the server and the wire go on here."""
    return await trio.to_thread.run_sync(partial(call, *arguments))


async def eventually(holds: Callable[[], Any]) -> None:
    with trio.fail_after(PATIENCE):
        while not holds():  # noqa: ASYNC110  # a server has no event for a pin
            await trio.sleep(0.005)


def lose(*codes: int) -> Callable[[int, int], Fate]:
    return lambda code, number: Fate.LOSE_ANSWER if code in codes else Fate.PASS


def answered(call: Callable[..., Any], *arguments: Any) -> bool:
    try:
        call(*arguments)
    except NoAnswer:
        return False
    return True


@contextlib.asynccontextmanager
async def opened(face: str, url: str, **knobs: Any):
    one = await off(partial(client, face, url, **knobs))
    try:
        yield one
    finally:
        await off(one.close)


@contextlib.asynccontextmanager
async def impatient(reader: Client, seconds: float = 0.15) -> AsyncIterator[None]:
    """Its calls wait no longer than this: those that nobody will answer. From here on, it takes them for lost so soon, too."""
    standing = reader.handler._state
    standing.config = attrs.evolve(standing.config, timeout_ms=round(seconds * 1e3))
    manager = reader.impatient(seconds)
    await off(manager.__enter__)
    try:
        yield
    finally:
        await off(manager.__exit__, None, None, None)


async def beaten(reader: Client, holds: Callable[[], Any]) -> None:
    """Signs of life, until it is so: by itself it gives one each few seconds."""
    with trio.fail_after(PATIENCE):
        while not holds():
            await off(answered, reader.beat)


def unknown(reader: Client) -> int:
    return reader.handler.statistics().counters.pins_unknown


@pytest.mark.parametrize("face", FACES)
async def test_what_lost_answers_have_pinned_is_let_go_of_in_a_session_that_goes_on(face: str) -> None:
    keys = [f"k{at}" for at in range(PAGES)]
    async with (
        open_test_server(min_lease=0.05) as server,
        open_lossy_wire(server.endpoints[0]) as wire,
        opened("blocking", server.endpoints[0]) as owner,
        opened(face, wire.endpoint, pool_size=0, index="off") as reader,
    ):
        pinned = lambda: server.statistics().service.directory.pinned  # noqa: E731
        await off(owner.put, keys)
        assert await off(reader.hold, "k0", "k1") == [True, True]
        assert await off(reader.pin, "k1") == [True]
        wire.decide = lose(Code.FIND)
        async with impatient(reader):
            for what in (partial(reader.hold, *keys), partial(reader.pin, *keys), partial(reader.get, keys)):
                assert not await off(answered, what)
        await eventually(lambda: pinned() == PAGES)
        wire.decide = lambda code, number: Fate.PASS
        await beaten(reader, lambda: pinned() == 2)
        await eventually(lambda: unknown(reader) == 3 * PAGES)  # it hears of that a moment later
        assert await off(owner.delete, keys) == ["PINNED"] * 2 + ["DELETED"] * (PAGES - 2)
        assert [await off(reader.looks, key) for key in ("k0", "k1")] == ["right", "right"]
        # and what should have been given back, and was not: the question was lost, and nobody waits for its answer
        wire.decide = lambda code, number: Fate.LOSE_REQUEST if code == Code.UNPIN else Fate.PASS
        async with impatient(reader):  # until it has given up that answer
            lost = wire.statistics().lost
            await off(reader.let_go, "k0", "k1")
            await eventually(lambda: wire.statistics().lost > lost)
            wire.decide = lambda code, number: Fate.PASS
            await beaten(reader, lambda: pinned() == 1)
        assert await off(reader.unpin, "k1") == [True]
        assert await off(owner.delete, ["k0", "k1"]) == ["DELETED"] * 2
        codes: list[int] = []

        def note(code: int, number: int) -> Fate:
            codes.append(code)
            return Fate.PASS

        wire.decide = note
        await beaten(reader, lambda: codes.count(Code.BEAT) > 3)
        assert not {Code.FIND, Code.UNPIN, Code.PINS} & set(codes)  # signs of life, and nothing of pins
        assert server.statistics().service.refused == 0


@pytest.mark.parametrize("face", FACES)
async def test_with_a_server_that_does_not_list_pins_they_stay_until_the_session_ends(
    face: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_v1, "OWN_CODES", OWN_CODES - {Code.PINS})
    async with (
        open_test_server(min_lease=0.05, lease_grace=0.05) as server,
        open_lossy_wire(server.endpoints[0]) as wire,
        opened("blocking", server.endpoints[0], lease=60.0) as owner,
    ):
        async with opened(face, wire.endpoint, pool_size=0, index="off") as reader:
            await off(owner.put, ["k", "l"])
            assert await off(reader.hold, "l") == [True]
            wire.decide = lose(Code.FIND)
            async with impatient(reader):
                assert not await off(answered, reader.hold, "k")
            wire.decide = lambda code, number: Fate.PASS
            beats = reader.handler._state.beats
            await beaten(reader, lambda: reader.handler._state.beats > beats + 3)
            assert await off(owner.delete, ["k", "l"]) == ["PINNED"] * 2
            await off(reader.let_go, "l")
            await eventually(lambda: server.statistics().service.directory.pinned == 1)
            assert server.statistics().service.refused == 0  # it was asked for nothing that it does not know
        server._service.expire(trio.current_time() + 30)  # as long as its lease: what remains of it need not pass
        assert server.statistics().service.directory.pinned == 0
        assert await off(owner.delete, ["k", "l"]) == ["DELETED"] * 2


@pytest.mark.parametrize("face", FACES)
async def test_where_no_answeris_lost_nothing_is_ever_claimed(face: str) -> None:
    """Nobody waits for the answer to an UNPIN: it lies unread on a socket until somebody looks."""
    codes: list[int] = []

    def note(code: int, number: int) -> Fate:
        codes.append(code)
        return Fate.PASS

    async with (
        open_test_server(min_lease=0.05) as server,
        open_lossy_wire(server.endpoints[0]) as wire,
        opened("blocking", server.endpoints[0]) as owner,
        opened(face, wire.endpoint, pool_size=0, index="off") as reader,
    ):
        wire.decide = note
        keys = [f"k{at}" for at in range(PAGES)]
        await off(owner.put, keys)

        async def read(key: str) -> None:
            await off(reader.hold, key)
            held.append(key)
            await eventually(lambda: len(held) >= PAGES)  # so that all of them are at it at once
            await off(reader.let_go, key)

        for _ in range(2):
            held: list[str] = []
            beats = reader.handler._state.beats
            async with trio.open_nursery() as nursery:
                for key in keys:
                    nursery.start_soon(read, key)
                nursery.start_soon(beaten, reader, lambda beats=beats: reader.handler._state.beats > beats + 5)
            await off(reader.beat)
        assert codes.count(Code.FIND) == 2 * PAGES
        assert codes.count(Code.UNPIN) == 2 * PAGES
        assert Code.PINS not in codes
        assert server.statistics().service.directory.pinned == 0


async def test_a_ticket_that_was_begun_before_a_claim_holds_what_it_gives_out() -> None:
    async with (
        open_test_server() as server,
        opened("blocking", server.endpoints[0]) as owner,
        opened("blocking", server.endpoints[0], pool_size=0, index="off") as reader,
    ):
        keys = ["k", "l"]
        await off(owner.put, keys)
        handler = reader.handler
        ticket = await off(handler.begin.batch_retrieve, keys)
        await eventually(lambda: server.statistics().service.directory.pinned == 2)
        handler._state.pin_epochs.is_lost = True
        await off(reader.beat)
        assert server.statistics().service.directory.pinned == 0  # nobody uses its answer yet
        found = await off(ticket.result)
        assert server.statistics().service.directory.pinned == 2
        assert [bytes(info.view) == payload(info.key, info.length) for info in found] == [True, True]
        assert await off(owner.delete, keys) == ["PINNED"] * 2
        for info in found:
            await off(info.release)
        await eventually(lambda: server.statistics().service.directory.pinned == 0)


@pytest.mark.parametrize("face", FACES)
async def test_a_storm_of_losses_neither_leaks_a_pin_nor_shows_a_page_that_was_used_again(face: str) -> None:
    """A reader holds views over a wire that loses a third of its pinning, while the owner evicts for what it stores."""
    dice = random.Random(11)
    codes = (Code.FIND, Code.UNPIN, Code.PINS)
    fates = (Fate.PASS, Fate.PASS, Fate.PASS, Fate.LOSE_REQUEST, Fate.LOSE_ANSWER, Fate.HOLD_ANSWER, Fate.HOLD_REQUEST)
    async with (
        open_test_server(min_lease=0.05) as server,
        open_lossy_wire(server.endpoints[0]) as wire,
        opened("blocking", server.endpoints[0]) as owner,
        opened(face, wire.endpoint, pool_size=0, lease=LEASE, index="off") as reader,
    ):
        wire.decide = lambda code, number: dice.choice(fates) if code in codes else Fate.PASS
        stored = [f"s{at}" for at in range(PAGES)]
        assert await off(owner.put, stored) == ["NEW"] * PAGES
        looks: list[str] = []

        def read() -> None:
            wanted = dice.sample(stored[-PAGES:], 3)
            if answered(reader.hold, *wanted):
                for key in wanted:
                    if reader.held.get(key):
                        looks.append(reader.looks(key))
                        answered(reader.let_go, key)
            answered(reader.get, wanted)

        began = trio.current_time()
        number = 0
        async with impatient(reader, 0.04):
            while trio.current_time() - began < 1.0 or looks.count("right") < 10 or not unknown(reader):
                assert trio.current_time() - began < 5 * PATIENCE, (len(looks), unknown(reader))
                await off(read)
                wire.release()
                number += 1
                key = f"n{number}"
                if await off(owner.put, [key]) == ["NEW"]:
                    stored.append(key)
        assert set(looks) <= {"right", "lost"}
        wire.decide = lambda code, number: Fate.PASS
        wire.release()
        for key in list(reader.held):
            while reader.held[key]:
                looks.append(await off(reader.looks, key))
                await off(reader.let_go, key)
        assert set(looks) <= {"right", "lost"}
        assert looks.count("right") >= 10
        await eventually(lambda: server.statistics().service.directory.pinned == 0)
        last = [f"last{at}" for at in range(PAGES)]
        assert await off(owner.put, last) == ["NEW"] * PAGES  # every page can be had
        assert owner.pages().pages * PAGE == PAGES * PAGE
