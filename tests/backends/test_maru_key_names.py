"""What keys are called in the page store: by their digits, or as the text that they are."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from backends import make_tier
from backends.abc import LOADED, STORED, Deletion, RoomRequest
from backends.base.slots import PagesDestination
from backends.maru import MaruTier
from backends.maru._names import KeyNaming
from backends.maru.l1 import MaruL1
from backends.memory import MemoryTier
from backends.testing import check_tier, payload_of
from maru import MaruHandler
from maru.testing import open_test_server

BLOCK = 256 << 10
BLOCKS = 8
TEXTS = [b"org/model@01000100@0@00ff", "Größe@1@0@01".encode()]


def handler_to(endpoint: str, **knobs: Any) -> MaruHandler:
    defaults = {"chunk_size_bytes": BLOCK, "pool_size": BLOCKS * BLOCK, "auto_expand": False, "timeout_ms": 30_000}
    return MaruHandler(server_url=endpoint, **{**defaults, **knobs})


@asynccontextmanager
async def open_pair() -> AsyncIterator[tuple[MaruTier, MaruHandler]]:
    """A tier that names keys by their text, and a handler that sees the same pool."""
    with trio.fail_after(60):
        async with (
            open_test_server(high_watermark=1.0) as server,
            MaruTier(handler_to(server.endpoints[0]), key_names="text") as tier,
            handler_to(server.endpoints[0], pool_size=0) as handler,
        ):
            yield tier, handler


async def store(tier: MaruTier, keys: list[bytes]) -> None:
    host = MemoryTier(len(keys) * BLOCK, BLOCK)
    for key in keys:
        host.put(key, payload_of(key, BLOCK))
    reservation = await tier.reserve(RoomRequest(keys, BLOCK, "fail"))
    assert await reservation.transfer(host, host.pool.slots(keys)) == [STORED] * len(keys)
    reservation.release()
    host.close()


async def test_a_text_is_what_another_client_finds_the_block_by() -> None:
    async with open_pair() as (tier, handler):
        await store(tier, TEXTS)
        assert await handler.batch_exists([key.decode() for key in TEXTS]) == [True, True]
        assert await handler.batch_exists([key.hex() for key in TEXTS]) == [False, False]


async def test_what_is_named_by_its_text_is_found_loaded_and_deleted() -> None:
    async with open_pair() as (tier, _):
        await store(tier, TEXTS)
        assert await tier.contains([*TEXTS, b"no"]) == set(TEXTS)
        buffers = [bytearray(BLOCK) for _ in TEXTS]
        async with await tier.pin(TEXTS) as lease:
            assert list(await tier.load(lease, PagesDestination.over(buffers))) == [LOADED] * 2
        assert buffers == [payload_of(key, BLOCK) for key in TEXTS]
        assert await tier.delete(TEXTS) == [Deletion.DELETED] * 2


async def test_a_first_level_names_keys_the_same_way() -> None:
    async with open_pair() as (tier, handler):
        url = handler.config.server_url
        async with MaruL1(server_url=url, pool_size=BLOCKS * BLOCK, timeout_ms=30_000, key_names="text") as l1:
            await l1.register_kv_layout([(BLOCK,)], "uint8")
            reservation = await l1.reserve_write(TEXTS)
            assert await reservation.commit() == [STORED] * 2
            assert await handler.batch_exists([key.decode() for key in TEXTS]) == [True, True]
            assert await tier.contains(TEXTS) == set(TEXTS)
            async with await l1.reserve_read(TEXTS) as lease:
                assert list(lease.keys) == TEXTS
            with pytest.raises(ValueError, match="is not UTF-8"):
                await l1.reserve_write([b"\xff"])
            assert await l1.clear() == dict.fromkeys(TEXTS, Deletion.DELETED)


async def test_a_tier_whose_keys_are_texts_keeps_the_contract() -> None:
    number = iter(range(1000))
    async with open_test_server(high_watermark=1.0) as server:

        def make(blocks: int, block_bytes: int) -> MaruTier:
            handler = handler_to(server.endpoints[0], pool_size=8 * BLOCK, namespace=f"{next(number)}")
            return MaruTier(handler, key_names="text")

        with trio.fail_after(120):
            await check_tier(make, block_bytes=BLOCK)


@pytest.mark.parametrize(("names", "per_byte"), [("hex", 2), ("text", 1)])
async def test_a_key_is_as_long_as_its_name_allows(names: Any, per_byte: int) -> None:
    with trio.fail_after(60):
        async with (
            open_test_server(max_key_bytes=64) as server,
            MaruTier(handler_to(server.endpoints[0]), key_names=names) as tier,
        ):
            longest = 64 // per_byte
            await store(tier, [b"k" * longest])
            with pytest.raises(ValueError, match=f"keys of at most {longest} bytes, not of {longest + 1}"):
                await tier.reserve(RoomRequest([b"k" * (longest + 1)], BLOCK, "fail"))


def test_a_key_that_is_no_text_or_begins_like_a_salt_has_no_name() -> None:
    texts = KeyNaming.of("text")
    with pytest.raises(ValueError, match="is not UTF-8, as keys must be with key_names = text"):
        texts.names([b"\xff"])
    with pytest.raises(ValueError, match="begins with the salt of a tenant"):
        texts.names([b"\x1f3:bob0:\x1fkey"])


def test_there_is_no_third_way_to_name() -> None:
    with pytest.raises(ValueError, match="key_names = 'base64': must be one of hex, text"):
        MaruTier(handler_to("ipc:///nowhere"), key_names="base64")  # type: ignore[arg-type]


def test_a_specification_says_it() -> None:
    tier: Any = make_tier({"type": "maru", "server_url": "ipc:///nowhere", "key_names": "text"}, block_bytes=BLOCK)
    assert tier.naming is KeyNaming.of("text")
