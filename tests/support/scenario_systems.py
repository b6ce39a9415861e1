"""A cache of its own kind behind the contract of scenarios, as an example; and the same with one thing wrong each.

It knows nothing of this package but the contract: a task for each container, one tier, one dictionary.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from contextlib import asynccontextmanager

import attrs
import trio

from offload.testing.scenarios import Outcome, Refused


@attrs.define(eq=False)
class Ticket:
    """A container that the cache has taken in."""

    label: str
    result: Outcome | None = None
    over: trio.Event = attrs.Factory(trio.Event)
    scope: trio.CancelScope = attrs.Factory(trio.CancelScope)
    committed: bool = False
    cancelled: bool = False

    async def wait(self):
        await self.over.wait()

    async def cancel(self):
        self.request_cancel()
        await self.over.wait()

    def request_cancel(self):
        self.cancelled = True
        if not self.committed:
            self.scope.cancel()


class Cache:
    """Blocks by key, each with a digest; the one that was not used for longest makes room."""

    tier = "host"
    ticket = Ticket

    def __init__(self, world, nursery):
        self.world = world
        self.nursery = nursery
        self.blocks: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()
        self.inside: dict[Ticket, None] = {}
        self.pending: set[bytes] = set()
        self.closed = False

    async def store(self, keys, after, label):
        await trio.lowlevel.checkpoint()
        if self.closed:
            raise Refused("closed")
        ticket = self.ticket(label)
        self.inside[ticket] = None
        self.nursery.start_soon(self.walk, ticket, tuple(keys), after)
        return ticket

    async def walk(self, ticket, keys, after):
        result = Outcome("CANCELLED")
        mine: list[bytes] = []
        try:
            with ticket.scope:
                if after is not None:
                    await after()
                filtered = dict(await self.world.policy(keys))
                mine += [key for key in keys if key not in filtered and key not in self.pending]
                self.pending.update(mine)
                filtered |= dict.fromkeys([key for key in keys if key not in filtered and key not in mine], "pending")
                room = await self.reserve(mine)
                self.world.hook("before_commit", ticket.label)
                if not ticket.cancelled:
                    ticket.committed = True
                    self.world.hook("committed", ticket.label)
                    result = await self.copied(mine, filtered) if room else self.failed(mine, filtered, "full")
        except Exception as error:
            result = self.failed(mine, {}, type(error).__name__, type(error).__name__)
        finally:
            self.settle(ticket, result, mine)

    async def reserve(self, keys):
        return not keys or await self.world.reserve(self.tier, keys)

    async def copied(self, keys, filtered):
        missing = [key for key in keys if key not in self.blocks]
        data = [self.world.payload(key, self.tier) for key in missing]
        with trio.CancelScope(shield=True):
            arrived = await self.world.copy(self.tier, missing, data) if missing else []
        for key, sent, block in zip(missing, data, arrived, strict=False):
            self.blocks[key] = (block, hashlib.sha256(sent).digest())
        while len(self.blocks) > self.world.scenario.tier[self.tier].capacity:
            self.blocks.popitem(last=False)
        return Outcome("COMPLETE", completed=tuple(keys), filtered=filtered)

    def failed(self, keys, filtered, why, error=""):
        return Outcome("FAILED", failed=dict.fromkeys(keys, why), filtered=filtered, error=error)

    def settle(self, ticket, result, mine):
        self.pending.difference_update(mine)
        self.inside.pop(ticket, None)
        ticket.result = result
        self.world.hook("settled", ticket.label)
        ticket.over.set()

    async def load(self, keys):
        await trio.lowlevel.checkpoint()
        return {key: self.get(key) for key in keys}

    def get(self, key):
        if key not in self.blocks:
            return None
        block, digest = self.blocks[key]
        if hashlib.sha256(block).digest() != digest:
            del self.blocks[key]
            return None
        self.blocks.move_to_end(key)
        return block

    def audit(self):
        return {"containers": len(self.inside), "pending": len(self.pending)}

    def close_now(self):
        self.closed = True
        for ticket in list(self.inside):
            ticket.request_cancel()

    def found(self, tier):
        return self.blocks.keys() if tier == self.tier else ()

    async def delete(self, tier, keys):
        await trio.lowlevel.checkpoint()
        for key in keys if tier == self.tier else ():
            self.blocks.pop(key, None)

    async def drain(self, pipeline):
        for ticket in list(self.inside):
            await ticket.over.wait()

    def statistics(self, pipeline):
        return {"blocks": len(self.blocks), "inside": len(self.inside)}


def factory(kind=Cache):
    """What opens a cache of this kind."""

    @asynccontextmanager
    async def open_cache(world):
        async with trio.open_nursery() as nursery:
            cache = kind(world, nursery)
            for key in (
                world.scenario.tier[cache.tier].holds.split(", ") if world.scenario.tier[cache.tier].holds else []
            ):
                data = world.payload(key.encode(), cache.tier)
                cache.blocks[key.encode()] = (data, hashlib.sha256(data).digest())
            yield cache
            cache.close_now()

    return open_cache


open_cache = factory()


# --- the same with one thing wrong --------------------------------------------------------------------------------


class PublishesTooEarly(Cache):
    """A block can be found before its bytes are there."""

    async def copied(self, keys, filtered):
        new = [key for key in keys if key not in self.blocks]
        empty = bytes(len(self.world.payload(b"", self.tier)))
        self.nursery.start_soon(self.publish, dict.fromkeys(new, (empty, hashlib.sha256(empty).digest())))
        return await super().copied(keys, filtered)

    async def publish(self, blocks):
        self.blocks.update(blocks)


class TakesAnyBytes(Cache):
    """It keeps no digest."""

    def get(self, key):
        return self.blocks[key][0] if key in self.blocks else None


class CancelsAfterTheCommit(Cache):
    """A cancel during the copy is honoured, and the block is there all the same."""

    def settle(self, ticket, result, mine):
        super().settle(ticket, Outcome("CANCELLED") if ticket.cancelled else result, mine)


class _Hasty(Ticket):
    async def cancel(self):
        self.request_cancel()
        await trio.lowlevel.checkpoint()


class ConfirmsTooEarly(Cache):
    """A cancel is confirmed when it was asked for."""

    ticket = _Hasty


class KeepsThePending(Cache):
    """What a container that ended badly had marked stays marked."""

    def settle(self, ticket, result, mine):
        super().settle(ticket, result, mine if result.status == "COMPLETE" else [])


class CopiesTwice(Cache):
    """Two containers with one key copy it at the same time."""

    async def reserve(self, keys):
        self.pending.difference_update(keys)
        return await super().reserve(keys)


class LosesAWakeUp(Cache):
    """Who is cancelled after its commit is not told that it is over."""

    def settle(self, ticket, result, mine):
        if ticket.cancelled and ticket.committed:
            self.pending.difference_update(mine)
            self.inside.pop(ticket, None)
            ticket.result = result
        else:
            super().settle(ticket, result, mine)


class ChangesItsMind(Cache):
    """A result that was shown changes."""

    def settle(self, ticket, result, mine):
        super().settle(ticket, result, mine)
        if result.status == "CANCELLED":
            self.nursery.start_soon(self.later, ticket)

    async def later(self, ticket):
        await trio.sleep(0.25)
        ticket.result = Outcome("FAILED")


class NeverRests(Cache):
    """It looks whether there is something to do, all the time."""

    async def walk(self, ticket, keys, after):
        while not ticket.cancelled:
            await trio.lowlevel.checkpoint()
        await super().walk(ticket, keys, after)


class SaysItIsThere(Cache):
    """What failed to be copied is called complete."""

    def failed(self, keys, filtered, why, error=""):
        return Outcome("COMPLETE", completed=tuple(keys), filtered=filtered)


class ForgetsToDelete(Cache):
    """What is deleted can be found afterwards."""

    async def delete(self, tier, keys):
        await trio.lowlevel.checkpoint()


class Breaks(Cache):
    """It raises where the contract knows no exception."""

    async def load(self, keys):
        raise RuntimeError("no such shelf")


BROKEN = {
    PublishesTooEarly: "bytes",
    TakesAnyBytes: "bytes",
    CancelsAfterTheCommit: "I4",
    ConfirmsTooEarly: "I3",
    KeepsThePending: "I1",
    CopiesTwice: "I7",
    LosesAWakeUp: "hang",
    ChangesItsMind: "I2",
    NeverRests: "livelock",
    SaysItIsThere: "model",
    ForgetsToDelete: "model",
    Breaks: "crash",
}
"""Each kind of wrong, and the rule that finds it."""
