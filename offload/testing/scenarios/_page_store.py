"""Page store of a real run: a private ``maru-server``, and its faults.

Rule 1. It runs over a private directory, is reached through a Unix socket in it, and by no other process. Nothing of it
        is left when the run is over: the directory is in memory if possible, and is removed.
Rule 2. Only processes started here are ended here: signals go to a child that has not been waited for, so that no other
        process can have its number. It dies with this process, however that ends.
Rule 3. At the end it is asked to end (``SIGTERM``), and must: if it has to be killed, that is a violation.

| fault | here |
|---|---|
| peer_death | the server is killed with `kill -9`, and after `for_ms` started again over its files |
| stall | the server is stopped (`SIGSTOP`) for `for_ms` |
| drop | the server executes its requests, and its answers to stores are lost |
| duplicate | requests to store arrive twice, and so do the answers |
| full | all free pages are taken, and given back after `for_ms` |
| flip | a bit of the page, in the region's file |
| fail, delay | the copy thread, as for any other tier |
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
from collections.abc import Awaitable, Callable
from typing import IO, TYPE_CHECKING, Any, Final

import attrs
import trio

from maru.base.all_bytes import read_some
from maru.base.errors import PoolUnusable
from maru.doctor import find_place
from maru.testing import Code, Fate, LossyWire

from ._program import FaultKind
from ._real_tiers import RealTierModel
from ._virtual_tier import FaultWindow

if TYPE_CHECKING:
    from maru import AllocBatch

    from ._page_store_tier import PageStoreTier


_READY_WITHIN: Final = 30.0
_ENDED_WITHIN: Final = 10.0

# It ends with its parent; the rest is the command itself.
_PROGRAM: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit("the process that started this is gone")
sys.argv[0] = "maru-server"
from maru.server_cli import main
main()
"""


class NoPageStore(RuntimeError):
    """Failed start of a page store; the text is its last output."""


class PageStore:
    """One ``maru-server``, which may be killed, stopped, and started again.

    It is ready once this object is made, and starts again over its earlier files.

    Args:
        nbytes: size of all its regions together, in bytes.
        options: further options of the command.

    Raises:
        NoPageStore: it does not come up.
    """

    def __init__(self, nbytes: int, *options: str) -> None:
        try:
            location = find_place(nbytes)
        except PoolUnusable as exc:
            raise NoPageStore(str(exc)) from exc
        self.note: str = location.note
        """Remark about the place of its pool, for the report's reader.

        Most often empty.
        """
        self.directory: str = tempfile.mkdtemp(prefix=f"offload-maru-{os.getpid()}-", dir=location.parent)
        """Directory of its pool, its journal and its sockets.

        Its path is short, since a socket's name has 107 bytes.
        """
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
        """Endpoint for clients, also after a restart."""
        return self._endpoint

    @property
    def pool(self) -> str:
        """Directory of its regions."""
        return os.path.join(self.directory, "p")

    @property
    def alive(self) -> bool:
        """Whether it runs, or is stopped."""
        return self._process is not None and self._process.poll() is None

    def launch(self) -> None:
        """Start the server, over any existing files.

        Call it in a thread that lives as long as the run: the server dies with that.
        """
        command = [sys.executable, "-P", "-c", _PROGRAM, str(os.getpid()), "--json", "--host", "", "--rm-address", ""]
        command += ["--pool-path", self.pool, *self._options]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True
        )

    def wait_ready(self) -> None:
        """Wait until all of the server answers. Any thread.

        Raises:
            NoPageStore: it does not come up.
        """
        process = self._process
        assert process is not None and process.stdout is not None
        with process.stdout as output:
            line = _line_of(output.fileno())
        if not line:
            self.kill()
            raise NoPageStore(f"no page store: {self.log().strip().rpartition(chr(10))[2] or 'it printed nothing'}")
        ready: dict[str, Any] = json.loads(line)
        [self._endpoint] = ready["endpoints"]
        self.starts += 1

    def kill(self) -> None:
        """Kill the server (``kill -9``), and wait for its end. Idempotent."""
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()

    def stand_still(self) -> None:
        """Stop the server (``SIGSTOP``), without notice to any peer."""
        self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        """Resume the server (``SIGCONT``)."""
        self._send(signal.SIGCONT)

    def end(self) -> str:
        """End the server, and remove its files. Idempotent.

        Returns:
            The problems of its end; empty if there were none.
        """
        wrong = ""
        process, self._process = self._process, None
        if process is not None:
            wrong = _ended(process)
        if wrong:
            wrong += f"; its log: {self.log().strip()[-500:]}"
        if not self._log.closed:
            self._log.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        if os.path.exists(self.directory):
            wrong += f"; {os.listdir(self.directory)} is left in {self.directory}"
        return wrong

    def log(self) -> str:
        """Return its output so far."""
        if self._log.closed:
            return ""
        with open(f"/proc/self/fd/{self._log.fileno()}", errors="replace") as file:
            return file.read()

    def _send(self, number: int) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(number)


def _ended(process: subprocess.Popen[bytes]) -> str:
    """Ask it to end, wait for that, and return the problems."""
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
    """Return the first line; nothing if the writer ends or is silent.

    Silent means for too long.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    deadline = time.monotonic() + _READY_WITHIN
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        more = read_some(fd, 65_536) if left > 0 and poll.poll(left * 1e3) else b""
        if not more:
            return b""
        line += more
    return line


# --- faults of a page store -------------------------------------------------------------------------------------------


TO_THE_SERVER: Final[frozenset[FaultKind]] = frozenset({"peer_death", "stall", "drop", "duplicate", "full"})
"""Faults that are done to the store, not to copies."""
ON_THE_WIRE: Final[frozenset[FaultKind]] = frozenset({"drop", "duplicate"})
"""Faults that need a lossy wire."""


@attrs.define(eq=False)
class PageStoreModel(RealTierModel):
    """A page store of a real run."""

    store: PageStore = attrs.field(kw_only=True)
    tier: PageStoreTier | None = attrs.field(default=None, kw_only=True)
    wire: LossyWire | None = attrs.field(default=None, kw_only=True)
    starting: Callable[[Callable[[], Awaitable[object]]], object] = attrs.field(default=lambda task: None, kw_only=True)
    """Function that starts a task alongside the run."""
    disturbed: int = attrs.field(default=0, kw_only=True)
    """Number of faults done to the store.

    Requests at that time may have no answer.
    """
    _up: trio.Event = attrs.field(factory=lambda: _set_event(), kw_only=True)
    _ballast: list[AllocBatch] = attrs.field(factory=list, kw_only=True)
    _on_the_wire: list[FaultWindow] = attrs.field(factory=list, kw_only=True)
    _stops: int = attrs.field(default=0, kw_only=True)

    def open_window(self, window: FaultWindow) -> None:
        """Begin a fault that lasts."""
        if window.kind not in TO_THE_SERVER:
            super().open_window(window)
            return
        self.disturbed += 1
        if window.kind == "peer_death":
            self._kill(window)
        elif window.kind == "stall":
            self._stop(window)
        elif window.kind == "full":
            self._fill(window)
        else:
            self._on_the_wire.append(window)

    def end_faults(self) -> None:
        """End all faults, except that a server may still be starting."""
        super().end_faults()
        self._on_the_wire.clear()
        self._stops = 0
        self.store.go_on()
        self._empty()

    async def back(self) -> None:
        """Wait until the server is up again."""
        await self._up.wait()

    # -- to its process ------------------------------------------------------------------------------------------------

    @property
    def _alive(self) -> bool:
        """Whether there is a server to hit.

        A starting server has no clients yet.
        """
        return self._up.is_set() and self.store.alive

    def _kill(self, window: FaultWindow) -> None:
        if not self._alive:
            return
        window.entry.fired = True
        self.store.kill()
        self._up = trio.Event()
        self.starting(lambda: self._again(window.until))

    async def _again(self, when: float) -> None:
        await trio.sleep_until(when)
        self.store.launch()
        await trio.to_thread.run_sync(self.store.wait_ready)  # noqa: TID251
        self._up.set()

    def _stop(self, window: FaultWindow) -> None:
        if not self._alive:
            return
        window.entry.fired = True
        self._stops += 1
        self.store.stand_still()
        self.later(window.until, self._go_on)

    def _go_on(self) -> None:
        self._stops = max(0, self._stops - 1)
        if not self._stops:
            self.store.go_on()

    # -- to its wire ---------------------------------------------------------------------------------------------------

    def fate(self, code: int, number: int) -> Fate:
        """Return the fate of a request and of its answer."""
        if code != Code.STORE:
            return Fate.PASS
        for window in self._on_the_wire:
            if window.open:
                window.entry.fired = True
                return Fate.LOSE_ANSWER if window.kind == "drop" else Fate.TWICE
        return Fate.PASS

    # -- to its pages --------------------------------------------------------------------------------------------------

    def _fill(self, window: FaultWindow) -> None:
        assert self.tier is not None
        batch = self.tier.handler.alloc_pages_nowait(self.tier.handler.free_pages)
        window.entry.fired = True
        if batch is not None:
            self._ballast.append(batch)
        self.later(window.until, self._empty)

    def _empty(self) -> None:
        ballast, self._ballast = self._ballast, []
        for batch in ballast:
            batch.free()

    @property
    def ballast(self) -> int:
        """Number of pages that are taken only to leave fewer free."""
        return sum(len(batch) for batch in self._ballast)


def _set_event() -> trio.Event:
    event = trio.Event()
    event.set()
    return event
