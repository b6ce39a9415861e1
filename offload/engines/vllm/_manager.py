"""The state behind vLLM's own offloading: chunks in host memory, and room.

It runs in the scheduler's process. A chunk that the tiers have is verified in host memory first; only then it is
reported to vLLM as a hit. It is verified in place, and copied from there, if that is in memory of this process and the
worker is in this process, too. Otherwise it is copied into a row. Chunks that vLLM has stored lie in a row, are hits at
once, and are copied into the tiers in the background.

vLLM's thread makes all calls. Results from the engine's thread are queued there, and applied by a later call.
"""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from backends.abc import ExternalBlocks, Key
from backends.base.blocks import BlockPool

from ... import from_thread
from ..._engine import BlocksInPlace
from ..._errors import DrainUnproven, OffloadError
from ..._pipeline.lifecycle import Status
from ...preconditions import NO_WAIT
from .._faults import FaultLog
from .._weights import Generation
from ._arena import Arena
from ._copies import IDLE_WAIT
from ._naming import ChunkNaming
from ._rows import Answer, Fill, Question, RowTable
from ._settings import SpecSettings

_log = logging.getLogger("vllm.offload")

DRAIN_TIMEOUT: Final = 10.0
"""Seconds that the end of an instance waits for running stores."""
STORED_TOGETHER: Final = 256
"""Chunks in one store: far fewer than the budget of an engine."""


def open_host_memory(
    name: str,
    row_bytes: int,
    naming: ChunkNaming,
    settings: SpecSettings,
    in_place: Callable[[], bool] = lambda: False,
) -> HostMemory:
    """Make or open the arena of this name, and open its engine.

    ``in_place``: see :class:`HostMemory`.

    Raises:
        ConfigError: a name is unknown, or a value invalid, in the table of the engine.
        OSError: the memory cannot be had.
        ValueError: there is an arena of this name and of another size.
    """
    rows = settings.cpu_bytes_to_use // row_bytes
    arena = Arena(name, rows, row_bytes, huge_pages=settings.huge_pages)
    return HostMemory(
        from_thread.open_engine(arena, settings.engine_config(), when_full="drop").start(),
        arena,
        naming,
        lookup_timeout=settings.lookup_timeout,
        load_timeout=settings.load_timeout,
        tenant=settings.tenant,
        in_place=in_place,
        version_file=settings.weights_version_file,
    )


class HostMemory:
    """The rows of an instance, and the tiers behind them.

    Args:
        engine: stores from ``arena``, and drops blocks that there is no room for.
        arena: the rows.
        naming: of the chunks, by the keys that vLLM has for them.
        lookup_timeout: seconds that a lookup may take.
        load_timeout: seconds that filling rows from the tiers may take.
        tenant: tenant that may find the chunks.
        in_place: whether the workers are in this process, so that they can read pages of tiers in place.
        version_file: has the version of the weights after a reset; see :class:`Generation`.
    """

    def __init__(
        self,
        engine: from_thread.Engine,
        arena: Arena,
        naming: ChunkNaming,
        *,
        lookup_timeout: float,
        load_timeout: float,
        tenant: str = "",
        in_place: Callable[[], bool] = lambda: False,
        version_file: str = "",
    ) -> None:
        self.counts: FaultLog = FaultLog("host memory", _log)
        self.engine: from_thread.Engine = engine
        self.arena: Arena = arena
        self.table: RowTable = RowTable(BlockPool(len(arena)))
        self._naming, self._tenant, self._in_place = naming, tenant, in_place
        self._lookup_timeout, self._load_timeout = lookup_timeout, load_timeout
        self._lookups: dict[str, set[from_thread.LookupFuture]] = {}
        self._sources: dict[str, dict[Key, str]] = {}  # of each request, the tiers that rows were filled from for it
        self._generation = Generation(version_file)
        self._ended: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.has_lost_track: bool = False
        """Whether an error has lost a result.

        A request could then wait for ever.
        """

    # --- requests -------------------------------------------------------------------------------------------------

    def begin(self, request_id: str) -> None:
        """Forget a request that is new or was preempted."""
        self._cancel_lookups(request_id)
        self._sources[request_id] = {}
        self.table.begin(request_id)

    def end(self, request_id: str) -> None:
        """End a request.

        vLLM calls it at the end of the step after it: if all others wait for the tiers, wait here.
        """
        self._cancel_lookups(request_id)
        self._sources.pop(request_id, None)
        self.table.end(request_id)
        self._wait_for_the_tiers()

    def where(self, request_id: str, key: Key, position: int) -> Answer:
        """Return the state of a chunk.

        At the end of the step, the tiers are asked for unknown ones.
        """
        self._take_in()
        return self.table.where(request_id, key, position)

    def source(self, request_id: str, key: Key) -> str:
        """Return the tier that a row was filled from for this request.

        Empty for a row that was there already.
        """
        return self._sources.get(request_id, {}).get(key, "")

    def planned(self, preempted: Iterable[str], started: Iterable[str] = ()) -> None:
        """End the planning of a step: look its unknown chunks up.

        If all requests wait for the tiers, wait a little as well.

        Args:
            preempted: requests that are not computed any more; they may load again.
            started: requests that are computed from now on.
        """
        if self.has_lost_track:
            self._start_over()
        for request_id in preempted:
            if self.table.knows(request_id):  # a request that is over already would begin again, and never end
                self.begin(request_id)
        for request_id in started:
            self.table.run(request_id)
        self.table.step()
        for question in self.table.questions():
            self._look_up(question.request_id, question.keys, partial(self._found, question))
        self._take_in()
        self._wait_for_the_tiers()

    def _wait_for_the_tiers(self) -> None:
        if self.table.waits():
            self._take_in(IDLE_WAIT)

    # --- from the tiers into rows ---------------------------------------------------------------------------------

    def _look_up(self, request_id: str, keys: Sequence[Key], then: Callable[[from_thread.Hit | None], None]) -> None:
        """Look keys up, and pass the hit on; ``None`` without an answer."""
        named = self._naming.keys(keys, self._generation.current())
        try:
            lookup = self.engine.begin_lookup(named, tenant=self._tenant, timeout=self._lookup_timeout)
        except OffloadError as error:
            self.counts.trouble("lookups not made", error)
            then(None)
            return
        self._lookups.setdefault(request_id, set()).add(lookup)
        lookup.add_done_callback(self._later(partial(self._looked_up, request_id, then)))

    def _looked_up(
        self, request_id: str, then: Callable[[from_thread.Hit | None], None], lookup: from_thread.LookupFuture
    ) -> None:
        cancelled = lookup not in self._lookups.get(request_id, ())
        self._lookups.get(request_id, set()).discard(lookup)
        try:
            hit = None if cancelled else lookup.result(0)
        except OffloadError as error:
            self.counts.trouble("lookups without an answer, not taken for misses", error)
            hit = None
        # Operations that `then` begins keep the hit pinned. A hit without blocks is false, and has to be released as
        # well.
        with contextlib.nullcontext() if hit is None else hit:
            then(hit)

    def _found(self, question: Question, hit: from_thread.Hit | None) -> None:
        found = 0 if hit is None else len(hit)
        if hit is not None:
            for tier, why in hit.unavailable.items():
                self.counts.trouble(f"lookups without {tier}, which is unavailable", why)
        blocks = hit.in_place() if hit is not None and self._in_place() else None
        with self._counting_refused():
            fill = self.table.found(question, found, in_place=blocks is not None)
        self.counts.add("chunks asked for", len(question.keys))
        self.counts.add("chunks found", found)
        if fill is None:
            return
        if blocks is not None and hit is not None and not fill.rows:
            self._verify(fill, hit, blocks)
        elif len(fill.keys) == found:
            self._fill(fill, hit)
        else:  # some have a row by now, or get none, and a load takes all of a hit
            self._look_up(question.request_id, fill.keys, partial(self._fill, fill))

    @contextlib.contextmanager
    def _counting_refused(self) -> Iterator[None]:
        refused = self.table.refused
        yield
        if self.table.refused > refused:
            held = "all of it is held; see cpu_bytes_to_use"
            self.counts.trouble("chunks found, for which host memory has no room", held, self.table.refused - refused)

    def _verify(self, fill: Fill, hit: from_thread.Hit, blocks: BlocksInPlace) -> None:
        """Verify chunks in place.

        They stay pinned until nobody holds any of them.
        """
        hit.begin_reading(fill)
        let_go = partial(hit.end_reading, fill)
        try:
            loading = self.engine.begin_load(hit, blocks, timeout=self._load_timeout)
        except OffloadError as error:
            self.counts.trouble("loads not begun", error)
            self._verified(fill, blocks, let_go, 0)
            return
        loading.add_done_callback(self._later(partial(self._looked_at, fill, blocks, let_go)))
        self._note_sources(fill, hit)

    def _looked_at(
        self, fill: Fill, blocks: BlocksInPlace, let_go: Callable[[], None], loading: from_thread.LoadFuture
    ) -> None:
        loaded = 0
        try:
            loaded = blocks.leading(loading.result(0).loaded)
        except OffloadError as error:  # a load that may still read them writes nothing
            self.counts.trouble("loads that failed", error)
        self._verified(fill, blocks, let_go, loaded)

    def _verified(self, fill: Fill, blocks: BlocksInPlace, let_go: Callable[[], None], loaded: int) -> None:
        """Accept the leading chunks that were verified.

        The others may still be in another tier, and come through rows.
        """
        self.counts.add("chunks read in place", loaded)
        with self._counting_refused():
            others = self.table.verified(fill, blocks, loaded, let_go)
        if others is not None:
            self._look_up(fill.question.request_id, others.keys, partial(self._fill, others))

    def _fill(self, fill: Fill, hit: from_thread.Hit | None) -> None:
        loading = None
        if hit is not None:
            try:
                into = self.arena.into(fill.rows[: len(hit)])
                loading = self.engine.begin_load(hit, into, timeout=self._load_timeout)
            except OffloadError as error:
                self.counts.trouble("loads not begun", error)
        if loading is None:
            self._filled(fill, 0)
        else:
            loading.add_done_callback(self._later(partial(self._loaded, fill)))
            self._note_sources(fill, hit)

    def _note_sources(self, fill: Fill, hit: from_thread.Hit | None) -> None:
        tiers = [tier for tier, blocks in hit.runs for _ in range(blocks)] if hit is not None else []
        self._sources.get(fill.question.request_id, {}).update(zip(fill.keys, tiers, strict=False))

    def _loaded(self, fill: Fill, loading: from_thread.LoadFuture) -> None:
        try:
            self._filled(fill, loading.result(0).loaded)
        except DrainUnproven as error:
            self.counts.trouble("copies without a proven end, whose rows are not used any more", error)
            self.table.filled(fill, 0, safe=False)
        except OffloadError as error:
            self.counts.trouble("loads that failed", error)
            self._filled(fill, 0)

    def _filled(self, fill: Fill, loaded: int) -> None:
        missing = len(fill.keys) - loaded
        self.counts.add("chunks loaded", loaded)
        if missing:
            self.counts.trouble("chunks found, and not loaded", "damaged, or gone", missing)
        self.table.filled(fill, loaded)

    # --- copies of vLLM -------------------------------------------------------------------------------------------

    def load(self, request_id: str, keys: Sequence[Key]) -> list[int]:
        """Return the places of chunks that were reported as hits.

        They are held until :meth:`loaded`.
        """
        self.counts.add("chunks hit", len(keys))
        return self.table.load(request_id, keys)

    def loaded(self, request_id: str, keys: Iterable[Key]) -> None:
        """Release chunks that the workers have loaded."""
        self.table.loaded(request_id, keys)

    def take_for_store(
        self, keys: Sequence[Key], request_id: str = ""
    ) -> tuple[list[Key], list[int], list[Key]] | None:
        """Take rows; see :meth:`RowTable.take_for_store`. ``None`` if no chunk gets one."""
        self._take_in()
        refused = self.table.refused
        taken = self.table.take_for_store(keys, request_id)
        try:
            if self.table.refused > refused:
                why = "all of it is held; see cpu_bytes_to_use"
                self.counts.trouble("chunks not stored for want of room", why, self.table.refused - refused)
                if not taken[0]:
                    return None
            self.arena.take_unwritten(taken[1])
        except BaseException:
            self.not_written(taken[0])  # vLLM begins no copy into their rows, and reports no end of one.
            raise
        return taken

    def not_written(self, keys: Iterable[Key]) -> None:
        """Give back the rows of chunks that were not completely written."""
        self.table.stored(keys, success=False)

    def stored(self, keys: Iterable[Key], *, success: bool = True) -> None:
        """Store chunks that the workers have written into the tiers."""
        written = self.table.rows_of(keys)
        unwritten = self.arena.take_unwritten(list(written.values()))
        if unwritten:
            lost = [key for key, row in written.items() if row in unwritten]
            self.counts.trouble("chunks that a worker could not write", "see the log of the workers", len(lost))
            self.not_written(lost)
        there, rows = self.table.stored([key for key, row in written.items() if row not in unwritten], success)
        together = min(STORED_TOGETHER, self.engine.budget_blocks)  # a larger store is refused as a whole
        for start in range(0, len(there), together):
            try:
                self._store(there[start : start + together], rows[start : start + together])
            except BaseException:
                self.table.let_go(rows[start + together :])  # nothing has begun to copy these
                raise

    def _store(self, keys: Sequence[Key], rows: Sequence[int]) -> None:
        try:
            named = self._naming.keys(keys, self._generation.current())
            storing = self.engine.store(ExternalBlocks(self.arena, named, list(rows)), NO_WAIT, tenant=self._tenant)
        except BaseException as error:
            self.table.let_go(rows)
            if not isinstance(error, OffloadError):
                raise
            self.counts.trouble("chunks not stored", error, len(keys))
            return
        self.counts.add("chunks offered", len(keys))
        storing.add_done_callback(self._later(partial(self._arrived, rows)))

    def _arrived(self, rows: Sequence[int], storing: from_thread.StoreFuture) -> None:
        result = storing.result(0)
        self.table.let_go(rows)  # a copy that hangs may read the row's next content, into a page that nobody will find
        self.counts.add("chunks stored", len(result.completed))
        lost = len(rows) - len(result.completed)
        if storing.dropped:
            self.counts.trouble("chunks dropped, since too many are on their way", "see budget_blocks", lost)
        elif result.status is Status.FAILED:
            self.counts.trouble("chunks not stored", result.error or next(iter(result.failed.values()), "?"), lost)
        else:
            self.counts.kept_back("chunks", result.filtered.values())

    # --- the end --------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Make all stored chunks unfindable for this instance."""
        for request_id in list(self._lookups):
            self._cancel_lookups(request_id)
        self.table.reset()
        self._sources = {request_id: {} for request_id in self._sources}
        self._generation.reset()

    def _start_over(self) -> None:
        """Forget all chunks that no worker copies.

        It is called at the end of a step, when no hit is about to be loaded.
        """
        for request_id in list(self._lookups):
            self._cancel_lookups(request_id)
        self.table.start_over()
        self.has_lost_track = False

    def close(self) -> None:
        """Wait a while for running stores, and close the engine."""
        self.arena.unlink()
        for request_id in list(self._lookups):
            self._cancel_lookups(request_id)
        try:
            self.engine.drain(DRAIN_TIMEOUT)
        except OffloadError as error:
            self.counts.trouble("stores that the end cut off", error)
        try:
            self.engine.close()
        except OffloadError as error:
            self.counts.trouble("engines that could not be closed", error)
        self._take_in()

    # --- between the threads --------------------------------------------------------------------------------------

    def _later(self, function: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return a callback for the engine's thread that queues a future's end."""
        return lambda future: self._ended.put(partial(function, future))

    def _take_in(self, wait: float = 0.0) -> None:
        """Apply the queued results; wait this long if there are none."""
        while True:
            try:
                take_in = self._ended.get(timeout=wait) if wait else self._ended.get_nowait()
            except queue.Empty:
                return
            take_in()
            wait = 0.0

    def _cancel_lookups(self, request_id: str) -> None:
        for lookup in self._lookups.pop(request_id, ()):
            lookup.request_cancel()
