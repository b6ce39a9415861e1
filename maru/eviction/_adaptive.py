"""The default policy: LRFU with a half-life that follows the traffic.

No half-life is right everywhere. On the conversation trace the best one is ten times the capacity if little is held,
twice if more is, and a fraction of it if half of all blocks fit; on other traffic it differs again. So several are
tried all the time, each on a *shadow*: an LRFU of keys only, that sees a sample of the keys and is smaller in the same
proportion. The half-life whose shadow had the most hits lately is used. A sampled key costs some ten microseconds, and
one key in sixteen is sampled if the place is not small.

- A key is sampled when it comes in and is not remembered, after a gap drawn from a generator with a fixed seed. A fixed
  gap would pick the same depth of every prompt, and Python's hash differs from process to process. It stays sampled
  until every shadow has forgotten it.
- A shadow holds its share of the capacity: at least ``_FEWEST`` keys if the place has so many, so a larger share of a
  smaller place is sampled.
- Hits are counted by *epoch*, a quarter as many sampled uses as a shadow holds; at its end they are compared, and fade
  by half in four epochs. Another half-life must be better by ``_MARGIN``, so that equals do not alternate.
- No key is evicted until the place is full, and until then nothing is tried. Then the shadows begin with a sample of
  the present keys: empty ones took half of a short trace to learn.

Half-lives are in units of the capacity. A quarter is LRU for all practical purposes, thirty-two is LFU that forgets.

Nothing is rejected. Rejecting newcomers that weigh less than every victim was tried, and gave no more hits on the
conversation trace at any capacity; so a block that is put is always admitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ._contract import K
from ._lrfu import LRFU, ghosts_of

_HALF_LIVES: Final = (0.25, 2.0, 8.0, 32.0)
_FIRST: Final = 1
_ONE_IN: Final = 16
_FEWEST: Final = 64
_MARGIN: Final = 1.02
_TIMES: Final = 4
_FADE: Final = 0.5 ** (1 / _TIMES)


class AdaptiveLRFU(LRFU[K]):
    """Policy that weighs recency against frequency, by a half-life that adapts.

    The half-life follows the traffic. It rejects no key, and is the default of most tiers. Deterministic: the same
    calls give the same answers, in every process.
    """

    half_life: float

    def __init__(self) -> None:
        super().__init__(1.0)
        self._shadows: list[LRFU[K]] = []
        self._hits = [0.0] * len(_HALF_LIVES)
        self._chosen = _FIRST
        self._sampled: set[K] = set()
        self._tidy_at = 0  # number of sampled keys at which those that no shadow remembers are dropped
        self._one_in = 1
        self._share = 0
        self._epoch = 0  # sampled uses until it ends
        self._gap = 1  # unknown keys until one is sampled
        self._dice = 1

    @property
    def chosen(self) -> float:
        """Half-life in use, in units of the capacity."""
        return _HALF_LIVES[self._chosen]

    def use(self, keys: Sequence[K], depths: Sequence[int | None] | None = None) -> None:
        """Count one use of each of these keys, in order."""
        if self._share:
            sampled, entries, ghosts = self._sampled, self._entry, self._ghosts
            elsewhere, gap = bool(self._skipped or self._candidates), self._gap
            for key in keys:
                if key in sampled:
                    self._try(key)
                elif not (key in entries or key in ghosts or (elsewhere and self.remembers(key))):
                    gap -= 1
                    if not gap:
                        gap = self._draw_gap()
                        sampled.add(key)
                        self._try(key)
            self._gap = gap
        else:  # not full yet: the present keys stand for the capacity
            self.half_life = _HALF_LIVES[_FIRST] * (len(self._entry) + len(keys))
        super().use(keys, depths)

    def _grown(self) -> None:
        super()._grown()
        capacity = self._capacity
        self.half_life = capacity * _HALF_LIVES[self._chosen]
        one_in = max(1, min(_ONE_IN, capacity // _FEWEST))
        self._share = max(1, capacity // one_in)
        self._epoch = self._epoch or max(1, self._share // _TIMES)
        afresh = one_in != self._one_in or not self._sampled
        if afresh:
            self._one_in, self._sampled = one_in, set()
            self._shadows = [LRFU(1.0) for _ in _HALF_LIVES]
        for shadow, half_lives in zip(self._shadows, _HALF_LIVES, strict=True):
            shadow.half_life = self._share * half_lives
            shadow._most_ghosts = ghosts_of(capacity) // self._one_in
        if afresh:
            self._begin_shadows()

    def _begin_shadows(self) -> None:
        """Fill the shadows with a sample of the present keys.

        Called when the place is full for the first time, or much larger than before.
        """
        entries = self._entry
        for key in sorted(entries, key=entries.__getitem__):  # by their last use
            self._gap -= 1
            if not self._gap:
                self._gap = self._draw_gap()
                self._sampled.add(key)
                for shadow in self._shadows:
                    shadow.adopt(key, entries[key][1])

    def _try(self, key: K) -> None:
        """Use a sampled key in every shadow."""
        hits, share = self._hits, self._share
        for at, shadow in enumerate(self._shadows):
            if shadow.refer(key, share):
                hits[at] += 1
        self._epoch -= 1
        if not self._epoch:
            self._epoch = max(1, share // _TIMES)
            self._choose()

    def _choose(self) -> None:
        hits = self._hits
        best = max(range(len(hits)), key=hits.__getitem__)
        if hits[best] > _MARGIN * hits[self._chosen]:
            self._chosen = best
            self.half_life = self._capacity * _HALF_LIVES[best]
        self._hits = [count * _FADE for count in hits]
        if len(self._sampled) > self._tidy_at:
            self._sampled = {key for key in self._sampled if any(shadow.remembers(key) for shadow in self._shadows)}
            self._tidy_at = 2 * len(self._sampled)

    def _draw_gap(self) -> int:
        """Draw the number of unknown keys up to the next sampled one.

        It lies between one and almost twice the mean.
        """
        self._dice = (self._dice * 6364136223846793005 + 1442695040888963407) & ((1 << 64) - 1)
        return 1 + (self._dice >> 33) % (2 * self._one_in - 1)
