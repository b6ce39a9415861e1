"""The public tools for tests: a server in this process, and a wire that loses what it is told to."""

import contextlib
import random

import pytest
import trio

from maru import Loaded, MaruHandler, NoAnswer, Stored
from maru.testing import Code, Fate, open_lossy_wire, open_test_server
from tests.support.maru_actors import impatient

PAGE = 4096


def bytes_of(key, n=PAGE):
    return random.Random(key).randbytes(n)


def handler_for(wire, **knobs):
    return MaruHandler(
        server_url=wire.endpoint,
        pool_size=64 * PAGE,
        chunk_size_bytes=PAGE,
        timeout_ms=60_000,
        eager_map=False,
        **knobs,
    )


async def stored(handler, *keys):
    return await handler.batch_put(keys, [bytes_of(key) for key in keys])


async def loaded(handler, key):
    page = bytearray(PAGE)
    (answer,) = await handler.batch_get_into([key], [page])
    return bytes(page) if answer is Loaded.LOADED else answer


async def test_a_server_of_ones_own_serves_and_leaves_nothing():
    async with open_test_server() as server:
        path = server.config.pool_path
        async with MaruHandler(server_url=server.endpoints[0], pool_size=1 << 20, chunk_size_bytes=PAGE) as handler:
            assert await stored(handler, "a") == [Stored.NEW]
            assert await loaded(handler, "a") == bytes_of("a")
    assert not await trio.Path(path).exists()


async def test_its_knobs_are_those_of_a_server(tmp_path):
    pool = tmp_path / "pool"
    async with open_test_server(pool_path=str(pool), capacity_bytes=8 << 20) as server:
        assert server.statistics().pool.total_bytes == 8 << 20
    assert await trio.Path(pool).exists()


async def test_a_wire_that_is_told_nothing_changes_nothing():
    async with open_test_server() as server, open_lossy_wire(server.endpoints[0]) as wire:
        async with handler_for(wire) as one, handler_for(wire) as other:
            assert await stored(one, "a") == [Stored.NEW]
            assert await loaded(other, "a") == bytes_of("a")
        assert wire.statistics().lost == wire.statistics().doubled == wire.statistics().held == 0


@pytest.mark.parametrize("fate", [Fate.LOSE_REQUEST, Fate.LOSE_ANSWER, Fate.HOLD_REQUEST, Fate.HOLD_ANSWER])
async def test_a_store_without_an_answer_is_none_and_its_page_is_nobody_elses(fate):
    async with open_test_server() as server, open_lossy_wire(server.endpoints[0]) as wire, handler_for(wire) as handler:
        assert await stored(handler, "warm") == [Stored.NEW]  # so that nothing else is waited for impatiently
        wire.decide = lambda code, number: fate if code == Code.STORE else Fate.PASS
        async with impatient(handler, 0.08, Code.STORE):
            with pytest.raises(NoAnswer):
                await stored(handler, "a")
        wire.decide = lambda code, number: Fate.PASS
        wire.release()
        # Whatever became of it, what is found is right, and storing again ends well.
        assert await loaded(handler, "a") in (bytes_of("a"), Loaded.MISSING)
        assert (await stored(handler, "b")) == [Stored.NEW]
        assert (await stored(handler, "a"))[0] in (Stored.NEW, Stored.DUPLICATE)
        assert await loaded(handler, "a") == bytes_of("a")
        assert await loaded(handler, "b") == bytes_of("b")


async def test_a_request_that_arrives_twice_is_done_once():
    async with open_test_server() as server, open_lossy_wire(server.endpoints[0]) as wire, handler_for(wire) as handler:
        wire.decide = lambda code, number: Fate.TWICE if code in (Code.STORE, Code.DROP, Code.RECLAIM) else Fate.PASS
        for n in range(10):
            assert await stored(handler, f"a{n}", f"b{n}") == [Stored.NEW] * 2
            await handler.delete(f"a{n}")
        for n in range(10):
            assert await loaded(handler, f"b{n}") == bytes_of(f"b{n}")
        assert server.statistics().service.directory.entries == 10
        assert wire.statistics().doubled >= 20


@pytest.mark.parametrize("seed", range(6))
async def test_nothing_is_wrong_whatever_is_lost(seed):
    dice = random.Random(seed)
    fates = [Fate.PASS] * 12 + [fate for fate in Fate if fate is not Fate.PASS]
    async with (
        open_test_server() as server,
        open_lossy_wire(server.endpoints[0]) as wire,
        handler_for(wire, lease=30.0) as writer,
        handler_for(wire, lease=30.0) as reader,
    ):
        wire.decide = lambda code, number: dice.choice(fates)
        acknowledged = set()
        async with impatient(writer, 0.06), impatient(reader, 0.06):
            for n in range(24):
                key = f"k{n}"
                with trio.move_on_after(5):
                    with contextlib.suppress(NoAnswer):
                        if (await stored(writer, key))[0] in (Stored.NEW, Stored.DUPLICATE):
                            acknowledged.add(key)
                    with contextlib.suppress(NoAnswer):
                        assert await loaded(reader, f"k{dice.randrange(n + 1)}") is not None
                if dice.random() < 0.3:
                    wire.release()
        wire.decide = lambda code, number: Fate.PASS
        wire.release()
        for key in sorted(acknowledged):
            assert await loaded(reader, key) == bytes_of(key)
        for n in range(24):
            assert await loaded(reader, f"k{n}") in (bytes_of(f"k{n}"), Loaded.MISSING)
        assert wire.statistics().lost > 0


async def test_an_error_of_the_body_leaves_as_it_came():
    with pytest.raises(KeyError, match="mine"):
        async with open_test_server() as server, open_lossy_wire(server.endpoints[0]):
            raise KeyError("mine")
