"""The configuration of the engine of an adapter, with its defaults. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .._errors import ConfigError

DAEMON_URL: Final = (
    "",
    "ipc://PATH, or ipc, or empty",
    r"ipc(://.+)?|",
    "Daemon of this host with the tiers (`offload serve`), instead of tiers in this process; ipc: this user's daemon.",
)
"""The knob that selects a daemon in place of own tiers."""

_CACHE: Final[Mapping[str, Any]] = {
    # A server that is away must not keep an inference engine from starting, nor later from finding it again.
    "on_enter_failure": "miss",
    # The least recently used blocks make room: a cache that is full and accepts nothing new serves yesterday's prompts.
    # Nobody waits for a store here, but a tier on a busy host may answer slowly: blocks that it is not asked about in
    # time are not stored.
    "pipeline": {"on_destination_full": "evict", "policy_timeout": 5.0},
}


def located(engine: Mapping[str, Any], daemon_url: str, section: str) -> Mapping[str, Any]:
    """Return an engine's table with its tiers, or with their daemon.

    Args:
        engine: the configured table.
        daemon_url: the URL that is configured next to the table, or empty.
        section: the configuration section of both.

    Raises:
        ConfigError: both name a place for blocks, or neither does.
    """
    if daemon_url and (engine.get("tiers") or engine.get("daemon_url", daemon_url) != daemon_url):
        raise ConfigError(f"{section}.daemon_url", daemon_url, "must be empty if the table engine names tiers")
    table = {**engine, "daemon_url": daemon_url} if daemon_url else engine
    if not table.get("tiers") and not table.get("daemon_url"):
        raise ConfigError(f"{section}.engine", dict(engine), "must name tiers: {'tiers': {...}}; or set daemon_url")
    return table


def as_cache(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of an engine for a cache.

    Configured values override the defaults.
    """
    return _over(_CACHE, table)


def as_batch_cache(table: Mapping[str, Any], timeout: float, room_timeout: float) -> dict[str, Any]:
    """Return the table for a cache that is stored to in batches.

    Such a cache must not keep its user waiting.

    Args:
        table: the configured values, which override the defaults.
        timeout: seconds that a question to a tier may take.
        room_timeout: seconds that a store may wait for room in a full tier.
    """
    defaults = {
        "on_load_failure": "retry",
        "lookup_timeout": timeout,
        "breaker": {"call_timeout": timeout, "enter_timeout": timeout, "first_wait": min(1.0, timeout)},
        "pipeline": {
            # Blocks already arrive in batches: waiting for more gains nothing.
            "batch_config": {"max_batch_size": 256, "min_batch_size": 1, "flush_interval": 0.0},
            # The presence filter asks the server, which may take as long as any question.
            "policy_timeout": timeout,
            "destination_timeout": room_timeout,
            # The engine limits concurrent stores by its own memory, so this bound only catches errors.
            "budget_blocks": 1 << 20,
        },
    }
    return as_cache(_over(defaults, table))


def _over(defaults: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the configured values over the defaults, in nested tables too."""
    merged = {**defaults, **said}
    for name, value in said.items():
        default = defaults.get(name)
        if isinstance(default, Mapping) and isinstance(value, Mapping):
            merged[name] = _over(default, value)
    return merged
