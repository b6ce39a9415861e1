"""The shared index, as its one writer and its readers see it: against a model, with full buckets and hashes that collide."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from maru._client.operations.state import salt_of
from maru._index import MIN_BYTES, Entries, Found, IndexReader, IndexWriter, NotAnIndex, bytes_for, tenant_of
from maru._index.layout import AT_LEFT_OUT, AT_RETIRED, hash_of

EPOCH = 7


def make(keys: int = 64, **knobs):
    memory = mmap.mmap(-1, bytes_for(keys))
    return IndexWriter(memory, EPOCH, 99, **knobs), IndexReader(memory, **knobs)


def entry(name: str, generation: int, **more) -> Entries:
    return Entries(
        [name], more.get("region", 1), [more.get("offset", 0)], 4096, [more.get("checksum", 5)], [generation]
    )


# --- a key --------------------------------------------------------------------------------------------------------


def test_what_was_added_is_found_with_all_that_is_said_of_it() -> None:
    writer, reader = make()
    writer.add(Entries(["a", "b", "c"], [1, 2, 3], [10, 20, 30], [4, 5, 6], [7, None, 2**64 - 1], [100, 101, 102]))
    found = reader.find(["c", "nobody", "a", "b"])
    assert list(found.positions) == [0, 2, 3] and found.is_definite
    assert list(found.regions) == [3, 1, 2] and list(found.offsets) == [30, 10, 20]
    assert list(found.lengths) == [6, 4, 5] and list(found.checksums) == [2**64 - 1, 7, None]
    assert list(found.generations) == [102, 100, 101]
    assert not reader.changed(found)
    assert list(reader.find(["a", "nobody", "b"], prefix=True).positions) == [0]


def test_a_number_stands_for_a_column() -> None:
    writer, reader = make()
    writer.add(Entries(["a", "b"], 1, range(0, 8, 4), 4, None, range(5, 7)))
    found = reader.find(["a", "b"])
    assert (found.regions, found.offsets, found.checksums) == ((1, 1), (0, 4), (None, None))


def test_what_was_removed_is_not_found_and_has_changed() -> None:
    writer, reader = make()
    writer.add(Entries(["a", "b", "c"], 1, [0, 1, 2], 1, None, [1, 2, 3]))
    found = reader.find(["a", "b", "c"])
    writer.remove(["b"], [2])
    assert list(reader.changed(found)) == [1]
    assert list(reader.find(["a", "b", "c"]).positions) == [0, 2]
    assert len(writer) == 2


def test_what_is_there_anew_has_changed_wherever_it_lies() -> None:
    writer, reader = make()
    writer.add(entry("a", 1))
    found = reader.find(["a"])
    writer.remove(["a"], [1])
    writer.add(entry("a", 2))  # in the same slot, at the same place
    again = reader.find(["a"])
    assert again.words == found.words
    assert list(reader.changed(found)) == [0] and not reader.changed(again)


def test_adding_what_is_there_changes_nothing() -> None:
    writer, reader = make()
    writer.add(entry("a", 1))
    found = reader.find(["a"])
    writer.add(entry("a", 1))
    assert not reader.changed(found) and len(writer) == 1


def test_all_has_changed_when_the_file_is_retired() -> None:
    writer, reader = make()
    writer.add(entry("a", 1))
    found = reader.find(["a"])
    writer.retire()
    assert reader.is_retired
    assert list(reader.changed(found)) == [0]
    assert not reader.find(["nobody"]).is_definite


# --- what has no room ---------------------------------------------------------------------------------------------


def test_what_has_no_room_is_left_out_and_a_miss_says_so_until_it_is_gone() -> None:
    writer, reader = make(0)
    names = [f"k{number}" for number in range(10)]
    writer.add(Entries(names, 1, range(10), 1, None, range(1, 11)))
    found = reader.find(names)
    assert list(found.positions) == list(range(8)) and not found.is_definite
    assert writer.statistics().left_out == 2
    writer.remove(names[8:], [9, 10])
    assert reader.find(["nobody"]).is_definite


def test_what_may_not_be_found_is_left_out() -> None:
    writer, reader = make()
    writer.leave_out(["published"])
    assert not reader.find(["published"]).is_definite
    writer.add(entry("published", 1))  # while the index is filled, say
    assert not reader.find(["published"])
    writer.remove(["published"], [1])
    assert reader.find(["published"]).is_definite


def test_a_miss_says_nothing_while_the_file_is_filled() -> None:
    writer, reader = make()
    writer.begin_filling()
    assert not reader.find(["a"]).is_definite
    writer.end_filling()
    assert reader.find(["a"]).is_definite


def test_names_of_one_hash_are_never_taken_for_each_other() -> None:
    def collide(name: bytes, seed: int) -> bytes:
        return hash_of(name[:1], seed)

    writer, reader = make(hashing=collide)
    writer.add(entry("a1", 1))
    writer.add(entry("a2", 2))
    assert not reader.find(["a1", "a2"]) and not reader.find(["a1"]).is_definite
    writer.remove(["a1"], [1])
    writer.add(entry("a3", 3))
    assert not reader.find(["a1", "a2", "a3"]) and writer.statistics().collided == 1


def test_a_hash_that_lies_across_two_others_is_no_hit() -> None:
    one, two, three, four = (bytes([byte]) * 8 for byte in (1, 2, 3, 4))
    hashes = {b"low": one + two, b"high": three + four, b"across": two + three}
    writer, reader = make(0, hashing=lambda name, seed: hashes[name])
    writer.add(Entries(["low", "high"], 1, [0, 1], 1, None, [1, 2]))
    assert not reader.find(["across"])
    writer.add(entry("across", 3))
    assert list(reader.find(["across"]).generations) == [3]
    writer.remove(["across"], [3])
    assert list(reader.find(["low", "high", "across"]).generations) == [1, 2]


def test_a_slot_given_to_another_name_between_two_looks_is_not_taken_for_the_first() -> None:
    writer, reader = make(0)
    writer.add(entry("a", 1))
    memory = reader._memory

    class Late:
        """The slot is another name's as soon as the hash was found."""

        def __len__(self) -> int:
            return len(memory)

        def __getitem__(self, at: slice) -> bytes:
            return memory[at]

        def find(self, *what) -> int:
            spot = memory.find(*what)
            writer.remove(["a"], [1])
            writer.add(entry("b", 2))
            return spot

    reader._memory = Late()
    assert not reader.find(["a"])


# --- the file -----------------------------------------------------------------------------------------------------


def test_a_file_takes_at_most_96_bytes_for_a_key() -> None:
    for keys in (1_000, 1_000_000):
        assert bytes_for(keys) <= 96 * keys


def test_a_file_has_room_for_what_it_is_made_for_but_for_one_in_a_thousand() -> None:
    writer, _ = make(20_000)
    writer.add(Entries([f"k{number}" for number in range(20_000)], 1, range(20_000), 1, None, range(1, 20_001)))
    assert writer.statistics().left_out < 40 and writer.is_crowded
    writer, _ = make(20_000)
    writer.add(Entries([f"k{number}" for number in range(10_000)], 1, range(10_000), 1, None, range(1, 10_001)))
    assert not writer.is_crowded and writer.statistics().left_out == 0


def test_what_is_no_index_is_refused() -> None:
    memory = mmap.mmap(-1, bytes_for(64))
    with pytest.raises(NotAnIndex, match="not an index of version"):
        IndexReader(memory)
    with pytest.raises(NotAnIndex, match="at least"):
        IndexReader(mmap.mmap(-1, MIN_BYTES - 1))
    IndexWriter(memory, EPOCH, 1)
    assert IndexReader(memory).epoch == EPOCH
    memory[24:32] = (10**6).to_bytes(8, "little")
    with pytest.raises(NotAnIndex, match="does not fit"):
        IndexReader(memory)
    memory[8:16] = bytes(8)
    with pytest.raises(NotAnIndex, match="version"):
        IndexReader(memory)


@given(st.text(), st.text(), st.text(max_size=5))
def test_a_name_tells_its_tenant(tenant: str, namespace: str, key: str) -> None:
    assert tenant_of(salt_of(tenant, namespace) + key) == (tenant if tenant or namespace else tenant_of(key))


@given(st.text())
def test_any_text_has_a_tenant_or_none(name: str) -> None:
    assert isinstance(tenant_of(name), str) and isinstance(tenant_of("\x1f" + name), str)


# --- a model ------------------------------------------------------------------------------------------------------

NAMES = [f"name {number}" for number in range(40)]
some = st.lists(st.sampled_from(NAMES), unique=True, max_size=12)


class IndexMachine(RuleBasedStateMachine):
    """An index of three buckets beside a dict. With few hashes, names collide; with many, buckets overflow."""

    there: dict[str, tuple[int, int, int]] = {}  # noqa: RUF012
    held: list[tuple[Found, dict[str, int]]] = []  # noqa: RUF012

    @initialize(hashes=st.sampled_from([10, 1000]))
    def begin(self, hashes: int) -> None:
        def hashing(name: bytes, seed: int) -> bytes:
            return hash_of(str(int(name.split()[1]) % hashes).encode(), seed)

        memory = mmap.mmap(-1, 128 + 3 * 640)
        self.writer = IndexWriter(memory, EPOCH, 3, hashing=hashing)
        self.reader = IndexReader(memory, hashing=hashing)
        self.hash = hashing
        self.collides = hashes < len(NAMES)
        self.there = {}
        self.generation = 0
        self.held = []

    @rule(names=some, region=st.integers(0, 9))
    def add(self, names: list[str], region: int) -> None:
        names = [name for name in names if name not in self.there]
        first = self.generation + 1
        self.generation += len(names)
        generations = range(first, first + len(names))
        self.writer.add(Entries(names, region, [g * 10 for g in generations], 7, None, generations))
        self.there.update({name: (g, region, g * 10) for name, g in zip(names, generations, strict=True)})

    @rule(names=some)
    def add_again(self, names: list[str]) -> None:
        there = [name for name in names if name in self.there]
        rows = [self.there[name] for name in there]
        if rows:
            generations, regions, offsets = (list(column) for column in zip(*rows, strict=True))
            self.writer.add(Entries(there, regions, offsets, 7, None, generations))

    @precondition(lambda self: not self.collides)
    @rule(names=some)
    def leave_out(self, names: list[str]) -> None:
        names = [name for name in names if name not in self.there]
        self.writer.leave_out(names)
        for name in names:
            self.generation += 1
            self.there[name] = (self.generation, -1, -1)

    @rule(names=some)
    def remove(self, names: list[str]) -> None:
        names = [name for name in names if name in self.there]
        self.writer.remove(names, [self.there.pop(name)[0] for name in names])

    @rule(names=some)
    def remove_what_is_not_there(self, names: list[str]) -> None:
        names = [name for name in names if name not in self.there]
        self.writer.remove(names, [self.generation + 1] * len(names))

    @rule()
    def hold(self) -> None:
        self.held.append((self.reader.find(NAMES), {name: row[0] for name, row in self.there.items()}))

    @invariant()
    def what_is_held_has_changed_if_it_is_gone(self) -> None:
        for found, was in self.held:
            changed = set(self.reader.changed(found))
            for at, (position, generation) in enumerate(zip(found.positions, found.generations, strict=True)):
                if NAMES[position] in was:
                    now = self.there.get(NAMES[position], (0,))[0]
                    assert at in changed or was[NAMES[position]] == generation == now

    @precondition(lambda self: hasattr(self, "reader"))
    @invariant()
    def what_is_found_is_there_and_a_miss_is_true(self) -> None:
        found = self.reader.find(NAMES)
        seen = set()
        for position, *row in zip(found.positions, found.generations, found.regions, found.offsets, strict=True):
            if NAMES[position] in self.there:
                assert tuple(row) == self.there[NAMES[position]]
                seen.add(NAMES[position])
            else:  # of its hash there is another name: nobody can tell a name that was never stored from that one
                assert any(self.hash(NAMES[position].encode(), 0) == self.hash(n.encode(), 0) for n in self.there)
        if found.is_definite:
            assert seen == set(self.there)
        assert not self.writer.statistics().left_out or not found.is_definite
        assert (
            len(self.writer)
            == self.writer.statistics().keys
            == sum(self.writer._taken[b].bit_count() for b in range(3))
        )


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_words_that_change_stand_apart_from_those_that_do_not() -> None:
    """A header that readers look at with every load is in their caches, until somebody is left out."""
    assert AT_RETIRED // 8 == AT_LEFT_OUT // 8 == 1
