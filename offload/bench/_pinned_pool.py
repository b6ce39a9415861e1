"""``offload bench pinned-pool``: copies into a server's blocks and out of them, beside one memmove and the socket.

The server is a separate process, as ``offload pinned-pool`` runs it. One client maps its pool, the other is configured to
stream through the socket; both copy the same tensor, in turn. The memmove copies as many bytes from the same tensor into a
mapping of the same kind (and out of it), on one thread. All targets were written to before: the first touch of fresh memory
costs more than the copy.
"""

from __future__ import annotations

import ctypes
import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

from maru.base.scratch import scratch
from maru.bench._measure import Effort, Sample, in_turn, noisiest
from maru.bench._processes import Child
from maru.bench._row import Goal, Row

if TYPE_CHECKING:
    import torch

    from backends.pinned_pool import MemoryBlock, MemoryPool

_MIB: Final = 1 << 20
_WAYS: Final = ("in", "out")
_MEMMOVE: Final = Goal("ratio", ">=", 0.85)
_SOCKET: Final = Goal("ratio", ">=", 3.0)
_GOALS_FROM: Final = 64
"""MiB. The goals are for larger blocks; the figures of smaller ones are shown without a goal."""
_NO_TORCH: Final = "torch is not installed, so there are no tensors to copy: pip install 'trio-offload[torch]'"


def rows(effort: Effort) -> Iterator[Row]:
    """Copies of blocks of two sizes, and what an allocation costs."""
    sizes = {1: effort.size(1, 1), 64: effort.size(64, 2)}
    if importlib.util.find_spec("torch") is None:
        for label in sizes:
            for way in _WAYS:
                yield from _rows(label, way, None, None, None)
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
            samples = in_turn(f"pinned pool, {label} MiB", effort, subjects)
            del subjects
            for way in _WAYS:
                yield from _rows(label, way, *(samples[f"{way}.{name}"] for name in ("shared", "memmove", "socket")))
        yield _allocations(pools["shared"], effort)


def _rows(label: int, way: str, shared: Sample | None, memmove: Sample | None, socket: Sample | None) -> Iterator[Row]:
    for name, beside, limit, goal in (
        ("memmove", "memmove of the same bytes", memmove, _MEMMOVE),
        ("socket", "the same through the socket", socket, _SOCKET),
    ):
        yield Row(
            f"pinned_pool.{label}MiB.{way}.{name}",
            None if shared is None else shared.median / 1e9,
            "GB/s",
            beside,
            None if limit is None else limit.median / 1e9,
            goal if label >= _GOALS_FROM else None,
            noisiest(shared, limit) if shared and limit else None,
            "" if shared else _NO_TORCH,
        )


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
        assert block is not None  # which keeps its memory
        return _rate(n, lambda: ctypes.memmove(there, source.data_ptr(), n))

    def memmove_out() -> float:
        assert block is not None
        return _rate(n, lambda: ctypes.memmove(into.data_ptr(), there, n))

    return {"in.memmove": memmove_in, "out.memmove": memmove_out}


def _rate(nbytes: int, copy: Callable[[], object]) -> float:
    """Bytes per second over several copies, so that one measurement moves some 16 MiB at least."""
    times = max(1, 16 * _MIB // nbytes)
    begun = time.perf_counter()
    for _ in range(times):
        copy()
    return times * nbytes / (time.perf_counter() - begun)


def _allocations(pool: MemoryPool, effort: Effort) -> Row:
    """Allocate and free a block: two round trips, beside one."""
    import torch

    tensor, times = torch.empty(1, dtype=torch.uint8), effort.size(300, 20)

    def blocks() -> float:
        begun = time.perf_counter()
        for _ in range(times):
            block = pool.alloc_same_pin_tensor(tensor)
            assert block is not None
            pool.free(block)
        return (time.perf_counter() - begun) / times * 1e6

    def questions() -> float:
        begun = time.perf_counter()
        for _ in range(times):
            pool.get_usage_info()
        return (time.perf_counter() - begun) / times * 1e6

    samples = in_turn("pinned pool, allocations", effort, {"blocks": blocks, "questions": questions})
    ours, limit = samples["blocks"], samples["questions"]
    return Row(
        "pinned_pool.alloc_and_free",
        ours.median,
        "us",
        "one question and its answer",
        limit.median,
        None,
        noisiest(ours, limit),
    )


@contextmanager
def _server() -> Iterator[str]:
    """Start a server in a child process. Yields its address."""
    with scratch("pp") as directory:
        command = ["-m", "offload", "pinned-pool", "--json", "--port", "0", "--pool-memory-size", "512"]
        command += ["--runtime-dir", directory, "--log-level", "error"]
        with Child(command) as process:
            yield f"{process.ready['address']}"
