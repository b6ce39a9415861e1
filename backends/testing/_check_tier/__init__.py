"""The contract of a place as a test.

There is one check per promise of :mod:`backends.abc`.

Each check gets a tier of its own, stores blocks whose bytes follow from their keys, and ends with the tier at rest: no
room is reserved and no block is held. No check sleeps or races: each waits for the state that it needs.
"""

from ._checking import MakeTier as MakeTier
from ._checking import check_tier as check_tier
