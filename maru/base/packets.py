"""A SOCK_SEQPACKET connection of whole frames within this host, without waits.

Rule 1. A frame is sent entirely or not at all. The kernel keeps packets apart, so half a frame cannot be received: a
        peer that dies, or a task that is cancelled, leaves no partial frame.
Rule 2. A packet is bounded by the send buffer of its socket (212,960 bytes by default), so a frame of more than
        ``INLINE_BYTES`` travels as the descriptor of a sealed memfd that holds it. Pieces would be faster from 1 MiB on
        (240 us instead of 470; at 256 KiB both take 85), but then half a frame could be left over on both sides, and
        would have to be bounded for every peer that never sends the rest.
Rule 3. A descriptor is read only if it is a memfd that its sender has sealed against every change: reading from
        anything else (a pipe, a file of a network) may block, and its contents may change between check and use. Every
        received descriptor is closed.
Rule 4. A peer that breaks a rule loses the connection: every ``OSError`` but :exc:`BlockingIOError` means that it is
        over.
Rule 5. A shortage on this host does not end a connection. At its limit a process gives up its spare descriptor for a
        large frame; if that is not enough, :exc:`Shortage` is raised for this frame only. The kernel drops a descriptor
        for which there is no place, and the request with it. So a packet is peeked at first, and taken out of the
        socket once its descriptor is here: the peek costs a microsecond.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import stat
import struct
import termios
from array import array
from collections.abc import Iterator
from typing import Final

from .all_bytes import read_head, write_all
from .errors import PoolUnusable, Shortage
from .listeners import open_peer, peer_uid
from .spare_descriptor import SPARE

INLINE_BYTES: Final = 128 << 10
"""Largest frame that is sent as a packet.

Half of the default send buffer, and more than any message with the keys of one page.
"""
LONGEST_PATH: Final = 107
"""Most bytes in a Unix socket's name."""

_SIZE: Final = struct.Struct("!Q")
_INT: Final = struct.Struct("i")
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
# Space for exactly one descriptor: CMSG_SPACE would round up to two, and we would have to close the second.
_ONE_DESCRIPTOR: Final = socket.CMSG_LEN(_INT.size)
# As numbers: an operator of an enum costs half a microsecond, and these are tested for each packet.
_LOOK: Final = int(socket.MSG_PEEK)
_LOOK_AND_TAKE: Final = int(socket.MSG_PEEK | socket.MSG_CMSG_CLOEXEC)
_DROPPED: Final = int(socket.MSG_CTRUNC)
_CUT: Final = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_LEAST_MEMORY: Final = 512
"""Least kernel memory that a packet takes until received, in bytes.

On the measured host it takes 768.
"""
_BACKLOG: Final = 128
_SHORT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC, errno.ETOOMANYREFS})
"""Errors for a lack of descriptors or memory.

ETOOMANYREFS counts descriptors in transit.
"""


class BadPacket(ConnectionError):
    """The peer sent a malformed frame.

    It is too long, or has a descriptor that is not a sealed memfd.
    """


class PacketConnection:
    """One end of a connection.

    Not for two threads at once, except for the methods that allow any thread.

    Args:
        sock: a connected socket, which becomes non-blocking and is closed by this object.
        max_bytes: largest frame that is received.
        buffer: receive buffer of ``INLINE_BYTES``; may be shared by connections of one thread.
    """

    __slots__ = ("_buffers", "_first", "_look", "_max_bytes", "_send", "_sock", "_take", "_view", "descriptor")

    def __init__(self, sock: socket.socket, max_bytes: int, buffer: bytearray | None = None) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._send, self._look, self._take = sock.send, sock.recvmsg_into, sock.recv_into
        self._max_bytes = max_bytes
        self._view = memoryview(bytearray(INLINE_BYTES) if buffer is None else buffer)
        self._buffers = [self._view]
        self._first = bytearray(1)
        self.descriptor: int = sock.fileno()
        SPARE.keep()

    def send(self, frame: bytes) -> None:
        """Send one frame.

        Raises:
            BlockingIOError: there is no room for it now.
            Shortage: there is no memory or descriptor for so large a frame. Nothing was sent, and the connection goes
                on.
            OSError: the connection is over.
            ValueError: the frame is empty, which the kernel uses to signal that a peer has hung up.
        """
        if not frame:
            raise ValueError("a frame has at least one byte")
        if len(frame) > INLINE_BYTES:
            try:
                self._send_in_memory(frame)
            except Shortage:
                with SPARE.given_up():
                    self._send_in_memory(frame)
        else:
            self._send(frame)

    def receive(self) -> bytes:
        """Receive the next frame.

        Raises:
            BlockingIOError: there is none yet.
            Shortage: there is no descriptor to receive it with. The frame stays the next one.
            ConnectionResetError: the peer closed the connection.
            BadPacket: the frame is malformed. The caller must close the connection.
            OSError: the connection is over.
        """
        n, _, flags, _ = self._look(self._buffers, 0, _LOOK)
        if not flags & _CUT:
            if not n:
                raise ConnectionResetError("the peer closed the connection")
            self._take(self._first)  # the kernel drops the rest of the packet
            return bytes(self._view[:n])
        try:
            return self._receive_in_memory()
        except Shortage:
            with SPARE.given_up():
                return self._receive_in_memory()

    def most_unread(self) -> int:
        """Return an upper bound for the sent frames not received yet.

        Frames arrive in order, so these are the last ones.
        """
        try:
            (waiting,) = _INT.unpack(fcntl.ioctl(self._sock, termios.TIOCOUTQ, _INT.pack(0)))
        except (OSError, ValueError):
            return 0
        return int(waiting) // _LEAST_MEMORY

    @property
    def is_open(self) -> bool:
        """Whether the peer is connected, as far as the kernel knows.

        For any thread; sends nothing.
        """
        descriptor = self._sock.fileno()
        if descriptor < 0:
            return False
        poll = select.poll()
        poll.register(descriptor, select.POLLRDHUP)
        return not poll.poll(0)

    def open_peer(self) -> int:
        """Open a descriptor of the peer's process; -1 if there is none.

        Raises:
            OSError: this process, or this host, has no free descriptor now.
        """
        return open_peer(self._sock)

    def interrupt(self) -> None:
        """Disconnect, to wake a thread that waits here.

        For any thread; call :meth:`close` afterwards.
        """
        with contextlib.suppress(OSError):  # it is disconnected already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this process's end. Idempotent."""
        self._sock.close()

    def _send_in_memory(self, frame: bytes) -> None:
        descriptor = -1
        try:
            descriptor = os.memfd_create("maru-frame", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            write_all(descriptor, frame)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))]
            self._sock.sendmsg([_SIZE.pack(len(frame))], attached)
        except OSError as exc:
            if exc.errno not in _SHORT:
                raise
            raise Shortage(f"a frame of {len(frame)} bytes cannot be sent now: {exc}") from exc
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _receive_in_memory(self) -> bytes:
        n, attached, flags, _ = self._look(self._buffers, _ONE_DESCRIPTOR, _LOOK_AND_TAKE)
        descriptors = descriptors_in(attached)
        try:
            if flags & _CUT == _DROPPED and not descriptors:
                raise Shortage("no descriptor is left to receive a large frame")
            self._take(self._first)
            if flags & _CUT or len(descriptors) != 1 or n != _SIZE.size:
                raise BadPacket(f"a packet of {n} bytes with {len(descriptors)} descriptors, flags {flags:#x}")
            return self._read_sealed(descriptors[0], _SIZE.unpack(self._view[:n])[0])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _read_sealed(self, descriptor: int, size: int) -> bytes:
        if not 0 < size <= self._max_bytes:
            raise BadPacket(f"a frame of {size} bytes; at most {self._max_bytes} are accepted")
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError:  # not a memfd
            seals = 0
        if seals & _SEALS != _SEALS or os.fstat(descriptor).st_size != size:
            raise BadPacket("a descriptor of memory that is not sealed, or not of the announced size")
        frame = read_head(descriptor, size)
        if len(frame) != size:
            raise BadPacket("a descriptor whose memory ends early")
        return frame


# --- making connections -------------------------------------------------------------------------------------------


def connect(path: str) -> socket.socket:
    """Connect without waiting to a listener of this user or root.

    Raises:
        PermissionError: another user's process listens there. Nothing was sent.
        BlockingIOError: its backlog is full.
        OSError: no process listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        with reachable(path) as name:
            sock.connect(name)
        # The user is read from the connection itself, so the listener cannot be exchanged between the check and the
        # use.
        uid = peer_uid(sock)
        if uid not in (os.geteuid(), 0):
            raise PermissionError(f"{path!r} is served by user {uid}")
    except BaseException:
        sock.close()
        raise
    return sock


def is_served(path: str) -> bool:
    """Return whether a server listens at this path.

    The socket of a dead server refuses connections.
    """
    try:
        connect(path).close()
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    except OSError:
        return True
    return True


def listen(path: str) -> socket.socket:
    """Return a socket that listens at this path, mode 0600.

    A socket left there by a dead server is replaced.

    Raises:
        PoolUnusable: others may enter its directory, or no socket can be made there.
    """
    directory = os.path.dirname(os.path.abspath(path))
    try:
        status = os.stat(directory)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PoolUnusable(f"others may enter {directory!r}: the directory of a socket must have mode 0700")
        check_socket(path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with reachable(path) as name:
                listening.bind(name)
            os.chmod(path, 0o600)  # until then, its directory keeps others out
            listening.listen(_BACKLOG)
        except BaseException:
            listening.close()
            raise
    except OSError as exc:
        raise PoolUnusable(f"no socket can be made at {path!r}: {exc}") from exc
    return listening


def check_socket(path: str) -> None:
    """Check that a path is free or a socket.

    Raises:
        PoolUnusable: something else has this path.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise PoolUnusable(f"{path!r} exists, and is not a socket")


@contextlib.contextmanager
def reachable(path: str) -> Iterator[str]:
    """Yield a name for this path that fits into a socket's address.

    A path that is too long is reached through a descriptor of its directory.
    """
    if len(os.fsencode(path)) <= LONGEST_PATH:
        yield path
        return
    directory, name = os.path.split(os.path.abspath(path))
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


def descriptors_in(attached: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors received with a packet, which the receiver must close."""
    found = array("i")
    for level, kind, data in attached:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)
