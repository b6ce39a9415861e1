"""LMCache's first level in the page store.

Its memory objects are pages of the pool.

They are filled and read in place. LMCache cannot be configured to use it, as its first level has no plug.
:class:`MaruL1Manager` is passed to its storage manager instead: it has the methods of ``L1ManagerInterface``, which the
storage manager calls, and of ``L1ManagerProtocol``.

Rule 1. A page is written by the one that reserved it, and nobody finds it before it is committed.
Rule 2. An object that is read stays in place until each of its read locks is given back, whoever owns it.
Rule 3. The server chooses the victims when the pool is full: LMCache has nothing to evict here.
Rule 4. LMCache sees codes instead of our exceptions: an object that cannot be had does not exist, one without room is
    out of memory.
"""

from __future__ import annotations

import logging
import threading
import uuid
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import attrs

from backends.abc import Deletion, Duplicate, Key, Stored
from backends.maru.l1 import BlockingMaruL1, ViewLease, WriteReservation
from maru import LeaseLost

from .._faults import FaultLog
from .._guard import NOTHING, Hook, guard_faults, guarded, nothing
from ._lmcache_l1 import (
    L1BackendType,
    L1Error,
    L1ReconfigureError,
    MemoryFormat,
    MemoryLayoutDesc,
    MemoryObjMetadata,
    TensorMemoryObj,
    next_l1_manager_id,
)
from ._names import KeyNames, ObjectKey, naming, rows

T = TypeVar("T")

_log = logging.getLogger("offload.engines.lmcache")

Answer: TypeAlias = "tuple[L1Error, TensorMemoryObj | None]"
"""The result for a key, and its object."""


@attrs.define(eq=False)
class _Staged:
    """A page that is being written."""

    reservation: WriteReservation
    name: Key
    item: TensorMemoryObj


@attrs.define(eq=False)
class _Reading:
    """An object that is being read."""

    lease: ViewLease
    name: Key
    item: TensorMemoryObj
    place: tuple[int, int]
    """Its region, and the number of its page there."""
    locks: int


def _codes(error: L1Error) -> Hook:
    return Hook(lambda manager, keys, *args, **more: dict.fromkeys(keys, error))


def _answers(error: L1Error, put_right: Callable[..., Any] | None = None) -> Hook:
    return Hook(lambda manager, keys, *args, **more: dict.fromkeys(keys, (error, None)), put_right)


def _abort_write(
    manager: MaruL1Manager, keys: list[ObjectKey], is_temporary: object, layout_desc: object, tag: str = ""
) -> None:
    """Give back the pages of a write that counts as failed."""
    with manager._lock:
        new, manager._new = manager._new, {}
        for place, one in new.items():
            if manager._staged.get(place) is one:
                del manager._staged[place]
        manager._abort(list(new.values()))


def _end_reads(manager: MaruL1Manager, keys: list[ObjectKey], read_locks: int = 1, *args: object) -> None:
    """Give back the read locks of a failed call.

    LMCache does not know of them.
    """
    with manager._lock:
        taken, manager._taken = manager._taken, []
        manager._unlock(taken, read_locks)


def _status_unknown(manager: MaruL1Manager) -> dict[str, Any]:
    return {"type": type(manager).__name__, "is_healthy": False, **guard_faults(manager).report()}


_STARTS: Final = Hook(nothing, passes=(L1ReconfigureError,))
_HOOKS: Final = {
    "register_listener": NOTHING,
    "register_kv_layout": Hook(lambda *args: False),
    "reserve_write": _answers(L1Error.OUT_OF_MEMORY, _abort_write),
    "finish_write": _codes(L1Error.KEY_IN_WRONG_STATE),
    "finish_write_and_reserve_read": _answers(L1Error.KEY_IN_WRONG_STATE, _end_reads),
    "finish_write_and_delete": _codes(L1Error.KEY_IN_WRONG_STATE),
    "reserve_read": _answers(L1Error.KEY_NOT_EXIST, _end_reads),
    "unsafe_read": _answers(L1Error.KEY_NOT_EXIST),
    "read_at": NOTHING,
    "finish_read": _codes(L1Error.KEY_IN_WRONG_STATE),
    "touch_keys": NOTHING,
    "delete": _codes(L1Error.KEY_IS_LOCKED),
    "clear": NOTHING,
    "is_key_evictable": Hook(lambda *args: False),
    "allocate": Hook(lambda *args: (L1Error.OUT_OF_MEMORY, [])),
    "free": Hook(lambda *args: L1Error.SUCCESS),
    "get_backend_type": Hook(lambda *args: L1BackendType.DRAM),
    "get_memory_usage": Hook(lambda *args: (0, 0)),
    "get_staging_memory_usage": Hook(lambda *args: 0),
    "get_capacity_bytes_by_backend": Hook(lambda *args: {}),
    "get_l1_memory_desc": NOTHING,
    "memory_region_count": Hook(lambda *args: 1),
    "owns_device": Hook(lambda *args: False),
    "get_devdax_arena_statuses": Hook(lambda *args: []),
    "get_devdax_arena_status": _STARTS,
    "add_devdax_device": _STARTS,
    "remove_devdax_device": _STARTS,
    "report_status": Hook(_status_unknown),
    "memcheck": Hook(lambda *args: True),
    "close": NOTHING,
}


@guarded(_HOOKS)
class MaruL1Manager:
    """LMCache's first level in the page store.

    Thread-safe, one call at a time, as LMCache's own.

    Args:
        config: LMCache's configuration of a first level; its tag is used.
        key_names: how objects are named: ``hashed``, or ``published``, to share them with published integrations.
        weights_version: distinguishes the weights of one model; not with published names.
        knobs: of the page store: see :class:`maru.MaruConfig`.

    Raises:
        ValueError: ``key_names`` is unknown, or a knob invalid.
    """

    def __init__(self, config: Any, *, key_names: KeyNames = "hashed", weights_version: str = "", **knobs: Any) -> None:
        self._config = config
        self._name_of = naming(key_names, weights_version)
        self._l1 = BlockingMaruL1(key_names="text" if key_names == "published" else "hex", **knobs).start()
        self._id = next_l1_manager_id()
        self._pool_bytes: int = self._l1.config.pool_size
        self._lock = threading.RLock()
        self._layout: MemoryLayoutDesc | None = None
        self._staged: dict[tuple[ObjectKey, str], _Staged] = {}
        self._new: dict[tuple[ObjectKey, str], _Staged] = {}  # pages of the current call
        self._taken: list[ObjectKey] = []  # read locks of the current call
        self._allocated: dict[int, _Staged] = {}
        self._reading: dict[ObjectKey, _Reading] = {}
        self._listeners: list[Any] = []
        self.faults: FaultLog = FaultLog("first level", _log)
        self._is_healthy = True

    def __repr__(self) -> str:
        return f"<MaruL1Manager over {self._l1!r}>"

    @property
    def l1_manager_id(self) -> int:
        """The manager's id in this process."""
        return self._id

    @property
    def config(self) -> Any:
        """LMCache's configuration of this manager."""
        return self._config

    def register_listener(self, listener: Any) -> None:
        """Call this listener at each write, read and delete."""
        with self._lock:
            self._listeners.append(listener)

    def register_kv_layout(self, layout: MemoryLayoutDesc) -> bool:
        """Set the layout of objects, and bring the pool up.

        The first write does so, too; a process that only reads must call it.

        Returns:
            Whether it was accepted: there is one layout, and the server must answer.
        """
        with self._lock:
            shapes = [tuple(shape) for shape in layout.shapes]
            if self._try("layout", 1, lambda: self._l1.register_kv_layout(shapes, list(layout.dtypes))) is None:
                return False
            self._layout = layout
            return True

    # --- writing --------------------------------------------------------------------------------------------------

    def reserve_write(
        self, keys: list[ObjectKey], is_temporary: list[bool], layout_desc: MemoryLayoutDesc, tag: str = ""
    ) -> dict[ObjectKey, Answer]:
        """Take a page for each key.

        Keys that this writer is writing already, or that are read here, get none.
        """
        with self._lock:
            answers: dict[ObjectKey, Answer] = {}
            for key in keys:
                taken = (key, tag) in self._staged or key in self._reading
                answers[key] = (L1Error.KEY_NOT_WRITABLE if taken else L1Error.OUT_OF_MEMORY, None)
            free = [key for key, (error, _) in answers.items() if error is L1Error.OUT_OF_MEMORY]
            self._new = {}
            if free and self.register_kv_layout(layout_desc):
                staged = self._reserve(list(map(self._name_of, free)))
                self._new = {(key, tag): one for key, one in zip(free, staged, strict=False)}
                answers.update({key: (L1Error.SUCCESS, one.item) for (key, _), one in self._new.items()})
            self._tell("on_l1_keys_reserved_write", [key for key in free if answers[key][1] is not None])
            self._staged.update(self._new)
            self._new = {}  # LMCache knows of them now, and writes to them.
            return answers

    def finish_write(self, keys: list[ObjectKey], tag: str = "") -> dict[ObjectKey, L1Error]:
        """Publish written pages, with one message for pages that were reserved together."""
        with self._lock:
            answers = self._commit(keys, tag)
            self._tell("on_l1_keys_write_finished", _successful(answers))
            return answers

    def finish_write_and_reserve_read(
        self, keys: list[ObjectKey], read_locks: int = 1, tag: str = ""
    ) -> dict[ObjectKey, Answer]:
        """Publish written pages, and pin those that are stored then."""
        with self._lock:
            written = self._commit(keys, tag)
            there = _successful(written)
            read = self._hold(there, read_locks)
            self._tell("on_l1_keys_finish_write_and_reserve_read", [key for key in there if read[key][1] is not None])
            answers = {key: read.get(key, (error, None)) for key, error in written.items()}
            self._taken = []  # LMCache knows of them now, and gives them back.
            return answers

    def finish_write_and_delete(self, keys: list[ObjectKey], tag: str = "") -> dict[ObjectKey, L1Error]:
        """Give pages back without publishing them."""
        with self._lock:
            staged = {key: self._staged.pop((key, tag), None) for key in keys}
            self._abort([one for one in staged.values() if one is not None])
            return {key: L1Error.KEY_NOT_EXIST if one is None else L1Error.SUCCESS for key, one in staged.items()}

    # --- reading --------------------------------------------------------------------------------------------------

    def reserve_read(self, keys: list[ObjectKey], read_locks: int = 1) -> dict[ObjectKey, Answer]:
        """Pin the stored prefix of each row of keys, from any process."""
        with self._lock:
            answers = self._hold(keys, read_locks)
            self._tell("on_l1_keys_reserved_read", [key for key in keys if answers[key][1] is not None])
            self._taken = []  # LMCache knows of them now, and gives them back.
            return answers

    def unsafe_read(self, keys: list[ObjectKey]) -> dict[ObjectKey, Answer]:
        """Return the objects of pinned keys. Sends no message."""
        with self._lock:
            return {key: self._held(key) for key in keys}

    def read_at(self, region_id: int, page: int) -> TensorMemoryObj | None:
        """Return the object in a page of a region, if pinned here.

        Sends no message. A place does not identify an object: unless its page is pinned, it may have another object's
        bytes by the next moment.
        """
        with self._lock:
            for key, reading in self._reading.items():
                if reading.place == (region_id, page):
                    return self._held(key)[1]
            return None

    def finish_read(self, keys: list[ObjectKey], read_locks: int = 1) -> dict[ObjectKey, L1Error]:
        """Give read locks back."""
        with self._lock:
            answers = dict.fromkeys(keys, L1Error.KEY_NOT_EXIST)
            over: list[_Reading] = []
            for key in answers:
                reading = self._reading.get(key)
                if reading is not None:
                    answers[key] = L1Error.SUCCESS
                    reading.locks -= read_locks
                    if reading.locks <= 0:
                        over.append(self._reading.pop(key))
            self._release(over)
            self._tell("on_l1_keys_read_finished", _successful(answers))
            return answers

    def touch_keys(self, keys: list[ObjectKey]) -> None:
        """Report a use to the listeners.

        The server keeps its own order of use.
        """
        self._tell("on_l1_keys_accessed", keys)

    # --- deleting -------------------------------------------------------------------------------------------------

    def delete(self, keys: list[ObjectKey], force: bool = False) -> dict[ObjectKey, L1Error]:
        """Delete keys of any writer.

        Keys that are read or written, here or elsewhere, stay, also with ``force``.
        """
        with self._lock:
            written = {key for key, _ in self._staged}
            answers = dict.fromkeys(keys, L1Error.KEY_IS_LOCKED)
            asked = [key for key in answers if key not in written and key not in self._reading]
            told = self._try("delete", len(asked), lambda: self._l1.delete(list(map(self._name_of, asked)))) or ()
            answers.update(zip(asked, map(_DELETED.__getitem__, told), strict=False))
            self._tell("on_l1_keys_deleted_by_manager", _successful(answers))
            return answers

    def clear(self, force: bool = False) -> None:
        """Delete objects that this instance has written and that are not read."""
        with self._lock:
            self._try("clear", 1, self._l1.clear)

    def is_key_evictable(self, key: ObjectKey) -> bool:
        """Return false: the server evicts by itself."""
        return False

    # --- memory ---------------------------------------------------------------------------------------------------

    def allocate(self, layout_desc: MemoryLayoutDesc, count: int) -> tuple[L1Error, list[TensorMemoryObj]]:
        """Take pages without a key, until :meth:`free`."""
        with self._lock:
            if not self.register_kv_layout(layout_desc):
                return L1Error.OUT_OF_MEMORY, []
            staged = self._reserve([uuid.uuid4().bytes for _ in range(count)])
            if len(staged) < count:
                self._abort(staged)
                return L1Error.OUT_OF_MEMORY, []
            self._allocated.update((id(one.item), one) for one in staged)
            return L1Error.SUCCESS, [one.item for one in staged]

    def free(self, mem_objs: list[TensorMemoryObj]) -> L1Error:
        """Give pages without a key back."""
        with self._lock:
            staged = [self._allocated.pop(id(item), None) for item in mem_objs]
            self._abort([one for one in staged if one is not None])
            return L1Error.SUCCESS

    def get_backend_type(self, memory_obj: object) -> L1BackendType:
        """Return DRAM, since pages are shared memory."""
        return L1BackendType.DRAM

    def get_memory_usage(self) -> tuple[int, int]:
        """Return used and total bytes of this instance.

        ``(0, 0)`` before the layout is known.
        """
        try:  # this sends no message, so it does not affect the page store's health
            return self._l1.get_memory_usage()
        except Exception as error:
            self.faults.note("status", error)
            return 0, 0

    def _published_count(self) -> int:
        try:
            return self._l1.report_status().registered_pages
        except Exception as error:
            self.faults.note("status", error)
            return 0

    def get_staging_memory_usage(self) -> int:
        """Return the bytes of the pages that are being written."""
        with self._lock:
            layout = self._l1.layout
            return 0 if layout is None else layout.page_bytes * (len(self._staged) + len(self._allocated))

    def get_capacity_bytes_by_backend(self) -> dict[L1BackendType, int]:
        """Return the capacity of this instance's regions."""
        return {L1BackendType.DRAM: self._pool_bytes}

    def get_l1_memory_desc(self) -> None:
        """Return ``None``: no arena exists that a process could register."""

    def memory_region_count(self) -> int:
        """Return one."""
        return 1

    def owns_device(self, device_path: str) -> bool:
        """Return false: the pool belongs to the server."""
        return False

    def get_devdax_arena_statuses(self) -> list[Any]:
        """Return an empty list: there are no DAX arenas."""
        return []

    def get_devdax_arena_status(self, device_path: str) -> Any:
        """Raise ``L1ReconfigureError``: there are no DAX arenas.

        Raises:
            L1ReconfigureError: always.
        """
        raise L1ReconfigureError(404, f"{device_path} is not an arena: the pool belongs to the page store")

    def add_devdax_device(self, device_path: str, size_in_bytes: int) -> Any:
        """Raise ``L1ReconfigureError``: only the server can grow the pool.

        Raises:
            L1ReconfigureError: always.
        """
        raise L1ReconfigureError(400, "the pool belongs to the page store: no device can be added here")

    def remove_devdax_device(self, device_path: str, mode: object = None) -> Any:
        """Raise ``L1ReconfigureError``: only the server can shrink the pool.

        Raises:
            L1ReconfigureError: always.
        """
        raise L1ReconfigureError(400, "the pool belongs to the page store: no device can be removed here")

    # --- status, and the end --------------------------------------------------------------------------------------

    def report_status(self) -> dict[str, Any]:
        """Return the manager's health, and counts of failures.

        It is healthy if its last call to the page store succeeded.
        """
        with self._lock:
            used, total = self.get_memory_usage()
            capacities = self.get_capacity_bytes_by_backend()
            staging = len(self._staged) + len(self._allocated)
            return {
                "is_healthy": self._is_healthy,
                "type": type(self).__name__,
                # Published pages belong to this instance; pages that are read may belong to others.
                "total_object_count": max(self._published_count(), len(self._reading)) + staging,
                "write_locked_count": len(self._staged),
                "read_locked_count": len(self._reading),
                "temporary_count": 0,
                "staging_object_count": staging,
                "staging_bytes": self.get_staging_memory_usage(),
                "memory_used_bytes": used,
                "memory_total_bytes": total,
                "memory_configured_bytes": sum(capacities.values()),
                "capacity_bytes_by_backend": {backend.value: size for backend, size in capacities.items()},
                "memory_usage_ratio": used / total if total else 0.0,
                **self.faults.report(),
            }

    def memcheck(self) -> bool:
        """Return true: the server keeps account of pages."""
        return True

    def close(self) -> None:
        """Release everything and end the session. Idempotent.

        Published objects stay for other processes.
        """
        with self._lock:
            self._staged.clear()
            self._allocated.clear()
            self._reading.clear()
        self._l1.close()

    # --- below ----------------------------------------------------------------------------------------------------

    def _reserve(self, names: list[Key]) -> list[_Staged]:
        """Reserve a page for each leading name that there is room for."""
        reservation = self._try("write", len(names), lambda: self._l1.reserve_write(names))
        if reservation is None:
            return []
        if reservation.refused:
            self.faults.count("write", "full", "no page is free: raise pool_size", len(reservation.refused))
        pages = reservation.pages
        return [
            _Staged(reservation, name, self._item(page)) for name, page in zip(reservation.keys, pages, strict=True)
        ]

    def _commit(self, keys: Iterable[ObjectKey], tag: str) -> dict[ObjectKey, L1Error]:
        answers = dict.fromkeys(keys, L1Error.KEY_NOT_EXIST)
        staged = [(key, one) for key in answers if (one := self._staged.pop((key, tag), None)) is not None]
        for reservation, some in _by(staged, lambda pair: pair[1].reservation):
            outcomes = self._try("write", len(some), lambda r=reservation, s=some: self._commit_part(r, s))  # type: ignore[misc]
            for at, (key, _) in enumerate(some):
                there = outcomes is not None and isinstance(outcomes[at], Stored | Duplicate)
                answers[key] = L1Error.SUCCESS if there else L1Error.KEY_IN_WRONG_STATE
        return answers

    def _commit_part(self, reservation: WriteReservation, some: list[tuple[ObjectKey, _Staged]]) -> list[Any]:
        part = self._l1.take(reservation, [one.name for _, one in some])
        outcomes = dict(zip(part.keys, self._l1.commit(part), strict=True))
        return [outcomes[one.name] for _, one in some]

    def _abort(self, staged: list[_Staged]) -> None:
        for reservation, some in _by(staged, lambda one: one.reservation):
            names = [one.name for one in some]
            self._try("write", len(some), lambda r=reservation, n=names: self._l1.abort(self._l1.take(r, n)))  # type: ignore[misc]

    def _hold(self, keys: Sequence[ObjectKey], read_locks: int) -> dict[ObjectKey, Answer]:
        self._taken = []
        for row in rows(keys):
            self._hold_row(keys[row.start : row.stop], read_locks)
        answers = {key: self._held(key) for key in keys}
        # LMCache gives back no lock of an object that is reported as not readable.
        refused = [key for key in self._taken if answers[key][1] is None]
        if refused:
            self._taken = [key for key in self._taken if answers[key][1] is not None]
            self._unlock(refused, read_locks)
        return answers

    def _unlock(self, keys: Iterable[ObjectKey], read_locks: int) -> None:
        over = []
        for key in keys:
            reading = self._reading[key]
            reading.locks -= read_locks
            if reading.locks <= 0:
                over.append(self._reading.pop(key))
        self._release(over)

    def _hold_row(self, row: Sequence[ObjectKey], read_locks: int) -> None:
        """Take read locks on a row's held objects and stored prefix."""
        rest = [key for key in row if key not in self._reading]
        for key in row:
            if key in self._reading:
                self._reading[key].locks += read_locks
                self._taken.append(key)
        if not rest or self._layout is None:
            return
        names = list(map(self._name_of, rest))
        lease = self._try("read", len(rest), lambda: self._l1.reserve_read(names))
        if lease is None or not lease.keys:
            return
        for key, name, view, place in zip(rest, lease.keys, lease.views, lease.places, strict=False):
            self._reading[key] = _Reading(lease, name, self._item(view), place, read_locks)
            self._taken.append(key)

    def _held(self, key: ObjectKey) -> Answer:
        reading = self._reading.get(key)
        if reading is None:
            return L1Error.KEY_NOT_EXIST, None
        try:
            reading.lease.check()
        except LeaseLost as error:  # the server was silent for longer than it holds a pin: the page may be another's
            self.faults.note("read", error)
            return L1Error.KEY_NOT_READABLE, None
        return L1Error.SUCCESS, reading.item

    def _release(self, over: list[_Reading]) -> None:
        for lease, some in _by(over, lambda reading: reading.lease):
            gone = {reading.name for reading in some}
            left = [name for name in lease.keys if name not in gone]
            self._try("read", len(some), lambda k=lease, n=left: self._l1.keep(k, n))  # type: ignore[misc]

    def _item(self, page: memoryview) -> TensorMemoryObj:
        """Return a page as LMCache's memory object."""
        import torch  # LMCache has imported it

        layout = self._layout
        assert layout is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns that the page is read-only
            raw = torch.frombuffer(page, dtype=torch.uint8)  # type: ignore[no-untyped-call, unused-ignore]
        metadata = MemoryObjMetadata(
            shape=layout.shapes[0],
            dtype=layout.dtypes[0],
            address=raw.data_ptr(),
            phy_size=page.nbytes,
            ref_count=1,
            pin_count=0,
            fmt=MemoryFormat.UNDEFINED,
            shapes=list(layout.shapes),
            dtypes=list(layout.dtypes),
        )
        item = TensorMemoryObj(raw, metadata, None)
        item.set_l1_manager(self._id)
        return item

    def _tell(self, what: str, keys: list[ObjectKey]) -> None:
        for listener in self._listeners if keys else ():
            try:
                getattr(listener, what)(keys)
            except Exception as error:
                self.faults.note("notify", error)

    def _try(self, operation: str, n: int, function: Callable[[], T]) -> T | None:
        """Return the function's result, or ``None`` if it raises (rule 4)."""
        try:
            answer = function()
        except Exception as error:
            self.faults.note(operation, error, n)
            self._is_healthy = False
            return None
        self._is_healthy = True
        return answer


_DELETED = {
    Deletion.DELETED: L1Error.SUCCESS,
    Deletion.MISSING: L1Error.KEY_NOT_EXIST,
    Deletion.PINNED: L1Error.KEY_IS_LOCKED,
    Deletion.UNAVAILABLE: L1Error.KEY_IS_LOCKED,
}


def _successful(answers: dict[ObjectKey, L1Error]) -> list[ObjectKey]:
    return [key for key, error in answers.items() if error is L1Error.SUCCESS]


def _by(items: Iterable[T], owner: Callable[[T], Any]) -> list[tuple[Any, list[T]]]:
    """Group items by their owner, in the order of first items."""
    found: dict[Any, list[T]] = {}
    for item in items:
        found.setdefault(owner(item), []).append(item)
    return list(found.items())
