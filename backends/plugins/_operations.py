"""The protocol of a host and a plugin: operations and completions. Pure.

Rule 1. A completion belongs to the operation with its id (a channel, and the number that submitting returned), or to
        none. Completions without an operation are counted: *twice* if that operation is over, *unknown* if there never
        was one.
Rule 2. A completion may come before its id is known here, if submitting runs in a thread. So as long as an operation is
        being submitted, a completion of an unknown id is kept, and judged when the last of these ids is known.
Rule 3. An operation that is not waited for any more stays known until its completion comes: its memory is in use until
        then.
Rule 4. The meaning of a completion depends on the operation. Bits of a wrong number mean nothing, and the operation has
        failed. With ``ok`` false, bits of a *get* are a partial success, and bits of an *exists* are not to be
        believed.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import attrs

from ..abc import Capabilities, Key
from ._errors import PluginFault

OperationId: TypeAlias = tuple[str, int]
"""A channel and the id of an operation in it."""

REMEMBERED = 1024
"""Most ended operations that are remembered.

They distinguish a completion that comes twice from one of an unknown id. As many completions are kept for ids that are
not known yet.
"""


class Kind(enum.Enum):
    """The kinds of operations."""

    FIND = "find"
    GET = "get"
    SET = "set"
    DELETE = "delete"


@attrs.frozen
class Completion:
    """A plugin's report of the end of one operation."""

    channel: str
    """Channel of the report.

    A connector has one channel, an adapter one for each descriptor.
    """
    id: int
    """Id that submitting returned."""
    ok: bool
    """Whether the operation as a whole succeeded."""
    error: str = ""
    """Reason for a failure."""
    bits: Any = None
    """Result for each key: found, loaded, deleted.

    ``None``: ``ok`` is the result of all. Other values are reported as a fault.
    """


@attrs.define(eq=False)
class Operation:
    """An operation of a plugin, until it has answered."""

    kind: Kind
    channel: str
    keys: Sequence[Key]
    touches: object = None
    """Object that must stay alive, and unused otherwise, until the end."""
    on_over: Callable[[Operation], None] | None = None
    """Function that is called once, at the end.

    Whether the operation is waited for or not.
    """
    started: bool = False
    """Whether the plugin was asked, or is being asked."""
    id: int | None = None
    """Id that submitting returned; ``None`` until then."""
    waited_for: bool = True
    """Whether a task waits for its answer."""
    is_over: bool = False
    bits: list[bool] | None = None
    """Result for each key, once it is over."""
    fault: PluginFault | None = None
    """Failure as a whole, once it is over.

    Or the reason why its end will never be known.
    """
    in_vain: bool = False
    """Whether it ended when it was not waited for any more.

    Its effects are undone, as far as they must be.
    """

    @property
    def may_go_on(self) -> bool:
        """Whether the plugin may still work on it."""
        return self.started and not self.is_over

    @property
    def is_in_doubt(self) -> bool:
        """Whether it may go on, and is not waited for."""
        return self.may_go_on and not self.waited_for

    def refuse(self, fault: PluginFault, cause: BaseException) -> None:
        """End an operation that the plugin was not asked for."""
        fault.__cause__ = cause
        self.started, self.is_over = False, True
        self.bits, self.fault = [False] * len(self.keys), fault
        if self.on_over is not None:
            self.on_over(self)


def judge(kind: Kind, n: int, ok: bool, error: str, bits: Any) -> tuple[list[bool], PluginFault | None]:
    """Return a completion's bits for ``n`` keys, and its fault.

    The fault is the failure as a whole, if there is one.
    """
    column = None if bits is None else _column(bits, n)
    if isinstance(column, str):
        return [False] * n, PluginFault(f"{kind.value}: {column}")
    if not ok and (kind is not Kind.GET or bits is None):
        return [False] * n, PluginFault(f"{kind.value} failed: {error or 'the plugin gave no reason'}")
    if column is None:
        if kind is Kind.FIND:
            return [False] * n, PluginFault(f"{kind.value}: the plugin returned ok, but not which keys it has")
        return [True] * n, None
    return column, None


def _column(bits: Any, n: int) -> list[bool] | str:
    """Return a bool for each of ``n`` keys, or an error text.

    A plugin may report anything.
    """
    try:
        return [bool(bit) for bit in bits] if len(bits) == n else f"{len(bits)} bits for {n} keys"
    except Exception as exc:
        return f"{type(bits).__name__} {bits!r} are not bits: {exc!r}"


class Correlation:
    """The operations of one plugin.

    Attributes:
        unknown: completions of ids that were never returned.
        twice: completions of operations that were over.
        early: completions that came before their id was known.
        late: completions of operations that were not waited for any more.
        rejected: completions whose bits make no sense.
    """

    def __init__(self) -> None:
        self._operations: dict[OperationId, Operation] = {}
        self._submitting = 0
        self._early: OrderedDict[OperationId, Completion] = OrderedDict()
        self._over: OrderedDict[OperationId, None] = OrderedDict()
        self.unknown: int = 0
        self.twice: int = 0
        self.early: int = 0
        self.late: int = 0
        self.rejected: int = 0

    def __len__(self) -> int:
        return len(self._operations) + self._submitting

    def outstanding(self, channel: str) -> list[int]:
        """Return the known ids that are not completed, oldest first."""
        return [number for where, number in self._operations if where == channel]

    @property
    def in_doubt(self) -> int:
        """Number of operations that may go on and are not waited for."""
        return sum(operation.is_in_doubt for operation in self._operations.values())

    def begin(self) -> None:
        """Note that an operation is being submitted.

        Its completion may come before its id.
        """
        self._submitting += 1

    def submitted(self, operation: Operation, number: int) -> None:
        """Register a submitted operation by its id.

        Its completion may be here already.

        Raises:
            PluginFault: another operation has this id.
        """
        ticket = operation.channel, number
        if ticket in self._operations:
            self.not_submitted()
            raise PluginFault(f"{operation.kind.value}: the id {number} was returned twice")
        self._over.pop(ticket, None)
        operation.id = number
        self._operations[ticket] = operation
        completion = self._early.pop(ticket, None)
        if completion is not None:
            self.early += 1
            self._complete(ticket, completion)
        self.not_submitted()

    def not_submitted(self) -> None:
        """Note that submitting is over; see :meth:`begin`.

        Called alone if submitting failed.
        """
        self._submitting -= 1
        if not self._submitting:
            self.unknown += len(self._early)
            self._early.clear()

    def completed(self, completion: Completion) -> Operation | None:
        """Handle a completion. Return the operation that it ends, if any."""
        ticket = completion.channel, completion.id
        if ticket in self._operations:
            return self._complete(ticket, completion)
        if self._submitting and ticket not in self._early:
            self._early[ticket] = completion
            if len(self._early) > REMEMBERED:
                self._early.popitem(last=False)
                self.unknown += 1
        elif ticket in self._over or ticket in self._early:
            self.twice += 1
        else:
            self.unknown += 1
        return None

    def _complete(self, ticket: OperationId, completion: Completion) -> Operation:
        operation = self._operations.pop(ticket)
        self._over[ticket] = None
        if len(self._over) > REMEMBERED:
            self._over.popitem(last=False)
        n = len(operation.keys)
        operation.bits, operation.fault = judge(operation.kind, n, completion.ok, completion.error, completion.bits)
        if completion.bits is not None and isinstance(_column(completion.bits, n), str):
            self.rejected += 1
        if not operation.waited_for:
            self.late += 1
        operation.is_over = True
        if operation.on_over is not None:
            operation.on_over(operation)
        return operation


class Plugin(Protocol):
    """A plugin behind its contract.

    All methods are called on the trio thread, except :meth:`close` and :meth:`delete`, and :meth:`submit` if the host
    submits in a thread.
    """

    @property
    def name(self) -> str:
        """Name of the plugin, for errors."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Abilities of the plugin."""
        ...

    @property
    def deletes_by_call(self) -> bool:
        """Whether it deletes by :meth:`delete`, and not by an operation."""
        ...

    @property
    def resets(self) -> bool:
        """Whether :meth:`poll` resets the descriptor.

        Otherwise it is reset before that call.
        """
        ...

    def channels(self) -> Mapping[str, int]:
        """Return the descriptor of each channel.

        It is readable when there are completions.

        Raises:
            PluginTypeError: they make no sense.
        """
        ...

    def channel_of(self, kind: Kind) -> str:
        """Return the channel of the completions of such operations."""
        ...

    def submit(self, kind: Kind, keys: Sequence[Key], buffers: Sequence[memoryview]) -> object:
        """Submit an operation, without waiting. Return its id.

        The host checks that it is one. ``buffers`` are for ``GET`` and ``SET``, one for each key.

        If this raises, nothing was started.
        """
        ...

    def poll(self, channel: str, outstanding: Sequence[int], completions: list[Completion]) -> None:
        """Append the completions to ``completions``, without waiting.

        Also those before an exception.

        Args:
            channel: the channel of the completions.
            outstanding: ids without a completion so far.
            completions: list to append to.
        """
        ...

    def unlock(self, keys: Sequence[Key]) -> None:
        """Unlock keys that were found. Never blocks."""
        ...

    def delete(self, keys: Sequence[Key]) -> None:
        """Delete keys, for a plugin that deletes by a call.

        In a thread; returns when it is done.
        """
        ...

    def close(self) -> None:
        """Close the plugin. In a thread; returns when it is done."""
        ...
