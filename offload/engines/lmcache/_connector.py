"""The connector: the same cache with the methods of LMCache's ``native_plugin``.

There are six such methods, and a seventh, the optional status.

LMCache keeps the locks of such a connector itself, in a table of its own, which no tier knows: between its lookup and
its load a block may go, and then the load misses it. If that matters, use the adapter.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, Final, TypeAlias

from maru.base.threads import start_thread

from .._guard import NOTHING, Hook, guard_faults, guarded
from ._cache import ObjectCache
from ._config import CacheConfig
from ._events import EventFd
from ._memory import Span
from ._names import ParsedKey, naming, parse_object_key
from ._opening import LazyEngine
from ._operations import LookupOutcome, StoreOutcome

Completion: TypeAlias = tuple[int, bool, str, list[bool] | None]
"""Result of an operation: id, success, error text, a boolean per key."""


_NOT_BEGUN: Final = Hook(lambda connector, *args: connector._not_begun())
_HOOKS: Final = {
    "event_fd": Hook(lambda connector: connector._event.fd),
    "submit_batch_set": _NOT_BEGUN,
    "submit_batch_get": _NOT_BEGUN,
    "submit_batch_exists": _NOT_BEGUN,
    "submit_batch_delete": _NOT_BEGUN,
    "drain_completions": Hook(lambda connector: [], lambda connector: connector._event.signal()),
    "report_status": Hook(lambda connector: {"is_healthy": False, **guard_faults(connector).report()}),
    "close": NOTHING,
}


@guarded(_HOOKS)
class MaruConnector:
    """Objects by their published names, in the page store or other tiers.

    Args:
        parameters: the keys of the adapter's configuration, as keywords.

    Raises:
        ValueError: a key is unknown, or a value invalid.
    """

    def __init__(self, **parameters: Any) -> None:
        self.config: CacheConfig = CacheConfig.from_dict(parameters)
        self._cache = ObjectCache(
            LazyEngine(self.config.open),
            naming(self.config.key_names, self.config.weights_version),
            page_bytes=self.config.chunk_size_bytes,
            page_bytes_of=self.config.find_page_bytes,
            timeout=self.config.timeout,
        )
        self._ids = count(1)
        self._completions: dict[int, Completion] = {}
        self._event = EventFd()

    def event_fd(self) -> int:
        """Return a descriptor that is readable when an operation has ended."""
        return self._event.fd

    def submit_batch_set(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> int:
        """Store buffers under names."""
        number = next(self._ids)
        finish = partial(self._stored, number)
        self._begin(number, lambda: self._cache.store(_texts(keys), list(map(Span.of, buffers)), finish))
        return number

    def submit_batch_get(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> int:
        """Load names into buffers; the buffer of a missing name stays unchanged."""
        number = next(self._ids)
        finish = partial(self._loaded, number)
        self._begin(number, lambda: self._cache.load(_texts(keys), list(map(Span.of, buffers)), finish))
        return number

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Find which names are stored: a prefix of each row of chunks."""
        number = next(self._ids)
        self._begin(number, lambda: self._look_up(number, _texts(keys)))
        return number

    def _look_up(self, number: int, keys: list[ParsedKey]) -> None:
        self._cache.lookup(keys, partial(self._looked_up, number, keys))

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Delete names."""
        number = next(self._ids)
        self._begin(number, lambda: self._start_delete(number, _texts(keys)))
        return number

    def _start_delete(self, number: int, keys: list[ParsedKey]) -> None:
        # A delete waits for its tiers, and submitting must not.
        delete = partial(self._begin, number, partial(self._delete, number, keys))
        start_thread(threading.Thread(target=delete, name="offload lmcache delete"))

    def _begin(self, number: int, begin: Callable[[], None]) -> None:
        """Begin an operation, or complete it if it cannot begin."""
        try:
            begin()
        except Exception as error:
            with contextlib.suppress(Exception):
                self._cache.faults.note("submit", error)
            self._complete((number, False, f"not begun: {type(error).__name__}", None))

    def _not_begun(self) -> int:
        """Return the number of an operation that has failed."""
        number = next(self._ids)
        self._complete((number, False, "not begun", None))
        return number

    def drain_completions(self) -> list[Completion]:
        """Return the operations that have ended, each once. Never blocks."""
        self._event.reset()  # First: an operation that completes after this signals again.
        return [self._completions.pop(number) for number in list(self._completions)]

    def report_status(self) -> dict[str, Any]:
        """Return the adapter's status; see its ``report_status``."""
        return self._cache.report()

    def close(self) -> None:
        """Close the adapter. Idempotent."""
        try:
            self._cache.close()
        finally:
            self._event.close()

    # --- callbacks, in any thread -----------------------------------------------------------------------------------

    def _stored(self, number: int, outcome: StoreOutcome) -> None:
        self._complete((number, outcome.success, "" if outcome.success else "not all were stored", None))

    def _loaded(self, number: int, loaded: Sequence[bool]) -> None:
        self._complete((number, True, "", list(loaded)))

    def _looked_up(self, number: int, keys: Sequence[ParsedKey], outcome: LookupOutcome) -> None:
        # Nobody will unlock them: LMCache keeps its own locks for connectors.
        self._cache.unlock([key for key, found in zip(keys, outcome.found, strict=True) if found])
        self._complete((number, True, "", list(outcome.found)))

    def _delete(self, number: int, keys: Sequence[ParsedKey]) -> None:
        self._complete((number, True, "", self._cache.delete(keys)))

    def _complete(self, completion: Completion) -> None:
        self._completions.setdefault(completion[0], completion)
        self._event.signal()


def _texts(keys: Sequence[str]) -> list[ParsedKey]:
    return [parse_object_key(key) for key in keys]
