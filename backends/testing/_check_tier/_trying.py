"""The parts of a check: blocks, places, and one tier's case.

The bytes of blocks follow from their keys.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

import attrs
import trio
import trio.testing
import xxhash

from ...abc import (
    LOADED,
    STORED,
    Capabilities,
    Deletion,
    Destination,
    Key,
    Missed,
    Outcome,
    Reservation,
    RoomRequest,
    Source,
    WhenFull,
)
from ...base.pages import Pages, copy_pages, pages_of
from .._fake import payload_of

BLOCKS: Final = 8
"""Number of blocks that the tier of a check holds."""

PATIENCE: Final = 5.0
"""Seconds within which an answer of a tier's server must come."""


def must(holds: bool, promise: str, *details: object) -> None:
    """Raise if a promise is broken.

    An ``assert`` would be dropped by ``python -O``.
    """
    if not holds:
        raise AssertionError(" ".join([promise, *map(repr, details)]))


def _first_difference(block: bytes, expected: bytes) -> str:
    at = next(at for at, (one, other) in enumerate(zip(block, expected, strict=True)) if one != other)
    return f"byte {at} is {block[at : at + 8].hex(' ')}, expected {expected[at : at + 8].hex(' ')}"


class Bytes(Source):
    """A source of blocks whose bytes follow from their keys.

    A ref is the number of the key.
    """

    def __init__(self, block_bytes: int, *, in_host: bool = True) -> None:
        self._block_bytes = block_bytes
        self.in_host = in_host
        self.keys: list[Key] = []
        self.buffers: list[bytearray] = []
        self.error: Exception | None = None
        self.unreadable: Sequence[Key] = ()
        """Keys of blocks with which a copy raises ``error``.

        If there are none, each copy raises it.
        """
        self.started: threading.Event | None = None
        self.go_on: threading.Event | None = None
        self.copied = threading.Event()

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    def upgrade(self, keys: Sequence[Key]) -> list[int]:
        refs = list(range(len(self.keys), len(self.keys) + len(keys)))
        self.keys += keys
        self.buffers += [bytearray(payload_of(key, self.block_bytes)) for key in keys]
        return refs

    def views(self, refs: Sequence[int]) -> Pages | None:
        return pages_of([self.buffers[ref] for ref in refs]) if self.in_host else None

    def copy_out(self, refs: Sequence[int], pages: Pages) -> None:
        if self.started is not None and self.go_on is not None:
            self.started.set()
            self.go_on.wait()
        try:
            asked = {self.keys[ref] for ref in refs}
            if self.error is not None and (not self.unreadable or asked.intersection(self.unreadable)):
                raise self.error
            copy_pages(pages, pages_of([self.buffers[ref] for ref in refs]))
        finally:
            self.copied.set()


class KnownBytes(Bytes):
    """A source of the same blocks, with their checksums.

    Some blocks have one bit flipped.
    """

    def __init__(self, block_bytes: int, damaged: Sequence[Key] = (), *, in_host: bool = True) -> None:
        super().__init__(block_bytes, in_host=in_host)
        self.damaged = damaged
        self.forgotten: list[Key] = []

    def upgrade(self, keys: Sequence[Key]) -> list[int]:
        refs = super().upgrade(keys)
        for key, ref in zip(keys, refs, strict=True):
            self.buffers[ref][-1] ^= key in self.damaged
        return refs

    def checksums_of(self, keys: Sequence[Key], refs: Sequence[int]) -> list[int | None]:
        return [xxhash.xxh3_64_intdigest(payload_of(self.keys[ref], self.block_bytes)) for ref in refs]

    def forget_damaged(self, keys: Sequence[Key], refs: Sequence[int]) -> None:
        must([self.keys[ref] for ref in refs] == list(keys), "a source is told keys and their refs", keys, refs)
        self.forgotten += keys


class Places(Destination):
    """A destination whose places can be inspected."""

    def __init__(self, n: int, block_bytes: int, *, in_host: bool = True) -> None:
        self._block_bytes = block_bytes
        self.in_host = in_host
        self.buffers = [bytearray(b"\xee" * block_bytes) for _ in range(n)]
        self.error: Exception | None = None
        self.started: threading.Event | None = None
        self.go_on: threading.Event | None = None

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    def __len__(self) -> int:
        return len(self.buffers)

    def views(self) -> Pages | None:
        return pages_of(self.buffers) if self.in_host else None

    def copy_in(self, start: int, pages: Pages) -> None:
        if self.started is not None and self.go_on is not None:
            self.started.set()
            self.go_on.wait()
        if self.error is not None:
            raise self.error
        copy_pages(pages_of(self.buffers[start : start + len(pages)]), pages)


@attrs.define
class Case:
    """One tier, and the steps that the checks share."""

    tier: Any
    block_bytes: int
    any_block_size: bool
    threads: bool
    damage: Callable[[Any, Key], object] | None
    spoil: Callable[[Any, Key], object] | None
    take_away: Callable[[Any, Key], object] | None

    @property
    def remote(self) -> bool:
        """Whether the tier must be asked, and others may change it."""
        return not self.tier.capabilities.answers_at_once

    @property
    def capabilities(self) -> Capabilities:
        """The declared capabilities; all if the tier declares none."""
        declared: Capabilities = self.tier.capabilities
        return declared

    async def behind_its_back(self, hook: Callable[[Any, Key], object], key: Key) -> None:
        """Change a block without the tier, by a function of the caller."""
        happening = hook(self.tier, key)
        if isinstance(happening, Awaitable):
            await happening

    def keys(self, n: int, name: str = "a") -> list[Key]:
        """Return keys for ``n`` blocks."""
        return [f"{name}{number}".encode() * 4 for number in range(n)]

    def request(self, keys: Sequence[Key], when_full: WhenFull) -> RoomRequest:
        """Return a request for room for these keys."""
        return RoomRequest(keys, self.block_bytes, when_full)

    async def reserve(self, keys: Sequence[Key], when_full: WhenFull = "fail") -> Reservation:
        """Take room for these keys, or for a prefix."""
        reservation: Reservation = await self.tier.reserve(self.request(keys, when_full))
        return reservation

    async def reserve_now(self, keys: Sequence[Key], when_full: WhenFull) -> Reservation:
        """Take the room that there is now.

        Only a tier that must be asked may raise :class:`trio.WouldBlock` here.
        """
        try:
            reservation: Reservation = self.tier.reserve_nowait(self.request(keys, when_full))
        except trio.WouldBlock:
            must(self.remote, "partial and fail never wait")
            return await self.reserve(keys, when_full)
        return reservation

    async def contains(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Return those of ``keys`` that the tier has."""
        found: AbstractSet[Key] = await self.tier.contains(keys)
        if not self.remote:
            must(found == self.tier.contains_nowait(keys), "contains and contains_nowait say the same", found)
        return found

    async def until(self, holds: Callable[[], bool], promise: str, *details: object) -> None:
        """Wait until the condition holds; at once without a server."""
        await trio.testing.wait_all_tasks_blocked()
        if self.remote:
            with trio.move_on_after(PATIENCE):
                while not holds():  # noqa: ASYNC110  # the condition depends on the tier alone
                    await trio.sleep(0.001)
        must(holds(), promise, *details)

    async def store(
        self,
        keys: Sequence[Key],
        when_full: WhenFull = "fail",
        *,
        in_host: bool = True,
        source: Bytes | None = None,
    ) -> list[Outcome]:
        """Store these keys, for which there must be room."""
        reservation = await self.reserve(keys, when_full)
        must(list(reservation.granted) == list(keys), "there must be room for", keys, reservation.granted)
        source = Bytes(self.block_bytes, in_host=in_host) if source is None else source
        try:
            return list(await reservation.transfer(source, source.upgrade(keys)))
        finally:
            reservation.release()

    async def fill(self, n: int = BLOCKS, name: str = "a") -> list[Key]:
        """Store ``n`` new blocks."""
        keys = self.keys(n, name)
        outcomes = await self.store(keys)
        must(outcomes == [STORED] * n, "new blocks must be STORED", outcomes)
        return keys

    async def occupy(self, n: int = BLOCKS) -> Occupied:
        """Take ``n`` places so that they can be freed again."""
        occupied = Occupied(self)
        await occupied.more(self.keys(n))
        return occupied

    async def load(self, keys: Sequence[Key], *, in_host: bool = True) -> list[bytes | None]:
        """Load these keys, which must be there; ``None`` for a miss."""
        places = Places(len(keys), self.block_bytes, in_host=in_host)
        async with await self.tier.pin(keys) as lease:
            must(list(lease.keys) == list(keys), "a lease must hold all that is there", keys, lease.keys)
            outcomes = await self.tier.load(lease, places)
        must(len(outcomes) == len(keys), "one outcome per key of the lease", outcomes)
        must(all(o == LOADED or isinstance(o, Missed) for o in outcomes), "LOADED or Missed", outcomes)
        return [bytes(b) if o == LOADED else None for b, o in zip(places.buffers, outcomes, strict=True)]

    async def holds(self, keys: Sequence[Key]) -> None:
        """Check that these keys are there, with their bytes."""
        must(await self.contains(keys) == set(keys), "what is stored must be found", keys)
        wrong = {}
        for key, block in zip(keys, await self.load(keys), strict=True):
            expected = payload_of(key, self.block_bytes)
            if block != expected:
                wrong[key] = "missed" if block is None else _first_difference(block, expected)
        must(not wrong, "what is loaded must be what was stored", wrong)

    async def room(self) -> int:
        """Return the number of blocks that fit without an eviction."""
        reservation = await self.reserve_now(self.keys(BLOCKS, "room"), "partial")
        reservation.release()
        return len(reservation.granted)

    def at_rest(self) -> None:
        """Check that nothing is reserved or held."""
        statistics = self.tier.statistics()
        must(statistics.reserved_blocks == 0, "no room may be left reserved", statistics)
        must(statistics.held_blocks == 0, "no block may be left held", statistics)
        must(0 <= statistics.used_bytes <= statistics.capacity_bytes, "a tier keeps within its capacity", statistics)


class Occupied:
    """Places that are taken.

    By blocks, which are deleted to make room, or by reservations if nothing can be deleted.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        self._reserved: dict[Key, Reservation] = {}
        self.keys: list[Key] = []

    async def more(self, keys: Sequence[Key]) -> None:
        """Take a place for each of these keys."""
        self.keys += keys
        if self._case.capabilities.deletes:
            must(await self._case.store(keys) == [STORED] * len(keys), "new blocks must be STORED")
            return
        for key in keys:
            self._reserved[key] = await self._case.reserve([key])

    async def free(self, keys: Sequence[Key]) -> None:
        """Free the places of these keys."""
        if self._case.capabilities.deletes:
            answers = await self._case.tier.delete(keys)
            must(answers == [Deletion.DELETED] * len(keys), "what nobody holds can be deleted", answers)
        for key in keys:
            if key in self._reserved:
                self._reserved.pop(key).release()

    def end(self) -> None:
        """Release all reservations."""
        for reservation in self._reserved.values():
            reservation.release()
