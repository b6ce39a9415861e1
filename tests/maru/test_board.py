"""A pin board and all boards of a server: what they hold, and what hostile ones cannot do. Pure."""

from __future__ import annotations

import mmap
import struct
import threading
import time

import pytest

from maru._client.operations.board_pins import BoardCounters, BoardPins
from maru._index import (
    BOARD_BYTES,
    MARK,
    Boards,
    BoardWriter,
    Entries,
    IndexReader,
    NotAnIndex,
    TenantIndexes,
    bytes_for,
    header_of_board,
)
from maru._index.board import AT_TOP, AT_WRITTEN, CELLS, USES, BoardReader
from maru._index.boards import MOST_BOARDS, SHARE

NAMES = [f"n{number}" for number in range(8)]


def a_board() -> mmap.mmap:
    memory = mmap.mmap(-1, BOARD_BYTES)
    memory[:16] = header_of_board()
    return memory


class Host:
    """An index of eight names, registered as 1 to 8, with the boards of its clients."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, bytes_for(4 * CELLS))
        self.indexes = TenantIndexes()
        self.indexes.open("", memory, 1, 1)
        self.indexes.end_filling("")
        self.fences = 0
        self.boards = Boards(self.indexes, self.fence)
        self.reader = IndexReader(memory)
        self.counters = BoardCounters()
        self.add(NAMES, list(range(1, 9)))

    def fence(self) -> None:
        self.fences += 1

    def add(self, names: list[str], generations: list[int]) -> None:
        writer = self.indexes._writers[""]
        writer.add(Entries(names, 1, [64 * one for one in generations], 64, None, generations))

    def client(self, number: int = 1) -> BoardPins:
        memory = a_board()
        self.boards.open(number, "", memory)
        return BoardPins(BoardWriter(memory), threading.Lock(), 0, self.counters)

    def hold(self, client: BoardPins, names: list[str]) -> list:
        return client.hold(names, self.reader.find(names), self.reader)


@pytest.fixture
def host() -> Host:
    return Host()


# --- what is held -------------------------------------------------------------------------------------------------


def test_what_is_held_is_not_claimed_until_it_is_released(host: Host) -> None:
    client = host.client()
    pins = host.hold(client, NAMES[:3])
    assert [pin.generation for pin in pins] == [1, 2, 3]
    assert host.boards.claim(NAMES, list(range(1, 9))) == {1, 2, 3}
    client.release(pins[:2])
    assert host.boards.claim(NAMES[:3], [1, 2, 3]) == {3}
    client.release(pins[2:])
    assert host.boards.claim(NAMES[:3], [1, 2, 3]) == set()
    assert host.fences == 3


def test_what_is_claimed_can_be_loaded_and_held_by_nobody_until_it_is_given_up(host: Host) -> None:
    client = host.client()
    found = host.reader.find(["n0"])
    assert host.boards.claim(["n0"], [1]) == set()
    assert client.hold(["n0"], found, host.reader) == [None]
    again = host.reader.find(["n0"])
    assert again.generations == (1,) and not host.reader.changed(again)
    assert host.reader.changed(again, marked=True) == [0]
    assert client.hold(["n0"], again, host.reader) == [None]
    assert host.counters.changed == 2 and not len(client)
    host.boards.give_up(["n0"], [1])
    assert [pin.generation for pin in host.hold(client, ["n0"])] == [1]


def test_what_stays_can_be_held_again_at_once(host: Host) -> None:
    first, second = host.client(1), host.client(2)
    host.hold(first, ["n0"])
    assert host.boards.claim(["n0", "n1"], [1, 2]) == {1}
    assert [pin and pin.generation for pin in host.hold(second, ["n0", "n1"])] == [1, None]


def test_what_went_between_the_two_looks_is_not_held(host: Host) -> None:
    client = host.client()
    found = host.reader.find(NAMES[:3])
    host.indexes.removed(["n1"], [2])
    pins = client.hold(NAMES[:3], found, host.reader)
    assert [pin and pin.generation for pin in pins] == [1, None, 3]
    assert host.boards.held() - {0} == {1, 3}
    assert host.counters == BoardCounters(held=2, changed=1)


def test_a_key_that_is_held_twice_takes_one_cell_and_is_released_twice(host: Host) -> None:
    client = host.client()
    one, two = host.hold(client, ["n0"]), host.hold(client, ["n0", "n1"])
    assert one[0] is two[0] and len(client) == 2
    client.release(one)
    assert host.boards.claim(["n0"], [1]) == {1}
    client.release(two)
    assert host.boards.claim(["n0", "n1"], [1, 2]) == set()


def test_what_finds_no_cell_is_not_held_and_counted(host: Host) -> None:
    names = [f"many {number}" for number in range(CELLS + 2)]
    host.add(names, list(range(100, 102 + CELLS)))
    client = host.client()
    pins = host.hold(client, names)
    assert pins.count(None) == 2 and pins[-2:] == [None, None] and host.counters.full == 2
    client.release(pins[:1])
    assert host.hold(client, names[-1:])[0].generation == 101 + CELLS


def test_what_is_over_holds_nothing_and_hands_over_what_it_held(host: Host) -> None:
    client = host.client()
    pins = host.hold(client, ["n0", "n1"])
    assert client.end() == pins and all(pin.board is None for pin in pins)
    assert host.hold(client, ["n2"]) == [None]
    assert client.release(pins) == pins  # they are to be released otherwise


def test_in_a_forked_child_nothing_of_the_parents_is_let_go_of(host: Host) -> None:
    client = host.client()
    pins = host.hold(client, ["n0"])
    client._lock.acquire()  # as another thread may have at that moment
    client.after_fork()
    client.release(pins)
    assert host.boards.claim(["n0"], [1]) == {1}


def test_threads_hold_and_release_at_once(host: Host) -> None:
    client = host.client()
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(300):
                names = [NAMES[(seed + turn) % 8], NAMES[(seed * turn) % 8]]
                pins = host.hold(client, names)
                standing = host.boards.held()
                assert all(pin.generation in standing for pin in pins)
                client.release(pins)
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not len(client)
    assert host.boards.held() <= {0}


# --- uses ---------------------------------------------------------------------------------------------------------


def test_uses_come_to_the_server_the_deepest_first_and_once(host: Host) -> None:
    client = host.client()
    client.note_used(host.reader.find(["n0", "n1", "n2"]))
    client.note_used(host.reader.find(["n5"]))
    assert host.boards.take_uses() == [["n2", "n1", "n0", "n5"]]
    assert host.boards.take_uses() == []


def test_uses_of_one_client_can_be_taken_alone(host: Host) -> None:
    one, other = host.client(1), host.client(2)
    one.note_used(host.reader.find(["n0"]))
    other.note_used(host.reader.find(["n5"]))
    assert host.boards.take_uses(2) == [["n5"]]
    assert host.boards.take_uses(3) == []  # who has no board
    assert host.boards.take_uses() == [["n0"]]


def test_so_many_uses_are_taken_at_once_of_each_client_in_its_turn(host: Host) -> None:
    much, little = host.client(1), host.client(2)
    for name in NAMES:
        much.note_used(host.reader.find([name]))
    little.note_used(host.reader.find(["n5"]))
    assert host.boards.take_uses(most=3) == [NAMES[:3]]
    much.note_used(host.reader.find(["n0"]))
    assert host.boards.take_uses(most=3) == [["n5"], NAMES[3:5]] and host.boards.has_uses()
    assert host.boards.take_uses(1, 2) == [NAMES[5:7]]
    assert host.boards.take_uses() == [["n7", "n0"]] and not host.boards.has_uses()


def test_of_more_uses_than_the_ring_has_the_latest_are_seen(host: Host) -> None:
    client = host.client()
    every = host.reader.find(NAMES)
    for _ in range(USES // 8 + 1):
        client.note_used(every)
    client.note_used(host.reader.find(["n3"]))
    [names] = host.boards.take_uses()
    assert len(names) == USES and names[-2:] == ["n0", "n3"]


def test_uses_that_go_round_the_end_of_the_ring_are_seen_in_order(host: Host) -> None:
    client = host.client()
    for _ in range(USES // 8):
        client.note_used(host.reader.find(NAMES[:7]))
    client.note_used(host.reader.find(NAMES[:3]))  # so that one of those that follow is cut in two
    host.boards.take_uses()
    for _ in range(64):
        client.note_used(host.reader.find(NAMES))
    client.note_used(host.reader.find(["n0", "n1"]))
    [names] = host.boards.take_uses()
    assert names == [*NAMES[::-1] * 64, "n1", "n0"]


def test_of_a_generation_that_has_more_than_32_bits_the_end_is_noted(host: Host) -> None:
    client = host.client()
    host.add(["old", "new"], [7 << 31, (1 << 40) + 9])
    client.note_used(host.reader.find(["old", "new"]))
    assert host.boards.take_uses() == [["new", "old"]]


def test_a_use_of_what_is_not_there_any_more_is_none(host: Host) -> None:
    client = host.client()
    client.note_used(host.reader.find(["n0", "n1"]))
    host.indexes.removed(["n0"], [1])
    assert host.boards.take_uses() == [["n1"]]


# --- whose board it is --------------------------------------------------------------------------------------------


def test_what_is_closed_holds_nothing(host: Host) -> None:
    host.hold(host.client(), ["n0"])
    host.boards.close(1)
    host.boards.close(1)
    assert host.boards.claim(["n0"], [1]) == set() and 1 not in host.boards


def test_there_are_so_many_boards_at_most(host: Host) -> None:
    for number in range(MOST_BOARDS):
        assert not host.boards.is_full
        host.boards.open(number, "", a_board())
    assert host.boards.is_full


def test_sessions_of_one_opener_have_a_share_of_the_boards(host: Host) -> None:
    share, opener = MOST_BOARDS // SHARE, object()
    for number in range(share):
        assert not host.boards.why_not(number, opener)
        host.boards.open(number, "", a_board(), opener)
    assert f"{share} sessions of one connection" in host.boards.why_not(share, opener)
    assert not host.boards.why_not(0, opener)  # in place of its own
    for other in (object(), None):
        assert not host.boards.why_not(share, other)
    host.boards.close(0)
    assert not host.boards.why_not(share, opener)


@pytest.mark.parametrize("garbage", [b"\xff" * 8, struct.pack("=Q", 1 << 40), struct.pack("=Q", MARK | 1)])
def test_garbage_on_a_board_holds_nothing_and_breaks_nothing(host: Host, garbage: bytes) -> None:
    memory = a_board()
    memory[16:] = (garbage * (BOARD_BYTES // 8))[: BOARD_BYTES - 16]
    host.boards.open(1, "", memory)
    assert host.boards.take_uses() == []
    assert host.boards.claim(NAMES, list(range(1, 9))) == set()
    written = memoryview(memory).cast("Q")
    for count in (0, 1 << 63, 7):  # a count that jumps
        written[AT_WRITTEN] = count
        assert host.boards.take_uses() in ([], [[]])


def test_a_board_that_says_it_is_full_costs_as_much_as_one_that_is(host: Host) -> None:
    for number in range(MOST_BOARDS):
        memory = a_board()
        memoryview(memory).cast("Q")[AT_TOP] = (1 << 64) - 1
        host.boards.open(number, "", memory)
    began = time.process_time()
    assert host.boards.claim(["n0"], [1]) == set()
    assert time.process_time() - began < 1.0  # some 10 ms; a scan without a bound would not end


def test_what_is_no_board_is_refused() -> None:
    with pytest.raises(NotAnIndex):
        BoardWriter(mmap.mmap(-1, BOARD_BYTES))
    short = mmap.mmap(-1, 4096)
    short[:16] = header_of_board()
    with pytest.raises(NotAnIndex):
        BoardWriter(short)


def test_a_reader_looks_at_no_cell_that_was_never_used() -> None:
    memory = a_board()
    writer, reader = BoardWriter(memory), BoardReader(memory)
    assert reader.held() == []
    cells = writer.put([7, 8, 9])
    assert reader.held() == [7, 8, 9]
    writer.clear(cells[:1])
    assert reader.held() == [0, 8, 9]
