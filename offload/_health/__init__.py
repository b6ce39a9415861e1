"""Health of tiers: faults, and the breaker that stops calls."""

from .breaker import Health as Health
from .breaker import HealthState as HealthState
from .breaker_tier import BreakerLease as BreakerLease
from .breaker_tier import BreakerTier as BreakerTier
from .breaker_tier import with_breaker as with_breaker
