"""The configuration of an engine: its settings, tiers, and routes.

In a file an engine is one table. Each tier is a table in it, from the fastest to the slowest, and each route is a table
of a list::

    [engine]                                      [engine.tiers.host]
    on_load_failure = "retry"                     type = "memory"
    promote = true                                capacity_bytes = "64 MiB"

    [[engine.routes]]                             [engine.tiers.disk]
    to = "disk"                                   type = "file"
    source = "source"                             directory = "/var/cache/kv"
"""

# ruff: noqa: RUF009  # the functions called in the class bodies make fields
from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, get_args

import attrs

from backends.abc import Source, Tier
from maru.configuration import Document, Knob, Knobs

from .._config import BreakerConfig, PipelineConfig
from .._errors import ConfigError
from ..abc import AsyncPolicy, Policy

OnLoadFailure: TypeAlias = Literal["miss", "fail", "retry"]
"""The action of a load for a block that cannot be loaded.

The load ends the usable prefix there, raises, or looks the block up again in the slower tiers (and ends the prefix
there if they do not have it).
"""

OnEnterFailure: TypeAlias = Literal["fail", "miss"]
"""The action of an engine for a tier that cannot be entered.

The engine fails to open; or it opens with the tier counting as broken, so that lookups miss there, until it can be
entered.
"""

Chain: TypeAlias = Literal["none", "on_store", "on_evict"]
"""The blocks stored in the next tier.

None, those that are stored in the tier before it, or those that this tier evicts.
"""

ChoiceMode: TypeAlias = Literal["off", "advise", "enforce"]
"""The use of the comparison of loading with recomputing.

There is no comparison, it is the advice of a lookup, or it limits the loaded blocks.
"""

TierLike: TypeAlias = "Tier | str | Mapping[str, Any]"
"""A tier; or the name or table from which it is made.

See :func:`backends.plugins.make_tier`. A table may also have ``wrappers``: names such as ``zstd`` and ``fp8``, a
``module:attribute`` that is or makes a wrapper, or tables of these with parameters.
"""

PolicyLike: TypeAlias = "Policy | AsyncPolicy | str | Mapping[str, Any]"
"""A policy; or the name or table from which it is made.

A name is ``pass_all``, ``presence``, ``frequency``, or a ``module:attribute`` that is a policy. The ``type`` of a table
is such a name, or a ``module:attribute`` that makes a policy of the other entries.
"""

SOURCE: Final = "source"
"""The name of the engine's source in routes."""

DAEMON: Final = "daemon"
"""The name of the tier that connects to a daemon."""
DAEMON_TIER: Final = "offload.client:DaemonTier"
"""The type of that tier."""
SHADOW_CHECK: Final = 1_000
"""The default of ``shadow_check``: one in so many loads is compared."""

_knob: Final = Knobs("OFFLOAD", ConfigError)
_NO_TABLES: Final[Mapping[str, Any]] = {}


class TierTable(dict[str, Any]):
    """A tier's table in a file, with its position for errors."""

    def __init__(self, table: Mapping[str, Any], document: Document, section: str) -> None:
        super().__init__(table)
        self.document: Document = document
        """The file."""
        self.section: str = section
        """The table's path in the file: ``engine.tiers.disk``."""


# --- routes -------------------------------------------------------------------------------------------------------


def _check_name(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, str):
        raise ConfigError(attribute.name, value, "must be the name of a tier")


def _check_policies(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    for policy in value if isinstance(value, tuple) else ():
        if isinstance(policy, Mapping) and not isinstance(policy.get("type"), str):
            raise ConfigError(attribute.name, policy, "has no type: set a name, or module:attribute")
        if not (isinstance(policy, str | Mapping | AsyncPolicy) or callable(policy)):
            raise ConfigError(attribute.name, policy, "must be a policy, a name, module:attribute, or a table")


def _as_tuple(value: Any) -> Any:
    if value is None or isinstance(value, tuple):
        return value
    if isinstance(value, list):
        return tuple(value)
    return (value,)


def _check_pipeline(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None and not isinstance(value, PipelineConfig):
        raise ConfigError(attribute.name, value, "must be a PipelineConfig, or a table of its knobs")


def _as_pipeline(value: Any) -> Any:
    return _knob.from_mapping(value, PipelineConfig, section="pipeline") if isinstance(value, Mapping) else value


def _is_flag(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(attribute.name, value, "must be true or false")


@attrs.frozen
class Route:
    """A route by which blocks get into a tier.

    Routes that are not configured have the defaults.
    """

    to: str = attrs.field(validator=_check_name)
    """The tier that it leads to, by name."""
    source: str = attrs.field(default="", validator=_check_name)
    """The name of the faster tier at which it starts.

    ``source`` is the engine's source. By default the tier before ``to`` if that can be read as a source, else the
    engine's source.
    """
    policies: Sequence[PolicyLike] | None = attrs.field(default=None, converter=_as_tuple, validator=_check_policies)
    """Policies that decide in this order which blocks may take the route.

    By default blocks that the tier does not have yet may take it.
    """
    auto_chain: bool = attrs.field(default=True, validator=_is_flag)
    """Whether its stored blocks pass on to routes that start there."""
    required: bool | None = attrs.field(default=None, validator=attrs.validators.optional(_is_flag))
    """Whether a store waits for this route, and fails if it fails.

    This is about a route from one tier to the next. By default true with ``on_evict`` only: a block must not go
    before its copy is below. If it is not required, a store has ended when the tier before has its blocks, ``await
    handle.wait_routes()`` has their outcomes on this route, and the route drops blocks for which it has no room
    (``route_share``, ``route_patience``); with ``on_evict`` it then drops, and counts, victims beyond its share.
    """
    pipeline: PipelineConfig | None = attrs.field(default=None, converter=_as_pipeline, validator=_check_pipeline)
    """All settings of its pipeline; by default the engine's ``pipeline``."""


def _as_routes(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return value
    routes: list[Any] = []
    for at, route in enumerate(value):
        if not isinstance(route, Mapping):
            routes.append(route)
        elif "to" not in route:
            raise ConfigError(f"routes[{at}].to", None, "must be the name of a tier")
        else:
            routes.append(_knob.from_mapping(route, Route, section=f"routes[{at}]"))
    return tuple(routes)


def _check_routes(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(route, Route) for route in value):
        raise ConfigError("routes", value, "must be a list of Route, or of tables with the names of its fields")


# --- places -------------------------------------------------------------------------------------------------------


def _check_tiers(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError("tiers", value, "must be a table of tiers by name, the fastest first")
    for name, tier in value.items():
        if not isinstance(name, str) or not name:
            raise ConfigError("tiers", name, "must be a name, not empty")
        if not name.isprintable():
            raise ConfigError("tiers", name, "must consist of printable characters: it appears in logs and metrics")
        if name == SOURCE:
            raise ConfigError("tiers", name, "must be another name: routes use it for the engine's source")
        _check_place(f"tiers.{name}", tier, Tier)


def _check_source(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None:
        _check_place("source", value, Source)


def _check_place(name: str, place: object, kind: type[Source | Tier]) -> None:
    if isinstance(place, Mapping):
        if not isinstance(place.get("type"), str):
            raise ConfigError(f"{name}.type", place.get("type"), "must be a name such as memory, or module:attribute")
    elif not (isinstance(place, str) and place) and not isinstance(place, kind):
        kind_name = f"backends.abc.{kind.__name__}"
        raise ConfigError(name, place, f"must be a {kind_name}, a name such as memory, module:attribute, or a table")


def _check_promote(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, bool) and not (isinstance(value, str) and value):
        raise ConfigError(attribute.name, value, "must be true, false, or the name of a tier")


def _check_chain(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value not in get_args(Chain):
        raise ConfigError(attribute.name, value, f"must be one of {', '.join(get_args(Chain))}")


def _check_enter_failure(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    words = get_args(OnEnterFailure)
    actions = value if isinstance(value, Mapping) else {"": value}
    for name, word in actions.items():
        if word not in words:
            knob = f"{attribute.name}.{name}" if name else attribute.name
            raise ConfigError(
                knob, word, f"must be one of {', '.join(words)}, or a table of these by the names of tiers"
            )


def _as_enter_failure(value: Any) -> Any:
    """Parse a text such as ``maru=miss,disk=miss`` into a table.

    It is for environment variables.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, str) and "=" in value:
        pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
        return {name.strip(): word.strip() for name, _, word in pairs}
    return value


def _as_chain(value: Any) -> Any:
    return ("on_store" if value else "none") if isinstance(value, bool) else value


@attrs.frozen
class LoadOrRecompute:
    """The choice between loading found blocks and computing them.

    Reasons are in :func:`engine_knobs`.
    """

    mode: ChoiceMode = _knob.choice(
        "off",
        ChoiceMode,
        "Comparison of loading with recomputing. off: none; advise: in the advice of a hit; enforce: blocks that are "
        "computed sooner are not loaded, and a load that falls behind is given up.",
    )
    seconds_per_block: float = _knob.seconds(
        0.0,
        0.0,
        3_600.0,
        "Time to compute a block, until the engine reports it (Engine.computed). 0: unknown, so everything is loaded.",
    )
    max_loss: float = _knob.fraction(
        0.02,
        0.0,
        1.0,
        "Longest delay of a request compared with no cache, as a share of the time to compute the found blocks. Less "
        "gives up loads that stutter; 0 never tries an unmeasured tier.",
    )
    probe_interval: float = _knob.seconds(
        1.0,
        0.001,
        86_400.0,
        "Time after which a tier that nothing is loaded from is measured again, by twelve blocks at most.",
    )


@_knob.checks_names
@attrs.frozen
class EngineConfig:
    """The settings of an engine.

    :func:`engine_knobs` has the reason for each bound and default.
    """

    source: Source | str | Mapping[str, Any] | None = _knob.field(
        None,
        "a source, or how to make one",
        "Source of the blocks to store. Mostly an object, since a file cannot name an engine's tensors.",
        _check_source,
    )
    block_bytes: int = _knob.size(
        0, 0, 1 << 40, "Size of every block; needed only if the source is made from its name. 0: the source's size."
    )
    block_tokens: int = _knob.integer(
        0, 0, 1 << 20, "Tokens in a block, so that metrics also count tokens. 0: they do not."
    )
    tiers: Mapping[str, TierLike] = _knob.field(
        _NO_TABLES,
        "a table for each tier",
        "Tiers by name, from the fastest to the slowest.",
        _check_tiers,
        converter=lambda tiers: dict(tiers) if isinstance(tiers, Mapping) else tiers,
    )
    daemon_url: str = _knob.text(
        "",
        "ipc://PATH, or ipc, or empty",
        r"ipc(://.+)?|",
        "Daemon with the tiers (`offload serve`), instead of tiers here: it becomes the one tier, `daemon`. ipc: this "
        "user's daemon.",
    )
    routes: tuple[Route, ...] = _knob.field(
        (),
        "a list of tables",
        "Routes in addition to the default ones, or with other settings.",
        _check_routes,
        converter=_as_routes,
    )
    chain: Chain = _knob.field(
        "on_store",
        f"one of {', '.join(get_args(Chain))}",
        "Blocks to store in the next tier. true is on_store, false is none.",
        _check_chain,
        converter=_as_chain,
    )
    on_load_failure: OnLoadFailure = _knob.choice(
        "miss",
        OnLoadFailure,
        "Result of a load for a block that was found and cannot be loaded: end the prefix, raise, or look it up again.",
    )
    on_enter_failure: OnEnterFailure | Mapping[str, OnEnterFailure] = _knob.field(
        "fail",
        f"one of {', '.join(get_args(OnEnterFailure))}, or a table of these by the names of tiers, or maru=miss,disk=fail",
        "Action for a tier that cannot be made or entered: fail, or open with the tier counting as broken. A tier "
        "that is not named fails. A wrong configuration always fails.",
        _check_enter_failure,
        converter=_as_enter_failure,
    )
    promote: bool | str = _knob.field(
        False,
        "true, false, or the name of a tier",
        "Copy blocks that are loaded from a slower tier to a faster one: the fastest, or the named one.",
        _check_promote,
    )
    promotion_blocks: int = _knob.integer(
        256, 1, 65_536, "Blocks that are promoted at once. Each takes a block of host memory until it is written."
    )
    lookup_timeout: float = _knob.timeout(
        3.0,
        0.001,
        86_400.0,
        "Time for a tier's part of a lookup; after that the lookup continues without it, and the tier has a fault. "
        "Longer than the timeout of the page store's client, so that its error names the cause. inf: as call_timeout.",
    )
    store_patience: float = _knob.seconds(
        1.0, 0.0, 3_600.0, "Time that a store yields to loads in progress before one batch is copied all the same."
    )
    shadow_check: int = _knob.integer(
        SHADOW_CHECK,
        0,
        1_000_000_000,
        "Loads per shadow check: one of so many is read again, or recomputed, and compared with the loaded bytes. 0: "
        "no check. At 1,000 it costs less than 1 % of the time of loads.",
    )
    load_or_recompute: LoadOrRecompute = _knob.table(
        LoadOrRecompute(), "Choice between loading found blocks and computing them, if that is sooner."
    )
    breaker: BreakerConfig = _knob.table(BreakerConfig(), "Settings of the breaker, and of the probes of broken tiers.")
    pipeline: PipelineConfig = _knob.table(PipelineConfig(), "Settings of every route that has none of its own.")

    def __attrs_post_init__(self) -> None:
        if self.daemon_url:
            self._use_daemon()
        if isinstance(self.promote, str) and self.tiers and self.promote not in self.tiers:
            raise ConfigError("promote", self.promote, f"must be true, false, or one of {', '.join(self.tiers)}")
        if isinstance(self.on_enter_failure, Mapping) and self.tiers:
            for tier in self.on_enter_failure:
                if tier not in self.tiers:
                    known = ", ".join(self.tiers)
                    raise ConfigError("on_enter_failure", tier, f"must be the name of a tier: {known}")
        for at, route in enumerate(self.routes):
            for name, value in (("to", route.to), ("source", route.source)):
                if value not in self.tiers and not (name == "source" and value in ("", SOURCE)):
                    known = ", ".join([SOURCE, *self.tiers] if name == "source" else self.tiers) or "there is none"
                    raise ConfigError(f"routes[{at}].{name}", value, f"must be the name of a place: {known}")

    def _use_daemon(self) -> None:
        """Make the daemon the one tier."""
        tiers: dict[str, TierLike] = {DAEMON: {"type": DAEMON_TIER, "url": self.daemon_url}}
        if self.tiers not in ({}, tiers):
            raise ConfigError("daemon_url", self.daemon_url, "must be empty if tiers are set: the daemon has the tiers")
        object.__setattr__(self, "tiers", tiers)

    @property
    def first_pipeline(self) -> PipelineConfig:
        """The settings of the route into the first tier, which limit ``store``."""
        first = next(iter(self.tiers), None)
        return next((route.pipeline for route in self.routes if route.to == first), None) or self.pipeline

    def opens_without(self, tier: str) -> bool:
        """Return whether the engine opens even if this tier is absent."""
        actions = self.on_enter_failure
        return (actions.get(tier, "fail") if isinstance(actions, Mapping) else actions) == "miss"

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], *, section: str = "") -> EngineConfig:
        """Load from nested mappings, as a TOML or JSON parser returns them.

        Missing names keep their defaults.

        Args:
            mapping: the fields of this class by name.
            section: the path of this mapping in its file, put before names in errors.

        Raises:
            ConfigError: an unknown name, or a value out of range.
        """
        return _knob.from_mapping(mapping, cls, section=section)

    @classmethod
    def from_toml(
        cls,
        source: str | os.PathLike[str],
        *,
        section: str = "engine",
        others: Collection[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> EngineConfig:
        """Load from a TOML file and the environment.

        The environment takes precedence: ``OFFLOAD_ENGINE__PROMOTE=true``.

        Args:
            source: a path (``pathlib.Path``), or TOML as a text.
            section: the table to read; may be missing.
            others: tables of the file that are allowed and not read here. Any other table is an error.
            environ: the environment; by default that of this process.

        Raises:
            ConfigError: not TOML, an unknown name, or a value out of range; with file and line, or the variable.
            OSError: the file cannot be read.
        """
        return cls.from_document(_knob.read(source), section=section, others=others, environ=environ)

    @classmethod
    def from_document(
        cls,
        document: Document,
        *,
        section: str = "engine",
        others: Collection[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> EngineConfig:
        """Load from a file that was read, as :meth:`from_toml` does."""
        config = _knob.load(cls, document, section=section, others=others, environ=environ)

        def located(path: str, table: Any) -> Any:
            return TierTable(table, document, f"{section}.{path}") if type(table) is dict else table

        tables = {tier: located(f"tiers.{tier}", table) for tier, table in config.tiers.items()}
        return attrs.evolve(config, source=located("source", config.source), tiers=tables)


def engine_knobs() -> tuple[Knob, ...]:
    """Return every setting of an engine and of its pipelines.

    They are in the order of declaration.
    """
    return tuple(_knob.of(EngineConfig, "engine"))
