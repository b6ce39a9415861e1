"""Operations of both handlers, over handles, views and buffers.

Pure, except for the addresses of buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

from .answers import Deleted, Loaded, Stored
from .copying import Buffer, Places, copy, copy_and_sum, sums
from .keys import list_keys
from .operations import ClientState, Operation, Pin, Work, allocate, delete, hold, load, pin, put, store, unpin
from .views import AllocHandle, MemoryInfo

T = TypeVar("T")

GiveBack: TypeAlias = Callable[[Sequence[Pin]], object]
"""Callback that takes pins with one user less."""


# --- storing ------------------------------------------------------------------------------------------------------


def alloc(s: ClientState, size: int) -> Operation[AllocHandle | None]:
    """Allocate a page to fill."""
    handles = yield from batch_alloc(s, 1, size)
    return None if handles is None else handles[0]


def batch_alloc(s: ClientState, n: int, size: int | None) -> Operation[list[AllocHandle] | None]:
    """Allocate pages to fill."""
    page_bytes = s.pages.page_bytes
    size = page_bytes if size is None else size
    if not 0 < size <= page_bytes:
        raise ValueError(f"size = {size}: must be from 1 to chunk_size_bytes, {page_bytes}")
    if n < 0:
        raise ValueError(f"n = {n}: must be at least 0")
    pages = yield from allocate(s, n)
    return None if pages is None else [AllocHandle(s, page, size) for page in pages]


def free(s: ClientState, handles: Iterable[AllocHandle]) -> None:
    """Give back pages that were not stored.

    Once: a handle that was stored or freed is refused.
    """
    handles = list(handles)
    for handle in handles:
        handle._check(s)
    s.free([handle._use() for handle in handles])


def batch_store(s: ClientState, keys: Iterable[str], handles: Iterable[AllocHandle]) -> Operation[list[Stored]]:
    """Register filled pages."""
    keys, handles = list_keys(keys), list(handles)
    if len(keys) != len(handles) or len({id(handle) for handle in handles}) != len(handles):
        raise ValueError(f"{len(keys)} keys but {len(handles)} handles, which must all be different")
    if not keys:
        return []
    s.check_open()
    sizes = [handle.size for handle in handles]
    checksums: list[int] | None = None
    if s.config.checksums:
        checksums = yield Work(partial(_sums, handles), sum(sizes))
    for handle in handles:  # not before: while they were summed, another thread may have stored or freed one
        handle._check(s)
    pages = [handle._use() for handle in handles]
    return (yield from store(s, keys, pages, _one_for_all(sizes), checksums))


def batch_put(s: ClientState, keys: Iterable[str], buffers: Sequence[Buffer]) -> Operation[list[Stored]]:
    """Copy buffers into pages and register them."""
    keys = list_keys(keys)
    with Places(buffers, write=False) as places:
        at, sizes = places.addresses, places.sizes
        _check(keys, sizes, s.pages.page_bytes)
        if not keys:
            return []

        def copying(to: Sequence[int], summed: bool) -> list[int] | None:
            n = len(to)
            if summed:
                return copy_and_sum(to, at[:n], sizes[:n])
            copy(to, at[:n], sizes[:n])
            return None

        return (yield from put(s, keys, _one_for_all(sizes), copying))


# --- reading ------------------------------------------------------------------------------------------------------


def retrieve(s: ClientState, key: str, give_back: GiveBack) -> Operation[MemoryInfo | None]:
    """Pin the page of a key."""
    [found] = yield from batch_retrieve(s, [key], give_back)
    return found


def batch_retrieve(s: ClientState, keys: Iterable[str], give_back: GiveBack) -> Operation[list[MemoryInfo | None]]:
    """Pin the pages of these keys."""
    keys = list_keys(keys)
    pins = yield from hold(s, keys)
    return [None if one is None else MemoryInfo(s, key, one, give_back) for key, one in zip(keys, pins, strict=True)]


def batch_get_into(s: ClientState, keys: Iterable[str], buffers: Sequence[Buffer]) -> Operation[list[Loaded]]:
    """Copy the pages of these keys into buffers."""
    keys = list_keys(keys)
    with Places(buffers, write=True) as places:
        to, sizes = places.addresses, places.sizes
        _check(keys, sizes, None)
        if not keys:
            return []

        def copying(
            positions: Sequence[int], at: Sequence[int], lengths: Sequence[int], summed: bool
        ) -> list[int] | None:
            targets = to if len(positions) == len(to) else [to[position] for position in positions]
            if summed:
                return copy_and_sum(targets, at, lengths)
            copy(targets, at, lengths)
            return None

        return (yield from load(s, keys, sizes, copying))


# --- one key ------------------------------------------------------------------------------------------------------


def first(operation: Operation[list[T]]) -> Operation[T]:
    """Return the only answer of an operation."""
    [answer] = yield from operation
    return answer


def store_one(s: ClientState, key: str, handle: AllocHandle) -> Operation[Stored]:
    """Register a filled page."""
    return first(batch_store(s, [key], [handle]))


def pin_one(s: ClientState, key: str) -> Operation[bool]:
    """Pin a key, if it is there."""
    return first(pin(s, [key]))


def unpin_one(s: ClientState, key: str) -> Operation[bool]:
    """Undo a pin."""
    return first(unpin(s, [key]))


def delete_one(s: ClientState, key: str) -> Operation[Deleted]:
    """Delete a key."""
    return first(delete(s, [key]))


# --- helpers ------------------------------------------------------------------------------------------------------


def _one_for_all(sizes: list[int]) -> int | list[int]:
    return sizes[0] if sizes.count(sizes[0]) == len(sizes) else sizes


def _check(keys: Sequence[str], sizes: Sequence[int], most: int | None) -> None:
    if len(keys) != len(sizes):
        raise ValueError(f"{len(keys)} keys but {len(sizes)} buffers")
    if most is not None and sizes and not 0 < min(sizes) <= max(sizes) <= most:
        raise ValueError(f"buffers of {min(sizes)} to {max(sizes)} bytes: must be from 1 to chunk_size_bytes, {most}")


def _sums(handles: Sequence[AllocHandle]) -> list[int]:
    return sums([handle.address for handle in handles], [handle.size for handle in handles])
