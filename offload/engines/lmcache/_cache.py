"""The cache: objects of LMCache stored, found, locked, loaded and deleted in the tiers of one engine.

Every operation is begun by any thread, never waits (but for a delete and the end), and ends by one call of what it was given,
which may come before it returns, in the engine's thread, or in the one that opens it. What LMCache is told then is a
truth for each object; what went wrong is in the log of faults.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import attrs

from backends.abc import LOADED, Deletion, ExternalBlocks, Failed, Key, Missed

from ..._errors import DrainUnproven
from ..._pipeline.result import TransferResult
from ...from_thread import Hit
from ...preconditions import NO_WAIT
from .._faults import FaultLog, name_of
from ._layouts import Describe, LayoutChecks
from ._locks import LockTable
from ._memory import MemoryObjects, ObjectPlaces, Span
from ._names import ObjectKey, rows
from ._opening import LazyEngine, OpenEngine, Task

_log = logging.getLogger("offload.engines.lmcache")

_THERE: Final = frozenset({"present", "pending"})
"""Reasons to keep a block back that mean it is in the tier, or is being stored by somebody who will be told how that ends."""

_GONE: Final = frozenset({Deletion.DELETED, Deletion.MISSING})


def _undescribed(at: int) -> None:
    """Nothing is known of what an object looks like."""


@attrs.frozen
class StoreOutcome:
    """How a store ended."""

    there: Sequence[bool]
    """Of each object, whether it is in the tier."""
    written: Sequence[bool]
    """Of each object, whether this store has put it there."""

    @property
    def success(self) -> bool:
        """Whether all of them are there."""
        return all(self.there)


@attrs.frozen
class LookupOutcome:
    """How a lookup ended."""

    found: Sequence[bool]
    """Of each key, whether it was found and is locked now: a prefix of each row."""
    gone: Sequence[bool]
    """Of each key, whether it is known not to be there: every tier was asked."""


class ObjectCache:
    """Objects in the tiers of one engine.

    Args:
        lazy: the engine.
        name_of: what an object is called in the tiers.
        page_bytes: the size of a page. 0: that of the first object.
        page_bytes_of: asks the tiers how large the pages of these keys are, for a lookup that comes before all objects and
            knows no size; 0 where nothing is found. It may wait, about as long as a lookup.
        align_bytes: what LMCache rounds the sizes of its objects up to.
        timeout: seconds for a lookup or a delete.
    """

    def __init__(
        self,
        lazy: LazyEngine,
        name_of: Callable[[ObjectKey], Key],
        *,
        page_bytes: int = 0,
        page_bytes_of: Callable[[Sequence[Key]], int] = lambda names: 0,
        align_bytes: int = 1,
        timeout: float = 2.0,
    ) -> None:
        self.faults: FaultLog = FaultLog("cache", _log)
        self.unavailable: dict[str, str] = {}
        """Tiers that the last lookup was answered without, and why."""
        self._lazy = lazy
        self._name_of = name_of
        self._page_bytes = page_bytes
        self._page_bytes_of = page_bytes_of
        self._align_bytes = max(1, align_bytes)
        self._timeout = timeout
        self._lock = threading.Lock()
        self._locks: LockTable[Hit] = LockTable()
        self.layouts: LayoutChecks = LayoutChecks(self.faults)
        """Which layouts of objects have been tried."""
        lazy.on_replaced = self._release_all

    @property
    def locked(self) -> int:
        """How many keys are locked."""
        return len(self._locks)

    # --- down -----------------------------------------------------------------------------------------------------

    def store(
        self,
        keys: Sequence[ObjectKey],
        spans: Sequence[Span],
        finish: Callable[[StoreOutcome], None],
        *,
        describe: Describe = _undescribed,
    ) -> None:
        """Copy objects into the first tier. Until it has ended, their memory is read."""
        storing = _Storing(self, list(keys), list(spans), finish)
        self._run(storing, spans, describe)

    # --- back -----------------------------------------------------------------------------------------------------

    def lookup(
        self,
        keys: Sequence[ObjectKey],
        finish: Callable[[LookupOutcome], None],
        *,
        object_bytes: int = 0,
        describe: Describe = _undescribed,
    ) -> None:
        """Find the prefix of each row of keys, and lock it.

        Args:
            keys: row behind row.
            finish: called once.
            object_bytes: the largest object that is looked for, if that is known: what a page is large enough for, where this
                is what connects.
            describe: what the objects look like, as far as it is known.
        """
        looking = _Looking(self, list(keys), finish)
        if not keys:
            looking.end()
            return
        page_bytes = self._page_bytes or -(-object_bytes // self._align_bytes) * self._align_bytes
        self._lazy.run(
            Task(
                looking.begin,
                looking.refuse,
                lambda: page_bytes or self._page_bytes_of(looking.first_of_rows()),
                prepare=self._prepare(keys, describe),
            )
        )

    def unlock(self, keys: Sequence[ObjectKey]) -> None:
        """Drop one lock of each key. Without an engine there is none to drop."""
        names = [self._name_of(key) for key in keys]
        with self._lock:
            over = self._locks.unlock(names)
        for hit in over:
            hit.release()

    def load(
        self,
        keys: Sequence[ObjectKey],
        spans: Sequence[Span],
        finish: Callable[[Sequence[bool]], None],
        *,
        describe: Describe = _undescribed,
    ) -> None:
        """Copy objects into the caller's memory, which is written until this has ended.

        Where it cannot be proven that a copy is over, it never ends: the memory must not be used again.
        """
        loading = _Loading(self, list(keys), list(spans), finish)
        self._run(loading, spans, describe)

    # --- away -----------------------------------------------------------------------------------------------------

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Forget objects in all tiers, and wait for it; of each, whether it is not there any more. What is locked stays."""
        opened = self._lazy.opened
        if opened is None:
            return [False] * len(keys)
        names = [self._name_of(key) for key in keys]
        try:
            answers = opened.engine.delete(names, timeout=self._timeout)
        except Exception as error:
            self.faults.note("delete", error, len(keys))
            return [False] * len(keys)
        silent = answers.count(Deletion.UNAVAILABLE)
        if silent:
            self.faults.count("delete", "unavailable", "a tier could not be asked", silent)
        return [answer in _GONE for answer in answers]

    def close(self, timeout: float | None = None) -> None:
        """Release all locks and close the engine; every operation has ended then, but for a load that cannot be proven over."""
        self._release_all()
        try:
            self._lazy.close(timeout)
        except Exception as error:
            self.faults.note("close", error)
            _log.warning("the engine behind LMCache could not be closed: %r", error)

    # --- what there is --------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """For a status: how the engine is, what is locked, and what went wrong."""
        lazy, opened = self._lazy, self._lazy.opened
        failure = lazy.failure
        return {
            "is_healthy": lazy.state in ("not connected", "opening", "open") and not self.unavailable,
            "state": lazy.state,
            "open_error": None if failure is None else f"{name_of(failure)}: {failure}",
            "page_bytes": self._page_bytes if opened is None else opened.page_bytes,
            "unavailable_tiers": dict(self.unavailable),
            "locked_key_count": self.locked,
            "stores_under_way": 0 if opened is None else len(opened.source),
            **self.faults.report(),
        }

    # --- below ----------------------------------------------------------------------------------------------------

    def _run(self, operation: _Storing | _Loading, spans: Sequence[Span], describe: Describe) -> None:
        """Begin what brings objects: they say how large a page is."""
        if not spans:
            operation.end()
            return
        # The largest of the first ones: what has one object in each group has them all in its first store, mostly.
        page_bytes = self._page_bytes or max(span.size for span in spans)
        largest = max(span.used for span in spans)
        prepare = self._prepare(operation.keys, describe)
        self._lazy.run(Task(operation.begin, operation.refuse, lambda: page_bytes, largest, prepare))

    def _prepare(self, keys: Sequence[ObjectKey], describe: Describe) -> Callable[[OpenEngine], None] | None:
        """Tries the layouts of these that were not; ``None`` where all were, or nothing is known of them."""
        due = () if describe is _undescribed else self.layouts.due(keys, describe)
        return partial(self.layouts.check, due) if due else None

    def _release_all(self) -> None:
        with self._lock:
            hits = self._locks.clear()
        for hit in hits:
            hit.release()

    def name(self, keys: Sequence[ObjectKey]) -> list[Key]:
        """What these are called in the tiers."""
        return list(map(self._name_of, keys))

    def note_unavailable(self, tiers: Any, asked: int) -> None:
        """Which tiers a lookup was answered without."""
        for error in tiers.values():
            self.faults.note("lookup", error, asked)
        self.unavailable = {tier: f"{name_of(error)}: {error}" for tier, error in tiers.items()}

    def lock(self, hit: Hit) -> None:
        """Keep a hit until its keys are unlocked."""
        with self._lock:
            self._locks.lock(hit, hit.keys)

    def locked_hit(self, names: Sequence[Key]) -> Hit | None:
        """The hit that has locked exactly these."""
        with self._lock:
            return self._locks.find(names)

    def ask(self, opened: OpenEngine, names: Sequence[Key], salt: str) -> Any:
        """Begin a lookup."""
        return opened.engine.begin_lookup(names, tenant=salt, timeout=self._timeout)


class _Parts:
    """Counts the parts of an operation; the last to end ends it. Parts end in any thread."""

    def __init__(self, n: int, end: Callable[[], None]) -> None:
        self._left = n
        self._end = end
        self._lock = threading.Lock()

    def end_one(self) -> None:
        with self._lock:
            self._left -= 1
            over = not self._left
        if over:
            self._end()


class _Storing:
    """One store: a part for each salt, since a store has one tenant."""

    def __init__(
        self, cache: ObjectCache, keys: list[ObjectKey], spans: list[Span], finish: Callable[[StoreOutcome], None]
    ) -> None:
        self.cache = cache
        self.keys = keys
        self.spans = spans
        self.finish = finish
        self.there = [False] * len(keys)
        self.written = [False] * len(keys)

    def end(self) -> None:
        self.finish(StoreOutcome(self.there, self.written))

    def refuse(self, error: Exception) -> None:
        self.cache.faults.note("store", error, len(self.keys))
        self.end()

    def begin(self, opened: OpenEngine) -> None:
        wrong = self.cache.layouts.refusal(self.keys)
        if wrong is not None:
            self.refuse(wrong)
            return
        by_salt: dict[str, dict[Key, list[int]]] = {}
        for at, (key, name) in enumerate(zip(self.keys, self.cache.name(self.keys), strict=True)):
            # A key that is named twice is stored once: blocks of one store have different keys.
            by_salt.setdefault(key.cache_salt, {}).setdefault(name, []).append(at)
        parts = _Parts(len(by_salt), self.end)
        for salt, positions in by_salt.items():
            self._begin_part(opened, salt, positions, parts)

    def _begin_part(self, opened: OpenEngine, salt: str, positions: dict[Key, list[int]], parts: _Parts) -> None:
        source: MemoryObjects = opened.source
        blocks: ExternalBlocks | None = None
        try:
            blocks = source.lend(list(positions), [self.spans[at[0]] for at in positions.values()])
            future = opened.engine.store(blocks, NO_WAIT, tenant=salt)
        except Exception as error:
            if blocks is not None:
                source.take_back(blocks)
            self.cache.faults.note("store", error, len(positions))
            parts.end_one()
            return
        future.add_done_callback(partial(self._part_ended, source, blocks, positions, parts))

    def _part_ended(
        self,
        source: MemoryObjects,
        blocks: ExternalBlocks,
        positions: dict[Key, list[int]],
        parts: _Parts,
        future: Any,
    ) -> None:
        try:
            self._note_result(future.result(0), positions)
        except Exception as error:
            self.cache.faults.note("store", error, len(positions))
        source.take_back(blocks)
        parts.end_one()

    def _note_result(self, result: TransferResult, positions: dict[Key, list[int]]) -> None:
        faults = self.cache.faults
        for name in result.completed:
            for at in positions[name]:
                self.there[at] = self.written[at] = True
        for name, reason in result.filtered.items():
            if reason in _THERE:
                for at in positions[name]:
                    self.there[at] = True
            else:
                faults.count("store", reason)
        for error in result.failed.values():
            faults.note("store", error)
        if result.error is not None:
            faults.note("store", result.error)


class _Looking:
    """One lookup: a part for each row."""

    def __init__(self, cache: ObjectCache, keys: list[ObjectKey], finish: Callable[[LookupOutcome], None]) -> None:
        self.cache = cache
        self.keys = keys
        self.finish = finish
        self.found = [False] * len(keys)
        self.gone = [False] * len(keys)

    def end(self) -> None:
        self.finish(LookupOutcome(self.found, self.gone))

    def refuse(self, error: Exception) -> None:
        self.cache.faults.note("lookup", error, len(self.keys))
        self.end()

    def first_of_rows(self) -> list[Key]:
        """The keys without which nothing is found."""
        return self.cache.name([self.keys[row.start] for row in rows(self.keys)])

    def begin(self, opened: OpenEngine) -> None:
        wrong = self.cache.layouts.refusal(self.keys)
        if wrong is not None:
            self.refuse(wrong)
            return
        wanted = rows(self.keys)
        names = self.cache.name(self.keys)
        parts = _Parts(len(wanted), self.end)
        for row in wanted:
            try:
                future = self.cache.ask(opened, names[row.start : row.stop], self.keys[row.start].cache_salt)
            except Exception as error:
                self.cache.faults.note("lookup", error, len(row))
                parts.end_one()
                continue
            future.add_done_callback(partial(self._row_ended, row, parts))

    def _row_ended(self, row: range, parts: _Parts, future: Any) -> None:
        try:
            hit: Hit = future.result(0)
        except Exception as error:
            self.cache.faults.note("lookup", error, len(row))
            parts.end_one()
            return
        self.cache.note_unavailable(hit.unavailable, len(row) - len(hit))
        found = row.start + len(hit)
        self.found[row.start : found] = [True] * len(hit)
        # Of the key behind the prefix it is known that no tier has it, if every tier was asked; of those behind it nothing is.
        if found < row.stop and not hit.unavailable:
            self.gone[found] = True
        if len(hit):
            self.cache.lock(hit)
        else:
            hit.release()
        parts.end_one()


class _Loading:
    """One load: a part for each row, in steps from one gap to the next.

    A step takes the hit of the lookup where that has locked just these keys. LMCache often wants fewer, as some are in its
    first level already, and then they are looked up once more, in a hit that ends with the step.
    """

    def __init__(
        self,
        cache: ObjectCache,
        keys: list[ObjectKey],
        spans: list[Span],
        finish: Callable[[Sequence[bool]], None],
    ) -> None:
        self.cache = cache
        self.keys = keys
        self.spans = spans
        self.finish = finish
        self.names: list[Key] = []
        self.loaded = [False] * len(keys)

    def end(self) -> None:
        self.finish(self.loaded)

    def refuse(self, error: Exception) -> None:
        self.cache.faults.note("load", error, len(self.keys))
        self.end()

    def begin(self, opened: OpenEngine) -> None:
        wrong = self.cache.layouts.refusal(self.keys)
        if wrong is not None:
            self.refuse(wrong)
            return
        self.names = self.cache.name(self.keys)
        wanted = rows(self.keys)
        parts = _Parts(len(wanted), self.end)
        for row in wanted:
            hit = self.cache.locked_hit(self.names[row.start : row.stop])
            if hit is None:
                self._look(opened, row, parts)
            else:
                self._copy(opened, row, parts, hit, None)

    def _look(self, opened: OpenEngine, rest: range, parts: _Parts) -> None:
        """Look for what is left of a row; its first key may be missing, and then for what is behind that."""
        if not rest:
            parts.end_one()
            return
        try:
            salt = self.keys[rest.start].cache_salt
            future = self.cache.ask(opened, self.names[rest.start : rest.stop], salt)
        except Exception as error:
            self._give_up(rest, parts, error)
            return
        future.add_done_callback(partial(self._looked, opened, rest, parts))

    def _looked(self, opened: OpenEngine, rest: range, parts: _Parts, future: Any) -> None:
        try:
            hit: Hit = future.result(0)
        except Exception as error:
            self._give_up(rest, parts, error)
            return
        if not len(hit):
            self.cache.note_unavailable(hit.unavailable, len(rest))
            hit.release()
            # Without its tiers every further question would be answered as this one, and each may take a timeout.
            self._look(opened, rest[len(rest) :] if hit.unavailable else rest[1:], parts)
            return
        self._copy(opened, rest, parts, hit, hit)

    def _copy(self, opened: OpenEngine, rest: range, parts: _Parts, hit: Hit, own: Hit | None) -> None:
        """Load the blocks of a hit into the first places of what is left."""
        here = rest[: len(hit)]
        try:
            places = ObjectPlaces(self.spans[here.start : here.stop], opened.page_bytes)
            future = opened.engine.begin_load(hit, places)
        except Exception as error:
            if own is not None:
                own.release()
            self._give_up(rest, parts, error)
            return
        future.add_done_callback(partial(self._copied, opened, rest, here, parts, own))

    def _copied(
        self, opened: OpenEngine, rest: range, here: range, parts: _Parts, own: Hit | None, future: Any
    ) -> None:
        if own is not None:
            own.release()
        try:
            outcomes = future.result(0).outcomes
        except DrainUnproven as error:
            # No end of this part, and so none of the task (rule 4 of the package): LMCache gives the memory of a load that has
            # ended to another request, and this copy may still write into it.
            self.cache.faults.note("load", error, len(here))
            return
        except Exception as error:
            self._give_up(rest, parts, error)
            return
        for at, outcome in zip(here, outcomes, strict=True):
            if outcome == LOADED:
                self.loaded[at] = True
            elif isinstance(outcome, Failed):
                self.cache.faults.note("load", outcome.error)
            elif isinstance(outcome, Missed):
                self.cache.faults.count("load", outcome.reason)
        self._look(opened, rest[len(here) + 1 :], parts)  # behind the hit is a key that no tier has

    def _give_up(self, rest: range, parts: _Parts, error: Exception) -> None:
        self.cache.faults.note("load", error, len(rest))
        parts.end_one()
