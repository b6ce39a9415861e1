"""Causes (I9): whatever happened to a container of ours, the scenario has a reason for it. For a system that has one.

What could have happened is told from the program, and of faults from those that hit something; so what happens to a container
because of its neighbour, and could not happen to it alone, has no reason here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from backends import BackendError, DamagedBlock
from backends.abc import CapacityError, Key
from offload import (
    DestinationFull,
    DrainUnproven,
    PipelineClosed,
    PolicyFailed,
    PreconditionFailed,
    Status,
    TransferFailed,
    TransferResult,
)

from .._files.knobs_of import config_of
from .._names import expand
from .._program import TICK, PipelineSpec

if TYPE_CHECKING:
    from .._world.world import Parcel, VirtualWorld
    from .oracle import Oracle

_RAISE = frozenset({"fail", "torn", "duplicate", "miscount", "peer_death"})
"""What makes a copy raise."""
_SLACK = 4 * TICK
"""What unwinding and rounding may add to a time."""


class Causes:
    """What a scenario has reasons for."""

    def __init__(self, world: VirtualWorld, oracle: Oracle) -> None:
        self._world = world
        self._oracle = oracle
        self._hit: dict[str, set[str]] = {}
        """The kinds of faults that hit something in each tier."""
        self._failing: dict[str, set[Key]] = {}
        """The blocks that a fault had fail, in each tier."""
        self._stored: dict[str, int] = {}
        """The blocks that may need room in each tier."""
        self._shared: dict[tuple[str, Key], int] = {}
        for planted in world.faults:
            if planted.line is not None and planted.line.fired and planted.line.where in world.places:
                self._hit.setdefault(planted.line.where, set()).add(planted.fault.do)
        for name, place in world.places.items():
            self._failing[name] = set(place.failed)
            self._stored[name] = len(expand(place.spec.holds))
        for parcel in world.parcels.values():
            if parcel.state:
                for tier in oracle.below(parcel.pipeline):
                    self._stored[tier] += len(parcel.keys)
                    for key in parcel.keys:
                        self._shared[tier, key] = self._shared.get((tier, key), 0) + 1
        self._jumped = bool(world.jumps)
        self._fires = {step.fire: step.at_ms * TICK for step in world.scenario.step if step.fire}

    def all(self) -> Iterator[tuple[str, str]]:
        """What has no reason, each with the rule that it breaks."""
        for parcel in self._world.parcels.values():
            if isinstance(parcel.result, TransferResult):
                yield from self._one(parcel, parcel.result)
        if self._world.locks:
            yield "I1", f"{self._world.locks} locks are still held"

    def _one(self, parcel: Parcel, result: TransferResult) -> Iterator[tuple[str, str]]:
        if parcel.in_time and result.status is not Status.CANCELLED:
            yield "I4", f"{parcel.label} was cancelled in time, and ended {result}"
        if result.status is Status.CANCELLED and not parcel.cancelled:
            yield "I9", f"{parcel.label} was cancelled, and nobody asked for that"
        spec = self._world.pipelines[parcel.pipeline]
        tiers = self._oracle.below(parcel.pipeline)
        for key, error in [(None, result.error), *result.failed.items()]:
            if error is not None and not self._may_fail(parcel, spec, tiers, key, error):
                cause = f" because of {error.__cause__!r}" if error.__cause__ is not None else ""
                about = "" if key is None else f" for {key.decode()}"
                yield "I9", f"{parcel.label} failed{about} with {error!r}{cause}, for which there is no reason"
        for key, reason in result.filtered.items():
            if not self._may_filter(parcel, spec, key, reason):
                yield "I9", f"{parcel.label} had {key.decode()} filtered as {reason!r}, for which there is no reason"
        if result.completed and parcel.label in self._world.places[spec.to].miscounted:
            yield "S34", f"{parcel.label} believes a copy that did not answer once for each block: {result}"
        missing = [route for route in spec.chain if route not in result.routes] if result.completed else []
        if missing:
            yield "I5", f"{parcel.label} has ended, and nothing is known of its way through {', '.join(missing)}"
        gone = self._world.evicted.get(spec.source, {})
        filled = any(spec.source == other.to for other in self._world.pipelines.values())
        for key in result.evicted:
            if parcel.store.kind != "weak" or not (key in gone or filled):
                yield "I9", f"{parcel.label} had {key.decode()} evicted, for which there is no reason"

    # -- errors --------------------------------------------------------------------------------------------------------

    def _may_fail(
        self, parcel: Parcel, spec: PipelineSpec, tiers: tuple[str, ...], key: Key | None, error: BaseException
    ) -> bool:
        hit = set().union(*[self._hit.get(tier, set()) for tier in tiers])
        match error:
            case PolicyFailed():
                return spec.on_policy_error == "fail" and (
                    self._may_raise(spec, parcel) or self._may_overrun(spec, parcel)
                )
            case PreconditionFailed():
                return self._may_not_hold(spec, parcel)
            case PipelineClosed():
                return self._world.closed_at is not None or self._world.stuck
            case DestinationFull():
                return "full" in hit or any(self._may_be_full(tier) for tier in tiers)
            case DrainUnproven():
                return self._may_be_unproven(parcel, tiers, hit)
            case TransferFailed():
                return bool(hit & (_RAISE | self._silent(tiers))) or _too_large(
                    error, parcel, min(self._world.tiers[tier].capacity for tier in tiers)
                )
            case DamagedBlock():  # found on its way out of a tier in which a bit of it was flipped
                return any(error.key in place.flipped for place in self._world.places.values())
            case OSError():
                return any(key in self._failing[tier] for tier in tiers) or (key is None and "fail" in hit)
            case BackendError():  # a page store says that a store was not done, and that nothing of it is left
                return bool(hit & self._silent(tiers))
            case _:
                return False

    def _silent(self, tiers: tuple[str, ...]) -> set[str]:
        """What keeps a page store from answering, which fails what was asked of it: of other tiers it only takes longer."""
        kinds = {self._world.tiers[tier].kind for tier in tiers}
        return {"stall", "drop", "peer_death"} if "maru" in kinds else set()

    def _may_raise(self, spec: PipelineSpec, parcel: Parcel) -> bool:
        return any(policy.do == "raise" and _about(policy.keys, parcel) for policy in spec.policies)

    def _may_overrun(self, spec: PipelineSpec, parcel: Parcel) -> bool:
        waiting = [policy for policy in spec.policies if policy.ms or policy.do in ("sleep", "hang")]
        if waiting and self._jumped:
            return True
        acting = [policy for policy in waiting if _about(policy.keys, parcel)]
        needed = sum(policy.ms for policy in acting) * TICK
        return any(policy.do == "hang" for policy in acting) or needed >= config_of(spec).policy_timeout

    def _may_not_hold(self, spec: PipelineSpec, parcel: Parcel) -> bool:
        patience = config_of(spec).precondition_timeout
        for after in parcel.store.after:
            if after.do in ("raise", "never") or self._world.slow or self._jumped:
                return True
            times = [parcel.asked_at + after.ms * TICK] if after.ms is not None else []
            if after.event:
                times.append(self._fires.get(after.event, float("inf")))
            if times and min(times) + _SLACK >= parcel.asked_at + patience:
                return True
            if times and (self._world.leaves or self._world.closed_at is not None):
                return True  # the step that fires it may never be done
        return False

    def _may_be_full(self, tier: str) -> bool:
        return self._stored[tier] > self._world.tiers[tier].capacity

    def _may_be_unproven(self, parcel: Parcel, tiers: tuple[str, ...], hit: set[str]) -> bool:
        world = self._world
        if hit & {"unproven", "drop", "stall", "delay", "reorder"} or world.closed_at is not None or self._jumped:
            return True
        for spec in world.pipelines.values():
            if spec.to in tiers:
                config, size = config_of(spec), world.tiers[spec.to].block_bytes
                most = max(config.batch_config.max_batch_size, *[len(one.keys) for one in world.parcels.values()])
                if world.places[spec.to].duration(most * size) >= config.transfer_timeout:
                    return True
        return False

    # -- filtered ------------------------------------------------------------------------------------------------------

    def _may_filter(self, parcel: Parcel, spec: PipelineSpec, key: Key, reason: str) -> bool:
        policies = spec.policies
        if any(one.do == "reject" and one.reason == reason and _about_key(one.keys, key) for one in policies):
            return True
        if reason == "present":
            return any(one.do == "present" for one in policies)
        if reason == "pending":
            return self._shared.get((spec.to, key), 0) > 1
        if reason == "overflow":
            return spec.on_overflow == "drop" and parcel.store.kind == "weak"
        if reason == "error":
            return spec.on_policy_error != "fail" and self._may_raise(spec, parcel)
        if reason == "timeout":
            return spec.on_policy_error != "fail" and self._may_overrun(spec, parcel)
        return False


def _too_large(error: BaseException, parcel: Parcel, capacity: int) -> bool:
    return isinstance(error.__cause__, CapacityError) and len(parcel.keys) > capacity


def _about(keys: str, parcel: Parcel) -> bool:
    return not keys or not {key.encode() for key in expand(keys)}.isdisjoint(parcel.keys)


def _about_key(keys: str, key: Key) -> bool:
    return not keys or key in {one.encode() for one in expand(keys)}
