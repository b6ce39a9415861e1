"""The calls of the backend, with timeouts and boolean results.

They ask the engine.

They need no SGLang. SGLang's threads for prefetch and backup call them, which have nothing else to do meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from backends.abc import LOADED, Failed, Key, Missed

from ... import from_thread
from ..._pipeline.result import TransferResult
from ...preconditions import NO_WAIT
from .._faults import THERE, FaultLog, name_of
from ._pages import HostPages, LentPages
from ._settings import Settings

_log = logging.getLogger("offload.engines.sglang")


class PageStorage:
    """Pages in the tiers of one engine. Thread-safe; no call raises.

    Args:
        engine: an open engine that stores from ``source``.
        source: SGLang's pages.
        settings: the timeouts of the calls, and the tenant of the pages.
        faults: counts failures.
    """

    def __init__(self, engine: from_thread.Engine, source: HostPages, settings: Settings, faults: FaultLog) -> None:
        self.unavailable: Mapping[str, str] = {}
        """Tiers that the last lookup could not ask, and why."""
        self.source: HostPages = source
        self._engine = engine
        self._settings = settings
        self._faults = faults

    # --- lookups --------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[Key]) -> int:
        """Return the number of leading pages that are stored.

        Nothing keeps them stored until they are loaded.
        """
        try:
            with self._look(keys) as hit:
                return len(hit)
        except Exception as error:
            self._faults.note("lookup", error, len(keys))
            return 0

    def _look(self, keys: Sequence[Key]) -> from_thread.Hit:
        settings = self._settings
        self._faults.add("pages asked for", len(keys))
        hit = self._engine.lookup(keys, timeout=settings.lookup_timeout, tenant=settings.tenant)
        try:
            for error in hit.unavailable.values():
                self._faults.note("lookup", error, len(keys) - len(hit))
            self.unavailable = {tier: f"{name_of(error)}: {error}" for tier, error in hit.unavailable.items()}
            self._faults.add("pages found", len(hit))
        except BaseException:
            hit.release()
            raise
        return hit

    # --- back -----------------------------------------------------------------------------------------------------

    def load(self, keys: Sequence[Key], pages: LentPages) -> list[bool]:
        """Copy the leading pages that are stored.

        The caller owns the pages again after it. A page that did not come may have any content, as SGLang assumes: it
        computes such a page. No page after the first missing one counts as loaded: SGLang's callers differ in whether
        they stop there.

        Returns:
            Whether each page was loaded.
        """
        loaded = [False] * len(keys)
        with pages:
            try:
                with self._look(keys) as hit:  # blocks that are being loaded stay pinned
                    timeout = self._settings.load_timeout
                    future = self._engine.begin_load(hit, pages, timeout=timeout) if len(hit) else None
            except Exception as error:
                self._faults.note("load", error, len(keys))
                return loaded
            if future is not None:
                self._wait_for(future, loaded)
        return loaded

    def _wait_for(self, future: from_thread.LoadFuture, loaded: list[bool]) -> None:
        try:
            # No longer than this, although the load's end may not be proven yet: the pages it would write to are
            # revoked.
            outcomes = future.result(self._settings.load_timeout).outcomes
        except BaseException as error:
            future.request_cancel()
            if not isinstance(error, Exception):
                raise
            self._faults.note("load", error, len(loaded))
            return
        leading = True
        for at, outcome in enumerate(outcomes):
            leading = leading and outcome == LOADED
            loaded[at] = leading
            if outcome == LOADED:
                continue
            if isinstance(outcome, Failed):
                self._faults.note("load", outcome.error)
            elif isinstance(outcome, Missed):
                self._faults.count("load", outcome.reason)
        self._faults.add("pages loaded", loaded.count(True))

    # --- down -----------------------------------------------------------------------------------------------------

    def store(self, keys: Sequence[Key], pages: LentPages) -> list[bool]:
        """Copy pages into the first tier.

        The caller owns the pages again after it.

        Returns:
            Whether each page is stored.
        """
        with pages:
            # A key that is named twice is stored once: blocks of one store have different keys.
            positions: dict[Key, int] = {}
            for at, key in enumerate(keys):
                positions.setdefault(key, at)
            there = self._store(positions, pages)
        return [key in there for key in keys]

    def _store(self, positions: Mapping[Key, int], pages: LentPages) -> set[Key]:
        blocks = self.source.lend(list(positions), pages, list(positions.values()))
        future: from_thread.StoreFuture | None = None
        try:
            future = self._engine.store(blocks, NO_WAIT, tenant=self._settings.tenant)
            future.add_done_callback(partial(self.source.take_back, blocks))
            result = future.result(self._settings.store_timeout)
        except BaseException as error:
            if future is not None:
                future.request_cancel()
            if not isinstance(error, Exception):
                raise
            self._faults.note("store", error, len(positions))
            return set()
        finally:
            if future is None or future.done():
                self.source.take_back(blocks)
        return self._noted(result, len(positions))

    def _noted(self, result: TransferResult, n: int) -> set[Key]:
        there = set(result.completed)
        self._faults.add("pages stored", len(there))
        for key, reason in result.filtered.items():
            if reason in THERE:
                there.add(key)
            else:
                self._faults.count("store", reason)
        for error in result.failed.values():
            self._faults.note("store", error)
        if result.error is not None:  # the error of the blocks that have no error of their own
            rest = n - len(result.completed) - len(result.filtered) - len(result.failed)
            self._faults.note("store", result.error, rest)
        return there

    # --- the end --------------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Return the status: completed work, failures, and unavailable tiers."""
        return {
            "counts": self._faults.snapshot(),
            "unavailable_tiers": dict(self.unavailable),
            "stores_under_way": len(self.source),
            **self._faults.report(),
        }

    def close(self) -> None:
        """Close the engine. Running operations end, or are cut off."""
        try:
            self._engine.close()
        except Exception as error:
            self._faults.note("close", error)
