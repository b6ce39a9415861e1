"""Places a block of KV cache can live: one module for each place.

``backends.MemoryTier``, ``FileTier``, ``DeviceTier`` and ``MaruTier`` are imported when they are asked for, and torch only
when a :class:`~backends.device.DeviceTier` is made.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ._errors import BackendError as BackendError
from ._errors import BlockSizeError as BlockSizeError
from ._errors import CapacityError as CapacityError
from ._errors import DamagedBlock as DamagedBlock
from ._errors import DuplicateKeys as DuplicateKeys
from ._errors import MissingKeys as MissingKeys
from ._errors import PlaceClosed as PlaceClosed
from ._errors import PlaceInUse as PlaceInUse
from ._errors import StrayPath as StrayPath
from ._errors import Unproven as Unproven

if TYPE_CHECKING:
    from .device import DeviceTier as DeviceTier
    from .file import FileTier as FileTier
    from .maru import MaruTier as MaruTier
    from .memory import MemoryTier as MemoryTier

_PLACES = {"MemoryTier": "memory", "FileTier": "file", "DeviceTier": "device", "MaruTier": "maru"}


def __getattr__(name: str) -> Any:
    module = _PLACES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{module}", __name__), name)
