"""The table of an engine behind an inference engine: where its tiers are, and what it is unless it says otherwise. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .._errors import ConfigError

DAEMON_URL: Final = (
    "",
    "ipc://PATH, or ipc, or empty",
    r"ipc(://.+)?|",
    "The daemon of this host that has the tiers (`offload serve`), instead of tiers in this process; ipc: that of this user.",
)
"""The knob by which an inference engine uses a daemon: one line, in place of tiers."""

_CACHE: Final[Mapping[str, Any]] = {
    # A server that is away must not keep an inference engine from starting, nor later from finding it again.
    "on_enter_failure": "miss",
    # What is least recently used makes room: a cache that takes nothing in when it is full serves yesterday's prompts.
    # Nobody waits for a store here, but a busy host may for a tier's answer: what it is not asked in time is not stored.
    "pipeline": {"on_destination_full": "evict", "policy_timeout": 5.0},
}


def located(engine: Mapping[str, Any], daemon_url: str, section: str) -> Mapping[str, Any]:
    """The table of an engine, with its tiers, or with the daemon that has them.

    Args:
        engine: the table that was said.
        daemon_url: what was said beside it, or nothing.
        section: where both were said.

    Raises:
        ConfigError: both say where blocks go, or neither does.
    """
    if daemon_url and (engine.get("tiers") or engine.get("daemon_url", daemon_url) != daemon_url):
        raise ConfigError(f"{section}.daemon_url", daemon_url, "must be empty where the table engine names tiers")
    table = {**engine, "daemon_url": daemon_url} if daemon_url else engine
    if not table.get("tiers") and not table.get("daemon_url"):
        raise ConfigError(f"{section}.engine", dict(engine), "must name tiers: {'tiers': {...}}; or say daemon_url")
    return table


def as_cache(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table of an engine for a cache. What is said wins, name by name."""
    return _over(_CACHE, table)


def as_batch_cache(table: Mapping[str, Any], timeout: float, room_timeout: float) -> dict[str, Any]:
    """The same, for a cache that is stored to by the batch, and that must not keep its user waiting.

    Args:
        table: what is said; it wins, name by name.
        timeout: seconds that a question to a tier may take.
        room_timeout: seconds that a store may wait for room in a full tier.
    """
    defaults = {
        "on_load_failure": "retry",
        "lookup_timeout": timeout,
        "breaker": {"call_timeout": timeout, "enter_timeout": timeout, "first_wait": min(1.0, timeout)},
        "pipeline": {
            # What is stored comes as a batch already: nothing is gained by waiting for company.
            "batch_config": {"max_batch_size": 256, "min_batch_size": 1, "flush_interval": 0.0},
            # The presence filter asks the server, which may take as long as any question.
            "policy_timeout": timeout,
            "destination_timeout": room_timeout,
            # The engine bounds what it stores at once by its own memory, so that this bound is for errors.
            "budget_blocks": 1 << 20,
        },
    }
    return as_cache(_over(defaults, table))


def _over(defaults: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """What is said, over the defaults: table by table, name by name."""
    merged = {**defaults, **said}
    for name, value in said.items():
        default = defaults.get(name)
        if isinstance(default, Mapping) and isinstance(value, Mapping):
            merged[name] = _over(default, value)
    return merged
