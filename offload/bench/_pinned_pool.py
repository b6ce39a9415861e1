"""``offload bench pinned-pool``: copies into a server's blocks and back.

They are compared with one memmove and with the socket. The server is a separate process, as ``offload pinned-pool``
runs it. One client maps its pool, the other is configured to stream through the socket; both copy the same tensor, in
turn. The memmove copies as many bytes from the same tensor into a mapping of the same kind (and out of it), on one
thread. All targets were written to before: the first touch of fresh memory costs more than the copy.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

from maru.base.scratch import scratch
from maru.bench.measure import Effort, Row, Samples, measure, rate_of, seconds_of
from maru.bench.processes import Child

if TYPE_CHECKING:
    import torch

    from backends.pinned_pool import MemoryBlock, MemoryPool

_MIB: Final = 1 << 20
_WAYS: Final = ("in", "out")
_LIMITS: Final = (
    ("memmove", "memmove of the same bytes", "ratio >= 0.85"),
    ("socket", "the same through the socket", "ratio >= 3"),
)
_GOALS_FROM: Final = 64
"""MiB of the smallest blocks with goals.

The figures of smaller blocks are shown without a goal.
"""
_NO_TORCH: Final = "torch is not installed, so there are no tensors to copy: pip install 'trio-offload[torch]'"


def rows(effort: Effort) -> Iterator[Row]:
    """Yield the rows of blocks of two sizes, and of an allocation."""
    sizes = {1: effort.size(1, 1), 64: effort.size(64, 2)}
    if importlib.util.find_spec("torch") is None:
        for label in sizes:
            yield from _rows(label, Samples(why_not=_NO_TORCH))
        return
    import torch

    from backends.pinned_pool import ServerPinnedMemoryPool

    with _server() as server, ExitStack() as stack:
        pools = {
            name: stack.enter_context(
                ServerPinnedMemoryPool(torch.uint8, 2 * max(sizes.values()), server=server, shared_memory=shared)
            )
            for name, shared in (("shared", True), ("socket", False))
        }
        for label, mib in sizes.items():
            source = torch.full((mib * _MIB,), 1, dtype=torch.uint8)
            into = torch.full_like(source, 2)
            subjects: dict[str, Callable[[], float]] = {}
            for name, pool in pools.items():
                block = pool.alloc_same_pin_tensor(source)
                assert block is not None
                subjects |= {f"in.{name}": _in(block, source), f"out.{name}": _out(block.copy_(source), into)}
            subjects |= _memmoves(source, into)
            samples = measure(f"pinned pool, {label} MiB", effort, subjects)
            del subjects
            yield from _rows(label, samples)
        yield _allocations(pools["shared"], effort)


def _rows(label: int, samples: Samples) -> Iterator[Row]:
    for way, (limit, beside, goal) in itertools.product(_WAYS, _LIMITS):
        goal_of_label = goal if label >= _GOALS_FROM else None
        name = f"pinned_pool.{label}MiB.{way}.{limit}"
        yield samples.row(name, "GB/s", f"{way}.shared", beside, f"{way}.{limit}", goal_of_label, scale=1e-9)


# --- subjects: bytes per second -----------------------------------------------------------------------------------


def _in(block: MemoryBlock, source: torch.Tensor) -> Callable[[], float]:
    return lambda: _rate(source.nbytes, lambda: block.copy_(source))


def _out(block: MemoryBlock, into: torch.Tensor) -> Callable[[], float]:
    return lambda: _rate(into.nbytes, lambda: block.to(out=into))


def _memmoves(source: torch.Tensor, into: torch.Tensor) -> dict[str, Callable[[], float]]:
    from backends.pinned_pool import PinnedMemoryPool

    pool = PinnedMemoryPool(source.dtype, max(1, source.nbytes // _MIB))
    block = pool.alloc_same_pin_tensor(source)
    assert block is not None
    there, n = block.copy_(source).data_ptr(), source.nbytes

    def memmove_in() -> float:
        assert block is not None  # the block keeps its memory alive
        return _rate(n, lambda: ctypes.memmove(there, source.data_ptr(), n))

    def memmove_out() -> float:
        assert block is not None
        return _rate(n, lambda: ctypes.memmove(into.data_ptr(), there, n))

    return {"in.memmove": memmove_in, "out.memmove": memmove_out}


def _rate(nbytes: int, copy: Callable[[], object]) -> float:
    """Return bytes per second over several copies.

    One measurement then moves at least some 16 MiB.
    """
    return rate_of(nbytes, copy, max(1, 16 * _MIB // nbytes))


def _allocations(pool: MemoryPool, effort: Effort) -> Row:
    """Measure allocating and freeing a block: two round trips, next to one."""
    import torch

    tensor, times = torch.empty(1, dtype=torch.uint8), effort.size(300, 20)

    def allocate_and_free() -> None:
        block = pool.alloc_same_pin_tensor(tensor)
        assert block is not None
        pool.free(block)

    calls = {"blocks": allocate_and_free, "questions": pool.get_usage_info}
    subjects = {name: partial(seconds_of, call, times) for name, call in calls.items()}
    samples = measure("pinned pool, allocations", effort, subjects)
    beside = "one question and its answer"
    return samples.row("pinned_pool.alloc_and_free", "us", "blocks", beside, "questions", scale=1e6)


@contextmanager
def _server() -> Iterator[str]:
    """Start a server in a child process. Yield its address."""
    with scratch("pp") as directory:
        command = ["-m", "offload", "pinned-pool", "--json", "--port", "0", "--pool-memory-size", "512"]
        command += ["--runtime-dir", directory, "--log-level", "error"]
        with Child(command) as process:
            yield f"{process.ready['address']}"
