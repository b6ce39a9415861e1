"""The half of the connector in a worker process.

It moves chunks between vLLM's cache and the tiers. vLLM's thread begins loads and stores; the engine's thread ends
them, and queues the results. So the order of a load's steps matters where both threads meet: a request that is given up
is marked first and cancelled second, and operations begun for it are recorded first and checked second; one of the two
threads sees the other.
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
from maru.base.flags import Flag

from ... import from_thread
from ..._engine import GIVEN_UP
from ..._errors import DrainUnproven, LayoutCheckFailed, OffloadError, WaitTimeout
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
"""Seconds that a step waits for stores before it overwrites their blocks.

After that it cancels them. It is enough for the flush of a batch and the copy of some chunks. vLLM reassigns blocks
that a window has passed in the very next step, so that otherwise little would be stored of them.
"""
PARTS_OF_BUDGET: Final = 8
"""Parts of the budget into which a larger store is split."""
LONGEST_CHECK: Final = 5.0
"""Seconds that a worker's start waits for the layout check.

It waits that long if a tier is slow to answer.
"""
LONGEST_END: Final = 30.0
"""Seconds that the end of cancelled loads may take, for all together.

The engine answers sooner, unless its thread hangs.
"""
DRAIN_TIMEOUT: Final = 10.0
"""Seconds that the end of a worker waits for running stores."""


@attrs.define(eq=False)
class _Load:
    """One request's load and its progress."""

    plan: LoadPlan
    future: from_thread.LookupFuture | from_thread.LoadFuture | None = None
    given_up: bool = False
    """Whether nobody uses its result."""
    cancelled: bool = False
    """Whether it was cancelled, and begins no copy."""
    over: Flag = attrs.Factory(Flag)
    """Set when it has ended, with or without a proof."""


@attrs.define(eq=False)
class _Store:
    """One running store."""

    future: from_thread.StoreFuture
    blocks: frozenset[int]


class WorkerHalf:
    """The calls of vLLM's worker.

    Args:
        engine: stores from ``source``.
        source: vLLM's cache.
        naming: of this worker's chunks.
        lookup_timeout: seconds that pinning the chunks of a load may take.
        load_timeout: seconds that a load may take.
        room_knob: name of the knob to raise if there is no room.
        computed: returns a precondition that holds once all work that was queued on the device until now is over: an
            event of CUDA. Stores wait for it before they read blocks, loads before they write them. By default it holds
            already.
        tenant: tenant that may find the chunks.
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
        """Record of the hashes for tiers' keys, if events are taken."""
        self._loads: dict[str, _Load] = {}
        self._arrived: queue.SimpleQueue[tuple[str, int]] = (
            queue.SimpleQueue()
        )  # requests, and the number of loaded chunks
        self._received: set[str] = set()
        self.failed: set[int] = set()
        """Blocks that were not loaded, and not yet reported to vLLM."""
        self._failed_requests: set[str] = set()
        self._stores: dict[from_thread.StoreFuture, _Store] = {}
        self._tokens: dict[str, from_thread.CancellationToken] = {}
        self._idle = False
        self._unproven: OffloadError | None = None  # of a copy that may still use the cache

    # --- before the forward pass ----------------------------------------------------------------------------------

    def protect(self, plan: StepPlan) -> None:
        """Ensure that no store reads blocks that this step overwrites."""
        for request_id in plan.cancelled:
            token = self._tokens.pop(request_id, None)
            if token is not None:
                token.request_cancel()
        deadline = time.monotonic() + STORE_GRACE
        for store in self._touched(plan):
            with contextlib.suppress(OffloadError):  # not over yet, or failed; the result is handled elsewhere
                store.future.result(max(0.0, deadline - time.monotonic()))
        touched = self._touched(plan)
        self._end_stores(touched)
        self.counts.add("stores cancelled, since their blocks are given out anew", len(touched))

    def _touched(self, plan: StepPlan) -> list[_Store]:
        """Return the stores that read blocks which this step overwrites."""
        if plan.all_overwritten:
            return list(self._stores.values())
        return [store for store in list(self._stores.values()) if not plan.overwritten.isdisjoint(store.blocks)]

    def withdraw(self) -> None:
        """Fail all running stores: the overwritten blocks are not known."""
        self._source.withdraw()  # First, since nothing in it can fail.
        self._end_stores(list(self._stores.values()))

    def leave_cache(self) -> None:
        """Ensure that nothing reads or writes vLLM's cache any more.

        Its memory is about to go. Later stores and loads work as before.

        Raises:
            DrainUnproven: a copy may still use the cache: it must not be freed.
        """
        stores, loads = list(self._stores.values()), [one for one in self._loads.values() if not one.over.is_set]
        for load in loads:
            self._request_end(load)
        if self._unproven is None:  # else it fails anyway, and the guard calls this again
            self._end_stores(stores)
            deadline = time.monotonic() + LONGEST_END  # one for all: an engine that hangs ends none
            for load in loads:
                if not load.over.wait(max(0.0, deadline - time.monotonic())):
                    self._unproven = WaitTimeout(f"{load.future!r} does not end")
        self.counts.add("stores cancelled, since the cache goes to sleep", len(stores))
        self.counts.add("loads cancelled, since the cache goes to sleep", len(loads))
        if self._unproven is not None:
            raise DrainUnproven(f"a copy may still use the cache: {self._unproven}") from self._unproven

    @staticmethod
    def _request_end(load: _Load) -> None:
        load.cancelled = True
        if load.future is not None:
            load.future.request_cancel()

    def _end_stores(self, stores: Sequence[_Store]) -> None:
        for store in stores:
            store.future.request_cancel()
        for store in stores:
            self._wait_for_the_end(store)

    def _wait_for_the_end(self, store: _Store) -> None:
        """Wait until nothing reads the blocks.

        The engine bounds a copy; if its thread hangs, offloading ends here.
        """
        try:
            store.future.cancel()
        except DrainUnproven as error:
            # The page that it is copied to is quarantined: nothing will ever be found under its key.
            self._unproven = error
            self.counts.trouble("copies without a proven end, whose pages are not used any more", error)
        except OffloadError as error:
            # Its key must not be registered any more, since its bytes are about to change. That is done in the engine's
            # thread, so that this ends with the engine.
            self._unproven = error
            _log.error("%r does not end: %s. Offloading stops", store.future, error)
            self._close(0.0)

    # --- loads ----------------------------------------------------------------------------------------------------

    def load(self, plan: StepPlan) -> None:
        """Begin the loads of a step.

        They write their blocks once earlier work on the device is over. vLLM's own work on these blocks may still be
        queued: it zeroes new blocks, and their previous owners may have a pass to go.
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
        """End the loads of a step that did not begin.

        The others end by themselves.
        """
        for one in plan.loads:
            if one.request_id not in self._loads:
                load = self._loads[one.request_id] = _Load(one)
                self._arrive(load, 0)

    def _pinned(self, load: _Load, computed: PreconditionLike, future: from_thread.LookupFuture) -> None:
        """Begin a load when its lookup has ended.

        The chunks are pinned, or not there any more. In the engine's thread, or in the caller's if it was over at once.
        """
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
        if load.cancelled:
            loading.request_cancel()
        loading.add_done_callback(partial(self._loaded, load))

    def _loaded(self, load: _Load, future: from_thread.LoadFuture) -> None:
        """Record the end of a load.

        In the engine's thread, or in the caller's if it was over at once.
        """
        loaded, error, why = 0, None, ""
        try:
            result = future.result(0)
            loaded = result.loaded // self._source.pages_per_chunk
            if result.loaded < len(result.outcomes) and result.outcomes[result.loaded] == GIVEN_UP:
                why = "given up, since that is sooner"
        except DrainUnproven as unproven:
            # If it were reported as over, vLLM would give the blocks to somebody, and a copy may still write to them.
            self.counts.trouble("loads without a proven end, whose requests and blocks are withheld", unproven)
            self._unproven = unproven
            load.over.set()
            return
        except Exception as raised:
            error = raised
        self._arrive(load, loaded, error or why)

    def _arrive(self, load: _Load, loaded: int, why: Exception | str = "") -> None:
        self._arrived.put((load.plan.request_id, loaded))
        load.over.set()
        missing = len(load.plan.hashes) - loaded
        self.counts.add("chunks loaded", loaded)
        if (why or missing) and not load.given_up:
            self.counts.trouble("chunks not loaded, and computed instead", why or "damaged, or gone", missing)

    def received(self, finished: frozenset[str]) -> set[str]:
        """Return the requests whose loads are over, since the last call.

        Loads of finished requests are cancelled first.
        """
        self.collect(finished)
        received, self._received = self._received, set()
        return received

    def results(self, finished: frozenset[str]) -> tuple[set[str], set[str]]:
        """Return the requests whose loads have ended, and those lacking blocks."""
        self.collect(finished)
        results = self._received, self._failed_requests
        self._received, self._failed_requests = set(), set()
        return results

    def collect(self, finished: frozenset[str]) -> None:
        """Record the loads that are over.

        If an error cuts this short, no result is lost.
        """
        wait = self._idle and bool(self._loads)
        for request_id in finished:
            load = self._loads.get(request_id)
            if load is not None:
                wait, load.given_up = False, True
                self._request_end(load)
        while True:
            try:
                # Nothing is computed in this step: give the threads that load a chance, rather than return at once.
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
                    # Failed blocks first: vLLM takes blocks that are not reported for loaded.
                    self.failed |= lost
                    if lost:
                        self._failed_requests.add(request_id)
                self._received.add(request_id)
            except BaseException:
                self._arrived.put((request_id, loaded))
                raise
            del self._loads[request_id]

    def failed_blocks(self) -> set[int]:
        """Return the blocks that were not loaded, since the last call."""
        failed, self.failed = self.failed, set()
        return failed

    # --- stores ---------------------------------------------------------------------------------------------------

    def store(self, plan: StepPlan) -> None:
        """Begin the stores of a step, after its forward pass."""
        if not plan.stores:
            return
        # Not at the start of the next step, though sampling's own copies come first then: an idle engine has no next step,
        # and the blocks of its last request would not be stored until another one comes.
        computed = self._computed()
        for one in plan.stores:
            for part in self._within_budget(one):
                self._store(part, computed, plan.generation)

    def _within_budget(self, plan: StorePlan) -> Sequence[StorePlan]:
        """Split a store that exceeds the engine's budget.

        The engine would refuse it as a whole.
        """
        n, most = len(plan.hashes), self.engine.budget_blocks // self._source.pages_per_chunk
        if n <= most:
            return (plan,)
        if not most:
            self._dropped(n)
            return ()
        # Several parts fill the budget: blocks that are in flight already then displace the last parts, and not the
        # whole store.
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
            self._forget(chunks)  # without its chunks, a running copy fails
            if future is not None:
                self._stores.pop(future, None)
                future.request_cancel()
            if not isinstance(error, OffloadError):
                raise
            self._not_stored(error, len(plan.hashes))
        else:
            self.counts.add("chunks offered", len(plan.hashes))

    def _stored(self, chunks: ExternalBlocks, future: from_thread.StoreFuture) -> None:
        """Record the end of a store.

        In the engine's thread, or in the caller's if it was over at once.
        """
        result, pages = future.result(0), self._source.pages_per_chunk
        if isinstance(result.error, DrainUnproven):
            self._unproven = result.error  # first: `leave_cache` looks for running stores, and then for this
        try:
            self._forget(chunks)
        finally:
            self._stores.pop(future, None)
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
            with contextlib.suppress(OffloadError):  # its absence counts as a miss
                self.engine.store(behind, NO_WAIT, tenant=self._tenant)

    def _dropped(self, chunks: int) -> None:
        self.counts.trouble("chunks dropped, since too many are on their way", "see budget_blocks", chunks)

    def _not_stored(self, why: BaseException | None, chunks: int) -> None:
        """Count chunks that were not stored, and log the reason.

        If there was no room, the log names the knob to raise.
        """
        full = why is not None and name_of(why) == "full"
        hint = f"; no room: raise {self._room_knob}" if full else ""
        self.counts.trouble("chunks not stored", f"{why or '?'}{hint}", chunks)

    def _forget(self, chunks: ExternalBlocks) -> None:
        self._source.forget(chunks.refs or ())
        if self.events is not None:
            self.events.settled(chunks.keys)

    def finished(self, finished: frozenset[str]) -> None:
        """Drop the cancel tokens of requests that are over.

        Nothing more is stored of them; running stores go on.
        """
        for request_id in finished:
            self._tokens.pop(request_id, None)

    # --- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait a while for running stores, and close the engine."""
        self._close(DRAIN_TIMEOUT)

    def _close(self, drain: float) -> None:
        try:
            if drain:
                self.engine.drain(drain)
                self.engine.drain(drain)  # markers are stored after the last chunks
        except OffloadError as error:
            self.counts.trouble("stores that the end of the worker cut off", error)
        try:
            self.engine.close()
        except OffloadError as error:
            _log.error("the engine of a worker could not be closed: %s", error)


def check_layout(
    engine: from_thread.Engine, canary: ChunkCanary, naming: ChunkNaming, computed: PreconditionLike = NO_WAIT
) -> None:
    """Send a pattern through a store and a load.

    If it comes back in another layout, nothing is offloaded. It has ended when this returns: its use of the device
    would invalidate a graph that vLLM captures next.

    Args:
        engine: stores from the cache.
        canary: free blocks of the cache.
        naming: of this worker's chunks.
        computed: holds once earlier work on the device is over. vLLM's own zeroing of the cache may still be queued.

    Raises:
        DrainUnproven: its end is not certain.
    """
    layout = f"{naming.model}/{naming.dtype}/{naming.layout}/{naming.rank}"
    try:
        check = engine.check_layout(canary, layout, timeout=LONGEST_CHECK, precondition=computed)
    except LayoutCheckFailed as error:
        _log.error("nothing is offloaded or loaded: %s", error)
        close_engine(engine)
    except DrainUnproven:
        raise
    except Exception as error:  # such as an error of the device that may not come again
        _log.warning("the layout of the cache was not checked: %s", error)
    else:
        if check.inconclusive:
            _log.warning("the layout of the cache was not checked: %s", check.inconclusive)


def close_engine(engine: from_thread.Engine) -> None:
    """Close an engine; log an error that keeps it from closing."""
    try:
        engine.close()
    except OffloadError as error:
        _log.error("an engine could not be closed: %s", error)
