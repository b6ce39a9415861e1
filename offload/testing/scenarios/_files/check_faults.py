"""Whether the faults of a scenario can happen. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .._contract import SEAMS_OF
from .._program import Fault, FaultKind
from .complaints import Complaints, nearest, said

USED_BY_FAULT: Final[Mapping[FaultKind, tuple[str, ...]]] = {
    "cancel": ("who", "times"), "abandon": ("who",), "cancel_waiter": ("who",), "cancel_host": (), "shut_down": (),
    "evict": ("tier", "keys"), "unproven": ("tier", "for_ms", "grouped"), "fail": ("tier", "keys", "for_ms", "grouped"),
    "stall": ("tier", "for_ms"), "drop": ("tier", "for_ms", "grouped"), "delay": ("tier", "ms", "for_ms"),
    "duplicate": ("tier", "for_ms"), "miscount": ("tier", "by", "for_ms"), "reorder": ("tier", "for_ms"),
    "torn": ("tier", "keys", "for_ms", "grouped"),
    "flip": ("tier", "keys"), "full": ("tier", "for_ms"), "peer_death": ("tier", "for_ms"), "clock": ("ms",),
}  # fmt: skip
"""The fields that a fault of each kind looks at, besides when and how likely."""

_FIELDS: Final = tuple(dict.fromkeys([field for used in USED_BY_FAULT.values() for field in used]))
_ON_CONTAINERS: Final = frozenset({"cancel", "abandon", "cancel_waiter"})
_ANYWHERE: Final = frozenset({"evict", "flip", "peer_death"})
"""Those of a tier that are not about copies into it."""


def check_faults(c: Complaints) -> None:
    """What goes wrong."""
    for i, fault in enumerate(c.scenario.fault):
        path = f"fault[{i}]"
        _when(c, path, fault)
        _whom(c, path, fault)
        c.unused(path, fault, fault.do, USED_BY_FAULT[fault.do], _FIELDS)
        _how(c, path, fault)
        c.distinct(f"{path}.keys", c.names(f"{path}.keys", fault.keys), "key")
        if fault.tier and c.one(f"{path}.tier", fault.tier, c.tiers, "tier"):
            _where(c, f"{path}.tier", fault)
        for seam in SEAMS_OF[fault.do]:
            c.seam(f"{path}.do", seam)


def _when(c: Complaints, path: str, fault: Fault) -> None:
    if (fault.at_ms is None) == (not fault.at_hook):
        found = "both at_ms and at_hook" if fault.at_hook else "no time"
        c.wrong(path, f"has {found}: say exactly one of at_ms and at_hook")
    if fault.at_ms is not None:
        c.in_time(f"{path}.at_ms", fault.at_ms)
    if fault.at_hook:
        c.seam(f"{path}.at_hook", "hook")
        if c.hooks is not None:
            c.one(f"{path}.at_hook", fault.at_hook, c.hooks, "hook")
        return
    for name in ("of", "visit"):
        if said(fault, name):
            c.wrong(f"{path}.{name}", "is about visits of a hook: say at_hook as well")


def _whom(c: Complaints, path: str, fault: Fault) -> None:
    c.each(f"{path}.of", fault.of, c.labels, "container")
    c.each(f"{path}.who", fault.who, c.labels, "container")
    if fault.do not in _ON_CONTAINERS or fault.who.strip():
        return
    if not fault.at_hook:
        c.wrong(f"{path}.who", f'is missing: say whom {fault.do!r} hits, as in who = "a0"')
    elif fault.do == "abandon":
        c.wrong(f"{path}.who", "is missing: no hook is about a container that still waits for room")


def _how(c: Complaints, path: str, fault: Fault) -> None:
    if not fault.by:
        c.wrong(f"{path}.by", "0 answers too many are as many as there should be: say 1, or -1")
    if fault.grouped and fault.do == "fail" and (fault.keys or fault.at_hook):
        why = "the blocks fail, and nothing is raised" if fault.keys else "at a hook it is about blocks, which fail"
        c.wrong(f"{path}.grouped", f"{why}: leave it out, or say at_ms without keys")


def _where(c: Complaints, path: str, fault: Fault) -> None:
    if fault.do == "evict":
        c.source(path, fault.tier)
    elif fault.do not in _ANYWHERE:
        into = dict.fromkeys([spec.to for spec in c.pipelines.values()])
        if fault.tier not in into:
            c.wrong(path, f"nothing is copied into {fault.tier!r}{nearest(fault.tier, into)}")
