"""Eviction policies, for the page store, tiers and block pool. Pure.

A policy chooses the keys to evict from a full place. :class:`EvictionPolicy` is the contract and has the rules; every
other class here implements it. How to choose one: :class:`AdaptiveLRFU` by default, :class:`LRU` if a use must cost
next to nothing. ``offload replay TRACE --compare-eviction`` replays your own requests against all of them.
"""

from ._contract import EvictionPolicy as EvictionPolicy
from ._adaptive import AdaptiveLRFU as AdaptiveLRFU
from ._lru import LRU as LRU
from ._wtinylfu import WTinyLFU as WTinyLFU
