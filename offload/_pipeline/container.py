"""The container, a pipeline's unit of work, and the batch, a slot's.

P1: a container is cancelled whole or not at all: its phase is one value for all of its blocks.
P2: a container carries its own cancellation from enqueue on: the phase, and the scope or the holder that it has right
now.
P4: the last sweep comes right before the upgrade: :meth:`OffloadBatch.sweep_cancelled`.
P5: after the upgrade a batch is one flat list of blocks, in which each container owns a span.

A container is always in exactly one place: a task waits on its behalf (``cancel_scope`` is the scope that this wait is
in); or a channel has it parked, or a slot owns its batch (that is its ``holder``); or, with neither, a stage steps it
synchronously. When the gate closes, the scope is cancelled, or the holder takes the container out, and it settles. So a
cancel is O(1).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import attrs
import trio

from backends.abc import EVICTED, Key, Source

from .._errors import DestinationFull
from .lifecycle import GATE, IllegalMove, Phase, Request, Status

if TYPE_CHECKING:
    from trio_util import AsyncValue

    from backends.abc import Blocks

    from ..abc import Precondition
    from .cancellation import CancellationToken
    from .offer import Offer
    from .result import TransferResult

_log = logging.getLogger("offload.pipeline")
_OPEN, _COMMITTED = Phase.OPEN, Phase.COMMITTED
_IF_CANCELLED, _IF_FAILED = GATE[_OPEN][Request.CANCEL], GATE[_OPEN][Request.FAIL]
_NOTHING: Mapping[Key, str] = MappingProxyType({})
_NO_FAILURES: Mapping[Key, BaseException] = MappingProxyType({})


class Holder(Protocol):
    """The channel that parks a container, or the slot of its batch."""

    def withdraw(self, container: OffloadContainer) -> None:
        """Settle the container, whose gate has just closed. Synchronous.

        The gate closed because the container was cancelled, or failed.
        """


@attrs.define(eq=False, repr=False)
class OffloadContainer:
    """The blocks of one enqueue, their precondition, and their cancel token."""

    number: int
    """The container's number, counted up within a pipeline from 1."""
    blocks: Blocks
    """The blocks as enqueued."""
    precondition: Precondition | None
    """The condition for reading the bytes; ``None``: now."""
    keys: Sequence[Key]
    """The keys still to transfer.

    First all, then those that passed the policies, then those that were upgraded.
    """
    phase: Phase = _OPEN
    """The commit gate. See :mod:`offload._pipeline.lifecycle`."""
    status: Status = Status.EVALUATING
    """The status that the handle shows."""
    holder: Holder | None = None
    """The channel or slot that takes it out when the gate closes."""
    cancel_scope: trio.CancelScope | None = None
    """The scope of the task that waits for the container, if any.

    A new one for each wait, since a scope can be entered once only.
    """
    deadline: float = 0.0
    """The end of its part in a shared wait, on trio's clock."""
    ready_at: float = 0.0
    """The time when it became ready for a batch, on trio's clock."""
    evaluated: bool = False
    """Whether the policies have answered."""
    announced: bool = False
    """Whether its commit was announced to the observers."""
    marked: bool = False
    """Whether ``keys`` are marked as pending at the destination."""
    filtered: Mapping[Key, str] = _NOTHING
    """Filtered blocks, each with its reason.

    A policy, a pending mark or an overflow filtered them.
    """
    completed: Sequence[Key] = ()
    """Blocks that are in the destination now."""
    failed: Mapping[Key, BaseException] = _NO_FAILURES
    """Blocks whose transfer failed or was rejected, with the error."""
    evicted: Sequence[Key] = ()
    """Weak blocks that were gone at the upgrade."""
    error: BaseException | None = None
    """The error because of which the whole container failed."""
    lease: Callable[[], None] | None = None
    """The function that releases its locks and holds (:meth:`hold`)."""
    onward: Sequence[Blocks] = ()
    """The stored blocks, held at the destination once for each route.

    The routes are those of the chain. Weak if the destination has to be asked to hold them. Empty once the routes have
    them.
    """
    routes: Mapping[str, TransferResult] | None = None
    """The results of the chain's required routes, by pipeline."""
    offers: Sequence[Offer] = ()
    """The offers of stored blocks to routes that are not required."""
    cancel_token: CancellationToken | None = None
    """The token it was enqueued with, if any.

    It leaves the token when it settles.
    """
    confirmed: trio.Event | None = None
    """An event that is set once it has settled.

    Made when a task waits.
    """
    watch: AsyncValue[Status] | None = None
    """The status as a value that tasks can wait on.

    Made when it is first used.
    """

    def __repr__(self) -> str:
        return f"<OffloadContainer {self.number}: {len(self.blocks)} blocks, {self.status.value}>"

    def move(self, status: Status) -> None:
        """Change the status.

        Raises:
            IllegalMove: no arrow of the transition table leads there; nothing was changed.
        """
        if status not in self.status.next:
            raise IllegalMove(f"{self!r} cannot become {status.value}")
        self.status = status
        if self.watch is not None:
            try:
                self.watch.value = status
            except Exception:  # setting it calls the predicates of the tasks that wait
                _log.exception("a predicate on the status of %r raised", self)

    def cancel(self) -> None:
        """Request a cancellation of the gate.

        If the gate is open, the container ends as CANCELLED.
        """
        self._close(_IF_CANCELLED)

    def fail(self, error: BaseException) -> None:
        """Request a failure of the gate.

        If the gate is open, the container ends as FAILED with this error.
        """
        if self.phase is _OPEN:
            self.error = error
        self._close(_IF_FAILED)

    def abandon(self, error: BaseException) -> None:
        """Fail the container, committed or not.

        The blocks still to copy have failed. A cancelled container stays cancelled.
        """
        self.fail(error)
        if self.phase is _COMMITTED:  # after the upgrade, or a route of a chain, committed when it was enqueued
            self.error = error
            ended = {*self.completed, *self.failed}
            self.failed = {**self.failed, **{key: error for key in self.keys if key not in ended}}

    def _close(self, phase: Phase) -> None:
        if self.phase is not _OPEN or self.status.terminal:
            return
        # The phase first: it is the truth, by which the tasks woken below decide. The scope is only the wake-up.
        self.phase = phase
        if self.cancel_scope is not None:
            self.cancel_scope.cancel()
        elif self.holder is not None:
            self.holder.withdraw(self)

    def claim(self) -> bool:
        """Request the commit of the gate.

        Returns True if it is committed, False if it was cancelled or failed before.
        """
        self.phase = phase = GATE[self.phase][Request.CLAIM]
        return phase is _COMMITTED

    def filter(self, reasons: Mapping[Key, str]) -> None:
        """Filter these blocks, each with its reason."""
        if reasons:
            self.keys = [key for key in self.keys if key not in reasons]
            self.filtered = {**self.filtered, **reasons}

    def hold(self, release: Callable[[], None]) -> None:
        """Have ``release`` called at the end of this container.

        It is called before the end is published, and must not raise.
        """
        lease = self.lease

        def release_all() -> None:
            release()
            if lease is not None:
                lease()

        self.lease = release_all

    def after_offers(self, call: Callable[[], None]) -> None:
        """Call a function when the optional routes have ended their offers.

        Those are the routes that are not required. The call may be made now.
        """
        left = len(self.offers)
        if not left:
            call()
            return

        def one_ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                call()

        for offer in self.offers:
            offer.when_ended(one_ended)

    def refs_of(self, keys: Sequence[Key]) -> list[int]:
        """Return the refs of some of this container's blocks.

        Weak blocks are upgraded, one counted ref each.
        """
        refs = self.blocks.refs
        if refs is None:
            return self.blocks.source.upgrade(keys)
        if len(keys) == len(refs):
            return refs
        by_key = dict(zip(self.blocks.keys, refs, strict=True))
        return [by_key[key] for key in keys]


@attrs.define(eq=False)
class FlatBlocks:
    """The blocks of a batch after the upgrade, as columns.

    Each container owns the next ``sizes[i]`` rows.
    """

    containers: list[OffloadContainer]
    """The containers with at least one block to transfer."""
    sizes: list[int]
    """The number of blocks of each container here."""
    keys: list[Key]
    """The key of each block."""
    refs: list[int]
    """The ref of each block: its place in the source."""
    held: Sequence[int]
    """The refs that the upgrade took, to be released after the copy."""
    dropped: Sequence[Key] = ()
    """Blocks that dropped out of the batch.

    They were evicted, or the destination had no room for them.
    """


@attrs.define(eq=False)
class OffloadBatch:
    """Containers that leave together.

    Each can be cancelled on its own until it is claimed.
    """

    containers: list[OffloadContainer]
    """The containers, in the order in which they became ready."""
    keys: list[Key] = attrs.Factory(lambda batch: _keys_of(batch.containers), takes_self=True)
    """The keys of all containers, in order."""

    def keep(self, containers: list[OffloadContainer], keys: list[Key] | None = None) -> None:
        """Reduce the batch to these containers.

        ``keys`` are theirs, if the caller has them already.
        """
        self.containers = containers
        self.keys = _keys_of(containers) if keys is None else keys

    def sweep_cancelled(self) -> list[OffloadContainer]:
        """Take out, and return, the containers whose gate has closed.

        They are not settled yet.
        """
        swept = [container for container in self.containers if not container.phase.proceeds]
        if swept:
            self.keep([container for container in self.containers if container.phase.proceeds])
        return swept

    def claim(self) -> list[OffloadContainer]:
        """Commit every container whose gate is open.

        Takes out, and returns, the others.
        """
        lost: list[OffloadContainer] = []
        for container in self.containers:
            if container.phase is _OPEN:
                container.phase = _COMMITTED  # as in claim(), for the common case
            elif not container.claim():
                lost.append(container)
        if lost:
            self.keep([container for container in self.containers if container.phase is _COMMITTED])
        return lost

    def upgrade(self, source: Source, granted: Sequence[Key] | None = None) -> FlatBlocks:
        """Upgrade the committed containers: weak to strong, into flat columns.

        Blocks that were evicted are noted on their container, as are those that are not in ``granted`` (if the
        destination granted room for a part only). ``keys`` of a container are afterwards those it transfers; one that
        has none left is not in the result.
        """
        containers = self.containers
        asked = keys = self.keys
        if granted is not None:
            _refuse(containers, set(granted))
            self.keep(containers)
            keys = self.keys
        if all([container.blocks.refs is None for container in containers]):
            refs = source.upgrade(keys)
            held = refs
        else:
            refs, held = _refs_of(containers)
        if len(refs) != len(keys):
            source.release(held)
            raise ValueError(f"{source!r} returned {len(refs)} refs for {len(keys)} blocks")
        if EVICTED in refs:
            keys, refs = _drop_evicted(containers, keys, refs)
        dropped: Sequence[Key] = ()
        if len(keys) < len(asked):
            dropped = list(set(asked).difference(keys))
            containers = [container for container in containers if container.keys]
        return FlatBlocks(containers, [len(container.keys) for container in containers], keys, refs, held, dropped)


def _keys_of(containers: Sequence[OffloadContainer]) -> list[Key]:
    return list(chain.from_iterable([container.keys for container in containers]))


def depths_of(containers: Sequence[OffloadContainer]) -> dict[Key, int]:
    """Return the known depths of all blocks of these containers.

    Some of these blocks may not be copied now.
    """
    depths: dict[Key, int] = {}
    for container in containers:
        blocks = container.blocks
        if blocks.depths is not None:
            pairs = zip(blocks.keys, blocks.depths, strict=True)
            depths.update({key: depth for key, depth in pairs if depth is not None})
    return depths


def _refs_of(containers: Sequence[OffloadContainer]) -> tuple[list[int], list[int]]:
    """Return the refs of all blocks, and those the upgrade took."""
    refs: list[int] = []
    held: list[int] = []
    try:
        for container in containers:
            column = container.refs_of(container.keys)
            refs += column
            if container.blocks.refs is None:
                held += column
    except BaseException:
        containers[0].blocks.source.release(held)
        raise
    return refs, held


def _refuse(containers: Sequence[OffloadContainer], granted: set[Key]) -> None:
    for container in containers:
        refused = [key for key in container.keys if key not in granted]
        if refused:
            error = DestinationFull("there was room for a part of the batch only")
            container.failed = {**container.failed, **dict.fromkeys(refused, error)}
            container.keys = [key for key in container.keys if key in granted]


def _drop_evicted(
    containers: Sequence[OffloadContainer], keys: list[Key], refs: list[int]
) -> tuple[list[Key], list[int]]:
    gone = {key for key, ref in zip(keys, refs, strict=True) if ref == EVICTED}
    for container in containers:
        evicted = [key for key in container.keys if key in gone]
        if evicted:
            container.evicted = evicted
            container.keys = [key for key in container.keys if key not in gone]
    return [key for key in keys if key not in gone], [ref for ref in refs if ref != EVICTED]
