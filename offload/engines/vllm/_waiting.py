"""Limits on the pins of waiting requests, by tier. Pure.

A tier in which everything is pinned takes no new block, so that running requests store nothing. Many requests may wait,
and for long; so together they keep a share of each tier.

Rule 1. A request that has arrived is looked up if there is room; otherwise only when vLLM asks for it.
Rule 2. If vLLM asks for a request and there is no room, others that it has not asked for since the last step are
    released, the oldest first. Those it has asked for are about to be computed, which makes room: the request waits for
    them.
Rule 3. No request waits for room while nobody keeps anything: a single prompt may be longer than the share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from backends.abc import Key

SHARE: Final = 2
"""Divisor of a tier's capacity that waiting requests may pin: a half.

That is enough for the requests that come next, and the rest is for running ones.
"""
UNKNOWN_TIER: Final = 1024
"""Blocks of a tier of unknown capacity, as a daemon's."""


def limits_of(capacities: Mapping[str, int], block_bytes: int) -> dict[str, int]:
    """Return the blocks of each tier that waiting requests may keep.

    Capacities are in bytes; 0: not known.
    """
    return {tier: max(1, nbytes // block_bytes // SHARE) for tier, nbytes in capacities.items() if nbytes}


@attrs.define(eq=False)
class _Pins:
    """The pins of one request."""

    keys: Sequence[Key]
    """Keys of its lookup."""
    asked: int
    """The step in which vLLM last asked for the request."""
    held: Sequence[tuple[str, Key]] = ()
    """Blocks by tier; none until there is an answer."""


@attrs.define(eq=False)
class WaitingPins:
    """Pins of all waiting requests."""

    limits: Mapping[str, int]
    """Blocks by tier that they may keep together."""
    _requests: dict[str, _Pins] = attrs.Factory(dict)  # the oldest first
    _unanswered: dict[str, int] = attrs.Factory(dict)  # keys of requests whose lookups had no answer yet
    _holders: Counter[tuple[str, Key]] = attrs.Factory(Counter)
    _blocks: Counter[str] = attrs.Factory(Counter)  # of each tier that somebody holds, once each
    _step: int = 1
    _is_searched: bool = False  # vLLM has asked for all of them since the last step

    def step(self) -> None:
        """Count a step of vLLM."""
        self._step += 1
        self._is_searched = False

    def asked(self, request_id: str) -> None:
        """Record that vLLM asks for a request."""
        if request_id in self._requests:
            self._requests[request_id].asked = self._step

    def begin(self, request_id: str, keys: Sequence[Key], *, is_asked: bool) -> None:
        """Count a lookup that has begun.

        ``is_asked``: vLLM asks for the request, which has not only arrived.
        """
        if not self._requests:  # an error that came between two counts ends here
            self._unanswered, self._holders, self._blocks = {}, Counter(), Counter()
        self._requests[request_id] = _Pins(keys, self._step if is_asked else -1)
        self._unanswered[request_id] = len(keys)
        self._is_searched = False

    def answer(self, request_id: str, runs: Sequence[tuple[str, int]]) -> None:
        """Count a lookup's pins: leading keys, in runs of a tier."""
        if self._unanswered.pop(request_id, None) is None:
            return
        pins = self._requests.get(request_id)
        if pins is None:
            return
        tiers = [tier for tier, blocks in runs for _ in range(blocks)]
        pins.held = list(zip(tiers, pins.keys, strict=False))
        for one in pins.held:
            self._holders[one] += 1
            self._blocks[one[0]] += self._holders[one] == 1

    def release(self, request_id: str) -> None:
        """Remove the pins of a request, which does not keep them now."""
        self._unanswered.pop(request_id, None)
        pins = self._requests.pop(request_id, None)
        for one in () if pins is None else pins.held:
            self._holders[one] -= 1
            if not self._holders[one]:
                del self._holders[one]
                self._blocks[one[0]] -= 1

    @property
    def unanswered(self) -> list[str]:
        """Requests whose lookups had no answer yet."""
        return list(self._unanswered)

    @property
    def has_room(self) -> bool:
        """Whether one more request may be looked up.

        Keys without an answer count as if the largest tier had them.
        """
        if not self._requests:
            return True
        largest = max(self.limits.values(), default=UNKNOWN_TIER)
        if sum(self._unanswered.values()) >= largest:
            return False
        return all(blocks < self.limits.get(tier, UNKNOWN_TIER) for tier, blocks in self._blocks.items())

    def oldest(self) -> str | None:
        """Return the oldest request that vLLM has skipped, if any.

        vLLM has not asked for it since the last step.
        """
        if self._is_searched:
            return None
        skipped = (request_id for request_id, pins in self._requests.items() if pins.asked < self._step - 1)
        oldest = next(skipped, None)
        self._is_searched = oldest is None
        return oldest
