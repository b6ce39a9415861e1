"""What the environment refuses, one call at a time: a server in a process of its own, whose n-th open, thread or write fails.

The child replaces the calls below before it imports anything of ours, so that names bound at import are replaced as well. It
reads commands on its standard input: ``arm KIND N`` (N = 0: count only) and ``tell``, whose answer has the counts and what the
process holds.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import json
import mmap
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

KINDS = ("open", "mmap", "reserve", "thread", "socket", "accept", "write")


class _Refusals:
    """Counts calls by kind, and refuses the one that was asked for."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.arm("", 0)

    def arm(self, kind: str, at: int) -> None:
        with self.lock:
            self.kind, self.at, self.refused = kind, at, ""
            self.counts = dict.fromkeys(KINDS, 0)

    def ask(self, kind: str) -> bool:
        """Count a call, and return whether it is refused."""
        with self.lock:
            self.counts[kind] += 1
            if kind != self.kind or self.counts[kind] != self.at:
                return False
            frame = sys._getframe(2)
            names = []
            while frame is not None and len(names) < 6:
                names.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
                frame = frame.f_back
            self.refused = " < ".join(names)
            return True


refusals = _Refusals()


def _refusing(kind: str, real: Callable[..., Any], make: Callable[[], Exception]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if refusals.ask(kind):
            raise make()
        return real(*args, **kwargs)

    return call


def _os_error(code: int) -> Callable[[], Exception]:
    return lambda: OSError(code, os.strerror(code))


def _refusing_files(real: Callable[..., Any]) -> Callable[..., Any]:
    """As :func:`_refusing`, for files only: the disk of an eventfd is never full."""

    def call(descriptor: int, *args: Any) -> Any:
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and refusals.ask("write"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, *args)

    return call


def install() -> None:
    """Replace the calls. Of each kind all names that servers use."""
    for name in ("open", "memfd_create", "dup", "eventfd", "pipe", "pidfd_open"):
        setattr(os, name, _refusing("open", getattr(os, name), _os_error(errno.EMFILE)))
    for name in ("ftruncate", "posix_fallocate"):
        setattr(os, name, _refusing("reserve", getattr(os, name), _os_error(errno.ENOSPC)))
    for name in ("write", "writev", "pwrite", "pwritev"):
        setattr(os, name, _refusing_files(getattr(os, name)))

    class Mmap(mmap.mmap):
        def __new__(cls, *args: Any, **kwargs: Any) -> Mmap:
            if refusals.ask("mmap"):
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            return super().__new__(cls, *args, **kwargs)

    mmap.mmap = Mmap  # type: ignore[misc]
    for name in ("_start_new_thread", "_start_joinable_thread"):
        if hasattr(threading, name):
            real = getattr(threading, name)
            setattr(threading, name, _refusing("thread", real, lambda: RuntimeError("can't start new thread")))
    begin, accept = socket.socket.__init__, socket.socket.accept

    def init(self: socket.socket, *args: Any, **kwargs: Any) -> None:
        if len(args) < 4 and kwargs.get("fileno") is None and refusals.ask("socket"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        begin(self, *args, **kwargs)

    socket.socket.__init__ = init  # type: ignore[method-assign]
    socket.socket.accept = _refusing("accept", accept, _os_error(errno.EMFILE))  # type: ignore[method-assign]
    _install_in_ours()


def _install_in_ours() -> None:
    """Replace what goes past the names above: mappings made in C, and trio's threads, which it keeps for the next call."""
    import trio._core._thread_cache as cache

    from maru.base.memory import memory

    class NoneIdle(dict):  # type: ignore[type-arg]
        def popitem(self) -> Any:
            raise KeyError

    cache.THREAD_CACHE._idle_workers = NoneIdle()
    cache.IDLE_TIMEOUT = 0.01
    real = memory._mmap

    def refuse(*args: Any) -> Any:
        if refusals.ask("mmap"):
            ctypes.set_errno(errno.ENOMEM)
            return ctypes.c_void_p(-1).value
        return real(*args)

    memory._mmap = refuse


def _descriptors() -> int:
    """How many are open, but for those of idle copy threads, of which there may be more or fewer."""
    n = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            n += "eventfd" not in os.readlink(f"/proc/self/fd/{name}")
    return n


def _obey(tell: Callable[[], dict[str, Any]]) -> None:
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "arm":
            refusals.arm(rest[0], int(rest[1]))
        facts = {} if word == "arm" else {"counts": refusals.counts, "refused": refusals.refused, **tell()}
        print(json.dumps(facts), flush=True)
    os._exit(0)


def run_child(serve: Callable[..., Any], directory: str) -> None:
    """Serve, and obey. ``serve`` gets the directory, and what to call with the address and a function that reports holds."""
    import trio

    def ready(address: str, held: Callable[[], dict[str, Any]]) -> None:
        token = trio.lowlevel.current_trio_token()

        def tell() -> dict[str, Any]:
            return {
                "held": trio.from_thread.run_sync(held, trio_token=token),
                "descriptors": _descriptors(),
            }

        threading.Thread(target=_obey, args=(tell,), daemon=True).start()
        print(json.dumps({"address": address}), flush=True)

    trio.run(serve, directory, ready)


class RefusingServer:
    """A server in a process of its own, of which calls can be refused.

    Args:
        serve: ``module:function`` of the coroutine function that serves, as :func:`run_child` calls it.
        directory: for all that it makes.
    """

    def __init__(self, serve: str, directory: str) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the block
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.refusals", serve, directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self.address: str = self._read()["address"]

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the server has ended: {self.said()[-3000:]}"
        return json.loads(line)

    def said(self) -> str:
        """Return its log."""
        self.log.seek(0)
        return self.log.read()

    def _ask(self, line: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._read()

    def arm(self, kind: str = "none", at: int = 0) -> None:
        """Count from now on, and refuse the call of this kind with this number."""
        self._ask(f"arm {kind} {at}")

    def tell(self) -> Any:
        """Return counts, where a call was refused, what is held, and how many descriptors are open."""
        return self._ask("tell")

    def __enter__(self) -> RefusingServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self.log.close()


if __name__ == "__main__":
    install()
    name, where = sys.argv[1:]
    module, _, function = name.partition(":")
    from tests.support import refusals as this  # under its own name: what was installed is what is asked

    this.refusals = refusals  # type: ignore[misc]
    run_child(getattr(importlib.import_module(module), function), where)
