"""Room in a tier: a queue of requests, and their order.

Rule 1. Room is granted in the order of the requests. While a request waits, no later one is granted room.
Rule 2. A request that shrinks (:class:`backends.abc.RoomRequest`) keeps its place in the queue.
Rule 3. Room that was granted to a request that is cancelled in the same tick is given back.

:class:`WaitQueue` keeps the order, for every tier. :class:`Room` grants room that this process knows to be free; a tier
that has to ask a server lets the first request of the queue ask, while the others wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import attrs
import trio

from .._errors import CapacityError
from ..abc import Key, RoomRequest, WhenFull


@attrs.define(eq=False)
class Waiter:
    """One request in a :class:`WaitQueue`."""

    request: RoomRequest
    size: int
    """Room that one block takes, in the unit of the tier."""
    changed: trio.Event = attrs.field(factory=trio.Event)
    """Event that there may be room, or that room was granted."""
    slots: list[int] | None = None
    """The slots that :meth:`WaitQueue.grant` granted."""


class WaitQueue:
    """Requests that wait for room in one place, in order of arrival.

    Args:
        serve: called whenever the first request may be served: it is another one than before, or has shrunk.

    Attributes:
        requests: the waiting requests, first in first. To be read only, also as a truth value; the methods change it.
    """

    def __init__(self, serve: Callable[[], None]) -> None:
        self.requests: OrderedDict[Waiter, None] = OrderedDict()
        self._serve = serve

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def first(self) -> Waiter | None:
        """The request that has waited longest, or ``None``."""
        return next(iter(self.requests), None)

    @contextmanager
    def join(self, request: RoomRequest, size: int = 1) -> Iterator[Waiter]:
        """Wait at the end of the queue while the block lasts.

        However it ends, the next request is served.
        """
        waiter = Waiter(request, size)

        def shrunk() -> bool:
            # Already granted: the slots are for the keys as they were, so the caller must give them back and ask again.
            if waiter not in self.requests:
                return False
            self._serve()  # fewer blocks may fit already
            return True

        self.requests[waiter] = None
        try:
            with request.waiting(shrunk):
                yield waiter
        finally:
            if waiter in self.requests:
                del self.requests[waiter]
                self._serve()  # the next request may need less

    def grant(self, waiter: Waiter, slots: list[int]) -> None:
        """Take a request out of the queue, with room."""
        del self.requests[waiter]
        waiter.slots = slots
        waiter.changed.set()


class Room(ABC):
    """The room of one tier in this process.

    A subclass defines the unit of room, for example slots.

    ``size`` is the room that one block takes, in the unit of the subclass.
    """

    def __init__(self) -> None:
        self._waiters = WaitQueue(self._serve)
        self._serving = False

    # --- implemented by a subclass --------------------------------------------------------------------------------

    @abstractmethod
    def could_hold(self, n: int, size: int = 1) -> bool:
        """Return whether ``n`` blocks fit into an empty place."""

    @abstractmethod
    def fitting(self, n: int, size: int = 1) -> int:
        """Return how many of ``n`` blocks fit into the free room."""

    @abstractmethod
    def take(self, n: int, size: int = 1) -> list[int] | None:
        """Stage ``n`` slots; ``None`` if there is no room for all."""

    @abstractmethod
    def take_evicting(self, keys: Sequence[Key], size: int = 1) -> list[int] | None:
        """Stage a slot for each key, evicting as much as needed.

        ``None`` if too much is held.

        A key that the eviction policy rejects gets ``EVICTED`` instead of a slot. The other slots ascend.
        """

    @abstractmethod
    def give_back(self, slots: Sequence[int]) -> None:
        """Free staged slots that were not registered, ignoring ``EVICTED``."""

    @abstractmethod
    def catch_up(self) -> None:
        """Serve waiting requests with blocks that other threads have released."""

    # --- room -----------------------------------------------------------------------------------------------------

    @property
    def is_waited_for(self) -> bool:
        """Whether a task waits for room."""
        return bool(self._waiters.requests)

    def reserve_nowait(self, keys: Sequence[Key], when_full: WhenFull, size: int = 1) -> list[int]:
        """Stage a slot for each key, or for a prefix.

        A prefix only under ``partial`` and ``fail``.

        Raises:
            trio.WouldBlock: there is no room now, or other requests wait for it.
            CapacityError: under ``wait`` and ``evict``: they would not fit into the empty tier.
        """
        if when_full == "partial" or when_full == "fail":
            room = 0 if self._waiters.requests else self.fitting(len(keys), size)
            return self.take(room, size) or []
        if not self.could_hold(len(keys), size):
            raise CapacityError(f"{self!r} cannot hold {len(keys)} more blocks, even if it were empty")
        slots = None if self._waiters.requests else self._try(keys, size, when_full)
        if slots is None:
            raise trio.WouldBlock
        return slots

    async def reserve(self, request: RoomRequest, size: int = 1) -> list[int]:
        """Stage a slot for each of ``request.keys``, or for a prefix.

        It waits for room, in order. The keys are those of the request when this returns.

        A checkpoint; cancelled, it holds nothing.

        Raises:
            CapacityError: see :meth:`reserve_nowait`.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            slots = self.reserve_nowait(request.keys, request.when_full, size)
        except trio.WouldBlock:
            pass
        else:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return slots
        with self._waiters.join(request, size) as waiter:
            # After joining: a thread that releases blocks wakes this task only if it finds a request in the queue.
            self.catch_up()
            try:
                await waiter.changed.wait()
            except BaseException:
                if waiter.slots is not None:
                    self.give_back(waiter.slots)  # rule 3
                raise
        assert waiter.slots is not None
        return waiter.slots

    # --- helpers --------------------------------------------------------------------------------------------------

    def _try(self, keys: Sequence[Key], size: int, when_full: WhenFull) -> list[int] | None:
        return self.take_evicting(keys, size) if when_full == "evict" else self.take(len(keys), size)

    def _serve(self) -> None:
        """Grant room to the waiting requests in order, while there is enough."""
        # A spiller may end a spill at once, which calls this function while it chooses the victims for the first
        # request. That request is being served already; served twice, it would get two sets of slots.
        if self._serving:
            return
        self._serving = True
        try:
            while (waiter := self._waiters.first) is not None:
                slots = self._try(waiter.request.keys, waiter.size, waiter.request.when_full)
                if slots is None:
                    return
                self._waiters.grant(waiter, slots)
        finally:
            self._serving = False
