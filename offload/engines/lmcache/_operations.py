"""Operations: one store, lookup or load of LMCache, in the open engine.

Each is begun once and ends once, by a call of its callback: in the thread that begins it if it needs no message,
otherwise in the engine's thread. It has a part for each row of keys, or for each salt; the last part to end ends it.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, TypeAlias

import attrs

from backends.abc import LOADED, ExternalBlocks, Failed, Key, Missed

from ..._errors import DrainUnproven
from ..._pipeline.result import TransferResult
from ...from_thread import Hit, LoadFuture, LookupFuture, StoreFuture
from ...preconditions import NO_WAIT
from .._faults import THERE
from .._guard import insist
from ._memory import MemoryObjects, ObjectPlaces, Span
from ._names import ObjectKey, rows
from ._opening import OpenEngine

if TYPE_CHECKING:
    from ._cache import ObjectCache

Waited: TypeAlias = LookupFuture | LoadFuture
"""A future that a step waits for."""


FEW_KEYS: Final = 64
"""Keys in the next lookup of a load after a gap.

The number doubles with each lookup that finds all of them.
"""


@attrs.frozen
class StoreOutcome:
    """The result of a store."""

    there: Sequence[bool]
    """Whether each object is in the tier."""
    written: Sequence[bool]
    """Whether this store wrote each object."""

    @property
    def success(self) -> bool:
        """Whether all objects are in the tier."""
        return all(self.there)


@attrs.frozen
class LookupOutcome:
    """The result of a lookup."""

    found: Sequence[bool]
    """Whether each key was found and locked: a prefix of each row."""
    gone: Sequence[bool]
    """Whether each key is known to be absent: every tier was asked."""


class Operation(ABC):
    """One operation on some keys."""

    name: ClassVar[str]
    """Name of the operation in the log of faults."""

    def __init__(self, cache: ObjectCache, keys: Sequence[ObjectKey]) -> None:
        self.cache = cache
        self.keys: Sequence[ObjectKey] = list(keys)
        """The keys, row after row."""
        self.rows: Sequence[range] = rows(self.keys)
        """The positions of each row."""

    @abstractmethod
    def end(self) -> None:
        """Report the result to the callback."""

    @abstractmethod
    def prepare(self, opened: OpenEngine) -> Sequence[Callable[[], None]]:
        """Return a function for each part that begins it.

        None of them raises.
        """

    def begin(self, opened: OpenEngine) -> None:
        """Begin the operation, unless an object's layout is wrong."""
        wrong: Exception | None
        try:
            wrong = self.cache.layouts.refusal(self.keys)
            parts = () if wrong is not None else self.prepare(opened)
        except Exception as error:
            wrong = error
        if wrong is not None:
            self.refuse(wrong)
            return
        # From here on each part ends by itself: the operation must not end while another one reads or writes memory.
        for part in parts:
            part()

    def refuse(self, error: Exception) -> None:
        """End the operation before it has begun."""
        with contextlib.suppress(Exception):  # without memory for a count, it still ends
            self.cache.faults.note(self.name, error, len(self.keys))
        insist(self.end)

    def _note(self, error: BaseException, n: int) -> None:
        with contextlib.suppress(Exception):
            self.cache.faults.note(self.name, error, n)

    def names(self) -> list[Key]:
        """Return the names of the keys in the tiers."""
        return self.cache.name(self.keys)

    def parts(self, n: int) -> Callable[[], None]:
        """Return the function that each of ``n`` parts calls at its end.

        Parts end in any thread.
        """
        return partial(insist, self.end if n == 1 else _Parts(n, self.end).end_one)


class _Parts:
    """Counts the parts of an operation, which end in any thread.

    The last to end ends the operation.
    """

    def __init__(self, n: int, end: Callable[[], None]) -> None:
        self._left = n
        self._end = end
        self._lock = threading.Lock()

    def end_one(self) -> None:
        with self._lock:
            self._left -= 1
            over = not self._left
        if over:
            insist(self._end)


class Storing(Operation):
    """One store, in a part for each salt (a store's tenant)."""

    name = "store"

    def __init__(
        self,
        cache: ObjectCache,
        keys: Sequence[ObjectKey],
        spans: Sequence[Span],
        finish: Callable[[StoreOutcome], None],
    ) -> None:
        super().__init__(cache, keys)
        self._spans = list(spans)
        self._finish = finish
        self._there = [False] * len(keys)
        self._written = [False] * len(keys)

    def end(self) -> None:
        """Report which objects are in the tier, and which were written."""
        self._finish(StoreOutcome(self._there, self._written))

    def prepare(self, opened: OpenEngine) -> Sequence[Callable[[], None]]:
        """Return a part for each salt."""
        by_salt: dict[str, dict[Key, list[int]]] = {}
        for at, (key, name) in enumerate(zip(self.keys, self.names(), strict=True)):
            # A key that is named twice is stored once: blocks of one store have different keys.
            by_salt.setdefault(key.cache_salt, {}).setdefault(name, []).append(at)
        end = self.parts(len(by_salt))
        return [partial(self._start_part, opened, salt, positions, end) for salt, positions in by_salt.items()]

    def _start_part(
        self, opened: OpenEngine, salt: str, positions: dict[Key, list[int]], end: Callable[[], None]
    ) -> None:
        source: MemoryObjects = opened.source
        blocks: ExternalBlocks | None = None
        try:
            blocks = source.lend(list(positions), [self._spans[at[0]] for at in positions.values()])
            ended = partial(self._part_ended, source, blocks, positions, end)
            future = opened.engine.store(blocks, NO_WAIT, tenant=salt)
        except BaseException as error:
            try:
                if blocks is not None:
                    source.take_back(blocks)
                self._note(error, len(positions))
            finally:
                end()
            if not isinstance(error, Exception):
                raise
            return
        future.add_done_callback(ended)

    def _part_ended(
        self,
        source: MemoryObjects,
        blocks: ExternalBlocks,
        positions: dict[Key, list[int]],
        end: Callable[[], None],
        future: StoreFuture,
    ) -> None:
        try:
            self._note_result(future.result(0), positions)
        except Exception as error:
            self._note(error, len(positions))
        finally:
            try:
                insist(partial(source.take_back, blocks))
            finally:
                end()

    def _note_result(self, result: TransferResult, positions: dict[Key, list[int]]) -> None:
        faults = self.cache.faults
        for name in result.completed:
            for at in positions[name]:
                self._there[at] = self._written[at] = True
        self.cache.note_stored([self._spans[positions[name][0]].used for name in result.completed])
        for name, reason in result.filtered.items():
            if reason in THERE:
                for at in positions[name]:
                    self._there[at] = True
            else:
                faults.count("store", reason)
        for error in result.failed.values():
            faults.note("store", error)
        if result.error is not None:
            faults.note("store", result.error)


class Looking(Operation):
    """One lookup: a part for each row."""

    name = "lookup"

    def __init__(self, cache: ObjectCache, keys: Sequence[ObjectKey], finish: Callable[[LookupOutcome], None]) -> None:
        super().__init__(cache, keys)
        self._finish = finish
        self._found = [False] * len(keys)
        self._gone = [False] * len(keys)

    def end(self) -> None:
        """Report which keys were found, and which are known to be gone."""
        self._finish(LookupOutcome(self._found, self._gone))

    def first_of_rows(self) -> list[Key]:
        """Return the first key of each row.

        Without it nothing of the row is found.
        """
        return self.cache.name([self.keys[row.start] for row in self.rows])

    def prepare(self, opened: OpenEngine) -> Sequence[Callable[[], None]]:
        """Return a part for each row."""
        names, end = self.names(), self.parts(len(self.rows))
        return [partial(self._start_row, opened, names[row.start : row.stop], row, end) for row in self.rows]

    def _start_row(self, opened: OpenEngine, names: Sequence[Key], row: range, end: Callable[[], None]) -> None:
        future: LookupFuture | None = None
        try:
            ended = partial(self._row_ended, row, end)
            future = self.cache.ask(opened, names, self.keys[row.start].cache_salt)
            future.add_done_callback(ended)
        except BaseException as error:
            if future is not None:
                future.request_cancel()
            self._note(error, len(row))
            end()
            if not isinstance(error, Exception):
                raise

    def _row_ended(self, row: range, end: Callable[[], None], future: LookupFuture) -> None:
        hit: Hit | None = None
        try:
            hit = future.result(0)
            self._take_in(row, hit)
        except Exception as error:
            if hit is not None:
                hit.release()
            self._found[row.start : row.stop] = [False] * len(row)
            self._note(error, len(row))
        finally:
            end()

    def _take_in(self, row: range, hit: Hit) -> None:
        self.cache.note_unavailable(hit.unavailable, len(row) - len(hit))
        found = row.start + len(hit)
        self._found[row.start : found] = [True] * len(hit)
        # If every tier was asked, the key after the prefix is in none of them; nothing is known of the keys after that
        # one.
        if found < row.stop and not hit.unavailable:
            self._gone[found] = True
        if len(hit):
            self.cache.lock(hit)
        else:
            hit.release()


class Loading(Operation):
    """One load: a part per row, in steps from gap to gap.

    A step takes the hit of the lookup if that has locked exactly these keys. LMCache often wants fewer, as some are in
    its first level already, and then they are looked up again, in a hit that ends with the step.
    """

    name = "load"

    def __init__(
        self,
        cache: ObjectCache,
        keys: Sequence[ObjectKey],
        spans: Sequence[Span],
        finish: Callable[[Sequence[bool]], None],
    ) -> None:
        super().__init__(cache, keys)
        self._spans = list(spans)
        self._finish = finish
        self._names: list[Key] = []
        self._loaded = [False] * len(keys)

    def end(self) -> None:
        """Report which objects were loaded."""
        self._finish(self._loaded)

    def prepare(self, opened: OpenEngine) -> Sequence[Callable[[], None]]:
        """Return a part for each row."""
        self._names, end = self.names(), self.parts(len(self.rows))
        return [_Steps(self._load_row(opened, row, end)).start for row in self.rows]

    def _load_row(self, opened: OpenEngine, row: range, end: Callable[[], None]) -> Iterator[Waited]:
        """Load a row, and end its part.

        The part does not end if a copy may still be under way.
        """
        rest, most = row, len(row)
        own: Hit | None = None
        try:
            hit = self.cache.locked_hit(self._names[row.start : row.stop])
            while rest:
                asked = rest[:most]
                if hit is None:
                    hit = own = yield from self._look(opened, asked)
                if len(hit):
                    yield from self._copy(opened, rest, hit)
                else:
                    self.cache.note_unavailable(hit.unavailable, len(rest))
                if hit.unavailable and not len(hit):
                    # Without its tiers every further question would be answered like this one, and each may take a
                    # timeout.
                    rest = rest[len(rest) :]
                elif len(hit) < len(asked):
                    rest = rest[len(hit) + 1 :]  # after the hit is a key that no tier has
                    # Few at a time, so that many gaps cost a lookup of few keys each, and not of all that is left.
                    most = FEW_KEYS
                else:
                    rest, most = rest[len(hit) :], 2 * most
                if own is not None:
                    own.release()
                hit = own = None
        except DrainUnproven as error:
            # No end of this part, and so none of the task (rule 4 of the package): LMCache gives the memory of a load
            # that has ended to another request, and this copy may still write into it.
            self._note(error, len(rest))
            return
        except Exception as error:
            self._note(error, len(rest))
        finally:
            if own is not None:
                own.release()
        end()

    def _look(self, opened: OpenEngine, rest: range) -> Generator[Waited, None, Hit]:
        """Look up the remaining keys of a row."""
        future = self.cache.ask(opened, self._names[rest.start : rest.stop], self.keys[rest.start].cache_salt)
        try:
            yield future
            return future.result(0)
        except BaseException:
            future.request_cancel()  # releases the blocks that it has found
            raise

    def _copy(self, opened: OpenEngine, rest: range, hit: Hit) -> Generator[Waited, None, None]:
        """Load the blocks of a hit into the first remaining places."""
        here = rest[: len(hit)]
        places = ObjectPlaces(self._spans[here.start : here.stop], opened.page_bytes)
        future = opened.engine.begin_load(hit, places)
        yield future
        for at, outcome in zip(here, future.result(0).outcomes, strict=True):
            if outcome == LOADED:
                self._loaded[at] = True
            elif isinstance(outcome, Failed):
                self.cache.faults.note("load", outcome.error)
            elif isinstance(outcome, Missed):
                self.cache.faults.count("load", outcome.reason)


class _Steps:
    """Steps, each begun when the future of the one before has ended.

    A future that has ended already calls back at once. So a step is begun by a loop, and never by the callback of the
    step
    before: a load of many missing keys has one for each, more than Python has frames.
    """

    def __init__(self, steps: Iterator[Waited]) -> None:
        self._steps = steps
        self._lock = threading.Lock()
        self._has_ended = False
        self._is_running = True

    def start(self) -> None:
        """Run the steps until one has to wait."""
        for future in self._steps:
            future.add_done_callback(self._go_on)
            with self._lock:
                self._is_running, self._has_ended = self._has_ended, False
                if not self._is_running:
                    return

    def _go_on(self, future: Waited) -> None:
        with self._lock:
            if self._is_running:  # the loop of `start` finds it ended
                self._has_ended = True
                return
            self._is_running = True
        self.start()
