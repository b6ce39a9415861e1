"""Chunks of a cache on a device, over a driver in Python: their bytes in every layout of vLLM, in one batch, and when."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs
import numpy
import pytest

from backends import BackendError
from backends.base.block_layout import TensorMemory
from backends.base.copier import Copier, close_copiers
from backends.base.pages import checksums, new_pages
from backends.memory import MemoryTier
from maru.base.memory.cuda import CudaError
from maru.fake_cuda import FakeCuda, every_order, use
from offload import NO_WAIT, DrainUnproven, LayoutCheckFailed, OffloadError, Status, block_key, from_thread
from offload.engines.vllm import _chunks, _copies, _layers
from offload.engines.vllm._arena import Arena
from offload.engines.vllm._chunks import ChunkSource, GroupCaches, layout_of_caches
from offload.engines.vllm._copies import RowCopies
from offload.engines.vllm._layers import LayerChunks
from offload.engines.vllm._worker import check_layout
from tests.engines import test_vllm_halves as halves
from tests.support.maru_processes import eventually
from tests.support.planted import device as P

SIZES = {"L": 3, "B": 8, "H": 2, "N": 4, "C": 6}
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
"""Orders of memory, as vLLM 0.32 names them: layers, blocks, heads, tokens, content."""
RUNS = {"LBHNC": 3, "LBNHC": 3, "LHBNC": 6, "BLHNC": 1, "BLNHC": 1, "BHLNC": 1}
"""Runs of memory that a block has."""
OUT_OF_MEMORY, ILLEGAL_ADDRESS = 2, 700
ITEM_BYTES = {"uint8": 1, "torch.float8_e4m3fn": 1, "torch.bfloat16": 2, "torch.uint16": 2}


def layers_of(order: str, address: int, dtype: str = "uint8", device: int | None = 0, **sizes: int) -> dict[str, Any]:
    """Where the layers of a cache lie, as vLLM views each: blocks, heads, tokens, content."""
    sizes, strides, n = {**SIZES, **sizes}, dict[str, int](), 1
    for axis in reversed(order):
        strides[axis], n = n, n * sizes[axis]
    item, shape = ITEM_BYTES[dtype], [sizes[axis] for axis in "BHNC"]
    steps = [strides[axis] for axis in "BHNC"]
    return {
        f"model.layers.{at}": TensorMemory(address + at * strides["L"] * item, shape, steps, item, dtype, device, None)
        for at in range(sizes["L"])
    }


@attrs.frozen(eq=False)
class RecordedEvent:
    """An event of the engine, as ``torch.cuda.Event`` is one."""

    cuda_event: int
    driver: Any

    def query(self) -> bool:
        self.driver.attach(0)  # as the runtime does
        return bool(self.driver.query(self.cuda_event))

    def synchronize(self) -> None:
        self.driver.attach(0)
        self.driver.synchronize(self.cuda_event)


class There:
    """A cache on a device, and its copier, which knows of registered memory."""

    def __init__(self, fake: FakeCuda, driver: Any, order: str, dtype: str, **sizes: int) -> None:
        self.fake, self.driver, self.order, self.dtype, self.sizes = fake, driver, order, dtype, {**SIZES, **sizes}
        driver.attach(0)
        self.nbytes = int(numpy.prod(list(self.sizes.values()))) * ITEM_BYTES[dtype]
        self.address = driver.allocate(self.nbytes)
        self.layers = layers_of(order, self.address, dtype, **sizes)
        self.fake.write(self.address, numpy.random.default_rng(1).bytes(self.nbytes))
        self.compute = driver.stream()
        self.copier = Copier(
            driver, 0, lambda *span: sorted((one.address, one.address + one.nbytes) for one in fake.registered.values())
        )

    def whole(self) -> Any:
        """All bytes by layer, block, head, token."""
        sizes = [self.sizes[axis] for axis in self.order]
        sizes[-1] *= ITEM_BYTES[self.dtype]
        found = numpy.frombuffer(self.fake.read(self.address, self.nbytes), numpy.uint8).reshape(sizes)
        return found.transpose(*[self.order.index(axis) for axis in "LBHNC"])

    def block(self, number: int) -> bytes:
        return bytes(self.whole()[:, number].tobytes())

    def fill(self, number: int, byte: int) -> None:
        """Write a block, as a kernel does."""
        whole = self.whole().copy()
        whole[:, number] = byte
        back = whole.transpose(*["LBHNC".index(axis) for axis in self.order])
        self.fake.write(self.address, back.tobytes())

    def source(self, per_chunk: int = 2) -> ChunkSource:
        return ChunkSource([GroupCaches(self.layers, self.sizes["B"], per_chunk)])

    def record(self) -> Any:
        """An event behind all that the compute stream was given until now."""
        event = self.driver.event()
        self.driver.record(event, self.compute)
        return RecordedEvent(event, self.driver)


def host(source: ChunkSource) -> MemoryTier:
    """A tier that is not pinned, so that the driver's calls are in order."""
    return MemoryTier(1 << 20, source.block_bytes, pin_memory=False)


@contextmanager
def device(order: str = "LBHNC", dtype: str = "uint8", sizes: Any = SIZES, **knobs: Any) -> Iterator[There]:
    fake = FakeCuda(**knobs)
    with use(fake) as driver, pytest.MonkeyPatch.context() as patch:
        there = There(fake, driver, order, dtype, **sizes)
        for module in (_chunks, _layers):
            patch.setattr(module, "copier_of", lambda device: there.copier)
        try:
            yield there
        finally:
            there.copier.close()
            close_copiers()
    assert not fake.wrong


# --- the bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("order", LAYOUTS)
def test_in_every_layout_blocks_go_to_pages_and_into_other_blocks(order: str, dtype: str) -> None:
    with device(order, dtype) as there:
        source = there.source(3)
        assert source.block_bytes == 3 * len(there.block(0))
        pages = new_pages(2, source.block_bytes)
        source.copy_out(source.chunks([b"a", b"b"], [[5, 1, 7], [2, None, 3]], first=0).refs, pages)
        expected = {to: there.block(at) for to, at in ((0, 5), (4, 1), (6, 3))}
        before = {at: there.block(at) for at in (1, 2, 3, 5, 7)}
        destination = source.into([[0, 4, None], [None, None, 6]])
        assert destination.copy_in_and_sum(0, pages) == checksums(pages)
        assert {at: there.block(at) for at in range(8)} == {**before, **expected}
        assert numpy.frombuffer(pages[1], numpy.uint8).reshape(3, -1)[1].max() == 0  # nothing of what was there before


@pytest.mark.parametrize("order", LAYOUTS)
def test_a_block_that_is_one_run_is_one_copy(order: str) -> None:
    with device(order) as there:
        tier = GroupCaches(there.layers, 8, 1).blocks
        pages = new_pages(2, tier.block_bytes)
        assert len(tier.pieces([1, 4], pages)) == 2 * RUNS[order]


@pytest.mark.parametrize("order", LAYOUTS)
def test_a_host_has_the_bytes_of_a_device(order: str) -> None:
    with device(order) as there:
        memory = numpy.frombuffer(there.fake.read(there.address, there.nbytes), numpy.uint8).copy()
        here = layers_of(order, memory.ctypes.data, device=None)
        pages = [new_pages(2, there.source().block_bytes) for _ in range(2)]
        for layers, there_or_here in ((there.layers, pages[0]), (here, pages[1])):
            ChunkSource([GroupCaches(layers, 8, 2)]).copy_blocks_out([[5, 1], [6, 3]], there_or_here)
        assert checksums(pages[0]) == checksums(pages[1])
        ChunkSource([GroupCaches(here, 8, 2)]).copy_in([[0, 2], [4, None]], pages[0])
        there.source().copy_in([[0, 2], [4, None]], pages[0])
        assert memory.tobytes() == there.fake.read(there.address, there.nbytes)


def test_layouts_whose_bytes_have_the_same_order_store_the_same_bytes() -> None:
    found = {}
    for order in LAYOUTS:
        with device(order) as there:
            for at in range(8):
                there.fill(at, at)
            whole = there.whole().copy()
            whole[:] = numpy.arange(whole.size, dtype=numpy.uint8).reshape(whole.shape)
            there.fake.write(there.address, whole.transpose(*["LBHNC".index(axis) for axis in order]).tobytes())
            pages = new_pages(1, there.source().block_bytes)
            there.source().copy_blocks_out([[5, 1]], pages)
            found[order] = checksums(pages)[0]
    assert found["LBHNC"] == found["LHBNC"] == found["BLHNC"]
    assert found["LBNHC"] == found["BLNHC"]
    assert len(set(found.values())) == 3


# --- what they are called -----------------------------------------------------------------------------------------------


def test_the_name_of_a_layout_says_in_which_order_interleaved_layers_are_stored() -> None:
    names = {order: layout_of_caches([layers_of(order, 0)], 8, 64) for order in LAYOUTS}
    assert names["BHLNC"].endswith(";in the order [0, 2, 4, 1, 3, 5]")
    assert [order for order in LAYOUTS if "order" in names[order]] == ["BHLNC"]
    assert names["LHBNC"] == names["LBHNC"], "the same bytes"
    assert len({names[order] for order in ("LBHNC", "LBNHC", "BHLNC")}) == 3


@pytest.mark.parametrize("order", LAYOUTS)
def test_the_name_of_a_layout_has_nothing_of_the_number_of_blocks(order: str) -> None:
    assert layout_of_caches([layers_of(order, 0)], 8, 64) == layout_of_caches([layers_of(order, 0, B=9)], 9, 64)


def test_what_layouts_were_called_they_are_called() -> None:
    def said(*strides: int) -> str:
        shape, dtype = (2, 4, 6), "torch.bfloat16"
        return "64 tokens/" + ";".join(f"model.layers.{at}:{dtype}:{shape}:{strides}" for at in range(3))

    for order in ("LBHNC", "BLHNC"):
        assert layout_of_caches([layers_of(order, 0, "torch.bfloat16")], 8, 64) == said(24, 6, 1)
    for order in ("LBNHC", "BLNHC"):
        assert layout_of_caches([layers_of(order, 0, "torch.bfloat16")], 8, 64) == said(6, 12, 1)
    swapped = dict(reversed(layers_of("BLHNC", 0).items()))
    assert "order" not in layout_of_caches([swapped], 8, 64), "of layers in pieces alone"


def test_kernels_that_count_smaller_blocks_are_grouped() -> None:
    with device() as there:
        with_small = layers_of("LBHNC", there.address, B=16, N=2)
        source = ChunkSource([GroupCaches(with_small, 8, 1)])
        pages = new_pages(1, source.block_bytes)
        source.copy_blocks_out([[3]], pages)
        assert bytes(pages[0]) == there.block(3)


# --- through an engine --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
def test_chunks_are_stored_and_loaded_and_their_planes_come_back(order: str, dtype: str) -> None:
    with device(order, dtype) as there:
        source, keys = there.source(), [block_key(b"%d" % at) for at in range(2)]
        with from_thread.open_engine(source, [host(source)], shadow_check=1) as engine:
            assert engine.check_layout(source.canary([6, 7]), "a name").shared
            stored = {at: there.block(at) for at in range(4)}
            chunks = source.chunks(keys, [[0, 1], [2, 3]], first=0)
            assert engine.store(chunks, NO_WAIT).result(10).status is Status.COMPLETE
            with engine.lookup(keys) as hit:
                assert engine.load(hit, source.into([[4, 5], [6, None]]), precondition=NO_WAIT).loaded == 2
            assert [there.block(at) for at in (4, 5, 6)] == [stored[at] for at in (0, 1, 2)]
            shadow = engine.statistics().engine.shadow
            assert shadow.compared["stored"] == 3 and not shadow.mismatches  # two of them are the check's


def test_a_layout_that_is_read_otherwise_than_written_is_found_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with device("LBHNC") as there:
        source = there.source()
        with from_thread.open_engine(source, [host(source)]) as engine:
            P.chunks_are_loaded_in_another_order(monkeypatch)
            with pytest.raises(LayoutCheckFailed, match="planes"):
                engine.check_layout(source.canary([6, 7]), "a name")


def layer_chunks(there: There) -> Any:
    """Pages of published connectors: of each layer one."""
    return LayerChunks(there.layers, there.sizes["B"], there.sizes["N"], 2)


TYPED = (BackendError, CudaError, OffloadError)


@contextmanager
def checked(**knobs: Any) -> Iterator[tuple[There, from_thread.Engine, Any]]:
    """An engine before its layout check with free blocks; its copier has threads and streams."""
    with device(**knobs) as there:
        source = there.source()
        with from_thread.open_engine(source, [host(source)], shadow_check=0) as engine:
            pages = new_pages(1, source.block_bytes)
            source.copy_blocks_out([[0, 1]], pages)
            source.copy_in([[0, 1]], pages)
            # Made after those of the copier: its work is done later if nothing waits for it.
            there.compute = there.driver.stream()
            yield there, engine, source.canary([6, 7])


def calls_of_a_check() -> int:
    with checked() as (there, engine, canary):
        begun = len(there.fake.calls)
        check_layout(engine, canary, halves.NAMING)
        return len(there.fake.calls) - begun


def checks_behind_what_is_queued(number: int) -> None:
    """vLLM zeroes its cache before it registers it, and that ends at some call of the driver."""
    with checked() as (there, engine, canary):
        there.fake.kernel(there.compute, lambda: [there.fill(at, 0) for at in range(8)])
        computed, begun = there.record(), len(there.fake.calls)
        there.fake.choose = lambda n: n - 1 if len(there.fake.calls) - begun > number else 0
        assert engine.check_layout(canary, "a name", precondition=computed).shared


def test_the_check_of_a_layout_comes_behind_what_is_queued_for_its_blocks() -> None:
    for number in range(0, calls_of_a_check(), 3):
        checks_behind_what_is_queued(number)


def check_with_failing_calls(number: int, code: int, calls: int, log: pytest.LogCaptureFixture) -> tuple[str, bool]:
    """Have so many calls of a check fail; returns how it ended, and whether a copy may still be under way."""
    log.clear()
    with checked() as (there, engine, canary):
        begun = len(there.fake.calls)
        for failing in range(calls):
            there.fake.fail(begun + number + failing, code)
        try:
            check_layout(engine, canary, halves.NAMING)
            ended = "checked"
        except DrainUnproven:
            ended = "unproven"
        under_way = any(stream.queue for stream in there.fake.streams.values())
        if (told := log.text.count("was not checked")) and ended == "checked":
            assert told == 1
            ended = "not checked"
        if ended != "unproven":
            engine.statistics()  # it is open: offloading goes on
    return ended, under_way


@pytest.mark.parametrize("code", [OUT_OF_MEMORY, ILLEGAL_ADDRESS], ids=["refused", "sticky"])
def test_a_check_of_which_one_call_fails_is_over_and_offloading_goes_on(
    code: int, caplog: pytest.LogCaptureFixture
) -> None:
    ends = [check_with_failing_calls(number, code, 1, caplog) for number in range(0, calls_of_a_check(), 3)]
    assert set(ends) <= {("checked", False), ("not checked", False)}
    assert ("not checked", False) in ends


def test_a_check_whose_copies_have_no_proven_end_ends_the_start_of_vllm(caplog: pytest.LogCaptureFixture) -> None:
    calls = range(0, calls_of_a_check(), 2)
    ends = [check_with_failing_calls(number, OUT_OF_MEMORY, 2, caplog) for number in calls]
    assert [ended for ended, under_way in ends if under_way and ended != "unproven"] == []
    assert ("unproven", True) in ends


@attrs.frozen(eq=False)
class Written:
    """In the place of the tensor that a loop writes: blocks of the device."""

    there: There

    def __setitem__(self, where: tuple[slice, int], value: float) -> None:
        self.there.fill(where[1], int(value) % 251)


def test_a_load_of_the_connector_comes_behind_what_is_queued_for_its_blocks() -> None:
    """vLLM zeroes new blocks, and the pass of those who had them before may not be over."""
    sizes = {"L": 2, "B": 64, "H": 2, "N": halves.BLOCK, "C": 4}
    with device(sizes=sizes, choose=lambda n: n - 1) as there:
        source = there.source(halves.CHUNK // halves.BLOCK)
        with from_thread.open_engine(source, [host(source)], when_full="drop") as engine:
            vllm = halves.Loop(engine, source, Written(there), computed=there.record)  # type: ignore[arg-type]
            computed = halves.stored(vllm)
            gate, blocks = threading.Event(), halves.blocks_from(32)
            there.fake.kernel(there.compute, lambda: [there.fill(block, 0) for block in blocks], gate)
            vllm.scheduler.allocated("second", [blocks], vllm.matched("p", 256, name="second"))
            begun = len(there.fake.calls)
            # The load waits for the device; or it is over, where it does not.
            eventually(
                lambda: vllm.step() and ("cuEventQuery" in there.fake.calls[begun:] or "second" in vllm.received)
            )
            there.fake.open_gate(gate)
            there.fake.progress()
            eventually(lambda: vllm.step() and "second" in vllm.received)
            vllm.scheduler.close()
        assert not vllm.failed
        assert [there.block(at) for at in blocks[:12]] == [there.block(at) for at in computed[:12]]
        assert any(there.block(blocks[0]))


# --- calls of the driver ------------------------------------------------------------------------------------------------


class Copies:
    """The copies of a worker between a device and rows: of two groups of KV caches in one memory, as vLLM has them."""

    def __init__(self, there: There, arena: Arena) -> None:
        self.there, self.arena = there, arena
        there.driver.register(arena.memory.memory.address, arena.memory.memory.length)
        groups = [there.source(2), there.source(1)]
        self.copies = RowCopies(arena, 0, groups, lambda: [there.record()])
        # Streams, events and threads are there once both ways were used.
        self.store([0, 1, 2], [2, 1], [0, 1])
        self.load([0, 1, 2], [2, 1], [0, 1])
        # Made after those of the copier: its work is done later if nothing has a copy wait for it.
        there.compute = there.driver.stream()

    def store(self, blocks: Sequence[int], sizes: Sequence[int], rows: Sequence[int]) -> Any:
        return self._ended(self.copies.store, blocks, sizes, rows)

    def load(self, blocks: Sequence[int], sizes: Sequence[int], rows: Sequence[int]) -> Any:
        return self._ended(self.copies.load, blocks, sizes, rows, {})

    def _ended(self, begin: Any, blocks: Sequence[int], sizes: Sequence[int], rows: Sequence[int], *more: Any) -> Any:
        begin(1, blocks, sizes, [0, 0], rows, *more)
        self.copies.wait([1])
        (copied,) = self.copies.finished(idle=False)
        return copied

    def row(self, number: int, blocks: int) -> bytes:
        """The first blocks of a row."""
        return bytes(self.arena.pages([number])[0][: blocks * len(self.there.block(0))])

    def write_row(self, number: int, byte: int) -> None:
        row = self.arena.pages([number])[0]
        row[:] = bytes([byte]) * len(row)


_numbers = itertools.count()


@contextmanager
def worker(**options: Any) -> Iterator[Copies]:
    with device(**options) as there:
        arena = Arena(f"device {os.getpid()} {next(_numbers)}", 4, there.source(2).block_bytes)
        arena.unlink()
        one = Copies(there, arena)
        try:
            yield one
        finally:
            one.copies.close()
            there.driver.unregister(arena.memory.memory.address)


@pytest.mark.parametrize("way", ["store", "load"])
def test_a_job_of_many_layers_is_one_batch_and_waits_on_the_device(way: str) -> None:
    """8 blocks of 2 MiB over 32 layers."""
    with worker(sizes={"L": 32, "B": 8, "H": 2, "N": 16, "C": 2048}) as one:
        begun = len(one.there.fake.calls)
        assert getattr(one, way)(range(8), [8, 0], range(4)).nbytes == 8 * 2 << 20
        assert one.there.fake.calls[begun:] == [
            "cuEventCreate", "cuEventRecord",  # vLLM's
            "cuStreamWaitEvent", "cuMemcpyBatchAsync", "cuEventRecord", "cuEventSynchronize",
        ]  # fmt: skip


def test_a_job_of_several_groups_is_one_batch() -> None:
    with worker() as one:
        begun = len(one.there.fake.calls)
        expected = [one.there.block(at) for at in (4, 5, 6)]
        assert one.store([4, 5, 6], [2, 1], [2, 3]).error is None
        assert one.there.fake.calls[begun:].count("cuMemcpyBatchAsync") == 1
        assert one.row(2, 2) + one.row(3, 1) == b"".join(expected)


def test_chunks_of_several_groups_are_one_batch() -> None:
    with device() as there:
        source = ChunkSource([GroupCaches(there.layers, 8, 2), GroupCaches(there.layers, 8, 1)])
        pages = new_pages(2, source.block_bytes)
        there.driver.register(pages.addresses[0], 2 * source.block_bytes)
        source.copy_blocks_out([[0, 1, 2]], pages.part(0, 1))
        begun = len(there.fake.calls)
        source.copy_blocks_out([[0, 1, 2], [3, None, 4]], pages)
        assert there.fake.calls[begun:] == ["cuMemcpyBatchAsync", "cuEventRecord", "cuEventSynchronize"]
        assert bytes(pages[0]) == b"".join(there.block(at) for at in (0, 1, 2))
        there.driver.unregister(pages.addresses[0])


# --- when ---------------------------------------------------------------------------------------------------------------


DEPTH = 7
"""Choices of each walk through the orders of streams."""


def stores_what_was_computed(choose: Any) -> None:
    with worker() as one:
        there = one.there
        there.fake.choose = choose
        there.fake.kernel(there.compute, lambda: [there.fill(at, 7) for at in (3, 4)])
        assert one.store([3, 4], [2, 0], [2]).error is None
        computed = bytes([7]) * 2 * len(there.block(3))
        assert one.row(2, 2) == computed
        there.fill(3, 9)  # they are given out again
        there.fill(4, 9)
        there.fake.progress()
        assert one.row(2, 2) == computed


def loads_behind_what_is_queued(choose: Any) -> None:
    with worker() as one:
        there = one.there
        one.write_row(2, 7)
        there.fake.choose = choose
        there.fake.kernel(there.compute, lambda: [there.fill(at, 0) for at in (3, 4)])
        assert one.load([3, 4], [2, 0], [2]).error is None
        loaded = bytes([7]) * len(there.block(3))
        assert there.block(3) == there.block(4) == loaded
        one.write_row(2, 9)  # it is given out again
        there.fake.progress()
        assert there.block(3) == there.block(4) == loaded


@pytest.mark.parametrize("run", [stores_what_was_computed, loads_behind_what_is_queued])
def test_in_every_order_of_streams_a_job_comes_behind_what_was_started_before_and_is_over_at_its_end(run: Any) -> None:
    assert every_order(run, DEPTH) > 100


# --- the end ------------------------------------------------------------------------------------------------------------


def signal_raised(wait: Any, nth: int) -> bool:
    """Raise in the nth function that begins while vLLM waits for a job.

    Returns whether so many functions began.
    """
    with worker() as one:
        there, gate, calls = one.there, threading.Event(), 0
        there.fake.kernel(there.compute, lambda: None, gate)
        one.copies.store(7, [3, 4], [2, 0], [0, 0], [2])  # behind that pass
        opening = threading.Timer(0.05, there.fake.open_gate, [gate])
        opening.start()

        def trace(frame: Any, event: str, arg: object) -> None:
            nonlocal calls
            calls += 1
            if calls == nth:
                raise SystemExit  # as vLLM's handler of SIGTERM does

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            wait(one.copies)
            sys.settrace(before)
        except SystemExit:
            sys.settrace(before)
        opening.join()
        one.copies.close()
        assert one.copies._stores.join(0)
        return calls >= nth


@pytest.mark.parametrize("wait", [lambda one: one.finished(idle=True), lambda one: one.wait([7])])
def test_a_signal_wherever_vllm_waits_for_a_job_leaves_it_to_end(wait: Any) -> None:
    assert len(list(itertools.takewhile(partial(signal_raised, wait), range(1, 50)))) > 0


def test_the_end_of_a_worker_is_bounded_by_no_device(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr("offload.engines.vllm._copies.LONGEST_END", 0.05)
    with worker() as one:
        gate = threading.Event()
        one.there.fake.kernel(one.there.compute, lambda: None, gate)
        waits = one.there.fake.calls.count("cuStreamWaitEvent")
        one.copies.store(7, [3, 4], [2, 0], [0, 0], [2])
        one.copies.load(8, [3, 4], [2, 0], [0, 0], [2], {})
        assert eventually(lambda: one.there.fake.calls.count("cuStreamWaitEvent") == waits + 2)
        one.copies.close()
        assert "has not ended within 0.05 s" in caplog.text
        one.there.fake.open_gate(gate)
        assert one.copies._stores.join(10) and one.copies._loads.join(10)


def test_jobs_behind_the_end_are_reported_or_refused() -> None:
    with worker() as one:
        gate = threading.Event()
        one.there.fake.kernel(one.there.compute, lambda: None, gate)
        one.copies.store(7, [3, 4], [2, 0], [0, 0], [2])  # behind that pass
        one.copies.store(8, [3, 4], [2, 0], [0, 0], [3])
        opening = threading.Timer(0.05, one.there.fake.open_gate, [gate])
        opening.start()
        one.copies.close()
        opening.join()
        one.copies.wait([7, 8])
        assert [type(copied.error) for copied in one.copies.finished(idle=False)][-1] is RuntimeError
        with pytest.raises(RuntimeError, match="have ended"):
            one.copies.store(9, [3, 4], [2, 0], [0, 0], [2])
        one.copies.fail_store(9, [2])
        assert [copied.job_id for copied in one.copies.finished(idle=False)] == [9]


def test_a_job_that_raises_anywhere_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with worker() as one:
        monkeypatch.setattr(one.copies, "_copy_all", None)
        monkeypatch.setattr(one.arena, "mark_unwritten", None)
        assert isinstance(one.store([3, 4], [2, 0], [2]).error, TypeError)


# --- errors -------------------------------------------------------------------------------------------------------------

SOURCES = {"chunks": (lambda there: there.source(), "BLHNC"), "pages of layers": (layer_chunks, "LBNHC")}


def lives(kind: str, number: int, code: int) -> int:
    """Store and load chunks while one call of the driver fails. Returns how many calls that took."""
    make, order = SOURCES[kind]
    with device(order) as there:
        source = make(there)
        with from_thread.open_engine(source, [host(source)], shadow_check=0) as engine:
            begun = len(there.fake.calls)
            there.fake.fail(begun + number, code)
            computed = {at: there.block(at) for at in range(8)}
            n = source.pages_per_chunk
            keys = [b"key %d" % at for at in range(2 * n)]
            stored = engine.store(source.chunks(keys, [[0, 1], [2, 3]], 0), NO_WAIT).result(10)
            assert stored.status is Status.COMPLETE or isinstance(
                stored.error or next(iter(stored.failed.values())), TYPED
            )
            with engine.lookup(keys) as hit:
                chunks = len(hit) // n
                try:
                    destination = source.into([[4, 5], [6, 7]][:chunks])
                    loaded = (
                        engine.load(hit, destination, precondition=NO_WAIT).loaded // n if len(hit) == n * chunks else 0
                    )
                except OffloadError:
                    loaded = 0
            for at in range(2 * loaded):
                assert there.block(4 + at) == computed[at]
            assert [there.block(at) for at in range(4)] == [computed[at] for at in range(4)]
            assert code != OUT_OF_MEMORY or not any(stream.queue for stream in there.fake.streams.values())
            return len(there.fake.calls) - begun


@pytest.mark.parametrize("code", [OUT_OF_MEMORY, ILLEGAL_ADDRESS], ids=["refused", "sticky"])
@pytest.mark.parametrize("kind", SOURCES)
def test_where_any_one_call_fails_nothing_is_lost_and_no_byte_is_wrong(kind: str, code: int) -> None:
    for number in range(lives(kind, 1_000_000, code)):
        lives(kind, number, code)


CALLS_OF_VLLM, CALLS = 2, 4
"""Driver calls of a job: to record the event, and to copy."""


@pytest.mark.parametrize("attempts", [1, 3])
@pytest.mark.parametrize("number", range(CALLS))
def test_a_store_of_which_one_call_fails_is_tried_again_or_its_rows_are_marked(
    number: int, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_copies, "ATTEMPTS", attempts)
    with worker() as one:
        one.there.fake.fail(len(one.there.fake.calls) + CALLS_OF_VLLM + number)
        assert one.store([3, 4], [2, 0], [2]).error is None
        assert one.arena.take_unwritten([1, 2, 3]) == ({2} if attempts == 1 else set())
        assert attempts == 1 or one.row(2, 2) == one.there.block(3) + one.there.block(4)
        assert one.store([5, 6], [2, 0], [3]).error is None  # the next one is as ever
        assert one.row(3, 2) == one.there.block(5) + one.there.block(6)


@pytest.mark.parametrize("attempts", [1, 3])
@pytest.mark.parametrize("number", range(CALLS))
def test_a_load_of_which_one_call_fails_is_tried_again_or_has_failed(
    number: int, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_copies, "ATTEMPTS", attempts)
    with worker() as one:
        one.write_row(2, 7)
        one.there.fake.fail(len(one.there.fake.calls) + CALLS_OF_VLLM + number)
        copied = one.load([3, 4], [2, 0], [2])
        assert (copied.error is not None) == (attempts == 1)
        assert attempts == 1 or one.there.block(3) == bytes([7]) * len(one.there.block(3))


@pytest.mark.parametrize("way", ["store", "load"])
def test_a_copy_whose_end_is_not_proven_is_not_tried_again_and_is_an_error(way: str) -> None:
    """vLLM would give its rows, or its blocks, to others."""
    with worker() as one:
        begun = len(one.there.fake.calls) + CALLS_OF_VLLM
        one.there.fake.fail(begun + 3)
        one.there.fake.fail(begun + 4)  # the synchronization behind the error
        assert getattr(one, way)([3, 4], [2, 0], [2]).error is not None
        assert len(one.there.fake.calls) == begun + 5
        assert one.arena.take_unwritten([2]) == ({2} if way == "store" else set())


def test_an_event_is_kept_until_the_copy_behind_it_is_over() -> None:
    with worker() as one:
        gone: list[str] = []
        record = one.there.record

        def watched() -> Any:
            event = record()
            weakref.finalize(event, lambda: gone.append(one.there.fake.calls[-1]))
            return event

        one.there.record = watched  # type: ignore[method-assign]
        assert one.store([3], [1, 0], [2]).error is None
        assert gone == ["cuEventSynchronize"]
