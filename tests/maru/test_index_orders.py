"""The protocol of the shared index, in every order of a reader's loads among the stores of a server and its owners."""

from __future__ import annotations

import pytest

from tests.support import board_orders
from tests.support.index_orders import Faults, first_wrong


@pytest.mark.parametrize("depth", [3, pytest.param(4, marks=pytest.mark.long)])
def test_no_order_shows_a_reader_wrong_bytes_or_lets_it_miss_what_is_there(depth: int) -> None:
    wrong, programs, orders = first_wrong(depth, Faults())
    assert not wrong, f"{wrong}, after {programs} programs and {orders} orders"
    assert programs > 20 * (depth - 1) and orders > 10 ** (depth + 1)


COPIED = "was copied instead of"


@pytest.mark.parametrize(
    ("faults", "shows"),
    [
        (Faults(no_check=True), COPIED),
        (Faults(publish_first=True), "the next server does not know it"),
        (Faults(tell_first=True), COPIED),
        (Faults(torn=True), COPIED),
        (Faults(sequence_first=True), "another name's"),
    ],
    ids=["no re-check", "publish before journal", "tell before removal", "torn sequence", "sequence before entry"],
)
def test_the_walk_finds_each_fault(faults: Faults, shows: str) -> None:
    wrong, _, orders = first_wrong(3, faults)
    assert shows in wrong and orders < 10_000


def test_what_was_published_and_never_journaled_gives_wrong_bytes_where_the_index_is_not_retired() -> None:
    assert not first_wrong(2, Faults(publish_first=True), COPIED)[0]
    assert first_wrong(2, Faults(publish_first=True, never_retired=True), COPIED)[0]


@pytest.mark.long
def test_the_retirement_of_an_index_and_the_lease_of_a_reader_each_hold_without_the_other() -> None:
    assert not first_wrong(4, Faults(never_retired=True))[0]
    assert not first_wrong(4, Faults(no_lease=True))[0]
    assert first_wrong(4, Faults(never_retired=True, no_lease=True), COPIED)[0]


# --- what is held by a board --------------------------------------------------------------------------------------


def test_no_order_shows_a_reader_that_holds_a_page_other_bytes_or_keeps_what_was_let_go_of() -> None:
    wrong, orders = board_orders.first_wrong(board_orders.Faults())
    assert not wrong and orders > 10_000


@pytest.mark.long
def test_no_order_shows_a_reader_other_bytes_that_asks_for_a_pin_where_its_board_cannot_hold() -> None:
    wrong, orders = board_orders.first_wrong(board_orders.Faults(), ["both"])
    assert not wrong and orders > 50_000


@pytest.mark.parametrize(
    "fault",
    [
        "scan_first", "no_mark", "no_second_look", "look_first", "closed_early", "no_lease", "let_go_early",
        "answers_within", "no_pins",
    ],
)  # fmt: skip
def test_the_walk_over_boards_finds_each_fault(fault: str) -> None:
    wrong, _ = board_orders.first_wrong(board_orders.Faults(**{fault: True}))
    assert "was seen under a hold" in wrong
