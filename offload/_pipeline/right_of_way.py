"""Who goes first, loads or stores? Pure: what is under way and the time go in, a decision comes out.

Rule 1. A load never waits. What it may find in its way are the store batches that were copying when it began.
Rule 2. While a load is under way no other batch starts: it *stands back*, in line.
Rule 3. Whoever has stood back for ``patience`` goes all the same, one at a time: the first in line, and the next one when the
        copy of that one is over. So loads that never end do not starve stores, and where no load is under way before it, one
        that is shorter than ``patience`` meets no batch that began after it.
Rule 4. When the last load is over, all may go.
"""

from __future__ import annotations

from collections import OrderedDict

import attrs


@attrs.define(eq=False)
class Store:
    """A store batch that is about to start, or has started."""

    since: float
    """When it began to stand back, in seconds."""


@attrs.define(eq=False)
class RightOfWay:
    """Counts loads, keeps the line of those that stand back, and decides. There is no other place that decides."""

    patience: float
    """How long a store stands back at most, in seconds, where nobody before it does."""
    loads: int = 0
    """Loads under way."""
    exception: Store | None = None
    """The one store that was let go before loads that are, or were, under way. It is still copying."""
    line: OrderedDict[Store, None] = attrs.Factory(OrderedDict)
    """Those that stand back, longest first."""

    def join(self, store: Store) -> None:
        """Stand back, behind all others."""
        self.line[store] = None

    def may_go(self, store: Store, now: float) -> bool:
        """Whether this one may start now. If so, it has left the line, and :meth:`over` is called when its copy is over."""
        if self.loads:
            if self.exception is not None or self.first is not store or now < store.since + self.patience:
                return False
            self.exception = store
        self.line.pop(store, None)
        return True

    def looks_again(self, store: Store) -> float | None:
        """When this one may go by the passing of time alone; ``None``: only when something else happens."""
        return store.since + self.patience if self.exception is None and self.first is store else None

    @property
    def first(self) -> Store | None:
        """Whoever has stood back for longest."""
        return next(iter(self.line), None)

    def leave(self, store: Store) -> None:
        """It does not want to start any more."""
        self.line.pop(store, None)

    def over(self, store: Store) -> None:
        """Its copy is over, or never began. Idempotent."""
        if self.exception is store:
            self.exception = None
