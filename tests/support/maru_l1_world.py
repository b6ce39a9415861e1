"""MaruL1 over a server in virtual time, and what must hold in the end: shared by the tests of it."""

from __future__ import annotations

import contextlib

import trio

from backends.abc import Deletion
from backends.maru.l1 import MaruL1
from backends.testing import payload_of
from maru._client.operations import beat
from tests.support.maru_world import PAGE, Joined, PublishedWorld, World

KNOWN, MORE, MANY = ([f"{name}{n}".encode() for n in range(count)] for name, count in (("k", 3), ("m", 3), ("x", 8)))
"""Stored before; not stored yet; as many as there are pages."""
ALL = [*KNOWN, *MORE, *MANY]
SHAPES, DTYPE = [(PAGE // 8,)], "int64"
"""A block fills a page of the world."""


class Site:
    """A MaruL1 of this name over a world. ``.socket`` is its wire, once its layout is registered."""

    def __init__(self, world: World | PublishedWorld, name: str = "a", **config):
        self.world = world
        self.joined: list[Joined] = []
        config = {"pool_size": 8 * PAGE, "eager_map": False, "auto_expand": False, "instance_id": name, **config}

        def make(config):
            joined = Joined(world, name, **{field: getattr(config, field) for field in _FIELDS})
            self.joined.append(joined)
            return joined.handler

        self.l1 = MaruL1(make_handler=make, **config)

    @property
    def socket(self):
        return self.joined[-1].socket

    @property
    def handler(self):
        return self.joined[-1].handler


_FIELDS = (
    "pool_size",
    "chunk_size_bytes",
    "eager_map",
    "auto_expand",
    "instance_id",
    "checksums",
    "timeout_ms",
    "lease",
)


@contextlib.asynccontextmanager
async def open_site(world, name="a", *, known=(), **config):
    """A site whose layout is registered, with these keys stored."""
    site = Site(world, name, **config)
    async with site.l1 as l1:
        await l1.register_kv_layout(SHAPES, DTYPE)
        if known:
            await store(l1, known)
        yield site


def fill(reservation):
    for key, page in zip(reservation.keys, reservation.pages, strict=True):
        page[:] = payload_of(key, PAGE)


async def store(l1, keys):
    async with await l1.reserve_write(keys) as reservation:
        fill(reservation)
        return await reservation.commit()


async def read(l1, keys):
    """The prefix that is there, whose bytes are right."""
    async with await l1.reserve_read(keys) as lease:
        for key, view in zip(lease.keys, lease.views, strict=True):
            assert bytes(view) == payload_of(key, PAGE), key
        lease.check()
        return list(lease.keys)


async def settle(*sites):
    """Let both sides hear of each other."""
    for _ in range(4):
        for site in sites:
            await site.handler._driver.run(beat(site.handler._state))
        await trio.sleep(0.01)


async def at_rest(world, *sites, quarantined=0):
    """Both sides agree, and what is found is right; then all is deleted: every page is free, and nobody is pinned."""
    await settle(*sites)
    for site in sites:
        status = site.l1.report_status()
        assert (status.reservations, status.leases, status.reserved_pages, status.in_doubt_pages) == (0, 0, 0, 0)
        for key in ALL:
            await read(site.l1, [key])
    await settle(*sites)
    for site in sites:  # each its own first: a published server does not tell an owner what others have deleted
        assert Deletion.PINNED not in (await site.l1.clear()).values()
    for site in sites:
        assert Deletion.PINNED not in await site.l1.delete(ALL)
    await settle(*sites)
    for site in sites:
        pages = site.handler.statistics().pages
        assert (pages.free, pages.strays) == (pages.pages - quarantined, 0)
        assert site.l1.report_status().pinned_keys == 0
    if isinstance(world, World):
        assert world.service.directory.statistics().pinned == 0
    else:
        assert not +world.pins
