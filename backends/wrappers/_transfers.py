"""What a wrapped tier gives out: a lease, a reservation whose copy encodes its blocks, and the numbers of its chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from ..abc import Failed, Key, Outcome, ReadLease, Reservation, Source
from ._chain import Context

if TYPE_CHECKING:
    from ._chain import Context
    from ._coding import Encoding
    from ._tier import WrappedTier


@attrs.frozen
class WrapperStatistics:
    """A snapshot of one wrapped tier; counters count since it was made."""

    encoded: int
    """Blocks that were encoded and are in the tier now, or were when they were told to be."""
    plain_bytes: int
    """Bytes that were encoded, of those that were a duplicate in the end, too."""
    stored_bytes: int
    """Bytes they became, headers included. What of its slot a block leaves unused is not counted."""
    decoded: int
    """Blocks that were decoded and verified."""
    read_bytes: int
    """Stored bytes they were decoded from, as far as a load has read them."""
    missed: Mapping[str, int]
    """Blocks that the tier below had, and that could not be decoded, by reason: ``damaged``: not what was stored; ``tag``: not
    what was encrypted, or not under this key; ``foreign``: of another tenant; ``secret``: encrypted with a secret that is not
    here any more."""
    staging: int
    """Working memories taken from the system, in all: as many as copies have run at the same time."""

    @property
    def ratio(self) -> float:
        """Stored bytes for each plain one; 1.0 as long as nothing was encoded."""
        return self.stored_bytes / self.plain_bytes if self.plain_bytes else 1.0

    @property
    def bad_tags(self) -> int:
        """Blocks whose authentication failed: what was encrypted has been changed."""
        return self.missed.get("tag", 0)


@attrs.define
class Counters:
    """The numbers, on the trio thread."""

    encoded: int = 0
    plain_bytes: int = 0
    stored_bytes: int = 0
    decoded: int = 0
    read_bytes: int = 0
    missed: dict[str, int] = attrs.Factory(dict)

    def miss(self, reason: str) -> None:
        """One block could not be decoded."""
        self.missed[reason] = self.missed.get(reason, 0) + 1

    def snapshot(self, staging: int) -> WrapperStatistics:
        """An immutable copy."""
        return WrapperStatistics(
            self.encoded,
            self.plain_bytes,
            self.stored_bytes,
            self.decoded,
            self.read_bytes,
            dict(self.missed),
            staging,
        )


class WrappedLease:
    """A hold on the prefix of some keys. Made by :meth:`WrappedTier.pin`."""

    __slots__ = ("contexts", "inner", "keys", "tier")

    def __init__(self, tier: WrappedTier, contexts: Sequence[Context], inner: ReadLease) -> None:
        """Not to be called: a tier makes them."""
        self.tier: WrappedTier = tier
        self.contexts: Sequence[Context] = contexts
        """What is needed to decode each block, the tenant included: later claims change nothing for this read."""
        self.inner: ReadLease = inner
        """The hold on the encoded blocks."""
        self.keys: Sequence[Key] = [context.key for context in contexts]
        """What is held."""

    def __repr__(self) -> str:
        return f"<lease of {len(self.keys)} blocks in {self.tier!r}>"

    def forget(self, positions: Sequence[int]) -> None:
        """The blocks at these positions are not what was stored; see :class:`backends.abc.ForgettingLease`."""
        self.tier.forget(self, positions)

    async def release(self) -> None:
        """Let go. Idempotent; it has let go even when cancelled."""
        await self.inner.release()
        await self.tier.purge()

    async def __aenter__(self) -> WrappedLease:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.inner.__aexit__(None, None, None)
        await self.tier.purge()


class WrappedReservation:
    """Slots of the tier below for some keys. Made by :meth:`WrappedTier.reserve`."""

    __slots__ = ("_inner", "_tier", "_used", "granted")

    def __init__(self, tier: WrappedTier, keys: Sequence[Key], inner: Reservation) -> None:
        """Not to be called: a tier makes them."""
        self._tier = tier
        self._inner = inner
        self._used = False
        self.granted: Sequence[Key] = keys
        """The keys there is room for."""

    def __repr__(self) -> str:
        return f"<room for {len(self.granted)} blocks in {self._tier!r}>"

    def keep(self, keys: Sequence[Key]) -> None:
        """Give back the room of every granted key not in ``keys``, a subsequence of ``granted``. Never blocks."""
        if len(keys) != len(self.granted):
            self._inner.keep(self._tier.names(keys))
            self.granted = keys

    async def transfer(self, source: Source, refs: Sequence[int]) -> Sequence[Outcome]:
        """Encode the blocks of ``source`` and store them; see :class:`backends.abc.Reservation`.

        A block that its source knows to be damaged, or that cannot be encrypted, fails alone. Cancelled, it leaves at once,
        even with blocks still being encoded in a copy thread: a caller that quarantines it must not release it.

        Raises:
            ValueError: not one ref per granted key, or a second call.
            BlockSizeError: the source's blocks are of another size than the tier's.
            Unproven: the copy may still be going on.
        """
        tier, keys = self._tier, self.granted
        if self._used or len(refs) != len(keys):
            raise ValueError(f"a transfer takes one ref per kept block, once: {len(refs)} refs for {self!r}")
        tier.check_size(source.block_bytes)
        self._used = True
        contexts = tier.contexts(keys)
        refused = await self._refused(contexts)
        if not refused:
            return await self._store(tier.encoding(source, refs, contexts))
        good = [at for at in range(len(keys)) if at not in refused]
        self._inner.keep(tier.names([keys[at] for at in good]))
        encoding = tier.encoding(source, [refs[at] for at in good], [contexts[at] for at in good])
        stored = iter(await self._store(encoding) if good else ())
        return [Failed(refused[at]) if at in refused else next(stored) for at in range(len(keys))]

    def hold(self) -> None:
        """Hold what is stored until :meth:`release`, where the tier below can."""
        hold = getattr(self._inner, "hold", None)
        if hold is not None:
            hold()

    def note_depths(self, depths: Mapping[Key, int]) -> None:
        """Pass the depths on to the tier below, where it takes them."""
        note_depths = getattr(self._inner, "note_depths", None)
        if note_depths is not None:
            names = zip(self.granted, self._tier.names(self.granted), strict=True)
            note_depths({name: depths[key] for key, name in names if key in depths})

    def release(self) -> None:
        """Give back the room of what was not published. Idempotent; never blocks, never raises."""
        self._inner.release()

    async def _refused(self, contexts: Sequence[Context]) -> dict[int, Exception]:
        """Which blocks cannot be encrypted, since it is not known whose they are, by position."""
        tier = self._tier
        if not tier.coder.seals:
            return {}
        refused: dict[int, Exception] = await tier.off_thread(tier.coder.refusals, contexts)
        return refused

    async def _store(self, encoding: Encoding) -> list[Outcome]:
        try:
            outcomes = list(await self._inner.transfer(encoding.as_source(), range(len(encoding.contexts))))
        except Exception:
            encoding.copy.settle()
            raise
        encoding.copy.settle()
        self._tier.note_stored(encoding, outcomes)
        return outcomes
