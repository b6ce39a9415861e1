"""What the tests of wrappers share: chains, wrapped tiers of every kind, and how to put blocks in, harm them, get them out."""

from __future__ import annotations

import itertools
import struct
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from backends.abc import Key, RoomRequest
from backends.base.pooled import Lease
from backends.base.slots import PagesDestination
from backends.file import FileTier
from backends.maru import MaruTier
from backends.memory import MemoryTier
from backends.testing import payload_of
from backends.wrappers import AesGcm, Chain, Context, Fp8, Wrapper, Zstd, slot_bytes, wrap
from maru import MaruHandler
from maru.testing import open_test_server

SECRETS = {"": b"nobody's secret!", "ann": b"a" * 32, "bob": b"b" * 24}
NAMES = ("zstd", "fp8", "aes", "fp8-zstd", "zstd-aes", "fp8-zstd-aes")
EXACT = ("zstd", "aes", "zstd-aes")
PLACES = ("memory", "memory without checksums", "file", "file of slots")
PAGE = 256 << 10
"""Eight of them fill the smallest region of a page store."""
_numbers = itertools.count()


def wrappers_of(chain: str, **options: Any) -> list[Wrapper]:
    makers: dict[str, Callable[[], Wrapper]] = {
        "zstd": Zstd,
        "fp8": lambda: Fp8("float32", row=8, lossy=True),
        "aes": lambda: AesGcm(options.get("secrets", SECRETS)),
        "spy": lambda: options["spy"],
    }
    return [makers[name]() for name in chain.split("-")]


def make_tier(place: str, directory: Path, wrappers: Sequence[Wrapper], blocks: int, block_bytes: int) -> Any:
    slot = slot_bytes(block_bytes, *wrappers)
    inner: Any
    if place.startswith("memory"):
        inner = MemoryTier(blocks * slot, slot, checksums=place == "memory")
    else:
        options = {"block_bytes": slot} if place == "file of slots" else {}
        inner = FileTier(directory / str(next(_numbers)), blocks * slot, **options)
    return wrap(inner, *wrappers, block_bytes=block_bytes)


def memory(wrappers: Sequence[Wrapper], blocks: int = 8, block_bytes: int = 64, **options: Any) -> Any:
    """A wrapped memory tier whose own checksums find nothing: what is found, the chain has found."""
    slot = slot_bytes(block_bytes, *wrappers)
    return wrap(MemoryTier(blocks * slot, slot, checksums=False, **options), *wrappers, block_bytes=block_bytes)


class _ForeignLease(Lease):
    def forget(self, positions: Sequence[int]) -> bool:
        return False


class Foreign(MemoryTier):
    """A tier that cannot be told that what it holds is damaged: only its keys can be deleted."""

    def forget_held(self, keys: Sequence[Key], refs: Sequence[int]) -> bool:
        return False

    def pin_nowait(self, keys: Sequence[Key]) -> Lease:
        lease = super().pin_nowait(keys)
        return _ForeignLease(self, lease.keys, lease.refs)


def foreign(wrappers: Sequence[Wrapper], blocks: int = 8, block_bytes: int = 64, kind: Any = Foreign) -> Any:
    """A wrapped one, whose own checksums find nothing."""
    slot = slot_bytes(block_bytes, *wrappers)
    return wrap(kind(blocks * slot, slot, checksums=False), *wrappers, block_bytes=block_bytes)


@asynccontextmanager
async def page_store(**knobs: Any) -> AsyncIterator[Callable[..., MaruTier]]:
    """Makes tiers over one page store; not entered yet."""
    async with open_test_server(high_watermark=1.0) as server:

        def make(pages: int = 8) -> MaruTier:
            defaults = {"chunk_size_bytes": PAGE, "pool_size": pages * PAGE, "auto_expand": False, "eager_map": False}
            name = {"namespace": f"{next(_numbers)}"}
            return MaruTier(MaruHandler(server_url=server.endpoints[0], **{**defaults, **name, **knobs}))

        yield make


# --- blocks in and out --------------------------------------------------------------------------------------------


def oracle(wrappers: Sequence[Wrapper], data: bytes) -> bytes:
    """What comes back of these bytes: themselves, unless a wrapper is lossy."""
    for wrapper in wrappers:
        if wrapper.lossy:
            data = through(wrapper, data)
    return data


def through(wrapper: Wrapper, data: bytes, context: Context | None = None) -> bytes:
    context = context or Context(b"key", "", b"chain")
    back = bytearray(len(data))
    wrapper.decode(context, memoryview(bytearray(encoded(wrapper, data, context))), memoryview(back))
    return bytes(back)


def encoded(wrapper: Wrapper, data: bytes, context: Context | None = None) -> bytes:
    room = bytearray(wrapper.bound(len(data)))
    n = wrapper.encode(context or Context(b"key", "", b"chain"), memoryview(bytearray(data)), memoryview(room))
    assert 0 <= n <= len(room)
    return bytes(room[:n])


def judge_lossy(monkeypatch: Any, wrappers: Sequence[Wrapper]) -> None:
    """Have `check_tier` expect what the oracle says, wherever it asks for a payload."""

    def payload(key: bytes, n: int) -> bytes:
        return oracle(wrappers, payload_of(key, n))

    for name, module in list(sys.modules.items()):
        if name.startswith("backends.testing") and hasattr(module, "payload_of"):
            monkeypatch.setattr(module, "payload_of", payload)


def source_of(blocks: dict[bytes, bytes], **options: Any) -> MemoryTier:
    size = len(next(iter(blocks.values())))
    source = MemoryTier(len(blocks) * size, size, **options)
    for key, data in blocks.items():
        source.put(key, data)
    return source


async def store(tier: Any, blocks: dict[bytes, bytes], when_full: Any = "fail", source: Any = None) -> list[Any]:
    source = source or source_of(blocks)
    reservation = await tier.reserve(RoomRequest(list(blocks), tier.block_bytes, when_full))
    refs = source.upgrade(list(blocks))
    try:
        return list(await reservation.transfer(source, refs))
    finally:
        reservation.release()
        source.release(refs)


async def load(tier: Any, keys: Sequence[bytes]) -> tuple[list[Any], list[bytes]]:
    places = [bytearray(b"\xee" * tier.block_bytes) for _ in keys]
    async with await tier.pin(keys) as lease:
        outcomes = list(await tier.load(lease, PagesDestination.over(places)))
    return outcomes, [bytes(place) for place in places]


def blocks_of(n: int, size: int = 64, name: str = "k") -> dict[bytes, bytes]:
    keys = [f"{name}{number}".encode() for number in range(n)]
    return {key: payload_of(key, size) for key in keys}


def at_rest(tier: Any) -> None:
    statistics = tier.statistics()
    assert (statistics.reserved_blocks, statistics.held_blocks) == (0, 0)


# --- what lies there ----------------------------------------------------------------------------------------------


def stored_page(tier: Any, key: bytes) -> memoryview:
    """Where a block of a wrapped memory tier lies, to be read and harmed."""
    [slot] = tier.inner.pool.slots([tier.stored_key(key)])
    page: memoryview = tier.inner.views([slot])[0]
    return page


def file_of(tier: Any, key: bytes) -> Path:
    name = tier.stored_key(key).hex()
    [path] = Path(tier.inner._open.path).glob(f"*/{name}.*.kv")
    return path


def sealed_again(chain: Chain, key: bytes, page: memoryview) -> None:
    """Make the checksum fit whatever stands in the page now, as somebody would who means harm."""
    from backends.wrappers import _chain

    fixed = _chain._FIXED.size
    lengths = struct.unpack_from(f"<{len(chain.wrappers)}Q", page, fixed)
    head = page[: fixed + 8 * len(lengths)]
    body = page[chain.header_bytes : chain.header_bytes + lengths[-1]]
    struct.pack_into("<Q", page, fixed + 8 * len(lengths), _chain._sum_of(head, key, body))


# --- wrappers to look with ----------------------------------------------------------------------------------------


class Spy:
    """Inverts every byte, says what it was given, waits where it is told to, and fails as told. Stands in any thread."""

    id = b"spy/1"
    lossy = False

    def __init__(self) -> None:
        self.encoded: list[bytes] = []
        self.decoded: list[bytes] = []
        self.started = threading.Event()
        self.go_on: threading.Event | None = None
        self.error: Exception | None = None
        self.says: int | None = None

    def __repr__(self) -> str:
        return "Spy()"

    def bound(self, size: int) -> int:
        return size

    def encode(self, context: Context, src: memoryview, dst: memoryview) -> int:
        self._at(src, dst)
        self.encoded.append(bytes(src))
        dst[: src.nbytes] = bytes(byte ^ 0xFF for byte in src)
        return src.nbytes if self.says is None else self.says

    def decode(self, context: Context, src: memoryview, dst: memoryview) -> None:
        self._at(src, dst)
        self.decoded.append(bytes(src))
        dst[:] = bytes(byte ^ 0xFF for byte in src)

    def _at(self, src: memoryview, dst: memoryview) -> None:
        assert src.nbytes == dst.nbytes, "a wrapper is given what belongs together, and no more"
        self.started.set()
        if self.go_on is not None:
            assert self.go_on.wait(30)
        if self.error is not None:
            raise self.error
