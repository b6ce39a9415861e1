"""The stores of engines, which are containers of the engine's pipeline.

Each is within the quota of its tenant.

    fits, and there is room --> a container --> it has settled: the answer, without a task
    does not fit            --> a task, in which blocks of the tenant are deleted; then as above
    no room                 --> a task, which waits for it; then as above
    waits for a signal      --> in the pipeline, up to half of its budget for a session; beyond, a task outside of it
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import trio

from backends.abc import Deletion, Key

from .._engine import Engine
from .._errors import OffloadError, PipelineFull
from .._pipeline.container import OffloadContainer
from .._pipeline.handle import TransferHandle
from ..abc import PreconditionLike
from ..preconditions import NO_WAIT
from ._engine import DaemonEngine
from ._messages import Answer, Store, Stored, cut, unpacked
from ._quotas import Account, Quotas
from ._requests import EngineSignal, UnderWay, stored
from ._sessions import Session
from ._tenants import stored_keys

_DELETED: Final = 1_024
"""Blocks that are deleted for a quota in one step.

Other engines wait for a step: some 3 us per block.
"""

_log = logging.getLogger("offload.daemon")


class Stores:
    """The running stores of all engines.

    Args:
        engine: the tiers and pipelines.
        quotas: of tenants.
        epoch: this start of the daemon.
        nursery: of the tasks.
        finish: answers a request that was running.
    """

    def __init__(
        self,
        engine: DaemonEngine,
        quotas: Quotas,
        *,
        epoch: int,
        nursery: trio.Nursery,
        finish: Callable[[UnderWay, Answer], None],
    ) -> None:
        self._engine = engine
        self._quotas = quotas
        self._epoch = epoch
        self._nursery = nursery
        self._finish = finish
        self._open: dict[OffloadContainer, tuple[UnderWay, TransferHandle]] = {}
        self._waiting = 0  # blocks of all stores that wait for their signal
        engine.on_settled = self._settled

    def begin(self, session: Session, request: Store) -> None:
        """Store blocks of a cache of this session.

        The answer comes when all of them have ended.
        """
        keys = stored_keys(session.tenant, request.keys)
        depths = unpacked(request.depths)
        blocks = self._engine.caches.blocks(request.cache, unpacked(request.blocks), keys, depths)
        engine = self._engine.require()
        signal = EngineSignal() if request.waits else None
        account = self._quotas.of(session.tenant)
        scope = trio.CancelScope()
        under_way = UnderWay(
            session, request.seq, scope.cancel, request.cache, request.cancel_token, signal, keys, account
        )
        session.requests[request.seq] = under_way
        precondition = NO_WAIT if signal is None else signal
        enqueue: Callable[[], Awaitable[TransferHandle]]
        if account is None:
            enqueue = partial(engine.store, blocks, precondition, tenant=session.tenant)
        else:
            enqueue = partial(self._store_within, account, under_way, unpacked(request.blocks), depths, precondition)
        if signal is not None and not self._may_wait(engine, session, len(keys)):
            signalled = partial(self._store_signalled, signal, enqueue)
            self._nursery.start_soon(self._store_late, under_way, scope, signalled)
            return
        if signal is not None:
            self._note_waiting(under_way, len(keys))
        if account is not None and account.shortage(keys, self._quotas.block_bytes):
            self._nursery.start_soon(self._store_late, under_way, scope, enqueue)
            return
        try:
            if account is not None:
                under_way.coming, _ = account.admit(keys, self._quotas.block_bytes)
            handle = engine.store_nowait(blocks, precondition, tenant=session.tenant)
        except PipelineFull:
            # Not within the quota again: these blocks were admitted there.
            enqueue = partial(engine.store, blocks, precondition, tenant=session.tenant)
            self._nursery.start_soon(self._store_late, under_way, scope, enqueue)
        except BaseException:
            del session.requests[request.seq]
            self.signalled(under_way)
            if account is not None:
                account.settled(under_way.coming)
            raise
        else:
            self._admitted(under_way, handle)

    def _may_wait(self, engine: Engine, session: Session, blocks: int) -> bool:
        """Return whether a session's blocks may wait in the first pipeline.

        They wait for their signal, and take of its budget.
        """
        budget = engine.pipelines[0].config.budget_blocks
        return session.waiting + blocks <= budget // 2 and self._waiting + blocks <= budget - budget // 4

    async def _store_signalled(
        self, signal: EngineSignal, enqueue: Callable[[], Awaitable[TransferHandle]]
    ) -> TransferHandle:
        """Wait for a signal outside of the pipeline, then store.

        Raises:
            trio.TooSlowError: it does not come within ``precondition_timeout``.
        """
        with trio.fail_after(self._engine.require().pipelines[0].config.precondition_timeout):
            await signal.wait_reported()
        return await enqueue()

    def _note_waiting(self, under_way: UnderWay, blocks: int) -> None:
        under_way.waiting += blocks
        under_way.session.waiting += blocks
        self._waiting += blocks

    def signalled(self, under_way: UnderWay) -> None:
        """End the count of a store's blocks as waiting for its signal.

        It has come, or the store is over. Idempotent.
        """
        self._note_waiting(under_way, -under_way.waiting)

    async def _store_within(
        self,
        account: Account,
        under_way: UnderWay,
        ids: Sequence[int],
        depths: Sequence[int],
        precondition: PreconditionLike,
    ) -> TransferHandle:
        """Store the blocks that fit into a tenant's quota.

        Before that, its least recently used blocks are deleted.
        """
        keys = under_way.keys
        await self.make_room(account, keys)
        # No checkpoint up to the engine's own: deleted blocks make room for these.
        under_way.coming, under_way.refused = account.admit(keys, self._quotas.block_bytes)
        refused = set(under_way.refused)
        fits = [at for at in range(len(keys)) if at not in refused]
        blocks = self._engine.caches.blocks(
            under_way.cache,
            [ids[at] for at in fits],
            [keys[at] for at in fits],
            [depths[at] for at in fits] if depths else depths,
        )
        return await self._engine.require().store(blocks, precondition, tenant=account.tenant)

    async def make_room(self, account: Account, keys: Sequence[Key], *, staying: Sequence[Key] = ()) -> None:
        """Delete a tenant's least recently used blocks until these fit.

        Blocks in ``staying`` are not deleted: of a prompt, the blocks that are there already. If cancelled, some are
        deleted.

        Held blocks are skipped. A tier that cannot delete now ends it: blocks that a tier keeps stay in the others as
        well.
        """
        asked: set[Key] = {*keys, *staying}
        while short := account.shortage(keys, self._quotas.block_bytes):
            victims = account.victims(min(short, _DELETED), asked)
            if not victims:
                return
            asked.update(victims)  # held blocks stay, and are not tried twice
            answers = await self._engine.require().delete(victims, why="over the quota of its tenant", together=True)
            account.asked(victims, answers)
            if Deletion.UNAVAILABLE in answers:
                return

    def trim(self) -> None:
        """Begin to delete the excess over quotas that were made smaller."""
        for account in self._quotas:
            if self._engine.engine is not None:
                self._nursery.start_soon(self._trim, account)

    async def _trim(self, account: Account) -> None:
        try:
            await self.make_room(account, ())
        except Exception as exc:  # the next store of this tenant tries again
            _log.warning("tenant %s: blocks beyond its quota could not be removed: %r", account.tenant, exc)

    async def _store_late(
        self, under_way: UnderWay, scope: trio.CancelScope, enqueue: Callable[[], Awaitable[TransferHandle]]
    ) -> None:
        """Store when there is room; until then a cancel leaves nothing behind."""
        handle: TransferHandle | None = None
        answer: Answer = Stored(under_way.seq, self._epoch, "cancelled", [], [], "")
        try:
            with scope:
                handle = await enqueue()
        except Exception as exc:  # also from a tier that gets the tenant, or deletes for a quota
            if not isinstance(exc, OffloadError | ValueError | trio.TooSlowError):
                _log.warning("%s: a store failed: %r", under_way.session, exc)
            answer = Stored(under_way.seq, self._epoch, "failed", [], [], cut(f"{type(exc).__name__}: {exc}"))
        finally:
            if handle is None:
                self._finish(under_way, answer)
            else:
                self._admitted(under_way, handle)

    def _admitted(self, under_way: UnderWay, handle: TransferHandle) -> None:
        under_way.cancel = handle.request_cancel
        if handle.status.terminal:
            self._end_store(under_way, handle)
        else:
            self._open[handle._container] = (under_way, handle)
        if under_way.session.ended:
            under_way.cancel()

    def _settled(self, container: OffloadContainer) -> None:
        """End the store of a settled container of the first pipeline."""
        store = self._open.pop(container, None)
        if store is not None:
            self._end_store(*store)

    def _end_store(self, under_way: UnderWay, handle: TransferHandle) -> None:
        assert handle.result is not None
        result, account = handle.result, under_way.account
        answer = stored(under_way.seq, self._epoch, under_way.keys, result, under_way.refused)
        if account is not None:
            there = [*result.completed, *[key for key, reason in result.filtered.items() if reason == "present"]]
            self._quotas.settled(account, under_way.coming, there)
            under_way.coming = ()
        under_way.unproven = answer.status == "unproven"
        self._finish(under_way, answer)
