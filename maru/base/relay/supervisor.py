"""TCP without keys: a child process relays the connections.

The server listens, and the child (`maru.base.relay`) accepts.

Rule 1. The port is the server's for as long as it lives: a client that connects while there is no relay waits in the
        backlog.
Rule 2. A relay that has ended is started again, at once and then with growing pauses: the server and its clients on the
        Unix socket do not notice. Relayed clients have lost their connections.
Rule 3. The relay ends with the server: killed when the task is cancelled, and by itself when the process has gone.
Rule 4. It receives the port when it requests it, which it does once it would notice the end of the server. A program
        takes long to start on a busy machine; if it already had the port, it would keep out the successor of a server
        that was killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
from array import array
from functools import partial
from typing import Final

import attrs
import msgspec
import trio

from ...exception_groups import raise_unwrapped
from ..threads import run_process
from .tcp import address_of, open_listener

FIRST_PAUSE: Final = 0.05
"""Seconds before a relay that has ended is started again.

Each further pause is twice as long.
"""
LAST_PAUSE: Final = 5.0
SOUND: Final = 10.0
"""Seconds after which an ended relay counts as having worked."""
_LOG_INTERVAL: Final = 10.0
"""Seconds between two log lines about refused connections."""
_MOST_LINE: Final = 1 << 14

_log = logging.getLogger("maru.server")


@attrs.frozen
class RelayStatistics:
    """A snapshot of the outcomes of TCP connections.

    Counted since the relay was last started.
    """

    relayed: int = 0
    """Connections joined to the server."""
    malformed: int = 0
    """Connections closed for an invalid or late handshake."""
    strangers: int = 0
    """Connections closed because another user made them."""
    crowded: int = 0
    """Connections closed because they exceeded a limit."""
    unserved: int = 0
    """Connections closed because the server did not accept them in time."""
    failed: int = 0
    """Connections closed by a fault of the relay."""
    starts: int = 0
    """Number of times that a relay was started."""
    pid: int = 0
    """Process of the relay; 0 while there is none."""

    @property
    def refused(self) -> int:
        """Number of connections that were refused."""
        return self.malformed + self.strangers + self.crowded + self.unserved + self.failed


class RelaySupervisor:
    """Keeper of one server's relay, which it starts again when it ends."""

    def __init__(self, server: str, *, kind: str = "ROUTER", most: int, anybody: bool) -> None:
        """Relay to the server's Unix socket, for ``most`` connections at once.

        Args:
            server: path of the socket.
            kind: type of the socket, as ZeroMQ names it: ``ROUTER`` or ``PUB``.
            most: most connections at once.
            anybody: whether other users of this host may connect.
        """
        self._server, self._kind, self._most, self._anybody = server, kind, most, anybody
        self._counts = RelayStatistics()
        self._starts = self._pid = 0
        self._told, self._told_at = 0, -_LOG_INTERVAL

    async def run(self, host: str, port: int, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Relay until cancelled.

        Once started, ``task_status`` gets the address: ``tcp://host:port``.

        Raises:
            OSError: it cannot listen there.
        """
        async with await open_listener(host, port) as listener:
            task_status.started(f"tcp://{address_of(listener)}")
            await self._supervise(listener.socket.fileno())

    def statistics(self) -> RelayStatistics:
        """Return an immutable snapshot, at most a second old."""
        return attrs.evolve(self._counts, starts=self._starts, pid=self._pid)

    async def _supervise(self, listening: int) -> None:
        # A relay that cannot run at all must not be started in a busy loop, so each pause is twice the last. A relay
        # that ran for long has proved that it can, and is started again at once.
        pause = FIRST_PAUSE
        while True:
            began = trio.current_time()
            ended = await self._run_once(listening)
            if trio.current_time() - began > SOUND:
                pause = FIRST_PAUSE
            _log.warning("the relay of TCP connections has ended (%s): restarting in %g s", ended, pause)
            await trio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)

    async def _run_once(self, listening: int) -> str:
        """Run one relay to its end. Returns a text with its outcome."""
        anybody = "anybody" if self._anybody else "ours"
        arguments = [self._server, self._kind, str(self._most), str(os.getpid()), anybody]
        self._starts += 1
        self._counts, self._told = RelayStatistics(), 0
        try:
            ours, theirs = trio.socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            start = partial(
                run_process,
                [sys.executable, "-P", "-m", "maru.base.relay", *arguments],
                stdin=theirs,
                capture_stdout=False,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
                deliver_cancel=_kill,
                start_new_session=True,  # an interrupt from the keyboard is for the server
            )
            with raise_unwrapped(), ours, theirs:
                async with trio.open_nursery() as nursery:
                    process: trio.Process = await nursery.start(start)
                    theirs.close()
                    self._pid = process.pid
                    nursery.start_soon(_hand_over, ours, listening)
                    await self._listen(process)
                    status = await process.wait()
        except (OSError, MemoryError) as exc:
            return f"it cannot be started: {str(exc) or 'no memory is left'}"
        finally:
            self._pid = 0
        return f"status {status}"

    async def _listen(self, process: trio.Process) -> None:
        """Record a relay's reports until it has ended."""
        assert process.stdout is not None
        line = bytearray()
        while more := await process.stdout.receive_some(_MOST_LINE):
            *lines, rest = (bytes(line) + more).split(b"\n")
            line = bytearray(rest[:_MOST_LINE])
            for one in lines:
                self._note(one)

    def _note(self, line: bytes) -> None:
        try:
            self._counts = counts = msgspec.json.decode(line, type=RelayStatistics)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            _log.error("the relay of TCP connections: %s", line.decode(errors="replace"))
            return
        now = trio.current_time()
        if counts.refused > self._told and now - self._told_at >= _LOG_INTERVAL:
            self._told, self._told_at = counts.refused, now
            _log.warning(
                "TCP connections refused: %d malformed, %d of other users, %d too many, %d not accepted in time, %d failed",
                counts.malformed, counts.strangers, counts.crowded, counts.unserved, counts.failed,
            )  # fmt: skip


async def _hand_over(relay: trio.socket.SocketType, listening: int) -> None:
    """Send the port to a relay once it requests it.

    A relay that ends before receives nothing.
    """
    with contextlib.suppress(OSError):
        if await relay.recv(1):
            await relay.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [listening]))])


async def _kill(process: trio.Process) -> None:
    process.kill()
