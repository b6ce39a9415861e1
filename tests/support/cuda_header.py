"""Compare the prototypes of :mod:`maru.base.memory.cuda` with NVIDIA's cuda.h, of CUDA 12.8 or 12.9.

``python -m tests.support.cuda_header FILE``. The header is not part of this repository: the wheel nvidia-cuda-runtime-cu12 of
those versions brings it.
"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path
from typing import Any, Final

from maru.base.memory import cuda

_TYPES: Final = {
    "size_t": ctypes.c_size_t,
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "cuuint64_t": ctypes.c_uint64,
    "CUdevice": ctypes.c_int,
    "CUdevice_attribute": ctypes.c_int,
    "CUresult": ctypes.c_int,
    "CUdeviceptr": ctypes.c_void_p,
    "CUcontext": ctypes.c_void_p,
    "CUstream": ctypes.c_void_p,
    "CUevent": ctypes.c_void_p,
    "CUipcMemHandle": cuda.IpcHandle,
    "const char *": ctypes.c_char_p,
}
_VALUES: Final = {
    "CU_MEMHOSTREGISTER_PORTABLE": cuda.PORTABLE,
    "CU_MEMHOSTREGISTER_READ_ONLY": cuda.READ_ONLY,
    "CU_STREAM_NON_BLOCKING": cuda._NON_BLOCKING,
    "CU_EVENT_BLOCKING_SYNC": cuda._BLOCKING_SYNC,
    "CU_EVENT_DISABLE_TIMING": cuda._NO_TIMING,
    "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL": cuda._THREAD_LOCAL,
    "CU_STREAM_CAPTURE_MODE_RELAXED": cuda._RELAXED,
    "CU_STREAM_CAPTURE_STATUS_NONE": cuda._NOT_CAPTURING,
    "CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS": cuda._LAZY_PEER_ACCESS,
    "CU_MEMCPY_SRC_ACCESS_ORDER_STREAM": cuda.STREAM_ORDER,
    "CU_MEMCPY_SRC_ACCESS_ORDER_ANY": cuda.ANY_ORDER,
    "CUDA_ERROR_NOT_READY": cuda._NOT_READY,
    "CUDA_ERROR_NOT_SUPPORTED": cuda._NOT_SUPPORTED,
    "CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": cuda._USES_HOST_POINTERS,
}
_STRUCTS: Final = {
    "CUmemcpyAttributes_st": ["srcAccessOrder", "srcLocHint", "dstLocHint", "flags"],
    "CUmemLocation_st": ["type", "id"],
    "CUipcMemHandle_st": ["reserved"],
    "CUuuid_st": ["bytes"],
}


def differences(header: str) -> list[str]:
    """Return what is not as the header says."""
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    found = []
    for name, types in cuda.PROTOTYPES.items():
        bare = name.removesuffix("_v2")
        declared = re.search(rf"^CUresult CUDAAPI {bare}\(([^)]*)\);", header, re.MULTILINE)
        renamed = re.search(rf"^#define {bare}\s+(?:__CUDA_API_PTSZ\()?(\w+)", header, re.MULTILINE)
        if declared is None or [_type(text) for text in declared[1].split(",") if text != "void"] != list(types):
            found.append(f"{name}: {declared and declared[1]}")
        if renamed is not None and renamed[1] != name:
            found.append(f"{name}: the header calls {renamed[1]}")
    for name, value in _VALUES.items():
        said = re.search(rf"\b{name}\s*=?\s*\(?(0x[0-9a-fA-F]+|\d+)", header)
        if said is None or int(said[1], 0) != value:
            found.append(f"{name}: {said and said[1]}")
    for name, fields in _STRUCTS.items():
        said = re.search(rf"struct {name} \{{(.*?)\}}", header, re.DOTALL)
        if said is None or re.findall(r"(\w+)(?:\[\w+\])?;", said[1]) != fields:
            found.append(f"{name}: {said and said[1]}")
    for code in cuda._STICKY:
        if not re.search(rf"= {code}\b", header):
            found.append(f"error {code} is not in the header")
    return found


def _type(text: str) -> Any:
    text = " ".join(text.split())
    bare = re.sub(r"\s*\w+$", "", text).strip()
    if bare == "const char *" and text.endswith("symbol"):
        return ctypes.c_char_p
    return ctypes.c_void_p if "*" in text else _TYPES.get(bare)


if __name__ == "__main__":
    wrong = differences(Path(sys.argv[1]).read_text(errors="replace"))
    print(
        "\n".join(wrong)
        or f"{len(cuda.PROTOTYPES)} prototypes, {len(_VALUES)} values, {len(_STRUCTS)} structs: as it says"
    )
    sys.exit(bool(wrong))
