"""A tier that raises in any of its methods ends no request of others, and no daemon."""

import contextlib

import attrs
import pytest
import trio

from backends.abc import ReadLease, Reservation
from backends.base.forwarding import ForwardingTier
from backends.testing import FakeTier
from offload import Engine, OffloadError
from offload.client import open_connection
from offload.daemon import _messages as messages
from offload.daemon._messages import packed
from tests.daemon.test_daemon import KEYS, cache_of, registered, until
from tests.daemon.test_serve import get
from tests.support.daemons import SIZE, daemon, engine_config

ASKED = ("contains", "pin", "load", "delete", "reserve", "reserve_nowait", "statistics", "carry")
OF_ITS_PARTS = ("release", "transfer", "give_back", "end")
"""Of a lease, and of a reservation; the end of a tag."""


class Lease(ReadLease):
    """A lease that raises once it is released."""

    def __init__(self, tier, inner):
        self._tier, self.inner = tier, inner

    @property
    def keys(self):
        return self.inner.keys

    async def release(self):
        await self.inner.__aexit__(None, None, None)
        self._tier.check("release")

    async def __aexit__(self, *exc):
        await self.release()


class IllReservation(Reservation):
    """A reservation that raises once its work is done."""

    def __init__(self, tier, inner):
        self._tier, self.inner = tier, inner

    @property
    def granted(self):
        return self.inner.granted

    def keep(self, keys):
        self.inner.keep(keys)

    async def transfer(self, source, refs):
        self._tier.check("transfer")
        return await self.inner.transfer(source, refs)

    def release(self):
        self.inner.release()
        self._tier.check("give_back")


class Third(ForwardingTier):
    """A third party's tier: asked by awaiting, told of tenants."""

    ill, error = "", None

    @property
    def capabilities(self):
        return attrs.evolve(super().capabilities, needs_tenants=True)

    def check(self, name):
        if name == self.ill:
            raise self.error

    async def contains(self, keys):
        self.check("contains")
        return await super().contains(keys)

    async def load(self, lease, destination):
        self.check("load")
        return await super().load(getattr(lease, "inner", lease), destination)

    async def delete(self, keys):
        self.check("delete")
        return await super().delete(keys)

    def statistics(self):
        self.check("statistics")
        return super().statistics()

    async def pin(self, keys):
        self.check("pin")
        return Lease(self, await super().pin(keys))

    async def reserve(self, request):
        self.check("reserve")
        return IllReservation(self, await super().reserve(request))

    def reserve_nowait(self, request):
        self.check("reserve_nowait")
        return IllReservation(self, super().reserve_nowait(request))

    def carry(self, keys, tenant):
        self.check("carry")
        return lambda: self.check("end")


class Remote(FakeTier):
    capabilities = attrs.evolve(FakeTier.capabilities, answers_at_once=False)

    async def contains(self, keys):
        return super().contains_nowait(keys)


@pytest.mark.parametrize("error", [ConnectionError("gone"), ValueError("wrong"), KeyError("lock id")], ids=repr)
@pytest.mark.parametrize("method", [*ASKED, *OF_ITS_PARTS])
async def test_a_method_that_raises_ends_no_daemon(method, error, path):
    tier = Third(Remote(64, SIZE))
    async with (
        daemon(path, engine=engine_config(tiers={"third": tier}), block_bytes=SIZE, status="ipc") as server,
        open_connection(server.url) as other,
    ):
        async with open_connection(server.url) as connection:
            cache = await registered(connection, cache_of())

            async def ask(make, answer):
                with trio.fail_after(30), contextlib.suppress(OffloadError):
                    return await connection.ask(make, answer)

            def store(keys):
                ids = packed(range(len(keys)))
                return ask(lambda seq: messages.Store(seq, cache, keys, ids), messages.Stored)

            def lookup():
                return ask(lambda seq: messages.Lookup(seq, KEYS, 5.0), messages.Found)

            await store(KEYS)
            holds = [(await lookup()).hold for _ in range(3)]
            tier.ill, tier.error = method, error
            await store([b"more"])
            await ask(lambda seq: messages.Exists(seq, KEYS), messages.Existing)
            await lookup()
            await ask(lambda seq: messages.Load(seq, holds[0], cache, packed(range(8))), messages.Loaded)
            await ask(lambda seq: messages.Release(seq, holds[:2]), messages.Done)
            await ask(lambda seq: messages.Delete(seq, [b"none"], 5.0), messages.Deleted)
            await ask(messages.Stats, messages.Counters)
            await ask(lambda seq: messages.Explain(seq, KEYS), messages.Explained)
            assert (await trio.to_thread.run_sync(get, path, "/status"))[0] == 200
            await server.degradations.look()
            assert isinstance(server.engine, Engine)
        await until(lambda: len(server.sessions) == 1)
        tier.ill = ""
        assert (await other.ask(messages.Status, messages.State)).state == "ready"
        assert tier.statistics().held_blocks == 0
