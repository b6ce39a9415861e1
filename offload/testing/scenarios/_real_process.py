"""Our pipelines in a separate process, as a system under test.

A peer's death is ``kill -9``, a stall is ``SIGSTOP``.

    this process                      the child (`_real_child`)
    users, faults, oracle  <------->  pipelines over memory and files

Rule 1. Containers in progress when the child died have failed, whether or not they had reached the disk: their keys may
        be found. Acknowledged blocks must be found again if they are in files, and are gone if they were in memory.
Rule 2. Every request fails while it is dead. When its time is over, another child takes over the directory; a request
        meanwhile waits for it.
Rule 3. No child outlives the run.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from typing import Any, Final, cast

import attrs
import msgspec
import trio

from backends.abc import Key

from ._names import first_destination
from ._program import Scenario
from ._real_child import MessageSocket
from ._real_world import RealWorld
from ._systems import (
    Factory,
    Outcome,
    Refused,
    System,
    World,
)
from ._virtual_tier import FaultWindow

_START: Final = 60.0
_END: Final = 30.0
_SIGNALLED: Final = frozenset({"peer_death", "stall"})
_ANYWHERE: Final = frozenset({"cancel", "abandon", "cancel_waiter", "cancel_host", "shut_down", "evict"})


def needs_process(scenario: Scenario) -> bool:
    """Return whether a scenario needs pipelines in a process of their own.

    Its faults are signals: a peer that dies, and nothing that must be done to copies from inside. A page store is the
    peer itself: its server is a process already.
    """
    if any(spec.kind == "maru" for spec in scenario.tier.values()):
        return False
    kinds = {fault.do for fault in scenario.fault}
    return "peer_death" in kinds and kinds <= _SIGNALLED | _ANYWHERE


class PeerDied(ConnectionResetError):
    """The process of the pipelines is dead."""


# --- the child ----------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class _PendingCall:
    """A question that was sent and has no answer yet."""

    event: trio.Event = attrs.Factory(trio.Event)
    answer: Any = None
    error: BaseException | None = None


class ChildProcess:
    """One child process, from its start to its end.

    The process is ready once this object is made.
    """

    def __init__(self, world: RealWorld) -> None:
        scenario = msgspec.structs.replace(world.scenario, fault=[], expect=[])
        pace = next(iter(world.real.values())).clock.pace
        planned = sorted({fault.at_hook for fault in world.scenario.fault if fault.at_hook})
        ours, theirs = socket.socketpair()
        with theirs:
            command = [
                sys.executable,
                "-P",
                "-m",
                "offload.testing.scenarios._real_child",
                str(theirs.fileno()),
                world.workdir,
            ]
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, process_group=0
            )
        self.wire = MessageSocket(ours)
        self.wire.send(msgspec.json.encode(scenario), world.seed, planned, pace)
        try:
            assert self.wire.receive(_START) == ["ready"]
        except BaseException:
            self.end()
            raise

    def go_on(self) -> None:
        """Resume the stopped process (SIGCONT)."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Kill the process unless it has ended, and reap it. Idempotent."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class _RemotePipelines:
    """Pipelines of the child, as a system under test in this process."""

    def __init__(self, world: RealWorld, nursery: trio.Nursery, stack: ExitStack) -> None:
        self._world = world
        self._nursery = nursery
        self._stack = stack
        self._closing = False
        self._child: ChildProcess | None = None
        self._up = trio.Event()
        self._over: trio.Event = trio.Event()
        self._dead = False
        self._number = 0
        self._asked: dict[int, _PendingCall] = {}
        self._tickets: dict[str, _Ticket] = {}
        for model in world.real.values():
            model.signal = self._signal

    def __repr__(self) -> str:
        return "<our pipelines in another process>"

    # -- start and end -------------------------------------------------------------------------------------------------

    def begin(self, child: ChildProcess) -> None:
        """Use this child from now on."""
        self._child = child
        self._nursery.start_soon(self._listen, child)
        self._dead = False
        self._up.set()

    async def stop(self) -> None:
        """Ask the child to end, and kill it if it does not."""
        self._closing = True
        child = self._child
        if child is None:
            return
        try:
            if not self._dead:
                child.go_on()
                with contextlib.suppress(OSError):
                    child.wire.send("end")
                with trio.move_on_after(_END, shield=True):
                    await self._over.wait()
        finally:
            child.end()

    def _signal(self, window: FaultWindow) -> None:
        """Send a fault of the scenario to the child as a signal."""
        child = self._child
        if child is None or self._dead:
            return
        window.entry.fired = True
        if window.kind == "stall":
            child.process.send_signal(signal.SIGSTOP)
            self._world.at(window.until, child.go_on)
        else:
            child.process.kill()
            self._died()
            self._world.background.start_soon(self._again, window.until)

    def _died(self) -> None:
        self._dead, self._up = True, trio.Event()
        world = self._world
        for asked in self._asked.values():
            asked.error = PeerDied("the process of the pipelines is dead")
            asked.event.set()
        self._asked.clear()
        for name, model in world.real.items():
            if model.spec.kind == "memory" and name in world.oracle.tiers:
                world.oracle.taken_away(name, world.oracle.must(name))
        for ticket in self._tickets.values():
            ticket.die(world)

    async def _again(self, when: float) -> None:
        await trio.sleep_until(when)
        old = self._child
        assert old is not None
        await trio.to_thread.run_sync(old.end)  # noqa: TID251
        if self._closing:
            return
        child = await trio.to_thread.run_sync(ChildProcess, self._world)  # noqa: TID251
        self._stack.callback(child.end)
        if not self._closing:
            self.begin(child)

    async def _listen(self, child: ChildProcess) -> None:
        try:
            while True:
                self._hear(child, await child.wire.wait())
        except (OSError, trio.ClosedResourceError):
            if not self._dead and not self._over.is_set():
                self._world.wrong("crash", f"the process of the pipelines ended by itself: {child.process.wait()}")
                self._died()
                self._over.set()
        finally:
            child.wire.close()

    def _hear(self, child: ChildProcess, message: list[Any]) -> None:
        what, *args = message
        world = self._world
        if what == "hook":
            name, who, where, stops = args
            world.hook(name, who, where)
            if stops:
                with contextlib.suppress(OSError):  # a fault at the hook may have killed it
                    child.wire.send("go")
        elif what == "ended":
            label, outcome = args
            if label in self._tickets:
                self._tickets[label].end(_outcome(outcome))
        elif what == "answer":
            number, answer, error, text = args
            asked = self._asked.pop(number, None)
            if asked is not None:
                asked.answer = answer
                asked.error = _error(error, text) if error else None
                asked.event.set()
        elif what == "over":
            for text in args[0]:
                rule, _, rest = text.partition(": ")
                world.wrong(rule, rest)
            self._over.set()

    # -- asking --------------------------------------------------------------------------------------------------------

    def tell(self, *message: object) -> None:
        """Send a message without an answer; a dead child is skipped."""
        if self._child is not None and not self._dead:
            with contextlib.suppress(OSError):
                self._child.wire.send(*message)

    async def ask(self, what: str, *args: object) -> Any:
        """Send a question, and wait for its answer.

        Raises:
            PeerDied: the child is dead, or dies meanwhile.
        """
        asked = self._ask(what, *args) if self._up.is_set() else await self._ask_later(what, *args)
        await asked.event.wait()
        if asked.error is not None:
            raise asked.error
        return asked.answer

    async def _ask_later(self, what: str, *args: object) -> _PendingCall:
        """Ask once the child has started; raise while it is dead."""
        if any(model.window("peer_death") is not None for model in self._world.real.values()):
            raise PeerDied("the process of the pipelines is dead")
        await self._up.wait()
        return self._ask(what, *args)

    def _ask(self, what: str, *args: object) -> _PendingCall:
        self._number += 1
        asked = self._asked[self._number] = _PendingCall()
        self.tell(what, self._number, *args)
        return asked

    def _ask_now(self, what: str, *args: object) -> Any:
        """Ask, and block the whole thread until the answer.

        Other messages are handled meanwhile.
        """
        child = self._child
        if child is None or self._dead or self._over.is_set():
            return None
        asked = self._ask(what, *args)
        while not asked.event.is_set():
            self._hear(child, child.wire.receive())
        return asked.answer

    # -- the contract --------------------------------------------------------------------------------------------------

    async def store(self, keys: Sequence[Key], after: Callable[[], Awaitable[object]] | None, label: str) -> _Ticket:
        """Store a container.

        If the child dies during the request, the container has failed.
        """
        ticket = self._tickets[label] = _Ticket(self, label, keys)
        try:
            await self.ask("store", label, after is not None)
        except PeerDied:
            ticket.die(self._world)
        except BaseException:
            del self._tickets[label]
            raise
        if after is not None and ticket.result is None:
            self._nursery.start_soon(self._wait_for, label, after)
        return ticket

    async def _wait_for(self, label: str, after: Callable[[], Awaitable[object]]) -> None:
        broken = False
        try:
            await after()
        except Exception:
            broken = True
        self.tell("holds", label, broken)

    async def load(self, keys: Sequence[Key]) -> Mapping[Key, bytes | None]:
        """Load from the destination of the first pipeline."""
        return await self.load_from(first_destination(self._world.scenario), keys)

    async def load_from(self, tier: str, keys: Sequence[Key]) -> Mapping[Key, bytes | None]:
        """Load from a tier."""
        return dict(zip(keys, await self.ask("load", tier, list(keys)), strict=True))

    async def delete(self, tier: str, keys: Sequence[Key]) -> None:
        """Delete keys from a tier."""
        await self.ask("delete", tier, list(keys))

    async def drain(self, pipeline: str) -> None:
        """Wait until everything inside has settled, or is dead."""
        with contextlib.suppress(PeerDied):
            await self.ask("drain", pipeline)

    def close_now(self) -> None:
        """Begin to shut down."""
        self.tell("close_now")

    def evict(self, tier: str, keys: Sequence[Key], again: bool) -> None:
        """Take keys out of a source."""
        self.tell("evict", tier, list(keys), again)

    def release(self, pipeline: str) -> None:
        """Release all quarantined entries."""
        self.tell("release", pipeline)

    def audit(self) -> Mapping[str, int]:
        """Return the resources that are still held; a dead child holds none."""
        return self._ask_now("audit") or {}

    async def audit_later(self) -> Mapping[str, int]:
        """Return the audit without blocking the trio thread."""
        try:
            held: Mapping[str, int] = await self.ask("audit")
        except PeerDied:
            return {}
        return held

    async def ready(self) -> None:
        """Wait until the child is alive."""
        await self._up.wait()

    def found(self, tier: str) -> Sequence[Key]:
        """Return the keys that can be found in a tier."""
        return self._ask_now("found", tier) or []


class _Ticket:
    """A container in the child."""

    def __init__(self, far: _RemotePipelines, label: str, keys: Sequence[Key]) -> None:
        self.label = label
        self.keys = keys
        self.result: Outcome | None = None
        self._far = far
        self._ended = trio.Event()

    def end(self, outcome: Outcome) -> None:
        """End it with this outcome, unless it has ended before."""
        if self.result is None:
            self.result = outcome
            self._ended.set()

    def die(self, world: RealWorld) -> None:
        """End it as failed, since its process has died.

        The state of its blocks on the disk is unknown.
        """
        if self.result is None:
            world.died[self.label] = None
            model = world.real[world.pipelines[world.requests[self.label].pipeline].to]
            for key in self.keys:
                model.arrived[key] = model.arrived.get(key, 0) + 1
            # The errors are those of a pipeline whose tier died, so that expectations are the same in virtual time.
            self.end(Outcome("FAILED", failed=dict.fromkeys(self.keys, "PeerDied"), error="TransferFailed"))
            request = world.requests[self.label]
            if request.ticket is self:
                world.look(request)

    async def wait(self) -> object:
        """Wait until it is terminal."""
        await self._ended.wait()
        return self.result

    async def cancel(self) -> object:
        """Request its cancel, and return once it is confirmed.

        If its process dies, its end is the confirmation.
        """
        with contextlib.suppress(PeerDied):
            await self._far.ask("cancel", self.label)
        return await self.wait()

    def request_cancel(self) -> None:
        """Request its cancel."""
        self._far.tell("request_cancel", self.label)


def _outcome(said: Mapping[str, Any]) -> Outcome:
    return Outcome(**{**said, "completed": tuple(said["completed"]), "evicted": tuple(said["evicted"])})


def _error(name: str, text: str) -> Exception:
    if name == "Refused":
        return Refused(text)
    # An error of its own class, by name: reports of an end contain the name.
    base = OSError if name.endswith("Error") else RuntimeError
    error: Exception = type(name, (base,), {})(text)
    return error


def in_process(world: RealWorld, stack: ExitStack) -> Factory:
    """Start our pipelines in a separate process; return their factory.

    The process starts now: a scenario's time begins when it is ready.

    Args:
        world: world of the run.
        stack: stack whose end kills every child.
    """
    child = ChildProcess(world)
    stack.callback(child.end)

    def open_far(world: World) -> AbstractAsyncContextManager[System]:
        return _open(cast("RealWorld", world), child, stack)

    return open_far


@asynccontextmanager
async def _open(world: RealWorld, child: ChildProcess, stack: ExitStack) -> AsyncIterator[System]:
    async with trio.open_nursery() as nursery:
        far = _RemotePipelines(world, nursery, stack)
        try:
            far.begin(child)
            yield cast("System", far)
        finally:
            with trio.CancelScope(shield=True):
                await far.stop()
            nursery.cancel_scope.cancel()
