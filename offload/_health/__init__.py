"""Whether a tier is well: who judges what it answers, and who keeps a broken one from being asked."""

from .breaker import Health as Health
from .breaker import HealthState as HealthState
from .guarded_tier import GuardedRemoteTier as GuardedRemoteTier
from .guarded_tier import GuardedTier as GuardedTier
from .guarded_tier import guarded as guarded
