"""A private directory of one user: for pools, sockets and block files.

Rule 1. It belongs to this user, and no other user may enter it; files that others could have put there are not trusted.
        An empty one is closed to other users, unless it is shared, as ``/tmp``; one with files may be needed as it is.
Rule 2. Only the last component of a path is made. If its parent is missing, a disk is not mounted, or the path is
        misspelt; in either case the blocks would fill another disk.
Rule 3. A new directory is durable, if its parent may be read.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable


def open_private_directory(
    path: str | os.PathLike[str], refuse: Callable[[str], Exception], *, purpose: str
) -> tuple[int, str]:
    """Open a directory that is ours alone, or make it.

    Returns its descriptor and its real path.

    Args:
        path: the directory; if relative, the working directory must not change during this call.
        refuse: makes the exception from a text with the fault and the way out.
        purpose: purpose of the directory, in words: "the directory of a pool".

    Raises:
        Exception: the one made by ``refuse``: the parent is missing, or the directory cannot be made or opened, is not
            ours, or is open to others.
    """
    path = os.path.abspath(path)
    _make(path, refuse, purpose)
    fd, status = _open_ours(path, refuse, purpose)
    try:
        if status.st_mode & 0o077:
            os.fchmod(fd, 0o700)
        return fd, os.path.realpath(path)
    except BaseException:
        os.close(fd)
        raise


def check_private_directory(path: str | os.PathLike[str], refuse: Callable[[str], Exception], *, purpose: str) -> None:
    """Raise any error that :func:`open_private_directory` would raise.

    A directory made for the check is removed again.
    """
    path = os.path.abspath(path)
    is_there = os.path.lexists(path)
    _make(path, refuse, purpose)
    try:
        os.close(_open_ours(path, refuse, purpose)[0])
    finally:
        if not is_there:
            os.rmdir(path)


def _open_ours(path: str, refuse: Callable[[str], Exception], purpose: str) -> tuple[int, os.stat_result]:
    """Open a directory that is ours, and private or closable to others."""
    try:
        if os.lstat(path).st_uid != os.geteuid():  # a link that another user made is not ours either
            raise refuse(f"{path!r} belongs to another user: choose another directory")
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise refuse(f"{path!r} cannot be used as {purpose}: {exc.strerror or exc}") from exc
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid():
            raise refuse(f"{path!r} belongs to another user: choose another directory")
        if status.st_mode & 0o077 and (
            os.listdir(fd) or status.st_mode & stat.S_ISVTX
        ):  # in use, or everybody's, as /tmp
            raise refuse(f"others may enter {path!r}: choose another directory, or chmod 700 {path}")
        return fd, status
    except BaseException:
        os.close(fd)
        raise


def _make(path: str, refuse: Callable[[str], Exception], purpose: str) -> None:
    if os.path.lexists(path):
        return
    parent = os.path.dirname(path)
    if not os.path.lexists(parent):
        raise refuse(
            f"there is no directory {parent!r} for {path!r} to be made in: is its disk mounted? "
            f"If the path is right, make it first: mkdir -p {parent}"
        )
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    except OSError as exc:
        raise refuse(f"{path!r} cannot be used as {purpose}: {exc.strerror or exc}") from exc
    with contextlib.suppress(OSError):
        fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
