"""The half of the connector in a worker process: it moves chunks between vLLM's cache and the tiers.

vLLM's thread begins loads and stores; the engine's thread ends them, and puts down what has arrived. So the order of a
load's steps matters where both threads meet: a request that is given up is noted first and cancelled second, and what was
begun for it is noted first and looked at second; one of the two sees the other.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import attrs

from backends.abc import ExternalBlocks

from ... import from_thread
from ..._engine import GIVEN_UP
from ..._errors import DrainUnproven, LayoutCheckFailed, OffloadError
from ..._pipeline.lifecycle import Status
from ...abc import PreconditionLike
from ...preconditions import NO_WAIT
from .._faults import FaultLog, name_of
from ._chunks import ChunkCanary, ChunkSource
from ._key_events import KeyEvents
from ._layers import LayerChunks
from ._naming import ChunkNaming, Naming, with_adapter
from ._plans import LoadPlan, StepPlan, StorePlan
from ._scheduler import IDLE_WAIT

_log = logging.getLogger("vllm.offload")

STORE_GRACE: Final = 0.02
"""Seconds that a step waits for stores whose blocks it overwrites, before it cancels them: the flush of a batch and the copy of
some chunks. vLLM gives out anew in the very next step what a window has passed, so that else little would be stored of it."""
PARTS_OF_BUDGET: Final = 8
"""Parts of the budget that a store larger than it is split into."""
LONGEST_CHECK: Final = 5.0
"""Seconds that the start of a worker waits for the check of its layout, where a tier is slow to answer."""
DRAIN_TIMEOUT: Final = 10.0
"""Seconds that the end of a worker waits for what is being stored to arrive."""


@attrs.define(eq=False)
class _Load:
    """One request's load, as far as it is."""

    plan: LoadPlan
    future: from_thread.LookupFuture | from_thread.LoadFuture | None = None
    given_up: bool = False


@attrs.define(eq=False)
class _Store:
    """One store that is under way."""

    future: from_thread.StoreFuture
    blocks: frozenset[int]


class WorkerHalf:
    """What vLLM's worker calls.

    Args:
        engine: stores from ``source``.
        source: vLLM's cache.
        naming: of this worker's chunks.
        lookup_timeout: seconds that it may take to pin what is to be loaded.
        load_timeout: seconds that a load may take.
        room_knob: what is to be raised where there is no room.
        computed: returns a precondition that holds once all that the device was given until now is over: an event of CUDA.
            Stores wait for it before they read blocks, loads before they write them. By default it holds already.
        tenant: who may find it.
    """

    def __init__(
        self,
        engine: from_thread.Engine,
        source: ChunkSource | LayerChunks,
        naming: Naming,
        *,
        lookup_timeout: float,
        load_timeout: float,
        room_knob: str,
        computed: Callable[[], PreconditionLike] = lambda: NO_WAIT,
        tenant: str = "",
    ) -> None:
        self._room_knob = room_knob
        self.counts: FaultLog = FaultLog("worker", _log)
        self.engine: from_thread.Engine = engine
        self._source = source
        self._naming = naming
        self._lookup_timeout, self._load_timeout = lookup_timeout, load_timeout
        self._computed = computed
        self._tenant = tenant
        self.events: KeyEvents | None = None
        """Record of the hashes that the keys of tiers stand for, if somebody takes its events."""
        self._loads: dict[str, _Load] = {}
        self._arrived: queue.SimpleQueue[tuple[str, int]] = (
            queue.SimpleQueue()
        )  # requests, and how many of their chunks
        self._received: set[str] = set()
        self.failed: set[int] = set()
        """Blocks that were to be loaded and were not, and of which vLLM was not told."""
        self._failed_requests: set[str] = set()
        self._stores: dict[from_thread.StoreFuture, _Store] = {}
        self._tokens: dict[str, from_thread.CancellationToken] = {}
        self._idle = False

    # --- before the forward pass ----------------------------------------------------------------------------------

    def protect(self, plan: StepPlan) -> None:
        """See to it that no store reads blocks that this step overwrites."""
        for request_id in plan.cancelled:
            token = self._tokens.pop(request_id, None)
            if token is not None:
                token.request_cancel()
        deadline = time.monotonic() + STORE_GRACE
        for store in self._touched(plan):
            with contextlib.suppress(OffloadError):  # not over yet; what it came to is looked at elsewhere
                store.future.result(max(0.0, deadline - time.monotonic()))
        touched = self._touched(plan)
        self._end_stores(touched)
        self.counts.add("stores cancelled, since their blocks are given out anew", len(touched))

    def _touched(self, plan: StepPlan) -> list[_Store]:
        """The stores that read blocks which this step overwrites."""
        if plan.all_overwritten:
            return list(self._stores.values())
        return [store for store in list(self._stores.values()) if not plan.overwritten.isdisjoint(store.blocks)]

    def withdraw(self) -> None:
        """Let no store under way go well: it is not known which blocks are overwritten."""
        self._source.withdraw()  # first, since nothing in it can fail
        self._end_stores(list(self._stores.values()))

    def leave_cache(self) -> None:
        """See to it that nothing reads vLLM's cache any more: its memory is about to go. Later stores and loads are as ever."""
        stores = list(self._stores.values())
        self._end_stores(stores)
        self.counts.add("stores cancelled, since the cache goes to sleep", len(stores))

    def _end_stores(self, stores: Sequence[_Store]) -> None:
        for store in stores:
            store.future.request_cancel()
        for store in stores:
            self._wait_for_the_end(store)

    def _wait_for_the_end(self, store: _Store) -> None:
        """Wait until nothing reads the blocks. The engine bounds a copy; where its thread hangs, offloading ends here."""
        try:
            store.future.cancel()
        except DrainUnproven as error:
            # The page that it is copied to is quarantined: nothing will ever be found under its key.
            self.counts.trouble("copies without a proven end, whose pages are not used any more", error)
        except OffloadError as error:
            # Its key must not be registered any more, since its bytes are about to change. That is done in the engine's
            # thread, so that this ends with the engine.
            _log.error("%r does not end: %s. Nothing is offloaded any more", store.future, error)
            self._close(0.0)

    # --- loads ----------------------------------------------------------------------------------------------------

    def load(self, plan: StepPlan) -> None:
        """Begin the loads of a step. They write their blocks once what the device was given before is over.

        vLLM's own work on these blocks may still be queued: it zeroes new blocks, and those who had them before may have a
        pass to go.
        """
        self._idle = plan.idle
        if not plan.loads:
            return
        computed = self._computed()
        for one in plan.loads:
            load = self._loads[one.request_id] = _Load(one)
            try:
                self._begin_load(load, plan.generation, computed)
            except Exception as error:  # whatever it is, the request must go on
                self._arrive(load, 0, error)

    def _begin_load(self, load: _Load, generation: str, computed: PreconditionLike) -> None:
        hashes = load.plan.hashes
        if not hashes:  # of a request whose load could not be planned
            self._arrive(load, 0)
            return
        keys = self._naming.keys(hashes, with_adapter(generation, load.plan.adapter))
        pinned = partial(self._pinned, load, computed)
        if self.events is not None:
            self.events.found(keys, hashes)
        load.future = self.engine.begin_lookup(keys, tenant=self._tenant, timeout=self._lookup_timeout)
        load.future.add_done_callback(pinned)

    def end_loads(self, plan: StepPlan) -> None:
        """End the loads of a step that were not begun. Those that were begun end by themselves."""
        for one in plan.loads:
            if one.request_id not in self._loads:
                load = self._loads[one.request_id] = _Load(one)
                self._arrive(load, 0)

    def _pinned(self, load: _Load, computed: PreconditionLike, future: from_thread.LookupFuture) -> None:
        """In the engine's thread: what is to be loaded is pinned, or not there any more."""
        try:
            hit = future.result(0)
            for tier, error in hit.unavailable.items():
                self.counts.trouble(f"loads without {tier}, which is unavailable", error)
            with hit:  # the load keeps it pinned
                destination = self._source.into(load.plan.blocks[: len(hit)])
                loading = self.engine.begin_load(hit, destination, precondition=computed, timeout=self._load_timeout)
        except Exception as error:  # whatever it is, the request must go on
            self._arrive(load, 0, error)
            return
        load.future = loading
        if load.given_up:
            loading.request_cancel()
        loading.add_done_callback(partial(self._loaded, load))

    def _loaded(self, load: _Load, future: from_thread.LoadFuture) -> None:
        """In the engine's thread: a load is over."""
        loaded, error, why = 0, None, ""
        try:
            result = future.result(0)
            loaded = result.loaded // self._source.pages_per_chunk
            if result.loaded < len(result.outcomes) and result.outcomes[result.loaded] == GIVEN_UP:
                why = "given up, since that is sooner"
        except DrainUnproven as unproven:
            # Told that it is over, vLLM would give the blocks to somebody, and a copy may still write to them.
            self.counts.trouble("loads without a proven end, whose requests and blocks are withheld", unproven)
            return
        except Exception as raised:
            error = raised
        self._arrive(load, loaded, error or why)

    def _arrive(self, load: _Load, loaded: int, why: Exception | str = "") -> None:
        self._arrived.put((load.plan.request_id, loaded))
        missing = len(load.plan.hashes) - loaded
        self.counts.add("chunks loaded", loaded)
        if (why or missing) and not load.given_up:
            self.counts.trouble("chunks not loaded, and computed instead", why or "damaged, or gone", missing)

    def received(self, finished: frozenset[str]) -> set[str]:
        """The requests whose loads are over, since the last call. Those of finished requests are cancelled first."""
        self.collect(finished)
        received, self._received = self._received, set()
        return received

    def results(self, finished: frozenset[str]) -> tuple[set[str], set[str]]:
        """Return the requests whose loads have ended, and the requests that lack a block."""
        self.collect(finished)
        results = self._received, self._failed_requests
        self._received, self._failed_requests = set(), set()
        return results

    def collect(self, finished: frozenset[str]) -> None:
        """Take in the loads that are over. Where this is cut short by an error, nothing of what it took in is lost."""
        wait = self._idle and bool(self._loads)
        for request_id in finished:
            load = self._loads.get(request_id)
            if load is not None:
                wait, load.given_up = False, True
                if load.future is not None:
                    load.future.request_cancel()
        while True:
            try:
                # Nothing is computed in this step: give the threads that load a chance, rather than to turn round at once.
                request_id, loaded = self._arrived.get(timeout=IDLE_WAIT) if wait else self._arrived.get_nowait()
            except queue.Empty:
                return
            wait = False
            load = self._loads.get(request_id)
            if load is None:
                continue
            try:
                if not load.given_up:
                    lost = {block for chunk in load.plan.blocks[loaded:] for block in chunk if block is not None}
                    # First what did not come: vLLM takes for loaded what it is not told of.
                    self.failed |= lost
                    if lost:
                        self._failed_requests.add(request_id)
                self._received.add(request_id)
            except BaseException:
                self._arrived.put((request_id, loaded))
                raise
            del self._loads[request_id]

    def failed_blocks(self) -> set[int]:
        """Blocks that were to be loaded and were not, since the last call."""
        failed, self.failed = self.failed, set()
        return failed

    # --- stores ---------------------------------------------------------------------------------------------------

    def store(self, plan: StepPlan) -> None:
        """Begin the stores of a step, behind its forward pass."""
        if not plan.stores:
            return
        computed = self._computed()
        for one in plan.stores:
            for part in self._within_budget(one):
                self._store(part, computed, plan.generation)

    def _within_budget(self, plan: StorePlan) -> Sequence[StorePlan]:
        """Split a store that exceeds the engine's budget, which refuses it as a whole."""
        n, most = len(plan.hashes), self.engine.budget_blocks // self._source.pages_per_chunk
        if n <= most:
            return (plan,)
        if not most:
            self._dropped(n)
            return ()
        # Several parts fill the budget: what is in flight already then displaces the last parts, and not the whole store.
        size = max(1, most // PARTS_OF_BUDGET)
        return [
            attrs.evolve(
                plan, hashes=plan.hashes[at : at + size], blocks=plan.blocks[at : at + size], first=plan.first + at
            )
            for at in range(0, n, size)
        ]

    def _store(self, plan: StorePlan, computed: PreconditionLike, generation: str) -> None:
        keys = self._naming.keys(plan.hashes, with_adapter(generation, plan.adapter))
        blocks = frozenset(block for chunk in plan.blocks for block in chunk if block is not None)
        chunks = self._source.chunks(keys, plan.blocks, plan.first)
        future: from_thread.StoreFuture | None = None
        try:
            stored = partial(self._stored, chunks)
            if self.events is not None:
                self.events.storing(keys, plan.hashes)
            token = self._tokens.setdefault(plan.request_id, from_thread.CancellationToken())
            future = self.engine.store(chunks, computed, tenant=self._tenant, cancel_token=token)
            self._stores[future] = _Store(future, blocks)
            future.add_done_callback(stored)
        except BaseException as error:
            self._forget(chunks)  # a copy that is under way does not go well without
            if future is not None:
                self._stores.pop(future, None)
                future.request_cancel()
            if not isinstance(error, OffloadError):
                raise
            self._not_stored(error, len(plan.hashes))
        else:
            self.counts.add("chunks offered", len(plan.hashes))

    def _stored(self, chunks: ExternalBlocks, future: from_thread.StoreFuture) -> None:
        """In the engine's thread, or where it was over at once: a store has ended."""
        try:
            self._forget(chunks)
        finally:
            self._stores.pop(future, None)
        result, pages = future.result(0), self._source.pages_per_chunk
        self.counts.add("chunks stored", len(result.completed) // pages)
        if future.dropped:
            self._dropped(len(chunks) // pages)
        elif result.status is Status.FAILED:
            why = result.error or next(iter(result.failed.values()), None)
            self._not_stored(why, (len(chunks) - len(result.completed)) // pages)
        else:
            self.counts.kept_back("chunks", result.filtered.values(), pages)
        there = [key for key, reason in result.filtered.items() if reason == "present"]
        behind = self._source.behind(chunks, frozenset([*result.completed, *there]))
        if behind is not None:
            with contextlib.suppress(OffloadError):  # it is not found then, as if it were not there
                self.engine.store(behind, NO_WAIT, tenant=self._tenant)

    def _dropped(self, chunks: int) -> None:
        self.counts.trouble("chunks dropped, since too many are on their way", "see budget_blocks", chunks)

    def _not_stored(self, why: BaseException | None, chunks: int) -> None:
        """Count it, and say what to do where there was no room."""
        full = why is not None and name_of(why) == "full"
        hint = f"; no room: raise {self._room_knob}" if full else ""
        self.counts.trouble("chunks not stored", f"{why or '?'}{hint}", chunks)

    def _forget(self, chunks: ExternalBlocks) -> None:
        self._source.forget(chunks.refs or ())
        if self.events is not None:
            self.events.settled(chunks.keys)

    def finished(self, finished: frozenset[str]) -> None:
        """These requests are over: nothing more is stored of them. What is under way goes on."""
        for request_id in finished:
            self._tokens.pop(request_id, None)

    # --- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let what is being stored arrive, for a while, and close the engine."""
        self._close(DRAIN_TIMEOUT)

    def _close(self, drain: float) -> None:
        try:
            if drain:
                self.engine.drain(drain)
                self.engine.drain(drain)  # what was stored behind the last of it
        except OffloadError as error:
            self.counts.trouble("stores that the end of the worker cut off", error)
        try:
            self.engine.close()
        except OffloadError as error:
            _log.error("the engine of a worker could not be closed: %s", error)


def check_layout(engine: from_thread.Engine, canary: ChunkCanary, naming: ChunkNaming) -> None:
    """Send a pattern through a store and a load. If it comes back in another layout, nothing is offloaded.

    It has ended when this returns: its use of the device would invalidate a graph that vLLM captures next.

    Raises:
        DrainUnproven: its end is not certain.
    """
    layout = f"{naming.model}/{naming.dtype}/{naming.layout}/{naming.rank}"
    try:
        check = engine.check_layout(canary, layout, timeout=LONGEST_CHECK)
    except LayoutCheckFailed as error:
        _log.error("nothing is offloaded, and nothing loaded: %s", error)
        close_engine(engine)
    except DrainUnproven:
        raise
    except OffloadError as error:
        _log.warning("the layout of the cache was not checked: %s", error)
    else:
        if check.inconclusive:
            _log.warning("the layout of the cache was not checked: %s", check.inconclusive)


def close_engine(engine: from_thread.Engine) -> None:
    """Close an engine, and log what keeps it from closing."""
    try:
        engine.close()
    except OffloadError as error:
        _log.error("an engine could not be closed: %s", error)
