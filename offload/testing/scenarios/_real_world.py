"""World of a real run: the same seams and faults, with threads.

Rule 1. Times of the scenario are minimal distances. Being slow is no violation: expectations that depend on durations
        are not judged (`_expectations`), as if the clock jumped ahead all the time.
Rule 2. Every thread that waits at a gate leaves it when the run is over: no thread of a copy outlives it.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, cast

import trio
import trio.testing

from backends.abc import Key
from backends.base.threads import run_in_thread

from ._clock import unshield
from ._names import pipelines_of, tiers_of
from ._page_store import PageStore
from ._program import Scenario, TierSpec
from ._real_tiers import RealTierModel, WallClock
from ._trace import Violation
from ._virtual_tier import Copy, TierModel, Torn
from ._world import VirtualWorld

_UNSHIELDED_AFTER: Final = 45.0
_REST: Final = 1.0
"""Seconds that a system of several threads has to come to rest."""
_POLL: Final = 0.002


class RealWorld(VirtualWorld):
    """World of one real run.

    Args:
        scenario: scenario to play.
        seed: seed of its choices. The order of threads has none.
        clock: clock of real time.
        workdir: directory for files; it is empty.
    """

    slow = True
    fsync = False
    """Whether files are durable before they count as stored."""

    def __init__(self, scenario: Scenario, seed: int, clock: WallClock, workdir: str) -> None:
        super().__init__(scenario, seed, cast("trio.testing.MockClock", clock))
        self.workdir = workdir
        self._wall = clock
        self.over: threading.Event = threading.Event()
        """Event set when the run is over: no thread waits any more."""
        self.died: dict[str, None] = {}
        """Containers in progress in a process when it was killed."""
        self.notes: dict[str, None] = {}
        """Remarks for a reader of the report."""
        self.jumps.append((0.0, math.inf))  # rule 1
        self.real: dict[str, RealTierModel] = {}
        self._stores: list[PageStore] = []
        try:
            self._open_places(scenario, clock)
        except BaseException:
            self.close_down()
            raise
        self.tier_models: dict[str, TierModel] = cast("dict[str, TierModel]", self.real)

    def _open_places(self, scenario: Scenario, clock: WallClock) -> None:
        full = {fault.tier for fault in scenario.fault if fault.do == "full"}
        into = {spec.to for spec in pipelines_of(scenario).values()}
        first = next(iter(pipelines_of(scenario).values())).to
        for name, spec in tiers_of(scenario).items():
            model = self.real[name] = self._place(name, spec, clock)
            model.begins = self._begins
            if spec.kind == "file" and name in into and (name in full or ("" in full and name == first)):
                try:
                    model.disk = disk_for(spec.capacity, spec.block_bytes)
                except NoDisk as error:
                    self.notes[f"full: {error}; so no room is granted in {name} instead"] = None

    def _place(self, name: str, spec: TierSpec, clock: WallClock) -> RealTierModel:
        if spec.kind != "maru":
            return RealTierModel(name, spec, self.trace, self._owners, clock=clock, over=self.over, later=self.at)
        from ._page_store import PageStoreModel
        from ._page_store_tier import pool_bytes, server_options

        store = PageStore(pool_bytes(spec), *server_options())
        self._stores.append(store)
        if store.note:
            self.notes[store.note] = None
        return PageStoreModel(
            name,
            spec,
            self.trace,
            self._owners,
            clock=clock,
            over=self.over,
            later=self.at,
            store=store,
            starting=lambda task: self.background.start_soon(task),
        )

    def close_down(self) -> None:
        """Release threads, disks and page stores. Idempotent."""
        self.over.set()
        for store in self._stores:
            if wrong := store.end():
                self.violations.append(Violation("crash", wrong))
        for model in self.real.values():
            if model.disk is not None:
                model.disk.close()
                model.disk = None

    def directory_of(self, tier: str) -> str:
        """Return the directory of a tier's files."""
        disk = self.real[tier].disk
        return disk.path if disk is not None else os.path.join(self.workdir, tier)

    # -- the seams -----------------------------------------------------------------------------------------------------

    async def copy(self, tier: str, keys: Sequence[Key], data: Sequence[bytes]) -> Sequence[bytes]:
        """Write blocks in a copy thread, and read them back.

        Into memory, or into files.
        """
        model = self.real[tier]
        for key, block in zip(keys, data, strict=True):
            if bytes(block) != self.payload(key, tier):
                self.wrong("bytes", f"{key.decode()} is copied into {tier}, and is not what was stored under that key")
        blocks = [bytes(block) for block in data]
        copied = self._through_files if model.spec.kind == "file" else self._through_memory

        async def move(copy: Copy) -> list[bytes]:
            flips = {at: entry for at, key in enumerate(keys) if (entry := model.flips(key)) is not None}
            try:
                arrived = await run_in_thread(copied, model, copy, tuple(keys), blocks, frozenset(flips))
            except OSError as error:
                if error.errno == 28:
                    model.met_no_room(copy, keys)
                raise
            torn, failing = copy.torn(), copy.failing()
            if torn is not None:
                raise Torn(f"a copy into {tier} broke off in the middle of {torn.decode()}")
            if failing:
                raise OSError(f"a copy into {tier} failed for {sorted(failing)}")
            return copy.answers(arrived)

        model.check_peer()
        await trio.lowlevel.checkpoint()
        return await model.run_copy(tuple(keys), move)

    @staticmethod
    def _through_memory(
        model: RealTierModel, copy: Copy, keys: Sequence[Key], blocks: Sequence[bytes], flips: frozenset[int]
    ) -> list[bytes]:
        model.gate(copy)
        memory = [bytearray(block) for block in blocks]
        for at in flips:
            memory[at][0] ^= 1
        return [bytes(block) for block in memory]

    def _through_files(
        self, model: RealTierModel, copy: Copy, keys: Sequence[Key], blocks: Sequence[bytes], flips: frozenset[int]
    ) -> list[bytes]:
        model.gate(copy)
        directory = self.directory_of(model.name)
        os.makedirs(directory, exist_ok=True)
        arrived: list[bytes] = []
        for at, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            path = os.path.join(directory, f"{copy.number:x}-{key.hex()[:96]}.{at}")
            try:
                with open(path, "wb") as file:
                    file.write(bytes([block[0] ^ 1]) + block[1:] if at in flips else block)
                with open(path, "rb") as file:
                    arrived.append(file.read())
            finally:
                if os.path.exists(path):
                    os.unlink(path)
        return arrived

    def opened(self) -> None:
        """Begin the scenario's time, now that the system is open."""
        self._wall.start_clock()

    # -- the end -------------------------------------------------------------------------------------------------------

    def give_up(self, rule: str, text: str) -> None:
        """Give up a run that does not end by itself.

        Open all gates and cancel the system; if it drains for too long, ignore its shields.
        """
        super().give_up(rule, text)
        self.over.set()
        for model in self.real.values():
            model.released.set()
        self.background.start_soon(self._insist)

    async def _insist(self) -> None:
        await trio.sleep(_UNSHIELDED_AFTER)
        unshield()

    async def quiet(self) -> None:
        """Wait until the system holds nothing, or for a limited time."""
        ready = getattr(self.system, "ready", None)
        if ready is not None:
            await ready()
        with trio.move_on_after(_REST):
            while True:
                await trio.testing.wait_all_tasks_blocked()
                later = getattr(self.system, "audit_later", None)
                held: Mapping[str, int] = await later() if later is not None else self.system.audit()
                if not any(held.values()):
                    return
                await trio.sleep(_POLL)

    def jump(self, seconds: float) -> None:
        """Raise: real time cannot jump."""
        raise AssertionError("a scenario with a fault of the clock is not played for real")

    def at(self, time: float, call: Callable[[], object]) -> None:
        """Call a function at a time."""
        self.background.start_soon(self._later, time, call)


# --- a disk that can be full ------------------------------------------------------------------------------------------


_PAGE: Final = 4096
_HELPER_TIME: Final = 20.0

# Runs in a process of its own, and imports nothing of ours: it lives for some ten milliseconds.
_HELPER: Final = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUSER, REC, PRIVATE = 0x20000, 0x10000000, 0x4000, 0x40000
def call(name, *args):
    if getattr(libc, name)(*args):
        error = ctypes.get_errno()
        sys.exit(f"{name}: {os.strerror(error)}")
channel, directory, nbytes = int(sys.argv[1]), sys.argv[2].encode(), int(sys.argv[3])
uid, gid = os.getuid(), os.getgid()
if libc.unshare(NEWNS):
    call("unshare", NEWNS | NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
call("mount", b"none", b"/", None, REC | PRIVATE, None)
call("mount", b"none", directory, b"tmpfs", 0, f"size={nbytes},mode=700,uid={uid},gid={gid}".encode())
root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
socket.send_fds(socket.socket(fileno=channel), [b"x"], [root])
"""


class NoDisk(OSError):
    """Missing file system of its own; the text is the reason."""


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
        """Path of the root, for this process."""
        return f"/proc/self/fd/{self._root}"

    def fill(self) -> None:
        """Take all free space: from now on, writers meet ``ENOSPC``."""
        self._full = True
        fd = os.open("ballast", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._root)
        try:
            while free := self._free():
                with contextlib.suppress(OSError):  # another writer took some of it meanwhile
                    os.posix_fallocate(fd, os.fstat(fd).st_size, free)
        finally:
            os.close(fd)

    def empty(self) -> None:
        """Free the space that :meth:`fill` took."""
        if self._full:
            self._full = False
            os.unlink("ballast", dir_fd=self._root)

    def close(self) -> None:
        """Release the disk; it goes once no file is open. Idempotent."""
        root, self._root = self._root, -1
        if root >= 0:
            os.close(root)

    def _free(self) -> int:
        status = os.fstatvfs(self._root)
        return status.f_bavail * status.f_frsize


def disk_for(blocks: int, block_bytes: int) -> SmallDisk:
    """Return a disk with room for so many blocks as files, twice.

    Each file has a header; twice, since removed files are freed later.

    Raises:
        NoDisk: it cannot be made here.
    """
    each = -(-(block_bytes + 512) // _PAGE) * _PAGE
    return SmallDisk(2 * blocks * each + (1 << 20))


def _mounted(nbytes: int) -> int:
    """Return the root of a new tmpfs."""
    ours, theirs = socket.socketpair()
    with ours, tempfile.TemporaryDirectory() as directory:
        with theirs:
            command = [sys.executable, "-I", "-S", "-c", _HELPER, str(theirs.fileno()), directory, str(nbytes)]
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
                raise NoDisk(f"no mount namespace can be made: {error}") from error
        if done.returncode:
            why = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
            raise NoDisk(f"no file system can be mounted here, not even in its own namespace ({why})")
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
        os.set_inheritable(fds[0], False)
        return fds[0]
