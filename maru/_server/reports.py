"""Clients' reports of their operations (REPORT_STATS), as GET_STATS returns them. Pure.

Rule 1. Reporting costs the same however much was reported before, and asking costs nothing per key. The table is
        encoded when it has changed, as long as the bytes encoded in ``INTERVAL`` are no more than the largest table: so
        a small one is always current.
Rule 2. Names come from outside, so the table is bounded: beyond ``MAX_CLIENTS`` the client that was silent for the
        longest is removed, a client's first ``MAX_OPERATIONS`` operations are distinguished, and names are cut at
        ``MAX_NAME_BYTES``. The whole table takes ``MAX_BYTES`` at most.
Rule 3. An impossible number (negative, infinite, none) is no report.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

import attrs
import msgspec

from .._wire import ClientStats, OperationStats, ReportEntry, StatsManagerStats

MAX_CLIENTS: Final = 64
"""Most clients in the table: a few kB each, in every answer."""
MAX_OPERATIONS: Final = 16
"""Most operations of a client; published clients have a dozen."""
MAX_NAME_BYTES: Final = 128
"""Bytes of a name at most: a host's name and a number."""
MAX_BYTES: Final = 512 << 10
"""Bytes of the encoded table at most.

65 clients, 16 operations each, at some 400 bytes an operation with its name.
"""
INTERVAL: Final = 0.25
"""Seconds in which ``MAX_BYTES`` are encoded at most.

A larger table is kept for so long.
"""
_MOST_BYTES: Final = (1 << 63) - 1
"""Largest sum of bytes: an answer has no room for more."""
_LONGEST: Final = 1e15
"""Longest latency accepted, in microseconds.

Thirty years are no latency, and sums of shorter ones stay finite.
"""
_encode: Final = msgspec.msgpack.Encoder().encode
ALL: Final = "_all"
"""Name of the row of all clients together."""


@attrs.define(eq=False)
class _Span:
    """Latencies of a period."""

    count: int = 0
    total: float = 0.0
    least: float = math.inf
    most: float = 0.0

    def add(self, latency: float) -> None:
        self.count += 1
        self.total += latency
        self.least = min(self.least, latency)
        self.most = max(self.most, latency)

    @property
    def average(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def minimum(self) -> float:
        return self.least if self.count else 0.0


@attrs.define(eq=False)
class _Operation:
    hits: int = 0
    misses: int = 0
    total_bytes: int = 0
    ever: _Span = attrs.field(factory=_Span)
    interval: _Span = attrs.field(factory=_Span)

    def add(self, entry: ReportEntry) -> None:
        self.hits += entry.result == "hit"
        self.misses += entry.result == "miss"
        self.total_bytes = min(self.total_bytes + entry.size, _MOST_BYTES)
        self.ever.add(entry.latency_us)
        self.interval.add(entry.latency_us)

    def tell(self) -> OperationStats:
        """Return the figures, and begin a new interval."""
        ever, interval, self.interval = self.ever, self.interval, _Span()
        return OperationStats(
            ever.count,
            self.hits,
            self.misses,
            self.total_bytes,
            ever.total,
            ever.average,
            ever.minimum,
            ever.most,
            interval.count,
            interval.average,
            interval.minimum,
            interval.most,
        )


class Reports:
    """The table of clients and operations."""

    def __init__(self, max_clients: int = MAX_CLIENTS, max_operations: int = MAX_OPERATIONS) -> None:
        self._max_clients, self._max_operations = max_clients, max_operations
        self._all: dict[str, _Operation] = {}
        self._clients: OrderedDict[str, dict[str, _Operation]] = OrderedDict()
        self._told = msgspec.Raw()
        self._has_changed = True
        self._credit: float = MAX_BYTES
        """Bytes that may be encoded; negative if the last table took more."""
        self._credited_at = 0.0
        self.encoded = 0
        """Number of times the table was encoded."""

    def add(self, entries: Iterable[ReportEntry]) -> None:
        """Add a client's report of its operations."""
        for entry in entries:
            if not (0 <= entry.latency_us < _LONGEST and 0 <= entry.size <= _MOST_BYTES):
                continue
            client, name = _cut(entry.client_id), _cut(entry.op_type)
            operations = self._clients.get(client)
            if operations is None:
                operations = self._clients[client] = {}
                if len(self._clients) > self._max_clients:
                    self._clients.popitem(last=False)
            else:
                self._clients.move_to_end(client)
            for table in (operations, self._all):
                operation = table.get(name)
                if operation is None:
                    if len(table) >= self._max_operations:
                        continue
                    operation = table[name] = _Operation()
                operation.add(entry)
                self._has_changed = True

    def tell(self, now: float) -> msgspec.Raw:
        """Return the encoded figures of each client and of all together.

        They are current, or up to ``INTERVAL`` old. Current figures begin every interval again.
        """
        earned = (now - self._credited_at) * MAX_BYTES / INTERVAL
        self._credit, self._credited_at = min(MAX_BYTES, self._credit + earned), now
        if self._has_changed and self._credit > 0:
            self._told = msgspec.Raw(_encode(self._tell()))
            self._credit -= len(bytes(self._told))
            self.encoded += 1
        return self._told

    def _tell(self) -> StatsManagerStats:
        tables = {ALL: self._all, **self._clients}
        # An interval that is reported now is over: the next answer has an empty one.
        self._has_changed = any(one.interval.count for table in tables.values() for one in table.values())
        return StatsManagerStats(
            {
                client: ClientStats({name: operation.tell() for name, operation in table.items()})
                for client, table in tables.items()
            }
        )


def _cut(name: str) -> str:
    if len(name) * 4 <= MAX_NAME_BYTES:  # a character takes 4 bytes at most
        return name
    return name.encode()[:MAX_NAME_BYTES].decode(errors="ignore")
