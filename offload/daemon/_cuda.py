"""Memory of a CUDA device that another process owns, by IPC handle.

This module has both sides. The engine names the allocation that a tensor lies in, and its offset there. The daemon
opens the allocation, and has the device copy between its blocks and pages (:mod:`backends.base.copier`). Both call the
driver, so a daemon needs no torch.

Rule 1. A registration opens each of its allocations once, however many tensors lie in it; the driver counts the
    openings of all registrations. They are closed with the last reference to the memory, like all memory of an engine
    (:mod:`._memory`): in a thread, since that reference may go anywhere.
Rule 2. The engine must not free the allocation while its cache is registered: otherwise the content of a copy is
    undefined. If its process ends, the driver keeps the memory until the daemon has closed it.
Rule 3. An engine's claims about an allocation are checked against the driver's.
Rule 4. An allocation is a multiple of 2 MiB. The driver may put smaller ones into one block of memory, and shares all
    of that.
Rule 5. An error that ends the context of a device, or leaves the end of a copy unproven, loses the device for this
    process. Its memory is refused from then on, so that engines copy through host memory.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Final
from uuid import UUID

import attrs

from backends.abc import Unproven, UnreadableBlock
from backends.base.block_layout import TensorMemory, check_disjoint
from backends.base.copier import DeviceLost
from backends.base.pages import Pages
from backends.device import DeviceBlocks
from maru.base.memory.cuda import CudaError, Driver, NoDriver, find_driver
from maru.base.threads import start_thread

from ._layout import BadLayout, CacheLayout
from ._memory import CacheStorage
from ._messages import CudaMemory, Refusal, TensorLayout

_WHOLE: Final = 2 << 20
"""Divisor of the size of a shared allocation, in bytes: rule 4.

See CUDA C++ Programming Guide, Interprocess Communication.
"""

_log = logging.getLogger("offload.daemon")


def _uuid_of(driver: Driver, device: int) -> str:
    """Return the UUID of a device as torch spells it."""
    return str(UUID(bytes=driver.uuid(device)))


# --- the engine's side --------------------------------------------------------------------------------------------------


class CannotShare(Exception):
    """The memory of a cache cannot be opened by another process."""


def describe_cuda(tensors: Sequence[TensorMemory], axes: Sequence[int]) -> tuple[list[TensorLayout], list[CudaMemory]]:
    """Describe a cache's tensors, and share the allocations they lie in.

    Blocking. Attaches the calling thread to their device.

    Raises:
        CannotShare: the driver does not share one of them, as with expandable segments of torch and vLLM's sleep mode.
    """
    device = tensors[0].device
    assert device is not None, "these tensors are in host memory"
    memories: dict[int, CudaMemory] = {}
    layouts: list[TensorLayout] = []
    try:
        driver = find_driver()
        driver.attach(device)
        uuid = _uuid_of(driver, device)
        for tensor, axis in zip(tensors, axes, strict=True):
            start, size = driver.extent(tensor.address)
            if start not in memories:
                if size % _WHOLE:
                    raise CannotShare(f"it is in an allocation of {size} bytes, not a multiple of 2 MiB")
                memories[start] = CudaMemory(uuid, driver.share(start), 0, size)
            layouts.append(
                TensorLayout(
                    list(memories).index(start),
                    tensor.address - start,
                    tensor.item_bytes,  # type: ignore[arg-type]  # checked by the daemon
                    list(tensor.shape),
                    list(tensor.strides),
                    axis % len(tensor.shape),
                )
            )
    except CudaError as exc:
        raise CannotShare(str(exc)) from exc
    return layouts, list(memories.values())


# --- the daemon's side --------------------------------------------------------------------------------------------------


class Devices:
    """The CUDA devices of a daemon. Thread-safe.

    It has the open memory of engines, and the lost devices.

    Args:
        on_lost: called with the UUID of a device when it is lost, in any thread. Must not raise.

    Attributes:
        lost: causes, by the UUIDs of lost devices.
        openings: counts the open allocations.
    """

    def __init__(self, on_lost: Callable[[str], None]) -> None:
        self.lost: dict[str, str] = {}
        self.openings: Openings = Openings()
        self._on_lost = on_lost

    def check(self, device: str) -> None:
        """Raise if a device is lost.

        Raises:
            Refusal: it is.
        """
        if device in self.lost:
            raise Refusal(
                "unavailable", f"device {device} is lost to this daemon until it is restarted: {self.lost[device]}"
            )

    def open(self, memories: Sequence[CudaMemory]) -> list[DeviceMemory]:
        """Open the memories of one cache.

        Blocking; attaches the calling thread to their device.

        Raises:
            BadLayout: they are on several devices, or not within their allocations.
            Refusal: this process cannot use them; the text has the reason.
            OSError: no thread can be started.
        """
        device = memories[0].device
        if any(memory.device != device for memory in memories):
            raise BadLayout("the tensors of one cache are on several devices")
        self.check(device)
        _check_numpy()
        try:
            driver = find_driver()
            number = _number_of(driver, device)
            with self.watch(device):
                driver.attach(number)
                return self._open(driver, number, memories)
        except NoDriver as exc:
            raise Refusal(
                "unavailable", f"memory of a device was registered, but this process sees no device: {exc}"
            ) from exc
        except CudaError as exc:
            raise Refusal("unavailable", f"this process cannot open memory of device {device}: {exc}") from exc

    def _open(self, driver: Driver, number: int, memories: Sequence[CudaMemory]) -> list[DeviceMemory]:
        opened = self.openings.begin(driver, number)
        found = []
        for memory in memories:
            address = opened.open(memory.handle)
            start, size = driver.extent(address)
            room = start + size - address
            if memory.offset + memory.size > room:
                raise BadLayout(f"it ends at byte {memory.offset + memory.size} of an allocation of {room}")
            found.append(DeviceMemory(self, memory.device, opened, address + memory.offset, memory.size))
        return found

    @contextmanager
    def watch(self, device: str) -> Iterator[None]:
        """Record an error of the body that loses a device: rule 5."""
        try:
            yield
        except (CudaError, DeviceLost, Unproven) as error:
            if (not isinstance(error, CudaError) or error.sticky) and device not in self.lost:
                self.lost[device] = str(error)
                self._on_lost(device)
            raise


def _check_numpy() -> None:
    """Raise if numpy, which lists the copies of devices, is missing."""
    try:
        import numpy  # noqa: F401
    except ImportError:
        text = "memory of a device needs numpy, which is not installed here: pip install 'trio-offload[cuda]'"
        raise Refusal("unavailable", text) from None


def _number_of(driver: Driver, uuid: str) -> int:
    """Return the number of a device in this process."""
    for device in range(driver.devices):
        if _uuid_of(driver, device) == uuid:
            return device
    raise Refusal("unavailable", f"this process does not see device {uuid}: give the daemon the devices of its engines")


# --- open allocations
# --------------------------------------------------------------------------------------------------


class Openings:
    """Counts the open allocations of engines, and closes them. Thread-safe.

    One thread closes them, while there are any: a finalizer runs in any thread and in the middle of anything, so that
    it only puts them into a queue.

    Attributes:
        count: number of open allocations.
        failed_closes: number of failed closes. They are tried again with the next ones.
    """

    def __init__(self) -> None:
        self.count: int = 0
        self.failed_closes: int = 0
        self._lock = threading.Lock()
        self._owners = 0
        self._due: SimpleQueue[list[_Opening]] = SimpleQueue()
        self._left: list[_Opening] = []

    def begin(self, driver: Driver, number: int) -> Opened:
        """Return an opener of allocations, for a thread attached to this device.

        The allocations are closed with it.

        Raises:
            OSError: no thread can be started.
        """
        addresses: list[_Opening] = []
        opened = Opened(self, driver, number, addresses)
        with self._lock:
            if not self._owners:
                start_thread(threading.Thread(target=self._run, name="offload device memory", daemon=True))
            self._owners += 1
        weakref.finalize(opened, self._due.put, addresses).atexit = False
        return opened

    def note(self, change: int) -> None:
        """Count allocations that were opened or closed."""
        with self._lock:
            self.count += change

    def _run(self) -> None:
        owners = 1
        while owners:
            self._close(self._left + self._due.get())
            with self._lock:
                owners = self._owners = self._owners - 1

    def _close(self, due: Sequence[_Opening]) -> None:
        self._left, error = [], None
        for one in due:
            try:
                one.driver.attach(one.device)
                one.driver.close(one.address)
                self.note(-1)
            except CudaError as exc:
                self.failed_closes += 1
                error = exc
                if not exc.sticky:
                    self._left.append(one)
        if error is not None:
            _log.warning("device memory of an engine could not be closed: %s", error)


@attrs.frozen
class _Opening:
    """One open allocation."""

    driver: Driver
    device: int
    address: int


@attrs.frozen(eq=False)
class Opened:
    """The allocations of one registration."""

    _openings: Openings
    _driver: Driver
    device: int
    """The number of their device in this process."""
    _all: list[_Opening]
    _by_handle: dict[bytes, int] = attrs.field(factory=dict)

    def open(self, handle: bytes) -> int:
        """Open an allocation, or find it if open. Returns its address."""
        if handle not in self._by_handle:
            address = self._by_handle[handle] = self._driver.open(handle)
            self._all.append(_Opening(self._driver, self.device, address))
            self._openings.note(1)
        return self._by_handle[handle]


# --- caches -------------------------------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class DeviceMemory:
    """One memory of a device, over which a cache is registered."""

    _devices: Devices
    device: str
    """The UUID of the device."""
    _opened: Opened
    address: int
    size: int

    def storage(self, layout: CacheLayout, memories: Sequence[DeviceMemory]) -> CacheStorage:
        """Return the blocks of a cache; see :class:`~offload.daemon._memory.EngineMemory`.

        Raises:
            BadLayout: pieces of its tensors share memory.
        """
        pieces = [
            (memories[tensor.memory].address + tensor.offset, plane)
            for tensor, planes in zip(layout.tensors, layout.layouts, strict=True)
            for plane in planes.planes
        ]
        try:
            check_disjoint(pieces, layout.blocks)
        except ValueError as exc:
            raise BadLayout(str(exc)) from None
        blocks = DeviceBlocks(pieces, layout.blocks, self._opened.device, self._opened)
        return DeviceCache(self._devices, self.device, blocks)


class DeviceCache(CacheStorage):
    """The blocks of a cache on a device.

    Args:
        devices: notified if the device is lost.
        device: the UUID of the device.
        blocks: copies them.
    """

    def __init__(self, devices: Devices, device: str, blocks: DeviceBlocks) -> None:
        self.device: str = device
        self.block_bytes: int = blocks.block_bytes
        self._devices = devices
        self._blocks: DeviceBlocks | None = blocks

    def let_go(self) -> None:
        """Drop the reference to the memory.

        It is closed at once, or when the last running copy is over.
        """
        self._blocks = None

    def pages(self, slots: Sequence[int]) -> None:
        """Return ``None``: blocks are not in host memory."""

    def copy_out(self, slots: Sequence[int], pages: Pages) -> None:
        """Copy blocks to the pages, and wait for the end.

        Raises:
            UnreadableBlock: the device did not copy them. They are not damaged.
            Unproven: it may still be copying.
        """
        if why := self._copy(lambda blocks: blocks.copy_out(slots, pages)):
            raise UnreadableBlock(f"not read from device {self.device}: {why}")

    def copy_in(self, slots: Sequence[int], pages: Pages) -> None:
        """Copy pages to the blocks, and wait for the end.

        Raises:
            OSError: the device did not copy them.
            Unproven: it may still be copying.
        """
        if why := self._copy(lambda blocks: blocks.copy_in(slots, pages)):
            raise OSError(f"not written to device {self.device}: {why}")

    def _copy(self, call: Callable[[DeviceBlocks], None]) -> str:
        """Have the device copy. Returns the reason for a failure.

        An error would keep frames, and in them the memory.
        """
        blocks = self._blocks
        if blocks is None:
            return "its engine is gone"
        try:
            with self._devices.watch(self.device):
                call(blocks)
        except (CudaError, DeviceLost, OSError) as exc:
            return str(exc)
        return ""
