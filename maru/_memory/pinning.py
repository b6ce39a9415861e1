"""Pinning: host memory that a CUDA device copies from and to by itself (cudaHostRegister), through torch.

torch is not imported unless the configuration names it: it takes over a second and 200 MiB.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Protocol

from .._errors import CannotMap

_PORTABLE = 1
"""Pinned for every device and thread (cudaHostRegisterPortable)."""
_READ_ONLY = 8
"""The device only reads it (cudaHostRegisterReadOnly): without it, memory that is mapped read-only is refused."""

_log = logging.getLogger(__name__)


class Pinning(Protocol):
    """Pins memory, and lets go of it."""

    def pin(self, address: int, length: int, writable: bool) -> str:
        """Pin it. An empty text, or why that cannot be."""
        ...

    def unpin(self, address: int) -> None:
        """Let go of what was pinned from this address on. Never raises."""
        ...


class CudaPinning:
    """cudaHostRegister, by way of torch."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def pin(self, address: int, length: int, writable: bool) -> str:
        try:
            flags = _PORTABLE if writable else _PORTABLE | _READ_ONLY
            code = int(self._torch.cuda.cudart().cudaHostRegister(address, length, flags))
        except Exception as exc:  # no driver, no device, or a torch that was built without CUDA
            return f"{type(exc).__name__}: {exc}"
        if not code:
            return ""
        self._forget_error()
        return f"cudaHostRegister gave error {code}"

    def unpin(self, address: int) -> None:
        try:
            code = int(self._torch.cuda.cudart().cudaHostUnregister(address))
        except Exception as exc:  # the interpreter is going down
            _log.debug("not unpinned: %r", exc)
        else:
            if code:
                self._forget_error()

    def _forget_error(self) -> None:
        """Clear an error that CUDA keeps until it is read. Otherwise a kernel of the engine would report it."""
        try:
            self._torch.empty(1, device="cuda").fill_(0)
        except Exception:
            _log.debug("there was one", exc_info=True)


def find_pinning(wanted: bool | None) -> Pinning | None:
    """How to pin here: None if it is not wanted, or if this process does not use CUDA.

    Args:
        wanted: True imports torch if need be. None: only where torch is imported already, and has a device.

    Raises:
        CannotMap: it is wanted, and there is no CUDA.
    """
    if wanted is False:
        return None
    torch = sys.modules.get("torch")
    if wanted and torch is None:
        try:
            import torch
        except ImportError as exc:
            raise CannotMap("pinning needs torch: pip install trio-offload[torch]") from exc
    if torch is not None and torch.cuda.is_available():
        return CudaPinning(torch)
    if wanted:
        raise CannotMap("pinning is wanted, but torch finds no CUDA device")
    return None
