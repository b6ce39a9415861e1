"""Lookups and loads that the calling thread makes itself, over memory and files, without the engine's thread."""

from __future__ import annotations

import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import attrs
import pytest

from backends.abc import Failed, Key
from backends.base.blockfile import Directory
from backends.base.blocks import BlockPool
from backends.base.pooled import PooledTier
from backends.base.slots import PagesDestination
from backends.file import FileTier
from backends.memory import MemoryTier
from maru.eviction import LRU
from offload import NO_WAIT, BreakerConfig, PipelineConfig, TierUnavailable, block_key, from_thread
from offload._engine.direct import DirectLoad, DirectReads
from offload._health.breaker import Call, HealthState, Verdict
from offload.from_thread import EngineClosed, _mailbox
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


def is_at_rest(engine: from_thread.Engine, *tiers: PooledTier[Any]) -> bool:
    statistics = engine.statistics()
    held = sum(engine.call(tier.statistics).held_blocks for tier in tiers)
    return statistics.unreleased_hits == statistics.engine.open_hits == held == 0


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


def test_a_lookup_and_a_load_do_not_wait_for_the_engines_thread() -> None:
    keys, host = keys_of(2), memory(2)
    with engine_of(keys, {"host": host}) as engine, at_work(engine), no_message():
        assert load_all(engine, keys) == [payload(key) for key in keys]


def disk_of(path: Path, blocks: int, **more: Any) -> FileTier:
    return FileTier(path, blocks * (SIZE + 4096), block_bytes=SIZE, **more)


def test_a_prefix_over_memory_and_files_is_found_and_loaded_without_a_message(tmp_path: Path) -> None:
    keys, host, disk = keys_of(8), memory(8), disk_of(tmp_path, 8)
    with engine_of(keys, {"host": host, "disk": disk}) as engine:
        engine.call(host.pool.delete, [*keys[2:4], *keys[6:]])
        with at_work(engine), no_message():
            buffers, destination = places(8)
            with engine.lookup(keys) as hit:
                assert hit.runs == [("host", 2), ("disk", 2), ("host", 2), ("disk", 2)]
                assert engine.load(hit, destination).loaded == 8
        assert buffers == [payload(key) for key in keys]
        found = engine.statistics().engine
        assert (found.hit_blocks, found.loaded_blocks) == (8, 8)
        assert (found.tiers["host"].loaded, found.tiers["disk"].loaded) == (4, 4)
        assert is_at_rest(engine, host, disk)


def test_what_is_begun_reads_no_file_in_the_calling_thread(tmp_path: Path) -> None:
    keys, disk = keys_of(4), disk_of(tmp_path, 4)
    with engine_of(keys, {"disk": disk}) as engine:
        with at_work(engine):
            hit = engine.lookup(keys)
            load = engine.begin_load(hit, places(4)[1])
            hit.release()
            assert not load.done()
        assert load.result(SOON).loaded == 4


def test_what_a_thread_loads_from_a_slower_tier_is_promoted(tmp_path: Path) -> None:
    keys, host, disk = keys_of(4), memory(8), disk_of(tmp_path, 4)
    with engine_of(keys, {"host": host, "disk": disk}, promote=True) as engine:
        engine.call(host.pool.delete, keys[1:])
        with no_message():
            assert load_all(engine, keys) == [payload(key) for key in keys]
        engine.drain(SOON)
        assert engine.call(host.contains_nowait, keys) == {*keys}
        assert engine.statistics().engine.promoted_blocks == 3


def test_a_file_that_is_not_what_was_stored_is_found_forgotten_and_missed(tmp_path: Path) -> None:
    keys, disk = keys_of(4), disk_of(tmp_path, 4)
    with engine_of(keys, {"disk": disk}) as engine:
        damaged = next(tmp_path.glob(f"*/{keys[2].hex()}.*"))
        data = bytearray(damaged.read_bytes())
        data[-1] ^= 1
        damaged.write_bytes(data)
        assert load_all(engine, keys) == [payload(key) for key in keys[:2]]
        found = engine.statistics().engine
        assert found.tiers["disk"].missed["damaged"] == 1
        assert (found.loads, found.loaded_blocks) == (1, 2)
        assert engine.call(disk.contains_nowait, keys) == {keys[0], keys[1], keys[3]}


def test_a_tier_whose_breaker_is_open_is_left_out_and_named_and_probed_by_its_own_thread(tmp_path: Path) -> None:
    keys, host, disk = keys_of(4), memory(4), disk_of(tmp_path, 4)
    patient = BreakerConfig(max_faults=1, first_wait=SOON, longest_wait=2 * SOON)
    with engine_of(keys, {"host": host, "disk": disk}, breaker=patient) as engine:
        engine.call(host.pool.delete, keys[2:])
        runner = engine._worker.engine._breaker_tiers["disk"]._runner
        engine.call(runner.release, runner.breaker.generation, Call.LOAD, Verdict.FAULT, "planted")
        with at_work(engine), no_message(), engine.lookup(keys) as hit:
            assert hit.keys == keys[:2]
            assert isinstance(hit.unavailable["disk"], TierUnavailable)
        assert engine.statistics().engine.lookup_failures == {"disk": 1}
        engine.call(setattr, runner.breaker, "_until", 0.0)  # a probe is due
        assert load_all(engine, keys) == [payload(key) for key in keys]
        assert engine.statistics().engine.health["disk"].state is HealthState.CLOSED


def test_a_hit_whose_tier_breaks_is_loaded_by_the_engines_thread(tmp_path: Path) -> None:
    keys, disk = keys_of(4), disk_of(tmp_path, 4)
    patient = BreakerConfig(max_faults=1, first_wait=SOON, longest_wait=2 * SOON)
    with engine_of(keys, {"disk": disk}, breaker=patient) as engine, engine.lookup(keys) as hit:
        runner = engine._worker.engine._breaker_tiers["disk"]._runner
        engine.call(runner.release, runner.breaker.generation, Call.LOAD, Verdict.FAULT, "planted")
        result = engine.load(hit, places(4)[1])
        assert result.loaded == 0
        assert isinstance(result.outcomes[0], Failed)
        assert isinstance(result.outcomes[0].error, TierUnavailable)


def test_a_read_of_files_that_takes_too_long_is_ended_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, disk = keys_of(4), disk_of(tmp_path, 4)
    read, reads = Directory.read, []
    deadline = time.monotonic() + 0.5

    def slow(self: Directory, *args: Any) -> None:
        reads.append(args)
        time.sleep(max(0.0, deadline + 0.01 - time.monotonic()))
        read(self, *args)

    with engine_of(keys, {"disk": disk}) as engine, engine.lookup(keys) as hit:
        monkeypatch.setattr(Directory, "read", slow)
        assert not disk.load_from_thread(hit.pinned._segments[0].lease.bare, places(4)[1].views(), deadline)
        assert len(reads) == 1  # one block, and no other


def test_stores_yield_to_a_load_of_files_in_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, disk = keys_of(4), disk_of(tmp_path, 4)
    reading, go_on = threading.Event(), threading.Event()
    read = Directory.read

    def slow(self: Directory, *args: Any) -> None:
        reading.set()
        assert go_on.wait(SOON)
        read(self, *args)

    with engine_of(keys, {"disk": disk}) as engine, engine.lookup(keys) as hit:
        monkeypatch.setattr(Directory, "read", slow)
        loading = threading.Thread(target=engine.load, args=(hit, places(4)[1]))
        loading.start()
        assert reading.wait(SOON)
        priority = engine._worker.engine._load_priority
        assert not priority.is_clear and priority.statistics().loads == 1
        go_on.set()
        loading.join(SOON)
        assert priority.is_clear


def test_the_tenant_of_a_hit_goes_with_it(tmp_path: Path) -> None:
    """What a tier behind needs to know is told it by the engine's thread, before any load that asks it."""
    keys, host, carried = keys_of(4), memory(4), list[tuple[Sequence[Key], str, str]]()

    class Tenants(MemoryTier):
        capabilities = attrs.evolve(MemoryTier.capabilities, needs_tenants=True)

        def carry(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
            carried.append((keys, tenant, "begun"))
            return lambda: carried.append((keys, tenant, "over"))

    with engine_of(keys, {"host": host, "shared": Tenants(SIZE * 4, SIZE)}) as engine:
        carried.clear()
        with no_message():
            engine.lookup(keys, tenant="mine").release()
        engine.statistics()
    assert carried == [(keys, "mine", "begun"), (keys, "mine", "over")]


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
        for _ in range(2 * _mailbox.MOST_LEFT):
            engine.lookup(keys).release()
        assert eventually(lambda: len(engine._worker.mailbox.urgent) < _mailbox.MOST_LEFT)
        assert eventually(lambda: len(host.pool._thread_pins.pinned) < _mailbox.MOST_LEFT)


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
            signal.pthread_kill(threading.get_ident(), 0)  # handles it here, if it has come and is not handled yet
    except Struck:
        return True
    return False


@pytest.mark.parametrize("where", ["memory", "files"])
@pytest.mark.parametrize("what", ["lookup", "load", "release"])
@pytest.mark.filterwarnings("ignore:.*dropped without being released:ResourceWarning")
def test_a_signal_at_any_moment_leaves_all_whole(what: str, where: str, tmp_path: Path) -> None:
    """Each time nothing is held behind it, and the next read works."""
    random = Random(what)
    keys = keys_of(3)
    host = memory(3) if where == "memory" else disk_of(tmp_path, 3)
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
    closes_whole(host)


def closes_whole(host: MemoryTier | FileTier) -> None:
    """No reader keeps the directory of files open that is none any more."""
    if isinstance(host, FileTier):
        directory = host._open
        host.close()
        assert directory is not None
        assert directory.root == -1


@contextmanager
def unraisable_ignored() -> Iterator[None]:
    before, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = before


class StrikeAt:
    """Raises as a signal does, at the nth place where Python handles one: a function begins, or one in C is over."""

    def __init__(self, place: int) -> None:
        self.left, self.struck = place, False

    def __call__(self, frame: Any, event: str, argument: object) -> None:
        if event in ("call", "c_return") and not self.struck:
            self.left -= 1
            if self.left < 0:
                self.struck = True
                raise Struck


@pytest.mark.parametrize("where", ["memory", "files"])
@pytest.mark.parametrize("what", ["lookup", "load", "release"])
@pytest.mark.filterwarnings("ignore:.*dropped without being released:ResourceWarning")
def test_a_signal_at_each_place_where_one_is_handled_leaves_all_whole(what: str, where: str, tmp_path: Path) -> None:
    keys = keys_of(3)
    host = memory(3) if where == "memory" else disk_of(tmp_path, 3)
    stored = [payload(key) for key in keys]
    with engine_of(keys, {"host": host}) as engine:
        _, destination = places(3)

        def act(strike: StrikeAt) -> None:
            hit = engine.lookup(keys) if what != "lookup" else None
            sys.setprofile(strike)
            try:
                if hit is None:
                    hit = engine.lookup(keys)  # which is dropped behind this, as all of them
                elif what == "load":
                    engine.load(hit, destination)
                else:
                    hit.release()
            except Struck:
                pass
            finally:
                sys.setprofile(None)

        for place in range(1_000):
            strike = StrikeAt(place)
            act(strike)
            assert is_at_rest(engine, host), f"at place {place}"
            if not strike.struck:
                break
        assert 10 < place < 999
        assert load_all(engine, keys) == stored
    closes_whole(host)


def test_a_signal_while_a_hit_is_dropped_leaves_all_whole() -> None:
    """At each place but the first one, which is before the first instruction of ``__del__``."""
    keys, host = keys_of(3), memory(3)
    with engine_of(keys, {"host": host}) as engine, warnings.catch_warnings(), unraisable_ignored():
        warnings.simplefilter("ignore", ResourceWarning)
        for place in range(1, 1_000):
            hit = engine.lookup(keys)
            strike = StrikeAt(place)
            sys.setprofile(strike)
            del hit
            sys.setprofile(None)
            assert is_at_rest(engine, host), f"at place {place}"
            if not strike.struck:
                break
        assert 5 < place < 999


# --- against the end of the engine ------------------------------------------------------------------------------------


def test_a_hit_that_is_found_while_the_engine_ends_holds_nothing_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread has pinned, and the engine ends before it notes the hit."""
    keys, host = keys_of(4), memory(4)
    pinned, go_on = threading.Event(), threading.Event()
    find = DirectReads.find

    def slow(self: DirectReads, *args: Any) -> Any:
        found = find(self, *args)
        pinned.set()
        assert go_on.wait(SOON)
        return found

    errors: list[BaseException] = []

    def look() -> None:
        try:
            engine.lookup(keys)
        except BaseException as error:
            errors.append(error)

    with engine_of(keys, {"host": host}) as engine:
        monkeypatch.setattr(DirectReads, "find", slow)
        looking = threading.Thread(target=look)
        looking.start()
        assert pinned.wait(SOON)
    go_on.set()
    looking.join(SOON)
    assert [type(error) for error in errors] == [EngineClosed]
    errors.clear()  # their tracebacks hold what was local
    assert host.statistics().held_blocks == 0


def test_a_hit_that_outlives_its_engine_holds_nothing() -> None:
    keys, host = keys_of(4), memory(4)
    with engine_of(keys, {"host": host}) as engine:
        hit = engine.lookup(keys)
    assert host.statistics().held_blocks == 0
    hit.release()
    assert host.statistics().held_blocks == 0


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
    monkeypatch.setattr(BlockPool, "_hold_pinned", lambda self: self._thread_pins.pinned.clear())
    keys, host = keys_of(4), memory(4)
    with engine_of(keys, {"host": host}) as engine:
        hit = engine.lookup(keys)
        for key in keys_of(4, start=10):
            engine.call(host.put, key, payload(key))
        buffers, destination = places(4)
        engine.load(hit, destination)
        assert buffers != [payload(key) for key in keys]
        hit.release()
