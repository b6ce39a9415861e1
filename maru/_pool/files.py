"""Regions as files: with a name in a directory, or without one.

Blocking. See :mod:`maru._pool.backing` for the rules.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from ..base.addresses import LOCK
from ..base.errors import CannotMap, PoolUnusable
from ..base.forks import watch_forks
from ..base.memory.memory import Memory
from ..base.own_directory import renew_directory
from ..base.region_file import RegionFile, region_file_name
from .backing import (
    ALIGN_BYTES,
    Adoption,
    Kind,
    Ledger,
    Reserve,
    flags_for,
    full_is_an_answer,
    not_now,
    reserve_all,
)
from .index_files import leave_free
from .state_directory import StateDirectory, in_use, lock, open_private

_NAME = re.compile(r"maru_([0-9]{1,19})\.dat(\.tmp)?")
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Lasting errors of a reservation.

The file system has not got these bytes. A lack of memory may be over soon.
"""
_MAX_STRAY_ID = 10**17
"""Largest id of a found file that new ids continue from.

New regions get the number after the largest file found below this: ids are microseconds, and have 16 digits. After a
larger one, which no server has given, they would become too long for a name.
"""


class Files(Ledger):
    """Regions as files ``maru_ID.dat`` in a directory, most likely of a tmpfs."""

    kind: Kind = "files"
    align = ALIGN_BYTES

    def __init__(
        self,
        state_directory: StateDirectory,
        path: str | os.PathLike[str],
        capacity_bytes: int | None,
        reserve: Reserve = os.posix_fallocate,
        keep_free: int = 0,
    ) -> None:
        self._state_directory = state_directory
        self._reserve = reserve
        self._keep_free = keep_free
        self._fd, self.path = open_private(path)
        self._lock = -1
        try:
            if self.path != state_directory.path:
                self._lock = lock(self._fd, self.path)
            if capacity_bytes is None:
                system = os.fstatvfs(self._fd)
                capacity_bytes = system.f_bavail * system.f_frsize // 10 * 9
                capacity_bytes += sum(status.st_size for _, status in self._scan())
        except BaseException:
            self.close()
            raise
        super().__init__(capacity_bytes)
        watch_forks(self, Files.close)  # a forked child does not hold its lock

    def create(self, length: int, go_on: Callable[[], object]) -> RegionFile:
        with self.taking(length), full_is_an_answer(length):
            if self._keep_free:
                leave_free(self._fd, length, self._keep_free)
            region_id = self._state_directory.next_region_id()
            name = region_file_name(region_id)
            temporary = name + ".tmp"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(temporary, flags, 0o600, dir_fd=self._fd)
            try:
                reserve_all(fd, length, self._reserve, go_on)
                if self._keep_free:  # once more: others may have reserved at the same time
                    leave_free(self._fd, 0, self._keep_free)
                os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            except BaseException:
                self._unlink(temporary)
                raise
            finally:
                os.close(fd)
        return self._region(region_id, length)

    def remove(self, region: RegionFile) -> None:
        with contextlib.suppress(FileNotFoundError):  # removed by an operator
            os.unlink(region_file_name(region.region_id), dir_fd=self._fd)
        self.give_back(region.length)

    def open_fd(self, region: RegionFile, write: bool) -> int:
        return os.open(region_file_name(region.region_id), flags_for(write) | os.O_NOFOLLOW, dir_fd=self._fd)

    def peek(self, region_id: int) -> memoryview | None:
        name = region_file_name(region_id)
        try:
            status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) or not status.st_size:
                return None  # no region, and not adopted either
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._fd)
            try:
                return Memory(fd, 0, status.st_size, write=False).buffer()
            finally:
                os.close(fd)
        except FileNotFoundError:
            return None
        except (OSError, CannotMap) as exc:
            raise not_now(f"{self.path}/{name}", exc) from exc

    def adopt(self, regions: Iterable[tuple[int, int]]) -> Adoption:
        found = dict(self._scan())
        wanted = dict(regions)
        strays = [int(match[1]) for name in found if (match := _NAME.fullmatch(name))]
        self._state_directory.saw([*wanted, *(region_id for region_id in strays if region_id <= _MAX_STRAY_ID)])
        adopted: list[RegionFile] = []
        missing: list[int] = []
        short: list[int] = []
        for region_id, length in wanted.items():
            status = found.pop(region_file_name(region_id), None)
            if status is None:
                missing.append(region_id)
            elif self._is_whole(region_id, length, status):
                adopted.append(self._region(region_id, length))
                self.allocated_bytes += length
            else:
                short.append(region_id)
        for name in (*map(region_file_name, short), *found):  # once all were looked at: a start that fails removes none
            self._unlink(name)
        return Adoption(tuple(adopted), tuple(missing), tuple(short), len(found))

    def renew(self, regions: Iterable[RegionFile]) -> int:
        if self.path == self._state_directory.path:
            if not os.path.samestat(os.fstat(self._fd), os.fstat(self._state_directory.fd)):
                os.dup2(self._state_directory.fd, self._fd, inheritable=False)
        else:
            renew_directory(self._fd, self._lock, self.path, LOCK, PoolUnusable, partial(in_use, self.path))
        names = set(os.listdir(self._fd))
        return sum(region_file_name(region.region_id) not in names for region in regions)

    def close(self) -> None:
        for fd in (self._lock, self._fd):
            if fd >= 0:
                os.close(fd)
        self._lock = self._fd = -1

    def _region(self, region_id: int, length: int) -> RegionFile:
        return RegionFile(region_id, length, f"{self.path}/{region_file_name(region_id)}", 0)

    def _scan(self) -> Iterable[tuple[str, os.stat_result]]:
        with os.scandir(self._fd) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name):
                    status = entry.stat(follow_symlinks=False)
                    if not stat.S_ISDIR(status.st_mode):
                        yield entry.name, status

    def _is_whole(self, region_id: int, length: int, status: os.stat_result) -> bool:
        """Return whether all its bytes are there.

        Holes are filled: a copy of a pool may have come without its zeros.

        Raises:
            PoolUnusable: it cannot be read now.
        """
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size < length:
            return False
        if status.st_blocks * 512 >= length and not status.st_mode & 0o077:
            return True
        try:
            fd = os.open(region_file_name(region_id), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._fd)
            try:
                os.fchmod(fd, 0o600)
                return self._fill(fd, length)
            finally:
                os.close(fd)
        except OSError as exc:
            raise not_now(f"{self.path}/{region_file_name(region_id)}", exc) from exc

    def _fill(self, fd: int, length: int) -> bool:
        """Reserve the holes of a file.

        Return whether the file system has the room.
        """
        try:
            self._reserve(fd, 0, length)
        except OSError as exc:
            if exc.errno not in _NO_ROOM:
                raise
            return False
        return True

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):  # the next start looks for it again
            os.unlink(name, dir_fd=self._fd)


class Memfds(Ledger):
    """Regions as files without a name, which do not survive a restart.

    They are sealed against being made shorter. A path names a descriptor of this process; once a region is freed, its
    number may come to name another region.
    """

    kind: Kind = "memfd"
    path = "memfd"
    align = ALIGN_BYTES

    def __init__(
        self, state_directory: StateDirectory, capacity_bytes: int | None, reserve: Reserve = os.posix_fallocate
    ) -> None:
        super().__init__(_available_bytes() // 10 * 9 if capacity_bytes is None else capacity_bytes)
        self._state_directory = state_directory
        self._reserve = reserve
        self._fds: dict[int, int] = {}

    def create(self, length: int, go_on: Callable[[], object]) -> RegionFile:
        with self.taking(length), full_is_an_answer(length):
            region_id = self._state_directory.next_region_id()
            fd = os.memfd_create(f"maru_{region_id}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.fchmod(fd, 0o600)
                reserve_all(fd, length, self._reserve, go_on)
                # After the reservation, which grows the file. From here on no process can take pages away from one that
                # has them mapped.
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            except BaseException:
                os.close(fd)
                raise
        self._fds[region_id] = fd
        return RegionFile(region_id, length, f"/proc/{os.getpid()}/fd/{fd}", 0)

    def remove(self, region: RegionFile) -> None:
        os.close(self._fds.pop(region.region_id))
        self.give_back(region.length)

    def open_fd(self, region: RegionFile, write: bool) -> int:
        fd = self._fds.get(region.region_id)
        if fd is None:
            raise FileNotFoundError(errno.ENOENT, f"region {region.region_id} is gone")
        return os.open(f"/proc/self/fd/{fd}", flags_for(write))

    def peek(self, region_id: int) -> memoryview | None:
        return None

    def adopt(self, regions: Iterable[tuple[int, int]]) -> Adoption:
        missing = tuple(region_id for region_id, _ in regions)
        self._state_directory.saw(missing)
        return Adoption((), missing, (), 0)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])


# --- helpers ------------------------------------------------------------------------------------------------------


def _available_bytes() -> int:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise PoolUnusable("the available memory is unknown: set capacity_bytes")
