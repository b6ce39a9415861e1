"""Whose fault is it? A copy has two ends, and an error of the other one is none of the tier's.

A tier's copy calls its source, or its destination, and lets their errors through as its own. So a guarded tier is given a
stand-in that notes them. It passes on all else that the real one has, checksums above all
(:class:`backends.abc.ChecksummedSource`), and passes for it (``isinstance`` asks ``__class__``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from backends.abc import Destination, Failed, Outcome, Source
from backends.pages import Pages
from maru.exception_groups import leaves


class _Witness:
    """A place, and whether it raised."""

    def __init__(self, place: Any) -> None:
        self._place = place
        self._errors: list[BaseException] = []  # several, where a tier copies in several tasks

    def __repr__(self) -> str:
        return repr(self._place)

    def _kind(self) -> Any:
        return type(self._place)

    __class__: Any = property(_kind)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._place, name)

    @property
    def block_bytes(self) -> int:
        return self._place.block_bytes  # type: ignore[no-any-return]

    def views(self, *guards: Sequence[int]) -> Pages | None:
        try:
            return self._place.views(*guards)  # type: ignore[no-any-return]
        except BaseException as error:
            self._errors.append(error)
            raise

    def is_to_blame(self, error: BaseException) -> bool:
        """Whether this error, or what led to it, is the place's own. Of a group, whether all that is in it is."""
        return bool(self._errors) and all([self._has_led_to(leaf) for leaf in leaves(error)])

    def _has_led_to(self, error: BaseException) -> bool:
        own = [leaf for one in self._errors for leaf in leaves(one)]
        seen: BaseException | None = error
        while seen is not None:
            if any(leaf is one for leaf in leaves(seen) for one in own):
                return True
            seen = seen.__cause__ or seen.__context__
        return False

    def not_to_blame(self, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        """Those outcomes that are not failures of the place's own."""
        if not self._errors:
            return outcomes
        return [one for one in outcomes if not (isinstance(one, Failed) and self.is_to_blame(one.error))]


class SourceWitness(_Witness):
    """A :class:`~backends.abc.Source`, as a guarded tier sees it."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)

    @property
    def as_source(self) -> Source:
        """What the tier is given."""
        source: Any = self
        return source  # type: ignore[no-any-return]

    def copy_out(self, guards: Sequence[int], pages: Pages) -> None:
        try:
            self._place.copy_out(guards, pages)
        except BaseException as error:
            self._errors.append(error)
            raise


class DestinationWitness(_Witness):
    """A :class:`~backends.abc.Destination`, as a guarded tier sees it."""

    def __init__(self, destination: Destination) -> None:
        super().__init__(destination)

    @property
    def as_destination(self) -> Destination:
        """What the tier is given."""
        destination: Any = self
        return destination  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return len(self._place)

    def copy_in(self, start: int, pages: Pages) -> None:
        try:
            self._place.copy_in(start, pages)
        except BaseException as error:
            self._errors.append(error)
            raise
