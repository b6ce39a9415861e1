"""Driver of operations in a trio run, with one shared socket.

No task stands between a call and its answer: the waiting caller reads the socket. Next to the callers run a few small
tasks: one ends expired waits, one renews the lease, one reports released views to the server.

Rule 1. Any error, a cancellation included, is thrown into the operation, which leaves everything in order and raises it
        on.
Rule 2. One task watches all waits, since a deadline of its own would cost each call a third.
Rule 3. Work that may block is done in a thread: mapping, and copies that take longer than a thread costs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any, TypeVar

import trio

from .._wire import HEADER_BYTES, Code, ErrorReply, decode_reply, read_header, request
from ..base.errors import BadFrame, BadMessage, CannotMap, HandlerClosed, MaruError, NoAnswer, ServerRefused, Shortage
from ..base.peers import Listener
from ..base.threads import NoThread, run_in_thread
from ..transport import Message, MessageSocket
from . import operations as operations
from .correlation import Correlation
from .handler_base import CallStatistics, beat_of
from .operations import Alone, Call, ClientState, Effect, Identify, Map, MapIndex, Operation, Pin, Work
from .regions import fetch_region
from .sockets import identify

T = TypeVar("T")

_log = logging.getLogger(__name__)

INLINE_BYTES = 1 << 20
"""Bytes up to which a copy is made in place.

It takes as long as waking a thread and being woken by it.
"""
COPIES = 2
"""Copies in threads at once: two fill a memory bus."""


class Driver:
    """Performs the effects of operations, in a trio run."""

    def __init__(self, state: ClientState) -> None:
        self.state = state
        self.timeout = state.config.timeout_ms / 1e3
        self.correlation: Correlation[Call] = Correlation(state.config.max_inflight)
        self.unreadable = 0
        self._socket: MessageSocket
        self._closed = True
        self._room = trio.lowlevel.ParkingLot()
        self._queueing: set[int] = set()
        """Sequences of calls that wait for room to be sent."""
        self._alone, self._alone_for_memory = trio.Lock(), trio.Lock()
        self._copies = trio.CapacityLimiter(COPIES)
        self._released = trio.Event()
        self._keeping = trio.CancelScope(shield=True)
        self.connected = trio.Event()
        self.connecting = trio.Lock()

    def use(self, socket: MessageSocket) -> None:
        """Use this socket from now on."""
        self._socket = socket
        self._closed = False

    def close(self) -> None:
        """Refuse further calls. Waiting calls end when the socket is closed."""
        self._closed = True
        self._room.unpark_all()
        self._keeping.cancel()

    async def keep(self) -> None:
        """Run the background tasks, until closed.

        Cancelling the scope around the handler does not end them: a caller may go on for a while, in a shield, and must
        not wait for ever, nor lose an answer.
        """
        with self._keeping:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.keep_time)
                await self.connected.wait()
                nursery.start_soon(self.keep_lease)
                nursery.start_soon(self.keep_unpinning)

    async def run(self, operation: Operation[T], *, alone: tuple[trio.Lock, ...] = ()) -> T:
        """Drive an operation to its end. Always a checkpoint.

        Args:
            operation: the operation.
            alone: the locks that are held for it.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        send = operation.send
        waited = False
        value: Any = None
        error: BaseException | None = None
        try:
            while True:
                effect = send(value) if error is None else operation.throw(error)
                error = None
                try:
                    if type(effect) is not Call:
                        waited = True
                        value = await self._perform(effect, alone)
                    elif effect.is_awaited:
                        waited = True
                        value = await self._call(effect)
                    else:
                        self._start(effect)
                        value = None
                except BaseException as exc:
                    error = exc
        except StopIteration as stop:
            if not waited:
                await trio.lowlevel.cancel_shielded_checkpoint()
            result: T = stop.value
            return result
        finally:
            error = None  # its traceback holds this frame

    async def _perform(self, effect: Effect, alone: tuple[trio.Lock, ...]) -> Any:
        if type(effect) is Work:
            if effect.size <= INLINE_BYTES:
                return effect.do()
            return await run_in_thread(effect.do, limiter=self._copies)
        if type(effect) is Alone:
            lock = self._alone_for_memory if effect.for_memory else self._alone
            if lock in alone:
                return await self.run(effect.operation(), alone=alone)
            async with lock:
                return await self.run(effect.operation(), alone=(*alone, lock))
        if type(effect) is Identify:
            return await self.identify()
        assert type(effect) is Map or type(effect) is MapIndex
        return await self.map(effect)

    async def identify(self) -> Listener:
        """Find the process that listens at the server's address.

        In a thread, since a name may have to be looked up.
        """
        try:
            return await run_in_thread(identify, self.state.config, abandon_on_cancel=True)
        except NoThread as exc:
            return Listener(unknown=str(exc))

    async def map(self, effect: Map | MapIndex) -> Any:
        """Map a region, or the index, in a thread."""
        s = self.state
        fetch = partial(
            fetch_region,
            effect,
            session=s.token,
            descriptors=s.descriptors,
            rm_address=s.rm_address,
            timeout=self.timeout,
            device=s.config.dax_path,
        )
        # Left alone when cancelled: its mapping is then referred to by no object, and unmaps itself.
        try:
            return await run_in_thread(fetch, abandon_on_cancel=True)
        except NoThread as exc:  # this must not end the task that keeps the lease
            raise CannotMap(f"nothing can be mapped now: {exc}") from exc

    # --- calls ----------------------------------------------------------------------------------------------------

    async def _call(self, call: Call) -> Any:
        while self.correlation.is_full and not self._closed:
            await self._room.park()
        frames = self._begin(call)
        try:
            try:
                self._socket.send_nowait(frames)
            except trio.WouldBlock:
                await self._send_late(call, frames)
            reply = await call.expected.wait()
        except BaseException as exc:
            self._give_up(call)
            if isinstance(exc, trio.ClosedResourceError):
                raise HandlerClosed(f"{self.state!r}: closed while a call waited for its answer") from exc
            if isinstance(exc, Shortage):
                raise NoAnswer(f"{self.state!r}: {exc}") from exc
            raise
        if type(reply) is ErrorReply:
            raise ServerRefused(reply.error, reply.code)
        return reply

    async def _send_late(self, call: Call, frames: tuple[bytes, bytes]) -> None:
        """Send a call's frames once there is room in the socket.

        There is none if the server is away for long, or reads nothing. Waits as long as for an answer.
        """
        self._queueing.add(call.sequence)
        try:
            with trio.move_on_after(max(0.0, call.deadline - self.state.clock())) as patience:
                await self._socket.send(frames)
        finally:
            self._queueing.discard(call.sequence)
        if patience.cancelled_caught:
            self.state.counters.unanswered += not call.is_over
            raise NoAnswer(f"{self.state!r}: the server does not read its requests, so no more can be sent")

    def _start(self, call: Call) -> None:
        """Send a call without waiting for its answer, which is still applied."""
        if self.correlation.is_full or self._closed:
            return
        frames = self._begin(call)
        try:
            self._socket.send_nowait(frames)
        except (trio.WouldBlock, trio.ClosedResourceError, Shortage):
            pass
        finally:
            self._give_up(call)

    def _begin(self, call: Call) -> tuple[bytes, bytes]:
        """Encode a call as frames that may leave now."""
        if self._closed:
            raise HandlerClosed(f"{self.state!r}")
        call.sequence = sequence = self.correlation.begin(call)
        try:
            frame = request(call.code, sequence, call.message)
            if call.sending is not None:
                call.sending()
        except BaseException:
            self.correlation.unsent(sequence)
            self._unpark()
            raise
        call.expected = self._socket.expect()
        call.sent_at = now = self.state.clock()
        call.deadline = now + (self.timeout if call.patience is None else call.patience)
        return b"", frame

    def _give_up(self, call: Call) -> None:
        """Stop waiting for a call; apply its answer if it came already."""
        if not call.is_over:
            call.is_over = True
            self.correlation.give_up(call.sequence)
            self.state.gave_up(call)
            self._unpark()
        elif call.reply is not None:
            self.state.heard_late(call, call.reply)

    def _unpark(self) -> None:
        if self._room:
            self._room.unpark()

    def on_messages(self, messages: list[Message]) -> None:
        """Apply answers that have come.

        Never raises: it is called by whichever task reads the socket, for all.
        """
        correlation, state = self.correlation, self.state
        for message in messages:
            frame = message[-1]
            try:
                _, _, sequence, length = read_header(frame)
            except BadFrame:
                self.unreadable += 1
                continue
            call = correlation.answered(sequence)
            is_late = call is None
            if call is None:
                call = correlation.late(sequence)
                if call is None:
                    continue
            try:
                reply = decode_reply(call.code, memoryview(frame)[HEADER_BYTES : HEADER_BYTES + length])
            except BadMessage as exc:
                self.unreadable += 1
                if not is_late:
                    call.is_over = True
                    state.gave_up(call)
                    call.expected.fail(exc)
                continue
            if is_late:
                state.heard_late(call, reply)
                continue
            call.is_over = True
            call.reply = reply
            state.heard(call, reply, call.sent_at)
            call.expected.deliver(reply)
            if self._room:
                self._room.unpark()

    # --- time -----------------------------------------------------------------------------------------------------

    async def keep_time(self) -> None:
        """End every wait that is over.

        All waits are equally long, or longer. So a task that sleeps for that long at most, and then until the first of
        the waits is over, is never late; and no call has to wake it, or has a deadline of its own.
        """
        while True:
            now = self.state.clock()
            first = now + self.timeout
            for call in self.correlation.calls():
                if call.deadline > now:
                    first = min(first, call.deadline)
                else:
                    self._end_unanswered(call, "no answer")
            await trio.sleep(first - now)

    def on_lost(self, unsent: Collection[bytes]) -> None:
        """End all calls that were sent over a lost connection.

        They will never be answered.
        """
        to_send = self._queueing.union(read_header(frame).sequence for frame in unsent)
        for call in self.correlation.calls():
            if call.sequence not in to_send:
                self._end_unanswered(call, "the connection was lost before there was an answer")

    def on_shortage(self, frame: bytes, shortage: Shortage) -> None:
        """End the call whose queued frame cannot be sent."""
        sequence = read_header(frame).sequence
        for call in self.correlation.calls():
            if call.sequence == sequence:
                self._end_unanswered(call, f"{shortage}; no answer")

    def _end_unanswered(self, call: Call, why: str) -> None:
        call.is_over = True
        self.correlation.give_up(call.sequence)
        self.state.gave_up(call)
        self._unpark()
        self.state.counters.unanswered += 1
        call.expected.fail(NoAnswer(f"{self.state!r}: {why} to {Code(call.code).name}"))

    async def keep_lease(self) -> None:
        """Renew the lease, and do the work that waits for it."""
        state = self.state
        while True:
            await trio.sleep(beat_of(state))
            try:
                await self.run(operations.beat(state))
                await self.run(operations.restore(state))
            except HandlerClosed:
                return
            except (MaruError, OSError) as exc:
                _log.warning("%r: the server does not respond: %s", state, exc)
            except Exception:  # a bug of ours, or of a callback, must not cost the lease, nor end everything around it
                _log.exception("%r could not renew its lease", state)

    async def keep_unpinning(self) -> None:
        """Report pins of released views to the server."""
        while True:
            await self._released.wait()
            self._released = trio.Event()
            try:
                with contextlib.suppress(MaruError):
                    await self.run(operations.settle(self.state))
            except Exception:  # likewise: the next call settles it, and gets the error
                _log.exception("%r could not settle its unresolved operations with the server", self.state)

    def give_back(self, pins: Iterable[Pin]) -> None:
        """Remove one user of each pin, and report that to the server.

        It is reported at once, in one message, without waiting for the answer.
        """
        state = self.state
        state.pinned.release(pins, state.era)
        if state.pinned.due and not self._closed:
            if not state.unsettled:
                for call in operations.give_back_pins(state, wait=False):
                    assert type(call) is Call
                    self._start(call)
            if state.pinned.due:
                self._released.set()

    def statistics(self) -> CallStatistics:
        calls = self.correlation.statistics()
        return CallStatistics(int(not self._closed), calls.waiting, calls.late, calls.unknown, self.unreadable)
