"""Users of the system: they perform the scenario's steps, and await results.

Rule 1. Actions at the same virtual time happen in the order of the file, steps before faults. Each step has begun (up
        to its first wait) before the next one does.
Rule 2. Each container has a task of its own, which stores it and waits for its end.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from ._faults import PlannedFault
from ._names import expand, first_destination, first_source, keys_of, shown
from ._policies import ScriptedError
from ._program import (
    TICK,
    KeysStep,
    LoadStep,
    Step,
    StoreStep,
)
from ._systems import Refused, System, Ticket

if TYPE_CHECKING:
    from backends.abc import Key

    from ._oracle import Load
    from ._world import Request, VirtualWorld


class Users:
    """All users of one run."""

    def __init__(self, world: VirtualWorld) -> None:
        self._world = world
        self._oracle = world.oracle
        self._loads = 0
        self._nursery: trio.Nursery = None  # type: ignore[assignment]
        self._begun = trio.Event()
        """Event set once the task started last has begun."""
        self._begun.set()

    @property
    def _system(self) -> System:
        return self._world.system

    async def live(self) -> None:
        """Perform all steps, and wait for everything."""
        world = self._world
        self._oracle.begin()
        async with trio.open_nursery() as self._nursery:
            await self._timeline()
        if world.raises:
            raise ScriptedError("the user's own code broke")
        if world.leaves:
            return
        for request in world.requests.values():
            if request.ticket is not None:
                await request.ticket.wait()
                world.look(request)

    async def _timeline(self) -> None:
        world = self._world
        todo: list[tuple[int, Step | PlannedFault]] = [(step.at_ms, step) for step in world.scenario.step]
        todo += [(one.fault.at_ms, one) for one in world.faults if one.fault.at_ms is not None]
        stored = False
        for at_ms, what in sorted(todo, key=lambda one: one[0]):
            if trio.current_time() < at_ms * TICK:
                await trio.sleep_until(at_ms * TICK)
            else:
                await self._turn()
            if isinstance(what, PlannedFault):
                if stored:
                    # A tick in which a system with room accepts the container stored just now: faults find it there.
                    await trio.lowlevel.checkpoint()
                what.happen(world)
            else:
                await self._step(what)
            stored = isinstance(what, Step) and what.store is not None

    async def _step(self, step: Step) -> None:
        world = self._world
        if step.store is not None:
            await self._store_all(step.store)
        elif step.load is not None:
            self._begin(partial(self._load, step.load))
        elif step.fire is not None:
            world.events.fire(step.fire)
        elif step.evict is not None:
            self._evict(step.evict)
        elif step.delete is not None:
            self._begin(partial(self._delete, step.delete))
        elif step.drain is not None:
            self._begin(partial(self._drain, step.drain))
        elif step.release is not None:
            self._call("release", step.release)
        elif step.close is not None:
            self._close(step.close.how)

    def _begin(self, task: Callable[[trio.Event], Awaitable[None]]) -> None:
        """Start a user's task; it sets its event when it has begun."""
        self._begun = trio.Event()
        self._nursery.start_soon(task, self._begun)

    async def _turn(self) -> None:
        """Wait until the task started last has begun.

        Before time passes it has begun anyway.
        """
        await self._begun.wait()

    # -- storing -------------------------------------------------------------------------------------------------------

    async def _store_all(self, step: StoreStep) -> None:
        requests = [self._world.requests[label] for label in keys_of(step)]
        if step.how == "now":
            self._begin(partial(self._store_now, [[request] for request in requests]))
        elif step.how == "many":
            self._begin(partial(self._store_now, [requests]))
        else:
            for request in requests:
                await self._turn()
                self._begin(partial(self._store, request))

    async def _store_now(self, groups: Sequence[Sequence[Request]], begun: trio.Event) -> None:
        """Store groups one after the other, unless the system does not wait.

        Then they come all at once.
        """
        for requests in groups:
            if await self._take_in(requests, begun):
                for request in requests:
                    self._nursery.start_soon(self._wait, request)

    async def _store(self, request: Request, begun: trio.Event) -> None:
        if await self._take_in([request], begun):
            await self._wait(request)

    async def _take_in(self, requests: Sequence[Request], begun: trio.Event) -> bool:
        """Return whether the system has accepted these containers.

        One container, or several that are stored in one call.
        """
        world, now = self._world, trio.current_time()
        after = world.events.precondition(requests[0].store)
        for request in requests:
            request.state, request.asked_at, request.after = "asked", now, after
            world.step("asked", request.label)
            self._oracle.asked(request)
        begun.set()
        tickets: Sequence[Ticket] = ()
        refusal = None
        try:
            with trio.CancelScope() as scope:
                for request in requests:
                    request.storing = scope
                tickets = await self._ask(requests, after.wait if after is not None else None)
        except Refused as error:
            refusal = str(error)
        except Exception as error:
            refusal = type(error).__name__
            world.crashed(error, f"store of {', '.join([request.label for request in requests])}")
        finally:
            for request in requests:
                request.storing = None
            if not tickets:
                self._not_taken(requests, refusal)
        for request, ticket in zip(requests, tickets, strict=bool(tickets)):
            request.ticket, request.state = ticket, "taken"
            world.step("taken", request.label)
            world.look(request)
        return bool(tickets)

    async def _ask(
        self, requests: Sequence[Request], after: Callable[[], Awaitable[object]] | None
    ) -> Sequence[Ticket]:
        if requests[0].store.how != "many":
            return [await self._system.store(requests[0].keys, after, requests[0].label)]
        many = {request.label: request.keys for request in requests}
        tickets: Sequence[Ticket] = await self._system.store_many(many, after)  # type: ignore[attr-defined]
        if len(tickets) != len(requests):
            raise ValueError(f"{len(tickets)} tickets for {len(requests)} containers")
        return tickets

    def _not_taken(self, requests: Sequence[Request], refusal: str | None) -> None:
        """Mark the requests as refused, or as abandoned without a message."""
        for request in requests:
            request.state = "abandoned" if refusal is None else "refused"
            self._world.step(request.state, request.label, refusal or "")
            self._oracle.not_taken(request)

    async def _wait(self, request: Request) -> None:
        world, ticket = self._world, request.ticket
        assert ticket is not None
        with trio.CancelScope() as scope:
            request.waiting.append(scope)
            try:
                await ticket.wait()
            except Exception as error:
                world.crashed(error, f"the wait for {request.label}")
            else:
                world.step("waited", request.label)
                world.confirmed(request)
            finally:
                request.waiting.remove(scope)
                if scope.cancel_called:
                    world.step("waiter gone", request.label)

    # -- reading and removing ------------------------------------------------------------------------------------------

    async def _load(self, step: LoadStep, begun: trio.Event) -> None:
        world, system = self._world, self._system
        tier = step.tier or ("" if world.scenario.engine is not None else first_destination(world.scenario))
        label = step.id or f"load{self._loads}"
        self._loads += 1
        keys = tuple([key.encode() for key in expand(step.keys)])
        about = self._oracle.loading(tier, keys)
        begun.set()
        found: Any = None
        try:
            with trio.move_on_after(step.gives_up_ms * TICK if step.gives_up_ms else math.inf):
                if step.hold_ms:
                    found = await self._hold(label, about, step.hold_ms * TICK)
                elif step.tier and hasattr(system, "load_from"):
                    found = await system.load_from(tier, keys)
                else:
                    found = await system.load(keys)
            if found is None:
                world.step("given up", label, "", tier)
                self._oracle.ends(about)
                return
        except OSError as error:
            world.step("missed", label, type(error).__name__, tier)
            world.missed += len(keys)
            self._oracle.ends(about)
            return
        except Exception as error:
            world.crashed(error, f"the load {label}")
            self._oracle.ends(about)
            return
        there = [key for key in keys if found.get(key) is not None]
        missed = [key for key in keys if found.get(key) is None]
        world.loaded += len(there)
        world.missed += len(missed)
        if there:
            world.step("loaded", label, shown(there), tier)
        if missed:
            world.step("missed", label, shown(missed), tier)
        if step.hold_ms:
            self._oracle.ends(about)
        else:
            self._oracle.loaded(about, found)

    async def _hold(self, label: str, load: Load, seconds: float) -> dict[Key, bytes | None]:
        """Load keys, hold them for a while, and load them again."""
        world, oracle, keys = self._world, self._oracle, load.keys
        async with self._system.hold(load.tier, keys) as read:  # type: ignore[attr-defined]
            first: dict[Key, bytes] = dict(await read())
            # Only a prefix is held: an unread key after its end may still be stored.
            end = next((at for at, key in enumerate(keys) if key not in first), len(keys))
            oracle.brought(load, first, [key for at, key in enumerate(keys) if at <= end or key in first])
            await trio.sleep(seconds)
            lost = oracle.held_on(load, first, dict(await read()))
        if lost:
            where = load.tier or "whatever tier it was in"
            world.wrong("model", f"{shown(lost)} was held in {where} by {label}, and was not the same under its hold")
        return {**dict.fromkeys(keys), **first}

    def _evict(self, step: KeysStep) -> None:
        world = self._world
        tier = step.tier or first_source(world.scenario)
        keys = tuple([key.encode() for key in expand(step.keys)])
        try:
            world.evict(tier, keys, again=step.again)
        except Exception as error:
            world.crashed(error, "evict")

    async def _delete(self, step: KeysStep, begun: trio.Event) -> None:
        world, system = self._world, self._system
        tier = step.tier or first_destination(world.scenario)
        keys = tuple([key.encode() for key in expand(step.keys)])
        before = self._oracle.deleting(tier, keys)
        begun.set()
        try:
            await system.delete(tier, keys)  # type: ignore[attr-defined]
        except OSError:
            pass  # the tier's peer is dead: the state of these keys is unknown
        except Exception as error:
            world.crashed(error, "a delete")
        else:
            self._oracle.deleted(tier, keys, before)

    async def _drain(self, pipeline: str, begun: trio.Event) -> None:
        world = self._world
        inside = [one for one in world.requests.values() if one.pipeline == pipeline and one.alive]
        begun.set()
        try:
            await self._system.drain(pipeline)  # type: ignore[attr-defined]
        except Exception as error:
            world.crashed(error, "a drain")
        for request in inside:
            if request.alive:
                world.wrong("I3", f"the drain of {pipeline} is over, but {request.label} is not")

    # -- the end -------------------------------------------------------------------------------------------------------

    def _call(self, name: str, *args: object) -> None:
        try:
            getattr(self._system, name)(*args)
        except Exception as error:
            self._world.crashed(error, name)

    def _close(self, how: str) -> None:
        world = self._world
        if how == "raise":
            world.raises = True
        if how in ("leave", "raise"):
            world.leaves = True
            self._nursery.cancel_scope.cancel()
        try:
            world.close(how)
        except Exception as error:
            world.crashed(error, f"the end by {how}")
