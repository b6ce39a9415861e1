"""A store whose page has come back, and was taken anew by somebody else, before its wait for an answer ended."""

import pytest
import trio

from maru import NoAnswer
from maru._client.answers import Deleted
from maru._wire import Code
from tests.support.maru_world import PAGE, Joined, World


@pytest.mark.parametrize("how", ["timeout", "cancelled"])
async def test_a_store_that_ends_without_an_answer_frees_nothing_that_is_somebody_elses_by_then(how, autojump_clock):
    world = World()
    first, second = Joined(world, "a", pool_size=PAGE, auto_expand=False, timeout_ms=500), Joined(world, "b")
    async with first as handler, second as other:
        [handle] = await handler.batch_alloc(1)
        handle.buf[:] = b"a" * PAGE
        scope = trio.CancelScope()

        async def store():
            with scope, pytest.raises(NoAnswer):
                await handler.batch_store(["k"], [handle])

        async with trio.open_nursery() as nursery:
            first.socket.fate = lambda code: "late" if code == Code.STORE else None
            nursery.start_soon(store)
            await trio.sleep(0.1)  # it is registered, and its answer on the way
            assert await other.delete("k") is Deleted.DELETED
            assert await handler.batch_pin(["k"]) == [False]  # with this answer the page comes back
            [taken] = await handler.batch_alloc(1)
            assert taken.page == handle.page
            if how == "cancelled":
                scope.cancel()
        first.socket.fate = lambda code: None
        pages = handler.statistics().pages
        assert (pages.free, pages.allocated) == (0, 1)
        taken.buf[:] = b"b" * PAGE
        await handler.batch_store(["l"], [taken])
        [info] = await other.batch_retrieve(["l"])
        with info:
            assert bytes(info.view) == b"b" * PAGE
        assert handler.statistics().pages.registered == 1
