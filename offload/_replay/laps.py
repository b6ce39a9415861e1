"""A trace played several times, with a share of names kept. Pure.

The requests are the same. A trace of an hour does not show the behaviour over a week, and a trace that is simply
repeated hits everything from the second lap on. So in each lap most of the blocks are new, as tomorrow's conversations
are, and the others are those of the lap before.

Rule 1. The kept names are closed under prefixes: a hash id names a block with everything before it, so a block keeps
    its name only if all blocks before it do. Kept are the prompts of requests drawn at random, without their last
    block.
Rule 2. The same trace, number of laps and share give the same names in any process.
Rule 3. A lap is generated when it is played and then dropped: memory does not grow with the number of laps.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import msgspec

from .trace import Request


class Laps:
    """The laps of a trace; each iteration begins with the first.

    Args:
        requests: of the trace, in the order of their time.
        laps: number of laps.
        rename: share of the different blocks that have new names in each lap after the first.
    """

    def __init__(self, requests: Sequence[Request], laps: int = 1, rename: float = 0.0) -> None:
        if laps < 1 or not 0.0 <= rename <= 1.0:
            raise ValueError(f"laps = {laps}, rename = {rename}: must be at least 1, and from 0 to 1")
        self.requests: Sequence[Request] = requests
        self.laps: int = laps
        ids = {hash_id for request in requests for hash_id in request.hash_ids}
        self._different = len(ids)
        self._stride = max(ids, default=0) + 1
        self._kept = round((1.0 - rename) * len(ids))

    def __len__(self) -> int:
        return self.laps * len(self.requests)

    def __iter__(self) -> Iterator[Sequence[Request]]:
        yield self.requests
        lap_of: dict[int, int] = {}  # the lap in which a block got its name; blocks of lap 0 have no entry
        for lap in range(1, self.laps):
            kept = self._kept_in(lap)
            for request in self.requests:
                for hash_id in request.hash_ids:
                    if hash_id not in kept:
                        lap_of[hash_id] = lap
            yield [self._renamed(request, lap, lap_of) for request in self.requests]

    @property
    def unique_blocks(self) -> int:
        """Number of different blocks in all laps."""
        return self._different + (self.laps - 1) * (self._different - self._kept)

    @property
    def period(self) -> float:
        """Milliseconds from the start of one lap to that of the next.

        It is the length of the trace plus one mean distance.
        """
        requests = self.requests
        if len(requests) < 2:
            return 0.0
        length = requests[-1].timestamp - requests[0].timestamp
        return length + length / (len(requests) - 1)

    def _kept_in(self, lap: int) -> set[int]:
        """Return the blocks that keep their names from the lap before."""
        order = list(range(len(self.requests)))
        random.Random(lap).shuffle(order)
        kept: set[int] = set()
        for at in order:
            for hash_id in self.requests[at].hash_ids:
                if len(kept) == self._kept:
                    return kept
                kept.add(hash_id)
        return kept

    def _renamed(self, request: Request, lap: int, lap_of: dict[int, int]) -> Request:
        stride = self._stride
        return msgspec.structs.replace(
            request,
            timestamp=request.timestamp + lap * self.period,
            hash_ids=tuple([hash_id + stride * lap_of.get(hash_id, 0) for hash_id in request.hash_ids]),
        )
