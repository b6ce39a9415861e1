"""How a tier is wrapped: which kind it is then, and whether its slots are large enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from .._errors import BlockSizeError
from ..abc import ReadableTier, RoomRequest, Source, Tier
from ..leaving import SpillingTier
from ._chain import Chain, chain_id, check_order
from ._contract import Wrapper
from ._source import WrappedSourceTier, WrappedSpillingTier
from ._tier import WrappedRemoteTier, WrappedTier

_NEEDED: Final = ("reserve", "reserve_nowait", "contains", "pin", "load", "delete", "statistics")


def wrap(tier: ReadableTier, *wrappers: Wrapper, block_bytes: int) -> WrappedTier | WrappedRemoteTier:
    """The same tier for blocks that pass through these wrappers on their way in, and back on their way out.

    Of a tier that is read from as a :class:`~backends.abc.Source`, it is one as well; of a remote one, a remote one.

    Args:
        tier: whose slots hold at least :func:`slot_bytes`; it is this one's from now on.
        wrappers: in the order in which a plain block passes through them: what loses something, what compresses, what
            encrypts.
        block_bytes: size of every plain block.

    Raises:
        ChainError: no wrapper, one twice, or in an order that cannot be meant.
        BlockSizeError: the slots of the tier are too small.
        ValueError: a wrapper cannot encode blocks of this size.
        TypeError: this is no tier, or one that gives out its pages, as :class:`backends.maru.l1.MaruL1`.
    """
    missing = [method for method in _NEEDED if not hasattr(tier, method)]
    if missing:
        raise TypeError(f"{tier!r} cannot be wrapped: it has no {', '.join(missing)}")
    chain = Chain(wrappers, block_bytes)
    slot = _slot_of(tier, chain.slot_bytes)
    if not isinstance(tier, Tier):
        return WrappedRemoteTier(tier, chain, slot)
    if isinstance(tier, Source):
        return (WrappedSpillingTier if isinstance(tier, SpillingTier) else WrappedSourceTier)(tier, chain, slot)
    return WrappedTier(tier, chain, slot)


def slot_bytes(block_bytes: int, *wrappers: Wrapper) -> int:
    """How large the slots of a tier must be to hold blocks of this size in these wrappers, whatever is in them.

    Raises:
        ChainError: as :func:`wrap`.
        ValueError: a wrapper cannot encode blocks of this size.
    """
    return Chain(wrappers, block_bytes).slot_bytes


def layout_of(layout: str, wrappers: Sequence[Wrapper]) -> str:
    """The layout of blocks that were in these wrappers, for whoever makes their keys or fingerprints.

    What a lossy wrapper gives back is not what was computed, so it needs keys of its own, made with this as layout or salt. The
    same layout as before, if they lose nothing.

    Raises:
        ChainError: as :func:`wrap`.
    """
    check_order(wrappers)
    lossy = [wrapper for wrapper in wrappers if wrapper.lossy]
    return f"{layout}+lossy-{chain_id(lossy).hex()}" if lossy else layout


def _slot_of(tier: Any, needed: int) -> int:
    """The size of the tier's slots; of one that takes any size, what is needed."""
    has = getattr(tier, "block_bytes", 0)
    if has in (0, needed):
        return needed
    try:
        tier.reserve_nowait(RoomRequest((), needed, "fail")).release()
    except BlockSizeError as exc:
        if exc.expected_bytes < needed:
            raise
        return exc.expected_bytes
    return needed
