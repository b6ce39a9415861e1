"""A FIND that a restarted server answers when nobody waits any more: what it has pinned is given back."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from maru import Deleted, MaruHandler, NoAnswer, ServerConfig, Stored, open_server
from maru.testing import Code, Fate, open_lossy_wire
from tests.support.maru_actors import impatient
from tests.support.maru_processes import temporary_pool


@pytest.fixture
def pool():
    with temporary_pool() as path:
        yield path


def config(pool: Path) -> ServerConfig:
    return ServerConfig(host="", rm_address="", pool_path=str(pool), capacity_bytes=8 << 20)


async def serve(pool: Path, over: trio.Event, *, task_status=trio.TASK_STATUS_IGNORED) -> None:
    """A server until that is over: it is left while a client of it goes on."""
    async with open_server(config(pool)) as server:
        task_status.started(server)
        await over.wait()


async def test_what_a_late_find_pinned_at_a_server_nobody_had_heard_of_yet_is_given_back(pool: Path) -> None:
    """The question waits on the wire while the server restarts; the new one knows the session, and pins."""
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            over = trio.Event()
            first = await nursery.start(serve, pool, over)
            async with (
                open_lossy_wire(first.endpoints[-1]) as wire,
                MaruHandler(
                    server_url=wire.endpoint, timeout_ms=30_000, lease=60.0, pool_size=2 << 20, index="off"
                ) as handler,
            ):
                assert await handler.batch_put(["a", "b"], [b"one", b"two"]) == [Stored.NEW, Stored.NEW]
                wire.decide = lambda code, number: Fate.HOLD_REQUEST if code == Code.FIND else Fate.PASS
                async with impatient(handler):
                    with pytest.raises(NoAnswer):
                        await handler.hold_pages(["a", "b"])
                over.set()
                while nursery.child_tasks:  # noqa: ASYNC110  # a nursery has no event for its last task
                    await trio.sleep(0.001)
                last = trio.Event()
                second = await nursery.start(serve, pool, last)
                wire.decide = lambda code, number: Fate.PASS
                assert wire.release() == 1
                while not second.statistics().service.directory.pinned:  # noqa: ASYNC110  # nor a server for a pin
                    await trio.sleep(0.001)
                assert await handler.healthcheck()  # who waits for an answer reads all that have come
                assert handler.statistics().calls.late == 1
                assert await handler.batch_delete(["a", "b"]) == [Deleted.DELETED, Deleted.DELETED]
            last.set()
