"""The abilities of places: each is declared once, with a default, and a class that keeps one in an attribute declares it."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.abc import Destination, ReadLease, Reservation, RoomRequest, Source, Tier, TransferExecutor
from backends.base.forwarding import ForwardingDestination, ForwardingSource, ForwardingTier
from backends.base.slots import Storage
from backends.testing import FakeTier
from offload import with_breaker

ROOT = Path(__file__).parents[2]
CONTRACTS = (Source, Destination, TransferExecutor, Reservation, ReadLease, Storage)
NOT_FORWARDED = {
    Source: {"weak", "strong"},  # made of the others, for the source in front
    Tier: {"direct"},  # a read in another thread would pass by the tier in front
    Destination: set[str](),
    ReadLease: set[str](),
    Reservation: set[str](),
}


def subclasses(kind: type) -> Iterator[type]:
    for one in kind.__subclasses__():
        yield one
        yield from subclasses(one)


def assigned(kind: type) -> Iterator[str]:
    """Yield the attributes of ``self`` that a class assigns."""
    tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    for found in ast.walk(tree):
        if isinstance(found, ast.ClassDef) and found.name == kind.__name__:
            for node in ast.walk(found):
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                for target in targets:
                    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                        yield target.attr


def test_no_class_assigns_a_property_of_its_contract() -> None:
    # A type checker lets it pass, and the first instance raises.
    for package in ("backends", "offload"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if "class " in path.read_text() and path.name != "__main__.py":
                try:
                    importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
                except ImportError:
                    continue  # an adapter of an engine that is not installed
    wrong = [
        f"{kind.__module__}.{kind.__name__}.{name}"
        for contract in CONTRACTS
        for kind in subclasses(contract)
        if kind.__module__.startswith(("backends.", "offload."))
        for name in assigned(kind)
        if isinstance(found := inspect.getattr_static(kind, name, None), property) and found.fset is None
    ]
    assert not wrong, "declare a default of the attribute in the class"


@pytest.mark.parametrize(
    ("front", "contract"),
    [
        (ForwardingSource, Source),
        (ForwardingTier, Tier),
        (ForwardingDestination, Destination),
    ],
)
def test_a_place_in_front_forwards_every_ability(front: type, contract: type) -> None:
    assert_forwards_all(front, contract)


async def test_a_lease_and_room_in_front_forward_every_ability() -> None:
    tier = with_breaker(FakeTier(), "tier")
    assert_forwards_all(type(await tier.pin([])), ReadLease)
    assert_forwards_all(type(await tier.reserve(RoomRequest([], tier.block_bytes, "partial"))), Reservation)


def assert_forwards_all(front: type, contract: type) -> None:
    abilities = {name for kind in contract.__mro__[:-1] for name in vars(kind) if not name.startswith("_")}
    own = {name for kind in front.__mro__ if kind not in contract.__mro__ for name in vars(kind)}
    assert abilities - own == NOT_FORWARDED[contract]


@pytest.mark.parametrize(
    ("place", "method", "arguments", "ability"),
    [
        (Source, "plane_samples", ([],), "Source.plane_names"),
        (Destination, "plane_samples", ([],), "Destination.plane_names"),
        (Destination, "copy_in_and_sum", (0, None), "Destination.sums_pages"),
        (Destination, "copy_out", ([], None), "Destination.is_readable"),
        (Tier, "contains_nowait", ([],), "Capabilities.answers_at_once"),
        (Tier, "on_evicted", (print,), "Capabilities.reports_evictions"),
        (Tier, "spill_to", (print,), "Capabilities.reports_evictions"),
        (Tier, "list_keys", (), "Capabilities.lists_keys"),
        (Tier, "watch_keys", (None,), "Capabilities.lists_keys"),
    ],
)
def test_a_method_that_a_place_lacks_names_its_ability(place: Any, method: str, arguments: Any, ability: str) -> None:
    # Declared, say, by a tier of a user who forgot the method.
    bare = type("Bare", (place,), dict.fromkeys(place.__abstractmethods__))()
    with pytest.raises(NotImplementedError, match=rf"Bare .*has no {method}: see {ability}"):
        getattr(bare, method)(*arguments)
