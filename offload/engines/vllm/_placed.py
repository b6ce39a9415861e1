"""Pages of tiers that are used in place until loaded. Pure.

They are verified first.

Each has a number below zero, which is used once. A page is found by its key as long as somebody holds it; with the last
page of those pinned together, the pin goes.

Rule 1. Once a step, a tier is asked whether it still has touch with its pages. Pages that it has lost are not found any
    more, and go once nobody holds them. Running loads are not affected: the copying worker checks again, after the
    copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import attrs

from backends.abc import Key

if TYPE_CHECKING:
    from backends.base.pages import Pages


class Placed(Protocol):
    """Blocks that are pinned together; see :class:`offload._engine.BlocksInPlace`."""

    @property
    def pages(self) -> Pages:
        """Addresses of the pages."""
        ...

    def holds(self) -> bool:
        """Return whether the pages still belong to the blocks."""
        ...

    def unchanged(self, positions: Sequence[int]) -> bool:
        """Return whether these pages are unchanged since they were verified."""
        ...


@attrs.define(eq=False)
class _Pin:
    """Pages that are pinned together."""

    blocks: Placed
    let_go: Callable[[], None]
    pages: int
    """Number of its pages that somebody holds."""
    looked_at: int
    """The step in which it was last checked."""
    lost: bool = False
    """Whether its tier has lost touch with it."""


@attrs.define(eq=False)
class _Page:
    """One page."""

    key: Key
    pin: _Pin
    position: int
    holders: int = 1


@attrs.define(eq=False)
class PlacedPages:
    """The pages of tiers that one instance holds."""

    most: int
    """Number of pages that may be held."""
    _pages: dict[int, _Page] = attrs.Factory(dict)
    _numbers: dict[Key, int] = attrs.Factory(dict)
    _unused: Iterable[int] = attrs.Factory(lambda: itertools.count(-2, -1))  # -1 stands for no place at all
    _steps: int = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._numbers

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def room(self) -> int:
        """Number of further pages that may be held."""
        return self.most - len(self._pages)

    def step(self) -> None:
        """Count a step that vLLM has planned."""
        self._steps += 1

    def add(self, keys: Sequence[Key], blocks: Placed, let_go: Callable[[], None]) -> list[int]:
        """Add keys that lie verified in the leading pages of ``blocks``.

        Returns their numbers, each held once.
        """
        if not keys:
            let_go()
            return []
        pin = _Pin(blocks, let_go, len(keys), self._steps)
        numbers = list(itertools.islice(self._unused, len(keys)))
        pages = (_Page(key, pin, at) for at, key in enumerate(keys))
        self._pages.update(zip(numbers, pages, strict=True))
        self._numbers.update(zip(keys, numbers, strict=True))
        return numbers

    def take(self, key: Key, *, looked_at: bool = False) -> int | None:
        """Hold the page of this key; ``None`` if there is none.

        With ``looked_at`` the caller has kept rule 1.
        """
        number = self._numbers.get(key)
        if number is None or not (looked_at or self.holds(number)):
            return None
        self._pages[number].holders += 1
        return number

    def holds(self, number: int) -> bool:
        """Return whether this page, which somebody holds, is unchanged: rule 1."""
        pin = self._pages[number].pin
        if pin.looked_at != self._steps and not pin.lost:
            pin.looked_at, pin.lost = self._steps, not pin.blocks.holds()
            if pin.lost:
                self._hide([number for number, page in self._pages.items() if page.pin is pin])
        return not pin.lost

    def release(self, numbers: Iterable[int]) -> None:
        """Release one hold of each."""
        for number in numbers:
            page = self._pages[number]
            page.holders -= 1
            if page.holders:
                continue
            self._hide((number,))
            del self._pages[number]
            page.pin.pages -= 1
            if not page.pin.pages:
                page.pin.let_go()

    def forget(self) -> None:
        """Make all pages unfindable; they go once nobody holds them."""
        self._numbers.clear()

    def where(self, numbers: Sequence[int]) -> Mapping[int, tuple[Placed, int]]:
        """Return the blocks and position of each place in a tier.

        Somebody must hold them.
        """
        pages = [(number, self._pages[number]) for number in numbers if number < 0]
        return {number: (page.pin.blocks, page.position) for number, page in pages}

    def _hide(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            key = self._pages[number].key
            if self._numbers.get(key) == number:
                del self._numbers[key]
