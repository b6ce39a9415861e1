"""Interface of a system under test, and of its world.

A *factory* is called with a :class:`World` and returns an async context manager, whose value is the system::

    @asynccontextmanager
    async def open_cache(world: World) -> AsyncIterator[System]:
        async with trio.open_nursery() as nursery:
            yield Cache(world, nursery)

The world is the only way out: instead of using memory itself, a cache asks the world to, which lets the operation take
modelled time and fail. These ways are the *seams*. A fault whose seam a system does not use cannot be injected into it;
a scenario with such a fault is refused when it is loaded (`_players` finds out which ones a system uses).
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
"""Every seam, and how a system implements it."""

Status: TypeAlias = Literal["COMPLETE", "CANCELLED", "FAILED"]


@attrs.frozen
class Outcome:
    """End of a container, for a system without its own result."""

    status: Status
    """Status of the container.

    Complete: each block has an end, whichever. Cancelled: nothing was moved. Failed: a block that should be stored is
    not.
    """
    completed: tuple[Key, ...] = ()
    """Keys that are stored, or were already."""
    filtered: Mapping[Key, str] = attrs.field(factory=dict)
    """Keys that a policy held back, with reasons."""
    failed: Mapping[Key, str] = attrs.field(factory=dict)
    """Keys that should be stored and are not, with reasons."""
    evicted: tuple[Key, ...] = ()
    """Keys that had left the source before their turn came."""
    error: str = ""
    """Class name of the container's error."""


class Ticket(Protocol):
    """A container that a system has accepted."""

    @property
    def result(self) -> Any:
        """Outcome of the container, or ``None`` before its end.

        An object with a ``status`` (a word of :data:`Status`, or an enum's member of that name) and perhaps the other
        fields of an :class:`Outcome`. Once it is set it never changes.
        """

    async def wait(self) -> object:
        """Wait for the container's end. If cancelled, nothing has changed."""

    async def cancel(self) -> object:
        """Request the container's cancellation, and wait for its confirmation.

        Afterwards no block of it is held or copied any more.

        Raises:
            Exception: the cancellation cannot be confirmed; the container's holdings are quarantined.
        """

    def request_cancel(self) -> object:
        """Request the container's cancellation, synchronously.

        Also allowed within a hook.
        """


class System(Protocol):
    """Contract of a system under test: store, load, and report holdings.

    Optional, each a seam: ``async store_many({label: keys}, after) -> Sequence[Ticket]`` (all of them or, when it
    raises, none), ``close_now()`` (begin to shut down; synchronous), ``async drain(pipeline)``,
    ``evict(tier, keys, again)``, ``async delete(tier, keys)``, ``found(tier) -> Collection[Key]``,
    ``release(pipeline)``, ``statistics(pipeline)``. A system whose readers can hold found blocks may have
    ``hold(tier, keys)``: an async context manager whose value is a coroutine function, which reads the held prefix as
    often as it is called and returns ``{key: bytes}``. A system with several tiers may have
    ``async load_from(tier, keys)`` besides ``load``, for steps that name a tier.
    """

    async def store(self, keys: Sequence[Key], after: Callable[[], Awaitable[object]] | None, label: str) -> Ticket:
        """Store a container.

        It may wait for room; if it is cancelled meanwhile, nothing is stored.

        Args:
            keys: keys of its blocks. Their bytes are ``world.payload(key)``.
            after: to be awaited before their bytes may be read. ``None``: they may be read now.
            label: its name, for hooks. ``world.asked(label)`` returns the rest of the scenario's request.

        Raises:
            Refused: the system is full or closed; nothing was accepted.
        """

    async def load(self, keys: Sequence[Key]) -> Mapping[Key, bytes | None]:
        """Return the bytes of keys; ``None`` for missing ones."""

    def audit(self) -> Mapping[str, int]:
        """Return the system's holdings, by name: all 0 at rest."""


class Refused(Exception):
    """Raised by ``store``: the system does not accept this container."""


class World(Protocol):
    """Interface that the harness offers to a system, for one run."""

    scenario: Scenario
    seed: int

    def hook(self, name: str, label: str | Sequence[str]) -> None:
        """Announce an imminent event of these containers, synchronously.

        Faults at this hook happen within the call.
        """

    async def reserve(self, tier: str, keys: Sequence[Key]) -> bool:
        """Ask for room, and return whether there is some.

        It waits while a fault withholds room, except if the scenario has it refuse.
        """

    async def copy(self, tier: str, keys: Sequence[Key], data: Sequence[bytes]) -> Sequence[bytes]:
        """Write blocks into a tier, and return the bytes that arrived.

        It takes the tier's time.

        Raises:
            OSError: it failed; which bytes have arrived is unknown. In an exception group if the scenario has it
                ``grouped``.
        """

    async def policy(self, keys: Sequence[Key]) -> Mapping[Key, str]:
        """Return the keys that must not be stored, with reasons.

        The policies are those of the scenario's first pipeline.
        """

    def payload(self, key: Key, tier: str = "") -> bytes:
        """Return the bytes of this key: a function of the key alone.

        They are as long as the tier's blocks.
        """

    def asked(self, label: str) -> StoreStep:
        """Return the scenario's request for a container."""


Factory: TypeAlias = Callable[[World], AbstractAsyncContextManager[System]]


# --- scenarios that cannot be played --------------------------------------------------------------------------------


class NeedsRealTime(ScenarioError):
    """A system that does not follow virtual time: run it with ``--real``.

    It has threads or an event loop of its own.
    """

    def __init__(self, colour: str) -> None:
        text = f"{colour} does not follow virtual time: add --real, or call play_real(...)"
        super().__init__("", None, "", f"a system of {text}")


class NeedsProcesses(ScenarioError):
    """A scenario with a page store: run it with ``--real``.

    The server of a page store is a process of its own.
    """

    def __init__(self, tier: str) -> None:
        text = "a page store is a process of its own, with sockets, which do not follow virtual time: add --real"
        super().__init__("", None, f"tier.{tier}.kind", text)
        self.tier: str = tier


class NotForReal(ScenarioError):
    """A scenario that declares why it cannot hold in real time.

    ``text`` is its reason.
    """

    def __init__(self, scenario: Scenario) -> None:
        super().__init__("", None, "not_for_real", scenario.not_for_real)


class NoSuchSystem(ValueError):
    """No factory of that name; the text lists the existing ones."""


# --- finding a system by name -----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def factory_of(system: str) -> Factory | None:
    """Return the factory that ``module:factory`` names; ``None`` for ours.

    An empty name means ours. A module is looked for where Python looks, and in the current directory, as ``python -m``
    does.

    Raises:
        NoSuchSystem: there is none.
    """
    if not system:
        return None
    module_name, colon, path = system.partition(":")
    if not (module_name and colon and path):
        raise NoSuchSystem(f"{system!r} does not name a system: use module:factory, as in mycache:open_cache")
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
    except Exception as error:  # any error of the module's import
        raise NoSuchSystem(f"{system}: importing {module_name} fails: {type(error).__name__}: {error}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise NoSuchSystem(f"{system}: {module_name} has no {path}{_instead(found)}")
        found = getattr(found, name)
    if not callable(found):
        raise NoSuchSystem(
            f"{system}: {path} is {type(found).__name__}, not a factory: it must be callable with a World"
        )
    return found


def _look_here() -> None:
    """Add the current directory to the path, permanently.

    A module may import another one when it is used.
    """
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
    """Check that the system and the scenario can run in virtual time.

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
    """Return the tier that is a page store, or an empty text."""
    return next((name for name, spec in scenario.tier.items() if spec.kind == "maru"), "")
