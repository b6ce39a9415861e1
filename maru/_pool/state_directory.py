"""State directory of a pool, owned by one server. Blocking.

It holds all that has to outlive that server.

    DIRECTORY/maru.lock     held with flock for as long as the directory is open; has the id of the holding process
    DIRECTORY/maru.pool     the id of the pool, and its secret; written once
    DIRECTORY/maru.state    the next region id, the boot, and the spans of a device; written with each region

Rule 1. Directories are made with mode 0700, files with 0600. One that is not ours, or that others may enter, is
        refused.
Rule 2. State is on disk before it is acted on, and is replaced as a whole: a crash leaves the old or the new one.
Rule 3. A region id is never used twice. If the counter was lost or is below the ids found, it continues far above.
Rule 4. A damaged state does not prevent a start: it costs the spans of a device and a jump of the counter.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import Annotated, TypeVar

import msgspec

from ..base.addresses import LOCK
from ..base.errors import PoolInUse, PoolUnusable
from ..base.forks import watch_forks
from ..base.own_directory import holder_of_lock, lock_directory, locked_inodes, renew_directory
from ..base.private_directory import check_private_directory, open_private_directory

_POOL = "maru.pool"
_STATE = "maru.state"
_FORMAT = 1
ID_BYTES = 16
_SECRET_BYTES = 32
S = TypeVar("S", bound=msgspec.Struct)

_log = logging.getLogger(__name__)


class _Identity(msgspec.Struct, frozen=True):
    """Content of ``maru.pool``, as JSON."""

    format: int
    pool_id: bytes
    secret: bytes


class _State(msgspec.Struct, frozen=True):
    """Content of ``maru.state``, as JSON.

    An operator may want to read it.
    """

    next_region_id: Annotated[int, msgspec.Meta(ge=1)]
    boot_id: str
    place: str
    """The device of the spans."""
    spans: dict[int, tuple[int, int]]
    """Offset and length of each region of a device."""


class StateDirectory:
    """An open, locked directory.

    Every method may be called in any thread.

    Raises:
        PoolInUse: another server has it; the text names its process.
        PoolUnusable: it cannot be made or read, is not ours, or is open to others.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.fd: int
        self.path: str
        self.fd, self.path = open_private(path)
        """The directory's descriptor, and its real path."""
        self._lock = -1
        self._mutex = threading.Lock()
        try:
            self._lock = lock(self.fd, self.path)
            for name in (_POOL, _STATE):
                self._unlink(name + ".tmp")
            self._boot_id = _boot_id()
            is_new = not _exists(self.fd, _POOL)
            self._identity = self._read_identity()
            self._state = self._read_state(is_new)
        except OSError as exc:
            self.close()
            raise PoolUnusable(f"the state in {self.path!r} cannot be read or written: {exc}") from exc
        except BaseException:
            self.close()
            raise
        watch_forks(self, StateDirectory.close)  # a forked child does not hold its lock

    def __repr__(self) -> str:
        return f"<StateDirectory {self.path!r}{'' if self.fd >= 0 else ' (closed)'}>"

    @property
    def pool_id(self) -> bytes:
        """16 bytes that no other pool has; the same after a restart."""
        return self._identity.pool_id

    @property
    def secret(self) -> bytes:
        """Key that signs tokens and capabilities; the same after a restart."""
        return self._identity.secret

    @property
    def rebooted(self) -> bool:
        """Whether the machine was rebooted since :meth:`remember_boot`.

        Pages may have lost their contents then.
        """
        return self._state.boot_id != self._boot_id

    def remember_boot(self) -> None:
        """Record that regions were verified after the reboot.

        They count as stored since then.
        """
        with self._mutex:
            self._change(boot_id=self._boot_id)

    def next_region_id(self) -> int:
        """Return an id that was never used, and never will be again."""
        with self._mutex:
            region_id = self._state.next_region_id
            self._change(next_region_id=region_id + 1)
        return region_id

    def saw(self, region_ids: Iterable[int]) -> None:
        """Record that these ids were found in use."""
        highest = max(region_ids, default=0)
        with self._mutex:
            if highest >= self._state.next_region_id:
                self._change(next_region_id=max(highest + 1, _far_above()))

    def spans_of(self, place: str) -> dict[int, tuple[int, int]]:
        """Return offset and length of each recorded region of this device."""
        return dict(self._state.spans) if self._state.place == place else {}

    def keep_spans(self, place: str, spans: dict[int, tuple[int, int]]) -> None:
        """Record these spans, replacing all others."""
        with self._mutex:
            self._change(place=place, spans=spans)

    def renew(self) -> list[str]:
        """Make again all that was removed under this server. Return the paths.

        The directory, its lock, its identity and its state.

        Raises:
            PoolInUse: another server has the directory by now.
            PoolUnusable: it is not ours any more.
            OSError: it cannot be made.
        """
        with self._mutex:
            made = renew_directory(self.fd, self._lock, self.path, LOCK, PoolUnusable, partial(in_use, self.path))
            for name, content in ((_POOL, self._identity), (_STATE, self._state)):
                if not _exists(self.fd, name):
                    self._write(name, content)
                    made.append(f"{self.path}/{name}")
        return made

    def close(self) -> None:
        """Let another server have the directory. Idempotent."""
        for fd in (self._lock, self.fd):
            if fd >= 0:
                os.close(fd)
        self._lock = self.fd = -1

    # --- helpers --------------------------------------------------------------------------------------------------

    def _read_identity(self) -> _Identity:
        identity = _read(self.fd, self.path, _POOL, _Identity)
        if identity is None:
            identity = _Identity(_FORMAT, secrets.token_bytes(ID_BYTES), secrets.token_bytes(_SECRET_BYTES))
            self._write(_POOL, identity)
        return _checked(identity, self.path)

    def _read_state(self, is_new: bool) -> _State:
        state = _read(self.fd, self.path, _STATE, _State)
        if state is None:
            # Lost, unless the pool is new: the used ids are unknown, and the regions found have to be verified.
            state = _State(1, self._boot_id, "", {}) if is_new else _State(_far_above(), "", "", {})
            self._write(_STATE, state)
        return state

    def _change(self, **changes: object) -> None:
        changed = msgspec.structs.replace(self._state, **changes)
        # The file first, so that this process never acts on a state that a restart would not find.
        self._write(_STATE, changed)
        self._state = changed

    def _write(self, name: str, content: msgspec.Struct) -> None:
        temporary = name + ".tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(temporary, flags, 0o600, dir_fd=self.fd)
        try:
            with open(fd, "wb") as file:
                file.write(msgspec.json.encode(content))
                file.flush()
                os.fsync(fd)
            # The content is on disk before it gets the name, and the directory is synced after: a crash leaves the old
            # file or the new one, never a part of it.
            os.rename(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException:
            self._unlink(temporary)
            raise
        os.fsync(self.fd)

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self.fd)


def open_private(path: str | os.PathLike[str]) -> tuple[int, str]:
    """Open a directory that is ours alone, made if need be.

    Return its descriptor and its real path.

    Raises:
        PoolUnusable: its parent is missing, it cannot be made, is not ours, or others may enter it.
    """
    return open_private_directory(path, PoolUnusable, purpose="the directory of a pool")


def check_private(path: str | os.PathLike[str]) -> None:
    """Raise the errors of :func:`open_private`.

    A directory that had to be made to find out is removed again.
    """
    check_private_directory(path, PoolUnusable, purpose="the directory of a pool")


def in_use(path: str, process: str) -> PoolInUse:
    """Return the error for a second server in the same directory."""
    return PoolInUse(f"{path!r} is in use by another server, process {process}")


def holder_of(path: str | os.PathLike[str]) -> str:
    """Return the process that holds a directory's lock, or "".

    The process has written this into the lock file. Takes no lock.
    """
    lock_path = os.path.join(path, LOCK)
    with contextlib.suppress(OSError):
        inode = os.stat(lock_path).st_ino
        with (
            open("/proc/locks", encoding="ascii") as locks,
            open(lock_path, encoding="ascii", errors="replace") as file,
        ):
            if inode in locked_inodes(locks.read()):
                return file.read(32).strip() or "unknown"
    return holder_of_lock(os.fspath(path))  # the lock file was removed


def identity_of(path: str | os.PathLike[str]) -> bytes | None:
    """Return the id of the pool in a directory, or None.

    A damaged one that will be replaced counts as none.

    Raises:
        PoolUnusable: it is of another format.
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        identity = _read(fd, os.fspath(path), _POOL, _Identity)
    finally:
        os.close(fd)
    return None if identity is None else _checked(identity, os.fspath(path)).pool_id


def lock(directory: int, path: str) -> int:
    """Lock a directory until the returned descriptor is closed.

    Raises:
        PoolInUse: another process has it.
    """
    return lock_directory(directory, LOCK, partial(in_use, path))


def _checked(identity: _Identity, path: str) -> _Identity:
    if identity.format != _FORMAT or len(identity.pool_id) != ID_BYTES or len(identity.secret) != _SECRET_BYTES:
        raise PoolUnusable(f"{path}/{_POOL} is of format {identity.format}, not {_FORMAT}")
    return identity


def _read(directory: int, path: str, name: str, kind: type[S]) -> S | None:
    """Return the content of a file; None if missing or damaged."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        content = file.read()
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        _log.warning("%s/%s is damaged (%s), and is replaced", path, name, exc)
        return None


def _far_above() -> int:
    """Return the time in microseconds, above all ids ever used.

    There is less than one new region in each microsecond.
    """
    return time.time_ns() // 1_000


def _exists(directory: int, name: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        os.stat(name, dir_fd=directory, follow_symlinks=False)
        return True
    return False


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except (FileNotFoundError, PermissionError):  # as in a sandbox, at each start; anything else may be over soon
        return "unknown"
