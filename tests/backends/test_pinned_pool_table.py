"""The table of chunks: whatever is asked of it, it does what a naive model does, and no chunk has two owners."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backends.pinned_pool import Allocation
from backends.pinned_pool import _table as table_module
from backends.pinned_pool._table import ChunkTable, Unknown, spans_of

CHUNK = 8
CLIENTS = st.integers(0, 3)


class Model(RuleBasedStateMachine):
    """Pools as dictionaries of sets."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ChunkTable(24, CHUNK)
        self.pools: dict[int, int] = {}
        self.held: dict[tuple[int, int], Allocation] = {}
        self.seen: set[tuple[int, int, int]] = set()
        self.generation: dict[int, int] = {}

    def left(self) -> int:
        return 24 - sum(self.pools.values())

    def used(self, client: int) -> list[int]:
        return [chunk for (owner, _), one in self.held.items() if owner == client for chunk in one.chunk_indices]

    @rule(client=CLIENTS, nbytes=st.integers(-1, 30 * CHUNK))
    def open_pool(self, client: int, nbytes: int) -> None:
        if client in self.pools or nbytes <= 0:
            with pytest.raises(ValueError):
                self.table.open_pool(client, nbytes)
            return
        chunks = self.table.open_pool(client, nbytes)
        wanted = (nbytes + CHUNK - 1) // CHUNK
        if wanted > self.left():
            assert chunks is None
        else:
            assert chunks == wanted
            self.pools[client] = wanted
            self.generation[client] = self.generation.get(client, 0) + 1

    @rule(client=CLIENTS)
    def close_pool(self, client: int) -> None:
        assert self.table.close_pool(client) == self.pools.pop(client, 0)
        self.held = {name: one for name, one in self.held.items() if name[0] != client}

    @rule(client=CLIENTS, nbytes=st.integers(0, 12 * CHUNK))
    def allocate(self, client: int, nbytes: int) -> None:
        if client not in self.pools:
            with pytest.raises(Unknown):
                self.table.allocate(client, nbytes)
            return
        free = sorted(set(range(self.pools[client])) - set(self.used(client)))
        wanted = (nbytes + CHUNK - 1) // CHUNK
        allocation = self.table.allocate(client, nbytes)
        if wanted > len(free):
            assert allocation is None
            return
        assert allocation is not None
        indices = list(allocation.chunk_indices)
        runs = [free[at : at + wanted] for at in range(len(free) - wanted + 1) if wanted]
        runs = [run for run in runs if run[-1] - run[0] == wanted - 1]
        assert indices == (runs[0] if runs else free[:wanted])
        assert allocation.is_contiguous == (not wanted or bool(runs))
        name = (client, self.generation[client], allocation.allocation_id)
        assert name not in self.seen
        self.seen.add(name)
        self.held[client, allocation.allocation_id] = allocation

    @rule(client=CLIENTS, ids=st.lists(st.integers(0, 12), max_size=4))
    def free(self, client: int, ids: list[int]) -> None:
        if client not in self.pools:
            with pytest.raises(Unknown):
                self.table.free(client, ids)
            return
        there = {(client, number) for number in ids} & self.held.keys()
        assert self.table.free(client, ids) == len(there)
        for name in there:
            del self.held[name]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def look_at_bytes(self, data: st.DataObject) -> None:
        (client, number), allocation = data.draw(st.sampled_from(sorted(self.held.items(), key=lambda item: item[0])))
        offset = data.draw(st.integers(-1, allocation.nbytes + 1))
        length = data.draw(st.integers(0, allocation.nbytes + 1))
        if offset < 0 or offset + length > allocation.nbytes:
            with pytest.raises(Unknown):
                self.table.spans(client, number, offset, length)
            return
        spans = self.table.spans(client, number, offset, length)
        covered = [place for start, n in spans for place in range(start, start + n)]
        everywhere = [index * CHUNK + at for index in allocation.chunk_indices for at in range(CHUNK)]
        assert covered == everywhere[offset : offset + length]
        assert all(first + n != second for (first, n), (second, _) in itertools.pairwise(spans))

    @invariant()
    def nothing_is_lost_and_nothing_twice(self) -> None:
        assert self.table.left == self.left()
        assert self.table.clients == len(self.pools)
        for client, chunks in self.pools.items():
            used = self.used(client)
            assert len(used) == len(set(used))
            assert all(0 <= chunk < chunks for chunk in used)
            usage = self.table.usage(client)
            assert usage.allocated_chunks == len(used)
            assert usage.free_chunks == chunks - len(used)
            mine = [one for (owner, _), one in self.held.items() if owner == client]
            assert usage.active_allocations == len(mine)
            assert usage.allocated_bytes == sum(one.nbytes for one in mine)


Model.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_table_does_what_the_model_does = Model.TestCase


@given(chunks=st.lists(st.integers(0, 9), unique=True, min_size=1, max_size=6), data=st.data())
@settings(max_examples=100, deadline=None)
def test_spans_are_the_bytes_in_order_whatever_the_chunks(chunks: list[int], data: st.DataObject) -> None:
    nbytes = data.draw(st.integers((len(chunks) - 1) * CHUNK + 1, len(chunks) * CHUNK))
    offset = data.draw(st.integers(0, nbytes))
    length = data.draw(st.integers(0, nbytes - offset))
    spans = list(spans_of(Allocation(0, chunks, nbytes), CHUNK, offset, length))
    covered = [place for start, n in spans for place in range(start, start + n)]
    assert covered == [index * CHUNK + at for index in chunks for at in range(CHUNK)][offset : offset + length]
    assert all(n > 0 for _, n in spans)


def test_pool_of_too_many_chunks_is_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "MAX_CHUNKS", 4)
    table = ChunkTable(100, CHUNK)
    assert table.open_pool(0, 5 * CHUNK) is None
    assert table.open_pool(0, 4 * CHUNK) == 4


def test_allocations_of_nothing_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "MAX_ALLOCATIONS", 3)
    table = ChunkTable(4, CHUNK)
    table.open_pool(0, CHUNK)
    assert [table.allocate(0, 0) is None for _ in range(4)] == [False, False, False, True]


def test_less_than_no_bytes_are_an_error() -> None:
    table = ChunkTable(4, CHUNK)
    table.open_pool(0, CHUNK)
    with pytest.raises(ValueError):
        table.allocate(0, -1)
