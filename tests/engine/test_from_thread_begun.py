"""Lookups and loads that are begun: what an inference engine does while it computes.

Order comes from events, never from sleep."""

import asyncio
import logging
import select
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import trio

import offload
from backends.abc import Key, Unproven
from backends.base.slots import PagesDestination
from backends.testing import FakeTier, payload_of
from offload import NO_WAIT, PipelineConfig, PipelineFull, from_thread
from offload.from_thread import LoadFuture, LookupFuture, StoreFuture, _worker
from tests.support.held_by_process import no_descriptor_left

from .test_from_thread import (
    ROOM_FOR_EIGHT,
    SOON,
    SlowToLoad,
    at_rest,
    holding,
    in_forked_child,
    keys_of,
    places,
    slow_to_load,
    tiers,
)


class SlowToPin(FakeTier):
    """A lookup that a cancel ends, and that waits for its gate."""

    gate: trio.Event | None = None

    async def pin(self, keys):
        if self.gate is not None:
            await self.gate.wait()
        return await super().pin(keys)


class SlowToAnswer(SlowToPin):
    """Has pinned, and waits for its gate before it returns: no checkpoint lies behind it."""

    async def pin(self, keys):
        lease = await FakeTier.pin(self, keys)
        if self.gate is not None:
            await self.gate.wait()
        return lease


def slow_to_pin(n: int) -> tuple[FakeTier, SlowToPin, list[Key]]:
    host, _, keys = tiers(n)
    return host, SlowToPin(n), keys


def stored(engine: from_thread.Engine, host: FakeTier, keys: list[Key]) -> None:
    assert engine.store(host.weak(keys), precondition=NO_WAIT).result().status is offload.Status.COMPLETE


def closed_gate(tier: SlowToPin | SlowToLoad) -> trio.Event:
    gate = tier.gate = trio.Event()
    return gate


# --- the way of a block ---------------------------------------------------------------------------------------------


def test_a_begun_lookup_and_a_begun_load_bring_what_the_waiting_ones_bring():
    host, disk, keys = tiers(8)
    with from_thread.open_engine(host, [disk]) as engine:
        stored(engine, host, keys)
        found = engine.begin_lookup([*keys, b"unknown"])
        assert (found.keys, found.tenant) == ([*keys, b"unknown"], "")
        with found.result(SOON) as hit:
            assert (list(hit.keys), hit.runs, found.done()) == (keys, [("faketier", 8)], True)
            assert found.result(0) is hit
            buffers, destination = places(8)
            loading = engine.begin_load(hit, destination)
            assert (loading.hit, loading.destination) == (hit, destination)
            assert loading.result(SOON).loaded == 8
        assert [bytes(buffer) for buffer in buffers] == [payload_of(key, 64) for key in keys]
        assert "done" in repr(found) and "done" in repr(loading)
        at_rest(engine, host, disk)


def test_beginning_waits_for_nobody():
    host, disk, keys = tiers(8)
    with from_thread.open_engine(host, [disk]) as engine:
        stored(engine, host, keys)
        hit = engine.lookup(keys)
        with holding(engine):  # nobody could answer
            lookups = [engine.begin_lookup(keys) for _ in range(4)]
            loads = [engine.begin_load(hit, places(8)[1]) for _ in range(4)]
            assert not any(future.done() for future in [*lookups, *loads])
            assert "pending" in repr(lookups[0])
        for lookup in lookups:
            with lookup.result(SOON) as found:
                assert len(found) == 8
        assert [load.result(SOON).loaded for load in loads] == [8] * 4
        hit.release()
        at_rest(engine, host, disk)


def test_a_hit_may_be_released_as_soon_as_its_load_is_begun():
    host, disk, keys = slow_to_load(8)
    with from_thread.open_engine(host, [disk]) as engine:
        stored(engine, host, keys)
        for _ in range(20):  # trio runs the tasks of one tick in any order
            hit = engine.lookup(keys)
            with holding(engine):
                loading = engine.begin_load(hit, places(8)[1])
                hit.release()
            assert loading.result(SOON).loaded == 8
        with pytest.raises(ValueError, match="released"):
            engine.begin_load(hit, places(8)[1])
        at_rest(engine, host, disk)


@pytest.mark.parametrize("kind", ["numpy", "torch", "torch bfloat16"])
def test_arrays_and_tensors_are_destinations_alike(kind):
    torch = pytest.importorskip("torch")
    host, disk, keys = tiers(4)
    if kind == "numpy":
        rows = np.zeros((4, 16), dtype=np.float32)
        seen = lambda: [row.tobytes() for row in rows]  # noqa: E731
    else:
        rows = torch.zeros((4, 16)) if kind == "torch" else torch.zeros((4, 32), dtype=torch.bfloat16)
        seen = lambda: [bytes(row.view(torch.uint8).tolist()) for row in rows]  # noqa: E731
    with from_thread.open_engine(host, [disk]) as engine:
        stored(engine, host, keys)
        with engine.begin_lookup(keys).result(SOON) as hit:
            assert engine.begin_load(hit, PagesDestination.over(rows)).result(SOON).loaded == 4
        assert seen() == [payload_of(key, 64) for key in keys]


# --- polling --------------------------------------------------------------------------------------------------------


def test_poll_returns_each_begun_call_once_beside_the_stores():
    host, disk, keys = tiers(8)
    with from_thread.open_engine(host, [disk]) as engine:
        assert engine.poll() == []
        store = engine.store(host.weak(keys), precondition=NO_WAIT)
        store.result(SOON)
        lookup = engine.begin_lookup(keys)
        hit = lookup.result(SOON)
        load = engine.begin_load(hit, places(8)[1])
        load.result(SOON)
        failed = engine.begin_load(hit, places(4)[1])
        with pytest.raises(ValueError, match="do not fit"):
            failed.result(SOON)
        hit.release()
        polled = engine.poll()
        assert polled == [store, lookup, load, failed]
        assert [type(future) for future in polled] == [StoreFuture, LookupFuture, LoadFuture, LoadFuture]
        assert engine.poll() == []
        with engine.lookup(keys) as hit:  # its caller has the answer already
            engine.load(hit, places(8)[1])
        assert engine.poll() == []
        at_rest(engine, host, disk)


def test_the_descriptor_tells_of_a_begun_lookup_and_of_a_begun_load():
    host, disk, keys = tiers(8)
    with from_thread.open_engine(host, [disk]) as engine:
        stored(engine, host, keys)
        waiting = select.epoll()
        waiting.register(engine.fileno(), select.EPOLLIN)
        assert waiting.poll(0) == []
        lookup = engine.begin_lookup(keys)
        assert waiting.poll(SOON) and engine.poll() == [lookup]
        load = engine.begin_load(lookup.result(0), places(8)[1])
        assert waiting.poll(SOON) and engine.poll() == [load]
        lookup.result(0).release()
        waiting.close()


def test_a_dropped_store_is_polled_once_and_takes_no_room():
    host, disk, keys = tiers(16)
    narrow = PipelineConfig(budget_blocks=8, batch_config=offload.BatchConfig(max_batch_size=8))
    with from_thread.open_engine(host, [disk], config=narrow, when_full="drop") as engine:
        fileno = engine.fileno()
        with holding(engine):
            kept = engine.store(host.weak(keys[:8]), precondition=NO_WAIT)
            dropped = engine.store(host.weak(keys[8:]), precondition=NO_WAIT)
            assert dropped.dropped and select.select([fileno], [], [], 0)[0]
            assert engine.poll() == [dropped]
            token = from_thread.CancellationToken()
            token.request_cancel()
            cancelled = engine.store(host.weak(keys[8:]), precondition=NO_WAIT, cancel_token=token)
            assert engine.poll() == [cancelled] and engine.poll() == []
        kept.result(SOON)
        assert engine.poll() == [kept]
        assert engine.store(host.weak(keys[8:]), precondition=NO_WAIT).result().completed == tuple(keys[8:])
        engine.poll()
        at_rest(engine, host, disk)


def test_what_is_begun_and_never_looked_at_runs_into_a_bound(monkeypatch):
    monkeypatch.setattr(_worker, "MAX_CALLS", 4)
    host, disk, keys = tiers(8)
    with from_thread.open_engine(host, [disk]) as engine:
        engine.poll()
        for _ in range(4):
            engine.begin_lookup(keys).result(SOON)
        with pytest.raises(PipelineFull, match="poll them"):
            engine.begin_lookup(keys)
        engine.lookup(keys).release()  # a call that waits is bounded by its thread
        assert len(engine.poll()) == 4
        engine.begin_lookup(keys).result(SOON)


# --- callbacks ------------------------------------------------------------------------------------------------------


def test_a_callback_is_called_once_in_the_engines_thread_in_order():
    host, disk, keys = tiers(8)
    with from_thread.open_engine(host, [disk]) as engine:
        called: list[tuple[int, object, str]] = []
        with holding(engine):
            future = engine.begin_lookup(keys)
            for number in range(3):
                future.add_done_callback(
                    lambda it, number=number: called.append((number, it, threading.current_thread().name))
                )
            assert called == []
        future.result(SOON)
        engine.statistics()
        assert called == [(number, future, "offload engine") for number in range(3)]


def test_a_callback_added_late_is_called_at_once_in_the_callers_thread():
    host, disk, keys = tiers(8)
    with from_thread.open_engine(host, [disk]) as engine:
        store = engine.store(host.weak(keys), precondition=NO_WAIT)
        store.result(SOON)
        lookup = engine.begin_lookup(keys)
        hit = lookup.result(SOON)
        load = engine.begin_load(hit, places(8)[1])
        load.result(SOON)
        for future in (store, lookup, load):
            names: list[str] = []
            future.add_done_callback(lambda _, names=names: names.append(threading.current_thread().name))
            assert names == ["MainThread"]
        hit.release()


def test_what_a_callback_raises_is_logged_and_ends_nothing(caplog):
    host, disk, keys = tiers(8)
    with from_thread.open_engine(host, [disk]) as engine, caplog.at_level(logging.ERROR):
        called: list[object] = []
        with holding(engine):
            future = engine.store(host.weak(keys), precondition=NO_WAIT)
            future.add_done_callback(lambda _: 1 / 0)
            future.add_done_callback(called.append)
        assert future.result(SOON).status is offload.Status.COMPLETE
        future.add_done_callback(lambda _: 1 / 0)
        engine.statistics()
        assert called == [future]
    assert [record.name for record in caplog.records] == ["offload.from_thread"] * 2
    assert "ZeroDivisionError" in caplog.text


def test_a_callback_finds_its_future_among_the_news_and_may_begin_more():
    host, disk, keys = tiers(8)
    with from_thread.open_engine(host, [disk]) as engine:
        stored(engine, host, keys)
        engine.poll()
        loads: list[LoadFuture] = []
        found: list[object] = []
        loaded = threading.Event()

        def load(future: LookupFuture) -> None:
            found.extend(engine.poll())
            hit = future.result(0)
            loads.append(engine.begin_load(hit, places(8)[1]))
            loads[0].add_done_callback(lambda _: loaded.set())
            hit.release()

        with holding(engine):
            lookup = engine.begin_lookup(keys)
            lookup.add_done_callback(load)
        assert loaded.wait(SOON)
        assert found == [lookup] and loads[0].result(0).loaded == 8
        engine.poll()
        at_rest(engine, host, disk)


def test_a_begun_call_is_awaited_in_asyncio():
    host, disk, keys = tiers(8)

    async def step(engine: from_thread.Engine) -> int:
        with await engine.begin_lookup(keys) as hit:
            return (await engine.begin_load(hit, places(8)[1])).loaded

    with from_thread.open_engine(host, [disk]) as engine:
        stored(engine, host, keys)
        assert asyncio.run(step(engine)) == 8


# --- a lookup that is not wanted any more ---------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["in the mailbox", "while a tier is asked", "answered"])
def test_a_cancelled_lookup_lets_go_what_it_pinned(when):
    host, disk, keys = slow_to_pin(8)
    with from_thread.open_engine(host, [disk]) as engine:
        stored(engine, host, keys)
        if when == "in the mailbox":
            with holding(engine):
                future = engine.begin_lookup(keys)
                future.request_cancel()
        elif when == "while a tier is asked":
            gate = engine.call(closed_gate, disk)
            future = engine.begin_lookup(keys)
            engine.call(len, ())  # it has begun by then
            future.cancel(SOON)
            engine.call(gate.set)
        else:
            future = engine.begin_lookup(keys)
            assert len(future.result(SOON)) == 8
            future.cancel(SOON)
        if when != "answered":
            with pytest.raises(from_thread.CallCancelled):
                future.result(SOON)
        future.cancel(SOON)  # again
        at_rest(engine, host, disk)


def test_a_lookup_cancelled_in_the_step_of_its_answer_holds_nothing():
    host, _, keys = tiers(8)
    disk = SlowToAnswer(8)
    with from_thread.open_engine(host, [disk]) as engine:
        stored(engine, host, keys)
        gate = engine.call(closed_gate, disk)
        future = engine.begin_lookup(keys)
        engine.call(len, ())  # it has begun by then

        def answer_and_cancel() -> None:
            gate.set()
            future.request_cancel()
            future._cancel()  # before the task that has its answer runs

        engine.call(answer_and_cancel)
        with pytest.raises(from_thread.CallCancelled):
            future.result(SOON)
        at_rest(engine, host, disk)


def test_a_callback_cannot_end_the_thread(caplog):
    host, disk, keys = tiers(8)
    aborted = asyncio.new_event_loop().create_future()
    aborted.cancel()
    with from_thread.open_engine(host, [disk]) as engine:
        storing = engine.store(host.weak(keys), precondition=NO_WAIT)
        storing.add_done_callback(lambda future: aborted.result())  # raises CancelledError, a BaseException
        assert storing.result(SOON).status is offload.Status.COMPLETE
        with engine.lookup(keys) as hit:
            assert len(hit) == 8
        at_rest(engine, host, disk)
    assert "a callback of" in caplog.text
    aborted.get_loop().close()


def test_a_notifier_without_a_descriptor_costs_no_room():
    host, disk, keys = tiers(8)
    with from_thread.open_engine(host, [disk], config=ROOM_FOR_EIGHT) as engine:
        with no_descriptor_left(), pytest.raises(OSError, match="Too many open files"):
            engine.fileno()
        for _ in range(3):
            stored(engine, host, keys)
        at_rest(engine, host, disk)


def test_a_dropped_hit_is_released_where_warnings_are_errors():
    host, disk, keys = tiers(8)
    with from_thread.open_engine(host, [disk]) as engine:
        stored(engine, host, keys)
        hit = engine.lookup(keys)
        with warnings.catch_warnings():
            warnings.simplefilter("error", ResourceWarning)
            with pytest.raises(ResourceWarning, match="without being released"):
                hit.__del__()
        at_rest(engine, host, disk)


def test_a_lookup_out_of_its_time_is_ended_and_holds_nothing():
    host, disk, keys = slow_to_pin(8)
    with from_thread.open_engine(host, [disk]) as engine:
        stored(engine, host, keys)
        gate = engine.call(closed_gate, disk)
        with engine.begin_lookup(keys, timeout=1.0).result(SOON) as hit:
            assert len(hit) == 0 and list(hit.unavailable) == ["slowtopin"]  # the tier was silent: that is no miss
        engine.call(gate.set)
        with holding(engine):
            late = engine.begin_lookup(keys, timeout=0.0)
            with pytest.raises(from_thread.WaitTimeout):  # of the one who waits: the lookup goes on
                late.result(0.0)
        with late.result(SOON) as hit:
            assert "no time was left" in str(hit.unavailable["slowtopin"])
        at_rest(engine, host, disk)


def test_what_cannot_be_asked_for_says_so_at_once():
    host, disk, keys = tiers(8)
    with from_thread.open_engine(host, [disk]) as engine:
        with pytest.raises(TypeError):
            engine.begin_lookup(keys[0])
        with pytest.raises(ValueError, match="timeout"):
            engine.begin_lookup(keys, timeout=float("nan"))
        with pytest.raises(ValueError, match="at most 432"):
            engine.begin_lookup([bytes(5000)])
        at_rest(engine, host, disk)


# --- a load that is not wanted any more -----------------------------------------------------------------------------


def test_a_cancelled_load_is_done_when_its_copy_is_over():
    host, disk, keys = slow_to_load(8)
    with from_thread.open_engine(host, [disk]) as engine:
        stored(engine, host, keys)
        with engine.lookup(keys) as hit:
            gate = engine.call(closed_gate, disk)
            future = engine.begin_load(hit, places(8)[1])
            with pytest.raises(from_thread.WaitTimeout):
                future.cancel(timeout=0.02)
            assert not future.done()  # the tier copies still
            engine.call(gate.set)
            future.cancel(SOON)
            with pytest.raises(from_thread.CallCancelled):
                future.result(0)
        at_rest(engine, host, disk)


def test_a_load_cancelled_in_the_mailbox_writes_nothing():
    host, disk, keys = tiers(8)
    with from_thread.open_engine(host, [disk]) as engine:
        stored(engine, host, keys)
        buffers, destination = places(8)
        with engine.lookup(keys) as hit:
            with holding(engine):
                future = engine.begin_load(hit, destination)
                future.request_cancel()
            with pytest.raises(from_thread.CallCancelled):
                future.result(SOON)
        assert not any(any(buffer) for buffer in buffers)


@pytest.mark.parametrize("how", ["cancelled", "out of time"])
def test_a_load_without_an_end_says_that_its_destination_is_lost(how, monkeypatch):
    monkeypatch.setattr(_worker, "LEAVE_TIMEOUT", 0.05)
    host, disk, keys = slow_to_load(8)
    with from_thread.open_engine(host, [disk]) as engine:
        stored(engine, host, keys)
        with engine.lookup(keys) as hit:
            gate = engine.call(closed_gate, disk)
            future = engine.begin_load(hit, places(8)[1], timeout=0.02 if how == "out of time" else None)
            if how == "cancelled":
                with pytest.raises(offload.DrainUnproven):
                    future.cancel(SOON)
            with pytest.raises(offload.DrainUnproven, match="may still be written to"):
                future.result(SOON)
            engine.call(gate.set)
        at_rest(engine, host, disk)


def test_a_load_out_of_its_time_is_ended():
    host, disk, keys = tiers(8)

    class SlowAndCancellable(FakeTier):
        async def load(self, lease, destination):
            await trio.sleep_forever()

    disk = SlowAndCancellable(8)
    with from_thread.open_engine(host, [disk]) as engine:
        stored(engine, host, keys)
        with engine.lookup(keys) as hit, pytest.raises(from_thread.WaitTimeout, match="was ended"):
            engine.begin_load(hit, places(8)[1], timeout=0.02).result(SOON)
        at_rest(engine, host, disk)


def test_a_tier_that_cannot_prove_the_end_of_its_copy_is_told_of_in_one_word():
    host, _, keys = tiers(8)

    class Lost(FakeTier):
        async def load(self, lease, destination):
            raise Unproven("a thread hangs")

    with from_thread.open_engine(host, [Lost(8)]) as engine:
        stored(engine, host, keys)
        with engine.lookup(keys) as hit, pytest.raises(offload.DrainUnproven):
            engine.begin_load(hit, places(8)[1]).result(SOON)


# --- the engine's end -----------------------------------------------------------------------------------------------


def test_closing_ends_what_is_begun_and_lets_go_of_it():
    host, disk, keys = slow_to_pin(8)
    engine = from_thread.open_engine(host, [disk]).start()
    stored(engine, host, keys)
    answered = engine.begin_lookup(keys)
    hit = answered.result(SOON)
    engine.call(closed_gate, disk)
    asked = engine.begin_lookup(keys)
    called: list[object] = []
    asked.add_done_callback(called.append)
    engine.poll()
    engine.close()
    with pytest.raises(from_thread.EngineClosed):
        asked.result(0)
    assert called == [asked] and engine.poll() == [asked]
    assert disk.statistics().held_blocks == 0
    asked.request_cancel()  # harmless
    hit.release()
    for call in (lambda: engine.begin_lookup(keys), engine.poll):
        with pytest.raises(from_thread.EngineClosed):
            call()


def test_closing_waits_for_the_end_of_a_begun_load():
    host, disk, keys = slow_to_load(8)
    engine = from_thread.open_engine(host, [disk]).start()
    stored(engine, host, keys)
    hit = engine.lookup(keys)
    gate = engine.call(closed_gate, disk)
    future = engine.begin_load(hit, places(8)[1])
    engine.call(len, ())
    with pytest.raises(from_thread.WaitTimeout):
        engine.close(timeout=0.02)
    with pytest.raises(offload.DrainUnproven):  # as long as the thread has not ended, the destination may be written to
        future.result(0)
    engine._worker.mailbox.call(gate.set)
    engine.close()


def test_a_crash_ends_what_is_begun():
    host, disk, keys = slow_to_pin(8)
    engine = from_thread.open_engine(host, [disk]).start()
    stored(engine, host, keys)
    engine.call(closed_gate, disk)
    future = engine.begin_lookup(keys)

    class Crash(BaseException):
        pass

    def crash() -> None:
        raise Crash

    with pytest.raises(from_thread.EngineCrashed):
        engine.call(crash)
    with pytest.raises(from_thread.EngineCrashed):
        future.result(SOON)
    with pytest.raises(from_thread.EngineCrashed):
        engine.close()


def test_a_forked_child_is_refused_what_its_parent_has_begun():
    host, disk, keys = slow_to_pin(8)
    with from_thread.open_engine(host, [disk]) as engine:
        stored(engine, host, keys)
        answered = engine.begin_lookup(keys)
        hit = answered.result(SOON)
        gate = engine.call(closed_gate, disk)
        asked = engine.begin_lookup(keys)

        def check() -> None:
            for call in (
                lambda: engine.begin_lookup(keys),
                lambda: engine.begin_load(hit, places(8)[1]),
                lambda: asked.add_done_callback(print),
                asked.done,
                asked.result,
                asked.cancel,
            ):
                with pytest.raises(from_thread.EngineForked):
                    call()
            asked.request_cancel()
            assert answered.result(0) is hit

        in_forked_child(check)
        engine.call(gate.set)
        with asked.result(SOON) as again:
            assert len(again) == 8
        assert engine.begin_load(hit, places(8)[1]).result(SOON).loaded == 8
        hit.release()
        engine.poll()
        at_rest(engine, host, disk)


def test_many_threads_begin_and_cancel_and_each_end_is_polled_once():
    n, threads = 250, 4
    host, disk, keys = tiers(8)
    with from_thread.open_engine(host, [disk]) as engine:
        stored(engine, host, keys)
        engine.fileno()  # what ended before is no news
        begun: list[list[LookupFuture]] = [[] for _ in range(threads)]

        def begin(me: int) -> None:
            for number in range(n):
                future = engine.begin_lookup(keys[: 1 + number % 8])
                begun[me].append(future)
                if number % 3 == 0:
                    future.request_cancel()

        polled: list[object] = []
        with ThreadPoolExecutor(threads) as pool:
            beginning = [pool.submit(begin, me) for me in range(threads)]
            while len(polled) < threads * n:
                assert select.select([engine.fileno()], [], [], SOON)[0]
                polled += engine.poll()
            for each in beginning:
                each.result(SOON)
        assert len(set(polled)) == threads * n
        for future in [future for mine in begun for future in mine]:
            future.request_cancel()
        assert keys_of(0)[0] in keys
        engine.delete([b"unknown"])  # behind all releases
        at_rest(engine, host, disk)
