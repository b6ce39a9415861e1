"""Planted faults: the tests of a promise must find a fault that breaks it. All of them are here, and nowhere in the packages.

A fault is a function that takes a patch and replaces names of the packages by others that do something wrong. A patch has
``setattr`` and ``setitem``: a test's ``monkeypatch``, or :class:`ForGood` in a process that is going to end.

    python -m tests.support.planted        each fault, and the names that it replaces

The modules hold the faults by what they are planted in; ``test_planted.py`` and ``test_*_planted.py`` in the folders of tests
say which test is to find which. A fault whose names have moved is found by ``tests/maru/test_planted.py`` at once.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

AREAS = ("breaker", "daemon", "device", "engine", "l1", "maru", "pipeline", "shadow", "wrappers")

Fault: TypeAlias = Callable[[Any], None]


class ForGood:
    """In the place of ``monkeypatch``, in a process that is going to end."""

    def setattr(self, target: Any, name: str, value: Any) -> None:
        setattr(target, name, value)

    def setitem(self, target: Any, key: Any, value: Any) -> None:
        target[key] = value


class Listing:
    """In the place of ``monkeypatch``: replaces nothing, and notes what would be replaced."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def setattr(self, target: Any, name: str, value: Any) -> None:
        getattr(target, name)  # AttributeError: it has moved, and the fault would change nothing
        where = target.__name__ if inspect.ismodule(target) else f"{target.__module__}.{target.__qualname__}"
        self.names.append(f"{where}.{name}")

    def setitem(self, target: Any, key: Any, value: Any) -> None:
        self.names.append(f"{_name_of(target)}[{key!r}]")


def _name_of(table: Any) -> str:
    """What a table is called, in whichever module has it."""
    return next(
        f"{module.__name__}.{name}"
        for module in list(sys.modules.values())
        if module.__name__.startswith(("offload", "backends", "maru", "tests"))
        for name, value in vars(module).items()
        if value is table
    )


def faults(area: str) -> Iterator[Fault]:
    """All faults of one module, in its order."""
    module = importlib.import_module(f"{__name__}.{area}")
    for name, fault in vars(module).items():
        if inspect.isfunction(fault) and fault.__module__ == module.__name__ and not name.startswith("_"):
            yield fault


def replaced_by(fault: Fault) -> list[str]:
    """The names that a fault replaces.

    Raises:
        AttributeError, ImportError: one of them is not there.
    """
    listing = Listing()
    fault(listing)
    return listing.names


def plant(name: str) -> None:
    """Plant a fault of :mod:`tests.support.planted.maru` in this process: a ``setup`` for `maru_processes`."""
    getattr(importlib.import_module(f"{__name__}.maru"), name)(ForGood())
