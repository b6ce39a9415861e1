"""A tier as the world models it: how long copies into it take, and how they go wrong meanwhile.

What goes wrong for a while is a :class:`Window`. A copy is a :class:`Flight`; it meets every window that is open when it
begins, or that opens while it is under way, and how it ends follows from those it has met.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol, TypeVar

import attrs
import trio

from backends.abc import Key, Unproven

from .._program import TICK, FaultKind, TierSpec
from .moments import Line, Moments

T = TypeVar("T")


class Unknown(Unproven, OSError):
    """The end of a copy is unknown: what it wrote, and whether it still writes."""


class Torn(OSError):
    """A copy broke off in the middle of a block."""


@attrs.define(eq=False)
class Window:
    """A fault that lasts."""

    kind: FaultKind
    until: float
    """On trio's clock, in seconds."""
    keys: frozenset[Key]
    """Which blocks it is about; empty: all."""
    line: Line
    """Its line in the trace, which says whether it hit anything."""
    ms: int = 1
    """By how much it delays."""
    by: int = 1
    """How many answers too many, or too few."""
    grouped: bool = False
    """What it has a copy raise comes in a group."""

    @property
    def open(self) -> bool:
        """Whether it is still so."""
        return trio.current_time() < self.until


@attrs.define(eq=False)
class Flight:
    """One copy that is under way."""

    number: int
    keys: Sequence[Key]
    ends: float
    met: dict[FaultKind, Window] = attrs.Factory(dict)

    def meets(self, window: Window, *, begins: bool = False) -> None:
        """The window is open while this copy is under way."""
        if window.keys and window.keys.isdisjoint(self.keys):
            return
        if window.kind == "stall" and not begins:
            return  # only copies that begin wait
        if window.kind == "delay":
            self.ends += window.ms * TICK
        elif window.kind == "stall":
            self.ends += window.until - trio.current_time()
        if window.kind != "reorder":  # which holds one back at its end, or does not
            window.line.fired = True
        self.met.setdefault(window.kind, window)

    @property
    def miscounted(self) -> bool:
        """Whether there is not one answer for each block."""
        return "duplicate" in self.met or "miscount" in self.met

    def answers(self, one_each: Sequence[T]) -> list[T]:
        """What the copy answers, if it should answer this, one for each block."""
        answers = list(one_each)
        if "duplicate" in self.met:
            return answers * 2
        if "miscount" not in self.met:
            return answers
        by = self.met["miscount"].by
        return answers[:by] if by < 0 else answers + answers[-1:] * by

    def failing(self) -> AbstractSet[Key]:
        """The blocks that fail, and only these; empty where none does, or all of the copy."""
        window = self.met.get("fail")
        return window.keys.intersection(self.keys) if window is not None else frozenset()

    def torn(self) -> Key | None:
        """The block in the middle of which it breaks off, if it does."""
        window = self.met.get("torn")
        if window is None:
            return None
        return next((key for key in self.keys if key in window.keys), self.keys[0])


class _Content(Protocol):
    """What a place asks the system about itself."""

    def flip(self, keys: Sequence[Key]) -> Sequence[Key]:
        """Flip a bit of each stored block. Returns those that were there."""


@attrs.define(eq=False)
class Place:
    """One tier of the world."""

    name: str
    spec: TierSpec
    moments: Moments
    owners: Callable[[Sequence[Key]], Sequence[str]]
    """The containers that have these keys and are under way."""
    windows: list[Window] = attrs.Factory(list)
    flying: dict[Flight, None] = attrs.Factory(dict)
    arrived: dict[Key, int] = attrs.Factory(dict)
    """How often a block was copied to the end."""
    begun: dict[Key, int] = attrs.Factory(dict)
    """How often a copy of it began."""
    unknown: int = 0
    """Copies whose end nobody knows, since it was never announced or said to be unknown."""
    failed: dict[Key, None] = attrs.Factory(dict)
    """Blocks that a fault had fail."""
    batches: int = 0
    copied: int = 0
    """Blocks."""
    flipped: set[Key] = attrs.Factory(set)
    """Blocks of which a bit was flipped since they were stored."""
    armed: dict[Key, Line] = attrs.Factory(dict)
    """Blocks of which a bit is flipped when they arrive next: where the world does not hold the bytes itself."""
    content: _Content | None = None
    begins: Callable[[Place, Sequence[Key], Sequence[str] | None], None] | None = None
    """Is told of each copy that begins: into which place, of which keys, of which containers where that is known."""
    miscounted: dict[str, None] = attrs.Factory(dict)
    """Containers whose copy did not answer once for each block."""
    clashes: list[str] = attrs.Factory(list)
    """Keys that were copied twice at the same time (I7)."""
    _held_back: Flight | None = None
    _ended: trio.Event = attrs.Factory(trio.Event)

    # -- what goes wrong -----------------------------------------------------------------------------------------------

    def opens(self, window: Window) -> None:
        """From now on it is so, for a while."""
        self.windows.append(window)
        for flight in self.flying:
            flight.meets(window)

    def window(self, kind: FaultKind) -> Window | None:
        """The open window of this kind that lasts longest."""
        found: Window | None = None
        for window in self.windows:
            if window.kind == kind and window.open and (found is None or window.until > found.until):
                found = window
        return found

    def calm(self) -> None:
        """Nothing goes wrong here any more."""
        self.windows.clear()
        self.armed.clear()

    def check_alive(self) -> None:
        """Raise where the peer that holds this tier is dead.

        Raises:
            OSError: it is.
        """
        window = self.window("peer_death") if self.windows else None
        if window is not None:
            window.line.fired = True
            raise ConnectionResetError(f"the peer that holds {self.name} is dead")

    def withheld(self) -> Window | None:
        """The window in which nobody is granted room, if it is open. Who asks is about to be told."""
        window = self.window("full") if self.windows else None
        if window is not None:
            window.line.fired = True
        return window

    async def wait_for_room(self) -> None:
        """Return once room is no longer withheld."""
        while (window := self.withheld()) is not None:
            await _until(window.until)

    # -- copies --------------------------------------------------------------------------------------------------------

    def duration(self, nbytes: int) -> float:
        """What a copy of so many bytes takes, in seconds: whole virtual milliseconds."""
        spec = self.spec
        return (spec.latency_ms + (-(-nbytes // spec.bytes_per_ms) if spec.bytes_per_ms else 0)) * TICK

    async def carry(
        self, keys: Sequence[Key], move: Callable[[Flight], Awaitable[T]], who: Sequence[str] | None = None
    ) -> T:
        """One copy into this place: takes its time, and ends as what it has met has it.

        ``move`` writes the bytes when their time has come, but for the blocks that are ``failing``, and answers.

        Raises:
            OSError: it failed.
            Unknown: nobody knows.
            ExceptionGroup: of one of these, where what it has met raises so.
        """
        now = trio.current_time()
        self.batches += 1
        for key in keys:
            self.begun[key] = self.begun.get(key, 0) + 1
        for other in self.flying:
            twice = set(keys).intersection(other.keys)
            if twice:
                self.clashes.append(f"{_names(sorted(twice))} copied into {self.name} twice at the same time")
        names = _names(keys)
        if self.begins is not None:
            self.begins(self, keys, who)
        who = tuple(self.owners(keys) if who is None else who)
        self.moments.add("tier", "copy", who, self.name, names)
        flight = Flight(self.batches, keys, now + self.duration(len(keys) * self.spec.block_bytes))
        if self.windows:
            self.windows = [window for window in self.windows if window.until > now]
            for window in self.windows:
                flight.meets(window, begins=True)
        self.flying[flight] = None
        ended = "left"
        try:
            await self._fly(flight)
            self._break(flight)
            if "drop" in flight.met:
                ended = "dropped"
                await _never_end(in_tasks=flight.met["drop"].grouped)
            answer = await move(flight)
            failing = flight.failing()
            self.failed.update(dict.fromkeys(sorted(failing)))
            for key in keys:
                if key not in failing:
                    self.arrived[key] = self.arrived.get(key, 0) + 1
                    self.copied += 1
            ended = "copied"
            return answer
        except OSError as error:
            ended = "failed"
            if any(window.grouped for window in flight.met.values()):
                raise ExceptionGroup(f"a copy into {self.name}", [error]) from None
            raise
        finally:
            if flight.miscounted:
                self.miscounted.update(dict.fromkeys(who))
            del self.flying[flight]
            self._ended.set()
            self._ended = trio.Event()
            self.moments.add("tier", ended, who, self.name, names)

    async def _fly(self, flight: Flight) -> None:
        """Let its time pass. What it meets meanwhile may make that longer."""
        await _until(flight.ends)
        while trio.current_time() < flight.ends:
            await _until(flight.ends)
        if "reorder" in flight.met:
            await self._hold_back(flight)

    async def _hold_back(self, flight: Flight) -> None:
        """Let one that began later end first, if there is one; and hold back only one at a time."""
        window = flight.met["reorder"]
        later = [other for other in self.flying if other.number > flight.number]
        if self._held_back is not None or not later or not window.open:
            return
        self._held_back = flight
        window.line.fired = True
        try:
            with trio.move_on_at(window.until):
                while all(other in self.flying for other in later):
                    await self._ended.wait()
        finally:
            self._held_back = None

    def _break(self, flight: Flight) -> None:
        """Raise what it has met."""
        met = flight.met
        if not met:
            return
        self.unknown += "unproven" in met or "drop" in met
        if "peer_death" in met:
            raise ConnectionResetError(f"the peer that holds {self.name} died")
        if "unproven" in met:
            raise Unknown(f"nobody knows how a copy into {self.name} ended")
        if "fail" in met and not met["fail"].keys:
            raise OSError(f"a copy into {self.name} failed")


async def _never_end(*, in_tasks: bool) -> None:
    """Sleep for ever; where it is in several tasks, whoever cancels it meets a group of Cancelled."""
    if not in_tasks:
        await trio.sleep_forever()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        await trio.sleep_forever()


async def _until(time: float) -> None:
    """Sleep, always with a checkpoint."""
    await trio.sleep_until(time)


def _names(keys: Sequence[Key]) -> str:
    return ",".join([key.decode(errors="backslashreplace") for key in keys])
