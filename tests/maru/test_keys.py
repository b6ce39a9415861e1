"""What is no key is refused where it comes in, by every face, before a page, a pin or a message is taken for it."""

from __future__ import annotations

import pytest

from backends.abc import RoomRequest
from backends.maru import MaruTier
from maru import MaruHandler
from maru._client.keys import list_keys
from maru._client.pages import PageStatistics
from maru.testing import open_test_server
from tests.support.maru_actors import FACES, PAGE, client
from tests.support.maru_processes import Server, temporary_pool

NO_KEYS = [
    (["k", b"k"], TypeError, "of type bytes"),
    (["k", 7], TypeError, "the key 7 is of type int"),
    ([None], TypeError, "NoneType"),
    ("key", TypeError, "'key' is one key"),
    (b"key", TypeError, "is one key"),
    (["k", "\ud800"], ValueError, "not valid Unicode"),
    (["\ud83d", "\ude00"], ValueError, "not valid Unicode"),  # which are whole where they meet
]


@pytest.fixture(scope="module")
def server():
    with temporary_pool() as path, Server(path) as one:
        yield one


@pytest.mark.parametrize(("keys", "error", "text"), NO_KEYS)
def test_what_is_no_key_says_so(keys, error, text):
    with pytest.raises(error, match=text):
        list_keys(keys)


def test_keys_of_any_kind_of_sequence_are_keys():
    class Text(str):
        __slots__ = ()

    assert list_keys(("a", Text("b"))) == list_keys(iter(["a", "b"])) == ["a", "b"]
    assert list_keys(["\U0001f600", "", "é"]) == ["\U0001f600", "", "é"]


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(("keys", "error", "text"), NO_KEYS)
def test_no_face_takes_anything_for_what_is_no_key(server, face, keys, error, text):
    with client(face, server.ipc) as one:
        handles = one.call("batch_alloc", len(keys), 5)
        before = pages_of(one)
        buffers = [bytearray(b"bytes") for _ in keys]
        calls = {
            "batch_store": (keys, handles),
            "batch_put": (keys, buffers),
            "batch_retrieve": (keys,),
            "batch_get_into": (keys, buffers),
            "batch_exists": (keys,),
            "batch_pin": (keys,),
            "batch_unpin": (keys,),
            "batch_delete": (keys,),
        }
        for name, arguments in calls.items():
            with pytest.raises(error, match=text):
                one.call(name, *arguments)
            assert pages_of(one) == before, name
        assert all(handle.buf is not None for handle in handles)  # they are the caller's still
        stored = one.call("batch_store", [f"{face} {at}" for at in range(len(handles))], handles)
        assert {answer.name for answer in stored} <= {"NEW", "DUPLICATE"}


def pages_of(one) -> PageStatistics:
    return (
        one.call("statistics").pages if one.__class__.__name__ == "BlockingClient" else one.handler.statistics().pages
    )


def test_a_key_is_refused_before_its_page_is_filled(server):
    """On what was: the bytes were copied or summed first, and the handles were of no use any more."""
    with client("blocking", server.ipc) as one:
        [handle] = one.call("batch_alloc", 1, PAGE)
        with pytest.raises(TypeError, match="of type bytes"):
            one.call("store", b"k", handle)
        assert one.call("store", "a key", handle)


# --- the tier -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "error", "text"),
    [
        ([b"a", "text"], TypeError, "of type str"),
        (b"key", TypeError, "is one key"),
        ([b"k" * 29], ValueError, "at most 28 bytes, not of 29.*max_key_bytes"),
    ],
)
@pytest.mark.parametrize("when_full", ["wait", "evict", "partial", "fail"])
async def test_a_tier_reserves_nothing_for_what_is_no_key(keys, error, text, when_full):
    """On what was: it was copied first, and refused when it was to be stored."""
    async with (
        open_test_server(max_key_bytes=64) as server,
        MaruTier(MaruHandler(server_url=server.endpoints[0], chunk_size_bytes=PAGE, namespace="m")) as tier,
    ):
        salt = 64 - tier.handler.max_key_bytes
        assert salt == 7, "the keys above are as long as fits beside it"
        for reserve in (tier.reserve, tier.reserve_nowait):
            with pytest.raises(error, match=text):
                await reserve(RoomRequest(keys, PAGE, when_full))
        assert tier.statistics().reserved_blocks == 0
        reservation = await tier.reserve(RoomRequest([b"k" * 28], PAGE, when_full))
        assert len(reservation.granted) == 1
        reservation.release()
