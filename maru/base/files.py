"""Files named by a user: bounded reads without waits, writes without losses.

Rule 1. A file is replaced only if it is empty, or begins as the files of that kind do. A mistyped path costs nothing.
        The new file is written next to the old one first: a full disk costs nothing either.
Rule 2. No wait: a named pipe is refused, since opening one waits for a process at its other end, or ends that process's
        read. A device (``/dev/null``) and a pipe that the caller has open (``/dev/stdin``) are used as they are.
Rule 3. A private file is closed to other users, whatever the umask is, and also if it existed before.
Rule 4. A file is read up to a bound: a device may have no end.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from typing import Final

import attrs

_MIB: Final = 1 << 20


def read_file(path: str | os.PathLike[str], most: int = 64 * _MIB) -> bytes:
    """Read a file, or an open pipe, to its end.

    Raises:
        OSError: it cannot be read, is a named pipe, or has more than ``most`` bytes.
    """
    with open_input(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"has more than {most // _MIB} MiB", os.fspath(path))
    return data


def open_input(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a file, or an open pipe, for reading.

    Raises:
        OSError: it cannot be opened, or is a named pipe.
    """
    status = os.stat(path)
    if stat.S_ISFIFO(status.st_mode) and not _is_open_pipe(path, status):
        raise OSError(errno.ESPIPE, "is a named pipe, which would block: name a file", os.fspath(path))
    return open(path, "rb")


def _is_open_pipe(path: str | os.PathLike[str], status: os.stat_result) -> bool:
    """Return whether a path names a pipe that this process has open.

    ``/dev/stdin`` may be one.
    """
    # such a path resolves to a name that is no path: /proc/7/fd/pipe:[123]
    return stat.S_ISFIFO(status.st_mode) and not os.path.lexists(os.path.realpath(path))


@attrs.frozen
class OutputKind:
    """A kind of file, recognised by its first bytes."""

    name: str
    """Name for messages: ``a scenario``."""
    begins: bytes
    """The first bytes of every such file."""
    private: bool = False
    """Whether the file is closed to other users."""

    def why_not(self, path: str | os.PathLike[str]) -> str:
        """Return the reason not to replace a file, or an empty text.

        Raises:
            OSError: the file cannot be examined.
        """
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return ""
        if stat.S_ISDIR(status.st_mode):
            return "is a directory: name a file in it"
        if not stat.S_ISREG(status.st_mode):
            usable = stat.S_ISCHR(status.st_mode) or _is_open_pipe(path, status)
            return "" if usable else "is neither a file nor a device: name a new file"
        with open(path, "rb") as file:
            first = file.read(len(self.begins))
        return "" if first in (b"", self.begins) else f"already exists, and is not {self.name}: name a new file"

    def write(self, path: str | os.PathLike[str], data: bytes) -> None:
        """Write a file, or replace one of this kind.

        Raises:
            FileExistsError: the path names a file of another kind.
            OSError: the file cannot be written.
        """
        if why := self.why_not(path):
            raise FileExistsError(errno.EEXIST, why, os.fspath(path))
        if os.path.exists(path) and not os.path.isfile(path):  # a device, or an open pipe
            with open(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC), "wb") as file:
                os.set_blocking(file.fileno(), True)
                file.write(data)
            return
        place = os.path.realpath(path)  # for a link, its target is replaced
        temporary = f"{place}.{os.getpid()}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600 if self.private else 0o666)
        try:
            with open(fd, "wb") as file:
                if os.path.exists(place) and not self.private:
                    os.fchmod(fd, stat.S_IMODE(os.stat(place).st_mode))
                file.write(data)
                file.flush()
                os.fsync(fd)
            os.replace(temporary, place)
        except BaseException:
            os.unlink(temporary)
            raise


SCENARIO: Final = OutputKind("a scenario", b"format = ")
PERFETTO: Final = OutputKind("a trace for Perfetto", b'{"displayTimeUnit"')
RUN_TRACE: Final = OutputKind("a trace of a run", b"# offload trace ")
JUNIT: Final = OutputKind("JUnit XML", b"<?xml ")
PICTURE: Final = OutputKind("a picture", b"<svg ")
