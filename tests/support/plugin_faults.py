"""Plugins that do what they are told, right or wrong, and when: in the calling thread, so that virtual time is enough.

An operation waits until the test answers it. How an answer is told, the test says, too.
"""

import contextlib
import ctypes
import os


class PlayedConnector:
    """Six methods. ``answer`` completes the oldest operation that is waiting; ``automatic`` does so at once."""

    def __init__(self, *, deletes=False):
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.blocks = {}
        self.waiting = []  # (id, kind, keys, views)
        self.done = []
        self.automatic = True
        self.signals = True
        self.resets = True
        self.submit_error = self.drain_error = self.close_error = None
        self.on_drain = lambda: None
        self.close_waits = None
        self.closed = 0
        self.ids = 0
        self.next_id = None
        if deletes:
            self.submit_batch_delete = lambda keys: self._submit("delete", keys)

    def event_fd(self):
        return self.fd

    def submit_batch_get(self, keys, memoryviews):
        return self._submit("get", keys, memoryviews)

    def submit_batch_set(self, keys, memoryviews):
        return self._submit("set", keys, memoryviews)

    def submit_batch_exists(self, keys):
        return self._submit("exists", keys)

    def drain_completions(self):
        self.on_drain()
        if self.resets:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.fd)
        if self.drain_error is not None:
            raise self.drain_error
        done, self.done = self.done, []
        return done

    def close(self):
        if self.close_waits is not None:
            self.close_waits.wait()
        self.closed += 1
        os.close(self.fd)
        if self.close_error is not None:
            raise self.close_error

    def put(self, view, data):
        """Write a block that was read; a test may put a worse one in its place."""
        view[:] = data

    # --- what the test says -------------------------------------------------------------------------------------------

    def kinds(self):
        return [kind for _, kind, _, _ in self.waiting]

    def answer(self, **said):
        """Complete the oldest one that waits: rightly, but for what is said (``id``, ``ok``, ``error``, ``bits``)."""
        number, kind, keys, views = self.waiting.pop(0)
        self.tell(**{**self._do(number, kind, keys, views), **said})

    def tell(self, id, ok=True, error="", bits=None, signal=None):  # as it is called
        self.done.append((id, ok, error, bits))
        if self.signals if signal is None else signal:
            self.signal()

    def signal(self):
        os.eventfd_write(self.fd, 1)

    def _submit(self, kind, keys, views=()):
        if self.submit_error is not None:
            raise self.submit_error
        self.ids += 1
        number = self.ids if self.next_id is None else self.next_id
        self.waiting.append((number, kind, keys, views))
        if self.automatic:
            self.answer()
        return number

    def _do(self, number, kind, keys, views):
        there = [key in self.blocks for key in keys]
        if kind == "exists":
            return {"id": number, "bits": there}
        if kind == "delete":
            for key in keys:
                self.blocks.pop(key, None)
            return {"id": number, "bits": there}
        for key, view, is_there in zip(keys, views, there, strict=True):
            if kind == "set":
                self.blocks[key] = bytes(view)
            elif is_there:
                self.put(view, self.blocks[key])
        return {"id": number, "bits": there if kind == "get" else None}


class Bits:
    """A bitmap of a length that the test says."""

    def __init__(self, bits):
        self._bits = bits

    def test(self, at):
        return self._bits[at]

    def size(self):
        return len(self._bits)


class PlayedAdapter:
    """LMCache's L2 interface over a dictionary. ``answer`` completes the oldest task, ``automatic`` does so at once."""

    def __init__(self):
        self.fds = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(3)]
        self.blocks = {}
        self.locks = {}
        self.waiting = []
        self.results = [{}, {}, {}]
        self.automatic = True
        self.signals = True
        self.unlock_error = self.query_error = self.delete_error = None
        self.deleted = []
        self.closed = 0
        self.ids = 0

    def get_store_event_fd(self):
        return self.fds[0]

    def get_lookup_and_lock_event_fd(self):
        return self.fds[1]

    def get_load_event_fd(self):
        return self.fds[2]

    def submit_store_task(self, keys, objects):
        return self._submit(0, keys, objects)

    def pop_completed_store_tasks(self):
        if self.query_error is not None:
            raise self.query_error
        done, self.results[0] = self.results[0], {}
        return done

    def submit_lookup_and_lock_task(self, keys):
        return self._submit(1, keys, ())

    def query_lookup_and_lock_result(self, task_id):
        return self._query(1, task_id)

    def submit_unlock(self, keys):
        if self.unlock_error is not None:
            raise self.unlock_error
        for key in keys:
            self.locks[key.chunk_hash] -= 1
            if not self.locks[key.chunk_hash]:
                del self.locks[key.chunk_hash]

    def submit_load_task(self, keys, objects):
        return self._submit(2, keys, objects)

    def query_load_result(self, task_id):
        return self._query(2, task_id)

    def delete(self, keys):
        if self.delete_error is not None:
            raise self.delete_error
        for key in keys:
            if key.chunk_hash not in self.locks:
                self.blocks.pop(key.chunk_hash, None)
                self.deleted.append(key.chunk_hash)

    def close(self):
        self.closed += 1
        for fd in set(self.fds):
            os.close(fd)

    # --- what the test says -------------------------------------------------------------------------------------------

    def answer(self, result=None, *, signal=None):
        """Complete the oldest task that waits: rightly, or with this result."""
        channel, number, keys, objects = self.waiting.pop(0)
        right = self._do(channel, keys, objects)
        self.results[channel][number] = right if result is None else result
        if self.signals if signal is None else signal:
            os.eventfd_write(self.fds[channel], 1)

    def _query(self, channel, task_id):
        if self.query_error is not None:
            raise self.query_error
        return self.results[channel].pop(task_id, None)

    def _submit(self, channel, keys, objects):
        self.ids += 1
        self.waiting.append((channel, self.ids, keys, objects))
        if self.automatic:
            self.answer()
        return self.ids

    def _do(self, channel, keys, objects):
        names = [key.chunk_hash for key in keys]
        there = [name in self.blocks for name in names]
        if channel == 1:
            for name, is_there in zip(names, there, strict=True):
                if is_there:
                    self.locks[name] = self.locks.get(name, 0) + 1
            return Bits(there)
        for name, memory, is_there in zip(names, objects, there, strict=True):
            if channel == 0:
                self.blocks[name] = bytes(memory.byte_array)
            elif is_there:
                # By address: the buffer of LMCache's own objects, where it is loaded, cannot be assigned to.
                ctypes.memmove(memory.data_ptr, self.blocks[name], len(self.blocks[name]))
        return True if channel == 0 else Bits(there)
