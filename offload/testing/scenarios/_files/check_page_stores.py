"""Whether what a scenario says of a page store is something that can be done to one, or with one. Pure."""

from __future__ import annotations

from typing import Final

from .._house import first_destination
from .._program import FaultKind, PolicySpec
from .complaints import Complaints, quoted, said

FAULTS_OF_A_PAGE_STORE: Final[frozenset[FaultKind]] = frozenset(
    {"peer_death", "stall", "drop", "duplicate", "full", "flip", "fail", "delay"}
)
"""What can be done to its server, its wire and its pages, or to the thread that copies into them."""
_CONTAINERS: Final[frozenset[FaultKind]] = frozenset(
    {"cancel", "abandon", "cancel_waiter", "cancel_host", "shut_down", "clock", "evict"}
)
_ONLY_OF_IT: Final = ("patience_ms", "lease_ms")


def check_page_stores(c: Complaints) -> None:
    """Tiers of kind ``maru``, and what of the others is only theirs."""
    stores = {name for name, tier in c.scenario.tier.items() if tier.kind == "maru"}
    for name, tier in c.scenario.tier.items():
        path = f"tier.{quoted(name)}"
        if name not in stores:
            for field in _ONLY_OF_IT:
                if said(tier, field):
                    c.wrong(
                        f"{path}.{field}", f"is about page stores, and this tier is of kind {tier.kind!r}: leave it out"
                    )
        elif tier.eviction != "lru":
            c.wrong(f"{path}.eviction", "a page store evicts what was used least recently: leave it out")
    for name, spec in c.pipelines.items():
        path = f"pipeline.{quoted(name)}"
        if spec.source in stores:
            c.wrong(
                f"{path}.from", f"{spec.source!r} is a page store, from which no pipeline starts: let it be the last"
            )
        for i, policy in enumerate(spec.policies):
            if policy.do == "present" and (policy.tier or spec.to) in stores:
                _present(c, f"{path}.policies[{i}]", policy)
    for i, fault in enumerate(c.scenario.fault):
        tier_name = fault.tier or first_destination(c.scenario)
        if fault.do in _CONTAINERS or tier_name not in stores:
            continue
        if fault.do not in FAULTS_OF_A_PAGE_STORE:
            can = ", ".join(sorted(FAULTS_OF_A_PAGE_STORE))
            c.wrong(f"fault[{i}].do", f"nobody can do {fault.do!r} to a page store, {tier_name!r}: it can meet {can}")
        elif fault.do == "fail" and (fault.keys or fault.at_hook):
            c.wrong(f"fault[{i}].do", "of a page store a whole copy fails, not one block: say at_ms, and no keys")


def _present(c: Complaints, path: str, policy: PolicySpec) -> None:
    for field in ("keys", "ms", "p"):
        if said(policy, field):
            c.wrong(
                f"{path}.{field}",
                "a page store is asked by the filter that an engine has, which asks of all: leave it out",
            )
