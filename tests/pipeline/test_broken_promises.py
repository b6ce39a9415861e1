"""Whatever a place, a policy, a precondition or an instrument raises, wherever: the container it was raised for may fail, no
stage does, no neighbour where they can be told apart, and I1..I9 hold.
"""

from __future__ import annotations

from typing import Any

import pytest
import trio

from backends.abc import RoomRequest
from backends.testing import FakeTier
from offload import NO_WAIT, Status
from offload.abc import Leased, Precondition
from tests.support.actors import Answer, Slow
from tests.support.invariants import TICK, World, keys_of, open_world


class Broken(Exception):
    """What is raised."""


ERRORS = {
    "plain": lambda: Broken("broken"),
    "grouped": lambda: ExceptionGroup("of tasks", [Broken("one"), ExceptionGroup("more", [KeyError("two")])]),
    "cancelled": lambda: trio.Cancelled._create(source="explicit"),
    "cancelled in a group": lambda: BaseExceptionGroup(
        "of tasks", [trio.Cancelled._create(source="explicit"), Broken()]
    ),
}
ORDINARY = ("plain", "grouped")


class Once:
    """Raises at the ``nth`` call of ``name`` on one object, before what it does, or after it."""

    def __init__(self, owner: Any, name: str, error: BaseException, *, after: bool = False, nth: int = 1) -> None:
        self.left, self.error, self.raised = nth, error, False
        inner = getattr(owner, name)

        def call(*args: Any) -> Any:
            answer = inner(*args) if after else None
            self.left -= 1
            if not self.left:
                self.raised = True
                raise self.error
            return answer if after else inner(*args)

        setattr(owner, name, call)


def on_reservations(world: World, name: str, error: BaseException, *, after: bool) -> list[Once]:
    """The first reservation raises in this method or property."""
    made: list[Once] = []
    inner = world.destination.reserve_nowait

    class Raising:
        def __init__(self, real: Any) -> None:
            self.real = real

        def __getattribute__(self, asked: str) -> Any:
            real = object.__getattribute__(self, "real")
            if asked != name or made:
                return getattr(real, asked)
            if asked == "granted":
                made.append(once := Once.__new__(Once))
                once.raised = True
                raise error
            once = Once.__new__(Once)
            once.raised = False
            made.append(once)
            call = getattr(real, asked)

            def raising(*args: Any) -> Any:
                if after:
                    call(*args)
                once.raised = True
                raise error

            return raising

    world.destination.reserve_nowait = lambda *args: Raising(inner(*args))  # type: ignore[method-assign,assignment,return-value]
    return made


SOURCE = {
    "upgrade": False,  # the first time is that of the strong blocks, before they are stored
    "release": True,
    "views": False,
}
DESTINATION = {"reserve_nowait": False}
RESERVATION = {"granted": False, "keep": False, "release": True}
"""Each method of a contract, and whether it raises when all is done: what gives back, and says that it has not."""


async def go_on(world: World, *, raised: bool, spared: int) -> None:
    """The pipeline takes in more, and at least so many of the three containers arrived."""
    assert raised
    for entry in world.pipeline.quarantine:
        entry.release()
    assert (await world.stored("d", 2)).status is Status.COMPLETE
    results = [world.handles[label].result for label in "abc"]
    assert sum(result.status is Status.COMPLETE for result in results) >= spared
    assert world.at_rest() == {}


async def store_three(world: World) -> None:
    """Three containers in one batch, of which the second is cancelled before the commit, so that room is given back."""
    handles = [world.store(label, 2, kind="strong" if label == "a" else "weak") for label in "abc"]
    world.at("pre_claim", lambda batch: handles[1].request_cancel())
    for handle in handles:
        await handle.wait()


@pytest.mark.parametrize("error", ORDINARY)
@pytest.mark.parametrize("name", SOURCE)
async def test_a_source_raises_once(autojump_clock, name: str, error: str) -> None:
    async with open_world(min_batch_size=6) as world:
        once = Once(world.source, name, ERRORS[error](), after=SOURCE[name], nth=2 if name == "upgrade" else 1)
        await store_three(world)
        await go_on(world, raised=once.raised, spared=0 if name == "views" else 2)


async def test_a_source_that_does_not_know_its_block_size_fails_one_container(autojump_clock) -> None:
    class Unsure(FakeTier):
        left = 1

        @property
        def block_bytes(self) -> int:
            type(self).left -= 1
            if not type(self).left:
                raise Broken
            return int(vars(self)["block_bytes"])

    async with open_world(min_batch_size=6) as world:
        world.source.__class__ = Unsure
        Unsure.left = 100
        for label in "abc":
            world.source.fill(keys_of(label, 2))
        Unsure.left = 10_000
        blocks = [world.source.weak(keys_of(label, 2)) for label in "abc"]
        handles = world.pipeline.enqueue_many(blocks, precondition=NO_WAIT)
        Unsure.left = 1
        results = [await handle.wait() for handle in handles]
        Unsure.left = 10_000
        assert [result.status for result in results] == [Status.COMPLETE] * 3  # asked again, each for itself
        world.source.__class__ = FakeTier


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", DESTINATION)
async def test_a_destination_raises_once(autojump_clock, name: str, error: str) -> None:
    async with open_world(min_batch_size=6) as world:
        once = Once(world.destination, name, ERRORS[error](), after=DESTINATION[name])
        await store_three(world)
        await go_on(world, raised=once.raised, spared=2 if error in ORDINARY else 0)


@pytest.mark.parametrize("error", ORDINARY)
@pytest.mark.parametrize("name", RESERVATION)
async def test_a_reservation_raises_once(autojump_clock, name: str, error: str) -> None:
    async with open_world(min_batch_size=6) as world:
        made = on_reservations(world, name, ERRORS[error](), after=RESERVATION[name])
        await store_three(world)
        await go_on(world, raised=made[0].raised, spared=2)


@pytest.mark.parametrize("error", ERRORS)
async def test_a_transfer_raises_once(autojump_clock, error: str) -> None:
    """By its contract that is the end of all of its blocks: it answers one by one where it can tell them apart."""
    async with open_world(min_batch_size=6) as world:
        world.faults.error = ERRORS[error]()
        world.at("xfer_end", lambda batch: setattr(world.faults, "error", None))
        await store_three(world)
        await go_on(world, raised=True, spared=0)


@pytest.mark.parametrize("error", ERRORS)
async def test_waiting_for_room_raises_once(autojump_clock, error: str) -> None:
    async with open_world(min_batch_size=6) as world:
        raised = []

        async def reserve(*args: Any) -> Any:
            await trio.sleep(TICK)
            if not raised:
                raised.append(True)
                raise ERRORS[error]()
            return await FakeTier.reserve(world.destination, *args)

        real = world.destination.reserve_nowait

        def full(*args: Any) -> Any:
            if not raised:
                raise trio.WouldBlock
            return real(*args)

        world.destination.reserve, world.destination.reserve_nowait = reserve, full  # type: ignore[method-assign,assignment]
        await store_three(world)
        await go_on(world, raised=bool(raised), spared=2 if error in ORDINARY else 0)


async def test_asking_for_less_room_raises_and_the_caller_of_cancel_is_not_told(autojump_clock) -> None:
    async with open_world(min_batch_size=4) as world:
        world.faults.room = trio.Event()

        def broken() -> bool:
            raise Broken

        async def reserve(request: RoomRequest) -> Any:
            with request.waiting(broken):
                return await FakeTier.reserve(world.destination, request)

        world.destination.reserve = reserve  # type: ignore[method-assign]
        one, two = world.store("a", 2), world.store("b", 2)
        await trio.sleep(5 * TICK)
        await one.cancel()
        world.faults.room.set()
        assert (await two.wait()).status is Status.COMPLETE
        assert one.status is Status.CANCELLED


@pytest.mark.parametrize("method", ["reserve_nowait", "upgrade"])
async def test_what_one_container_makes_a_place_raise_fails_that_container(autojump_clock, method: str) -> None:
    async with open_world(min_batch_size=6) as world:
        place: Any = world.destination if method == "reserve_nowait" else world.source
        inner = getattr(place, method)

        def picky(asked: Any) -> Any:
            if b"b1" in getattr(asked, "keys", asked):
                raise Broken("not this one")
            return inner(asked)

        setattr(place, method, picky)
        handles = {label: world.store(label, 2) for label in "abc"}
        results = {label: (await handle.wait()).status for label, handle in handles.items()}
        assert results == {"a": Status.COMPLETE, "b": Status.FAILED, "c": Status.COMPLETE}
        assert world.at_rest() == {}


@pytest.mark.parametrize("column", [[], [1], [1] * 9, None])
async def test_a_source_that_answers_another_number_of_refs_fails_its_containers(autojump_clock, column: Any) -> None:
    async with open_world(min_batch_size=4) as world:
        inner, world.source.upgrade = world.source.upgrade, lambda keys: column  # type: ignore[method-assign]
        world.source.release = lambda refs: None  # type: ignore[method-assign]
        handles = [world.store(label, 2) for label in "ab"]
        assert [(await handle.wait()).status for handle in handles] == [Status.FAILED] * 2
        del world.source.release
        world.source.upgrade = inner  # type: ignore[method-assign]
        assert (await world.stored("c", 2)).status is Status.COMPLETE


class _Lock:
    """A policy whose lease cannot be given back."""

    def __call__(self, keys: Any) -> Any:
        def release() -> None:
            raise Broken

        return Leased({}, release)


POLICIES: dict[str, Any] = {
    "a policy": lambda error: Answer(lambda keys: raising(error)),
    "a policy that waits": lambda error: Slow(TICK, lambda keys: raising(error)),
    "a lease": lambda error: _Lock(),
    "no mapping": lambda error: Answer(lambda keys: 7),
}


def raising(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    ("policy", "error"), [(one, error) for one in POLICIES for error in (ERRORS if "waits" in one else ORDINARY)]
)
async def test_a_policy_raises(autojump_clock, policy: str, error: str) -> None:
    broken = POLICIES[policy](ERRORS[error]())

    async with open_world(policies=[broken]) as world:
        result = await world.stored("a", 2)
        assert result.status is Status.COMPLETE
        assert set(result.filtered.values()) == (set() if policy == "a lease" else {"error"})
        assert (await world.stored("b", 2)).status is Status.COMPLETE
        assert world.at_rest() == {}


class Odd(Precondition):
    """A precondition that raises in one of its methods."""

    def __init__(self, where: str, error: BaseException) -> None:
        self.where, self.error = where, error

    def is_set(self) -> bool:
        return raising(self.error) if self.where == "is_set" else False  # type: ignore[no-any-return]

    @property
    def passive(self) -> bool:
        return raising(self.error) if self.where == "passive" else self.where == "parked"  # type: ignore[no-any-return]

    async def wait(self) -> None:
        await trio.sleep(TICK)
        raise self.error

    def __hash__(self) -> int:
        return raising(self.error) if self.where == "hash" else id(self)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("where", "error"),
    [(one, error) for one in ("is_set", "passive", "hash") for error in ORDINARY]
    + [(one, error) for one in ("wait", "parked") for error in ERRORS],  # what is not async raises no Cancelled
)
async def test_a_precondition_raises(autojump_clock, where: str, error: str) -> None:
    async with open_world() as world:
        neighbour = world.store("n", 2)
        handle = world.store("a", 2, precondition=Odd(where, ERRORS[error]()))
        assert (await handle.wait()).status is Status.FAILED
        assert (await neighbour.wait()).status is Status.COMPLETE
        assert (await world.stored("b", 2)).status is Status.COMPLETE
        assert world.at_rest() == {}
