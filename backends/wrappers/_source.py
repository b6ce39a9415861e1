"""The other face of a wrapped tier: blocks go on from here to the next place, and are decoded on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from .._errors import DamagedBlock
from ..abc import EVICTED, Key, StrongBlocks, WeakBlocks
from ..leaving import Listener, Spill
from ..pages import Pages
from ..pooled import hold_all
from ._coding import Refused, decode_pages
from ._contract import Context, Damaged
from ._tier import WrappedTier


@attrs.define(eq=False)
class _Guarded:
    """A block below that is held, and by how many."""

    context: Context
    count: int = 0


class WrappedSourceTier(WrappedTier):
    """A :class:`~backends.abc.Tier` of encoded blocks that is a :class:`~backends.abc.Source` of plain ones as well."""

    inner: Any

    def __init__(self, *args: Any) -> None:
        """Not to be called: see :func:`wrap`."""
        super().__init__(*args)
        self._guarded: dict[int, _Guarded] = {}
        self._suspects: dict[
            int, tuple[Context, Damaged]
        ] = {}  # guard -> found by a thread; the trio thread forgets it

    def weak(self, keys: Sequence[Key]) -> WeakBlocks:
        """These blocks without a hold: what is gone by the time of the commit is reported as evicted."""
        return WeakBlocks(self, keys, None)

    def strong(self, keys: Sequence[Key]) -> StrongBlocks:
        """These blocks, each held by a guard that whoever gets the value must release.

        Raises:
            MissingKeys: not all of them are here; none is held then.
            DuplicateKeys: a key is named twice; none is held then.
        """
        return hold_all(self, keys)

    def upgrade(self, keys: Sequence[Key]) -> list[int]:
        """Weak to strong; see :class:`backends.abc.Source`. Whose the blocks are is decided now."""
        self._settle()
        guards: list[int] = self.inner.upgrade(self.names(keys))
        for at, (key, guard) in enumerate(zip(keys, guards, strict=True)):
            if guard == EVICTED:
                continue
            if key in self._condemned:
                self.inner.release([guard])
                guards[at] = EVICTED
                continue
            context = self.context(key)
            held = self._guarded.setdefault(guard, _Guarded(context))
            held.count += 1
            if held.context != context:  # one hold for several tenants is nobody's
                held.context = attrs.evolve(context, tenant=None)
        return guards

    def release(self, guards: Sequence[int]) -> None:
        """Drop one count of each guard."""
        self._settle()
        for guard in guards:
            held = self._guarded.get(guard)
            if held is not None:
                held.count -= 1
                if not held.count:
                    del self._guarded[guard]
        self.inner.release(guards)

    def forget_held(self, keys: Sequence[Key], guards: Sequence[int]) -> None:
        """What these guards hold is not what was stored: it is no longer found under these keys."""
        self._forget_held([self._guarded[guard].context for guard in guards], guards)

    def views(self, guards: Sequence[int]) -> None:
        """No plain block lies anywhere."""
        return

    def copy_out(self, guards: Sequence[int], pages: Pages) -> None:
        """Decode blocks, a few at a time.

        Raises:
            DamagedBlock: one of them cannot be decoded; it is no longer found once its guard is released.
        """
        contexts = [self._guarded[guard].context for guard in guards]
        done, n = 0, len(guards)
        with self.coder.staging.take() as scratch:
            while done < n:
                stored = scratch.portion(n - done, self.slot_bytes)
                end = done + len(stored)
                try:
                    self.inner.copy_out(guards[done:end], stored)
                except DamagedBlock as exc:  # the tier below has found it, and forgets it itself
                    raise DamagedBlock(self, self.chain.key(exc.key), exc.reason) from None
                try:
                    decode_pages(self.coder, contexts[done:end], stored, pages.part(done, end), scratch)
                except Refused as exc:
                    context, guard = contexts[done + exc.at], guards[done + exc.at]
                    self._suspects[guard] = context, exc.why
                    raise DamagedBlock(self, context.key, exc.why.reason) from None
                done = end

    def _settle(self) -> None:
        while self._suspects:  # before their guards are released: what is forgotten is what was read
            guard, (context, error) = self._suspects.popitem()
            self._counters.miss(error.reason)
            if not error.keep:
                self._forget_held([context], [guard])

    def _forget_held(self, contexts: Sequence[Context], guards: Sequence[int]) -> None:
        forget = getattr(self.inner, "forget_held", None)
        if forget is not None:
            forget(self.names([context.key for context in contexts]), guards)
        else:
            self._condemned.add(contexts)


class WrappedSpillingTier(WrappedSourceTier):
    """The same over a tier that tells of its evictions; see :class:`backends.leaving.SpillingTier`."""

    def on_evicted(self, listener: Listener) -> Callable[[], None]:
        """Tell ``listener`` which keys have made room, from now on, until the returned function is called."""
        end: Callable[[], None] = self.inner.on_evicted(lambda names: listener(self._keys(names)))
        return end

    def spill_to(self, spiller: Callable[[Spill], None]) -> Callable[[], None]:
        """Let ``spiller`` copy what is to make room elsewhere before it goes.

        Raises:
            ValueError: somebody does already.
        """

        def spill(below: Spill) -> None:
            held = (0,) if below.held else ()
            spiller(Spill(self._keys(below.keys), held, lambda slots: self._keys(below.over())))

        end: Callable[[], None] = self.inner.spill_to(spill)
        return end

    def _keys(self, names: Sequence[Key]) -> list[Key]:
        """What these are called here. What another chain has stored below, or nobody here, is not known here."""
        return [self.chain.key(name) for name in names if name.endswith(self.chain.id)]
