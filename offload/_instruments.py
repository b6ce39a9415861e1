"""Tables of instrument hooks: cheap without instruments, and safe if one raises.

An *instrument* is an object with some of the hooks of :mod:`offload.abc`; a pipeline or an engine calls the hooks when
something happens. The rules:

Rule 1. A hook without instruments is an empty tuple, so that the hot path pays an attribute and a truth test: ``if
        hooks.settled: hooks.fire("settled", container)``.
Rule 2. An instrument that raises is removed, from all of its hooks, and logged; the pipeline and the others go on.
Rule 3. Only an ``Exception`` removes an instrument; a KeyboardInterrupt is raised.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from .abc import CALLS, ENGINE_HOOKS, HOOKS, CallInstrument, EngineInstrument, Instrument, Watcher

if TYPE_CHECKING:
    from ._engine import Engine
    from ._pipeline.pipeline import Pipeline

_LOGGER = logging.getLogger("offload.abc.Instrument")

Calls: TypeAlias = tuple[Callable[..., Any], ...]

_INHERITED = {**vars(Instrument), **vars(CallInstrument), **vars(EngineInstrument)}


def attach(instruments: Iterable[object], opened: Pipeline | Engine) -> None:
    """Have each ``Watcher`` among the instruments observe a pipeline or engine.

    Called when it was just opened. A watcher that raises is logged, see rule 2.
    """
    for one in instruments:
        if isinstance(one, Watcher):
            try:
                one.watch(opened)
            except Exception:
                _LOGGER.exception("%r could not watch %r", one, opened)


class HookTable:
    """The instruments of a pipeline or an engine, by hook.

    Each hook is an attribute: the functions to call, in the order of adding.
    """

    __slots__ = ("_instruments", "in_any_thread")

    names: ClassVar[tuple[str, ...]] = ()
    """The names of the hooks."""

    def __init__(self, instruments: Iterable[object] = ()) -> None:
        # A list, searched by identity: an instrument need not be hashable, and two equal ones are still two.
        self._instruments: list[tuple[object, dict[str, Callable[..., Any]]]] = []
        self._arrange()
        for instrument in instruments:
            self.add(instrument)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._instruments)} instruments>"

    def add(self, instrument: object) -> None:
        """Call this instrument's hooks from now on. Adding it again does nothing.

        Raises:
            TypeError: it defines no hook, or one that is not a plain callable; nothing was added.
        """
        if self._find(instrument) is None:
            self._instruments.append((instrument, _used_hooks(instrument, self.names)))
            self._arrange()

    def remove(self, instrument: object) -> None:
        """Stop calling this instrument.

        Raises:
            KeyError: it is not in the table. It may have been removed because it raised.
        """
        found = self._find(instrument)
        if found is None:
            raise KeyError(instrument)
        del self._instruments[found]
        self._arrange()

    def fire(self, name: str, *args: object) -> None:
        """Call this hook of every instrument that has it.

        An instrument that raises is removed; see the rules above. An instrument that is added during the calls is not
        called for this event; one that is removed during them may still be.
        """
        for call in getattr(self, name):
            try:
                call(*args)
            except Exception:
                instrument = self._drop(name, call)
                _LOGGER.exception("hook %r of instrument %r raised; the instrument was removed", name, instrument)

    def _drop(self, name: str, call: Callable[..., Any]) -> object:
        for position, (instrument, used) in enumerate(self._instruments):
            if used.get(name) is call:
                del self._instruments[position]
                self._arrange()
                return instrument
        return call  # the instrument was removed meanwhile, perhaps by itself

    def _find(self, instrument: object) -> int | None:
        for position, (known, _) in enumerate(self._instruments):
            if known is instrument:
                return position
        return None

    def _arrange(self) -> None:
        self.in_any_thread: bool = all([getattr(one, "in_any_thread", False) for one, _ in self._instruments])
        for name in self.names:
            setattr(self, name, tuple([used[name] for _, used in self._instruments if name in used]))


class Hooks(HookTable):
    """The hooks of one pipeline."""

    __slots__ = (*HOOKS, *CALLS)

    names: ClassVar[tuple[str, ...]] = (*HOOKS, *CALLS)

    admission: Calls
    awaiting: Calls
    batching: Calls
    transfer: Calls
    pre_claim: Calls
    sweep_claim_gap: Calls
    post_claim: Calls
    xfer_start: Calls
    xfer_end: Calls
    settled: Calls
    enqueued: Calls
    cancel_requested: Calls


class EngineHooks(HookTable):
    """The hooks of one engine."""

    __slots__ = ENGINE_HOOKS

    names: ClassVar[tuple[str, ...]] = ENGINE_HOOKS

    looked_up: Calls
    loaded: Calls
    deleted: Calls


def _used_hooks(instrument: object, names: tuple[str, ...]) -> dict[str, Callable[..., Any]]:
    if isinstance(instrument, type):
        raise TypeError(f"an instrument is an object, not a class: use {instrument.__name__}()")
    used: dict[str, Callable[..., Any]] = {}
    for name in names:
        call = getattr(instrument, name, None)
        if call is None or getattr(call, "__func__", None) is _INHERITED[name]:
            continue  # inherited from the protocol, whose hooks do nothing
        if not callable(call):
            raise TypeError(f"{name} of instrument {instrument!r} is not callable")
        if inspect.iscoroutinefunction(call):
            raise TypeError(f"{name} of instrument {instrument!r} is async: hooks are called, never awaited")
        used[name] = call
    if not used:
        raise TypeError(f"{instrument!r} defines none of the hooks: {', '.join(names)}")
    return used
