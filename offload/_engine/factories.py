"""Factories for the objects that a configuration only names.

They make tiers and their wrappers, and the policies of routes. Only these functions import the named modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from backends.abc import Capabilities, Source, Tier
from backends.base.closing import close_beside
from maru.base.errors import KnobError

from .._errors import ConfigError
from ..abc import AsyncPolicy, Policy
from ..policies import FrequencyFilter, PassAll, PresenceFilter, as_policy
from .config import Chain, EngineConfig, PolicyLike, TierLike, TierTable

_ALL: Final = Capabilities()
_POLICIES: Final[Mapping[str, Any]] = {"presence": PresenceFilter, "pass_all": PassAll, "frequency": FrequencyFilter}


def make_source(config: EngineConfig) -> Source | Tier:
    """Make or return the source of an engine.

    It may be a tier, whose blocks are the source.

    Raises:
        ConfigError: it is named without block_bytes, or the object made cannot be read as a source.
        Exception: making it raised; a note names the object that was being made.
    """
    source: Any = config.source
    if not isinstance(source, str | Mapping):
        return source  # type: ignore[no-any-return]
    if not config.block_bytes:
        raise ConfigError("block_bytes", 0, "must be the size of a block, since the source is created by name")
    made = make_tier("source", source, config.block_bytes)
    if made.source is None:
        error = ConfigError("source", source, f"cannot be read as a source: it is {made!r}")
        close_beside(error, made)
        raise error
    return made


def make_tier(name: str, tier: TierLike, block_bytes: int) -> Tier:
    """Make a tier that is only named; return any other unchanged.

    Raises:
        ConfigError: its table is of a file, and has a wrong value.
        Exception: making it raised; a note names the object that was being made.
    """
    if not isinstance(tier, str | Mapping):
        return tier
    from backends.plugins import make_tier as make  # only needed if a tier is named

    try:
        if isinstance(tier, Mapping) and "wrappers" in tier:
            return _wrapped(name, dict(tier), block_bytes, make)
        return make(tier, block_bytes=block_bytes)
    except Exception as error:
        error.add_note(f"while making {name} of an engine, for blocks of {block_bytes} bytes")
        if isinstance(tier, TierTable) and (misfit := _misfit(name, tier, error)) is not None:
            raise misfit from error
        raise


def _misfit(name: str, table: TierTable, error: Exception) -> ConfigError | None:
    """Return an error with the position of its entry in the file.

    ``None`` if the file is not the cause.
    """
    from backends.plugins import TierParameterError, UnknownTier

    knob, value, why = "", table.get("type"), str(error)
    if isinstance(error, TierParameterError):
        knob, value, why = error.parameter, error.value, error.why
    elif isinstance(error, KnobError):
        knob, value, why = error.knob.removeprefix(f"{name}."), error.value, error.bound
    elif isinstance(error, UnknownTier):
        knob = "type"
    elif type(error) not in (ValueError, TypeError):  # a subclass has more information than ConfigError could
        return None
    path = ".".join(filter(None, (table.section, knob)))
    return ConfigError(path, value, f"{why} {table.document.place(path)}")


def _wrapped(name: str, tier: dict[str, Any], block_bytes: int, make: Callable[..., Tier]) -> Tier:
    """Make a tier whose blocks pass through wrappers.

    Its slots have the size that the wrappers make of a block.
    """
    from backends.wrappers import slot_bytes, wrap

    specs = tier.pop("wrappers")
    knob = f"{name}.wrappers"
    if not isinstance(specs, list | tuple):
        specs = [specs]
    wrappers = [_wrapper(wrapper, knob) for wrapper in specs]
    inner = make(tier, block_bytes=slot_bytes(block_bytes, *wrappers))
    try:
        return wrap(inner, *wrappers, block_bytes=block_bytes)
    except BaseException as error:
        close_beside(error, inner)
        raise


def needs_tenants(name: str, tier: TierLike) -> bool:
    """Return whether a tier that is only named needs tenants.

    It does if it passes them to its plugin, or if its wrappers encrypt.
    """
    if isinstance(tier, Mapping) and tier.get("cache_salts"):
        return True
    specs = tier.get("wrappers", ()) if isinstance(tier, Mapping) else ()
    wrappers = specs if isinstance(specs, list | tuple) else [specs]
    return any(getattr(_wrapper(wrapper, f"{name}.wrappers"), "seals", False) for wrapper in wrappers)


def _wrapper(wrapper: Any, knob: str) -> Any:
    """Return the wrapper of a configuration entry, made if need be.

    The entry is a wrapper, a name, ``module:attribute``, or a table with parameters.
    """
    if not isinstance(wrapper, str | Mapping):
        return wrapper
    from backends import wrappers

    parameters = dict(wrapper) if isinstance(wrapper, Mapping) else {"type": wrapper}
    found = _found(str(parameters.pop("type", "")), knob, {"zstd": wrappers.Zstd, "fp8": wrappers.Fp8}, "a wrapper")
    if hasattr(found, "encode") and not isinstance(found, type):
        return found
    _check_parameters("wrapper", knob, found, parameters)
    return found(**parameters)


def leads_on(tier: Tier, chain: Chain) -> bool:
    """Return whether routes may start at this tier.

    It must be a source, or a page store, which does not report its evictions.
    """
    return tier.source is not None or (chain != "on_evict" and tier.held_pages is not None)


def make_policies(policies: Sequence[PolicyLike] | None, tier: Tier, route: str) -> list[Policy | AsyncPolicy]:
    """Make the policies of a route into this tier.

    By default it is a filter for blocks that the tier already has, unless the tier filters these itself.

    Raises:
        ConfigError: an unknown name, or a parameter that the policy does not have.
        ImportError, AttributeError: no such module, or no such name in it.
        TypeError: the object is not a policy.
    """
    if policies is None:
        return [presence_filter(tier)] if tier.capabilities.asked_first else []
    return [_policy(policy, tier, f"routes.{route}.policies") for policy in policies]


def _policy(policy: PolicyLike, tier: Tier, knob: str) -> Policy | AsyncPolicy:
    if isinstance(policy, Mapping):
        parameters = dict(policy)
        name = str(parameters.pop("type"))
        if name == "presence":
            for parameter, value in parameters.items():
                raise ConfigError(f"{knob}.{parameter}", value, "presence has no parameters")
            return presence_filter(tier)
        found = _found(name, knob, _POLICIES, "a policy")
        _check_parameters("policy", knob, found, parameters)
        made = found(**parameters)
    elif isinstance(policy, str):
        if policy == "presence":
            return presence_filter(tier)
        found = _found(policy, knob, _POLICIES, "a policy")
        made = found() if isinstance(found, type) else found
    else:
        made = policy
    return as_policy(made)


def _check_parameters(what: str, knob: str, maker: Any, parameters: Mapping[str, Any]) -> None:
    """Check that each entry of a table is a factory's parameter.

    Raises:
        ConfigError: it is not.
    """
    from backends.plugins import TierParameterError
    from backends.plugins.finding import check_names, parameters_of

    try:
        check_names(what, parameters, parameters_of(maker))
    except TierParameterError as error:
        raise ConfigError(f"{knob}.{error.parameter}", error.value, error.why) from None


def _found(name: str, knob: str, ready_made: Mapping[str, Any], what: str) -> Any:
    if name in ready_made:
        return ready_made[name]
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(knob, name, f"must be one of {', '.join(ready_made)}, or module:attribute")
    from backends.plugins.finding import find_module, find_name  # its errors name the object and the place

    return find_name(find_module(module), attribute, f"{what} for {knob}")


def presence_filter(tier: Tier) -> Policy | AsyncPolicy:
    """Return the filter for blocks that a tier already has."""
    return PresenceFilter(tier)
