"""Session with a daemon: requests and answers, begun again after a loss.

Rule 1. A request is answered, or raises :class:`DaemonUnavailable`: a lost request is never a miss.
Rule 2. A request that has the daemon read or write this process's memory ends only when that is over for certain: by
        its answer; by a message of the same start of the daemon that the session it was sent in is given back, which
        the next hello asks for; or by the end of the daemon's process, which the kernel reports. Until one of these
        comes it waits. If the daemon reports that the end of a copy is not proven, it raises
        :class:`~backends.abc.Unproven`.
Rule 3. A request whose task was cancelled is not forgotten: anything held by its answer is released, and its work under
        way is cancelled.
Rule 4. All that a session had is gone with it: numbers of caches, memories and holds are of one :class:`Session`. A
        request that has waited to be sent checks again whether its session goes on.
Rule 5. A request that gives something back is never dropped: if the channel is full, or the daemon refuses it for now,
        it is sent later.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from math import inf
from typing import Final, TypeVar

import attrs
import trio

from backends.abc import Unproven
from maru.base.errors import Shortage
from maru.exception_groups import raise_unwrapped
from maru.transport import ChannelClient, Expected, open_channel

from .._errors import ConfigError
from ..daemon._config import default_url
from ..daemon._handover import hand_over
from ..daemon._messages import (
    MAX_CREDENTIAL_BYTES,
    MAX_NAME_LENGTH,
    NAME_OF,
    OLDEST,
    SINCE,
    VERSION,
    Answer,
    BadFrame,
    Cancel,
    Commit,
    Found,
    Hello,
    Loaded,
    Refused,
    Release,
    Request,
    Reserved,
    Status,
    Stored,
    Welcome,
    decode_answer,
    decode_request,
    encode,
)
from ._errors import DaemonBusy, DaemonRefused, DaemonTierFailed, DaemonUnavailable, NoPageStore

_HEARTBEATS: Final = 3
"""Heartbeats in the time of a lease.

One may be late, and one lost.
"""
_AGAIN: Final = 0.2
"""Seconds until a daemon that refused a session is asked again.

It is draining, or has no place.
"""
_COLLECT: Final = 0.05
"""Seconds until answers that nothing waits for are read.

A task may read them sooner while it waits for its own.
"""
_SEQ: Final = (1 << 32) - 1
_SESSION_OVER: Final = "its session is over"

A = TypeVar("A", bound=Answer)

_log = logging.getLogger("offload.client")


@attrs.define(eq=False)
class Session:
    """One session with a daemon.

    It never comes back once it is over.
    """

    epoch: int
    """Number of the daemon's start."""
    token: bytes = attrs.field(repr=False)
    tenant: str
    lease: float
    block_bytes: int
    """Size of the daemon's blocks; 0: unknown in this session.

    No cache has decided it, as far as this session knows.
    """
    handover_path: str
    version: int
    """Version of the protocol that is spoken."""
    expires: float
    """Time at which the daemon may give this process up.

    It is on the clock of trio, and put off by each answered heartbeat.
    """
    process: int = attrs.field(repr=False)
    """Descriptor of the daemon's process; -1 if there is none."""

    def close(self) -> None:
        """Close the session's descriptors in this process. Idempotent."""
        if self.process >= 0:
            os.close(self.process)
            self.process = -1


@attrs.define(eq=False)
class _Call:
    seq: int
    expected: Expected
    touches_memory: bool
    abandoned: bool = False
    """Whether the task that asked was cancelled."""
    ended: Callable[[], object] | None = None
    """Called when an abandoned call has ended for certain."""
    answer: Answer | None = None
    failure: BaseException | None = None
    session: Session | None = None
    """The session that was lost with it."""
    make: Callable[[int], Request] | None = None
    """Makes the request again, if nothing waits for its answer."""

    def deliver(self, answer: Answer) -> None:
        self.answer = answer
        self.expected.deliver(answer)
        self._end(is_proven=not _is_unproven(answer))

    def fail(self, error: BaseException) -> None:
        self.failure = error
        self.expected.fail(error)
        self._end(is_proven=not isinstance(error, Unproven))

    def _end(self, *, is_proven: bool) -> None:
        if self.abandoned and is_proven and self.ended is not None:
            self.ended()


class DaemonConnection:
    """Connection to a daemon, for requests and their answers.

    Made by :func:`open_connection`; for any number of tasks of one trio run.

    Attributes:
        url: address of the daemon.
        session: the current one; ``None`` while there is none.
        sessions: how many have begun.
    """

    def __init__(self, url: str, name: str, credential: bytes) -> None:
        """Use :func:`open_connection` instead."""
        self.url: str = url
        self.session: Session | None = None
        self.sessions: int = 0
        self.on_session: Callable[[], object] = bool
        """Called when a session has begun."""
        if len(credential) > MAX_CREDENTIAL_BYTES:
            raise ConfigError("credential", f"of {len(credential)} bytes", f"must have at most {MAX_CREDENTIAL_BYTES}")
        # A name is for logs: the end of a model's path is kept.
        self._name, self._credential = name[-MAX_NAME_LENGTH:], credential
        self.read_blocks: int = 0
        """Blocks read in the page store but not reported yet.

        The daemon gets their number with the next heartbeat.
        """
        self._channel: ChannelClient
        self._nursery: trio.Nursery
        self._calls: dict[int, _Call] = {}
        self._unproven: list[_Call] = []
        """Calls of lost sessions that may still use this process's memory."""
        self._due: deque[Callable[[int], Request]] = deque()
        """Requests that found no room, and whose answers nothing waits for.

        There are at most as many as the daemon lets a session hold.
        """
        self._collects = False
        self._previous = b""
        self._last = 0
        self._cause = "it has not answered yet"
        self._refusal: DaemonRefused | None = None
        self._changed = trio.Event()

    def __repr__(self) -> str:
        return f"<DaemonConnection to {self.url}: {self._cause if self.session is None else 'connected'}>"

    # --- asking -----------------------------------------------------------------------------------------------------

    async def ask(
        self,
        make: Callable[[int], Request],
        answer: type[A],
        *,
        session: Session | None = None,
        touches_memory: bool = False,
        sent: Callable[[int], object] | None = None,
        ended: Callable[[], object] | None = None,
    ) -> A:
        """Send a request, and wait for its answer.

        Args:
            make: makes the request with its number.
            answer: type of the expected answer.
            session: the session of the numbers in the request; by default the current one.
            touches_memory: whether the daemon reads or writes this process's memory for it: rule 2.
            sent: called with the number once it was sent.
            ended: called when it has ended, if this was cancelled before.

        Raises:
            DaemonUnavailable: there is no session, or it was lost before the answer came.
            DaemonRefused: the daemon cannot do what was asked.
            DaemonBusy: the session has too much under way, or this process no descriptor for so large a request.
            Unproven: the session was lost, and with it the end of a copy.
        """
        try:
            seq, call = await self._begin(make, session, touches_memory, ended)
        except trio.Cancelled:
            if ended is not None:  # it has never begun
                ended()
            raise
        if sent is not None:
            sent(seq)
        try:
            got = await call.expected.wait()
        except trio.Cancelled:
            call.abandoned = True
            if call.answer is not None:  # it came in the tick of the cancel
                self._let_go(call.answer)
                call.deliver(call.answer)
            elif call.failure is not None:  # it was lost in the tick of the cancel
                call.fail(call.failure)
            elif seq in self._calls:
                self.tell(lambda number: Cancel(number, [seq]))
            raise
        return self._checked(got, answer)

    async def ask_to_the_end(
        self, make: Callable[[int], Request], answer: type[A], *, session: Session, leave_after: float
    ) -> A:
        """Send a request that writes this process's memory.

        Wait for its answer. Like :meth:`ask`, but cancelled, it cancels the request, and waits for its end.

        Raises:
            Unproven: cancelled, it did not end within ``leave_after`` seconds, or not for certain; or the session was
                lost, and with it the end of a copy; or the connection was closed: the memory must not be used again.
        """
        seq, call = await self._begin(make, session, touches_memory=True)
        try:
            try:
                got = await call.expected.wait()
            except (trio.Cancelled, KeyboardInterrupt):
                self.tell(lambda number: Cancel(number, [seq]))
                ignored = suppress(DaemonUnavailable, KeyboardInterrupt)
                with trio.CancelScope(shield=True), trio.move_on_after(leave_after), ignored:
                    await call.expected.wait()
                if not call.expected.done:
                    raise Unproven(f"the daemon at {self.url} has not confirmed the end of a load") from None
                if call.answer is not None and _is_unproven(call.answer):
                    raise Unproven(f"the daemon at {self.url} abandoned a copy that may still be going on") from None
                raise
        except trio.ClosedResourceError:
            raise Unproven(f"the connection to the daemon at {self.url} was closed during a load") from None
        return self._checked(got, answer)

    async def _begin(
        self,
        make: Callable[[int], Request],
        session: Session | None,
        touches_memory: bool,
        ended: Callable[[], object] | None = None,
    ) -> tuple[int, _Call]:
        """Send a request. Return its number and its call.

        The answer is delivered to the call. Cancelled, nothing was sent.
        """
        current = self.session if session is None else session
        if current is None or current is not self.session:
            await trio.lowlevel.checkpoint()
            raise self._unavailable("" if session is None else _SESSION_OVER)
        self._last = seq = self._last % _SEQ + 1
        request = make(seq)
        if SINCE[type(request)] > current.version:
            raise DaemonRefused(
                f"{NAME_OF[type(request)]} is of version {SINCE[type(request)]} of the protocol: the daemon at {self.url} "
                f"speaks {current.version} with this client, which speaks {OLDEST} to {VERSION}"
            )
        frame = encode(request)
        while True:
            if self._due:
                self._tell_due()  # first: otherwise a delete overtakes the release of the blocks that it names
            if self.session is not current:
                raise self._unavailable(_SESSION_OVER)  # rule 4: its numbers would name things of another session
            if not self._due:
                call = self._calls[seq] = _Call(seq, self._channel.expect(), touches_memory, ended=ended)
                try:
                    self._channel.send_nowait([frame])
                    return seq, call
                except trio.WouldBlock:
                    del self._calls[seq]
                except Shortage as exc:
                    del self._calls[seq]
                    raise DaemonBusy(str(exc)) from exc
                except BaseException:
                    self._calls.pop(seq, None)
                    raise
            await self._channel.wait_room()

    def tell(self, make: Callable[[int], Request]) -> None:
        """Send a request whose answer nothing waits for, once there is room.

        Never waits. If the session ends before, that has the same effect.
        """
        if self.session is None:
            return
        self._due.append(make)
        if len(self._due) == 1:
            self._tell_due()
            if self._due:
                self._nursery.start_soon(self._keep_telling, self.session)

    def _tell_due(self) -> None:
        while self._due:
            make = self._due.popleft()  # first: if the connection is found lost, nothing is due any more
            self._last = seq = self._last % _SEQ + 1
            self._calls[seq] = _Call(seq, self._channel.expect(), touches_memory=False, abandoned=True, make=make)
            read = self.read_blocks
            try:
                self._channel.send_nowait([encode(make(seq))])
            except trio.WouldBlock:
                del self._calls[seq]
                self.read_blocks = read  # a report that was not sent counts in the next one
                self._due.appendleft(make)
                return
            except Shortage:
                del self._calls[seq]
                self._nursery.start_soon(self._tell_later, make)
                continue
            if not self._collects:
                self._collects = True
                self._nursery.start_soon(self._collect)

    async def _collect(self) -> None:
        """Read outstanding answers that nothing waits for.

        They hold blocks, slots and memory.
        """
        try:
            while any(call.abandoned for call in self._calls.values()):
                await trio.sleep(_COLLECT)
                self._channel.look()
        finally:
            self._collects = False

    async def _keep_telling(self, session: Session) -> None:
        while self.session is session and self._due:
            self._tell_due()  # first: the missing room may have come before this task began
            if self._due:
                await self._channel.wait_room()

    async def _tell_later(self, make: Callable[[int], Request]) -> None:
        session = self.session
        await trio.sleep(_AGAIN)
        if self.session is session:
            self.tell(make)

    def _checked(self, got: Answer, answer: type[A]) -> A:
        if isinstance(got, answer):
            return got
        if isinstance(got, Refused):
            if got.kind == "full":
                raise DaemonBusy(got.text)
            if got.kind == "pages":
                raise NoPageStore(got.text)
            if got.kind in ("session", "draining"):
                raise DaemonUnavailable(self.url, got.text)
            if got.kind == "unavailable":
                raise DaemonTierFailed(self.url, got.text)
            raise DaemonRefused(got.text)
        raise DaemonUnavailable(self.url, f"it answered with {type(got).__name__}, not {answer.__name__}")

    def _unavailable(self, why: str = "") -> DaemonUnavailable:
        return DaemonUnavailable(self.url, why or self._cause)

    async def hand_over(self, descriptor: int, session: Session) -> int:
        """Hand over a descriptor of memory, which stays the caller's.

        Return its number in this session.

        Raises:
            OSError: it was refused, or there is no daemon.
        """
        return await hand_over(session.handover_path, session.token, descriptor)

    def start(self, function: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Run this next to other requests, until the connection is closed.

        Raises:
            DaemonUnavailable: there is no session, so that nothing can be asked.
        """
        if self.session is None:
            raise self._unavailable()
        self._nursery.start_soon(function, *arguments)

    async def wait_session(self) -> Session:
        """Wait until there is a session.

        Raises:
            DaemonRefused: the daemon refuses this client.
        """
        while self.session is None:
            if self._refusal is not None:
                raise self._refusal
            await self._changed.wait()
        await trio.lowlevel.checkpoint()
        return self.session

    # --- incoming messages and losses -------------------------------------------------------------------------------

    def _on_messages(self, batch: Sequence[Sequence[bytes]]) -> None:
        for frames in batch:
            try:
                answer = decode_answer(frames[-1])
            except BadFrame as exc:
                # Its request would wait for ever, and it is unknown which one that is.
                _log.warning("the daemon at %s sent a malformed answer: %s", self.url, exc)
                self._channel.reconnect()
                return
            call = self._calls.pop(answer.seq, None)
            if call is None:
                continue
            if call.abandoned:
                self._let_go(answer)
            is_put_off = isinstance(answer, Refused) and answer.kind == "full"
            if is_put_off and call.make is not None and self.session is not None:
                self._nursery.start_soon(self._tell_later, call.make)
            call.deliver(answer)

    def _let_go(self, answer: Answer) -> None:
        """Release anything held by an answer that nothing waits for any more."""
        if isinstance(answer, Found):
            self.tell(lambda seq: Release(seq, [answer.hold]))
        elif isinstance(answer, Reserved):
            self.tell(lambda seq: Commit(seq, answer.reservation))

    def _on_lost(self, unsent: object) -> None:
        session, self.session = self.session, None
        self._due.clear()
        # Frames of the lost session, or a greeting: nobody would wait for its answer, and the next greeting would be one
        # too many.
        self._channel.drop_unsent()
        self._cause = "the connection is lost"
        calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            if call.touches_memory and session is not None:
                call.session = session
                self._unproven.append(call)
            else:
                call.fail(self._unavailable())
        if session is not None:
            self._previous = session.token
            self._nursery.start_soon(self._until_dead, session)
        self._notify()

    def _on_shortage(self, frame: bytes, shortage: Shortage) -> None:
        try:
            call = self._calls.pop(decode_request(frame).seq, None)
        except BadFrame:  # larger than the daemon takes, which hangs up on it
            self._channel.reconnect()
            return
        if call is None:
            return
        if call.make is not None:
            self._nursery.start_soon(self._tell_later, call.make)
        call.fail(DaemonBusy(str(shortage)))

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _until_dead(self, session: Session) -> None:
        """End the calls of this session when the daemon's process is dead.

        It does not use our memory any more then.
        """
        try:
            if session.process >= 0 and any(call.session is session for call in self._unproven):
                await trio.lowlevel.wait_readable(session.process)
                self._end_lost(lambda call: call.session is session)
        finally:
            session.close()

    def _end_lost(self, chosen: Callable[[_Call], bool], unproven: Sequence[int] = ()) -> None:
        """End calls of lost sessions.

        Those with these numbers, or all of them with 0, end without a proof.
        """
        for call in [call for call in self._unproven if chosen(call)]:
            self._unproven.remove(call)
            if 0 in unproven or call.seq in unproven:
                call.fail(Unproven(f"the daemon at {self.url} was lost, and a copy of it may still be going on"))
            else:
                call.fail(self._unavailable("it was lost; nothing of this request is under way any more"))

    def _close(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.close()

    # --- sessions ---------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Begin a session, and another one when it is lost, until cancelled."""
        while True:
            try:
                await self._greet()
            except DaemonUnavailable as exc:
                self._cause = exc.why
                await trio.sleep(_AGAIN)
                continue
            except (DaemonRefused, DaemonBusy) as exc:
                self._cause = str(exc)
                self._refusal = exc if isinstance(exc, DaemonRefused) else None
                self._notify()
                await trio.sleep(_AGAIN)
                continue
            self._refusal = None
            self._notify()
            self.on_session()
            await self._beat()

    async def _greet(self) -> None:
        self._last = seq = self._last % _SEQ + 1
        call = self._calls[seq] = _Call(seq, self._channel.expect(), touches_memory=False)
        began = trio.current_time()
        await self._channel.send([encode(Hello(seq, OLDEST, VERSION, self._name, self._credential, self._previous))])
        welcome = self._checked(await call.expected.wait(), Welcome)
        self._previous = b""
        # A session begins only when the one before is given back: rule 2. Another start of the daemon knows nothing of
        # that one: its process is waited for, and if the kernel cannot report its end, nothing proves it.
        self._end_lost(lambda call: call.session is not None and call.session.epoch == welcome.epoch, welcome.unproven)
        self._end_lost(lambda call: call.session is not None and call.session.process < 0, [0])
        try:
            process = self._channel.open_peer()
        except OSError as exc:
            # Without it nothing would prove the end of a copy when the daemon is killed. So this session is given back.
            self._previous = welcome.token
            self._channel.reconnect()
            raise self._unavailable(f"its process cannot be watched now: {exc}") from exc
        self.session = Session(
            welcome.epoch,
            welcome.token,
            welcome.tenant,
            welcome.lease,
            welcome.block_bytes,
            welcome.handover,
            welcome.version,
            began + welcome.lease,
            process,
        )
        self.sessions += 1

    async def _beat(self) -> None:
        """Send heartbeats to the daemon until the session is lost."""
        session = self.session
        while session is not None and self.session is session:
            changed = self._changed
            with trio.move_on_after(session.lease / _HEARTBEATS):
                await changed.wait()
            if self.session is session:
                began = trio.current_time()
                try:
                    await self.ask(self._status, Answer, session=session)
                except DaemonUnavailable:
                    return
                session.expires = began + session.lease

    def look(self) -> None:
        """Take incoming messages, and notice a lost connection, without waiting.

        Without this call the next request, or heartbeat, does so.
        """
        self._channel.look()

    def tell_status(self) -> None:
        """Report blocks read since the last heartbeat. Never waits."""
        if self.session is not None and self.read_blocks:
            self.tell(self._status)

    def _status(self, seq: int) -> Status:
        read, self.read_blocks = self.read_blocks, 0
        return Status(seq, read)


def _is_unproven(answer: Answer) -> bool:
    """Return whether a copy may still be going on after this answer."""
    return (isinstance(answer, Stored) and answer.status == "unproven") or (
        isinstance(answer, Loaded) and answer.unproven
    )


def path_of(url: str) -> str:
    """Return the path of a daemon's socket.

    The default, also for ``ipc`` alone, is this user's daemon.

    Raises:
        ValueError: it is not on this host: a daemon serves by shared memory.
    """
    if url in ("", "ipc"):
        url = default_url()
    if not url.startswith("ipc://") or len(url) <= len("ipc://"):
        raise ValueError(
            f"daemon_url = {url!r}: must be ipc://PATH, or ipc, since a daemon is on the host of its engines"
        )
    return url.removeprefix("ipc://")


@asynccontextmanager
async def open_connection(
    url: str = "", *, name: str = "", credential: str = "", wait: float = inf
) -> AsyncIterator[DaemonConnection]:
    """Open a connection to the daemon of this host.

    It is open for the length of an ``async with`` block.

    Args:
        url: ``ipc://PATH`` of its socket; by default that of this user's daemon.
        name: of this engine, for the daemon's log.
        credential: identifies the tenant, if the daemon has tenants.
        wait: seconds to wait for the first session.

    Raises:
        ValueError: the URL is of another host.
        DaemonUnavailable: there was no session in that time.
        DaemonRefused: the daemon refuses this client.
    """
    path = path_of(url)
    connection = DaemonConnection(f"ipc://{path}", name or f"process {os.getpid()}", credential.encode())
    with raise_unwrapped():
        async with (
            open_channel(
                path, connection._on_messages, connection._on_lost, connection._on_shortage
            ) as connection._channel,
            trio.open_nursery() as connection._nursery,
        ):
            connection._nursery.start_soon(connection._keep)
            try:
                with trio.move_on_after(wait) as waiting:
                    await connection.wait_session()
                if waiting.cancelled_caught:
                    raise connection._unavailable(f"there was no session within {wait:g} s: {connection._cause}")
                yield connection
            finally:
                connection._nursery.cancel_scope.cancel()
                connection._close()
