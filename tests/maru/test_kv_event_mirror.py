"""A mirror holds what its publisher holds, whatever the network and the publisher do. Virtual time, from a seed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count

import msgspec
import pytest

from maru.kv_events._log import MOST_HASHES, EventLog
from maru.kv_events._messages import (
    Answer,
    BadEvent,
    EventMessage,
    Replay,
    Request,
    pack_request,
    unpack_answer,
    unpack_batch,
    unpack_message,
    unpack_request,
)
from maru.kv_events._mirror import Mirror

STALE, RETRY, BEAT = 3.0, 1.0, 1.0
MEDIA = ("host", "disk")


class Publisher:
    """A run of a publisher after the other: what it holds, its log, and all states that it was in."""

    def __init__(self, rng: random.Random, send: Callable[[str, list[bytes]], None]) -> None:
        self.rng, self.send = rng, send
        self.held: dict[str, set[bytes]] = {medium: set() for medium in MEDIA}
        self.states: dict[tuple[int, int], frozenset[tuple[str, bytes]]] = {}
        self.ended: dict[tuple[int, int], float] = {}
        self.point = (0, -1)
        self.runs = 0
        self.start(0.0)

    def state(self) -> frozenset[tuple[str, bytes]]:
        return frozenset((medium, key) for medium, keys in self.held.items() for key in keys)

    def start(self, now: float) -> None:
        """The next run: it knows nothing of the one before, and some of its blocks are gone."""
        self.runs += 1
        for keys in self.held.values():
            keys.difference_update(self.rng.sample(sorted(keys), k=len(keys) // 3))
        self.log = EventLog(self.runs * 7, kept_bytes=self.rng.choice((0, 400, 4_000)))
        for medium, keys in self.held.items():
            self.log.stored(medium, sorted(keys))
        self.tell(now)

    def change(self, now: float) -> None:
        for _ in range(self.rng.randint(1, 4)):
            medium = self.rng.choice(MEDIA)
            keys = {bytes([self.rng.randrange(40)]) for _ in range(self.rng.randint(1, 6))}
            if self.rng.random() < 0.6:
                self.held[medium] |= keys
                self.log.stored(medium, sorted(keys))
            else:
                self.held[medium] -= keys
                self.log.removed(medium, sorted(keys))
        self.tell(now)

    def tell(self, now: float) -> None:
        for message in self.log.take(now):
            self.send("event", message.frames(b"kv"))
        if (point := (self.log.epoch, self.log.last)) != self.point:
            self.ended[self.point] = now
            self.point = point
        self.states[point] = self.state()

    def beat(self, now: float) -> None:
        self.send("event", self.log.heartbeat(now).frames(b"kv"))

    def answer(self, request: Request, now: float) -> None:
        answers: list[Answer]
        if isinstance(request, Replay):
            answers = list(self.log.replay(request.start, now))
        else:
            held = {medium: sorted(keys) for medium, keys in self.held.items()}
            answers = list(self.log.snapshot(held, now, list))
        for answer in answers:
            self.send("answer", answer.frames(b"kv"))


class Run:
    """A publisher, a mirror, and a network between them that loses, repeats, delays and reorders."""

    def __init__(self, seed: int, make_mirror: Callable[..., Mirror] = Mirror) -> None:
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        self.order = count()
        self.wire: list[tuple[float, int, str, list[bytes]]] = []
        self.loss, self.repeats, self.delay = (
            rng.choice((0.0, 0.1, 0.5)),
            rng.choice((0.0, 0.2)),
            rng.choice((0.0, 0.4, 2.0)),
        )
        self.mirror = make_mirror(stale_after=STALE, retry_after=RETRY)
        self.current_for = 0
        self.round_trip = 2 * self.delay
        self.publisher = Publisher(rng, self.send)

    def send(self, kind: str, frames: list[bytes]) -> None:
        for _ in range(2 if self.rng.random() < self.repeats else 1):
            if self.rng.random() >= self.loss:
                late = self.now + self.rng.random() * self.delay
                heapq.heappush(self.wire, (late, next(self.order), kind, frames))

    def deliver(self) -> None:
        while self.wire and self.wire[0][0] <= self.now:
            _, _, kind, frames = heapq.heappop(self.wire)
            match kind:
                case "event":
                    self.mirror.receive(unpack_message(frames), self.now)
                case "answer":
                    self.mirror.receive_answer(unpack_answer(frames), self.now)
                case "request":
                    self.publisher.answer(unpack_request(frames), self.now)
            self.ask()
            self.check()

    def ask(self) -> None:
        if (request := self.mirror.take_request()) is not None:
            self.send("request", pack_request(request))

    def held(self) -> frozenset[tuple[str | None, bytes | int]]:
        return frozenset((medium, key) for medium, keys in self.mirror.held().items() for key in keys)

    def check(self) -> None:
        """What is held was held at one point; a current mirror held it lately."""
        told = self.mirror.statistics()
        if told.epoch:
            point = (told.epoch, told.sequence)
            if point in self.publisher.states:  # otherwise it is in the midst of what one change told
                assert self.held() == self.publisher.states[point]
        if self.mirror.is_current(self.now):
            self.current_for += 1
            last = [ended for at, ended in self.publisher.ended.items() if at >= (told.epoch, told.sequence)]
            assert self.now - min(last, default=self.now) <= STALE + self.round_trip

    def step(self, dt: float) -> None:
        self.now += dt
        self.deliver()
        self.mirror.tick(self.now)
        self.ask()
        self.check()

    def play(self) -> None:
        beat = 0.0
        for _ in range(120):
            self.step(self.rng.choice((0.0, 0.01, 0.1, 0.3)))
            match self.rng.random():
                case chance if chance < 0.4:
                    self.publisher.change(self.now)
                case chance if chance < 0.45:
                    self.publisher.start(self.now)
                case chance if chance < 0.5:
                    self.loss = self.rng.choice((0.0, 0.1, 0.5, 1.0))
            if self.now >= beat:
                beat = self.now + BEAT
                self.publisher.beat(self.now)
        self.loss = self.delay = 0.0
        for _ in range(80):
            self.step(0.1)
            if self.now >= beat:
                beat = self.now + BEAT
                self.publisher.beat(self.now)

    def check_end(self) -> None:
        assert self.mirror.is_current(self.now)
        assert self.held() == self.publisher.state()


class AnyEpoch(Mirror):
    """Takes a message of another epoch for one of its own."""

    def receive(self, message: EventMessage, now: float) -> None:
        self._epoch = self._epoch and unpack_batch(message.payload).epoch
        super().receive(message, now)


class NoGaps(Mirror):
    """Goes on behind a gap."""

    def receive(self, message: EventMessage, now: float) -> None:
        if unpack_batch(message.payload).events:
            self._next = max(self._next, message.sequence)
        super().receive(message, now)


class MixedParts(Mirror):
    """Takes parts of two snapshots for those of one."""

    def receive_answer(self, answer: Answer, now: float) -> None:
        batch = unpack_batch(answer.payload)
        self._parts_of = (batch.epoch, batch.last)
        super().receive_answer(answer, now)


class NeverAsks(Mirror):
    """Waits for what is missing."""

    def tick(self, now: float) -> None:
        if not self._epoch:
            super().tick(now)


@pytest.mark.parametrize("fault", [AnyEpoch, NoGaps, MixedParts, NeverAsks])
def test_a_planted_fault_is_found(fault: type[Mirror]) -> None:
    def fails(seed: int) -> bool:
        run = Run(seed, fault)
        try:
            run.play()
            run.check_end()
        except AssertionError:
            return True
        return False

    assert any(fails(seed) for seed in range(200))


@pytest.mark.parametrize("seeds", [200, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_mirror_becomes_what_the_publisher_holds_and_was_it_at_one_point_all_the_time(seeds: int) -> None:
    for seed in range(seeds):
        run = Run(seed)
        try:
            run.play()
            run.check_end()
        except AssertionError as exc:
            raise AssertionError(f"seed {seed}") from exc
        assert run.current_for


# --- messages ---------------------------------------------------------------------------------------------------------


def test_a_batch_is_bounded_and_their_order_is_that_of_what_happened() -> None:
    log = EventLog(1)
    keys = [number.to_bytes(4, "big") for number in range(MOST_HASHES + 1)]
    log.stored("host", keys)
    log.removed("host", keys[:1])
    log.stored("host", keys[:1])
    told = [unpack_batch(message.payload).events for message in log.take(0.0)]
    assert [type(events[0]).__name__ for events in told] == [
        "AllBlocksCleared", "BlockStored", "BlockStored", "BlockRemoved", "BlockStored",
    ]  # fmt: skip
    assert [len(getattr(events[0], "block_hashes", [])) for events in told] == [0, MOST_HASHES, 1, 1, 1]


def test_what_is_kept_for_replays_is_bounded_in_bytes() -> None:
    log = EventLog(1, kept_bytes=1_000)
    for number in range(1_000):
        log.stored("host", [bytes([number % 256]) * 32])
        log.take(0.0)
    answers = list(log.replay(0, 0.0))
    assert sum(len(answer.payload) for answer in answers[:-1]) <= 1_000
    assert answers[-2].sequence == log.last


@pytest.mark.parametrize(
    "frames", [[], [b"kv"], [b"kv", b"short", b""], [b"kv", bytes(8), b"", b""], [b"kv", bytes(9), b""]]
)
def test_frames_that_are_no_event_message_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(BadEvent):
        unpack_message(frames)


def test_whatever_a_payload_is_it_is_a_batch_or_refused_and_changes_nothing() -> None:
    rng = random.Random(1)
    log = EventLog(9)
    log.stored("host", [b"one", b"two"])
    good = [message.payload for message in log.take(0.0)]
    mirror = Mirror()
    mirror.tick(0.0)
    for answer in log.snapshot({"host": [b"one"]}, 0.0, list):
        mirror.receive_answer(answer, 0.0)
    for _ in range(20_000):
        payload = bytearray(rng.choice(good))
        for _ in range(rng.randint(1, 3)):
            payload[rng.randrange(len(payload))] = rng.randrange(256)
        before = (mirror.statistics(), frozenset(mirror.held()["host"]))
        try:
            unpack_batch(bytes(payload))
        except BadEvent:
            with pytest.raises(BadEvent):
                mirror.receive(EventMessage(0, bytes(payload)), 0.0)
            assert (mirror.statistics(), frozenset(mirror.held()["host"])) == before


def test_a_publisher_without_epochs_is_refused_since_its_restart_would_not_be_seen() -> None:
    payload = msgspec.msgpack.encode([0.0, [], 0])
    with pytest.raises(BadEvent, match="epoch = 0"):
        unpack_batch(payload)


@pytest.mark.parametrize("frames", [[], [b""], [b"", b"x"], [b"", b"snapshot", b"more"], [b"x", bytes(8)]])
def test_a_request_that_is_none_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(BadEvent):
        unpack_request(frames)
