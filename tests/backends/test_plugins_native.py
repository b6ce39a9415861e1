"""The host of native connectors: what goes right, and what it does when they do wrong."""

import os
import threading
import time

import pytest
import trio
import trio.testing

import backends
from backends.abc import DUPLICATE, LOADED, STORED, Deletion, Failed, Missed, RoomRequest
from backends.base.slots import PagesDestination
from backends.plugins import HostConfig, NativeTier, NoAnswer, PluginFault, PluginTypeError
from backends.plugins._native import published_name
from backends.testing import FakeTier, payload_of
from tests.support.plugin_faults import PlayedConnector
from tests.support.plugin_peers import ThreadConnector
from tests.support.plugin_play import KEYS, SIZE, filled_source, left_by, load, of_host, rescued, settle, store

NAMES = [published_name(key) for key in KEYS]


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


# --- what goes right ------------------------------------------------------------------------------------------------


async def test_blocks_go_out_and_come_back(connector, source):
    async with hosted(connector) as tier:
        assert await store(tier, source) == [STORED] * 3
        assert {name: connector.blocks[name] for name in NAMES} == {
            name: payload_of(key, SIZE) for name, key in zip(NAMES, KEYS, strict=True)
        }
        assert await tier.contains([*KEYS, b"no"]) == set(KEYS)
        assert await load(tier) == ([LOADED] * 3, [payload_of(key, SIZE) for key in KEYS])
        assert await store(tier, source) == [DUPLICATE] * 3
    assert connector.closed == 1


async def test_keys_have_the_names_that_one_says(connector, source):
    async with NativeTier(connector, SIZE, name_of=lambda key: f"model@{key.hex()}") as tier:
        await store(tier, source, KEYS[:1])
    assert list(connector.blocks) == [f"model@{KEYS[0].hex()}"]


async def test_nothing_is_asked_of_no_keys(connector, source):
    connector.automatic = False
    async with hosted(connector) as tier:
        assert await store(tier, source, []) == []
        assert await tier.contains([]) == set()
        async with await tier.pin([]) as lease:
            assert await tier.load(lease, PagesDestination.over([bytearray(SIZE)])) == []
        assert await tier.delete([]) == []
    assert connector.ids == 0


async def test_what_somebody_else_stored_is_found_and_counted_as_unverified(connector):
    connector.blocks[NAMES[0]] = payload_of(KEYS[0], SIZE)
    async with hosted(connector) as tier:
        assert (await load(tier, KEYS[:1]))[0] == [LOADED]
        assert of_host(tier, "unverified") == (1,)
        assert tier.statistics().blocks == 0


async def test_without_checksums_nothing_is_verified_nor_counted(connector, source):
    async with hosted(connector, checksums=False) as tier:
        await store(tier, source)
        connector.blocks[NAMES[0]] = bytes(SIZE)
        assert await load(tier, KEYS[:1]) == ([LOADED], [bytes(SIZE)])
        assert of_host(tier, "unverified") == (0,)


async def load_beside_a_secret(tier, connector, put):
    """Store a block of one tenant, then load another's by a connector that writes what ``put`` writes. Outcome and bytes."""
    source = FakeTier(4, SIZE)
    source.put(b"ann", b"S" * SIZE)
    await store(tier, source, [b"ann"])
    connector.blocks[published_name(b"bob")] = b"b" * SIZE
    connector.put = put
    buffer = bytearray(SIZE)
    async with await tier.pin([b"bob"]) as lease:
        [outcome] = await tier.load(lease, PagesDestination.over([buffer]))
    return outcome, bytes(buffer)


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("length", [0, 1, SIZE // 2, SIZE - 8, SIZE - 4])
async def test_a_short_read_is_a_miss(connector, checksums, length):
    def put(view, data):
        view[:length] = data[:length]

    async with hosted(connector, checksums=checksums) as tier:
        outcome, got = await load_beside_a_secret(tier, connector, put)
        assert (outcome, got) == (Missed("short"), bytes(SIZE))
        assert tier.statistics().missed["short"] == 1
        assert await tier.contains([b"ann", b"bob"]) == {b"ann"}


async def test_a_read_with_a_hole_shows_no_other_block(connector):
    def put(view, data):
        view[-16:] = data[-16:]

    async with hosted(connector) as tier:
        outcome, got = await load_beside_a_secret(tier, connector, put)
        assert (outcome, got) == (LOADED, bytes(SIZE - 16) + b"b" * 16)
        assert of_host(tier, "unverified") == (1,)


async def test_a_short_block_that_was_stored_here_is_stored_again(connector, source):
    async with hosted(connector, checksums=False) as tier:  # a sum finds it, too
        await store(tier, source)
        connector.put = lambda view, data: None
        assert (await load(tier))[0] == [Missed("short")] * 3
        del connector.put
        assert await store(tier, source) == [STORED] * 3
        assert await load(tier) == ([LOADED] * 3, [payload_of(key, SIZE) for key in KEYS])


async def test_a_damaged_block_is_deleted_as_soon_as_that_is_possible(source):
    connector = PlayedConnector(deletes=True)
    async with hosted(connector) as tier:
        await store(tier, source)
        connector.blocks[NAMES[1]] = bytes(SIZE)
        assert (await load(tier))[0] == [LOADED, Missed("damaged"), LOADED]
        assert await tier.contains(KEYS) == {KEYS[0], KEYS[2]}
        async with await tier.pin(KEYS[1:2]) as lease:
            assert not lease.keys
        assert await store(tier, source, [b"d"]) == [STORED]
        assert NAMES[1] not in connector.blocks
        assert of_host(tier, "hidden_keys") == (0,)


async def test_a_damaged_block_that_will_not_go_stays_hidden(source):
    connector = PlayedConnector(deletes=True)
    async with hosted(connector) as tier:
        await store(tier, source)
        connector.blocks[NAMES[1]] = bytes(SIZE)
        await load(tier)
        connector.submit_batch_delete = lambda keys: connector._submit("exists", keys)  # says yes, does nothing
        said = connector.submit_batch_delete
        connector.submit_batch_delete = lambda keys: said([f"not {key}" for key in keys])  # says no, does nothing
        await store(tier, source, [b"d"])
        assert await tier.contains(KEYS) == {KEYS[0], KEYS[2]}
        assert NAMES[1] in connector.blocks


async def test_victims_are_deleted_before_their_room_is_used(source):
    connector = PlayedConnector(deletes=True)
    async with hosted(connector, capacity_bytes=3 * SIZE) as tier:
        await store(tier, source)
        assert await store(tier, source, [b"d", b"e"], "evict") == [STORED] * 2
        assert len(connector.blocks) == 3
        assert tier.statistics().evicted == 2
        assert tier.statistics().used_bytes == 3 * SIZE


async def test_a_victim_is_not_found_while_it_is_still_there(source):
    connector = PlayedConnector(deletes=True)
    async with hosted(connector, capacity_bytes=3 * SIZE) as tier:
        await store(tier, source)
        reservation = await tier.reserve(RoomRequest([b"d", b"e", b"f"], SIZE, "evict"))
        assert set(connector.blocks) == set(NAMES)
        assert await tier.contains(KEYS) == set()
        reservation.release()


async def test_what_is_evicted_while_it_is_asked_for_is_neither_found_nor_held(source):
    connector = PlayedConnector(deletes=True)
    async with hosted(connector, capacity_bytes=3 * SIZE) as tier:
        await store(tier, source)
        connector.automatic = False
        found = []

        async def ask():
            found.append(await tier.contains(KEYS))

        async def hold():
            async with await tier.pin(KEYS) as lease:
                found.append(list(lease.keys))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await settle()
            nursery.start_soon(hold)
            await settle()
            reservation = tier.reserve_nowait(RoomRequest([b"d", b"e", b"f"], SIZE, "evict"))
            connector.answer()
            connector.answer()
        assert found == [set(), []] or found == [[], set()]
        reservation.release()
        connector.automatic = True


async def test_without_a_capacity_the_oldest_are_forgotten_and_not_deleted(source):
    connector = PlayedConnector(deletes=True)
    async with hosted(connector, most_known=2) as tier:
        await store(tier, source)
        assert tier.statistics().blocks == 2
        assert tier.statistics().evicted == 0
        assert await tier.contains(KEYS) == set(KEYS)
        assert (await load(tier))[0] == [LOADED] * 3
        assert of_host(tier, "unverified") == (1,)


async def test_two_stores_of_one_key_are_one_after_the_other(connector, source):
    connector.automatic = False
    got = []

    async def one(keys):
        got.append(await store(tier, source, keys))

    async with hosted(connector) as tier:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, KEYS[:2])
            await settle()
            nursery.start_soon(one, KEYS[1:])
            await settle()
            assert connector.kinds() == ["exists"]
            assert await tier.contains(KEYS[:2]) == set()
            for kinds in (["set"], ["exists"], ["set"], []):
                connector.answer()
                await settle()
                assert connector.kinds() == kinds
        assert got == [[STORED, STORED], [DUPLICATE, STORED]]
        connector.automatic = True


async def test_it_is_a_tier_of_an_engine(source):
    import offload

    hot = FakeTier(4, SIZE)
    with trio.fail_after(60):
        async with offload.open_engine(source, [hot, hosted(ThreadConnector())]) as engine:
            blocks = source.weak(KEYS)
            handle = await engine.store(blocks, precondition=offload.NO_WAIT)
            await handle.wait()
            await engine.drain()
            await hot.delete(KEYS)
            buffers = [bytearray(SIZE) for _ in KEYS]
            async with await engine.lookup(KEYS) as hit:
                await engine.load(hit, PagesDestination.over(buffers))
            assert [bytes(buffer) for buffer in buffers] == [payload_of(key, SIZE) for key in KEYS]


# --- completions ----------------------------------------------------------------------------------------------------


async def test_a_completion_of_an_unknown_id_is_counted(connector, source):
    async with hosted(connector) as tier:
        connector.tell(4711)
        await settle()
        assert of_host(tier, "unknown") == (1,)
        assert await store(tier, source) == [STORED] * 3


async def test_a_second_completion_is_counted_and_changes_nothing(connector, source):
    async with hosted(connector) as tier:
        await store(tier, source)
        connector.tell(2, ok=False, error="on second thoughts")
        await settle()
        assert of_host(tier, "twice", "unknown") == (1, 0)
        assert await tier.contains(KEYS) == set(KEYS)


async def test_an_id_that_is_outstanding_is_not_given_twice(connector):
    connector.automatic = False
    connector.next_id = 7
    async with hosted(connector) as tier, trio.open_nursery() as nursery:
        nursery.start_soon(tier.contains, KEYS)
        await settle()
        with pytest.raises(PluginFault, match="the id 7 was returned twice"):
            await tier.contains(KEYS)
        connector.answer()
        connector.waiting.clear()


@pytest.mark.parametrize("bits", [[True], [True] * 4], ids=["too few", "too many"])
async def test_a_wrong_number_of_bits_is_a_fault(bits, connector, source):
    async with hosted(connector) as tier:
        await store(tier, source)
        connector.automatic = False
        connector_answers = AnswersBadly(connector, bits=bits)
        for ask in (lambda: tier.contains(KEYS), lambda: tier.pin(KEYS)):
            with connector_answers, pytest.raises(PluginFault, match=f"exists?|find: {len(bits)} bits for 3 keys"):
                await ask()
        connector.automatic = True
        buffers = [bytearray(b"\xee" * SIZE) for _ in KEYS]
        async with await tier.pin(KEYS) as lease:
            connector.automatic = False
            with connector_answers, pytest.raises(PluginFault, match=f"get: {len(bits)} bits for 3 keys"):
                await tier.load(lease, PagesDestination.over(buffers))
        assert buffers == [bytearray(b"\xee" * SIZE)] * 3
        assert of_host(tier, "wrong_bits", "quarantined_bytes") == (3, 0)
        connector.automatic = True


class AnswersBadly:
    """While this is entered, everything is answered with what was said."""

    def __init__(self, connector, **said):
        self.connector, self.said = connector, said
        self.right = connector._submit

    def __enter__(self):
        def submit(*args):
            number = self.right(*args)
            self.connector.answer(**self.said)
            return number

        self.connector._submit = submit

    def __exit__(self, *exc):
        self.connector._submit = self.right


async def test_bits_of_a_failed_get_are_a_partial_success(connector, source):
    async with hosted(connector) as tier:
        await store(tier, source)
        lease = await tier.pin(KEYS)
        buffers = [bytearray(SIZE) for _ in KEYS]
        connector.automatic = False
        with AnswersBadly(connector, ok=False, error="one was slow", bits=[True, False, True]):
            outcomes = await tier.load(lease, PagesDestination.over(buffers))
        assert outcomes == [LOADED, Missed("gone"), LOADED]
        assert [bytes(buffers[0]), bytes(buffers[2])] == [payload_of(KEYS[0], SIZE), payload_of(KEYS[2], SIZE)]
        assert bytes(buffers[1]) == bytes(SIZE)
        await lease.release()
        connector.automatic = True


async def test_bits_of_a_failed_exists_are_not_believed(connector, source):
    async with hosted(connector) as tier:
        await store(tier, source)
        connector.automatic = False
        badly = AnswersBadly(connector, ok=False, error="no connection", bits=[True] * 3)
        with badly, pytest.raises(PluginFault, match="no connection"):
            await tier.contains(KEYS)
        connector.automatic = True


async def test_an_exists_without_bits_says_nothing(connector, source):
    connector.automatic = False
    async with hosted(connector) as tier:
        with AnswersBadly(connector, bits=None), pytest.raises(PluginFault, match="not which keys"):
            await tier.contains(KEYS)


async def test_a_get_without_bits_is_as_it_says(connector, source):
    async with hosted(connector) as tier:
        await store(tier, source)
        lease = await tier.pin(KEYS)
        buffers = [bytearray(SIZE) for _ in KEYS]
        connector.automatic = False
        with AnswersBadly(connector, bits=None):
            assert await tier.load(lease, PagesDestination.over(buffers)) == [LOADED] * 3
        with AnswersBadly(connector, ok=False, error="broken", bits=None), pytest.raises(PluginFault, match="broken"):
            await tier.load(lease, PagesDestination.over(buffers))
        await lease.release()


async def test_a_failed_set_fails_all_its_keys_and_hides_what_it_left(connector, source):
    async with hosted(connector) as tier:
        connector.automatic = False
        async with trio.open_nursery() as nursery:
            outcomes = []

            async def one():
                outcomes.extend(await store(tier, source))

            nursery.start_soon(one)
            await settle()
            connector.answer()
            await settle()
            connector.answer(ok=False, error="disk full")
        assert all(isinstance(outcome, Failed) and "disk full" in str(outcome.error) for outcome in outcomes)
        connector.automatic = True
        assert set(connector.blocks) == set(NAMES)  # left behind
        assert await tier.contains(KEYS) == set()
        assert tier.statistics().used_bytes == 0
        assert await store(tier, source) == [STORED] * 3
        assert await tier.contains(KEYS) == set(KEYS)


async def test_a_set_may_say_which_keys_failed(connector, source):
    async with hosted(connector) as tier:
        connector.automatic = False
        outcomes = []

        async def one():
            outcomes.extend(await store(tier, source))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await settle()
            connector.answer()
            await settle()
            connector.answer(bits=[True, False, True])
        connector.automatic = True
        assert outcomes[0] == outcomes[2] == STORED
        assert isinstance(outcomes[1], Failed)
        assert await tier.contains(KEYS) == {KEYS[0], KEYS[2]}
        assert tier.statistics().used_bytes == 2 * SIZE


# --- the descriptor -------------------------------------------------------------------------------------------------


async def test_a_signal_with_nothing_behind_it_is_counted(connector, source):
    async with hosted(connector) as tier:
        connector.signal()
        await settle()
        assert of_host(tier, "empty_wakes", "resets") == (1, 0)
        assert await store(tier, source) == [STORED] * 3


async def test_an_answer_without_a_signal_is_found_and_counted(connector, mock_clock):
    connector.signals = False
    async with hosted(connector, rescue_interval=0.25) as tier:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tier.contains, KEYS)
            await settle()
            mock_clock.jump(0.2)
            await settle()
            assert of_host(tier, "rescues", "outstanding") == (0, 1)
            mock_clock.jump(0.1)
        assert of_host(tier, "rescues", "outstanding") == (1, 0)


async def test_nobody_looks_while_nothing_is_outstanding(connector, mock_clock):
    looks = []
    connector.on_drain = lambda: looks.append(trio.current_time())
    async with hosted(connector) as tier:
        await tier.contains(KEYS)
        looks.clear()
        mock_clock.jump(100)
        await settle()
        assert len(looks) <= 1  # of the wait that was going on


async def test_a_descriptor_that_is_not_reset_is_reset_here(connector, source):
    looks = []
    connector.resets = False
    connector.on_drain = lambda: looks.append(1)
    async with hosted(connector) as tier:
        assert await store(tier, source) == [STORED] * 3
        await settle()
        assert of_host(tier, "resets")[0] >= 1
        assert len(looks) < 20


async def test_an_exception_in_drain_is_counted_and_tried_again(connector, mock_clock):
    connector.drain_error = OSError("as told")
    async with hosted(connector) as tier, trio.open_nursery() as nursery:
        nursery.start_soon(tier.contains, KEYS)
        await settle()
        assert of_host(tier, "raised", "outstanding") == (1, 1)
        connector.drain_error = None
        mock_clock.jump(1)  # not at once again
        await settle()
        mock_clock.jump(1)  # its signal was lost, so that is a rescue
    assert of_host(tier, "raised", "outstanding") == (1, 0)


async def test_exceptions_in_drain_end_in_no_answer_which_says_so(connector, mock_clock):
    connector.drain_error = OSError("as told")
    async with hosted(connector, deadline=10) as tier:
        error = await left_by(mock_clock, 11, tier.contains, KEYS)
        assert isinstance(error, NoAnswer)
        assert error.__cause__ is connector.drain_error
        connector.drain_error = None
        await rescued(mock_clock)


async def test_what_drain_returns_must_be_completions(connector, mock_clock):
    connector.automatic = False
    async with hosted(connector, deadline=10) as tier:
        connector.done.append("nonsense")
        connector.signal()
        error = await left_by(mock_clock, 11, tier.contains, KEYS)
        assert "drain_completions returned 'nonsense'" in str(error.__cause__)
        connector.answer()


@pytest.mark.parametrize("fd", ["3", None, -1, True])
async def test_a_descriptor_must_be_one(fd, connector):
    connector.event_fd = lambda: fd
    with pytest.raises(PluginTypeError, match="not a descriptor"):
        async with hosted(connector):
            pass
    assert connector.closed == 1


async def test_a_descriptor_that_is_closed_breaks_the_line(connector, mock_clock):
    other = os.eventfd(0)
    os.close(other)
    connector.event_fd = lambda: other
    async with hosted(connector) as tier:
        await settle()
        with pytest.raises(PluginFault, match="cannot be waited for"):
            await tier.contains(KEYS)


async def test_who_waits_when_the_line_breaks_is_told_at_once(connector, source, mock_clock):
    connector.automatic = False
    async with hosted(connector) as tier:
        reservation = await tier.reserve(RoomRequest(KEYS, SIZE, "fail"))
        errors = []

        async def transfer():
            with pytest.raises(backends.Unproven) as info:
                await reservation.transfer(source, [0, 1, 2])
            errors.append(info.value)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(transfer)
            await settle()
            connector.answer()
            await settle()
            assert connector.kinds() == ["set"]
            tier.driver._break("broken on purpose")
        assert "broken on purpose" in str(errors[0])
        reservation.release()


async def test_two_hosts_cannot_listen_to_one_descriptor(connector):
    other = PlayedConnector()
    os.close(other.fd)
    other.fd = connector.fd
    other.close = lambda: None
    async with hosted(connector) as first, hosted(other) as second:
        await settle()
        broken = []
        for tier in (first, second):
            try:
                await tier.contains([])
                await tier.contains(KEYS)
            except PluginFault as fault:
                broken.append(str(fault))
        assert len(broken) == 1
        assert "another host already waits for descriptor" in broken[0]


# --- submitting -----------------------------------------------------------------------------------------------------


async def test_a_submit_that_raises_has_started_nothing(connector, source):
    connector.submit_error = OSError("as told")
    async with hosted(connector) as tier:
        for ask in (lambda: tier.contains(KEYS), lambda: store(tier, source)):
            with pytest.raises(PluginFault, match="submitting find raised OSError"):
                await ask()
        assert of_host(tier, "outstanding", "quarantined_bytes") == (0, 0)
        connector.submit_error = None
        assert await store(tier, source) == [STORED] * 3


async def test_a_set_that_cannot_be_submitted_fails(connector, source):
    connector.submit_batch_set = lambda keys, memoryviews: 1 / 0
    async with hosted(connector) as tier:
        outcomes = await store(tier, source)
        assert all(isinstance(outcome, Failed) for outcome in outcomes)
        assert of_host(tier, "outstanding", "quarantined_bytes") == (0, 0)


async def test_a_submit_that_blocks_is_counted(connector):
    right = connector._submit

    def slowly(*args):
        time.sleep(0.06)
        return right(*args)

    connector._submit = slowly
    async with hosted(connector) as tier:
        await tier.contains(KEYS)
        assert of_host(tier, "slow_submits") == (1,)


async def test_in_a_thread_a_submit_that_blocks_can_be_left(connector):
    entered, go_on = threading.Event(), threading.Event()
    right = connector._submit

    def blocked(*args):
        entered.set()
        go_on.wait()
        return right(*args)

    connector._submit = blocked
    async with hosted(connector, submit_in_thread=True) as tier:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tier.contains, KEYS)
            await trio.to_thread.run_sync(entered.wait)
            nursery.cancel_scope.cancel()
        assert of_host(tier, "outstanding") == (1,)
        go_on.set()
        with trio.fail_after(60):
            while of_host(tier, "outstanding") != (0,):  # noqa: ASYNC110  # a thread says when
                await trio.sleep(0.01)


async def test_in_a_thread_a_submit_that_raises_is_told(connector):
    connector.submit_error = OSError("as told")
    async with hosted(connector, submit_in_thread=True) as tier:
        with pytest.raises(PluginFault, match="submitting find raised OSError"):
            await tier.contains(KEYS)
        assert of_host(tier, "outstanding") == (0,)


# --- what cannot be ---------------------------------------------------------------------------------------------------


async def test_leases_and_destinations_must_fit(connector, source):
    async with hosted(connector) as tier, hosted(PlayedConnector()) as other:
        await store(tier, source)
        lease = await tier.pin(KEYS)
        with pytest.raises(ValueError, match="does not hold blocks in"):
            await other.load(lease, PagesDestination.over([bytearray(SIZE) for _ in range(3)]))
        with pytest.raises(ValueError, match="do not fit into 2 places"):
            await tier.load(lease, PagesDestination.over([bytearray(SIZE) for _ in range(2)]))
        with pytest.raises(backends.BlockSizeError):
            await tier.load(lease, PagesDestination.over([bytearray(SIZE + 1) for _ in range(3)]))
        await lease.release()
        with pytest.raises(ValueError, match="does not hold blocks in"):
            await tier.load(lease, PagesDestination.over([bytearray(SIZE) for _ in range(3)]))


async def test_a_reservation_is_used_once_and_as_it_was_made(connector, source):
    async with hosted(connector) as tier:
        reservation = await tier.reserve(RoomRequest(KEYS, SIZE, "fail"))
        with pytest.raises(ValueError, match="of which 0 were granted"):
            reservation.keep([b"x"])
        with pytest.raises(ValueError, match="one ref per kept block"):
            await reservation.transfer(source, [0])
        with pytest.raises(backends.BlockSizeError):
            await reservation.transfer(FakeTier(2, SIZE * 2), [0, 1, 2])
        assert await reservation.transfer(source, [0, 1, 2]) == [STORED] * 3
        with pytest.raises(ValueError, match="one ref per kept block"):
            await reservation.transfer(source, [0, 1, 2])
        reservation.release()
        assert await tier.delete(KEYS[:1]) == [Deletion.UNAVAILABLE]


@pytest.mark.parametrize(
    "knobs",
    [
        {"deadline": 0},
        {"deadline": float("inf")},
        {"close_deadline": "5"},
        {"rescue_interval": True},
        {"capacity_bytes": 0},
        {"capacity_bytes": 1.5},
        {"capacity_bytes": SIZE - 1},
        {"checksums": 1},
        {"submit_in_thread": None},
        {"most_known": 0},
        {"most_quarantined_bytes": "1GiB"},
    ],
    ids=str,
)
def test_knobs_that_make_no_sense(knobs, connector):
    with pytest.raises(ValueError, match=next(iter(knobs))):
        hosted(connector, **knobs)


def test_what_is_no_connector(connector):
    with pytest.raises(PluginTypeError, match="it lacks event_fd, submit_batch_get"):
        NativeTier(object(), SIZE)
    with pytest.raises(ValueError, match="block_bytes is 0"):
        NativeTier(connector, 0)
