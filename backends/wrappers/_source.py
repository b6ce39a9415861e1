"""A wrapped tier as a source: its blocks go on from here to the next place, and are decoded on the way.

Rule 1. Whose a block is, is decided when it is upgraded; a block held for several tenants at once cannot be decrypted.
Rule 2. A block that cannot be decoded is found in a copy thread, and handled on the trio thread before its ref is released:
        so what the tier below forgets is the block that was read, and not what was stored under the same key since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from maru.kv_events import KeyWatcher

from .._errors import DamagedBlock
from ..abc import EVICTED, Key, StrongBlocks, WeakBlocks
from ..leaving import Listener, Spill
from ..pages import Pages
from ..pooled import hold_all
from ._chain import Context, Damaged
from ._coding import Undecodable, decode_pages

if TYPE_CHECKING:
    from ._tier import WrappedTier

SOURCE_METHODS: Final = ("weak", "strong", "upgrade", "release", "forget_held", "views", "copy_out")
SPILLING_METHODS: Final = ("on_evicted", "spill_to")
KEY_BOOK_METHODS: Final = ("list_keys", "watch_keys")


@attrs.define(eq=False)
class _Guarded:
    """A block below that is held, and how often."""

    context: Context
    count: int = 0


@attrs.frozen(eq=False)
class _NamesWatcher:
    """Tells a watcher of keys what is told of the names below."""

    watcher: KeyWatcher[Key]
    keys: Callable[[Sequence[Key]], list[Key]]

    def stored(self, names: Sequence[Key]) -> None:
        self.watcher.stored(self.keys(names))

    def removed(self, names: Sequence[Key]) -> None:
        self.watcher.removed(self.keys(names))


class DecodedSource:
    """The blocks of a wrapped tier as a :class:`~backends.abc.Source` of plain blocks. Its methods become the tier's own."""

    def __init__(self, tier: WrappedTier) -> None:
        self._tier = tier
        self._inner: Any = tier.inner
        self.guarded: dict[int, _Guarded] = {}
        """What is held below, by ref."""
        self._undecodable: dict[int, tuple[Context, Damaged]] = {}  # by ref: found in a copy thread

    def weak(self, keys: Sequence[Key], depths: Sequence[int | None] | None = None) -> WeakBlocks:
        """These blocks without a hold: what is gone by the time of the commit is reported as evicted."""
        tier: Any = self._tier
        return WeakBlocks(tier, keys, None, depths)

    def strong(self, keys: Sequence[Key], depths: Sequence[int | None] | None = None) -> StrongBlocks:
        """These blocks, each held by a ref that the caller must release.

        Raises:
            MissingKeys: not all of them are here; none is held then.
            DuplicateKeys: a key is named twice; none is held then.
        """
        tier: Any = self._tier
        return hold_all(tier, keys, depths)

    def upgrade(self, keys: Sequence[Key]) -> list[int]:
        """Weak to strong; see :class:`backends.abc.Source`."""
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
        """Drop one count of each ref."""
        self.handle_undecodable()
        for ref in refs:
            held = self.guarded.get(ref)
            if held is not None:
                held.count -= 1
                if not held.count:
                    del self.guarded[ref]
        self._inner.release(refs)

    def forget_held(self, keys: Sequence[Key], refs: Sequence[int]) -> None:
        """What these refs hold is not what was stored: it is no longer found under these keys."""
        self._forget([self.guarded[ref].context for ref in refs], refs)

    def views(self, refs: Sequence[int]) -> None:
        """None: no plain block lies in memory."""
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
                except DamagedBlock as exc:  # the tier below has found it, and forgets it itself
                    raise DamagedBlock(tier, tier.chain.key(exc.key), exc.reason) from None
                try:
                    decode_pages(tier.coder, contexts[done:end], stored, pages.part(done, end), scratch)
                except Undecodable as exc:
                    context, ref = contexts[done + exc.at], refs[done + exc.at]
                    self._undecodable[ref] = context, exc.why
                    raise DamagedBlock(tier, context.key, exc.why.reason) from None
                done = end

    def handle_undecodable(self) -> None:
        """Count and forget what copy threads could not decode: rule 2. On the trio thread."""
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

    # --- where the tier below tells of its evictions --------------------------------------------------------------

    def on_evicted(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with the keys that have made room, from now on, until the returned function is called."""
        end: Callable[[], None] = self._inner.on_evicted(lambda names: listener(self._keys(names)))
        return end

    def spill_to(self, spiller: Callable[[Spill], None]) -> Callable[[], None]:
        """Have ``spiller`` copy what is to make room elsewhere before it goes.

        Raises:
            ValueError: the tier has a spiller.
        """

        def spill(below: Spill) -> None:
            held = (0,) if below.held else ()
            spiller(Spill(self._keys(below.keys), held, lambda slots: self._keys(below.over()), below.depths))

        end: Callable[[], None] = self._inner.spill_to(spill)
        return end

    # --- where the tier below tells which keys it has -------------------------------------------------------------------

    def list_keys(self) -> list[Key]:
        """All keys that can be found, in any order."""
        return self._keys(self._inner.list_keys())

    def watch_keys(self, watcher: KeyWatcher[Key]) -> Callable[[], None]:
        """Tell ``watcher`` of every change from now on, until the returned function is called."""
        end: Callable[[], None] = self._inner.watch_keys(_NamesWatcher(watcher, self._keys))
        return end

    def _keys(self, names: Sequence[Key]) -> list[Key]:
        """The keys of these names, without those that were stored through another chain, or through none."""
        chain = self._tier.chain
        return [chain.key(name) for name in names if name.endswith(chain.id)]
