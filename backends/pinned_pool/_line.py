"""One blocking connection to a server: frames out and in, each in bounded time. One thread at a time.

Rule 1. What was begun to be sent is sent whole, or the connection is over: half a frame would spoil the next one.
Rule 2. An answer that does not come in time may come later: what has arrived of it is kept, and the connection stays.
Rule 3. What is there when the time is over is still taken, once: who was late may have been this process. So a peer that
        sends a byte now and then does not prolong anything.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from ipaddress import ip_address
from typing import Final

from maru._listeners import find_tcp_listener
from maru._peers import why_untrusted

from ._errors import PoolLost, PoolTimeout, PoolUnreachable, PoolUntrusted
from ._messages import HEADER, Answer, BadFrame, Request, decode_answer, encode, lengths

_DISCARD_BYTES: Final = 64 << 10

_log = logging.getLogger(__name__)


def parse_address(server: str) -> tuple[str, int]:
    """Host and port of ``host:port``.

    Raises:
        ValueError: it is none.
    """
    host, colon, port = server.removeprefix("tcp://").rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(f"{server!r} is no host:port")
    return host.strip("[]"), int(port)


class Line:
    """A connection.

    Args:
        server: ``host:port``.
        timeout: seconds to wait for it to be there.
        uid: the user whose server is meant, besides root's.

    Raises:
        PoolUntrusted: another user's process listens there. Nothing was sent.
        PoolUnreachable: nobody listens there.
        PoolTimeout: nobody answers there.
    """

    def __init__(self, server: str, timeout: float, uid: int) -> None:
        self.server: Final = server
        address = parse_address(server)
        try:
            self._sock = socket.create_connection(address, timeout)
        except TimeoutError as exc:
            raise PoolTimeout(f"no pinned pool at {server} answered within {timeout:g} s") from exc
        except OSError as exc:
            raise PoolUnreachable(f"there is no pinned pool at {server}: {exc}") from exc
        try:
            self._check_peer(uid)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            self._sock.close()
            raise
        self._came = bytearray()
        """Of the next answer."""

    @property
    def is_open(self) -> bool:
        """Whether nobody has hung up, as far as the kernel knows. Any thread; asks nobody."""
        fd = self._sock.fileno()
        if fd < 0:
            return False
        poll = select.poll()
        poll.register(fd, select.POLLRDHUP)
        return not poll.poll(0)

    def close(self) -> None:
        """Close this process's end. Idempotent. The peer hears of it when no process has it open any more."""
        self._sock.close()

    def interrupt(self) -> None:
        """Have whoever waits here find that this is over. Any thread."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is over already

    def send(self, request: Request, payload: memoryview, deadline: float) -> None:
        """Send one frame.

        Raises:
            PoolLost: the connection is over; also where half of the frame was sent in time.
            PoolTimeout: nothing of it could be sent.
        """
        head = memoryview(encode(request, len(payload)))
        sent, total = 0, len(head) + len(payload)
        try:
            while sent < total:
                at = max(0, sent - len(head))
                self._sock.settimeout(_left(deadline))
                sent += self._sock.sendmsg([head[sent:], payload[at:]])
                if sent < total:
                    _check_time(deadline)
        except TimeoutError as exc:
            if not sent:
                raise PoolTimeout(f"{self.server} takes no requests") from exc
            raise PoolLost(f"{self.server} stopped reading in the middle of a request") from exc
        except OSError as exc:
            self.close()
            raise PoolLost(f"the connection to {self.server} is over: {exc}") from exc
        finally:
            if 0 < sent < total:
                self.close()

    def receive(self, deadline: float) -> tuple[Answer, int]:
        """The next answer, and how many bytes are behind it: these are to be read or discarded next.

        Raises:
            PoolLost: the connection is over.
            PoolTimeout: it does not come. It still may.
        """
        try:
            self._gather(HEADER.size, deadline)
            message_bytes, payload_bytes = lengths(bytes(self._came[: HEADER.size]))
            self._gather(HEADER.size + message_bytes, deadline)
            body = bytes(self._came[HEADER.size :])
            self._came.clear()
            return decode_answer(body), payload_bytes
        except BadFrame as exc:
            self.close()
            raise PoolLost(f"{self.server} is no pinned pool: {exc}") from exc

    def read(self, view: memoryview, deadline: float) -> None:
        """Bytes behind an answer.

        Raises:
            PoolLost: the connection is over; also where they do not come in time.
        """
        whole = False
        try:
            while view:
                self._sock.settimeout(_left(deadline))
                n = self._sock.recv_into(view)
                if not n:
                    raise PoolLost(f"{self.server} has hung up")
                view = view[n:]
                if view:
                    _check_time(deadline)
            whole = True
        except OSError as exc:
            raise PoolLost(f"{self.server} stopped in the middle of an answer: {exc}") from exc
        finally:
            if not whole:
                self.close()

    def discard(self, nbytes: int, deadline: float) -> None:
        """As `read`, for what nobody wants."""
        scratch = memoryview(bytearray(min(nbytes, _DISCARD_BYTES)))
        while nbytes:
            n = min(nbytes, len(scratch))
            self.read(scratch[:n], deadline)
            nbytes -= n

    def _check_peer(self, uid: int) -> None:
        """Raise where another user's process is at the other end, as far as the kernel tells.

        Asked once there is a connection: who listens may have changed until then.
        """
        try:
            host, port = self._sock.getpeername()[:2]
        except OSError as exc:
            raise PoolLost(f"{self.server} has hung up: {exc}") from exc
        listener = find_tcp_listener(host, port)
        if why_untrusted(listener, uid):
            other = min(listener.uids - {uid, 0})
            raise PoolUntrusted(
                f"{self.server} is served by user {other}, not by user {uid}: start a server of your own, or say "
                f"server_uid = {other} if that one is meant"
            )
        if listener.unknown and ip_address(host.partition("%")[0]).is_loopback:
            _log.warning("whose process listens at %s cannot be told: %s", self.server, listener.unknown)

    def _gather(self, nbytes: int, deadline: float) -> None:
        """Have so many bytes of the next answer here."""
        tried = False
        while len(self._came) < nbytes:
            try:
                if tried:
                    _check_time(deadline)
                self._sock.settimeout(_left(deadline))
                data = self._sock.recv(nbytes - len(self._came))
            except TimeoutError as exc:
                raise PoolTimeout(f"{self.server} did not answer in time") from exc
            except OSError as exc:
                self.close()
                raise PoolLost(f"the connection to {self.server} is over: {exc}") from exc
            if not data:
                self.close()
                raise PoolLost(f"{self.server} has hung up")
            self._came += data
            tried = True


def _check_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError("it comes too slowly")


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())  # 0 would mean: do not wait, with another error
