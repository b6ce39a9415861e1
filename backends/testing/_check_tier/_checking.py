"""The test itself: every promise, each on a tier of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, Final, TypeAlias

from ...abc import Key, Tier
from . import _reading as reading
from . import _room as room
from . import _storing as storing
from ._trying import BLOCKS, Case

MakeTier: TypeAlias = Callable[[int, int], Tier]
"""``make_tier(blocks, block_bytes)``: an empty tier for so many blocks of this size. Entered if it is an async context manager,
closed if it has a ``close``."""

_PROMISES: Final[tuple[Callable[[Case], Awaitable[None]], ...]] = (
    storing.stores_and_loads,
    storing.publishes_only_after_the_copy,
    storing.keeps_a_part,
    storing.first_writer_wins,
    room.grants_what_fits,
    room.waits_for_room,
    room.a_request_that_shrinks_keeps_its_turn,
    room.evicts_what_nobody_holds,
    room.refuses_what_cannot_fit,
    room.a_cancelled_wait_holds_nothing,
    reading.a_pin_holds,
    reading.a_hit_is_loaded_or_missed,
    reading.a_damaged_block_is_a_miss,
    storing.a_failing_source_leaves_nothing,
    storing.a_block_that_cannot_be_stored_fails,
    storing.what_a_source_knows_to_be_damaged_is_not_stored,
    reading.a_failing_destination_leaves_all,
    storing.a_cancelled_store_leaves_nothing,
    reading.a_cancelled_load_leaves_when_it_is_over,
    reading.async_means_checkpoint,
    reading.is_a_source,
    storing.tells_which_keys_it_has,
    storing.knows_the_depths_that_were_said,
)


async def check_tier(
    make_tier: MakeTier,
    *,
    block_bytes: int = 256,
    damage: Callable[[Any, Key], object] | None = None,
    spoil: Callable[[Any, Key], object] | None = None,
    take_away: Callable[[Any, Key], object] | None = None,
    any_block_size: bool = False,
    threads: bool = True,
) -> None:
    """Test every promise of :class:`backends.abc.Tier` on a tier of yours, and of :class:`backends.abc.Source` if it is one.

    One that has no ``contains_nowait`` is no :class:`backends.abc.Tier`: it may have to ask before it grants room, and what it
    is told may take a moment to arrive. All else it promises as well.

    A tier that declares ``capabilities`` (:class:`backends.abc.Capabilities`) is tried for what it declares, and for what
    it then answers instead.

    A tier that forgets a waiter makes it wait for ever: bound it with :func:`trio.fail_after`.

    Args:
        make_tier: called as ``make_tier(blocks, block_bytes)`` for each promise: an empty tier for exactly so many blocks
            of this size. It is entered, if it is an async context manager, and closed by its ``close``, if it has one.
        block_bytes: the size of the blocks to try it with.
        damage: called as ``damage(tier, key)``, and awaited if that makes sense: change a byte of a stored block behind the
            tier's back. Without it, what a tier does with a damaged block is not tried.
        spoil: the same: have storing this key fail, from now on. Without it, what a tier does then is not tried.
        take_away: the same: delete a stored block as another client would, which respects pins. Without it, what a
            hit is worth is not tried.
        any_block_size: the tier takes blocks of any size.
        threads: the tier copies in threads, or otherwise waits for copies so that it can leave them. Say ``False`` of one
            that copies in place. A copy that was left counts as over when the source is, and with it every copy thread of
            :mod:`backends.base.threads`: threads of your own must not write to a slot after that.

    Raises:
        AssertionError: a promise is not kept, and which.
    """
    for promise in _PROMISES:
        tier = make_tier(BLOCKS, block_bytes)
        case = Case(tier, block_bytes, any_block_size, threads, damage, spoil, take_away)
        try:
            async with AsyncExitStack() as stack:
                if hasattr(type(case.tier), "__aenter__"):
                    await stack.enter_async_context(case.tier)
                await promise(case)
                case.at_rest()
        except Exception as exc:
            exc.add_note(f"the promise: {promise.__name__.replace('_', ' ')}; the tier: {case.tier!r}")
            raise
        finally:
            close = getattr(case.tier, "close", None)
            if close is not None:
                close()
