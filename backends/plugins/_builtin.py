"""The kinds of tier that have a name without anybody registering it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs

from ._errors import TierParameterError
from ._python import make_native_plugin, make_plugin
from .finding import check_names, parameters_of

if TYPE_CHECKING:
    from ..abc import ReadableTier, Tier

TierFactory: TypeAlias = "Callable[..., ReadableTier]"
"""Called as ``factory(block_bytes=..., **parameters)``; returns a tier, which is not opened yet."""

_GIGABYTES: Final = "pool_size_gb"
_UNITS: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def size_of(value: object, name: str, tier: str) -> int:
    """A number of bytes, or one with its unit: ``4096``, ``"64KiB"``, ``"1.5 GiB"``.

    Raises:
        TierParameterError: it is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        number = value.rstrip("KMGTiB")
        try:
            return int(float(number) * _UNITS[value[len(number) :]])
        except (ValueError, KeyError, OverflowError):
            pass
    raise TierParameterError(tier, name, value, "must be a size such as 4096, '64KiB' or '1GiB'")


def _memory(*, block_bytes: int, capacity_bytes: int | str = "256MiB", **more: Any) -> Tier:
    from ..memory import MemoryTier

    check_names("memory", more, parameters_of(MemoryTier))
    return MemoryTier(size_of(capacity_bytes, "capacity_bytes", "memory"), block_bytes, **more)


def _file(*, block_bytes: int, directory: str = "", capacity_bytes: int | str = "1GiB", **more: Any) -> Tier:
    from ..file import FileTier

    check_names("file", more, parameters_of(FileTier))
    if directory == "":
        raise TierParameterError("file", "directory", None, "missing a required argument: 'directory'")
    if not isinstance(directory, str | os.PathLike):
        raise TierParameterError("file", "directory", directory, "must be a path")
    return FileTier(directory, size_of(capacity_bytes, "capacity_bytes", "file"), block_bytes=block_bytes, **more)


def _maru(*, block_bytes: int, **knobs: Any) -> ReadableTier:
    from maru import MaruConfig, MaruHandler

    from ..maru import MaruTier

    known = {field.name for field in attrs.fields(MaruConfig)}
    check_names("maru", knobs, {*known, _GIGABYTES})
    if _GIGABYTES in knobs:
        knobs["pool_size"] = _pool_size(knobs, knobs.pop(_GIGABYTES))
    knobs.setdefault("chunk_size_bytes", block_bytes)
    return MaruTier(MaruHandler(**knobs), block_bytes=block_bytes)


def _pool_size(knobs: Mapping[str, Any], gigabytes: object) -> int:
    """What LMCache's adapter for this page store calls ``pool_size_gb``, in bytes."""
    if "pool_size" in knobs:
        raise TierParameterError("maru", _GIGABYTES, gigabytes, "says the same as pool_size, in GiB: say one of them")
    number = isinstance(gigabytes, int | float) and not isinstance(gigabytes, bool)
    if not (number and 0 <= gigabytes < math.inf):  # type: ignore[operator]
        raise TierParameterError("maru", _GIGABYTES, gigabytes, "must be a number of GiB")
    return int(gigabytes * (1 << 30))  # type: ignore[operator]


def _plugin(*, block_bytes: int, **parameters: Any) -> ReadableTier:
    return make_plugin(block_bytes=block_bytes, **_sized("plugin", parameters, make_plugin))


def _native_plugin(*, block_bytes: int, **parameters: Any) -> ReadableTier:
    return make_native_plugin(block_bytes=block_bytes, **_sized("native_plugin", parameters, make_native_plugin))


def _sized(tier: str, parameters: dict[str, Any], make: Callable[..., object]) -> dict[str, Any]:
    missing = [name for name in ("module_path", "class_name") if name not in parameters]
    if missing:
        raise TierParameterError(tier, missing[0], None, f"the specification of a plugin lacks {' and '.join(missing)}")
    check_names(tier, parameters, parameters_of(make))
    if parameters.get("capacity_bytes") is not None:
        parameters["capacity_bytes"] = size_of(parameters["capacity_bytes"], "capacity_bytes", tier)
    return parameters


BUILTIN: Final[Mapping[str, TierFactory]] = {
    "memory": _memory,
    "file": _file,
    "maru": _maru,
    "plugin": _plugin,
    "native_plugin": _native_plugin,
}
