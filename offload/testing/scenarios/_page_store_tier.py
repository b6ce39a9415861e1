"""The page store as a tier of a real run: :class:`~backends.maru.MaruTier`, watched, and audited when all is over.

What the ledger asks of a tier (who holds what, what is reserved) a page store does not know at once, or another process does.
So :class:`_Shown` shows what this client knows while it runs, and when the pipelines have closed, the store itself is asked
(:meth:`PageStoreTier.settle`): what is there, whether it is right, and whether all comes back when it is deleted.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs
import trio

from backends.abc import LOADED, STORED, Deletion, Destination, Key, Outcome, ReadLease, RoomRequest, Source
from backends.base.pages import new_pages
from backends.base.slots import PagesDestination
from backends.maru import MaruReservation, MaruTier
from backends.testing import payload_of
from maru import MaruError, MaruHandler, NoAnswer
from maru.testing import open_lossy_wire

from ._program import TierSpec
from ._real_tiers import GatedSource
from ._virtual_tier import Copy

if TYPE_CHECKING:
    from ._page_store import PageStoreModel


REGION: Final = 2 << 20
"""Regions are whole multiples of it."""
_REST_TIMEOUT: Final = 20.0
"""Seconds in which a page store must come to rest."""
_LEFT: Final = 4
"""Regions that fit into the pool beside the first: each session that was lost leaves one until it is empty."""


class _Violations(Protocol):
    def wrong(self, rule: str, text: str) -> None: ...

    @property
    def all_keys(self) -> Sequence[Key]: ...


@attrs.frozen
class _Figures:
    """What the ledger looks at."""

    held: int
    staged: int
    waiting: int


class _ClientView:
    """The figures of a page store as the ledger reads them from other tiers."""

    def __init__(self, tier: PageStoreTier) -> None:
        self._tier = tier
        self._slot_of: dict[Key, int] = {}
        """The keys that are there, as far as is known here."""
        self._last: _Figures | None = None

    def statistics(self) -> _Figures:
        """As they are; when the store is closed, as they were."""
        return self._last or self._now()

    def freeze(self) -> None:
        """Keep the figures as they are now, since the store closes: pages in doubt count as staged."""
        in_doubt = self._tier.handler.statistics().pages.in_doubt
        self._last = attrs.evolve(self._now(), staged=self._now().staged + in_doubt)

    def _now(self) -> _Figures:
        handler = self._tier.handler.statistics()
        staged = handler.pages.allocated + handler.pages.registering - self._tier.model.ballast
        return _Figures(handler.pinned, max(0, staged), len(self._tier._waiters))


class _Reservation(MaruReservation):
    """Pages of a real run: their transfer is one of the world's copies."""

    __slots__ = ()
    _tier: PageStoreTier

    async def transfer(self, source: Source, refs: Sequence[int]) -> Sequence[Outcome]:
        """What the real one does, past the gate."""
        tier, keys = self._tier, tuple(self.granted)
        tier.batches.append(keys)
        tier.copying += 1
        transfer = super().transfer

        async def move(copy: Copy) -> list[Outcome]:
            try:
                return copy.answers(await transfer(GatedSource(source, tier.model, copy), refs))
            except MaruError:  # no answer, or none any more: it may have been done
                tier.model.end_unknown(copy)
                raise

        try:
            outcomes = await tier.model.run_copy(keys, move, tier.leaving)
        finally:
            tier.copying -= 1
        stored = [key for key, outcome in zip(keys, outcomes, strict=False) if outcome == STORED]
        tier.copied += stored
        tier.pool._slot_of.update(dict.fromkeys(stored, 0))
        return outcomes


class PageStoreTier(MaruTier):
    """Pages of a store of its own; has the attributes of a fake tier, for the ledger."""

    def __init__(self, model: PageStoreModel, judge: _Violations) -> None:
        spec = model.spec
        handler = MaruHandler(server_url=model.store.endpoint, **knobs_of(spec))
        super().__init__(handler, block_bytes=spec.block_bytes, name=model.name)
        self.model = model
        self.pool = _ClientView(self)
        self.flipped: set[Key] = set()
        self.leaving: Sequence[str] | None = None
        self.batches: list[tuple[Key, ...]] = []
        self.copied: list[Key] = []
        self.copying = 0
        self._judge = judge
        self._held_from_the_start: list[Key] = []
        self._bytes: dict[Key, bytes] = {}
        model.tier = self

    # -- its life ------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def open(self, *, lossy: bool) -> AsyncIterator[None]:
        """Connected for the length of the block, through a wire that loses what it is told to where that is wanted."""
        async with AsyncExitStack() as stack:
            if lossy:
                wire = self.model.wire = await stack.enter_async_context(open_lossy_wire(self.model.store.endpoint))
                wire.decide = self.model.fate
                self.handler = MaruHandler(attrs.evolve(self.handler.config, server_url=wire.endpoint))
                self.handler.on_pages_freed(self.wake_first)
            # Its patience is for what the scenario does: a first answer that takes longer is asked for again.
            await self._asking(stack.enter_async_context, self, again_after=NoAnswer)
            await self._fill()
            try:
                yield
            finally:
                with trio.move_on_after(_REST_TIMEOUT, shield=True) as bound:
                    await self.settle()
                if bound.cancelled_caught:
                    what = f"{self.name} does not come to rest within {_REST_TIMEOUT:g} s: {self.handler.statistics()}"
                    self._judge.wrong("I1", what)
                self.pool.freeze()

    async def _fill(self) -> None:
        """Take the region now, and not when the first block comes, and store what is there from the start."""
        batch = await self._asking(self.handler.alloc_pages, 1, again_after=NoAnswer)
        assert batch is not None
        batch.free()
        keys = self._held_from_the_start
        if keys:
            blocks = [payload_of(key, self.block_bytes) for key in keys]
            await self._asking(self.handler.batch_put, [key.hex() for key in keys], blocks, again_after=NoAnswer)
            await self._until(lambda: self._in_doubt == 0)
            self.pool._slot_of.update(dict.fromkeys(keys, 0))

    async def settle(self) -> None:
        """All is over: what is there is looked at and compared, then deleted, and all pages must be free."""
        self.model.end_faults()
        await self.model.back()
        await self._asking(self.handler.exists, "")
        await self._until(lambda: self._in_doubt == 0 and self.pool.statistics().held == 0)
        keys = list(dict.fromkeys([*self._judge.all_keys, *self._held_from_the_start]))
        found = await self._asking(self.contains, keys)
        self.pool._slot_of = {key: 0 for key in keys if key in found}
        for key in self.pool._slot_of:
            await self._read(key)
        await self._empty(keys)

    async def _asking(self, ask: Any, *args: Any, again_after: type[MaruError] = MaruError) -> Any:
        """Ask until there is an answer: a server that has just come up may have lost a question."""
        deadline = trio.current_time() + _REST_TIMEOUT
        while True:
            try:
                return await ask(*args)
            except again_after:
                if trio.current_time() > deadline:
                    raise
                await trio.sleep(0.01)

    async def _until(self, holds: Any) -> None:
        while not holds():
            await self.handler.healthcheck()
            await trio.sleep(0.002)

    @property
    def _in_doubt(self) -> int:
        pages = self.handler.statistics().pages
        return pages.in_doubt + pages.registering

    async def _read(self, key: Key) -> None:
        page = new_pages(1, self.block_bytes)
        lease = await self._asking(self.pin, [key])
        async with lease:
            outcomes = await MaruTier.load(self, lease, PagesDestination(page))
        if list(outcomes) == [LOADED]:
            self._bytes[key] = bytes(page[0])
        elif key not in self.flipped:
            self._judge.wrong(
                "model", f"{key.decode(errors='replace')} is in {self.name}, and cannot be loaded: {outcomes}"
            )

    async def _empty(self, keys: Sequence[Key]) -> None:
        pinned = list(keys)
        with trio.move_on_after(_REST_TIMEOUT / 4) as bound:
            while pinned:  # what was given back a moment ago may be on its way
                answers = await self._asking(super().delete, pinned)
                pinned = [key for key, answer in zip(pinned, answers, strict=True) if answer is Deletion.PINNED]
            await self._until(lambda: self._all_free)
        if pinned:
            names = ", ".join([key.decode(errors="replace") for key in pinned])
            self._judge.wrong("I1", f"at rest, {names} in {self.name} cannot be deleted: somebody holds them")
            return
        pages = self.handler.statistics().pages
        if bound.cancelled_caught or pages.strays:
            self._judge.wrong("I1", f"all of {self.name} is deleted, and not all of its pages are free: {pages}")
        entries = (await self._asking(self.handler.get_stats))["kv_manager"]["total_entries"]
        if entries:
            self._judge.wrong("I1", f"all of {self.name} is deleted, and its server still lists {entries} keys")

    @property
    def _all_free(self) -> bool:
        pages = self.handler.statistics().pages
        return pages.free == pages.pages

    # -- the tier ------------------------------------------------------------------------------------------------------

    async def reserve(self, request: RoomRequest) -> MaruReservation:
        """Take pages."""
        granted = await super().reserve(request)
        return _Reservation(self, granted.granted, granted._batch)

    def reserve_nowait(self, request: RoomRequest) -> MaruReservation:
        """Take pages that are known to be free here."""
        granted = super().reserve_nowait(request)
        return _Reservation(self, granted.granted, granted._batch)

    async def load(self, lease: ReadLease, destination: Destination) -> Sequence[Outcome]:
        """Load.

        Raises:
            OSError: what was done to the store meanwhile has cost it the lease.
        """
        before = self.model.disturbed
        with trio.CancelScope(shield=True):
            await trio.sleep(self.model.duration(len(lease.keys) * self.block_bytes))
        outcomes = await super().load(lease, destination)
        if self.model.disturbed and any(getattr(outcome, "reason", "") == "lease" for outcome in outcomes):
            raise ConnectionResetError(
                f"the lease in {self.name} was lost ({self.model.disturbed - before} times meanwhile)"
            )
        return outcomes

    async def delete(self, keys: Sequence[Key]) -> list[Deletion]:
        """Delete keys."""
        answers = await super().delete(keys)
        for key, answer in zip(keys, answers, strict=True):
            if answer is not Deletion.PINNED:
                self.pool._slot_of.pop(key, None)
        return answers

    # -- what a fake tier has ------------------------------------------------------------------------------------------

    def fill(self, keys: Sequence[Key]) -> None:
        """Have these there when it opens."""
        self._held_from_the_start += keys

    def get(self, key: Key) -> bytes | None:
        """The bytes that were there at the end."""
        return self._bytes.get(key)

    def flip(self, keys: Sequence[Key]) -> Sequence[Key]:
        """Flip a bit in the pages of each of these that is there, unseen by the store; of none named: of all."""
        there = [key for key in keys or list(self.pool._slot_of) if key in self.pool._slot_of]
        pool = self.model.store.pool
        for name in os.listdir(pool):
            if name.endswith(".dat"):
                with open(os.path.join(pool, name), "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                    for key in there:
                        _flip_all(memory, payload_of(key, self.block_bytes))
        self.flipped.update(there)
        return there

    def close(self) -> None:
        """Nothing that is not closed by then: see :meth:`open`."""


def knobs_of(spec: TierSpec) -> dict[str, Any]:
    """A client with exactly ``capacity`` pages, in one region."""
    region = region_of(spec)
    return {
        "chunk_size_bytes": region // spec.capacity,
        "pool_size": region,
        "auto_expand": False,
        "checksums": spec.checksums,
        "timeout_ms": spec.patience_ms,
        "lease": spec.lease_ms / 1e3,
    }


def region_of(spec: TierSpec) -> int:
    """The bytes of the region of one client: of the fewest that can be had, in as large pages as there is room for."""
    return -(-spec.capacity * spec.block_bytes // REGION) * REGION


def pool_bytes(spec: TierSpec) -> int:
    """Room for the regions of one client, and for what lost sessions leave."""
    return (1 + _LEFT) * region_of(spec)


def server_options() -> list[str]:
    """Of the command: evicts only when asked to, takes short leases."""
    return [
        *("--high-watermark", "1.0", "--low-watermark", "1.0"),
        *("--min-lease", "0.05", "--lease-grace", "0.1", "--watermark-interval", "0.02"),
        *("--log-level", "warning"),
    ]


def _flip_all(memory: mmap.mmap, block: bytes) -> None:
    """In every page with these bytes: which of them counts, only the store knows."""
    at = memory.find(block)
    while at >= 0:
        memory[at] ^= 1
        at = memory.find(block, at + 1)
