"""A guarded tier: broken it says so at once, no call waits for ever, and every turn comes back."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from backends import PlaceClosed
from backends.abc import LOADED, STORED, Deletion, Destination, Failed, Missed, ReadLease, RoomRequest, Unproven
from backends.base.pooled import Lease
from backends.base.slots import PagesDestination
from backends.memory import MemoryTier
from backends.testing import FakeTier, PacedTier, payload_of
from offload import BreakerTier, HealthState, TierTooSlow, TierUnavailable, with_breaker
from tests.support.ill_tiers import SIZE, Ill, RemoteIll, fail, ill_and_guard, places

KEYS = [b"a", b"b", b"c"]


async def pin(guard: Any) -> Any:
    async with await guard.pin(KEYS) as lease:
        return list(lease.keys)


async def load(guard: Any) -> Any:
    """Only the load asks."""
    async with await guard.inner.pool_lease(KEYS) as lease:
        return await guard.load(lease, places(len(KEYS)))


async def delete(guard: Any) -> Any:
    return await guard.delete([b"nothing"])


async def reserve(guard: Any, when_full: str = "partial") -> Any:
    reservation = await guard.reserve(RoomRequest([b"new"], SIZE, when_full))
    try:
        source = FakeTier(4, SIZE)
        source.fill([b"new"])
        return await reservation.transfer(source, source.upgrade([b"new"]))
    finally:
        reservation.release()


async def reserve_waiting(guard: Any) -> Any:
    return await reserve(guard, "wait")


async def contains(guard: Any) -> Any:
    return await guard.contains(KEYS)


CALLS: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "pin": pin,
    "load": load,
    "delete": delete,
    "reserve": reserve,
    "contains": contains,
}
"""What asks a tier and has a deadline."""


class Asked(RemoteIll):
    async def pool_lease(self, keys: Any) -> Any:
        """A lease without asking."""
        return self.pin_nowait(keys)


def asked_and_guard(**breaker: Any) -> tuple[Any, Any]:
    tier, guard = ill_and_guard(Asked, **breaker)
    tier.fill(KEYS)
    return tier, guard


@pytest.mark.parametrize("name", CALLS)
async def test_three_faults_break_it_and_then_it_is_not_asked(autojump_clock, name) -> None:
    tier, guard = asked_and_guard()
    tier.ill = OSError("gone")
    for _ in range(3):
        assert guard.health.state is HealthState.CLOSED
        with pytest.raises(OSError, match="gone"):
            await CALLS[name](guard)
    tier.asked.clear()
    with pytest.raises(
        TierUnavailable, match=r"ill has been unavailable for 0 s \(OSError: gone\); it is tried again in 1 s"
    ):
        await CALLS[name](guard)
    assert (tier.asked, trio.current_time()) == ([], guard.health.since)
    assert tier.at_rest()


@pytest.mark.parametrize("name", CALLS)
async def test_it_is_tried_again_and_well_if_it_answers(autojump_clock, name) -> None:
    tier, guard = asked_and_guard()
    tier.ill = OSError("gone")
    for _ in range(3):
        with pytest.raises(OSError, match="gone"):
            await CALLS[name](guard)
    await trio.sleep(1.0)
    with pytest.raises(OSError, match="gone"):
        await CALLS[name](guard)
    tier.ill = None
    await trio.sleep(1.99)
    with pytest.raises(TierUnavailable):
        await CALLS[name](guard)
    await trio.sleep(0.02)
    await CALLS[name](guard)
    assert (guard.health.state, guard.health.faults) == (HealthState.CLOSED, 0)
    assert tier.at_rest()


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_that_never_answers_is_cut_off_and_a_fault(autojump_clock, name) -> None:
    tier, guard = asked_and_guard(load_timeout=5.0)
    tier.hang = True
    start = trio.current_time()
    for n in range(1, 4):
        with pytest.raises(TierTooSlow, match=f"ill did not answer {name} within 5 s"):
            await CALLS[name](guard)
        assert trio.current_time() == start + n * 5.0
    assert guard.health.state is HealthState.OPEN
    assert tier.at_rest()


@pytest.mark.parametrize(("megabytes", "seconds"), [(16, 60.0), (17, 61.0), (1_000, 120.0)])
async def test_time_of_a_load_grows_with_its_bytes(autojump_clock, megabytes, seconds) -> None:
    tier, guard = asked_and_guard()
    tier.hang = True

    class Large(PagesDestination):
        block_bytes = megabytes * 1_000_000

    large = Large.over([bytearray(SIZE) for _ in KEYS])
    async with await tier.pool_lease(KEYS) as lease:
        with pytest.raises(TierTooSlow):
            await guard.load(lease, large)
    assert trio.current_time() == seconds


@pytest.mark.parametrize("name", CALLS)
async def test_without_a_deadline_it_has_its_own(autojump_clock, name) -> None:
    tier, guard = asked_and_guard(load_timeout=None, call_timeout=None)
    tier.hang = True
    with trio.move_on_after(1e6) as scope:
        await CALLS[name](guard)
    assert scope.cancelled_caught and guard.health.faults == 0


@pytest.mark.parametrize("name", [*CALLS, "reserve_waiting"])
@pytest.mark.parametrize("state", ["closed", "half-open"])
async def test_a_cancelled_call_is_no_fault_and_gives_its_turn_back(autojump_clock, name, state) -> None:
    tier, guard = asked_and_guard()
    if state == "half-open":
        await fail(guard, tier)
        await trio.sleep(1.0)
    before = guard.health
    tier.hang = True
    ask = CALLS.get(name, reserve_waiting)
    for _ in range(4):
        with trio.move_on_after(1.0) as scope:
            await ask(guard)
        assert scope.cancelled_caught
    after = guard.health
    assert (after.state, after.faults) == (before.state, before.faults)
    tier.hang = False
    await ask(guard)  # at once, with the turn that came back
    assert guard.health.state is HealthState.CLOSED
    assert tier.at_rest()


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_that_is_cancelled_before_it_begins_takes_no_turn(autojump_clock, name) -> None:
    tier, guard = asked_and_guard()
    await fail(guard, tier)
    await trio.sleep(1.0)
    with trio.CancelScope() as scope:
        scope.cancel()
        await CALLS[name](guard)
    assert scope.cancelled_caught
    assert guard.health.state is HealthState.OPEN
    await CALLS[name](guard)
    assert tier.at_rest()


async def test_a_refusal_is_a_checkpoint(autojump_clock) -> None:
    tier, guard = asked_and_guard()
    await fail(guard, tier)
    for name, ask in CALLS.items():
        with trio.CancelScope() as scope:
            scope.cancel()
            if name != "load":
                await ask(guard)
            else:
                await guard.load(tier.pin_nowait([]), places(0))
        assert scope.cancelled_caught, name


async def test_one_probe_while_others_are_told_that_it_is_under_way(autojump_clock) -> None:
    tier, guard = asked_and_guard()
    await fail(guard, tier)
    await trio.sleep(1.0)
    tier.asked.clear()
    tier.gates = [gate := trio.Event()]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pin, guard)
        await trio.testing.wait_all_tasks_blocked()
        for ask in CALLS.values():
            with pytest.raises(TierUnavailable, match="it is being tried again"):
                await ask(guard)
        assert tier.asked == ["pin"]
        gate.set()
    assert guard.health.state is HealthState.CLOSED


async def test_what_was_asked_before_it_broke_says_nothing_afterwards(autojump_clock) -> None:
    tier, guard = asked_and_guard()
    tier.gates = [first, second] = [trio.Event(), trio.Event()]
    answers: list[Any] = []

    async def ask() -> None:
        try:
            answers.append(await pin(guard))
        except OSError as error:
            answers.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        await fail(guard, tier)
        broken = guard.health
        first.set()  # it answers after all
        await trio.testing.wait_all_tasks_blocked()
        assert guard.health == broken and answers == [KEYS]
        await trio.sleep(1.0)
        await pin(guard)
        assert guard.health.state is HealthState.CLOSED
        tier.ill = OSError("late")
        second.set()
    assert isinstance(answers[1], OSError)
    assert (guard.health.state, guard.health.faults) == (HealthState.CLOSED, 0)


@pytest.mark.parametrize("outcome", ["answer", "miss", "caller's mistake"])
async def test_answers_are_no_faults(autojump_clock, outcome) -> None:
    tier, guard = asked_and_guard()
    for _ in range(5):
        if outcome == "answer":
            assert await guard.delete([b"none"]) == [Deletion.MISSING]
        elif outcome == "miss":
            tier.faults.missing = {KEYS[0]: "gone"}
            assert (await load(guard))[0] == Missed("gone")
        else:
            with pytest.raises(ValueError, match="do not fit"):
                async with await guard.pin(KEYS) as lease:
                    await guard.load(lease, places(1))
    assert guard.health.faults == 0


# --- a tier that knows at once what it contains ---------------------------------------------------------------------


async def test_contains_nowait_refuses_but_neither_probes_nor_proves(autojump_clock) -> None:
    tier, guard = ill_and_guard()
    tier.fill(KEYS)
    assert guard.contains_nowait(KEYS) == set(KEYS)
    await fail(guard, tier, 2)
    guard.contains_nowait(KEYS)
    await fail(guard, tier, 1)
    for _ in range(2):
        with pytest.raises(TierUnavailable):
            guard.contains_nowait(KEYS)
        await trio.sleep(1.0)
    assert guard.health.state is HealthState.OPEN
    await pin(guard)
    assert guard.contains_nowait(KEYS) == set(KEYS)


async def test_contains_nowait_that_raises_is_a_fault(autojump_clock) -> None:
    tier, guard = ill_and_guard()

    def contains_nowait(keys: Any) -> Any:
        raise PlaceClosed("closed")

    tier.contains_nowait = contains_nowait
    for _ in range(3):
        with pytest.raises(PlaceClosed):
            guard.contains_nowait(KEYS)
    with pytest.raises(TierUnavailable, match="closed"):
        guard.contains_nowait(KEYS)


# --- room -----------------------------------------------------------------------------------------------------------


async def test_a_full_tier_is_not_broken(autojump_clock) -> None:
    tier, guard = ill_and_guard(capacity=2)
    tier.fill(KEYS[:2])
    for _ in range(5):
        with pytest.raises(trio.WouldBlock):
            guard.reserve_nowait(RoomRequest([b"new"], SIZE, "wait"))
        reservation = await guard.reserve(RoomRequest([b"new"], SIZE, "partial"))
        assert list(reservation.granted) == []
        reservation.release()
        with trio.move_on_after(10.0):
            await guard.reserve(RoomRequest([b"new"], SIZE, "wait"))
    assert guard.health.faults == 0 and tier.at_rest()


async def test_who_waits_for_room_in_a_tier_that_breaks_is_told(autojump_clock) -> None:
    tier, guard = ill_and_guard(capacity=2)
    tier.fill(KEYS[:2])

    async def wait() -> None:
        with pytest.raises(TierUnavailable, match="OSError: gone"):
            await guard.reserve(RoomRequest([b"new"], SIZE, "wait"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        await fail(guard, tier)
    assert trio.current_time() == guard.health.since
    assert tier.pool.statistics().waiting == 0 and tier.at_rest()


async def test_a_probe_that_would_wait_for_room_does_not_keep_the_turn(autojump_clock) -> None:
    tier, guard = ill_and_guard(capacity=2)
    tier.fill(KEYS[:2])
    await fail(guard, tier)
    await trio.sleep(1.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reserve_waiting, guard)
        await trio.testing.wait_all_tasks_blocked()
        assert guard.health.state is HealthState.CLOSED  # that it is full is an answer
        await guard.delete(KEYS[:1])
    assert tier.contains_nowait([b"new"]) == {b"new"} and tier.at_rest()


@pytest.mark.parametrize("when_full", ["wait", "evict", "partial", "fail"])
@pytest.mark.parametrize("now", [True, False], ids=["nowait", "await"])
async def test_a_store_is_a_probe_from_its_reservation_to_its_end(autojump_clock, when_full, now) -> None:
    tier, guard = ill_and_guard()
    await fail(guard, tier)
    await trio.sleep(1.0)
    if now:
        reservation = guard.reserve_nowait(RoomRequest([b"new"], SIZE, when_full))
    else:
        reservation = await guard.reserve(RoomRequest([b"new"], SIZE, when_full))
    assert guard.health.state is HealthState.HALF_OPEN
    with pytest.raises(TierUnavailable):
        guard.reserve_nowait(RoomRequest([b"other"], SIZE, when_full))
    source = FakeTier(4, SIZE)
    source.fill([b"new"])
    assert await reservation.transfer(source, source.upgrade([b"new"])) == [STORED]
    assert guard.health.state is HealthState.CLOSED
    reservation.release()
    assert tier.at_rest()


async def test_room_that_is_given_back_unused_gives_the_turn_back(autojump_clock) -> None:
    tier, guard = ill_and_guard()
    await fail(guard, tier)
    await trio.sleep(1.0)
    for _ in range(3):
        reservation = guard.reserve_nowait(RoomRequest([b"new"], SIZE, "partial"))
        reservation.keep([])
        reservation.release()
        reservation.release()
        assert guard.health.state is HealthState.OPEN
    assert tier.at_rest()


async def test_room_of_before_it_broke_is_of_no_use_while_it_is_broken(autojump_clock) -> None:
    tier, guard = ill_and_guard()
    source = FakeTier(4, SIZE)
    source.fill(KEYS)
    early = [guard.reserve_nowait(RoomRequest([key], SIZE, "wait")) for key in KEYS[:2]]
    await fail(guard, tier)
    with pytest.raises(TierUnavailable):
        await early[0].transfer(source, source.upgrade(KEYS[:1]))
    early[0].release()
    assert tier.batches == []
    await trio.sleep(1.0)
    await pin(guard)
    assert await early[1].transfer(source, source.upgrade(KEYS[1:2])) == [
        STORED
    ]  # it is well again, and so is the room
    early[1].release()
    assert tier.at_rest()


@pytest.mark.parametrize(
    ("error", "faults"),
    [(OSError("gone"), 3), (Unproven("?"), 3), (ValueError("no"), 0)],
    ids=["os", "unproven", "value"],
)
async def test_what_a_transfer_raises_is_judged(autojump_clock, error, faults) -> None:
    tier, guard = ill_and_guard()
    tier.faults.error = error
    for _ in range(3):
        with pytest.raises(type(error)):
            await reserve(guard)
    assert guard.health.faults == faults


async def test_blocks_that_fail_are_judged_together(autojump_clock) -> None:
    tier, guard = ill_and_guard()
    tier.faults.failing = {b"new": OSError("gone")}
    for _ in range(3):
        assert isinstance((await reserve(guard))[0], Failed)
    assert guard.health.state is HealthState.OPEN


async def test_a_transfer_that_is_cut_off_is_a_fault(autojump_clock) -> None:
    """By contract nobody cancels one, unless it took too long."""
    tier, guard = ill_and_guard()
    tier.faults.hang = True
    for n in range(3):
        assert guard.health.faults == n
        with trio.move_on_after(60.0):
            await reserve(guard)
    assert guard.health.state is HealthState.OPEN
    assert guard.health.cause == "no end of a copy within its time"


class BadSource(FakeTier):
    """Its bytes cannot be had."""

    def views(self, guards: Any) -> Any:
        return None

    def copy_out(self, guards: Any, pages: Any) -> None:
        raise OSError("the source is gone")


class BadPlaces(Destination):
    """They cannot be written."""

    block_bytes = SIZE

    def __len__(self) -> int:
        return 3

    def views(self) -> Any:
        return None

    def copy_in(self, start: int, pages: Any) -> None:
        raise OSError("the destination is gone")


async def test_an_error_of_the_source_is_not_the_tiers(autojump_clock) -> None:
    tier, guard = ill_and_guard()
    source = BadSource(4, SIZE)
    source.fill([b"new"])
    for _ in range(5):
        reservation = guard.reserve_nowait(RoomRequest([b"new"], SIZE, "wait"))
        with pytest.raises(OSError, match="the source is gone"):
            await reservation.transfer(source, source.upgrade([b"new"]))
        reservation.release()
    assert guard.health.faults == 0 and tier.at_rest()


async def test_a_source_that_cannot_even_be_looked_at_is_to_blame_itself(autojump_clock) -> None:
    class NoViews(FakeTier):
        def views(self, guards: Any) -> Any:
            raise OSError("the source is gone")

    tier, guard = ill_and_guard()
    source = NoViews(4, SIZE)
    source.fill([b"new"])
    for _ in range(5):
        reservation = guard.reserve_nowait(RoomRequest([b"new"], SIZE, "wait"))
        with pytest.raises(OSError, match="the source is gone"):
            await reservation.transfer(source, source.upgrade([b"new"]))
        assert "room for 1 blocks" in repr(reservation)
        with pytest.raises(ValueError, match="once"):  # a second time is the tier's to refuse
            await reservation.transfer(source, [0])
        reservation.release()
    assert guard.health.faults == 0 and tier.at_rest()


async def test_an_error_of_the_destination_is_not_the_tiers(autojump_clock) -> None:
    tier, guard = asked_and_guard()
    for _ in range(5):
        async with await guard.pin(KEYS) as lease:
            outcomes = await guard.load(lease, BadPlaces())
        assert isinstance(outcomes[0], Failed)
    assert guard.health.faults == 0 and tier.at_rest()


async def test_an_error_of_a_destination_that_sums_is_not_the_tiers(autojump_clock) -> None:
    class BadSums(BadPlaces):
        sums_pages = True

        def copy_in_and_sum(self, start: int, pages: Any) -> list[int]:
            raise OSError("the destination is gone")

    tier = MemoryTier(4 * SIZE, SIZE)
    tier.put(b"a", bytes(SIZE))
    guard = with_breaker(tier, "host")
    for _ in range(5):
        async with await guard.pin([b"a"]) as lease:
            outcomes = await guard.load(lease, BadSums())
        assert isinstance(outcomes[0], Failed) and "the destination is gone" in str(outcomes[0].error)
    assert guard.health.faults == 0


async def test_a_tier_that_finds_everything_and_reads_nothing_breaks(autojump_clock) -> None:
    tier, guard = asked_and_guard()
    tier.faults.load_error = OSError("input/output error")
    for _ in range(3):
        async with await guard.pin(KEYS) as lease:
            with pytest.raises(OSError, match="input/output"):
                await guard.load(lease, places(3))
    for wait in (1.0, 2.0, 4.0):  # each time a pin closes it, and the load after it opens it for longer
        health = guard.health
        assert health.next_probe == trio.current_time() + wait
        await trio.sleep(wait)
        async with await guard.pin(KEYS) as lease:
            with pytest.raises(OSError, match="input/output"):
                await guard.load(lease, places(3))
    tier.faults.load_error = None
    await trio.sleep(8.0)
    async with await guard.pin(KEYS) as lease:
        assert await guard.load(lease, places(3)) == [LOADED] * 3
    assert guard.health.faults == 0


# --- leases ---------------------------------------------------------------------------------------------------------


class Sticky(Asked):
    """Its leases are hard to give back."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stuck: Any = None

    async def pin(self, keys: Any) -> Any:
        lease = await super().pin(keys)
        tier = self

        class Lease(ReadLease):
            keys = lease.keys

            async def release(self) -> None:
                lease.release_nowait()
                if tier.stuck == "hang":
                    await trio.sleep_forever()
                elif tier.stuck is not None:
                    raise tier.stuck

            async def __aexit__(self, *exc: object) -> None:
                await self.release()

        return Lease()


async def test_a_lease_of_a_broken_tier_is_let_go_without_an_error(autojump_clock, caplog) -> None:
    tier, guard = ill_and_guard(Sticky)
    tier.fill(KEYS)
    leases = [await guard.pin(KEYS) for _ in range(3)]
    assert list(leases[0].keys) == KEYS
    tier.stuck = OSError("gone")
    await leases[0].release()
    tier.stuck = "hang"
    start = trio.current_time()
    await leases[1].release()
    assert trio.current_time() == start + 5.0
    assert guard.health.faults == 2
    async with leases[2]:
        pass
    assert guard.health.state is HealthState.OPEN
    assert tier.at_rest()
    assert "ill could not release a lease: TierTooSlow" in caplog.text
    tier.stuck = OSError("gone")
    health = guard.health
    await trio.sleep(1.0)
    await leases[2].release()
    assert guard.health == health  # neither a probe nor a fault


async def test_a_lease_that_raises_where_it_need_not_wait_is_released_by_waiting(monkeypatch) -> None:
    tier, guard = ill_and_guard()
    tier.fill(KEYS)
    release_nowait, raised = Lease.release_nowait, []

    def raise_once(self: Lease) -> bool:
        if not raised:
            raised.append(self)
            raise OSError("gone")
        return release_nowait(self)

    monkeypatch.setattr(Lease, "release_nowait", raise_once)
    async with await guard.pin(KEYS):
        pass
    assert raised and tier.at_rest()


async def test_a_release_that_raises_is_logged_and_no_fault_if_it_is_a_mistake(autojump_clock, caplog) -> None:
    tier, guard = ill_and_guard(Sticky)
    lease = await guard.pin([])
    tier.stuck = ValueError("released twice")
    await lease.release()
    assert guard.health.faults == 0
    assert "ill could not release a lease: ValueError: released twice" in caplog.text


async def test_statistics_of_a_tier_that_raises_are_its_last(monkeypatch, caplog) -> None:
    tier, guard = ill_and_guard()
    tier.fill(KEYS)
    before = guard.statistics()
    monkeypatch.setattr(tier, "statistics", lambda: [][0])
    assert guard.statistics() == guard.statistics() == before
    assert caplog.text.count("ill has no statistics now: IndexError") == 1


async def test_a_cancelled_release_has_let_go(autojump_clock) -> None:
    tier, guard = ill_and_guard(Sticky)
    tier.fill(KEYS)
    lease = await guard.pin(KEYS)
    tier.stuck = "hang"
    with trio.move_on_after(1.0) as scope:
        await lease.release()
    assert scope.cancelled_caught and tier.at_rest() and guard.health.faults == 0


class RemoteSource(FakeTier):
    capabilities = attrs.evolve(FakeTier.capabilities, answers_at_once=False)


# --- what goes through ----------------------------------------------------------------------------------------------


async def test_it_is_what_its_tier_is() -> None:
    local, remote = with_breaker(FakeTier(), "local"), with_breaker(RemoteSource(), "remote")  # type: ignore[arg-type]
    assert local.capabilities.answers_at_once and not remote.capabilities.answers_at_once
    assert local.source is local.inner and remote.source is remote.inner
    assert (local.name, local.block_bytes, local.capacity if hasattr(local, "capacity") else None) == (
        "local",
        64,
        None,
    )
    local.fill(KEYS)  # beyond the contract
    assert local.get(KEYS[0]) == payload_of(KEYS[0], 64)
    assert local.weak(KEYS).source is local.inner
    assert local.statistics() == local.inner.statistics()
    assert repr(local).startswith("<local, breaker closed: <FakeTier")
    with pytest.raises(AttributeError):
        local.nothing_of_the_kind  # noqa: B018


async def test_a_tier_that_is_no_source_has_none_either() -> None:
    guard = with_breaker(PacedTier(FakeTier()), "plain")
    assert guard.source is None


async def test_entering_it_enters_the_tier() -> None:
    class Entered(Ill):
        inside = False

        async def __aenter__(self) -> Entered:
            self.inside = True
            return self

        async def __aexit__(self, *exc: object) -> None:
            self.inside = False

    tier = Entered()
    async with with_breaker(tier, "tier") as guard:
        assert tier.inside and isinstance(guard, BreakerTier)
    assert not tier.inside
    async with with_breaker(FakeTier(), "plain") as guard:
        assert isinstance(guard, BreakerTier)


def test_one_guard_is_enough() -> None:
    guard = with_breaker(FakeTier(), "tier")
    assert with_breaker(guard, "again") is guard and guard.name == "tier"


async def test_the_log_says_when_it_breaks_and_when_it_is_well(autojump_clock, caplog) -> None:
    caplog.set_level(logging.INFO, "offload.health")
    tier, guard = asked_and_guard()
    await fail(guard, tier)
    await trio.sleep(1.0)
    await fail(guard, tier, 1)
    await trio.sleep(2.0)
    await pin(guard)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "ill is broken after 3 faults in a row, the last one OSError: gone"),
        ("INFO", "ill is healthy again"),
    ]
