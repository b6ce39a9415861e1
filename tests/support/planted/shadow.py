"""Blocks that are loaded, verified, and wrong: no checksum differs. The shadow check finds each."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from backends.abc import Destination
from backends.base.pages import Pages, checksums
from backends.base.slots import SlotTier
from backends.device import _HostTensors
from offload.engines.lmcache._memory import ObjectPlaces
from offload.engines.sglang._pages import LentPages


def keys_are_loaded_as_values(patch: Any) -> None:
    """A layout is read otherwise than it was written: of each layer, shape (2, blocks, tokens, heads, head_dim)."""
    _behind_each_load(patch, lambda block: block.flip(0))


def heads_are_loaded_in_another_order(patch: Any) -> None:
    """The same with the order of heads."""
    _behind_each_load(patch, lambda block: block.roll(1, 2))


def hicache_keys_are_loaded_as_values(patch: Any) -> None:
    """In SGLang's pages: of each layer a run of keys, and one of values behind it."""
    _behind_each_page_of_sglang(
        patch, lambda runs: [run for at in range(0, len(runs), 2) for run in (runs[at + 1], runs[at])]
    )


def hicache_heads_are_loaded_in_another_order(patch: Any) -> None:
    """In SGLang's pages of two heads, of 8 numbers in bfloat16 each."""

    def otherwise(runs: list[bytes]) -> list[bytes]:
        heads = [[run[at : at + 16] for at in range(0, len(run), 16)] for run in runs]
        return [b"".join(pair for at in range(0, len(run), 2) for pair in (run[at + 1], run[at])) for run in heads]

    _behind_each_page_of_sglang(patch, otherwise)


def _behind_each_page_of_sglang(patch: Any, change: Callable[[list[bytes]], list[bytes]]) -> None:
    write = LentPages.write

    def otherwise(self: LentPages, at: int, address: int) -> None:
        write(self, at, address)
        runs = self._runs[at]
        changed = change([ctypes.string_at(run, size) for run, _, size in runs])
        for (run, _, size), data in zip(runs, changed, strict=True):
            ctypes.memmove(run, data, size)

    patch.setattr(LentPages, "write", otherwise)


def lmcache_keys_are_loaded_as_values(patch: Any) -> None:
    """In LMCache's objects: the second half is values."""
    _behind_each_object_of_lmcache(patch, lambda data: data[len(data) // 2 :] + data[: len(data) // 2])


def lmcache_heads_are_loaded_in_another_order(patch: Any) -> None:
    """In LMCache's objects of four heads, of 4 numbers in bfloat16 each."""

    def otherwise(data: bytes) -> bytes:
        rows = (data[at : at + 32] for at in range(0, len(data), 32))
        return b"".join(row[8:] + row[:8] for row in rows)

    _behind_each_object_of_lmcache(patch, otherwise)


def _behind_each_object_of_lmcache(patch: Any, change: Callable[[bytes], bytes]) -> None:
    def otherwise(self: ObjectPlaces, start: int, pages: Pages) -> None:
        for span, address in zip(self._spans[start:], pages.addresses, strict=False):
            ctypes.memmove(span.address, change(ctypes.string_at(address, span.size)), span.size)

    patch.setattr(ObjectPlaces, "views", lambda self: None)
    patch.setattr(ObjectPlaces, "copy_in", otherwise)


def a_stale_page_is_served(patch: Any) -> None:
    """A store writes nothing, and what lay in its page until then is found under the new key, with a checksum of its own."""

    async def write(self: SlotTier, source: Any, refs: Any, keys: Any, slots: list[int]) -> Mapping[int, Exception]:
        pages = self._storage.pages(slots)
        assert pages is not None
        self.note_checksums(slots, checksums(pages))
        return {}

    patch.setattr(SlotTier, "write", write)


def another_requests_page_is_served(patch: Any) -> None:
    """What is read is a page of other keys, and it is compared with its own checksum."""
    load = SlotTier._load

    async def crossed(self: SlotTier, lease: Any, destination: Destination, there: Pages | None) -> Any:
        own = lease.refs
        others = [slot for slot in self.pool.slots(self.pool.list_keys()) if slot not in own][: len(own)]
        lease.refs = others + own[len(others) :]
        try:
            return await load(self, lease, destination, there)
        finally:
            lease.refs = own

    patch.setattr(SlotTier, "_load", crossed)


def _behind_each_load(patch: Any, change: Any) -> None:
    copy_in = _HostTensors.copy_in

    def otherwise(self: _HostTensors, slots: Sequence[int], pages: Pages) -> None:
        copy_in(self, slots, pages)
        for layer in (tensor.owner for tensor in self._owner):
            for slot in slots:
                layer[:, slot] = change(layer[:, slot]).clone()

    patch.setattr(_HostTensors, "copy_in", otherwise)
