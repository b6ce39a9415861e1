"""Plugins as Python objects: which of three contracts one keeps, how it is made, and the host that makes it a tier.

* A *tier* keeps the contract of :mod:`backends.abc` itself, and is used as it is.
* A *native connector* has six methods, or seven; :class:`~backends.plugins.NativeTier` hosts it.
* An *L2 adapter* has LMCache's interface; :class:`~backends.plugins.LMCacheTier` hosts it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..closing import close_beside
from ._config import HostConfig, host_config
from ._contracts import contract_of
from ._errors import PluginTypeError
from .finding import accepted, check_call, find_class, find_config_class

if TYPE_CHECKING:
    from ..abc import ReadableTier


def make_plugin(
    *,
    block_bytes: int,
    module_path: str,
    class_name: str,
    adapter_params: Mapping[str, Any] | None = None,
    config_class_name: str | None = None,
    **host: Any,
) -> ReadableTier:
    """The type ``plugin``: a class that is constructed with its configuration, or with its parameters as a ``dict``.

    Args:
        block_bytes: the size of every block. The class is given it, too, if it takes a parameter of that name.
        module_path: the module to import.
        class_name: the class in it: a tier, an L2 adapter of LMCache, or a native connector.
        adapter_params: what its configuration is made from.
        config_class_name: see :func:`~backends.plugins.finding.find_config_class`.
        **host: for the host, where the class needs one: see :class:`~backends.plugins.HostConfig`; ``max_capacity_gb``, too.

    Raises:
        PluginModuleError, PluginClassError, PluginTypeError: what was looked for, and where.
        ValueError: a parameter is wrong; also what the class itself raises.
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
) -> ReadableTier:
    """The type ``native_plugin``: a connector, constructed with its parameters as keyword arguments.

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


def adopt(plugin: object, what: str, block_bytes: int, **host: Any) -> ReadableTier:
    """A tier as it is; a connector or an adapter in its host, which closes it in the end.

    Raises:
        PluginTypeError: it is neither; it is closed then, if it has a ``close``.
        ValueError: a parameter of the host is wrong, or there is no host.
    """
    try:
        contract = contract_of(plugin, what)
        if contract == "a tier":
            if host:
                raise ValueError(f"{what} is a tier of its own and has no host to take {', '.join(host)}")
            tier: Any = plugin
            return tier  # type: ignore[no-any-return]
        return _host(contract, plugin, block_bytes, host_config(_capacity(host)))
    except BaseException as error:
        close_beside(error, plugin)
        raise


def _host(contract: str, plugin: object, block_bytes: int, config: HostConfig) -> ReadableTier:
    if contract == "a native connector":
        from ._native import NativeTier

        return NativeTier(plugin, block_bytes, config)
    from ._lmcache import LMCacheTier

    return LMCacheTier(plugin, block_bytes, config)


def _capacity(host: Mapping[str, Any]) -> dict[str, Any]:
    """The host's arguments; ``max_capacity_gb``, which published specifications use, is ``capacity_bytes`` in GiB."""
    arguments = dict(host)
    gib = arguments.pop("max_capacity_gb", None)
    if gib is not None:
        if isinstance(gib, bool) or not isinstance(gib, int | float) or gib < 0:
            raise ValueError(f"max_capacity_gb is {gib!r}, but must be a number that is not negative")
        if "capacity_bytes" in arguments:
            raise ValueError("capacity_bytes and max_capacity_gb say the same: give one of them")
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
