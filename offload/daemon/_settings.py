"""All settings of a daemon, with the places that set them.

They are shown by ``--print-config``, and compared by a reload.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from maru.configuration import Document, Knob

from .._engine.config import EngineConfig, engine_knobs
from ._config import (
    CHANNEL_NAME,
    MARU_NAME,
    POOL_SECTION,
    RELOADED,
    DaemonConfig,
    daemon_config,
    daemon_knobs,
    embeds_maru,
    engine_config,
    pool_config,
    read_document,
)

if TYPE_CHECKING:
    from backends.pinned_pool import PinnedPoolConfig


@attrs.frozen
class Settings:
    """The settings that a daemon was started with."""

    path: str
    """Path of its file; empty without one."""
    document: Document
    options: Mapping[str, tuple[str, object]]
    daemon: DaemonConfig
    engine: EngineConfig
    embeds_maru: bool
    """Whether the daemon runs a Maru server of its own."""
    pinned_pool: PinnedPoolConfig | None
    """Configuration of the pool that it serves, if it serves one."""

    @property
    def maru_directory(self) -> str:
        """Directory of the embedded Maru server's pool and sockets."""
        return f"{self.daemon.runtime_dir}/{MARU_NAME}"


def read_settings(path: str, options: Mapping[str, tuple[str, object]]) -> Settings:
    """Read a daemon's file, the environment and the options.

    Raises:
        offload.ConfigError: an unknown name, or a value out of its bound.
        OSError: the file cannot be read.
    """
    document = read_document(path)
    daemon = daemon_config(document, options=options)
    daemon = attrs.evolve(daemon, runtime_dir=os.path.realpath(daemon.runtime_dir))
    embedded = f"ipc://{daemon.runtime_dir}/{MARU_NAME}/maru.sock"
    engine = engine_config(document, daemon, embedded)
    return Settings(
        path, document, options, daemon, engine, embeds_maru(document, daemon), pool_config(document, daemon)
    )


def refused_changes(before: Settings, after: Settings) -> list[str]:
    """Return the settings that differ and need a restart, by name."""
    names = [
        f"daemon.{field.name}"
        for field in attrs.fields(DaemonConfig)
        if field.name not in RELOADED and getattr(before.daemon, field.name) != getattr(after.daemon, field.name)
    ]
    if _listens_otherwise(before.daemon, after.daemon):
        names.append("daemon.admin_token_file")
    elif not before.daemon.admin_path("") and after.daemon.admin_path(""):
        names.append("daemon.admin")  # by the end of its tenants
    taken_over = keep_unreloadable_of_engine(before.engine, after.engine)
    names += [
        f"engine.{field.name}"
        for field in attrs.fields(EngineConfig)
        if getattr(taken_over, field.name) != getattr(after.engine, field.name)
    ]
    if before.pinned_pool is not None and after.pinned_pool is not None:
        names += [
            f"{POOL_SECTION}.{field.name}"
            for field in attrs.fields(type(before.pinned_pool))
            if getattr(before.pinned_pool, field.name) != getattr(after.pinned_pool, field.name)
        ]
    return names


def keep_unreloadable(before: DaemonConfig, after: DaemonConfig) -> DaemonConfig:
    """Return the settings before, with reloadable ones from after."""
    kept = {"admin_token_file"} if _listens_otherwise(before, after) else set()
    return attrs.evolve(before, **{name: getattr(after, name) for name in RELOADED - kept})


def _listens_otherwise(before: DaemonConfig, after: DaemonConfig) -> bool:
    """Return whether only one of the two has a token file.

    A listener would then begin, or write a file.
    """
    return bool(before.admin_token_file) != bool(after.admin_token_file)


def keep_unreloadable_of_engine(before: EngineConfig, after: EngineConfig) -> EngineConfig:
    """Return the engine's settings before, with reloadable thresholds from after."""
    choice = attrs.evolve(
        before.load_or_recompute,
        max_loss=after.load_or_recompute.max_loss,
        probe_interval=after.load_or_recompute.probe_interval,
    )
    return attrs.evolve(before, lookup_timeout=after.lookup_timeout, breaker=after.breaker, load_or_recompute=choice)


def as_toml(settings: Settings, environ: Mapping[str, str]) -> str:
    """Return all settings as a file that sets them again.

    A comment names the place where each was set.
    """
    file = settings.document.parse()
    shown: list[tuple[tuple[Knob, ...], Any]] = [
        (daemon_knobs(), settings.daemon),
        (engine_knobs(), settings.engine),
    ]
    if settings.pinned_pool is not None:
        from backends.pinned_pool import knobs as pool_knobs

        shown.append((pool_knobs(), settings.pinned_pool))
    lines = [
        f"{path} = {value}  # {source}"
        for knobs, config in shown
        for knob in knobs
        for source in [_source(knob, file, settings, environ)]
        for path, value in _shown(knob.name, _value(config, knob.name.split(".")[1:]))
    ]
    return "\n".join(lines)


def _source(knob: Knob, file: Mapping[str, Any], settings: Settings, environ: Mapping[str, str]) -> str:
    if knob.name in settings.options:
        return settings.options[knob.name][0]
    if knob.variable in environ:
        return f"environment, {knob.variable}"
    table: Any = file
    for name in knob.name.split("."):
        table = table.get(name) if isinstance(table, Mapping) else None
    return "default" if table is None else f"file {settings.document.place(knob.name)}"


def _value(config: Any, path: Sequence[str]) -> Any:
    for name in path:
        config = getattr(config, name)
    return config


def _shown(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield a value as TOML, by name.

    JSON is TOML except for tables, which are shown name by name, and for empty values, which are left out.
    """
    if value is None or (isinstance(value, Mapping | tuple) and not value):
        return
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _shown(f"{path}.{json.dumps(name) if not str(name).isidentifier() else name}", inner)
    elif value == float("inf"):
        yield path, "inf"
    elif isinstance(value, tuple) and any(attrs.has(type(item)) for item in value):
        yield path, "[" + ", ".join(_inline(item) for item in value) + "]"
    else:
        yield path, json.dumps(value, default=str)


def _inline(item: Any) -> str:
    told = {name: value for name, value in attrs.asdict(item, recurse=False).items() if value not in (None, "")}
    return "{ " + ", ".join(f"{name} = {json.dumps(value, default=str)}" for name, value in told.items()) + " }"


def maru_config(settings: Settings) -> Any:
    """Return the configuration of the embedded Maru server, if there is one."""
    if not settings.embeds_maru:
        return None
    from maru import ServerConfig

    pool_bytes, of_engines = (
        int(gib * (1 << 30)) for gib in (settings.daemon.maru_pool_size_gb, settings.daemon.engine_pool_size_gb)
    )
    return ServerConfig(
        rm_address="",
        pool_path=settings.maru_directory,
        # Next to this daemon's region there is that of the one before, which is still read.
        capacity_bytes=2 * pool_bytes + of_engines + (64 << 20),
        log_level=settings.daemon.log_level,
    )


def notes_on_page_stores(settings: Settings) -> Iterator[str]:
    """Yield a sentence for each tier whose page store runs elsewhere."""
    if not settings.document.parse().get("engine", {}).get("tiers"):
        return
    for name, tier in settings.engine.tiers.items():
        kind = tier.get("type") if isinstance(tier, Mapping) else tier
        if isinstance(kind, str) and kind.partition(":")[0] == "maru":
            url = tier.get("server_url") if isinstance(tier, Mapping) else kind.partition(":")[2]
            where = f"at {url}" if url else "where clients of this user look"
            yield f"tier {name}: no page store is embedded, as [engine] names tiers: maru-server has to run {where}"


def socket_url(daemon: DaemonConfig) -> str:
    """Return the URL of the daemon with this configuration."""
    return f"ipc://{daemon.runtime_dir}/{CHANNEL_NAME}"
