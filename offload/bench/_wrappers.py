"""``offload bench wrappers``: bytes through a wrapped tier.

They are compared with the bare library on one thread, and with memmove. A batch of 64 blocks goes into a memory tier
and comes back: reservation, copy thread, header, checksums and publication are in the figure. The bare library does the
same work over the same blocks in one loop, into memory that is allocated already, in as few calls as it can. The
memmove copies the same blocks once.

The blocks are synthetic keys and values: 16-bit floats, normally distributed, each channel with its own scale. Real
ones may compress better or worse; measure yours.

Last, the gain: the bytes that a file tier takes on disk for each plain byte.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, Final

import trio

from backends.abc import LOADED, STORED, Key, RoomRequest
from backends.base.pages import Pages, new_pages
from backends.base.slots import PagesDestination
from backends.base.threads import keep_threads
from backends.file import FileTier
from backends.memory import MemoryTier
from backends.wrappers import AesGcm, Fp8, Wrapper, Zstd, slot_bytes, wrap
from maru.base.scratch import scratch
from maru.bench.measure import Effort, Row, Samples, measure, rate_of

_BLOCKS: Final = 64
_ROW: Final = 128
_SECRET: Final = bytes(range(32))
_CHAINS: Final = ("zstd", "fp8", "aes", "fp8-zstd-aes")
_NEEDED: Final = {"torch": "torch", "zstandard": "zstd", "cryptography": "aes"}
_WAYS: Final = ("store", "load")
_LIMITS: Final = (("bare", "the bare library, one thread"), ("memmove", "memmove of the same bytes"))


def rows(effort: Effort) -> Iterator[Row]:
    """Yield the rows of each wrapper and of all together.

    The rows of the bytes on disk follow.
    """
    missing = [extra for package, extra in _NEEDED.items() if find_spec(package) is None]
    if missing:
        nothing = Samples(why_not=f"not all extras are installed: pip install 'trio-offload[{','.join(missing)}]'")
        for chain in _CHAINS:
            yield from _rows(chain, nothing)
            yield _gained(chain, None, nothing.why_not)
        return
    blocks = _Blocks(effort.size(256 << 10, 4 << 10))
    with _one_thread_each():
        for chain in _CHAINS:
            yield from _rows(chain, measure(f"wrappers, {chain}", effort, _subjects(blocks, chain)))
    for chain in _CHAINS:
        effort.progress(f"wrappers, {chain}: on disk")
        yield _gained(chain, trio.run(_on_disk, blocks, chain))


def _rows(chain: str, samples: Samples) -> Iterator[Row]:
    for way, (limit, beside) in product(_WAYS, _LIMITS):
        name = f"wrappers.{chain}.{way}.{limit}"
        yield samples.row(name, "MB/s", f"{way}.wrapped", beside, f"{way}.{limit}", scale=1e-6)


def _gained(chain: str, share: float | None, why: str = "") -> Row:
    one = None if share is None else 1.0
    return Row(f"wrappers.{chain}.on_disk", share, "B per plain B", "unwrapped", one, why_not=why)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Let torch use one thread.

    With one for each core it would compete with the copy threads.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# --- stored blocks ------------------------------------------------------------------------------------------------


class _Blocks:
    """A batch in a memory tier, and buffers to load it to."""

    def __init__(self, block_bytes: int) -> None:
        import torch

        self.block_bytes = block_bytes
        self.keys: list[Key] = [number.to_bytes(32, "little") for number in range(_BLOCKS)]
        self.source = MemoryTier(_BLOCKS * block_bytes, block_bytes)
        rng = torch.Generator().manual_seed(5)
        scales = torch.exp(torch.randn(1024, generator=rng))
        for key in self.keys:
            values = torch.randn(block_bytes // 2, generator=rng).view(-1, min(1024, block_bytes // 2))
            block = bytearray(block_bytes)
            torch.frombuffer(block, dtype=torch.bfloat16).copy_((values * scales[: values.shape[1]]).view(-1))
            self.source.put(key, block)
        self.places = new_pages(_BLOCKS, block_bytes)
        for page in self.places:
            page[:] = bytes(block_bytes)
        refs = self.source.upgrade(self.keys)
        views = self.source.views(refs)
        assert views is not None
        self.pages: Pages = views
        self.refs = refs

    @property
    def nbytes(self) -> int:
        return _BLOCKS * self.block_bytes


def _wrappers(chain: str) -> list[Wrapper]:
    makers: dict[str, Callable[[], Wrapper]] = {
        "zstd": Zstd,
        "fp8": lambda: Fp8("bfloat16", row=_ROW, lossy=True),
        "aes": lambda: AesGcm({"": _SECRET}),
    }
    return [makers[name]() for name in chain.split("-")]


# --- subjects: bytes per second -----------------------------------------------------------------------------------


def _subjects(blocks: _Blocks, chain: str) -> dict[str, Callable[[], float]]:
    wrappers = _wrappers(chain)
    slot = slot_bytes(blocks.block_bytes, *wrappers)
    tier = wrap(MemoryTier(_BLOCKS * slot, slot), *wrappers, block_bytes=blocks.block_bytes)
    bare = _Bare(blocks, chain)

    def memmove() -> None:
        for to, at in zip(blocks.places.addresses, blocks.pages.addresses, strict=True):
            ctypes.memmove(to, at, blocks.block_bytes)

    moved = partial(rate_of, blocks.nbytes, memmove)
    return {
        "store.wrapped": partial(trio.run, _store, tier, blocks),
        "store.bare": bare.there,
        "store.memmove": moved,
        "load.wrapped": partial(trio.run, _load, tier, blocks),
        "load.bare": bare.back,
        "load.memmove": moved,
    }


async def _store(tier: Any, blocks: _Blocks) -> float:
    async with keep_threads():
        await tier.delete(blocks.keys)
        await _put(tier, blocks)  # starts the thread
        await tier.delete(blocks.keys)
        begun = time.perf_counter()
        await _put(tier, blocks)
        return blocks.nbytes / (time.perf_counter() - begun)


async def _put(tier: Any, blocks: _Blocks) -> None:
    reservation = await tier.reserve(RoomRequest(blocks.keys, blocks.block_bytes, "fail"))
    outcomes = await reservation.transfer(blocks.source, blocks.refs)
    reservation.release()
    assert outcomes == [STORED] * _BLOCKS


async def _load(tier: Any, blocks: _Blocks) -> float:
    async with keep_threads():
        if not tier.contains_nowait(blocks.keys):
            await _put(tier, blocks)
        await _get(tier, blocks)
        begun = time.perf_counter()
        await _get(tier, blocks)
        return blocks.nbytes / (time.perf_counter() - begun)


async def _get(tier: Any, blocks: _Blocks) -> None:
    async with await tier.pin(blocks.keys) as lease:
        outcomes = await tier.load(lease, PagesDestination(blocks.places))
    assert list(outcomes) == [LOADED] * _BLOCKS


class _Bare:
    """Loop that does the same work by calling the libraries directly."""

    def __init__(self, blocks: _Blocks, chain: str) -> None:
        self._blocks = blocks
        self._steps = [_STEPS[name](blocks.block_bytes) for name in chain.split("-")]
        self._made: list[Any] = []

    def there(self) -> float:
        pages = list(self._blocks.pages)
        begun = time.perf_counter()
        made: list[Any] = []
        for page in pages:
            data: Any = page
            for there, _ in self._steps:
                data = there(data)
            made.append(data)
        seconds = time.perf_counter() - begun
        self._made = made
        return self._blocks.nbytes / seconds

    def back(self) -> float:
        if not self._made:
            self.there()
        begun = time.perf_counter()
        for data in self._made:
            for _, back in reversed(self._steps):
                data = back(data)
        return self._blocks.nbytes / (time.perf_counter() - begun)


Step = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def _bare_zstd(block_bytes: int) -> Step:
    import zstandard

    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    return compressor.compress, decompressor.decompress


def _bare_aes(block_bytes: int) -> Step:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    cipher = AESGCM(_SECRET)

    def there(data: Any) -> Any:
        nonce = os.urandom(12)
        return nonce, cipher.encrypt(nonce, data, b"")

    return there, lambda sealed: cipher.decrypt(sealed[0], sealed[1], b"")


def _bare_fp8(block_bytes: int) -> Step:
    import torch

    def there(data: Any) -> Any:
        wide = torch.frombuffer(data, dtype=torch.bfloat16).view(-1, _ROW).to(torch.float32)
        scale = wide.abs().amax(1, keepdim=True) / 448.0
        stored = memoryview(bytearray(wide.numel() + 4 * scale.numel()))
        torch.frombuffer(stored[: 4 * scale.numel()], dtype=torch.float32).copy_(scale.view(-1))
        torch.frombuffer(stored[4 * scale.numel() :], dtype=torch.float8_e4m3fn).copy_((wide / scale).view(-1))
        return stored

    def back(data: Any) -> Any:
        stored = torch.frombuffer(bytearray(data) if isinstance(data, bytes) else data, dtype=torch.uint8)
        rows = len(stored) // (_ROW + 4)
        scale = stored[: 4 * rows].view(torch.float32).view(-1, 1)
        small = stored[4 * rows :].view(torch.float8_e4m3fn).view(-1, _ROW)
        return (small.to(torch.float32) * scale).to(torch.bfloat16)

    return there, back


_STEPS: Final[dict[str, Callable[[int], Step]]] = {"zstd": _bare_zstd, "fp8": _bare_fp8, "aes": _bare_aes}


# --- gain ---------------------------------------------------------------------------------------------------------


async def _on_disk(blocks: _Blocks, chain: str) -> float:
    """Measure bytes on disk for each plain byte.

    Headers and the rounding of the file system are included.
    """
    wrappers = _wrappers(chain)
    with ExitStack() as stack:
        directory = stack.enter_context(scratch("offload-bench"))
        below = FileTier(directory, 2 * blocks.nbytes + _BLOCKS * 4096)
        stack.callback(below.close)
        await _put(wrap(below, *wrappers, block_bytes=blocks.block_bytes), blocks)
        return sum(_taken(Path(directory))) / blocks.nbytes


def _taken(directory: Path) -> Sequence[int]:
    return [path.stat().st_blocks * 512 for path in directory.glob("*/*.kv")]
