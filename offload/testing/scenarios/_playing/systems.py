"""Which system is played with: ours, or one that is named as ``module:factory``."""

from __future__ import annotations

import functools
import importlib
import os
import sys

from .._contract import Factory


class NoSuchSystem(ValueError):
    """There is no factory of that name; the text says what there is instead."""


@functools.lru_cache(maxsize=8)
def factory_of(system: str) -> Factory | None:
    """The factory that ``module:factory`` names; ``None``, of nothing: ours.

    A module is looked for where Python looks, and in the current directory, as ``python -m`` does.

    Raises:
        NoSuchSystem: there is none.
    """
    if not system:
        return None
    module_name, colon, path = system.partition(":")
    if not (module_name and colon and path):
        raise NoSuchSystem(f"{system!r} does not name a system: say module:factory, as in mycache:open_cache")
    try:
        _look_here()
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise NoSuchSystem(f"{system}: importing {module_name} fails: {error}") from error
        raise NoSuchSystem(
            f"{system}: there is no module {module_name}, neither installed nor in {os.getcwd()}; "
            f"run this where {module_name.partition('.')[0]}.py is, or install it"
        ) from error
    except Exception as error:  # whatever the module does when it is imported
        raise NoSuchSystem(f"{system}: importing {module_name} fails: {type(error).__name__}: {error}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise NoSuchSystem(f"{system}: {module_name} has no {path}{_instead(found)}")
        found = getattr(found, name)
    if not callable(found):
        raise NoSuchSystem(
            f"{system}: {path} is no factory, but {type(found).__name__}: it must be callable with a World"
        )
    return found


def _look_here() -> None:
    """For good, not only for this import: a module may import another one when it is used."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def _instead(module: object) -> str:
    names = [
        name
        for name, value in getattr(module, "__dict__", {}).items()
        if callable(value)
        and not name.startswith("_")
        and getattr(value, "__module__", "") == getattr(module, "__name__", None)
    ]
    return f"; it has {', '.join(names[:8])}" if names else ""
