"""Copies between a device and pages, over a driver in Python: which they are, when they are made, and when they are over."""

import ctypes
import gc
import itertools
import os
import random
import signal
import sys
import threading
import time
import weakref
from contextlib import contextmanager
from functools import partial

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import BackendError, Unproven
from backends.base.block_layout import Plane, TensorMemory, as_one_run
from backends.base.copier import BlockPieces, Copier, DeviceLost, Pieces, close_copiers, copier_of
from backends.base.pages import new_pages
from backends.device import DeviceTier
from maru.base.memory import pinning
from maru.base.memory.cuda import CudaError
from maru.fake_cuda import FakeCuda, every_order, use

N, LAYERS, RUN = 6, 4, 64
"""Blocks, layers with keys and values, and bytes of each piece."""
DEPTH = 7
"""Choices of each walk through the orders of streams."""


class Device:
    """A KV cache in the memory of a fake device, and registered pages beside it."""

    def __init__(self, fake, driver, *, registered=True):
        self.fake, self.driver = fake, driver
        driver.attach(0)
        self.block_bytes = LAYERS * 2 * RUN
        self.cache = driver.allocate(N * self.block_bytes)
        self.tensors = [
            TensorMemory(self.cache + at * 2 * N * RUN, (2, N, RUN), (N * RUN, RUN, 1), 1, "uint8", 0, None)
            for at in range(LAYERS)
        ]
        self.pages = new_pages(N, self.block_bytes)
        self.address = self.pages.addresses[0]
        if registered:
            driver.register(self.address, N * self.block_bytes)
        self.spans = [(one.address, one.address + one.nbytes) for one in fake.registered.values()]
        self.copier = Copier(driver, 0, lambda address, nbytes: self.spans)
        self.tier = DeviceTier(self.tensors, block_axis=1)
        self.pieces = self.tier._storage._pieces

    def compute_stream(self):
        """A stream of the engine, whose work is done later than that of the copier if nothing has it wait."""
        for copy in (self.copier.store, self.copier.load):
            copy(self.pieces.of([N - 1], self.pages.part(N - 1, N)))
        return self.driver.stream()

    def block(self, number):
        parts = range(2 * LAYERS)
        return b"".join(self.fake.read(self.cache + (part * N + number) * RUN, RUN) for part in parts)

    def write(self, number, byte):
        for part in range(2 * LAYERS):
            self.fake.write(self.cache + (part * N + number) * RUN, bytes([byte]) * RUN)


@contextmanager
def device(registered=True, **knobs):
    fake = FakeCuda(**knobs)
    with use(fake) as driver:
        there = Device(fake, driver, registered=registered)
        try:
            yield there
        finally:
            there.copier.close()
            close_copiers()
    assert not fake.wrong


# --- which copies: pure -----------------------------------------------------------------------------------------------


def pieces(*rows):
    return Pieces(*(numpy.array(column, numpy.uint64) for column in zip(*rows, strict=True)))


def rows(found):
    return list(zip(found.device.tolist(), found.host.tolist(), found.sizes.tolist(), strict=True))


def test_neighbours_on_both_sides_are_one_copy():
    assert rows(pieces((0, 100, 8), (8, 108, 8), (16, 116, 4)).joined()) == [(0, 100, 20)]
    assert len(pieces((0, 100, 8), (8, 200, 8)).joined()) == 2
    assert len(pieces((0, 100, 8), (50, 108, 8)).joined()) == 2


@given(st.data())
def test_pieces_are_cut_at_the_borders_of_registrations_and_lose_no_byte(data):
    draw = data.draw
    edges = sorted(draw(st.sets(st.integers(0, 200), min_size=2, max_size=10)))
    spans = [pair for pair in itertools.pairwise(edges) if draw(st.booleans())]
    drawn = draw(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 60)), min_size=1, max_size=6))
    whole = pieces(*((1000 * at + host, host, size) for at, (host, size) in enumerate(drawn)))
    inside, others = whole.split(spans)

    def covered(part):
        return sorted((device + at, host + at) for device, host, size in rows(part) for at in range(size))

    assert sorted(covered(inside) + covered(others)) == covered(whole)
    for _, host, size in rows(inside):
        assert any(start <= host and host + size <= stop for start, stop in spans)
    for _, host, size in rows(others):
        assert not any(start < host + size and host < stop for start, stop in spans)


def test_portions_are_no_larger_than_the_buffer_and_lose_no_byte():
    portions = [rows(portion) for portion in pieces((0, 100, 30), (50, 300, 3)).portions(8)]
    assert all(sum(size for _, _, size in portion) <= 8 for portion in portions)
    assert [row for portion in portions for row in portion] == [
        (0, 100, 8), (8, 108, 8), (16, 116, 8), (24, 124, 6), (50, 300, 2), (52, 302, 1),
    ]  # fmt: skip


# --- bytes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("version", [12080, 12000])
def test_blocks_arrive_as_they_were(registered, version):
    with device(registered, version=version) as there:
        for number in range(N):
            there.write(number, 10 + number)
        there.copier.store(there.pieces.of([4, 0, 5], there.pages.part(0, 3)))
        assert [bytes(page) for page in there.pages.part(0, 3)] == [there.block(number) for number in (4, 0, 5)]
        there.copier.load(there.pieces.of([1, 2, 3], there.pages.part(0, 3)))
        assert [there.block(number) for number in (1, 2, 3)] == [bytes(page) for page in there.pages.part(0, 3)]


def test_a_store_of_many_blocks_is_one_batch_one_event_and_one_synchronization():
    with device() as there:
        there.copier.store(there.pieces.of([0], there.pages.part(0, 1)))  # makes the stream and the event
        before = len(there.fake.calls)
        there.copier.store(there.pieces.of(range(N), there.pages))
        assert there.fake.calls[before:] == ["cuMemcpyBatchAsync", "cuEventRecord", "cuEventSynchronize"]


def layers_in(there, *, interleaved):
    """Layers side by side in each block: one behind the other, or head by head."""
    whole, between, stride = LAYERS * 2 * RUN, RUN if interleaved else 2 * RUN, LAYERS * RUN if interleaved else RUN
    return [
        TensorMemory(there.cache + at * between, (N, 2, RUN), (whole, stride, 1), 1, "uint8", 0, None)
        for at in range(LAYERS)
    ]


def test_a_block_whose_layers_follow_each_other_is_one_piece():
    with device() as there:
        tier = DeviceTier(layers_in(there, interleaved=False))
        assert len(tier._storage._pieces.of([1, 3], there.pages.part(0, 2))) == 2


def test_layers_that_are_interleaved_have_the_bytes_of_layers_that_lie_apart():
    """Their keys are the same: an engine of either kind may load what the other has stored."""
    with device() as there:
        there.fake.write(there.cache, random.Random(1).randbytes(N * there.block_bytes))
        DeviceTier(layers_in(there, interleaved=True))._storage.copy_out([2], there.pages.part(0, 1))
        rows = [there.fake.read(there.cache + (2 * LAYERS * 2 + at) * RUN, RUN) for at in range(2 * LAYERS)]
        assert bytes(there.pages[0]) == b"".join(rows[head * LAYERS + at] for at in range(LAYERS) for head in range(2))


def test_a_run_that_layers_make_together_is_found_in_any_order():
    pieces = [(100, Plane(at * 8, 64, 8)) for at in (2, 0, 1, 3)]
    assert as_one_run(pieces, 4) == (100, Plane(0, 64, 32))
    assert as_one_run([pieces[0], *pieces[2:]], 4) == (108, Plane(0, 64, 24))
    assert as_one_run([pieces[1], *pieces[:1]], 4) is None  # a gap
    assert as_one_run(pieces, 1) is None  # by chance


def test_no_copy_goes_over_two_allocations_that_follow_each_other():
    plane = Plane(0, RUN, RUN)
    block = BlockPieces([(RUN, plane), (0, plane)], 1)  # tensors of one block each, the second before the first
    assert len(block.of([0], new_pages(1, 2 * RUN))) == 2
    two = BlockPieces([(N * RUN, plane), (0, plane)], N)
    pages = new_pages(2, 2 * RUN)
    assert len(two.of([N - 1, 0], pages)) == 4
    beside = BlockPieces([(0, Plane(0, 2 * RUN, RUN)), (RUN, Plane(0, 2 * RUN, RUN))], N)
    assert len(beside.of([0, 1], pages)) == 1


@pytest.mark.parametrize("way", ["store", "load"])
def test_neighbours_that_pass_through_the_buffer_stay_apart(way, monkeypatch):
    """Two allocations may lie side by side, and a copy over both is refused."""
    with device(registered=False) as there:
        begun, copy = [], there.driver.copy
        monkeypatch.setattr(there.driver, "copy", lambda *of, **to: (begun.extend(of[3].tolist()), copy(*of, **to)))
        page = there.pages.addresses[0]
        getattr(there.copier, way)(pieces((there.cache, page + RUN, RUN), (there.cache + RUN, page, RUN)))
        assert begun == [RUN, RUN]


def test_a_copy_is_listed_a_bounded_number_of_pieces_at_a_time(monkeypatch):
    monkeypatch.setattr("backends.device._MOST_PIECES", 4 * LAYERS)
    with device() as there:
        tier = DeviceTier(there.tensors, block_axis=1)
        tier._storage.copy_out(range(N), there.pages)
        assert there.fake.calls.count("cuMemcpyBatchAsync") == N // 2


@pytest.mark.parametrize("registered", [True, False])
def test_one_call_of_the_driver_makes_a_bounded_number_of_copies(registered):
    """Drivers have failed at 51,828."""
    n, whole = 60_000, 1 << 18
    with device() as there:
        host, on_device = new_pages(1, whole), there.driver.allocate(whole)
        if registered:
            there.driver.register(host.addresses[0], whole)
            there.spans.append((host.addresses[0], host.addresses[0] + whole))
        there.fake.write(on_device, bytes(range(256)) * (whole // 256))
        rows = numpy.arange(n, dtype=numpy.uint64) * 3
        one = numpy.ones(n, numpy.uint64)
        there.copier.store(Pieces(on_device + rows, host.addresses[0] + rows, one))
        assert bytes(host[0])[: 3 * n : 3] == there.fake.read(on_device, whole)[: 3 * n : 3]
        assert there.fake.calls.count("cuEventSynchronize") == 1


# --- when ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [12080, 12000])
def test_in_every_order_of_streams_a_load_comes_after_what_it_waits_for(version):
    def run(choose):
        with device(version=version) as there:
            ctypes.memset(there.address, 7, 2 * there.block_bytes)
            compute, computed = there.compute_stream(), there.driver.event()
            there.fake.choose = choose
            there.fake.kernel(compute, lambda: there.write(0, 0))
            there.driver.record(computed, compute)
            there.copier.load(there.pieces.of([0, 1], there.pages.part(0, 2)), [computed])
            there.fake.progress()
            assert there.block(0) == there.block(1) == bytes([7]) * there.block_bytes

    assert every_order(run, DEPTH) > 100


def test_in_every_order_of_streams_a_store_reads_what_was_computed_before():
    def run(choose):
        with device() as there:
            compute, computed = there.compute_stream(), there.driver.event()
            there.fake.choose = choose
            there.fake.kernel(compute, lambda: there.write(0, 7))
            there.driver.record(computed, compute)
            there.copier.store(there.pieces.of([0], there.pages.part(0, 1)), [computed])
            assert bytes(there.pages[0]) == bytes([7]) * there.block_bytes

    assert every_order(run, DEPTH) > 100


def test_the_buffer_is_not_filled_again_before_it_was_read(monkeypatch):
    monkeypatch.setattr("backends.base.copier._copier.STAGING_BYTES", (1024,))
    data = random.Random(1).randbytes(N * LAYERS * 2 * RUN)
    whole = len(data)

    def load(choose):
        with device(registered=False) as there:
            ctypes.memmove(there.address, data, whole)
            there.fake.choose = choose
            there.copier.load(pieces((there.cache, there.address, whole)))
            there.fake.progress()
            assert there.fake.read(there.cache, whole) == data

    def store(choose):
        with device(registered=False) as there:
            there.fake.write(there.cache, data)
            there.fake.choose = choose
            there.copier.store(pieces((there.cache, there.address, whole)))
            assert ctypes.string_at(there.address, whole) == data

    assert every_order(load, DEPTH) > 100
    assert every_order(store, DEPTH) > 10


@pytest.mark.parametrize("way", ["store", "load"])
def test_a_copy_sleeps_until_its_end_and_does_not_wait_for_the_default_stream(way):
    with device() as there:
        gate = threading.Event()
        there.fake.kernel(there.fake.default_stream(), lambda: None, gate)
        getattr(there.copier, way)(there.pieces.of([0], there.pages.part(0, 1)))
        assert not there.fake.spins
        there.fake.open_gate(gate)


@pytest.mark.parametrize("way", ["store", "load"])
def test_a_copy_behind_an_event_of_a_graph_that_is_captured_does_not_count_as_made(way):
    """The copy would be part of the graph."""
    with device() as there:
        compute, captured = there.compute_stream(), there.driver.event()
        there.fake.capture(compute)
        there.driver.record(captured, compute)
        with pytest.raises(Unproven, match="CAPTURED_EVENT"):
            getattr(there.copier, way)(there.pieces.of([0], there.pages.part(0, 1)), [captured])
        there.fake.end_capture(compute)


class Pressed(BaseException):
    """An exception of a signal's handler, such as KeyboardInterrupt."""


@pytest.fixture
def press(monkeypatch):
    """Send this process a signal whose handler raises."""

    def handle(number, frame):
        raise Pressed

    before = signal.signal(signal.SIGUSR1, handle)
    yield lambda: os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def from_another_thread(act):
    thread = threading.Thread(target=act)
    thread.start()
    return thread


@pytest.mark.parametrize("way", ["store", "load"])
def test_however_many_signals_come_a_copy_ends_before_they_are_raised(press, way):
    with device() as there:
        copy, block = getattr(there.copier, way), there.pieces.of([0], there.pages.part(0, 1))
        copy(block)
        [stream], gate = there.fake.streams, threading.Event()
        there.fake.kernel(stream, lambda: None, gate)

        def act():
            for _ in range(5):
                time.sleep(0.02)
                press()
            time.sleep(0.02)
            there.fake.open_gate(gate)

        pressing = from_another_thread(act)
        with pytest.raises(Pressed):
            copy(block)
        assert gate.is_set() and not there.fake.streams[stream].queue
        pressing.join()


def second_signal_raised(nth):
    """Interrupt a waiting copy twice, the second time where the nth function begins.

    Returns whether so many functions began.
    """
    with device() as there:
        block, calls = there.pieces.of([0], there.pages.part(0, 1)), []
        there.copier.store(block)
        [stream], gate = there.fake.streams, threading.Event()
        there.fake.kernel(stream, lambda: None, gate)

        def trace(frame, event, arg):
            if pressed.is_set():
                calls.append(frame.f_code.co_name)
                if len(calls) == nth:
                    signal.raise_signal(signal.SIGUSR1)

        pressed, going_on = threading.Event(), []

        def act():
            while len(there.fake.streams[stream].queue) < 3:  # its copy and its end
                time.sleep(0.001)
            pressed.set()
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.05)
            there.fake.open_gate(gate)

        pressing = from_another_thread(act)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            there.copier.store(block)
        except Pressed:
            sys.settrace(before)
            going_on += there.fake.streams[stream].queue
        finally:
            sys.settrace(before)
        pressing.join()
        assert not going_on, f"the copy goes on behind a second signal in {calls[nth - 1]}"
        there.copier.load(block)  # nor does it wait for a lock
        return len(calls) >= nth


def test_a_second_signal_at_the_start_of_any_function_waits_for_the_copy(press):
    reached = list(itertools.takewhile(second_signal_raised, range(1, 50)))
    assert len(reached) > 3


def test_a_copy_that_has_not_begun_is_withdrawn_by_a_signal(press):
    with device() as there:
        block = there.pieces.of([0], there.pages.part(0, 1))
        there.copier.store(block)
        [stream], gate = there.fake.streams, threading.Event()
        there.fake.kernel(stream, lambda: None, gate)
        first = from_another_thread(lambda: there.copier.store(block))
        while len(there.fake.streams[stream].queue) < 3:  # its copy and its end
            time.sleep(0.001)
        pressing = from_another_thread(lambda: (time.sleep(0.02), press()))
        with pytest.raises(Pressed):
            there.copier.store(block)
        assert not gate.is_set()
        there.fake.open_gate(gate)
        first.join()
        pressing.join()
        there.copier.load(block)
        assert there.fake.calls.count("cuMemcpyBatchAsync") == 3


# --- the buffer ---------------------------------------------------------------------------------------------------------


def is_mapped(address):
    with open("/proc/self/maps") as maps:
        spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
    return any(start <= address < stop for start, stop in spans)


@pytest.mark.parametrize("most_registered", [4 << 20, 0])
@pytest.mark.parametrize("version", [12080, 12000])
def test_copies_go_on_where_cuda_registers_a_smaller_buffer_or_none(most_registered, version):
    with device(registered=False, version=version, most_registered=most_registered) as there:
        for number in range(N):
            there.write(number, 10 + number)
        there.copier.store(there.pieces.of([4, 0], there.pages.part(0, 2)))
        assert [bytes(page) for page in there.pages.part(0, 2)] == [there.block(number) for number in (4, 0)]
        there.copier.load(there.pieces.of([1, 2], there.pages.part(0, 2)))
        assert [there.block(number) for number in (1, 2)] == [bytes(page) for page in there.pages.part(0, 2)]
        assert bool(there.fake.registered) == bool(most_registered)
        pinned = pinning.statistics()
        assert pinned.refused_bytes >= 16 << 20 and "OUT_OF_MEMORY" in pinned.why_not


def test_the_buffers_are_pinned_memory_like_any_other_and_not_in_a_forked_child():
    before = pinning.statistics().pinned_bytes
    with device() as there:
        there.copier.store(there.pieces.of([0], there.pages.part(0, 1)))
        assert pinning.statistics().pinned_bytes == before + (8 << 20)
        [buffer] = [span.address for span in there.fake.registered.values() if span.address != there.address]
        child = os.fork()
        if not child:
            os._exit(is_mapped(buffer))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pinning.statistics().pinned_bytes == before


# --- errors -------------------------------------------------------------------------------------------------------------


def error_of(call):
    try:
        call()
    except CudaError as error:
        return error
    return None


@pytest.mark.parametrize("way", ["store", "load"])
@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("version", [12080, 12000])
def test_where_any_one_call_fails_nothing_is_under_way_and_nothing_leaks(way, registered, version):
    with device(registered, version=version) as there:
        begun = len(there.fake.calls)
        getattr(there.copier, way)(there.pieces.of(range(N), there.pages))
        n_calls = len(there.fake.calls) - begun
    assert n_calls > 5
    for number in range(n_calls):
        with device(registered, version=version) as there:
            for block in range(N):
                there.write(block, 10 + block)
            there.fake.fail(len(there.fake.calls) + number)
            copy = getattr(there.copier, way)
            error = error_of(partial(copy, there.pieces.of(range(N), there.pages)))
            assert error is None or not error.sticky
            if error is None:  # only the buffer was refused
                assert [bytes(page) for page in there.pages] == [there.block(block) for block in range(N)]
            assert not any(stream.queue for stream in there.fake.streams.values())
            copy(there.pieces.of(range(N), there.pages))  # the next one is as ever
            there.copier.close()
            assert not there.fake.streams and not there.fake.events
            assert len(there.fake.registered) == registered


def test_an_error_of_a_copy_keeps_no_memory():
    class Memory:
        pass

    def fail(owner):
        there.fake.fail(len(there.fake.calls))
        with pytest.raises(CudaError):
            there.copier.store(there.pieces.of([0], there.pages.part(0, 1)))

    with device() as there:
        memory = Memory()
        gone = weakref.ref(memory)
        gc.disable()
        try:
            fail(memory)
            del memory
            assert gone() is None
        finally:
            gc.enable()


def store_without_an_end(there):
    """Store a block, and again, where neither the event nor the stream can be synchronized."""
    there.copier.store(there.pieces.of([0], there.pages.part(0, 1)))
    begun = len(there.fake.calls)
    there.fake.fail(begun + 2)  # the synchronization
    there.fake.fail(begun + 3)  # and the one behind it
    with pytest.raises(Unproven):
        there.copier.store(there.pieces.of([0], there.pages.part(0, 1)))


def test_a_copy_whose_end_is_not_proven_says_so_and_ends_the_copier():
    with device() as there:
        store_without_an_end(there)
        with pytest.raises(DeviceLost):
            there.copier.store(there.pieces.of([0], there.pages.part(0, 1)))
        there.copier.load(there.pieces.of([0], there.pages.part(0, 1)))  # the other way has a stream of its own


def test_the_buffer_of_a_copy_whose_end_is_not_proven_is_kept():
    with device(registered=False) as there:
        store_without_an_end(there)
        fake = there.fake
    del there  # the copier has the error, whose frames have the buffer
    gc.collect()
    [buffer] = fake.registered
    assert is_mapped(buffer)


def test_a_sticky_error_is_unproven_and_later_copies_are_refused():
    with device() as there:
        there.copier.store(there.pieces.of([0], there.pages.part(0, 1)))
        there.fake.lose(0)
        with pytest.raises(Unproven):
            there.copier.store(there.pieces.of([0], there.pages.part(0, 1)))
        calls = len(there.fake.calls)
        with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"):
            there.copier.store(there.pieces.of([0], there.pages.part(0, 1)))
        assert len(there.fake.calls) == calls


def test_only_its_own_device_gets_a_context():
    fake = FakeCuda(devices=2)
    with use(fake) as driver:
        copier, host = Copier(driver, 1, lambda address, nbytes: []), new_pages(1, 3)
        with pytest.raises(CudaError, match="INVALID_VALUE"):  # no such memory
            copier.load(pieces((1, host.addresses[0], 3)))
        copier.close()
    assert fake.contexts == {1}


def test_a_forked_child_is_told_that_it_cannot_copy():
    with use(FakeCuda()), device() as there:
        copier_of(0)
        child = os.fork()
        if not child:
            try:
                copier_of(0).store(there.pieces.of([0], there.pages.part(0, 1)))
            except BackendError as error:
                os._exit(0 if "forked off" in str(error) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
