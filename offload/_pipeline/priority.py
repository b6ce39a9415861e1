"""The priority of loads over stores.

It announces loads, and makes the transfer slots of pipelines yield to them. The rules:

Rule 1. A load never waits. Only store batches that were copying when it began may be in its way.
Rule 2. While a load is under way no other batch starts: it *yields*, in the order in which it came.
Rule 3. A batch that has yielded for ``patience`` starts all the same, one at a time: the first in the queue, and the
        next one when the copy of that one is over. So loads that never end do not starve stores; and a load that is
        shorter than ``patience``, with no load under way before it, meets no batch that began after it.
Rule 4. When the last load is over, all may start.

One :class:`LoadPriority` is shared by all pipelines of an engine. A load runs in ``with load_priority.loading():``. A
slot asks before it takes a batch, so that a yielding batch stays parked, can be cancelled, and grows into a fuller
batch. If room was long in coming, the slot asks again: loads may have begun meanwhile.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Protocol

import attrs
import trio

from .channel import BatchReceiver
from .container import Holder, OffloadBatch, OffloadContainer

# --- the decision: pure, a function of the loads under way and the time
# -------------------------------------------------


@attrs.define(eq=False)
class YieldingStore:
    """A store batch that is about to start, or has started."""

    since: float
    """The time when it began to yield, in seconds."""


@attrs.define(eq=False)
class YieldQueue:
    """The count of loads, the queue of yielding stores, and the decision.

    No other code decides.
    """

    patience: float
    """Most seconds that a store yields, if none before it does."""
    loads: int = 0
    """Number of loads under way in the trio thread."""
    in_threads: dict[object, None] = attrs.Factory(dict)
    """Loads under way in other threads.

    These threads add and remove them themselves.
    """
    exception: YieldingStore | None = None
    """The one store that started while loads were under way.

    It is still copying; the loads may have ended.
    """
    waiting: OrderedDict[YieldingStore, None] = attrs.Factory(OrderedDict)
    """The stores that yield, longest first."""

    def join(self, store: YieldingStore) -> None:
        """Add a store that yields, after all others."""
        self.waiting[store] = None

    def may_go(self, store: YieldingStore, now: float) -> bool:
        """Return whether this store may start now.

        If so, it has left the queue; call :meth:`over` when its copy is over.
        """
        if self.loads or self.in_threads:
            if self.exception is not None or self.first is not store or now < store.since + self.patience:
                return False
            self.exception = store
        self.waiting.pop(store, None)
        return True

    def looks_again(self, store: YieldingStore) -> float | None:
        """Return the time at which this store may start by itself.

        ``None`` if only another event can let it start.
        """
        return store.since + self.patience if self.exception is None and self.first is store else None

    @property
    def first(self) -> YieldingStore | None:
        """The store that has yielded for longest."""
        return next(iter(self.waiting), None)

    def leave(self, store: YieldingStore) -> None:
        """Remove a store that no longer wants to start."""
        self.waiting.pop(store, None)

    def over(self, store: YieldingStore) -> None:
        """Record that this store's copy is over, or will not begin."""
        if self.exception is store:
            self.exception = None


# --- the functions for loads and stores --------------------------------------------------------------------------------


@attrs.frozen
class LoadPriorityStatistics:
    """A snapshot of a :class:`LoadPriority`. Counters count from the start."""

    loads: int
    """Number of loads under way."""
    yielding: int
    """Number of stores that wait for loads now."""
    yielded: int
    """Number of stores that have waited for loads."""
    went_first: int
    """Number of such stores that started while loads were under way.

    They had yielded for long enough.
    """


class CopyPermit:
    """A store's permit to copy. Made by :meth:`LoadPriority.acquire_permit`."""

    __slots__ = ("_priority", "_store")

    def __init__(self, priority: LoadPriority, store: YieldingStore) -> None:
        self._priority = priority
        self._store = store

    def release(self) -> None:
        """Release the permit: the copy is over.

        Idempotent; must be called, since the next store may wait for it.
        """
        self._priority._over(self._store)


class LoadPriority:
    """The priority of loads over stores, between the same tiers.

    Args:
        patience: seconds that a store yields to loads; after that it starts all the same.

    Raises:
        ValueError: ``patience`` is negative, or no number.
    """

    def __init__(self, *, patience: float = 1.0) -> None:
        if not patience >= 0:
            raise ValueError(f"patience = {patience!r}: must be seconds from 0")
        self._queue = YieldQueue(patience)
        self._loading = _Loading(self)
        self._wake_ups: dict[YieldingStore, trio.Event] = {}
        self._yielded = self._went_first = 0

    def __repr__(self) -> str:
        return f"<LoadPriority: {self.statistics().loads} loads, {len(self._queue.waiting)} stores yield>"

    @property
    def is_clear(self) -> bool:
        """Whether a store may start now, since no load is under way."""
        return not (self._queue.loads or self._queue.in_threads)

    def loading(self) -> AbstractContextManager[None]:
        """Announce a load for as long as the ``with`` block lasts.

        Any number at a time. Never waits.
        """
        return self._loading

    @contextmanager
    def loading_in_thread(self, call: Callable[[Callable[[], None]], None]) -> Iterator[None]:
        """Announce a load that another thread makes, in that thread.

        It lasts as long as the ``with`` block.

        Args:
            call: has the trio thread call a function.
        """
        load = object()
        in_threads = self._queue.in_threads
        try:
            in_threads[load] = None
            yield
        finally:
            in_threads.pop(load, None)
            call(self._wake_all)

    async def acquire_permit(self) -> CopyPermit:
        """Wait until a store may start to copy.

        It may if no load is under way, or it has yielded for long enough. Always a checkpoint. If cancelled, it has
        left the queue. The permit must be released when the copy is over.
        """
        await trio.lowlevel.checkpoint()
        queue, store = self._queue, YieldingStore(trio.current_time())
        if queue.may_go(store, store.since):
            return CopyPermit(self, store)
        queue.join(store)
        self._yielded += 1
        try:
            while not queue.may_go(store, trio.current_time()):
                wake_up = self._wake_ups[store] = trio.Event()
                at = queue.looks_again(store)
                with trio.CancelScope(deadline=math.inf if at is None else at):
                    await wake_up.wait()
        finally:
            self._wake_ups.pop(store, None)
            queue.leave(store)
            # Also if this one was cancelled: its deadline may have been the one that was to wake the next.
            self._wake_first()
        self._went_first += queue.exception is store
        return CopyPermit(self, store)

    def statistics(self) -> LoadPriorityStatistics:
        """Return an immutable snapshot."""
        queue = self._queue
        loads = queue.loads + len(queue.in_threads)
        return LoadPriorityStatistics(loads, len(queue.waiting), self._yielded, self._went_first)

    def _over(self, store: YieldingStore) -> None:
        if self._queue.exception is store:
            self._queue.over(store)
            self._wake_first()

    def _wake_all(self) -> None:
        """Wake the stores that yield, if no load is under way."""
        if self.is_clear:
            for wake_up in self._wake_ups.values():
                wake_up.set()

    def _wake_first(self) -> None:
        """Have the first store in the queue decide again.

        The first store may have changed, or the one exception may be over.
        """
        first = self._queue.first
        if first is not None:
            self._wake_ups[first].set()


class _Loading:
    """The context that every load enters.

    One object for all, since it keeps nothing of a single load.
    """

    __slots__ = ("_priority",)

    def __init__(self, priority: LoadPriority) -> None:
        self._priority = priority

    def __enter__(self) -> None:
        self._priority._queue.loads += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        queue = self._priority._queue
        queue.loads -= 1
        if not queue.loads:
            self._priority._wake_all()


# --- between batching and transfer --------------------------------------------------------------------------------------


class _Ready(BatchReceiver, Protocol):
    async def wait_due(self) -> None: ...


@attrs.define(eq=False)
class PriorityReceiver:
    """Batching's receiving end for slots that yield to loads.

    A batch that is due may be taken when no load is in its way.
    """

    priority: LoadPriority
    ready: _Ready
    """Batching's own receiving end."""
    _permits: dict[Holder, CopyPermit] = attrs.Factory(dict)
    """The permits of slots whose batch needed one."""
    _closing: bool = False

    async def receive(self, owner: Holder) -> OffloadBatch:
        """Wait until a batch is due and may start, and take it.

        If cancelled while waiting, it has taken nothing.
        """
        self.release_permit(owner)
        while True:
            await self.ready.wait_due()
            if not self._goes_first():
                # Yield without a batch in hand: parked containers can be cancelled, and have time to become more.
                self._permits[owner] = await self.priority.acquire_permit()
            batch = self.ready.receive_nowait(owner)
            if batch is not None:
                return batch
            # While this one yielded, the due batch was taken by another slot, or cancelled.
            self.release_permit(owner)

    def receive_nowait(self, owner: Holder) -> OffloadBatch | None:
        """Take a batch if one is due and may start."""
        self.release_permit(owner)
        return self.ready.receive_nowait(owner) if self._goes_first() else None

    def put_back(self, container: OffloadContainer) -> None:
        """Take a container back as the first of the next batch."""
        self.ready.put_back(container)

    async def yield_to_loads(self, owner: Holder) -> None:
        """Wait until the batch in hand may start.

        No checkpoint if it may start at once.
        """
        if not self._goes_first():
            self._permits[owner] = await self.priority.acquire_permit()

    def release_permit(self, owner: Holder) -> None:
        """Release the permit of a slot, so that another batch may start.

        The slot's batch is over, or waits for something else. Idempotent.
        """
        if self._permits:
            permit = self._permits.pop(owner, None)
            if permit is not None:
                permit.release()

    def stop_yielding(self) -> None:
        """Let committed containers go ahead: the pipeline closes. Their time is short."""
        self._closing = True

    def close(self) -> None:
        """Release the permits of all slots, which have ended."""
        while self._permits:
            self._permits.popitem()[1].release()

    def _goes_first(self) -> bool:
        return self._closing or self.priority.is_clear
