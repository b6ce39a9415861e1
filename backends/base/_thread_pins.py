"""Pins that other threads take in a registry.

Blocks are found, held and released without the thread that the registry belongs to.

A registry belongs to its own thread, the trio thread. Any other thread may look a key up in its table and hold it:

    any thread, under the lock                          the registry's own thread
    T1  look the keys up                                O1  under the lock: hold pinned blocks, choose victims, and take
    T2  leave a pin: one append                             them out of the table
    any thread, without the lock                        O2  free the victims
    T3  read the blocks                                 O3  hold pinned blocks and release released ones, before anything
    T4  release the pin: one append                         that depends on held blocks

Rule 1. Blocks are chosen and taken out of the table in one critical section (O1), which begins by holding pinned
        blocks. So a pin is left before it, and is held; or after it, and has found only blocks that are still there.
Rule 2. A thread makes no change but one append. An exception that strikes there between any two bytecodes
        (KeyboardInterrupt, or one raised by a signal handler) leaves the table consistent, and the lock free.
Rule 3. A pin ends with its lease: by a release, or when the lease is collected, since a signal may strike before any
        other code knows of it. That is the callback of a weak reference, written in C, which no signal can interrupt.
Rule 4. Under the lock the code never waits, and calls no foreign code. So a thread waits at most while the registry's
        own thread chooses some victims, whatever that thread does otherwise.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..abc import Key


class ThreadPin(weakref.ref[Any]):
    """The pin of one lease that a thread took.

    It refers to the lease weakly: rule 3.
    """

    __slots__ = ("_released", "_releases", "is_held", "keys", "slots")

    def __init__(
        self, lease: object, releases: Callable[[ThreadPin], None], keys: Sequence[Key], slots: list[int]
    ) -> None:
        super().__init__(lease, releases)  # type: ignore[call-arg]  # typeshed knows `__new__` only
        self._releases = releases
        self._released = False
        self.keys: Sequence[Key] = keys
        self.slots: list[int] = slots
        self.is_held: bool = False
        """Whether the registry counts its blocks as held.

        Changes in the registry's own thread.
        """

    def __new__(cls, lease: object, releases: Callable[[ThreadPin], None], *_: object) -> ThreadPin:
        """Only :meth:`ThreadPins.pin` makes one."""
        return super().__new__(cls, lease, releases)

    @property
    def is_over(self) -> bool:
        """Whether its lease was released or collected."""
        return self._released or self() is None

    def release(self) -> None:
        """Release the pin. Idempotent; in any thread; never blocks."""
        self._released = True
        self._releases(self)


class ThreadPins:
    """The pins and releases that threads have left in a registry.

    Attributes:
        lock: a thread holds it while it looks keys up and leaves a pin, the registry's own thread while it takes keys out.
        pinned: pins that are not held yet, in order.
        released: pins that are over. One may be listed twice.
    """

    __slots__ = ("lock", "pinned", "released")

    def __init__(self) -> None:
        # Reentrant: a collection, or the handler of a signal, may run anything in the middle of anything.
        self.lock = threading.RLock()
        self.pinned: deque[ThreadPin] = deque()
        self.released: deque[ThreadPin] = deque()

    def __bool__(self) -> bool:
        return bool(self.pinned or self.released)

    def pin(self, lease: object, keys: Sequence[Key], slots: list[int]) -> ThreadPin:
        """Leave a pin of these slots for a lease. Under the lock."""
        pin = ThreadPin(lease, self.released.append, keys, slots)
        self.pinned.append(pin)
        return pin
