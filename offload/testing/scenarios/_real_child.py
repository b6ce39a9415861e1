"""Child process with a real run's pipelines, which may be killed.

Run with ``python -m`` this module, FD, DIRECTORY. It opens our pipelines over the files of the directory, executes the
parent's requests, and reports events, in msgpack messages over a socket pair (:class:`MessageSocket`). It knows faults
only by their effects: a signal, or a call within a hook.

Rule 1. Blocks are durable before they are acknowledged (``fsync``): a block that was reported as stored is found by the
        next process, or missed; and is never wrong.
Rule 2. At a hook at which a fault is planned it waits until the parent sends ``go``, and meanwhile makes the calls that
        must happen within the hook.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import attrs
import msgspec
import trio

from maru.base.all_bytes import send_all
from offload.preconditions import AsyncCallable

from ._policies import ScriptedError
from ._program import Scenario
from ._real_run import RealPipelineSystem
from ._real_tiers import WallClock
from ._real_world import RealWorld
from ._systems import Refused, Ticket
from ._trace import outcome_of
from ._world import Request

if TYPE_CHECKING:
    from ._real_tiers import RealFile, RealMemory


_TIMEOUT: Final = 30.0
_HEAD: Final = 4

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class MessageSocket:
    """One end of a socket pair for messages.

    Sending to an end that is gone raises ``OSError``; reading from it, ``ConnectionResetError``.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._read = bytearray()
        self._later: deque[list[Any]] = deque()
        self._parked: trio.CancelScope | None = None

    def send(self, *message: object) -> None:
        """Send a message; block while the other side does not read.

        That never takes long, since it always does.
        """
        data = _encode(message)
        send_all(self._socket, len(data).to_bytes(_HEAD, "big") + data)

    def receive(self, seconds: float = _TIMEOUT) -> list[Any]:
        """Return the next message; the whole thread waits for it.

        Raises:
            TimeoutError: there is none.
        """
        while (message := self._next()) is None:
            if not select.select([self._socket], [], [], seconds)[0]:
                raise TimeoutError(f"no message within {seconds:g} s")
            self._fill()
        self._wake()  # nothing will announce further messages that have been read
        return message

    def keep(self, message: list[Any]) -> None:
        """Keep a message for the task that waits."""
        self._later.append(message)
        self._wake()

    async def wait(self) -> list[Any]:
        """Return the next message; this task waits for it."""
        while True:
            message = self._later.popleft() if self._later else self._next()
            if message is not None:
                return message
            with trio.CancelScope() as self._parked:
                await trio.lowlevel.wait_readable(self._socket)
            self._parked = None
            self._fill()

    def _wake(self) -> None:
        if self._parked is not None:
            self._parked.cancel()

    def close(self) -> None:
        """Close the socket. Idempotent; no task may wait in it."""
        self._socket.close()

    def _next(self) -> list[Any] | None:
        if len(self._read) < _HEAD:
            return None
        end = _HEAD + int.from_bytes(self._read[:_HEAD], "big")
        if len(self._read) < end:
            return None
        message: list[Any] = _decode(bytes(self._read[_HEAD:end]))
        del self._read[:end]
        return message

    def _fill(self) -> None:
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("the other side is gone")
        self._read += data


# --- the child --------------------------------------------------------------------------------------------------------


_AT_ONCE: Final = frozenset({"request_cancel", "close_now", "evict", "release", "holds"})
"""Requests that are executed within a hook."""


class ChildWorld(RealWorld):
    """World of the pipelines in the child; hooks go to the parent."""

    fsync = True

    def __init__(
        self, scenario: Scenario, seed: int, clock: WallClock, workdir: str, wire: MessageSocket, planned: Sequence[str]
    ) -> None:
        super().__init__(scenario, seed, clock, workdir)
        self.wire = wire
        self.at_once: Callable[[list[Any]], object] = lambda message: None
        self._stops = frozenset(planned)

    def hook(self, name: str, label: str | Sequence[str], where: str = "") -> None:
        """Report a hook, and stop if a fault is planted there."""
        super().hook(name, label, where)
        who = (label,) if isinstance(label, str) else tuple(label)
        stops = name in self._stops
        self.wire.send("hook", name, who, where, stops)
        while stops:
            message = self.wire.receive()
            if message[0] == "go":
                return
            if message[0] in _AT_ONCE:
                self.at_once(message)
            else:
                self.wire.keep(message)

    def look(self, request: Request) -> None:
        """Report an end as soon as it is seen."""
        if request.outcome is None and request.ticket is not None and request.ticket.result is not None:
            request.outcome = outcome_of(request.ticket.result)
            self.wire.send("ended", request.label, attrs.asdict(request.outcome))
            if self.told is not None:
                self.told(request.label)


class _CommandLoop:
    """Executor of the parent's requests, one task for each question."""

    def __init__(self, world: ChildWorld, ours: RealPipelineSystem) -> None:
        self._world = world
        self._system = ours
        self._holds: dict[str, trio.Event] = {}
        self._broken: set[str] = set()
        world.at_once = self.at_once

    async def live(self) -> None:
        """Serve messages until the parent asks to end, or is gone."""
        world = self._world
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    message = await world.wire.wait()
                except ConnectionResetError:  # the parent is gone
                    message = ["end"]
                if message[0] == "end":
                    nursery.cancel_scope.cancel()
                    return
                if message[0] in _AT_ONCE:
                    self.at_once(message)
                else:
                    nursery.start_soon(self._answer, nursery, *message)

    def at_once(self, message: list[Any]) -> None:
        """Execute a request at once, within a hook."""
        what, *args = message
        world, ours = self._world, self._system
        if what == "request_cancel":
            ticket = world.requests[args[0]].ticket
            if ticket is not None:
                ticket.request_cancel()
        elif what == "holds":
            label, broken = args
            if broken:
                self._broken.add(label)
            self._holds.setdefault(label, trio.Event()).set()
        elif what == "close_now":
            ours.close_now()
        elif what == "evict":
            ours.evict(*args)
        elif what == "release":
            ours.release(*args)

    async def _answer(self, nursery: trio.Nursery, what: str, number: int, *args: Any) -> None:
        call: Callable[..., Awaitable[object]] = getattr(self, f"_{what}")
        try:
            self._world.wire.send("answer", number, await call(*args), "", "")
        except Exception as error:
            self._world.wire.send("answer", number, None, type(error).__name__, str(error))
        else:
            if what == "store":
                nursery.start_soon(self._watch, args[0])

    async def _store(self, label: str, waits: bool) -> None:
        request = self._world.requests[label]
        if waits:
            holds = self._holds.setdefault(label, trio.Event())

            async def wait() -> None:
                await holds.wait()
                if label in self._broken:
                    raise ScriptedError("its event will never be set")

            request.after = AsyncCallable(wait)
        request.state = "taken"
        ticket: Ticket = await self._system.store(request.keys, None, label)
        request.ticket = ticket
        self._world.look(request)

    async def _watch(self, label: str) -> None:
        request = self._world.requests[label]
        assert request.ticket is not None
        await request.ticket.wait()
        self._world.look(request)

    async def _cancel(self, label: str) -> None:
        ticket = self._world.requests[label].ticket
        if ticket is None:
            raise Refused(f"there is no container {label} here")
        await ticket.cancel()

    async def _load(self, tier: str, keys: Sequence[bytes]) -> list[bytes | None]:
        found = await self._system.load_from(tier, keys)
        return [found[key] for key in keys]

    async def _delete(self, tier: str, keys: Sequence[bytes]) -> None:
        await self._system.delete(tier, keys)

    async def _drain(self, pipeline: str) -> None:
        await self._system.drain(pipeline)

    async def _audit(self) -> dict[str, int]:
        return dict(self._system.audit())

    async def _found(self, tier: str) -> list[bytes]:
        return list(self._system.found(tier))


async def _main(world: ChildWorld) -> None:
    ours = RealPipelineSystem(world)
    with contextlib.ExitStack() as stack:
        stack.callback(world.close_down)
        for tier in ours.tiers.values():
            stack.callback(cast("RealFile | RealMemory", tier).close)
        async with trio.open_nursery() as world.background:
            async with ours.open():
                world.wire.send("ready")
                await _CommandLoop(world, ours).live()
            world.background.cancel_scope.cancel()
        ours.ledger.close()
        for request in world.requests.values():
            world.look(request)
        wrong = [*ours.ledger.violations, *[f"{one.rule}: {one.text}" for one in world.violations]]
        with contextlib.suppress(OSError):
            world.wire.send("over", wrong)


def run(wire: MessageSocket, directory: str) -> None:
    """Run the real systems of a scenario in a child process.

    The first message has scenario, seed, hooks and pace.
    """
    try:
        text, seed, planned, pace = wire.receive()
    except ConnectionResetError:  # the parent is gone
        return
    clock = WallClock(pace)
    world = ChildWorld(msgspec.json.decode(text, type=Scenario), seed, clock, directory, wire, planned)
    trio.run(_main, world, clock=clock)


if __name__ == "__main__":
    run(MessageSocket(socket.socket(fileno=int(sys.argv[1]))), sys.argv[2])
