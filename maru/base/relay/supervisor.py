"""TCP without keys: the server listens, and a process of its own takes the connections and relays them (`maru.base.relay`).

Rule 1. The port is the server's for as long as it lives: whoever connects while there is no relay waits in the backlog.
Rule 2. A relay that has ended is started again, at once and then ever later: the server and its clients on the Unix socket do
        not notice. Whoever was relayed has lost his connection.
Rule 3. The relay ends with the server: killed when the task is cancelled, and by itself when the process has gone.
Rule 4. It is given the port when it asks for it, which it does once it would see the end of the server. A program takes long
        to start on a busy machine; with the port in its hands, it would keep out the successor of a server that was killed.
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
"""Before a relay that has ended is started again; each further one takes twice as long."""
LAST_PAUSE: Final = 5.0
SOUND: Final = 10.0
"""A relay that lived so long, in seconds, was no failure of starting one."""
_LOG_INTERVAL: Final = 10.0
"""Seconds between two lines about connections that were turned away."""
_MOST_LINE: Final = 1 << 14

_log = logging.getLogger("maru.server")


@attrs.frozen
class RelayStatistics:
    """A snapshot of what became of TCP connections; counters since the relay was started last."""

    relayed: int = 0
    """Joined to the server."""
    malformed: int = 0
    """Closed for what they said, or did not say in time."""
    strangers: int = 0
    """Closed, being of other users."""
    crowded: int = 0
    """Closed, being too many."""
    unserved: int = 0
    """Closed, for the server did not take them in time."""
    failed: int = 0
    """Closed by a fault of the relay."""
    starts: int = 0
    """How often a relay was started."""
    pid: int = 0
    """Its process; 0 while there is none."""

    @property
    def refused(self) -> int:
        """Connections that were turned away."""
        return self.malformed + self.strangers + self.crowded + self.unserved + self.failed


class RelaySupervisor:
    """Starts the relay of one server, and starts it again whenever it has ended."""

    def __init__(self, server: str, *, kind: str = "ROUTER", most: int, anybody: bool) -> None:
        """Relay to the server's Unix socket, for so many connections at once.

        Args:
            server: the path of the socket.
            kind: what it is in ZeroMQ's words: ``ROUTER`` or ``PUB``.
            most: connections at once.
            anybody: whether other users of this host may come in.
        """
        self._server, self._kind, self._most, self._anybody = server, kind, most, anybody
        self._counts = RelayStatistics()
        self._starts = self._pid = 0
        self._told, self._told_at = 0, -_LOG_INTERVAL

    async def run(self, host: str, port: int, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Relay until cancelled. Started, it says where: ``tcp://host:port``.

        Raises:
            OSError: it cannot listen there.
        """
        async with await open_listener(host, port) as listener:
            task_status.started(f"tcp://{address_of(listener)}")
            await self._supervise(listener.socket.fileno())

    def statistics(self) -> RelayStatistics:
        """An immutable snapshot, at most a second old."""
        return attrs.evolve(self._counts, starts=self._starts, pid=self._pid)

    async def _supervise(self, listening: int) -> None:
        # A relay that cannot run at all must not be started in a busy loop, so each pause is twice the last. One that ran for
        # long has proved that it can, and is started again at once.
        pause = FIRST_PAUSE
        while True:
            began = trio.current_time()
            ended = await self._run_once(listening)
            if trio.current_time() - began > SOUND:
                pause = FIRST_PAUSE
            _log.warning("the relay of TCP connections has ended (%s): started again in %g s", ended, pause)
            await trio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)

    async def _run_once(self, listening: int) -> str:
        """One relay to its end; how that was."""
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
        """Note what a relay says, until it has ended."""
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
                "TCP connections turned away: %d malformed, %d of other users, %d too many, %d not taken in time, %d failed",
                counts.malformed, counts.strangers, counts.crowded, counts.unserved, counts.failed,
            )  # fmt: skip


async def _hand_over(relay: trio.socket.SocketType, listening: int) -> None:
    """Give a relay the port once it asks. One that ends before it asks gets nothing."""
    with contextlib.suppress(OSError):
        if await relay.recv(1):
            await relay.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [listening]))])


async def _kill(process: trio.Process) -> None:
    process.kill()
