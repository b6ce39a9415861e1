"""Public names that are imported when they are first used (PEP 562), for the ``__init__`` of each package here."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, homes: Mapping[str, str]) -> None:
    """Have a package find these names when they are asked for. Called once, by the package itself.

    Args:
        package: its ``__name__``.
        homes: the module of each name, relative to it.
    """
    known = vars(sys.modules[package])

    def find(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = known[name] = getattr(import_module(home, package), name)
        return value

    # Put there from here: assigned in each package, they would be public names without a type.
    known["__getattr__"], known["__dir__"] = find, lambda: sorted({*known, *homes})
