"""A file system of its own that can be filled to the last byte: for a disk that is full, as a real thing.

It is a small tmpfs that a helper mounts in a mount namespace of its own, and of which it hands over an open directory. Nobody
else sees it, nothing is mounted where others look, and it is gone with the last descriptor. Where the caller is not root, the
helper makes a user namespace for itself as well; some systems do not allow that.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from typing import Final

_PAGE: Final = 4096
_HELPER_TIME: Final = 20.0

# Runs in a process of its own, and imports nothing of ours: it is there for some ten milliseconds.
_HELPER: Final = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUSER, REC, PRIVATE = 0x20000, 0x10000000, 0x4000, 0x40000
def call(name, *args):
    if getattr(libc, name)(*args):
        error = ctypes.get_errno()
        sys.exit(f"{name}: {os.strerror(error)}")
door, place, nbytes = int(sys.argv[1]), sys.argv[2].encode(), int(sys.argv[3])
uid, gid = os.getuid(), os.getgid()
if libc.unshare(NEWNS):
    call("unshare", NEWNS | NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
call("mount", b"none", b"/", None, REC | PRIVATE, None)
call("mount", b"none", place, b"tmpfs", 0, f"size={nbytes},mode=700,uid={uid},gid={gid}".encode())
root = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
socket.send_fds(socket.socket(fileno=door), [b"x"], [root])
"""


class NoDisk(OSError):
    """No file system of its own can be had here; the text says why."""


class SmallDisk:
    """A file system of so many bytes.

    Raises:
        NoDisk: it cannot be made here.
    """

    def __init__(self, nbytes: int) -> None:
        self._root = _mounted(nbytes)
        self._full = False

    def __repr__(self) -> str:
        return f"<a disk at {self.path}{', full' if self._full else ''}>"

    @property
    def path(self) -> str:
        """Where it is, for this process."""
        return f"/proc/self/fd/{self._root}"

    def fill(self) -> None:
        """Take all that is free: from now on, who writes meets ``ENOSPC``."""
        self._full = True
        fd = os.open("ballast", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._root)
        try:
            while free := self._free():
                with contextlib.suppress(OSError):  # somebody else took some of it meanwhile
                    os.posix_fallocate(fd, os.fstat(fd).st_size, free)
        finally:
            os.close(fd)

    def empty(self) -> None:
        """Give it back."""
        if self._full:
            self._full = False
            os.unlink("ballast", dir_fd=self._root)

    def close(self) -> None:
        """It is gone once nobody has a file of it open. Idempotent."""
        root, self._root = self._root, -1
        if root >= 0:
            os.close(root)

    def _free(self) -> int:
        status = os.fstatvfs(self._root)
        return status.f_bavail * status.f_frsize


def disk_for(blocks: int, block_bytes: int) -> SmallDisk:
    """A disk on which so many blocks fit as files, each with its header, and twice over: what is removed goes later.

    Raises:
        NoDisk: it cannot be made here.
    """
    each = -(-(block_bytes + 512) // _PAGE) * _PAGE
    return SmallDisk(2 * blocks * each + (1 << 20))


def _mounted(nbytes: int) -> int:
    """The root of a new tmpfs."""
    ours, theirs = socket.socketpair()
    with ours, tempfile.TemporaryDirectory() as place:
        with theirs:
            command = [sys.executable, "-S", "-E", "-c", _HELPER, str(theirs.fileno()), place, str(nbytes)]
            try:
                done = subprocess.run(
                    command,
                    pass_fds=[theirs.fileno()],
                    capture_output=True,
                    text=True,
                    timeout=_HELPER_TIME,
                    process_group=0,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise NoDisk(f"no mount namespace can be had: {error}") from error
        if done.returncode:
            why = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
            raise NoDisk(f"no file system can be mounted here, not even in a namespace of its own ({why})")
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
        os.set_inheritable(fds[0], False)
        return fds[0]
