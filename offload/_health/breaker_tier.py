"""A tier behind a circuit breaker, which fails calls while broken.

The contract is the same; a call to a broken tier does not wait for a timeout.

    BreakerTier(tier, "maru") -> pin, contains, load, delete, reserve -> the tier, or TierUnavailable

Rule 1. Every call that reaches the tier acquires a permit of the :mod:`~offload._health.breaker`, and releases it on every
        path; :mod:`~offload._health.faults` gives the verdict. ``contains_nowait`` proves nothing and needs no permit.
Rule 2. No call waits for ever. A question has ``call_timeout``, a load ``load_timeout`` and a second for each 50 MB; then it
        is cancelled, which by the tier's contract leaves nothing behind (a load returns when its copy is over), and counts as
        a fault. Waiting for room is bounded by the caller alone, and ends when the tier breaks.
Rule 3. A store is one call, from its reservation to the end of its transfer: taking room often asks the tier nothing. Only a
        timeout of the caller cancels a transfer (:meth:`backends.abc.Reservation.transfer`), so that is a fault.
Rule 4. Releasing a lease never fails because the tier is broken: the tier itself releases blocks that the lease cannot.
Rule 5. An absent tier counts as broken, and its probe is an attempt to enter it, which the engine makes
        (:mod:`offload._engine.late_tiers`).
Rule 6. All other attributes are the tier's own. Copies out of its source prove nothing about it (a load does), so they need no
        permit.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import inf
from typing import Any, Final, TypeVarTuple

import trio

from backends.abc import (
    Deletion,
    Destination,
    Key,
    Outcome,
    ReadLease,
    Reservation,
    RoomRequest,
    Source,
    Tier,
    TierStatistics,
)
from backends.base.direct import DirectTier
from backends.base.forwarding import ForwardingTier
from maru.exception_groups import holds

from .._config import BreakerConfig
from .attribution import ErrorAttribution
from .breaker import Call, Health, Verdict
from .faults import describe, judge_exception
from .runner import BreakerRunner

Ts = TypeVarTuple("Ts")

_ANSWERED, _FAULT, _SILENT = Verdict
_DEFAULTS: Final = BreakerConfig()
_NOTHING: Final = TierStatistics(0, 0, 0, 0, 0, 0, 0, 0, 0, {}, 0)
_log = logging.getLogger("offload.health")


def with_breaker(tier: Tier, name: str, *, breaker: BreakerConfig = _DEFAULTS) -> BreakerTier:
    """Put a breaker, which fails calls while broken, before a tier.

    The result keeps the contract of the tier and has its abilities; entering it enters the tier, and its other attributes are
    the tier's.
    :func:`backends.testing.check_tier` holds for it.

    Args:
        tier: a tier of any kind. One that has a breaker already is returned unchanged, with its name and its settings.
        name: the tier's name in errors, logs and statistics.
        breaker: when the tier counts as broken, how it is tried again, and how long a call may take.
    """
    # With two breakers in a row each would hide the other's probes.
    return tier if isinstance(tier, BreakerTier) else BreakerTier(tier, name, breaker)


class BreakerTier(ForwardingTier):
    """A tier behind a circuit breaker. Made by :func:`with_breaker`.

    Attributes:
        name: the tier's name in errors, logs and statistics.
        inner: the tier itself.
    """

    name: str = ""

    def __init__(self, tier: Tier, name: str, breaker: BreakerConfig) -> None:
        """Use :func:`with_breaker` instead.

        It keeps the breaker of a tier that has one.
        """
        super().__init__(tier)
        self.name = name
        self._config = breaker
        self._runner = BreakerRunner(name, breaker)
        # Else a tier that is back waits for the end of a wait that has doubled while it was gone.
        tier.tell_when_back(self._runner.hasten)
        self._counted, self._is_mute = _NOTHING, False

    def __repr__(self) -> str:
        return f"<{self.name}, breaker {self.health.state.value}: {self.inner!r}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":  # `copy.copy` looks these up before `__init__` has run
            raise AttributeError(name)
        return getattr(self.inner, name)

    def replace_breaker(self, before: BreakerConfig, after: BreakerConfig) -> None:
        """Replace the settings from the next call on, if ``before`` still holds.

        A wait that has begun keeps its length.
        """
        if self._config is before:
            self._config = self._runner.config = self._runner.breaker.config = after

    @property
    def health(self) -> Health:
        """The state of the breaker after the last call."""
        return self._runner.health

    def statistics(self) -> TierStatistics:
        """Return the tier's statistics; zeros while the tier is absent.

        The last ones if it raises.
        """
        if not self._runner.is_available:
            return _NOTHING
        try:
            self._counted = super().statistics()
            self._is_mute = False
        except Exception as error:  # it is asked each second, by tasks that all engines of a daemon need
            if not self._is_mute:
                self._is_mute = True
                _log.warning("%s has no statistics now: %s", self.name, describe(error))
        return self._counted

    # --- reading ----------------------------------------------------------------------------------------------------

    async def contains(self, keys: Sequence[Key], *, within: float = inf, hurried: bool = False) -> AbstractSet[Key]:
        """Those of ``keys`` that the tier had when it was asked.

        Args:
            keys: any number of keys.
            within: seconds; lowers ``call_timeout`` for this call.
            hurried: no answer within a lowered ``call_timeout`` is no fault.

        Raises:
            TierUnavailable: the tier is broken.
            TierTooSlow: no answer within ``call_timeout``, or ``within``.
        """
        found: AbstractSet[Key] = await self._ask(within, hurried, self.inner.contains, keys)
        return found

    def contains_nowait(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Return those of ``keys`` that are known to be there.

        Never blocks, so it neither probes the tier nor proves that it works.

        Raises:
            TierUnavailable: the tier is broken.
        """
        runner = self._runner
        if not runner.is_closed:
            runner.raise_unavailable()
        try:
            found: AbstractSet[Key] = self.inner.contains_nowait(keys)
        except Exception as error:
            runner.release_with(runner.breaker.generation, Call.ASK, error)
            raise
        return found

    async def pin(self, keys: Sequence[Key], *, within: float = inf, hurried: bool = False) -> ReadLease:
        """Pin the longest prefix of ``keys`` that is there.

        Cancelled, it pins nothing.

        Args:
            keys: the keys, in order.
            within: seconds; lowers ``call_timeout`` for this call.
            hurried: no answer within a lowered ``call_timeout`` is no fault.

        Raises:
            TierUnavailable: the tier is broken.
            TierTooSlow: no answer within ``call_timeout``, or ``within``.
        """
        return BreakerLease(self._runner, await self._ask(within, hurried, self.inner.pin, keys))

    async def load(self, lease: ReadLease, destination: Destination) -> Sequence[Outcome]:
        """Copy the leased blocks to ``destination``.

        Cancelled, it returns only when the copy is over.

        Raises:
            TierUnavailable: the tier is broken; ``destination`` was not touched.
            TierTooSlow: not over within its time (:meth:`time_to_load`). It is over now: ``destination`` may be used.
            Unproven: a copy may still be going on.
        """
        attribution = ErrorAttribution()
        outcomes: Sequence[Outcome] = await self._runner.run(
            Call.LOAD,
            self.time_to_load(len(lease.keys) * destination.block_bytes),
            self.inner.load,
            lease.bare,
            attribution.observe_destination(destination),
            attribution=attribution,
        )
        return outcomes

    async def delete(self, keys: Sequence[Key], *, within: float = inf, hurried: bool = False) -> list[Deletion]:
        """Delete these keys, except pinned ones. Returns one answer per key.

        Args:
            keys: the keys to delete.
            within: seconds; lowers ``call_timeout`` for this call.
            hurried: no answer within a lowered ``call_timeout`` is no fault.

        Raises:
            TierUnavailable: the tier is broken; nothing was deleted.
            TierTooSlow: no answer within ``call_timeout``, or ``within``; some may be deleted.
        """
        answers: list[Deletion] = await self._ask(within, hurried, self.inner.delete, keys)
        return answers

    async def _ask(
        self, within: float, hurried: bool, ask: Callable[[Sequence[Key]], Awaitable[Any]], keys: Sequence[Key]
    ) -> Any:
        usual = self._config.call_timeout
        return await self._runner.run(Call.ASK, min(within, usual), ask, keys, hurried=hurried and within < usual)

    # --- reading in the caller's thread -----------------------------------------------------------------------------

    @property
    def direct(self) -> DirectTier | None:
        """The tier, if other threads may read it: see :mod:`backends.base.direct`."""
        return self.inner.direct

    def permit_from_thread(self, now: float) -> int | None:
        """Return a permit to call :attr:`direct` in another thread.

        ``None`` if the trio thread may make a probe.

        Raises:
            TierUnavailable: the tier is broken.
        """
        return self._runner.permit_from_thread(now)

    def pin_from_thread(self, keys: Sequence[Key]) -> ReadLease | None:
        """Pin the longest present prefix, as :attr:`direct` does."""
        lease = None if self.direct is None else self.direct.pin_from_thread(keys)
        return None if lease is None else BreakerLease(self._runner, lease)

    def note_answered(self, permit: int, call: Call) -> None:
        """Release a permit of another thread, whose call was answered.

        In the trio thread.
        """
        self._runner.release(permit, call, _ANSWERED)

    def time_to_load(self, copied_bytes: int) -> float:
        """Return the time limit of a load of this size, in seconds."""
        return self._config.time_to_load(copied_bytes)

    # --- writing ----------------------------------------------------------------------------------------------------

    async def reserve(self, request: RoomRequest) -> Reservation:
        """Take room for the blocks of a request.

        If it is cancelled, or the tier breaks meanwhile, it holds nothing.

        Raises:
            TierUnavailable: the tier is broken, or broke while this waited for room.
            TierTooSlow: ``partial`` or ``fail``, which never wait for room, had no answer within ``call_timeout``.
        """
        runner = self._runner
        permit = await runner.acquire()
        if request.waits and runner.is_probing:
            # The probe's permit must not be held while others hold the room, or no other probe could go. So the probe is a
            # request that never waits: it shows at once whether the tier answers, and "full" is an answer too.
            at_once = await self._reserve(permit, RoomRequest(request.keys, request.block_bytes, "partial"))
            if len(at_once.granted) == len(request.keys):
                return at_once
            at_once.release(_ANSWERED)
            permit = await runner.acquire()
        return await self._reserve(permit, request)

    async def _reserve(self, permit: int, request: RoomRequest) -> BreakerReservation:
        runner, ask = self._runner, self.inner.reserve
        try:
            if request.waits:
                reservation = await runner.run_until_broken(ask, request)
            else:
                reservation = await runner.run_within(self._config.call_timeout, ask, request)
        except BaseException as error:
            runner.release_with(permit, Call.STORE, error)
            raise
        return BreakerReservation(runner, reservation, permit)

    def reserve_nowait(self, request: RoomRequest) -> Reservation:
        """Like :meth:`reserve`, but raises :class:`trio.WouldBlock` instead of waiting."""
        runner = self._runner
        permit = runner.acquire_nowait()
        try:
            reservation = self.inner.reserve_nowait(request)
        except BaseException as error:
            runner.release_with(permit, Call.STORE, error)
            raise
        return BreakerReservation(runner, reservation, permit)

    @property
    def may_store_at_once(self) -> bool:
        """Whether the tier overrides :meth:`stores_at_once`, and so may return true."""
        return self.direct is not None and type(self.direct).stores_at_once is not DirectTier.stores_at_once

    def tell_time_by(self, clock: trio.abc.Clock) -> None:
        """Set the clock for verdicts in threads that store at once.

        It is that of the engine's run; such a thread has no run.
        """
        self._runner.clock = clock

    def stores_at_once(self, n: int, block_bytes: int) -> bool:
        """Whether a store waits for nothing and wakes no task; see :meth:`backends.base.direct.DirectTier.stores_at_once`."""
        direct, runner = self.direct, self._runner
        return direct is not None and runner.wakes_nobody and direct.stores_at_once(n, block_bytes)


class BreakerLease(ReadLease):
    """A lease on blocks of a tier behind a breaker: rule 4.

    Attributes:
        bare: the lease of the tier.
        keys: the pinned keys.
    """

    __slots__ = ("_runner", "bare", "keys")

    def __init__(self, runner: BreakerRunner, bare: ReadLease) -> None:
        self._runner = runner
        self.bare: ReadLease = bare
        self.keys: Sequence[Key] = bare.keys

    def __repr__(self) -> str:
        return f"<{self._runner.name}: {self.bare!r}>"

    def forget(self, positions: Sequence[int]) -> bool:
        """Drop the damaged blocks at these positions."""
        return self.bare.forget(positions)

    def release_nowait(self) -> bool:
        """Release the blocks if that waits for nothing. Return whether it has."""
        try:
            return self.bare.release_nowait()
        except Exception:  # :meth:`release` meets and logs the error: rule 4
            return False

    def release_from_thread(self) -> bool:
        """Release the blocks if any thread may. Return whether it has."""
        return self.bare.release_from_thread()

    async def release(self) -> None:
        """Release the blocks. Idempotent; they are released also when cancelled."""
        await self._release(self.bare.release)

    async def __aenter__(self) -> BreakerLease:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if not self.release_nowait():  # a scope and its deadline cost more than such a release
            await self._release(self.bare.__aexit__, *exc)

    async def _release(self, release: Callable[[*Ts], Awaitable[None]], *args: *Ts) -> None:
        """Release without a permit, whatever the tier's health.

        A release must neither be refused nor be the probe.
        """
        runner = self._runner
        try:
            await runner.run_within(runner.config.call_timeout, release, *args)
        except Exception as error:
            # No error is raised: the caller could not do more, and goes on to release its other leases.
            if judge_exception(error) is _FAULT and runner.is_closed:
                runner.release_with(runner.breaker.generation, Call.ASK, error)
            _log.warning("%s could not release a lease: %s", runner.name, describe(error))


class BreakerReservation(Reservation):
    """Room in a tier behind a breaker.

    Its permit ends with the transfer, or with the release if there is none: rule 3.

    Attributes:
        inner: the reservation of the tier.
    """

    __slots__ = ("_permit", "_runner", "inner")

    def __init__(self, runner: BreakerRunner, inner: Reservation, permit: int) -> None:
        self._runner = runner
        self.inner: Reservation = inner
        self._permit: int | None = permit

    def __repr__(self) -> str:
        return f"<{self._runner.name}: {self.inner!r}>"

    @property
    def granted(self) -> Sequence[Key]:
        """The keys there is room for."""
        return self.inner.granted

    def keep(self, keys: Sequence[Key]) -> None:
        """Give back the room of every granted key not in ``keys``."""
        self.inner.keep(keys)

    def note_depths(self, depths: Mapping[Key, int]) -> None:
        """Pass on the depths of these blocks."""
        self.inner.note_depths(depths)

    def hold(self) -> None:
        """Have the stored blocks held until the release."""
        self.inner.hold()

    async def transfer(self, source: Source, refs: Sequence[int]) -> Sequence[Outcome]:
        """Copy the kept blocks and publish them.

        Raises:
            TierUnavailable: the tier broke since the room was taken; nothing was copied.
        """
        runner, permit = self._runner, self._permit
        self._permit = None
        outcomes: Sequence[Outcome]
        if permit is None:  # a second call, which the tier itself refuses
            outcomes = await self.inner.transfer(source, refs)
            return outcomes
        if permit != runner.breaker.generation and not runner.is_closed:
            runner.raise_unavailable()
        attribution = ErrorAttribution()
        verdict, cause = _SILENT, ""
        try:
            outcomes = await self.inner.transfer(attribution.observe_source(source), refs)
            verdict, cause = attribution.judge_outcomes(outcomes)
            return outcomes
        except Exception as error:
            verdict, cause = attribution.judge_exception(error)
            raise
        except BaseException as error:
            if holds(error, trio.Cancelled):  # alone, or in a group if the tier copies in a nursery
                verdict, cause = _FAULT, "no end of a copy within its time"
            raise
        finally:
            runner.release(permit, Call.STORE, verdict, cause)

    def release(self, verdict: Verdict = _SILENT) -> None:
        """Give back the room that was not published. Idempotent.

        Args:
            verdict: the proof that unused room gives about the tier.
        """
        permit, self._permit = self._permit, None
        self.inner.release()
        if permit is not None:
            self._runner.release(permit, Call.STORE, verdict)
