"""Parses ``--tier``. Pure.

It is a tier that the replay makes for itself, or any specification for `make_tier`::

    memory                                 maru                        file:DIR
    NAME                                   module:attribute            maru:URL
    { type = "NAME", parameter = 1 }       {"type": "NAME", "parameter": 1}

The kinds in the first line are made and sized by the replay, and removed with it. Those in the other two are the
caller's.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from typing import Any

from .options import ReplayError, TierSpec
from .units import UNLIMITED


def specs_of(tiers: Sequence[str], capacities: Sequence[float]) -> list[TierSpec]:
    """Parse ``--tier`` and ``--capacity``; by default one memory tier.

    Raises:
        ReplayError: a specification is wrong, or the numbers of capacities and tiers differ.
    """
    tiers = tiers or ("memory",)
    capacities = capacities or (UNLIMITED,) * len(tiers)
    if len(capacities) != len(tiers):
        raise ReplayError(f"{len(tiers)} tiers, but {len(capacities)} capacities: pass --capacity once for each --tier")
    return [_spec_of(tier, capacity) for tier, capacity in zip(tiers, capacities, strict=True)]


def _spec_of(tier: str, capacity: float) -> TierSpec:
    kind, _, where = tier.partition(":")
    if tier in ("memory", "maru"):
        return TierSpec(tier, None, capacity)
    if kind == "file" and where:
        return TierSpec("file", where, capacity)
    if kind == "file" or not tier.strip():
        raise ReplayError(
            f"--tier {tier!r}: must be memory, maru or file:DIR, a name, module:attribute, or a table such as "
            '{ type = "NAME" }'
        )
    if tier.lstrip().startswith("{"):
        table = _table(tier)
    elif kind == "maru":
        table = {"type": "maru", "server_url": where}
    else:
        table = {"type": tier}
    if capacity != UNLIMITED:
        knob = "pool_size" if table["type"] == "maru" else "capacity_bytes"
        if knob in table:
            raise ReplayError(
                f"--tier {tier!r}: {knob} is set twice: leave out its --capacity, or set that to unlimited"
            )
        table[knob] = int(capacity)
    return TierSpec(table["type"], None, capacity, table)


def _table(text: str) -> dict[str, Any]:
    """Parse JSON, or an inline table of TOML."""
    table: Any
    try:
        table = json.loads(text)
    except ValueError:
        try:
            table = tomllib.loads(f"tier = {text}")["tier"]
        except tomllib.TOMLDecodeError as error:
            raise ReplayError(f"--tier {text!r}: neither JSON nor an inline table of TOML: {error}") from None
    if not isinstance(table.get("type"), str) or not table["type"]:
        raise ReplayError(f"--tier {text!r}: has no type: set a name or module:attribute")
    return dict(table)
