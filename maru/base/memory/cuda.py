"""Calls of the CUDA driver, made by no other module.

Pinning, the copier, preconditions and the daemon's caches use it. It needs libcuda and no torch; each call releases the
interpreter's lock.

Rule 1. A thread calls :meth:`Driver.attach` before any other call. Contexts belong to threads, and a thread without one
        either fails or, through the runtime, makes one on device 0. An engine attaches its own threads; code that may
        run in any thread, such as a finalizer, uses :meth:`Driver.attached`, which restores the thread's state.
Rule 2. Attaching sets the thread's capture mode to thread-local: an engine that captures a graph in global mode would
        otherwise have its capture invalidated by our calls (CUDA Driver API, ``cuThreadExchangeStreamCaptureMode``).
Rule 3. Every failure is a :exc:`CudaError`. A sticky one has ended the context: no later call of this process on that
        device succeeds.
Rule 4. The driver keeps no error for a later call, in contrast to the runtime (``cudaGetLastError``): a refused
        registration is never reported by a kernel of the engine.
Rule 5. A forked child makes no call of its parent's driver: it would fail, or wait for a lock that a thread of the parent
        held. Every call raises :exc:`NoDriver` there.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes import c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any, Final, NewType

from ..errors import MaruError
from ..forks import watch_forks

Event = NewType("Event", int)
"""Handle of an event, such as ``torch.cuda.Event.cuda_event``."""
Stream = NewType("Stream", int)
"""Handle of a stream, such as ``torch.cuda.Stream.cuda_stream``."""

PORTABLE: Final = 1
"""CU_MEMHOSTREGISTER_PORTABLE: memory is pinned for the contexts of all devices."""
READ_ONLY: Final = 8
"""CU_MEMHOSTREGISTER_READ_ONLY: the device only reads the memory.

Memory that is mapped read-only is refused without it.
"""

BATCH_CALL: Final = "cuMemcpyBatchAsync"
"""Call that begins many copies (CUDA 12.8)."""

_NOT_READY: Final = 600
_NOT_SUPPORTED: Final = 801
_NON_BLOCKING: Final = 1
_BLOCKING_SYNC: Final = 1
_NO_TIMING: Final = 2
_THREAD_LOCAL: Final = 1
_RELAXED: Final = 2
_NOT_CAPTURING: Final = 0
_LAZY_PEER_ACCESS: Final = 1
_BATCH_SINCE: Final = 12080
"""Least CUDA version whose ``cuMemcpyBatchAsync`` is used.

It reports the copy that failed; the one of 13.0 does not.
"""
_NO_COPY: Final = c_size_t(-1).value
"""Index that the batch call reports for an unattributed error."""
_USES_HOST_POINTERS: Final = 91
"""CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM.

It is 0 in WSL2, where batches of registered memory fault.
"""

_STICKY: Final = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911})
"""Errors that end a context.

Those for which cuda.h requires relaunching the process, ECC and NVLink errors, and 709.
"""


class Uuid(ctypes.Structure):
    """The driver's struct CUuuid."""

    _fields_ = (("bytes", c_char * 16),)


class IpcHandle(ctypes.Structure):
    """The driver's struct CUipcMemHandle."""

    _fields_ = (("reserved", c_char * 64),)


class Location(ctypes.Structure):
    """The driver's struct CUmemLocation."""

    _fields_ = (("type", c_uint), ("id", c_int))


class CopyAttributes(ctypes.Structure):
    """The driver's struct CUmemcpyAttributes."""

    _fields_ = (("order", c_uint), ("source", Location), ("destination", Location), ("flags", c_uint))


STREAM_ORDER: Final = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: read sources after the stream's earlier work."""
ANY_ORDER: Final = 3
"""CU_MEMCPY_SRC_ACCESS_ORDER_ANY: read sources at once.

They may be read before earlier work of the stream is done.
"""

_p, _z = c_void_p, c_size_t
PROTOTYPES: Final[Mapping[str, tuple[Any, ...]]] = {
    "cuCtxPopCurrent_v2": (_p,),
    "cuCtxPushCurrent_v2": (_p,),
    "cuCtxSetCurrent": (_p,),
    "cuDeviceGet": (_p, c_int),
    "cuDeviceGetAttribute": (_p, c_int, c_int),
    "cuDeviceGetCount": (_p,),
    "cuDeviceGetName": (_p, c_int, c_int),
    "cuDeviceGetUuid_v2": (_p, c_int),
    "cuDevicePrimaryCtxGetState": (c_int, _p, _p),
    "cuDevicePrimaryCtxRetain": (_p, c_int),
    "cuDriverGetVersion": (_p,),
    "cuEventCreate": (_p, c_uint),
    "cuEventDestroy_v2": (_p,),
    "cuEventQuery": (_p,),
    "cuEventRecord": (_p, _p),
    "cuEventSynchronize": (_p,),
    "cuGetErrorName": (c_int, _p),
    "cuGetProcAddress_v2": (c_char_p, _p, c_int, c_uint64, _p),
    "cuInit": (c_uint,),
    "cuIpcCloseMemHandle": (_p,),
    "cuIpcGetMemHandle": (_p, _p),
    "cuIpcOpenMemHandle_v2": (_p, IpcHandle, c_uint),
    "cuMemAlloc_v2": (_p, _z),
    "cuMemFree_v2": (_p,),
    "cuMemGetAddressRange_v2": (_p, _p, _p),
    "cuMemHostRegister_v2": (_p, _z, c_uint),
    "cuMemHostUnregister": (_p,),
    "cuMemcpyBatchAsync": (_p, _p, _p, _z, _p, _p, _z, _p, _p),
    "cuMemcpyDtoHAsync_v2": (_p, _p, _z, _p),
    "cuMemcpyHtoDAsync_v2": (_p, _p, _z, _p),
    "cuStreamCreate": (_p, c_uint),
    "cuStreamDestroy_v2": (_p,),
    "cuStreamIsCapturing": (_p, _p),
    "cuStreamSynchronize": (_p,),
    "cuStreamWaitEvent": (_p, _p, c_uint),
    "cuThreadExchangeStreamCaptureMode": (_p,),
}
"""Argument types of each function used, by its exported name.

All return a CUresult, an int.
"""


class CudaError(MaruError):
    """The driver refused a call.

    If it is sticky, the operator must act: this process cannot use the device any more.
    """

    def __init__(self, call: str, code: int, name: str = "", detail: str = "") -> None:
        super().__init__(f"{call} failed with {name or 'CUresult'} ({code}){detail}")
        self.call: str = call
        """Exported name of the function."""
        self.code: int = code
        """CUresult of the call."""
        self.sticky: bool = code in _STICKY
        """Whether the error has ended the context."""


class NoDriver(CudaError):
    """CUDA cannot be used here: no driver, or no device.

    The text has the cause.
    """

    def __init__(self, why: str) -> None:
        MaruError.__init__(self, why)
        self.call: str = "cuInit"
        self.code: int = 0
        self.sticky: bool = False


def open_library() -> Any:
    """Load libcuda.

    Raises:
        NoDriver: this host has none.
    """
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as exc:
        raise NoDriver(f"no CUDA driver: {exc}") from exc


@cache
def find_driver() -> Driver:
    """Return the driver of this host, loaded once in a process.

    Raises:
        NoDriver: there is none, or it sees no device.
    """
    return Driver(open_library())


class _Calls(dict[str, Any]):
    """Functions by name; none in a forked child."""

    def __missing__(self, name: str) -> Any:
        raise NoDriver("CUDA cannot be used in a process that was forked off one that uses it")


class Driver:
    """The functions of one loaded driver, for any attached thread.

    Copies are only begun.

    Args:
        library: has the driver's functions as attributes, by exported name.

    Raises:
        NoDriver: it sees no device.
    """

    def __init__(self, library: Any) -> None:
        self._calls = _Calls({name: _typed(library, name) for name in PROTOTYPES if name != BATCH_CALL})
        self._contexts: dict[int, int] = {}
        self._lock = threading.RLock()
        """Lock of the contexts.

        Reentrant: a finalizer may run in a thread that holds it.
        """
        watch_forks(self, Driver._after_fork)
        try:
            self._call("cuInit", 0)
            self.devices: int = self._get("cuDeviceGetCount", c_int())
        except CudaError as exc:
            raise NoDriver(f"the CUDA driver sees no device: {exc}") from exc
        if not self.devices:
            raise NoDriver("the CUDA driver sees no device")
        self.version: int = self._get("cuDriverGetVersion", c_int())
        """CUDA version that the driver supports, such as 12080."""
        self._batch = self._find_batch()

    def __repr__(self) -> str:
        return f"<Driver of CUDA {self.version}, {self.devices} devices>"

    def _after_fork(self) -> None:
        """Refuse every call in a forked child: rule 5.

        The lock is a new one: a thread that is not there may hold it, since making a context takes a second.
        """
        self._lock = threading.RLock()
        self._calls.clear()
        self._contexts.clear()
        self._batch = None

    @property
    def copy_call(self) -> str:
        """Call that begins copies.

        :data:`BATCH_CALL`, or the one for a single copy if the driver is older than CUDA 12.8, a device cannot use
        host pointers, or the driver has refused batches.
        """
        return BATCH_CALL if self._batch is not None else "cuMemcpyHtoDAsync"

    # --- threads and devices ------------------------------------------------------------------------------------------

    def attach(self, device: int) -> None:
        """Make this thread use a device (rules 1 and 2).

        It uses the device's primary context, as torch does.

        The first call of a process makes that context if nothing else has: some 500 MiB of the device's memory.
        """
        self._call("cuCtxSetCurrent", self._context(device))
        self.leave_captures_alone()

    def leave_captures_alone(self) -> None:
        """Keep this thread's later calls from disturbing other threads' captures.

        This includes calls by torch. Needs no device.
        """
        self._set_capture_mode(c_int(_THREAD_LOCAL))

    @contextmanager
    def attached(self, device: int) -> Iterator[None]:
        """Make this thread use a device inside the block. For any thread.

        Afterwards it uses the former device again. Inside, no call invalidates a graph capture, not even one of this
        thread.
        """
        self._call("cuCtxPushCurrent_v2", self._context(device))
        mode = c_int(_RELAXED)
        try:
            self._set_capture_mode(mode)
            try:
                yield
            finally:  # a lost context refuses these calls as well
                self._calls["cuThreadExchangeStreamCaptureMode"](ctypes.addressof(mode))
        finally:
            popped = c_void_p()
            self._calls["cuCtxPopCurrent_v2"](ctypes.addressof(popped))

    def _context(self, device: int) -> int:
        with self._lock:
            context = self._contexts.get(device)
            if context is None:
                handle = self._get("cuDeviceGet", c_int(), device)
                context = self._contexts[device] = self._get("cuDevicePrimaryCtxRetain", c_void_p(), handle)
        return context

    def _set_capture_mode(self, mode: c_int) -> None:
        """Set this thread's mode; ``mode`` becomes the former one."""
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.addressof(mode))

    def active_device(self) -> int | None:
        """Return the first device of which this process has a primary context.

        ``None`` if there is none; this makes none.
        """
        flags, active = c_uint(), c_int()
        for device in range(self.devices):
            handle = self._get("cuDeviceGet", c_int(), device)
            self._call("cuDevicePrimaryCtxGetState", handle, ctypes.addressof(flags), ctypes.addressof(active))
            if active.value:
                return device
        return None

    def name(self, device: int) -> str:
        """Return the name of a device, such as "NVIDIA H100"."""
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", ctypes.addressof(text), len(text), self._get("cuDeviceGet", c_int(), device))
        return text.value.decode(errors="replace")

    def uuid(self, device: int) -> bytes:
        """Return the 16 bytes that identify a device on any host."""
        uuid = Uuid()
        self._call("cuDeviceGetUuid_v2", ctypes.addressof(uuid), self._get("cuDeviceGet", c_int(), device))
        return bytes(uuid)

    # --- memory -------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Allocate memory of this thread's device. Returns its address."""
        return int(self._get("cuMemAlloc_v2", c_void_p(), nbytes))

    def free(self, address: int) -> None:
        """Free memory of a device, after all work started on it."""
        self._call("cuMemFree_v2", address)

    def register(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        """Pin host memory, so that all devices copy it directly."""
        self._call("cuMemHostRegister_v2", address, nbytes, PORTABLE | READ_ONLY if read_only else PORTABLE)

    def unregister(self, address: int) -> None:
        """Unpin the registration that starts at this address."""
        self._call("cuMemHostUnregister", address)

    # --- streams and events -------------------------------------------------------------------------------------------

    def stream(self) -> Stream:
        """Create a stream of this thread's device.

        It and the default stream do not wait for each other.
        """
        return Stream(self._get("cuStreamCreate", c_void_p(), _NON_BLOCKING))

    def event(self) -> Event:
        """Create an event of this thread's device, without timing.

        Synchronizing with it sleeps.
        """
        return Event(self._get("cuEventCreate", c_void_p(), _BLOCKING_SYNC | _NO_TIMING))

    def destroy_stream(self, stream: Stream) -> None:
        """Destroy a stream once its work is done."""
        self._call("cuStreamDestroy_v2", stream)

    def destroy_event(self, event: Event) -> None:
        """Destroy an event; work that waits for it is not affected."""
        self._call("cuEventDestroy_v2", event)

    def record(self, event: Event, stream: Stream) -> None:
        """Record an event after all current work of the stream.

        Both are of one device.
        """
        self._call("cuEventRecord", event, stream)

    def wait(self, stream: Stream, event: Event) -> None:
        """Make later work of the stream wait for the event.

        It waits for the event's last recording. The device waits, not this thread.
        """
        self._call("cuStreamWaitEvent", stream, event, 0)

    def query(self, event: Event) -> bool:
        """Return whether the event is complete; true if never recorded."""
        code = self._calls["cuEventQuery"](event)
        if code and code != _NOT_READY:
            raise self._error("cuEventQuery", code)
        return not code

    def synchronize(self, event: Event) -> None:
        """Block this thread, asleep, until the event is complete."""
        self._call("cuEventSynchronize", event)

    def synchronize_stream(self, stream: Stream) -> None:
        """Block this thread until all work of the stream is done.

        It spins, so this is for cleanup after an error.
        """
        self._call("cuStreamSynchronize", stream)

    def is_capturing(self, stream: Stream) -> bool:
        """Return whether the stream is recording its work into a graph."""
        return bool(self._get("cuStreamIsCapturing", c_int(), before=(stream,)) != _NOT_CAPTURING)

    # --- copies -------------------------------------------------------------------------------------------------------

    def copy(self, stream: Stream, to: Any, at: Any, sizes: Any, *, load: bool) -> None:
        """Begin copies on the stream, in any order among themselves.

        If the driver refuses them, it has begun none.

        Args:
            stream: not the default stream.
            to: destination addresses, a contiguous numpy array of uint64. The arrays may be reused after the call.
            at: source addresses, likewise.
            sizes: bytes of each copy, likewise.
            load: whether to copy from registered host memory to the device; otherwise the other way. The sources of a
                load must be complete already: they may be read before earlier work of the stream is done.

        Raises:
            CudaError: the driver refused the copies. Without batches (:attr:`copy_call`), some copies may have been
                begun.
        """
        batch, count = self._batch, len(sizes)
        if batch is None:
            self.copy_each(stream, to, at, sizes, load=load)
        elif count:
            attributes = CopyAttributes(order=ANY_ORDER if load else STREAM_ORDER)
            first, failed = c_size_t(), c_size_t(_NO_COPY)
            code = batch(
                to.ctypes.data, at.ctypes.data, sizes.ctypes.data, count, ctypes.addressof(attributes),
                ctypes.addressof(first), 1, ctypes.addressof(failed), stream,
            )  # fmt: skip
            if code == _NOT_SUPPORTED:
                self._batch = None
                self.copy_each(stream, to, at, sizes, load=load)
            elif code:
                which = f", copy {failed.value} of {count}" if failed.value < count else f", of {count} copies"
                raise self._error(BATCH_CALL, code, which)

    def copy_each(self, stream: Stream, to: Any, at: Any, sizes: Any, *, load: bool) -> None:
        """Begin copies like :meth:`copy`, by a call for each.

        Host memory need not be registered: the driver then copies through buffers of its own, and may block.
        """
        name = "cuMemcpyHtoDAsync_v2" if load else "cuMemcpyDtoHAsync_v2"
        call = self._calls[name]
        for number, (target, source, size) in enumerate(zip(to.tolist(), at.tolist(), sizes.tolist(), strict=True)):
            code = call(target, source, size, stream)
            if code:
                raise self._error(name, code, f", copy {number} of {len(sizes)}")

    # --- memory of another process ------------------------------------------------------------------------------------

    def extent(self, address: int) -> tuple[int, int]:
        """Return the start and the bytes of an address's allocation."""
        base, size = c_void_p(), c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.addressof(base), ctypes.addressof(size), address)
        return base.value or 0, size.value

    def share(self, address: int) -> bytes:
        """Return 64 bytes with which another process opens an allocation.

        That process must be on this host.
        """
        handle = IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.addressof(handle), address)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Open another process's allocation on this thread's device.

        Every open needs a :meth:`close`.
        """
        shared = IpcHandle.from_buffer_copy(handle)
        return int(self._get("cuIpcOpenMemHandle_v2", c_void_p(), shared, _LAZY_PEER_ACCESS))

    def close(self, address: int) -> None:
        """Close an allocation opened by :meth:`open`."""
        self._call("cuIpcCloseMemHandle", address)

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _find_batch(self) -> Any:
        address, status = c_void_p(), c_int()
        code = self._calls["cuGetProcAddress_v2"](
            BATCH_CALL.encode(), ctypes.addressof(address), _BATCH_SINCE, 0, ctypes.addressof(status)
        )
        if code or not address.value or not all(map(self._uses_host_pointers, range(self.devices))):
            return None
        return ctypes.CFUNCTYPE(c_int, *PROTOTYPES[BATCH_CALL])(address.value)

    def _uses_host_pointers(self, device: int) -> bool:
        handle = self._get("cuDeviceGet", c_int(), device)
        return bool(self._get("cuDeviceGetAttribute", c_int(), _USES_HOST_POINTERS, handle))

    def _call(self, name: str, *args: Any) -> None:
        code = self._calls[name](*args)
        if code:
            raise self._error(name, code)

    def _get(self, name: str, result: Any, *args: Any, before: tuple[Any, ...] = ()) -> Any:
        """Call a function that writes a result. Returns the result.

        The result's address is the function's first argument after ``before``.
        """
        self._call(name, *before, ctypes.addressof(result), *args)
        return result.value or 0

    def _error(self, call: str, code: int, detail: str = "") -> CudaError:
        text = c_char_p()
        self._calls["cuGetErrorName"](code, ctypes.addressof(text))
        return CudaError(call, code, (text.value or b"").decode(errors="replace"), detail)


def _typed(library: Any, name: str) -> Any:
    """Return a function of the driver with its prototype.

    Raises:
        NoDriver: the driver has no such function.
    """
    try:
        function = getattr(library, name)
    except AttributeError as exc:
        raise NoDriver(f"the CUDA driver is too old: it has no {name}; CUDA 12.0 is needed") from exc
    function.argtypes, function.restype = PROTOTYPES[name], c_int
    return function
