"""The owner's pages: the table of moves, and the columns that follow it."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from maru._client.page_states import MOVES, IllegalMove, PageEvent, PageState
from maru._client.pages import OwnedPages

S, E = PageState, PageEvent
PAGE = 64

# As the specification has them, row by row.
ARROWS = {
    (S.FREE, E.ALLOCATE, S.ALLOCATED),
    (S.ALLOCATED, E.CANCEL, S.FREE),
    (S.ALLOCATED, E.SEND, S.REGISTERING),
    (S.REGISTERING, E.NEW, S.REGISTERED),
    (S.REGISTERING, E.REFUSED, S.FREE),
    (S.REGISTERING, E.UNANSWERED, S.IN_DOUBT),
    (S.IN_DOUBT, E.HELD, S.REGISTERED),
    (S.IN_DOUBT, E.NOT_HELD, S.FREE),
    (S.IN_DOUBT, E.UNKNOWABLE, S.QUARANTINED),
    (S.REGISTERED, E.PIN, S.PINNED),
    (S.PINNED, E.PIN, S.PINNED),
    (S.PINNED, E.UNPIN, S.PINNED),
    (S.PINNED, E.LAST_UNPIN, S.REGISTERED),
    (S.REGISTERED, E.DROP, S.RETURNING),
    (S.RETURNING, E.ACKNOWLEDGE, S.FREE),
    # a return that overtakes the answer, and a page that turns out to be another's
    (S.REGISTERING, E.DROP, S.RETURNING),
    (S.IN_DOUBT, E.DROP, S.RETURNING),
    (S.REGISTERING, E.DISPUTED, S.QUARANTINED),
} | {(state, E.END, S.ORPHAN) for state in S if state is not S.ORPHAN}


def name(value):
    return getattr(value, "name", None)


def pages_with(n, regions=1):
    pages = OwnedPages(PAGE)
    for number in range(regions):
        pages.add_region(10 + number, n * PAGE)
    return pages


def test_the_table_has_these_arrows_and_no_other():
    assert {(old, event, new) for old, row in MOVES.items() for event, new in row.items()} == ARROWS
    assert set(MOVES) == set(S)


def test_a_pinned_page_is_not_dropped_and_a_page_of_unknown_fate_is_not_used_again():
    def reach(state, without):
        found, todo = set(), [state]
        while todo:
            for event, after in MOVES[todo.pop()].items():
                if event not in without and after not in found:
                    found.add(after)
                    todo.append(after)
        return found

    assert E.DROP not in MOVES[S.PINNED]
    answers = {E.NEW, E.REFUSED, E.HELD, E.NOT_HELD, E.DROP}
    assert reach(S.REGISTERING, answers) == {S.IN_DOUBT, S.QUARANTINED, S.ORPHAN}
    assert reach(S.QUARANTINED, ()) == {S.ORPHAN}


# --- every move of the columns --------------------------------------------------------------------------------------


def bring(pages, state):
    """Two pages in this state."""
    two = pages.allocate(2)
    if state is S.FREE:
        pages.cancel(two)
    elif state is not S.ALLOCATED:
        pages.sent(two, 1)
        if state is S.REGISTERED:
            pages.answered(two, 1)
        elif state is S.IN_DOUBT:
            pages.unanswered(two, 1, can_resolve=True)
        elif state is S.QUARANTINED:
            pages.unanswered(two, 1, can_resolve=False)
        elif state is S.RETURNING:
            pages.answered(two, 1)
            pages.returned(2, [10, 10], [page * PAGE for page in two], [1, 1])
        elif state is S.ORPHAN:
            pages.end_region(10)
    assert [pages.state(page) for page in two] == [state] * 2
    return two


STRICT = {
    E.CANCEL: lambda pages, two: pages.cancel(two),
    E.SEND: lambda pages, two: pages.sent(two, 9),
}
REACHED = [state for state in S if state is not S.PINNED]


@pytest.mark.parametrize(("state", "event"), list(itertools.product(REACHED, STRICT)), ids=name)
@pytest.mark.parametrize("scattered", [False, True])
def test_what_the_owner_decides_follows_the_table_or_changes_nothing(state, event, scattered):
    pages = pages_with(8)
    two = bring(pages, state)
    if scattered:
        two = two[::-1]
    before = (bytes(pages._states), list(pages._attempts), list(pages._free), pages.statistics())
    if event in MOVES[state]:
        STRICT[event](pages, two)
        assert [pages.state(page) for page in two] == [MOVES[state][event]] * 2
    else:
        with pytest.raises(IllegalMove, match=event.name):
            STRICT[event](pages, two)
        assert (bytes(pages._states), list(pages._attempts), list(pages._free), pages.statistics()) == before


@pytest.mark.parametrize("state", REACHED, ids=name)
def test_what_the_server_says_too_late_changes_nothing(state):
    """An answer, a resolution or a return counts for what waits for it, and for nothing else."""
    pages = pages_with(8)
    two = bring(pages, state)
    before = (bytes(pages._states), list(pages._free))
    if state is not S.REGISTERING:
        pages.answered(two, 1, [E.REFUSED, E.NEW])
        pages.answered(two, 1)
        pages.unanswered(two, 1, can_resolve=True)
    if state is not S.IN_DOUBT:
        pages.resolved(1, two, [0, 7])
    pages.answered(two, 2)
    pages.resolved(2, two, [0, 7])
    assert (bytes(pages._states), list(pages._free)) == before


def test_a_page_named_twice_is_refused():
    pages = pages_with(8)
    first, second = pages.allocate(2)
    with pytest.raises(IllegalMove):
        pages.sent([second, first, second], 1)
    with pytest.raises(IllegalMove):
        pages.cancel([first, first])
    assert pages.statistics().allocated == 2


# --- handing out ----------------------------------------------------------------------------------------------------


def test_pages_are_handed_out_ascending_and_as_neighbours_again_after_their_return():
    pages = pages_with(8)
    first, second = pages.allocate(3), pages.allocate(5)
    assert (first, second) == ([0, 1, 2], [3, 4, 5, 6, 7])
    assert pages.allocate(1) is None
    assert pages.allocate(0) == []
    pages.sent(first, 1)
    pages.answered(first, 1)
    assert pages.returned(1, [10] * 3, [0, PAGE, 2 * PAGE], [1] * 3) == 3
    assert pages.allocate(3) == [0, 1, 2]


def test_a_part_of_what_came_back_is_a_run_too_and_goes_out_first():
    """What was used last is in the caches still, and a copy into neighbours is one run."""
    pages = pages_with(16)
    first, _ = pages.allocate(4), pages.allocate(4)
    pages.cancel(first)
    assert pages.allocate(2) == [0, 1]
    assert pages.allocate(2) == [2, 3]
    assert pages.allocate(2) == [8, 9]


def test_two_regions_are_no_neighbours():
    pages = pages_with(2, regions=2)
    assert pages.locations(pages.allocate(4)) == ([10, 10, 11, 11], [0, PAGE, 0, PAGE])
    assert pages.locations([0, 1]) == (10, [0, PAGE])
    [_, last], [first, _] = ([r.first, r.first + r.pages - 1] for r in pages.regions)
    assert first - last == 2


def test_a_rest_that_is_no_page_is_not_used():
    pages = OwnedPages(PAGE)
    pages.add_region(1, 3 * PAGE - 1)
    assert pages.free == 2
    with pytest.raises(ValueError, match="already"):
        pages.add_region(1, PAGE)
    with pytest.raises(ValueError, match="positive"):
        OwnedPages(0)


# --- returns --------------------------------------------------------------------------------------------------------


def stored(pages, n, attempt=1):
    column = pages.allocate(n)
    pages.sent(column, attempt)
    pages.answered(column, attempt)
    return column


def test_a_return_is_applied_once():
    pages = pages_with(4)
    stored(pages, 4)
    for _ in range(3):
        pages.returned(1, [10, 10], [0, PAGE], [1, 1])
    assert (pages.free, pages.acknowledged, pages.statistics().returned) == (2, 2, 2)
    assert pages.statistics().strays == 0


def test_behind_a_missing_return_nothing_is_free():
    """The server would refuse the page: it has not been told that this return was applied."""
    pages = pages_with(4)
    stored(pages, 4)
    assert pages.returned(3, [10], [2 * PAGE], [1]) == 0
    assert pages.behind
    assert (pages.acknowledged, pages.free, pages.statistics().returning) == (0, 0, 1)
    assert pages.returned(1, [10] * 3, [0, PAGE, 2 * PAGE], [1] * 3) == 3
    assert not pages.behind
    assert (pages.acknowledged, pages.free, pages.statistics().returned) == (3, 3, 3)


def test_a_return_that_overtakes_the_answer_is_the_fate_of_the_page():
    pages = pages_with(2)
    column = pages.allocate(2)
    pages.sent(column, 5)
    pages.returned(1, [10], [0], [5])
    assert pages.free == 1
    again = pages.allocate(1)
    assert again == [0]
    pages.answered(column, 5)  # at last: and page 0 is not taken for registered
    assert [pages.state(page) for page in column] == [S.ALLOCATED, S.REGISTERED]


def test_a_return_of_a_page_in_doubt_settles_it():
    pages = pages_with(2)
    column = pages.allocate(2)
    pages.sent(column, 5)
    pages.unanswered(column, 5, can_resolve=True)
    assert pages.in_doubt == {5: column}
    pages.returned(1, [10], [PAGE], [5])
    assert pages.in_doubt == {5: [0]}
    pages.resolved(5, column, [3, 0])
    assert [pages.state(page) for page in column] == [S.REGISTERED, S.FREE]
    assert pages.in_doubt == {}


@pytest.mark.parametrize(
    ("region", "offset", "attempt"), [(10, 0, 2), (11, 0, 1), (10, 1, 1), (10, 4 * PAGE, 1), (10, -PAGE, 1)]
)
def test_a_return_of_what_is_not_ours_is_counted_and_changes_nothing(region, offset, attempt):
    pages = pages_with(4)
    stored(pages, 4)
    before = bytes(pages._states)
    pages.returned(1, [region], [offset], [attempt])
    assert (bytes(pages._states), pages.acknowledged, pages.statistics().strays) == (before, 1, 1)


def test_a_region_that_ended_leaves_nothing_behind():
    pages = pages_with(4, regions=2)
    in_doubt = pages.allocate(2)
    pages.sent(in_doubt, 1)
    pages.unanswered(in_doubt, 1, can_resolve=True)
    stored(pages, 4, attempt=2)
    last = pages.allocate(1)
    pages.returned(2, [11], [0], [2])
    pages.end_region(10)
    pages.end_region(11)
    assert (pages.free, pages.in_doubt, pages.regions) == (0, {}, [])
    assert [pages.state(page) for page in [*in_doubt, *last]] == [S.ORPHAN] * 3
    assert pages.region_of(last[0]).region_id == 11
    pages.returned(1, [10], [0], [2])
    assert pages.acknowledged == 2
    pages.new_session()
    pages.add_region(12, 2 * PAGE)
    assert pages.acknowledged == 0
    assert pages.free == 2


# --- against a naive model --------------------------------------------------------------------------------------------


class Machine(RuleBasedStateMachine):
    """A dict of states per (region, index), moved one page at a time, and a server that answers when it likes."""

    def __init__(self):
        super().__init__()
        self.pages = OwnedPages(PAGE)
        self.model = {}
        self.under = {}  # place -> attempt
        self.attempts = {}  # attempt -> places, not answered
        self.next_region = self.next_attempt = self.next_number = 1
        self.sent_returns = {}  # number -> (region, offset, attempt), not acknowledged
        self.arrived = set()

    def place(self, page):
        region = self.pages.region_of(page)
        return region.region_id, page - region.first

    def page(self, place):
        [region] = [region for region in self.pages.regions if region.region_id == place[0]]
        return region.first + place[1]

    def move(self, place, event):
        self.model[place] = MOVES[self.model[place]][event]

    def places(self, *states):
        return sorted(place for place, state in self.model.items() if state in states)

    @rule(n=st.integers(0, 5))
    def add_region(self, n):
        if self.next_region < 4:
            self.pages.add_region(self.next_region, n * PAGE)
            self.model.update({(self.next_region, index): S.FREE for index in range(n)})
            self.next_region += 1

    @rule(n=st.integers(0, 6))
    def allocate(self, n):
        free = self.places(S.FREE)
        column = self.pages.allocate(n)
        if n > len(free):
            assert column is None
            return
        assert column == sorted(set(column))
        assert len(column) == n
        for page in column:
            self.move(self.place(page), E.ALLOCATE)

    @rule(data=st.data())
    def cancel(self, data):
        if chosen := self.some(data, S.ALLOCATED):
            self.pages.cancel([self.page(place) for place in chosen])
            for place in chosen:
                self.move(place, E.CANCEL)

    @rule(data=st.data())
    def send(self, data):
        if chosen := self.some(data, S.ALLOCATED):
            self.pages.sent([self.page(place) for place in chosen], self.next_attempt)
            self.attempts[self.next_attempt] = chosen
            for place in chosen:
                self.move(place, E.SEND)
                self.under[place] = self.next_attempt
            self.next_attempt += 1

    def some(self, data, *states):
        places = self.places(*states)
        return data.draw(st.lists(st.sampled_from(places), unique=True, max_size=5)) if places else []

    def still(self, attempt, state):
        return [place for place, by in self.under.items() if by == attempt and self.model.get(place) is state]

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def answer(self, data):
        attempt = data.draw(st.sampled_from(sorted(self.attempts)))
        places = [place for place in self.attempts[attempt] if place in self.model]
        events = data.draw(
            st.none()
            | st.lists(st.sampled_from([E.NEW, E.REFUSED, E.DISPUTED]), min_size=len(places), max_size=len(places))
        )
        due = self.still(attempt, S.REGISTERING)
        self.pages.answered([self.page(place) for place in places], attempt, events)
        for place, event in zip(places, events or [E.NEW] * len(places), strict=True):
            if place in due:
                self.move(place, event)
        del self.attempts[attempt]

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), can_resolve=st.booleans())
    def no_answer(self, data, can_resolve):
        attempt = data.draw(st.sampled_from(sorted(self.attempts)))
        places = [place for place in self.attempts[attempt] if place in self.model]
        due = self.still(attempt, S.REGISTERING)
        self.pages.unanswered([self.page(place) for place in places], attempt, can_resolve=can_resolve)
        for place in due:
            self.move(place, E.UNANSWERED)
            if not can_resolve:
                self.move(place, E.UNKNOWABLE)

    @precondition(lambda self: self.pages.in_doubt)
    @rule(data=st.data())
    def resolve(self, data):
        attempt = data.draw(st.sampled_from(sorted(self.pages.in_doubt)))
        column = list(self.pages.in_doubt[attempt])
        assert {self.place(page) for page in column} == set(self.still(attempt, S.IN_DOUBT))
        held = data.draw(st.lists(st.integers(0, 1), min_size=len(column), max_size=len(column)))
        for page, is_held in zip(column, held, strict=True):
            self.move(self.place(page), E.HELD if is_held else E.NOT_HELD)
        self.pages.resolved(attempt, column, held)

    @rule(data=st.data())
    def server_drops(self, data):
        """The server hands pages back; the returns may travel for a while, in any order, and more than once."""
        for place in self.some(data, S.REGISTERED, S.REGISTERING, S.IN_DOUBT):
            attempt = self.under[place]
            if not any(r[:2] == (place[0], place[1] * PAGE) for r in self.sent_returns.values()):
                self.sent_returns[self.next_number] = (place[0], place[1] * PAGE, attempt)
                self.next_number += 1

    @precondition(lambda self: self.sent_returns)
    @rule(data=st.data())
    def returns_arrive(self, data):
        numbers = sorted(self.sent_returns)
        first = data.draw(st.sampled_from(numbers))
        some = numbers[numbers.index(first) :][: data.draw(st.integers(1, 4))]
        self.pages.returned(some[0], *map(list, zip(*(self.sent_returns[number] for number in some), strict=True)))
        for number in some:
            region, offset, attempt = self.sent_returns[number]
            place = region, offset // PAGE
            if number not in self.arrived:
                self.arrived.add(number)
                if self.under.get(place) == attempt and E.DROP in MOVES.get(self.model.get(place), {}):
                    self.move(place, E.DROP)
        while min(self.sent_returns, default=0) in self.arrived:
            region, offset, _ = self.sent_returns.pop(min(self.sent_returns))
            if self.model.get(place := (region, offset // PAGE)) is S.RETURNING:
                self.move(place, E.ACKNOWLEDGE)

    @precondition(lambda self: self.pages.regions)
    @rule(data=st.data())
    def end_region(self, data):
        region = data.draw(st.sampled_from([region.region_id for region in self.pages.regions]))
        self.pages.end_region(region)
        self.model = {place: state for place, state in self.model.items() if place[0] != region}

    @invariant()
    def they_agree(self):
        for place, state in self.model.items():
            if state is S.FREE:
                self.under.pop(place, None)
            assert self.pages.state(self.page(place)) is state
        statistics = self.pages.statistics()
        counted = {state: len(self.places(state)) for state in S}
        assert (statistics.free, statistics.pages) == (counted[S.FREE], len(self.model))
        assert (statistics.allocated, statistics.registering) == (counted[S.ALLOCATED], counted[S.REGISTERING])
        assert (statistics.registered, statistics.in_doubt) == (counted[S.REGISTERED], counted[S.IN_DOUBT])
        assert (statistics.returning, statistics.quarantined) == (counted[S.RETURNING], counted[S.QUARANTINED])
        assert sorted(map(self.place, self.pages._free)) == self.places(S.FREE)
        in_doubt = [self.place(page) for column in self.pages.in_doubt.values() for page in column]
        assert sorted(in_doubt) == self.places(S.IN_DOUBT)
        assert all(self.pages.in_doubt.values())
        assert self.pages.acknowledged == min(self.sent_returns, default=self.next_number) - 1
        assert self.pages.behind == bool(self.arrived & set(self.sent_returns))


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.long
class TestMachineLong(Machine.TestCase):
    settings = settings(max_examples=2_000, stateful_step_count=50, deadline=None)
