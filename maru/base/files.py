"""Files that are named by a user: read without a wait and with a bound, written without a loss.

Rule 1. A file is replaced only if it is empty, or begins as the files of that kind do. A path that was typed by mistake costs
        nothing. What replaces it is written beside it first: a full disk costs nothing either.
Rule 2. No wait: a named pipe is refused, since opening one waits for a process at its other end, or ends what that one reads.
        A device (``/dev/null``) and a pipe that the caller has open (``/dev/stdin``) are used as they are.
Rule 3. A private file is closed to other users, whatever the umask is, and also if it was there.
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
    """Read a file, or a pipe that is open, to its end.

    Raises:
        OSError: it cannot be read, is a named pipe, or has more than ``most`` bytes.
    """
    with open_input(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"has more than {most // _MIB} MiB", os.fspath(path))
    return data


def open_input(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a file, or a pipe that is open, for reading.

    Raises:
        OSError: it cannot be opened, or is a named pipe.
    """
    status = os.stat(path)
    if stat.S_ISFIFO(status.st_mode) and not _is_open_pipe(path, status):
        raise OSError(errno.ESPIPE, "is a named pipe, which would be waited for: name a file", os.fspath(path))
    return open(path, "rb")


def _is_open_pipe(path: str | os.PathLike[str], status: os.stat_result) -> bool:
    """Whether a path names a pipe that this process has open, as ``/dev/stdin`` does."""
    # what it resolves to is no path then: /proc/7/fd/pipe:[123]
    return stat.S_ISFIFO(status.st_mode) and not os.path.lexists(os.path.realpath(path))


@attrs.frozen
class OutputKind:
    """A kind of file, recognised by its first bytes."""

    name: str
    """In words: ``a scenario``."""
    begins: bytes
    """The first bytes of every such file."""
    private: bool = False
    """Whether it is closed to other users."""

    def why_not(self, path: str | os.PathLike[str]) -> str:
        """Return why a file there is not to be replaced; empty if nothing is lost by it.

        Raises:
            OSError: it cannot be looked at.
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
        return "" if first in (b"", self.begins) else f"is there already, and is not {self.name}: name a new file"

    def write(self, path: str | os.PathLike[str], data: bytes) -> None:
        """Write a file, or replace one of this kind.

        Raises:
            FileExistsError: there is another kind of file.
            OSError: it cannot be written.
        """
        if why := self.why_not(path):
            raise FileExistsError(errno.EEXIST, why, os.fspath(path))
        if os.path.exists(path) and not os.path.isfile(path):  # a device, or a pipe that is open
            with open(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC), "wb") as file:
                os.set_blocking(file.fileno(), True)
                file.write(data)
            return
        place = os.path.realpath(path)  # of a link, what it names is replaced
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
