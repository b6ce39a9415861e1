"""A wrapped tier as a source: its blocks are decoded while they are copied to another tier.

Rule 1. The tenant of a block is decided when it is upgraded; a block held for several tenants at once cannot be decrypted.
Rule 2. A block that cannot be decoded is found in a copy thread, and handled on the trio thread before its ref is released: so
        the tier below drops the block that was read, and not a new one under the same key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from maru.kv_events import KeyWatcher

from .._errors import DamagedBlock
from ..abc import EVICTED, Key, StrongBlocks, WeakBlocks
from ..base.leaving import Listener, Spill
from ..base.pages import Pages
from ..base.pooled import hold_all
from ._chain import Context, Damaged
from ._coding import Undecodable, decode_pages

if TYPE_CHECKING:
    from ._tier import WrappedTier

SOURCE_METHODS: Final = ("weak", "strong", "upgrade", "release", "forget_held", "views", "copy_out")
SPILLING_METHODS: Final = ("on_evicted", "spill_to")
KEY_BOOK_METHODS: Final = ("list_keys", "watch_keys")


@attrs.define(eq=False)
class _Guarded:
    """A held block of the tier below, with the count of its refs."""

    context: Context
    count: int = 0


@attrs.frozen(eq=False)
class _NamesWatcher:
    """Translates the names of stored blocks into keys for a watcher."""

    watcher: KeyWatcher[Key]
    keys: Callable[[Sequence[Key]], list[Key]]

    def stored(self, names: Sequence[Key]) -> None:
        self.watcher.stored(self.keys(names))

    def removed(self, names: Sequence[Key]) -> None:
        self.watcher.removed(self.keys(names))


class DecodedSource:
    """The blocks of a wrapped tier as a :class:`~backends.abc.Source` of plain blocks. The tier takes over its methods."""

    def __init__(self, tier: WrappedTier) -> None:
        self._tier = tier
        self._inner: Any = tier.inner
        self.guarded: dict[int, _Guarded] = {}
        """The held blocks of the tier below, by ref."""
        self._undecodable: dict[int, tuple[Context, Damaged]] = {}  # by ref: found in a copy thread

    def weak(self, keys: Sequence[Key], depths: Sequence[int | None] | None = None) -> WeakBlocks:
        """These blocks without refs: those that are gone at the commit are reported as evicted."""
        tier: Any = self._tier
        return WeakBlocks(tier, keys, None, depths)

    def strong(self, keys: Sequence[Key], depths: Sequence[int | None] | None = None) -> StrongBlocks:
        """These blocks, each with a ref that the caller must release.

        Raises:
            MissingKeys: not all of them are here; none is held then.
            DuplicateKeys: a key is named twice; none is held then.
        """
        tier: Any = self._tier
        return hold_all(tier, keys, depths)

    def upgrade(self, keys: Sequence[Key]) -> list[int]:
        """Take a ref for each block; see :class:`backends.abc.Source`."""
        tier = self._tier
        self.handle_undecodable()
        refs: list[int] = self._inner.upgrade(tier.names(keys))
        for at, (key, ref) in enumerate(zip(keys, refs, strict=True)):
            if ref == EVICTED:
                continue
            if key in tier.damaged:
                self._inner.release([ref])
                refs[at] = EVICTED
                continue
            context = tier.context(key)
            held = self.guarded.setdefault(ref, _Guarded(context))
            held.count += 1
            if held.context != context:  # rule 1
                held.context = attrs.evolve(context, tenant=None)
        return refs

    def release(self, refs: Sequence[int]) -> None:
        """Release one count of each ref."""
        self.handle_undecodable()
        for ref in refs:
            held = self.guarded.get(ref)
            if held is not None:
                held.count -= 1
                if not held.count:
                    del self.guarded[ref]
        self._inner.release(refs)

    def forget_held(self, keys: Sequence[Key], refs: Sequence[int]) -> None:
        """Drop the damaged blocks of these refs: they are no longer found under these keys."""
        self._forget([self.guarded[ref].context for ref in refs], refs)

    def views(self, refs: Sequence[int]) -> None:
        """None: plain blocks are not in memory."""
        return

    def copy_out(self, refs: Sequence[int], pages: Pages) -> None:
        """Decode blocks, a few at a time. In a copy thread.

        Raises:
            DamagedBlock: one of them cannot be decoded; it is no longer found once its ref is released.
        """
        tier = self._tier
        contexts = [self.guarded[ref].context for ref in refs]
        done, n = 0, len(refs)
        with tier.coder.staging.take() as scratch:
            while done < n:
                stored = scratch.portion(n - done, tier.slot_bytes)
                end = done + len(stored)
                try:
                    self._inner.copy_out(refs[done:end], stored)
                except DamagedBlock as exc:  # the tier below has found it, and drops it itself
                    raise DamagedBlock(tier, tier.chain.key(exc.key), exc.reason) from None
                try:
                    decode_pages(tier.coder, contexts[done:end], stored, pages.part(done, end), scratch)
                except Undecodable as exc:
                    context, ref = contexts[done + exc.at], refs[done + exc.at]
                    self._undecodable[ref] = context, exc.why
                    raise DamagedBlock(tier, context.key, exc.why.reason) from None
                done = end

    def handle_undecodable(self) -> None:
        """Count and drop the blocks that copy threads could not decode: rule 2. On the trio thread."""
        while self._undecodable:
            ref, (context, error) = self._undecodable.popitem()
            self._tier.counters.miss(error.reason)
            if not error.keep:
                self._forget([context], [ref])

    def _forget(self, contexts: Sequence[Context], refs: Sequence[int]) -> None:
        forget = getattr(self._inner, "forget_held", None)
        if forget is not None:
            forget(self._tier.names([context.key for context in contexts]), refs)
        else:
            self._tier.damaged.add(contexts)

    # --- where the tier below reports its evictions ---------------------------------------------------------------

    def on_evicted(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with evicted keys from now on, until the returned function is called."""
        end: Callable[[], None] = self._inner.on_evicted(lambda names: listener(self._keys(names)))
        return end

    def spill_to(self, spiller: Callable[[Spill], None]) -> Callable[[], None]:
        """Let ``spiller`` copy victims elsewhere before they go.

        Raises:
            ValueError: the tier has a spiller.
        """

        def spill(below: Spill) -> None:
            held = (0,) if below.held else ()
            spiller(Spill(self._keys(below.keys), held, lambda slots: self._keys(below.over()), below.depths))

        end: Callable[[], None] = self._inner.spill_to(spill)
        return end

    # --- where the tier below knows its keys ----------------------------------------------------------------------------

    def list_keys(self) -> list[Key]:
        """All keys that are stored, in any order."""
        return self._keys(self._inner.list_keys())

    def watch_keys(self, watcher: KeyWatcher[Key]) -> Callable[[], None]:
        """Report every change to ``watcher`` from now on, until the returned function is called."""
        end: Callable[[], None] = self._inner.watch_keys(_NamesWatcher(watcher, self._keys))
        return end

    def _keys(self, names: Sequence[Key]) -> list[Key]:
        """The keys of these names, without those that were stored through another chain, or without one."""
        chain = self._tier.chain
        return [chain.key(name) for name in names if name.endswith(chain.id)]
