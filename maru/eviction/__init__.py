"""Which keys a full place gives up: the eviction policies, for page store, tiers and block pool alike. Pure.

:class:`EvictionPolicy` is the contract and has the rules; every other class here keeps it. Which one when:
:class:`AdaptiveLRFU` unless you know better, :class:`LRU` where a use must cost next to nothing. ``offload replay TRACE
--compare-eviction`` plays your own requests against all of them.
"""

from ._contract import EvictionPolicy as EvictionPolicy
from ._adaptive import AdaptiveLRFU as AdaptiveLRFU
from ._lru import LRU as LRU
from ._wtinylfu import WTinyLFU as WTinyLFU
