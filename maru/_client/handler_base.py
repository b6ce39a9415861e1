"""What both handlers are without waiting for anybody: who they are, and which memory they see."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import attrs

from .._config import MaruConfig
from . import columns as columns
from .columns import HeldBatch
from .operations import BoardCounters, ClientState, Counters, Pin, Shortfall
from .pages import PageStatistics
from .views import MemoryInfo


@attrs.frozen
class CallStatistics:
    """A snapshot of the calls of a handler; counters since it was made."""

    sockets: int
    """Open."""
    waiting: int
    """Calls without an answer."""
    late: int
    """Answers to calls given up, in all."""
    unknown: int
    """Answers to nothing, in all."""
    unreadable: int
    """Frames or answers that were none, in all."""


@attrs.frozen
class HandlerStatistics:
    """A snapshot of a handler; counters since it was made."""

    pages: PageStatistics
    """Its own."""
    calls: CallStatistics
    """On the way to the server."""
    counters: Counters
    """What happened to it."""
    board: BoardCounters
    """What it held without a message, and what it could not."""
    pinned: int
    """Keys it holds pinned, by message or by its board."""
    regions: int
    """Mapped, its own and others'."""
    shortfall: Shortfall | None = None
    """The last region that the server had not so many bytes for; ``None`` if it had all that was asked for."""
    why_no_index: str = ""
    """Why keys are looked up by message and not in the shared index; empty if they are, or nothing was looked up yet."""


class HandlerBase:
    """The part of a handler that is the same in trio and in threads."""

    def __init__(
        self,
        config: MaruConfig | None,
        knobs: dict[str, Any],
        clock: Callable[[], float],
        lock: AbstractContextManager[object],
    ) -> None:
        """See the two handlers."""
        config = MaruConfig() if config is None else config
        self.config: MaruConfig = attrs.evolve(config, **knobs)
        """Its knobs."""
        self._instance_id = self.config.instance_id or uuid.uuid4().hex
        self._reports = self.config.enable_stats
        self._lock = lock
        self._clock = clock
        self._state = ClientState(self.config, self._instance_id, clock)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._state!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot go to another process: make one there")

    @property
    def connected(self) -> bool:
        """Whether it was connected and not closed. Says nothing of the server's health: see ``healthcheck``."""
        return self._state.is_connected and not self._state.is_closed

    @property
    def era(self) -> int:
        """Grows when what was known of keys is over: the server has restarted or ended the session, or this was opened anew."""
        return self._state.era

    @property
    def instance_id(self) -> str:
        """Who owns its regions."""
        return self._instance_id

    @property
    def max_key_bytes(self) -> int:
        """Bytes of a key in UTF-8 at most: what the server takes, less the salt of tenant and namespace."""
        return self._state.max_key_bytes - len(self._state.salt.encode())

    def get_chunk_size(self) -> int:
        """Bytes of a page."""
        return self.config.chunk_size_bytes

    def get_owned_region_ids(self) -> list[int]:
        """Regions of its own. The first is taken by the first ``alloc``: a handler that only reads takes none."""
        with self._lock:
            return [region.region_id for region in self._state.pages.regions]

    def get_owned_keys(self) -> list[str]:
        """What is stored in its regions, as far as it has heard. Asks nobody."""
        state = self._state
        with self._lock:
            pages, stored, salt = state.pages, state.stored, len(state.salt)
            owned = [page for region in pages.regions for page in pages.registered(region.region_id)]
            return [stored[page][0][salt:] for page in owned if page in stored]

    def get_region_page_count(self, region_id: int) -> int | None:
        """Pages of a region that is mapped here; ``None`` if it is not."""
        with self._lock:
            span = self._state.spans.get(region_id)
        return None if span is None else span.length // self.config.chunk_size_bytes

    def get_buffer_view(self, region_id: int, offset: int, size: int) -> memoryview | None:
        """Some bytes of a region that is mapped here, read-only if it is another's; ``None`` if it is not mapped.

        Nothing keeps these bytes from changing: what is read under a pin comes from ``retrieve``.

        Raises:
            ValueError: they are not inside.
        """
        with self._lock:
            span = self._state.spans.get(region_id)
        return None if span is None else span.view(offset, size)

    def set_on_region_added(self, callback: Callable[[int, int], object] | None) -> None:
        """Have ``callback(region_id, pages)`` called when a region was mapped: an own one, or another's.

        It is called inside the call that needed the region, and must not call for another one.
        """
        size = self.config.chunk_size_bytes

        def added(region_id: int) -> None:
            assert callback is not None
            callback(region_id, self._state.spans[region_id].length // size)

        self._state.on_region_added = None if callback is None else added

    def hold_pages_here(self, keys: Sequence[str]) -> HeldBatch | None:
        """Hold what is stored under these keys up to the first that is missing, without a message. Any thread; never waits.

        Returns:
            What is held, as ``hold_pages`` does; it may be released in any thread, too. ``None`` where the shared index, or our
            board, cannot tell or hold all of it, or a region is not mapped here yet: then ``hold_pages`` can.
        """
        return columns.hold_pages_here(self._state, keys, self._release_here)

    def exist_here(self, keys: Sequence[str]) -> list[bool] | None:
        """Which of these keys are there, without a message. Any thread; never waits. ``None``: the shared index cannot tell."""
        return columns.exist_here(self._state, keys)

    def _release_here(self, pins: Sequence[Pin]) -> None:
        """One user of each pin less. Any thread."""
        left = list(pins)
        for board in {pin.board for pin in pins} - {None}:
            left = board.release(left)
        self._state.pinned.dropped.extend(left)  # the server counts them since a restart: the next call tells it

    def _begin_anew(self) -> None:
        """It is not connected (any more): nothing is known of a server, and what was counted and asked for stays."""
        was = self._state
        self._state = now = ClientState(self.config, self._instance_id, self._clock)
        now.counters, now.on_region_added = was.counters, was.on_region_added
        now.index.counters = was.index.counters
        now.era = was.era + 1  # what was held is of an era that is over
        now.pages.go_on_from(was.pages)

    def _observe(self, what: str, answer: object, latency: float) -> None:
        """Note what a call did, for the server's statistics. Sent with the next sign of life."""
        answers = answer if isinstance(answer, list) else [answer]
        hits = sum(map(bool, answers))
        result = "none" if not answers else "hit" if hits == len(answers) else "partial" if hits else "miss"
        size = sum(one.length for one in answers if isinstance(one, MemoryInfo))
        if what in ("store", "batch_store", "batch_put", "batch_get_into"):
            size = hits * self.config.chunk_size_bytes
        self._state.reports.append((what, result, size, latency))

    def _snapshot(self, calls: CallStatistics) -> HandlerStatistics:
        state = self._state
        with self._lock:
            return HandlerStatistics(
                pages=state.pages.statistics(),
                calls=calls,
                counters=attrs.evolve(state.counters),
                board=attrs.evolve(state.index.counters),
                pinned=len(state.pinned) + (0 if state.index.board is None else len(state.index.board)),
                regions=len(state.spans),
                shortfall=state.shortfall,
                why_no_index=state.index.why_not,
            )


def beat_of(state: ClientState) -> float:
    """Seconds between two signs of life."""
    return state.lease / BEATS_PER_LEASE if state.own else PUBLISHED_BEAT


BEATS_PER_LEASE = 3
"""Two may be lost."""
PUBLISHED_BEAT = 10.0
"""A published server has no lease; its beat only shows whether it still knows this handler's regions."""
