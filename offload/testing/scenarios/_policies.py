"""Policies of a pipeline and preconditions of a container, from a scenario.

The actions of a policy are drawn for each container, by its label if that is known, otherwise by its keys.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, TypeAlias

import attrs
import trio

from backends.abc import Key
from offload.abc import AsyncPolicy, Leased, Policy, Precondition, Reasons
from offload.policies import NOTHING_REJECTED, AllOf
from offload.preconditions import AsyncCallable, ThreadEvent, TrioEvent, all_of, any_of

from ._faults import ask_cancel
from ._names import expand
from ._program import TICK, After, PolicySpec, StoreStep

if TYPE_CHECKING:
    from ._world import VirtualWorld


_Act = Callable[[Sequence[Key]], "Reasons | Leased"]


class _PolicyAction:
    """One policy of a pipeline: its answer, and its keys."""

    def __init__(self, world: VirtualWorld, pipeline: str, index: int, spec: PolicySpec, held: _Held) -> None:
        self._world = world
        self._site = ("policy", pipeline, index)
        self.spec = spec
        self._about = frozenset([key.encode() for key in expand(spec.keys)])
        self._held = held

    def acts(self, keys: Sequence[Key]) -> bool:
        """Return whether the policy acts on these keys."""
        if self._about and self._about.isdisjoint(keys):
            return False
        if self.spec.p >= 1.0:
            return True
        return self._world.rng.chance(self.spec.p, *self._site, self._world.label or tuple(keys))

    def tells_at_once(self, keys: Sequence[Key]) -> bool:
        """Return whether the policy can answer about these keys without waiting."""
        rng, share = self._world.rng, self.spec.at_once
        return bool(share) and rng.chance(share, *self._site, "at once", self._world.label or tuple(keys))

    def answer(self, keys: Sequence[Key]) -> Reasons | Leased:
        """Return the answer about these keys."""
        world, spec = self._world, self.spec
        if spec.do == "reject":
            return {key: spec.reason for key in keys if not self._about or key in self._about}
        if spec.do == "present":
            there = self._held(spec.tier or world.pipelines[self._site[1]].to, keys)
            return {key: "present" for key in keys if key in there}
        if spec.do == "raise":
            raise ScriptedError("a policy broke")
        if spec.do == "lock":
            world.locks += 1
            return Leased(NOTHING_REJECTED, self._unlock)
        if spec.do == "cancel":
            for label in expand(spec.who):
                request = world.requests[label]
                if request.ticket is not None:
                    ask_cancel(world, request)
        return NOTHING_REJECTED

    def _unlock(self) -> None:
        self._world.locks -= 1


_Held = Callable[[str, Sequence[Key]], AbstractSet[Key]]


class _SyncPolicy:
    """A policy that does not wait."""

    def __init__(self, doing: _PolicyAction) -> None:
        self._doing = doing

    def __call__(self, keys: Sequence[Key]) -> Reasons | Leased:
        return self._doing.answer(keys) if self._doing.acts(keys) else NOTHING_REJECTED


class _WaitingPolicy(AsyncPolicy):
    """A policy that waits before it answers, or for ever."""

    def __init__(self, doing: _PolicyAction) -> None:
        self._doing = doing

    async def evaluate(self, keys: Sequence[Key]) -> Reasons | Leased:
        """Wait, then answer."""
        doing = self._doing
        if not doing.acts(keys):
            await trio.lowlevel.checkpoint()
            return NOTHING_REJECTED
        if doing.spec.do == "hang":
            await trio.sleep_forever()
        await trio.sleep(doing.spec.ms * TICK)
        return doing.answer(keys)

    def evaluate_nowait(self, keys: Sequence[Key]) -> Reasons | Leased | None:
        """Answer, if that is possible without waiting."""
        doing = self._doing
        if not doing.tells_at_once(keys):
            return None
        return doing.answer(keys) if doing.acts(keys) else NOTHING_REJECTED


def make_policies(world: VirtualWorld, pipeline: str, held: _Held) -> list[Policy | AsyncPolicy]:
    """Return the policies of a pipeline, in order.

    ``held`` returns which of some keys a tier holds.
    """
    made: list[Policy | AsyncPolicy] = []
    for index, spec in enumerate(world.pipelines[pipeline].policies):
        doing = _PolicyAction(world, pipeline, index, spec, held)
        made.append(_WaitingPolicy(doing) if spec.ms or spec.do in ("sleep", "hang") else _SyncPolicy(doing))
    return made


class WorldPolicies:
    """Policies of a pipeline for a system that asks the world."""

    def __init__(self, policies: Sequence[Policy | AsyncPolicy]) -> None:
        self._policy = AllOf(*policies) if policies else None

    async def ask(self, keys: Sequence[Key]) -> Mapping[Key, str]:
        """Return the keys that the policies keep back, with reasons.

        A lock is released at once: with this interface no container can hold it.
        """
        if isinstance(self._policy, AsyncPolicy):
            answer = await self._policy.evaluate(keys)
        else:
            await trio.lowlevel.checkpoint()
            answer = self._policy(keys) if self._policy is not None and keys else NOTHING_REJECTED
        if isinstance(answer, Leased):
            answer.release()
            answer = answer.reasons
        return dict(answer)


def world_policies(world: VirtualWorld, pipeline: str) -> WorldPolicies:
    """Return a pipeline's policies, for a system that asks the world.

    The system reports the keys of a tier (``found``).
    """

    def held(tier: str, keys: Sequence[Key]) -> AbstractSet[Key]:
        found = getattr(world.system, "found", None)
        return set(found(tier)).intersection(keys) if found is not None else set()

    return WorldPolicies(make_policies(world, pipeline, held))


# --- preconditions ----------------------------------------------------------------------------------------------------


_UNWINDING = 2 * TICK


class ScriptedError(LookupError):
    """Error raised by a scenario's policies, preconditions and users."""


_Event: TypeAlias = "trio.Event | ThreadEvent"


@attrs.define(eq=False)
class Events:
    """Events of a scenario by name: one step fires, many containers wait."""

    timer: Callable[[float, Callable[[], object]], None]
    """Function that calls another function at a time."""
    _shared: dict[tuple[str, type[_Event]], _Event] = attrs.Factory(dict)
    _listening: dict[str, list[_Event]] = attrs.Factory(dict)
    _fired: dict[str, None] = attrs.Factory(dict)

    def fire(self, name: str) -> None:
        """Set an event, for all that wait for it now or later."""
        self._fired[name] = None
        for event in self._listening.get(name, ()):
            event.set()

    def holds(self, store: StoreStep, asked_at: float, now: float) -> bool:
        """Return whether a container's preconditions hold by now.

        Only then may its bytes be read.
        """
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
        """Return the precondition of a container; ``None`` if it has none."""
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
        """Return the event behind a precondition.

        All preconditions with one name share it, unless a time may set it as well.
        """
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
                raise ScriptedError("the forward pass failed")

        async def wait_stubbornly() -> None:
            try:
                await told.wait()
            except trio.Cancelled:
                with trio.CancelScope(shield=True):
                    await trio.sleep(_UNWINDING)
                raise
            if after.do == "raise":
                raise ScriptedError("the forward pass failed")

        return wait_stubbornly if after.made_of == "stubborn" else wait


def unwinding(after: Sequence[After]) -> float:
    """Return the unwinding time of a cancelled wait for these, in seconds."""
    return _UNWINDING if any(one.made_of == "stubborn" for one in after) else 0.0
