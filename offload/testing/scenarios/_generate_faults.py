"""Faults of a generated program, aimed at its containers in progress. Pure.

Rule 1. A fault that hits nothing shows nothing: it is put where its kind mostly finds a target, and now and then
        anywhere. A user who gives up waiting for room must have to wait, and copies end in another order only if two
        are in progress.
Rule 2. Each program leaves out about half of the kinds. With every kind in every program there would be an excuse for
        everything, and an end without a reason (I9) could not be recognised.
Rule 3. Faults that make all copies fail are few: the rest of the program has to go on.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from offload.abc import HOOKS

from ._names import compress
from ._program import Fault, FaultKind
from ._rng import Rng

SHARED: Final = tuple([f"k{i}" for i in range(24)])
"""Keys that many containers have."""
COUNT: Final = (32, 68)
"""Minimum and maximum number of faults in a program."""

_WEIGHTS: Final[dict[FaultKind, int]] = {
    "cancel": 9, "cancel_waiter": 7, "abandon": 6, "evict": 5, "fail": 3, "stall": 6, "delay": 6, "duplicate": 3,
    "miscount": 3, "reorder": 6, "torn": 2, "flip": 4, "full": 4, "drop": 1, "unproven": 2, "peer_death": 1, "clock": 2,
    "shut_down": 1, "cancel_host": 1,
}  # fmt: skip
_AT_LEAST: Final[tuple[tuple[FaultKind, ...], ...]] = (
    ("cancel", "delay"), ("cancel_waiter", "evict"), ("delay", "duplicate"), ("stall", "flip"),
)  # fmt: skip
"""Pairs of kinds, of which each program has at least one pair.

No program lacks faults.
"""
_LIKELY: Final[dict[FaultKind, float]] = {
    "cancel": 0.8, "cancel_waiter": 0.65, "evict": 0.65, "reorder": 0.8, "abandon": 0.8,
    "fail": 0.35, "torn": 0.3, "full": 0.35, "duplicate": 0.15, "miscount": 0.15, "clock": 0.3, "drop": 0.15,
    "unproven": 0.2, "peer_death": 0.15, "shut_down": 0.08, "cancel_host": 0.06,
}  # fmt: skip
"""Probability of a kind in a program, if that is not 0.55.

After the rare ones there is little left to fail.
"""
_ONCE: Final[frozenset[FaultKind]] = frozenset({"shut_down", "cancel_host"})
_HARSH: Final[frozenset[FaultKind]] = frozenset(
    {"fail", "torn", "full", "drop", "unproven", "duplicate", "miscount", "peer_death", "clock"}
)
"""Kinds of which a few faults are enough.

If most containers fail, there is little left to fail.
"""
_ON_CONTAINERS: Final[frozenset[FaultKind]] = frozenset({"cancel", "cancel_waiter", "abandon"})
_ON_COPIES: Final[frozenset[FaultKind]] = frozenset(
    {"unproven", "stall", "drop", "delay", "duplicate", "miscount", "reorder", "full", "peer_death"}
)
_ON_KEYS: Final[frozenset[FaultKind]] = frozenset({"fail", "torn", "flip"})
_BEFORE_COPY: Final = ("transfer", "pre_claim", "sweep_claim_gap", "post_claim", "xfer_start")
_WHERE: Final[dict[FaultKind, tuple[str, ...]]] = {
    **dict.fromkeys(
        ("unproven", "fail", "stall", "drop", "delay", "duplicate", "miscount", "reorder", "torn"), _BEFORE_COPY
    ),
    "peer_death": ("batching", *_BEFORE_COPY),
    "full": ("awaiting", "batching", "transfer"),
    "evict": ("admission", "awaiting", "batching", "transfer"),
    "flip": ("xfer_end",),
    "cancel_waiter": HOOKS[2:-1],
}  # fmt: skip
"""Hooks at which a fault of a kind finds a target.

For kinds not named, any hook.
"""
_VISITS: Final[dict[str, int]] = {"admission": 10, "awaiting": 8, "batching": 6, "transfer": 4, "settled": 10}
"""Approximate number of a hook's visits, if more than three."""
_AT_HOOK: Final[dict[FaultKind, float]] = {"flip": 0.9, "stall": 0.9, "reorder": 0.9, "evict": 0.5, "delay": 0.5}
"""Probability of a hook instead of a time, if not 0.65."""
_WITHIN: Final[dict[FaultKind, int]] = {"abandon": 2, "cancel_waiter": 6, "cancel": 8, "flip": 30}
"""Maximum delay of a fault after its container's store."""
_CROWD: Final = 4
"""Minimum time that a container obstructs others, in virtual milliseconds."""


@attrs.frozen
class PlannedStore:
    """A container that the program will store."""

    label: str
    """Name of the container; empty: blocks that a reader holds."""
    at_ms: int
    """Time of the store, or of the read."""
    keys: tuple[str, ...]
    """Keys of its blocks."""
    kept: bool = False
    """Whether the engine keeps its blocks alive."""
    waits: bool = False
    """Whether it waits for room in the first pipeline's budget."""
    within: int = 0
    """Time span of faults after it; 0: the default of their kind."""


@attrs.define
class FaultPlan:
    """Faults of a program, aimed at its containers."""

    rng: Rng
    """Choices of the program's seed."""
    puts: Sequence[PlannedStore]
    """Containers of the program."""
    read: Sequence[PlannedStore]
    """Blocks that readers hold, as targets for faults of stored blocks."""
    below: Sequence[str]
    """Tiers to which stored blocks go on."""
    slots: int
    """Maximum number of concurrent copies into the first destination."""
    budget: int
    """Budget of the first pipeline, in blocks."""
    copy_ms: int
    """Approximate duration of a copy into the first destination."""
    _orders: dict[FaultKind, Sequence[PlannedStore]] = attrs.Factory(dict)

    def all(self) -> list[Fault]:
        """Draw all faults of the program."""
        rng, kinds = self.rng, self._kinds()
        most = {kind: self._most(kind) for kind in kinds}
        low, high = COUNT
        weighted = [kind for kind in kinds if most[kind] for _ in range(_WEIGHTS[kind])]
        faults: list[Fault] = []
        for i in range(low + rng.below(high - low + 1, "faults")):
            if not weighted:
                break
            kind = rng.pick(weighted, "fault", i, "what")
            most[kind] -= 1
            if not most[kind]:
                weighted = [other for other in weighted if other != kind]
            faults.append(self._fault(i, kind, most[kind]))
        return faults

    def _kinds(self) -> list[FaultKind]:
        """Draw which kinds of faults this program has."""
        chosen = [kind for kind in _WEIGHTS if self.rng.chance(_LIKELY.get(kind, 0.55), "kind", kind)]
        return [*dict.fromkeys([*chosen, *self.rng.pick(_AT_LEAST, "at least")])]

    def _most(self, kind: FaultKind) -> int:
        """Return the maximum number of faults of a kind.

        It is not much more than the number of targets.
        """
        if kind in _ONCE:
            return 1
        containers = len(self.puts)
        if kind in _HARSH:
            return 1 + self.rng.below(3, "most", kind)
        if kind == "abandon":
            return min(4, len(self._order(kind)))
        if kind == "reorder":
            return 2 if self.slots > 1 else 0
        if kind in ("cancel", "evict", "flip"):
            return 1 + containers // 2
        return containers + containers // 2 if kind == "delay" else containers

    def _aim(self, kind: FaultKind, number: int) -> PlannedStore:
        """Return the container for a fault: each once before any twice."""
        order = self._order(kind)
        return order[number % len(order)]

    def _order(self, kind: FaultKind) -> Sequence[PlannedStore]:
        order = self._orders.get(kind)
        if order is None:
            if kind == "abandon":
                order = self._crowded()
            else:
                order = sorted(self.puts, key=lambda put: self.rng.fraction("order", kind, put.label))
            if kind == "flip":
                order = [*self.read, *order]
            self._orders[kind] = order
        return order

    def _crowded(self) -> Sequence[PlannedStore]:
        """Return the containers that mostly have to wait for room.

        Together with the containers just before them they exceed the budget; those that exceed it most come first.
        """
        puts = sorted(self.puts, key=lambda put: put.at_ms)
        crowds = {
            put: sum([len(one.keys) for one in puts[: i + 1] if one.at_ms >= put.at_ms - _CROWD])
            for i, put in enumerate(puts)
            if put.waits
        }
        crowded = [put for put, blocks in crowds.items() if blocks > self.budget]
        return sorted(crowded, key=lambda put: -crowds[put])

    def _fault(self, i: int, kind: FaultKind, number: int) -> Fault:
        rng, where = self.rng, ("fault", i)
        aim = self._aim(kind, number)
        told: dict[str, Any] = {"do": kind}
        if rng.chance(0.03, *where, "perhaps"):
            told["p"] = 0.5
        at_hook = kind != "abandon" and bool(aim.label) and rng.chance(_AT_HOOK.get(kind, 0.65), *where, "at a hook")
        if at_hook:
            hooks = HOOKS if rng.chance(0.2, *where, "anywhere") else _WHERE.get(kind, HOOKS)
            told["at_hook"] = rng.pick(hooks, *where, "hook")
            if rng.chance(0.35 if kind in _ON_CONTAINERS else 0.15, *where, "of one"):
                told["of"] = aim.label
            else:
                told["visit"] = 1 + rng.below(_VISITS.get(told["at_hook"], 2), *where, "visit")
        else:
            told["at_ms"] = aim.at_ms + rng.below(aim.within or _WITHIN.get(kind, 12), *where, "at")
        return Fault(**{**told, **self._told(kind, where, aim, told)})

    @functools.cached_property
    def _anybody(self) -> str:
        """All containers, as a list of names.

        A neighbour's fault counts more visits than those about itself.
        """
        return compress([put.label for put in sorted(self.puts, key=lambda put: (put.label[0], int(put.label[1:])))])

    def _told(
        self, kind: FaultKind, where: tuple[object, ...], aim: PlannedStore, when: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Draw the fields of a fault of this kind, except its time."""
        rng, at_hook = self.rng, "at_hook" in when
        if kind in _ON_CONTAINERS:
            if not at_hook:
                return {"who": aim.label, **self._again(kind, where)}
            if when["at_hook"] != "settled" and not rng.chance(0.3, *where, "a neighbour"):
                return self._again(kind, where)
            other = rng.pick(self.puts, *where, "other")
            return {"who": other.label, "of": when.get("of") or self._anybody, **self._again(kind, where)}
        if kind == "evict":
            # The keys of other containers as well: an engine drops a key for all of them, but never one that it keeps
            # alive itself.
            keys = [] if aim.kept else sample(rng, aim.keys, 0.7, *where, "its own")
            keys += [key for key in sample(rng, SHARED, 0.1, *where, "others") if key not in keys]
            return {"keys": compress(keys or SHARED[:1])}
        if kind == "clock":
            return {"ms": 1 + rng.below(20, *where, "ms")}
        if kind not in _ON_COPIES | _ON_KEYS:
            return {}
        told: dict[str, Any] = {}
        if self.below and rng.chance(0.2, *where, "tier"):
            told["tier"] = rng.pick(self.below, *where, "which tier")
        whole = kind == "fail" and not at_hook and rng.chance(0.5, *where, "whole copies")
        if kind in _ON_KEYS and not whole and (not at_hook or "of" in when):
            told["keys"] = compress(aim.keys[: 1 + rng.below(3, *where, "how many")] or SHARED[:2])
        if kind == "delay":
            told["ms"] = 1 + rng.below(4, *where, "ms")
        if kind != "flip":
            told["for_ms"] = 1 + rng.below(6, *where, "for") + (30 if kind == "reorder" else 0)
        if kind == "fail" and "keys" in told and rng.chance(0.3, *where, "for good"):
            told["for_ms"] = 200
        if kind == "miscount":
            told["by"] = rng.pick([-2, -1, -1, 1, 3], *where, "by")
        elif kind in ("unproven", "torn", "drop") or (kind == "fail" and not at_hook and "keys" not in told):
            told["grouped"] = rng.chance(0.5, *where, "grouped")
        return told

    def _again(self, kind: FaultKind, where: tuple[object, ...]) -> dict[str, Any]:
        """Draw whether a cancel is requested twice, which is rare."""
        return {"times": 2} if kind == "cancel" and self.rng.chance(0.1, *where, "twice") else {}


def sample(rng: Rng, keys: Sequence[str], p: float, *where: object) -> list[str]:
    """Draw each of these keys with this probability.

    One hash decides a dozen keys.
    """
    found: list[str] = []
    for first in range(0, len(keys), 12):
        bits = rng.below(1 << 48, *where, first)
        for key in keys[first : first + 12]:
            if bits % 16 < p * 16:
                found.append(key)
            bits //= 16
    return found
