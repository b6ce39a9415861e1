"""A large load is copied and summed in two threads; what comes of it is the same as in one. Loads at one time take turns."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import pytest
import trio
import trio.testing

from backends.abc import LOADED, Destination
from backends.base import copying as _copying
from backends.base import pages as pages_module
from backends.base import slots
from backends.base.copying import deliver
from backends.base.pages import Pages, checksums, copy_and_sum, new_pages
from backends.base.slots import PagesDestination
from backends.base.threads import keep_threads, run_beside
from backends.memory import MemoryTier
from backends.testing import payload_of

SIZE = 256


@attrs.define(eq=False)
class Places(Destination):
    """A destination that is no host memory, and says in which thread it was written to."""

    into: Pages
    error: Exception | None = None
    threads: list[str] = attrs.Factory(list)

    @property
    def block_bytes(self) -> int:
        return SIZE

    def __len__(self) -> int:
        return len(self.into)

    def views(self) -> None:
        return None

    def copy_in(self, start: int, pages: Pages) -> None:
        self.threads.append(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        for at, page in enumerate(pages):
            self.into[start + at][:] = page


class SummingPlaces(Places):
    """Such a destination that sums what it copies."""

    sums_pages = True

    def copy_in_and_sum(self, start: int, pages: Pages) -> list[int]:
        self.copy_in(start, pages)
        return checksums(pages)


def filled(n: int) -> Pages:
    pages, rng = new_pages(n, SIZE), random.Random(n)
    for page in pages:
        page[:] = rng.randbytes(SIZE)
    return pages


@pytest.fixture(params=[0, 1 << 30], ids=["two threads", "one thread"])
def threshold(request, monkeypatch):
    monkeypatch.setattr(_copying, "BESIDE_BYTES", request.param)


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("in_host_memory", [True, False])
def test_all_of_it_arrives_with_its_checksums(threshold, n, summed, in_host_memory):
    source, into = filled(n), new_pages(n, SIZE)
    places = Places(into)
    sums = deliver(source, places, 0, into if in_host_memory else None, summed)
    assert sums == (checksums(source) if summed else None)
    assert [bytes(page) for page in into] == [bytes(page) for page in source]
    assert len(places.threads) == (not in_host_memory)  # a destination is written to by one thread at a time


def test_a_destination_that_sums_what_it_copies_is_not_read_again_for_it(threshold, monkeypatch):
    def read_again(pages: Pages) -> list[int]:
        raise AssertionError("read again")

    monkeypatch.setattr(_copying, "checksums", read_again)
    source, places = filled(4), SummingPlaces(new_pages(4, SIZE))
    assert deliver(source, places, 0, None, True) == checksums(source)
    assert deliver(source, places, 0, None, False) is None
    assert [bytes(page) for page in places.into] == [bytes(page) for page in source]


@pytest.mark.parametrize("places", [Places, SummingPlaces])
def test_what_a_destination_raises_is_raised_and_both_threads_have_ended(threshold, places):
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="full"):
        deliver(filled(4), places(new_pages(4, SIZE), OSError("full")), 0, None, True)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("more", [0, 77])
def test_a_page_that_is_copied_part_by_part_has_the_checksum_of_the_whole(more, monkeypatch):
    monkeypatch.setattr(pages_module, "WARM_BYTES", 100)
    source, into = new_pages(2, 300 + more), new_pages(2, 300 + more)
    for page in source:
        page[:] = random.Random(more).randbytes(300 + more)
    assert copy_and_sum(into, source) == checksums(source)
    assert [bytes(page) for page in into] == [bytes(page) for page in source]
    with pytest.raises(ValueError, match="cannot copy"):
        copy_and_sum(new_pages(2, 300 + more - 1), source)


def test_what_the_second_thread_raises_is_raised_where_its_result_is_asked_for():
    def fail() -> None:
        raise OSError("beside")

    with pytest.raises(OSError, match="beside"), run_beside(fail) as result:
        result()


def test_at_the_exit_the_second_thread_has_ended():
    gate, order = threading.Event(), []

    def wait() -> None:
        gate.wait(10)
        order.append("ended")

    with pytest.raises(KeyError), run_beside(wait):
        gate.set()
        raise KeyError
    assert order == ["ended"]


# --- loads beside a copy take turns -------------------------------------------------------------------------------------


BLOCK = slots.PORTION_BYTES // 4
KEYS = tuple(b"%032d" % number for number in range(10))  # three portions, the last one short


@attrs.define(eq=False)
class Copying:
    """The copies that threads make, which wait until they may."""

    may: threading.Event = attrs.Factory(threading.Event)
    running: int = 0
    begun: threading.Semaphore = attrs.Factory(lambda: threading.Semaphore(0))
    most: int = 0
    halves: int = 0
    _lock: threading.Lock = attrs.Factory(threading.Lock)

    @contextmanager
    def one(self) -> Iterator[None]:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        self.begun.release()
        assert self.may.wait(30)
        yield
        with self._lock:
            self.running -= 1


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> Copying:
    """Two loads may be copied at a time; a load is large, so that it could be copied by halves."""
    seen, copied, by_halves = Copying(), _copying._copied, _copying._copied_by_halves

    def copy(*args: object) -> object:
        with seen.one():
            return copied(*args)  # type: ignore[arg-type]

    def copy_by_halves(*args: object) -> object:
        seen.halves += 1
        return by_halves(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("backends.base.in_place.BESIDE", 1)
    monkeypatch.setattr(_copying, "BESIDE_BYTES", 0)
    monkeypatch.setattr(_copying, "_copied", copy)
    monkeypatch.setattr(_copying, "_copied_by_halves", copy_by_halves)
    return seen


class Loads:
    """Loads of one tier at once, each of all its blocks into memory of its own."""

    def __init__(self, n: int) -> None:
        self.tier = MemoryTier(len(KEYS) * BLOCK, BLOCK)
        for key in KEYS:
            self.tier.put(key, payload_of(key, BLOCK))
        self.buffers = [[bytearray(BLOCK) for _ in KEYS] for _ in range(n)]
        self.scopes = [trio.CancelScope() for _ in range(n)]
        self.done: list[int] = []

    async def load(self, at: int) -> None:
        with self.scopes[at]:
            async with await self.tier.pin(KEYS) as lease:
                outcomes = await self.tier.load(lease, PagesDestination.over(self.buffers[at]))
            assert outcomes == [LOADED] * len(KEYS)
            self.done.append(at)

    def arrived(self, at: int) -> bool:
        return self.buffers[at] == [bytearray(payload_of(key, BLOCK)) for key in KEYS]

    def is_untouched(self, at: int) -> bool:
        return not any(any(buffer) for buffer in self.buffers[at])


async def wait_running(copying: Copying, n: int) -> None:
    """Wait until so many more copies have begun."""
    for _ in range(n):
        assert await trio.to_thread.run_sync(copying.begun.acquire, True, 30)


async def test_of_many_loads_at_once_no_more_are_copied_than_may_be(copying: Copying) -> None:
    loads = Loads(7)
    async with keep_threads(), trio.open_nursery() as nursery:
        for at in range(7):
            nursery.start_soon(loads.load, at)
        await wait_running(copying, 2)
        await trio.testing.wait_all_tasks_blocked()
        assert (copying.running, len(loads.done)) == (2, 1)  # that one was copied in place
        copying.may.set()
    assert all(map(loads.arrived, range(7)))
    assert copying.most == 2
    assert copying.halves == 0  # beside other copies there is no processor for it


async def test_a_load_that_is_cancelled_before_its_turn_copies_nothing_and_takes_no_turn(
    copying: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots.SlotTier, "inline_bytes", -1)
    loads = Loads(4)
    async with keep_threads(), trio.open_nursery() as nursery:
        for at in range(4):
            nursery.start_soon(loads.load, at)
            await trio.testing.wait_all_tasks_blocked()
        await wait_running(copying, 2)
        loads.scopes[2].cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert loads.scopes[2].cancelled_caught  # at once, while the others are still being copied
        copying.may.set()
    assert sorted(loads.done) == [0, 1, 3]
    assert loads.is_untouched(2)
    assert all(map(loads.arrived, loads.done))
    assert loads.tier.statistics().held_blocks == 0


async def test_a_load_that_is_cancelled_while_it_is_copied_gives_its_turn_back_when_the_copy_is_over(
    copying: Copying,
) -> None:
    loads = Loads(5)
    async with keep_threads(), trio.open_nursery() as nursery:
        for at in range(5):
            nursery.start_soon(loads.load, at)
        await wait_running(copying, 2)
        for scope in loads.scopes:
            scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert copying.running == 2
        copying.may.set()
    again = Loads(3)
    again.tier = loads.tier
    async with keep_threads(), trio.open_nursery() as nursery:
        for at in range(3):
            nursery.start_soon(again.load, at)
    assert all(map(again.arrived, range(3)))
    assert copying.most == 2


async def test_a_load_in_a_thread_is_copied_by_halves_where_nothing_is_copied_beside_it(
    copying: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots.SlotTier, "inline_bytes", -1)
    loads = Loads(1)
    copying.may.set()
    async with keep_threads():
        await loads.load(0)
    assert loads.arrived(0)
    assert (copying.halves, copying.most >= 1) == (1, True)


async def test_a_load_that_is_cancelled_between_two_portions_in_place_gives_its_turn_back(
    copying: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Loads(3)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(loads.load, 0)
        while loads.is_untouched(0):
            await trio.lowlevel.checkpoint()
        loads.scopes[0].cancel()
    assert not loads.arrived(0)
    monkeypatch.setattr(slots.SlotTier, "inline_bytes", -1)
    async with keep_threads(), trio.open_nursery() as nursery:
        for at in (1, 2):
            nursery.start_soon(loads.load, at)
        await wait_running(copying, 2)
        copying.may.set()
    assert sorted(loads.done) == [1, 2]
