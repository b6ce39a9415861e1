"""Copies between buffers and pages, as columns of addresses. Any thread.

Pieces that are adjacent on both sides are copied as one run. Copies release the interpreter's lock, sums do not, so
both together are done in portions: a portion is summed while it is still in the core's own cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import xxhash

Buffer: TypeAlias = Any
"""Object with its bytes in one run.

It has the buffer protocol, or is a tensor on the CPU.
"""

_WARM_BYTES: Final = 256 * 1024
_memmove = ctypes.memmove
_digest = xxhash.xxh3_64_intdigest


class _Py_buffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_Py_buffer), ctypes.c_int]
_get_buffer.restype = ctypes.c_int
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = [ctypes.POINTER(_Py_buffer)]
_release_buffer.restype = None
_SIMPLE, _WRITABLE = 0, 1


class Places:
    """Addresses and sizes of buffers, which are kept in place until closed.

    Raises:
        TypeError: not a buffer.
        ValueError: a tensor that is not contiguous or not on the CPU.
        BufferError: not contiguous, or read-only although it is to be written.
    """

    __slots__ = ("_held", "_tensors", "addresses", "sizes")

    def __init__(self, buffers: Sequence[Buffer], *, write: bool) -> None:
        self.addresses: list[int] = []
        self.sizes: list[int] = []
        self._held: list[_Py_buffer] = []
        self._tensors: list[Buffer] = []
        try:
            for buffer in buffers:
                self._add(buffer, _WRITABLE if write else _SIMPLE)
        except BaseException:
            self.close()
            raise

    def _add(self, buffer: Buffer, flags: int) -> None:
        pointer = getattr(buffer, "data_ptr", None)
        if pointer is not None:
            if buffer.device.type != "cpu" or not buffer.is_contiguous():
                raise ValueError(f"the tensor must be contiguous and on the CPU; its device is {buffer.device}")
            self._tensors.append(buffer)
            self.addresses.append(pointer())
            self.sizes.append(buffer.nbytes)
            return
        view = _Py_buffer()
        _get_buffer(buffer, view, flags)
        self._held.append(view)
        self.addresses.append(view.buf or 0)
        self.sizes.append(view.len)

    def close(self) -> None:
        """Release the buffers. Idempotent."""
        held, self._held = self._held, []
        self._tensors.clear()
        for view in held:
            _release_buffer(view)

    def __enter__(self) -> Places:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def copy(to: Sequence[int], at: Sequence[int], sizes: Sequence[int]) -> None:
    """Copy ``sizes[i]`` bytes from ``at[i]`` to ``to[i]``, for every i."""
    run_to = run_at = run_bytes = 0
    for target, source, size in zip(to, at, sizes, strict=True):
        if target == run_to + run_bytes and source == run_at + run_bytes:
            run_bytes += size
            continue
        if run_bytes:
            _memmove(run_to, run_at, run_bytes)
        run_to, run_at, run_bytes = target, source, size
    if run_bytes:
        _memmove(run_to, run_at, run_bytes)


def sums(at: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return the xxh3-64 of each run of bytes."""
    return [_digest((ctypes.c_char * size).from_address(address)) for address, size in zip(at, sizes, strict=True)]


def copy_and_sum(to: Sequence[int], at: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Copy like :func:`copy`; return the xxh3-64 of each as it arrived."""
    arrived: list[int] = []
    start, portion = 0, 0
    for stop, size in enumerate(sizes, start=1):
        portion += size
        if portion >= _WARM_BYTES or stop == len(sizes):
            if stop - start == 1:
                arrived.append(_copy_and_sum_one(to[start], at[start], size))
            else:
                copy(to[start:stop], at[start:stop], sizes[start:stop])
                arrived += sums(to[start:stop], sizes[start:stop])
            start, portion = stop, 0
    return arrived


def _copy_and_sum_one(to: int, at: int, size: int) -> int:
    """Copy one run in portions, and return its sum.

    The beginning of a MiB has left the cache when its end has come.
    """
    state = xxhash.xxh3_64()
    for begin in range(0, size, _WARM_BYTES):
        n = min(_WARM_BYTES, size - begin)
        _memmove(to + begin, at + begin, n)
        state.update((ctypes.c_char * n).from_address(to + begin))
    return state.intdigest()
