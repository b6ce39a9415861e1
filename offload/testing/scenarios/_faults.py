"""Effects of a scenario's faults, one function for each kind.

The functions are in one table.

A fault has *fired* once it has hit something alive: a container that had not ended, a block that was stored, a copy
that was in progress. Each is a line of the trace from the moment at which it happens, whether it hits anything or not.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import trio

from backends.abc import Key

from ._names import expand, first_destination, first_source, shown
from ._program import (
    TICK,
    Fault,
    FaultKind,
    Scenario,
)
from ._rng import Rng
from ._trace import TraceEntry
from ._virtual_tier import FaultWindow

if TYPE_CHECKING:
    from ._world import Request, VirtualWorld


class PlannedFault:
    """One fault of a scenario, until its time or its hook comes."""

    __slots__ = ("entry", "fault", "keys", "left", "of", "who")

    def __init__(self, fault: Fault) -> None:
        self.fault: Fault = fault
        self.who: tuple[str, ...] = expand(fault.who)
        self.of: frozenset[str] = frozenset(expand(fault.of) or self.who)
        self.keys: tuple[Key, ...] = tuple([key.encode() for key in expand(fault.keys)])
        self.left: int = fault.visit
        self.entry: TraceEntry | None = None

    @property
    def name(self) -> str:
        """Name under which it is counted: ``cancel``, or ``cancel at post_claim``."""
        return f"{self.fault.do} at {self.fault.at_hook}" if self.fault.at_hook else self.fault.do

    def visit(self, world: VirtualWorld, who: Sequence[str], where: str) -> None:
        """Count a call of its hook about these containers; act when due."""
        if self.left and (not self.of or not self.of.isdisjoint(who)):
            self.left -= 1
            if not self.left:
                self.happen(world, who, where)

    def happen(self, world: VirtualWorld, who: Sequence[str] = (), where: str = "") -> None:
        """Execute the fault now.

        An exception is recorded as a violation, and never reaches the system.
        """
        try:
            FAULTS[self.fault.do](world, self, (*(self.who or who),) * self.fault.times, where)
        except Exception:
            world.wrong("crash", f"the fault {self.name} raised: {traceback.format_exc()}")


def plan_faults(scenario: Scenario, rng: Rng) -> Iterator[PlannedFault]:
    """Yield the faults of a scenario that happen with this seed."""
    for i, fault in enumerate(scenario.fault):
        if fault.p >= 1.0 or rng.chance(fault.p, "fault", i, "happens"):
            yield PlannedFault(fault)


# --- to containers ------------------------------------------------------------------------------------------------


def _cancel(world: VirtualWorld, planned: PlannedFault, who: Sequence[str], where: str) -> None:
    entry = planned.entry = world.log_fault(planned, who, where, "")
    for label in who:
        request = world.requests.get(label)
        if request is None or request.ticket is None:
            continue
        entry.fired |= request.alive
        ask_cancel(world, request)


def ask_cancel(world: VirtualWorld, request: Request) -> None:
    """Request the cancel of a container, and start awaiting its confirmation."""
    assert request.ticket is not None
    note_cancel(world, request)
    request.ticket.request_cancel()
    world.askers.start_soon(await_cancel, world, request)


def note_cancel(world: VirtualWorld, request: Request) -> None:
    """Record a cancel request, and whether it is in time."""
    world.step("cancel asked", request.label)
    request.cancelled = True
    if world.ledger is not None and world.ledger.cancel_is_in_time(request.ticket):
        request.in_time = True


async def await_cancel(world: VirtualWorld, request: Request) -> None:
    """Wait for the confirmation of a cancel."""
    ticket = request.ticket
    assert ticket is not None
    began, prompt = trio.current_time(), request.in_time and request.alive
    with trio.CancelScope() as scope:
        request.waiting.append(scope)
        try:
            await ticket.cancel()
        except Exception as error:
            world.step("unconfirmed", request.label, type(error).__name__)
            world.unconfirmed(request, error)
        else:
            world.step("confirmed", request.label)
            world.confirmed(request)
            if prompt:
                world.prompt(request, began)
        finally:
            request.waiting.remove(scope)
            if scope.cancel_called:
                world.step("waiter gone", request.label)


def _abandon(world: VirtualWorld, planned: PlannedFault, who: Sequence[str], where: str) -> None:
    entry = planned.entry = world.log_fault(planned, who, where, "")
    for label in who:
        request = world.requests.get(label)
        if request is not None and request.storing is not None:
            entry.fired = True
            request.storing.cancel()


def _cancel_waiter(world: VirtualWorld, planned: PlannedFault, who: Sequence[str], where: str) -> None:
    entry = planned.entry = world.log_fault(planned, who, where, "")
    for label in who:
        request = world.requests.get(label)
        for scope in list(request.waiting) if request is not None else ():
            entry.fired |= not scope.cancel_called
            scope.cancel()


# --- to the system ------------------------------------------------------------------------------------------------


def _cancel_host(world: VirtualWorld, planned: PlannedFault, who: Sequence[str], where: str) -> None:
    entry = planned.entry = world.log_fault(planned, (), where, "")
    entry.fired = world.busy()
    world.close("cancel")


def _shut_down(world: VirtualWorld, planned: PlannedFault, who: Sequence[str], where: str) -> None:
    entry = planned.entry = world.log_fault(planned, (), where, "")
    entry.fired = world.busy() and world.closed_at is None
    world.close("close")


def _clock(world: VirtualWorld, planned: PlannedFault, who: Sequence[str], where: str) -> None:
    entry = planned.entry = world.log_fault(planned, (), where, f"{planned.fault.ms} ms")
    entry.fired = world.busy()
    world.jump(planned.fault.ms * TICK)


# --- to blocks ----------------------------------------------------------------------------------------------------


def _keys(world: VirtualWorld, planned: PlannedFault, who: Sequence[str]) -> tuple[Key, ...]:
    """Return the blocks of a fault: the named ones, if any.

    At a hook without named blocks, those of its containers; no blocks mean all.
    """
    if planned.keys or not planned.fault.at_hook:
        return planned.keys
    requests = [world.requests[label] for label in who if label in world.requests]
    return tuple(dict.fromkeys([key for request in requests for key in request.keys]))


def _evict(world: VirtualWorld, planned: PlannedFault, who: Sequence[str], where: str) -> None:
    tier = planned.fault.tier or first_source(world.scenario)
    keys = _keys(world, planned, who)
    entry = planned.entry = world.log_fault(planned, (), tier, shown(keys))
    entry.fired = bool(world.evict(tier, keys, again=planned.fault.again))


def _flip(world: VirtualWorld, planned: PlannedFault, who: Sequence[str], where: str) -> None:
    model = world.tier_models[planned.fault.tier or first_destination(world.scenario)]
    keys = _keys(world, planned, who)
    entry = planned.entry = world.log_fault(planned, (), model.name, shown(keys))
    if model.content is not None:
        flipped = model.content.flip(keys)
        model.flipped.update(flipped)
        entry.fired = bool(flipped)
    else:
        model.flip_on_arrival.update(dict.fromkeys(keys or world.all_keys, entry))


# --- to a tier, for a while ---------------------------------------------------------------------------------------


def _window(world: VirtualWorld, planned: PlannedFault, who: Sequence[str], where: str) -> None:
    fault = planned.fault
    model = world.tier_models[planned.fault.tier or first_destination(world.scenario)]
    keys = _keys(world, planned, who) if fault.do in ("fail", "torn") else ()
    note = f"for {fault.for_ms} ms" + (f": {shown(keys)}" if keys else "")
    entry = planned.entry = world.log_fault(planned, (), model.name, note)
    until = trio.current_time() + fault.for_ms * TICK
    model.open_window(FaultWindow(fault.do, until, frozenset(keys), entry, fault.ms, fault.by, fault.grouped))


_Act = Callable[["VirtualWorld", PlannedFault, Sequence[str], str], None]

FAULTS: Final[Mapping[FaultKind, _Act]] = {
    "cancel": _cancel, "abandon": _abandon, "cancel_waiter": _cancel_waiter,
    "cancel_host": _cancel_host, "shut_down": _shut_down, "clock": _clock,
    "evict": _evict, "flip": _flip,
    "unproven": _window, "fail": _window, "stall": _window, "drop": _window, "delay": _window,
    "duplicate": _window, "miscount": _window, "reorder": _window, "torn": _window, "full": _window, "peer_death": _window,
    "slow_loads": _window,
}  # fmt: skip
"""Effect of each kind of fault."""
