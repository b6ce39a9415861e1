"""A page store of its own for a run: a real ``maru-server`` over a private directory, and what can be done to a process.

Rule 1. It is reached through a Unix socket in that directory, and by nobody else. Nothing of it is left when the run is over:
        the directory is in memory where there is such a place, and is removed.
Rule 2. What was started here is ended here, and nothing else is: signals go to a child that has not been waited for, whose
        number nobody else can have. It dies with this process, however that ends.
Rule 3. In the end it is asked to end (``SIGTERM``), and must: what has to be killed then is a violation.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO, Any, Final

from maru._errors import PoolUnusable
from maru._pool.placement import find_place

_READY_WITHIN: Final = 30.0
_ENDED_WITHIN: Final = 10.0

# It ends with whoever started it; what else it does is the command.
_PROGRAM: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit("whoever started this is gone")
sys.argv[0] = "maru-server"
from maru.server_cli import main
main()
"""


class NoPageStore(RuntimeError):
    """No page store can be had here; the text is what it said last."""


class PageStore:
    """One ``maru-server``, which may be killed, stopped, and started again over what it left. It is ready when this is.

    Args:
        nbytes: of all its regions together.
        options: of the command, beside those that say where it is.

    Raises:
        NoPageStore: it does not come up.
    """

    def __init__(self, nbytes: int, *options: str) -> None:
        try:
            place = find_place(nbytes)
        except PoolUnusable as exc:
            raise NoPageStore(str(exc)) from exc
        self.note: str = place.note
        """What a reader of the report must know of where its pool is; most often empty."""
        self.directory: str = tempfile.mkdtemp(prefix=f"offload-maru-{os.getpid()}-", dir=place.parent)
        """Of its pool, its journal and its sockets; its path is short, since a socket's name has 107 bytes."""
        self.starts: int = 0
        self._options = ("--capacity-bytes", str(nbytes), *options)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by end()
        self._process: subprocess.Popen[bytes] | None = None
        self._endpoint = ""
        try:
            self.launch()
            self.wait_ready()
        except BaseException:
            self.end()
            raise

    def __repr__(self) -> str:
        return f"<a page store in {self.directory}, started {self.starts} times>"

    @property
    def endpoint(self) -> str:
        """Where clients reach it, also after a restart."""
        return self._endpoint

    @property
    def pool(self) -> str:
        """The directory of its regions."""
        return os.path.join(self.directory, "p")

    @property
    def alive(self) -> bool:
        """Whether it runs, or stands still."""
        return self._process is not None and self._process.poll() is None

    def launch(self) -> None:
        """Start it, over whatever is there. To be called in a thread that lives as long as the run: it dies with that."""
        command = [sys.executable, "-c", _PROGRAM, str(os.getpid()), "--json", "--host", "", "--rm-address", ""]
        command += ["--pool-path", self.pool, *self._options]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True
        )

    def wait_ready(self) -> None:
        """Return once everything answers. Any thread.

        Raises:
            NoPageStore: it does not come up.
        """
        process = self._process
        assert process is not None and process.stdout is not None
        with process.stdout as output:
            line = _line_of(output.fileno())
        if not line:
            self.kill()
            raise NoPageStore(f"no page store: {self.log().strip().rpartition(chr(10))[2] or 'it says nothing'}")
        ready: dict[str, Any] = json.loads(line)
        [self._endpoint] = ready["endpoints"]
        self.starts += 1

    def kill(self) -> None:
        """``kill -9``, and see it buried. Idempotent."""
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()

    def stand_still(self) -> None:
        """``SIGSTOP``: it does nothing, and nobody is told."""
        self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        """``SIGCONT``."""
        self._send(signal.SIGCONT)

    def end(self) -> str:
        """Have it end, and remove what it has left. Idempotent.

        Returns:
            What was wrong with its end; empty where nothing was.
        """
        wrong = ""
        process, self._process = self._process, None
        if process is not None:
            wrong = _ended(process)
        if wrong:
            wrong += f"; it said: {self.log().strip()[-500:]}"
        if not self._log.closed:
            self._log.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        if os.path.exists(self.directory):
            wrong += f"; {os.listdir(self.directory)} is left in {self.directory}"
        return wrong

    def log(self) -> str:
        """What it has said so far."""
        if self._log.closed:
            return ""
        with open(f"/proc/self/fd/{self._log.fileno()}", errors="replace") as file:
            return file.read()

    def _send(self, number: int) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(number)


def _ended(process: subprocess.Popen[bytes]) -> str:
    """Ask it to end, wait until it has, and say what was wrong with that."""
    if process.poll() is not None:
        return f"the page store ended by itself: {process.returncode}"
    process.send_signal(signal.SIGCONT)
    process.terminate()
    try:
        status = process.wait(_ENDED_WITHIN)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"the page store did not end within {_ENDED_WITHIN:g} s of being asked to"
    return f"the page store ended with {status}, when it was asked to end" if status else ""


def _line_of(fd: int) -> bytes:
    """What comes before the first end of a line; nothing, if whoever writes is gone before, or says nothing for too long."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    deadline = time.monotonic() + _READY_WITHIN
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        more = os.read(fd, 65_536) if left > 0 and poll.poll(left * 1e3) else b""
        if not more:
            return b""
        line += more
    return line
