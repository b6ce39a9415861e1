"""Whether a tier works: what counts as its fault, and the circuit breaker that keeps a broken one from being asked."""

from .breaker import Health as Health
from .breaker import HealthState as HealthState
from .breaker_tier import BreakerTier as BreakerTier
from .breaker_tier import with_breaker as with_breaker
