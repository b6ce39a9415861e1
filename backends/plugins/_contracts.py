"""The three contracts of a plugin, as the methods that each takes. Pure.

An object is judged by the methods it has, not by what it inherits from: nothing of LMCache need be installed.
"""

from __future__ import annotations

from typing import Final

from ._errors import PluginTypeError
from .finding import missing_methods

TIER_METHODS: Final = ("reserve", "reserve_nowait", "contains", "pin", "load", "delete", "statistics")
"""What every tier has."""

NATIVE_METHODS: Final = (
    "event_fd",
    "submit_batch_get",
    "submit_batch_set",
    "submit_batch_exists",
    "drain_completions",
    "close",
)
"""What a native connector has. ``submit_batch_delete`` is a seventh, which not all have."""

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
"""What LMCache's L2AdapterInterface leaves to those who implement it."""

_CONTRACTS: Final = {
    "a tier": TIER_METHODS,
    "a native connector": NATIVE_METHODS,
    "an L2 adapter of LMCache": L2_METHODS,
}


def contract_of(plugin: object, what: str, *contracts: str) -> str:
    """Which contract an object, or a class, has all methods of: a key of the three above.

    Args:
        plugin: the object or class.
        what: what it is, for the error.
        *contracts: only these; by default any of them.

    Raises:
        PluginTypeError: none. Says what it lacks.
    """
    asked = contracts or tuple(_CONTRACTS)
    lacks = {contract: missing_methods(plugin, _CONTRACTS[contract]) for contract in asked}
    for contract, missing in lacks.items():
        if not missing:
            return contract
    wants = "; ".join(f"{contract} would need {', '.join(missing)}" for contract, missing in lacks.items())
    raise PluginTypeError(f"{what} is no plugin: {wants}")
