"""What a system under test offers, and what the world offers to it.

A *factory* is called with a :class:`World` and gives an async context manager, whose value is the system::

    @asynccontextmanager
    async def open_cache(world: World) -> AsyncIterator[System]:
        async with trio.open_nursery() as nursery:
            yield Cache(world, nursery)

The world is the only way out: what a cache would do with memory, it asks the world to do, which lets it take modelled time
and go wrong. These ways are the *seams*. A fault whose seam a system does not use cannot be injected into it; a scenario with
such a fault is refused when it is loaded (`_players` finds out which ones a system uses).
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Literal, Protocol, TypeAlias

import attrs

from backends.abc import Key

from ._program import Scenario, ScenarioError, Seam, StoreStep

SEAMS: Final[Mapping[Seam, str]] = {
    "hook": "calls world.hook(name, label) where something is about to happen",
    "reserve": "asks world.reserve(tier, keys) for room",
    "copy": "moves bytes through world.copy(tier, keys, data)",
    "policy": "asks world.policy(keys) what may be stored",
    "after": "waits for what it is given as `after` before it reads a byte",
    "store_many": "takes in several containers in one call, all of them or none",
    "close_now": "can be shut down with work inside",
    "evict": "has a source whose keys can be taken away",
    "delete": "can delete keys",
    "drain": "can wait until nothing is left to do",
    "found": "says which keys a tier has",
    "hold": "can hold what it has found, and read it again while it does",
}
"""Every seam, and what a system does that has it."""

Status: TypeAlias = Literal["COMPLETE", "CANCELLED", "FAILED"]


@attrs.frozen
class Outcome:
    """The end of a container, for a system without a result of its own."""

    status: Status
    """Complete: each block has an end, whichever. Cancelled: nothing was moved. Failed: one that should be there is not."""
    completed: tuple[Key, ...] = ()
    """Keys that are stored, or were there."""
    filtered: Mapping[Key, str] = attrs.field(factory=dict)
    """Keys that a policy held back, and why."""
    failed: Mapping[Key, str] = attrs.field(factory=dict)
    """Keys that should be there and are not, and why."""
    evicted: tuple[Key, ...] = ()
    """Keys that had left the source before their turn came."""
    error: str = ""
    """Name of the class of what the container failed with."""


class Ticket(Protocol):
    """A container that a system has accepted."""

    @property
    def result(self) -> Any:
        """Its outcome, or ``None`` before the end.

        What has a ``status`` (a word of :data:`Status`, or an enum's member of that name) and perhaps the other fields of an
        :class:`Outcome`. Once it is there it never changes.
        """

    async def wait(self) -> object:
        """Wait for its end. Cancelled, nothing has changed."""

    async def cancel(self) -> object:
        """Request its cancellation, and return once it is confirmed: nothing of it is held or copied any more.

        Raises:
            Exception: it cannot be confirmed; what it holds is quarantined.
        """

    def request_cancel(self) -> object:
        """Request its cancellation. Synchronous; also allowed within a hook."""


class System(Protocol):
    """The contract of a system under test: it stores, loads, and reports what it holds.

    Optional, each a seam: ``async store_many({label: keys}, after) -> Sequence[Ticket]`` (all of them or, when it raises,
    none), ``close_now()`` (begin to shut down; synchronous), ``async drain(pipeline)``, ``evict(tier, keys, again)``, ``async
    delete(tier, keys)``, ``found(tier) -> Collection[Key]``, ``release(pipeline)``, ``statistics(pipeline)``.
    One whose readers can hold what they found may have ``hold(tier, keys)``: an async context manager that gives a coroutine
    function, which reads the prefix that is held as often as it is called and answers ``{key: bytes}``.
    One with several tiers may have ``async load_from(tier, keys)`` beside ``load``, for steps that name a tier.
    """

    async def store(self, keys: Sequence[Key], after: Callable[[], Awaitable[object]] | None, label: str) -> Ticket:
        """Store a container. May wait for room; if it is cancelled meanwhile, nothing is stored.

        Args:
            keys: of its blocks. Their bytes are ``world.payload(key)``.
            after: to be awaited before their bytes may be read. ``None``: they may be read now.
            label: its name, for hooks. ``world.asked(label)`` has whatever else the scenario says of it.

        Raises:
            Refused: the system is full or closed; nothing was taken in.
        """

    async def load(self, keys: Sequence[Key]) -> Mapping[Key, bytes | None]:
        """The bytes of keys; ``None`` for missing ones."""

    def audit(self) -> Mapping[str, int]:
        """What the system holds, by name: all 0 at rest."""


class Refused(Exception):
    """Raised by ``store``: the system does not take this container."""


class World(Protocol):
    """What the harness offers to a system. All of it belongs to one run."""

    scenario: Scenario
    seed: int

    def hook(self, name: str, label: str | Sequence[str]) -> None:
        """Announce what is about to happen to these containers. Synchronous: faults at this hook happen within the call."""

    async def reserve(self, tier: str, keys: Sequence[Key]) -> bool:
        """Ask for room, and return whether there is some; waits while a fault withholds it, unless told otherwise."""

    async def copy(self, tier: str, keys: Sequence[Key], data: Sequence[bytes]) -> Sequence[bytes]:
        """Write blocks into a tier: takes the tier's time, and answers what has arrived there.

        Raises:
            OSError: it failed; what has arrived is unknown. In an exception group where the scenario has it ``grouped``.
        """

    async def policy(self, keys: Sequence[Key]) -> Mapping[Key, str]:
        """The keys that must not be stored, and why: the policies of the scenario's first pipeline."""

    def payload(self, key: Key, tier: str = "") -> bytes:
        """The bytes of this key: a function of the key alone. As long as the tier's blocks."""

    def asked(self, label: str) -> StoreStep:
        """The scenario's request for a container."""


Factory: TypeAlias = Callable[[World], AbstractAsyncContextManager[System]]


# --- what cannot be played ------------------------------------------------------------------------------------------


class NeedsRealTime(ScenarioError):
    """This system has threads or an event loop of its own, which do not follow virtual time: run it with ``--real``."""

    def __init__(self, colour: str) -> None:
        text = f"{colour} does not follow virtual time: add --real, or call play_real(...)"
        super().__init__("", None, "", f"a system of {text}")


class NeedsProcesses(ScenarioError):
    """This scenario has a page store, whose server is a process of its own: run it with ``--real``."""

    def __init__(self, tier: str) -> None:
        text = "a page store is a process of its own, with sockets, which do not follow virtual time: add --real"
        super().__init__("", None, f"tier.{tier}.kind", text)
        self.tier: str = tier


class NotForReal(ScenarioError):
    """A scenario that says itself why it cannot hold on the clock of the wall; ``text`` is what it says."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__("", None, "not_for_real", scenario.not_for_real)


class NoSuchSystem(ValueError):
    """There is no factory of that name; the text says what there is instead."""


# --- finding a system by name -----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def factory_of(system: str) -> Factory | None:
    """The factory that ``module:factory`` names; ``None``, of nothing: ours.

    A module is looked for where Python looks, and in the current directory, as ``python -m`` does.

    Raises:
        NoSuchSystem: there is none.
    """
    if not system:
        return None
    module_name, colon, path = system.partition(":")
    if not (module_name and colon and path):
        raise NoSuchSystem(f"{system!r} does not name a system: say module:factory, as in mycache:open_cache")
    try:
        _look_here()
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise NoSuchSystem(f"{system}: importing {module_name} fails: {error}") from error
        raise NoSuchSystem(
            f"{system}: there is no module {module_name}, neither installed nor in {os.getcwd()}; "
            f"run this where {module_name.partition('.')[0]}.py is, or install it"
        ) from error
    except Exception as error:  # whatever the module does when it is imported
        raise NoSuchSystem(f"{system}: importing {module_name} fails: {type(error).__name__}: {error}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise NoSuchSystem(f"{system}: {module_name} has no {path}{_instead(found)}")
        found = getattr(found, name)
    if not callable(found):
        raise NoSuchSystem(
            f"{system}: {path} is no factory, but {type(found).__name__}: it must be callable with a World"
        )
    return found


def _look_here() -> None:
    """For good, not only for this import: a module may import another one when it is used."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def _instead(module: object) -> str:
    names = [
        name
        for name, value in getattr(module, "__dict__", {}).items()
        if callable(value)
        and not name.startswith("_")
        and getattr(value, "__module__", "") == getattr(module, "__name__", None)
    ]
    return f"; it has {', '.join(names[:8])}" if names else ""


# --- systems that follow virtual time ---------------------------------------------------------------------------------


def check_virtual(factory: object, scenario: Scenario | None = None) -> None:
    """Insist that this factory's system can be run in virtual time, and this scenario.

    Raises:
        NeedsRealTime: the system cannot.
        NeedsProcesses: the scenario cannot.
    """
    if scenario is not None and (store := page_store_of(scenario)):
        raise NeedsProcesses(store)
    needs = getattr(factory, "needs_real_time", "")
    if needs:
        raise NeedsRealTime(needs)


def page_store_of(scenario: Scenario) -> str:
    """The tier that is a page store, if there is one."""
    return next((name for name, spec in scenario.tier.items() if spec.kind == "maru"), "")
