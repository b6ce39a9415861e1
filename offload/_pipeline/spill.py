"""Spilling: a full tier's victims are copied to the next tier first.

A victim is a block that the tier would evict. It goes when its copy has settled.

    store --reserve--> tier is full --victims--> Spilling --pipeline--> next tier
              ^                                     |
              `------------- their slots -----------'  over

Rule 1. A victim is found all the while: in its tier until its copy is found below. It goes uncopied only if the next
        tier is full, broken or late, if the store that needs its slot cannot wait, or at the end; then it is *dropped*,
        and counted with the reason.
Rule 2. No spill lasts for ever. For room below it waits half as long as a store waits for room here, and for its turn
        half as long again; so the store that waits for its slot gets it in time, however many tiers are chained. After
        the commit its copy is bounded by ``transfer_timeout``. If the end of the copy cannot be proven by then, the
        block stays where it is, in quarantine, and no store counts on its slot.
Rule 3. A store that waits for room and is cancelled ends no spill: its slot is free when the next one comes.
Rule 4. Nothing piles up. Blocks under way are held in their tier, so there are never more than that tier has. No more
        than the share of the route (``route_share``) is on it at a time, blocks in quarantine included. A victim
        without room in the share is dropped: a next tier that hangs leaves the rest of this one to new blocks.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final, Protocol, TypeAlias

import attrs
import trio

from backends.abc import Blocks, CapacityError, Key, Tier
from backends.base.leaving import Spill
from maru.exception_groups import holds

from .._config import PipelineConfig
from .._errors import DestinationFull, DrainUnproven, PipelineClosed, TierUnavailable
from ..abc import PreconditionLike
from ..preconditions import NO_WAIT
from .container import OffloadContainer
from .containment import give_back
from .handle import TransferHandle
from .lifecycle import Status
from .offer import BEHIND, RouteShare
from .page_hold import origin_of
from .result import TransferResult

Dropped: TypeAlias = Callable[[Sequence[Key], str], None]
"""A function called with blocks dropped without a copy, and the reason.

The reason is a word. Must not block or raise.
"""

Claim: TypeAlias = Callable[[Sequence[Key]], tuple[Collection[Key], Callable[[], None]]]
"""A function that registers the owners of victims at the next tier.

It takes the keys of the victims to be copied, and returns those that must not be copied, since their owner is unknown,
and a function that ends the registration. Must not block.
"""

_ASK_AGAIN: Final = 0.01
"""Seconds between two checks of a block that another container copies."""
_PATIENCE: Final = 1.5
"""The limit of a copy's waits, relative to that for room.

A copy waits for its turn and for room: see rule 2.
"""
_log = logging.getLogger("offload.spilling")


class Route(Protocol):
    """The pipeline to the next tier, as a spill sees it."""

    @property
    def name(self) -> str:
        """The route's name in statistics."""
        ...

    @property
    def config(self) -> PipelineConfig:
        """The settings of the route."""
        ...

    @property
    def share(self) -> RouteShare:
        """The room for blocks that it may hold in the tier above."""
        ...

    @property
    def quarantined_blocks(self) -> int:
        """Number of blocks whose copy has no proven end."""
        ...

    def add_instrument(self, instrument: object) -> None:
        """Call the hooks of an instrument."""
        ...

    def remove_instrument(self, instrument: object) -> None:
        """Stop calling an instrument."""
        ...

    async def enqueue(self, blocks: Blocks, *, precondition: PreconditionLike) -> TransferHandle:
        """Take in blocks of the tier above."""
        ...


@attrs.frozen
class SpillStatistics:
    """A snapshot of one chain on eviction, in blocks.

    Counters count from its start.
    """

    under_way: int
    """Victims that are still in their tier.

    Their copy has not settled, or its end is unproven.
    """
    spilled: int
    """Victims that left and are below.

    They were copied, or stored there by another writer first.
    """
    stayed: int
    """Victims that were used before their copy had settled, and stayed.

    Their copy may be below all the same.
    """
    dropped: Mapping[str, int]
    """Victims that went without a copy, by reason.

    The reasons are ``full``, ``too large`` (for the next tier, even if it were empty), ``unavailable``, ``late``,
    ``failed``, ``unproven``, ``pending`` (another container was copying it, and failed), ``at once`` (a ``put`` or
    ``stage``, which cannot wait), ``tenant unknown`` (the next tier must know the owner, and that is not known),
    ``closed``, ``behind`` (the route is not required, and has its share under way), or a policy's word.
    """


# --- the chain --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def spill(
    tier: Tier,
    route: Route,
    *,
    dropped: Dropped | None = None,
    claim: Claim | None = None,
    required: bool = True,
) -> AsyncIterator[Spilling]:
    """Have the victims of ``tier`` copied along ``route``.

    This lasts for the length of an ``async with`` block. The block is to be inside that of the pipeline ``route``, and
    around that of the pipelines that store into ``tier``. Leaving it waits for blocks under way, for ``drain_timeout``
    at most; those that have not settled by then are dropped.

    Args:
        tier: the tier that is full; the route's source.
        route: the pipeline to the next tier, with the settings that :func:`config_below` returns.
        dropped: called with the blocks that went without a copy.
        claim: registers the owners of the victims at the next tier, if that must know them.
        required: whether each victim has its time to be copied. Otherwise it waits for ``route_patience`` at most, and
            is dropped if the share of the route is under way.

    Raises:
        ValueError: the victims of this tier go elsewhere already.
    """
    spilling = Spilling(tier, route, dropped, claim, required=required)
    came: BaseException | None = None
    async with trio.open_nursery() as nursery:
        with trio.CancelScope(shield=True):  # if a start is cancelled, its task must end; ours does not end by that
            await nursery.start(spilling._run)
        try:
            end = tier.spill_to(spilling._take)
            route.add_instrument(spilling)
            try:
                yield spilling
            finally:
                end()
                with suppress(KeyError):  # it was removed already if a hook raised
                    route.remove_instrument(spilling)
        except BaseException as error:  # the body's own: it leaves as it came, not in a group
            came = error
        finally:
            await spilling._close()
    if came is not None:
        try:
            raise came
        finally:
            del came  # its traceback holds this frame


class Spilling:
    """The copying of one tier's victims to the next. Made by :func:`spill`."""

    def __init__(
        self,
        tier: Tier,
        route: Route,
        dropped: Dropped | None,
        claim: Claim | None = None,
        *,
        required: bool = True,
    ) -> None:
        self.tier: Tier = tier
        """The tier of the victims."""
        self.route: Route = route
        """The pipeline that copies them."""
        self.patience: float = _PATIENCE * route.config.destination_timeout if required else route.config.route_patience
        """Seconds that a victim may wait before its copy begins."""
        self._required = required
        self._waiting: dict[trio.CancelScope, None] = {}  # tasks that wait for room in the share
        self._source = origin_of(tier)
        self._told = dropped
        self._claim: Claim = _no_claim if claim is None else claim
        self._nursery: trio.Nursery | None = None
        self._scope = trio.CancelScope(shield=True)
        self._closing = trio.Event()
        self._closed = trio.Event()
        self._under_way = self._spilled = self._stayed = 0
        self._dropped: dict[str, int] = {}
        self._lingering: dict[Key, str] = {}  # ended victims still held elsewhere: why not copied, or ""
        self._deafen: Callable[[], None] | None = None
        self._complained = False
        self._most = route.config.batch_config.max_batch_size  # blocks sent together; fewer if the next tier is small

    def __repr__(self) -> str:
        return f"<Spilling to {self.route.name}: {self.statistics().under_way} blocks under way>"

    def statistics(self) -> SpillStatistics:
        """Return an immutable snapshot."""
        under_way = self._under_way + len(self._lingering)
        return SpillStatistics(under_way, self._spilled, self._stayed, dict(self._dropped))

    # --- opening and closing --------------------------------------------------------------------------------------

    async def _run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Run the parent of the tasks that carry victims.

        Shielded, as are the pipelines that they need and that need them.
        """
        try:
            with self._scope:
                async with trio.open_nursery() as self._nursery:
                    task_status.started()
                    await self._closing.wait()
        finally:
            self._nursery = None
            self._closed.set()

    async def _close(self) -> None:
        self._closing.set()
        with trio.CancelScope(shield=True):
            with trio.move_on_after(self.route.config.drain_timeout):
                await self._closed.wait()
            self._scope.cancel()
            await self._closed.wait()

    # --- one spill --------------------------------------------------------------------------------------------------

    def _take(self, victims: Spill) -> None:
        """Take over the victims of a reservation; called by the tier.

        Plain: the tier is in the midst of the reservation.
        """
        if not victims.held:
            self._drop(victims.keys, "at once")
            return
        if self._nursery is None:  # a crash: after a clean end nothing comes here any more
            self._drop(victims.over(), "closed")
            return
        self.route.share.measure()
        share = self.route.share
        if not self._unstuck:
            self._drop(victims.over(), "unproven")
            return
        if not self._required and share.used and share.used + len(victims.keys) > share.total:
            self._drop(victims.over(), BEHIND)
            return
        for key in self._lingering.keys() & set(victims.keys):  # it was used after all, and is a victim once more
            del self._lingering[key]
            self._stayed += 1
        self._nursery.start_soon(self._carry, victims)
        self._under_way += len(victims.keys)

    @property
    def _unstuck(self) -> int:
        """Number of blocks of the share that are not in quarantine."""
        return self.route.share.total - self.route.quarantined_blocks

    def settled(self, container: OffloadContainer) -> None:
        """Wake the tasks that wait for share, after a quarantine.

        This is the hook of an instrument.
        """
        if isinstance(container.error, DrainUnproven):
            for scope in self._waiting:
                scope.cancel()

    async def _carry(self, victims: Spill) -> None:
        why_not = dict.fromkeys(victims.keys, "late")  # the reason why a block is not below, as far as it is known
        unowned, end = _no_claim(victims.keys)
        try:
            unowned, end = self._claim(victims.keys)
            depths = {} if victims.depths is None else dict(zip(victims.keys, victims.depths, strict=True))
            await self._copy([key for key in why_not if key not in unowned], why_not, depths)
        except Exception:  # a tier or a callback broke its contract; the blocks go all the same
            _log.exception("%r could not copy the victims %r", self, victims)
            why_not.update(dict.fromkeys(why_not, "failed"))
        except BaseException:  # cancelled, alone or in a group
            why_not.update(dict.fromkeys(why_not, "closed"))
            raise
        finally:
            why_not.update(dict.fromkeys(unowned, _UNOWNED))
            give_back(self._end, victims, why_not)
            give_back(end)

    async def _copy(self, keys: Sequence[Key], why_not: dict[Key, str], depths: Mapping[Key, int | None]) -> None:
        """Copy these blocks, and remove the copied ones from ``why_not``.

        If cancelled, blocks that are not committed are not copied.
        """
        deadline = trio.current_time() + self.patience
        while keys:
            parts: list[TransferHandle] = []
            try:
                with trio.move_on_at(deadline):
                    await self._send(keys, parts, depths, why_not)
                    for part in parts:
                        await part.wait()
                _cancel(parts)  # late ones; after the commit this changes nothing
                for part in parts:
                    _note(part, await part.wait(), why_not)
            finally:
                _cancel(parts)
            if trio.current_time() >= deadline:
                return
            too_many = self._most > 1 and _TOO_MANY in why_not.values()
            if too_many:
                self._most //= 2
            keys = [key for key in keys if why_not.get(key) in (_TOO_MANY, _PENDING)]
            if keys and not too_many:
                keys = [key for key in keys if why_not[key] == _PENDING]
                await trio.sleep(_ASK_AGAIN)

    async def _send(
        self,
        keys: Sequence[Key],
        parts: list[TransferHandle],
        depths: Mapping[Key, int | None],
        why_not: dict[Key, str],
    ) -> None:
        """Enqueue the blocks as weak ones on the route.

        This spill holds them already, and a copy takes a hold of its own, which outlasts the end of this task.
        """
        share = self.route.share
        while keys:
            n = min(self._most, len(keys), self._unstuck)
            if n <= 0:
                why_not.update(dict.fromkeys(keys, "unproven"))
                return
            try:
                if not share.take_nowait(n) and not await self._take_share(n):
                    continue
            except PipelineClosed:
                return
            some, keys = keys[:n], keys[n:]
            # Victims come deepest first, which is not the order that implies depths: they are passed.
            blocks = self._source.weak(some, list(map(depths.get, some)) if depths else None)
            try:
                part = await self.route.enqueue(blocks, precondition=NO_WAIT)
            except BaseException as error:
                share.give_back(n)
                if isinstance(error, PipelineClosed):
                    return
                raise
            parts.append(part)
            if part.status.terminal:
                share.give_back(n)
            else:
                part._container.hold(partial(share.give_back, n))

    async def _take_share(self, n: int) -> bool:
        """Wait for room in the share, and return whether there was.

        There is none if so much of the share is stuck that there may never be.
        """
        taken = False
        with trio.CancelScope() as scope:
            self._waiting[scope] = None
            try:
                await self.route.share.take(n)
                taken = True
            finally:
                del self._waiting[scope]
        return taken

    def _end(self, victims: Spill, why_not: Mapping[Key, str]) -> None:
        """Let the blocks go, and count their outcomes."""
        n = len(victims.keys)
        leave = victims.over()
        self._under_way -= n
        self._stayed += n - len(leave)
        lingering = self.tier.contains_nowait(leave)
        for key in lingering:
            self._lingering[key] = why_not.get(key, "")
        if lingering and self._deafen is None:
            self._deafen = self.tier.on_evicted(self._went)
        self._count([(key, why_not.get(key, "")) for key in leave if key not in lingering])

    def _went(self, keys: Sequence[Key]) -> None:
        """Count evicted blocks that were held elsewhere when their spill ended."""
        self._count([(key, self._lingering.pop(key)) for key in keys if key in self._lingering])
        if not self._lingering and self._deafen is not None:
            self._deafen()
            self._deafen = None

    def _count(self, fates: Sequence[tuple[Key, str]]) -> None:
        lost: dict[str, list[Key]] = {}
        for key, reason in fates:
            if reason:
                lost.setdefault(reason, []).append(key)
            else:
                self._spilled += 1
        for reason, keys in lost.items():
            self._drop(keys, reason)
        if fates and not lost:
            self._complained = False

    def _drop(self, keys: Sequence[Key], reason: str) -> None:
        self._dropped[reason] = self._dropped.get(reason, 0) + len(keys)
        # Once for each outage: a tier that is down for an hour is one line, not one for each batch.
        level = logging.DEBUG if self._complained else logging.WARNING
        self._complained = True
        _log.log(level, "%d blocks were dropped instead of copied to %s: %s", len(keys), self.route.name, reason)
        if self._told is not None:
            self._told(keys, reason)


def _cancel(parts: Sequence[TransferHandle]) -> None:
    for part in parts:
        part.request_cancel()


def _note(part: TransferHandle, result: TransferResult, why_not: dict[Key, str]) -> None:
    """Record the outcome of some blocks: below, or the reason why not.

    A block that was gone already is not recorded: it was damaged.
    """
    for key in result.completed:
        why_not.pop(key, None)
    for key, reason in result.filtered.items():
        if reason == "present":
            why_not.pop(key, None)
        else:
            why_not[key] = reason
    for key, error in result.failed.items():
        why_not[key] = _word(error)
    if result.status is not Status.COMPLETE:  # the remaining blocks: cancelled or failed as a whole, before the copy
        why_not.update(dict.fromkeys(part.remaining_blocks, "late" if result.error is None else _word(result.error)))


def _no_claim(keys: Sequence[Key]) -> tuple[Collection[Key], Callable[[], None]]:
    """Return no unowned keys: the next tier need not know the owners."""
    return (), lambda: None


_PENDING, _TOO_MANY, _UNOWNED = "pending", "too large", "tenant unknown"

_WORDS: Final[Sequence[tuple[type[Exception], str]]] = (
    (DestinationFull, "full"),
    (TierUnavailable, "unavailable"),
    (DrainUnproven, "unproven"),
    (PipelineClosed, "closed"),
)


def _word(error: BaseException) -> str:
    if error.__cause__ is not None and holds(error.__cause__, CapacityError):
        return _TOO_MANY
    return next((word for kind, word in _WORDS if isinstance(error, kind)), "failed")
