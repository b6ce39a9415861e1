"""Effects that an operation yields, such as a call or a copy.

An operation is a generator: it yields an effect, and is resumed with the answer. It never waits, sends or copies
itself, so that the trio and the blocking face drive the same code. Errors are thrown in where it waits:

* :class:`~maru.base.errors.NoAnswer`, :class:`~maru.base.errors.ServerLost`: it is unknown whether the request was
  done.
* :class:`~maru.base.errors.ServerRefused`: the server answered with an error.
* a cancellation, or any other end of a wait.

It leaves its pages and pins in a right state on each of these, and raises it on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol, TypeAlias, TypeVar

from ..._wire import Reply, Request
from .board_pins import BoardCounters

T = TypeVar("T")


class Call:
    """Send a request and wait for its answer; resumed with the reply.

    A call that is not awaited is sent now, if it can be: resumed with nothing, at once. Its errors are ignored.
    """

    __slots__ = (
        "code",
        "connection",
        "deadline",
        "expected",
        "is_awaited",
        "is_over",
        "late",
        "message",
        "patience",
        "reply",
        "sending",
        "sent_at",
        "sequence",
    )

    def __init__(
        self,
        code: int,
        message: Request | None,
        *,
        sending: Callable[[], object] | None = None,
        late: Callable[[Any], None] | None = None,
        patience: float | None = None,
        is_awaited: bool = True,
    ) -> None:
        self.code = code
        self.message = message
        self.sending = sending
        """Called right before the request may leave.

        If it was not called, the request has not left and never will.
        """
        self.late = late
        """Called with a reply that comes after the call was given up."""
        self.patience = patience
        """Seconds to wait at most; ``timeout_ms`` unless set."""
        self.is_awaited = is_awaited
        """Whether its answer is waited for."""
        # From here on, fields of the driver: an object of its own for each call on its way would cost as much as this
        # one.
        self.reply: Any = None
        self.is_over = False
        self.sequence = 0
        self.sent_at: float
        self.deadline: float
        self.connection: Any
        self.expected: Any


class Span(Protocol):
    """A mapped region, for as long as any object refers to it."""

    @property
    def address(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def writable(self) -> bool: ...

    @property
    def owner(self) -> object:
        """Object that keeps it mapped, for users of its addresses."""
        ...

    def view(self, offset: int, length: int, /) -> memoryview:
        """Return some of its bytes."""
        ...


class Map:
    """Map a region here: resumed with a :class:`Span`."""

    __slots__ = ("capability", "handle", "length", "offset", "region_id", "write")

    def __init__(
        self, region_id: int, offset: int, length: int, *, write: bool, capability: bytes | None, handle: Any = None
    ) -> None:
        self.region_id = region_id
        self.offset = offset
        self.length = length
        self.write = write
        self.capability = capability
        """Capability for the socket that hands out descriptors.

        ``None``: ask the resource manager with ``handle``.
        """
        self.handle = handle


class MapIndex:
    """Map the tenant's shared index and our board.

    Resumed with an ``IndexReader`` and ``BoardPins``. Without ``with_board`` there is a board already: then ``None`` in
    its place.
    """

    __slots__ = ("counters", "era", "with_board")

    def __init__(self, era: int, counters: BoardCounters, *, with_board: bool) -> None:
        self.era = era
        """Era to which the board belongs."""
        self.counters = counters
        self.with_board = with_board


class Identify:
    """Find out who listens at the server's address.

    Resumed with a :class:`~maru.base.peers.Listener`.
    """

    __slots__ = ()


class Work:
    """Run a long task (a copy): resumed with its return value.

    It touches no state of the client.
    """

    __slots__ = ("do", "keep", "size")

    def __init__(self, do: Callable[[], Any], size: int, keep: object = None) -> None:
        self.do = do
        self.size = size
        """Number of bytes copied."""
        self.keep = keep
        """Memory that must stay mapped meanwhile.

        A region may be lost, and unmapped, while it is copied from or to.
        """


class Alone:
    """Run another operation exclusively: resumed with its return value.

    No other exclusive one is under way meanwhile. Requests for memory may take long, as the kernel clears it: they
    exclude only each other (``for_memory``), so that operations that need none do not wait. They may run the other
    exclusive ones inside, and not the other way round.
    """

    __slots__ = ("for_memory", "operation")

    def __init__(self, operation: Callable[[], Operation[Any]], *, for_memory: bool = False) -> None:
        self.operation = operation
        self.for_memory = for_memory


Effect: TypeAlias = Call | Map | MapIndex | Work | Alone | Identify
Operation: TypeAlias = Generator[Effect, Any, T]

__all__ = ["Alone", "Call", "Effect", "Identify", "Map", "MapIndex", "Operation", "Reply", "Request", "Span", "Work"]
