"""Every built-in tier as a destination, and every one that is a source with one block that is damaged behind its back."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from backends.abc import Key, RoomRequest, Tier
from backends.base.slots import SlotTier
from backends.device import DeviceTier
from backends.file import FileTier
from backends.maru import MaruTier
from backends.memory import MemoryTier
from backends.plugins import HostConfig, NativeTier
from backends.testing import FakeTier, payload_of
from backends.wrappers import Zstd, slot_bytes, wrap
from maru import MaruHandler
from maru.testing import open_test_server
from tests.support.plugin_peers import DeletingConnector

SIZE = 64
PAGE = 4096
Make = Callable[[int, int], Any]
"""``make(blocks, block_bytes)``"""


def memory(blocks: int, block_bytes: int, **options: Any) -> MemoryTier:
    return MemoryTier(blocks * block_bytes, block_bytes, **options)


def memory_in_a_thread(blocks: int, block_bytes: int) -> MemoryTier:
    tier = memory(blocks, block_bytes)
    tier.inline_bytes = -1
    return tier


def device(blocks: int, block_bytes: int, layers: int = 1) -> DeviceTier:
    """Blocks of tensors: of one, they are runs of host memory; of several, they are gathered and scattered."""
    tensors = [torch.zeros((blocks, block_bytes // layers), dtype=torch.uint8) for _ in range(layers)]
    return DeviceTier(tensors, pool=range(blocks))


def hosted(blocks: int, block_bytes: int, **knobs: Any) -> NativeTier:
    return NativeTier(DeletingConnector(), block_bytes, HostConfig(capacity_bytes=blocks * block_bytes, **knobs))


def wrapped(make: Make) -> Make:
    return lambda blocks, size: wrap(make(blocks, slot_bytes(size, Zstd())), Zstd(), block_bytes=size)


def files(directory: Path) -> Make:
    numbers = itertools.count()
    return lambda blocks, size: FileTier(directory / f"{next(numbers)}", blocks * size, block_bytes=size)


async def page_store(stack: AsyncExitStack, **knobs: Any) -> Make:
    server = await stack.enter_async_context(open_test_server(high_watermark=1.0))
    options = {"chunk_size_bytes": PAGE, "pool_size": 2 << 20, "auto_expand": False, "eager_map": False, **knobs}
    return lambda blocks, size: MaruTier(MaruHandler(server_url=server.endpoints[0], **options), block_bytes=size)


DESTINATIONS = (
    "memory",
    "memory in a thread",
    "memory without checksums",
    "device",
    "device of pieces",
    "file",
    "fake",
    "maru",
    "maru without checksums",
    "hosted",
    "hosted without checksums",
    "wrapped memory",
    "wrapped file",
    "wrapped maru",
    "wrapped hosted",
)
SOURCES = ("memory", "device of pieces", "file", "wrapped memory", "wrapped file", "wrapped without checksums")


@asynccontextmanager
async def opened(kind: str, directory: Path, blocks: int = 8, block_bytes: int = SIZE) -> AsyncIterator[Any]:
    """A tier of this kind; entered, if that can be done, and closed."""
    os.makedirs(directory, exist_ok=True)
    makers: dict[str, Make] = {
        "memory": memory,
        "memory in a thread": memory_in_a_thread,
        "memory without checksums": lambda blocks, size: memory(blocks, size, checksums=False),
        "device": device,
        "device of pieces": lambda blocks, size: device(blocks, size, layers=2),
        "file": files(directory),
        "fake": FakeTier,
        "hosted": hosted,
        "hosted without checksums": lambda blocks, size: hosted(blocks, size, checksums=False),
        "wrapped memory": wrapped(memory),
        "wrapped file": wrapped(files(directory)),
        "wrapped hosted": wrapped(hosted),
        "wrapped without checksums": wrapped(lambda blocks, size: memory(blocks, size, checksums=False)),
    }
    async with AsyncExitStack() as stack:
        if "maru" in kind:
            make = await page_store(stack, checksums="without" not in kind)
            makers |= {"maru": make, "maru without checksums": make, "wrapped maru": wrapped(make)}
        tier = makers[kind](blocks, block_bytes)
        if hasattr(tier, "close"):
            stack.callback(tier.close)
        if hasattr(type(tier), "__aenter__"):
            await stack.enter_async_context(tier)
        yield tier


async def store(tier: Any, source: Any, keys: list[Key], block_bytes: int | None = None) -> list[Any]:
    """Copy blocks of a source into a tier, as a pipeline does."""
    source = source.source if isinstance(source, Tier) else source
    reservation = await tier.reserve(
        RoomRequest(keys, tier.block_bytes if block_bytes is None else block_bytes, "fail")
    )
    refs = source.upgrade(keys)
    try:
        assert list(reservation.granted) == keys
        return list(await reservation.transfer(source, refs))
    finally:
        source.release(refs)
        reservation.release()


async def fill(tier: Any, keys: list[Key]) -> None:
    source = FakeTier(len(keys), tier.block_bytes)
    source.fill(keys)
    await store(tier, source, keys)


def flip(tier: Any, key: Key) -> None:
    """Flip one bit of a stored block, behind the tier's back."""
    if hasattr(tier, "inner"):
        tier, key = tier.inner, tier.stored_key(key)
    if isinstance(tier, FileTier):
        [path] = Path(tier._open.path).glob(f"*/{key.hex()}.*.kv")  # type: ignore[union-attr]
        with path.open("r+b") as file:
            file.seek(512 + 1)
            [byte] = file.read(1)
            file.seek(512 + 1)
            file.write(bytes([byte ^ 1]))
        return
    assert isinstance(tier, SlotTier)
    slots = tier.pool.slots([key])
    pages = tier._storage.pages(slots)
    if pages is not None:
        pages[0][1] ^= 1
    else:
        assert isinstance(tier, DeviceTier)
        first = tier.tensors[0]
        at = first.address + slots[0] * first.strides[tier.block_axes[0]] * first.item_bytes + 1
        ctypes.c_ubyte.from_address(at).value ^= 1


def payload(key: Key) -> bytes:
    return payload_of(key, SIZE)
