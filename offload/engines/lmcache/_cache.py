"""The cache: LMCache's objects in the tiers of one engine.

It stores, finds, locks, loads and deletes them.

Operations may begin in any thread and never wait (except a delete and the close). Each ends with one call of its
callback, which may come before the method returns, in the engine's thread, or in the one that opens it. The callback
gets a boolean for each object; failures are in the log of faults.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from backends.abc import Deletion, Key

from ...from_thread import Hit, LookupFuture
from .._faults import FaultLog, name_of
from ._layouts import Describe, LayoutChecks
from ._locks import LockTable
from ._memory import Span
from ._names import ObjectKey
from ._opening import LazyEngine, OpenEngine, Task
from ._operations import Loading, Looking, LookupOutcome, Operation, StoreOutcome, Storing

_log = logging.getLogger("offload.engines.lmcache")

_GONE: Final = frozenset({Deletion.DELETED, Deletion.MISSING})


def _undescribed(at: int) -> None:
    """Return nothing: the shapes and dtypes of the object are unknown."""


class ObjectCache:
    """Objects in the tiers of one engine.

    Args:
        lazy: the engine.
        name_of: returns the key of an object in the tiers.
        page_bytes: the size of a page. 0: that of the first object.
        page_bytes_of: asks the tiers for the page size of these keys, for a lookup that comes before all objects and
            knows no size; 0 if nothing is found. It may wait, about as long as a lookup.
        align_bytes: alignment to which LMCache rounds the sizes of its objects up.
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
        """Tiers that the last lookup could not ask, and why."""
        self._lazy = lazy
        self._name_of = name_of
        self._page_bytes = page_bytes
        self._page_bytes_of = page_bytes_of
        self._align_bytes = max(1, align_bytes)
        self._timeout = timeout
        self._lock = threading.Lock()
        self._locks: LockTable[Hit] = LockTable()
        self.layouts: LayoutChecks = LayoutChecks(self.faults)
        """Record of the object layouts that were checked."""
        self._stored_objects = self._stored_bytes = 0
        lazy.on_replaced = self._release_all

    @property
    def locked(self) -> int:
        """Number of locked keys."""
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
        """Copy objects into the first tier.

        Their memory is read until this has ended.
        """
        self._bring(Storing(self, keys, spans, finish), spans, describe)

    # --- back -----------------------------------------------------------------------------------------------------

    def lookup(
        self,
        keys: Sequence[ObjectKey],
        finish: Callable[[LookupOutcome], None],
        *,
        object_bytes: Callable[[], int] = lambda: 0,
        describe: Describe = _undescribed,
    ) -> None:
        """Find the prefix of each row of keys, and lock it.

        Args:
            keys: the rows, one after the other.
            finish: called once.
            object_bytes: returns the size of the largest object that is looked for; 0 if unknown. Called only if this
                connects, for the size of a page.
            describe: returns the shapes and dtypes of an object, if known.
        """
        looking = Looking(self, keys, finish)

        def page_bytes() -> int:
            of_object = -(-object_bytes() // self._align_bytes) * self._align_bytes
            return self._page_bytes or of_object or self._page_bytes_of(looking.first_of_rows())

        self._run(looking, describe, page_bytes)

    def unlock(self, keys: Sequence[ObjectKey]) -> None:
        """Drop one lock of each key.

        Without an engine there is none to drop.
        """
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
        """Copy objects into the caller's memory, which is written until the end.

        If it cannot be proven that a copy is over, it never ends: the memory must not be used again.
        """
        self._bring(Loading(self, keys, spans, finish), spans, describe)

    # --- away -----------------------------------------------------------------------------------------------------

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Delete objects from all tiers, and wait for it. Locked objects stay.

        Returns:
            For each object, whether it is gone.
        """
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
        """Release all locks and close the engine.

        Every operation has ended then, except a load that cannot be proven over.
        """
        self._release_all()
        try:
            self._lazy.close(timeout)
        except Exception as error:
            self.faults.note("close", error)
            _log.warning("the engine behind LMCache could not be closed: %r", error)

    # --- status ---------------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Return the status: the engine's state, locked keys, and failures."""
        lazy, opened = self._lazy, self._lazy.opened
        failure = lazy.failure
        page_bytes = self._page_bytes if opened is None else opened.page_bytes
        with self._lock:
            pages, stored = self._stored_objects * page_bytes, self._stored_bytes
        return {
            "is_healthy": lazy.state in ("not connected", "opening", "open") and not self.unavailable,
            "state": lazy.state,
            "open_error": None if failure is None else f"{name_of(failure)}: {failure}",
            "page_bytes": page_bytes,
            # An object takes a whole page: if groups have two sizes, the capacity holds correspondingly fewer of them.
            "page_bytes_per_stored_byte": round(pages / stored, 2) if stored else None,
            "unavailable_tiers": dict(self.unavailable),
            "locked_key_count": self.locked,
            "stores_under_way": 0 if opened is None else len(opened.source),
            **self.faults.report(),
        }

    # --- below ----------------------------------------------------------------------------------------------------

    def _bring(self, operation: Operation, spans: Sequence[Span], describe: Describe) -> None:
        """Begin an operation that has objects, whose sizes determine the page size."""
        largest = max([span.used for span in spans], default=0)
        # The largest of the first ones: the first store of a model with several groups mostly has an object of each.
        self._run(operation, describe, lambda: self._page_bytes or max([span.size for span in spans]), largest)

    def _run(
        self, operation: Operation, describe: Describe, page_bytes: Callable[[], int], object_bytes: int = 0
    ) -> None:
        if not operation.keys:
            operation.end()
            return
        due = () if describe is _undescribed else self.layouts.due(operation.keys, operation.rows, describe)
        opened = None if due else self._lazy.ready(object_bytes)
        if opened is not None:
            operation.begin(opened)
        else:
            prepare = partial(self.layouts.check, due) if due else None
            self._lazy.run(Task(operation.begin, operation.refuse, page_bytes, object_bytes, prepare))

    def _release_all(self) -> None:
        with self._lock:
            hits = self._locks.clear()
        for hit in hits:
            hit.release()

    def name(self, keys: Sequence[ObjectKey]) -> list[Key]:
        """Return the keys of these objects in the tiers."""
        return list(map(self._name_of, keys))

    def note_unavailable(self, tiers: Any, asked: int) -> None:
        """Record the tiers that could not be asked for a lookup."""
        if not tiers and not self.unavailable:
            return
        for error in tiers.values():
            self.faults.note("lookup", error, asked)
        self.unavailable = {tier: f"{name_of(error)}: {error}" for tier, error in tiers.items()}

    def note_stored(self, sizes: Sequence[int]) -> None:
        """Count stored objects, and their bytes without padding."""
        with self._lock:
            self._stored_objects += len(sizes)
            self._stored_bytes += sum(sizes)

    def lock(self, hit: Hit) -> None:
        """Keep a hit until its keys are unlocked."""
        with self._lock:
            self._locks.lock(hit, hit.keys)

    def locked_hit(self, names: Sequence[Key]) -> Hit | None:
        """Return the hit that has locked exactly these keys."""
        with self._lock:
            return self._locks.find(names)

    def ask(self, opened: OpenEngine, names: Sequence[Key], salt: str) -> LookupFuture:
        """Begin a lookup."""
        return opened.engine.begin_lookup(names, tenant=salt, timeout=self._timeout)
