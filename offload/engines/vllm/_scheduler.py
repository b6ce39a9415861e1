"""The half of the connector in vLLM's scheduler.

It looks requests up, keeps matched chunks pinned, and plans each step. vLLM's thread makes all calls. Lookups begin
when a request arrives, so that most are answered when it is its turn.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

import attrs

from ... import from_thread
from ..._errors import OffloadError
from .._faults import FaultLog
from .._weights import Generation
from ._naming import Naming, keys_of_all_ranks, with_adapter
from ._plans import LoadPlan, StepPlan, StorePlan
from ._requests import Blocks, Question, RequestRecord, RequestTable, State
from ._waiting import WaitingPins, limits_of

_log = logging.getLogger("vllm.offload")

PUT_OFF: Final = "lookups put off, since requests that wait keep their share of the tiers"
IDLE_WAIT: Final = 0.005
"""Seconds that a step without a forward pass waits for running work.

vLLM would return at once, and keep the interpreter from the threads that it waits for; a request that arrives meanwhile
is delayed no longer than this.
"""


@attrs.frozen
class Scheduled:
    """The decisions of vLLM for one step that matter here."""

    computed: Mapping[str, int]
    """Number of tokens that each scheduled request will have computed after it."""
    blocks_of: Callable[[str], Blocks]
    """Returns all block numbers of a request, of each group."""
    overwritten: frozenset[int]
    """Blocks that were given out in this step."""
    cancelled: frozenset[str]
    """Requests that were preempted."""


class SchedulerHalf:
    """The calls of vLLM's scheduler.

    Args:
        engine: for lookups: the worker's own, or, if workers are other processes, one of this process that only
            reads.
        ranks: the naming of each worker's chunks; if a chunk has a page for each layer, the naming of each layer.
        table: the requests.
        lookup_timeout: seconds that a lookup may take.
        stores: whether anything is to be stored (vLLM's role is producer, or both).
        loads: whether anything is to be loaded.
        tenant: tenant that may find the chunks.
        version_file: has the version of the weights after a reset; see :class:`Generation`.
    """

    def __init__(
        self,
        engine: from_thread.Engine,
        ranks: Sequence[Naming],
        table: RequestTable,
        *,
        lookup_timeout: float,
        stores: bool = True,
        loads: bool = True,
        tenant: str = "",
        version_file: str = "",
    ) -> None:
        self.counts: FaultLog = FaultLog("scheduler", _log)
        self._engine = engine
        self._ranks = ranks
        self._table = table
        self._lookup_timeout = lookup_timeout
        self._stores, self._loads, self._tenant = stores, loads, tenant
        self._generation = Generation(version_file)
        self._lookups: dict[str, from_thread.LookupFuture] = {}  # running, or holding pins
        self._loading: dict[str, frozenset[int]] = {}  # the blocks that a request waits for
        self._plans: list[LoadPlan] = []  # of the step that is being put together
        self._allocated: set[int] = set()
        self._cancelled: set[str] = set()
        self._waiting = WaitingPins(self._limits())

    def _limits(self) -> dict[str, int]:
        try:
            tiers = self._engine.statistics().engine.tiers
        except OffloadError as error:
            self.counts.trouble("sizes of tiers not known", error)
            return {}
        capacities = {name: tier.capacity_bytes for name, tier in tiers.items()}
        return limits_of(capacities, self._engine.block_bytes)

    # --- lookups --------------------------------------------------------------------------------------------------

    def added(self, request_id: str, hashes: Sequence[bytes], tokens: int, adapter: str = "") -> None:
        """Begin the lookup of a request that has arrived, before vLLM asks."""
        record = self._table.add(request_id, hashes, adapter)
        if not self._loads or not tokens:
            return
        if not self._has_room():
            self.counts.add(PUT_OFF)
            return
        question = self._table.match(record, tokens, 0)
        if isinstance(question, Question):
            self._begin(record, question)

    def matched(
        self, request_id: str, hashes: Sequence[bytes], tokens: int, computed: int, adapter: str = ""
    ) -> int | None:
        """Return the number of loadable tokens after the computed ones.

        ``None`` while it is not known.
        """
        record = self._table.add(request_id, hashes, adapter)
        if not self._loads:
            return 0
        self._waiting.asked(request_id)
        self._look(record)
        matched = self._table.match(record, tokens, computed)
        if isinstance(matched, Question):
            self._let_go(request_id)
            if not self._make_room():
                record.ask_again()
                return None
            matched = self._begin(record, matched, is_asked=True)
        return matched

    def adapter_of(self, request_id: str) -> str:
        """Return the identity of a request's adapter.

        Empty if the request is not known, or has none.
        """
        record = self._table.records.get(request_id)
        return "" if record is None else record.adapter

    def _has_room(self) -> bool:
        """Return whether waiting requests may pin more.

        New answers are counted first.
        """
        if not self._waiting.has_room:
            for request_id in self._waiting.unanswered:
                lookup = self._lookups.get(request_id)
                if lookup is not None:
                    self._count_pins(request_id, lookup)
        return self._waiting.has_room

    def _count_pins(self, request_id: str, lookup: from_thread.LookupFuture) -> None:
        if lookup.done():
            with contextlib.suppress(OffloadError):  # the error is handled when vLLM asks
                self._waiting.answer(request_id, lookup.result(0).runs)

    def _make_room(self) -> bool:
        """Release pins that vLLM does not ask for, until there is room.

        Returns whether there is.
        """
        while not self._has_room():
            oldest = self._waiting.oldest()
            if oldest is None:
                return False
            self._let_go(oldest)
            record = self._table.records.get(oldest)
            if record is not None:
                record.ask_again()
            self.counts.add("requests that waited and are looked up again, since others were first")
        return True

    def _begin(self, record: RequestRecord, question: Question, *, is_asked: bool = False) -> int | None:
        self._let_go(record.request_id)
        generation = with_adapter(self._generation.current(), record.adapter)
        keys = keys_of_all_ranks(self._ranks, question.hashes, generation)
        try:
            lookup = self._engine.begin_lookup(keys, tenant=self._tenant, timeout=self._lookup_timeout)
        except OffloadError as error:
            self.counts.trouble("lookups not made", error)
            self._table.answer(record, 0)
            return 0
        self._lookups[record.request_id] = lookup
        self._waiting.begin(record.request_id, keys, is_asked=is_asked)
        self._count_pins(record.request_id, lookup)
        self.counts.add("chunks asked for", len(question.hashes))
        return None

    def _look(self, record: RequestRecord) -> None:
        """Record the answer of a lookup, if it is there."""
        lookup = self._lookups.get(record.request_id)
        if lookup is None or record.state is not State.ASKED or not lookup.done():
            return
        try:
            hit = lookup.result(0)
        except OffloadError as error:
            self.counts.trouble("lookups without an answer, not taken for misses", error)
            found = 0
        else:
            found = len(hit) // len(self._ranks)  # a chunk of which one rank has no part is none
            for tier, why in hit.unavailable.items():
                self.counts.trouble(f"lookups without {tier}, which is unavailable", why)
        self.counts.add("chunks found", found)
        self._table.answer(record, found)
        if not found:
            self._let_go(record.request_id)

    def _let_go(self, request_id: str) -> None:
        """End the lookup of a request, and release its pins."""
        self._waiting.release(request_id)
        lookup = self._lookups.pop(request_id, None)
        if lookup is not None:
            lookup.request_cancel()

    # --- decisions of vLLM ----------------------------------------------------------------------------------------

    def allocated(self, request_id: str, blocks: Blocks, external: int) -> None:
        """Record a request's blocks, and plan its load.

        ``external`` is the number of tokens to load.
        """
        record = self._table.records.get(request_id)
        if record is None:
            return
        plan = self._table.allocated(record, blocks, external)
        if plan is not None:
            self._plans.append(plan)
            wanted = frozenset(block for chunk in plan.blocks for block in chunk if block is not None)
            self._loading[request_id] = wanted
            self._waiting.release(request_id)
            self._allocated |= wanted
            self.counts.add("chunks to load", len(plan.hashes))
            for tier, tokens in self.sources(request_id, external).items():
                self.counts.add(f"tokens hit in {tier}", tokens)
        elif record.state is not State.LOADING:
            self._let_go(request_id)

    def sources(self, request_id: str, external: int) -> dict[str, int]:
        """Return the number of a request's tokens to load from each tier.

        The tier of a chunk is that of the first rank's part.
        """
        record, lookup = self._table.records.get(request_id), self._lookups.get(request_id)
        if record is None or lookup is None or not lookup.done():
            return {}
        try:
            runs = lookup.result(0).runs
        except OffloadError:
            return {}
        tiers = [tier for tier, keys in runs for _ in range(keys)]
        return self._table.sources(record, external, tiers[:: len(self._ranks)])

    def plan(self, scheduled: Scheduled) -> StepPlan:
        """Return the plan of a step."""
        self._waiting.step()
        stores: list[StorePlan] = []
        if self._stores:
            for request_id, computed in scheduled.computed.items():
                record = self._table.records.get(request_id)
                if record is None:
                    continue
                store = self._table.store(record, computed, partial(scheduled.blocks_of, request_id))
                if store is not None:
                    stores.append(store)
        if not scheduled.computed and not self._loading:
            self._wait_for_a_lookup()
        plan = StepPlan(
            loads=self._plans,
            stores=stores,
            overwritten=scheduled.overwritten | self._allocated,
            cancelled=scheduled.cancelled | self._cancelled,
            idle=not scheduled.computed,
            generation=self._generation.current() if stores or self._plans else "",
        )
        self._plans, self._allocated, self._cancelled = [], set(), set()
        return plan

    def _wait_for_a_lookup(self) -> None:
        """Wait a little for a lookup when nothing is computed or loaded."""
        pending = next((lookup for lookup in self._lookups.values() if not lookup.done()), None)
        if pending is not None:
            with contextlib.suppress(OffloadError):  # the error is handled when vLLM asks
                pending.result(IDLE_WAIT)

    # --- results --------------------------------------------------------------------------------------------------

    def received(
        self, request_ids: Sequence[str], failed: frozenset[int], failed_requests: frozenset[str] = frozenset()
    ) -> None:
        """Record loads that are over.

        ``failed`` are the blocks that did not come; of ``failed_requests`` not all came.
        """
        for request_id in request_ids:
            wanted = self._loading.pop(request_id, frozenset())
            self._let_go(request_id)
            record = self._table.records.get(request_id)
            if record is not None:
                self._table.loaded(record, wanted.isdisjoint(failed) and request_id not in failed_requests)

    def finished(self, request_id: str, aborted: bool) -> None:
        """End a request.

        Its running load goes on until the worker reports its end: its blocks are written to.
        """
        record = self._table.records.pop(request_id, None)
        if request_id not in self._loading:
            self._let_go(request_id)
        if record is not None and aborted:
            self._cancelled.add(request_id)

    # --- failures -------------------------------------------------------------------------------------------------

    def forget(self, request_id: str) -> None:
        """Forget a request, which is computed. Its running load goes on."""
        self._table.records.pop(request_id, None)
        if request_id not in self._loading:
            self._let_go(request_id)

    def refuse_load(self, request_id: str, blocks: Blocks) -> None:
        """Plan an empty load for a request that could not be planned.

        The worker reports it as over, and all blocks that vLLM waits for as not loaded.

        Args:
            request_id: of a request that waits for its load.
            blocks: all its block numbers, of each group.
        """
        if any(plan.request_id == request_id for plan in self._plans):
            return
        record = self._table.records.get(request_id)
        computed = 0
        if record is not None:
            record.state, computed = State.LOADING, record.computed
        self._waiting.release(request_id)
        sizes = [group.block_size for group in self._table.groups]
        lost = [given[computed // size :] for size, given in zip(sizes, blocks, strict=True)]
        self._loading[request_id] = frozenset(block for given in lost for block in given)
        self._plans.append(LoadPlan(request_id, (), lost))

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests whose loads are over."""
        for request_id in request_ids:
            self._loading.pop(request_id, None)
            self.forget(request_id)

    def reset(self) -> None:
        """Make all stored chunks unfindable.

        Waiting requests are looked up again; nothing of the others is stored.
        """
        self._generation.reset()
        for request_id in list(self._lookups):
            if request_id not in self._loading:
                self._let_go(request_id)
        self._table.reset()

    def close(self) -> None:
        """Release all pins."""
        for request_id in list(self._lookups):
            self._let_go(request_id)
