"""Requests that are not answered yet, and the making of their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import attrs
import trio

from backends.abc import LOADED, Failed, Key, Missed, Outcome

from .._engine import LoadResult
from .._errors import DrainUnproven
from .._pipeline.lifecycle import Status
from .._pipeline.result import TransferResult
from ..abc import Precondition
from ._messages import Loaded, Stored, StoreStatus, cut, cut_all
from ._quotas import REASON, Account
from ._sessions import Session


@attrs.define(eq=False)
class UnderWay:
    """A request without an answer."""

    session: Session
    seq: int
    cancel: Callable[[], None]
    """Requests its end. Idempotent; does not wait."""
    cache: int = 0
    """The cache whose blocks it reads or writes."""
    cancel_token: int = 0
    signal: EngineSignal | None = None
    """Precondition of a store."""
    keys: Sequence[Key] = ()
    """Keys of a store, as they are stored."""
    account: Account | None = None
    """Account that a store's blocks count against."""
    coming: Sequence[Key] = ()
    """Its keys that count there until it has ended."""
    refused: Sequence[int] = ()
    """Positions of the blocks that did not fit there."""
    waiting: int = 0
    """Blocks that count as waiting for the signal."""
    over: trio.Event = attrs.field(factory=trio.Event)
    unproven: bool = False
    """Whether a copy may still be running, once it is over."""


class EngineSignal(Precondition):
    """A precondition that its engine reports as fulfilled, or as failed."""

    def __init__(self) -> None:
        self._reported = trio.Event()
        self._failed = ""

    def report(self, failed: str) -> None:
        """Record the engine's report; the first one counts."""
        if not self._reported.is_set():
            self._failed = failed
            self._reported.set()

    async def wait_reported(self) -> None:
        """Wait until the engine has reported, either way."""
        await self._reported.wait()

    def is_set(self) -> bool:
        """Return whether it is fulfilled."""
        return self._reported.is_set() and not self._failed

    async def wait(self) -> None:
        """Wait for the engine.

        Raises:
            RuntimeError: it reported that it never will be fulfilled.
        """
        await self._reported.wait()
        if self._failed:
            raise RuntimeError(f"reported by its engine: {self._failed}")

    @property
    def passive(self) -> bool:
        """True: waiting runs no code of the engine's."""
        return True


def stored(seq: int, epoch: int, keys: Sequence[Key], result: TransferResult, refused: Sequence[int] = ()) -> Stored:
    """Return the answer to a store; a quota has refused some positions."""
    status: StoreStatus = "unproven" if isinstance(result.error, DrainUnproven) else _STATUS[result.status]
    error = "" if result.error is None else f"{type(result.error).__name__}: {result.error}"
    failed = {key: f"{type(why).__name__}: {why}" for key, why in result.failed.items()}
    filtered = _at(keys, result.filtered) + [(at, REASON) for at in refused]
    unstored = _at(keys, failed)
    return Stored(seq, epoch, status, cut_all(filtered, len(unstored)), cut_all(unstored, len(filtered)), cut(error))


_STATUS: Final[Mapping[Status, StoreStatus]] = {
    Status.COMPLETE: "complete",
    Status.CANCELLED: "cancelled",
    Status.FAILED: "failed",
}


def _at(keys: Sequence[Key], reasons: Mapping[Key, str]) -> list[tuple[int, str]]:
    return [(at, reasons[key]) for at, key in enumerate(keys) if key in reasons] if reasons else []


def loaded(seq: int, epoch: int, result: LoadResult) -> Loaded:
    """Return the answer to a load."""
    if result.loaded == len(result.outcomes):
        return Loaded(seq, epoch, result.loaded, [], [], unproven=False)
    missed: list[tuple[int, str]] = []
    failed: list[tuple[int, str]] = []
    for at, outcome in enumerate(result.outcomes):
        if outcome == LOADED:
            continue
        (missed if isinstance(outcome, Missed) else failed).append((at, _reason(outcome)))
    return Loaded(seq, epoch, result.loaded, cut_all(missed, len(failed)), cut_all(failed, len(missed)), unproven=False)


def _reason(outcome: Outcome) -> str:
    if isinstance(outcome, Failed):
        return f"{type(outcome.error).__name__}: {outcome.error}"
    return outcome.reason if isinstance(outcome, Missed) else str(outcome)
