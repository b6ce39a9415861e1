"""LMCache's own keys and memory objects, and an adapter driven as its controllers drive it."""

import select

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

PATIENCE = 60.0
PAGE = 64 << 10


def keys_of(n, start=0, **fields):
    said = {"model_name": "org/model", "kv_rank": ObjectKey.ComputeKVRank(1, 0, 1, 0), **fields}
    return [ObjectKey((start + at).to_bytes(8, "big"), **said) for at in range(n)]


def memory_object(size=PAGE, used=None, fill=True):
    """An object of so many bytes, of which some may be padding."""
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8) if fill else torch.zeros(size, dtype=torch.uint8)
    shape = torch.Size([used or size])
    metadata = MemoryObjMetadata(
        shape=shape,
        dtype=torch.uint8,
        address=raw.data_ptr(),
        phy_size=size,
        ref_count=1,
        pin_count=0,
        fmt=MemoryFormat.KV_2LTD,
        shapes=[shape],
        dtypes=[torch.uint8],
    )
    return TensorMemoryObj(raw, metadata, None)


def bytes_of(item):
    return bytes(item.byte_array)


def layout(size=PAGE):
    return MemoryLayoutDesc([torch.Size([size])], [torch.uint8])


def wait_readable(fd, patience=PATIENCE):
    """Wait for a signal and reset it, as LMCache's controllers do."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    assert poller.poll(patience * 1000), "no signal"
    consume_fd(fd)


class Driver:
    """Calls an adapter as the controllers do: submit, wait for the signal, ask once."""

    def __init__(self, adapter):
        self.adapter = adapter

    def store(self, keys, objects):
        task = self.adapter.submit_store_task(keys, objects)
        wait_readable(self.adapter.get_store_event_fd())
        return self.adapter.pop_completed_store_tasks()[task]

    def lookup(self, keys, layouts=None):
        task = self.adapter.submit_lookup_and_lock_task(keys, {0: layout()} if layouts is None else layouts)
        wait_readable(self.adapter.get_lookup_and_lock_event_fd())
        return truths(self.adapter.query_lookup_and_lock_result(task), len(keys))

    def load(self, keys, objects):
        task = self.adapter.submit_load_task(keys, objects)
        wait_readable(self.adapter.get_load_event_fd())
        return truths(self.adapter.query_load_result(task), len(keys))


def truths(bitmap, n):
    assert bitmap is not None
    assert len(bitmap) == n
    return [bitmap.test(at) for at in range(n)]
