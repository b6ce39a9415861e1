"""The cancellation token: one cancellation for containers of several pipelines.

P2: each container carries its own cancellation from enqueue on, its gate. A token passed at enqueue is a second way to
that gate: cancelling the token requests the cancel of every container that has it, as ``handle.request_cancel()`` does
for one.

Rule 1. A container joins the token when it is enqueued, and leaves it when it settles: a token holds nothing that has
        ended.
Rule 2. A token is cancelled once and for good. A container enqueued with it afterwards settles as CANCELLED at once,
        and no policy is asked.
Rule 3. ``cancel()`` returns when all members of that moment have settled. So it promises for each of them the same as
        ``handle.cancel()`` for one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import attrs
import trio

from .._errors import DrainUnproven


class _Member(Protocol):
    """A token's member: a container, or the scope of a waiting enqueue."""

    def cancel(self) -> None: ...


class _Settlement(Protocol):
    awaited_confirmations: int

    def announce_cancel(self, container: Any) -> None: ...


@attrs.define(eq=False)
class Confirmation:
    """The wait of one call of ``cancel()``."""

    remaining: set[_Member]
    """Members that have not left yet."""
    unproven: list[DrainUnproven] = attrs.Factory(list)
    """Errors of members that left with an unproven copy."""
    over: trio.Event = attrs.Factory(trio.Event)

    def note(self, member: _Member, error: BaseException | None) -> None:
        """Record that a member has left, with its error, if any."""
        if member in self.remaining:
            self.remaining.discard(member)
            if isinstance(error, DrainUnproven):
                self.unproven.append(error)
            if not self.remaining:
                self.over.set()


class CancellationToken:
    """A cancellation that is shared by any number of containers.

    Pass it to ``enqueue(..., cancel_token=token)``, any number of times. For one trio run; a thread without trio uses
    :class:`offload.from_thread.CancellationToken`.
    """

    __slots__ = ("_called", "_confirmations", "_members")

    def __init__(self) -> None:
        self._called = False
        # Each member with the settlement of its pipeline, or None for an enqueue that waits for room. A dict keeps the
        # order of enqueue.
        self._members: dict[_Member, _Settlement | None] = {}
        self._confirmations: list[Confirmation] = []

    def __repr__(self) -> str:
        return f"<CancellationToken: {'cancelled' if self._called else 'not cancelled'}, {len(self._members)} inside>"

    def __len__(self) -> int:
        """Return the number of members that have not ended.

        Members are containers, and enqueues that wait for room.
        """
        return len(self._members)

    def __bool__(self) -> bool:
        """Return true: a token without containers is a token."""
        return True

    @property
    def cancel_called(self) -> bool:
        """Whether a cancellation was requested."""
        return self._called

    def request_cancel(self) -> None:
        """Request the cancellation of all containers that have the token.

        It does not wait, and is idempotent. Containers that are not committed end as CANCELLED; the copies of the
        others drain.
        """
        self._called = True
        # A copy: a parked container settles, and so leaves, within this call; an observer may enqueue another.
        for member, settlement in list(self._members.items()):
            if member in self._members:
                _cancel(member, settlement)

    async def cancel(self) -> None:
        """Cancel all containers that have the token, and await confirmation.

        When it returns, no block of any of them is referenced, reserved or in flight. Any number of callers may wait; a
        caller that is itself cancelled leaves the request in effect. Always a checkpoint.

        Raises:
            DrainUnproven: the end of one copy could not be proven in time; its blocks and memory are quarantined.
            ExceptionGroup: of DrainUnproven, one for each such container, if there are several.
        """
        # Before the request, which makes some of them leave at once: they count as confirmed, too.
        settlements = {settlement for settlement in self._members.values() if settlement is not None}
        confirmation = Confirmation(set(self._members))
        self._confirmations.append(confirmation)
        for settlement in settlements:
            settlement.awaited_confirmations += 1
        try:
            self.request_cancel()
            if confirmation.remaining:
                await confirmation.over.wait()
            else:
                await trio.lowlevel.checkpoint()
        finally:
            self._confirmations.remove(confirmation)
            for settlement in settlements:
                settlement.awaited_confirmations -= 1
        unproven = [_again(error) for error in confirmation.unproven]
        if len(unproven) == 1:
            raise unproven[0]
        if unproven:
            raise ExceptionGroup("the end of several copies could not be proven", unproven)

    # -- for the pipeline ----------------------------------------------------------------------------------------------

    def join(self, member: _Member, settlement: _Settlement | None) -> None:
        """Add a container (with its settlement) or a scope.

        If the token is cancelled, the member is cancelled at once.
        """
        self._members[member] = settlement
        if self._called:
            _cancel(member, settlement)

    def leave(self, member: _Member, error: BaseException | None) -> None:
        """Remove a member that has ended, with its error, if any.

        Called once all its resources are released.
        """
        if member in self._members:
            del self._members[member]
            for confirmation in list(self._confirmations):
                confirmation.note(member, error)

    @contextmanager
    def scope(self) -> Iterator[trio.CancelScope]:
        """Open a scope that is cancelled with the token.

        It is for a wait that has no container yet.
        """
        with trio.CancelScope() as scope:
            self.join(scope, None)
            try:
                yield scope
            finally:
                self.leave(scope, None)


def _cancel(member: _Member, settlement: _Settlement | None) -> None:
    if settlement is not None:
        settlement.announce_cancel(member)
    member.cancel()


def _again(error: DrainUnproven) -> DrainUnproven:
    """Return a copy of the error.

    One exception that is raised in several tasks collects the frames of all of them.
    """
    again = DrainUnproven(*error.args)
    again.__cause__ = error
    return again
