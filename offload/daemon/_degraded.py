"""The watch for degradations of a daemon, which looks every second.

It keeps the results for the log, the status page, metrics and operators. :mod:`offload._health.degradations` decides;
here are the facts and the log. A degradation is logged when it begins and when it ends.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import attrs
import trio

from backends.base.threads import run_in_thread
from backends.file import FileTier
from maru.base.memory import pinning
from maru.base.process_limits import find_descriptors

from .._health import HealthState
from .._health.degradations import GRAVE, Degradation, DegradationWatch, RoomFact, ServiceFacts
from .._pipeline.marks import innermost

if TYPE_CHECKING:
    from .._engine import Engine

INTERVAL: Final = 1.0
"""Seconds between two looks.

One costs 0.1 ms, most of it the switch to a thread.
"""
_PATIENCE: Final = 2.0
"""Seconds for the file systems to answer.

One that hangs is left to the breaker of its tier.
"""
_LEAST_BLOCKS: Final = 4
"""Blocks that must find room on a tier's disk.

Otherwise the disk counts as full.
"""

_log = logging.getLogger("offload.daemon")


@attrs.define(eq=False)
class Degradations:
    """The degradations of a daemon.

    Args:
        engine: returns its engine, or ``None`` while its tiers are not open.
        journal: returns why its page store keeps answers back; empty if it does not.
        lost_devices: returns the causes by lost devices.
    """

    engine: Callable[[], Engine | None]
    journal: Callable[[], str] = str
    lost_devices: Callable[[], Mapping[str, str]] = dict
    _watch: DegradationWatch = attrs.field(factory=DegradationWatch)
    _files: tuple[str, ...] = ()
    """Paths that have to stay."""
    _is_looking: bool = False
    """Whether a thread is still looking.

    A file system may hang, and one thread is enough to find out.
    """
    _failed: bool = False
    """Whether the last look failed."""

    def keep(self, *paths: str) -> None:
        """Set the files that the daemon has made and needs.

        Their existence is enough: a server whose lock another one has ends, and one whose socket was removed makes it
        again.
        """
        self._files = paths

    @property
    def now(self) -> list[Degradation]:
        """The degradations found at the last look."""
        return list(self._watch.current.values())

    def texts(self) -> dict[str, str]:
        """Return the sentences of current degradations, by name and subject."""
        return {one.key: one.text for one in self.now}

    def counters(self) -> Mapping[str, float]:
        """Return the number of degradations, by name."""
        return {f"degraded.{name}": count for name, count in self._watch.counts().items()}

    async def run(self) -> None:
        """Look, until cancelled."""
        while True:
            try:
                await self.look()
            except Exception as exc:  # from a tier: all engines need the daemon to go on
                _log.log(logging.DEBUG if self._failed else logging.ERROR, "cannot look for degradations: %r", exc)
                self._failed = True
            else:
                self._failed = False
            await trio.sleep(INTERVAL)

    async def look(self) -> None:
        """Look once. Nothing has changed when it is cancelled."""
        facts = await self._facts()
        began, ended = self._watch.look(facts, trio.current_time())
        for one in began:
            _log.log(logging.ERROR if one.name in GRAVE else logging.WARNING, "degraded: %s", one.text)
        for one in ended:
            _log.info("no longer degraded: %s", one.key)

    async def _facts(self) -> ServiceFacts:
        engine = self.engine()
        rooms: dict[str, tuple[str, int]] = {}
        pinned = pinning.statistics()
        facts = ServiceFacts(
            journal=self.journal(),
            lost_devices=dict(self.lost_devices()),
            refused_bytes=pinned.refused_bytes,
            why_not_pinned=pinned.lost or pinned.why_not,
        )
        if engine is not None:
            statistics = engine.statistics()
            facts = attrs.evolve(
                facts,
                broken={
                    name: health.cause
                    for name, health in statistics.health.items()
                    if health.state != HealthState.CLOSED
                },
                failed_blocks={name: one.blocks_failed for name, one in statistics.pipelines.items()},
                dropped_blocks={name: one.blocks_dropped for name, one in statistics.pipelines.items()},
                quarantined={name: one.quarantined for name, one in statistics.pipelines.items()},
                late_policies={name: one.policy_timeouts for name, one in statistics.pipelines.items()},
            )
            for name, tier in engine.tiers.items():
                place = innermost(tier)
                held = statistics.tiers[name]
                left = held.capacity_bytes - held.used_bytes
                if isinstance(place, FileTier) and place.blocks_directory:
                    least = _LEAST_BLOCKS * (engine.source.block_bytes or 1)
                    rooms[name] = (
                        place.blocks_directory,
                        least if left >= least else 0,
                    )  # else it evicts before it grows
        if self._is_looking:
            return facts
        with trio.move_on_after(_PATIENCE):
            try:
                room, descriptors, unlinked = await run_in_thread(self._look_around, rooms)
            except (OSError, RuntimeError):  # no descriptor, or no thread, to find out with
                return attrs.evolve(facts, descriptors=find_descriptors())
            return attrs.evolve(facts, rooms=room, descriptors=descriptors, unlinked=unlinked)
        return facts

    def _look_around(
        self, rooms: Mapping[str, tuple[str, int]]
    ) -> tuple[dict[str, RoomFact], tuple[int, int], tuple[str, ...]]:
        """Ask the file systems, in a thread, since one may hang."""
        self._is_looking = (
            True  # here: a look that is cancelled before the thread has begun must not end all later ones
        )
        try:
            found = {}
            for name, (path, needed) in rooms.items():
                try:
                    system = os.statvfs(path)
                except OSError:  # it is gone, or its disk, which its tier reports; others are looked at
                    continue
                found[name] = RoomFact(path, system.f_bavail * system.f_frsize, needed)
            unlinked = tuple([path for path in self._files if not os.path.lexists(path)])
            return found, find_descriptors(), unlinked
        finally:
            self._is_looking = False
