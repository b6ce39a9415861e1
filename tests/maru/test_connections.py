"""The blocking sockets of a handler: who has which, and what arrives on them."""

import itertools
import sys
import threading
import time
from collections import deque
from contextlib import nullcontext

import pytest

from maru import BadMessage, HandlerClosed, NoAnswer
from maru._client.connections import Connection, ConnectionPool
from maru._client.operations import Call
from maru._wire import Code, ExistsReply, KeyRequest, error_reply, read_header, reply

SOON = 10.0


class FakeDealer:
    """Answers at once what it is told to, and waits for nothing."""

    losses = 0

    def __init__(self):
        self.inbox = deque()
        self.sent = []
        self.closed = 0
        self.mute = False
        self.full = False

    def send(self, frames, timeout):
        if self.full:
            return False
        self.sent.append(read_header(frames[-1]).sequence)
        if not self.mute:
            self.answer(self.sent[-1])
        return True

    def answer(self, sequence, *, exists=True):
        self.inbox.append([b"", reply(Code.EXISTS_KV, sequence, ExistsReply(exists))])

    def receive(self, timeout):
        return self.inbox.popleft() if self.inbox else None

    def close(self):
        self.closed += 1


def call(**options):
    return Call(Code.EXISTS_KV, KeyRequest("k"), **options)


def later():
    return time.monotonic() + SOON


def connection_over(dealer, window=4, late=lambda call, reply: None, gave_up=lambda call: None, closed=lambda: False):
    return Connection(dealer, window, nullcontext(), late, gave_up, closed)


def connections_over(dealers, window=2):
    def connect():
        return dealers.append(FakeDealer()) or dealers[-1]

    return ConnectionPool(connect, window, nullcontext(), lambda call, reply: None, lambda call: None)


def test_answers_are_handed_out_to_whom_they_belong_in_any_order():
    dealer = FakeDealer()
    connection = connection_over(dealer)
    dealer.mute = True
    calls = [call() for _ in range(3)]
    for one in calls:
        connection.send(one, later())
    for sequence, exists in ((3, True), (1, False), (2, True)):
        dealer.answer(sequence, exists=exists)
    connection.receive(later())
    assert [one.reply.exists for one in calls] == [False, True, True]
    assert len(connection.correlation) == 0


def test_whoever_gives_up_is_noted_and_an_unread_answer_is_found_by_looking():
    told, gave_up = [], []
    dealer = FakeDealer()
    connection = connection_over(dealer, late=lambda call, reply: told.append(call), gave_up=gave_up.append)
    one = call()
    connection.send(one, later())  # answered at once, and not read
    connection.give_up(one)
    assert (gave_up, told) == ([one], [])
    connection.look()
    assert (gave_up, told) == ([one], [one])
    dealer.full = True
    other = call()
    with pytest.raises(NoAnswer):
        connection.send(other, time.monotonic() - 1)
    assert gave_up == [one, other]


def test_an_answer_that_cannot_be_read_is_as_none():
    gave_up = []
    dealer = FakeDealer()
    connection = connection_over(dealer, gave_up=gave_up.append)
    dealer.mute = True
    one = call()
    connection.send(one, later())
    dealer.inbox.append([b"", reply(Code.EXISTS_KV, one.sequence, b"\xc1")])
    connection.receive(later())
    assert type(one.reply) is BadMessage
    assert gave_up == [one]


def test_looking_leaves_the_lines_in_their_order_and_those_in_use_alone():
    dealers = []
    connections = connections_over(dealers, window=3)
    taken = [connections.take(later()) for _ in range(3)]
    for connection in taken[:2]:
        connections.give_back(connection)
    for dealer in dealers:
        dealer.mute = True
        dealer.answer(99)
    connections.look()
    assert [len(dealer.inbox) for dealer in dealers] == [0, 0, 1]
    assert connections.take(later()) is taken[1]  # the one that was used last
    assert connections.take(later()) is taken[0]


def test_a_late_answer_is_heard_and_given_to_nobody():
    told = []
    dealer = FakeDealer()
    connection = connection_over(dealer, late=lambda call, reply: told.append((call, reply.exists)))
    dealer.mute = True
    one, other = call(), call()
    connection.send(one, later())
    with pytest.raises(NoAnswer):
        connection.receive(time.monotonic() - 1)
    connection.give_up(one)
    connection.send(other, later())
    dealer.answer(1)
    dealer.answer(2, exists=False)
    connection.receive(later())
    assert told == [(one, True)]
    assert other.reply.exists is False
    connection.give_up(other)  # it has come: whoever gave up is told as well
    assert told[1:] == [(other, False)]


def test_what_cannot_be_read_costs_its_own_call_only():
    dealer = FakeDealer()
    connection = connection_over(dealer)
    dealer.mute = True
    one, other = call(), call()
    for each in (one, other):
        connection.send(each, later())
    dealer.inbox.append([b"", b"no frame"])
    dealer.inbox.append([b"", error_reply(0, 0, "what was that?")])
    dealer.inbox.append([b"", reply(Code.EXISTS_KV, 1, b"\xc0")])
    dealer.answer(2)
    connection.receive(later())
    assert isinstance(one.reply, BadMessage)
    assert other.reply.exists
    assert (connection.unreadable, connection.correlation.statistics().unknown) == (2, 1)
    connection.give_up(one)


def test_a_full_window_waits_for_an_answer_and_a_full_socket_is_no_answer():
    dealer = FakeDealer()
    connection = connection_over(dealer, window=2)
    calls = [call() for _ in range(5)]
    for one in calls:
        connection.send(one, later())
    assert sum(one.reply is not None for one in calls) >= 3
    dealer.mute = True
    connection = connection_over(dealer, window=1)
    connection.send(call(), later())
    with pytest.raises(NoAnswer):
        connection.send(call(), time.monotonic() - 1)
    dealer.full = True
    connection = connection_over(dealer)
    with pytest.raises(NoAnswer, match="does not read its requests"):
        connection.send(call(), time.monotonic() - 1)


def test_a_call_that_waits_to_be_sent_notices_that_its_handler_was_closed():
    dealer, gave_up, looks = FakeDealer(), [], iter([False, False, True])
    dealer.full = True
    waiting = call()
    with pytest.raises(HandlerClosed, match="to be sent"):
        connection_over(dealer, gave_up=gave_up.append, closed=lambda: next(looks)).send(waiting, later())
    assert gave_up == [waiting]


def test_what_is_to_be_said_before_sending_may_refuse_and_then_nothing_leaves():
    dealer = FakeDealer()
    connection = connection_over(dealer)

    def refuse():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        connection.send(call(sending=refuse), later())
    assert dealer.sent == []
    assert len(connection.correlation) == 0


def test_a_lone_thread_always_has_the_same_line_and_others_have_their_own():
    dealers = []
    connections = connections_over(dealers)
    one = connections.take(later())
    connections.give_back(one)
    assert connections.take(later()) is one
    other = connections.take(later())
    assert other is not one
    with pytest.raises(NoAnswer, match="2 calls"):
        connections.take(time.monotonic() - 1)
    got = []
    thread = threading.Thread(target=lambda: got.append(connections.take(later())))
    thread.start()
    connections.give_back(other)
    thread.join(SOON)
    assert got == [other]
    assert len(dealers) == connections.statistics().sockets == 2


def test_a_certain_line_is_waited_for():
    dealers = []
    connections = connections_over(dealers)
    one, other = connections.take(later()), connections.take(later())
    connections.give_back(other)
    with pytest.raises(NoAnswer):
        connections.take_that(one, time.monotonic() - 1)
    thread = threading.Thread(target=lambda: connections.take_that(one, later()))
    thread.start()
    connections.give_back(one)
    thread.join(SOON)
    assert connections.take(later()) is other


class Pressed(BaseException):
    """Raised by the handler of a signal, as KeyboardInterrupt is."""


def signal_raised(nth):
    """Raise in the nth function that begins while a connection is waited for. Return whether there were as many."""
    connections, calls = connections_over([]), 0
    used = [connections.take(later()) for _ in range(2)]

    def trace(frame, event, arg):
        nonlocal calls
        calls += 1
        if calls == nth:
            raise Pressed

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        connections.take(time.monotonic() + 0.01)
    except (Pressed, NoAnswer):
        sys.settrace(before)
    got = []
    thread = threading.Thread(target=lambda: got.append(connections.take(later())), daemon=True)
    thread.start()
    connections.give_back(used[0])
    thread.join(SOON)
    assert got == [used[0]]
    connections.close()
    return calls >= nth


def test_a_signal_anywhere_in_the_wait_for_a_connection_leaves_no_lock_held():
    assert len(list(itertools.takewhile(signal_raised, range(1, 50)))) > 3


def test_closing_closes_each_line_once_and_those_in_use_when_they_come_back():
    dealers = []
    connections = connections_over(dealers)
    used, free = connections.take(later()), connections.take(later())
    connections.give_back(free)
    failed = []

    def wait():
        try:
            connections.take_that(used, later())
        except HandlerClosed:
            failed.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    connections.close()
    connections.close()
    thread.join(SOON)
    assert failed == [True]
    assert sorted(dealer.closed for dealer in dealers) == [0, 1]
    connections.give_back(used)
    assert [dealer.closed for dealer in dealers] == [1, 1]
    with pytest.raises(HandlerClosed):
        connections.take(later())
    assert connections.statistics().sockets == 0


def test_lines_go_round_among_many_threads_without_one_being_lost():
    dealers = []
    connections = connections_over(dealers, window=3)
    busy, most, failures = [], [], []

    def work():
        try:
            for _ in range(300):
                connection = connections.take(later())
                busy.append(connection)
                assert busy.count(connection) == 1
                most.append(len(busy))
                one = call()
                connection.send(one, later())
                connection.receive(later())
                assert one.reply.exists
                busy.remove(connection)
                connections.give_back(connection)
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert failures == []
    assert max(most) <= 3
    assert len(connections._free) == len(dealers) <= 3
