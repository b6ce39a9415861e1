"""What a part of a scenario is when nothing is said of it. Pure."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import msgspec

from .._program import Part


@functools.cache
def plain_of(kind: type[Part]) -> Mapping[str, Any]:
    """The fields of a kind of part that have a default, and what it is."""
    return {
        info.name: info.default if info.default_factory is msgspec.NODEFAULT else info.default_factory()
        for info in msgspec.structs.fields(kind)
        if not info.required
    }


def plain(value: Any) -> Any:
    """The same, with the defaults themselves wherever something equals one.

    msgspec leaves out what *is* the default. In a scenario that came from another process it only equals it.
    """
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if not isinstance(value, Part):
        return value
    defaults = plain_of(type(value))
    changed = {}
    for field in value.__struct_fields__:
        old = getattr(value, field)
        changed[field] = defaults[field] if field in defaults and defaults[field] == old else plain(old)
    return msgspec.structs.replace(value, **changed)
