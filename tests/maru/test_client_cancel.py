"""Cancellation at every await of the trio handler, over a wire in virtual time.

Each case is played again and again; the k-th time the call under test is cancelled right before the k-th step of a task,
until the case ends untouched. Then both sides must say the same of every page, and nobody may hold what should be free.
"""

from __future__ import annotations

import contextlib

import pytest
import trio
import trio.testing

from maru import BadMessage, HandlerClosed, NoAnswer, ServerRefused
from maru._client.answers import Loaded, Stored
from maru._client.operations import beat
from maru._wire import Code, error_reply
from maru._wire.frames import frame_of
from tests.maru.test_operations import keys_of, value_of, values_of
from tests.support.maru_world import PAGE, Joined, PublishedWorld, World
from tests.support.steps import at_every_step, played


async def put(handler, other):
    await handler.batch_put(keys_of(3, "p"), values_of(keys_of(3, "p")))


async def put_with_a_new_region(handler, other):
    held = await other.batch_retrieve(keys_of(3))
    await handler.batch_put(keys_of(6, "n"), values_of(keys_of(6, "n")))
    for info in held:
        info.release()


async def store_by_hand(handler, other):
    handles = await handler.batch_alloc(2)
    for key, handle in zip("uv", handles, strict=True):
        handle.buf[:] = value_of(key)
    try:
        await handler.batch_store(["u", "v"], handles)
    finally:
        for handle in handles:
            if not handle.is_used:
                handler.free(handle)


async def get(handler, other):
    buffers = [bytearray(PAGE) for _ in range(3)]
    assert await handler.batch_get_into(["k1", "x", "o1"], buffers) == [
        Loaded.LOADED,
        Loaded.MISSING,
        Loaded.LOADED,
    ]
    assert buffers[0] == value_of("k1")


async def look(handler, other):
    for info in await handler.batch_retrieve(["o1", "x", "k2"]):
        if info is not None:
            with info:
                assert info.view == value_of(info.key)


async def pin_and_unpin(handler, other):
    pinned = await handler.batch_pin(["k1", "o1", "x"])
    assert pinned == [True, True, False]
    with trio.CancelScope(shield=True):
        await handler.batch_unpin(["k1", "o1"])


async def delete(handler, other):
    await handler.batch_delete(["k1", "x", "o1"])


async def after_a_restart(handler, other):
    handler._world.restart()
    await handler.exists("k1")
    await handler.batch_put(["r"], [value_of("r")])
    await handler.exists("k1")


async def after_the_session(handler, other):
    handler._world.now += 10_000
    await handler.batch_put(["r"], [value_of("r")])


async def claim_pins(handler, other):
    """What is held here, where an answer that was lost has pinned something; the first claim is lost as well."""
    socket = handler._driver._socket
    try:
        with await handler.retrieve("k1") as held:
            socket.fate = lambda code: "cut" if code == Code.FIND else None
            with pytest.raises(NoAnswer):
                await handler.retrieve("o1")
            socket.fate = lambda code: "lost" if code == Code.PINS else None
            with pytest.raises(NoAnswer):
                await handler._driver.run(beat(handler._state))
            socket.fate = lambda code: None
            await handler._driver.run(beat(handler._state))
            assert handler.statistics().counters.pins_unknown == 1
            assert held.view == value_of("k1")
    finally:
        socket.fate = lambda code: None


async def unpin_while_claiming(handler, other):
    """What is given back waits for the claim that is under way."""
    assert await handler.batch_pin(["k1", "o1"]) == [True, True]
    handler._state.pin_epochs.is_lost = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(handler._driver.run, beat(handler._state))
        while not handler._state.pin_epochs.is_claiming:  # noqa: ASYNC110  # nothing tells of it but its request
            await trio.sleep(0.0005)
        assert await handler.batch_unpin(["k1", "o1"]) == [True, True]
        assert not handler._state.pin_epochs.is_claiming
        assert handler._state.pinned.due == []


CASES = [
    put,
    put_with_a_new_region,
    store_by_hand,
    get,
    look,
    pin_and_unpin,
    delete,
    after_a_restart,
    after_the_session,
    claim_pins,
    unpin_while_claiming,
]


async def at_rest(world, *handlers):
    await trio.sleep(max(handler.config.timeout_ms / 1e3 for handler in handlers))  # what comes late has come
    for _ in range(4):
        for handler in handlers:
            await handler._driver.run(beat(handler._state))
        await trio.sleep(0.01)
    for handler in handlers:
        statistics = handler.statistics()
        pages = statistics.pages
        assert (pages.allocated, pages.registering, pages.in_doubt, pages.returning) == (0, 0, 0, 0)
        assert (pages.quarantined, pages.strays, statistics.pinned, statistics.calls.waiting) == (0, 0, 0, 0)
        owned = {region.region_id for region in handler._state.pages.regions}
        there = {
            (location.region_id, location.offset)
            for location in world.service.directory._state.located.values()
            if location.region_id in owned
        }
        assert pages.registered == len(there)
    assert world.service.directory.statistics().pinned == 0


async def play(case, instrument):
    world = World(capacity_regions=6)
    async with Joined(world, "a", pool_size=4 * PAGE) as handler, Joined(world, "b") as other:
        handler._world = world
        await handler.batch_put(keys_of(3), values_of(keys_of(3)))
        await other.batch_put(["o1"], [value_of("o1")])
        with trio.CancelScope() as scope:
            instrument.do = scope.cancel
            await case(handler, other)
            instrument.do = None
        instrument.do = None
        if case in (pin_and_unpin, unpin_while_claiming):
            await handler.batch_unpin(["k1", "o1"])  # whether or not it was cancelled between the two
        await at_rest(world, handler, other)
        names = [*keys_of(3), "o1", *keys_of(3, "p"), *keys_of(6, "n"), "u", "v", "r"]
        buffers = [bytearray(PAGE) for _ in names]
        for name, buffer, loaded in zip(names, buffers, await other.batch_get_into(names, buffers), strict=True):
            assert not loaded or buffer == value_of(name), name


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_cancelled_at_every_step_it_leaves_no_page_and_no_pin_behind(case, seed):
    at_every_step(lambda k: played(play, case, k=k, seed=seed), most=500, least=3, name=case.__name__)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_cancelled_from_outside_at_every_step_the_handler_ends_at_once(case):
    async def main(instrument):
        world = World(capacity_regions=6)
        with trio.CancelScope() as scope:
            if case is CASES[0]:
                instrument.do = scope.cancel
            async with Joined(world, "a", pool_size=4 * PAGE) as handler, Joined(world, "b") as other:
                handler._world = world
                await handler.batch_put(keys_of(3), values_of(keys_of(3)))
                await other.batch_put(["o1"], [value_of("o1")])
                instrument.do = scope.cancel  # what is before is the same in all cases
                await case(handler, other)
        instrument.do = None
        assert trio.current_time() < 20_000

    at_every_step(lambda k: played(main, k=k, seed=0), most=2_000, name=case.__name__)


# --- one at a time ----------------------------------------------------------------------------------------------------


async def test_a_timeout_is_no_answer_and_costs_no_page(autojump_clock):
    world = World()
    joined = Joined(world, timeout_ms=500)
    async with joined as handler:
        await handler.batch_put(["k"], [value_of("k")])
        joined.socket.fate = lambda code: "lost" if code == Code.STORE else None
        began = trio.current_time()
        with pytest.raises(NoAnswer):
            await handler.batch_put(["l"], [value_of("l")])
        assert trio.current_time() - began == pytest.approx(0.5, abs=0.01)
        joined.socket.fate = lambda code: None
        assert await handler.batch_put(["m"], [value_of("m")]) == [Stored.NEW]
        await at_rest(world, handler)


async def test_calls_time_out_each_at_its_own_time(autojump_clock):
    joined = Joined(World(), timeout_ms=1_000, lease=60.0)
    ends = []

    async def ask(handler, at):
        await trio.sleep(at)
        with pytest.raises(NoAnswer):
            await handler.exists("k")
        ends.append(round(trio.current_time() - began - at, 2))

    async with joined as handler, trio.open_nursery() as nursery:
        joined.socket.fate = lambda code: "lost"
        began = trio.current_time()
        for at in (0.0, 0.3, 0.9, 1.5, 2.4):
            nursery.start_soon(ask, handler, at)
    assert ends == [1.0] * 5


async def test_no_more_calls_than_the_window_wait_at_once(autojump_clock):
    world = World()
    joined = Joined(world, max_inflight=4)
    seen = []

    async with joined as handler:
        deliver = joined.socket._deliver

        async def watched(frame):
            seen.append(handler.statistics().calls.waiting)
            await deliver(frame)

        joined.socket._deliver = watched
        async with trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(handler.exists, "k")
        assert max(seen) == 4
        assert len(seen) == 40


async def test_a_full_socket_is_waited_for_and_a_cancelled_wait_has_sent_nothing(autojump_clock):
    joined = Joined(World())
    async with joined as handler:
        await handler.batch_put(["k"], [value_of("k")])
        joined.socket.full = True
        before = joined.socket.sent
        with trio.move_on_after(1):
            await handler.batch_put(["l"], [value_of("l")])
        assert joined.socket.sent == before
        joined.socket.full = False
        assert not await handler.exists("l")
        await at_rest(joined.world, handler)


async def test_the_lease_is_renewed_by_itself(autojump_clock):
    world = World()

    async def clock():
        while True:
            await trio.sleep(0.1)
            world.now += 0.1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(clock)
        async with Joined(world, lease=3.0) as handler:
            await handler.batch_put(["k"], [value_of("k")])
            info = await handler.retrieve("k")
            await trio.sleep(60)
            info.check()
            assert handler.statistics().counters.sessions_lost == 0
            info.release()
        nursery.cancel_scope.cancel()


async def test_a_view_that_is_left_is_unpinned_soon_and_a_forgotten_one_with_the_next_call(autojump_clock):
    world = World()
    pinned = lambda: world.service.directory.statistics().pinned  # noqa: E731
    async with Joined(world) as handler:
        await handler.batch_put(["k"], [value_of("k")])
        with await handler.retrieve("k") as info:
            assert pinned() == 1
        await trio.sleep(0.01)
        assert pinned() == 0
        view = (await handler.retrieve("k")).view
        part = view[3:7]
        del view
        await handler.exists("k")
        assert pinned() == 1
        del part
        await handler.exists("k")
        assert pinned() == 0
        del info


async def test_another_body_fails_as_it_came(autojump_clock):
    with pytest.raises(ZeroDivisionError):
        async with Joined(World()):
            1 / 0  # noqa: B018
    with pytest.raises(ExceptionGroup) as caught:
        async with Joined(World()):
            raise ExceptionGroup("mine", [ValueError()])
    assert caught.value.message == "mine"


async def test_closing_ends_whoever_waits_and_takes_no_longer_than_a_moment(autojump_clock):
    joined = Joined(World(), max_inflight=2)
    ended = []

    async def ask(handler):
        try:
            await handler.exists("k")
        except HandlerClosed:
            ended.append(trio.current_time())

    async with trio.open_nursery() as nursery, joined as handler:
        joined.socket.fate = lambda code: "lost"
        for _ in range(3):
            nursery.start_soon(ask, handler)
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
    assert len(ended) == 3
    assert max(ended) - began <= 1.0
    with pytest.raises(HandlerClosed):
        await handler.exists("k")
    async with joined:
        assert not await handler.exists("k")
        with pytest.raises(RuntimeError, match="is already open"):
            await handler.__aenter__()


async def test_a_server_that_is_not_there_is_an_error_at_the_start(autojump_clock):
    joined = Joined(World(), timeout_ms=700)
    opened = joined._open

    @contextlib.asynccontextmanager
    async def deaf(on_messages):
        async with opened(on_messages) as socket:
            socket.fate = lambda code: "lost"
            yield socket

    joined.handler._open_socket = deaf
    with pytest.raises(NoAnswer):
        async with joined:
            pass
    assert trio.current_time() < 2.5


async def test_every_method_is_a_checkpoint_also_where_it_asks_nobody():
    async with Joined(World()) as handler:
        await handler.batch_put(["k"], [value_of("k")])
        assert await handler.pin("k")
        for call in (
            lambda: handler.alloc(1),
            lambda: handler.batch_alloc(0),
            lambda: handler.retrieve("k"),
            lambda: handler.batch_put([], []),
            lambda: handler.batch_store([], []),
            lambda: handler.batch_get_into([], []),
            lambda: handler.batch_exists([]),
            lambda: handler.batch_delete([]),
            lambda: handler.batch_pin([]),
            lambda: handler.batch_unpin([]),
        ):
            with trio.testing.assert_checkpoints():
                await call()
            with trio.CancelScope() as scope:
                scope.cancel()
                await call()
                raise AssertionError("no checkpoint")


async def test_with_a_published_server_too(autojump_clock):
    world = PublishedWorld()
    async with Joined(world, "a") as handler, Joined(world, "b", pool_size=0) as reader:
        assert await handler.batch_put(["k", "l"], values_of("kl")) == [Stored.NEW] * 2
        with await reader.retrieve("k") as info:
            assert info.view == value_of("k")
        await trio.sleep(30)
    assert set(world.pins.values()) == {0}
    assert world.handles == {}


async def test_what_cannot_be_read_is_counted_and_costs_its_own_call_only(autojump_clock):
    joined = Joined(World())
    async with joined as handler:
        await handler.batch_put(["k"], [value_of("k")])
        on_messages = handler._driver.on_messages
        on_messages([[b"", b"no frame"], [b"", error_reply(0, 0, "what was that?")]])
        assert handler.statistics().calls.unreadable == 1
        assert handler.statistics().calls.unknown == 1
        joined.socket.fate = lambda code: "lost"
        async with trio.open_nursery() as nursery:

            async def ask():
                with pytest.raises(BadMessage):
                    await handler.exists("k")

            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            [call] = handler._driver.correlation.calls()
            on_messages([[b"", frame_of(Code.EXISTS_KV | 0x80, call.sequence, b"\xc0", 0)]])
        joined.socket.fate = lambda code: None
        assert await handler.exists("k")
        assert handler.statistics().calls.unreadable == 2
        with trio.move_on_after(0.0005):
            await handler.exists("k")
        on_messages([[b"", frame_of(Code.EXISTS_KV | 0x80, call.sequence + 2, b"\xc0", 0)]])  # late, and unreadable
        assert handler.statistics().calls.unreadable == 3


async def test_an_error_of_the_server_is_raised_with_its_word(autojump_clock):
    world = World()
    async with Joined(world) as handler:
        world.service.closed = True
        with pytest.raises(ServerRefused) as caught:
            await handler.batch_put(["k"], [value_of("k")])
        assert caught.value.word == "closed"
        world.service.closed = False
        assert await handler.batch_put(["k"], [value_of("k")]) == [Stored.NEW]
