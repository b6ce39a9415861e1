"""The reads of engines: lookups and holds, loads, releases, explanations.

A lookup is answered at once if the tiers allow it, a release if all of it is in memory; everything else is one task, in
a scope of its own, which a cancel or the end of the session cancels.

Rule 1. The result of a lookup is held under a number of its session, even if it is empty, until it is released under
    that number or the session is over.
Rule 2. A load leaves nothing unverified in the memory of a tenant's engine.
Rule 3. No session holds more than half of a tier's blocks, so that others can store: a lookup finds no more than that
    leaves.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Protocol

import trio

from backends.abc import LOADED, Key, Unproven
from backends.base.threads import run_in_thread_to_the_end
from maru.exception_groups import holds

from .._engine import LoadResult
from .._engine.explain import BlockExplanation, Explanation
from ..preconditions import NO_WAIT
from ._engine import DaemonEngine
from ._memory import CacheBlocks
from ._messages import (
    Answer,
    Done,
    Existing,
    Exists,
    Explain,
    Explained,
    Found,
    Load,
    Loaded,
    Lookup,
    Refusal,
    Release,
    Request,
    carried,
    cut,
    unpacked,
)
from ._quotas import Quotas
from ._requests import loaded
from ._sessions import Session, Sessions
from ._tenants import stored_keys

_EXPLAINED: Final = 2_048
"""Blocks that are explained in one step, some 5 us each.

Other engines wait for the step.
"""
_RELEASED: Final = 16_384
"""Blocks of holds that are released within their request's step.

They take some 0.3 us each.
"""
_CLEAR_AGAIN: Final = 0.1
"""Seconds until clearing is tried again, if no thread could start."""

_log = logging.getLogger("offload.daemon")


class Start(Protocol):
    """Answers a request in a task."""

    def __call__(
        self, session: Session, request: Request, work: Callable[[Session, Any], Awaitable[Answer]], *, cache: int = 0
    ) -> None: ...


class Reads:
    """The reads of engines, and their holds.

    Args:
        engine: the tiers and pipelines.
        quotas: of tenants.
        sessions: has the holds of each session, and their bounds.
        epoch: this start of the daemon.
        start: answers a request in a task.
    """

    def __init__(self, engine: DaemonEngine, quotas: Quotas, sessions: Sessions, *, epoch: int, start: Start) -> None:
        self._engine = engine
        self._quotas = quotas
        self._sessions = sessions
        self._epoch = epoch
        self._start = start
        self._last_hold = 0
        self._explaining = trio.Lock()

    def lookup(self, session: Session, request: Lookup) -> Answer | None:
        """Find and hold a prefix: at once, or in a task.

        It is found at once if the tiers allow it.
        """
        if len(session.holds) + len(session.requests) >= self._sessions.limits.holds:
            raise Refusal("full", f"a session has at most {self._sessions.limits.holds} holds: release some")
        keys = stored_keys(session.tenant, request.keys)
        found = self._engine.require().direct.find(keys, session.tenant)
        if found is None:
            self._start(session, request, self._look_up)
            return None
        found.count()
        if self._is_near_half(session, found.hit):
            self._start(session, request, partial(self._look_up_less, found.hit))
            return None
        return self._found(session, request, found.hit)

    async def _look_up(self, session: Session, request: Lookup) -> Answer:
        keys = stored_keys(session.tenant, request.keys)
        hit = await self._engine.require().lookup(keys, tenant=session.tenant, within=request.within, hurried=True)
        return await self._look_up_less(hit, session, request)

    async def _look_up_less(self, hit: Any, session: Session, request: Lookup) -> Answer:
        """Look up again while the hit exceeds the session's limit: rule 3.

        Nothing is held if cancelled.
        """
        held = [hit]  # it is in no table yet
        try:
            while self._is_near_half(session, held[0]):
                await self._count_holds(session)
                most = self._allowed(session, held[0])
                if most == len(held[0].keys):
                    break
                keys = held[0].keys[:most]
                await self.let_go(held.pop())
                held.append(
                    await self._engine.require().lookup(
                        keys, tenant=session.tenant, within=request.within, hurried=True
                    )
                )
        except BaseException:
            for one in held:
                await self.let_go(one)
            raise
        return self._found(session, request, held[0])

    def _is_near_half(self, session: Session, hit: Any) -> bool:
        """Return whether this hit may exceed the session's limit.

        Then its keys must be counted.
        """
        wanted = session.held + len(hit.keys)
        return any([self._engine.most_held(name, wanted) is not None for name, _ in hit.runs])

    async def _count_holds(self, session: Session) -> None:
        """Count the keys of the session's holds, one hold per step.

        None is left uncounted when this returns.
        """
        while rest := [hold for hold in session.holds if hold not in session.held_keys]:
            for hold in rest:
                if hold in session.holds and hold not in session.held_keys:  # released or counted meanwhile
                    session.held_keys.add(hold, _runs(session.holds[hold]))
                await trio.lowlevel.checkpoint()

    def _allowed(self, session: Session, hit: Any) -> int:
        """Return how many leading found blocks the session may hold."""
        allowed = 0
        for name, keys in _runs(hit):
            most = self._engine.most_held(name, session.held + len(hit.keys))
            fitting = len(keys) if most is None else session.held_keys.fitting(name, keys, most)
            allowed += fitting
            if fitting < len(keys):
                break
        return allowed

    def _found(self, session: Session, request: Lookup, hit: Any) -> Answer:
        unavailable = {name: cut(f"{type(why).__name__}: {why}") for name, why in hit.unavailable.items()}
        self._last_hold += 1
        # An empty hit is held, too: it is released like the others, and there is one way for all.
        session.holds[self._last_hold] = hit
        session.held += len(hit.keys)
        if hit.keys:
            session.held_costs[self._last_hold] = session.costs.pop(request.seq, 0)
        self._quotas.found(session.tenant, hit.keys)
        return Found(request.seq, self._epoch, self._last_hold, len(hit.keys), hit.runs, unavailable)

    def exists(self, session: Session, request: Exists) -> None:
        """Answer which keys are stored."""
        self._start(session, request, self._exist)

    async def _exist(self, session: Session, request: Exists) -> Answer:
        present = await self._engine.contains(stored_keys(session.tenant, request.keys))
        return Existing(request.seq, self._epoch, bytes(present))

    def load(self, session: Session, request: Load) -> None:
        """Load held blocks into a cache."""
        session.check_cache(request.cache)
        hit = session.holds.get(request.hold)
        if hit is None:
            raise Refusal("unknown", f"this session has no hold {request.hold}: it was released")
        destination = self._engine.caches.into(request.cache, unpacked(request.blocks))
        if len(hit.keys) != len(destination):
            raise Refusal("invalid", f"{len(hit.keys)} blocks are held, but {len(destination)} places were named")
        self._start(session, request, partial(self._load, hit, destination), cache=request.cache)

    async def _load(self, hit: Any, destination: CacheBlocks, session: Session, request: Load) -> Answer:
        try:
            result = await self._load_or_clear(hit, destination, session)
        except BaseException as exc:
            if not holds(exc, Unproven):
                raise
            session.requests[request.seq].unproven = True  # also in a group with a cancel, which asked for this answer
            if holds(exc, (KeyboardInterrupt, SystemExit)):
                raise
            return Loaded(request.seq, self._epoch, 0, [], [], unproven=True)
        return loaded(request.seq, self._epoch, result)

    async def _load_or_clear(self, hit: Any, destination: CacheBlocks, session: Session) -> LoadResult:
        try:
            # The client has waited for the precondition of the load before it asked.
            result = await self._engine.require().load(hit, destination, precondition=NO_WAIT)
        except BaseException as exc:
            if not holds(exc, Unproven):
                await self._clear(session, destination, range(len(destination)))
            raise
        if result.loaded < len(result.outcomes):
            await self._clear(session, destination, [at for at, one in enumerate(result.outcomes) if one != LOADED])
        return result

    async def _clear(self, session: Session, destination: CacheBlocks, positions: Sequence[int]) -> None:
        """Clear unverified blocks in a tenant's memory.

        A loaded block is verified only after it was copied. Wrong content may be another tenant's
        bytes: a copy of that one, whose end could not be proven, may have written to a page that was released since.
        """
        if not session.tenant or not positions:
            return
        begun: list[bool] = []

        def clear() -> None:
            begun.append(True)
            destination.clear(positions)

        with trio.CancelScope(shield=True):  # one pass over memory, of at most one request
            while not begun:
                try:
                    await run_in_thread_to_the_end(clear)
                except (OSError, RuntimeError) as exc:
                    if begun:  # its engine has cut it off, or its device does not copy
                        _log.info("%s: %d blocks are neither loaded nor cleared: %s", session, len(positions), exc)
                    else:  # there is no thread or descriptor for it now
                        await trio.sleep(_CLEAR_AGAIN)

    def release(self, session: Session, request: Release) -> Answer | None:
        """Release holds: at once, or in a task.

        They are released at once if they are few and all in memory.
        """
        hits = [self._take_out(session, hold) for hold in request.holds if hold in session.holds]
        direct, blocks, left = self._engine.require().direct, 0, []
        for hit in hits:
            blocks += len(hit.keys)
            if blocks > _RELEASED or not direct.release(hit):
                left.append(hit)
        if not left:
            return Done(request.seq, self._epoch, len(hits))
        self._start(session, request, partial(self._release, left, len(hits)))
        return None

    async def _release(self, hits: list[Any], count: int, session: Session, request: Release) -> Answer:
        for hit in hits:
            await self.let_go(hit)
            await trio.lowlevel.cancel_shielded_checkpoint()  # others are served between two
        return Done(request.seq, self._epoch, count)

    async def release_any(self, session: Session) -> None:
        """Release one of the holds of a session that is over."""
        await self.let_go(self._take_out(session, next(iter(session.holds))))

    def _take_out(self, session: Session, hold: int) -> Any:
        hit = session.holds.pop(hold)
        session.held -= len(hit.keys)
        session.held_keys.remove(hold, _runs(hit))
        self._sessions.refund(session, session.held_costs.pop(hold, 0))
        return hit

    async def let_go(self, hit: Any) -> None:
        """Release a hit that is in no table; log its tiers' errors.

        If cancelled, it is released as well: nobody else would.
        """
        try:
            with trio.CancelScope(shield=True):
                await self._engine.require().release(hit)
        except Exception as exc:
            _log.warning("%r could not be released: %r", hit, exc)

    def explain(self, session: Session, request: Explain) -> None:
        """Explain why blocks are, or are not, there."""
        self._start(session, request, self._explain)

    async def _explain(self, session: Session, request: Explain) -> Answer:
        keys = stored_keys(session.tenant, request.keys)
        blocks: list[BlockExplanation] = []
        async with self._explaining:  # a step of each of many would be one long step for all other engines
            for start in range(0, max(1, len(keys)), _EXPLAINED):
                part = await self._engine.require().explain(keys[start : start + _EXPLAINED], tenant=session.tenant)
                blocks += part.blocks
                await trio.lowlevel.checkpoint()
        return Explained(request.seq, self._epoch, carried(str(Explanation(blocks))[: 1 << 18]))


def _runs(hit: Any) -> Iterator[tuple[str, Sequence[Key]]]:
    """Yield the tiers of a hit, in order, with their held keys."""
    start = 0
    for name, blocks in hit.runs:
        yield name, hit.keys[start : start + blocks]
        start += blocks
