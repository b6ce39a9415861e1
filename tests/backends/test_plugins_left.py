"""Hosts when there is no answer, when nobody waits any more, and in the end."""

import os
import threading

import pytest
import trio
import trio.testing

import backends
from backends.abc import LOADED, STORED, Rejected, RoomRequest, Source
from backends.base.slots import PagesDestination
from backends.plugins import HostConfig, NativeTier, NoAnswer, PluginFault, _host_state
from backends.testing import payload_of
from tests.support.held_by_process import open_descriptors
from tests.support.plugin_faults import PlayedConnector
from tests.support.plugin_peers import DeletingConnector
from tests.support.plugin_play import KEYS, SIZE, cancelled, filled_source, left_by, load, of_host, settle, store


@pytest.fixture
def mock_clock(mock_clock):
    mock_clock.rate = 0.1  # a test that fails must not wait for ever at its end
    return mock_clock


@pytest.fixture
def source():
    return filled_source()


@pytest.fixture
def connector():
    return PlayedConnector()


def hosted(connector, **knobs):
    return NativeTier(connector, SIZE, HostConfig(**knobs))


# --- no answer ------------------------------------------------------------------------------------------------------


async def test_without_an_answer_a_store_is_unproven_and_its_memory_is_not_used_again(connector, source, mock_clock):
    connector.automatic = False
    async with hosted(connector, deadline=10) as tier:
        reservation = await tier.reserve(RoomRequest(KEYS, SIZE, "fail"))
        refs = source.upgrade(KEYS)

        async def transfer():
            await reservation.transfer(source, refs)

        async with trio.open_nursery() as nursery:
            error = None

            async def caught():
                nonlocal error
                with pytest.raises(backends.Unproven) as info:
                    await transfer()
                error = info.value

            nursery.start_soon(caught)
            await settle()
            connector.answer()  # exists
            await settle()
            assert connector.kinds() == ["set"]
            mock_clock.jump(11)
        assert isinstance(error.__cause__, NoAnswer)
        assert of_host(tier, "in_doubt", "quarantined_bytes", "hidden_keys") == (1, 3 * SIZE, 3)
        assert tier.statistics().reserved_blocks == 3  # of whoever quarantined the reservation
        [(_, _, _, views)] = connector.waiting
        connector.automatic = True
        held = connector.waiting.pop()
        assert await tier.contains(KEYS) == set()
        assert await store(tier, source, [KEYS[0]]) == [Rejected("in doubt")]
        assert await store(tier, source, [b"d"]) == [STORED]
        assert [bytes(view) for view in views] == [payload_of(key, SIZE) for key in KEYS]
        connector.waiting.append(held)
        connector.answer()  # it comes after all
        await settle()
        assert of_host(tier, "in_doubt", "late", "quarantined_bytes", "hidden_keys") == (0, 1, 0, 0)
        assert await tier.contains(KEYS) == set(KEYS)
        reservation.release()


async def test_a_store_that_fails_late_leaves_nothing_to_be_found(connector, source, mock_clock):
    connector.automatic = False
    async with hosted(connector, deadline=10) as tier:
        reservation = await tier.reserve(RoomRequest(KEYS, SIZE, "fail"))

        async def transfer():
            with pytest.raises(backends.Unproven):
                await reservation.transfer(source, [0, 1, 2])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(transfer)
            await settle()
            connector.answer()
            await settle()
            mock_clock.jump(11)
        connector.answer(ok=False, error="too late")
        await settle()
        connector.automatic = True
        assert await tier.contains(KEYS) == set()
        assert of_host(tier, "in_doubt", "quarantined_bytes") == (0, 0)
        reservation.release()


async def test_so_much_memory_is_left_to_a_plugin_and_no_more(connector, source, mock_clock):
    async with hosted(connector, deadline=10, most_quarantined_bytes=4 * SIZE) as tier:
        await store(tier, source)
        async with await tier.pin(KEYS) as lease:
            connector.automatic = False
            places = PagesDestination.over([bytearray(SIZE) for _ in KEYS])
            await left_by(mock_clock, 11, tier.load, lease, places)
            with pytest.raises(PluginFault, match="192 bytes are in quarantine"):
                await tier.load(lease, places)
            connector.answer()
            await settle()
            connector.automatic = True
            assert await tier.load(lease, places) == [LOADED] * 3


@pytest.mark.parametrize("what", ["contains", "pin"])
async def test_without_an_answer_nothing_is_known(what, connector, mock_clock):
    connector.automatic = False
    async with hosted(connector, deadline=10) as tier:
        error = await left_by(mock_clock, 11, getattr(tier, what), KEYS)
        assert isinstance(error, NoAnswer)
        assert "did not answer within 10 s, asked to find 3 keys" in str(error)
        connector.answer()
        await settle()
        assert of_host(tier, "late", "in_doubt") == (1, 0)
        assert tier.statistics().held_blocks == 0


async def test_a_store_that_cannot_ask_what_is_there_stores_nothing(connector, source, mock_clock):
    connector.automatic = False
    async with hosted(connector, deadline=10) as tier:
        error = await left_by(mock_clock, 11, store, tier, source)
        assert isinstance(error, NoAnswer)
        assert tier.statistics().used_bytes == 0
        assert of_host(tier, "quarantined_bytes", "hidden_keys") == (0, 0)
        connector.answer()


async def test_a_copy_that_was_cancelled_before_it_began_leaves_no_memory_in_quarantine(connector, source):
    async with hosted(connector) as tier:
        scope, views = trio.CancelScope(), source.views

        def cancelling(refs):
            scope.cancel()  # the plugin has been asked what is there; next is the copy
            return

        source.views = cancelling
        with scope:
            await store(tier, source)
        assert scope.cancelled_caught
        assert of_host(tier, "quarantined_bytes", "hidden_keys") == (0, 0)
        source.views = views
        assert await store(tier, source) == [STORED] * len(KEYS)


async def test_without_an_answer_a_load_leaves_the_destination_alone(connector, source, mock_clock):
    async with hosted(connector, deadline=10) as tier:
        await store(tier, source)
        lease = await tier.pin(KEYS)
        connector.automatic = False
        buffers = [bytearray(b"\xee" * SIZE) for _ in KEYS]
        error = await left_by(mock_clock, 11, tier.load, lease, PagesDestination.over(buffers))
        assert isinstance(error, NoAnswer)
        assert of_host(tier, "quarantined_bytes") == (3 * SIZE,)
        connector.answer()  # writes into what it was given
        await settle()
        assert buffers == [bytearray(b"\xee" * SIZE)] * 3
        assert of_host(tier, "quarantined_bytes", "in_doubt") == (0, 0)
        await lease.release()


async def test_without_an_answer_nobody_knows_what_was_deleted(source, mock_clock):
    connector = PlayedConnector(deletes=True)
    async with hosted(connector, deadline=10) as tier:
        await store(tier, source)
        connector.automatic = False
        error = await left_by(mock_clock, 11, tier.delete, KEYS[:1])
        assert isinstance(error, NoAnswer)
        connector.answer()
        await settle()
        assert tier.statistics().blocks == 2  # the books have heard of it


# --- cancelled at every await -----------------------------------------------------------------------------------------


def hear_now(tier, connector):
    """The answer is heard before whoever waits for it runs again."""
    connector.answer(signal=False)
    tier.driver._collect("completions", woken=False, expected=True)


@pytest.mark.parametrize("same_tick", [False, True])
@pytest.mark.parametrize("what", ["contains", "pin", "delete"])
async def test_a_cancelled_question_leaves_at_once_and_holds_nothing(what, same_tick, source):
    connector = PlayedConnector(deletes=True)
    async with hosted(connector) as tier:
        await store(tier, source)
        connector.automatic = False
        then = (lambda: hear_now(tier, connector)) if same_tick else None
        await cancelled(getattr(tier, what), KEYS, then=then)
        assert of_host(tier, "in_doubt") == (0 if same_tick else 1,)
        if not same_tick:
            connector.answer()
            await settle()
        assert of_host(tier, "outstanding", "hidden_keys") == (0, 0)
        assert tier.statistics().held_blocks == 0
        connector.automatic = True
        assert await tier.contains(KEYS) == (set() if what == "delete" else set(KEYS))
        assert tier.statistics().blocks == (0 if what == "delete" else 3)


async def test_a_store_that_is_cancelled_while_it_asks_has_sent_nothing(connector, source):
    connector.automatic = False
    async with hosted(connector) as tier:
        await cancelled(store, tier, source)
        assert tier.statistics().used_bytes == 0
        connector.answer()
        await settle()
        assert connector.waiting == []
        assert of_host(tier, "quarantined_bytes", "hidden_keys") == (0, 0)


@pytest.mark.parametrize("same_tick", [False, True])
async def test_a_store_that_is_cancelled_while_it_is_set_leaves_at_once(same_tick, connector, source):
    async with hosted(connector) as tier:
        connector.automatic = False

        scope = trio.CancelScope()

        async def run():
            with scope:
                await store(tier, source)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await settle()
            connector.answer()
            await settle()
            assert connector.kinds() == ["set"]
            scope.cancel()
            if same_tick:
                hear_now(tier, connector)
        assert scope.cancelled_caught
        assert of_host(tier, "in_doubt", "quarantined_bytes") == ((0, 0) if same_tick else (1, 3 * SIZE))
        if not same_tick:
            connector.answer()
            await settle()
        assert of_host(tier, "in_doubt", "quarantined_bytes", "hidden_keys") == (0, 0, 0)
        connector.automatic = True
        assert await tier.contains(KEYS) == set(KEYS)


async def test_a_store_that_is_cancelled_while_it_waits_for_another_has_done_nothing(connector, source):
    connector.automatic = False
    async with hosted(connector) as tier, trio.open_nursery() as nursery:
        nursery.start_soon(store, tier, source)
        await settle()
        await cancelled(store, tier, source)
        assert connector.kinds() == ["exists"]
        connector.answer()
        await settle()
        connector.answer()


async def test_a_store_that_is_cancelled_while_victims_are_deleted_gives_its_room_back(source):
    connector = PlayedConnector(deletes=True)
    async with hosted(connector, capacity_bytes=3 * SIZE) as tier:
        await store(tier, source)
        connector.automatic = False
        await cancelled(store, tier, source, [b"d"], "evict")
        assert connector.kinds() == ["delete"]
        connector.answer()
        await settle()
        assert tier.statistics().used_bytes == 2 * SIZE
        connector.automatic = True
        assert len(await tier.contains(KEYS)) == 2


async def test_a_store_that_is_cancelled_while_a_thread_copies_leaves_at_once(connector, source):
    started, go_on = threading.Event(), threading.Event()

    class Slow(Source):
        block_bytes = SIZE

        def copy_out(self, refs, pages):
            started.set()
            go_on.wait()

    before = set(_host_state._quarantine)  # what others were left with for good
    async with hosted(connector) as tier:
        reservation = await tier.reserve(RoomRequest(KEYS, SIZE, "fail"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reservation.transfer, Slow(), [0, 1, 2])
            await trio.to_thread.run_sync(started.wait)
            nursery.cancel_scope.cancel()
        assert of_host(tier, "quarantined_bytes") == (3 * SIZE,)
        go_on.set()
        reservation.release()
        assert connector.kinds() == []
        with trio.fail_after(60):
            while of_host(tier, "quarantined_bytes") != (0,):  # noqa: ASYNC110  # a thread says when
                await trio.sleep(0.01)
        assert _host_state._quarantine <= before


@pytest.mark.parametrize("same_tick", [False, True])
async def test_a_load_that_is_cancelled_while_it_asks_leaves_at_once(same_tick, connector, source):
    async with hosted(connector) as tier:
        await store(tier, source)
        async with await tier.pin(KEYS) as lease:
            connector.automatic = False
            buffers = [bytearray(b"\xee" * SIZE) for _ in KEYS]
            then = (lambda: hear_now(tier, connector)) if same_tick else None
            await cancelled(tier.load, lease, PagesDestination.over(buffers), then=then)
            assert of_host(tier, "quarantined_bytes") == (0 if same_tick else 3 * SIZE,)
            if not same_tick:
                connector.answer()
                await settle()
            assert of_host(tier, "quarantined_bytes", "in_doubt") == (0, 0)
            assert buffers == [bytearray(b"\xee" * SIZE)] * 3
        connector.automatic = True


async def test_a_reserve_that_is_cancelled_while_it_waits_holds_nothing(connector, source):
    async with hosted(connector, capacity_bytes=3 * SIZE) as tier:
        held = await tier.reserve(RoomRequest(KEYS, SIZE, "wait"))
        await cancelled(tier.reserve, RoomRequest([b"d"], SIZE, "wait"))
        held.release()
        assert tier.statistics().used_bytes == 0


async def test_cancelled_before_it_begins_nothing_is_asked(connector, source):
    async with hosted(connector) as tier:
        for fn, args in (
            (tier.contains, (KEYS,)),
            (tier.pin, (KEYS,)),
            (tier.delete, (KEYS,)),
            (store, (tier, source)),
        ):
            with trio.CancelScope() as scope:
                scope.cancel()
                await fn(*args)
            assert scope.cancelled_caught
        assert connector.ids == 0
        assert of_host(tier, "outstanding", "quarantined_bytes", "hidden_keys") == (0, 0, 0)


# --- opened and closed ------------------------------------------------------------------------------------------------


async def test_it_is_used_inside_async_with_and_opened_once(connector, source):
    tier = hosted(connector)
    with pytest.raises(backends.PlaceClosed, match="is not open"):
        await tier.contains(KEYS)
    with pytest.raises(backends.PlaceClosed, match="is not open"):
        await tier.reserve(RoomRequest(KEYS, SIZE, "fail"))
    async with tier, tier:
        assert await store(tier, source) == [STORED] * 3
    assert connector.closed == 1
    with pytest.raises(backends.PlaceClosed, match="was closed"):
        await tier.__aenter__()


async def test_what_is_outstanding_in_the_end_is_waited_for(connector, mock_clock):
    connector.automatic = False
    order = []
    leaving = trio.Event()

    def closes():
        order.append("closed")
        os.close(connector.fd)

    connector.close = closes
    async with trio.open_nursery() as nursery:

        async def use():
            async with hosted(connector, close_deadline=5) as tier:
                await cancelled(tier.contains, KEYS)
                leaving.set()

        nursery.start_soon(use)
        await leaving.wait()
        await settle()
        assert order == []
        connector.answer()
    assert order == ["closed"]


async def test_what_is_never_answered_is_waited_for_so_long_and_no_longer(connector, mock_clock):
    connector.automatic = False
    leaving = trio.Event()

    async def use():
        async with hosted(connector, close_deadline=5) as tier:
            await cancelled(tier.contains, KEYS)
            leaving.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(use)
        await leaving.wait()
        await settle()
        mock_clock.jump(4)
        await settle()
        assert connector.closed == 0
        mock_clock.jump(2)
    assert connector.closed == 1


async def test_who_waits_when_it_is_closed_is_told(connector, mock_clock):
    connector.automatic = False
    errors = []

    async def ask(tier):
        with pytest.raises(NoAnswer, match="was closed") as info:
            await tier.contains(KEYS)
        errors.append(info.value)

    async def use(nursery):
        async with hosted(connector, close_deadline=5) as tier:
            nursery.start_soon(ask, tier)
            await settle()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(use, nursery)
        while not errors:  # at once, not at a deadline
            await settle()
        mock_clock.jump(6)
    assert connector.closed == 1


async def test_an_exception_in_close_is_told(connector):
    connector.close_error = OSError("as told")
    with pytest.raises(PluginFault, match=r"close raised OSError\('as told'\)"):
        async with hosted(connector):
            pass


async def test_the_callers_own_exception_comes_first(connector):
    connector.close_error = OSError("as told")
    with pytest.raises(KeyError) as info:
        async with hosted(connector):
            raise KeyError("mine")
    assert "close raised OSError" in info.value.__notes__[0]


async def test_a_close_that_does_not_return_is_left_and_told(connector, mock_clock):
    connector.close_waits = threading.Event()

    async def use():
        async with hosted(connector, close_deadline=5):
            pass

    try:
        error = await left_by(mock_clock, 6, use)
        assert isinstance(error, NoAnswer)
        assert "close did not return within 5 s" in str(error)
    finally:
        connector.close_waits.set()


async def test_cancelled_in_the_end_it_closes_all_the_same(connector):
    with trio.CancelScope() as scope:
        async with hosted(connector):
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert connector.closed == 1


async def test_nothing_is_left_when_it_is_closed(source):
    before = open_descriptors(collect=True)
    threads = set(threading.enumerate())  # those of earlier tests may go meanwhile
    for _ in range(3):
        async with hosted(DeletingConnector(), capacity_bytes=4 * SIZE) as tier:
            await store(tier, source)
            await store(tier, source, [b"d", b"e"], "evict")
            await load(tier, [b"d"])
    assert set(threading.enumerate()) <= threads
    assert open_descriptors() <= before


async def test_of_what_is_stored_chunk_by_chunk_the_deepest_makes_room(source):
    """A host keeps the order of use for its plugin, so the depths of blocks as well."""
    keys = [b"%d" % at for at in range(48)]
    async with hosted(DeletingConnector(), capacity_bytes=32 * SIZE) as tier:
        for depth, key in enumerate(keys):
            reservation = await tier.reserve(RoomRequest([key], SIZE, "evict"))
            reservation.note_depths({key: depth})
            await reservation.transfer(source, source.upgrade([key]))
            reservation.release()
        there = await tier.contains(keys)
        assert keys[0] in there, "of two candidates the head stays"
        assert tier.depths_of(keys[:1]) == [0]
