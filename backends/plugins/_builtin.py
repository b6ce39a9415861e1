"""The kinds of tier that have a name without anybody registering it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ._python import make_native_plugin, make_plugin

if TYPE_CHECKING:
    from ..abc import RemoteTier, Tier

TierFactory: TypeAlias = "Callable[..., Tier | RemoteTier]"
"""Called as ``factory(block_bytes=..., **parameters)``; returns a tier, which is not opened yet."""

_UNITS: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def size_of(value: object, name: str) -> int:
    """A number of bytes, or one with its unit: ``4096``, ``"64KiB"``, ``"1.5 GiB"``.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        number = value.rstrip("KMGTiB")
        try:
            return int(float(number) * _UNITS[value[len(number) :]])
        except (ValueError, KeyError, OverflowError):
            pass
    raise ValueError(f"{name} is {value!r}, but must be a size such as 4096, '64KiB' or '1GiB'")


def _memory(*, block_bytes: int, capacity_bytes: int | str = "256MiB", **more: Any) -> Tier:
    from ..memory import MemoryTier

    return MemoryTier(size_of(capacity_bytes, "capacity_bytes"), block_bytes, **more)


def _file(*, block_bytes: int, directory: str, capacity_bytes: int | str = "1GiB", **more: Any) -> Tier:
    from ..file import FileTier

    return FileTier(directory, size_of(capacity_bytes, "capacity_bytes"), block_bytes=block_bytes, **more)


def _maru(*, block_bytes: int, **knobs: Any) -> RemoteTier:
    from maru import MaruHandler

    from ..maru import MaruTier

    knobs.setdefault("chunk_size_bytes", block_bytes)
    return MaruTier(MaruHandler(**knobs), block_bytes=block_bytes)


def _plugin(*, block_bytes: int, **parameters: Any) -> Tier | RemoteTier:
    return make_plugin(block_bytes=block_bytes, **_sized(parameters))


def _native_plugin(*, block_bytes: int, **parameters: Any) -> Tier | RemoteTier:
    return make_native_plugin(block_bytes=block_bytes, **_sized(parameters))


def _sized(parameters: dict[str, Any]) -> dict[str, Any]:
    missing = [name for name in ("module_path", "class_name") if name not in parameters]
    if missing:
        raise ValueError(f"the specification of a plugin lacks {' and '.join(missing)}")
    if parameters.get("capacity_bytes") is not None:
        parameters["capacity_bytes"] = size_of(parameters["capacity_bytes"], "capacity_bytes")
    return parameters


BUILTIN: Final[Mapping[str, TierFactory]] = {
    "memory": _memory,
    "file": _file,
    "maru": _maru,
    "plugin": _plugin,
    "native_plugin": _native_plugin,
}
