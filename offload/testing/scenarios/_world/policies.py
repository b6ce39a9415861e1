"""The policies of a pipeline, made from what a scenario says of them: real ones, whoever asks them.

What a policy does is drawn for each container, by its label where that is known and by its keys where it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

import trio

from backends.abc import Key
from offload.abc import AsyncPolicy, Leased, Policy, Reasons
from offload.policies import NOTHING_REJECTED, AllOf

from .._names import expand
from .._program import TICK, PolicySpec
from .faults import ask_cancel
from .preconditions import Broken

if TYPE_CHECKING:
    from .world import VirtualWorld

_Act = Callable[[Sequence[Key]], "Reasons | Leased"]


class _Doing:
    """One policy of a pipeline: what it answers, and whom it is about."""

    def __init__(self, world: VirtualWorld, pipeline: str, index: int, spec: PolicySpec, held: _Held) -> None:
        self._world = world
        self._site = ("policy", pipeline, index)
        self.spec = spec
        self._about = frozenset([key.encode() for key in expand(spec.keys)])
        self._held = held

    def acts(self, keys: Sequence[Key]) -> bool:
        """Whether it does anything about these."""
        if self._about and self._about.isdisjoint(keys):
            return False
        if self.spec.p >= 1.0:
            return True
        return self._world.dice.chance(self.spec.p, *self._site, self._world.label or tuple(keys))

    def answer(self, keys: Sequence[Key]) -> Reasons | Leased:
        """What it says of them."""
        world, spec = self._world, self.spec
        if spec.do == "reject":
            return {key: spec.reason for key in keys if not self._about or key in self._about}
        if spec.do == "present":
            there = self._held(spec.tier or world.pipelines[self._site[1]].to, keys)
            return {key: "present" for key in keys if key in there}
        if spec.do == "raise":
            raise Broken("a policy broke")
        if spec.do == "lock":
            world.locks += 1
            return Leased(NOTHING_REJECTED, self._unlock)
        if spec.do == "cancel":
            for label in expand(spec.who):
                parcel = world.parcels[label]
                if parcel.ticket is not None:
                    ask_cancel(world, parcel)
        return NOTHING_REJECTED

    def _unlock(self) -> None:
        self._world.locks -= 1


_Held = Callable[[str, Sequence[Key]], AbstractSet[Key]]


class _Now:
    """A policy that does not wait."""

    def __init__(self, doing: _Doing) -> None:
        self._doing = doing

    def __call__(self, keys: Sequence[Key]) -> Reasons | Leased:
        return self._doing.answer(keys) if self._doing.acts(keys) else NOTHING_REJECTED


class _Later(AsyncPolicy):
    """A policy that waits before it answers, or for ever."""

    def __init__(self, doing: _Doing) -> None:
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


def made_of(world: VirtualWorld, pipeline: str, held: _Held) -> list[Policy | AsyncPolicy]:
    """The policies of a pipeline, in order; ``held`` says which of some keys a tier has."""
    made: list[Policy | AsyncPolicy] = []
    for index, spec in enumerate(world.pipelines[pipeline].policies):
        doing = _Doing(world, pipeline, index, spec, held)
        made.append(_Later(doing) if spec.ms or spec.do in ("sleep", "hang") else _Now(doing))
    return made


class AnyPolicies:
    """The policies of a pipeline for a system that asks the world."""

    def __init__(self, policies: Sequence[Policy | AsyncPolicy]) -> None:
        self._policy = AllOf(*policies) if policies else None

    async def ask(self, keys: Sequence[Key]) -> Mapping[Key, str]:
        """What they keep back. A lock they took is given back at once: this way there is nobody to hold it."""
        if isinstance(self._policy, AsyncPolicy):
            answer = await self._policy.evaluate(keys)
        else:
            await trio.lowlevel.checkpoint()
            answer = self._policy(keys) if self._policy is not None and keys else NOTHING_REJECTED
        if isinstance(answer, Leased):
            answer.release()
            answer = answer.reasons
        return dict(answer)


def policies_of(world: VirtualWorld, pipeline: str) -> AnyPolicies:
    """Those of a pipeline, for a system that asks the world; what a tier has, the system says (``found``)."""

    def held(tier: str, keys: Sequence[Key]) -> AbstractSet[Key]:
        found = getattr(world.system, "found", None)
        return set(found(tier)).intersection(keys) if found is not None else set()

    return AnyPolicies(made_of(world, pipeline, held))
