"""The memory between a plugin and everybody else: plugins never see a source, nor a destination.

A plugin that does not answer may read and write for ever. What it was given is the host's own: a *run* of pages, which is used
again once the plugin has said that it is done, and never before. A run whose end is not proven stays in quarantine, mapped,
also when its tier is gone: memory that is given back under a plugin's feet would be somebody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..pages import Pages, new_pages
from ._errors import PluginFault

_quarantine: set[Run] = set()
"""Of this process. Keeps what is in it mapped."""


class Run:
    """Pages for one operation."""

    __slots__ = ("_all", "is_over", "pages", "staging")

    def __init__(self, staging: Staging, pages: Pages) -> None:
        self.staging: Staging = staging
        self._all = pages
        self.pages: Pages = pages
        """As many as were asked for."""
        self.is_over: Callable[[], bool] | None = None
        """In quarantine: whether it may be used again by now. ``None``: somebody will say."""

    def __repr__(self) -> str:
        return f"<run of {len(self._all)} pages>"

    def use(self, n: int) -> Run:
        """The first ``n`` pages of it."""
        self.pages = self._all.part(0, n)
        return self

    def room(self) -> int:
        """How many pages it has."""
        return len(self._all)

    def buffers(self, positions: Sequence[int] | None = None) -> list[memoryview]:
        """Some of its pages, or all, as writable buffers that keep the memory mapped."""
        return [self.pages[at] for at in (range(len(self.pages)) if positions is None else positions)]

    def give_back(self) -> None:
        """It is proven that nobody uses it any more."""
        _quarantine.discard(self)
        self.staging.take_back(self)

    def quarantine(self, is_over: Callable[[], bool] | None = None) -> None:
        """Somebody may use it still: until ``is_over``, or until it is given back."""
        self.is_over = is_over
        _quarantine.add(self)
        self.staging.lost.add(self)

    def free(self) -> None:
        """Whoever used it is done: it need not stay mapped for that. Called in any thread."""
        _quarantine.discard(self)


class Staging:
    """The runs of one tier.

    Args:
        page_bytes: size of every page.
        most_lost_bytes: how much may be in quarantine.
        spare: how many runs to keep for the next operation. The first touch of fresh memory costs ten times a copy.
    """

    def __init__(self, page_bytes: int, most_lost_bytes: int, spare: int = 4) -> None:
        self.page_bytes = page_bytes
        self._most_lost_bytes = most_lost_bytes
        self._spare: list[Run] = []
        self._most = spare
        self.lost: set[Run] = set()
        """In quarantine."""

    @property
    def quarantined_bytes(self) -> int:
        """How much memory is in quarantine."""
        self._sweep()
        return sum(run.room() for run in self.lost) * self.page_bytes

    def take(self, n: int) -> Run:
        """A run of ``n`` pages, whatever is in them.

        Raises:
            PluginFault: the plugin has been left too much memory that it has not given back.
        """
        if self.quarantined_bytes + n * self.page_bytes > self._most_lost_bytes and self.lost:
            raise PluginFault(
                f"{self.quarantined_bytes} bytes are in quarantine, since the plugin has not answered: "
                f"most_quarantined_bytes is {self._most_lost_bytes}"
            )
        fitting = [run for run in self._spare if run.room() >= n]
        if not fitting:
            return Run(self, new_pages(n, self.page_bytes))
        run = min(fitting, key=Run.room)
        self._spare.remove(run)
        return run.use(n)

    def take_back(self, run: Run) -> None:
        """It may be used again."""
        self.lost.discard(run)
        run.is_over = None
        self._spare.append(run)
        if len(self._spare) > self._most:
            self._spare.remove(min(self._spare, key=Run.room))

    def _sweep(self) -> None:
        """Take back what may be used again by now."""
        for run in [run for run in self.lost if run.is_over is not None and run.is_over()]:
            run.give_back()
