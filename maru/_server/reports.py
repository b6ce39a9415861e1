"""What clients have reported of their operations (REPORT_STATS), as GET_STATS tells it. Pure.

Rule 1. Reporting costs the same however much was reported before, and asking costs nothing per key. The table is encoded when
        it has changed, as long as what is encoded in ``INTERVAL`` is no more than the largest table: so a small one is always
        that of now.
Rule 2. Names come from outside, so the table is bounded: beyond ``MAX_CLIENTS`` whoever was silent for the longest goes,
        of a client's operations the first ``MAX_OPERATIONS`` are told apart, and names are cut at ``MAX_NAME_BYTES``. All of it
        takes ``MAX_BYTES`` at most.
Rule 3. A number that cannot be (negative, infinite, none) is no report.
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
"""A few kB each, in every answer."""
MAX_OPERATIONS: Final = 16
"""Published clients have a dozen."""
MAX_NAME_BYTES: Final = 128
"""A host's name and a number."""
MAX_BYTES: Final = 512 << 10
"""Of the table, encoded: 65 clients, 16 operations each, at some 400 bytes an operation with its name."""
INTERVAL: Final = 0.25
"""Seconds in which ``MAX_BYTES`` are encoded at most; a larger table stands for so long."""
_MOST_BYTES: Final = (1 << 63) - 1
"""Sums stop here: what is more cannot be said in an answer."""
_LONGEST: Final = 1e15
"""Microseconds. Thirty years are no latency, and sums of what is shorter stay finite."""
_encode: Final = msgspec.msgpack.Encoder().encode
ALL: Final = "_all"
"""The name under which all clients together are told."""


@attrs.define(eq=False)
class _Span:
    """Latencies of some time."""

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
        """The figures; the interval begins anew."""
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
        """Bytes that may be encoded; the last table may have taken more."""
        self._credited_at = 0.0
        self.encoded = 0
        """How often the table was encoded."""

    def add(self, entries: Iterable[ReportEntry]) -> None:
        """Note what a client says it did."""
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
        """Return the figures of each client and of all together, encoded: those of now, or of up to ``INTERVAL`` ago.

        With those of now, every interval that clients are told of begins anew.
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
    if len(name) * 4 <= MAX_NAME_BYTES:  # what a character takes at most
        return name
    return name.encode()[:MAX_NAME_BYTES].decode(errors="ignore")
