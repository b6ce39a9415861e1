"""Regions as spans of one DAX device, or of one plain file.

Blocking. See :mod:`maru._pool.backing` for the rules. All that holds for a device (``/dev/dax*``) holds for a plain
file as well, and is tested on one. A device differs in two things: its size and its alignment are in sysfs, and it
needs no reserving.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Iterable

from ..base.errors import CannotMap, PoolFull, PoolInUse, PoolUnusable
from ..base.forks import watch_forks
from ..base.memory.memory import Memory
from ..base.region_file import RegionFile
from .backing import (
    ALIGN_BYTES,
    STEP_BYTES,
    Adoption,
    Kind,
    Reserve,
    flags_for,
    full_is_an_answer,
    not_now,
)
from .spans import Spans
from .state_directory import StateDirectory
from .writers import may_read, may_write, read, written


class Device:
    """Regions as spans of one device or plain file.

    After a restart they are found again with the state directory. A descriptor of a device reaches all of it, and a
    process that has a freed region mapped sees the memory of the next region there: a device protects regions from each
    other less than files do. So a span that one of our clients may still write is not handed out again: see
    :mod:`maru._pool.writers`. A reader's mapping may come to show another region; its lease has ended by then, which
    the reader notices. Of a span that is left by an earlier server nobody knows the leases: it waits for readers, too.
    """

    kind: Kind = "device"

    def __init__(
        self,
        state_directory: StateDirectory,
        path: str | os.PathLike[str],
        capacity_bytes: int | None,
        reserve: Reserve = os.posix_fallocate,
        *,
        zero: bool = True,
    ) -> None:
        self._state_directory = state_directory
        self._zero = zero
        self._mutex = threading.Lock()
        self.path = os.path.realpath(path)
        self._fd, self._spans = open_device(self.path, capacity_bytes)
        self.align = self._spans.align
        try:
            if stat.S_ISREG(os.fstat(self._fd).st_mode):
                try:
                    reserve(self._fd, 0, self._spans.total_bytes)
                except OSError as exc:
                    raise PoolUnusable(
                        f"no memory for {self._spans.total_bytes} bytes of {self.path!r}: {exc}"
                    ) from exc
        except BaseException:
            os.close(self._fd)
            raise
        self._place = f"{self.path} in steps of {self.align}"
        self._taken: dict[int, tuple[int, int]] = {}
        self._in_use: list[tuple[int, int]] = []  # freed, but another process may still write there
        self._found: list[tuple[int, int]] = []  # left by an earlier server, and not handed out since
        watch_forks(self, Device.close)  # a forked child does not hold its lock

    @property
    def total_bytes(self) -> int:
        return self._spans.total_bytes

    @property
    def allocated_bytes(self) -> int:
        if self._in_use and self._mutex.acquire(blocking=False):  # without waiting: this is called on the server's loop
            try:
                self._sweep()
            finally:
                self._mutex.release()
        return self._spans.total_bytes - self._spans.free_bytes

    def create(self, length: int, go_on: Callable[[], object]) -> RegionFile:
        with self._mutex:
            self._sweep()
            offset = self._spans.take(length)
        if offset is None:
            waiting = sum(size for _, size in self._in_use)
            more = f"; {waiting} freed bytes are still mapped by earlier clients" if waiting else ""
            raise PoolFull(
                f"no free span of {length} bytes among {self._spans.free_bytes} free bytes of {self.path!r}{more}"
            )
        try:
            with full_is_an_answer(length):
                if self._zero:
                    self._clear(offset, length, go_on)
                region_id = self._state_directory.next_region_id()
                with self._mutex:
                    # On disk before the region is handed out: after a crash, a span that a client may have mapped must
                    # not look free.
                    self._state_directory.keep_spans(self._place, self._taken | {region_id: (offset, length)})
                    self._taken[region_id] = (offset, length)
        except BaseException:
            with self._mutex:
                self._spans.give_back(offset, length)
            raise
        return RegionFile(region_id, length, self.path, offset)

    def remove(self, region: RegionFile) -> None:
        with self._mutex:
            taken = {region_id: span for region_id, span in self._taken.items() if region_id != region.region_id}
            self._state_directory.keep_spans(self._place, taken)
            # The state was written first: if that raises, the span stays taken. It becomes free only once no process
            # can write it.
            self._in_use.append(self._taken.pop(region.region_id))
            self._sweep()

    def _sweep(self) -> None:
        """Free the spans that no process uses any more."""
        staying: list[tuple[int, int]] = []
        for span in self._in_use:
            if self._users(*span, found=span in self._found):
                staying.append(span)
            else:
                self._spans.give_back(*span)
                if span in self._found:
                    self._found.remove(span)
        self._in_use = staying

    def _users(self, offset: int, length: int, *, found: bool) -> list[tuple[int, int]]:
        """Return the parts that a process may write.

        For a span found at the start, return the parts that a process may read, too.
        """
        return written(self._fd, offset, length) + (read(self._fd, offset, length) if found else [])

    def open_fd(self, region: RegionFile, write: bool) -> int:
        fd = os.open(f"/proc/self/fd/{self._fd}", flags_for(write))  # this device, even if its path names another
        try:
            (may_write if write else may_read)(fd, region.offset, region.length)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def peek(self, region_id: int) -> memoryview | None:
        offset, length = self._state_directory.spans_of(self._place).get(region_id, (0, 0))
        if not length or offset % self.align or not 0 <= offset <= self.total_bytes - length:
            return None  # it would not be adopted
        try:
            return Memory(self._fd, offset, length, write=False).buffer()
        except (OSError, CannotMap) as exc:
            raise not_now(f"region {region_id} of {self.path}", exc) from exc

    def adopt(self, regions: Iterable[tuple[int, int]]) -> Adoption:
        remembered = self._state_directory.spans_of(self._place)
        wanted = dict(regions)
        self._state_directory.saw([*wanted, *remembered])
        adopted: list[RegionFile] = []
        missing: list[int] = []
        short: list[int] = []
        for region_id, length in wanted.items():
            offset, taken = remembered.get(region_id, (0, 0))
            if not taken:
                missing.append(region_id)
            elif taken < length or not self._spans.claim(offset, taken):
                short.append(region_id)
            else:
                self._taken[region_id] = (offset, taken)
                self._found.append((offset, taken))
                adopted.append(RegionFile(region_id, length, self.path, offset))
        if len(remembered) > len(adopted):
            self._state_directory.keep_spans(self._place, self._taken)
        self._leave_alone()
        swept = len(remembered.keys() - wanted.keys())
        return Adoption(tuple(adopted), tuple(missing), tuple(short), swept)

    def _leave_alone(self) -> None:
        """Take out free spans that a process may still use.

        It may write or read them since the time of another server.
        """
        for start, size in self._spans.free():
            end = start
            for at, n in sorted(self._users(start, size, found=True)):
                offset = max(end, at - at % self.align)
                stop = -(-(at + n) // self.align) * self.align
                if self._spans.claim(offset, stop - offset):
                    self._in_use.append((offset, stop - offset))
                    self._found.append((offset, stop - offset))
                    end = stop

    def renew(self, regions: Iterable[RegionFile]) -> int:
        return 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _clear(self, offset: int, length: int, go_on: Callable[[], object]) -> None:
        """Clear a span, so that its old bytes cannot be read.

        The last owner has left them.
        """
        step = STEP_BYTES - STEP_BYTES % self.align or self.align
        for start in range(0, length, step):
            go_on()
            part = Memory(self._fd, offset + start, min(step, length - start), write=True)
            ctypes.memset(part.address, 0, part.length)


def open_device(path: str, capacity_bytes: int | None) -> tuple[int, Spans]:
    """Open and lock a device or a file.

    Return its descriptor and spans.

    Raises:
        PoolInUse: another server has it.
        PoolUnusable: it cannot be used.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as exc:
        raise PoolUnusable(f"{path!r} cannot be opened: {exc}") from exc
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # another server may have another state directory
        except BlockingIOError:
            raise PoolInUse(f"{path!r} is in use by another server") from None
        try:
            size, align = device_facts(fd)
        except PoolUnusable as exc:
            raise PoolUnusable(f"{path!r} cannot hold a pool: {exc}") from exc
        spans = Spans(size if capacity_bytes is None else min(size, capacity_bytes), align)
        if not spans.total_bytes:
            raise PoolUnusable(f"{path!r} has less than {align} usable bytes")
    except BaseException:
        os.close(fd)
        raise
    return fd, spans


def device_facts(fd: int) -> tuple[int, int]:
    """Return size and alignment of an open device or plain file.

    Both are in bytes.

    Raises:
        PoolUnusable: it is neither, or sysfs does not know its size.
    """
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode):
        return status.st_size, ALIGN_BYTES
    if not stat.S_ISCHR(status.st_mode):
        raise PoolUnusable("neither a DAX device nor a file")
    about = f"/sys/dev/char/{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    try:
        with open(f"{about}/size") as file:
            size = int(file.read())
    except (FileNotFoundError, ValueError) as exc:
        raise PoolUnusable(f"not a DAX device: its size is not in {about}/size") from exc
    except OSError as exc:
        raise PoolUnusable(f"its size cannot be read now: {exc}") from exc
    align = ALIGN_BYTES
    # Older kernels have no such file. An error in reading it is different: the earlier spans are those of one
    # alignment.
    try:
        with contextlib.suppress(FileNotFoundError, ValueError), open(f"{about}/align") as file:
            align = max(align, int(file.read()))
    except OSError as exc:
        raise PoolUnusable(f"its alignment cannot be read now: {exc}") from exc
    return size, align
