"""A hold on pages of a page store, for a pipeline.

A tier of this process is a source: the pipeline takes a ref of each block at its commit, without waiting. A page store
(:attr:`backends.abc.Tier.held_pages`) has to be asked, which takes a message, and may find a block gone. So its blocks
enter a pipeline as weak ones, and the hold on them is their precondition:

    admission -> awaiting: pin the passed blocks -> batching -> transfer: upgrade, copy -> settled: released

Rule 1. Held pages stay held until their container has settled, whatever its end; a copy has refs of its own.
Rule 2. A block that is gone is left out, and counts as evicted at the upgrade.
Rule 3. A tier that does not answer fails the container. That does not mean that its blocks are gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from backends.abc import Source, StrongBlocks, Tier

from ..abc import Precondition

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.abc import HeldSource

    from .container import OffloadContainer


def held_pages_of(place: object) -> HeldSource | None:
    """Return the held pages of a page store, or ``None``.

    The page store may have a breaker in front of it. ``None`` for any other place.
    """
    return place.held_pages if isinstance(place, Tier) else None


def origin_of(place: Source | Tier) -> Source:
    """Return the source of a pipeline that starts at this place.

    For a tier these are its blocks, or, for a page store, its held pages.

    Raises:
        TypeError: it is no source, or a tier that cannot be read so.
    """
    source: object = place
    if isinstance(place, Tier):
        source = place.source if place.held_pages is None else place.held_pages  # an empty source is false
    if not isinstance(source, Source):
        raise TypeError(f"no pipeline can start at {place!r}: it is neither a backends.abc.Source nor a tier with one")
    return source


class PageHold(Precondition):
    """A precondition that holds once the pages of a container are held.

    They are released with the other resources of the container.

    Args:
        tier: the page store, asked through its breaker, so that it cannot take for ever.

    Attributes:
        container: the container, to be set before its stages run.
    """

    def __init__(self, tier: Tier) -> None:
        self.container: OffloadContainer | None = None
        self._tier = tier
        self._pages = cast("HeldSource", origin_of(tier))

    def is_set(self) -> bool:
        """Return False: the tier has to be asked."""
        return False

    async def wait(self) -> None:
        """Hold the pages that are stored.

        If this is cancelled, or the tier does not answer, none is held.
        """
        container = self.container
        assert container is not None
        held: list[StrongBlocks] = []
        release = _releasing(held)
        try:
            wanted = list(container.keys)
            while wanted:
                held.append(self._pages.take((await self._tier.pin(wanted)).bare))
                # A pin ends at the first missing block. For the blocks after it, the tier is asked which ones it has.
                wanted = wanted[len(held[-1]) + 1 :]
                if wanted:
                    there = await self._tier.contains(wanted)
                    wanted = [key for key in wanted if key in there]
        except BaseException:
            release()
            raise
        container.hold(release)


def _releasing(held: list[StrongBlocks]) -> Callable[[], None]:
    def release() -> None:
        while held:
            held.pop().release()

    return release
