"""What a half of the connector counts, and says once.

vLLM is told of nothing that fails here, so that an operator must learn of it: each kind of trouble is logged when it is met
first, and counted from then on.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping

_log = logging.getLogger("vllm.offload")


class Counts:
    """Counters of one half, by name. In any thread."""

    def __init__(self, half: str) -> None:
        self._half = half
        self._counts: Counter[str] = Counter()
        self._said: set[str] = set()
        self._lock = threading.Lock()  # vLLM's thread counts, and the engine's

    def add(self, name: str, number: int = 1) -> None:
        """Count."""
        if number:
            with self._lock:
                self._counts[name] += number

    def trouble(self, name: str, why: object, number: int = 1) -> None:
        """Count something that should not be; the first time, say why. ``name`` says what was done about it."""
        self.add(name, number)
        with self._lock:
            said = name in self._said
            self._said.add(name)
        if not said:
            _log.warning("%s: %s (%s; from now on only counted)", self._half, name, why)

    def snapshot(self) -> Mapping[str, int]:
        """All of them."""
        with self._lock:
            return dict(self._counts)

    def __str__(self) -> str:
        return ", ".join(f"{name} {number}" for name, number in sorted(self.snapshot().items())) or "nothing"
