"""Hosts whose plugins answer at the worst moment, or with what makes no sense: nobody else may suffer from it."""

import os
import select
import threading

import pytest
import trio
import trio.testing

import backends
from backends.abc import LOADED, STORED, Deletion, Destination, Failed, Missed, RoomRequest, Source
from backends.base.slots import PagesDestination
from backends.plugins import HostConfig, LMCacheTier, NativeTier, NoAnswer, PluginFault, PluginTypeError
from tests.support.plugin_faults import PlayedAdapter, PlayedConnector
from tests.support.plugin_play import (
    KEYS,
    SIZE,
    cancelled,
    filled_source,
    left_by,
    load,
    of_host,
    rescued,
    settle,
    store,
)


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


@pytest.fixture
def adapter():
    return PlayedAdapter()


def hosted(plugin, **knobs):
    kind = NativeTier if isinstance(plugin, PlayedConnector) else LMCacheTier
    return kind(plugin, SIZE, HostConfig(**knobs))


class JustBefore(trio.abc.Instrument):
    """Calls a function right before a task of this name runs again, once."""

    def __init__(self, name, fn):
        self.name, self.fn = name, fn

    def before_task_step(self, task):
        if self.fn is not None and task.name == self.name:
            fn, self.fn = self.fn, None
            fn()


async def in_the_last_moment(tier, plugin, channel, happens, fn, *args):
    """What a call returns or raises, if it is answered after this has happened and before it runs again."""
    came = []

    async def run():
        try:
            came.append(await fn(*args))
        except Exception as exc:
            came.append(exc)

    def hear():
        plugin.answer(signal=False)
        tier.driver._collect(channel, woken=False, expected=True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, name="asks")
        await settle()
        instrument = JustBefore("asks", hear)
        trio.lowlevel.add_instrument(instrument)
        happens()
        await settle()
        trio.lowlevel.remove_instrument(instrument)
    [one] = came
    return one


# --- answered in the tick in which nobody waits any more ----------------------------------------------------------------


@pytest.mark.parametrize("look", ["contains", "pin", "load"])
async def test_a_miss_forgets_nothing_stored_meanwhile(connector, source, look):
    key = KEYS[:1]
    async with hosted(connector, capacity_bytes=8 * SIZE) as tier:

        async def ask():
            if look == "contains":
                await tier.contains(key)
            elif look == "pin":
                async with await tier.pin(key):
                    pass
            else:
                await load(tier, key)

        async with trio.open_nursery() as nursery:
            if look == "load":  # found by another process's hand, and gone when it is read
                connector.automatic = False
                nursery.start_soon(ask)
                await settle()
                connector.answer(bits=[True])
                await settle()
            else:
                connector.automatic = False
                nursery.start_soon(ask)
                await settle()
            number, kind, keys, views = connector.waiting.pop(0)
            said = connector._do(number, kind, keys, views)  # "not there", which is told later
            assert said["bits"] == [False]
            connector.automatic = True
            assert await store(tier, source, key) == [STORED]
            connector.tell(**said)
        assert (len(tier.registry), tier.statistics().used_bytes) == (1, SIZE)
        [name] = connector.blocks
        connector.blocks[name] = b"\xff" * SIZE
        outcomes, _ = await load(tier, key)
        assert outcomes == [Missed("damaged")] and of_host(tier, "unverified") == (0,)


@pytest.mark.parametrize("why", ["the deadline", "the line broke"])
async def test_a_load_that_is_answered_as_it_is_given_up_gives_its_memory_back_once(why, connector, source, mock_clock):
    async with hosted(connector, deadline=10) as tier:
        await store(tier, source)
        lease = await tier.pin(KEYS)
        buffers = [bytearray(SIZE) for _ in KEYS]
        connector.automatic = False
        happens = {
            "the deadline": lambda: mock_clock.jump(10.5),
            "the line broke": lambda: tier.driver._break("broken on purpose"),
        }[why]
        came = await in_the_last_moment(
            tier, connector, "completions", happens, tier.load, lease, PagesDestination.over(buffers)
        )
        assert isinstance(came, NoAnswer) or came == [LOADED] * 3
        assert of_host(tier, "quarantined_bytes", "outstanding") == (0, 0)
        tier.driver._broken = None
        # Two loads at the same time have a memory each.
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(tier.load, lease, PagesDestination.over([bytearray(SIZE) for _ in KEYS]))
            await settle()
            first, second = [views for _, _, _, views in connector.waiting]
            first[0][:] = b"1" * SIZE
            second[0][:] = b"2" * SIZE
            assert bytes(first[0]) == b"1" * SIZE
            connector.answer()
            connector.answer()
        await lease.release()
        connector.automatic = True


@pytest.mark.parametrize("why", ["the deadline", "the line broke"])
async def test_a_pin_that_is_answered_as_it_is_given_up_is_unlocked_once(why, adapter, source, mock_clock):
    async with hosted(adapter, deadline=10) as tier:
        await store(tier, source)
        adapter.automatic = False
        happens = {
            "the deadline": lambda: mock_clock.jump(10.5),
            "the line broke": lambda: tier.driver._break("broken on purpose"),
        }[why]
        came = await in_the_last_moment(tier, adapter, "lookup", happens, tier.pin, KEYS)
        if not isinstance(came, NoAnswer):
            assert adapter.locks == dict.fromkeys(KEYS, 1)
            await came.release()
        assert adapter.locks == {}
        assert of_host(tier, "failed_unlocks") == (0,)
        assert tier.statistics().held_blocks == 0


@pytest.mark.parametrize("why", ["the deadline", "the line broke"])
async def test_a_store_that_is_answered_as_it_is_given_up_hides_nothing(why, connector, source, mock_clock):
    async with hosted(connector, deadline=10) as tier:
        right = connector._submit

        def submit(kind, *args):
            connector.automatic = kind != "set"
            return right(kind, *args)

        connector._submit = submit
        happens = {
            "the deadline": lambda: mock_clock.jump(10.5),
            "the line broke": lambda: tier.driver._break("broken on purpose"),
        }[why]
        came = await in_the_last_moment(tier, connector, "completions", happens, store, tier, source)
        tier.driver._broken = None
        assert isinstance(came, NoAnswer | backends.Unproven) or came == [STORED] * 3
        assert of_host(tier, "quarantined_bytes", "hidden_keys", "outstanding") == (0, 0, 0)
        assert len(set(map(id, tier._state.staging._spare))) == len(tier._state.staging._spare)
        assert await tier.contains(KEYS) == set(KEYS)


# --- submitted in a thread ------------------------------------------------------------------------------------------------


async def test_in_a_thread_an_id_that_is_outstanding_is_not_given_twice(connector):
    connector.automatic = False
    connector.next_id = 7
    async with hosted(connector, submit_in_thread=True) as tier, trio.open_nursery() as nursery:
        nursery.start_soon(tier.contains, KEYS)
        with trio.fail_after(60):
            while tier.driver.correlation.outstanding("completions") != [7]:  # noqa: ASYNC110  # a thread says when
                await trio.sleep(0.01)
        with pytest.raises(PluginFault, match="the id 7 was returned twice"):
            await tier.contains(KEYS)
        connector.answer()
        connector.waiting.clear()
        await settle()


async def test_an_id_that_is_given_twice_to_whoever_has_left_is_no_reason_for_others_to_fail(connector):
    entered, go_on = threading.Event(), threading.Event()
    right = connector._submit
    connector.automatic = False
    connector.next_id = 7

    def blocked(*args):
        if connector.ids:
            entered.set()
            go_on.wait()
        return right(*args)

    connector._submit = blocked
    async with hosted(connector, submit_in_thread=True) as tier, trio.open_nursery() as nursery:
        nursery.start_soon(tier.contains, KEYS)
        with trio.fail_after(60):
            while tier.driver.correlation.outstanding("completions") != [7]:  # noqa: ASYNC110  # a thread says when
                await trio.sleep(0.01)
            async with trio.open_nursery() as left:
                left.start_soon(tier.contains, KEYS)
                await trio.to_thread.run_sync(entered.wait)
                left.cancel_scope.cancel()
            go_on.set()
            while of_host(tier, "outstanding") != (1,):  # noqa: ASYNC110  # the listener files it
                await trio.sleep(0.01)
        connector.answer()
        connector.waiting.clear()
        await settle()


async def test_in_a_thread_a_submit_that_raises_when_it_was_left_gives_everything_back(connector, source):
    entered, go_on = threading.Event(), threading.Event()
    right = connector._submit

    def blocked(kind, *args):
        if kind != "set":
            return right(kind, *args)
        entered.set()
        go_on.wait()
        raise OSError("as told")

    connector._submit = blocked
    async with hosted(connector, submit_in_thread=True) as tier:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store, tier, source)
            await trio.to_thread.run_sync(entered.wait)
            nursery.cancel_scope.cancel()
        assert of_host(tier, "outstanding", "quarantined_bytes", "hidden_keys") == (1, 3 * SIZE, 3)
        go_on.set()
        with trio.fail_after(60):
            while of_host(tier, "outstanding") != (0,):  # noqa: ASYNC110  # a thread says when
                await trio.sleep(0.01)
        assert of_host(tier, "quarantined_bytes", "hidden_keys") == (0, 0)


async def test_without_a_thread_to_submit_in_nothing_is_outstanding(connector, source, monkeypatch):
    async with hosted(connector, submit_in_thread=True) as tier:
        await store(tier, source)
        async with await tier.pin(KEYS) as lease:

            async def none_left(*args):
                raise RuntimeError("can't start new thread")

            with monkeypatch.context() as patched:
                patched.setattr("backends.plugins._driver.run_in_thread", none_left)
                places = PagesDestination.over([bytearray(SIZE) for _ in KEYS])
                with pytest.raises(PluginFault, match="can't start"):
                    await tier.load(lease, places)
            assert of_host(tier, "outstanding", "quarantined_bytes") == (0, 0)
            assert await tier.load(lease, places) == [LOADED] * 3


# --- what makes no sense ----------------------------------------------------------------------------------------------------


class Untrue:
    def __bool__(self):
        raise RuntimeError("neither")


@pytest.mark.parametrize(
    "bits", [5, object(), iter([True] * 3), [True, Untrue(), True]], ids=["int", "object", "iterator", "untrue"]
)
async def test_bits_that_are_none_are_a_fault_of_this_operation_alone(bits, connector, source):
    async with hosted(connector) as tier:
        await store(tier, source)
        connector.automatic = False

        async def ask():
            with pytest.raises(PluginFault, match="bits"):
                await tier.contains(KEYS)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await settle()
            connector.answer(bits=bits)
        assert of_host(tier, "outstanding", "wrong_bits") == (0, 1)
        connector.automatic = True
        assert await tier.contains(KEYS) == set(KEYS)


@pytest.mark.parametrize("what", ["native", "lmcache"])
async def test_an_id_that_is_none_leaves_its_memory_to_the_plugin(what, connector, adapter, source):
    plugin = connector if what == "native" else adapter
    async with hosted(plugin) as tier:
        await store(tier, source)
        async with await tier.pin(KEYS) as lease:
            plugin.automatic = False
            right = plugin._submit
            plugin._submit = lambda *args: right(*args) and "seven"
            places = PagesDestination.over([bytearray(SIZE) for _ in KEYS])
            with pytest.raises(PluginFault, match="'seven'"):
                await tier.load(lease, places)
            assert of_host(tier, "quarantined_bytes") == (3 * SIZE,)  # it was asked, and may write there for ever
            plugin._submit = right
            plugin.waiting.clear()
            plugin.automatic = True
            assert await tier.load(lease, places) == [LOADED] * 3
        for run in set(tier._state.staging.quarantined):  # of this process, and nobody is at it
            run.give_back()


async def test_one_task_that_cannot_be_asked_for_holds_up_no_other(adapter, source, mock_clock):
    async with hosted(adapter, deadline=10) as tier:
        await store(tier, source)
        adapter.automatic = False
        right, found = adapter._query, []

        def query(channel, task_id):
            if task_id == 3:
                raise KeyError(task_id)
            return right(channel, task_id)

        adapter._query = query

        async def ask(key):
            try:
                found.append(await tier.contains([key]))
            except NoAnswer as exc:
                found.append(type(exc.__cause__))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, KEYS[0])
            await settle()
            nursery.start_soon(ask, KEYS[1])
            await settle()
            adapter.answer()
            adapter.answer()
            await settle()
            assert found == [{KEYS[1]}]
            nursery.start_soon(ask, KEYS[2])
            await settle()
            adapter.answer()
            await settle()
            assert found == [{KEYS[1]}, {KEYS[2]}]  # at once
            mock_clock.jump(11)
        assert found[2] is KeyError
        assert of_host(tier, "raised")[0] >= 1
        adapter._query = right
        await rescued(mock_clock)


async def test_one_completion_that_makes_no_sense_loses_no_other(connector):
    connector.automatic = False
    async with hosted(connector) as tier, trio.open_nursery() as nursery:
        found = []

        async def ask():
            found.append(await tier.contains(KEYS))

        nursery.start_soon(ask)
        await settle()
        connector.done.append("nonsense")
        connector.done.append(("seven", True, "", None))
        connector.answer()
        await settle()
        assert found == [set()]
        assert of_host(tier, "raised", "outstanding") == (1, 0)


async def test_one_result_of_a_store_that_makes_no_sense_loses_no_other(adapter, source):
    class Neither:
        def is_successful(self):
            raise RuntimeError("neither")

    adapter.automatic = False
    outcomes = {}
    async with hosted(adapter) as tier:

        async def one(key):
            [outcomes[key]] = await store(tier, source, [key])

        async with trio.open_nursery() as nursery:
            for key in KEYS[:2]:
                nursery.start_soon(one, key)
            await settle()
            adapter.answer()
            adapter.answer()
            await settle()
            adapter.answer(Neither(), signal=False)
            adapter.answer()
        assert sorted(isinstance(outcome, Failed) for outcome in outcomes.values()) == [False, True]
        [failed] = [outcome for outcome in outcomes.values() if outcome != STORED]
        assert "neither" in str(failed.error)


# --- what is bounded --------------------------------------------------------------------------------------------------------


async def test_questions_that_are_never_answered_do_not_pile_up(connector, mock_clock):
    connector.automatic = False
    async with hosted(connector, most_unanswered=3) as tier:
        for _ in range(3):
            await cancelled(tier.contains, KEYS)
        with pytest.raises(PluginFault, match=r"3 operations .* most_unanswered is 3"):
            await tier.contains(KEYS)
        assert of_host(tier, "outstanding") == (3,)
        for _ in range(3):
            connector.answer()
        await settle()
        connector.automatic = True
        assert await tier.contains(KEYS) == set()


async def test_threads_that_never_return_do_not_pile_up(connector, adapter, source):
    go_on = threading.Event()
    before = set(threading.enumerate())  # those of earlier tests may go meanwhile
    connector._submit = lambda *args: go_on.wait() and 1
    adapter.delete = lambda keys: go_on.wait()
    try:
        async with (
            hosted(connector, submit_in_thread=True, most_unanswered=3) as submits,
            hosted(adapter, most_unanswered=3) as deletes,
        ):
            await store(deletes, source)
            for _ in range(3):
                await cancelled(submits.contains, KEYS)
                await cancelled(deletes.delete, KEYS)
            with pytest.raises(PluginFault, match="most_unanswered is 3"):
                await submits.contains(KEYS)
            with pytest.raises(PluginFault, match="most_unanswered is 3"):
                await deletes.delete(KEYS)
            assert len(set(threading.enumerate()) - before) == 6
            go_on.set()
            connector._submit = PlayedConnector._submit.__get__(connector)
            with trio.fail_after(60):
                while set(threading.enumerate()) - before:  # noqa: ASYNC110  # threads say when
                    await trio.sleep(0.01)
            assert await deletes.delete(KEYS[:1]) == [Deletion.PINNED]
            connector.tell(1, bits=[False] * 3)  # the one id that all of them got
    finally:
        go_on.set()


# --- descriptors, and the end -----------------------------------------------------------------------------------------------


async def test_a_store_task_that_is_told_without_an_id_loses_no_other(adapter, source):
    async with hosted(adapter, deadline=10) as tier, trio.open_nursery() as nursery:
        adapter.automatic = False
        outcomes = []

        async def run():
            outcomes.extend(await store(tier, source))

        nursery.start_soon(run)
        await settle()
        adapter.answer()  # what is there
        await settle()
        adapter.results[0]["no number"] = True
        adapter.answer()
        await settle()
        assert outcomes == [STORED] * 3
        assert of_host(tier, "raised", "in_doubt", "quarantined_bytes") == (1, 0, 0)
        adapter.automatic = True


async def test_a_plugin_that_cannot_be_opened_says_so_also_if_it_cannot_be_closed_either(connector):
    connector.event_fd = lambda: "a descriptor"
    connector.close_error = OSError("as told")
    with pytest.raises(PluginTypeError, match="not a descriptor") as raised:
        async with hosted(connector):
            raise AssertionError("it opened")
    assert connector.closed == 1 and "close raised OSError('as told')" in raised.value.__notes__[0]


@pytest.mark.parametrize("channel", [0, 1, 2], ids=["store", "lookup", "load"])
async def test_a_descriptor_is_read_before_it_is_waited_for_again(channel, adapter, source):
    polls = []
    for name in ("pop_completed_store_tasks", "query_lookup_and_lock_result", "query_load_result"):
        right = getattr(adapter, name)
        setattr(adapter, name, lambda *args, right=right, name=name: polls.append(name) or right(*args))
    async with hosted(adapter) as tier:
        for keys in (KEYS, [b"d"]):
            await store(tier, source, keys)
            assert (await load(tier, keys))[0] == [LOADED] * len(keys)
            for _ in range(20):  # not until all wait: who does not read it never does
                await trio.lowlevel.checkpoint()
            assert not readable(adapter.fds[channel])
        assert of_host(tier, "empty_wakes", "resets", "rescues") == (0, 0, 0)
    assert len(polls) == 8  # each task was asked for once


def readable(fd):
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


async def test_what_nobody_else_reads_is_read_here_and_keeps_nobody_busy(connector):
    looks = []
    connector.resets = False
    connector.on_drain = lambda: looks.append(1)
    async with hosted(connector) as tier:
        connector.signal()
        for _ in range(100):  # not until all wait: who does not read it never does
            await trio.lowlevel.checkpoint()
        assert len(looks) <= 3
        assert not readable(connector.fd)
        assert of_host(tier, "empty_wakes", "resets") == (1, 1)


async def test_a_descriptor_that_is_something_else_by_now_breaks_the_line(connector, mock_clock):
    connector.automatic = False
    async with hosted(connector, deadline=10) as tier:
        await settle()
        os.dup2(other := os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), connector.fd)
        os.close(other)
        error = await left_by(mock_clock, 1, tier.contains, KEYS)  # not only at the deadline
        assert isinstance(error, NoAnswer)
        assert "was closed, and now belongs to another file" in str(error)


async def test_a_descriptor_that_the_plugin_closes_is_nobody_elses(connector, mock_clock):
    connector.automatic = False
    async with hosted(connector, deadline=10) as tier:
        await settle()
        os.close(connector.fd)
        number = connector.fd
        other = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        if other != number:
            os.dup2(other, number)
            os.close(other)
        heard = []

        async def innocent():
            await trio.lowlevel.wait_readable(number)
            heard.append(os.eventfd_read(number))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(innocent)
            await settle()
            error = await left_by(mock_clock, 11, tier.contains, KEYS)
            assert isinstance(error, NoAnswer | PluginFault)
            os.eventfd_write(number, 4)
        assert heard == [4]


async def test_a_lease_that_outlives_its_tier_tells_the_closed_plugin_nothing(adapter, source):
    asked = []
    async with hosted(adapter) as tier:
        await store(tier, source)
        lease = await tier.pin(KEYS)
        adapter.submit_unlock = lambda keys: asked.append(adapter.closed)
    await lease.release()
    assert asked in ([], [0])
    assert tier.statistics().held_blocks == 0


async def test_who_has_opened_it_leaves_last(connector, source):
    tier, entered, leave, left = hosted(connector), trio.Event(), trio.Event(), trio.Event()

    async def first():
        async with tier:
            async with tier:
                entered.set()
            assert await tier.contains(KEYS) == set()
            await leave.wait()
        left.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(first)
        await entered.wait()
        async with tier:
            leave.set()
            await settle()
            assert (connector.closed, left.is_set()) == (0, False)
            assert await store(tier, source) == [STORED] * 3
            assert (await load(tier))[0] == [LOADED] * 3
    assert (connector.closed, left.is_set()) == (1, True)


@pytest.mark.parametrize("where", ["inside", "waiting for the others"])
async def test_who_is_cancelled_closes_it_under_the_others(where, connector):
    tier, entered, joined, ends = hosted(connector), trio.Event(), trio.Event(), trio.CancelScope()

    async def first():
        with ends:
            async with tier:
                entered.set()
                await joined.wait()
                if where == "inside":
                    await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(first)
        await entered.wait()
        async with tier:
            joined.set()
            await settle()
            assert connector.closed == 0
            ends.cancel()
            with trio.fail_after(60):
                while not connector.closed:  # noqa: ASYNC110  # a thread does it
                    await trio.sleep(0.01)
            with pytest.raises(backends.PlaceClosed):
                await tier.contains(KEYS)
            with pytest.raises(backends.PlaceClosed, match="was closed"):
                await tier.__aenter__()
    assert ends.cancelled_caught
    assert connector.closed == 1


async def test_who_fails_does_not_wait_for_those_that_end_by_it(connector):
    tier, entered, go_on = hosted(connector), trio.Event(), trio.Event()

    async def fails():
        async with tier:
            entered.set()
            await go_on.wait()
            raise ValueError("as told")

    with pytest.raises(ExceptionGroup) as info, trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails)
            await entered.wait()
            async with tier:
                go_on.set()
                await trio.sleep_forever()
    assert str(info.value.exceptions[0]) == "as told"
    assert connector.closed == 1


# --- copies whose end nobody can prove -------------------------------------------------------------------------------------


class Remote(Destination, Source):
    """Where blocks come from and go to by copies of its own, the next of which does not come to an end."""

    block_bytes = SIZE

    def __init__(self):
        self.lost = []
        self.error = backends.Unproven("it may go on")

    def __len__(self):
        return len(KEYS)

    def views(self, refs=()):
        return None

    def copy_out(self, refs, pages):
        self._copy(pages)

    def copy_in(self, start, pages):
        self._copy(pages)

    def _copy(self, pages):
        if self.error is None:
            assert not any(self.overlap(pages, lost) for lost in self.lost)
            return
        self.lost.append(pages)
        error, self.error = self.error, None
        raise error

    @staticmethod
    def overlap(one, other):
        return bool(set(one.addresses) & set(other.addresses))


async def test_memory_that_a_source_may_write_still_is_not_used_again(connector):
    remote = Remote()
    async with hosted(connector) as tier:
        for quarantined in (0, 3 * SIZE):
            assert of_host(tier, "quarantined_bytes") == (quarantined,)
            reservation = await tier.reserve(RoomRequest(KEYS, SIZE, "fail"))
            try:
                assert await reservation.transfer(remote, [0, 1, 2]) == [STORED] * 3
            except backends.Unproven:
                assert connector.kinds() == []
            finally:
                reservation.release()
        assert len(remote.lost) == 1
        assert of_host(tier, "quarantined_bytes", "hidden_keys") == (3 * SIZE, 0)
        assert await tier.contains(KEYS) == set(KEYS)
        for run in set(tier._state.staging.quarantined):
            run.give_back()


async def test_a_load_whose_end_is_unproven_is_no_failure_and_keeps_its_memory(connector, source):
    remote = Remote()
    async with hosted(connector) as tier:
        await store(tier, source)
        async with await tier.pin(KEYS) as lease:
            with pytest.raises(backends.Unproven):
                await tier.load(lease, remote)
            assert of_host(tier, "quarantined_bytes") == (3 * SIZE,)
            assert await tier.load(lease, remote) == [LOADED] * 3
        for run in set(tier._state.staging.quarantined):
            run.give_back()
