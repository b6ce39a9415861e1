"""Attribution of a copy's error to the tier or the other end.

A tier's copy calls its source or its destination, and passes on their errors as its own. So a tier behind a breaker gets a
proxy of the other end, which records the errors that this raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from backends.abc import Destination, Failed, Outcome, Source
from backends.base.forwarding import ForwardingDestination, ForwardingSource
from backends.base.pages import Pages
from maru.exception_groups import leaves

from .breaker import Verdict
from .faults import describe, judge_exception, judge_outcomes

T = TypeVar("T")


class ErrorAttribution:
    """Judges one copy by its errors, without those of the other end."""

    def __init__(self) -> None:
        self._errors: list[BaseException] = []  # several if a tier copies in several tasks

    def observe_destination(self, destination: Destination) -> Destination:
        """Return a front of the destination that records its errors."""
        return _ObservedDestination(destination, self._errors)

    def observe_source(self, source: Source) -> Source:
        """Return a front of the source that records its errors."""
        return _ObservedSource(source, self._errors)

    def is_of_other_end(self, error: BaseException) -> bool:
        """Return whether the other end raised or caused this error.

        For a group: whether it did for all of its errors.
        """
        return bool(self._errors) and all([self._has_led_to(leaf) for leaf in leaves(error)])

    def judge_exception(self, error: BaseException) -> tuple[Verdict, str]:
        """Return the verdict of a copy's exception, and the fault's description."""
        if self.is_of_other_end(error):
            return Verdict.SILENT, ""
        return judge_exception(error), describe(error)

    def judge_outcomes(self, outcomes: Sequence[Outcome]) -> tuple[Verdict, str]:
        """Return the verdict of a copy's outcomes, and the fault's description."""
        if not self._errors:
            return judge_outcomes(outcomes)
        return judge_outcomes(
            [one for one in outcomes if not (isinstance(one, Failed) and self.is_of_other_end(one.error))]
        )

    def _has_led_to(self, error: BaseException) -> bool:
        # A tier may wrap an error of the other end in one of its own, so the whole chain of causes is searched.
        recorded = [leaf for one in self._errors for leaf in leaves(one)]
        link: BaseException | None = error
        while link is not None:
            if any(leaf is one for leaf in leaves(link) for one in recorded):
                return True
            link = link.__cause__ or link.__context__
        return False


class _ObservedDestination(ForwardingDestination):
    """A destination whose errors are recorded."""

    __slots__ = ("_errors",)

    def __init__(self, inner: Destination, errors: list[BaseException]) -> None:
        super().__init__(inner)
        self._errors = errors

    def __repr__(self) -> str:
        return repr(self.inner)

    def views(self) -> Pages | None:
        return _recorded(self._errors, self.inner.views)

    def copy_in(self, start: int, pages: Pages) -> None:
        _recorded(self._errors, self.inner.copy_in, start, pages)

    def copy_in_and_sum(self, start: int, pages: Pages) -> list[int]:
        return _recorded(self._errors, self.inner.copy_in_and_sum, start, pages)


class _ObservedSource(ForwardingSource):
    """A source whose errors are recorded."""

    __slots__ = ("_errors",)

    def __init__(self, inner: Source, errors: list[BaseException]) -> None:
        super().__init__(inner)
        self._errors = errors

    def __repr__(self) -> str:
        return repr(self.inner)

    def views(self, refs: Sequence[int]) -> Pages | None:
        return _recorded(self._errors, self.inner.views, refs)

    def copy_out(self, refs: Sequence[int], pages: Pages) -> None:
        _recorded(self._errors, self.inner.copy_out, refs, pages)


def _recorded(errors: list[BaseException], call: Callable[..., T], *args: Any) -> T:
    """Call, and record an error before it is raised."""
    try:
        return call(*args)
    except BaseException as error:
        errors.append(error)
        raise
