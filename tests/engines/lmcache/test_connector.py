"""The connector, driven as LMCache drives a native plugin, and in a host of ours."""

import select

import pytest
import trio

from backends.abc import LOADED, STORED, RoomRequest
from backends.base.slots import PagesDestination
from backends.memory import MemoryTier
from backends.plugins import NativeTier
from backends.testing import payload_of
from offload.engines.lmcache import MaruConnector, object_key_to_string
from tests.engines.lmcache.caches import PAGE, in_memory, objects
from tests.engines.lmcache.keys import chunks

NAMES = list(map(object_key_to_string, chunks(4)))


@pytest.fixture
def connector():
    made = MaruConnector(**in_memory(chunk_size_bytes=PAGE))
    yield made
    made.close()


def complete(connector, number):
    """Wait for the one completion that there is."""
    assert select.select([connector.event_fd()], [], [], 60)[0]
    [completion] = connector.drain_completions()
    assert completion[0] == number
    assert not select.select([connector.event_fd()], [], [], 0)[0]
    return completion[1:]


def views(buffers):
    return [memoryview(buffer) for buffer in buffers]


def test_what_was_set_exists_and_can_be_got_and_deleted(connector):
    stored, loaded = objects(4), objects(4)
    assert complete(connector, connector.submit_batch_set(NAMES, views(stored))) == (True, "", None)
    wanted = [*NAMES, object_key_to_string(chunks(1, 9)[0])]
    assert complete(connector, connector.submit_batch_exists(wanted)) == (True, "", [True] * 4 + [False])
    assert complete(connector, connector.submit_batch_get(NAMES, views(loaded))) == (True, "", [True] * 4)
    assert loaded == stored
    assert complete(connector, connector.submit_batch_delete(NAMES)) == (True, "", [True] * 4)
    assert complete(connector, connector.submit_batch_exists(NAMES)) == (True, "", [False] * 4)


def test_a_buffer_of_a_name_that_is_not_there_is_as_it_was(connector):
    [buffer] = objects(1)
    before = bytes(buffer)
    assert complete(connector, connector.submit_batch_get(NAMES[:1], views([buffer]))) == (True, "", [False])
    assert buffer == before


def test_a_set_that_fails_says_so(connector):
    ok, error, bits = complete(connector, connector.submit_batch_set(NAMES[:1], views(objects(1, 2 * PAGE))))
    assert (ok, error, bits) == (False, "not all were stored", None)
    assert connector.report_status()["failures"] == {"store: object too large": 1}


def test_what_exists_is_not_locked(connector):
    complete(connector, connector.submit_batch_set(NAMES, views(objects(4))))
    complete(connector, connector.submit_batch_exists(NAMES))
    assert connector.report_status()["locked_key_count"] == 0


def test_closing_twice_is_closing_once(connector):
    connector.close()
    connector.close()


def test_a_parameter_that_is_none_is_named():
    with pytest.raises(ValueError, match="did you mean timeout_ms"):
        MaruConnector(timeout=3)


async def test_it_is_a_tier_in_a_host_of_ours():
    keys = [bytes([at]) * 8 for at in range(4)]
    host = MemoryTier(4 * PAGE, PAGE)
    for key in keys:
        host.put(key, payload_of(key, PAGE))
    with trio.fail_after(60):
        async with NativeTier(MaruConnector(**in_memory(chunk_size_bytes=PAGE)), PAGE) as tier:
            reservation = await tier.reserve(RoomRequest(keys, PAGE, "fail"))
            assert await reservation.transfer(host, host.pool.slots(keys)) == [STORED] * 4
            reservation.release()
            buffers = [bytearray(PAGE) for _ in keys]
            async with await tier.pin(keys) as lease:
                assert list(await tier.load(lease, PagesDestination.over(buffers))) == [LOADED] * 4
            assert buffers == [payload_of(key, PAGE) for key in keys]
    host.close()
