"""A tier whose copies wait, as on a drive that does not answer."""

import threading

from backends.base.slots import SlotTier


class Gate:
    """Copies that pass it, once it is open; and whether one waits."""

    def __init__(self):
        self.waiting, self.opened = threading.Event(), threading.Event()
        self.opened.set()

    def shut(self):
        self.waiting.clear()
        self.opened.clear()

    def open(self):
        self.opened.set()

    def wait(self):
        self.waiting.set()
        assert self.opened.wait(60)


IN, OUT = Gate(), Gate()


class GatedSlots:
    """Slots that no view shows, so that blocks pass through memory of the tier's."""

    def __init__(self, n, block_bytes):
        self.block_bytes = block_bytes
        self._slots = [bytearray(block_bytes) for _ in range(n)]

    def pages(self, slots):
        return None

    def copy_in(self, slots, pages):
        IN.wait()
        for slot, page in zip(slots, pages, strict=True):
            self._slots[slot][:] = page

    def copy_out(self, slots, pages):
        OUT.wait()
        for slot, page in zip(slots, pages, strict=True):
            page[:] = self._slots[slot]


def gated_tier(*, blocks, block_bytes):
    """For a table: ``{"type": "tests.engines.sglang.tiers:gated_tier", "blocks": 8}``."""
    return SlotTier(blocks, GatedSlots(blocks, block_bytes))
