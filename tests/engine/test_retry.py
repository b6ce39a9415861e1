"""``on_load_failure = "retry"``: what one tier does not deliver is looked for once more behind it, within the same load."""

from __future__ import annotations

import pytest
import trio

from backends.abc import LOADED, Failed, Missed, Unproven
from maru.exception_groups import holds
from offload import Engine
from tests.support.engine_places import Places, cancelled_at_checkpoint, keys_of, payloads, room


async def load(engine: Engine, keys: list[bytes], **options: object):  # type: ignore[no-untyped-def]
    async with await engine.lookup(keys) as hit:
        buffers, destination = room(len(hit))
        result = await engine.load(hit, destination, **options)  # type: ignore[arg-type]
        assert buffers[: result.loaded] == payloads(keys[: result.loaded])
        return result


async def test_a_damaged_block_is_taken_from_the_tier_behind_and_the_prefix_goes_on() -> None:
    places, keys = Places(), keys_of(8)
    places["a"].fill(keys[:6])
    places["b"].fill(keys)
    places["a"].damage(keys[2])
    async with places.open(on_load_failure="retry") as engine:
        result = await load(engine, keys)
        assert (result.loaded, result.outcomes) == (8, [LOADED] * 8)
        assert places["b"].statistics().loaded == 2 + 1  # what had come was not read again
        statistics = engine.statistics()
        assert (statistics.retried_blocks, statistics.recovered_blocks) == (1, 1)
        assert statistics.load_faults == {"a": 1}
        assert statistics.load_failures == {} and statistics.loaded_blocks == 8
    places.assert_at_rest()


@pytest.mark.parametrize("mode", ["miss", "retry"])
async def test_what_no_tier_behind_has_ends_the_prefix(mode: str) -> None:
    places, keys = Places(3), keys_of(8)
    places["a"].fill(keys)
    places["b"].fill(keys[4:])
    places["c"].fill(keys[1:2])
    for at in (1, 3, 4, 6):
        places["a"].damage(keys[at])
    async with places.open(on_load_failure=mode) as engine:
        result = await load(engine, keys)
        assert result.loaded == (3 if mode == "retry" else 1)
        assert result.outcomes[result.loaded] == Missed("damaged")
        statistics = engine.statistics()
        # Behind the first gap that stays nothing is looked for.
        assert (statistics.retried_blocks, statistics.recovered_blocks) == ((1 + 2, 1) if mode == "retry" else (0, 0))
        assert statistics.load_faults == {"a": 4}
        assert statistics.load_failures == {"damaged": 3 if mode == "retry" else 4}
    places.assert_at_rest()


async def test_a_tier_that_fails_whole_is_replaced_by_those_behind_it() -> None:
    places, keys = Places(3), keys_of(7)
    places["a"].fill(keys[:5])
    places["b"].fill(keys[:2] + keys[5:])
    places["c"].fill(keys[2:5])
    places["a"].faults.load_error = OSError("gone")
    async with places.open(on_load_failure="retry") as engine:
        assert (await load(engine, keys)).loaded == 7
        statistics = engine.statistics()
        assert (statistics.retried_blocks, statistics.recovered_blocks) == (5, 5)
        assert statistics.load_faults == {"a": 5} and statistics.load_failures == {}
    places.assert_at_rest()


async def test_what_fails_behind_as_well_is_looked_for_further_behind() -> None:
    places, keys = Places(4), keys_of(6)
    for name in "abcd":
        places[name].fill(keys)
    places["a"].damage(keys[1])
    places["a"].damage(keys[2])
    places["b"].damage(keys[2])
    places["c"].faults.load_error = OSError("gone")
    async with places.open(on_load_failure="retry") as engine:
        assert (await load(engine, keys)).loaded == 6
        statistics = engine.statistics()
        assert statistics.load_faults == {"a": 2, "b": 1, "c": 1}
        assert (statistics.retried_blocks, statistics.recovered_blocks) == (2 + 1 + 1, 2)
        assert places["d"].statistics().loaded == 1
    places.assert_at_rest()


async def test_each_tier_is_asked_for_a_block_at_most_once() -> None:
    places, keys = Places(4), keys_of(1)
    asked = []
    for name, tier in places.tiers.items():
        tier.fill(keys)
        tier.faults.load_error = OSError(name)

        async def pin(keys, name=name, pin=tier.pin):  # type: ignore[no-untyped-def]
            asked.append(name)
            return await pin(keys)

        tier.pin = pin  # type: ignore[method-assign]
    async with places.open(on_load_failure="retry") as engine:
        result = await load(engine, keys)
        assert result.loaded == 0
        (failed,) = result.outcomes
        assert isinstance(failed, Failed) and str(failed.error) == "a"  # the first cause, not the last
        assert asked == ["a", "b", "c", "d"]
        assert engine.statistics().load_failures == {"failed": 1}
    places.assert_at_rest()


async def test_a_tier_that_cannot_be_asked_again_is_left_out_and_counted() -> None:
    places, keys = Places(3), keys_of(3)
    for name in "abc":
        places[name].fill(keys)
    places["a"].damage(keys[1])

    async def no_pin(keys: object) -> None:
        raise OSError("gone")

    places["b"].pin = no_pin  # type: ignore[method-assign,assignment]
    async with places.open(on_load_failure="retry") as engine:
        assert (await load(engine, keys)).loaded == 3
        assert engine.statistics().lookup_failures == {"b": 1}
        assert places["c"].statistics().loaded == 1
    places.assert_at_rest()


async def test_a_copy_whose_end_is_unknown_is_not_tried_again() -> None:
    places, keys = Places(), keys_of(3)
    places["a"].fill(keys)
    places["b"].fill(keys)
    places["a"].faults.load_error = Unproven("who knows")
    async with places.open(on_load_failure="retry") as engine:
        with pytest.raises(Unproven):
            await load(engine, keys)
        assert places["b"].statistics().loaded == 0
    places.assert_at_rest()


async def test_a_block_that_was_recovered_can_be_promoted_to_where_it_was_damaged() -> None:
    places, keys = Places(), keys_of(5)
    places["a"].fill(keys)
    places["b"].fill(keys)
    places["a"].damage(keys[3])
    async with places.open(on_load_failure="retry", promote=True) as engine:
        assert (await load(engine, keys)).loaded == 5
        await engine.drain()
        assert engine.statistics().promoted_blocks == 1
        assert places["a"].contains_nowait(keys) == set(keys)
        assert (await load(engine, keys)).loaded == 5
        assert engine.statistics().load_faults == {"a": 1}
    places.assert_at_rest()


async def test_a_hit_released_meanwhile_changes_nothing(autojump_clock: object) -> None:
    places, keys = Places(latency=1.0), keys_of(4)
    places["a"].fill(keys)
    places["b"].fill(keys)
    places["a"].damage(keys[0])
    async with places.open(on_load_failure="retry") as engine:
        hit = await engine.lookup(keys)
        buffers, destination = room(4)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.load, hit, destination)
            await trio.sleep(1.5)  # it reads from the second by now
            await engine.release(hit)
            assert places["b"].statistics().held_blocks == 1
        assert buffers == payloads(keys)
        places.assert_at_rest()


async def test_cancelled_at_any_await_of_a_retry_nothing_is_held(autojump_clock: object) -> None:
    caught = 0
    places, keys = Places(3, latency=0.5), keys_of(8)
    async with places.open(on_load_failure="retry") as engine:
        for nth in range(40):
            for name in "abc":
                await places[name].delete(keys)
                places[name].fill(keys)
            places["a"].damage(keys[2])
            places["a"].damage(keys[5])
            places["b"].damage(keys[5])

            async def body() -> None:
                await load(engine, keys)

            with trio.fail_after(60):
                caught += await cancelled_at_checkpoint(nth, body)
            places.assert_at_rest()
    assert 4 <= caught < 40


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("how", ["raised", "answered"])
async def test_nothing_is_loaded_into_a_place_that_a_copy_may_still_write_to(depth: int, how: str) -> None:
    """A tier that copies in a nursery says so in a group; or, for one block alone, in its outcome."""
    places, keys = Places(), keys_of(4)
    places["a"].fill(keys)
    places["b"].fill(keys)
    error: Exception = Unproven("it may still write")
    for _ in range(depth):
        error = ExceptionGroup("of a nursery", [OSError("the other half"), error])

    async def load(lease: object, destination: object) -> list[object]:
        if how == "raised":
            raise error
        return [LOADED, Failed(error), LOADED, LOADED]

    places["a"].load = load  # type: ignore[method-assign,assignment]
    async with places.open(on_load_failure="retry") as engine:
        async with await engine.lookup(keys) as hit:
            buffers, destination = room(len(hit))
            with pytest.raises((Unproven, ExceptionGroup)) as caught:
                await engine.load(hit, destination)
            assert holds(caught.value, Unproven)
            assert buffers == [bytes(len(one)) for one in buffers]  # nothing of the tier behind
        assert places["b"].statistics().loaded == 0
