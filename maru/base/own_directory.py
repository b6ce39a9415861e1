"""A directory that one server holds: its lock, and repairs after removals.

systemd's ``RemoveIPC`` removes all of a user's files in /dev/shm when he logs out, and cleaners of temporary files
remove old ones. A server without its sockets cannot be reached, and without its lock a second one could begin next to
it.

Rule 1. Both the directory itself and a file in it are locked: removing the file does not let a second server in.
Rule 2. A removed file is made again under the lock, in a directory that is this server's own; a server that finds
        another one's lock there ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Callable

from .all_bytes import read_head, write_all_at
from .private_directory import open_private_directory

LAST_BREATH = 1.0
"""Seconds until the lock of a dead process counts as another one's.

The kernel releases it within milliseconds.
"""
LOOK = 1.0
"""Seconds between two checks for removed files."""


def lock_directory(directory: int, name: str, in_use: Callable[[str], Exception], patience: float = LAST_BREATH) -> int:
    """Lock a directory, and a file in it.

    The file stays locked until the returned descriptor is closed, the directory until ``directory`` is.

    Args:
        directory: an open descriptor of the directory.
        name: name of the file, into which the number of this process is written.
        in_use: makes the error, given the process that has the lock.
        patience: seconds to wait for a process that has ended.

    Raises:
        Exception: the error made by ``in_use``: another process has the lock.
    """
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=directory)
    try:
        deadline = time.monotonic() + patience
        while not (_try_lock(directory) and _try_lock(fd)):
            holder = read_head(fd, 32).decode("ascii", "replace").strip() or holder_of_lock(directory) or "unknown"
            # If a server was killed while it started a process, that one still has the lock between fork and exec.
            if _is_alive(holder) or time.monotonic() > deadline:
                raise in_use(holder)
            time.sleep(0.005)
        os.ftruncate(fd, 0)
        write_all_at(fd, b"%d\n" % os.getpid(), 0)
        return fd
    except BaseException:
        os.close(fd)
        raise


def renew_directory(
    directory: int,
    lock: int,
    path: str,
    name: str,
    refuse: Callable[[str], Exception],
    in_use: Callable[[str], Exception],
) -> list[str]:
    """Make a removed directory or lock again. Returns the paths made.

    Both descriptors keep their numbers.

    Raises:
        Exception: the error made by ``in_use`` or ``refuse``: another server has the directory, or it cannot be made.
    """
    made: list[str] = []
    if not os.path.lexists(path):
        made.append(path)
    elif _is_at(directory, path) and _is_at(lock, f"{path}/{name}"):
        return made
    new, _ = open_private_directory(path, refuse, purpose="the directory of a server")
    try:
        if _is_at(directory, path):
            os.dup2(directory, new, inheritable=False)  # the old descriptor has the lock
        made.append(f"{path}/{name}")
        new_lock = lock_directory(new, name, in_use, 0.0)
        try:
            os.dup2(new, directory, inheritable=False)
            os.dup2(new_lock, lock, inheritable=False)
        finally:
            os.close(new_lock)
    finally:
        os.close(new)
    return made


def holder_of_lock(directory: int | str) -> str:
    """Return the process that has a directory locked, or an empty text.

    The text is also empty if the kernel does not report the process.
    """
    with contextlib.suppress(OSError):
        status = os.stat(directory)
        with open("/proc/locks", encoding="ascii") as locks:
            process = locked_inodes(locks.read()).get(status.st_ino)
        return "" if process is None else str(process)
    return ""


def locked_inodes(locks: str) -> dict[int, int]:
    """Return the process of each flock in ``/proc/locks``, by inode.

    Trying to lock instead would hinder a server that starts.
    """
    found = {}
    for line in locks.splitlines():
        words = line.split()
        if len(words) >= 6 and words[1] == "FLOCK":
            with contextlib.suppress(ValueError):
                found[int(words[5].rpartition(":")[2])] = int(words[4])
    return found


def is_socket_at(path: str, inode: int) -> bool | None:
    """Return whether a path is this socket; None if it is free."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return status.st_ino == inode and stat.S_ISSOCK(status.st_mode)


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system that cannot lock directories: the file's lock has to suffice
        return stat.S_ISDIR(os.fstat(fd).st_mode)
    return True


def _is_alive(process: str) -> bool:
    """Return whether a process may exist.

    True for a text that is not a number.
    """
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (ValueError, OverflowError, OSError):
        return True
    return True
