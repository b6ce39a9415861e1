"""Leases, reservations and statistics of a wrapped tier.

The copy of a reservation encodes its blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from ..abc import Key, Outcome, ReadLease, Reservation, Source
from ..base.tier_base import TierLease, TierReservation
from ._chain import Context

if TYPE_CHECKING:
    from ._chain import Context
    from ._tier import WrappedTier


@attrs.frozen
class WrapperStatistics:
    """A snapshot of one wrapped tier; counters count since it was made."""

    encoded: int
    """Blocks that were encoded and stored."""
    plain_bytes: int
    """Bytes that were encoded, including those of duplicates."""
    stored_bytes: int
    """Encoded size of these bytes, headers included.

    The unused part of a slot is not counted.
    """
    decoded: int
    """Blocks that were decoded and verified."""
    read_bytes: int
    """Stored bytes that loads have decoded them from."""
    missed: Mapping[str, int]
    """Blocks of the tier below that could not be decoded, by reason.

    ``damaged``: not the stored bytes; ``tag``: not the encrypted bytes, or not under this key; ``foreign``: of another
    tenant; ``secret``: encrypted with a secret that is not here any more.
    """
    staging: int
    """Working memories allocated in total.

    As many as copies have run at the same time.
    """

    @property
    def ratio(self) -> float:
        """Stored bytes per plain byte; 1.0 until a block is encoded."""
        return self.stored_bytes / self.plain_bytes if self.plain_bytes else 1.0

    @property
    def bad_tags(self) -> int:
        """Blocks whose authentication failed.

        Their encrypted bytes were changed.
        """
        return self.missed.get("tag", 0)


@attrs.define
class Counters:
    """The counters, on the trio thread."""

    encoded: int = 0
    plain_bytes: int = 0
    stored_bytes: int = 0
    decoded: int = 0
    read_bytes: int = 0
    missed: dict[str, int] = attrs.Factory(dict)

    def miss(self, reason: str) -> None:
        """Count one block that could not be decoded."""
        self.missed[reason] = self.missed.get(reason, 0) + 1

    def snapshot(self, staging: int) -> WrapperStatistics:
        """Return an immutable copy."""
        return WrapperStatistics(
            self.encoded,
            self.plain_bytes,
            self.stored_bytes,
            self.decoded,
            self.read_bytes,
            dict(self.missed),
            staging,
        )


class WrappedLease(TierLease["WrappedTier"]):
    """A hold on the prefix of some keys.

    Made by :meth:`WrappedTier.pin`.
    """

    __slots__ = ("contexts", "inner")

    def __init__(self, tier: WrappedTier, contexts: Sequence[Context], inner: ReadLease) -> None:
        """Use :meth:`WrappedTier.pin` instead."""
        super().__init__(tier, [context.key for context in contexts])
        self.contexts: Sequence[Context] = contexts
        """Facts to decode each block, including its tenant.

        Later tags change nothing for this read.
        """
        self.inner: ReadLease = inner
        """The lease of the encoded blocks."""

    @property
    def is_held(self) -> bool:
        """Always true: the tier below refuses loads of released blocks."""
        return True

    def forget(self, positions: Sequence[int]) -> bool:
        """Drop the damaged blocks at these positions; see :meth:`backends.abc.ReadLease.forget`."""
        self.tier.forget(self, positions)
        return True

    async def __aexit__(self, *exc: object) -> None:
        await self.inner.__aexit__(None, None, None)
        await self.tier.purge()


class WrappedReservation(TierReservation["WrappedTier"]):
    """Slots of the tier below for some keys.

    :meth:`WrappedTier.reserve` makes it. A transfer encodes the blocks into the slots. A block that its source knows to
    be damaged, or that cannot be encrypted, fails alone. Cancelled, a transfer returns at once, even with blocks still
    being encoded in a copy thread: a caller that quarantines it must not release it.
    """

    __slots__ = ("_contexts", "_inner", "_refs", "_source")

    def __init__(self, tier: WrappedTier, keys: Sequence[Key], inner: Reservation) -> None:
        """Use :meth:`WrappedTier.reserve` instead."""
        super().__init__(tier, keys, tier.block_bytes)
        self._inner = inner
        self._source: Source | None = None
        self._refs: Sequence[int] = ()
        self._contexts: Sequence[Context] = ()

    def hold(self) -> None:
        """Hold stored blocks until :meth:`release`, if the tier below can."""
        self._inner.hold()

    def note_depths(self, depths: Mapping[Key, int]) -> None:
        """Pass the depths to the tier below."""
        names = zip(self.granted, self._tier.names(self.granted), strict=True)
        self._inner.note_depths({name: depths[key] for key, name in names if key in depths})

    def release(self) -> None:
        """Give back the room of unpublished blocks.

        Idempotent; never blocks, never raises.
        """
        self._inner.release()

    def _size(self) -> int:
        return len(self._inner.granted)

    def _keep(self, positions: Sequence[int]) -> None:
        names = self._inner.granted
        self._inner.keep([names[at] for at in positions])
        if self._contexts:
            self._refs = [self._refs[at] for at in positions]
            self._contexts = [self._contexts[at] for at in positions]

    async def _copy(self, source: Source, keys: Sequence[Key], refs: Sequence[int]) -> Mapping[int, Exception]:
        # Only blocks that cannot be encrypted, since their tenant is unknown. The tier below copies all others, and
        # registers them in the same transfer: the bytes of a copy are made while it is made.
        tier = self._tier
        self._source, self._refs, self._contexts = source, refs, tier.contexts(keys)
        if not tier.coder.seals:
            return {}
        refused: dict[int, Exception] = await tier.off_thread(tier.coder.refusals, self._contexts)
        return refused

    async def _register(self, keys: Sequence[Key]) -> Sequence[Outcome]:
        assert self._source is not None
        encoding = self._tier.encoding(self._source, self._refs, self._contexts)
        self._source = None
        try:
            outcomes = list(await self._inner.transfer(encoding.as_source(), range(len(encoding.contexts))))
        except Exception:  # not a cancel: then a thread may still find damaged blocks, and none are settled
            encoding.copy.settle()
            raise
        encoding.copy.settle()
        self._tier.note_stored(encoding, outcomes)
        return outcomes
