"""Checks of a driver, for the fake and a GPU.

They cover the behaviour that the code above a driver relies on.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from ..base.memory.cuda import CudaError, Driver, Event, Stream
from ..base.memory.memory import PAGE_BYTES

_NBYTES: Final = 4 * PAGE_BYTES


@contextmanager
def _host(driver: Driver, nbytes: int = _NBYTES) -> Iterator[tuple[int, mmap.mmap]]:
    """Register host memory for a block."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    driver.register(address, nbytes)
    try:
        yield address, memory
    finally:
        driver.unregister(address)


@contextmanager
def _device(driver: Driver, nbytes: int = _NBYTES) -> Iterator[int]:
    """Allocate memory of the device for a block."""
    address = driver.allocate(nbytes)
    try:
        yield address
    finally:
        driver.free(address)


@contextmanager
def _stream(driver: Driver) -> Iterator[tuple[Stream, Event]]:
    stream, event = driver.stream(), driver.event()
    try:
        yield stream, event
    finally:
        driver.synchronize_stream(stream)
        driver.destroy_event(event)
        driver.destroy_stream(stream)


def _column(values: Sequence[int]) -> Any:
    import numpy

    return numpy.array(values, numpy.uint64)


def _copy(driver: Driver, stream: Stream, pieces: Sequence[tuple[int, int, int]], *, load: bool) -> None:
    to, at, sizes = zip(*pieces, strict=True)
    driver.copy(stream, _column(to), _column(at), _column(sizes), load=load)


def _refused(call: Callable[[], object]) -> CudaError:
    try:
        call()
    except CudaError as error:
        return error
    raise AssertionError("the driver accepted the call")


def copies_arrive_both_ways(driver: Driver) -> None:
    """Check that pieces of any size arrive, between any addresses."""
    with (
        _host(driver) as (host, memory),
        _host(driver) as (back, again),
        _device(driver) as device,
        _stream(driver) as (
            stream,
            event,
        ),
    ):
        memory[:] = bytes(range(256)) * (_NBYTES // 256)
        _copy(driver, stream, [(device + 1, host + 7, 1), (device + 100, host + 256, 5000)], load=True)
        _copy(driver, stream, [(back + 3, device + 1, 1), (back + 4096, device + 100, 5000)], load=False)
        driver.record(event, stream)
        driver.synchronize(event)
        assert driver.query(event)
        assert again[3:4] == memory[7:8] and again[4096:9096] == memory[256:5256]


def no_copies_are_no_error(driver: Driver) -> None:
    """Check that an empty batch is accepted."""
    with _stream(driver) as (stream, _):
        driver.copy(stream, _column([]), _column([]), _column([]), load=True)


def one_stream_waits_for_another(driver: Driver) -> None:
    """Check that an event makes one stream wait for another."""
    with (
        _host(driver) as (host, memory),
        _host(driver) as (back, again),
        _device(driver) as device,
        _stream(driver) as (first, loaded),
        _stream(driver) as (second, stored),
    ):
        memory[:] = b"x" * _NBYTES
        _copy(driver, first, [(device, host, _NBYTES)], load=True)
        driver.record(loaded, first)
        driver.wait(second, loaded)
        _copy(driver, second, [(back, device, _NBYTES)], load=False)
        driver.record(stored, second)
        driver.synchronize(stored)
        assert again[:] == memory[:]


def an_event_that_was_never_recorded_holds(driver: Driver) -> None:
    """Check that an event that was never recorded is complete.

    So a caller must check whether it was recorded.
    """
    event = driver.event()
    assert driver.query(event)
    driver.synchronize(event)
    driver.destroy_event(event)


def memory_is_registered_once(driver: Driver) -> None:
    """Check that a second registration raises an error, and is harmless."""
    with _host(driver) as (host, _):
        twice = _refused(lambda: driver.register(host, _NBYTES))
        assert (twice.code, twice.sticky) == (712, False) and "cuMemHostRegister" in str(twice)
    assert _refused(lambda: driver.unregister(host)).code == 713
    copies_arrive_both_ways(driver)


def what_is_read_only_is_registered_as_such(driver: Driver) -> None:
    """Check that read-only memory can be registered, and is read.

    A foreign region is such memory.
    """
    with mmap.mmap(-1, _NBYTES, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) as memory:
        memory[:4] = b"here"
        view = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(view)
        mprotect = ctypes.CDLL(None).mprotect
        mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        assert not mprotect(address, _NBYTES, mmap.PROT_READ)
        driver.register(address, _NBYTES, read_only=True)
        with _host(driver) as (back, again), _device(driver) as device, _stream(driver) as (stream, event):
            _copy(driver, stream, [(device, address, 4)], load=True)
            _copy(driver, stream, [(back, device, 4)], load=False)
            driver.record(event, stream)
            driver.synchronize(event)
            assert again[:4] == b"here"
        driver.unregister(address)
        del view


def an_allocation_is_found_by_any_address_in_it(driver: Driver) -> None:
    """Check that an allocation is found by the addresses inside it only."""
    with _device(driver) as device:
        start, nbytes = driver.extent(device + 100)
        assert start <= device and device + _NBYTES <= start + nbytes
    with mmap.mmap(-1, PAGE_BYTES) as memory:
        view = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(view)
        assert not _refused(lambda: driver.extent(address)).sticky
        del view


def a_thread_needs_to_be_attached(driver: Driver) -> None:
    """Check that calls of an unattached thread fail."""
    errors: list[CudaError] = []
    thread = threading.Thread(target=lambda: errors.append(_refused(driver.stream)))
    thread.start()
    thread.join()
    assert [error.code for error in errors] == [201]


def an_attached_block_leaves_its_thread_as_it_was(driver: Driver) -> None:
    """Check that an attached block restores its thread's state.

    The thread may be a foreign one that runs a finalizer.
    """
    errors: list[CudaError] = []
    mode = ctypes.c_int()

    def run() -> None:
        with driver.attached(0):
            driver.destroy_stream(driver.stream())
        errors.append(_refused(driver.stream))
        driver._call("cuThreadExchangeStreamCaptureMode", ctypes.addressof(mode))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [error.code for error in errors] == [201]
    assert mode.value == 0, "its calls no longer invalidate a capture in global mode"
    assert driver.active_device() == 0


def an_empty_allocation_is_refused(driver: Driver) -> None:
    """Check that allocations are refused if empty or larger than the device."""
    assert _refused(lambda: driver.allocate(0)).code == 1
    assert _refused(lambda: driver.allocate(1 << 50)).code == 2


def no_stream_of_ours_is_capturing(driver: Driver) -> None:
    """Check that a new stream is not capturing."""
    with _stream(driver) as (stream, _):
        assert not driver.is_capturing(stream)


def devices_have_names(driver: Driver) -> None:
    """Check that every device has a name, and its own UUID."""
    assert driver.name(0) and len({driver.uuid(device) for device in range(driver.devices)}) == driver.devices
    assert all(len(driver.uuid(device)) == 16 for device in range(driver.devices))


CHECKS: Final = (
    copies_arrive_both_ways,
    no_copies_are_no_error,
    one_stream_waits_for_another,
    an_event_that_was_never_recorded_holds,
    memory_is_registered_once,
    what_is_read_only_is_registered_as_such,
    an_allocation_is_found_by_any_address_in_it,
    a_thread_needs_to_be_attached,
    an_attached_block_leaves_its_thread_as_it_was,
    an_empty_allocation_is_refused,
    no_stream_of_ours_is_capturing,
    devices_have_names,
)
"""All checks.

Each takes a driver, in a thread attached to device 0.
"""
