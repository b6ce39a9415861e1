"""A tier behind a breaker: the same contract, but a broken one says so at once instead of costing everybody a timeout.

    guarded(tier, "maru") -> pin, contains, load, delete, reserve -> the tier, or TierUnavailable

Rule 1. Every call that asks the tier takes a turn of the :mod:`~offload._health.breaker`, and hands it back on every path;
        :mod:`~offload._health.faults` says what came of it. A sync ``contains`` never waits and proves nothing: it takes none.
Rule 2. No call waits for ever. A question has ``call_timeout``, a load ``load_timeout``; then it is cancelled, which by the
        contract of a place leaves nothing behind (a load leaves when its copy is over), and that is a fault. Waiting for room
        is no question: it is bounded by whoever waits, and ends when the tier breaks.
Rule 3. A store is one call, from its reservation to the end of its transfer: taking room often asks nobody. A transfer is
        cancelled only by whoever bounds it (:meth:`backends.abc.Reservation.transfer`), so that this is a timeout, a fault.
Rule 4. A broken tier is never an error of whoever lets go: what a lease cannot give back is the tier's to give back.
Rule 5. A tier that is not there is broken, and its probe is an attempt to enter it, which is whoever's who keeps it
        (:mod:`offload._engine.keeping`).
Rule 6. All else is the tier's own, and goes through: its blocks as a source, its statistics, what it has beyond the contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from inspect import iscoroutinefunction
from math import inf
from typing import Any, Final

from backends.abc import (
    Deletion,
    Destination,
    Key,
    Outcome,
    ReadLease,
    RemoteTier,
    Reservation,
    Source,
    Tier,
    TierStatistics,
    WhenFull,
)
from backends.pages import Pages

from .._config import BreakerConfig
from .breaker import Call, Health
from .faults import judge_outcomes
from .gate import Gate
from .held import GuardedLease, GuardedReservation
from .witness import DestinationWitness

_DEFAULTS: Final = BreakerConfig()
_NOTHING: Final = TierStatistics(0, 0, 0, 0, 0, 0, 0, 0, 0, {}, 0)


class Guard:
    """What the guards of all tiers share. Made by :func:`guarded` only.

    Attributes:
        name: what errors, logs and statistics call the tier.
        unguarded: the tier itself.
    """

    def __init__(self, tier: Tier | RemoteTier, name: str, breaker: BreakerConfig) -> None:
        """Not to be called: :func:`guarded` knows which kind of guard a tier needs."""
        self.name: str = name
        self.unguarded: Any = tier
        self._config = breaker
        self._gate = Gate(name, breaker)

    def __repr__(self) -> str:
        return f"<{self.name}, {self.health.state.value}: {self.unguarded!r}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "unguarded":  # whoever copies this asks before it is made
            raise AttributeError(name)
        return getattr(self.unguarded, name)

    async def __aenter__(self) -> Any:
        """Enter the tier, where it can be entered."""
        if hasattr(type(self.unguarded), "__aenter__"):
            await self.unguarded.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Leave the tier, where it was entered."""
        if hasattr(type(self.unguarded), "__aexit__"):
            await self.unguarded.__aexit__(*exc)

    @property
    def health(self) -> Health:
        """How the tier is, as far as calls have told."""
        return self._gate.health

    def statistics(self) -> TierStatistics:
        """The tier's own; of one that is not there, nothing."""
        if not self._gate.there:
            return _NOTHING
        statistics: TierStatistics = self.unguarded.statistics()
        return statistics

    # --- reading ----------------------------------------------------------------------------------------------------

    async def pin(self, keys: Sequence[Key], *, within: float = inf) -> ReadLease:
        """Hold the longest prefix of ``keys`` that is there. Cancelled, it holds nothing.

        Args:
            keys: what is wanted, in order.
            within: seconds that lower ``call_timeout`` for this call.

        Raises:
            TierUnavailable: the tier is broken.
            TierTooSlow: no answer within ``call_timeout``, or ``within``.
        """
        lease = await self._gate.call(Call.ASK, min(within, self._config.call_timeout), self.unguarded.pin, keys)
        return GuardedLease(self._gate, lease)

    async def load(self, lease: ReadLease, destination: Destination) -> Sequence[Outcome]:
        """Copy the leased blocks to ``destination``. Cancelled, it leaves only when the copy is over.

        Raises:
            TierUnavailable: the tier is broken; ``destination`` was not touched.
            TierTooSlow: not over within ``load_timeout``. It is over now: the destination is the caller's again.
            Unproven: a copy may still be going on.
        """
        witness = DestinationWitness(destination)
        outcomes: Sequence[Outcome] = await self._gate.call(
            Call.LOAD,
            self._config.load_timeout,
            self.unguarded.load,
            lease.unguarded if isinstance(lease, GuardedLease) else lease,
            witness.as_destination,
            judge=lambda outcomes: judge_outcomes(witness.not_to_blame(outcomes)),
            blameless=witness.is_to_blame,
        )
        return outcomes

    async def delete(self, keys: Sequence[Key], *, within: float = inf) -> list[Deletion]:
        """Forget these keys; a held one stays.

        Args:
            keys: what is to be forgotten.
            within: seconds that lower ``call_timeout`` for this call.

        Raises:
            TierUnavailable: the tier is broken; nothing was forgotten.
            TierTooSlow: no answer within ``call_timeout``, or ``within``; some may be forgotten.
        """
        answers: list[Deletion] = await self._gate.call(
            Call.ASK, min(within, self._config.call_timeout), self.unguarded.delete, keys
        )
        return answers

    # --- writing ----------------------------------------------------------------------------------------------------

    async def reserve(self, keys: Sequence[Key], block_bytes: int, when_full: WhenFull) -> Reservation:
        """Take room for these blocks. Cancelled while it waits, or cut off since the tier breaks meanwhile, it holds nothing.

        Raises:
            TierUnavailable: the tier is broken, or broke while this waited for room.
            TierTooSlow: ``partial`` and ``fail`` never wait for room, and had no answer within ``call_timeout``.
        """
        gate = self._gate
        waits = when_full == "wait" or when_full == "evict"
        turn = await gate.admit()
        if waits and gate.probing:
            # The turn of the probe is not held for as long as others hold the room: whether the tier answers is told at once.
            at_once = await self._reserve(turn, keys, block_bytes, "partial")
            if len(at_once.granted) == len(keys):
                return at_once
            at_once.refuse()
            turn = await gate.admit()
        return await self._reserve(turn, keys, block_bytes, when_full)

    async def _reserve(
        self, turn: int, keys: Sequence[Key], block_bytes: int, when_full: WhenFull
    ) -> GuardedReservation:
        gate, ask = self._gate, self.unguarded.reserve
        try:
            if when_full == "wait" or when_full == "evict":
                reservation = await gate.while_well(ask, keys, block_bytes, when_full)
            else:
                reservation = await gate.in_time(self._config.call_timeout, ask, keys, block_bytes, when_full)
        except BaseException as error:
            gate.leave_by(turn, Call.STORE, error)
            raise
        return GuardedReservation(gate, reservation, turn)

    def reserve_nowait(self, keys: Sequence[Key], block_bytes: int, when_full: WhenFull) -> Reservation:
        """Like :meth:`reserve`, but raises :class:`trio.WouldBlock` instead of waiting."""
        gate = self._gate
        turn = gate.enter()
        try:
            reservation = self.unguarded.reserve_nowait(keys, block_bytes, when_full)
        except BaseException as error:
            gate.leave_by(turn, Call.STORE, error)
            raise
        return GuardedReservation(gate, reservation, turn)

    def narrow(self, asked: Sequence[Key], keys: Sequence[Key]) -> bool:
        """Whoever waits for ``asked`` wants ``keys`` only."""
        narrowed: bool = self.unguarded.narrow(asked, keys)
        return narrowed


class GuardedTier(Guard):
    """A guard of a :class:`~backends.abc.Tier`, which keeps that contract."""

    def contains(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Those of ``keys`` that can be found right now. Never blocks, so it neither probes the tier nor proves it well.

        Raises:
            TierUnavailable: the tier is broken.
        """
        gate = self._gate
        if not gate.closed:
            gate.refuse()
        try:
            found: AbstractSet[Key] = self.unguarded.contains(keys)
        except Exception as error:
            gate.leave_by(gate.breaker.generation, Call.ASK, error)
            raise
        return found


class GuardedRemoteTier(Guard):
    """A guard of a :class:`~backends.abc.RemoteTier`, which keeps that contract."""

    async def contains(self, keys: Sequence[Key], *, within: float = inf) -> AbstractSet[Key]:
        """Those of ``keys`` that could be found when it was asked.

        Args:
            keys: what is asked for.
            within: seconds that lower ``call_timeout`` for this call.

        Raises:
            TierUnavailable: the tier is broken.
            TierTooSlow: no answer within ``call_timeout``, or ``within``.
        """
        found: AbstractSet[Key] = await self._gate.call(
            Call.ASK, min(within, self._config.call_timeout), self.unguarded.contains, keys
        )
        return found


class _AsSource:
    """What the guard of a :class:`~backends.abc.Source` has, too: all of it that tier's own, and no call of other places."""

    unguarded: Any

    @property
    def block_bytes(self) -> int:
        """Size of every block, in bytes."""
        size: int = self.unguarded.block_bytes
        return size

    def upgrade(self, keys: Sequence[Key]) -> list[int]:
        """Weak to strong: see :class:`backends.abc.Source`."""
        guards: list[int] = self.unguarded.upgrade(keys)
        return guards

    def release(self, guards: Sequence[int]) -> None:
        """Drop one count of each guard."""
        self.unguarded.release(guards)

    def views(self, guards: Sequence[int]) -> Pages | None:
        """Where these blocks lie in host memory, if each is one run there."""
        views: Pages | None = self.unguarded.views(guards)
        return views

    def copy_out(self, guards: Sequence[int], pages: Pages) -> None:
        """Copy each block into the page at the same position. Called in a worker thread."""
        self.unguarded.copy_out(guards, pages)


class _GuardedSourceTier(_AsSource, GuardedTier):
    """Of a tier that is a source."""


class _GuardedRemoteSourceTier(_AsSource, GuardedRemoteTier):
    """Of a remote tier that is a source."""


def guarded(
    tier: Tier | RemoteTier, name: str, *, breaker: BreakerConfig = _DEFAULTS
) -> GuardedTier | GuardedRemoteTier:
    """A tier behind a breaker: a broken one is not asked, and says so at once.

    It keeps the contract that the tier keeps: ``contains`` is async where the tier's is, it is a
    :class:`~backends.abc.Source` where the tier is one, entering it enters the tier, and what the tier has beyond the contract
    is found on the guard. :func:`backends.testing.check_tier` holds for it.

    Args:
        tier: of whatever kind. One that has a guard keeps it, with its name and its knobs: it is returned as it is.
        name: what errors, logs and statistics call it.
        breaker: when it counts as broken, how it is tried again, and how long a call may take.
    """
    if isinstance(tier, GuardedTier | GuardedRemoteTier):  # two breakers in a row would hide each other's probes
        return tier
    remote, source = iscoroutinefunction(tier.contains), isinstance(tier, Source)
    if remote:
        return (_GuardedRemoteSourceTier if source else GuardedRemoteTier)(tier, name, breaker)
    return (_GuardedSourceTier if source else GuardedTier)(tier, name, breaker)
