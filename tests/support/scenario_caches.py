"""Small caches under the adapter contract: one that keeps its promises, and some that do not."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import trio

from offload.testing.scenarios import Outcome, TierSpec


class Ticket:
    def __init__(self) -> None:
        self.result: Outcome | None = None
        self.scope = trio.CancelScope()
        self.over = trio.Event()

    async def wait(self) -> None:
        await self.over.wait()

    def request_cancel(self) -> None:
        self.scope.cancel()

    async def cancel(self) -> None:
        self.request_cancel()
        await self.over.wait()


class Careful:
    """Commits before it copies, and verifies what has arrived."""

    verifies = True
    shields = True

    def __init__(self, world, nursery) -> None:
        self.world, self.nursery = world, nursery
        self.blocks: dict[bytes, bytes] = {}
        self.moving: dict[bytes, trio.Event] = {}
        self.inside = 0

    async def store(self, keys: Sequence[bytes], after: Callable[[], Awaitable[object]] | None, label: str) -> Ticket:
        ticket = Ticket()
        self.nursery.start_soon(self.walk, ticket, keys, after, label)
        return ticket

    async def walk(self, ticket, keys, after, label) -> None:
        self.inside += 1
        outcome = Outcome("CANCELLED")
        try:
            with ticket.scope:
                if after is not None:
                    await after()
                while busy := [self.moving[key] for key in keys if key in self.moving]:
                    await busy[0].wait()
                self.world.hook("commit", label)
                await trio.lowlevel.checkpoint_if_cancelled()
                if self.shields:
                    outcome = Outcome("FAILED", error="Timeout")
                with trio.move_on_after(1, shield=self.shields):
                    outcome = await self.move(keys)
        except Exception as error:
            outcome = Outcome("FAILED", failed=dict.fromkeys(keys, "error"), error=type(error).__name__)
        finally:
            self.inside -= 1
            ticket.result = outcome
            ticket.over.set()
            self.world.hook("settled", label)

    async def move(self, keys: Sequence[bytes]) -> Outcome:
        new = [key for key in keys if key not in self.blocks]
        done = trio.Event()
        self.moving.update(dict.fromkeys(new, done))
        data = [self.world.payload(key) for key in new]
        try:
            arrived = await self.world.copy("host", new, data) if new else []
        finally:
            for key in new:
                del self.moving[key]
            done.set()
        good = {
            key: block
            for key, block, sent in zip(new, arrived, data, strict=False)
            if block == sent or not self.verifies
        }
        self.blocks |= good
        bad = [key for key in new if key not in good]
        kept = tuple([key for key in keys if key not in bad])
        if bad:
            return Outcome("FAILED", completed=kept, failed=dict.fromkeys(bad, "checksum"))
        return Outcome("COMPLETE", completed=kept)

    async def load(self, keys: Sequence[bytes]) -> Mapping[bytes, bytes | None]:
        return {key: self.blocks.get(key) for key in keys}

    def audit(self) -> dict[str, int]:
        return {"inside": self.inside, "moving": len(self.moving)}


class Trusting(Careful):
    """Believes that what it sent is what has arrived."""

    verifies = False


class Hasty(Careful):
    """Breaks a copy off when its container is cancelled."""

    shields = False


class Deaf(Careful):
    """Without a hook, and stores before it may."""

    async def walk(self, ticket, keys, after, label) -> None:
        ticket.result = await self.move(keys)
        ticket.over.set()


class Lending(Careful):
    """Has as many places as its tier, and puts nobody out of them whom a reader holds."""

    minds = True

    def __init__(self, world, nursery) -> None:
        super().__init__(world, nursery)
        self.tier_models = world.scenario.tier.get("host", TierSpec()).capacity
        self.lent: list[bytes] = []

    async def move(self, keys: Sequence[bytes]) -> Outcome:
        outcome = await super().move(keys)
        for key in [key for key in self.blocks if not self.held(key)][: max(0, len(self.blocks) - self.tier_models)]:
            del self.blocks[key]
        return outcome

    def held(self, key: bytes) -> bool:
        return self.minds and key in self.lent

    async def delete(self, tier: str, keys: Sequence[bytes]) -> None:
        for key in keys:
            if not self.held(key):
                self.blocks.pop(key, None)

    @asynccontextmanager
    async def hold(self, tier: str, keys: Sequence[bytes]):
        found = [key for key in keys if key in self.blocks]
        self.lent += found

        async def read() -> Mapping[bytes, bytes]:
            return {key: self.blocks[key] for key in found if key in self.blocks}

        try:
            yield read
        finally:
            for key in found:
                self.lent.remove(key)

    def audit(self) -> dict[str, int]:
        return {**super().audit(), "lent": len(self.lent)}


class Forgetful(Lending):
    """Forgets what it has lent."""

    minds = False


class Dying(Careful):
    """Takes its process with it when it stores two blocks late."""

    async def walk(self, ticket, keys, after, label) -> None:
        if trio.current_time() > 0.0015 and len(keys) == 2:
            os._exit(3)
        await super().walk(ticket, keys, after, label)


class Spinning(Careful):
    """Never comes back from a load."""

    async def load(self, keys: Sequence[bytes]) -> Mapping[bytes, bytes | None]:
        while True:
            pass


def factory(kind):
    @asynccontextmanager
    async def opened(world):
        async with trio.open_nursery() as nursery:
            yield kind(world, nursery)

    return opened


careful, trusting, hasty, deaf = map(factory, (Careful, Trusting, Hasty, Deaf))
lending, forgetful, dying, spinning = map(factory, (Lending, Forgetful, Dying, Spinning))


@asynccontextmanager
async def broken(world):
    raise RuntimeError("no memory for a cache")
    yield
