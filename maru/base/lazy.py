"""Public names that are imported on first use (PEP 562).

The ``__init__`` of each package uses this.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, homes: Mapping[str, str]) -> None:
    """Make a package import these names on first use.

    The package calls it once.

    Args:
        package: its ``__name__``.
        homes: the module of each name, relative to the package.
    """
    known = vars(sys.modules[package])

    def find(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = known[name] = getattr(import_module(home, package), name)
        return value

    # Set here: assigned in each package, they would be public names without a type.
    known["__getattr__"], known["__dir__"] = find, lambda: sorted({*known, *homes})
