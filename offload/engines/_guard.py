"""The guard at the face of an adapter: an inference engine sees no exception of ours, but what its interface names.

A hook that raises is answered as if nothing were cached. That is logged once, and counted. What the answer must put right, so
that no request waits for ever and no block holds other bytes than its key says, the hook's entry in the table does.

Rule 1. Each public method of an adapter has an entry: one without is an error when the class is made.
Rule 2. Every ``Exception`` is answered, unless the entry names it. ``SystemExit`` and ``KeyboardInterrupt`` pass, since engines
        end by them, once the entry has put things right.
Rule 3. An answer is never that something went well that did not. So what puts things right is tried twice, and passes where it
        raises both times.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, Final, TypeAlias, TypeVar

import attrs

from ._faults import FaultLog

C = TypeVar("C", bound=type)

Answer: TypeAlias = Callable[..., Any]
"""Called with the adapter and the arguments of the hook, by position where that can be. Returns the hook's answer."""

_log = logging.getLogger("offload.engines")

GUARD_ATTRIBUTE: Final = "__offload_hook__"
"""The entry of a guarded method, for tests."""


@attrs.frozen
class Hook:
    """How a hook that raised is answered."""

    answer: Answer
    """Answers as if nothing were cached."""
    put_right: Answer | None = None
    """Called before the answer, and before an exception that passes."""
    passes: tuple[type[BaseException], ...] = ()
    """Exceptions that the interface names."""


def nothing(*args: object, **kwargs: object) -> None:
    """Answer ``None``."""


NOTHING: Final = Hook(nothing)
PASSES: Final = Hook(nothing, passes=(Exception,))
"""The entry of a method that may raise: it is called at the start, or its interface says so."""


def guarded(hooks: Mapping[str, Hook], logger: logging.Logger = _log) -> Callable[[C], C]:
    """Guard all public methods of a class.

    Args:
        hooks: an entry for each.
        logger: where the first fault of each hook is logged.

    Raises:
        TypeError: a public method has no entry, or an entry no method.
    """

    def guard(cls: C) -> C:
        methods = {
            name: method
            for name, method in vars(cls).items()
            if isinstance(method, FunctionType) and not name.startswith("_")
        }
        if methods.keys() != hooks.keys():
            different = ", ".join(sorted(methods.keys() ^ hooks.keys()))
            raise TypeError(f"the guard of {cls.__name__} must say how exactly its hooks are answered: {different}")
        for name, method in methods.items():
            setattr(cls, name, _guard(method, hooks[name], cls.__name__, logger))
        return cls

    return guard


def guard_faults(adapter: Any, logger: logging.Logger = _log) -> FaultLog:
    """Return the faults of an adapter's hooks."""
    faults: FaultLog | None = vars(adapter).get("_guard_faults")
    if faults is None:
        faults = FaultLog(type(adapter).__name__, logger)
        vars(adapter)["_guard_faults"] = faults
    return faults


def insist(function: Callable[[], None]) -> None:
    """Call what has to be done, such as to tell an engine that something has ended; once more if it raises."""
    try:
        function()
    except Exception:
        function()


def _guard(method: Callable[..., Any], hook: Hook, owner: str, logger: logging.Logger) -> Callable[..., Any]:
    signature = inspect.signature(method)

    def in_order(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return arguments by position, as answers take them, however the engine has passed them."""
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # it is that which was raised
            return args, kwargs
        return bound.args, bound.kwargs

    @functools.wraps(method)
    def guard(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            ordered, named = in_order(self, *args, **kwargs)
            if isinstance(error, Exception) and not isinstance(error, hook.passes):
                with contextlib.suppress(Exception):  # without memory for a count, the answer still counts
                    guard_faults(self, logger).note(method.__name__, error)
                if hook.put_right is not None:
                    insist(functools.partial(hook.put_right, *ordered, **named))
                return hook.answer(*ordered, **named)
            if hook.put_right is not None:
                with contextlib.suppress(Exception):  # the one that passes says why
                    insist(functools.partial(hook.put_right, *ordered, **named))
            raise

    setattr(guard, GUARD_ATTRIBUTE, hook)
    return guard
