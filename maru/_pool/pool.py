"""Pool of memory regions shared by processes, with an asynchronous interface.

Blocking work runs in the pool's own threads, so a pool that stalls (a full disk, a dead NFS server) delays only tasks
that wait for memory: queries are answered at once, from this process's own tables.

Rule 1. A region that was handed out exists until it is freed. A cancelled allocation leaves nothing.
Rule 2. Freeing takes effect at once, and completes even if the waiting task is cancelled.
Rule 3. Closing abandons only work under way: regions outlive the server (except those of a memfd).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from types import TracebackType

import attrs
import trio

from ..base.errors import CannotMap, HandlerClosed, PoolFull, PoolUnusable
from ..base.memory.huge_pages import reserve_huge
from ..base.region_file import RegionFile as RegionFile
from ..base.workers import Workers
from .backing import ALIGN_BYTES as ALIGN_BYTES
from .backing import Adoption as Adoption
from .backing import Backing, Kind, Reserve
from .device import Device, open_device
from .files import Files, Memfds
from .state_directory import StateDirectory, check_private, holder_of, identity_of, in_use

MEMFD = "memfd"
"""Place of a pool of files without a name.

It is given instead of a path. No restart survives them.
"""

_log = logging.getLogger(__name__)


@attrs.frozen
class Totals:
    """A snapshot of a pool."""

    total_bytes: int
    """Bytes that regions may take together."""
    allocated_bytes: int
    """Bytes that regions take, those being made or freed included."""
    free_bytes: int
    """Bytes left. The file system may have less.

    An allocation then finds the pool full.
    """
    regions: int
    """The number of regions."""
    pending: int
    """Threads at work, including those whose waiting task was cancelled."""


class Pool:
    """Regions of shared memory.

    Made by :func:`open_pool`; belongs to one trio run.
    """

    def __init__(self, state_directory: StateDirectory, backing: Backing, *, threads: int = 4) -> None:
        self._state_directory = state_directory
        self._backing = backing
        self._regions: dict[int, RegionFile] = {}
        self._memory = Workers(threads)
        # Separate threads, so that a client that maps a region does not wait for allocations.
        self._descriptors = Workers(threads)
        self._adopted = self._closed = False

    def __repr__(self) -> str:
        totals = self.totals()
        return f"<Pool at {self._backing.path!r}: {totals.allocated_bytes} of {totals.total_bytes} bytes allocated>"

    @property
    def home(self) -> str:
        """The directory of this server's state, journal and sockets.

        All that outlives the server is there.
        """
        return self._state_directory.path

    @property
    def path(self) -> str:
        """The directory of the regions' files, the device, or ``memfd``."""
        return self._backing.path

    @property
    def kind(self) -> Kind:
        """Kind of the regions' memory."""
        return self._backing.kind

    @property
    def align(self) -> int:
        """Bytes that every region's length is a multiple of."""
        return self._backing.align

    @property
    def pool_id(self) -> bytes:
        """16 bytes that no other pool has; the same after a restart."""
        return self._state_directory.pool_id

    @property
    def secret(self) -> bytes:
        """Key that signs tokens and capabilities; the same after a restart."""
        return self._state_directory.secret

    @property
    def rebooted(self) -> bool:
        """Whether the machine was rebooted since :meth:`remember_boot`.

        Only regions that pass verification are to be kept then.
        """
        return self._state_directory.rebooted

    async def remember_boot(self) -> None:
        """Record that the remaining regions were verified after a reboot.

        Cancelled, this may be remembered or not.
        """
        await self._memory.do(self._state_directory.remember_boot)

    def peek(self, region_id: int) -> memoryview | None:
        """Return the bytes of a region left by the last server.

        They are to be verified before it is adopted. Blocking; any thread. None if there are none: no file, or a memfd.

        Raises:
            PoolUnusable: there is something, and it cannot be read now.
        """
        return self._backing.peek(region_id)

    async def adopt(self, regions: Iterable[tuple[int, int]]) -> Adoption:
        """Adopt the last server's regions, and remove our other files.

        Call it once, before anything is allocated. Cancelled, it may have removed some; the pool is to be closed.

        Args:
            regions: id and length of each that the journal knows.

        Raises:
            PoolUnusable: one of them is there, and cannot be read now. Nothing is removed.
        """
        assert not self._adopted, "a pool adopts once"
        self._adopted = True
        wanted = list(regions)
        adoption = await self._memory.do(lambda: self._backing.adopt(wanted))
        self._regions.update((region.region_id, region) for region in adoption.adopted)
        return adoption

    async def allocate(self, length: int) -> RegionFile:
        """Make a region of at least ``length`` bytes.

        The length is rounded up to the alignment. All of it is reserved, and zeros. Cancelled, it leaves at once, and
        nothing is left of the region.

        Raises:
            PoolFull: there is no room for it, in the pool's capacity or in the file system.
            PoolUnusable: the file system or the device failed.
            HandlerClosed: the pool was closed.
        """
        if length <= 0:
            raise ValueError(f"a region cannot have {length} bytes")
        self._check()
        assert self._adopted, "adopt first: it removes all regions that it is not given"
        length += -length % self._backing.align
        totals = self.totals()
        if length > totals.free_bytes:  # without waiting for a thread, which checks again
            await trio.lowlevel.checkpoint()
            raise PoolFull(f"{length} bytes do not fit: {totals.free_bytes} of {totals.total_bytes} are free")
        try:
            region = await self._memory.make(lambda go_on: self._backing.create(length, go_on), self._backing.remove)
        except (OSError, MemoryError, CannotMap) as exc:  # a span of a device is mapped to be cleared
            raise PoolUnusable(f"no region can be made in {self._backing.path!r}: {exc!r}") from exc
        self._regions[region.region_id] = region
        return region

    async def free(self, region_id: int) -> None:
        """Free a region's memory. An unknown one is freed already.

        The region is not found any more as soon as this is called. Cancelled, its memory is freed all the same. A
        process that has it mapped keeps it (except on a device) until it unmaps it.
        """
        self._check()
        # Out of the table before the thread removes it: no descriptor of it may be handed out any more, also when this
        # is cancelled meanwhile and the removal goes on.
        region = self._regions.pop(region_id, None)
        if region is None:
            await trio.lowlevel.checkpoint()
            return
        try:
            await self._memory.do(lambda: self._backing.remove(region))
        except (OSError, MemoryError) as exc:  # it stays allocated, and is swept at the next start
            _log.warning("region %d cannot be removed: %s", region_id, exc)

    def find(self, region_id: int) -> RegionFile | None:
        """Return the file of this region, or None."""
        return self._regions.get(region_id)

    async def open_fd(self, region_id: int, write: bool) -> int:
        """Return a new descriptor of a region's file.

        It is opened only to be read unless ``write``. Cancelled, nothing stays open.

        Raises:
            CannotMap: the region is not here, or cannot be opened.
            HandlerClosed: the pool was closed.
        """
        self._check()
        region = self._regions.get(region_id)
        if region is None:
            await trio.lowlevel.checkpoint()
            raise CannotMap(f"there is no region {region_id}")
        try:
            return await self._descriptors.make(lambda _: self._backing.open_fd(region, write), os.close)
        except (OSError, MemoryError) as exc:
            raise CannotMap(f"region {region_id} cannot be opened: {exc!r}") from exc

    def totals(self) -> Totals:
        """Return an immutable snapshot, in constant time."""
        total, allocated = self._backing.total_bytes, self._backing.allocated_bytes
        pending = self._memory.statistics().pending + self._descriptors.statistics().pending
        return Totals(total, allocated, max(0, total - allocated), len(self._regions), pending)

    async def renew(self) -> tuple[list[str], int]:
        """Make again all that was removed of the pool under this server.

        Return the paths, and the number of regions without memory.

        Raises:
            PoolInUse: another server has the directory by now.
            PoolUnusable: it is not ours any more, or cannot be made.
            HandlerClosed: the pool was closed.
        """
        self._check()
        regions = list(self._regions.values())

        def work() -> tuple[list[str], int]:
            made = self._state_directory.renew()
            return made, self._backing.renew(regions)

        try:
            return await self._memory.do(work)
        except OSError as exc:
            raise PoolUnusable(f"the files removed from {self.home!r} cannot be made again: {exc}") from exc

    async def aclose(self, grace: float = 0.5) -> None:
        """Close the pool: another server may have it then. Regions stay.

        Waits for abandoned work, for ``grace`` seconds at most and cancelled or not; a thread stuck beyond that
        releases the pool when it is done, or with the process.
        """
        if not self._closed:
            self._closed = True
            with trio.move_on_after(grace, shield=True):
                await self._memory.wait_idle()
                await self._descriptors.wait_idle()
            self._memory.at_idle(lambda: self._descriptors.at_idle(self._let_go))
        await trio.lowlevel.checkpoint()

    async def __aenter__(self) -> Pool:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    # --- helpers --------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._closed:
            raise HandlerClosed(f"the pool at {self._backing.path!r} was closed")

    def _let_go(self) -> None:
        self._backing.close()
        self._state_directory.close()


async def open_pool(
    where: str | os.PathLike[str],
    capacity_bytes: int | None = None,
    *,
    home: str | os.PathLike[str] | None = None,
    threads: int = 4,
    reserve: Reserve | None = None,
    huge_pages: bool = False,
    keep_free: int = 0,
) -> Pool:
    """Open a pool, exclusively until it is closed or this process ends.

    Cancelled, nothing stays open.

    Args:
        where: a directory, ``"memfd"``, or a DAX device. A plain file is taken for a device. A directory that is the
            home as well is made if need be, with mode 0700; anything else must exist.
        capacity_bytes: bytes that regions may take together. None: all of a device; elsewhere nine tenths of the free
            bytes.
        home: the directory of all that outlives the server. By default ``where``, which must be a directory then.
        threads: how many allocations and removals may be under way at once, and how many openings.
        reserve: reserves memory for a file; by default as the next argument requires.
        huge_pages: reserve memory in huge pages as far as they are to be had.
        keep_free: bytes that a region leaves free in a directory's file system.

    Raises:
        PoolInUse: another server has it; the text names its process.
        PoolUnusable: it cannot be used: not there, not ours, open to others.
    """
    if reserve is None:
        reserve = reserve_huge if huge_pages else os.posix_fallocate

    def work(go_on: object) -> tuple[StateDirectory, Backing]:
        return open_backing(where, capacity_bytes, home=home, reserve=reserve, keep_free=keep_free)

    def undo(opened: tuple[StateDirectory, Backing]) -> None:
        opened[1].close()
        opened[0].close()

    try:
        return Pool(*await Workers(1).make(work, undo), threads=threads)
    except OSError as exc:
        raise PoolUnusable(f"{os.fspath(where)!r} cannot be used as a pool: {exc}") from exc


def open_backing(
    where: str | os.PathLike[str],
    capacity_bytes: int | None = None,
    *,
    home: str | os.PathLike[str] | None = None,
    reserve: Reserve = os.posix_fallocate,
    keep_free: int = 0,
) -> tuple[StateDirectory, Backing]:
    """Open the parts of a :class:`Pool`, as :func:`open_pool`. Blocking."""
    where = os.fspath(where)
    kind = kind_of(where, home)
    state_directory = StateDirectory(where if home is None else home)
    try:
        if kind == "memfd":
            return state_directory, Memfds(state_directory, capacity_bytes, reserve)
        if kind == "device":
            return state_directory, Device(state_directory, where, capacity_bytes, reserve)
        return state_directory, Files(state_directory, where, capacity_bytes, reserve, keep_free)
    except BaseException:
        state_directory.close()
        raise


def check_pool(where: str, capacity_bytes: int | None, *, home: str) -> None:
    """Raise the errors of opening a pool, without opening or making it.

    Takes no lock but a device's for a moment.

    Raises:
        PoolInUse: another server has it.
        PoolUnusable: it cannot be used.
    """
    kind = kind_of(where, home)
    for directory in dict.fromkeys((home, where) if kind == "files" else (home,)):
        check_private(directory)
        process = holder_of(directory)
        if process:
            raise in_use(os.path.realpath(directory), process)
    with contextlib.suppress(FileNotFoundError):
        identity_of(home)
    if kind == "device":
        os.close(open_device(os.path.realpath(where), capacity_bytes)[0])


def kind_of(where: str, home: str | os.PathLike[str] | None) -> Kind:
    """Return the kind of the memory that regions would have.

    Raises:
        PoolUnusable: there is nothing of this name. Only the home is made: any other place must exist.
    """
    if where == MEMFD:
        kind: Kind = "memfd"
    elif os.path.isdir(where):
        return "files"
    elif os.path.exists(where):
        kind = "device"
    elif (home is None or where == os.fspath(home)) and not where.startswith("/dev/dax"):
        return "files"
    else:
        raise PoolUnusable(f"there is no device {where!r}: dax_path must name an existing device, file or directory")
    if home is None:
        raise PoolUnusable(f"{where!r} cannot hold the files that outlive the server: name a directory for them")
    return kind
