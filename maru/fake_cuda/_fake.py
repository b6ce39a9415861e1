"""The fake driver: an implementation of each function of libcuda."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any, Final, TypeVar

from ..base.memory import cuda, pinning
from ._memory import Allocation, HostSpan, allocate, find, opened, overlapping, permissions
from ._orders import Choose, latest
from ._streams import Event, Stream, Work

INVALID_VALUE: Final = 1
OUT_OF_MEMORY: Final = 2
NOT_INITIALIZED: Final = 3
NO_DEVICE: Final = 100
INVALID_CONTEXT: Final = 201
INVALID_HANDLE: Final = 400
NOT_FOUND: Final = 500
NOT_READY: Final = 600
ILLEGAL_ADDRESS: Final = 700
ALREADY_REGISTERED: Final = 712
NOT_REGISTERED: Final = 713
NOT_SUPPORTED: Final = 801
CAPTURE_UNSUPPORTED: Final = 900
CAPTURED_EVENT: Final = 907

REFUSALS: Final[Mapping[str, str]] = {
    "a call before cuInit": "documented: CUDA_ERROR_NOT_INITIALIZED",
    "a call in a thread without a context": "documented: CUDA_ERROR_INVALID_CONTEXT",
    "any call after a sticky error": "documented: the process must be relaunched",
    "an event recorded in a stream of another device": "documented: CUDA_ERROR_INVALID_HANDLE",
    "a batch in the default stream": "documented: hStream must not be the legacy NULL stream",
    "an error of a batch that is no copy's": "documented: failIdx is SIZE_MAX",
    "a batch of registered memory where devices cannot use host pointers": "reported of WSL2: an illegal address",
    "any batch, if batches are not supported": "documented: CUDA_ERROR_NOT_SUPPORTED",
    "memory registered twice": "documented: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
    "memory unregistered that is not registered": "documented: CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
    "read-only memory registered without the flag": "documented, for devices without pageable memory access",
    "unsafe calls of a thread in global mode while another captures in global mode": "documented: 900, and it is invalidated",
    "a query of a captured event": "documented: CUDA_ERROR_CAPTURED_EVENT",
    "a synchronization with a capturing stream": "documented: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
    "a batch with memory that is registered for another device": "stricter than the documentation: it is not pinned there",
    "a piece of a batch without bytes": "stricter than the documentation, which does not say",
    "a copy from or to memory that is freed before it is made": "documented as undefined: here CUDA_ERROR_ILLEGAL_ADDRESS",
    "memory used with a context of another device": "stricter than CUDA, which may copy between devices",
    "a batch from or to host memory that is not registered": "stricter than CUDA, which copies through buffers of its own",
    "a batch of more than 50,000 copies": "reported of driver 580 on Blackwell: the process hangs or ends",
    "a copy across two registrations": "stricter than CUDA as far as is known: not seen on a device yet",
    "memory of other kinds than cuMemAlloc's, shared with another process": "documented: cuIpcGetMemHandle takes no other",
    "handles that were destroyed": "stricter than CUDA, which may crash",
}
"""Refused calls, with the source of each refusal."""

EFFECTS: Final[Mapping[str, str]] = {
    "memory that is registered without PORTABLE": "documented: it is pinned for the context that registered it only",
    "a stream without NON_BLOCKING": "documented: it and the default stream wait for each other",
    "an event without BLOCKING_SYNC": "documented: a thread that synchronizes with it spins",
    "a wait for a captured event": "documented: the waiting stream joins the capture",
    "a copy of memory that is not registered, by a call of its own": "documented: CUDA copies it, and may block",
}
"""Effects that a caller must know, with the source of each."""

_UNSAFE: Final = frozenset(
    {
        "cuMemAlloc_v2",
        "cuMemFree_v2",
        "cuMemHostRegister_v2",
        "cuMemHostUnregister",
        "cuEventQuery",
        "cuEventSynchronize",
        "cuStreamSynchronize",
        "cuIpcOpenMemHandle_v2",
        "cuIpcCloseMemHandle",
    }
)
_WITHOUT_CONTEXT: Final = frozenset(
    {
        "cuInit",
        "cuDeviceGetCount",
        "cuDriverGetVersion",
        "cuDeviceGet",
        "cuDeviceGetAttribute",
        "cuDeviceGetName",
        "cuDeviceGetUuid_v2",
        "cuDevicePrimaryCtxGetState",
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent_v2",
        "cuCtxSetCurrent",
        "cuThreadExchangeStreamCaptureMode",
        "cuGetProcAddress_v2",
        "cuGetErrorName",
    }
)
_CONTEXTS: Final = 0xC000
_RELAXED: Final = 2
_MOST_PIECES: Final = 50_000
_PATIENCE: Final = 30.0
"""Seconds until a synchronization that waits for a gate counts as deadlocked."""
_handles = count(0x5000_0001)
_V = TypeVar("_V")


class FakeCuda:
    """A driver with devices of its own, for any thread.

    Args:
        devices: number of devices.
        version: CUDA version; below 12080 there is no ``cuMemcpyBatchAsync``.
        choose: picks the work that is done before and behind each call, and in a synchronization.
        device_bytes: memory of each device.
        most_registered: bytes that can be registered.
        shares: whether other processes can open its memory; that of expandable segments and of sleep mode they cannot.
        host_pointers: whether its devices can use host pointers of registered memory; in WSL2 they cannot.
        batches: whether it supports the batch call that it has.
    """

    def __init__(
        self,
        devices: int = 1,
        *,
        version: int = 12080,
        choose: Choose = latest,
        device_bytes: int = 1 << 30,
        most_registered: int = 1 << 40,
        shares: bool = True,
        host_pointers: bool = True,
        batches: bool = True,
    ) -> None:
        self.devices: int = devices
        self.version: int = version
        self.choose: Choose = choose
        self.device_bytes: int = device_bytes
        self.most_registered: int = most_registered
        self.shares: bool = shares
        self.host_pointers: bool = host_pointers
        self.batches: bool = batches
        self.calls: list[str] = []
        """Names of the called functions, in order, except cuGetErrorName."""
        self.wrong: list[BaseException] = []
        """Errors of a test's usage, and of the fake itself.

        Usage errors are those for which CUDA has no error. A test checks that there are none.
        """
        self.contexts: set[int] = set()
        """Devices of which this process has a context."""
        self.invalidated: bool = False
        """Whether a graph capture was invalidated."""
        self.spins: int = 0
        """Synchronizations with events whose waiting threads spin."""
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Event] = {}
        self.allocations: dict[int, Allocation] = {}
        self.registered: dict[int, HostSpan] = {}
        self.library: SimpleNamespace = SimpleNamespace(
            **{name: self._pointer(name) for name in cuda.PROTOTYPES if name != cuda.BATCH_CALL}
        )
        """Stand-in for libcuda."""
        self._batch_pointer = self._pointer(cuda.BATCH_CALL)
        self._changed = threading.Condition(threading.RLock())
        self._of_thread = threading.local()
        self._lost: dict[int, int] = {}
        self._refused: dict[int, int] = {}
        self._initialized = False
        self._captures: dict[int, int] = {}

    # --- for tests ----------------------------------------------------------------------------------------------------

    def fail(self, number: int, code: int = OUT_OF_MEMORY) -> None:
        """Refuse the call with this number, counted from 0 as in :attr:`calls`."""
        self._refused[number] = code

    def lose(self, device: int, code: int = ILLEGAL_ADDRESS) -> None:
        """End the context of a device, as a faulty kernel does."""
        with self._changed:
            self._lost[device] = code
            self._changed.notify_all()

    def kernel(self, stream: int, run: Callable[[], object], gate: threading.Event | None = None) -> None:
        """Add an engine's work to a stream. Its gate delays its end."""
        with self._changed:
            self._add(self.streams[stream], Work(run, ready=lambda: gate is None or gate.is_set()))

    def default_stream(self, device: int = 0) -> int:
        """Return a handle of a device's default stream, for :meth:`kernel` only."""
        handle = next(_handles)
        self.streams[handle] = Stream(device, is_default=True)
        return handle

    def open_gate(self, gate: threading.Event) -> None:
        """Set a gate, and wake the threads that wait for its work."""
        gate.set()
        with self._changed:
            self._changed.notify_all()

    def progress(self) -> None:
        """Do all work that is ready."""
        with self._changed:
            while steps := self._steps():
                steps[0]()

    def read(self, address: int, nbytes: int) -> bytes:
        """Return the current contents of a device's memory."""
        allocation = find(self.allocations, address, nbytes)
        assert allocation is not None, f"no memory of a device at {address:#x}"
        return allocation.read(address, nbytes)

    def write(self, address: int, data: bytes) -> None:
        """Write into a device's memory now, as a kernel does."""
        allocation = find(self.allocations, address, len(data))
        assert allocation is not None, f"no memory of a device at {address:#x}"
        allocation.write(address, data)

    def capture(self, stream: int) -> None:
        """Begin to capture a stream into a graph, in global mode.

        The capture belongs to this thread.
        """
        with self._changed:
            self.streams[stream].captured_in = stream
            self._captures[stream] = threading.get_ident()

    def end_capture(self, stream: int) -> None:
        """End the capture of a stream and of those that joined."""
        with self._changed:
            for one in self.streams.values():
                if one.captured_in == stream:
                    one.captured_in = None
            del self._captures[stream]

    def close(self) -> None:
        """Unmap the remaining memory of devices."""
        for allocation in self.allocations.values():
            allocation.close()
        self.allocations.clear()

    # --- entering -----------------------------------------------------------------------------------------------------

    def _pointer(self, name: str) -> Any:
        function = getattr(self, "_" + name.removesuffix("_v2"))
        return ctypes.CFUNCTYPE(ctypes.c_int, *cuda.PROTOTYPES[name])(partial(self._enter, name, function))

    def _enter(self, name: str, function: Callable[..., int | None], *args: Any) -> int:
        with self._changed:
            try:
                if name == "cuGetErrorName":
                    return function(*args) or 0
                number = len(self.calls)
                self.calls.append(name)
                refused = self._refused.pop(number, 0) or self._refuse(name)
                if name == cuda.BATCH_CALL:
                    ctypes.c_size_t.from_address(args[7]).value = cuda._NO_COPY
                if refused:
                    return refused
                self._moment()
                code = function(*args) or 0
                self._moment()
                return code
            except BaseException as exc:  # an exception cannot pass through C
                self.wrong.append(exc)
                return 999

    def _refuse(self, name: str) -> int:
        if not self._initialized and name != "cuInit":
            return NOT_INITIALIZED
        if name in _WITHOUT_CONTEXT:
            return 0
        device = self._device
        if device is None:
            return INVALID_CONTEXT
        if device in self._lost:
            return self._lost[device]
        others = any(thread != threading.get_ident() for thread in self._captures.values())
        mode = getattr(self._of_thread, "mode", 0)
        if name in _UNSAFE and self._captures and mode != _RELAXED and (not others or not mode):
            self.invalidated = True
            return CAPTURE_UNSUPPORTED
        return 0

    @property
    def _device(self) -> int | None:
        return getattr(self._of_thread, "device", None)

    def _steps(self) -> list[Callable[[], object]]:
        live = (stream for stream in self.streams.values() if stream.device not in self._lost)
        return [step for stream in live for step in stream.steps()]

    def _moment(self) -> None:
        """Do some work before or behind a call, as picked by :attr:`choose`."""
        while steps := self._steps():
            picked = self.choose(len(steps) + 1)
            if not picked:
                return
            steps[picked - 1]()

    def _do_until(self, over: Callable[[], bool]) -> int:
        device = self._device
        while not over():
            if device in self._lost:
                return self._lost[device]
            if steps := self._steps():
                steps[self.choose(len(steps))]()
            elif not self._changed.wait(_PATIENCE):
                raise AssertionError("a synchronization waits for work that never continues")
        return self._lost.get(device or 0, 0)

    # --- threads and devices ------------------------------------------------------------------------------------------

    def _cuInit(self, flags: int) -> int:
        self._initialized = self.devices > 0
        return 0 if self._initialized else NO_DEVICE

    def _cuDriverGetVersion(self, out: int) -> None:
        ctypes.c_int.from_address(out).value = self.version

    def _cuDeviceGetCount(self, out: int) -> None:
        ctypes.c_int.from_address(out).value = self.devices

    def _cuDeviceGet(self, out: int, ordinal: int) -> int:
        ctypes.c_int.from_address(out).value = ordinal
        return 0 if 0 <= ordinal < self.devices else 101

    def _cuDeviceGetAttribute(self, out: int, attribute: int, device: int) -> int:
        if attribute != cuda._USES_HOST_POINTERS:
            return INVALID_VALUE
        ctypes.c_int.from_address(out).value = int(self.host_pointers)
        return 0

    def _cuDeviceGetName(self, out: int, room: int, device: int) -> None:
        ctypes.memmove(out, f"fake device {device}".encode() + b"\0", min(room, len(f"fake device {device}") + 1))

    def _cuDeviceGetUuid(self, out: int, device: int) -> None:
        ctypes.memmove(out, device.to_bytes(16, "big"), 16)

    def _cuDevicePrimaryCtxRetain(self, out: int, device: int) -> None:
        self.contexts.add(device)
        ctypes.c_void_p.from_address(out).value = _CONTEXTS + device

    def _cuDevicePrimaryCtxGetState(self, device: int, flags: int, active: int) -> None:
        ctypes.c_int.from_address(active).value = int(device in self.contexts)

    def _cuCtxSetCurrent(self, context: int) -> None:
        self._of_thread.device = context - _CONTEXTS

    def _cuCtxPushCurrent(self, context: int) -> None:
        self._of_thread.below = [*getattr(self._of_thread, "below", ()), self._device]
        self._of_thread.device = context - _CONTEXTS

    def _cuCtxPopCurrent(self, out: int) -> None:
        ctypes.c_void_p.from_address(out).value = _CONTEXTS + self._here()
        self._of_thread.device = self._of_thread.below.pop()

    def _cuThreadExchangeStreamCaptureMode(self, mode: int) -> None:
        new = ctypes.c_int.from_address(mode)
        self._of_thread.mode, new.value = new.value, getattr(self._of_thread, "mode", 0)

    def _cuGetProcAddress(self, symbol: bytes, out: int, version: int, flags: int, status: int) -> int:
        there = symbol == cuda.BATCH_CALL.encode() and version <= self.version
        pointer = ctypes.cast(self._batch_pointer, ctypes.c_void_p).value if there else None
        ctypes.c_void_p.from_address(out).value = pointer
        return 0 if there else NOT_FOUND

    def _cuGetErrorName(self, code: int, out: int) -> None:
        names = {
            value: name
            for name, value in globals().items()
            if name[0].isupper() and name.isupper() and isinstance(value, int)
        }
        self._of_thread.text = ctypes.create_string_buffer(f"CUDA_ERROR_{names.get(code, 'UNKNOWN')}".encode())
        ctypes.c_void_p.from_address(out).value = ctypes.addressof(self._of_thread.text)

    # --- memory -------------------------------------------------------------------------------------------------------

    def _here(self) -> int:
        assert self._device is not None
        return self._device

    def _cuMemAlloc(self, out: int, nbytes: int) -> int:
        used = sum(one.nbytes for one in self.allocations.values() if one.device == self._here() and not one.opened)
        if not nbytes or used + nbytes > self.device_bytes:
            return OUT_OF_MEMORY if nbytes else INVALID_VALUE
        made = allocate(self._here(), nbytes)
        self.allocations[made.address] = made
        ctypes.c_void_p.from_address(out).value = made.address
        return 0

    def _cuMemFree(self, address: int) -> int:
        allocation = self.allocations.get(address)
        if allocation is None or allocation.opened:
            return INVALID_VALUE
        self._do_until(lambda: not any(one.queue for one in self.streams.values() if one.device == allocation.device))
        self.allocations.pop(address).close()
        return 0

    def _cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not nbytes or not (how := permissions(address, nbytes)) or ("w" not in how and not flags & cuda.READ_ONLY):
            return INVALID_VALUE
        if overlapping(self.registered, address, nbytes):
            return ALREADY_REGISTERED
        if sum(one.nbytes for one in self.registered.values()) + nbytes > self.most_registered:
            return OUT_OF_MEMORY
        device = None if flags & cuda.PORTABLE else self._here()
        self.registered[address] = HostSpan(address, nbytes, bool(flags & cuda.READ_ONLY), device)
        return 0

    def _cuMemHostUnregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) is not None else NOT_REGISTERED

    # --- streams and events -------------------------------------------------------------------------------------------

    def _cuStreamCreate(self, out: int, flags: int) -> None:
        self._make(self.streams, Stream(self._here(), blocking=not flags & cuda._NON_BLOCKING), out)

    def _cuEventCreate(self, out: int, flags: int) -> None:
        self._make(self.events, Event(self._here(), spins=not flags & cuda._BLOCKING_SYNC), out)

    def _make(self, table: dict[int, _V], made: _V, out: int) -> None:
        handle = next(_handles)
        table[handle] = made
        ctypes.c_void_p.from_address(out).value = handle

    def _cuStreamDestroy(self, stream: int) -> int:
        return 0 if self.streams.pop(stream, None) is not None else INVALID_HANDLE

    def _cuEventDestroy(self, event: int) -> int:
        return 0 if self.events.pop(event, None) is not None else INVALID_HANDLE

    def _cuEventRecord(self, handle: int, where: int) -> int:
        event, stream = self.events.get(handle), self.streams.get(where)
        if event is None or stream is None or event.device != stream.device:
            return INVALID_HANDLE
        event.recorded += 1
        event.captured_in = stream.captured_in
        self._add(stream, Work(partial(setattr, event, "done", event.recorded)))
        return 0

    def _cuStreamWaitEvent(self, where: int, handle: int, flags: int) -> int:
        event, stream = self.events.get(handle), self.streams.get(where)
        if event is None or stream is None:
            return INVALID_HANDLE
        recorded = event.recorded
        if event.captured_in is not None:
            stream.captured_in = event.captured_in
        self._add(stream, Work(lambda: None, ready=lambda: event.done >= recorded))
        return 0

    def _cuEventQuery(self, handle: int) -> int:
        event = self.events.get(handle)
        if event is None or event.captured_in is not None:
            return INVALID_HANDLE if event is None else CAPTURED_EVENT
        if event.holds:
            return 0
        if steps := self._steps():  # a device progresses by itself: a caller that polls often enough sees it
            steps[self.choose(len(steps))]()
        return NOT_READY

    def _cuEventSynchronize(self, handle: int) -> int:
        event = self.events.get(handle)
        if event is None or event.captured_in is not None:
            return INVALID_HANDLE if event is None else CAPTURED_EVENT
        self.spins += event.spins
        return self._do_until(lambda: event.holds)

    def _cuStreamSynchronize(self, handle: int) -> int:
        stream = self.streams.get(handle)
        if stream is None or stream.captured_in is not None:
            return INVALID_HANDLE if stream is None else CAPTURE_UNSUPPORTED
        return self._do_until(lambda: not stream.queue)

    def _cuStreamIsCapturing(self, handle: int, out: int) -> int:
        stream = self.streams.get(handle)
        ctypes.c_int.from_address(out).value = int(stream is not None and stream.captured_in is not None)
        return 0 if stream is not None else INVALID_HANDLE

    def _add(self, stream: Stream, work: Work) -> None:
        """Add work to a stream, after its implicit predecessors."""
        others = [one for one in self.streams.values() if one.queue and stream.waits_for(one)]
        work.behind = [one.queue[-1] for one in others]
        stream.add(work)

    # --- copies -------------------------------------------------------------------------------------------------------

    def _cuMemcpyHtoDAsync(self, to: int, at: int, nbytes: int, stream: int) -> int:
        return self._copy([(to, at, nbytes)], stream, pageable=True)

    def _cuMemcpyDtoHAsync(self, to: int, at: int, nbytes: int, stream: int) -> int:
        return self._copy([(to, at, nbytes)], stream, pageable=True)

    def _cuMemcpyBatchAsync(
        self,
        to: int,
        at: int,
        sizes: int,
        n: int,
        attributes: int,
        firsts: int,
        n_attributes: int,
        failed: int,
        stream: int,
    ) -> int:
        if not self.batches:
            return NOT_SUPPORTED
        if n > _MOST_PIECES:
            raise AssertionError(f"a batch of {n} copies: must be at most {_MOST_PIECES}")
        if not self.host_pointers:
            self._lost[self._here()] = ILLEGAL_ADDRESS
            return 0
        order = cuda.CopyAttributes.from_address(attributes).order
        if n_attributes != 1 or ctypes.c_size_t.from_address(firsts).value or order not in (1, 2, 3):
            return INVALID_VALUE
        column = ctypes.c_uint64 * n
        columns = (column.from_address(address) for address in (to, at, sizes))
        pieces = list(zip(*columns, strict=True))
        for number, piece in enumerate(pieces):
            if not piece[2] or not self._are_valid(*piece, pageable=False):
                ctypes.c_size_t.from_address(failed).value = number
                return INVALID_VALUE
        return self._copy(pieces, stream, any_order=order == cuda.ANY_ORDER)

    def _side(self, address: int, nbytes: int, device: int, *, pageable: bool) -> Allocation | HostSpan | None:
        """Return the memory of a copy's side; ``None`` if invalid."""
        found = find(self.allocations, address, nbytes) or find(self.registered, address, nbytes)
        if isinstance(found, Allocation) and found.device != device:
            return None
        if isinstance(found, HostSpan) and found.device not in (None, device):
            return found if pageable else None
        if found is None and pageable and not overlapping(self.registered, address, nbytes):
            how = permissions(address, nbytes)
            return HostSpan(address, nbytes, read_only="w" not in how) if how.startswith("r") else None
        return found

    def _are_valid(self, to: int, at: int, nbytes: int, *, pageable: bool) -> bool:
        """Return whether a copy has both ends, one on this device."""
        target, source = (self._side(one, nbytes, self._here(), pageable=pageable) for one in (to, at))
        if target is None or source is None or (isinstance(target, HostSpan) and target.read_only):
            return False
        return isinstance(target, Allocation) or isinstance(source, Allocation)

    def _copy(
        self, pieces: list[tuple[int, int, int]], handle: int, *, any_order: bool = False, pageable: bool = False
    ) -> int:
        stream = self.streams.get(handle)
        if stream is None or not all(self._are_valid(*piece, pageable=pageable) for piece in pieces):
            return INVALID_HANDLE if stream is None else INVALID_VALUE
        data: list[bytes] = []
        device = self._here()

        def read() -> None:
            work.read = None
            for _, at, nbytes in pieces:
                source = self._side(at, nbytes, device, pageable=pageable)
                if source is None:
                    self._lost[device] = ILLEGAL_ADDRESS
                    return
                data.append(source.read(at, nbytes))

        def run() -> None:
            if work.read is not None:
                read()
            for (to, _, nbytes), one in zip(pieces, data, strict=False):
                target = self._side(to, nbytes, device, pageable=pageable)
                if target is None:
                    self._lost[device] = ILLEGAL_ADDRESS
                    return
                target.write(to, one)

        work = Work(run, read=read, reads_early=any_order)
        self._add(stream, work)
        return 0

    # --- memory of another process ------------------------------------------------------------------------------------

    def _cuMemGetAddressRange(self, base: int, size: int, address: int) -> int:
        allocation = find(self.allocations, address, 1)
        if not isinstance(allocation, Allocation):
            return INVALID_VALUE
        ctypes.c_void_p.from_address(base).value = allocation.address
        ctypes.c_size_t.from_address(size).value = allocation.nbytes
        return 0

    def _cuIpcGetMemHandle(self, out: int, address: int) -> int:
        allocation = self.allocations.get(address)
        if allocation is None or allocation.opened or not self.shares:
            return INVALID_VALUE
        ctypes.memmove(out, allocation.handle(), 64)
        return 0

    def _cuIpcOpenMemHandle(self, out: int, handle: cuda.IpcHandle, flags: int) -> int:
        said = bytes(handle)
        mine = (one for one in self.allocations.values() if one.device == self._here())
        there = next((one for one in mine if one.opened and one.opened_by == said), None)
        if there is None:
            there = opened(said, self._here())
            if there is None:
                return INVALID_VALUE
            self.allocations[there.address] = there
        there.opened += 1
        ctypes.c_void_p.from_address(out).value = there.address
        return 0

    def _cuIpcCloseMemHandle(self, address: int) -> int:
        allocation = self.allocations.get(address)
        if allocation is None or not allocation.opened:
            return INVALID_VALUE
        allocation.opened -= 1
        if not allocation.opened:
            self.allocations.pop(address).close()
        return 0


@contextmanager
def use(fake: FakeCuda) -> Iterator[cuda.Driver]:
    """Replace libcuda by the fake for a block. Yields the driver.

    Not for two threads at once.
    """
    real = cuda.open_library
    cuda.open_library = lambda: fake.library
    cuda.find_driver.cache_clear()
    try:
        yield cuda.find_driver()
    finally:
        cuda.open_library = real
        cuda.find_driver.cache_clear()
        pinning.forget()
        fake.close()
