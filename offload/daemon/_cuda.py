"""Memory of a CUDA device that another process has allocated, by its IPC handle: both sides.

The engine names the allocation that a tensor lies in (``cudaIpcGetMemHandle``), and where in it; the daemon opens the
allocation (``cudaIpcOpenMemHandle``) once, makes tensors over it, and copies by :class:`backends.device.DeviceTier`, as in
one process. The calls are those of the CUDA runtime that torch has loaded: torch's own sharing of tensors counts references
in a file of its own, which would tie the daemon to processes of torch.

Rule 1. An allocation is opened once in a process, however many tensors lie in it: CUDA refuses a second time. It is closed
        with the last reference to it, like all memory of an engine (:mod:`._memory`).
Rule 2. The engine must not free the allocation while its cache is registered. Where its process ends, the driver keeps what the
        daemon has open.
Rule 3. What is said of the allocation is checked against what the driver says of it.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from backends.block_layout import TensorMemory
from backends.slots import Storage

from ._layout import BadLayout, CacheLayout
from ._memory import TensorStorage
from ._messages import CudaMemory, TensorLayout

_LAZY_PEER_ACCESS: Final = 1
_TYPES: Final = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}
"""The type of items of so many bytes, as ``__cuda_array_interface__`` names it."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


@cache
def _runtime() -> Any:
    """The CUDA runtime that torch has loaded.

    Raises:
        BadLayout: there is none.
    """
    import torch

    if not torch.cuda.is_available():
        raise BadLayout("the memory of a CUDA device was registered, and this process sees no device")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    loaded = re.search(r"\S*libcudart\S*\.so\S*", Path("/proc/self/maps").read_text())
    runtime = ctypes.CDLL(loaded[0] if loaded else None)  # linked in statically, it is found among what is loaded
    runtime.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint]
    runtime.cudaIpcCloseMemHandle.argtypes = [ctypes.c_void_p]
    runtime.cudaIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), ctypes.c_void_p]
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return runtime


def _check(code: int, what: str) -> None:
    if code:
        raise BadLayout(f"{what} failed: {_runtime().cudaGetErrorString(code).decode()}")


def _extent_of(address: int) -> tuple[int, int]:
    """Start and size of the allocation that this address is in."""
    driver = ctypes.CDLL("libcuda.so.1")
    base, size = ctypes.c_void_p(), ctypes.c_size_t()
    code = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_void_p(address))
    if code or base.value is None:
        raise BadLayout(f"the driver knows no allocation at {address:#x} (CUresult {code})")
    return base.value, size.value


# --- the daemon's side --------------------------------------------------------------------------------------------------


class _Allocation:
    """One allocation of another process, opened in this one."""

    def __init__(self, device: int, handle: bytes) -> None:
        import torch

        self.device = device
        opened = ctypes.c_void_p()
        with torch.cuda.device(device):
            code = _runtime().cudaIpcOpenMemHandle(
                ctypes.byref(opened), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
            )
        _check(code, "cudaIpcOpenMemHandle")
        assert opened.value is not None
        self.address: int = opened.value
        self.size: int = _extent_of(self.address)[1]

    def __del__(self) -> None:
        if hasattr(self, "address"):
            _runtime().cudaIpcCloseMemHandle(ctypes.c_void_p(self.address))


class _Span:
    """Some bytes of an allocation, as torch takes them; the tensor keeps it, and it keeps the allocation."""

    def __init__(self, allocation: _Allocation, offset: int, count: int, item_bytes: int) -> None:
        self._allocation = allocation
        self.__cuda_array_interface__: Mapping[str, object] = {
            "shape": (count,),
            "typestr": _TYPES[item_bytes],
            "data": (allocation.address + offset, False),
            "version": 3,
        }


class CudaMemories:
    """One memory of a device, as a cache is registered over it."""

    def __init__(self, memory: CudaMemory, allocation: _Allocation) -> None:
        if memory.offset + memory.size > allocation.size:
            raise BadLayout(f"it ends at byte {memory.offset + memory.size} of an allocation of {allocation.size}")
        self.size: int = memory.size
        self.offset: int = memory.offset
        self.allocation: _Allocation = allocation

    @classmethod
    def open(cls, memories: Sequence[CudaMemory]) -> list[CudaMemories]:
        """Open the memories of one cache. Blocking; imports torch.

        Raises:
            BadLayout: there is no such device here, or it does not know this memory.
        """
        opened: dict[bytes, _Allocation] = {}
        for memory in memories:
            if memory.handle not in opened:
                opened[memory.handle] = _Allocation(_device_of(memory.device), memory.handle)
        return [cls(memory, opened[memory.handle]) for memory in memories]

    def storage(self, layout: CacheLayout, memories: Sequence[CudaMemories]) -> Storage:
        """See :class:`~offload.daemon._memory.EngineMemory`."""
        import torch

        tensors = []
        for tensor in layout.tensors:
            memory = memories[tensor.memory]
            count = (memory.size - tensor.offset) // tensor.item_bytes
            span = _Span(memory.allocation, memory.offset + tensor.offset, count, tensor.item_bytes)
            flat = torch.as_tensor(span, device=f"cuda:{memory.allocation.device}")
            tensors.append(flat.as_strided(tensor.shape, tensor.strides))
        return TensorStorage(tensors, layout)


def _device_of(uuid: str) -> int:
    import torch

    _runtime()
    for device in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(device).uuid) == uuid:
            return device
    raise BadLayout(f"this process sees no device {uuid}: give the daemon the devices of its engines")


# --- the engine's side --------------------------------------------------------------------------------------------------


def describe_cuda(lying: Sequence[TensorMemory], axes: Sequence[int]) -> tuple[list[TensorLayout], list[CudaMemory]]:
    """The tensors of a cache, and the allocations that they lie in.

    Raises:
        BadLayout: the driver does not share one of them.
    """
    import torch

    memories: dict[int, CudaMemory] = {}
    tensors = []
    for tensor, axis in zip(lying, axes, strict=True):
        base, size = _extent_of(tensor.address)
        if base not in memories:
            handle = _Handle()
            with torch.cuda.device(tensor.device):
                _check(
                    _runtime().cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(base)), "cudaIpcGetMemHandle"
                )
            uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
            memories[base] = CudaMemory(uuid, bytes(handle), 0, size)
        tensors.append(
            TensorLayout(
                list(memories).index(base),
                tensor.address - base,
                tensor.item_bytes,  # type: ignore[arg-type]  # checked by the daemon
                list(tensor.shape),
                list(tensor.strides),
                axis % len(tensor.shape),
            )
        )
    return tensors, list(memories.values())
