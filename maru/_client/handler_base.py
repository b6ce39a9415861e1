"""Common base of both handlers: identity, settings and mapped memory. Never waits."""

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
    """A snapshot of a handler's calls; counters count from its creation."""

    sockets: int
    """Number of open sockets."""
    waiting: int
    """Calls without an answer."""
    late: int
    """Answers to calls given up, in all."""
    unknown: int
    """Answers to no known call, in all."""
    unreadable: int
    """Unreadable frames and answers, in all."""


@attrs.frozen
class HandlerStatistics:
    """A snapshot of a handler; counters count from its creation."""

    pages: PageStatistics
    """Statistics of its own pages."""
    calls: CallStatistics
    """Statistics of calls to the server."""
    counters: Counters
    """Counts of events, such as unanswered calls."""
    board: BoardCounters
    """Counts of keys held by its board, and of failures to hold."""
    pinned: int
    """Number of keys it holds pinned, by message or by its board."""
    regions: int
    """Number of mapped regions, its own and others'."""
    shortfall: Shortfall | None = None
    """The last region for which the server lacked bytes.

    ``None`` if the server had all that was requested.
    """
    why_no_index: str = ""
    """Reason why the shared index is not used for lookups.

    Empty if it is used, or nothing was looked up yet.
    """


class HandlerBase:
    """Common part of the handlers for trio and for threads."""

    def __init__(
        self,
        config: MaruConfig | None,
        knobs: dict[str, Any],
        clock: Callable[[], float],
        lock: AbstractContextManager[object],
    ) -> None:
        """Set up the settings and the state; see the two handlers."""
        config = MaruConfig() if config is None else config
        self.config: MaruConfig = attrs.evolve(config, **knobs)
        """Settings of the handler."""
        self._instance_id = self.config.instance_id or uuid.uuid4().hex
        self._reports = self.config.enable_stats
        self._lock = lock
        self._clock = clock
        self._state = ClientState(self.config, self._instance_id, clock)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._state!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be sent to another process: create one there")

    @property
    def connected(self) -> bool:
        """Whether it was connected and not closed.

        Shows nothing about the server's health: see ``healthcheck``.
        """
        return self._state.is_connected and not self._state.is_closed

    @property
    def era(self) -> int:
        """Number that grows when all knowledge of keys is void.

        That is: the server has restarted or ended the session, or this handler was opened again.
        """
        return self._state.era

    @property
    def instance_id(self) -> str:
        """Id of the owner of its regions."""
        return self._instance_id

    @property
    def max_key_bytes(self) -> int:
        """Most bytes of a key in UTF-8.

        The server's limit, less the salt of tenant and namespace.
        """
        return self._state.max_key_bytes - len(self._state.salt.encode())

    def get_chunk_size(self) -> int:
        """Return the bytes of a page."""
        return self.config.chunk_size_bytes

    def get_owned_region_ids(self) -> list[int]:
        """Return the ids of its own regions.

        The first is taken by the first ``alloc``: a handler that only reads takes none.
        """
        with self._lock:
            return [region.region_id for region in self._state.pages.regions]

    def get_owned_keys(self) -> list[str]:
        """Return the keys stored in its regions, as far as known.

        Sends no message.
        """
        state = self._state
        with self._lock:
            pages, stored, salt = state.pages, state.stored, len(state.salt)
            owned = [page for region in pages.regions for page in pages.registered(region.region_id)]
            return [stored[page][0][salt:] for page in owned if page in stored]

    def get_region_page_count(self, region_id: int) -> int | None:
        """Return the number of a mapped region's pages; else ``None``."""
        with self._lock:
            span = self._state.spans.get(region_id)
        return None if span is None else span.length // self.config.chunk_size_bytes

    def get_buffer_view(self, region_id: int, offset: int, size: int) -> memoryview | None:
        """Return some bytes of a mapped region; else ``None``.

        They are read-only if the region is another owner's. Nothing keeps these bytes from changing: pinned bytes come
        from ``retrieve``.

        Raises:
            ValueError: they are not inside.
        """
        with self._lock:
            span = self._state.spans.get(region_id)
        return None if span is None else span.view(offset, size)

    def set_on_region_added(self, callback: Callable[[int, int], object] | None) -> None:
        """Call ``callback(region_id, pages)`` whenever a region was mapped.

        Own regions and others' count. It is called inside the call that needed the region, and must not call for
        another one.
        """
        size = self.config.chunk_size_bytes

        def added(region_id: int) -> None:
            assert callback is not None
            callback(region_id, self._state.spans[region_id].length // size)

        self._state.on_region_added = None if callback is None else added

    def hold_pages_here(self, keys: Sequence[str]) -> HeldBatch | None:
        """Hold pages up to the first missing key, without a message.

        May be called from any thread; never waits.

        Returns:
            The held pages, as from ``hold_pages``; they may be released in any thread, too. ``None`` if the shared
            index or our board cannot decide or hold all of them, or if a region is not mapped here yet; then
            ``hold_pages`` can.
        """
        return columns.hold_pages_here(self._state, keys, self._release_here)

    def exist_here(self, keys: Sequence[str]) -> list[bool] | None:
        """Return whether each key is there, without a message.

        ``None`` if the shared index cannot decide. May be called from any thread; never waits.
        """
        return columns.exist_here(self._state, keys)

    def _release_here(self, pins: Sequence[Pin]) -> None:
        """Remove one user of each pin. Any thread."""
        left = list(pins)
        for board in {pin.board for pin in pins} - {None}:
            left = board.release(left)
        self._state.pinned.dropped.extend(left)  # since a restart, the server counts them: the next call reports them

    def _begin_anew(self) -> None:
        """Begin with a new state, not connected (any more).

        Nothing is known of a server; counters and callbacks are kept.
        """
        was = self._state
        self._state = now = ClientState(self.config, self._instance_id, self._clock)
        now.counters, now.on_region_added = was.counters, was.on_region_added
        now.index.counters = was.index.counters
        now.era = was.era + 1  # held pages are of an era that is over
        now.pages.go_on_from(was.pages)

    def _observe(self, what: str, answer: object, latency: float) -> None:
        """Record a call for the server's statistics.

        It is sent with the next beat.
        """
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
    """Return the seconds between two beats."""
    return state.lease / BEATS_PER_LEASE if state.own else PUBLISHED_BEAT


BEATS_PER_LEASE = 3
"""Beats in one lease: two may be lost."""
PUBLISHED_BEAT = 10.0
"""Seconds between two beats to a published server.

It has no lease; a beat only shows whether it still knows this handler's regions.
"""
