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
"""Function that makes an empty tier: ``make_tier(blocks, block_bytes)``.

It is for so many blocks of this size. The tier is entered if it is an async context manager, closed if it has a
``close``.
"""

_PROMISES: Final[tuple[Callable[[Case], Awaitable[None]], ...]] = (
    storing.stores_and_loads,
    storing.publishes_only_after_the_copy,
    storing.keeps_a_part,
    storing.first_writer_wins,
    storing.of_two_copies_at_once_one_wins,
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
    storing.a_block_that_its_source_cannot_read_fails_alone,
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
    """Test every promise of :class:`backends.abc.Tier` on a tier.

    If it has a :attr:`~backends.abc.Tier.source`, the promises of :class:`backends.abc.Source` are tested, too. A tier
    that does not declare ``answers_at_once`` may have to ask before it grants room, and changes may take a moment to
    arrive there.

    The abilities that a tier declares in ``capabilities`` (:class:`backends.abc.Capabilities`) are tested, and the
    answers that are required without the others.

    A tier that forgets a waiter makes this wait for ever: bound it with :func:`trio.fail_after`.

    Args:
        make_tier: called as ``make_tier(blocks, block_bytes)`` for each promise: an empty tier for exactly so many blocks
            of this size. It is entered, if it is an async context manager, and closed by its ``close``, if it has one.
        block_bytes: the size of the blocks to try it with.
        damage: called as ``damage(tier, key)``, and awaited if it is async: it changes a byte of a stored block without
            the tier. Without it, damaged blocks are not tested.
        spoil: likewise: it makes the store of this key fail, from now on. Without it, failing stores are not tested.
        take_away: likewise: it deletes a stored block as another client would, which respects pins. Without it, pins
            are not tested against other clients.
        any_block_size: the tier takes blocks of any size.
        threads: the tier copies in threads, or otherwise waits for copies so that it can leave them. Pass ``False`` for
            one that copies in place. A copy that was left counts as over when the source is, and with it every copy
            thread of :mod:`backends.base.threads`: threads of your own must not write to a slot after that.

    Raises:
        AssertionError: a promise is not kept; the text names it.
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
