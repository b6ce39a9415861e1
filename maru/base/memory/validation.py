"""Validation of files to map, for every region file from a peer.

No other module opens such files.

A peer names the memory. If it is not ours, it may name a file that is not its own (a key, a journal of ours), that
another user can read, or that is shorter than promised: touching a page after the end of a file is a SIGBUS, which ends
the process.

Rule 1. A regular file, of this user, closed to all others, with one name at most, and as long as promised.
Rule 2. A file without a name (a memfd) is sealed against shrinking. A file with a name, in ``/dev/shm`` for instance,
        cannot be
        sealed: its owner, which has the same user, can make it shorter while other processes have it mapped.
Rule 3. Or the device that the caller's own configuration names, and that one only.
Rule 4. No symbolic link is followed, in no component of a path. Any other kind of file is not opened: opening a device
        or a pipe may have an effect.
"""

from __future__ import annotations

import fcntl
import os
import stat
from typing import Final

from ..errors import CannotMap

_OTHERS: Final = 0o077
_WALKED: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def why_not_mappable(
    status: os.stat_result, end: int, *, uid: int, seals: int = 0, device: os.stat_result | None = None
) -> str:
    """Return why these bytes of a file may not be mapped. Pure.

    Empty if they may.

    Args:
        status: result of ``fstat`` for the file.
        end: end of the bytes to be mapped, counted from the file's start.
        uid: the user that maps the file.
        seals: result of ``F_GET_SEALS``; 0 if the file supports no seals.
        device: result of ``stat`` for the device (or the file used as one) that the configuration names.
    """
    is_file = stat.S_ISREG(status.st_mode)
    if is_file and end > status.st_size:
        return f"it has {status.st_size} bytes, but {end} were promised"
    if device is not None and _is_same(status, device):
        return ""
    if stat.S_ISCHR(status.st_mode):
        return "it is a device that dax_path does not name; set dax_path to it if its regions are to be mapped"
    if not is_file:
        return f"it is a {_kind(status.st_mode)}, not a regular file"
    if status.st_uid != uid:
        return f"it belongs to user {status.st_uid}, and this process runs as {uid}"
    if status.st_mode & _OTHERS:
        return f"others may use it: it has mode {stat.S_IMODE(status.st_mode):04o}, which must be 0600"
    if status.st_nlink > 1:
        return f"it has {status.st_nlink} hard links, so its name may hide another file"
    if not status.st_nlink and not seals & fcntl.F_SEAL_SHRINK:
        return "it has no name, and is not sealed against shrinking"
    return ""


def check_descriptor(fd: int, end: int, *, device: str = "") -> None:
    """Check that these bytes of an open file may be mapped.

    Args:
        fd: its descriptor.
        end: end of the bytes to be mapped, counted from the file's start.
        device: the path of the device (or the file used as one) that the configuration names.

    Raises:
        CannotMap: they may not; the text has the reason.
    """
    why = why_not_mappable(os.fstat(fd), end, uid=os.geteuid(), seals=_seals_of(fd), device=_device(device))
    if why:
        raise CannotMap(f"{_name_of(fd)!r} is not mapped: {why}")


def open_mappable(path: str | os.PathLike[str], end: int, *, write: bool, device: str = "") -> int:
    """Open a file by a path that a server sent, if mappable.

    Args:
        path: absolute path.
        end: end of the bytes to be mapped, counted from the file's start.
        write: whether to open it for writing.
        device: as for :func:`check_descriptor`.

    Returns:
        Its descriptor, which the caller closes.

    Raises:
        CannotMap: it may not be mapped, or cannot be opened; the text has the reason.
    """
    path = os.fspath(path)
    try:
        found = _walk(path)
        try:
            # Checked before it is opened, and opened by the descriptor that was checked, so that it cannot be exchanged
            # in between.
            why = why_not_mappable(os.fstat(found), end, uid=os.geteuid(), device=_device(device))
            if why:
                raise CannotMap(f"{path!r} is not mapped: {why}")
            return os.open(f"/proc/self/fd/{found}", (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)
        finally:
            os.close(found)
    except (OSError, ValueError) as exc:
        raise CannotMap(f"{path!r} cannot be opened: {exc}") from exc


def _walk(path: str) -> int:
    """Open a path for inspection only, without following symbolic links."""
    parts = path.split("/")
    if parts[0] or not parts[-1] or ".." in parts:
        raise CannotMap(f"{path!r} is not mapped: it is not an absolute path of a file")
    at = os.open("/", _WALKED)
    for part in filter(None, parts):
        try:
            # A link is opened as the link itself, so that it can be distinguished from a missing file.
            below = os.open(part, _WALKED, dir_fd=at)
        finally:
            os.close(at)
        at = below
        if stat.S_ISLNK(os.fstat(at).st_mode):
            os.close(at)
            raise CannotMap(f"{path!r} is not mapped: {part!r} in it is a symbolic link; give the pool its real path")
    return at


def _is_same(status: os.stat_result, device: os.stat_result) -> bool:
    if stat.S_ISCHR(device.st_mode):
        return stat.S_ISCHR(status.st_mode) and status.st_rdev == device.st_rdev
    if not stat.S_ISREG(device.st_mode):  # a directory: the files in it are ordinary ones
        return False
    return (status.st_dev, status.st_ino) == (device.st_dev, device.st_ino)


def _device(path: str) -> os.stat_result | None:
    if not path:
        return None
    try:
        return os.stat(path)
    except (OSError, ValueError) as exc:
        raise CannotMap(f"dax_path = {path!r}: {exc}") from exc


def _seals_of(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # its file system supports none
        return 0


def _name_of(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"descriptor {fd}"


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "directory", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket", stat.S_IFBLK: "block device"}
    return kinds.get(stat.S_IFMT(mode), "thing of another kind")
