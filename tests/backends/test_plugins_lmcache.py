"""The host of L2 adapters: three descriptors, locks, and what differs from one version to the next."""

import os
import threading

import pytest
import trio
import trio.testing

import backends
from backends.abc import LOADED, STORED, Capabilities, Deletion, Failed, Missed, RoomRequest
from backends.base.slots import PagesDestination
from backends.plugins import HostConfig, LMCacheTier, NoAnswer, PluginFault, PluginTypeError
from backends.plugins._lmcache import Layout, MemoryObject, ObjectKey, bits_of
from backends.testing import payload_of
from tests.support.plugin_faults import Bits, PlayedAdapter
from tests.support.plugin_peers import LoopAdapter
from tests.support.plugin_play import KEYS, SIZE, filled_source, load, of_host, settle, store


@pytest.fixture
def mock_clock(mock_clock):
    mock_clock.rate = 0.1  # a test that fails must not wait for ever at its end
    return mock_clock


@pytest.fixture
def source():
    return filled_source()


@pytest.fixture
def adapter():
    return PlayedAdapter()


def hosted(adapter, **knobs):
    return LMCacheTier(adapter, SIZE, HostConfig(**knobs))


# --- what goes right --------------------------------------------------------------------------------------------------


async def test_blocks_go_out_and_come_back(adapter, source):
    async with hosted(adapter) as tier:
        assert await store(tier, source) == [STORED] * 3
        assert adapter.blocks == {key: payload_of(key, SIZE) for key in KEYS}
        assert await tier.contains([*KEYS, b"no"]) == set(KEYS)
        assert adapter.locks == {}
        assert await load(tier) == ([LOADED] * 3, [payload_of(key, SIZE) for key in KEYS])
        assert adapter.locks == {}
    assert adapter.closed == 1


async def test_a_lease_locks_its_prefix_and_nothing_behind_the_gap(adapter, source):
    async with hosted(adapter) as tier:
        await store(tier, source)
        async with await tier.pin([KEYS[0], b"no", KEYS[1], KEYS[2]]) as lease:
            assert list(lease.keys) == KEYS[:1]
            assert adapter.locks == {KEYS[0]: 1}
        assert adapter.locks == {}


async def test_what_is_locked_by_somebody_else_is_pinned(adapter, source):
    async with hosted(adapter) as tier:
        await store(tier, source)
        adapter.locks[KEYS[1]] = 1
        answers = await tier.delete([*KEYS, b"no"])
        assert answers == [Deletion.DELETED, Deletion.PINNED, Deletion.DELETED, Deletion.MISSING]
        assert set(adapter.blocks) == {KEYS[1]}
        assert len(adapter.deleted) == 2  # it was tried again, and left alone


async def test_an_unlock_that_takes_a_moment_is_waited_for(tmp_path, source):
    adapter = LoopAdapter({"directory": tmp_path})
    with trio.fail_after(60):
        async with hosted(adapter) as tier:
            await store(tier, source)
            for key in KEYS:
                async with await tier.pin([key]):
                    pass
                assert await tier.delete([key]) == [Deletion.DELETED]


async def test_a_damaged_block_is_deleted_before_it_is_stored_anew(source):
    class KeepsWhatItHas(PlayedAdapter):
        def _do(self, channel, keys, objects):
            before = dict(self.blocks)
            done = super()._do(channel, keys, objects)
            self.blocks.update(before)
            return done

    async with hosted(adapter := KeepsWhatItHas()) as tier:
        await store(tier, source)
        adapter.blocks[KEYS[1]] = bytes(SIZE)
        assert (await load(tier))[0] == [LOADED, Missed("damaged"), LOADED]
        assert await store(tier, source, KEYS[1:2]) == [STORED]
        assert await load(tier) == ([LOADED] * 3, [payload_of(key, SIZE) for key in KEYS])


async def test_a_block_that_is_damaged_where_it_comes_from_fails_alone(adapter):
    memory = backends.MemoryTier(8 * SIZE, SIZE)
    for key in KEYS:
        memory.put(key, payload_of(key, SIZE))
    memory.views(memory.pool.slots(KEYS[1:2]))[0][:] = bytes(SIZE)
    async with hosted(adapter) as tier:
        outcomes = await store(tier, memory)
        assert [outcomes[0], outcomes[2]] == [STORED] * 2
        assert isinstance(outcomes[1].error, backends.DamagedBlock)
        assert set(adapter.blocks) == {KEYS[0], KEYS[2]}
        assert await load(tier, [KEYS[0], KEYS[2]]) == (
            [LOADED] * 2,
            [payload_of(KEYS[0], SIZE), payload_of(KEYS[2], SIZE)],
        )
        only = backends.MemoryTier(SIZE, SIZE)
        only.put(b"d", payload_of(b"d", SIZE))
        only.views([0])[0][:] = bytes(SIZE)
        [outcome] = await store(tier, only, [b"d"])
        assert isinstance(outcome.error, backends.DamagedBlock)
        assert of_host(tier, "quarantined_bytes", "hidden_keys") == (0, 0)
    memory.close()
    only.close()


# --- what an adapter tells --------------------------------------------------------------------------------------------


async def test_what_an_adapter_evicts_by_itself_makes_room_in_the_books(tmp_path, source):
    adapter = LoopAdapter({"directory": tmp_path})
    with trio.fail_after(60):
        async with hosted(adapter, capacity_bytes=3 * SIZE) as tier:
            assert tier.tells
            await store(tier, source)
            adapter.take_away(KEYS[1].hex())
            assert await tier.contains(KEYS) == {KEYS[0], KEYS[2]}
            assert tier.statistics().blocks == 2
            assert await store(tier, source, [b"d"]) == [STORED]


async def test_news_of_a_deletion_that_is_past_changes_nothing(tmp_path, source):
    adapter = LoopAdapter({"directory": tmp_path})
    with trio.fail_after(60):
        async with hosted(adapter, capacity_bytes=3 * SIZE) as tier:
            await store(tier, source)
            adapter.damage(KEYS[0].hex())
            assert (await load(tier))[0][0] == Missed("damaged")
            assert await store(tier, source, KEYS[:1]) == [STORED]  # deleted first, of which the news come later
            assert await tier.contains(KEYS) == set(KEYS)  # takes in all news
            assert tier.statistics().blocks == 3


async def test_an_adapter_whose_base_was_not_initialised_works_and_tells_nothing(adapter, source):
    def register_listener(listener):
        raise AttributeError("_listeners")

    adapter.register_listener = register_listener
    async with hosted(adapter, capacity_bytes=3 * SIZE) as tier:
        assert not tier.tells
        await store(tier, source)
        del adapter.blocks[KEYS[1]]
        assert tier.statistics().blocks == 3
        assert await tier.contains(KEYS) == {KEYS[0], KEYS[2]}
        assert tier.statistics().blocks == 2  # it was looked for


async def test_notifications_come_in_the_form_of_any_version(adapter, source):
    listeners = []
    adapter.register_listener = listeners.append
    async with hosted(adapter) as tier:
        await store(tier, source)
        [listener] = listeners
        key = ObjectKey(KEYS[0], "model", 0)
        listener.on_l2_keys_stored([key])
        listener.on_l2_keys_stored([key], [SIZE])
        listener.on_l2_keys_accessed([key])
        listener.on_l2_keys_deleted([key])
        await tier.contains(KEYS[1:])
        assert tier.statistics().blocks == 2


# --- versions ------------------------------------------------------------------------------------------------------------


async def test_a_lookup_is_called_as_it_can_be(adapter):
    asked = []

    class Newer(PlayedAdapter):
        def submit_lookup_and_lock_task(self, keys, group_layout_descs):
            asked.append(group_layout_descs)
            return super().submit_lookup_and_lock_task(keys)

    async with hosted(Newer()) as tier:
        await tier.contains(KEYS)
    assert asked == [{0: Layout([(SIZE,)], ["uint8"])}]
    async with hosted(adapter) as tier:  # the older form
        assert await tier.contains(KEYS) == set()


def test_a_lookup_that_wants_what_nobody_has(adapter):
    adapter.submit_lookup_and_lock_task = lambda keys, phase_of_the_moon: 1
    with pytest.raises(PluginTypeError, match="missing a required argument: 'phase_of_the_moon'"):
        hosted(adapter)


def test_a_delete_that_does_nothing_is_no_delete(adapter):
    class L2AdapterInterface:
        def delete(self, keys):
            return None

    class Base(L2AdapterInterface, PlayedAdapter):
        pass

    Base.delete.__qualname__ = "L2AdapterInterface.delete"  # as it is in the published module
    assert hosted(Base()).capabilities == Capabilities(deletes=False, per_key_outcomes=False)
    assert hosted(adapter).capabilities == Capabilities(per_key_outcomes=False)


@pytest.mark.parametrize("bits", [Bits([True, False]), [1, 0], (True, False)], ids=["size", "list", "tuple"])
def test_bitmaps_of_any_kind(bits):
    assert bits_of(bits) == [True, False]


def test_an_object_has_what_adapters_read():
    pages = backends.base.pages.new_pages(1, SIZE)
    memory = MemoryObject(pages[0], pages.addresses[0])
    memory.byte_array[:] = payload_of(b"a", SIZE)
    assert bytes(pages[0]) == payload_of(b"a", SIZE)
    assert memory.get_size() == memory.get_physical_size() == memory.meta.phy_size == SIZE
    assert memory.data_ptr == memory.metadata.address == pages.addresses[0]
    assert (memory.get_shape(), memory.get_shapes(), memory.is_valid()) == ((SIZE,), [(SIZE,)], True)
    memory.ref_count_up()
    memory.ref_count_down()
    assert "64 bytes" in repr(memory)


def test_an_object_is_a_tensor_where_torch_is():
    pytest.importorskip("torch")
    pages = backends.base.pages.new_pages(1, SIZE)
    memory = MemoryObject(pages[0], pages.addresses[0])
    memory.tensor[:] = 7
    assert bytes(pages[0]) == b"\7" * SIZE
    assert memory.raw_tensor.numel() == SIZE


def test_keys_may_say_which_model(adapter):
    with pytest.raises(ValueError, match="must be without '@'"):
        LMCacheTier(adapter, SIZE, model_name="a@b")
    tier = LMCacheTier(adapter, SIZE, model_name="m", kv_rank=3)
    assert tier.driver.plugin._key_of(b"k") == ObjectKey(b"k", "m", 3)


# --- what goes wrong -------------------------------------------------------------------------------------------------------


async def test_a_signal_before_its_result_is_rescued(adapter, mock_clock):
    adapter.automatic = False
    async with hosted(adapter) as tier:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tier.contains, KEYS)
            await settle()
            os.eventfd_write(adapter.fds[1], 1)  # first the signal
            await settle()
            adapter.answer(signal=False)  # then the result
            await settle()
            assert of_host(tier, "empty_wakes", "resets", "rescues", "outstanding") == (1, 0, 0, 1)
            mock_clock.jump(0.3)
        assert of_host(tier, "empty_wakes", "resets", "rescues", "outstanding") == (1, 0, 1, 0)


async def test_results_without_signals_are_rescued(adapter, source, mock_clock):
    adapter.signals = False
    async with hosted(adapter) as tier:
        outcomes = []

        async def one():
            outcomes.extend(await store(tier, source))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            while not outcomes:
                await settle()
                mock_clock.jump(0.3)
        assert outcomes == [STORED] * 3
        assert of_host(tier, "rescues") == (2,)


async def test_a_signal_of_one_kind_asks_for_all_that_is_outstanding_of_it(adapter, mock_clock):
    adapter.automatic = False
    async with hosted(adapter) as tier, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(tier.contains, KEYS)
        await settle()
        adapter.answer(signal=False)
        adapter.answer(signal=False)
        adapter.answer()
        await settle()
        assert of_host(tier, "outstanding", "rescues") == (0, 0)


async def test_a_failed_store_task_fails_all_its_keys(tmp_path, source):
    adapter = LoopAdapter({"directory": tmp_path})
    with trio.fail_after(60):
        async with hosted(adapter, capacity_bytes=8 * SIZE) as tier:
            adapter.failing.add(KEYS[1])
            outcomes = await store(tier, source)
            assert all(isinstance(outcome, Failed) for outcome in outcomes)
            assert (tmp_path / KEYS[0].hex()).exists()  # left behind
            assert await tier.contains(KEYS) == set()
            adapter.failing.clear()
            assert await store(tier, source, [b"d"]) == [STORED]
            assert not (tmp_path / KEYS[0].hex()).exists()  # deleted at the next occasion


async def test_what_a_lookup_has_locked_for_nobody_is_unlocked(adapter, source):
    async with hosted(adapter) as tier:
        await store(tier, source)
        adapter.automatic = False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tier.pin, KEYS)
            nursery.start_soon(tier.contains, KEYS)
            await settle()
            nursery.cancel_scope.cancel()
        assert adapter.locks == {}
        adapter.answer()
        adapter.answer()
        assert adapter.locks == dict.fromkeys(KEYS, 2)
        await settle()
        assert adapter.locks == {}
        assert of_host(tier, "late", "in_doubt") == (2, 0)


async def test_answered_and_cancelled_in_the_same_tick_it_is_unlocked(adapter, source):
    async with hosted(adapter) as tier:
        await store(tier, source)
        adapter.automatic = False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tier.pin, KEYS)
            await settle()
            nursery.cancel_scope.cancel()
            adapter.answer(signal=False)
            tier.driver._collect("lookup", woken=False, expected=True)
            assert adapter.locks == dict.fromkeys(KEYS, 1)
        assert adapter.locks == {}


async def test_in_the_end_what_was_found_for_nobody_is_unlocked_before_the_adapter_is_closed(
    adapter, source, mock_clock
):
    left = trio.Event()

    async def use():
        async with hosted(adapter) as tier:
            await store(tier, source)
            adapter.automatic = False
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tier.pin, KEYS)
                await settle()
                nursery.cancel_scope.cancel()
            left.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(use)
        await left.wait()
        await settle()
        assert adapter.closed == 0
        adapter.answer()
    assert (adapter.locks, adapter.closed) == ({}, 1)


async def test_an_unlock_that_raises_is_counted(adapter, source):
    async with hosted(adapter) as tier:
        await store(tier, source)
        adapter.unlock_error = OSError("as told")
        assert await tier.contains(KEYS) == set(KEYS)
        async with await tier.pin(KEYS):
            pass
        assert of_host(tier, "failed_unlocks") == (2,)
        assert tier.statistics().held_blocks == 0


async def test_three_descriptors_are_three(adapter):
    adapter.get_load_event_fd = adapter.get_store_event_fd
    with pytest.raises(PluginTypeError, match="must have three different descriptors"):
        async with hosted(adapter):
            pass
    assert adapter.closed == 1


@pytest.mark.parametrize("fd", [None, -3, "4"])
async def test_a_descriptor_is_one(fd, adapter):
    adapter.get_load_event_fd = lambda: fd
    with pytest.raises(PluginTypeError, match="not a descriptor"):
        async with hosted(adapter):
            pass


@pytest.mark.parametrize("result", [Bits([True]), Bits([True] * 9), 17], ids=["too few", "too many", "not a bitmap"])
async def test_a_bitmap_that_makes_no_sense_is_a_fault(result, adapter):
    adapter.automatic = False
    async with hosted(adapter) as tier:

        async def ask():
            with pytest.raises(PluginFault, match=r"bits for 3 keys|is not a bitmap"):
                await tier.contains(KEYS)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await settle()
            adapter.answer(result)
        assert of_host(tier, "outstanding") == (0,)


async def test_queries_that_raise_are_counted_and_end_in_no_answer(adapter, mock_clock):
    adapter.query_error = OSError("as told")
    async with hosted(adapter, deadline=10) as tier:

        async def ask():
            with pytest.raises(NoAnswer) as info:
                await tier.contains(KEYS)
            assert info.value.__cause__ is adapter.query_error

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await settle()
            mock_clock.jump(11)
        assert of_host(tier, "raised")[0] >= 1
        adapter.query_error = None
        for _ in range(3):
            await settle()
            mock_clock.jump(1)


async def test_a_delete_that_raises_is_a_fault(adapter, source):
    async with hosted(adapter) as tier:
        await store(tier, source)
        adapter.delete_error = OSError("as told")
        with pytest.raises(PluginFault, match="delete raised"):
            await tier.delete(KEYS)
        assert of_host(tier, "hidden_keys") == (0,)
        assert await tier.contains(KEYS) == set(KEYS)


async def test_a_delete_that_does_not_return_is_left(adapter, source, mock_clock):
    go_on = threading.Event()
    adapter.delete = lambda keys: go_on.wait()
    async with hosted(adapter, deadline=10) as tier:
        await store(tier, source)

        async def ask():
            with pytest.raises(NoAnswer, match="delete did not return within 10 s"):
                await tier.delete(KEYS)

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await settle()
                mock_clock.jump(11)
        finally:
            go_on.set()


async def test_a_cancelled_delete_leaves_at_once(adapter, source):
    entered, go_on = threading.Event(), threading.Event()

    def delete(keys):
        entered.set()
        go_on.wait()

    adapter.delete = delete
    async with hosted(adapter) as tier:
        await store(tier, source)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tier.delete, KEYS)
                await trio.to_thread.run_sync(entered.wait)
                nursery.cancel_scope.cancel()
        finally:
            go_on.set()
        assert of_host(tier, "hidden_keys") == (0,)


async def test_without_an_answer_an_unproven_store_is_quarantined(adapter, source, mock_clock):
    async with hosted(adapter, deadline=10) as tier:
        reservation = await tier.reserve(RoomRequest(KEYS, SIZE, "fail"))
        adapter.automatic = False

        async def transfer():
            with pytest.raises(backends.Unproven):
                await reservation.transfer(source, [0, 1, 2])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(transfer)
            await settle()
            adapter.answer()
            await settle()
            mock_clock.jump(11)
        assert of_host(tier, "quarantined_bytes", "hidden_keys") == (3 * SIZE, 3)
        adapter.answer(False)
        await settle()
        assert of_host(tier, "quarantined_bytes", "in_doubt") == (0, 0)
        reservation.release()


async def test_a_block_that_is_gone_is_missed(adapter, source):
    async with hosted(adapter) as tier:
        await store(tier, source)
        async with await tier.pin(KEYS) as lease:
            del adapter.blocks[KEYS[1]]  # against its promise
            outcomes = await tier.load(lease, PagesDestination.over([bytearray(SIZE) for _ in KEYS]))
        assert outcomes == [LOADED, Missed("gone"), LOADED]
        assert tier.statistics().missed == {"gone": 1, "damaged": 0, "short": 0}


def test_what_is_no_adapter():
    with pytest.raises(PluginTypeError, match="it lacks get_store_event_fd, "):
        LMCacheTier(object(), SIZE)
