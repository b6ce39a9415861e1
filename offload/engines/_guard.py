"""The guard of an adapter, which keeps exceptions from an inference engine.

Only exceptions that the interface names pass.

A hook that raises is answered as if nothing were cached. The fault is logged once, and counted. The hook's entry in the
table also cleans up, so that no request waits for ever and no block holds other bytes than its key names.

Rule 1. Each public method of an adapter has an entry: one without is an error when the class is made.
Rule 2. Every ``Exception`` is answered, unless the entry names it. ``SystemExit`` and ``KeyboardInterrupt`` pass, since
    engines end by them, once the entry has cleaned up.
Rule 3. An answer never claims success for something that failed. So the cleanup is tried twice, and its exception
    passes if it raises both times.
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
"""A function that returns the answer for a hook that raised.

It is called with the adapter and the hook's arguments, by position if possible.
"""

_log = logging.getLogger("offload.engines")

GUARD_ATTRIBUTE: Final = "__offload_hook__"
"""The entry of a guarded method, for tests."""


@attrs.frozen
class Hook:
    """The answer for a hook that raised."""

    answer: Answer
    """Returns the answer that means nothing is cached."""
    put_right: Answer | None = None
    """Cleanup before the answer, and before an exception that passes."""
    passes: tuple[type[BaseException], ...] = ()
    """Exceptions that the interface allows the hook to raise."""


def nothing(*args: object, **kwargs: object) -> None:
    """Return ``None``."""


NOTHING: Final = Hook(nothing)
PASSES: Final = Hook(nothing, passes=(Exception,))
"""The entry of a method that may raise.

It is called at the start, or its interface allows it to raise.
"""


def guarded(hooks: Mapping[str, Hook], logger: logging.Logger = _log) -> Callable[[C], C]:
    """Guard all public methods of a class.

    Args:
        hooks: an entry for each.
        logger: logs the first fault of each hook.

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
            raise TypeError(f"the guard of {cls.__name__} must name exactly its hooks, not these: {different}")
        for name, method in methods.items():
            setattr(cls, name, _guard(method, hooks[name], cls.__name__, logger))
        return cls

    return guard


def guard_faults(adapter: Any, logger: logging.Logger = _log) -> FaultLog:
    """Return the fault log of an adapter's hooks."""
    faults: FaultLog | None = vars(adapter).get("_guard_faults")
    if faults is None:
        faults = FaultLog(type(adapter).__name__, logger)
        vars(adapter)["_guard_faults"] = faults
    return faults


def insist(function: Callable[[], None]) -> None:
    """Call a function that must run, such as a completion callback.

    Retry once if it raises.
    """
    try:
        function()
    except Exception:
        function()


def _guard(method: Callable[..., Any], hook: Hook, owner: str, logger: logging.Logger) -> Callable[..., Any]:
    signature = inspect.signature(method)

    def in_order(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return the arguments by position, as answers take them."""
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # the wrong arguments are why the hook raised
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
                with contextlib.suppress(Exception):  # the exception that passes is the one to report
                    insist(functools.partial(hook.put_right, *ordered, **named))
            raise

    setattr(guard, GUARD_ATTRIBUTE, hook)
    return guard
