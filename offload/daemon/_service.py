"""Handlers for the requests of engines, one method for each message.

A method answers at once, or starts a task that will answer and returns nothing. Unanswered requests are in their
session's table, so that the end of a session finds all of them.

    store               one container of the engine's pipeline; answered without a task (:class:`Stores`)
    lookup, load, ...   reads of engines, and their holds (:class:`Reads`)
    delete, ...         one task each, in a scope of its own, which a cancel or the end of the session cancels

Rule 1. An invalid frame costs its sender the session. An impossible request is refused. Neither
    concerns another session.
Rule 2. An answer never waits for its reader. Unread answers are bounded by the channel, which then hangs up.
Rule 3. A session is given back in the order of :class:`~offload.daemon._sessions.Stage`, whatever has ended it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from typing import Any, Final

import msgspec
import trio

from backends.abc import Deletion
from maru.base.own_directory import LOOK
from maru.base.served_time import ServedTime
from maru.base.threads import run_in_thread

from .._engine import Engine
from ._cuda import Devices
from ._engine import DaemonEngine
from ._layout import CacheLayout, check_layout, count_pieces
from ._memory import CacheStorage, Shares, adopt, granted
from ._messages import (
    NAME_OF,
    OLDEST,
    SINCE,
    VERSION,
    Answer,
    BadFrame,
    Cancel,
    Cancelled,
    Commit,
    Counters,
    Delete,
    Deleted,
    Done,
    Exists,
    Hello,
    Load,
    Lookup,
    PageStore,
    Refusal,
    Refused,
    Registered,
    RegisterKVCache,
    Release,
    Request,
    ReserveWrite,
    Signal,
    State,
    Stats,
    Status,
    Store,
    UnregisterKVCache,
    Welcome,
    cut,
    decode_request,
    encode,
    negotiate,
)
from ._onward import OnwardCommits
from ._pages import Pages
from ._quotas import Quotas
from ._reads import Reads
from ._requests import UnderWay
from ._sessions import Limits, Session, Sessions, Stage
from ._statistics import counters
from ._stores import Stores
from ._tenants import Tenants, prefix_of, stored_keys

_log = logging.getLogger("offload.daemon")

_DELETIONS: Final = list(Deletion)
_BEGINS_WORK: Final = frozenset({RegisterKVCache, Store, Lookup, Exists, Load, Delete, PageStore, ReserveWrite})
"""Requests that a daemon refuses while it drains."""
_ENDS_WORK: Final = frozenset({Status, Signal, Cancel, Release, Commit, UnregisterKVCache})
"""Requests for which there is as much room again.

Otherwise an engine all of whose stores wait could signal and cancel none.
"""
_COSTS: Final = {"keys": (64, 1), "blocks": (64, 4), "depths": (64, 4), "tensors": (1_024, 1), "cuda": (1_024, 1)}
"""Bytes of an item in objects and lists, and its field length.

By name of the field.
"""
_COSTS_OF: Final = {
    request: [(name, *_COSTS[name]) for name in request.__struct_fields__ if name in _COSTS] for request in NAME_OF
}
_LISTING: Final = 5.0
"""Seconds that a start waits for page stores to list their keys.

These are keys of tenants with a quota.
"""
_LOOKS_A_LEASE: Final = 4
_LIST_AGAIN: Final = 30.0
"""Seconds until a store that did not answer is asked again."""
_REGISTERING: Final = 4
"""Threads that list and open caches.

They are few: slow caches of some engines must not take threads from the copies of others.
"""


class Service:
    """Handlers for frames of engines, over the engine of the tiers.

    Args:
        engine: the tiers and pipelines.
        epoch: this start of the daemon.
        limits: on engines.
        tenants: the tenants whose engines are admitted.
        send: sends a frame to a connection, without waiting; returns whether it is there.
        hang_up: ends a connection.
        admit: lets a connection stay, whose engine has shown its credential and has, or waits for, a session.
        nursery: of the tasks.
        engine_pages: whether engines may write pages of the page store.
        shares: of engines in the limits of this process; the caller closes it.
    """

    def __init__(
        self,
        engine: DaemonEngine,
        *,
        epoch: int,
        limits: Limits,
        tenants: Tenants,
        send: Callable[[bytes, bytes], bool],
        hang_up: Callable[[bytes], None],
        admit: Callable[[bytes], None],
        nursery: trio.Nursery,
        engine_pages: bool = True,
        shares: Shares,
    ) -> None:
        self.sessions: Sessions = Sessions(limits)
        self.time: ServedTime = ServedTime(trio.current_time, look_interval(limits.lease))
        """The clock for engines' silence, which stops while the daemon stands still."""
        self.tenants: Tenants = tenants
        self.quotas: Quotas = Quotas()
        self.quotas.configure(tenants.quotas)
        self.draining: bool = False
        """Whether new work is refused: sessions, stores, lookups and loads."""
        self.handover_path: str = ""
        self.hosted: Callable[[], Mapping[str, float]] = dict
        """Returns the counters of servers that the daemon hosts."""
        self.epoch: int = epoch
        self._engine = engine
        self._send_frame = send
        self._hang_up = hang_up
        self._admit = admit
        self._nursery = nursery
        self._last_memory = 0
        self._new_quotas: trio.Event | None = None
        """Wakes the task that charges quotas, if there is one."""
        self.shares: Shares = shares
        self._trio = trio.lowlevel.current_trio_token()
        self.devices: Devices = Devices(self._lose_soon)
        self._registering = trio.CapacityLimiter(_REGISTERING)
        self.stores: Stores = Stores(engine, self.quotas, epoch=epoch, nursery=nursery, finish=self._finish)
        self.onward: OnwardCommits = OnwardCommits(engine, nursery)
        self.pages: Pages = Pages(engine, self.quotas, self.stores, self.onward, self.sessions, is_on=engine_pages)
        self.reads: Reads = Reads(engine, self.quotas, self.sessions, epoch=epoch, start=self._start)
        self._handlers: Mapping[type, Callable[[Session, Any], Answer | None]] = {
            request: getattr(self.reads if hasattr(Reads, name) else self, name)
            for request, name in NAME_OF.items()
            if name != "hello"
        }
        engine.on_opened = self._opened
        engine.before_opened = self._charge_at_first

    def _opened(self, opened: Engine) -> None:
        books = self._engine.books()
        self.quotas.open(self._engine.block_bytes, books.values(), all_told=len(books) == len(opened.tiers))

    async def _charge_at_first(self, opened: Engine) -> None:
        """Charge the quotas with listed keys of page stores, before any store.

        If that takes long, it goes on in the background.
        """
        with trio.move_on_after(_LISTING):
            await self._charge(opened)
        if not all(account.is_listed for account in self.quotas):
            self._nursery.start_soon(self.charge_later)

    async def charge_later(self) -> None:
        """Charge new quotas, and list keys of page stores until all are.

        One task at a time does it.
        """
        if self._new_quotas is not None:
            self._new_quotas.set()
            return
        try:
            while not all(account.is_listed for account in self.quotas):
                new = self._new_quotas = trio.Event()
                if self._engine.engine is not None:
                    for _ in self.quotas.charging():
                        await trio.lowlevel.checkpoint()
                    await self._charge(self._engine.engine)
                    self.stores.trim()
                with trio.move_on_after(_LIST_AGAIN):
                    await new.wait()
        finally:
            self._new_quotas = None

    async def _charge(self, engine: Engine) -> None:
        for account in self.quotas:
            if account.is_listed:
                continue
            is_listed = True
            for name, tier in self._engine.listers(engine).items():
                try:
                    keys = await tier.list_stored(prefix_of(account.tenant))
                except Exception as exc:
                    is_listed = False
                    _log.warning("the blocks of tenant %s in %s are not counted yet: %r", account.tenant, name, exc)
                    continue
                if keys is None:
                    _log.warning("%s cannot list keys: its blocks of tenant %s count when found", name, account.tenant)
                with closing(self.quotas.listing(account, keys or [])) as steps:
                    for _ in steps:
                        await trio.lowlevel.checkpoint()
            account.is_listed = is_listed
        await trio.lowlevel.checkpoint()

    @property
    def under_way(self) -> int:
        """Number of requests that are not answered."""
        return sum(len(session.requests) for session in self.sessions)

    # --- frames -----------------------------------------------------------------------------------------------------

    def handle(self, peer: bytes, frame: bytes) -> None:
        """Serve one frame of a connection. Never raises for its content."""
        session = self.sessions.of(peer)
        try:
            request = decode_request(frame)
            if session is not None and request.seq in session.requests:
                raise BadFrame(f"request {request.seq} is already in progress")
        except BadFrame as exc:
            self.sessions.bad += 1
            _log.warning("%s is disconnected: %s", session or "an engine", exc)
            self._hang_up(peer)
            if session is not None:
                self.end(session, "a frame that is not a message")
            return
        try:
            if isinstance(request, Hello):
                answer = self._hello(peer, session, request)
            else:
                answer = self._serve(session, request, len(frame))
        except Refusal as refusal:
            answer = self._refused(request, refusal)
        except (BadFrame, ValueError, TypeError) as exc:
            answer = self._refused(request, Refusal("invalid", str(exc)))
        except Exception as exc:  # from a tier or a policy: it fails this request only
            _log.exception("%s: %s failed", session or "an engine", NAME_OF[type(request)])
            answer = self._refused(request, Refusal("unavailable", f"{type(exc).__name__}: {exc}"))
        if session is not None and isinstance(request, RegisterKVCache) and not request.cuda:
            for tensor in request.tensors:  # its registration has them; one that is refused leaves none
                session.memories.pop(tensor.memory, None)
        if answer is not None:
            if session is not None and request.seq in session.costs:
                self.sessions.refund(session, session.costs.pop(request.seq))
            self._send(peer, answer)

    def _serve(self, session: Session | None, request: Request, size: int) -> Answer | None:
        if session is None and isinstance(request, Status):
            return self._state(request)  # the daemon's state may be asked without a credential
        if session is None:
            raise Refusal("session", "this connection has no session: send Hello first")
        session.heard = self.time.now()
        if SINCE[type(request)] > session.version:
            name, since = NAME_OF[type(request)], SINCE[type(request)]
            text = f"{name} is of version {since}, and this session speaks {session.version} of {OLDEST} to {VERSION}"
            raise Refusal("version", text)
        if self.draining and type(request) in _BEGINS_WORK:
            raise Refusal("draining", "the daemon is shutting down")
        most = self.sessions.limits.requests * (2 if type(request) in _ENDS_WORK else 1)
        if len(session.requests) >= most:
            raise Refusal("full", f"{len(session.requests)} requests are in progress, as many as are allowed")
        if type(request) not in _ENDS_WORK:
            # A waiting request keeps its keys and columns: 1,024 requests of 8 MiB would be gigabytes of a session.
            self.sessions.charge(session, request.seq, size + _cost(request))
        return self._handlers[type(request)](session, request)

    def gone(self, peer: bytes) -> None:
        """End the session of a connection that has ended."""
        session = self.sessions.of(peer)
        if session is not None:
            self.end(session, "its connection is lost")

    def _send(self, peer: bytes, answer: Answer) -> None:
        self._send_frame(peer, encode(answer))

    def _refused(self, request: Request, refusal: Refusal) -> Refused:
        return Refused(request.seq, self.epoch, refusal.kind, cut(refusal))

    # --- sessions ---------------------------------------------------------------------------------------------------

    def _hello(self, peer: bytes, session: Session | None, request: Hello, *, resumed: bool = False) -> Answer | None:
        version = negotiate(request.oldest, request.newest)
        if version is None:
            text = f"this daemon speaks versions {OLDEST} to {VERSION}, the engine {request.oldest} to {request.newest}"
            raise Refusal("version", text)
        if self.draining:
            raise Refusal("draining", "the daemon is shutting down")
        tenant = self.tenants.of(request.credential)
        if tenant is None:
            raise Refusal("credential", "no tenant has this credential")
        if session is not None:
            raise Refusal("invalid", "this connection already has a session")
        previous = self.sessions.by_token(request.previous) if request.previous else None
        if previous is None:
            return self._welcome(peer, request, version, tenant, resumed=resumed)
        waiting, previous.successor = previous.successor, (peer, request)
        if waiting is None:
            previous.when_over.append(partial(self._welcome_late, previous))
        else:
            self._send(waiting[0], self._refused(waiting[1], Refusal("session", "a later hello waits in its place")))
            if waiting[0] != peer:
                self._hang_up(waiting[0])
        self._admit(peer)
        self.end(previous, "its engine has begun another one")
        self._hang_up(previous.peer)  # it was admitted for that session: else one engine could collect connections
        return None

    def _welcome(self, peer: bytes, request: Hello, version: int, tenant: str, *, resumed: bool) -> Answer:
        session = self.sessions.begin(
            peer, request.name, tenant, self.time.now(), version, self.tenants.credentials.keys()
        )
        if session is None:
            left = " beside a place for each tenant without one" if self.tenants.credentials else ""
            raise Refusal("full", f"there are {len(self.sessions)} sessions, as many as max_sessions allows{left}")
        self._admit(peer)
        _log.info("%s begins%s", session, f" for tenant {tenant}" if tenant else "")
        block_bytes = self._engine.block_bytes
        return Welcome(
            request.seq, self.epoch, version, session.number, session.token, tenant, session.lease, block_bytes,
            self.handover_path, resumed, self.sessions.unproven(request.previous) if request.previous else [],
        )  # fmt: skip

    def _welcome_late(self, previous: Session) -> None:
        """Welcome an engine whose previous session is now over, if still allowed."""
        peer, request = previous.successor
        try:
            # Decided again: while it waited, its credential may have been taken away, or the daemon begun to drain.
            answer = self._hello(peer, self.sessions.of(peer), request, resumed=True)
            assert answer is not None, "nothing is left of the previous session"
        except (Refusal, ValueError) as exc:
            self._send(peer, self._refused(request, exc if isinstance(exc, Refusal) else Refusal("invalid", str(exc))))
            self._hang_up(peer)  # it was admitted for a session that it does not get
            return
        if not self._send_frame(peer, encode(answer)):
            self.gone(peer)  # it was lost while the previous one was given back

    def end(self, session: Session, why: str) -> None:
        """End a session, and give back everything it holds. Idempotent.

        A task gives it back.
        """
        if self.sessions.end(session, why):
            _log.info("%s is over: %s", session, why)
            self._nursery.start_soon(self._give_back, session)

    def end_silent(self) -> None:
        """End the sessions whose engines were silent longer than their leases.

        If the daemon stood still since the last call, none is ended: frames that came meanwhile are read first.
        """
        away = self.time.away
        now = self.time.look()
        if self.time.away > away:
            _log.warning("the daemon was stopped for %.1f s: all leases are extended by it", self.time.away - away)
            return
        for session in self.sessions.expired(now):
            self._hang_up(session.peer)
            self.end(session, f"its engine was silent for {session.lease:g} s")

    async def wait_given_back(self) -> None:
        """Wait until nothing is left of the sessions that have ended."""
        for session in self.sessions:
            if session.ended:
                over = trio.Event()
                session.when_over.append(over.set)
                await over.wait()

    async def _give_back(self, session: Session) -> None:
        while (stage := session.due) is not Stage.OVER:
            if stage is Stage.COPIES:
                for under_way in list(session.requests.values()):
                    under_way.cancel()
                for under_way in list(session.requests.values()):
                    await under_way.over.wait()
            elif stage is Stage.HOLDS:
                await self.reads.release_any(session)
            elif stage is Stage.PAGES:
                await self.pages.give_back(session)
            else:
                self._forget_memory(session)
        self.sessions.forget(session)

    def _forget_memory(self, session: Session) -> None:
        for cache in session.caches:
            self._engine.caches.remove(cache)
        session.caches.clear()
        session.memories.clear()

    def status(self, session: Session, request: Status) -> Answer:
        """Answer with the state of the daemon."""
        self.pages.counts["read_blocks"] += request.read_blocks
        return self._state(request)

    def _state(self, request: Status) -> Answer:
        state = "draining" if self.draining else self._engine.state
        return State(request.seq, self.epoch, state, len(self.sessions), self.under_way)

    # --- caches -----------------------------------------------------------------------------------------------------

    def take_memory(self, token: bytes, descriptor: int) -> int:
        """Keep memory that was handed over for a session. Returns its number.

        The session is that with this token. The descriptor is taken over, also when this raises.

        Raises:
            Refusal: there is no such session, or it has too much.
            BadLayout: it is nothing that can be read and written.
        """
        try:
            session = self.sessions.by_token(token)
            if session is None or session.ended:
                raise Refusal("session", "there is no session with this token")
            if len(session.memories) >= self.sessions.limits.memories:
                raise Refusal("full", f"a session has at most {self.sessions.limits.memories} memories")
            kept, descriptor = descriptor, -1
            memory = adopt(kept, self.shares, session.number)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        self._last_memory += 1
        session.memories[self._last_memory] = memory
        return self._last_memory

    def register_kv_cache(self, session: Session, request: RegisterKVCache) -> None:
        """Register a cache."""
        if len(session.caches) + session.pending_caches >= self.sessions.limits.caches:
            raise Refusal("full", f"a session has at most {self.sessions.limits.caches} caches")
        numbers = sorted({tensor.memory for tensor in request.tensors}) if not request.cuda else []
        if not set(numbers) <= session.memories.keys():
            raise Refusal("unknown", "a tensor is in memory that was not handed over")
        handed_over = {number: session.memories[number] for number in numbers}
        session.pending_caches += 1
        self._start(session, request, partial(self._register, handed_over))

    async def _register(self, handed_over: Mapping[int, Any], session: Session, request: RegisterKVCache) -> Answer:
        try:
            storage, layout = await self._open_cache(handed_over, session, request)
        finally:
            session.pending_caches -= 1
        # No checkpoint from here on: a loss finds this cache in its session, and it is counted throughout.
        if request.cuda:
            self.devices.check(request.cuda[0].device)
        cache = self._engine.caches.add(storage, layout.blocks)
        session.caches.add(cache)
        _log.info("%s registered cache %d: %d blocks of %d bytes", session, cache, layout.blocks, layout.block_bytes)
        return Registered(request.seq, self.epoch, cache, layout.blocks, layout.block_bytes)

    async def _open_cache(
        self, handed_over: Mapping[int, Any], session: Session, request: RegisterKVCache
    ) -> tuple[CacheStorage, CacheLayout]:
        """Check a layout, open the tiers for its blocks, and map them."""
        if request.cuda:
            memories: list[Any] = await run_in_thread(self.devices.open, request.cuda, limiter=self._registering)
            tensors = request.tensors
        else:
            memories, numbers = list(handed_over.values()), list(handed_over)
            tensors = [
                msgspec.structs.replace(tensor, memory=numbers.index(tensor.memory)) for tensor in request.tensors
            ]
        sizes = [memory.size for memory in memories]
        pieces = count_pieces(tensors, sizes)
        with granted(self.shares.pieces, session.number, pieces, "pieces of blocks") as keep:
            # In threads: 65,536 pieces take a tenth of a second to list, and the first cache of several pieces imports
            # torch, or numpy on a device.
            layout = await run_in_thread(check_layout, tensors, sizes, limiter=self._registering)
            await self._engine.wait_open(layout.block_bytes)
            storage = await run_in_thread(memories[0].storage, layout, memories, limiter=self._registering)
            keep(storage)
        return storage, layout

    def _lose_soon(self, device: str) -> None:
        """End the sessions with caches on a lost device. Thread-safe."""
        with suppress(trio.RunFinishedError):
            self._trio.run_sync_soon(self._lose, device)

    def _lose(self, device: str) -> None:
        caches = self._engine.caches
        for session in self.sessions:
            if any(caches.device_of(cache) == device for cache in session.caches):
                self._hang_up(session.peer)
                self.end(session, f"device {device} is lost")

    def unregister_kv_cache(self, session: Session, request: UnregisterKVCache) -> None:
        """Forget a cache."""
        session.check_cache(request.cache)
        session.caches.discard(request.cache)  # no further request uses it
        session.pending_caches += 1
        self._start(session, request, self._unregister)

    async def _unregister(self, session: Session, request: UnregisterKVCache) -> Answer:
        try:
            for under_way in [one for one in session.requests.values() if one.cache == request.cache]:
                await under_way.over.wait()
        except BaseException:
            # Copies may go on, in batches with blocks of other engines: it is forgotten with the session, or when asked
            # again.
            session.caches.add(request.cache)
            raise
        finally:
            session.pending_caches -= 1
        self._engine.caches.remove(request.cache)
        return Done(request.seq, self.epoch, 1)

    # --- storing ----------------------------------------------------------------------------------------------------

    def store(self, session: Session, request: Store) -> None:
        """Store blocks of a cache."""
        session.check_cache(request.cache)
        self.stores.begin(session, request)

    def signal(self, session: Session, request: Signal) -> Answer:
        """Report the precondition of a store."""
        under_way = session.requests.get(request.store)
        if under_way is None or under_way.signal is None:
            return Done(request.seq, self.epoch, 0)  # it was cancelled meanwhile, perhaps
        under_way.signal.report(request.failed)
        self.stores.signalled(under_way)
        return Done(request.seq, self.epoch, 1)

    def cancel(self, session: Session, request: Cancel) -> Answer | None:
        """Cancel stores and loads; confirmed when all of them have ended."""
        named = set(request.requests)
        chosen = [
            under_way
            for seq, under_way in session.requests.items()
            if seq in named or (request.cancel_token and under_way.cancel_token == request.cancel_token)
        ]
        for under_way in chosen:
            under_way.cancel()
        self._start(session, request, partial(self._confirm, chosen))
        return None

    async def _confirm(self, chosen: list[UnderWay], session: Session, request: Cancel) -> Answer:
        for under_way in chosen:
            await under_way.over.wait()
        unproven = sum(under_way.unproven for under_way in chosen)
        return Cancelled(request.seq, self.epoch, len(chosen), unproven)

    # --- deleting -----------------------------------------------------------------------------------------------------

    def delete(self, session: Session, request: Delete) -> None:
        """Delete keys in all tiers."""
        self._start(session, request, self._delete)

    async def _delete(self, session: Session, request: Delete) -> Answer:
        keys = stored_keys(session.tenant, request.keys)
        answers = await self._engine.require().delete(keys, within=request.within, hurried=True)
        self.quotas.deleted(session.tenant, keys, answers)
        return Deleted(request.seq, self.epoch, bytes(map(_DELETIONS.index, answers)))

    # --- pages that engines write and read themselves ---------------------------------------------------------------

    def page_store(self, session: Session, request: PageStore) -> None:
        """Answer with the place of the page store."""
        self._start(session, request, self._place)

    async def _place(self, session: Session, request: PageStore) -> Answer:
        return await self.pages.place(request, self.epoch)

    def reserve_write(self, session: Session, request: ReserveWrite) -> Answer | None:
        """Announce blocks that the engine writes itself.

        They are announced at once if there is nothing to wait for, and otherwise in a task.
        """
        if len(session.announced) + len(session.requests) >= self.sessions.limits.holds:
            raise Refusal("full", f"a session has at most {self.sessions.limits.holds} reservations: commit some")
        answer = self.pages.reserve_nowait(session, request, self.epoch)
        if answer is None:
            self._start(session, request, self._reserve_write)
        return answer

    async def _reserve_write(self, session: Session, request: ReserveWrite) -> Answer:
        return await self.pages.reserve(session, request, self.epoch)

    def commit(self, session: Session, request: Commit) -> Answer:
        """Record the fates of announced blocks."""
        return Done(request.seq, self.epoch, self.pages.commit(session, request))

    # --- looking ----------------------------------------------------------------------------------------------------

    def stats(self, session: Session, request: Stats) -> Answer:
        """Answer with the counters."""
        values = {**counters(self, session, self._engine), **self.hosted()}
        return Counters(request.seq, self.epoch, values)

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _start(
        self, session: Session, request: Request, work: Callable[[Session, Any], Awaitable[Answer]], *, cache: int = 0
    ) -> None:
        """Answer a request in a task."""
        scope = trio.CancelScope()
        under_way = UnderWay(session, request.seq, scope.cancel, cache)
        session.requests[request.seq] = under_way
        self._nursery.start_soon(self._run, under_way, scope, work, request)

    async def _run(
        self,
        under_way: UnderWay,
        scope: trio.CancelScope,
        work: Callable[[Session, Any], Awaitable[Answer]],
        request: Request,
    ) -> None:
        answer: Answer = self._refused(request, Refusal("unavailable", "it was cancelled"))
        try:
            with scope:
                answer = await work(under_way.session, request)
        except Refusal as refusal:
            answer = self._refused(request, refusal)
        except ValueError as exc:
            answer = self._refused(request, Refusal("invalid", str(exc)))
        except Exception as exc:
            _log.warning("%s: %s failed: %r", under_way.session, NAME_OF[type(request)], exc)
            answer = self._refused(request, Refusal("unavailable", f"{type(exc).__name__}: {exc}"))
        finally:
            self._finish(under_way, answer)

    def _finish(self, under_way: UnderWay, answer: Answer) -> None:
        session = under_way.session
        session.requests.pop(under_way.seq, None)
        if under_way.unproven:
            session.unproven.add(under_way.seq)
        if under_way.seq in session.costs:
            self.sessions.refund(session, session.costs.pop(under_way.seq))
        if under_way.account is not None:
            under_way.account.settled(under_way.coming)
        self.stores.signalled(under_way)
        under_way.over.set()
        if not session.ended:
            self._send(session.peer, answer)


def look_interval(lease: float) -> float:
    """Return the seconds between two looks for silent engines.

    Short, as sessions from before a reload have another lease.
    """
    return min(LOOK, lease / _LOOKS_A_LEASE)


def _cost(request: Request) -> int:
    """Return the bytes of a decoded request beyond its frame.

    Its columns are unpacked.
    """
    cost = 0
    for name, each, length in _COSTS_OF[type(request)]:
        cost += len(getattr(request, name)) // length * each
    return cost
