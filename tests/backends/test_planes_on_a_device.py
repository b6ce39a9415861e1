"""Planes of blocks on a device, over a driver in Python: the same numbers as in host memory, and no task waits for them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import trio

from backends import Unproven
from backends.base.block_layout import TensorMemory
from backends.base.copier import close_copiers
from backends.base.pages import new_pages
from backends.base.planes import TensorPlanes
from backends.device import DeviceTier
from backends.memory import MemoryTier
from maru.base.memory.cuda import CudaError
from maru.fake_cuda import FakeCuda, use
from offload import NO_WAIT, LayoutCheckFailed, open_engine
from tests.support.planted import device as P

SHAPE = (2, 3, 4, 2, 8)  # keys and values, blocks, tokens, heads, head_dim
AXES = {"kv": 0, "head": 3}
LAYERS = 2
OUT_OF_MEMORY, ILLEGAL_ADDRESS = 2, 700
IN_ORDER = tuple(range(5))
DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8,
    torch.uint16,
]  # fmt: skip


class Caches:
    """The same bytes twice: in the memory of a device, and in tensors of host memory."""

    def __init__(self, fake: FakeCuda, driver: Any, dtype: torch.dtype, order: Sequence[int], gap: int) -> None:
        self.fake = fake
        driver.attach(0)
        strides, n = [0] * len(SHAPE), 1 + gap
        for axis in reversed(order):
            strides[axis], n = n, n * SHAPE[axis]
        torch.manual_seed(0)
        self.bytes = torch.randint(0, 256, (LAYERS * n * dtype.itemsize,), dtype=torch.uint8)
        self.address = driver.allocate(len(self.bytes))
        self.write()
        layers = self.bytes.view(dtype).view(LAYERS, n)
        self.host = [layer.as_strided(SHAPE, strides) for layer in (layers[at] for at in range(LAYERS))]
        self.device = [
            TensorMemory(
                self.address + at * n * dtype.itemsize, SHAPE, strides, dtype.itemsize, str(dtype), 0, driver
            )
            for at in range(LAYERS)
        ]  # fmt: skip

    def write(self) -> None:
        """Write what the host has into the device."""
        self.fake.write(self.address, self.bytes.numpy().tobytes())

    def planes(self, layers: Sequence[Any]) -> TensorPlanes:
        return TensorPlanes({f"layer {at}": one for at, one in enumerate(layers)}, block_axis=1, plane_axes=AXES)

    @property
    def are_equal(self) -> bool:
        return self.fake.read(self.address, len(self.bytes)) == self.bytes.numpy().tobytes()

    def tier(self) -> DeviceTier:
        return DeviceTier(self.device, block_axis=1, plane_axes=AXES)


@contextmanager
def caches(
    dtype: torch.dtype = torch.float32, order: Sequence[int] = IN_ORDER, gap: int = 0, **knobs: Any
) -> Iterator[Caches]:
    fake = FakeCuda(**knobs)
    with use(fake) as driver:
        try:
            yield Caches(fake, driver, dtype, order, gap)
        finally:
            close_copiers()
    assert not fake.wrong


def same_in(there: Caches) -> None:
    ours, theirs = there.planes(there.device), there.planes(there.host)
    assert ours.plane_names == theirs.plane_names
    for blocks in ([2, 0], [1]):
        found, expected = ours.samples(blocks), theirs.samples(blocks)
        assert [one.tobytes() for one in found] == [one.tobytes() for one in expected]
    assert ours.fill([1], "seed") == theirs.fill([1], "seed")
    assert there.are_equal
    ours.clear([2])
    theirs.clear([2])
    assert there.are_equal


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [0, 1])
def test_in_every_layout_samples_and_patterns_are_those_of_host_memory(gap: int) -> None:
    for order in itertools.permutations(range(len(SHAPE))):
        with caches(torch.bfloat16, order, gap) as there:
            same_in(there)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_every_kind_samples_and_patterns_are_those_of_host_memory(dtype: torch.dtype) -> None:
    with caches(dtype, (1, 3, 0, 2, 4)) as there:
        same_in(there)


def test_samples_of_many_blocks_are_one_batch() -> None:
    with caches() as there:
        planes = there.planes(there.device)
        planes.samples([0])  # makes the stream and the buffer
        begun = len(there.fake.calls)
        planes.samples([0, 1, 2])
        assert there.fake.calls[begun:] == ["cuMemcpyBatchAsync", "cuEventRecord", "cuEventSynchronize"]


def test_a_block_that_is_not_there_is_not_read() -> None:
    with caches() as there:
        planes = there.planes(there.device)
        for use_it in (planes.samples, planes.clear, lambda blocks: planes.fill(blocks, "seed")):
            for blocks in ([0, 3], [-1]):
                with pytest.raises(IndexError, match="must be from 0 to 2"):
                    use_it(blocks)


# --- errors -----------------------------------------------------------------------------------------------------------

USES: list[Callable[[TensorPlanes], object]] = [
    lambda planes: planes.samples([0, 2]),
    lambda planes: planes.fill([1], "seed"),
    lambda planes: planes.clear([1]),
]


def is_used_once(use_it: Callable[[TensorPlanes], object], number: int, code: int) -> int:
    """Use planes while one call of the driver fails, and return the number of calls."""
    with caches(torch.uint8) as there:  # no number is another one than itself
        planes, theirs = there.planes(there.device), there.planes(there.host)
        there.fake.fail(len(there.fake.calls) + number, code)
        begun = len(there.fake.calls)
        try:
            found, error = use_it(planes), None
        except (CudaError, Unproven) as raised:
            found, error = None, raised
        n_calls = len(there.fake.calls) - begun
        assert error is not None or found == use_it(theirs)
        if code == OUT_OF_MEMORY:
            assert not any(stream.queue for stream in there.fake.streams.values())
            assert use_it(planes) == use_it(theirs)
            assert there.are_equal
    return n_calls


@pytest.mark.parametrize("code", [OUT_OF_MEMORY, ILLEGAL_ADDRESS], ids=["refused", "sticky"])
@pytest.mark.parametrize("use_it", USES, ids=["samples", "fill", "clear"])
def test_planes_of_which_any_one_call_fails_are_over_and_right(
    use_it: Callable[[TensorPlanes], object], code: int
) -> None:
    for number in range(is_used_once(use_it, 1_000_000, code)):
        is_used_once(use_it, number, code)


# --- through an engine --------------------------------------------------------------------------------------------------


def open_over(there: Caches, **options: Any) -> tuple[DeviceTier, Any]:
    tier = there.tier()
    host = MemoryTier(8 * tier.block_bytes, tier.block_bytes, pin_memory=False)
    return tier, open_engine(tier, {"host": host}, shadow_check=1, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint16], ids=str)
async def test_a_canary_is_written_stored_loaded_and_found(dtype: torch.dtype) -> None:
    with caches(dtype, (1, 3, 0, 2, 4)) as there:
        tier, opened = open_over(there)
        async with opened as engine:
            check = await engine.check_layout(tier.canary(2), "a layout")
        assert (check.round_trip, check.shared) == (True, True)


async def test_a_layout_that_is_read_otherwise_than_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with caches() as there:
        tier, opened = open_over(there)
        P.pieces_are_loaded_in_another_order(monkeypatch)
        async with opened as engine:
            with pytest.raises(LayoutCheckFailed, match="planes are swapped"):
                await engine.check_layout(tier.canary(2), "a layout")


async def test_a_load_into_other_places_is_found_by_what_was_sampled_at_its_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with caches(torch.uint16) as there:
        tier, opened = open_over(there)
        async with opened as engine:
            await (await engine.store(tier.external([0, 1], [b"a", b"b"]), NO_WAIT)).wait()
            async with await engine.lookup([b"a"]) as hit:
                assert (await engine.load(hit, tier.into([2]), precondition=NO_WAIT)).loaded == 1
            P.pieces_are_loaded_in_another_order(monkeypatch)
            async with await engine.lookup([b"b"]) as hit:
                assert (await engine.load(hit, tier.into([2]), precondition=NO_WAIT)).loaded == 0
            assert engine.statistics().shadow.mismatches == {"stored": 1}


# --- and no task waits for a device ---------------------------------------------------------------------------------------


async def stored(there: Caches, engine: Any, tier: DeviceTier) -> None:
    result = await (await engine.store(tier.external([0], [b"new"]), NO_WAIT)).wait()
    assert result.completed


async def checked(there: Caches, engine: Any, tier: DeviceTier) -> None:
    assert (await engine.check_layout(tier.canary(2), "a layout")).shared


@pytest.mark.parametrize("work", [stored, checked])
async def test_while_a_device_is_busy_other_tasks_go_on(
    work: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maru.fake_cuda._fake._PATIENCE", 2.0)  # before a blocked loop is an error
    with caches() as there:
        tier, opened = open_over(there)
        async with opened as engine:
            tier.plane_samples([0])
            tier.into([2]).copy_in(0, new_pages(1, tier.block_bytes))
            gates = [threading.Event() for _ in there.fake.streams]
            for stream, gate in zip(there.fake.streams, gates, strict=True):
                there.fake.kernel(stream, bool, gate)
            begun = len(there.fake.calls)

            async def let_go_on() -> None:
                while "cuEventSynchronize" not in there.fake.calls[begun:]:  # noqa: ASYNC110 - a thread calls it
                    await trio.sleep(0.001)
                for gate in gates:
                    there.fake.open_gate(gate)

            with trio.fail_after(20):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(work, there, engine, tier)
                    nursery.start_soon(let_go_on)
