"""Page store as a tier of a real run: a :class:`~backends.maru.MaruTier`.

It is observed, and audited at the end. The ledger asks a tier who holds blocks and how much is reserved; a page store
does not know that at once, or another process does. So :class:`_ClientView` shows the knowledge of this client during
the run, and when the pipelines have closed, the store itself is asked (:meth:`PageStoreTier.settle`): which blocks it
has, whether they are right, and whether all pages come back when they are deleted.
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
"""Size of which regions are whole multiples, in bytes."""
_REST_TIMEOUT: Final = 20.0
"""Seconds in which a page store must come to rest."""
_LEFT: Final = 4
"""Regions in the pool besides the first.

Each session that was lost leaves one until it is empty.
"""


class _Violations(Protocol):
    def wrong(self, rule: str, text: str) -> None: ...

    @property
    def all_keys(self) -> Sequence[Key]: ...


@attrs.frozen
class _Figures:
    """Figures that the ledger reads."""

    held: int
    staged: int
    waiting: int


class _ClientView:
    """Figures of a page store in the form of other tiers' pools."""

    def __init__(self, tier: PageStoreTier) -> None:
        self._tier = tier
        self._slot_of: dict[Key, int] = {}
        """Keys in the store, as far as this client knows."""
        self._last: _Figures | None = None

    def statistics(self) -> _Figures:
        """Return the current figures, or those at the close of the store."""
        return self._last or self._now()

    def freeze(self) -> None:
        """Keep the current figures, since the store closes.

        Pages in doubt count as staged.
        """
        in_doubt = self._tier.handler.statistics().pages.in_doubt
        self._last = attrs.evolve(self._now(), staged=self._now().staged + in_doubt)

    def _now(self) -> _Figures:
        handler = self._tier.handler.statistics()
        staged = handler.pages.allocated + handler.pages.registering - self._tier.model.ballast
        return _Figures(handler.pinned, max(0, staged), len(self._tier._waiters))


class _Reservation(MaruReservation):
    """Pages of a real run; their transfer is a world's copy."""

    __slots__ = ()
    _tier: PageStoreTier

    async def transfer(self, source: Source, refs: Sequence[int]) -> Sequence[Outcome]:
        """Transfer like a real reservation, past the gate."""
        tier, keys = self._tier, tuple(self.granted)
        tier.batches.append(keys)
        tier.copying += 1
        transfer = super().transfer

        async def move(copy: Copy) -> list[Outcome]:
            try:
                return copy.answers(await transfer(GatedSource(source, tier.model, copy), refs))
            except MaruError:  # no answer, or none any more: the store may have been done
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
    """Pages of a private store, with the attributes of a fake tier.

    The ledger reads those.
    """

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

    # -- opening and closing -------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def open(self, *, lossy: bool) -> AsyncIterator[None]:
        """Connect for the duration of the block.

        With ``lossy``, the connection goes through a wire that loses requests on command.
        """
        async with AsyncExitStack() as stack:
            if lossy:
                wire = self.model.wire = await stack.enter_async_context(open_lossy_wire(self.model.store.endpoint))
                wire.decide = self.model.fate
                self.handler = MaruHandler(attrs.evolve(self.handler.config, server_url=wire.endpoint))
                self.handler.on_pages_freed(self.wake_first)
            # Its timeout is meant for the scenario's actions: a first request that takes longer is repeated.
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
        """Allocate the region now, and store the initial keys.

        Otherwise the first block would allocate the region.
        """
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
        """Check the store's contents at rest, and delete them.

        Afterwards all pages must be free.
        """
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
        """Ask until there is an answer.

        A server that has just started may have lost a question.
        """
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
            while pinned:  # pages released a moment ago may be on their way
                answers = await self._asking(super().delete, pinned)
                pinned = [key for key, answer in zip(pinned, answers, strict=True) if answer is Deletion.PINNED]
            await self._until(lambda: self._all_free)
        if pinned:
            names = ", ".join([key.decode(errors="replace") for key in pinned])
            self._judge.wrong("I1", f"at rest, {names} in {self.name} cannot be deleted: they are held")
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
        """Load blocks.

        Raises:
            OSError: a fault of the store has cost it the lease.
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

    # -- attributes of a fake tier -------------------------------------------------------------------------------------

    def fill(self, keys: Sequence[Key]) -> None:
        """Have these keys stored when it opens."""
        self._held_from_the_start += keys

    def get(self, key: Key) -> bytes | None:
        """Return the bytes of a key at the end of the run."""
        return self._bytes.get(key)

    def flip(self, keys: Sequence[Key]) -> Sequence[Key]:
        """Flip a bit in these stored blocks' pages, unseen by the store.

        No keys mean all.
        """
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
        """Do nothing: :meth:`open` closes everything."""


def knobs_of(spec: TierSpec) -> dict[str, Any]:
    """Return the options of a client with exactly ``capacity`` pages.

    They are in one region.
    """
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
    """Return the size of a client's region, in bytes.

    The region is the smallest possible, with pages as large as it allows.
    """
    return -(-spec.capacity * spec.block_bytes // REGION) * REGION


def pool_bytes(spec: TierSpec) -> int:
    """Return the pool size for one client's regions, in bytes.

    It includes the regions that lost sessions leave.
    """
    return (1 + _LEFT) * region_of(spec)


def server_options() -> list[str]:
    """Return server options: no eviction by itself, and short leases."""
    return [
        *("--high-watermark", "1.0", "--low-watermark", "1.0"),
        *("--min-lease", "0.05", "--lease-grace", "0.1", "--watermark-interval", "0.02"),
        *("--log-level", "warning"),
    ]


def _flip_all(memory: mmap.mmap, block: bytes) -> None:
    """Flip a bit in every page with these bytes.

    Only the store knows which of them counts.
    """
    at = memory.find(block)
    while at >= 0:
        memory[at] ^= 1
        at = memory.find(block, at + 1)
