"""A verdict is on what was read: what was stored anew under the same key before it is carried out stays."""

from __future__ import annotations

import ctypes
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from backends import DamagedBlock
from backends.abc import LOADED, STORED, Deletion, Missed, Rejected
from backends.base.pages import new_pages
from backends.file import FileTier
from backends.memory import MemoryTier
from backends.plugins import HostConfig, NativeTier
from backends.wrappers import AesGcm, Zstd, slot_bytes, wrap
from tests.support.plugin_faults import PlayedConnector
from tests.support.wrapping import (
    PAGE,
    SECRETS,
    Foreign,
    at_rest,
    blocks_of,
    load,
    page_store,
    source_of,
    store,
    stored_page,
)

BLOCKS = blocks_of(3)
KEYS = list(BLOCKS)
BAD = {KEYS[1]: BLOCKS[KEYS[1]]}
ALL = ([LOADED] * 3, list(BLOCKS.values()))
CHAIN = (Zstd(), AesGcm(SECRETS))
SLOT = slot_bytes(64, *CHAIN)


def wrapped(inner: Any) -> Any:
    return wrap(inner, *CHAIN, block_bytes=64)


# --- places that are told while the block is held ---------------------------------------------------------------------


def inner_of(place: str, directory: Path) -> Any:
    if place == "memory":
        return MemoryTier(8 * SLOT, SLOT, checksums=False)
    return FileTier(directory / "kv", 8 * 4 * SLOT, checksums=False)


def harm(tier: Any, key: bytes) -> None:
    """A byte of its body, so that no checksum but the chain's own finds it."""
    if isinstance(tier.inner, MemoryTier):
        stored_page(tier, key)[60] ^= 1
        return
    name = tier.stored_key(key)
    [path] = [path for path in Path(tier.inner._open.path).rglob("*") if path.is_file() and name in path.read_bytes()]
    data = bytearray(path.read_bytes())
    data[-1 - (len(data) - len(data.rstrip(b"\0")))] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("reader", [False, True], ids=["alone", "beside a reader"])
@pytest.mark.parametrize("place", ["memory", "file"])
async def test_two_wrapped_tiers_over_one_place_spare_each_others_blocks(
    place: str, reader: bool, tmp_path: Path
) -> None:
    inner = inner_of(place, tmp_path)
    a, b = wrapped(inner), wrapped(inner)
    await store(a, BLOCKS)
    harm(a, KEYS[1])
    other = await inner.pin(a.names(KEYS)) if reader else None
    assert (await load(a, KEYS))[0] == [LOADED, Missed("damaged"), LOADED]
    assert a.contains_nowait(KEYS) == b.contains_nowait(KEYS) == {KEYS[0], KEYS[2]}
    assert await store(b, BAD) == [STORED]
    if other is not None:
        await other.release()
    await a.purge()
    assert await load(a, KEYS) == await load(b, KEYS) == ALL
    assert a.statistics().deleted == 0 and inner.statistics().blocks == 3
    at_rest(a)
    a.close()


@pytest.mark.parametrize("place", ["memory", "file"])
async def test_what_a_copy_to_elsewhere_has_found_is_what_it_read(place: str, tmp_path: Path) -> None:
    inner = inner_of(place, tmp_path)
    a, b = wrapped(inner), wrapped(inner)
    await store(a, BLOCKS)
    harm(a, KEYS[1])
    refs = a.source.upgrade(KEYS)
    with pytest.raises(DamagedBlock):
        a.source.copy_out(refs, new_pages(3, 64))
    assert a.contains_nowait(KEYS) == {KEYS[0], KEYS[2]}
    assert await store(b, BAD) == [STORED]
    a.source.release(refs)
    await a.purge()
    assert await load(a, KEYS) == ALL
    assert a.statistics().missed["damaged"] == 1 and inner.statistics().blocks == 3
    at_rest(a)
    a.close()


# --- the page store, which has generations ----------------------------------------------------------------------------


async def harm_page(tier: Any, name: bytes) -> None:
    async with await tier.pin([name]) as lease:
        address = lease.pages.addresses[0] + 60
    ctypes.c_ubyte.from_address(address).value ^= 1


@asynccontextmanager
async def two_clients(wraps: bool) -> AsyncIterator[tuple[Any, Any, Any, Any]]:
    """Two tiers as two processes have them, and what is below each."""
    async with page_store(checksums=not wraps, namespace="shared") as make, make() as below_a, make() as below_b:
        if wraps:
            yield wrapped(below_a), wrapped(below_b), below_a, below_b
        else:
            yield below_a, below_b, below_a, below_b


@pytest.mark.parametrize("wraps", [False, True], ids=["bare", "wrapped"])
async def test_of_two_processes_over_a_page_store_neither_deletes_what_the_other_has_stored_anew(wraps: bool) -> None:
    size = 64 if wraps else PAGE
    blocks = blocks_of(3, size)
    bad = {KEYS[1]: blocks[KEYS[1]]}
    async with two_clients(wraps) as (a, b, below_a, below_b):
        assert await store(a, blocks) == [STORED] * 3
        name = a.stored_key(KEYS[1]) if wraps else KEYS[1]
        await harm_page(below_a, name)
        reader = await below_b.pin([name])
        assert (await load(a, KEYS))[0] == [LOADED, Missed("damaged"), LOADED]
        assert await a.contains(KEYS) == {KEYS[0], KEYS[2]}
        assert await store(a, bad) == [Rejected("damaged")], "not a duplicate of that"
        await reader.release()
        while await below_b.delete([name]) == [Deletion.PINNED]:  # the release is on its way
            pass
        assert await store(b, bad) == [STORED]
        assert [page.key for page in below_a.damaged] == [name]
        await below_a.purge()
        assert not below_a.damaged
        assert await load(a, KEYS) == await load(b, KEYS) == ([LOADED] * 3, list(blocks.values()))
        statistics = a.statistics()
        assert (statistics.deleted, statistics.missed["damaged"], statistics.duplicates) == (0, 1, 0)


async def test_what_lies_there_under_another_generation_is_missing_even_if_it_is_read() -> None:
    async with two_clients(False) as (a, b, *_):
        blocks = blocks_of(2, PAGE)
        assert await store(a, blocks) == [STORED] * 2
        names = [key.hex() for key in blocks]
        async with await a.pin(list(blocks)) as lease:
            old = list(lease.generations)
            answers = await b.handler.delete_pages(names, [old[0] + 7, old[1]])
            assert [answer.value for answer in answers] == ["missing", "pinned"]
        answers = await b.handler.delete_pages(names, [old[0] + 7, old[1]])
        while answers[1].value == "pinned":
            answers = await b.handler.delete_pages(names, [old[0] + 7, old[1]])
        assert [answer.value for answer in answers] == ["missing", "deleted"]
        assert await a.contains(list(blocks)) == set(list(blocks)[:1])


# --- any other, which is read once more -------------------------------------------------------------------------------


class Shared(PlayedConnector):
    """A connector of one process, to what several see."""

    def __init__(self, blocks: dict[str, bytes]) -> None:
        super().__init__(deletes=True)  # type: ignore[no-untyped-call]
        self.blocks = blocks
        self.before_delete: Any = None

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        raise AssertionError("it is set when it is made")


@asynccontextmanager
async def two_hosts() -> AsyncIterator[tuple[Any, Any, dict[str, bytes]]]:
    there: dict[str, bytes] = {}
    hosts = [NativeTier(Shared(there), SLOT, HostConfig(checksums=False)) for _ in range(2)]
    async with wrapped(hosts[0]) as a, wrapped(hosts[1]) as b:
        yield a, b, there


def spoil(there: dict[str, bytes], tier: Any, key: bytes) -> str:
    [name] = [name for name in there if name.endswith(tier.stored_key(key).hex())]
    there[name] = there[name][:60] + bytes([there[name][60] ^ 1]) + there[name][61:]
    return name


async def test_what_another_process_has_stored_anew_is_read_once_more_and_stays() -> None:
    async with two_hosts() as (a, b, there):
        await store(a, BLOCKS)
        good = dict(there)
        name = spoil(there, a, KEYS[1])
        lease = await a.pin(KEYS)
        assert (await load(a, KEYS))[0] == [LOADED, Missed("damaged"), LOADED]
        assert name in there, "it is held"
        there[name] = good[name]  # by the other one, with other bytes
        assert await b.delete(KEYS[1:2]) == [Deletion.DELETED] and await store(b, BAD) == [STORED]
        assert there[name] != good[name]
        await lease.release()
        assert not a.damaged and name in there
        assert await load(a, KEYS) == await load(b, KEYS) == ALL
        statistics = a.statistics()
        assert (statistics.loaded, statistics.missed["damaged"], statistics.deleted) == (5, 1, 0)


async def test_what_is_still_damaged_is_deleted() -> None:
    async with two_hosts() as (a, _, there):
        await store(a, BLOCKS)
        name = spoil(there, a, KEYS[1])
        assert (await load(a, KEYS))[0] == [LOADED, Missed("damaged"), LOADED]
        assert name not in there and not a.damaged
        assert await store(a, BAD) == [STORED]
        assert await load(a, KEYS) == ALL


async def test_what_has_gone_by_itself_is_not_deleted() -> None:
    async with two_hosts() as (a, _, there):
        await store(a, BLOCKS)
        lease = await a.pin(KEYS)
        name = spoil(there, a, KEYS[1])
        await load(a, KEYS)
        del there[name]
        await lease.release()
        assert not a.damaged
        assert a.statistics().missed == {"gone": 0, "damaged": 1, "short": 0}


async def test_what_is_stored_anew_between_the_reading_and_the_deletion_costs_a_miss_and_no_wrong_byte() -> None:
    async with two_hosts() as (a, b, there):
        await store(a, BLOCKS)
        good = dict(there)
        name = spoil(there, a, KEYS[1])
        connector = a.inner.connector
        delete = connector.submit_batch_delete

        def just_before(keys: Sequence[str]) -> Any:
            there.update({name: good[name]})
            return delete(keys)

        connector.submit_batch_delete = just_before
        assert (await load(a, KEYS))[0] == [LOADED, Missed("damaged"), LOADED]
        assert name not in there, "this is the window that is left"
        assert (await load(b, KEYS))[0] == [LOADED], "a miss"
        assert await store(b, BAD) == [STORED] and await load(a, KEYS) == ALL


@asynccontextmanager
async def two_bare_hosts() -> AsyncIterator[tuple[Any, Any, dict[str, bytes]]]:
    there: dict[str, bytes] = {}
    hosts = [NativeTier(Shared(there), 64, HostConfig()) for _ in range(2)]
    async with hosts[0] as a, hosts[1] as b:
        yield a, b, there


def name_in(there: dict[str, bytes], key: bytes) -> str:
    [name] = [name for name in there if name.endswith(f"@{key.hex()}")]
    return name


async def test_a_host_reads_once_more_what_its_own_checksum_has_condemned() -> None:
    async with two_bare_hosts() as (a, b, there):
        await store(a, BLOCKS)
        name, other = name_in(there, KEYS[1]), name_in(there, KEYS[2])
        there[name] = there[other] = bytes(64)
        assert (await load(a, KEYS))[0] == [LOADED, Missed("damaged"), Missed("damaged")]
        assert await b.delete(KEYS[1:2]) == [Deletion.DELETED] and await store(b, BAD) == [STORED]
        assert await a.contains(KEYS) == {KEYS[0]}
        assert await store(a, blocks_of(1, name="new")) == [STORED], "which deletes what is condemned, before"
        assert name in there and other not in there
        assert await a.contains(KEYS) == set(KEYS[:2])
        assert await load(a, KEYS[:2]) == ([LOADED] * 2, list(BLOCKS.values())[:2])
        assert (a.host_statistics().hidden_keys, a.host_statistics().quarantined_bytes) == (0, 0)
        assert not a._state.tombstones.expected_sums and a.statistics().deleted == 0


async def test_a_host_reads_a_few_at_a_time_and_deletes_none_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.plugins._deletions._AT_A_TIME", 2)
    async with two_bare_hosts() as (a, _, there):
        await store(a, BLOCKS)
        for key in KEYS:
            there[name_in(there, key)] = bytes(64)
        assert (await load(a, KEYS))[0] == [Missed("damaged")] * 3
        left = []
        for number in range(2):
            await store(a, blocks_of(1, name=f"new{number}-"))
            left.append(sum(data == bytes(64) for data in there.values()))
        assert left == [1, 0] and a.host_statistics().hidden_keys == 0


async def test_a_host_that_cannot_read_once_more_deletes_nothing_and_stores_all_the_same() -> None:
    async with two_bare_hosts() as (a, _, there):
        await store(a, BLOCKS)
        name = name_in(there, KEYS[1])
        there[name] = bytes(64)
        await load(a, KEYS)
        get = a.connector.submit_batch_get

        def failing(keys: Sequence[str], buffers: Any) -> Any:
            raise OSError("out of order")

        a.connector.submit_batch_get = failing
        victim = name_in(there, KEYS[2])
        a._state.tombstones.note_evicted(KEYS[2:])
        assert await store(a, blocks_of(1, name="new")) == [STORED]
        assert name in there and victim not in there and await a.contains(KEYS) == {KEYS[0]}
        a.connector.submit_batch_get = get
        assert await store(a, {key: BLOCKS[key] for key in KEYS[1:]}) == [STORED] * 2
        assert await load(a, KEYS) == ALL


async def test_what_a_tier_misses_and_does_not_count_is_not_taken_from_its_counts() -> None:
    class Uncounted(Foreign):
        misses = False

        async def load(self, lease: Any, destination: Any) -> Any:
            if not self.misses:
                return await super().load(lease, destination)
            await trio.lowlevel.checkpoint()
            return [Missed("busy")] * len(lease.keys)

    tier = wrapped(Uncounted(8 * SLOT, SLOT, checksums=False))
    await store(tier, BLOCKS)
    harm(tier, KEYS[1])
    lease = await tier.pin(KEYS)
    assert (await load(tier, KEYS))[0][1] == Missed("damaged")
    tier.inner.misses = True
    await lease.release()
    assert not tier.damaged
    missed = tier.statistics().missed
    assert (missed["damaged"], missed.get("busy", 0)) == (1, 0)


async def test_a_reading_that_fails_leaves_it_damaged() -> None:
    class Broken(Foreign):
        breaks = False

        async def load(self, lease: Any, destination: Any) -> Any:
            if self.breaks:
                raise OSError("no disk")
            return await super().load(lease, destination)

    inner = Broken(8 * SLOT, SLOT, checksums=False)
    tier = wrapped(inner)
    await store(tier, BLOCKS)
    harm(tier, KEYS[1])
    lease = await tier.pin(KEYS)
    assert (await load(tier, KEYS))[0] == [LOADED, Missed("damaged"), LOADED]
    inner.breaks = True
    await lease.release()
    assert tier.contains_nowait(KEYS) == {KEYS[0], KEYS[2]} and inner.statistics().blocks == 3
    inner.breaks = False
    await tier.purge()
    assert inner.statistics().blocks == 2 and not tier.damaged
    at_rest(tier)


async def test_one_at_a_time_deletes_what_is_damaged() -> None:
    class Gated(Foreign):
        gate: Any = None
        asked = 0

        async def delete(self, keys: Sequence[bytes]) -> list[Deletion]:
            self.asked += 1
            if self.gate is not None:
                await self.gate.wait()
            return await super().delete(keys)

    inner = Gated(8 * SLOT, SLOT, checksums=False)
    tier = wrapped(inner)
    await store(tier, BLOCKS)
    harm(tier, KEYS[1])
    holder = await inner.pin(tier.names(KEYS))
    await load(tier, KEYS)
    await holder.release()
    inner.gate, inner.asked = trio.Event(), 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tier.purge)
        with trio.fail_after(10):
            while not inner.asked:  # a thread reads it once more before
                await trio.lowlevel.checkpoint()
        with trio.fail_after(10):
            await tier.purge()  # which would delete what is stored anew behind the first deletion
            await tier.pin(KEYS[:1])
        assert inner.asked == 1
        inner.gate.set()
    assert await store(tier, BAD) == [STORED]
    assert await load(tier, KEYS) == ALL


async def test_a_few_are_read_at_a_time_and_all_of_them_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.wrappers._tier.PORTION_BYTES", SLOT)
    tier = wrapped(Foreign(8 * SLOT, SLOT, checksums=False))
    await store(tier, BLOCKS)
    holder = await tier.inner.pin(tier.names(KEYS[:1]))
    for key in KEYS:
        harm(tier, key)
    lease = await tier.pin(KEYS)
    assert (await load(tier, KEYS))[0] == [Missed("damaged")] * 3
    await lease.release()
    for _ in range(4):
        await tier.purge()
    assert tier.inner.statistics().blocks == 1, "the one that is held does not stand in the way"
    await holder.release()
    await tier.purge()
    assert tier.inner.statistics().blocks == 0 and tier.statistics().deleted == 0
    assert source_of(BLOCKS).contains_nowait(KEYS) == set(KEYS)
