"""Which pins a session has, by the server's account and by its client's: also when answers are lost.

What an answer that never came has pinned is found out by a *claim*: the client says what it holds, and the server lets go of
the rest (`maru._client.operations.pin_epochs`). Here it is driven step by step, over a wire on which anything may overtake
anything, as on the several sockets of a blocking handler; with the real faces in `test_maru_pins_faces`.
"""

from __future__ import annotations

import ctypes
from functools import partial

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from maru import LeaseLost, NoAnswer, ServerRefused
from maru._client.answers import Deleted
from maru._client.copying import copy, copy_and_sum
from maru._client.operations import (
    Alone,
    Call,
    Work,
    beat,
    connect,
    delete,
    hold,
    load,
    pin,
    release,
    settle,
    unpin,
)
from maru._client.operations.connecting import alone
from maru._client.operations.pin_epochs import MOST_UNANSWERED, PinEpochs
from maru._client.operations.pinning import claim_pins
from maru._wire import Code, ErrorReply, request
from tests.maru.test_operations import PATIENCE, joined, keys_of, value_of, values_of
from tests.support.maru_world import PAGE, Client, FakeSpan, World


def pins_at(world, client):
    """By the server's account: pins of each key that this client's session has."""
    number = world.service.directory.session_of(client.s.token)
    pins = world.service.directory._guard._pins
    counts = {}
    for own in (pins._of.get(number, {}), *pins._earlier.get(number, ())):
        for key, count in own.items():
            counts[key] = counts.get(key, 0) + count
    return counts


def lose(client, code, fate="cut"):
    """The next call of this code gets no answer."""
    fates = iter([fate])
    client.fate = lambda call: next(fates, None) if call.code == code else None


def knows_no_claims(world):
    """The server is one of ours as they were before PINS."""
    handle = world.service.handle

    def old(identity, frame, now):
        assert frame[3] != Code.PINS, "it was asked for what it does not list"
        answer = handle(identity, frame, now)
        return answer.replace(b"\x49\x4a", b"\x49\x49") if frame[3] == Code.HANDSHAKE else answer

    world.service.handle = old


# --- what is lost ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fate", ["cut", "delayed"])
def test_what_a_lost_answer_has_pinned_goes_with_a_claim_and_nothing_else_does(fate):
    world, writer, reader = joined("a", "b")
    writer.put(keys_of(4), values_of(keys_of(4)))
    held = reader.run(hold(reader.s, ["k0", "k1"]))
    assert reader.run(pin(reader.s, ["k1", "k2"])) == [True, True]
    lose(reader, Code.FIND, fate)
    with pytest.raises(NoAnswer):
        reader.run(hold(reader.s, ["k1", "k2", "k3"]))
    world.late_requests()
    if fate == "cut":
        assert pins_at(world, reader) == {"k0": 1, "k1": 3, "k2": 2, "k3": 1}
    reader.run(beat(reader.s))
    assert Code.PINS not in reader.calls  # the answer may come yet
    world.now += PATIENCE
    reader.run(beat(reader.s))
    assert reader.calls.count(Code.PINS) == (fate == "cut")
    assert pins_at(world, reader) == {"k0": 1, "k1": 2, "k2": 1}
    assert reader.s.counters.pins_unknown == (3 if fate == "cut" else 0)
    assert writer.run(delete(writer.s, keys_of(4))) == [Deleted.PINNED] * 3 + [Deleted.DELETED]
    for one in held:
        reader.s.check(one)
    reader.run(release(reader.s, held))
    assert reader.run(unpin(reader.s, ["k1", "k2"])) == [True, True]
    assert pins_at(world, reader) == {}
    reader.calls.clear()
    world.now += PATIENCE
    reader.run(beat(reader.s))
    assert reader.calls == [Code.BEAT]


@pytest.mark.parametrize("fate", ["lost", "cut"])
def test_what_a_lost_unpin_should_have_given_back_goes_with_a_claim(fate):
    world, writer, reader = joined("a", "b")
    writer.put(["k", "l"], values_of("kl"))
    held = reader.run(hold(reader.s, ["k", "l"]))
    lose(reader, Code.UNPIN, fate)
    with pytest.raises(NoAnswer):
        reader.run(release(reader.s, held[:1]))
    assert pins_at(world, reader) == ({"k": 1, "l": 1} if fate == "lost" else {"l": 1})
    world.now += PATIENCE
    reader.run(beat(reader.s))
    assert pins_at(world, reader) == {"l": 1}
    reader.run(release(reader.s, held[1:]))


def test_without_a_claim_it_stays_pinned_until_the_session_ends():
    """With a server of ours that does not list PINS all is as it was, and it is never asked for that."""
    world, writer, reader = World(), None, None
    knows_no_claims(world)
    writer, reader = Client(world, "a"), Client(world, "b")
    for client in (writer, reader):
        client.run(connect(client.s))
        assert client.s.own
        assert not client.s.settles_pins
    writer.put(["k"], [value_of("k")])
    lose(reader, Code.FIND)
    with pytest.raises(NoAnswer):
        reader.get(["k"])
    for _ in range(3):
        world.now += PATIENCE
        reader.run(beat(reader.s))
    assert pins_at(world, reader) == {"k": 1}
    assert writer.run(delete(writer.s, ["k"])) == [Deleted.PINNED]
    assert not reader.s.pin_epochs.waits


@pytest.mark.parametrize("fate", ["unsent", "lost", "cut", "late", "delayed"])
def test_a_claim_that_is_not_answered_is_made_again_of_what_is_held_then(fate):
    world, writer, reader = joined("a", "b")
    writer.put(["k", "l"], values_of("kl"))
    held = reader.run(hold(reader.s, ["k"]))
    lose(reader, Code.FIND)
    with pytest.raises(NoAnswer):
        reader.run(hold(reader.s, ["k", "l"]))
    world.now += PATIENCE
    lose(reader, Code.PINS, fate)
    with pytest.raises(NoAnswer):
        reader.run(beat(reader.s))
    assert not reader.s.pin_epochs.is_claiming
    held += reader.run(hold(reader.s, ["l"]))
    reader.run(release(reader.s, held[:1]))
    world.late_requests()  # the first claim names k, and not l
    reader.run(beat(reader.s))
    assert pins_at(world, reader) == {"l": 1}
    reader.run(release(reader.s, held[1:]))
    reader.calls.clear()
    reader.run(beat(reader.s))
    assert reader.calls == [Code.BEAT]


def test_a_claim_of_more_than_a_batch_goes_in_parts_and_nothing_goes_before_the_last():
    world = World(max_keys=64)
    client = Client(world, pool_size=400 * PAGE)
    client.run(connect(client.s))
    keys = keys_of(200)
    client.put(keys, values_of(keys))
    held = client.run(hold(client.s, keys[:150]))
    lose(client, Code.FIND)
    with pytest.raises(NoAnswer):
        client.run(hold(client.s, keys[140:200]))
    world.now += PATIENCE
    seen = []
    arrive = world.arrive

    def watch(identity, frame):
        answer = arrive(identity, frame)
        if frame[3] == Code.PINS:
            seen.append(len(pins_at(world, client)))
        return answer

    world.arrive = watch
    client.run(beat(client.s))
    assert seen == [200, 200, 150]
    assert pins_at(world, client) == dict.fromkeys(keys[:150], 1)
    client.run(release(client.s, held))


def test_a_claim_that_was_cut_between_its_parts_has_let_go_of_nothing():
    world = World(max_keys=64)
    client = Client(world, pool_size=400 * PAGE)
    client.run(connect(client.s))
    keys = keys_of(100)
    client.put(keys, values_of(keys))
    client.run(hold(client.s, keys))
    lose(client, Code.FIND)
    with pytest.raises(NoAnswer):
        client.run(hold(client.s, ["k0", "x"]))
    world.now += PATIENCE
    fates = iter([None, "lost"])
    client.fate = lambda call: next(fates, None) if call.code == Code.PINS else None
    with pytest.raises(NoAnswer):
        client.run(beat(client.s))
    assert pins_at(world, client) == {**dict.fromkeys(keys, 1), "k0": 2}
    client.run(beat(client.s))
    assert pins_at(world, client) == dict.fromkeys(keys, 1)


def test_a_session_that_is_over_has_nothing_to_claim():
    world, writer, reader = joined("a", "b")
    writer.put(["k"], [value_of("k")])
    lose(reader, Code.FIND)
    with pytest.raises(NoAnswer):
        reader.get(["k"])
    world.now += 1_000
    for _ in range(2):
        reader.run(beat(reader.s))
    assert reader.s.counters.sessions_lost == 1
    assert Code.PINS not in reader.calls


def test_an_unpin_that_a_restart_has_delayed_takes_nothing_that_was_pinned_since():
    """On another socket it may arrive at the next server behind the request that pinned again."""
    world, writer, reader = joined("a", "b")
    writer.put(["k"], [value_of("k")])
    held = reader.run(hold(reader.s, ["k"]))
    lose(reader, Code.UNPIN, "delayed")
    with pytest.raises(NoAnswer):
        reader.run(release(reader.s, held))
    world.restart()
    for client in (writer, reader, writer, reader):
        client.run(beat(client.s))
    reader.run(hold(reader.s, ["k"]))
    world.late_requests()
    assert pins_at(world, reader) == {"k": 1}


def test_pins_of_a_registration_that_went_although_pinned_are_not_given_back_to_the_next():
    world, writer, reader = joined("a", "b")
    writer.put(["k"], [value_of("k")])
    [old] = reader.run(hold(reader.s, ["k"]))
    world.service.directory.forget(["k"])
    writer.run(beat(writer.s))
    writer.put(["k"], [value_of("k")])
    reader.s.pinned._pins.clear()  # asked for again while the view of the first lives
    reader.s.pinned._pins["k"] = old
    lease, reader.s.deadline = reader.s.deadline, 0.0  # so that it asks
    [new] = reader.run(hold(reader.s, ["k"]))
    reader.s.deadline = lease
    assert new is not old
    reader.run(release(reader.s, [old]))
    assert pins_at(world, reader) == {"k": 1}


def test_what_is_remembered_of_lost_answers_is_bounded():
    epochs = PinEpochs()
    for _ in range(MOST_UNANSWERED + 1):
        call = Call(Code.FIND, None)
        call.sent_at = 10.0
        epochs.gave_up(call, 0)
    assert not epochs.waits
    assert epochs.is_due(0.0)
    epochs.end_claim(epochs.begin_claim(), is_settled=True)
    assert not epochs.is_due(99.0)


# --- anything overtakes anything -------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Thread:
    """Runs one operation, and waits for what that has asked for."""

    stack: list
    waits_for: Call | None = None
    waits_alone: Alone | None = None
    work: Work | None = None
    copies: list = attrs.field(factory=list)  # keys, while it copies from them
    era: int = 0
    result: object = None
    is_over: bool = False


@attrs.define(eq=False)
class Message:
    """A request or an answer on its way."""

    call: Call
    frame: bytes
    sent_at: float
    thread: Thread | None


NAMES = keys_of(3)


class Interleaved(RuleBasedStateMachine):
    """A client whose calls are under way at once, each on a socket of its own: any may be late, lost, given up or overtaken.

    At every moment the server has pinned, for this session, at least what the client relies on; and when all is quiet, exactly
    that.
    """

    def __init__(self):
        super().__init__()
        self.world = World(max_lease=3_600.0)  # what ends with a session is not what this is about
        owner = Client(self.world, "owner")
        owner.run(connect(owner.s))
        owner.put(NAMES, values_of(NAMES))
        self.client = Client(self.world, "c", lease=3_600.0)
        self.client.run(connect(self.client.s))
        self.s = self.client.s
        self.s.spans.update({region_id: FakeSpan(memory, False) for region_id, memory in self.world.memory.items()})
        self.threads = []
        self.requests = []
        self.answers = []
        self.held = []
        self.alone = None

    # --- driving

    def start(self, operation):
        thread = Thread([operation])
        self.threads.append(thread)
        self.step(thread, None)
        return thread

    def step(self, thread, value, error=None):
        while True:
            operation = thread.stack[-1]
            try:
                effect = operation.send(value) if error is None else operation.throw(error)
            except StopIteration as stop:
                thread.stack.pop()
                value, error = stop.value, None
                if self.finish_alone(thread) or thread.stack:
                    continue
                thread.result, thread.is_over = value, True
            except (NoAnswer, LeaseLost) as exc:
                thread.stack.pop()
                value, error = None, exc
                if self.finish_alone(thread) or thread.stack:
                    continue
                thread.is_over = True
            else:
                value = error = None
                if isinstance(effect, Call) and not effect.is_awaited:
                    self.send(effect, None)
                    self.s.gave_up(effect)
                    continue
                if isinstance(effect, Call):
                    self.send(effect, thread)
                elif isinstance(effect, Work):
                    thread.work, thread.era = effect, self.s.era
                elif isinstance(effect, Alone):
                    if self.alone is None:
                        self.alone = thread, len(thread.stack)
                    if self.alone[0] is thread:
                        thread.stack.append(effect.operation())
                        continue
                    thread.waits_alone = effect
                else:
                    value = self.client.perform(effect)
                    continue
            if thread.is_over:
                self.threads.remove(thread)
                self.held += [one for one in thread.result or () if hasattr(one, "users")]
            return

    def finish_alone(self, thread):
        """Whoever waits runs alone next, once whoever did so has ended that."""
        if self.alone is None or self.alone != (thread, len(thread.stack)):
            return False
        self.alone = None
        for other in self.threads:
            if other.waits_alone is not None:
                effect, other.waits_alone = other.waits_alone, None
                self.alone = other, len(other.stack)
                other.stack.append(effect.operation())
                self.step(other, None)
                break
        return bool(thread.stack)

    def send(self, call, thread):
        if call.sending is not None:
            call.sending()
        call.sent_at = self.world.now
        frame = request(call.code, next(self.client.sequences), call.message)
        self.requests.append(Message(call, frame, self.world.now, thread))
        if thread is not None:
            thread.waits_for = call

    # --- what is done

    @precondition(lambda self: len(self.threads) < 4)
    @rule(keys=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
    def hold(self, keys):
        self.start(hold(self.s, keys))

    @precondition(lambda self: len(self.threads) < 4)
    @rule(keys=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
    def load(self, keys):
        room = [(ctypes.c_char * PAGE)() for _ in keys]

        def copying(positions, at, sizes, with_sums):
            to = [ctypes.addressof(room[position]) for position in positions]
            return (copy_and_sum if with_sums else copy)(to, at, sizes)

        thread = Thread([load(self.s, keys, [PAGE] * len(keys), copying)], copies=keys)
        self.threads.append(thread)
        self.step(thread, None)

    @precondition(lambda self: self.held and len(self.threads) < 4)
    @rule(at=st.integers(0, 5))
    def release(self, at):
        self.start(release(self.s, [self.held.pop(at % len(self.held))]))

    @precondition(lambda self: len(self.threads) < 5)
    @rule()
    def beat(self):
        self.start(beat(self.s))

    @precondition(lambda self: len(self.threads) < 5)
    @rule()
    def claim(self):
        """As a beat does in the end, where answers are missing: else it were rare in here."""
        self.s.pin_epochs.is_lost = True
        self.start(alone(partial(claim_pins, self.s)))

    @rule()
    def time_passes(self):
        self.world.now += PATIENCE

    @rule(sure=st.integers(0, 20))
    def restart(self, sure):
        if not sure:
            self.world.restart()

    # --- what becomes of it

    @precondition(lambda self: self.requests)
    @rule(at=st.integers(0, 5))
    def is_answered_at_once(self, at):
        self.a_request_arrives(at, 1)
        self.an_answer_comes(-1)

    @precondition(lambda self: self.requests)
    @rule(at=st.integers(0, 5), is_kept=st.integers(0, 4))
    def a_request_arrives(self, at, is_kept):
        message = self.requests.pop(at % len(self.requests))
        answer = self.world.arrive(self.client.identity, message.frame)
        if is_kept:
            self.answers.append(attrs.evolve(message, frame=answer))

    @precondition(lambda self: self.requests)
    @rule(at=st.integers(0, 5))
    def a_requestis_lost(self, at):
        self.requests.pop(at % len(self.requests))

    @precondition(lambda self: self.answers)
    @rule(at=st.integers(0, 5))
    def an_answer_comes(self, at):
        message = self.answers.pop(at % len(self.answers))
        reply = self.client._decode(message.call, message.frame)
        thread = message.thread
        if thread is None or thread.waits_for is not message.call:
            self.s.heard_late(message.call, reply)
            return
        thread.waits_for = None
        self.s.heard(message.call, reply, message.sent_at)
        if isinstance(reply, ErrorReply):
            self.step(thread, None, ServerRefused(reply.error, reply.code))
        else:
            self.step(thread, reply)

    def waiting(self):
        return [thread for thread in self.threads if thread.waits_for is not None]

    @precondition(waiting)
    @rule(at=st.integers(0, 5))
    def a_call_is_given_up(self, at):
        threads = self.waiting()
        thread = threads[at % len(threads)]
        call, thread.waits_for = thread.waits_for, None
        self.s.gave_up(call)
        self.step(thread, None, NoAnswer("no answer"))

    @precondition(lambda self: any(thread.work for thread in self.threads))
    @rule()
    def a_copy_is_over(self):
        [thread, *_] = [thread for thread in self.threads if thread.work]
        work, thread.work = thread.work, None
        self.step(thread, work.do())

    # --- what must hold

    def relied_on(self):
        """By whom it is used: views, and copies under way."""
        counts = {}
        for one in set(self.held):
            if one.era == self.s.era:
                counts[one.key] = counts.get(one.key, 0) + one.taken
        for thread in self.threads:
            if thread.work and thread.era == self.s.era:
                for key in thread.copies:
                    counts[key] = counts.get(key, 0) + 1
        return counts

    @invariant()
    def the_server_has_pinned_what_the_client_relies_on(self):
        if self.s.unsettled or self.s.epoch != self.world.service.epoch or self.world.now >= self.s.deadline:
            return
        there = pins_at(self.world, self.client)
        for key, count in self.relied_on().items():
            assert there.get(key, 0) >= count, f"{key}: {there} at the server, and {self.relied_on()} here"

    def teardown(self):
        while True:  # what is under way is answered, lost or over
            if self.requests:
                self.a_request_arrives(0, 1)
            elif self.answers:
                self.an_answer_comes(0)
            elif any(thread.work for thread in self.threads):
                self.a_copy_is_over()
            elif self.waiting():
                self.a_call_is_given_up(0)
            else:
                break
        assert not self.threads, self.threads
        for _ in range(3):
            self.world.now += PATIENCE
            self.client.run(beat(self.s))
        assert not self.s.pin_epochs.is_claiming
        assert not self.s.pinned._lent
        assert pins_at(self.world, self.client) == self.relied_on()
        self.client.run(release(self.s, self.held))
        assert pins_at(self.world, self.client) == {}


# --- one by one -------------------------------------------------------------------------------------------------------


class Wire(Interleaved):
    """The same, told what to do."""

    def find(self, *keys):
        """Ask, and hold what comes; the request waits."""
        self.hold(list(keys))

    def arrives(self, code):
        """The first request of this code that waits arrives, and its answer waits."""
        self.the_server_has_pinned_what_the_client_relies_on()
        self.a_request_arrives([message.call.code for message in self.requests].index(code), 1)
        self.the_server_has_pinned_what_the_client_relies_on()

    def is_heard(self, code):
        """The first answer to this code that waits comes."""
        self.an_answer_comes([message.call.code for message in self.answers].index(code))
        self.the_server_has_pinned_what_the_client_relies_on()

    def answers_to(self, code):
        self.arrives(code)
        self.is_heard(code)

    def sent(self):
        return [message.call.code for message in self.requests]

    def end(self, *, claims=0):
        """All is quiet; how many claims that took."""
        self.the_server_has_pinned_what_the_client_relies_on()
        self.client.calls.clear()
        self.teardown()
        assert self.client.calls.count(Code.PINS) == claims


def test_what_a_find_of_an_earlier_turn_has_found_is_asked_for_again():
    wire = Wire()
    wire.find("k0")
    wire.arrives(Code.FIND)
    wire.claim()
    wire.answers_to(Code.PINS)
    assert pins_at(wire.world, wire.client) == {}
    wire.is_heard(Code.FIND)
    assert wire.held == []
    wire.answers_to(Code.FIND)
    assert pins_at(wire.world, wire.client) == {"k0": 1}
    assert len(wire.held) == 1
    wire.end()


def test_a_find_that_a_claim_has_overtaken_is_refused_and_asked_again():
    wire = Wire()
    wire.find("k0")
    wire.claim()
    wire.answers_to(Code.PINS)
    wire.answers_to(Code.FIND)
    assert pins_at(wire.world, wire.client) == {}
    wire.answers_to(Code.FIND)
    assert pins_at(wire.world, wire.client) == {"k0": 1}
    wire.end()


def test_what_a_find_pins_that_overtakes_the_claim_stays():
    wire = Wire()
    wire.find("k0")
    wire.arrives(Code.FIND)
    wire.a_call_is_given_up(0)
    wire.answers.clear()
    wire.claim()
    wire.find("k0", "k1")
    wire.answers_to(Code.FIND)
    assert pins_at(wire.world, wire.client) == {"k0": 2, "k1": 1}
    wire.answers_to(Code.PINS)
    assert pins_at(wire.world, wire.client) == {"k0": 1, "k1": 1}
    wire.end()


def late_find(wire):
    """A FIND given up, whose answer waits; and one that holds the same key."""
    wire.find("k0")
    wire.arrives(Code.FIND)
    wire.a_call_is_given_up(0)
    wire.find("k0")
    wire.arrives(Code.FIND)
    wire.an_answer_comes(1)
    assert pins_at(wire.world, wire.client) == {"k0": 2}
    assert len(wire.held) == 1


def test_what_is_due_when_a_turn_begins_goes_with_the_claim_and_not_twice():
    wire = Wire()
    late_find(wire)
    wire.is_heard(Code.FIND)
    assert wire.s.pinned.due == ["k0"]
    wire.claim()
    wire.answers_to(Code.PINS)
    assert wire.sent() == []
    assert pins_at(wire.world, wire.client) == {"k0": 1}
    wire.end()


def test_a_late_answer_behind_the_claim_gives_nothing_back_a_second_time():
    wire = Wire()
    late_find(wire)
    wire.claim()
    wire.answers_to(Code.PINS)
    wire.is_heard(Code.FIND)
    assert wire.s.pinned.due == []
    wire.end()


def test_what_is_copied_from_while_a_turn_begins_is_claimed():
    wire = Wire()
    wire.load(["k0", "k1"])
    wire.answers_to(Code.FIND)
    wire.claim()
    wire.answers_to(Code.PINS)
    assert pins_at(wire.world, wire.client) == {"k0": 1, "k1": 1}
    wire.a_copy_is_over()
    wire.end()


@pytest.mark.parametrize("is_claimed", [True, False])
def test_nothing_is_given_back_while_a_claim_is_under_way(is_claimed):
    """It would be one of those that the claim keeps, or lets go of: which, nobody could say."""
    wire = Wire()
    wire.find("k0")
    wire.answers_to(Code.FIND)
    wire.load(["k0"])
    wire.arrives(Code.FIND)
    wire.a_call_is_given_up(0)
    wire.answers.clear()
    wire.claim()
    wire.release(0)
    assert wire.sent() == [Code.PINS]
    if is_claimed:
        wire.answers_to(Code.PINS)
        assert pins_at(wire.world, wire.client) == {"k0": 1}
        wire.end()
    else:
        wire.a_call_is_given_up(0)
        wire.answers_to(Code.UNPIN)
        wire.end(claims=1)


def test_a_batch_that_is_given_back_in_parts_ends_with_the_turn():
    """What was to be given back next is let go of by the claim; given back as well, it would be what is held."""
    wire = Wire()
    wire.s.max_keys = 1
    for key in ("k0", "k1"):
        wire.find(key)
        wire.arrives(Code.FIND)
        wire.a_call_is_given_up(0)
        wire.find(key)
        wire.arrives(Code.FIND)
        wire.an_answer_comes(1 if key == "k0" else 2)
    for _ in range(2):
        wire.is_heard(Code.FIND)
    assert wire.s.pinned.due == ["k0", "k1"]
    wire.start(settle(wire.s))
    assert wire.sent() == [Code.UNPIN]
    wire.claim()
    for _ in range(2):
        wire.answers_to(Code.PINS)
    wire.answers_to(Code.UNPIN)
    assert wire.s.pinned.due == []
    assert pins_at(wire.world, wire.client) == {"k0": 1, "k1": 1}
    wire.end()


def test_a_call_that_was_under_way_when_a_turn_began_and_is_given_up_later_needs_no_further_claim():
    wire = Wire()
    wire.find("k0")
    wire.arrives(Code.FIND)
    wire.answers.clear()
    wire.claim()
    wire.answers_to(Code.PINS)
    wire.a_call_is_given_up(0)
    wire.end(claims=0)


def test_what_a_find_of_an_earlier_era_pins_after_a_claim_goes_with_the_next():
    wire = Wire()
    wire.find("k0")
    wire.a_call_is_given_up(0)
    wire.claim()
    wire.answers_to(Code.PINS)
    wire.world.restart()
    wire.answers_to(Code.FIND)  # the first that is heard of this server
    wire.end(claims=1)


def test_what_a_find_of_an_earlier_era_has_pinned_may_have_been_undone_by_an_unpin_of_that_era():
    """Both arrive at the next server before anything that is asked of that. Given back, it would be what is held."""
    wire = Wire()
    wire.find("k0")
    wire.answers_to(Code.FIND)
    wire.load(["k0"])
    wire.answers_to(Code.FIND)
    wire.a_copy_is_over()
    assert wire.sent() == [Code.UNPIN]
    wire.load(["k0"])
    wire.a_call_is_given_up(0)
    wire.world.restart()
    wire.a_request_arrives(1, 1)
    wire.arrives(Code.UNPIN)
    assert pins_at(wire.world, wire.client) == {}
    wire.is_heard(Code.FIND)
    assert wire.s.unsettled
    wire.end(claims=1)


def test_what_a_server_has_found_that_is_gone_is_asked_of_the_next():
    wire = Wire()
    wire.find("k0")
    wire.arrives(Code.FIND)
    wire.world.restart()
    for _ in range(2):  # the first hears of it, the second attaches again
        wire.beat()
        while wire.requests:
            wire.is_answered_at_once(0)
    wire.is_heard(Code.FIND)
    assert (wire.held, wire.s.pinned.due) == ([], [])
    wire.answers_to(Code.FIND)
    assert pins_at(wire.world, wire.client) == {"k0": 1}
    wire.end()


def test_a_claim_that_arrives_behind_a_later_one_is_refused():
    wire = Wire()
    wire.find("k0")
    wire.answers_to(Code.FIND)
    wire.claim()
    wire.a_call_is_given_up(0)
    wire.release(0)
    wire.answers_to(Code.UNPIN)
    wire.claim()
    wire.find("k1")
    wire.a_request_arrives(1, 1)
    wire.is_heard(Code.PINS)
    wire.answers_to(Code.FIND)
    wire.answers_to(Code.PINS)
    assert pins_at(wire.world, wire.client) == {"k1": 1}
    wire.end()


TestInterleaved = Interleaved.TestCase
TestInterleaved.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


@pytest.mark.long
class TestInterleavedLong(Interleaved.TestCase):
    settings = settings(max_examples=2_000, stateful_step_count=50, deadline=None)
