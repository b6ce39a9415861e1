"""Pinning of host memory for CUDA: one registrar per process.

It is for all memory that a device copies directly.

Rule 1. Memory is pinned chunk by chunk, for all devices. Chunks have at most 64 GiB, since registrations of half a TiB
        are refused, and meet at multiples of 2 MiB. A copy must not cross a border: :func:`spans` has them.
Rule 2. A memory is pinned as a whole or not at all: a chunk that is refused unpins those before it, and the reason is
        kept. Until all of it is pinned, no copy treats it as pinned: such a copy could be under way when a chunk is
        unpinned.
Rule 3. A forked child does not inherit it. It unpins nothing, and pinned private memory of its parent is not mapped:
        the kernel would copy each such page at the fork, which for 100 GiB takes a minute.
Rule 4. After an error that ends the context, nothing is pinned any more in this process.
Rule 5. Unpinning may happen in any thread, in a finalizer: it takes no lock of this module, and restores the thread's
        state.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import mmap
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs

from . import background
from .cuda import CudaError, Driver, NoDriver, find_driver

if TYPE_CHECKING:
    from .memory import Memory

CHUNK_BYTES: Final = 64 << 30
"""Most bytes of one registration."""
BORDER_BYTES: Final = 2 << 20
"""Chunks meet at multiples of this, the size of a huge page."""
AT_ONCE_BYTES: Final = 1 << 30
"""Most bytes that are pinned by the calling thread.

That takes a tenth of a second. Larger memory is pinned in the background.
"""
DRIVER_NODE: Final = "/dev/nvidiactl"
"""Device file that a CUDA process opens."""

_log = logging.getLogger(__name__)

_lock = threading.Lock()
_pins: Final[weakref.WeakSet[Pin]] = weakref.WeakSet()
_spans: Final[dict[int, int]] = {}
"""End of each registration, by its start.

Changed and copied by single operations, so that no lock is needed.
"""


_UNREGISTERED: Final = frozenset({0, 3, 4, 201, 713})
"""Codes of a refused call after which nothing is registered.

No driver, or not in this process; it, or its context, has ended; the memory is not registered.
"""
_later: Final[weakref.WeakKeyDictionary[Any, Callable[[Any], None]]] = weakref.WeakKeyDictionary()
"""Owners of memory that is pinned once a device is used.

Each has the function that pins it.
"""


@attrs.define
class _Process:
    """The state of CUDA in this process."""

    is_expected: bool = False
    lost: str = ""
    """Error that ended the context."""
    sorted_spans: tuple[object, list[tuple[int, int]]] = (None, [])
    """Version of the spans, and the spans in order."""
    version: object = None


_process: Final = _Process()


# --- whether to pin ---------------------------------------------------------------------------------------------------


def expect_cuda() -> None:
    """Pin memory in this process if there is a driver.

    For a process that will copy for devices, and imports no torch before.
    """
    _process.is_expected = os.path.exists(DRIVER_NODE)


def uses_cuda() -> bool:
    """Return whether memory is to be pinned in this process.

    It is if torch has initialized CUDA, or :func:`expect_cuda` has found a driver.
    """
    if _process.is_expected:
        return True
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())


def when_used(pin: Callable[[], None]) -> None:
    """Call ``pin`` once this process uses CUDA, which may be now.

    Memory of an engine may be older than the first copy of a device. Then the background thread calls it.

    Args:
        pin: a method, whose object is referred to weakly.
    """
    if uses_cuda():
        pin()
    else:
        method: Any = pin
        _later[method.__self__] = method.__func__


def use_device() -> None:
    """Pin memory that is older than the device's first copy.

    Called before each copy; the background thread pins.
    """
    while _later:
        with contextlib.suppress(KeyError, OSError):  # another thread has it; no thread: copies pass through a buffer
            owner, pin = _later.popitem()
            background.in_background(partial(_pin, weakref.ref(owner), pin))


def _pin(owner: weakref.ref[Any], pin: Callable[[Any], None]) -> bool:
    alive = owner()
    if alive is not None:
        pin(alive)
    return False


def why_no_driver() -> str:
    """Return the reason why nothing can be pinned on this host.

    Empty if there is a driver with a device.
    """
    try:
        find_driver()
    except NoDriver as exc:
        return str(exc)
    return ""


def copy_call() -> str:
    """Return the driver's call for copies; empty until a driver is loaded."""
    return find_driver().copy_call if find_driver.cache_info().currsize else ""


# --- pinning ----------------------------------------------------------------------------------------------------------


class Pin:
    """The pinning of one memory, undone right before it is unmapped.

    Nothing is pinned before :meth:`step` is called.

    Args:
        memory: referred to weakly.
    """

    def __init__(self, memory: Memory) -> None:
        self.nbytes: Final = -(-memory.length // mmap.PAGESIZE) * mmap.PAGESIZE
        """Size of the memory."""
        self.pinned_bytes: int = 0
        """Bytes that are pinned, from the start on."""
        self.why_not: str = ""
        """Reason why the memory is not pinned; empty while none is known."""
        self._address = memory.address
        self._read_only = not memory.writable
        self._memory = weakref.ref(memory)
        self._starts: list[int] = []
        memory.before_unmap(self._unpin)
        with _lock:
            _pins.add(self)

    def __repr__(self) -> str:
        return f"<Pin of {self.pinned_bytes} of {self.nbytes} bytes at {self._address:#x}>"

    @property
    def is_whole(self) -> bool:
        """Whether all of the memory is pinned."""
        return self.pinned_bytes == self.nbytes

    def pin(self) -> None:
        """Pin all of the memory in this thread, or nothing: see :attr:`why_not`."""
        while self.step():
            pass

    def pin_soon(self, *, may_block: bool = True) -> None:
        """Pin the memory, at once or in the background.

        At once if it is small and the caller may block.
        """
        if may_block and self.nbytes <= AT_ONCE_BYTES:
            self.pin()
            return
        try:
            background.in_background(self.step)
        except OSError as exc:
            self.why_not = f"no thread can be started to pin it: {exc}"

    def step(self) -> bool:
        """Pin the next chunk.

        For one thread at a time; it waits for the driver.

        Returns:
            Whether there is another chunk. False after a refusal, or once the memory is unmapped.
        """
        memory = self._memory()
        if memory is None or self.why_not or self.is_whole:
            return False
        start, end = self._address + self.pinned_bytes, self._address + self.nbytes
        stop = min(end, (start + CHUNK_BYTES) // BORDER_BYTES * BORDER_BYTES)
        memory.hide(start, stop)  # before it is pinned: a fork in between would copy it
        self._starts.append(start)  # first: a chunk interrupted after the call is unpinned as well
        try:
            _register(start, stop, read_only=self._read_only)
        except CudaError as error:
            self._starts.pop()
            if self._unpin():
                memory.show()
            self.why_not = _reason(error, self.nbytes)
            _log.warning("memory of %d bytes is not pinned: %s", self.nbytes, self.why_not)
            return False
        self.pinned_bytes = stop - self._address
        if stop < end:
            return True
        _spans.update(zip(self._starts, [*self._starts[1:], end], strict=True))
        _process.version = object()
        return False

    def _unpin(self) -> bool:
        """Unpin the memory. Return whether it may be unmapped."""
        self.pinned_bytes = 0
        self._starts = [start for start in reversed(self._starts) if not _unregister(start)]
        return not self._starts


def _register(start: int, stop: int, *, read_only: bool) -> None:
    if _process.lost:
        raise NoDriver(_process.lost)
    driver = find_driver()
    try:
        with driver.attached(_device(driver)):
            driver.register(start, stop - start, read_only=read_only)
    except CudaError as error:
        if error.sticky:
            _process.lost = f"this process has lost its CUDA context: {error}"
        raise


def _unregister(start: int) -> bool:
    """Undo a registration. Return whether there is none any more.

    If there is one, the driver would copy new memory at these addresses from and to the old pages.
    """
    _spans.pop(start, None)
    _process.version = object()
    for _ in range(2):  # a refusal may be the error of earlier work
        try:
            driver = find_driver()
            with driver.attached(_device(driver)):
                driver.unregister(start)
            return True
        except CudaError as error:
            if error.sticky or error.code in _UNREGISTERED:
                return True
            refusal = error
    _log.warning("memory at %#x stays mapped, since the driver does not unpin it: %s", start, refusal)
    return False


def _device(driver: Driver) -> int:
    """Return a device that this process uses already.

    A context on another one would take 500 MiB of that device.
    """
    active = driver.active_device()
    return 0 if active is None else active


def _reason(error: CudaError, nbytes: int) -> str:
    """Return the driver's reason, with the limits of this process.

    Only limits that are smaller than the memory are added.
    """
    from ..machine import memlock_limit, memory_left

    text, locked, left = str(error), memlock_limit(), memory_left()
    if locked is not None and locked < nbytes + sum(stop - start for start, stop in _spans.copy().items()):
        text += f"; it may lock {locked} bytes (ulimit -l, LimitMEMLOCK)"
    if left is not None and left < nbytes:
        text += f"; {left} bytes of memory are left here"
    return text


# --- pinned spans -----------------------------------------------------------------------------------------------------


def spans(address: int, nbytes: int) -> list[tuple[int, int]]:
    """Return the registrations that overlap these bytes, in order.

    Each is a pair of start and end. Empty if none of the bytes are pinned. For any thread.
    """
    version, cached = _process.version, _process.sorted_spans
    if cached[0] is not version:  # read before the spans are: an older list is sorted again
        cached = _process.sorted_spans = version, sorted(_spans.copy().items())
    found = cached[1]
    first = max(0, bisect.bisect_right(found, (address, sys.maxsize)) - 1)
    if first < len(found) and found[first][1] <= address:
        first += 1
    return found[first : bisect.bisect_left(found, (address + nbytes,))]


@attrs.frozen
class PinningStatistics:
    """Amounts of memory of this process that is to be pinned."""

    wanted_bytes: int
    """Bytes that are pinned, will be, or were refused."""
    pinned_bytes: int
    refused_bytes: int
    why_not: str
    """Reason for most of the refused bytes; empty if there are none."""
    lost: str
    """Error that ended the CUDA context of this process; empty if none."""


def statistics() -> PinningStatistics:
    """Return the amounts of pinned and refused memory."""
    with _lock:
        pins = list(_pins)
    refused: Counter[str] = Counter()
    for pin in pins:
        if pin.why_not:
            refused[pin.why_not] += pin.nbytes
    most = refused.most_common(1)
    return PinningStatistics(
        sum(pin.nbytes for pin in pins),
        sum(pin.pinned_bytes for pin in pins),
        refused.total(),
        most[0][0] if most else "",
        _process.lost,
    )


def forget() -> None:
    """Forget all pinned memory, once its driver is gone."""
    _pins.clear()
    _spans.clear()
    _process.version, _process.lost = object(), ""


def _after_fork() -> None:
    """Forget the parent's pinned memory: rule 3."""
    global _lock
    _lock = threading.Lock()  # a thread that is not in the child may have held it
    _later.clear()
    forget()


os.register_at_fork(after_in_child=_after_fork)
