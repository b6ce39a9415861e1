"""Tiers by name: makes a tier from its specification.

A specification is a name (``"memory"``), a name with its main argument (``"file:/var/cache/kv"``), a class or function
(``"my_package.tiers:NAS"``), or a mapping, also as JSON: ``{"type": ..., **parameters}``. Names are looked up in this
order: built in, :func:`register_tier`, modules that register a name when it is first used
(:func:`register_tier_module`), and entry points of the group ``trio_offload.tiers``. A name has one meaning.

The object that is found keeps one of three contracts. A *tier* keeps that of :mod:`backends.abc` itself, and is used as
it is. A *native connector* has six methods, or seven; :class:`~backends.plugins.NativeTier` hosts it. An *L2 adapter*
has LMCache's interface; :class:`~backends.plugins.LMCacheTier` hosts it.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs

from maru.eviction import LRU, AdaptiveLRFU, EvictionPolicy, WTinyLFU

from ..base.closing import close_beside
from ._config import HostConfig, host_config
from ._errors import PluginTypeError, TierParameterError, UnknownTier
from .finding import (
    accepted,
    check_call,
    check_names,
    contract_of,
    find_class,
    find_config_class,
    find_module,
    find_name,
    parameters_of,
)

if TYPE_CHECKING:
    from ..abc import Tier
    from ..maru._names import KeyNames


def make_plugin(
    *,
    block_bytes: int,
    module_path: str,
    class_name: str,
    adapter_params: Mapping[str, Any] | None = None,
    config_class_name: str | None = None,
    **host: Any,
) -> Tier:
    """Make a tier of the type ``plugin``, from a class.

    The class is constructed with its configuration, or with its parameters as a ``dict``.

    Args:
        block_bytes: the size of every block. Passed to the class if it has a parameter of that name.
        module_path: the module to import.
        class_name: the class in it: a tier, an L2 adapter of LMCache, or a native connector.
        adapter_params: the parameters of its configuration.
        config_class_name: see :func:`~backends.plugins.finding.find_config_class`.
        **host: settings of the host, for a class that needs one: see :class:`~backends.plugins.HostConfig`; also
            ``max_capacity_gb``.

    Raises:
        PluginModuleError, PluginClassError, PluginTypeError: the text gives the missing name, and the place that was
        searched.
        ValueError: a parameter is wrong; also errors of the class itself.
    """
    _check(module_path=module_path, class_name=class_name)
    module, plugin_class = find_class(module_path, class_name)
    what = f"{module_path}.{class_name}"
    contract_of(plugin_class, what)
    _check_concrete(plugin_class, what)
    parameters = _parameters(adapter_params)
    config_class: Any = find_config_class(module, class_name, plugin_class, config_class_name)
    argument = parameters if config_class is None else config_class.from_dict(parameters)
    offered = accepted(plugin_class, {"block_bytes": block_bytes})
    check_call(plugin_class, what, argument, **offered)
    return adopt(plugin_class(argument, **offered), what, block_bytes, **host)


def make_native_plugin(
    *,
    block_bytes: int,
    module_path: str,
    class_name: str,
    adapter_params: Mapping[str, Any] | None = None,
    **host: Any,
) -> Tier:
    """Make a tier of the type ``native_plugin``, from a connector.

    The connector is constructed with its parameters as keyword arguments.

    The arguments and errors are those of :func:`make_plugin`.
    """
    _check(module_path=module_path, class_name=class_name)
    _, plugin_class = find_class(module_path, class_name)
    what = f"{module_path}.{class_name}"
    contract_of(plugin_class, what, "a native connector")
    _check_concrete(plugin_class, what)
    parameters = _parameters(adapter_params)
    offered = accepted(plugin_class, {"block_bytes": block_bytes}, by_any=False)
    check_call(plugin_class, what, **{**offered, **parameters})
    return adopt(plugin_class(**{**offered, **parameters}), what, block_bytes, **host)


def adopt(plugin: object, what: str, block_bytes: int, **host: Any) -> Tier:
    """Return a tier, or a host for a connector or an adapter.

    A tier is returned unchanged. A host closes its plugin at the end.

    Raises:
        PluginTypeError: it is none of these; it is closed then, if it has a ``close``.
        ValueError: a parameter of the host is wrong, or there is no host.
    """
    try:
        contract = contract_of(plugin, what)
        if contract == "a tier":
            if host:
                raise ValueError(f"{what} is a tier itself and has no host to take {', '.join(host)}")
            tier: Any = plugin
            return tier  # type: ignore[no-any-return]
        return _host(contract, plugin, block_bytes, host_config(_capacity(host)))
    except BaseException as error:
        close_beside(error, plugin)
        raise


def _host(contract: str, plugin: object, block_bytes: int, config: HostConfig) -> Tier:
    if contract == "a native connector":
        from ._native import NativeTier

        return NativeTier(plugin, block_bytes, config)
    from ._lmcache import LMCacheTier

    return LMCacheTier(plugin, block_bytes, config)


def _capacity(host: Mapping[str, Any]) -> dict[str, Any]:
    """Return the host's arguments, with ``max_capacity_gb`` converted.

    Published specifications use it; it is ``capacity_bytes`` in GiB.
    """
    arguments = dict(host)
    gib = arguments.pop("max_capacity_gb", None)
    if gib is not None:
        if isinstance(gib, bool) or not isinstance(gib, int | float) or gib < 0:
            raise ValueError(f"max_capacity_gb is {gib!r}, but must be a number that is not negative")
        if "capacity_bytes" in arguments:
            raise ValueError("capacity_bytes and max_capacity_gb are the same setting: set one of them")
        arguments["capacity_bytes"] = int(gib * (1 << 30)) or None  # 0 has always meant unlimited
    return arguments


def _check(**names: object) -> None:
    for name, value in names.items():
        if not isinstance(value, str) or not value:
            raise ValueError(f"{name} is {value!r}, but must be a string that is not empty")


def _check_concrete(plugin_class: type, what: str) -> None:
    if inspect.isabstract(plugin_class):
        missing = ", ".join(sorted(getattr(plugin_class, "__abstractmethods__", ())))
        raise PluginTypeError(f"{what} leaves abstract methods open: {missing}")


def _parameters(adapter_params: object) -> dict[str, Any]:
    if adapter_params is None:
        return {}
    if not isinstance(adapter_params, Mapping):
        raise ValueError(f"adapter_params is {adapter_params!r}, but must be a mapping")
    return dict(adapter_params)


TierFactory: TypeAlias = "Callable[..., Tier]"
"""Function that makes a tier: ``factory(block_bytes=..., **parameters)``.

The tier is not opened yet.
"""

_GIGABYTES: Final = "pool_size_gb"
_UNITS: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def size_of(value: object, name: str, tier: str) -> int:
    """Return a number of bytes: ``4096``, ``"64KiB"``, ``"1.5 GiB"``.

    A number alone, or one with its unit.

    Raises:
        TierParameterError: the value is neither.
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
    _check_values("memory", MemoryTier, more)
    return MemoryTier(size_of(capacity_bytes, "capacity_bytes", "memory"), block_bytes, **more)


def _register(*, block_bytes: int, directory: str = "", capacity_bytes: int | str = "1GiB", **more: Any) -> Tier:
    from ..file import FileTier

    check_names("file", more, parameters_of(FileTier))
    if directory == "":
        raise TierParameterError("file", "directory", None, "missing a required argument: 'directory'")
    if not isinstance(directory, str | os.PathLike):
        raise TierParameterError("file", "directory", directory, "must be a path")
    _check_values("file", FileTier, more)
    return FileTier(directory, size_of(capacity_bytes, "capacity_bytes", "file"), block_bytes=block_bytes, **more)


def _maru(*, block_bytes: int, key_names: KeyNames = "hex", **knobs: Any) -> Tier:
    from maru import MaruConfig, MaruHandler

    from ..maru import MaruTier

    known = {field.name for field in attrs.fields(MaruConfig)}
    check_names("maru", knobs, {*known, _GIGABYTES, "key_names"})
    if _GIGABYTES in knobs:
        knobs["pool_size"] = _pool_size(knobs, knobs.pop(_GIGABYTES))
    knobs.setdefault("chunk_size_bytes", block_bytes)
    return MaruTier(MaruHandler(**knobs), block_bytes=block_bytes, key_names=key_names)


def _pool_size(knobs: Mapping[str, Any], gigabytes: object) -> int:
    """Return the size in bytes of ``pool_size_gb``.

    It is the parameter of LMCache's adapter for this page store.
    """
    if "pool_size" in knobs:
        raise TierParameterError(
            "maru", _GIGABYTES, gigabytes, "is the same setting as pool_size, in GiB: set one of them"
        )
    number = isinstance(gigabytes, int | float) and not isinstance(gigabytes, bool)
    if not (number and 0 <= gigabytes < math.inf):  # type: ignore[operator]
        raise TierParameterError("maru", _GIGABYTES, gigabytes, "must be a number of GiB")
    return int(gigabytes * (1 << 30))  # type: ignore[operator]


def _plugin(*, block_bytes: int, **parameters: Any) -> Tier:
    return make_plugin(block_bytes=block_bytes, **_sized("plugin", parameters, make_plugin))


def _native_plugin(*, block_bytes: int, **parameters: Any) -> Tier:
    return make_native_plugin(block_bytes=block_bytes, **_sized("native_plugin", parameters, make_native_plugin))


def _sized(tier: str, parameters: dict[str, Any], make: Callable[..., object]) -> dict[str, Any]:
    missing = [name for name in ("module_path", "class_name") if name not in parameters]
    if missing:
        raise TierParameterError(tier, missing[0], None, f"the specification of a plugin lacks {' and '.join(missing)}")
    check_names(tier, parameters, parameters_of(make))
    if parameters.get("capacity_bytes") is not None:
        parameters["capacity_bytes"] = size_of(parameters["capacity_bytes"], "capacity_bytes", tier)
    return parameters


_PLAIN: Final[Mapping[str, tuple[tuple[type, ...], str]]] = {
    "bool": ((bool,), "true or false"),
    "bool | None": ((bool, type(None)), "true or false"),
    "str": ((str,), "a text"),
}
"""Annotations of parameters whose values are checked.

A file can set them to other values without an error before the first store.
"""

_EVICTIONS: Final[Mapping[str, Callable[[], EvictionPolicy[Any]]]] = {
    "adaptive": AdaptiveLRFU,
    "lru": LRU,
    "wtinylfu": WTinyLFU,
}


def _check_values(tier: str, maker: Callable[..., object], parameters: dict[str, Any]) -> None:
    """Make the eviction policy from its name; check flags and texts.

    Raises:
        TierParameterError: a value is of the wrong type.
    """
    if parameters.get("eviction") is not None:
        parameters["eviction"] = _eviction(tier, parameters["eviction"])
    for name, parameter in inspect.signature(maker).parameters.items():
        kinds, said = _PLAIN.get(str(parameter.annotation), ((object,), ""))
        if name in parameters and not isinstance(parameters[name], kinds):
            raise TierParameterError(tier, name, parameters[name], f"must be {said}")


def _eviction(tier: str, policy: Any) -> Any:
    """Return an eviction policy by its name, or by ``module:attribute``.

    An object is returned unchanged.
    """
    if isinstance(policy, str):
        module, colon, attribute = policy.partition(":")
        if policy not in _EVICTIONS and not (module and colon and attribute):
            why = f"must be one of {', '.join(_EVICTIONS)}, or module:attribute"
            raise TierParameterError(tier, "eviction", policy, why)
        made: Any = _EVICTIONS.get(policy) or find_name(find_module(module), attribute, "an eviction policy")
        policy = made() if callable(made) else made
    if not callable(getattr(policy, "make_room", None)):
        why = f"must be an eviction policy, or one of {', '.join(_EVICTIONS)}"
        raise TierParameterError(tier, "eviction", policy, why)
    return policy


BUILTIN: Final[Mapping[str, TierFactory]] = {
    "memory": _memory,
    "file": _register,
    "maru": _maru,
    "plugin": _plugin,
    "native_plugin": _native_plugin,
}


ENTRY_POINTS: Final = "trio_offload.tiers"
"""Group of entry points for tiers.

The name of an entry point is the name of the tier, its value a factory, or a module that registers the name when it is
imported.
"""

_registered: dict[str, TierFactory] = {}
_modules: dict[str, str] = {}  # not imported yet


def register_tier(name: str, factory: TierFactory) -> None:
    """Give a kind of tier a name for specifications.

    Args:
        name: the name.
        factory: called as ``factory(block_bytes=..., **parameters)``; returns a tier, which is not opened yet.

    Raises:
        ValueError: the name is taken, by another factory.
    """
    _check_name(name)
    if _registered.setdefault(name, factory) is not factory:
        raise ValueError(f"a kind of tier is named {name!r} already: {_registered[name]!r}")


def register_tier_module(name: str, module_path: str) -> None:
    """Name a module that registers this tier when it is imported.

    It is imported at the first use of the name.

    Raises:
        ValueError: the name is taken, by another module or by a factory.
    """
    _check_name(name)
    if name in _registered or _modules.setdefault(name, module_path) != module_path:
        raise ValueError(f"a kind of tier is named {name!r} already")


def make_tier(spec: str | Mapping[str, Any], *, block_bytes: int) -> Tier:
    """Make a tier from its specification, without opening it.

    The caller enters it, if it is an async context manager.

    ========================  ================================================================================
    ``type``                  parameters
    ========================  ================================================================================
    ``memory``                ``capacity_bytes`` (256 MiB), and those of :class:`~backends.memory.MemoryTier`
    ``file``                  ``directory``, ``capacity_bytes`` (1 GiB), and those of :class:`~backends.file.FileTier`
    ``maru``                  the knobs of a client: ``server_url``, ``tenant``, ...; also LMCache's ``pool_size_gb``
    ``plugin``                ``module_path``, ``class_name``, ``adapter_params``, ``config_class_name``, and those of the host
    ``native_plugin``         the same without ``config_class_name``
    ``module:attribute``      the parameters of that object
    ========================  ================================================================================

    Args:
        spec: see above. A size may have a unit, ``"1GiB"``. After a name and a colon comes the directory of ``file``,
            or the server's URL of ``maru``. ``eviction`` may be a name: ``adaptive``, ``lru``, ``wtinylfu``, or
            ``module:attribute``.
        block_bytes: the size of every block.

    Raises:
        UnknownTier: no kind of tier has this name; a :class:`LookupError`.
        PluginModuleError: a module cannot be imported; an :class:`ImportError`.
        PluginClassError: a module has no such name; an :class:`AttributeError`.
        PluginTypeError: the object is no tier, and none can be made of it; a :class:`TypeError`.
        TierParameterError: a parameter is missing, unknown (then the text names the most similar one) or wrong; a
            :class:`ValueError`, like other errors of a tier in its parameters.
    """
    name, parameters = read_spec(spec)
    factory = _find(name)
    if factory is None:
        module_path, colon, attribute = name.partition(":")
        if not colon:
            raise UnknownTier(name, known_tiers(), ENTRY_POINTS)
        factory = find_name(find_module(module_path), attribute, f"the tier {name!r}")
    if not callable(factory):
        raise PluginTypeError(f"the tier {name!r} is {factory!r}, which cannot be called")
    if "block_bytes" in parameters:
        raise TierParameterError(name, "block_bytes", parameters["block_bytes"], f"is already set: it is {block_bytes}")
    check_names(name, parameters, parameters_of(factory))
    check_call(factory, name, block_bytes=block_bytes, **parameters)
    made = factory(block_bytes=block_bytes, **parameters)
    return adopt(made, name, block_bytes)


def read_spec(spec: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and the parameters of a specification.

    Raises:
        ValueError: it has no type, or is no JSON.
    """
    if isinstance(spec, str) and spec.lstrip().startswith("{"):
        try:
            spec = json.loads(spec)
        except ValueError as exc:
            raise ValueError(f"the specification of a tier is not JSON: {exc}") from None
    if isinstance(spec, str):
        kind, colon, where = spec.partition(":")
        parameter = {"file": "directory", "maru": "server_url"}.get(kind)
        if colon and parameter:
            return kind, {parameter: where}
        return spec, {}
    parameters = dict(spec)
    name = parameters.pop("type", None)
    if not isinstance(name, str) or not name:
        raise ValueError(f"the specification of a tier must have a 'type', a string, not {name!r}")
    return name, parameters


def known_tiers() -> list[str]:
    """Return the names that specifications may use, importing no module."""
    return sorted({*BUILTIN, *_registered, *_modules, *(point.name for point in entry_points(group=ENTRY_POINTS))})


# --- helpers ------------------------------------------------------------------------------------------------------


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z][\w.-]*", name):
        raise ValueError(f"{name!r} cannot name a kind of tier: only letters, digits, '_', '-' and '.' can")
    if name in BUILTIN:
        raise ValueError(f"{name!r} is built in")


def _find(name: str) -> TierFactory | None:
    factory = BUILTIN.get(name) or _registered.get(name)
    if factory is not None:
        return factory
    if name in _modules:
        module = find_module(_modules[name])  # stays registered if it fails: the next use raises the same
        return _by_import(name, module)
    for point in entry_points(group=ENTRY_POINTS, name=name):
        module = find_module(point.module)
        if not point.attr:
            return _by_import(name, module)
        found: TierFactory = find_name(module, point.attr, f"the entry point {point.name!r} of {ENTRY_POINTS!r}")
        return found
    return None


def _by_import(name: str, module: ModuleType) -> TierFactory:
    """Return the factory that a module has registered during its import."""
    try:
        factory = _registered[name]
    except KeyError:
        raise PluginTypeError(
            f"module {module.__name__!r} did not register the tier {name!r} when it was imported"
        ) from None
    _modules.pop(name, None)
    return factory
