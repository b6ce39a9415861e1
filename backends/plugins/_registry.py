"""Tiers by name: a specification in, a tier out.

A specification is a name (``"memory"``), a name and the one thing it needs (``"file:/var/cache/kv"``), the place of a class or
function (``"my_package.tiers:NAS"``), or a mapping, also as JSON: ``{"type": ..., **parameters}``. Names come from four places,
asked in this order: built in, :func:`register_tier`, modules that register a name when it is first asked for
(:func:`register_tier_module`), and entry points of the group ``trio_offload.tiers``. A name has one meaning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.metadata import entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from ._builtin import BUILTIN
from ._builtin import TierFactory as TierFactory
from ._errors import PluginTypeError, TierParameterError, UnknownTier
from ._python import adopt
from .finding import check_call, check_names, find_module, find_name, parameters_of

if TYPE_CHECKING:
    from ..abc import ReadableTier

ENTRY_POINTS: Final = "trio_offload.tiers"
"""The group of entry points that are tiers: the name of one is the name of the tier, its value a factory, or a module that
registers the name when it is imported."""

_registered: dict[str, TierFactory] = {}
_modules: dict[str, str] = {}  # not imported yet


def register_tier(name: str, factory: TierFactory) -> None:
    """Give a kind of tier a name.

    Args:
        name: what specifications call it.
        factory: called as ``factory(block_bytes=..., **parameters)``; returns a tier, which is not opened yet.

    Raises:
        ValueError: the name is taken, by another factory.
    """
    _check_name(name)
    if _registered.setdefault(name, factory) is not factory:
        raise ValueError(f"a kind of tier is named {name!r} already: {_registered[name]!r}")


def register_tier_module(name: str, module_path: str) -> None:
    """Have a module imported when a tier of this name is asked for, and not before: it calls :func:`register_tier` then.

    Raises:
        ValueError: the name is taken, by another module or by a factory.
    """
    _check_name(name)
    if name in _registered or _modules.setdefault(name, module_path) != module_path:
        raise ValueError(f"a kind of tier is named {name!r} already")


def make_tier(spec: str | Mapping[str, Any], *, block_bytes: int) -> ReadableTier:
    """Make a tier from its specification. It is not opened: whoever uses it enters it, if it is an async context manager.

    ========================  ================================================================================
    ``type``                  parameters
    ========================  ================================================================================
    ``memory``                ``capacity_bytes`` (256 MiB), and those of :class:`~backends.memory.MemoryTier`
    ``file``                  ``directory``, ``capacity_bytes`` (1 GiB), and those of :class:`~backends.file.FileTier`
    ``maru``                  the knobs of a client: ``server_url``, ``tenant``, ...; also ``pool_size_gb``, as LMCache says it
    ``plugin``                ``module_path``, ``class_name``, ``adapter_params``, ``config_class_name``, and those of the host
    ``native_plugin``         the same without ``config_class_name``
    ``module:attribute``      whatever that takes
    ========================  ================================================================================

    Args:
        spec: see above. A size may be written with its unit, ``"1GiB"``. Behind a name and a colon stands what ``file`` keeps
            its files in, and what ``maru`` connects to.
        block_bytes: the size of every block.

    Raises:
        UnknownTier: no kind of tier has this name; a :class:`LookupError`.
        PluginModuleError: a module cannot be imported; an :class:`ImportError`.
        PluginClassError: a module has no such name; an :class:`AttributeError`.
        PluginTypeError: what was found is no tier, nor can be made one; a :class:`TypeError`.
        TierParameterError: a parameter is missing, unknown (then it names the one that was perhaps meant) or wrong; a
            :class:`ValueError`, as is what else a tier says of its parameters.
    """
    name, parameters = _read(spec)
    factory = _find(name)
    if factory is None:
        module_path, colon, attribute = name.partition(":")
        if not colon:
            raise UnknownTier(name, known_tiers(), ENTRY_POINTS)
        factory = find_name(find_module(module_path), attribute, f"the tier {name!r}")
    if not callable(factory):
        raise PluginTypeError(f"the tier {name!r} is {factory!r}, which cannot be called")
    if "block_bytes" in parameters:
        raise TierParameterError(
            name, "block_bytes", parameters["block_bytes"], f"is said already: it is {block_bytes}"
        )
    check_names(name, parameters, parameters_of(factory))
    check_call(factory, name, block_bytes=block_bytes, **parameters)
    made = factory(block_bytes=block_bytes, **parameters)
    return adopt(made, name, block_bytes)


def known_tiers() -> list[str]:
    """The names that specifications may use, without importing what they stand for."""
    return sorted({*BUILTIN, *_registered, *_modules, *(point.name for point in entry_points(group=ENTRY_POINTS))})


# --- below --------------------------------------------------------------------------------------------------------


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z][\w.-]*", name):
        raise ValueError(f"{name!r} cannot name a kind of tier: letters, digits, '_', '-' and '.' can")
    if name in BUILTIN:
        raise ValueError(f"{name!r} is built in")


def _find(name: str) -> TierFactory | None:
    factory = BUILTIN.get(name) or _registered.get(name)
    if factory is not None:
        return factory
    if name in _modules:
        module = find_module(_modules[name])  # stays registered if it fails: the next try says the same
        return _by_import(name, module)
    for point in entry_points(group=ENTRY_POINTS, name=name):
        module = find_module(point.module)
        if not point.attr:
            return _by_import(name, module)
        found: TierFactory = find_name(module, point.attr, f"the entry point {point.name!r} of {ENTRY_POINTS!r}")
        return found
    return None


def _by_import(name: str, module: ModuleType) -> TierFactory:
    """What a module has registered, now that it is imported."""
    try:
        factory = _registered[name]
    except KeyError:
        raise PluginTypeError(
            f"module {module.__name__!r} was to register the tier {name!r} when it is imported, and did not"
        ) from None
    _modules.pop(name, None)
    return factory


def _read(spec: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name and the parameters of a specification."""
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
        raise ValueError(f"the specification of a tier has a 'type', a string; this one has {name!r}")
    return name, parameters
