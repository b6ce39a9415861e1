"""The public engine of threads. The rules are in the package's docstring."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, NoReturn, TypeAlias, TypeVar, TypeVarTuple

import attrs

from backends.abc import Blocks, Canary, Deletion, Destination, Key, Source, check_keys
from maru.kv_events import KeyWatcher

from .._config import BreakerConfig, PipelineConfig
from .._engine import (
    Chain,
    EngineConfig,
    EngineStatistics,
    LayoutCheck,
    LoadResult,
    OnEnterFailure,
    OnLoadFailure,
    Route,
    TierLike,
)
from .._engine import open_engine as _open_engine
from .._engine.config import SHADOW_CHECK
from .._engine.explain import Explanation
from .._engine.load_or_recompute import check_computed
from .._engine.loading import precondition_of
from .._engine.opening import configuration_of
from .._errors import EngineCrashed
from .._keys import BlockKey
from ..abc import AsyncPolicy, Instrument, Policy, PreconditionLike, Recompute
from ..preconditions import NO_WAIT, as_precondition
from ..preconditions import ThreadEvent as Event
from ._calls import CallFuture, Hit, LoadFuture, LookupFuture
from ._cancellation import CancellationToken
from ._future import StoreFuture
from ._worker import LEAVE_TIMEOUT, EngineWorker

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

AnyFuture: TypeAlias = StoreFuture | LookupFuture | LoadFuture
"""Everything that :meth:`Engine.poll` returns."""

WhenFull: TypeAlias = Literal["raise", "drop"]
"""The action of a store in a full engine.

It raises :class:`offload.PipelineFull`, or drops the blocks and counts them.
"""

DEFAULT_TIMEOUT: Final = 60.0
"""The default timeout of a call, in seconds.

It is longer than a healthy copy, and shorter than an operator's patience.
"""


def open_engine(
    source: Source | EngineConfig,
    tiers: Sequence[TierLike] | Mapping[str, TierLike] | EngineConfig = (),
    *,
    policies: Sequence[Policy | AsyncPolicy] | None = None,
    config: PipelineConfig | None = None,
    chain: bool | Chain = True,
    instruments: Sequence[Instrument | object] = (),
    on_load_failure: OnLoadFailure = "miss",
    routes: Sequence[Route] = (),
    promote: bool | str = False,
    breaker: BreakerConfig | None = None,
    on_enter_failure: OnEnterFailure | Mapping[str, OnEnterFailure] = "fail",
    shadow_check: int = SHADOW_CHECK,
    recompute: Recompute | None = None,
    when_full: WhenFull = "raise",
    timeout: float = DEFAULT_TIMEOUT,
    start_timeout: float = DEFAULT_TIMEOUT,
) -> Engine:
    """Open an engine in a new thread.

    Use it as ``with offload.from_thread.open_engine(host, [disk]) as engine``. While it is open, only that thread may
    use the source and the tiers, except as :meth:`Engine.store` allows. Policies and instruments are called in that
    thread, and must not wait for the engine (see :meth:`Engine.store` for the one exception).

    Args:
        source: as for :func:`offload.open_engine`, like all arguments without a description here.
        tiers: see there; an ``EngineConfig`` replaces all but the instruments and the last three arguments.
        policies: see there.
        config: see there; its ``budget_blocks`` (of the route to the first tier) is the limit for :meth:`Engine.store`.
        chain: see there.
        instruments: see there.
        on_load_failure: see there.
        routes: see there.
        promote: see there.
        breaker: see there.
        on_enter_failure: see there.
        shadow_check: see there.
        recompute: see there. Called in a thread of its own, neither the engine's nor the caller's.
        when_full: whether a store without room raises or drops its blocks.
        timeout: the default timeout of calls, in seconds.
        start_timeout: the timeout of :meth:`Engine.start`, in seconds.

    Raises:
        ValueError: as :func:`offload.open_engine`; or ``when_full`` or a timeout is out of range.
        TypeError: as there; or a config names its source instead of holding it.
    """
    if when_full not in ("raise", "drop"):
        raise ValueError(f"when_full = {when_full!r}: must be raise or drop")
    for name, seconds in (("timeout", timeout), ("start_timeout", start_timeout)):
        if not 0 < seconds < float("inf"):
            raise ValueError(f"{name} = {seconds!r}: must be positive and finite")
    whole = configuration_of(
        source,
        tiers,
        policies,
        config,
        chain,
        on_load_failure,
        routes,
        promote,
        breaker,
        on_enter_failure,
        shadow_check,
    )
    place: Any = whole.source
    if isinstance(place, str | Mapping):
        raise TypeError(
            f"source = {place!r}: must be the source object, since the blocks of each store are checked against it"
        )
    worker = EngineWorker(
        place,
        _open_engine(whole, instruments=instruments, recompute=recompute),
        budget_blocks=whole.first_pipeline.budget_blocks,
        drops=when_full == "drop",
        timeout=timeout,
        # The pipelines drain one after the other: those to slower tiers, the promotions, and those of spills.
        close_timeout=whole.first_pipeline.drain_timeout * 3 * len(whole.tiers) + 2 * LEAVE_TIMEOUT,
    )
    return Engine(worker, start_timeout)


class Engine:
    """An engine in its own thread. Made by :func:`open_engine`.

    It is a context manager, which starts and closes it.
    """

    def __init__(self, worker: EngineWorker, start_timeout: float) -> None:
        self._worker = worker
        self._start_timeout = start_timeout

    def __repr__(self) -> str:
        refusal = self._worker.refusal
        return f"<from_thread.Engine of {self._worker.source!r}: {'open' if refusal is None else refusal()}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be sent to another process: open one there")

    @property
    def budget_blocks(self) -> int:
        """Most blocks in flight at once, and in a single store."""
        return self._worker.budget_blocks

    @property
    def block_bytes(self) -> int:
        """Size of a block of the source, in bytes."""
        return self._worker.source.block_bytes

    # --- opening and closing --------------------------------------------------------------------------------------

    def start(self) -> Engine:
        """Start the thread and wait until the engine is open.

        Raises:
            WaitTimeout: it did not open within ``start_timeout``; it will close as soon as it has opened.
            RuntimeError: it was started before.
            Exception: opening the engine raised it.
        """
        worker = self._worker
        worker.start(self._start_timeout)
        # In this order: at exit, the latest registered function is called first. So the engine closes before any
        # finalizer runs and before everything that was registered earlier, while the tiers and their directories are
        # still there.
        weakref.finalize(self, worker.drop).atexit = False
        atexit.register(worker.close_at_exit)
        return self

    def close(self, timeout: float | None = None) -> None:
        """Close the engine and join its thread.

        Every future is done then. Idempotent; for any thread. Stores that are not committed end as FAILED, copies under
        way drain, as at the end of :func:`offload.open_engine`'s block. Call :meth:`drain` first to have everything
        stored. In a forked child it does nothing.

        Args:
            timeout: in seconds; by default a little longer than all pipelines may take to drain.

        Raises:
            WaitTimeout: the thread has not ended. Its futures are done, as FAILED by :class:`offload.DrainUnproven`:
                their blocks may still be read.
            EngineCrashed: the thread had ended with an error. Raised once.
        """
        self._worker.close(timeout)

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except EngineCrashed:
            if error is None:  # otherwise keep the body's own error, which is mostly due to the crash
                raise

    # --- storing --------------------------------------------------------------------------------------------------

    def store(
        self,
        blocks: Blocks,
        precondition: PreconditionLike,
        *,
        tenant: str = "",
        cancel_token: CancellationToken | None = None,
    ) -> StoreFuture:
        """Store blocks of the source. Never blocks.

        The stages run in the engine's thread, or at once in this one. They run at once, so that the future is done on
        return, if nothing may have to wait: ``NO_WAIT``, up to 512 KiB of ``source.external`` blocks for a tier in
        memory with none after it, no policy or instrument that needs the engine's thread
        (:class:`offload.abc.Instrument`), and an engine's thread that has nothing to do. Never in the main thread, in
        which a signal may strike.

        The room is decided in this call, by the engine's own count: all futures that are not done (and, once
        :meth:`poll` or :meth:`fileno` is in use, not polled) may have ``budget_blocks`` blocks together. Only this
        method feeds the first pipeline, so a store that passes here has room there.

        Strong blocks belong to the engine from this call on, also when it raises. ``source.weak`` and
        ``source.external`` may be called in any thread; methods that change the source (``strong``, ``put``, ``stage``)
        must go through :meth:`call`. Not for signal handlers, which may interrupt a store in their own thread.

        Args:
            blocks: from the engine's source.
            precondition: the condition for reading the bytes: an :class:`Event` that a thread sets after the forward
                pass, or a CUDA event, for example.
            tenant: the tenant, for tiers that need it.
            cancel_token: cancels this store together with others, for example all stores of one request.

        Raises:
            PipelineFull: there is no room. (With ``when_full="drop"``, the future is :attr:`~StoreFuture.dropped`
                instead.)
            PipelineClosed: the engine is closed, crashed, or belongs to the parent of a fork.
            ValueError: the blocks are of another source, or exceed the budget.
            TypeError: ``precondition`` is not a precondition.
        """
        worker = self._worker
        if precondition is not NO_WAIT and type(precondition) is not Event:
            precondition = worker.checked(blocks, precondition)
        future = StoreFuture(worker, blocks, precondition, tenant, cancel_token)
        mailbox, acts = worker.mailbox, False
        with worker.lock:
            entered = worker.entered + len(blocks.keys)
            fits = (
                entered - worker.left <= worker.budget_blocks
                and blocks.source is worker.source
                and worker.refusal is None
            )
            if fits:
                worker.entered = entered
                acts = precondition is NO_WAIT and worker.loop_lock.take_nowait()
                if not acts:
                    mailbox.messages.append(future)
        if acts:
            try:
                # The engine cannot end meanwhile, so a store that is left to it here is not forgotten.
                if worker.store_at_once(future):
                    return future
                mailbox.messages.append(future)
            finally:
                worker.loop_lock.release()
        if not fits:
            try:
                worker.refuse(future)
            except BaseException:
                if cancel_token is not None:
                    cancel_token._leave(future)
                raise
        elif not mailbox.wake_pending:
            mailbox.wake()
        return future

    def drain(self, timeout: float | None = None) -> None:
        """Wait until all earlier stores have settled in all of their tiers.

        A timeout cancels nothing.

        Raises:
            WaitTimeout: not everything has settled.
        """
        self._ask(self._worker.drain, timeout=timeout, after_stores=True)

    # --- ended futures --------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when a future has ended.

        It is for ``select`` or ``epoll``; then call :meth:`poll`. It may be readable although there is nothing to poll.
        Closing the engine closes it.

        Raises:
            PipelineClosed: the engine is closed, crashed, or belongs to the parent of a fork.
        """
        return self._worker.listen()

    def poll(self) -> list[AnyFuture]:
        """Return the futures that ended since the last poll, oldest first.

        Never blocks. Collecting begins with the first call of this or of :meth:`fileno`. From then on exactly one poll
        returns each future of a store, a begun lookup or a begun load that has ended, including those that were done on
        return. A store takes up room until then.

        Raises:
            PipelineClosed: the engine is closed, crashed, or belongs to the parent of a fork, and all futures were
                returned.
        """
        return self._worker.poll()

    def statistics(self, timeout: float | None = None) -> Statistics:
        """Return an immutable snapshot, taken in the engine's thread."""
        return self._ask(self._statistics, timeout=timeout)

    # --- loading --------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[Key], timeout: float | None = None, *, tenant: str = "") -> Hit:
        """Find the longest prefix of ``keys`` over all tiers and pin it.

        Use it as ``with engine.lookup(keys) as hit``. This thread finds the prefix itself, whatever the engine's thread
        does meanwhile, in tiers in memory, in files, and in the page store if its index knows the answer. If another
        tier has to be asked, or a broken one may be tried again, it is :meth:`begin_lookup`, and a wait for its end.

        Raises:
            WaitTimeout: the engine's thread itself did not answer, which is no miss. A prefix that is found later is
                released.
        """
        call = self._lookup(keys, tenant, timeout, polled=False)
        hit = self._worker.reads.lookup(call.keys, tenant)
        return self._worker.wait_for(call, timeout) if hit is None else hit

    def begin_lookup(self, keys: Sequence[Key], *, tenant: str = "", timeout: float | None = None) -> LookupFuture:
        """Begin to look up and pin the longest prefix of ``keys``.

        Never blocks; may be done on return. All tiers are looked up. Each has ``lookup_timeout`` for its part, and all
        of them together a little less than ``timeout``. A tier that does not answer is named in
        :attr:`Hit.unavailable`, its breaker counts a fault, and the result is the prefix in the others. The caller
        releases the hit, or cancels the future, which releases the blocks that it has pinned or will pin.

        Args:
            keys: the keys in order.
            tenant: the tenant, for tiers that need it.
            timeout: in seconds; by default the engine's. After it the lookup is ended, and its result raises
                :class:`WaitTimeout`.

        Raises:
            PipelineFull: too many calls have begun and not ended, or wait to be polled.
            PipelineClosed: the engine is closed, crashed, or belongs to the parent of a fork.
            TypeError: a key is not ``bytes``, or this is one key and not a sequence.
        """
        worker, call = self._worker, self._lookup(keys, tenant, timeout, polled=True)
        worker.check_begin(call)
        hit = worker.reads.lookup(call.keys, tenant)
        if hit is None:
            return worker.begin(call)
        worker.end_here(call, hit)
        return call

    def load(
        self,
        hit: Hit,
        destination: Destination,
        timeout: float | None = None,
        *,
        precondition: PreconditionLike | None = None,
        promote: bool | str | None = None,
    ) -> LoadResult:
        """Copy the blocks of a hit to ``destination`` and verify them.

        They are copied position by position. If the hit lies in tiers that a thread can read itself (see
        :meth:`lookup`), and the destination is host memory that may be written now, this thread reads the blocks
        itself, up to 32 MiB; if it finds anything wrong, and for all other loads, it is :meth:`begin_load`, and a wait
        for its end. So a disk that hangs within one block holds this thread, and no timeout ends that. However it ends,
        ``destination`` is the caller's again, but for the one case below: a load that runs out of time, or is
        interrupted, is ended and awaited.

        Args:
            hit: the result of a lookup.
            destination: addresses, numpy arrays or torch tensors, one for each block.
            timeout: in seconds, with the wait for the precondition; by default the engine's.
            precondition: the condition for writing to ``destination``; see :meth:`offload.Engine.load`.
            promote: as for :meth:`offload.Engine.load`.

        Raises:
            WaitTimeout: it took too long, and was ended.
            DrainUnproven: it took too long, and its copy may still be going on: ``destination`` must not be used.
            LoadFailed: a block could not be loaded, and ``on_load_failure`` is ``fail``.
            PreconditionFailed: the precondition has failed; nothing was copied.
            TypeError: the destination lies on a device and ``precondition`` is missing, or is no precondition.
            ValueError: the hit was released or belongs to another engine, or the destination is too small.
        """
        call = self._load(hit, destination, precondition, promote, timeout, polled=False)
        result = self._worker.reads.load(hit, destination, call.precondition, promote, call.deadline)
        return self._worker.wait_for(call, timeout) if result is None else result

    def begin_load(
        self,
        hit: Hit,
        destination: Destination,
        *,
        precondition: PreconditionLike | None = None,
        promote: bool | str | None = None,
        timeout: float | None = None,
    ) -> LoadFuture:
        """Begin to copy the blocks of a hit to ``destination``. Never blocks.

        It may be done on return: a short copy of memory is made at once, and nothing else, so that no file is read in
        this thread. The hit may be released as soon as this returns: its blocks stay pinned until the load has ended.
        The engine writes to the destination until the future is done.

        Args:
            hit: the result of a lookup.
            destination: addresses, numpy arrays or torch tensors, one for each block.
            precondition: the condition for writing to ``destination``; see :meth:`offload.Engine.load`.
            promote: as for :meth:`offload.Engine.load`; it does not make this load slower.
            timeout: in seconds, with the wait for the precondition; by default the engine's. After it the load is
                ended, and its result raises :class:`WaitTimeout`, or :class:`offload.DrainUnproven` if a copy may still
                be going on.

        Raises:
            PipelineFull: too many calls have begun and not ended, or wait to be polled.
            PipelineClosed: the engine is closed, crashed, or belongs to the parent of a fork.
            TypeError: the destination lies on a device and ``precondition`` is missing, or is no precondition.
            ValueError: the hit was released, or belongs to another engine.
        """
        worker, call = self._worker, self._load(hit, destination, precondition, promote, timeout, polled=True)
        worker.check_begin(call)
        result = worker.reads.load(hit, destination, call.precondition, promote, call.deadline, waits=False)
        if result is None:
            return worker.begin(call)
        worker.end_here(call, result)
        return call

    def computed(self, blocks: int, seconds: float, *, after: int = 0) -> None:
        """Record how long computing blocks of a prompt took. Never blocks.

        See :meth:`offload.Engine.computed`.

        Raises:
            ValueError: less than one block, or a time or a position below 0.
            PipelineClosed: the engine is closed, crashed, or belongs to the parent of a fork.
        """
        worker = self._worker
        check_computed(blocks, seconds, after)
        if worker.refusal is not None:
            raise worker.refusal()
        worker.mailbox.leave(partial(worker.engine.computed, blocks, seconds, after=after))

    def delete(self, keys: Sequence[Key], timeout: float | None = None) -> list[Deletion]:
        """Delete these keys in all tiers.

        All tiers together have a little less than ``timeout``; one that does not answer gives ``UNAVAILABLE``. Returns
        one answer per key, as :meth:`offload.Engine.delete` does.

        Raises:
            WaitTimeout: the engine's thread itself did not answer. Some tiers may have deleted keys.
        """
        check_keys(keys)
        return self._ask(self._worker.delete, list(keys), self._worker.deadline(timeout), timeout=timeout)

    def explain(
        self,
        what: Key | Sequence[Key] | Sequence[int],
        timeout: float | None = None,
        *,
        naming: BlockKey | None = None,
        others: Sequence[BlockKey] = (),
        tenant: str = "",
        operator: bool = False,
    ) -> Explanation:
        """Explain why blocks are, or are not, in the tiers.

        See :meth:`offload.Engine.explain`.

        Raises:
            WaitTimeout: there is no answer yet.
        """
        options = {"naming": naming, "others": others, "tenant": tenant, "operator": operator}
        return self._ask(self._explain, what, options, timeout=timeout)

    def check_layout(
        self,
        canary: Canary,
        layout: str,
        timeout: float | None = None,
        *,
        precondition: PreconditionLike = NO_WAIT,
    ) -> LayoutCheck:
        """Check that a block's planes come back as they were stored.

        It is for the time before the first request. See :meth:`offload.Engine.check_layout`. If it runs out of time, it
        is ended and awaited: nothing uses the block or its device any more, which may be about to capture a graph.

        Raises:
            LayoutCheckFailed: they do not.
            WaitTimeout: it took too long, and was ended.
            DrainUnproven: the block may still be in use.
        """
        ready = as_precondition(precondition)
        return self._ask(self._worker.check_layout, canary, layout, ready, timeout=timeout, to_the_end=True)

    def watch_keys(self, watcher_of: Callable[[str], KeyWatcher[Key]], timeout: float | None = None) -> list[str]:
        """Report the keys of the tiers, and all later changes, to watchers.

        Watchers are called in the engine's thread, until it closes; first each gets the keys that its tier holds.

        Args:
            watcher_of: makes the watcher of a tier, by its name; see :class:`maru.kv_events.KeyBook`.
            timeout: how long to wait, in seconds.

        Returns:
            The names of the tiers that report their keys.

        Raises:
            WaitTimeout: it may have begun, or not.
        """
        return self.call(self._watch_keys, watcher_of, timeout=timeout)

    def call(self, function: Callable[[*Ts], T], *args: *Ts, timeout: float | None = None) -> T:
        """Call a synchronous function in the engine's thread, and return its result.

        For methods that only that thread may call: ``engine.call(host.put, key, data)``.

        Raises:
            WaitTimeout: it has not returned. It may have been called, or may never be.
            Exception: the function raised it.
        """

        async def call() -> T:
            return function(*args)

        return self._ask(call, timeout=timeout)

    # --- helpers --------------------------------------------------------------------------------------------------

    def _lookup(self, keys: Sequence[Key], tenant: str, timeout: float | None, *, polled: bool) -> LookupFuture:
        check_keys(keys)
        worker = self._worker
        return LookupFuture(worker, list(keys), tenant, worker.deadline(timeout), polled=polled)

    def _load(
        self,
        hit: Hit,
        destination: Destination,
        precondition: PreconditionLike | None,
        promote: bool | str | None,
        timeout: float | None,
        *,
        polled: bool,
    ) -> LoadFuture:
        worker = self._worker
        if hit._worker is not worker:
            raise ValueError(f"{hit!r} belongs to another engine")
        ready = precondition_of(destination, precondition)
        return LoadFuture(worker, hit, destination, ready, promote, worker.deadline(timeout), polled=polled)

    def _ask(
        self,
        function: Callable[[*Ts], Awaitable[T]],
        *args: *Ts,
        timeout: float | None,
        after_stores: bool = False,
        to_the_end: bool = False,
    ) -> T:
        worker = self._worker
        call = CallFuture(worker, partial(function, *args), worker.deadline(timeout), to_the_end=to_the_end)
        return worker.wait_for(call, timeout, after_stores=after_stores)

    # On the trio thread:

    def _watch_keys(self, watcher_of: Callable[[str], KeyWatcher[Key]]) -> list[str]:
        watched = []
        for name, tier in self._worker.engine.tiers.items():
            if tier.capabilities.lists_keys:
                watcher = watcher_of(name)
                watcher.stored(tier.list_keys())
                tier.watch_keys(watcher)
                watched.append(name)
        return watched

    async def _explain(self, what: Key | Sequence[Key] | Sequence[int], options: Mapping[str, Any]) -> Explanation:
        return await self._worker.engine.explain(what, **options)

    async def _statistics(self) -> Statistics:
        worker = self._worker
        await worker.released()
        return Statistics(
            engine=worker.engine.statistics(),
            budget_blocks=worker.budget_blocks,
            in_flight_blocks=worker.entered - worker.left,
            refused_stores=worker.refused_stores,
            dropped_stores=worker.dropped_stores,
            dropped_blocks=worker.dropped_blocks,
            unpolled_futures=len(worker.unpolled),
            unreleased_hits=len(worker.hits),
        )


@attrs.frozen
class Statistics:
    """A snapshot of an engine, with the counts of its thread interface.

    Counters count from its start.
    """

    engine: EngineStatistics
    """The statistics of the engine itself."""
    budget_blocks: int
    """Blocks that may be in flight at once."""
    in_flight_blocks: int
    """Blocks of futures that are not done, to which the limit applies.

    If :meth:`Engine.poll` is in use, those of futures that are done and not polled are included.
    """
    refused_stores: int
    """Stores that raised :class:`offload.PipelineFull`."""
    dropped_stores: int
    """Stores that were dropped for lack of room."""
    dropped_blocks: int
    """Blocks of these stores."""
    unpolled_futures: int
    """Futures that are done and wait for :meth:`Engine.poll`."""
    unreleased_hits: int
    """Hits that hold blocks."""
