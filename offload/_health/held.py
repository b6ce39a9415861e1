"""What a guarded tier gives out: a lease, and a reservation with the turn that ends with it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVarTuple

import trio

from backends.abc import Key, Outcome, ReadLease, Reservation, Source
from maru.exception_groups import holds

from .breaker import Call, Verdict
from .faults import describe, judge_exception, judge_outcomes
from .gate import Gate
from .witness import SourceWitness

Ts = TypeVarTuple("Ts")

_ANSWERED, _FAULT, _SILENT = Verdict
_log = logging.getLogger("offload.health")


class _Held:
    """Something of a tier's, and the gate it came through. What it has beyond its contract is found on it as well."""

    __slots__ = ("_gate", "_inner")

    def __init__(self, gate: Gate, inner: Any) -> None:
        self._gate = gate
        self._inner = inner

    def __repr__(self) -> str:
        return f"<{self._gate.name}: {self._inner!r}>"

    def __getattr__(self, name: str) -> Any:
        if name in _Held.__slots__:  # whoever copies this asks before it is made
            raise AttributeError(name)
        return getattr(self._inner, name)


class GuardedLease(_Held):
    """A hold on blocks of a guarded tier."""

    __slots__ = ()

    @property
    def keys(self) -> Sequence[Key]:
        """What is held."""
        keys: Sequence[Key] = self._inner.keys
        return keys

    @property
    def unguarded(self) -> ReadLease:
        """The tier's own lease."""
        lease: ReadLease = self._inner
        return lease

    async def release(self) -> None:
        """Let go. Idempotent; it has let go even when cancelled."""
        await self._let_go(self._inner.release)

    async def __aenter__(self) -> GuardedLease:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._let_go(self._inner.__aexit__, *exc)

    async def _let_go(self, let_go: Callable[[*Ts], Awaitable[None]], *args: *Ts) -> None:
        """Whatever the tier's health, and without probing it. A fault is counted where everybody may ask, and not passed on."""
        gate = self._gate
        try:
            await gate.in_time(gate.config.call_timeout, let_go, *args)
        except Exception as error:
            if judge_exception(error) is not _FAULT:
                raise
            if gate.closed:
                gate.leave_by(gate.breaker.generation, Call.ASK, error)
            _log.warning("%s could not let go of a lease: %s", gate.name, describe(error))


class GuardedReservation(_Held):
    """Room in a guarded tier. Its turn ends with the transfer or, where there is none, with the release."""

    __slots__ = ("_turn",)

    def __init__(self, gate: Gate, inner: Reservation, turn: int) -> None:
        super().__init__(gate, inner)
        self._turn: int | None = turn

    @property
    def granted(self) -> Sequence[Key]:
        """The keys there is room for."""
        granted: Sequence[Key] = self._inner.granted
        return granted

    def keep(self, keys: Sequence[Key]) -> None:
        """Give back the room of every granted key not in ``keys``."""
        self._inner.keep(keys)

    async def transfer(self, source: Source, guards: Sequence[int]) -> Sequence[Outcome]:
        """Copy the kept blocks and publish them.

        Raises:
            TierUnavailable: the tier broke since the room was taken; nothing was copied.
        """
        gate, turn = self._gate, self._turn
        self._turn = None
        if turn is None:  # a second time, which is the tier's to refuse
            return await self._transfer(source, guards)
        if turn != gate.breaker.generation and not gate.closed:
            gate.refuse()
        witness = SourceWitness(source)
        verdict, cause = _SILENT, ""
        try:
            outcomes = await self._transfer(witness.as_source, guards)
            verdict, cause = judge_outcomes(witness.not_to_blame(outcomes))
            return outcomes
        except Exception as error:
            if not witness.is_to_blame(error):
                verdict, cause = judge_exception(error), describe(error)
            raise
        except BaseException as error:
            if holds(error, trio.Cancelled):  # alone, or in a group where the tier copies in a nursery
                verdict, cause = _FAULT, "no end of a copy within its time"
            raise
        finally:
            gate.leave(turn, Call.STORE, verdict, cause)

    def release(self) -> None:
        """Give back the room of what was not published. Idempotent; unused, it says nothing about the tier."""
        self._end(_SILENT)

    def refuse(self) -> None:
        """The same of what a tier has granted too little of: that it is full is an answer."""
        self._end(_ANSWERED)

    async def _transfer(self, source: Source, guards: Sequence[int]) -> Sequence[Outcome]:
        outcomes: Sequence[Outcome] = await self._inner.transfer(source, guards)
        return outcomes

    def _end(self, verdict: Verdict) -> None:
        turn, self._turn = self._turn, None
        self._inner.release()
        if turn is not None:
            self._gate.leave(turn, Call.STORE, verdict)
