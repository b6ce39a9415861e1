"""Plugins for the tests, as somebody outside the tree would write them: connectors, and adapters of three descriptors.

Each keeps real bytes, in files or in memory, and does its work in a thread of its own.
"""

import asyncio
import contextlib
import ctypes
import functools
import os
import queue
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

HERE = Path(__file__).parent
GET, SET, EXISTS, DELETE = range(4)


# --- a connector in C ---------------------------------------------------------------------------------------------


@functools.cache
def native_library():
    """The connector in C, compiled once for each process; ``None`` without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    folder = Path(tempfile.mkdtemp(prefix="offload-connector-"))
    try:
        target = folder / "connector.so"
        source = str(HERE / "native_connector.c")
        subprocess.run([compiler, "-O1", "-Wall", "-shared", "-fPIC", "-pthread", "-o", target, source], check=True)
        library = ctypes.CDLL(str(target))
    finally:
        shutil.rmtree(folder)
    library.nc_open.restype = ctypes.c_void_p
    library.nc_open.argtypes = [ctypes.c_char_p]
    library.nc_event_fd.argtypes = library.nc_close.argtypes = [ctypes.c_void_p]
    library.nc_submit.restype = ctypes.c_int64
    library.nc_submit.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_char_p),
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_size_t,
    ]
    library.nc_drain.argtypes = [ctypes.c_void_p, ctypes.c_int, *[ctypes.c_void_p] * 5, ctypes.c_int]
    return library


class CConnector:
    """The connector in C, over files in ``directory``. Six methods."""

    def __init__(self, directory):
        self.directory = Path(directory)
        self._library = native_library()
        self._connector = self._library.nc_open(os.fsencode(self.directory))

    def event_fd(self):
        return self._library.nc_event_fd(self._connector)

    def submit_batch_get(self, keys, memoryviews):
        return self._submit(GET, keys, memoryviews)

    def submit_batch_set(self, keys, memoryviews):
        return self._submit(SET, keys, memoryviews)

    def submit_batch_exists(self, keys):
        return self._submit(EXISTS, keys, [])

    def drain_completions(self):
        done = []
        number, kind, ok, n = ctypes.c_int64(), ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        bits = (ctypes.c_ubyte * 4096)()
        out = [ctypes.addressof(value) for value in (number, kind, ok, n)]
        while self._library.nc_drain(self._connector, not done, *out, ctypes.addressof(bits), len(bits)):
            told = None if kind.value == SET else [bool(bit) for bit in bits[: n.value]]
            done.append((number.value, bool(ok.value), "" if ok.value else "not all were written", told))
        return done

    def close(self):
        self._library.nc_close(self._connector)

    def _submit(self, kind, keys, buffers):
        n = len(keys)
        addresses = [ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in buffers]
        return self._library.nc_submit(
            self._connector,
            kind,
            n,
            (ctypes.c_char_p * n)(*map(str.encode, keys)),
            (ctypes.c_void_p * n)(*addresses) if buffers else None,
            buffers[0].nbytes if buffers else 0,
        )

    def damage(self, name):
        path = self.directory / name
        path.write_bytes(b"\xff" + path.read_bytes()[1:])

    def spoil(self, name):
        (self.directory / f"{name}.new").mkdir()  # which nobody can write to

    def take_away(self, name):
        (self.directory / name).unlink()


class DeletingCConnector(CConnector):
    """The same with the seventh method."""

    def submit_batch_delete(self, keys):
        return self._submit(DELETE, keys, [])


# --- a connector in Python ----------------------------------------------------------------------------------------


class ThreadConnector:
    """Six methods over a dictionary, with a thread that does the work."""

    def __init__(self, **params):
        self.params = params
        self.blocks = {}
        self.failing = set()
        self.closed = False
        self._ids = 0
        self._jobs = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._done = []
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def event_fd(self):
        return self._fd

    def submit_batch_get(self, keys, memoryviews):
        return self._submit(self._get, keys, memoryviews)

    def submit_batch_set(self, keys, memoryviews):
        return self._submit(self._set, keys, memoryviews)

    def submit_batch_exists(self, keys):
        return self._submit(self._exists, keys)

    def drain_completions(self):
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        with self._lock:
            done, self._done = self._done, []
        return done

    def close(self):
        self._jobs.put(None)
        self._thread.join()
        os.close(self._fd)
        self.closed = True

    def damage(self, name):
        self.blocks[name] = b"\xff" + self.blocks[name][1:]

    def spoil(self, name):
        self.failing.add(name)

    def take_away(self, name):
        del self.blocks[name]

    def _submit(self, fn, *args):
        self._ids += 1
        self._jobs.put((self._ids, fn, args))
        return self._ids

    def _work(self):
        while (job := self._jobs.get()) is not None:
            number, fn, args = job
            try:
                done = (number, True, "", fn(*args))
            except OSError as exc:
                done = (number, False, str(exc), None)
            with self._lock:
                self._done.append(done)
            os.eventfd_write(self._fd, 1)

    def _get(self, keys, memoryviews):
        bits = [key in self.blocks for key in keys]
        for key, view, bit in zip(keys, memoryviews, bits, strict=True):
            if bit:
                view[:] = self.blocks[key]
        return bits

    def _set(self, keys, memoryviews):
        if self.failing.intersection(keys):
            raise OSError("as told")
        self.blocks.update((key, bytes(view)) for key, view in zip(keys, memoryviews, strict=True))

    def _exists(self, keys):
        return [key in self.blocks for key in keys]


class DeletingConnector(ThreadConnector):
    """The same with the seventh method."""

    def submit_batch_delete(self, keys):
        return self._submit(lambda keys: [self.blocks.pop(key, None) is not None for key in keys], keys)


# --- an adapter with three descriptors ----------------------------------------------------------------------------


class Bitmap:
    """As adapters of LMCache answer."""

    def __init__(self, n):
        self._bits = [False] * n

    def set(self, at):
        self._bits[at] = True

    def test(self, at):
        return self._bits[at]

    def __len__(self):
        return len(self._bits)


class StoreResult:
    def __init__(self, ok):
        self._ok = ok

    def is_successful(self):
        return self._ok


class LoopAdapterConfig:
    def __init__(self, directory):
        self.directory = directory

    @classmethod
    def from_dict(cls, params):
        return cls(params["directory"])


class LoopAdapter:
    """LMCache's L2 interface over files, with an asyncio loop in a thread of its own, and locks that keep blocks."""

    def __init__(self, config, **kwargs):
        self.config = config
        self.kwargs = kwargs
        self.directory = Path(config.directory if hasattr(config, "directory") else config["directory"])
        self.locks = {}
        self.failing = set()
        self.stored = set()
        self.closed = False
        self._listeners = []
        self._ids = 0
        self._lock = threading.Lock()
        self._stores, self._lookups, self._loads = {}, {}, {}
        self._fds = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(3)]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def get_store_event_fd(self):
        return self._fds[0]

    def get_lookup_and_lock_event_fd(self):
        return self._fds[1]

    def get_load_event_fd(self):
        return self._fds[2]

    def submit_store_task(self, keys, objects):
        return self._submit(self._store, 0, self._stores, keys, objects)

    def pop_completed_store_tasks(self):
        with self._lock:
            done = dict(self._stores)
            self._stores.clear()
        return done

    def submit_lookup_and_lock_task(self, keys, group_layout_descs):
        assert list(group_layout_descs) == [0]
        return self._submit(self._look_up, 1, self._lookups, keys)

    def query_lookup_and_lock_result(self, task_id):
        with self._lock:
            return self._lookups.pop(task_id, None)

    def submit_unlock(self, keys):
        self._loop.call_soon_threadsafe(self._unlock, keys)

    def submit_load_task(self, keys, objects):
        return self._submit(self._load, 2, self._loads, keys, objects)

    def query_load_result(self, task_id):
        with self._lock:
            return self._loads.pop(task_id, None)

    def register_listener(self, listener):
        self._listeners.append(listener)

    def delete(self, keys):
        asyncio.run_coroutine_threadsafe(self._delete(keys), self._loop).result()

    def close(self):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for fd in self._fds:
            os.close(fd)
        self.closed = True

    def damage(self, name):
        path = self.directory / name
        path.write_bytes(b"\xff" + path.read_bytes()[1:])

    def spoil(self, name):
        self.failing.add(bytes.fromhex(name))

    def take_away(self, name):
        """As an adapter may by itself, and tells: not what is locked."""
        names = [key for key in self.stored if key.chunk_hash.hex() == name]
        asyncio.run_coroutine_threadsafe(self._delete(names), self._loop).result()

    def _path(self, key):
        return self.directory / key.chunk_hash.hex()

    def _submit(self, fn, channel, results, *args):
        with self._lock:
            self._ids += 1
            number = self._ids
        asyncio.run_coroutine_threadsafe(self._run(fn, channel, results, number, args), self._loop)
        return number

    async def _run(self, fn, channel, results, number, args):
        result = await fn(*args)
        with self._lock:
            results[number] = result  # first the result, then the signal
        os.eventfd_write(self._fds[channel], 1)

    async def _store(self, keys, objects):
        for key, memory in zip(keys, objects, strict=True):
            if key.chunk_hash in self.failing:
                return StoreResult(False)
            path = self._path(key)
            path.with_suffix(".new").write_bytes(memory.byte_array)
            path.with_suffix(".new").rename(path)
            self.stored.add(key)
        for listener in self._listeners:
            listener.on_l2_keys_stored(keys, [memory.get_size() for memory in objects])
        return StoreResult(True)

    async def _look_up(self, keys):
        bitmap = Bitmap(len(keys))
        for at, key in enumerate(keys):
            if self._path(key).exists():
                bitmap.set(at)
                self.locks[key] = self.locks.get(key, 0) + 1
        return bitmap

    def _unlock(self, keys):
        for key in keys:
            self.locks[key] -= 1
            if not self.locks[key]:
                del self.locks[key]

    async def _load(self, keys, objects):
        bitmap = Bitmap(len(keys))
        for at, (key, memory) in enumerate(zip(keys, objects, strict=True)):
            if self._path(key).exists():
                memory.byte_array[:] = self._path(key).read_bytes()
                bitmap.set(at)
        return bitmap

    async def _delete(self, keys):
        gone = [key for key in keys if key not in self.locks and self._path(key).exists()]
        for key in gone:
            self._path(key).unlink()
        for listener in self._listeners:
            listener.on_l2_keys_deleted(gone)
