"""What a lookup has found, and holds until it is released. Rules 1 and 3 are kept here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import attrs
import trio

from backends.abc import Key, ReadableTier, ReadLease

from .carrying import nothing

_LONGEST_RELEASE = 10.0
"""Seconds that the end of an engine waits for tiers that are slow to let go of forgotten hits."""
_log = logging.getLogger("offload.engine")


@attrs.frozen
class Run:
    """Neighbouring blocks of a hit that lie in one tier."""

    speed: int
    """The position of the tier among those of the engine: 0 is the fastest."""
    name: str
    tier: ReadableTier
    lease: ReadLease
    blocks: int


class Hit:
    """The longest prefix that was found, pinned where it lies. Made by :meth:`Engine.lookup` only.

    An async context manager: leaving it releases, also when cancelled.
    """

    __slots__ = ("_end", "_live", "_loads", "_released", "_runs", "_tenant", "keys", "unavailable")

    def __init__(
        self,
        keys: Sequence[Key],
        runs: list[Run],
        unavailable: Mapping[str, Exception],
        live: dict[Hit, None],
        tenant: str = "",
        end: Callable[[], None] = nothing,
    ) -> None:
        self._runs = runs
        self._live = live
        live[self] = None
        self._tenant = tenant
        self._end = end
        self._loads = 0
        self._released = False
        self.keys: Sequence[Key] = keys
        """What was found, from the first key asked for to the last before the first that no tier has."""
        self.unavailable: Mapping[str, Exception] = unavailable
        """Tiers that were left out because they raised or were silent, by name. Not a miss: they may well have the blocks."""

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        where = ", ".join(f"{blocks} in {name}" for name, blocks in self.runs)
        return f"<Hit of {len(self.keys)} blocks: {where or 'nothing'}{', released' if self._released else ''}>"

    @property
    def runs(self) -> list[tuple[str, int]]:
        """Where the prefix lies, in order: the name of a tier, and how many blocks are read from it."""
        return [(run.name, run.blocks) for run in self._runs]

    @property
    def released(self) -> bool:
        """Whether it has been released."""
        return self._released

    async def __aenter__(self) -> Hit:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._release()

    async def _release(self) -> None:
        """Give the pins back, or leave that to the last load that still reads through them."""
        released, self._released = self._released, True
        self._live.pop(self, None)
        if not released and not self._loads:
            await self._let_go()

    def _begin_load(self) -> list[Run]:
        """Keep the pins until :meth:`_end_load`, whoever releases meanwhile."""
        self._loads += 1
        return self._runs

    async def _end_load(self) -> None:
        self._loads -= 1
        if self._released and not self._loads:
            await self._let_go()

    async def _let_go(self) -> None:
        try:
            await let_go(self._runs)
        finally:
            self._end()


async def let_go(runs: Sequence[Run]) -> None:
    """Release all leases, whatever one of them raises. Leaving a lease releases it by contract, also when cancelled."""
    for at, run in enumerate(runs):
        try:
            await run.lease.__aexit__(None, None, None)
        except BaseException:
            await let_go(runs[at + 1 :])
            raise


async def release_forgotten(live: Mapping[Hit, None]) -> None:
    """The end of an engine is the end of its hits. Shielded, and bounded."""
    forgotten = list(live)
    if forgotten:
        _log.warning("%d hits were never released, among them %r", len(forgotten), forgotten[0])
    with trio.CancelScope(shield=True, deadline=trio.current_time() + _LONGEST_RELEASE):
        for hit in forgotten:
            try:
                await hit._release()
            except Exception:
                _log.exception("%r could not be released", hit)
