"""The published contract test: the fake passes it, and each planted fault fails it."""

import time
from contextlib import contextmanager

import pytest
import trio
import trio.testing

from backends.abc import STORED, Deletion, Destination, RoomRequest, Tier
from backends.base.copying import StoreCopy
from backends.base.pages import checksums, copy_pages, new_pages, pages_of
from backends.base.pooled import Lease, PooledReservation
from backends.base.room import WaitQueue
from backends.memory import MemoryTier
from backends.testing import FakeTier, NullExecutor, check_tier, payload_of


async def check(make_tier):
    await check_tier(make_tier, damage=lambda tier, key: tier.damage(key), threads=False)


async def test_the_fake_keeps_the_contract(autojump_clock):
    await check(FakeTier)
    await check(lambda n, size: FakeTier(n, size, latency=1, bytes_per_second=100))
    await check(lambda n, size: FakeTier(n, size, synchronous=True))


def but(request, when_full):
    """The same request in another object, so that it does not shrink with the one that was given."""
    return RoomRequest(request.keys, request.block_bytes, when_full)


class FindsWhatIsReserved(FakeTier):
    def contains_nowait(self, keys):
        return set(keys) if self.statistics().reserved_blocks else super().contains_nowait(keys)

    async def contains(self, keys):
        await trio.lowlevel.checkpoint()
        return self.contains_nowait(keys)


class KnowsTwoThings(FakeTier):
    def contains_nowait(self, keys):
        return set()


class LosesRoomOnKeep(FakeTier):
    async def reserve(self, request):
        reservation = await super().reserve(request)
        return LosingReservation(self, reservation.granted, reservation._slots, request.block_bytes)


class LosingReservation(PooledReservation):
    def keep(self, keys):
        wanted = set(keys)
        self._slots = [slot for key, slot in zip(self.granted, self._slots, strict=True) if key in wanted]
        self.granted = keys


class Overwrites(FakeTier):
    async def reserve(self, request):
        for key in request.keys:
            if self.pool.contains([key]):
                self.pool.delete([key])
        return await super().reserve(request)


class DeletesWhatIsPinned(FakeTier):
    async def delete(self, keys):
        await trio.lowlevel.checkpoint()
        found = self.pool.contains(keys)
        self.pool.forget(keys, self.pool.slots(keys))
        return [Deletion.DELETED if key in found else Deletion.MISSING for key in keys]


class SaysItDeleted(FakeTier):
    async def delete(self, keys):
        await trio.lowlevel.checkpoint()
        return [Deletion.DELETED if self.pool.contains([key]) else Deletion.MISSING for key in keys]


class EvictsWhenAskedToWait(FakeTier):
    async def reserve(self, request):
        return await super().reserve(but(request, "evict") if request.when_full == "wait" else request)


class NeverWaits(FakeTier):
    async def reserve(self, request):
        await trio.lowlevel.checkpoint()
        return self.reserve_nowait(but(request, "partial") if request.when_full == "wait" else request)


class Queue(WaitQueue):
    """What happens to a waiting request that shrinks is up to :meth:`shrunk`."""

    @contextmanager
    def join(self, request, size=1):
        with super().join(request, size) as waiter:
            right = request._shrunk
            with request.waiting(lambda: self.shrunk(waiter, right)):
                yield waiter


class MovingQueue(Queue):
    def shrunk(self, waiter, right):
        if waiter in self.requests:
            self.requests.move_to_end(waiter)
        return right()


class LazyQueue(Queue):
    def shrunk(self, waiter, right):
        return waiter in self.requests


class ShrinksAndLosesItsTurn(FakeTier):
    def __init__(self, *args):
        super().__init__(*args)
        self.pool._waiters = MovingQueue(self.pool._serve)


class ShrinksAndIsNotServed(FakeTier):
    def __init__(self, *args):
        super().__init__(*args)
        self.pool._waiters = LazyQueue(self.pool._serve)


class OnlySaysItShrinks(FakeTier):
    async def reserve(self, request):
        with request.waiting(lambda: True):
            return await super().reserve(but(request, request.when_full))


class PinsPastAGap(FakeTier):
    def pin_nowait(self, keys):
        there = [key for key in keys if self.pool.contains([key])]
        return Lease(self, there, self.pool.upgrade(there))


class LeaksItsLeases(FakeTier):
    def release(self, refs):
        pass


class DoesNotVerify(FakeTier):
    def __init__(self, n, size):
        super().__init__(n, size, checksums=False)


class LoadsTheWrongBlock(FakeTier):
    async def load(self, lease, destination):
        refs, lease.refs = lease.refs, lease.refs[::-1]
        try:
            return await super().load(lease, destination)
        finally:
            lease.refs = refs


class NoCheckpoint(FakeTier):
    async def pin(self, keys):
        return self.pin_nowait(keys)


class KeepsRoomOfACancelledWait(FakeTier):
    async def reserve(self, request):
        try:
            return await super().reserve(request)
        except trio.Cancelled:
            self.pool.take(1)
            raise


class AnswersTooFew(FakeTier):
    def __init__(self, n, size):
        super().__init__(n, size)
        self.faults.extra_outcomes = -1


class SaysStoredForAFailure(FakeTier):
    async def reserve(self, request):
        reservation = await super().reserve(request)
        return Optimist(self, reservation.granted, reservation._slots, request.block_bytes)


class Optimist(PooledReservation):
    async def transfer(self, source, refs):
        try:
            return await super().transfer(source, refs)
        except OSError:
            return [STORED] * len(refs)


class BelievesItsSource(FakeTier):
    """What MaruTier did: it sums up what has arrived, and asks nobody what it should have been."""

    async def write(self, source, refs, keys, slots):
        here, pages = self.views(slots), source.views(refs)
        if pages is None:
            source.copy_out(refs, here)
        else:
            copy_pages(here, pages)
        self.note_checksums(slots, checksums(here))
        return {}


class DoesNotTellItsSource(FakeTier):
    async def write(self, source, refs, keys, slots):
        return await super().write(SilentSource(source), refs, keys, slots)


class SilentSource:
    """Stands between, and passes on one of two methods."""

    def __init__(self, source):
        self._source = source

    def __getattr__(self, name):
        return getattr(self._source, name)

    def forget_damaged(self, keys, refs):
        pass


class FailsTheNeighboursOfADamagedBlock(FakeTier):
    async def write(self, source, refs, keys, slots):
        failures = await super().write(source, refs, keys, slots)
        if failures and len(failures) < len(keys):
            raise next(iter(failures.values()))
        return failures


class FailsTheNeighboursOfAnUnreadableBlock(FakeTier):
    async def write(self, source, refs, keys, slots):
        pages = new_pages(len(refs), self.block_bytes)
        source.copy_out(refs, pages)  # of all of them
        return await super().write(source, refs, keys, slots)


FAULTS = [
    BelievesItsSource,
    FailsTheNeighboursOfAnUnreadableBlock,
    DoesNotTellItsSource,
    FailsTheNeighboursOfADamagedBlock,
    FindsWhatIsReserved,
    LosesRoomOnKeep,
    Overwrites,
    DeletesWhatIsPinned,
    SaysItDeleted,
    EvictsWhenAskedToWait,
    NeverWaits,
    ShrinksAndLosesItsTurn,
    ShrinksAndIsNotServed,
    OnlySaysItShrinks,
    KnowsTwoThings,
    PinsPastAGap,
    LeaksItsLeases,
    DoesNotVerify,
    LoadsTheWrongBlock,
    NoCheckpoint,
    KeepsRoomOfACancelledWait,
    AnswersTooFew,
    SaysStoredForAFailure,
]


@pytest.mark.parametrize("faulty", FAULTS)
async def test_a_broken_promise_is_found(faulty, autojump_clock):
    with pytest.raises((AssertionError, trio.TooSlowError, ExceptionGroup)), trio.fail_after(1000):
        await check(faulty)


async def test_a_tier_in_which_no_request_can_shrink_keeps_the_contract():
    class Plain(FakeTier):
        async def reserve(self, request):
            return await super().reserve(but(request, request.when_full))

    await check(Plain)


async def test_a_failure_says_which_promise_and_which_tier():
    with pytest.raises(AssertionError) as info:
        await check(LeaksItsLeases)
    assert "the promise: " in info.value.__notes__[0]
    assert "LeaksItsLeases" in info.value.__notes__[0]


class ScratchesBehindTheSource(MemoryTier):
    """Its copy thread goes on working in its slots when it is over with a source that is not in host memory."""

    async def write(self, source, refs, keys, slots):
        here, pause = self.views(slots), 0.0 if source.views(refs) else 0.0001
        copied = StoreCopy(source, keys, refs, summed=True)

        def copy():
            plain = pages_of([bytearray(self.block_bytes) for _ in slots])
            copied.copy_to(plain)
            for _ in range(1000):
                for page in here:
                    page[:] = bytes(self.block_bytes)
                time.sleep(pause)
            copy_pages(here, plain)

        await self.off_thread(copy)
        self.note_checksums(slots, copied.sums)
        return copied.settle()


class OverwritesAtTheEndOfACopy(MemoryTier):
    """A tier whose second copy of a key overwrites the first."""

    async def write(self, source, refs, keys, slots):
        failures = await super().write(source, refs, keys, slots)
        self.pool.delete(keys)
        return failures


async def test_a_second_copy_of_a_key_that_overwrites_the_first_is_found():
    with pytest.raises(AssertionError, match="of two copies of a key one is stored"):
        await check_tier(lambda n, size: OverwritesAtTheEndOfACopy(n * size, size), any_block_size=False)


async def test_what_a_cancelled_copy_may_still_write_to_is_not_used_again():
    await check_tier(lambda n, size: ScratchesBehindTheSource(n * size, size), any_block_size=False)


async def test_a_tier_is_closed_after_each_promise():
    open_tiers = set()

    class Closing(FakeTier):
        def __init__(self, n, size):
            super().__init__(n, size)
            open_tiers.add(self)

        def close(self):
            open_tiers.remove(self)

    await check(Closing)
    assert not open_tiers


# --- the dials ----------------------------------------------------------------------------------------------------


KEYS = [b"%d" % number for number in range(4)]


@pytest.fixture
def source():
    source = FakeTier(16)
    source.fill(KEYS)
    return source


async def transfer(source, fake, keys=KEYS):
    reservation = await fake.reserve(RoomRequest(keys, fake.block_bytes, "fail"))
    refs = source.upgrade(keys)
    try:
        return await reservation.transfer(source, refs)
    finally:
        source.release(refs)
        reservation.release()


async def test_copies_take_the_time_they_are_told(source, autojump_clock):
    fake = FakeTier(latency=2, bytes_per_second=64)
    start = trio.current_time()
    await transfer(source, fake)
    assert trio.current_time() - start == 2 + 4
    async with await fake.pin(KEYS) as lease:
        outcomes = await fake.load(lease, FakeDestination(4))
    assert trio.current_time() - start == 2 * (2 + 4)
    assert len(outcomes) == 4
    assert fake.batches == [tuple(KEYS)]
    assert fake.copied == KEYS


class FakeDestination(Destination):
    block_bytes = 64

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def views(self):
        return None

    def copy_in(self, start, pages):
        assert [bytes(page) for page in pages] == [payload_of(key, 64) for key in KEYS[start : start + len(pages)]]


async def test_a_gate_holds_a_copy_open(source):
    fake = FakeTier()
    fake.faults.gate = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(transfer, source, fake)
        await trio.testing.wait_all_tasks_blocked()
        assert (fake.copying, fake.contains_nowait(KEYS)) == (1, set())
        fake.faults.gate.set()
    assert (fake.copying, fake.contains_nowait(KEYS)) == (0, set(KEYS))


async def test_blocks_fail_as_told_and_their_room_comes_back(source):
    fake, error = FakeTier(), OSError("as told")
    fake.faults.failing = {KEYS[1]: error}
    outcomes = await transfer(source, fake)
    assert [getattr(outcome, "error", None) for outcome in outcomes] == [None, error, None, None]
    assert fake.contains_nowait(KEYS) == {KEYS[0], KEYS[2], KEYS[3]}
    assert fake.free == 61


@pytest.mark.parametrize("error", [OSError("as told"), KeyboardInterrupt("as told")])
async def test_a_transfer_raises_as_told(source, error):
    fake = FakeTier()
    fake.faults.error = error
    with pytest.raises(type(error), match="as told"):
        await transfer(source, fake)
    assert fake.contains_nowait(KEYS) == set()
    assert (fake.free, fake.copying) == (64, 0)


@pytest.mark.parametrize("extra", [-1, 2])
async def test_a_wrong_number_of_outcomes_as_told(source, extra):
    fake = FakeTier()
    fake.faults.extra_outcomes = extra
    assert len(await transfer(source, fake)) == 4 + extra


async def test_a_copy_that_never_ends_can_be_left(source, autojump_clock):
    fake = FakeTier()
    fake.faults.hang = True
    with trio.move_on_after(5) as scope:
        await transfer(source, fake)
    assert scope.cancelled_caught
    assert (fake.copying, fake.contains_nowait(KEYS)) == (0, set())


async def test_room_is_refused_as_told(autojump_clock):
    fake = FakeTier()
    fake.faults.room = trio.Event()
    assert not fake.reserve_nowait(RoomRequest(KEYS, 64, "partial")).granted
    with pytest.raises(trio.WouldBlock):
        fake.reserve_nowait(RoomRequest(KEYS, 64, "evict"))
    with trio.move_on_after(1) as scope:
        await fake.reserve(RoomRequest(KEYS, 64, "wait"))
    assert scope.cancelled_caught
    fake.faults.room.set()
    assert (await fake.reserve(RoomRequest(KEYS, 64, "wait"))).granted == KEYS


async def test_a_synchronous_fake_passes_no_checkpoint(source):
    fake = FakeTier(synchronous=True)
    reservation = fake.reserve_nowait(RoomRequest(KEYS, 64, "wait"))
    with trio.testing.assert_no_checkpoints():
        await reservation.transfer(source, source.upgrade(KEYS))
    assert fake.contains_nowait(KEYS) == set(KEYS)


async def test_loads_miss_and_fail_as_told(source):
    source.faults.missing = {KEYS[2]: "torn"}
    async with await source.pin(KEYS) as lease:
        outcomes = await source.load(lease, FakeDestination(4))
        assert [getattr(outcome, "reason", None) for outcome in outcomes] == [None, None, "torn", None]
        source.faults.load_error = OSError("as told")
        with pytest.raises(OSError, match="as told"):
            await source.load(lease, FakeDestination(4))


async def test_the_null_executor_takes_everything_and_remembers_it(source):
    null = NullExecutor()
    reservation = null.reserve_nowait(RoomRequest(KEYS, 64, "wait"))
    reservation.keep(KEYS[:2])
    with trio.testing.assert_no_checkpoints():
        assert await reservation.transfer(source, [0, 1]) == [STORED] * 2
    reservation.release()
    assert null.contains_nowait(KEYS) == set(KEYS[:2])
    with trio.testing.assert_checkpoints():
        await null.reserve(RoomRequest(KEYS, 64, "wait"))


def test_payloads_follow_from_keys_and_differ():
    assert payload_of(b"a", 2000) == payload_of(b"a", 2000)
    assert len(payload_of(b"a", 2000)) == 2000
    assert payload_of(b"a", 16) == payload_of(b"a", 2000)[:16]
    assert payload_of(b"a", 16) != payload_of(b"b", 16)
    assert payload_of(b"a", 4096)[1024:2048] != payload_of(b"a", 4096)[2048:3072]
    assert payload_of(b"a", 0) == b""


def test_the_fake_is_a_tier():
    tier: Tier = FakeTier()
    assert tier.statistics().blocks == 0
