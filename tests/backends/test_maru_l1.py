"""Maru as the first level, against real servers: in this process, in another one, behind a wire that loses answers."""

from __future__ import annotations

import ctypes
import json
import signal
import sys
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio

import offload
from backends import DuplicateKeys, Unproven
from backends.abc import DUPLICATE, STORED, Deletion, Failed, Rejected, RoomRequest
from backends.maru import MaruTier
from backends.maru.l1 import LayoutMismatch, MaruL1, NoLayout
from backends.memory import MemoryTier
from backends.testing import payload_of
from backends.wrappers import Zstd, wrap
from maru import HandlerClosed, LeaseLost, MaruConfig, MaruError, MaruHandler, NoAnswer
from maru.testing import Code, Fate, open_lossy_wire, open_test_server
from tests.support.cuda_process import process_with_cuda
from tests.support.maru_actors import impatient, operations
from tests.support.maru_processes import Server, temporary_pool
from tests.support.pools import until

BLOCK = 256 << 10
BLOCKS = 8
SHAPES, DTYPE = [(2, 16, 4, 1024)], "bfloat16"
"""Of 256 KiB; eight fill the smallest region there is."""


def keys_of(n: int, name: str = "k") -> list[bytes]:
    return [f"{name}{number}".encode() * 4 for number in range(n)]


@asynccontextmanager
async def open_l1(endpoint: str, *, register: bool = True, **knobs: Any) -> AsyncIterator[MaruL1]:
    defaults = {"pool_size": BLOCKS * BLOCK, "auto_expand": False, "eager_map": False, "timeout_ms": 30_000}
    async with MaruL1(server_url=endpoint, **{**defaults, **knobs}) as l1:
        if register:
            await l1.register_kv_layout(SHAPES, DTYPE)
        yield l1


async def store(l1: MaruL1, keys: Sequence[bytes]) -> list[Any]:
    async with await l1.reserve_write(keys) as reservation:
        for key, page in zip(reservation.keys, reservation.pages, strict=True):
            page[:] = payload_of(key, BLOCK)
        return await reservation.commit()


def handler_of(l1: MaruL1) -> MaruHandler:
    return l1._handler_owner.require_handler(l1)


def wrong(lease: Any) -> list[bytes]:
    """The keys whose views show other bytes. (Of megabytes, no difference is worked out for the reader.)"""
    return [key for key, view in zip(lease.keys, lease.views, strict=True) if bytes(view) != payload_of(key, BLOCK)]


async def read(l1: MaruL1, keys: Sequence[bytes]) -> list[bytes]:
    async with await l1.reserve_read(keys) as lease:
        assert not wrong(lease)
        lease.check()
        assert await lease.damaged() == []
        return list(lease.keys)


async def all_is_free(*instances: MaruL1, keys: Sequence[bytes]) -> None:
    """Once all keys are deleted nothing is reserved, nothing pinned, and every page is free."""
    for l1 in instances:  # nobody waits for the answer to an unpin; what is asked behind it is answered after it
        assert await l1.delete([b"no such key"]) == [Deletion.MISSING]
    for l1 in instances:
        assert Deletion.PINNED not in await l1.delete(keys)
    for l1 in instances:
        with trio.fail_after(60):
            while l1.report_status().free_pages != l1.report_status().registered_pages + BLOCKS:
                await l1.reserve_read([])
                assert await l1.delete([b"no such key"]) == [Deletion.MISSING]
        status = l1.report_status()
        assert (status.reserved_pages, status.in_doubt_pages, status.registered_pages, status.pinned_keys) == (
            0,
            0,
            0,
            0,
        )
        assert l1.get_memory_usage() == (0, BLOCKS * BLOCK)


# --- the layout ---------------------------------------------------------------------------------------------------


async def test_nothing_is_there_before_the_layout_is_known() -> None:
    async with open_test_server() as server, open_l1(server.endpoints[0], register=False) as l1:
        assert l1.get_memory_usage() == (0, 0)
        assert l1.layout is None and not l1.report_status().connected
        assert server.statistics().service.directory.sessions == 0
        for what in (l1.reserve_write, l1.reserve_read, l1.delete):
            with pytest.raises(NoLayout, match="register_kv_layout"):
                await what([b"k"])
        assert await l1.clear() == {}
        layout = await l1.register_kv_layout(SHAPES, DTYPE, fmt="KV_2LTD", chunk_size_in_tokens=16)
        assert layout.block_bytes == layout.page_bytes == BLOCK
        assert l1.get_memory_usage() == (0, BLOCKS * BLOCK)  # the pool is up: reserving asks nobody
        directory = server.statistics().service.directory
        assert (directory.sessions, directory.regions) == (1, 1)


async def test_one_instance_holds_one_model_and_says_so() -> None:
    async with open_test_server() as server, open_l1(server.endpoints[0], register=False) as l1:
        async with trio.open_nursery() as nursery:
            for _ in range(3):  # the workers of one engine
                nursery.start_soon(l1.register_kv_layout, SHAPES, DTYPE)
        assert server.statistics().service.directory.sessions == 1
        for shapes, dtype, more in [
            (SHAPES, "float16", {}),
            ([(2, 16, 4, 512)], DTYPE, {}),
            (SHAPES, DTYPE, {"fmt": "other"}),
            (SHAPES, DTYPE, {"chunk_size_in_tokens": 32}),
        ]:
            with pytest.raises(LayoutMismatch, match=r"already has another layout than .*One MaruL1 has one layout"):
                await l1.register_kv_layout(shapes, dtype, **more)
        assert await store(l1, keys_of(2)) == [STORED] * 2
        await all_is_free(l1, keys=keys_of(2))


async def test_a_server_that_is_away_registers_nothing_and_later_it_works() -> None:
    async with (
        open_test_server() as server,
        open_lossy_wire(server.endpoints[0]) as wire,
        open_l1(wire.endpoint, register=False) as l1,
    ):
        wire.decide = lambda code, number: Fate.LOSE_REQUEST
        patient, l1.config = l1.config, attrs.evolve(l1.config, timeout_ms=100)
        with pytest.raises(NoAnswer):
            await l1.register_kv_layout(SHAPES, DTYPE)
        assert l1.layout is None
        with pytest.raises(NoLayout):
            await l1.reserve_write([b"k"])
        wire.decide = lambda code, number: Fate.PASS
        l1.config = patient
        await l1.register_kv_layout(SHAPES, DTYPE)
        assert await store(l1, keys_of(2)) == [STORED] * 2
        await all_is_free(l1, keys=keys_of(2))


async def test_a_pool_without_memory_is_no_reason_not_to_read(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        open_test_server(capacity_bytes=2 << 20, high_watermark=1.0) as server,
        open_l1(server.endpoints[0]) as l1,
        open_l1(server.endpoints[0]) as other,
    ):
        assert "no memory for its region" in caplog.text
        assert await store(l1, keys_of(2)) == [STORED] * 2
        assert await read(other, keys_of(2)) == keys_of(2)
        async with await other.reserve_write(keys_of(1, "n")) as reservation:
            assert (reservation.keys, reservation.refused) == ((), tuple(keys_of(1, "n")))
            assert await reservation.commit() == []
        assert other.get_memory_usage() == (0, 0)
        await all_is_free(l1, keys=keys_of(2))


async def test_it_says_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="register_kv_layout sets"):
        MaruL1(chunk_size_bytes=4096)
    l1 = MaruL1(MaruConfig(pool_size=1 << 20))
    with pytest.raises(HandlerClosed, match="async with"):
        await l1.register_kv_layout(SHAPES, DTYPE)
    async with open_test_server() as server:
        async with open_l1(server.endpoints[0], pool_size=BLOCK - 1, register=False) as l1:
            with pytest.raises(MaruError, match="pool_size"):
                await l1.register_kv_layout(SHAPES, DTYPE)
            with pytest.raises(RuntimeError, match="was already entered"):
                await l1.__aenter__()
        async with open_l1(server.endpoints[0]) as l1:
            for what in (l1.reserve_write, l1.reserve_read):
                with pytest.raises(DuplicateKeys):
                    await what([b"a", b"b", b"a"])
            async with await l1.reserve_write(keys_of(2)) as reservation:
                with pytest.raises(ValueError, match="has no page for 1"):
                    reservation.take([b"other"])
            await all_is_free(l1, keys=[])
        for what in (l1.reserve_write, l1.reserve_read, l1.delete):
            with pytest.raises(HandlerClosed):
                await what([b"k"])


async def test_it_is_no_tier_of_an_engine_and_takes_no_wrappers() -> None:
    async with MaruL1() as l1:
        with pytest.raises(TypeError, match=r"MaruL1 .* cannot be wrapped: it is not a backends.abc.Tier"):
            wrap(l1, Zstd(), block_bytes=BLOCK)  # type: ignore[arg-type]
        with pytest.raises(offload.OffloadError, match=r"MaruL1 .* must be a backends.abc.Tier"):
            async with offload.open_engine(MemoryTier(BLOCK, BLOCK), [l1]):  # type: ignore[list-item]
                pass


async def test_pages_are_gathered_once_and_by_their_own_handler() -> None:
    async with open_test_server() as server, open_l1(server.endpoints[0]) as l1, open_l1(server.endpoints[0]) as other:
        handler, stranger = l1._handler_owner.require_handler(l1), other._handler_owner.require_handler(other)
        handles = await handler.batch_alloc(2)
        assert handles is not None
        with pytest.raises(ValueError, match="all be different"):
            handler.gather([handles[0], handles[0]])
        with pytest.raises(HandlerClosed):
            stranger.gather(handles)
        batch = handler.gather(handles)
        assert len(batch) == 2
        with pytest.raises(HandlerClosed):
            handler.gather(handles)
        batch.free()
        await all_is_free(l1, other, keys=[])


async def test_an_error_of_the_body_leaves_as_it_came() -> None:
    async with open_test_server() as server:
        with pytest.raises(LookupError, match="mine"):
            async with open_l1(server.endpoints[0]):
                raise LookupError("mine")


# --- writing and reading ------------------------------------------------------------------------------------------


async def test_what_one_commits_the_other_reads_where_it_lies() -> None:
    keys = keys_of(5)
    async with open_test_server() as server, open_l1(server.endpoints[0]) as l1, open_l1(server.endpoints[0]) as other:
        assert await store(l1, keys) == [STORED] * 5
        assert await store(other, keys[:2]) == [DUPLICATE] * 2
        assert await read(other, [*keys, b"no such key"]) == keys
        assert await read(other, [keys[0], b"no such key", keys[1]]) == keys[:1]
        async with await other.reserve_read(keys) as lease:
            with pytest.raises(TypeError, match="read-only"):
                lease.views[0][0] = 1
            assert await l1.delete([*keys[:1], b"no such key"]) == [Deletion.PINNED, Deletion.MISSING]
        await all_is_free(l1, other, keys=keys)


async def test_a_key_that_another_layout_stored_ends_the_prefix() -> None:
    keys = keys_of(3)
    async with (
        open_test_server() as server,
        open_l1(server.endpoints[0]) as l1,
        MaruHandler(server_url=server.endpoints[0], chunk_size_bytes=BLOCK, pool_size=2 << 20) as handler,
    ):
        await store(l1, [keys[0], keys[2]])
        await handler.batch_put([keys[1].hex()], [b"a few bytes"])
        assert await read(l1, keys) == keys[:1]
        status = l1.report_status()
        assert (status.other_layout, status.pinned_keys) == (1, 0)
        await all_is_free(l1, keys=keys)


async def test_a_tier_and_it_find_each_others_blocks_under_one_namespace() -> None:
    keys = keys_of(3)
    async with open_test_server() as server, open_l1(server.endpoints[0], namespace="model") as l1:
        handler = MaruHandler(
            server_url=server.endpoints[0], chunk_size_bytes=BLOCK, pool_size=2 << 20, namespace="model"
        )
        async with MaruTier(handler) as tier:
            await store(l1, keys[:2])
            source = MemoryTier(BLOCK, BLOCK)
            source.put(keys[2], payload_of(keys[2], BLOCK))
            reservation = await tier.reserve(RoomRequest(keys[2:], BLOCK, "fail"))
            assert list(await reservation.transfer(source, source.upgrade(keys[2:]))) == [STORED]
            reservation.release()
            assert await read(l1, keys) == keys
            assert await tier.contains(keys) == set(keys)
            await all_is_free(l1, keys=keys)


async def test_damage_is_named_and_nothing_is_deleted_for_it() -> None:
    keys = keys_of(3)
    async with open_test_server() as server, open_l1(server.endpoints[0]) as l1:
        async with await l1.reserve_write(keys) as reservation:
            for key, page in zip(keys, reservation.pages, strict=True):
                page[:] = payload_of(key, BLOCK)
            late = memoryview(reservation.pages[1])[7:8]  # somebody goes on writing after the commit
            await reservation.commit()
        late[0] ^= 1
        async with await l1.reserve_read(keys) as lease:
            assert lease.keys == tuple(keys)
            assert await lease.damaged() == keys[1:2]
        async with await l1.reserve_read(keys) as lease:
            assert lease.keys == tuple(keys)
        await all_is_free(l1, keys=keys)


async def test_a_quota_is_an_outcome() -> None:
    keys = keys_of(2)
    async with (
        open_test_server(quota_instance_bytes=2 * BLOCK, high_watermark=1.0) as server,
        open_l1(server.endpoints[0]) as l1,
    ):
        await store(l1, keys)
        async with await l1.reserve_read(keys):
            assert await store(l1, keys_of(1, "n")) == [Rejected("quota")]
        assert l1.report_status().not_stored == 1
        await all_is_free(l1, keys=keys)


async def test_commit_and_read_ends_before_the_first_key_that_is_not_stored() -> None:
    keys = keys_of(3)
    async with (
        open_test_server(quota_instance_bytes=3 * BLOCK, high_watermark=1.0) as server,
        open_l1(server.endpoints[0]) as l1,
    ):
        held = keys_of(1, "held")
        await store(l1, held)
        async with await l1.reserve_read(held), await l1.reserve_write(keys) as reservation:
            for key, page in zip(reservation.keys, reservation.pages, strict=True):
                page[:] = payload_of(key, BLOCK)
            async with await reservation.commit_and_read() as lease:
                assert reservation.outcomes is not None
                stored = [outcome == STORED for outcome in reservation.outcomes]
                assert not all(stored)
                assert len(lease.keys) == stored.index(False)
                assert not wrong(lease)
        await all_is_free(l1, keys=[*keys, *held])


async def test_clear_deletes_what_is_its_own_and_nobody_reads() -> None:
    mine, others = keys_of(4), keys_of(2, "o")
    async with open_test_server() as server, open_l1(server.endpoints[0]) as l1, open_l1(server.endpoints[0]) as other:
        await store(l1, mine)
        await store(other, others)
        async with await other.reserve_read(mine[:1]):
            answers = await l1.clear()
            assert answers == {mine[0]: Deletion.PINNED, **dict.fromkeys(mine[1:], Deletion.DELETED)}
        assert await read(other, [mine[0]]) == mine[:1]
        assert await read(l1, others) == others
        assert await l1.clear() == {mine[0]: Deletion.DELETED}
        await all_is_free(l1, other, keys=[*mine, *others])


async def test_a_shutdown_deletes_nothing_and_leaves_no_pin() -> None:
    keys = keys_of(3)
    async with open_test_server() as server, open_l1(server.endpoints[0]) as reader:
        async with open_l1(server.endpoints[0]) as l1:
            await store(l1, keys)
            lease, reservation = await l1.reserve_read(keys[:2]), await l1.reserve_write(keys_of(2, "n"))
        assert not lease.is_open and not reservation.is_open
        directory = server.statistics().service.directory
        assert (directory.pinned, directory.abandoned, directory.entries) == (0, 1, 3)  # an orphan, and readable
        assert await read(reader, keys) == keys
        await all_is_free(reader, keys=keys)


async def test_many_blocks_of_a_megabyte_are_summed_beside_the_loop() -> None:
    size = 1 << 20
    async with open_test_server() as server, MaruL1(server_url=server.endpoints[0], pool_size=8 * size) as l1:
        await l1.register_kv_layout([(size,)], "uint8", full_chunk_size_bytes=size)
        async with await l1.reserve_write(keys_of(4)) as reservation:
            for page in reservation.pages:
                page[:] = b"x" * size
            assert await reservation.commit() == [STORED] * 4
        async with await l1.reserve_read(keys_of(4)) as lease:
            assert await lease.damaged() == []


# --- tensors ------------------------------------------------------------------------------------------------------


async def test_pages_are_tensors_of_the_layout_and_what_is_written_is_read_elsewhere() -> None:
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    shapes, dtypes = [(2, 16, 64), (3,), (4, 4)], [torch.bfloat16, torch.uint8, torch.float32]
    keys = keys_of(3)
    wanted = [
        (torch.randn(2, 16, 64).to(torch.bfloat16), torch.tensor([n, 2, 3], dtype=torch.uint8), torch.randn(4, 4))
        for n in range(3)
    ]
    async with (
        open_test_server() as server,
        MaruL1(server_url=server.endpoints[0], pool_size=2 << 20) as l1,
        MaruL1(server_url=server.endpoints[0], pool_size=2 << 20) as other,
    ):
        layout = await l1.register_kv_layout(shapes, dtypes)
        await other.register_kv_layout(shapes, ["bfloat16", "uint8", "float32"])
        assert [place.offset for place in layout.tensors] == [0, 4096, 4100]
        async with await l1.reserve_write(keys) as reservation:
            for tensors, values in zip(reservation.tensors(), wanted, strict=True):
                for tensor, value in zip(tensors, values, strict=True):
                    assert (tensor.shape, tensor.dtype) == (value.shape, value.dtype)
                    tensor.copy_(value)
            del tensors, tensor
            await reservation.commit()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch has nothing to say of memory that is mapped to be read
            async with await other.reserve_read(keys) as lease:
                there = lease.tensors()
                for tensors, values in zip(there, wanted, strict=True):
                    assert all(map(torch.equal, tensors, values))
        assert torch.equal(there[1][2], wanted[1][2])  # still mapped; it means nothing, and nobody has written it yet
        with pytest.raises(LeaseLost):
            lease.tensors()


async def test_a_tensor_that_is_still_written_keeps_its_page_and_its_memory() -> None:
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    async with open_test_server() as server:
        async with open_l1(server.endpoints[0]) as l1:
            async with await l1.reserve_write(keys_of(3)) as reservation:
                tensor = reservation.tensors()[1][0]
            assert l1.report_status().free_pages == BLOCKS - 1
            assert await store(l1, keys_of(8, "n")) == [STORED] * 7
            tensor.fill_(1.5)
            assert await read(l1, keys_of(7, "n")) == keys_of(7, "n")
        tensor.fill_(2.5)  # nor is its memory unmapped, now that the handler is closed
        assert torch.equal(tensor, torch.full_like(tensor, 2.5))


# --- lost answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fate", [Fate.LOSE_ANSWER, Fate.LOSE_REQUEST, Fate.HOLD_REQUEST, Fate.HOLD_ANSWER, Fate.TWICE])
async def test_a_lost_answer_costs_no_page_and_tells_no_lie(fate: Fate) -> None:
    keys, before = keys_of(4), keys_of(2, "before")
    async with (
        open_test_server() as server,
        open_lossy_wire(server.endpoints[0]) as wire,
        open_l1(wire.endpoint) as l1,
    ):
        await store(l1, before)
        seen: list[int] = []

        def decide(code: int, number: int) -> Fate:
            if code != Code.STORE or seen:
                return Fate.PASS
            seen.append(number)
            return fate

        wire.decide = decide
        async with impatient(handler_of(l1), 0.15, Code.STORE):
            outcomes = await store(l1, keys)
        wire.release()  # a store that was fenced arrives all the same, and is refused
        if fate in (Fate.LOSE_ANSWER, Fate.HOLD_ANSWER, Fate.TWICE):
            assert outcomes == [STORED] * 4
        else:
            assert all(isinstance(outcome, Failed) for outcome in outcomes)
            assert await store(l1, keys) == [STORED] * 4
        assert await read(l1, keys) == keys
        assert l1.report_status().in_doubt_pages == 0
        await all_is_free(l1, keys=[*keys, *before])


@pytest.mark.parametrize("fate", [Fate.HOLD_REQUEST, Fate.HOLD_ANSWER])
async def test_a_reservation_to_read_whose_answer_comes_late_holds_nothing_in_the_end(fate: Fate) -> None:
    keys = keys_of(4)
    async with (
        open_test_server() as server,
        open_lossy_wire(server.endpoints[0]) as wire,
        open_l1(wire.endpoint, index="off") as l1,
    ):
        await store(l1, keys)
        wire.decide = lambda code, number: fate if code == Code.FIND else Fate.PASS
        async with impatient(handler_of(l1)):
            with pytest.raises(NoAnswer):
                await l1.reserve_read(keys)
        await until(lambda: wire.release())  # it has it by now
        wire.decide = lambda code, number: Fate.PASS
        with trio.fail_after(60):
            await until(lambda: server.statistics().service.directory.found)  # it has arrived by now
            while server.statistics().service.directory.pinned:
                await l1.delete([b"no such key"])
        await all_is_free(l1, keys=keys)


async def test_a_commit_without_any_answer_is_unproven_and_its_pages_come_back() -> None:
    keys = keys_of(4)
    async with (
        open_test_server() as server,
        open_lossy_wire(server.endpoints[0]) as wire,
        open_l1(wire.endpoint) as l1,
    ):
        wire.decide = lambda code, number: Fate.LOSE_ANSWER if code in (Code.STORE, Code.RESOLVE) else Fate.PASS
        async with impatient(handler_of(l1), 0.08, Code.STORE, Code.RESOLVE):
            with pytest.raises(Unproven, match="it is unknown whether 4 blocks are stored"):
                await store(l1, keys)
        assert l1.report_status().unproven == 4
        wire.decide = lambda code, number: Fate.PASS
        assert l1.report_status().in_doubt_pages == 4
        driver = handler_of(l1)._driver
        await driver.run(operations.beat(driver.state))
        assert not l1.report_status().in_doubt_pages
        assert await read(l1, keys) == keys
        await all_is_free(l1, keys=keys)


# --- processes ----------------------------------------------------------------------------------------------------

_OWNER = """
import json, os, signal, sys, trio
from backends.maru.l1 import MaruL1
from backends.testing import payload_of
from backends.wrappers import Zstd, wrap

async def main(url, size, keys):
    keys = [bytes.fromhex(key) for key in keys]
    async with MaruL1(server_url=url, pool_size=16 * size, timeout_ms=30_000) as l1:
        await l1.register_kv_layout([(2, 16, 4, 1024)], "bfloat16")
        async with await l1.reserve_write(keys[:-2]) as stored, await l1.reserve_write(keys[-2:]) as never:
            for reservation in (stored, never):
                for key, page in zip(reservation.keys, reservation.pages):
                    page[:] = payload_of(key, size)
            await stored.commit()
            lease = await l1.reserve_read(keys)
            assert len(lease.keys) == len(keys) - 2
            os.kill(os.getpid(), signal.SIGKILL)

trio.run(main, *json.loads(sys.argv[1]))
"""


async def test_of_an_owner_that_is_killed_what_it_committed_is_read_and_the_rest_is_nowhere() -> None:
    keys = keys_of(6)
    with temporary_pool() as pool, Server(pool, skips=True) as server:
        url = server.ipc
        job = json.dumps([url, BLOCK, [key.hex() for key in keys]])
        done = await trio.run_process([sys.executable, "-c", _OWNER, job], check=False)
        assert done.returncode == -signal.SIGKILL
        async with open_l1(url, lease=60.0) as l1:
            assert await read(l1, keys) == keys[:4]
            directory = server.facts()
            assert (directory["entries"], directory["pinned"]) == (4, 4)  # the dead one's pins: as long as its lease
            assert await l1.delete(keys[:4]) == [Deletion.PINNED] * 4
            server.skip(20.0)
            with trio.fail_after(60):
                while Deletion.PINNED in await l1.delete(keys):  # noqa: ASYNC110
                    await trio.sleep(0.01)
                await until(lambda: server.facts()["regions"] == 1)
            assert server.facts()["pinned"] == 0
            assert await store(l1, keys) == [STORED] * 6
            await all_is_free(l1, keys=keys)


async def test_a_server_that_is_killed_loses_nothing_that_was_committed() -> None:
    with temporary_pool() as pool, Server(pool, "--high-watermark", "1.0") as server:
        async with open_l1(server.ipc, lease=5.0) as l1:
            kept, tried = keys_of(3), keys_of(3, "n")
            assert await store(l1, kept) == [STORED] * 3
            async with await l1.reserve_read(kept) as lease, await l1.reserve_write(tried) as reservation:
                for key, page in zip(tried, reservation.pages, strict=True):
                    page[:] = payload_of(key, BLOCK)
                await trio.to_thread.run_sync(server.restart)
                with trio.fail_after(60):
                    outcomes = await reservation.commit()
                assert outcomes == [STORED] * 3
                await l1.delete(
                    [b"no such key"]
                )  # the answer to the commit may have been the first news of the restart
                lease.check()  # the same registrations, pinned again under the new epoch
                assert list(lease.keys) == list(kept) and not wrong(lease)
            assert await read(l1, [*kept, *tried]) == [*kept, *tried]
            with trio.fail_after(60):
                while Deletion.PINNED in await l1.delete([*kept, *tried]):  # quiet time after a restart
                    await trio.lowlevel.checkpoint()
            await all_is_free(l1, keys=[*kept, *tried])


# --- a device that copies by itself -------------------------------------------------------------------------------


async def test_its_pages_are_registered_with_cuda_where_that_is_from_the_layout_on() -> None:
    with process_with_cuda() as cuda:
        async with open_test_server() as server, open_l1(server.endpoints[0], register=False) as l1:
            assert not cuda.registered
            await l1.register_kv_layout(SHAPES, DTYPE)
            [region] = cuda.registered.values()
            async with await l1.reserve_write(keys_of(2)) as reservation:
                for page in reservation.pages:
                    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
                    assert region.address <= address <= region.address + region.nbytes - BLOCK
            del page, reservation
