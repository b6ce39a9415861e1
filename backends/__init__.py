"""Tiers for KV-cache blocks, one module per tier.

``backends.MemoryTier``, ``FileTier``, ``DeviceTier`` and ``MaruTier`` are imported when they are first used, and torch only
when a :class:`~backends.device.DeviceTier` is made. ``make_tier`` makes any tier from a specification, also those of plugins.
"""

from typing import TYPE_CHECKING

from maru.base.lazy import lazily

from ._errors import BackendError as BackendError
from ._errors import BlockSizeError as BlockSizeError
from ._errors import CapacityError as CapacityError
from ._errors import DamagedBlock as DamagedBlock
from ._errors import DuplicateKeys as DuplicateKeys
from ._errors import MissingKeys as MissingKeys
from ._errors import PlaceClosed as PlaceClosed
from ._errors import PlaceInUse as PlaceInUse
from ._errors import RepeatedPlaces as RepeatedPlaces
from ._errors import StrayPath as StrayPath
from ._errors import Unproven as Unproven
from ._errors import UnreadableBlock as UnreadableBlock

if TYPE_CHECKING:
    from .device import DeviceTier as DeviceTier
    from .file import FileTier as FileTier
    from .maru import MaruTier as MaruTier
    from .memory import MemoryTier as MemoryTier
    from .plugins import make_tier as make_tier
    from .plugins import register_tier as register_tier
    from .plugins import register_tier_module as register_tier_module

_HOMES = {
    "MemoryTier": ".memory",
    "FileTier": ".file",
    "DeviceTier": ".device",
    "MaruTier": ".maru",
    "make_tier": ".plugins",
    "register_tier": ".plugins",
    "register_tier_module": ".plugins",
}

lazily(__name__, _HOMES)
