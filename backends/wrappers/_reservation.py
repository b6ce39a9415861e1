"""Room for some blocks in a wrapped tier: their copy encodes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..abc import Failed, Key, Outcome, Reservation, Source

if TYPE_CHECKING:
    from ._coding import Encoding
    from ._contract import Context
    from ._tier import WrappedPlace


class WrappedReservation:
    """Slots of the tier below for some keys. Made by :meth:`WrappedPlace.reserve`."""

    __slots__ = ("_inner", "_tier", "_used", "granted")

    def __init__(self, tier: WrappedPlace, keys: Sequence[Key], inner: Reservation) -> None:
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

    async def transfer(self, source: Source, guards: Sequence[int]) -> Sequence[Outcome]:
        """Encode the blocks of ``source`` and store them; see :class:`backends.abc.Reservation`.

        A block that its source knows to be damaged, or that cannot be encrypted, fails alone. Cancelled, it leaves at once,
        even with blocks still being encoded in a copy thread: whoever quarantines it does not release it.

        Raises:
            ValueError: not one guard per granted key, or a second call.
            BlockSizeError: the source's blocks are of another size than the tier's.
            Unproven: the copy may still be going on.
        """
        tier, keys = self._tier, self.granted
        if self._used or len(guards) != len(keys):
            raise ValueError(f"a transfer takes one guard per kept block, once: {len(guards)} guards for {self!r}")
        tier.check_size(source.block_bytes)
        self._used = True
        contexts = tier.contexts(keys)
        refused = await self._refused(contexts)
        if not refused:
            return await self._store(tier.encoding(source, guards, contexts))
        good = [at for at in range(len(keys)) if at not in refused]
        self._inner.keep(tier.names([keys[at] for at in good]))
        encoding = tier.encoding(source, [guards[at] for at in good], [contexts[at] for at in good])
        stored = iter(await self._store(encoding) if good else ())
        return [Failed(refused[at]) if at in refused else next(stored) for at in range(len(keys))]

    def hold(self) -> None:
        """Hold what is stored until :meth:`release`, where the tier below can."""
        hold = getattr(self._inner, "hold", None)
        if hold is not None:
            hold()

    def release(self) -> None:
        """Give back the room of what was not published. Idempotent; never blocks, never raises."""
        self._inner.release()

    async def _refused(self, contexts: Sequence[Context]) -> dict[int, Exception]:
        """Which blocks cannot be encrypted, since nobody knows whose they are."""
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
        self._tier.stored(encoding, outcomes)
        return outcomes
