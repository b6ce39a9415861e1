"""P5: behind the upgrade a batch is one flat list of blocks, and each block still knows its container."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.abc import EVICTED
from backends.testing import FakeTier
from offload import OffloadBatch, OffloadContainer, Status
from tests.support.invariants import keys_of, open_world


class Shelf(FakeTier):
    """A source that has some of the blocks."""

    def __init__(self, here):
        super().__init__(256, 8)
        self.fill(here)


def flatten(sizes, gone, granted=None, kinds=None):
    keys = [keys_of(f"{number}-", size) for number, size in enumerate(sizes)]
    everything = [key for column in keys for key in column]
    shelf = Shelf(everything)
    containers = []
    for number, column in enumerate(keys):
        kind = kinds[number % len(kinds)] if kinds else "weak"
        blocks = shelf.weak(column)
        if kind == "strong":
            blocks = shelf.strong(column)
        elif kind == "external":
            blocks = shelf.external(shelf.pool.slots(column), column)
        containers.append(OffloadContainer(number, blocks, None, column))
    strong = {key for container in containers if container.blocks.refs is not None for key in container.keys}
    shelf.pool.delete([key for key in gone if key not in strong])
    batch = OffloadBatch(containers)
    assert batch.claim() == []
    flat = batch.upgrade(shelf, granted)
    return shelf, containers, everything, flat


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.sets(st.integers(0, 30)),
    st.one_of(st.none(), st.integers(0, 30)),
    st.lists(st.sampled_from(["weak", "strong", "external"]), min_size=1, max_size=3),
)
def test_columns_and_spans_agree(sizes, gone, granted, kinds):
    everything = [key for number, size in enumerate(sizes) for key in keys_of(f"{number}-", size)]
    gone = {everything[i] for i in gone if i < len(everything)}
    short = None if granted is None else everything[:granted]
    shelf, containers, everything, flat = flatten(sizes, gone, short, kinds)

    assert [key for container in flat.containers for key in container.keys] == flat.keys
    assert flat.sizes == [len(container.keys) for container in flat.containers]
    assert all(flat.sizes)
    assert flat.refs == shelf.pool.slots(flat.keys)
    assert EVICTED not in flat.refs
    for container in containers:
        ends = [*container.keys, *container.failed, *container.evicted]
        assert sorted(ends) == sorted(container.blocks.keys)
        assert set(container.failed) == set(container.blocks.keys) - set(everything if short is None else short)
        assert set(container.evicted) == (
            (set(container.blocks.keys) & gone) - set(container.failed) if container.blocks.refs is None else set()
        )
        assert (container in flat.containers) == bool(container.keys)
    assert sorted(flat.dropped) == sorted(set(everything) - set(flat.keys))

    held = [key for container in flat.containers if container.blocks.refs is None for key in container.keys]
    assert sorted(ref for ref in flat.held if ref != EVICTED) == sorted(shelf.pool.slots(held))


def test_several_containers_with_holes():
    _shelf, containers, _, flat = flatten([3, 2, 2], {b"0-1", b"1-0", b"1-1"})
    assert flat.keys == [b"0-0", b"0-2", b"2-0", b"2-1"]
    assert flat.containers == [containers[0], containers[2]]
    assert flat.sizes == [2, 2]


async def test_outcomes_find_their_handles(autojump_clock):
    async with open_world(min_batch_size=9) as world:
        world.faults.failing.update({b"a1": OSError("a"), b"c0": OSError("c")})
        handles = {label: world.store(label, 3, kind=kind) for label, kind in zip("abc", KINDS, strict=True)}
        world.evict(b"a2", b"c1")
        results = {label: await handle.wait() for label, handle in handles.items()}
        assert len(world.destination.batches) == 1
        ends = {
            label: (list(result.completed), sorted(result.failed), list(result.evicted))
            for label, result in results.items()
        }
        assert ends == {
            "a": ([b"a0"], [b"a1"], [b"a2"]),
            "b": ([b"b0", b"b1", b"b2"], [], []),
            "c": ([b"c2"], [b"c0"], [b"c1"]),
        }
        assert [str(results[label].failed[key]) for label, key in (("a", b"a1"), ("c", b"c0"))] == ["a", "c"]


KINDS = ("weak", "strong", "weak")


@pytest.mark.parametrize("kinds", [("weak", "strong"), ("external", "weak"), ("strong", "external")])
async def test_all_kinds_travel_in_one_batch(autojump_clock, kinds):
    async with open_world(min_batch_size=4) as world:
        handles = [world.store(label, 2, kind=kind) for label, kind in zip("ab", kinds, strict=True)]
        for handle in handles:
            assert (await handle.wait()).status is Status.COMPLETE
        assert world.destination.batches == [(b"a0", b"a1", b"b0", b"b1")]


async def test_a_filtered_strong_container_keeps_its_refs_in_step(autojump_clock):
    async with open_world(policies=[lambda keys: {keys[0]: "no"}]) as world:
        handles = [world.store(label, 3, kind=kind) for label, kind in (("a", "strong"), ("b", "external"))]
        for handle, label in zip(handles, "ab", strict=True):
            assert list((await handle.wait()).completed) == keys_of(label, 3)[1:]
