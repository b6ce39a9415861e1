"""Tiers from other packages.

A tier is found by its name, by module and class, or as a connector or adapter written for another system.
:func:`make_tier` makes a tier from a specification. A :class:`backends.abc.Tier` is used as it is; a native connector
(six methods) and an L2 adapter of LMCache (three event descriptors) get a host, which keeps the contract for them as
far as they allow.
"""

from typing import TYPE_CHECKING

from maru.base.lazy import lazily

from ._registry import make_tier as make_tier
from ._registry import register_tier as register_tier
from ._registry import register_tier_module as register_tier_module
from ._registry import known_tiers as known_tiers
from ._registry import read_spec as read_spec
from ._registry import TierFactory as TierFactory
from ._config import HostConfig as HostConfig
from ._errors import HostConfigError as HostConfigError
from ._errors import NoAnswer as NoAnswer
from ._errors import PluginClassError as PluginClassError
from ._errors import PluginFault as PluginFault
from ._errors import PluginModuleError as PluginModuleError
from ._errors import PluginTypeError as PluginTypeError
from ._errors import TierParameterError as TierParameterError
from ._errors import UnknownTier as UnknownTier

if TYPE_CHECKING:
    from ._hosted import HostedTier as HostedTier
    from ._hosted import HostStatistics as HostStatistics
    from ._lmcache import LMCacheTier as LMCacheTier
    from ._native import NativeTier as NativeTier

_HOMES = {
    "HostedTier": "._hosted",
    "HostStatistics": "._hosted",
    "LMCacheTier": "._lmcache",
    "NativeTier": "._native",
}

lazily(__name__, _HOMES)
