"""The contract of a place as a test, for every place: what :mod:`backends.abc` promises, tried one promise at a time.

Each check gets a tier of its own, stores blocks whose bytes follow from their keys, and ends with the tier at rest: no
room is reserved and no block is held. No check sleeps or races: what must come first is waited for.
"""

from ._checking import MakeTier as MakeTier
from ._checking import check_tier as check_tier
