"""The page store of a real run, as far as what goes wrong is concerned: done to its process, to its wire, to its pages.

| fault | here |
|---|---|
| peer_death | the server is killed with `kill -9`, and after `for_ms` started again over what it left |
| stall | the server stands still (`SIGSTOP`) for `for_ms` |
| drop | the server does what it is asked to, and its answers to stores are lost |
| duplicate | requests to store arrive twice, and so do the answers |
| full | all pages that are free are taken, and given back after `for_ms` |
| flip | a bit of the page, in the region's file |
| fail, delay | the copy thread, as for any other tier |
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import attrs
import trio

from maru.testing import Code, Fate, LossyWire

from .._program import FaultKind
from .._world.places import Window
from .places import RealPlace

if TYPE_CHECKING:
    from maru import AllocBatch

    from .maru_tiers import RealMaru
    from .page_store import PageStore

TO_THE_SERVER: Final[frozenset[FaultKind]] = frozenset({"peer_death", "stall", "drop", "duplicate", "full"})
"""What is not done to copies, but to the store."""
ON_THE_WIRE: Final[frozenset[FaultKind]] = frozenset({"drop", "duplicate"})
"""What needs a wire that loses what it is told to."""


@attrs.define(eq=False)
class MaruPlace(RealPlace):
    """A page store of a real run."""

    store: PageStore = attrs.field(kw_only=True)
    tier: RealMaru | None = attrs.field(default=None, kw_only=True)
    wire: LossyWire | None = attrs.field(default=None, kw_only=True)
    starting: Callable[[Callable[[], Awaitable[object]]], object] = attrs.field(default=lambda task: None, kw_only=True)
    """Starts a task beside the run."""
    disturbed: int = attrs.field(default=0, kw_only=True)
    """How often something was done to the store: what was asked of it meanwhile may have no answer."""
    _up: trio.Event = attrs.field(factory=lambda: _set(), kw_only=True)
    _ballast: list[AllocBatch] = attrs.field(factory=list, kw_only=True)
    _on_the_wire: list[Window] = attrs.field(factory=list, kw_only=True)
    _stops: int = attrs.field(default=0, kw_only=True)

    def opens(self, window: Window) -> None:
        """From now on it is so, for a while."""
        if window.kind not in TO_THE_SERVER:
            super().opens(window)
            return
        self.disturbed += 1
        if window.kind == "peer_death":
            self._kill(window)
        elif window.kind == "stall":
            self._stop(window)
        elif window.kind == "full":
            self._fill(window)
        else:
            self._on_the_wire.append(window)

    def calm(self) -> None:
        """Nothing goes wrong here any more, but for a server that is on its way up."""
        super().calm()
        self._on_the_wire.clear()
        self._stops = 0
        self.store.go_on()
        self._empty()

    async def back(self) -> None:
        """Return once the server is there again."""
        await self._up.wait()

    # -- to its process ------------------------------------------------------------------------------------------------

    @property
    def _alive(self) -> bool:
        """Whether there is a server to hit: one that is on its way up is nobody's peer yet."""
        return self._up.is_set() and self.store.alive

    def _kill(self, window: Window) -> None:
        if not self._alive:
            return
        window.line.fired = True
        self.store.kill()
        self._up = trio.Event()
        self.starting(lambda: self._again(window.until))

    async def _again(self, when: float) -> None:
        await trio.sleep_until(when)
        self.store.launch()
        await trio.to_thread.run_sync(self.store.wait_ready)
        self._up.set()

    def _stop(self, window: Window) -> None:
        if not self._alive:
            return
        window.line.fired = True
        self._stops += 1
        self.store.stand_still()
        self.later(window.until, self._go_on)

    def _go_on(self) -> None:
        self._stops = max(0, self._stops - 1)
        if not self._stops:
            self.store.go_on()

    # -- to its wire ---------------------------------------------------------------------------------------------------

    def fate(self, code: int, number: int) -> Fate:
        """What becomes of a request on the wire, and of its answer."""
        if code != Code.STORE:
            return Fate.PASS
        for window in self._on_the_wire:
            if window.open:
                window.line.fired = True
                return Fate.LOSE_ANSWER if window.kind == "drop" else Fate.TWICE
        return Fate.PASS

    # -- to its pages --------------------------------------------------------------------------------------------------

    def _fill(self, window: Window) -> None:
        assert self.tier is not None
        batch = self.tier.handler.alloc_pages_nowait(self.tier.handler.free_pages)
        window.line.fired = True
        if batch is not None:
            self._ballast.append(batch)
        self.later(window.until, self._empty)

    def _empty(self) -> None:
        ballast, self._ballast = self._ballast, []
        for batch in ballast:
            batch.free()

    @property
    def ballast(self) -> int:
        """Pages that are taken only so that nobody else has them."""
        return sum(len(batch) for batch in self._ballast)


def _set() -> trio.Event:
    event = trio.Event()
    event.set()
    return event
