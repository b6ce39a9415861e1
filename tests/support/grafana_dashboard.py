"""The dashboard for Grafana: one table of panels, and the JSON that is made of it.

    python -m tests.support.grafana_dashboard      write docs/_static/kv-offload.dashboard.json

Rule 1. Each expression names series of `offload.metrics` only; a test asks a real Prometheus for each of them.
Rule 2. A rate has its denominator: a share of hits is drawn beside how much was asked for.
Rule 3. Nothing is named by a number that changes: the source of data is a variable, the identifier is a word.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

FILE = Path(__file__).resolve().parents[2] / "docs" / "_static" / "kv-offload.dashboard.json"
WIDTH, HEIGHT = 8, 7
"""Of a panel: three of them fill Grafana's 24 columns."""
SOURCE = {"type": "prometheus", "uid": "${source}"}


@attrs.frozen
class Panel:
    """One picture."""

    title: str
    unit: str
    """In Grafana's words: ``percentunit``, ``ops``, ``s``, ``bytes``, ``short``."""
    lines: tuple[tuple[str, str], ...]
    """Expressions, each with its legend."""
    kind: str


def series(name: str, where: str = "") -> str:
    """The series of this name of the engines that are chosen, where some label has a value."""
    return f'kv_offload_{name}{{instance=~"$instance"{where and ", "}{where}}}'


def total(vector: str, by: str) -> str:
    """The sum over all engines."""
    return f"sum by ({by}) ({vector})" if by else f"sum({vector})"


def rate(name: str, by: str = "", where: str = "") -> str:
    """Of a counter."""
    return total(f"rate({series(name, where)}[$__rate_interval])", by)


def now(name: str, by: str = "", where: str = "") -> str:
    """Of a gauge."""
    return total(series(name, where), by)


def quantile(q: float, name: str, by: str = "") -> str:
    """Of a histogram."""
    return f"histogram_quantile({q}, {rate(f'{name}_bucket', f'le, {by}' if by else 'le')})"


def share(part: str, whole: str) -> str:
    """A part of a whole."""
    return f"{part} / {whole}"


def panel(title: str, unit: str, *lines: tuple[str, str], kind: str = "timeseries") -> Panel:
    """One picture of these expressions, each with its legend."""
    return Panel(title, unit, lines, kind)


ROWS: dict[str, list[Panel]] = {
    "Is it worth it?": [
        panel(
            "Hits of what was asked for",
            "percentunit",
            (share(rate("hit_blocks_total"), rate("asked_blocks_total")), "hits"),
        ),
        panel(
            "Blocks asked for and found",
            "ops",
            (rate("asked_blocks_total"), "asked for"),
            (rate("hit_blocks_total"), "found"),
            (rate("loaded_blocks_total"), "loaded"),
        ),
        panel("Blocks loaded, by tier", "ops", (rate("tier_loaded_total", "tier"), "{{tier}}")),
        panel(
            "Loading a block, beside computing it",
            "s",
            (now("load_seconds_per_block", "tier"), "load, {{tier}}"),
            (now("recompute_seconds_per_block"), "compute"),
        ),
        panel("What was advised", "ops", (rate("advised_lookups_total", "advice"), "{{advice}}")),
        panel("Loads given up", "ops", (rate("given_up_loads_total", "reason"), "{{reason}}")),
        panel(
            "Tokens asked for, and found by tier",
            "ops",
            (rate("asked_tokens_total"), "asked for"),
            (rate("tier_hit_tokens_total", "tier"), "{{tier}}"),
        ),
    ],
    "Tiers": [
        panel(
            "Use",
            "percentunit",
            (share(now("tier_used_bytes", "tier"), now("tier_capacity_bytes", "tier")), "{{tier}}"),
        ),
        panel(
            "Stored and evicted blocks",
            "ops",
            (rate("tier_stored_total", "tier"), "stored, {{tier}}"),
            (rate("tier_evicted_total", "tier"), "evicted, {{tier}}"),
        ),
        panel(
            "Breakers that are not closed",
            "short",
            (now("breaker_state", "tier, state", 'state!="closed"'), "{{tier}} {{state}}"),
        ),
    ],
    "Stores": [
        panel(
            "Blocks in the pipelines, of the budget",
            "percentunit",
            (
                share(now("pipeline_used_blocks", "pipeline"), now("pipeline_budget_blocks", "pipeline")),
                "{{pipeline}}",
            ),
        ),
        panel("Containers in each stage", "short", (now("pipeline_stage_containers", "stage"), "{{stage}}")),
        panel("Time in each stage, 99th percentile", "s", (quantile(0.99, "stage_seconds", "stage"), "{{stage}}")),
        panel(
            "Time of a copy",
            "s",
            (quantile(0.5, "copy_seconds"), "median"),
            (quantile(0.99, "copy_seconds"), "99th percentile"),
        ),
        panel("How containers end", "ops", (rate("pipeline_settled_total", "status"), "{{status}}")),
        panel("Where cancelled ones were", "ops", (rate("ended_total", "stage", 'status="cancelled"'), "{{stage}}")),
        panel("Filtered blocks, by reason", "ops", (rate("filtered_blocks_total", "reason"), "{{reason}}")),
        panel("Blocks that failed, by reason", "ops", (rate("failed_blocks_total", "reason"), "{{reason}}")),
        panel("Bytes copied", "Bps", (rate("pipeline_copied_bytes_total", "pipeline"), "{{pipeline}}")),
    ],
    "What must be 0": [
        panel("Damaged blocks found", "ops", (rate("tier_missed_total", "tier", 'reason="damaged"'), "{{tier}}")),
        panel("Quarantined copies", "short", (now("quarantined"), "copies"), kind="stat"),
        panel("Mismatches of the shadow check", "ops", (rate("shadow_mismatches_total", "with"), "{{with}}")),
    ],
}


def panels() -> Iterator[dict[str, Any]]:
    """All panels and the lines between them, each at its place."""
    number, top = 1, 0
    for title, row in ROWS.items():
        yield {
            "type": "row", "id": number, "title": title, "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
        }  # fmt: skip
        number, top = number + 1, top + 1
        for at, one in enumerate(row):
            place = {"x": at % 3 * WIDTH, "y": top + at // 3 * HEIGHT, "w": WIDTH, "h": HEIGHT}
            yield {
                "type": one.kind, "id": number, "title": one.title, "datasource": SOURCE, "gridPos": place,
                "fieldConfig": {"defaults": {"unit": one.unit, "min": 0}, "overrides": []},
                "targets": [
                    {"refId": chr(ord("A") + position), "expr": expression, "legendFormat": legend, "datasource": SOURCE}
                    for position, (expression, legend) in enumerate(one.lines)
                ],
            }  # fmt: skip
            number += 1
        top += -(-len(row) // 3) * HEIGHT


def dashboard() -> dict[str, Any]:
    """What Grafana imports."""
    return {
        "title": "KV cache offloading",
        "uid": "kv-offload",
        "tags": ["kv-cache"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "instance", "label": "Engine", "type": "query", "datasource": SOURCE,
                    "query": "label_values(kv_offload_lookups_total, instance)", "refresh": 2,
                    "includeAll": True, "multi": True, "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": list(panels()),
    }  # fmt: skip


def rendered() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(rendered())
    print(f"wrote {FILE.name}: {sum(map(len, ROWS.values()))} panels")
