"""Real processes for the tests of the page store: servers and clients, and what is needed to be rude to them.

They are forked from one process, the *forge*, that has imported all they need: a server is ready in some 60 ms instead of 300,
so that a test can afford to kill fifty. What runs in them is what the command runs (:func:`serve` calls its main). Whoever
wants the command itself, with its imports, says ``fresh``.

Nothing outlives its test: a server and a client are context managers, the forge's children die with the forge (the kernel
sees to it), and the forge ends when the process of the tests does. Every wait in here has a bound.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tests.support.published import PublishedClient

PLANTED = {"server": "", "actor": ""}
"""A ``setup`` for every server, and for every actor: how a test of the tests plants faults into them."""
PATIENCE = 60.0
"""Seconds after which something that must happen will not: a test that waits so long has failed. As long as it is, it costs
nothing where it happens, and a machine that is busy with ten other things does not miss it."""
DESCRIBE = 0x49

TCP = ("--host", "127.0.0.1")
"""A server of a test listens on its Unix socket alone, as all do, unless it is told this."""

_PR_SET_PDEATHSIG = 1


# --- bytes that say whose they are --------------------------------------------------------------------------------


def payload(key: str, size: int) -> bytes:
    """What is stored under this key, always: a page that shows another key's bytes is seen at once."""
    digest = blake2b(key.encode()).digest()
    return (digest * (size // len(digest) + 1))[:size]


# --- waiting ------------------------------------------------------------------------------------------------------


def eventually(holds: Callable[[], Any], patience: float | None = None) -> Any:
    """Wait for what other processes bring about. Returns what ``holds`` returned, once that is true."""
    patience = PATIENCE if patience is None else patience
    deadline = time.monotonic() + patience
    while True:
        found = holds()
        if found:
            return found
        assert time.monotonic() < deadline, f"it did not come true in {patience:g} s"
        time.sleep(0.005)


def within(seconds: float | None, work: Callable[[], Any]) -> Any:
    """Do this in a thread, and fail if it takes longer (than anything may, if None): for what might hang.

    A hanging thread is left behind as a daemon.
    """
    seconds = PATIENCE if seconds is None else seconds
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as exc:
            outcome.append((None, exc))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, f"it took longer than {seconds:g} s"
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def free_port() -> int:
    """A port of this host that no connection is given while its server is away: or the next one could not listen there."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    dice = random.SystemRandom()
    while True:
        port = dice.randrange(10_000, max(first, 20_000))
        with socket.socket() as listening, contextlib.suppress(OSError):
            listening.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def temporary_pool() -> Iterator[Path]:
    """A directory for a pool, in memory where there is such a place. Its path is short: a socket's name has 107 bytes."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="maru-", dir=place))
    try:
        yield path / "p"
    finally:
        shutil.rmtree(path, ignore_errors=True)


# --- the forge ----------------------------------------------------------------------------------------------------


class Child:
    """A process that was forked, by its pidfd: no signal of ours can meet a stranger that got its number."""

    def __init__(self, forge: Forge, pid: int, pidfd: int):
        self._forge, self.pid, self._pidfd = forge, pid, pidfd
        self._status: int | None = None

    def send(self, number: int) -> None:
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    @property
    def alive(self) -> bool:
        return self._status is None and not self._has_ended(0)

    def wait(self, patience: float | None = None) -> int:
        """Its exit status, negative if a signal ended it."""
        if self._status is None:
            assert self._has_ended(PATIENCE if patience is None else patience), f"process {self.pid} does not end"
            self._status = os.waitstatus_to_exitcode(self._forge.reap(self.pid))
            os.close(self._pidfd)
        return self._status

    def _has_ended(self, patience: float) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(patience * 1e3))

    def kill(self) -> None:
        """``kill -9``, and wait until it is gone."""
        self.send(signal.SIGCONT)
        self.send(signal.SIGKILL)
        self.wait()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """A process that does nothing (``SIGSTOP``) for as long as the block lasts."""
        self.send(signal.SIGSTOP)
        eventually(lambda: self.state() in "Tt")
        try:
            yield
        finally:
            self.send(signal.SIGCONT)

    def state(self) -> str:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def private_bytes(self) -> int:
        """What it has for itself: without what it shares with the forge, and without shared memory."""
        lines = Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()
        fields = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:]}
        return (fields["Private_Dirty"] + fields.get("Swap", 0)) * 1024

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


class Forge:
    """Starts children. One of it, for all tests of a run; any thread."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._control.settimeout(60)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt from the keyboard is for the tests
            )
        atexit.register(self.close)

    def start(self, work: str, *arguments: Any, channel: int, errors: int, setup: str = "") -> Child:
        """Fork a child that calls ``work`` (``module:function``) with its channel's descriptor and these arguments.

        Args:
            work: what it is for.
            arguments: whatever JSON can say.
            channel: a descriptor for it to talk through.
            errors: a descriptor that becomes its standard output and error.
            setup: what to call first, ``module:function:argument``, several with commas between: to plant a fault, or to
                stall something.
        """
        request = json.dumps({"work": work, "arguments": arguments, "setup": setup}).encode()
        with self._lock:
            socket.send_fds(self._control, [request], [channel, errors])
            answer, fds, _, _ = socket.recv_fds(self._control, 1024, 1)
        return Child(self, int(answer), fds[0])

    def reap(self, pid: int) -> int:
        """The wait status of a child that has ended."""
        with self._lock:
            self._control.send(json.dumps({"reap": pid}).encode())
            return int(self._control.recv(1024))

    def close(self) -> None:
        self._control.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_forge: Forge | None = None


def forge() -> Forge:
    """The one that there is."""
    global _forge
    if _forge is None:
        _forge = Forge()
    return _forge


def _run_forge(control: socket.socket) -> None:
    """What the forge does: until nobody asks any more."""
    import maru._client.blocking
    import maru._client.handler
    import maru._server.main
    import maru.server_cli  # noqa: F401

    while True:
        try:
            message, fds, _, _ = socket.recv_fds(control, 1 << 16, 2)
        except ConnectionError:
            return
        if not message:
            return
        request = json.loads(message)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            control.send(str(status).encode())
            continue
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            control.close()
            _become(request, fds, parent)
        pidfd = os.pidfd_open(pid)
        socket.send_fds(control, [str(pid).encode()], [pidfd])
        for fd in (*fds, pidfd):
            os.close(fd)


def _become(request: dict[str, Any], fds: list[int], parent: int) -> None:
    """A child: never returns."""
    status = 70
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(71)
        channel, errors = fds
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        os.close(errors)
        os.set_inheritable(channel, False)
        for name in filter(None, (*request["setup"].split(","), request["work"])):
            module, function, *rest = name.split(":", 2)
            arguments = (channel, *request["arguments"]) if name == request["work"] else rest
            getattr(importlib.import_module(module), function)(*arguments)
        status = 0
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


# --- servers ------------------------------------------------------------------------------------------------------


def serve(channel: int, *arguments: str) -> None:
    """The command, in a child: its standard output is the channel."""
    os.dup2(channel, 1)
    os.close(channel)
    from maru.server_cli import main

    main(list(arguments), prog_name="maru-server")


class Server:
    """A ``maru-server`` over a pool of its own. Ended with its block; it can be killed and started again inside.

    Args:
        pool: its directory.
        options: of the command, beside those that are needed to find it.
        setup: ``module:function:argument``, called in its process first.
        fresh: start the command itself: with its imports, as a user does.
        skips: whether a test may :meth:`skip` time.
    """

    def __init__(
        self,
        pool: Path,
        *options: str,
        setup: str = "",
        fresh: bool = False,
        rm_address: str = "127.0.0.1:0",
        skips: bool = False,
    ):
        assert not (fresh and (setup or skips)), "what a user starts is nobody's to prepare"
        self.pool, self.options, self.fresh = pool, options, fresh
        self._ahead = tempfile.NamedTemporaryFile() if skips else None  # noqa: SIM115 - closed with the block
        skipping = ""
        if self._ahead is not None:
            skipping = f"tests.support.maru_setups:skip:{self._ahead.name}"
            self._set_ahead(0.0)
        self.setup = ",".join(filter(None, (skipping, setup, PLANTED["server"])))
        self.ready: dict[str, Any] = {}
        self.waited = 0.0
        """Seconds from asking for it to its being ready, the last time."""
        self.starts = 0
        host, _, rm_port = rm_address.rpartition(":")
        self._ports = [str(free_port()), rm_address if rm_port != "0" else f"{host}:{free_port()}"]
        self.text = ""
        """Its log, once the block is left."""
        self._child: Child | _Command | None = None
        self._asking: PublishedClient | None = None
        self._one_asks = threading.Lock()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the block

    def __enter__(self) -> Server:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._hang_up()
        if self._child is not None:
            self._child.kill()
        if not self._log.closed:
            self.text = self.log()
        self._log.close()
        if self._ahead is not None:
            self._ahead.close()

    def start(self) -> None:
        """Until it is ready."""
        self._hang_up()
        port, rm_address = self._ports
        options = ["--json", "--port", port, "--rm-address", rm_address, "--pool-path", str(self.pool)]
        # Published clients of a test come over its Unix socket, too.
        published = [] if "--no-ipc" in self.options else ["--zmq-socket"]
        options += ["--capacity-bytes", "64MiB", "--min-lease", "0.05", *published, *self.options]
        reading, writing = os.pipe()
        began = time.monotonic()
        try:
            if self.fresh:
                self._child = _Command(options, writing, self._log.fileno())
            else:
                self._child = forge().start(
                    f"{__name__}:serve", *options, channel=writing, errors=self._log.fileno(), setup=self.setup
                )
        finally:
            os.close(writing)
        with open(reading, "rb") as output:
            line = _read_line(output.fileno())
        self.waited = time.monotonic() - began
        assert line, f"no server: {self.log()}"
        self.ready = json.loads(line)
        self.starts += 1
        self._ports[1] = self.ready["rm_address"] or ""

    @property
    def process(self) -> Child | _Command:
        assert self._child is not None
        return self._child

    @property
    def tcp(self) -> str:
        """Of a server that was told to listen there: ``Server(pool, *TCP)``."""
        return self._endpoint("tcp:")

    @property
    def ipc(self) -> str:
        return self._endpoint("ipc:")

    def _endpoint(self, kind: str) -> str:
        found = [address for address in self.ready["endpoints"] if address.startswith(kind)]
        assert len(found) == 1, f"the server listens at {self.ready['endpoints']}; for TCP say Server(pool, *TCP)"
        return found[0]

    def kill(self) -> None:
        self._hang_up()
        self.process.kill()

    def restart(self) -> None:
        """``kill -9``, and start again at the same addresses."""
        self.kill()
        self.start()

    def stopped(self) -> contextlib.AbstractContextManager[None]:
        return self.process.stopped()

    def skip(self, seconds: float) -> None:
        """Its clock goes on by so much, and its successors' do: what it gave for a time, it takes back when next it looks.

        A lease that ends by real time has to be short for a test not to wait, and then ends too soon on a busy machine.
        """
        assert self._ahead is not None, "not made for it"
        self._set_ahead(self._skipped + seconds)

    def _set_ahead(self, seconds: float) -> None:
        assert self._ahead is not None
        self._skipped = seconds
        os.pwrite(self._ahead.fileno(), struct.pack("d", seconds), 0)

    def log(self) -> str:
        with open(f"/proc/self/fd/{self._log.fileno()}", errors="replace") as file:
            return file.read()

    def facts(self, section: str = "directory") -> dict[str, Any]:
        """What the server says of itself: over one connection, so that whoever asks often does not keep it busy with that."""
        with self._one_asks:
            if self._asking is None:
                self._asking = PublishedClient(self.ipc, timeout=PATIENCE)
            return self._asking.ask(DESCRIBE)["sections"][section]

    def _hang_up(self) -> None:
        if self._asking is not None:
            self._asking.close()
            self._asking = None

    def requests(self) -> int:
        """How many requests it has had, this one not counted."""
        return self.facts("server")["requests"] - 1

    def region_files(self) -> set[str]:
        return {name for name in os.listdir(self.pool) if name.endswith((".dat", ".tmp"))}


class _Command:
    """The command as a child of ours, with the face of a :class:`Child`."""

    def __init__(self, options: list[str], output: int, errors: int):
        program = "import sys; sys.argv[0] = 'maru-server'; from maru.server_cli import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *options], stdin=subprocess.DEVNULL, stdout=output, stderr=errors
        )
        self.pid = self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, patience: float = PATIENCE) -> int:
        return self._process.wait(patience)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    stopped = Child.stopped
    state = Child.state
    resident_bytes = Child.resident_bytes
    private_bytes = Child.private_bytes
    descriptors = Child.descriptors


def _read_line(fd: int) -> bytes:
    """What comes before the first end of a line, or before whoever writes has gone."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    deadline = time.monotonic() + PATIENCE
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        assert left > 0 and poll.poll(left * 1e3), f"nothing is said after {line!r}"
        more = os.read(fd, 65536)
        if not more:
            return b""
        line += more
    return line


# --- clients ------------------------------------------------------------------------------------------------------


class ActorFailed(Exception):
    """What an actor was asked to do raised this: the name of the exception, and its text."""


class Actor:
    """A client in a process of its own: told what to do, one thing at a time. Ended with its block.

    Args:
        work: ``module:function``, called with the channel and ``arguments``; it ends with :func:`act`.
    """

    def __init__(self, work: str, *arguments: Any):
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the block
        ours, theirs = socket.socketpair()
        ours.settimeout(PATIENCE)
        self._channel = ours
        with theirs:
            self.process = forge().start(
                work,
                *arguments,
                channel=theirs.fileno(),
                errors=self._log.fileno(),
                setup=PLANTED["actor"],
            )
        self._file = ours.makefile("rwb")

    def __enter__(self) -> Actor:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._file.close()
        self._channel.close()
        self.process.kill()
        self._log.close()

    def tell(self, do: str, *arguments: Any) -> None:
        """Ask for something, and do not wait for it."""
        self._file.write(json.dumps([do, arguments]).encode() + b"\n")
        self._file.flush()

    def hear(self) -> Any:
        line = self._file.readline()
        assert line, f"the actor has gone: {self.log()}"
        result, error = json.loads(line)
        if error is not None:
            raise ActorFailed(*error)
        return result

    def unheard(self) -> bytes:
        """What a killed one has said that nobody has heard: nothing, if it was still at what it was told to do."""
        return self._file.read()

    def ask(self, do: str, *arguments: Any) -> Any:
        self.tell(do, *arguments)
        return self.hear()

    def kill(self) -> None:
        self.process.kill()

    def log(self) -> str:
        with open(f"/proc/self/fd/{self._log.fileno()}", errors="replace") as file:
            return file.read()


def act(channel: int, actor: Any) -> None:
    """Do what the test says, until it has nothing more to say."""
    with socket.socket(fileno=channel) as sock, sock.makefile("rwb") as file:
        for line in file:
            do, arguments = json.loads(line)
            try:
                answer = [getattr(actor, do)(*arguments), None]
            except BaseException as exc:
                answer = [None, [type(exc).__name__, str(exc)]]
            file.write(json.dumps(answer).encode() + b"\n")
            file.flush()


if __name__ == "__main__":
    # What is forked looks for its work in this module under its name, and must find this very one.
    sys.modules["maru_processes"] = sys.modules["__main__"]
    with socket.socket(fileno=int(sys.argv[1])) as _control:
        _run_forge(_control)
