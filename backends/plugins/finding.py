"""Search for a plugin: module, class, configuration class and contract.

Rule 1. No fallbacks: the names in a specification must exist, or the error lists the missing name and where it was
        looked up.
Rule 2. The class of the configuration is looked up in four steps, in the plugin's own module: the name in the
        specification; the name of the plugin's class followed by ``Config``; the name in the attribute
        ``config_class_name`` of the plugin's class; none, and then the plugin gets the parameters as a plain ``dict``.
Rule 3. A plugin is called with the arguments that its signature takes. Arguments that versions add (``block_bytes``
        here, ``group_layout_descs`` there) are offered by name, and passed if there is a parameter of that name, or
        ``**kwargs``.
Rule 4. The contract of an object is recognised by its methods, not by its base classes: LMCache need not be installed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from maru.configuration import suggestion

from ..abc import Tier
from ._errors import PluginClassError, PluginModuleError, PluginTypeError, TierParameterError

NATIVE_METHODS: Final = (
    "event_fd",
    "submit_batch_get",
    "submit_batch_set",
    "submit_batch_exists",
    "drain_completions",
    "close",
)
"""The methods of a native connector. ``submit_batch_delete`` is an optional seventh."""

L2_METHODS: Final = (
    "get_store_event_fd",
    "get_lookup_and_lock_event_fd",
    "get_load_event_fd",
    "submit_store_task",
    "pop_completed_store_tasks",
    "submit_lookup_and_lock_task",
    "query_lookup_and_lock_result",
    "submit_unlock",
    "submit_load_task",
    "query_load_result",
    "close",
)
"""The abstract methods of LMCache's L2AdapterInterface."""

_CONTRACTS: Final = {
    "a native connector": NATIVE_METHODS,
    "an L2 adapter of LMCache": L2_METHODS,
}


def contract_of(plugin: object, what: str, *contracts: str) -> str:
    """Return the plugin contract that an object or class keeps.

    A tier derives from :class:`backends.abc.Tier`; the other contracts are published by other projects, and recognised by
    their methods.

    Args:
        plugin: the object or class.
        what: a description of it, for the error.
        *contracts: the contracts to try; by default all.

    Raises:
        PluginTypeError: none. The message lists the missing methods.
    """
    kind = plugin if isinstance(plugin, type) else type(plugin)
    if not contracts and issubclass(kind, Tier):
        return "a tier"
    lacks = {contract: missing_methods(plugin, _CONTRACTS[contract]) for contract in contracts or _CONTRACTS}
    for contract, missing in lacks.items():
        if not missing:
            return contract
    wants = [f"{contract} would need {', '.join(missing)}" for contract, missing in lacks.items()]
    if not contracts:
        wants.insert(0, "a tier would derive from backends.abc.Tier")
    raise PluginTypeError(f"{what} is not a plugin: {'; '.join(wants)}")


def find_module(module_path: str) -> ModuleType:
    """Import a module.

    Raises:
        PluginModuleError: it cannot be imported; an :class:`ImportError`.
    """
    try:
        return import_module(module_path)
    except ImportError as exc:
        raise PluginModuleError(module_path, exc) from exc


def find_name(module: ModuleType, name: str, what: str) -> Any:
    """Return the object with a dotted name in a module.

    Args:
        module: the module to search.
        what: a description of the object, for the error.

    Raises:
        PluginClassError: the name is missing; an :class:`AttributeError`.
    """
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as exc:
            raise PluginClassError(module.__name__, name, what) from exc
    return found


def find_class(module_path: str, class_name: str) -> tuple[ModuleType, type]:
    """Return the class of a plugin, and its module.

    Raises:
        PluginModuleError, PluginClassError: the module or class is missing.
        PluginTypeError: the object is not a class.
    """
    module = find_module(module_path)
    found = find_name(module, class_name, "the class of a plugin")
    if not isinstance(found, type):
        raise PluginTypeError(f"{module_path}.{class_name} is {found!r}, not a class")
    return module, found


def find_config_class(
    module: ModuleType, class_name: str, plugin_class: type, config_class_name: str | None = None
) -> type | None:
    """Return the class of a plugin's configuration: rule 2.

    A class that is found in the second step, only by its name, counts if it has a ``from_dict``; an explicitly named
    class must have one.

    Raises:
        PluginClassError: a name in the specification or in the plugin's class is not in the module.
        PluginTypeError: the class has no ``from_dict``.
    """
    if config_class_name is not None:
        return _named(module, config_class_name, "config_class_name of the specification")
    conventional = getattr(module, f"{class_name}Config", None)
    if isinstance(conventional, type) and callable(getattr(conventional, "from_dict", None)):
        return conventional
    own = getattr(plugin_class, "config_class_name", None)
    if isinstance(own, str) and own:
        return _named(module, own, f"config_class_name of the class {class_name}")
    return None


def _named(module: ModuleType, name: str, what: str) -> type:
    found = find_name(module, name, what)
    if not isinstance(found, type) or not callable(getattr(found, "from_dict", None)):
        raise PluginTypeError(f"{module.__name__}.{name}, {what}, is not a class with a from_dict")
    return found


def accepted(fn: Callable[..., object], offered: Mapping[str, Any], *, by_any: bool = True) -> dict[str, Any]:
    """Return those of ``offered`` that ``fn`` can be called with by name.

    Args:
        fn: the function to be called.
        offered: values by the name of a parameter.
        by_any: whether ``**kwargs`` takes them all. Otherwise only parameters of these names do.
    """
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature
        return {}
    if by_any and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(offered)
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = {parameter.name for parameter in parameters if parameter.kind in by_name}
    return {name: value for name, value in offered.items() if name in names}


def parameters_of(fn: Callable[..., object]) -> set[str] | None:
    """Return the names of a function's parameters.

    ``None`` if they are unknown, or the function takes any name.
    """
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {parameter.name for parameter in parameters if parameter.kind in by_name}


def check_names(what: str, given: Mapping[str, object], known: Collection[str] | None) -> None:
    """Raise unless all these names are parameters.

    Raises:
        TierParameterError: one is not; the text names the most similar parameter.
    """
    for name in given:
        if known is not None and name not in known:
            why = suggestion(name, sorted(known))
            raise TierParameterError(what, name, given[name], f"there is no such parameter; {why}")


def check_call(fn: Callable[..., object], what: str, *args: object, **kwargs: object) -> None:
    """Raise unless ``fn`` can be called with these arguments.

    As far as its signature shows.

    Raises:
        PluginTypeError: it cannot; the text names the plugin and the reason.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as exc:
        how = [*(type(arg).__name__ for arg in args), *(f"{name}=..." for name in kwargs)]
        raise PluginTypeError(f"{what}{signature} cannot be called with ({', '.join(how)}): {exc}") from exc


def missing_methods(plugin: object, names: tuple[str, ...]) -> list[str]:
    """Return the names without a method in an object or class."""
    return [name for name in names if not callable(getattr(plugin, name, None))]
