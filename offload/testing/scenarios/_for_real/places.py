"""A tier of a real run, as far as time and what goes wrong are concerned: the copies are made in copy threads.

What the virtual world models, happens here. A copy thread stands at the *gate* until the time has passed that the scenario
gives the tier at least (``latency_ms``, ``bytes_per_ms``); a stall and a delay keep it there longer. Then it copies, as long as
that takes.

| fault | here |
|---|---|
| stall, delay | the copy thread waits at the gate |
| fail | the copy thread raises; of one block: in the way of its file is a directory |
| torn | the file of the block is truncated behind the tier's back, and the copy raises |
| flip | a bit of the file, or of the memory |
| full | of a file tier: its disk is full, to the last byte; of a memory tier: no room is granted |
| unproven, drop, duplicate, reorder | the copy is made; its end is reported as told |
| peer_death | of the child process that the pipelines live in; elsewhere whatever is asked of the tier raises |
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import TypeVar

import attrs
import trio

from backends.abc import Key

from .._program import TICK
from .._world.moments import Line
from .._world.places import Flight, Place, Unknown, Window
from .disk import SmallDisk

T = TypeVar("T")


class WallClock(trio.abc.Clock):
    """The clock on the wall, from 0: 1/1024 s of trio's time, a virtual millisecond, is ``pace`` milliseconds of it."""

    def __init__(self, pace: float = 1.0) -> None:
        self.pace = pace
        self._scale = TICK * 1_000 / pace
        self._began = perf_counter()

    def start_clock(self) -> None:
        """It starts now; again, where it was started before."""
        self._began = perf_counter()

    def hurry(self) -> None:
        """From now on it goes 20 times as fast as the wall's, at whatever pace it went: what is left is to end."""
        now = self.current_time()
        self._scale = TICK * 1_000 * 20
        self._began = perf_counter() - now / self._scale

    def current_time(self) -> float:
        """In any thread."""
        return (perf_counter() - self._began) * self._scale

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Seconds of the wall."""
        return (deadline - self.current_time()) / self._scale


@attrs.define(eq=False)
class RealPlace(Place):
    """One tier of a real run."""

    clock: WallClock = attrs.field(factory=WallClock, kw_only=True)
    over: threading.Event = attrs.field(factory=threading.Event, kw_only=True)
    """Set when the run is: nobody stands at a gate any more."""
    let_go: trio.Event = attrs.field(factory=trio.Event, kw_only=True)
    """The same for those who wait on the trio thread."""
    disk: SmallDisk | None = attrs.field(default=None, kw_only=True)
    """Where it is made of files, and may have to be full."""
    signal: Callable[[Window], None] | None = attrs.field(default=None, kw_only=True)
    """Where it lives in a process of its own: does to that what it meets."""
    later: Callable[[float, Callable[[], object]], None] = attrs.field(default=lambda at, call: None, kw_only=True)
    """Has a function called at a time."""
    without_room: dict[Key, None] = attrs.field(factory=dict, kw_only=True)
    """Blocks that the full disk had no room for."""
    _unannounced: dict[Flight, Window] = attrs.field(factory=dict, kw_only=True)
    _lost: dict[Flight, Sequence[Key]] = attrs.field(factory=dict, kw_only=True)

    # -- in the copy thread --------------------------------------------------------------------------------------------

    def gate(self, flight: Flight) -> None:
        """Stand at the gate.

        Raises:
            OSError: the copy fails.
        """
        while (left := self.clock.deadline_to_sleep_time(flight.ends)) > 0:
            if self.over.wait(left):
                raise OSError(errno.ECANCELED, "the run is over")
        self._break(flight)

    # -- on the trio thread --------------------------------------------------------------------------------------------

    def opens(self, window: Window) -> None:
        """From now on it is so, for a while."""
        super().opens(window)
        if self.signal is not None:
            self.signal(window)
        if window.kind == "full" and self.disk is not None:
            self.disk.fill()
            self.later(window.until, self._empty)

    def _empty(self) -> None:
        if self.disk is not None and self.window("full") is None:
            self.disk.empty()

    def calm(self) -> None:
        """Nothing goes wrong here any more."""
        super().calm()
        self._empty()

    def withheld(self) -> Window | None:
        """A full disk withholds no room: nobody knows of it but who writes."""
        return None if self.disk is not None else super().withheld()

    def met_no_room(self, flight: Flight, keys: Sequence[Key]) -> None:
        """The disk had no room for these."""
        window: Window | None = flight.met.get("full") or self.window("full")
        if window is not None:
            window.line.fired = True
        self.without_room.update(dict.fromkeys(keys))
        self.failed.update(dict.fromkeys(keys))
        self._lost[flight] = keys

    def flips(self, key: Key) -> Line | None:
        """Whether a bit of this block is to be flipped as soon as it has arrived, and on whose account."""
        line = self.armed.pop(key, None)
        if line is not None:
            line.fired = True
            self.flipped.add(key)
        return line

    async def carry(
        self, keys: Sequence[Key], move: Callable[[Flight], Awaitable[T]], who: Sequence[str] | None = None
    ) -> T:
        """One copy into this place: ``move`` makes it, past the gate, and what it has met decides how its end is told."""

        async def really(flight: Flight) -> T:
            answer = await move(flight)
            met = flight.met
            try:
                self._break(flight)  # what came when the last byte had been written
            except OSError:
                self.nobody_knows(flight)
                raise
            if "unproven" in met:
                self.nobody_knows(flight)
                raise Unknown(f"nobody knows how a copy into {self.name} ended")
            if "drop" in met or self._unannounced.pop(flight, None) is not None:
                self.nobody_knows(flight)
                await self.let_go.wait()
                raise Unknown(f"nobody was told how a copy into {self.name} ended")
            if "reorder" in met:
                await self._hold_back(flight)
            for key in self._lost.pop(flight, ()):  # what is counted as arrived next, has not
                self.arrived[key] = self.arrived.get(key, 0) - 1
                self.copied -= 1
            return answer

        return await super().carry(keys, really, who)

    def nobody_knows(self, flight: Flight) -> None:
        """What it has copied is there, and nobody is told: it may be found."""
        for key in flight.keys:
            self.arrived[key] = self.arrived.get(key, 0) + 1

    async def _fly(self, flight: Flight) -> None:
        # Its time passes in the copy thread. What was dropped is copied all the same, and never told of.
        window = flight.met.pop("drop", None)
        if window is not None:
            self._unannounced[flight] = window

    def _break(self, flight: Flight) -> None:
        met = flight.met
        if "peer_death" in met:
            raise ConnectionResetError(errno.ECONNRESET, f"the peer that holds {self.name} died")
        if "fail" in met and not met["fail"].keys:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
