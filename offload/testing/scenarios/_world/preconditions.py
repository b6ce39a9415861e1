"""What must hold before the bytes of a container may be read, made from what a scenario says of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import attrs
import trio

from offload.abc import Precondition
from offload.preconditions import AsyncCallable, ThreadEvent, TrioEvent, all_of, any_of

from .._program import TICK, After, StoreStep

_UNWINDING = 2 * TICK


class Broken(LookupError):
    """What the policies, the preconditions and the users of a scenario raise."""


_Event: TypeAlias = "trio.Event | ThreadEvent"


@attrs.define(eq=False)
class Events:
    """The events of a scenario by name: what one step fires, many containers wait for."""

    timer: Callable[[float, Callable[[], object]], None]
    """Has a function called at a time."""
    _shared: dict[tuple[str, type[_Event]], _Event] = attrs.Factory(dict)
    _listening: dict[str, list[_Event]] = attrs.Factory(dict)
    _fired: dict[str, None] = attrs.Factory(dict)

    def fire(self, name: str) -> None:
        """Set it, for whoever waits for it and whoever will."""
        self._fired[name] = None
        for event in self._listening.get(name, ()):
            event.set()

    def holds(self, store: StoreStep, asked_at: float, now: float) -> bool:
        """Whether what a container waits for holds by now: only then may its bytes be read."""
        each = [self._holds(after, asked_at, now) for after in store.after]
        return any(each) if store.any_of else all(each)

    def _holds(self, after: After, asked_at: float, now: float) -> bool:
        if after.do != "fire":
            return False
        if after.event and after.event in self._fired:
            return True
        if after.ms is not None:
            return now >= asked_at + after.ms * TICK
        return not after.event

    def precondition(self, store: StoreStep) -> Precondition | None:
        """What this container waits for; ``None``: nothing."""
        if not store.after:
            return None
        made = [self._one(after) for after in store.after]
        if len(made) == 1:
            return made[0]
        return any_of(*made) if store.any_of else all_of(*made)

    def _one(self, after: After) -> Precondition:
        if after.do == "fire" and after.made_of == "trio":
            event = self._event(after, trio.Event)
            assert isinstance(event, trio.Event)
            return TrioEvent(event)
        if after.do == "fire" and after.made_of == "thread":
            thread = self._event(after, ThreadEvent)
            assert isinstance(thread, ThreadEvent)
            return thread
        if after.do == "never" and after.made_of == "trio":
            return TrioEvent(trio.Event())
        if after.do == "never" and after.made_of == "thread":
            return ThreadEvent()
        return AsyncCallable(self._function(after))

    def _event(self, after: After, kind: type[_Event]) -> _Event:
        """What is set when it is told: shared by all that wait for one name, unless a time may set it as well."""
        shared = after.event and after.ms is None
        event = self._shared.get((after.event, kind)) if shared else None
        if event is not None:
            return event
        event = kind()
        if after.event:
            self._listening.setdefault(after.event, []).append(event)
        if shared:
            self._shared[after.event, kind] = event
        if after.event in self._fired or not (after.event or after.ms is not None):
            event.set()
        elif after.ms is not None:
            self.timer(trio.current_time() + after.ms * TICK, event.set)
        return event

    def _function(self, after: After) -> Callable[[], Awaitable[None]]:
        told = self._event(after, trio.Event) if after.do != "never" else trio.Event()
        assert isinstance(told, trio.Event)

        async def wait() -> None:
            await told.wait()
            if after.do == "raise":
                raise Broken("the forward pass failed")

        async def wait_stubbornly() -> None:
            try:
                await told.wait()
            except trio.Cancelled:
                with trio.CancelScope(shield=True):
                    await trio.sleep(_UNWINDING)
                raise
            if after.do == "raise":
                raise Broken("the forward pass failed")

        return wait_stubbornly if after.made_of == "stubborn" else wait


def unwinding(after: Sequence[After]) -> float:
    """How long what is cancelled while it waits for these may take to leave, in seconds."""
    return _UNWINDING if any(one.made_of == "stubborn" for one in after) else 0.0
