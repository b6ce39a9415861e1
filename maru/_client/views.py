"""Handles of a client: pages to fill, and pages to read.

Rule 1. Bytes that are read are pinned: until the :class:`MemoryInfo` is left (it is a context manager) or released or,
        if it was forgotten, until it and the last view of its bytes are garbage.
Rule 2. A finalizer may run anywhere, also inside a lock of ours. It only appends to a list, and the next call does the
        rest.
Rule 3. A view shows memory that stays mapped for as long as the view lives. It cannot promise that the bytes are still
        the same once the pin is gone: :meth:`MemoryInfo.check` finds out, without a message.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ..base.errors import Damaged, HandlerClosed, LeaseLost
from .copying import sums
from .operations import ClientState, Pin, Span


def bytes_at(address: int, length: int, owner: object, *, write: bool) -> memoryview:
    """Return a view of memory that keeps ``owner`` alive.

    So does every view made of it.
    """
    whole: Any = (ctypes.c_char * length).from_address(address)
    whole.owner = owner
    view = memoryview(whole).cast("B")
    return view if write else view.toreadonly()


class AllocHandle:
    """A page to fill. Made by ``alloc`` and ``batch_alloc``.

    Write into :attr:`buf`, then pass it to ``store``. Once stored or freed, it is of no use any more. If it is
    forgotten, its page is free again once no view of it is left.
    """

    __slots__ = ("__weakref__", "_memory", "_state", "offset", "page", "region_id", "size")

    def __init__(self, state: Any, page: int, size: int) -> None:
        """Set up the handle. Not to be called: a handler makes them."""
        region = state.pages.region_of(page)
        self._state: ClientState | None = state
        self._memory: Span = state.spans[region.region_id]
        self.page: int = page
        """Number of the page among this handler's pages."""
        self.region_id: int = region.region_id
        self.offset: int = (page - region.first) * state.pages.page_bytes
        """Offset in the region, in bytes."""
        self.size: int = size
        """Number of bytes that are stored."""

    def __repr__(self) -> str:
        state = "" if self._state is not None else " (used)"
        return f"<AllocHandle of {self.size} bytes at {self.offset} in region {self.region_id}{state}>"

    @property
    def buf(self) -> memoryview:
        """The memory of the page, to be written."""
        if self._state is None:
            raise HandlerClosed(f"{self!r} was already stored or freed")
        return bytes_at(self.address, self.size, self, write=True)

    @property
    def address(self) -> int:
        """Address of the first byte.

        Valid while this handle, or a view of it, is held.
        """
        return self._memory.address + self.offset

    @property
    def is_used(self) -> bool:
        """Whether it was stored or freed."""
        return self._state is None

    def _check(self, state: ClientState) -> None:
        """Raise unless this may be stored or freed by that handler."""
        if self._state is not state:
            raise HandlerClosed(f"{self!r}" if self._state is None else f"{self!r} belongs to another handler")

    def _use(self) -> int:
        """Hand over its page: the caller frees or stores it."""
        if self._state is None:
            raise HandlerClosed(f"{self!r}")
        self._state = None
        return self.page

    def __del__(self) -> None:
        state = getattr(self, "_state", None)
        if state is not None:
            state.forgotten.append(self.page)


class _Grip:
    """Holds one user of a pin, and the memory.

    When it is garbage, its finalizer appends the pin to a list.
    """

    __slots__ = ("__weakref__", "_dropped", "memory", "pin")

    def __init__(self, pin: Pin, memory: object, dropped: Any) -> None:
        self.pin: Pin | None = pin
        self.memory = memory
        self._dropped = dropped

    def let_go(self) -> Pin | None:
        pin, self.pin = self.pin, None
        return pin

    def __del__(self) -> None:
        if self.pin is not None:
            self._dropped.append(self.pin)


class MemoryInfo:
    """The bytes stored under a key, to be read in place.

    A context manager: leaving it releases the pin. Made by ``retrieve`` and ``batch_retrieve``.
    """

    __slots__ = (
        "_checked",
        "_give_back",
        "_grip",
        "_state",
        "address",
        "generation",
        "key",
        "length",
        "offset",
        "region_id",
    )

    def __init__(self, state: Any, key: str, pin: Any, give_back: Callable[[tuple[Any]], object]) -> None:
        """Set up the view. Not to be called: a handler makes them."""
        memory = state.spans[pin.region_id]
        self._state: ClientState = state
        self._give_back = give_back
        self._grip = _Grip(pin, memory.owner, state.pinned.dropped)
        self._checked = not state.config.checksums or pin.checksum is None
        self.key: str = key
        self.region_id: int = pin.region_id
        self.offset: int = pin.offset
        """Offset in the region, in bytes."""
        self.length: int = pin.length
        """Length in bytes."""
        self.generation: int = pin.generation
        """Generation of its registration, unique in the life of the pool.

        0 from a published server.
        """
        self.address: int = memory.address + pin.offset
        """Address of the first byte.

        Valid while this, or a view, is held.
        """

    def __repr__(self) -> str:
        state = "" if self._grip.pin is not None else " (released)"
        return f"<MemoryInfo of {self.length} bytes at {self.offset} in region {self.region_id}{state}>"

    @property
    def view(self) -> memoryview:
        """The bytes, read-only and without a copy.

        The first time their checksum is verified, if there is one.

        Raises:
            Damaged: they are not the bytes that were stored.
            LeaseLost: they may have changed; see :meth:`check`.
        """
        self.check()
        if not self._checked:
            self._verify()
        return bytes_at(self.address, self.length, self._grip, write=False)

    def check(self) -> None:
        """Raise unless the bytes are still those that were found.

        Sends no message; any thread. Call it after a copy, too.

        Raises:
            LeaseLost: released; or the server restarted, or was silent for so long that it may have dropped the pin.
        """
        pin = self._grip.pin
        if pin is None:
            raise LeaseLost(f"{self!r}")
        self._state.check(pin)

    def release(self) -> None:
        """Release the pin. Idempotent.

        Views stay readable, but their bytes may be another key's.
        """
        pin = self._grip.let_go()
        if pin is not None:
            self._give_back((pin,))

    def _verify(self) -> None:
        pin = self._grip.pin
        assert pin is not None
        [found] = sums([self.address], [self.length])
        if found != pin.checksum:
            self._state.counters.damaged += 1
            raise Damaged(f"{self.key!r}: its bytes in region {self.region_id} do not match its checksum")
        self.check()
        self._checked = True

    def __enter__(self) -> MemoryInfo:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.release()
