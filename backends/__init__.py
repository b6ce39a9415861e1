"""Places a block of KV cache can live: one module for each place.

``backends.MemoryTier``, ``FileTier``, ``DeviceTier`` and ``MaruTier`` are imported when they are asked for, and torch only
when a :class:`~backends.device.DeviceTier` is made.
"""

from typing import TYPE_CHECKING

from maru._lazy import lazily

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

_HOMES = {
    "MemoryTier": ".memory",
    "FileTier": ".file",
    "DeviceTier": ".device",
    "MaruTier": ".maru",
}

lazily(__name__, _HOMES)
