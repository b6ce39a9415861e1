"""Faults of a breaker, for those who plant them into scenarios and into random programs."""

from __future__ import annotations

import pytest

from offload import HealthState
from offload._health.breaker import Breaker, Call, Verdict


def a_breaker_never_closes(patch: pytest.MonkeyPatch) -> None:
    """Its probe is answered, and it is left alone for good."""
    release = Breaker.release

    def never(self: Breaker, turn: int, call: Call, verdict: Verdict, now: float, cause: str = "") -> None:
        if self.state is HealthState.HALF_OPEN and verdict is Verdict.ANSWERED:
            verdict = Verdict.FAULT
        release(self, turn, call, verdict, now, cause)

    patch.setattr(Breaker, "release", never)


def a_breaker_never_tries_again(patch: pytest.MonkeyPatch) -> None:
    """Whoever is alone once is so for good."""
    acquire = Breaker.acquire
    patch.setattr(
        Breaker, "acquire", lambda self, now: acquire(self, now) if self.state is HealthState.CLOSED else None
    )
