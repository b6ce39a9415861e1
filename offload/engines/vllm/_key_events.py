"""KV events for routers: vLLM's blocks that come and go. Pure.

They are about the tiers of an instance.

The keys of a tier cover more than vLLM's hashes, and routers know only these. So a key is announced once its hash is
known: when the chunk was stored or loaded by this instance. Chunks that a tier held from an earlier run are announced
when somebody loads them.

Rule 1. A removal is announced exactly if the arrival was.
Rule 2. Nothing is remembered of a key that no tier holds, once its store has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager

import attrs

from backends.abc import Key


@attrs.frozen
class KeyEvent:
    """An event: chunks came into a tier, or went."""

    medium: str
    """The name of the tier."""
    hashes: list[bytes]
    """vLLM's hash of the last block of each chunk.

    It covers all tokens before it.
    """
    stored: bool
    """Whether they came."""


@attrs.define(eq=False)
class KeyEvents:
    """The events of one worker's chunks.

    Tiers are watched in the engine's thread, all other calls are in vLLM's.
    """

    _lock: AbstractContextManager[object]
    """Held for each call."""
    _media: dict[Key, set[str]] = attrs.Factory(dict)  # the tiers that hold each key
    _hashes: dict[Key, bytes] = attrs.Factory(dict)  # of keys that were announced, or will be when they arrive
    _events: list[KeyEvent] = attrs.Factory(list)
    _storing: Counter[Key] = attrs.Factory(Counter)

    # --- changes in tiers -----------------------------------------------------------------------------------------

    def watcher(self, medium: str) -> TierWatcher:
        """Return a :class:`maru.kv_events.KeyWatcher` for the tier of this name."""
        return TierWatcher(self, medium)

    def came(self, medium: str, keys: Sequence[Key]) -> None:
        """Record that keys can be found in a tier from now on."""
        with self._lock:
            for key in keys:
                self._media.setdefault(key, set()).add(medium)
            self._tell(medium, keys, stored=True)

    def went(self, medium: str, keys: Sequence[Key]) -> None:
        """Record that keys cannot be found in a tier any more."""
        with self._lock:
            self._tell(medium, keys, stored=False)
            for key in keys:
                media = self._media.get(key, set())
                media.discard(medium)
                if not media:
                    self._media.pop(key, None)
                    self._hashes.pop(key, None)

    # --- calls of vLLM --------------------------------------------------------------------------------------------

    def storing(self, keys: Sequence[Key], hashes: Sequence[bytes]) -> None:
        """Record that keys are being stored, until :meth:`settled`."""
        with self._lock:
            self._storing.update(keys)
            self._name(keys, hashes)

    def settled(self, keys: Sequence[Key]) -> None:
        """End a store; forget hashes that nothing needs any more."""
        with self._lock:
            self._storing.subtract(keys)
            for key in keys:
                if self._storing[key] <= 0:
                    del self._storing[key]
                    if key not in self._media:
                        self._hashes.pop(key, None)

    def found(self, keys: Sequence[Key], hashes: Sequence[bytes]) -> None:
        """Record that keys are being loaded."""
        with self._lock:
            there = [at for at, key in enumerate(keys) if key in self._media]
            self._name([keys[at] for at in there], [hashes[at] for at in there])

    def reset(self) -> None:
        """Announce the removal of all keys: they are not found any more."""
        with self._lock:
            for key in list(self._hashes):
                for medium in sorted(self._media.get(key, ())):
                    self._tell(medium, [key], stored=False)
            self._hashes.clear()

    def take(self) -> list[KeyEvent]:
        """Return the events since the last call, in order."""
        with self._lock:
            events, self._events = self._events, []
            return events

    # --- below ----------------------------------------------------------------------------------------------------

    def _name(self, keys: Sequence[Key], hashes: Sequence[bytes]) -> None:
        for key, one in zip(keys, hashes, strict=True):
            if key not in self._hashes:
                self._hashes[key] = one
                for medium in sorted(self._media.get(key, ())):
                    self._tell(medium, [key], stored=True)

    def _tell(self, medium: str, keys: Sequence[Key], *, stored: bool) -> None:
        hashes = [self._hashes[key] for key in keys if key in self._hashes]
        if not hashes:
            return
        last = self._events[-1] if self._events else None
        if last is not None and (last.medium, last.stored) == (medium, stored):
            last.hashes.extend(hashes)
        else:
            self._events.append(KeyEvent(medium, hashes, stored))


@attrs.frozen(eq=False)
class TierWatcher:
    """Watches one tier."""

    _events: KeyEvents
    _medium: str

    def stored(self, keys: Sequence[Key]) -> None:
        """Record that keys can be found from now on."""
        self._events.came(self._medium, keys)

    def removed(self, keys: Sequence[Key]) -> None:
        """Record that keys cannot be found any more."""
        self._events.went(self._medium, keys)
