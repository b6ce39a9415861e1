"""A wrapped tier as a source of decoded blocks.

Blocks are decoded while they are copied to another tier.

Rule 1. The tenant of a block is decided when it is upgraded; a block held for several tenants at once cannot be
        decrypted.
Rule 2. A block that cannot be decoded is found in a copy thread, and handled on the trio thread before its ref is
        released: so the tier below drops the block that was read, and not a new one under the same key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from .._errors import DamagedBlock
from ..abc import EVICTED, Key, Source
from ..base.pages import Pages
from ._chain import Context, Damaged
from ._coding import Undecodable, decode_pages

if TYPE_CHECKING:
    from ._tier import WrappedTier


@attrs.define(eq=False)
class _Guarded:
    """A held block of the tier below, with its ref count."""

    context: Context
    count: int = 0


class DecodedSource(Source):
    """A wrapped tier's blocks as a source of plain blocks.

    See :class:`~backends.abc.Source`.
    """

    def __init__(self, tier: WrappedTier, inner: Source) -> None:
        self._tier = tier
        self._inner = inner
        self.guarded: dict[int, _Guarded] = {}
        """Held blocks of the tier below, by ref."""
        self._undecodable: dict[int, tuple[Context, Damaged]] = {}  # by ref: found in a copy thread

    def __repr__(self) -> str:
        return f"<blocks of {self._tier!r}>"

    @property
    def block_bytes(self) -> int:
        """Size of every plain block, in bytes."""
        return self._tier.block_bytes

    def upgrade(self, keys: Sequence[Key]) -> list[int]:
        """Take a ref for each block; see :class:`backends.abc.Source`."""
        tier = self._tier
        self.handle_undecodable()
        refs = self._inner.upgrade(tier.names(keys))
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

    def forget_held(self, keys: Sequence[Key], refs: Sequence[int]) -> bool:
        """Drop the damaged blocks of these refs.

        They are no longer found under these keys.
        """
        self._forget([self.guarded[ref].context for ref in refs], refs)
        return True

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
        """Count and drop blocks that could not be decoded: rule 2.

        Copy threads have found them. On the trio thread.
        """
        while self._undecodable:
            ref, (context, error) = self._undecodable.popitem()
            self._tier.counters.miss(error.reason)
            if not error.keep:
                self._forget([context], [ref])

    def _forget(self, contexts: Sequence[Context], refs: Sequence[int]) -> None:
        if not self._inner.forget_held(self._tier.names([context.key for context in contexts]), refs):
            self._tier.damaged.add(contexts)
