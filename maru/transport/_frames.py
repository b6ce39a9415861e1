"""Whole messages out of and into a ZeroMQ socket, for both faces.

Querying a frame for more frames is cheaper than querying the socket: a frame object with its bytes costs 0.57 us, plain
bytes and RCVMORE 0.85. An identity frame always has more, so it is read as plain bytes (0.15).
"""

from __future__ import annotations

import errno
import os
import socket as sockets
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias

import zmq

from ..base.packets import LONGEST_PATH
from ._contract import Message
from ._options import SocketOptions, apply

Raw: TypeAlias = "zmq.Socket[bytes]"

NOW: Final = int(zmq.NOBLOCK)
MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
EVENTS: Final = int(zmq.EVENTS)
IN: Final = int(zmq.POLLIN)
OUT: Final = int(zmq.POLLOUT)
_KINDS: Final = {"dealer": zmq.DEALER, "router": zmq.ROUTER, "pub": zmq.PUB, "sub": zmq.SUB}


class TooManyFrames(Exception):
    """A message with more frames than allowed was dropped."""


_GONE: Final = (0, 0)
"""Placeholder for the device and number of a removed socket.

The socket is to be bound again.
"""


class Port:
    """A ZeroMQ socket with a context of its own.

    So it has its own I/O thread and its own authenticator, and once the context has ended nothing of it is left: its
    addresses can be bound again, and the file of a Unix socket is not removed under a successor. (Opening and ending
    one takes 0.2 ms each.) Only an authenticator uses another socket's context.
    """

    def __init__(self, kind: str, options: SocketOptions, context: zmq.Context[Raw] | None = None) -> None:
        self.context: zmq.Context[Raw] = context or zmq.Context()
        self.raw: Raw = self.context.socket(_KINDS[kind])
        self.endpoints: tuple[str, ...] = ()
        self._files: list[tuple[str, tuple[int, int]]] = []
        self.most_frames = options.max_frames
        self.routes = kind == "router"
        try:
            apply(options, self.raw, kind)
        except BaseException:
            self.close()
            if context is None:
                self.release()
            raise
        self.descriptor: int = self.raw.FD
        self.get: Callable[[int], int] = self.raw.get  # type: ignore[assignment]
        self.receive_bytes: Callable[[int], bytes] = self.raw.recv
        self.receive_frame: Callable[[int, bool], zmq.Frame] = self.raw.recv  # type: ignore[assignment]
        # Past the wrapper of pyzmq's Socket, which only forwards: 0.24 us instead of 0.38.
        self.send_frame: Callable[[bytes, int], Any] = super(zmq.Socket, self.raw).send

    # --- addresses ------------------------------------------------------------------------------------------------

    def attach(self, bind: Sequence[str], connect: Sequence[str], topics: Sequence[bytes] = ()) -> None:
        """Bind and connect to these addresses, and subscribe to these topics.

        Raises:
            ValueError: an address is neither ``tcp://`` nor ``ipc://``.
            OSError: an address cannot be used; for ``ipc://`` also if a live server has it.
        """
        for address in [*bind, *connect]:
            _check_address(address)
        for topic in topics:
            self.raw.subscribe(topic)
        for address in bind:
            self._bind(address)
        for address in connect:
            try:
                self.raw.connect(address)
            except zmq.ZMQError as exc:
                raise OSError(exc.errno, f"cannot connect to {address}: {exc.strerror}") from exc

    def _bind(self, address: str) -> None:
        path = address.removeprefix("ipc://")
        if path != address:
            check_free(path)
        try:
            self.raw.bind(address)
        except zmq.ZMQError as exc:
            raise OSError(exc.errno, f"cannot listen at {address}: {zmq.strerror(exc.errno or 0)}") from exc
        if path != address and not path.startswith("@"):
            # Until here it has the mode that the umask gives: until then only a private directory keeps others out.
            os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
            self._files.append((path, _inode(path)))
        self.endpoints += (self.raw.get_string(zmq.LAST_ENDPOINT),)

    def renew(self) -> list[str]:
        """Bind removed Unix sockets again. Returns their paths.

        To be called again until there are none. Two calls for each: ZeroMQ ends a binding in its own thread, and
        removes the file then, which would be the new one.
        """
        made = []
        for at, (path, inode) in enumerate(self._files):
            if inode == _GONE:
                self.endpoints = tuple(one for one in self.endpoints if one != f"ipc://{path}")
                del self._files[at]
                try:
                    self._bind(f"ipc://{path}")
                except OSError:
                    self._files.append((path, _GONE))
                    raise
                return [path]
            if not os.path.lexists(path):
                self.raw.unbind(f"ipc://{path}")
                self._files[at] = (path, _GONE)
                made.append(path)
        return made

    def close(self) -> None:
        """Close the socket; never blocks."""
        self.raw.close()

    def release(self) -> None:
        """Wait until nothing is left of the closed socket.

        Blocks for ``linger`` at most, mostly for 0.2 ms.
        """
        self.context.term()
        for path, inode in self._files:
            with suppress(OSError):
                if _inode(path) == inode:  # not that of a successor
                    os.unlink(path)

    # --- messages -------------------------------------------------------------------------------------------------

    def read(self) -> Message:
        """Read one message.

        Raises:
            zmq.Again: there is none.
            TooManyFrames: there was one, and it is dropped.
        """
        receive = self.receive_frame
        message: Message = [self.receive_bytes(NOW)] if self.routes else []
        while True:
            frame = receive(NOW, False)
            message.append(frame.bytes)
            if not frame.more:
                return message
            if len(message) >= self.most_frames:
                self.skip()

    def skip(self) -> None:
        """Read the rest of a message that has too many frames.

        Raises:
            TooManyFrames: always.
        """
        while self.receive_frame(NOW, False).more:
            pass
        raise TooManyFrames

    def write(self, frames: Sequence[bytes]) -> bool:
        """Send one message, whole or not at all.

        Returns:
            Whether its peer exists.

        Raises:
            zmq.Again: there is no room for it.
            TypeError: a frame is not bytes; ValueError: there is none.
        """
        if not frames:
            raise ValueError("a message has at least one frame")
        for frame in frames:
            if type(frame) is not bytes:  # raised in the middle, it would leave half a message in the socket
                raise TypeError(f"a frame is bytes, not {type(frame).__name__}")
        send, last, sent = self.send_frame, len(frames) - 1, 0
        try:
            while sent < last:
                send(frames[sent], MORE)
                sent += 1
            send(frames[last], NOW)
        except zmq.Again:
            if sent:  # lost in the middle: ZeroMQ takes back the first frames and swallows the others
                for frame in frames[sent + 1 : last]:
                    send(frame, MORE)
                if sent < last:
                    send(frames[last], NOW)
            raise
        except zmq.ZMQError as exc:
            if exc.errno == errno.EHOSTUNREACH:
                return False
            raise OSError(exc.errno, f"cannot send: {exc.strerror}") from exc
        return True


def _check_address(address: str) -> None:
    kind, _, rest = address.partition("://")
    if kind not in ("tcp", "ipc") or not rest:
        raise ValueError(f"{address!r} is not an address: tcp://host:port or ipc://path")
    if kind == "ipc" and len(os.fsencode(rest)) > LONGEST_PATH:
        raise ValueError(f"{address!r} is too long: the name of a Unix socket has at most {LONGEST_PATH} bytes")


def _inode(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino


def check_free(path: str, kind: sockets.SocketKind = sockets.SOCK_STREAM) -> None:
    """Check that a Unix socket's path is free for a server.

    ZeroMQ removes any file of this name.

    Raises:
        OSError: another process listens there, the path is another kind of file, or it cannot be checked.
    """
    name = "\0" + path[1:] if path.startswith("@") else path
    try:
        if not path.startswith("@") and not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "the path exists and is not a socket", path)
    except FileNotFoundError:
        return
    with sockets.socket(sockets.AF_UNIX, kind) as probe:
        probe.setblocking(False)
        # BlockingIOError: its backlog is full, so a server listens there.
        with suppress(ConnectionRefusedError, FileNotFoundError):
            with suppress(BlockingIOError):
                probe.connect(name)
            raise OSError(errno.EADDRINUSE, f"a server already listens at ipc://{path}")
