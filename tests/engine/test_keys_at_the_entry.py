"""Keys are checked where they come in: what is no key is refused there, and nobody else's block fails for it."""

from __future__ import annotations

from typing import Any

import pytest
import trio

import offload
import offload.from_thread
from backends.abc import MAX_KEY_BYTES
from backends.file import FileTier
from backends.memory import MemoryTier
from backends.testing import FakeTier
from offload import NO_WAIT, Status
from tests.support.engine_places import Places, keys_of

BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "text": (["text"], TypeError, "is of type str"),
    "number": ([7], TypeError, "is of type int"),
    "none": ([None], TypeError, "is of type NoneType"),
    "bytearray": ([bytearray(b"k")], TypeError, "is of type bytearray"),
    "one among good ones": ([b"good", "text"], TypeError, "'text'"),
    "one key": (b"key", TypeError, r"as in \[key\]"),
    "one text": ("key", TypeError, r"as in \[key\]"),
    "too long": ([bytes(MAX_KEY_BYTES + 1)], ValueError, "at most 432"),
}
BLOCKS = ("weak", "strong", "external")


@pytest.mark.parametrize(("keys", "kind", "text"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("how", BLOCKS)
def test_no_blocks_are_made_of_what_is_no_key(how, keys, kind, text) -> None:
    tier = FakeTier()
    make = {"weak": tier.weak, "strong": tier.strong, "external": lambda keys: tier.external([1] * len(keys), keys)}[
        how
    ]
    with pytest.raises(kind, match=text):
        make(keys)
    assert tier.statistics().held_blocks == 0


@pytest.mark.parametrize(("keys", "kind", "text"), BAD.values(), ids=BAD)
def test_put_refuses_what_is_no_key(keys, kind, text) -> None:
    tier = MemoryTier(64, 16)
    key = keys if isinstance(keys, str) else keys[-1]
    if isinstance(key, int) and isinstance(keys, bytes):
        return  # one key is what it takes
    with pytest.raises(kind):
        tier.put(key, bytes(16))
    assert tier.statistics().blocks == tier.statistics().reserved_blocks == 0


@pytest.mark.parametrize(("keys", "kind", "text"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("how", ["lookup", "delete"])
async def test_an_engine_refuses_what_is_no_key(how, keys, kind, text) -> None:
    places = Places()
    places["a"].fill(keys_of(2))
    async with places.open() as engine:
        with pytest.raises(kind, match=text):
            await getattr(engine, how)(keys)
        assert engine.statistics().open_hits == 0 and engine.statistics().lookup_failures == {}
    places.assert_at_rest()


def test_calls_of_another_thread_refuse_what_is_no_key() -> None:
    with offload.from_thread.open_engine(MemoryTier(64, 16), {"host": MemoryTier(64, 16)}) as engine:
        for keys, kind, text in BAD.values():
            for call in (engine.lookup, engine.delete):
                with pytest.raises(kind, match=text):
                    call(keys)


async def test_a_text_key_does_not_fail_its_neighbour(tmp_path) -> None:
    source = FakeTier(8, 64)
    source.fill([b"good"])
    async with offload.open_engine(source, {"disk": FileTier(tmp_path / "blocks", 1 << 20)}) as engine:
        good = await engine.store(source.weak([b"good"]), precondition=NO_WAIT)
        with pytest.raises(TypeError):
            await engine.store(source.external([1], ["text"]), precondition=NO_WAIT)  # type: ignore[list-item]
        with trio.fail_after(60):
            assert (await good.wait()).status is Status.COMPLETE


def test_the_longest_key_is_one_that_every_tier_takes() -> None:
    tier = FakeTier()
    assert tier.weak([bytes(MAX_KEY_BYTES)]).keys == (bytes(MAX_KEY_BYTES),)
