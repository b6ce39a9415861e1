"""Cancelled at every await of a wrapped tier, and copies at the same time: nothing is held, no bytes are another block's."""

import threading

import pytest
import trio
import trio.testing

from backends.abc import LOADED, STORED, Missed, RoomRequest
from backends.base.damaged_blocks import DamagedBlocks
from backends.base.slots import PagesDestination
from backends.base.threads import keep_threads
from backends.wrappers import AesGcm, Context, Zstd, slot_bytes, wrap
from tests.support.wrapping import (
    SECRETS,
    Foreign,
    Spy,
    at_rest,
    blocks_of,
    load,
    memory,
    page_store,
    source_of,
    store,
    stored_page,
    wrappers_of,
)

BLOCKS = blocks_of(3)
KEYS = list(BLOCKS)
OTHERS = blocks_of(3, name="other")


class Gate:
    """A place in a copy thread where it is waited for, and waits."""

    def __init__(self):
        self.reached, self.open = threading.Event(), threading.Event()

    def pass_through(self):
        self.reached.set()
        assert self.open.wait(30)

    async def wait_reached(self):
        assert await trio.to_thread.run_sync(self.reached.wait, 30)


class Slow(Foreign):
    """What it is asked to wait for takes until the gate is open."""

    gate: trio.Event | None = None
    waits = ("delete", "pin", "enter")
    asked = 0

    async def wait(self, what):
        if self.gate is not None and what in self.waits:
            self.asked += 1
            await self.gate.wait()

    async def delete(self, keys):
        await self.wait("delete")
        return await super().delete(keys)

    async def pin(self, keys):
        await self.wait("pin")
        return await super().pin(keys)


def slow(*wrappers):
    size = slot_bytes(64, *wrappers)
    return wrap(Slow(8 * size, size, checksums=False), *wrappers, block_bytes=64)


async def cut_off(doing, *args, when=trio.testing.wait_all_tasks_blocked):
    """Start it, and cancel it once it waits. Whether it left by the cancellation."""
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(doing, *args)
            await when()
            scope.cancel()
    return scope.cancelled_caught


# --- stores -------------------------------------------------------------------------------------------------------


async def test_a_store_that_is_cancelled_while_blocks_are_examined_leaves_at_once():
    gate = Gate()

    def secret_of(tenant):
        gate.pass_through()
        return b"s" * 16

    tier = memory([AesGcm(secret_of)])
    source = source_of(BLOCKS)
    reservation = await tier.reserve(RoomRequest(KEYS, 64, "fail"))
    async with keep_threads():
        assert await cut_off(reservation.transfer, source, source.upgrade(KEYS), when=gate.wait_reached)
        assert tier.contains_nowait(KEYS) == set() and tier.statistics().reserved_blocks == 3
        gate.open.set()
        reservation.release()
        at_rest(tier)
        assert await store(tier, BLOCKS) == [STORED] * 3


async def test_a_store_that_is_cancelled_while_blocks_are_encoded_leaves_at_once():
    spy = Spy()
    spy.go_on = threading.Event()
    tier = memory([spy])
    source = source_of(BLOCKS)
    reservation = await tier.reserve(RoomRequest(KEYS, 64, "fail"))

    async def encoding():
        assert await trio.to_thread.run_sync(spy.started.wait, 30)

    async with keep_threads():
        assert await cut_off(reservation.transfer, source, source.upgrade(KEYS), when=encoding)
        assert tier.contains_nowait(KEYS) == set() and tier.statistics().reserved_blocks == 3
        assert tier.wrapper_statistics().encoded == 0
        spy.go_on.set()
        reservation.release()
        at_rest(tier)
        assert await store(tier, BLOCKS) == [STORED] * 3
        assert (await load(tier, KEYS))[1] == list(BLOCKS.values())


async def test_a_store_that_is_cancelled_before_it_begins_has_done_nothing():
    for name in ("zstd", "aes"):
        tier = memory(wrappers_of(name))
        source = source_of(BLOCKS)
        reservation = await tier.reserve(RoomRequest(KEYS, 64, "fail"))
        with trio.CancelScope() as scope:
            scope.cancel()
            await reservation.transfer(source, source.upgrade(KEYS))
        assert scope.cancelled_caught
        reservation.release()
        assert tier.contains_nowait(KEYS) == set()
        at_rest(tier)


class Stopped(Spy):
    """Stops at the blocks it is told to, each at a gate of its own."""

    def __init__(self):
        super().__init__()
        self.gates = {}
        self.last = Gate()

    def encode(self, context, src, dst):
        if context.key in self.gates:
            self.gates[context.key].pass_through()
        made = super().encode(context, src, dst)
        if context.key == KEYS[-1]:
            self.last.reached.set()
        return made


async def copies_at_the_same_time_do_not_meet():
    """A store stops between two wrappers; it is cancelled there; others come and go; then it goes on, for nobody."""
    spy = Stopped()
    tier = memory(wrappers_of("zstd-spy-aes", spy=spy), blocks=16)
    gate = spy.gates[KEYS[0]] = Gate()
    source = source_of(BLOCKS)
    async with keep_threads():
        quarantined = await tier.reserve(RoomRequest(KEYS, 64, "fail"))
        assert await cut_off(quarantined.transfer, source, source.upgrade(KEYS), when=gate.wait_reached)
        other_gate = spy.gates[b"other1"] = Gate()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store, tier, OTHERS)
            await other_gate.wait_reached()  # the first of these is done, the second is between two wrappers
            gate.open.set()  # now the cancelled one writes on, wherever it writes
            await spy.last.wait_reached()
            other_gate.open.set()
        outcomes, places = await load(tier, list(OTHERS))
    assert outcomes == [LOADED] * 3
    assert places == list(OTHERS.values())
    assert tier.contains_nowait(KEYS) == set()
    quarantined.release()
    at_rest(tier)


async def test_copies_at_the_same_time_do_not_meet():
    with trio.fail_after(60):
        await copies_at_the_same_time_do_not_meet()


# --- loads --------------------------------------------------------------------------------------------------------


async def test_a_load_that_is_cancelled_leaves_when_no_block_is_decoded_any_more():
    spy = Spy()
    tier = memory([spy])
    places = [bytearray(64) for _ in KEYS]
    over = trio.Event()

    async def loading():
        try:
            await tier.load(lease, PagesDestination.over(places))
        finally:
            over.set()

    async with keep_threads():
        await store(tier, BLOCKS)
        spy.started.clear()
        spy.go_on = threading.Event()
        async with await tier.pin(KEYS) as lease:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(loading)
                    assert await trio.to_thread.run_sync(spy.started.wait, 30)
                    scope.cancel()
                    with trio.CancelScope(shield=True):
                        await trio.testing.wait_all_tasks_blocked()
                        assert not over.is_set(), "the destination is being written"
                        spy.go_on.set()
            assert scope.cancelled_caught and over.is_set()
        assert places == list(BLOCKS.values()), "it was over when it left"
    at_rest(tier)


@pytest.mark.parametrize("what", ["pin", "delete"])
async def test_what_waits_below_is_cancelled_there(what):
    tier = slow(Zstd())
    await store(tier, BLOCKS)
    tier.inner.gate = trio.Event()
    assert await cut_off(getattr(tier, what), KEYS)
    assert tier.inner.asked == 1
    tier.inner.gate = None
    assert tier.contains_nowait(KEYS) == set(KEYS)
    at_rest(tier)


async def test_a_cancelled_wait_for_room_holds_nothing():
    tier = slow(Zstd())
    await store(tier, blocks_of(8, name="full"))
    request = RoomRequest(KEYS, 64, "wait")
    assert await cut_off(tier.reserve, request)
    assert not request.shrink(KEYS[:1]), "it waits no more"
    await tier.delete(list(blocks_of(8, name="full")))
    at_rest(tier)
    assert await store(tier, BLOCKS, "wait") == [STORED] * 3


# --- what could not be decoded, and is to go -----------------------------------------------------------------------


async def with_one_damaged():
    """A tier with a block that could not be decoded and is held, so that it could not go either."""
    tier = slow(Zstd())
    await store(tier, BLOCKS)
    stored_page(tier, KEYS[0])[40] ^= 1
    holder = await tier.pin(KEYS)
    assert (await load(tier, KEYS))[0] == [Missed("damaged"), LOADED, LOADED]
    await holder.inner.release()
    assert tier.inner.statistics().blocks == 3 and tier.contains_nowait(KEYS) == set(KEYS[1:])
    return tier


@pytest.mark.parametrize("waits", ["pin", "delete"])
@pytest.mark.parametrize("what", ["reserve", "pin", "release", "leave", "purge"])
async def test_cancelled_while_it_is_deleted_it_stays_damaged_and_nothing_is_held(what, waits):
    tier = await with_one_damaged()
    lease = None
    if what in ("release", "leave"):
        kept, tier.damaged = tier.damaged, DamagedBlocks()
        lease = await tier.pin(KEYS[1:])
        tier.damaged = kept
    doing = {
        "reserve": lambda: tier.reserve(RoomRequest([b"new"], 64, "wait")),
        "pin": lambda: tier.pin(KEYS[1:]),
        "release": lambda: lease.release(),
        "leave": lambda: lease.__aexit__(None, None, None),
        "purge": lambda: tier.purge(),
    }[what]
    tier.inner.gate, tier.inner.waits = trio.Event(), (waits,)

    async def asked():
        with trio.fail_after(10):
            while not tier.inner.asked:  # a thread reads it once more before
                await trio.lowlevel.checkpoint()

    assert await cut_off(doing, when=asked)
    assert tier.inner.asked == 1, "it was about to delete, or to read once more before"
    tier.inner.gate = None
    assert tier.contains_nowait(KEYS) == set(KEYS[1:])
    at_rest(tier)
    await tier.purge()
    assert tier.inner.statistics().blocks == 2 and not tier.damaged


async def test_a_remote_tier_is_cancelled_while_it_is_asked():
    async with page_store() as make, wrap(make(), Zstd(), block_bytes=1000) as tier:
        with trio.CancelScope() as scope:
            scope.cancel()
            await tier.contains(KEYS)
        assert scope.cancelled_caught
        assert await tier.contains(KEYS) == set()


async def test_a_remote_tier_deletes_what_is_damaged_before_it_is_asked():
    async with page_store(checksums=False) as make, wrap(make(), AesGcm(SECRETS), block_bytes=1000) as tier:
        blocks = blocks_of(3, 1000)
        assert await store(tier, blocks) == [STORED] * 3
        tier.damaged.add([Context(KEYS[0], "", b"another chain")])
        assert await tier.contains(KEYS) == set(KEYS[1:])
        assert not tier.damaged and await tier.inner.contains(tier.names(KEYS)) == set(tier.names(KEYS[1:]))


async def test_what_cannot_be_deleted_now_is_later():
    class Silent(Slow):
        silent = True

        async def delete(self, keys):
            await trio.lowlevel.checkpoint()
            if self.silent:
                raise OSError("no answer")
            return await super().delete(keys)

    size = slot_bytes(64, Zstd())
    tier = wrap(Silent(8 * size, size, checksums=False), Zstd(), block_bytes=64)
    await store(tier, BLOCKS)
    stored_page(tier, KEYS[0])[40] ^= 1
    assert (await load(tier, KEYS))[0] == [Missed("damaged"), LOADED, LOADED]
    assert tier.contains_nowait(KEYS) == set(KEYS[1:])
    tier.inner.silent = False
    assert await store(tier, {KEYS[0]: BLOCKS[KEYS[0]]}) == [STORED]
    assert (await load(tier, KEYS))[0] == [LOADED] * 3


async def test_entering_and_leaving_are_cancelled_as_the_tier_below():
    events = []

    class Inner(Slow):
        async def __aenter__(self):
            await self.wait("enter")
            events.append("entered")

        async def __aexit__(self, *exc):
            events.append("left")
            await self.wait("enter")

    size = slot_bytes(64, Zstd())
    tier = wrap(Inner(8 * size, size), Zstd(), block_bytes=64)
    tier.inner.gate = trio.Event()
    assert await cut_off(tier.__aenter__)
    assert events == []
    tier.inner.gate = None
    await tier.__aenter__()
    tier.inner.gate = trio.Event()
    assert await cut_off(tier.__aexit__, None, None, None)
    assert events == ["entered", "left"]
