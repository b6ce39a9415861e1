"""``offload bench device``: blocks of a GPU to pinned pages and back.

They are compared with a bare call of the driver. A block has 16 tokens; its layouts are those of engines. The limit is
one ``cuMemcpyBatchAsync`` of the same pieces, listed beforehand, in a stream of its own. A multiplication of matrices
is timed alone and next to copies, if torch sees the device.

Without a GPU all of it runs over a driver in Python, and the bytes are compared: the rows have no figures then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs

from backends.base.block_layout import Plane
from backends.base.copier import BlockPieces, Pieces, close_copiers, copier_of
from backends.device import DeviceBlocks
from backends.memory import HostPages
from maru.base.memory.cuda import Driver, NoDriver, find_driver
from maru.bench.measure import Effort, Row, Samples, measure, rate_of, seconds_of
from maru.fake_cuda import FakeCuda, use

if TYPE_CHECKING:
    from backends.base.pages import Pages

_KIB: Final = 1 << 10
_BYTES: Final = 256 << 20
"""Bytes of the blocks of a layout that are copied at once."""
_WAYS: Final = ("store", "load")
_MATMUL: Final = 4096
"""Rows of the square matrices."""


@attrs.frozen
class _Layout:
    """Tensors of rows, one row for each block."""

    name: str
    tensors: int
    row: int
    """Bytes of a block in a tensor."""
    goal: str | None = None
    """Goal relative to the bare call."""

    @property
    def block_bytes(self) -> int:
        return self.tensors * self.row


_LAYOUTS: Final = (
    _Layout("run.64KiB", 1, 64 * _KIB),
    _Layout("run.256KiB", 1, 256 * _KIB),
    _Layout("run.1MiB", 1, 1024 * _KIB, goal="ratio >= 0.85"),
    _Layout("run.2MiB", 1, 2048 * _KIB),
    _Layout("layers32.64KiB", 32, 64 * _KIB, goal="ratio >= 0.7"),
    _Layout("keys-and-values64.32KiB", 64, 32 * _KIB),
    _Layout("latent61.18KiB", 61, 18 * _KIB),
)


def rows(effort: Effort) -> Iterator[Row]:
    """Yield the rows of each layout, and of a multiplication.

    The latter runs next to copies.
    """
    with ExitStack() as stack:
        why_not = ""
        try:
            driver = find_driver()
        except NoDriver as exc:
            why_not = f"{exc}; over a driver in Python all bytes arrived, which says nothing about speed"
            driver = stack.enter_context(use(FakeCuda()))
            effort = attrs.evolve(effort, quick=True, repeat=1)
        stack.callback(close_copiers)
        driver.attach(0)
        for layout in _LAYOUTS:
            yield from _of_layout(layout, driver, effort, why_not)
        yield _beside_a_matmul(driver, effort, why_not)


def _of_layout(layout: _Layout, driver: Driver, effort: Effort, why_not: str) -> Iterator[Row]:
    n = max(4, effort.size(_BYTES, 4 * layout.block_bytes) // layout.block_bytes)
    with ExitStack() as stack:
        tensors = [driver.allocate(n * layout.row) for _ in range(layout.tensors)]
        for address in tensors:
            stack.callback(driver.free, address)
        planes = [(address, Plane(0, layout.row, layout.row)) for address in tensors]
        blocks = DeviceBlocks(planes, n, 0, None)
        host = HostPages(n, layout.block_bytes)
        host.start_pinning(now=True)
        stack.callback(host.close)
        pages = host.pages(range(n))
        _check(blocks, pages, n)
        order = [*range(1, n, 2), *range(0, n, 2)]
        bare = BlockPieces(planes, n).of(order, pages)
        copies: dict[str, Callable[[], object]] = {}
        for way in _WAYS:
            copies[way] = partial(blocks.copy_out if way == "store" else blocks.copy_in, order, pages)
            copies[f"bare {way}"] = _bare(driver, bare, load=way == "load", stack=stack)
        subjects = {name: partial(rate_of, n * layout.block_bytes, copy) for name, copy in copies.items()}
        samples = measure(f"device, {layout.name}", effort, subjects)
        samples.why_not = why_not
        beside = f"{driver.copy_call} of the same pieces"
        for way in _WAYS:
            name = f"device.{layout.name}.{way}"
            yield samples.row(name, "GB/s", way, beside, f"bare {way}", layout.goal, scale=1e-9)


def _check(blocks: DeviceBlocks, pages: Pages, n: int) -> None:
    """Copy a pattern to the device and back.

    Each block comes back into another page.

    Raises:
        AssertionError: a block did not arrive unchanged.
    """
    for at, page in enumerate(pages):
        page[:] = (at % 251 + 1).to_bytes(1, "big") * len(page)
    blocks.copy_in(range(n), pages)
    for page in pages:
        page[:] = bytes(len(page))
    blocks.copy_out(range(n - 1, -1, -1), pages)
    for at, page in enumerate(pages):
        assert page == ((n - 1 - at) % 251 + 1).to_bytes(1, "big") * len(page), f"block {n - 1 - at} is other bytes"


def _bare(driver: Driver, pieces: Pieces, *, load: bool, stack: ExitStack) -> Callable[[], None]:
    """Return a function that copies the pieces by the driver alone."""
    stream, end = driver.stream(), driver.event()
    stack.callback(driver.destroy_stream, stream)
    stack.callback(driver.destroy_event, end)
    to, at = (pieces.device, pieces.host) if load else (pieces.host, pieces.device)

    def copy() -> None:
        driver.copy(stream, to, at, pieces.sizes, load=load)
        driver.record(end, stream)
        driver.synchronize(end)

    return copy


# --- cost of a copy for the engine --------------------------------------------------------------------------------


def _beside_a_matmul(driver: Driver, effort: Effort, why_not: str) -> Row:
    torch = None if why_not else _torch()
    if torch is None:
        return _matmul_row(Samples(why_not=why_not or "torch sees no device"))
    a = torch.randn(_MATMUL, _MATMUL, device="cuda", dtype=torch.bfloat16)

    def multiply() -> None:
        for _ in range(effort.size(50, 5)):
            torch.mm(a, a)
        torch.cuda.synchronize()

    size = 1024 * _KIB
    n = effort.size(_BYTES, 4 * size) // size
    address = driver.allocate(n * size)
    host = HostPages(n, size)
    host.start_pinning(now=True)
    pieces = BlockPieces([(address, Plane(0, size, size))], n).of(range(n), host.pages(range(n)))
    try:
        beside = partial(_beside, pieces, multiply)
        subjects = {"beside": partial(seconds_of, beside), "alone": partial(seconds_of, multiply)}
        return _matmul_row(measure("device, matmul", effort, subjects))
    finally:
        driver.free(address)
        host.close()


def _matmul_row(samples: Samples) -> Row:
    name, goal = "device.matmul.beside-copies", "ratio <= 1.05"
    return samples.row(name, "ms", "beside", "the same alone", "alone", goal, scale=1e3)


def _beside(pieces: Pieces, work: Callable[[], None]) -> None:
    """Do work while both ways of the copier are busy."""
    over = threading.Event()
    copier = copier_of(0)

    def copy(way: Callable[[Pieces, Sequence[Any]], None]) -> None:
        while not over.is_set():
            way(pieces, ())

    threads = [threading.Thread(target=copy, args=[way]) for way in (copier.store, copier.load)]
    for thread in threads:
        thread.start()
    try:
        work()
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _torch() -> Any:
    """Return torch, if it sees a device."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None
