"""What each fault of a scenario does: one function for each kind, in one table.

A fault has *fired* once it has hit something alive: a container that had not ended, a block that was there, a copy that was
under way. Each is a line of the trace from the moment at which it happens, whether it hits anything or not.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import trio

from backends.abc import Key

from ._defaults import first_destination, first_source
from ._names import expand
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
    """One fault of a scenario, waiting for its moment."""

    __slots__ = ("fault", "keys", "left", "line", "of", "who")

    def __init__(self, fault: Fault) -> None:
        self.fault: Fault = fault
        self.who: tuple[str, ...] = expand(fault.who)
        self.of: frozenset[str] = frozenset(expand(fault.of) or self.who)
        self.keys: tuple[Key, ...] = tuple([key.encode() for key in expand(fault.keys)])
        self.left: int = fault.visit
        self.line: TraceEntry | None = None

    @property
    def name(self) -> str:
        """What it is counted as."""
        return f"{self.fault.do} at {self.fault.at_hook}" if self.fault.at_hook else self.fault.do

    def visit(self, world: VirtualWorld, who: Sequence[str], where: str) -> None:
        """Its hook is called about these containers."""
        if self.left and (not self.of or not self.of.isdisjoint(who)):
            self.left -= 1
            if not self.left:
                self.happen(world, who, where)

    def happen(self, world: VirtualWorld, who: Sequence[str] = (), where: str = "") -> None:
        """Its moment has come. What it raises is a violation, and never the system's affair."""
        try:
            FAULTS[self.fault.do](world, self, (*(self.who or who),) * self.fault.times, where)
        except Exception:
            world.wrong("crash", f"the fault {self.name} raised: {traceback.format_exc()}")


def plan_faults(scenario: Scenario, dice: Rng) -> Iterator[PlannedFault]:
    """The faults of a scenario that happen at all with this seed."""
    for i, fault in enumerate(scenario.fault):
        if fault.p >= 1.0 or dice.chance(fault.p, "fault", i, "happens"):
            yield PlannedFault(fault)


# --- to containers ------------------------------------------------------------------------------------------------


def _cancel(world: VirtualWorld, planted: PlannedFault, who: Sequence[str], where: str) -> None:
    line = planted.line = world.line_of(planted, who, where, "")
    for label in who:
        parcel = world.parcels.get(label)
        if parcel is None or parcel.ticket is None:
            continue
        line.fired |= parcel.alive
        ask_cancel(world, parcel)


def ask_cancel(world: VirtualWorld, parcel: Request) -> None:
    """Ask for the cancel of a container, and have somebody wait for its confirmation."""
    assert parcel.ticket is not None
    note_cancel(world, parcel)
    parcel.ticket.request_cancel()
    world.askers.start_soon(await_cancel, world, parcel)


def note_cancel(world: VirtualWorld, parcel: Request) -> None:
    """Its cancel is asked for now: whether that comes in time is decided now as well."""
    world.step("cancel asked", parcel.label)
    parcel.cancelled = True
    if world.ledger is not None and world.ledger.cancel_is_in_time(parcel.ticket):
        parcel.in_time = True


async def await_cancel(world: VirtualWorld, parcel: Request) -> None:
    """Wait for the confirmation of a cancel."""
    ticket = parcel.ticket
    assert ticket is not None
    began, prompt = trio.current_time(), parcel.in_time and parcel.alive
    with trio.CancelScope() as scope:
        parcel.waiting.append(scope)
        try:
            await ticket.cancel()
        except Exception as error:
            world.step("unconfirmed", parcel.label, type(error).__name__)
            world.unconfirmed(parcel, error)
        else:
            world.step("confirmed", parcel.label)
            world.confirmed(parcel)
            if prompt:
                world.prompt(parcel, began)
        finally:
            parcel.waiting.remove(scope)
            if scope.cancel_called:
                world.step("waiter gone", parcel.label)


def _abandon(world: VirtualWorld, planted: PlannedFault, who: Sequence[str], where: str) -> None:
    line = planted.line = world.line_of(planted, who, where, "")
    for label in who:
        parcel = world.parcels.get(label)
        if parcel is not None and parcel.storing is not None:
            line.fired = True
            parcel.storing.cancel()


def _cancel_waiter(world: VirtualWorld, planted: PlannedFault, who: Sequence[str], where: str) -> None:
    line = planted.line = world.line_of(planted, who, where, "")
    for label in who:
        parcel = world.parcels.get(label)
        for scope in list(parcel.waiting) if parcel is not None else ():
            line.fired |= not scope.cancel_called
            scope.cancel()


# --- to the system ------------------------------------------------------------------------------------------------


def _cancel_host(world: VirtualWorld, planted: PlannedFault, who: Sequence[str], where: str) -> None:
    line = planted.line = world.line_of(planted, (), where, "")
    line.fired = world.busy()
    world.close("cancel")


def _shut_down(world: VirtualWorld, planted: PlannedFault, who: Sequence[str], where: str) -> None:
    line = planted.line = world.line_of(planted, (), where, "")
    line.fired = world.busy() and world.closed_at is None
    world.close("close")


def _clock(world: VirtualWorld, planted: PlannedFault, who: Sequence[str], where: str) -> None:
    line = planted.line = world.line_of(planted, (), where, f"{planted.fault.ms} ms")
    line.fired = world.busy()
    world.jump(planted.fault.ms * TICK)


# --- to blocks ----------------------------------------------------------------------------------------------------


def _keys(world: VirtualWorld, planted: PlannedFault, who: Sequence[str]) -> tuple[Key, ...]:
    """Which blocks it is about: those named, or, at a hook, those of the containers it is about; none: all."""
    if planted.keys or not planted.fault.at_hook:
        return planted.keys
    parcels = [world.parcels[label] for label in who if label in world.parcels]
    return tuple(dict.fromkeys([key for parcel in parcels for key in parcel.keys]))


def _evict(world: VirtualWorld, planted: PlannedFault, who: Sequence[str], where: str) -> None:
    tier = planted.fault.tier or first_source(world.scenario)
    keys = _keys(world, planted, who)
    line = planted.line = world.line_of(planted, (), tier, _said(keys))
    line.fired = bool(world.evict(tier, keys, again=False))


def _flip(world: VirtualWorld, planted: PlannedFault, who: Sequence[str], where: str) -> None:
    place = world.places[planted.fault.tier or first_destination(world.scenario)]
    keys = _keys(world, planted, who)
    line = planted.line = world.line_of(planted, (), place.name, _said(keys))
    if place.content is not None:
        flipped = place.content.flip(keys)
        place.flipped.update(flipped)
        line.fired = bool(flipped)
    else:
        place.armed.update(dict.fromkeys(keys or world.all_keys, line))


# --- to a tier, for a while ---------------------------------------------------------------------------------------


def _window(world: VirtualWorld, planted: PlannedFault, who: Sequence[str], where: str) -> None:
    fault = planted.fault
    place = world.places[planted.fault.tier or first_destination(world.scenario)]
    keys = _keys(world, planted, who) if fault.do in ("fail", "torn") else ()
    note = f"for {fault.for_ms} ms" + (f": {_said(keys)}" if keys else "")
    line = planted.line = world.line_of(planted, (), place.name, note)
    until = trio.current_time() + fault.for_ms * TICK
    place.opens(FaultWindow(fault.do, until, frozenset(keys), line, fault.ms, fault.by, fault.grouped))


def _said(keys: Sequence[Key]) -> str:
    return ",".join([key.decode(errors="backslashreplace") for key in keys])


_Act = Callable[["VirtualWorld", PlannedFault, Sequence[str], str], None]

FAULTS: Final[Mapping[FaultKind, _Act]] = {
    "cancel": _cancel, "abandon": _abandon, "cancel_waiter": _cancel_waiter,
    "cancel_host": _cancel_host, "shut_down": _shut_down, "clock": _clock,
    "evict": _evict, "flip": _flip,
    "unproven": _window, "fail": _window, "stall": _window, "drop": _window, "delay": _window,
    "duplicate": _window, "miscount": _window, "reorder": _window, "torn": _window, "full": _window, "peer_death": _window,
}  # fmt: skip
"""What a fault of each kind does."""
