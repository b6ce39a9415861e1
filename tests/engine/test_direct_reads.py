"""Lookups and loads that the calling thread makes itself, in memory, while the engine's thread waits for I/O."""

from __future__ import annotations

import select
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from backends.abc import Key
from backends.file import FileTier
from backends.memory import MemoryTier
from backends.slots import PagesDestination
from maru.eviction import LRU
from offload import NO_WAIT, PipelineConfig, block_key, from_thread
from offload._engine.direct import DirectLoad
from offload.from_thread import EngineClosed, WaitTimeout, _resting
from offload.from_thread._worker import EngineWorker
from tests.support.maru_processes import eventually

SIZE = 64
SOON = 60.0


def keys_of(n: int, start: int = 0) -> list[Key]:
    return [block_key(b"%d" % number) for number in range(start, start + n)]


def payload(key: Key) -> bytes:
    return (key * SIZE)[:SIZE]


def places(n: int) -> tuple[list[bytearray], PagesDestination]:
    buffers = [bytearray(SIZE) for _ in range(n)]
    return buffers, PagesDestination.over(buffers)


def memory(blocks: int, **more: Any) -> MemoryTier:
    return MemoryTier(SIZE * blocks, SIZE, **more)


@contextmanager
def engine_of(keys: Sequence[Key], tiers: dict[str, Any], **more: Any) -> Iterator[from_thread.Engine]:
    """An engine over these tiers, into which these keys were stored."""
    source = memory(len(keys))
    for key in keys:
        source.put(key, payload(key))
    with from_thread.open_engine(source, tiers, **more) as engine:
        engine.store(source.weak(keys), precondition=NO_WAIT).result(SOON)
        engine.drain(SOON)
        yield engine


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the engine's thread comes to rest late. Where it does not rest at all, a test says so itself."""
    monkeypatch.setattr(_resting, "LONGEST_WAIT", SOON)


@contextmanager
def no_message() -> Iterator[None]:
    def begin(self: EngineWorker, call: object, **more: object) -> None:
        raise AssertionError(f"{call!r} was sent to the engine's thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineWorker, "begin", begin)
        yield


@contextmanager
def at_work(engine: from_thread.Engine) -> Iterator[None]:
    """The engine's thread does not rest."""
    began, go_on = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        assert go_on.wait(SOON)

    thread = threading.Thread(target=engine.call, args=(work,))
    thread.start()
    try:
        assert began.wait(SOON)
        yield
    finally:
        go_on.set()
        thread.join(SOON)


def is_at_rest(engine: from_thread.Engine, host: MemoryTier) -> bool:
    statistics = engine.statistics()
    return statistics.unreleased_hits == statistics.engine.open_hits == host.statistics().held_blocks == 0


def load_all(engine: from_thread.Engine, keys: Sequence[Key]) -> list[bytes]:
    buffers, destination = places(len(keys))
    with engine.lookup(keys) as hit:
        loaded = engine.load(hit, destination).loaded
    return [bytes(buffer) for buffer in buffers[:loaded]]


# --- which way a read goes --------------------------------------------------------------------------------------------


def test_what_is_in_memory_is_found_and_loaded_without_a_message() -> None:
    keys, host = keys_of(8), memory(8)
    with engine_of(keys, {"host": host}) as engine:
        with no_message():
            assert load_all(engine, keys) == [payload(key) for key in keys]
        assert is_at_rest(engine, host)


def test_what_is_begun_is_done_on_return_and_polled_as_any_other() -> None:
    keys, host = keys_of(8), memory(8)
    with engine_of(keys, {"host": host}) as engine, no_message():
        ready = engine.fileno()
        buffers, destination = places(8)
        lookup = engine.begin_lookup(keys)
        assert lookup.done()
        load = engine.begin_load(lookup.result(), destination)
        assert load.done()
        assert load.result().loaded == 8
        assert buffers == [payload(key) for key in keys]
        assert select.select([ready], [], [], SOON)[0] == [ready]
        assert engine.poll() == [lookup, load]
        lookup.cancel()  # lets go of what it found
    assert host.statistics().held_blocks == 0


def test_it_is_counted_as_any_other_read() -> None:
    keys, host = keys_of(8), memory(8)
    with engine_of(keys, {"host": host}) as engine:
        load_all(engine, [*keys, *keys_of(1, start=99)])
        found = engine.statistics().engine
        assert (found.lookups, found.asked_blocks, found.hit_blocks, found.loads, found.loaded_blocks) == (
            1,
            9,
            8,
            1,
            8,
        )
        assert found.tiers["host"].loaded == 8


def test_while_the_thread_is_at_work_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_resting, "LONGEST_WAIT", 0)
    keys, host = keys_of(2), memory(2)
    with engine_of(keys, {"host": host}) as engine, at_work(engine), pytest.raises(WaitTimeout):
        engine.lookup(keys, timeout=0.01)


def test_what_a_slower_tier_may_have_is_asked_for(tmp_path: Path) -> None:
    keys = keys_of(8)
    host = memory(8)
    tiers = {"host": host, "disk": FileTier(tmp_path, 8 * (SIZE + 4096), block_bytes=SIZE)}
    with engine_of(keys, tiers) as engine:
        engine.call(host.pool.delete, keys[4:])
        assert load_all(engine, keys) == [payload(key) for key in keys]


def test_a_damaged_block_is_found_forgotten_and_looked_for_elsewhere(tmp_path: Path) -> None:
    keys, host = keys_of(4), memory(4)
    tiers = {"host": host, "disk": FileTier(tmp_path, 8 * (SIZE + 4096), block_bytes=SIZE)}
    with engine_of(keys, tiers, on_load_failure="retry", promote=False) as engine:
        engine.call(flip_a_bit, host, keys[2])
        assert load_all(engine, keys) == [payload(key) for key in keys]
        assert engine.statistics().engine.tiers["host"].missed["damaged"] == 1
        assert engine.call(host.contains_nowait, keys) == {keys[0], keys[1], keys[3]}


def flip_a_bit(host: MemoryTier, key: Key) -> None:
    slot = host.pool.slots([key])
    view = host.views(slot)
    assert view is not None
    view[0][0] ^= 1


# --- what it holds ----------------------------------------------------------------------------------------------------


def test_a_hit_holds_its_blocks_until_it_is_released() -> None:
    keys, host = keys_of(4), memory(4, eviction=LRU())
    with engine_of(keys, {"host": host}) as engine:
        hit = engine.lookup(keys[:2])
        for key in keys_of(2, start=10):
            engine.call(host.put, key, payload(key))
        assert engine.call(host.contains_nowait, keys) == {*keys[:2]}
        hit.release()
        for key in keys_of(4, start=20):
            engine.call(host.put, key, payload(key))
        assert engine.call(host.contains_nowait, keys) == set()


def test_a_release_never_overtakes_a_load_that_was_begun_before() -> None:
    keys = keys_of(4)
    with engine_of(keys, {"host": memory(8)}) as engine:
        for _ in range(300):
            _, destination = places(4)
            with engine.lookup(keys) as hit:
                load = engine.begin_load(hit, destination)
            assert load.result(SOON).loaded == 4


def test_a_release_wakes_a_store_that_waits_for_its_room() -> None:
    keys, host, source = keys_of(8), memory(4), memory(8)
    for key in keys:
        source.put(key, payload(key))
    evicting = PipelineConfig(on_destination_full="evict")
    with from_thread.open_engine(source, {"host": host}, config=evicting) as engine:
        engine.store(source.weak(keys[:4]), precondition=NO_WAIT).result(SOON)
        hit = engine.lookup(keys[:4])
        waiting = engine.store(source.weak(keys[4:]), precondition=NO_WAIT)
        assert eventually(lambda: engine.call(lambda: host.is_waited_for))
        hit.release()
        waiting.result(SOON)
        assert load_all(engine, keys[4:]) == [payload(key) for key in keys[4:]]


def test_readers_that_leave_much_wake_the_thread() -> None:
    keys, host = keys_of(1), memory(1)
    with engine_of(keys, {"host": host}) as engine:
        for _ in range(2 * _resting.MOST_LEFT):
            engine.lookup(keys).release()
        assert eventually(lambda: len(engine._worker.reads.resting._left) < _resting.MOST_LEFT)


@pytest.fixture
def held_copy(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """A copy in the calling thread tells that it has copied, and ends when it may."""
    copied, go_on = threading.Event(), threading.Event()
    copy = DirectLoad.copy

    def slow(self: DirectLoad) -> Any:
        result = copy(self)
        copied.set()
        assert go_on.wait(SOON)
        return result

    monkeypatch.setattr(DirectLoad, "copy", slow)
    return copied, go_on


def test_a_hit_that_is_released_during_a_load_is_held_to_its_end(held_copy: Any) -> None:
    copied, go_on = held_copy
    keys, host = keys_of(4), memory(4)
    with engine_of(keys, {"host": host}) as engine:
        hit, results = engine.lookup(keys), list[Any]()
        loading = threading.Thread(target=lambda: results.append(engine.load(hit, places(4)[1])))
        loading.start()
        assert copied.wait(SOON)
        hit.release()
        assert engine.statistics().unreleased_hits == 1
        go_on.set()
        loading.join(SOON)
        assert results[0].loaded == 4
        assert is_at_rest(engine, host)


def test_a_load_that_an_end_of_the_engine_overtakes_brings_nothing(held_copy: Any) -> None:
    copied, go_on = held_copy
    keys = keys_of(4)
    errors: list[BaseException] = []

    def load() -> None:
        try:
            engine.load(hit, places(4)[1])
        except BaseException as error:
            errors.append(error)

    with engine_of(keys, {"host": memory(4)}) as engine:
        hit = engine.lookup(keys)
        loading = threading.Thread(target=load)
        loading.start()
        assert copied.wait(SOON)
    go_on.set()
    loading.join(SOON)
    assert [type(error) for error in errors] == [EngineClosed]


# --- interrupted ------------------------------------------------------------------------------------------------------


class Struck(BaseException):
    """What a signal's handler raises, as that of SIGINT does."""


def _strike(*_: object) -> None:
    raise Struck


@contextmanager
def handled() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _strike)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


def is_struck(function: Callable[[], object], after: float) -> bool:
    """Call a function; whether a signal came before it had returned."""
    try:
        signal.setitimer(signal.ITIMER_REAL, after)
        try:
            function()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Struck:
        return True
    return False


@pytest.mark.parametrize("what", ["lookup", "load", "release"])
@pytest.mark.filterwarnings("ignore:.*dropped without being released:ResourceWarning")
def test_a_signal_at_any_moment_leaves_all_whole(what: str) -> None:
    """Each time nothing is held behind it, and the next read works."""
    random = Random(what)
    keys, host = keys_of(3), memory(3)
    stored = [payload(key) for key in keys]
    with engine_of(keys, {"host": host}) as engine, handled():
        _, destination = places(3)
        found: list[from_thread.Hit] = []

        def prepare() -> Callable[[], object]:
            if what == "lookup":
                return lambda: found.append(engine.lookup(keys))
            hit = engine.lookup(keys)
            return hit.release if what == "release" else lambda: engine.load(hit, destination)

        struck = 0
        for turn in range(600):
            struck += is_struck(prepare(), after=random.uniform(1e-6, 40e-6))
            found.clear()
            assert is_at_rest(engine, host), f"after {turn} turns"
            assert load_all(engine, keys) == stored
        assert struck > 10


# --- against a writer -------------------------------------------------------------------------------------------------


def read_while_blocks_change(seed: int, reads: int) -> int:
    """Threads read while others store more than there is room for; how many blocks were read, all of which were right."""
    room, names = 16, keys_of(48)
    source, host = memory(len(names)), memory(room, checksums=False)  # no checksum hides what is read wrong
    for key in names:
        source.put(key, payload(key))
    wrong: list[Key] = []
    read = [0, 0]
    evicting = PipelineConfig(on_destination_full="evict")
    with from_thread.open_engine(source, {"host": host}, config=evicting) as engine:

        def write(random: Random) -> None:
            for _ in range(reads):
                start = random.randrange(len(names) - 4)
                engine.store(source.weak(names[start : start + 4]), precondition=NO_WAIT).result(SOON)

        def look(reader: int, random: Random) -> None:
            buffers, destination = places(8)
            for _ in range(reads):
                start = random.randrange(len(names) - 8)
                with engine.lookup(names[start : start + 8]) as hit:
                    loaded = engine.load(hit, destination).loaded
                    wrong.extend(key for key, got in zip(hit.keys[:loaded], buffers) if got != payload(key))  # noqa: B905
                read[reader] += loaded

        generators = [Random(f"{seed}/{n}") for n in range(3)]
        threads = [
            threading.Thread(target=write, args=(generators[0],)),
            *[threading.Thread(target=look, args=(n, generators[n + 1])) for n in range(2)],
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
        assert is_at_rest(engine, host)
    assert not wrong
    return sum(read)


def test_blocks_that_are_read_while_others_are_written_are_right() -> None:
    assert read_while_blocks_change(seed=1, reads=200) > 0


def test_hits_that_hold_nothing_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a lookup in the calling thread pins nothing."""
    prepare = MemoryTier.prepare_pin

    def holds_nothing(self: MemoryTier, keys: Sequence[Key]) -> Any:
        lease, _ = prepare(self, keys)
        return lease, lambda: None

    monkeypatch.setattr(MemoryTier, "prepare_pin", holds_nothing)
    keys, host = keys_of(4), memory(4)
    with engine_of(keys, {"host": host}) as engine:
        hit = engine.lookup(keys)
        for key in keys_of(4, start=10):
            engine.call(host.put, key, payload(key))
        buffers, destination = places(4)
        engine.load(hit, destination)
        assert buffers != [payload(key) for key in keys]
        hit.release()
