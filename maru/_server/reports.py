"""What clients have reported of their operations (REPORT_STATS), as GET_STATS tells it. Pure.

Rule 1. Reporting costs the same however much was reported before, and asking costs nothing per key.
Rule 2. Names come from outside, so the table is bounded: beyond ``MAX_CLIENTS`` whoever was silent for the longest goes,
        and of a client's operations the first ``MAX_OPERATIONS`` are told apart.
Rule 3. A number that cannot be (negative, infinite, none) is no report.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

import attrs

from .._wire import ClientStats, OperationStats, ReportEntry, StatsManagerStats

MAX_CLIENTS: Final = 1024
"""A few kB each."""
MAX_OPERATIONS: Final = 32
"""Published clients have a dozen."""
_MOST_BYTES: Final = (1 << 63) - 1
"""Sums stop here: what is more cannot be said in an answer."""
_LONGEST: Final = 1e15
"""Microseconds. Thirty years are no latency, and sums of what is shorter stay finite."""
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

    def add(self, entries: Iterable[ReportEntry]) -> None:
        """Note what a client says it did."""
        for entry in entries:
            if not (0 <= entry.latency_us < _LONGEST and 0 <= entry.size <= _MOST_BYTES):
                continue
            operations = self._clients.get(entry.client_id)
            if operations is None:
                operations = self._clients[entry.client_id] = {}
                if len(self._clients) > self._max_clients:
                    self._clients.popitem(last=False)
            else:
                self._clients.move_to_end(entry.client_id)
            for table in (operations, self._all):
                operation = table.get(entry.op_type)
                if operation is None:
                    if len(table) >= self._max_operations:
                        continue
                    operation = table[entry.op_type] = _Operation()
                operation.add(entry)

    def tell(self) -> StatsManagerStats:
        """The figures of each client and of all together. Every interval begins anew."""
        tables = {ALL: self._all, **self._clients}
        return StatsManagerStats(
            {
                client: ClientStats({name: operation.tell() for name, operation in table.items()})
                for client, table in tables.items()
            }
        )
