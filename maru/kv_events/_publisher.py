"""Publisher of KV events, and of answers to requests.

It has a PUB socket for the events, and a ROUTER for readers that missed some.

Rule 1. A change of a book is collected at once, and published by one task a little later, so that changes of the same
        moment leave in one batch. Without changes it publishes a heartbeat.
Rule 2. A reader that does not read misses events, and never delays the publisher; it will see the gap and request them.
Rule 3. Each reader is answered separately, a part at a time, and a bounded number at once. One that takes no part for
        five seconds gets no more, and if others wait for its place, the one that has taken none for the longest loses
        its place. A reader that waits for the list of keys has not been offered a part yet, and stays.
Rule 4. The keys are listed for one reader at a time, and for a bounded share of the time: only that cost grows with the
        books.
Rule 5. An epoch begins with the stored keys, named and published a part at a time. Changes during that are published
        after them, in order, and only then is a reader answered: no reader learns that a key went, or is back, before
        it came.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any, Final

import attrs
import trio

from ..exception_groups import raise_unwrapped
from ..transport import Message, SocketOptions, TrioSocket, open_socket
from ._books import KeyBook, KeyList, list_lazily
from ._log import MOST_HASHES, EventLog
from ._messages import Answer, BadEvent, BlockHash, Replay, Request, unpack_request

_GATHER_TIME: Final = 0.005
_ANSWER_TIMEOUT: Final = 5.0
_MOST_REQUESTS: Final = 64
"""Requests read at once.

Only the last one of each reader is answered.
"""
_MOST_READERS: Final = 16
"""Readers answered at once.

For each, a list of all keys is kept.
"""
_PATIENCE: Final = 0.1
"""Seconds without a part taken, after which a reader loses its place.

It loses the place only if others wait for it.
"""
_REST: Final = 4.0
"""Pause between two listings of the books.

It is counted in units of the last listing's duration.
"""

NameOf = Callable[[Any], "BlockHash | None"]
"""Function that returns a key's block hash; None for unpublished keys."""


def same_name(key: Any) -> BlockHash:
    """Return the key itself."""
    name: BlockHash = key
    return name


@attrs.frozen
class PublisherStatistics:
    """A snapshot of a publisher; counters since it was opened."""

    epoch: int
    """Epoch of this run."""
    sequence: int
    """Last sequence number given."""
    heartbeats: int
    """Batches without events."""
    replays: int
    """Answered requests for missed events."""
    snapshots: int
    """Answered requests for all keys."""
    bad_requests: int
    """Messages that were not requests."""
    given_up: int
    """Answers that a reader did not take in time.

    Answers whose reader had gone count as well.
    """


class EventPublisher:
    """Publisher of the keys of some books.

    Made by :func:`open_publisher` and :func:`publish_events` only.

    Attributes:
        endpoint: the address of the events, with the chosen port.
        answers_endpoint: the address at which readers request missed events.
    """

    def __init__(
        self,
        new_log: Callable[[], EventLog],
        events: TrioSocket,
        answers: TrioSocket,
        topic: bytes,
        heartbeat: float,
    ) -> None:
        self._new_log, self._events, self._answers = new_log, events, answers
        self._topic, self._heartbeat = topic, heartbeat
        self._log = new_log()
        self._books: Mapping[str, KeyBook[Any]] = {}
        self._name_of: NameOf = same_name
        self._news = trio.Event()
        self._early: deque[tuple[Callable[[str, Sequence[BlockHash]], None], str, list[BlockHash]]] | None = None
        """Changes during the publication of the initial keys; ``None`` afterwards."""
        self._answering: dict[bytes, _Answering] = {}
        self._place = trio.lowlevel.ParkingLot()
        self._listing = trio.Lock()
        self._heartbeats = self._replays = self._snapshots = self._bad_requests = self._given_up = 0
        self.endpoint: str = events.endpoints[0]
        self.answers_endpoint: str = answers.endpoints[0]

    def __repr__(self) -> str:
        return f"<EventPublisher at {self.endpoint} of {', '.join(self._books)}>"

    def statistics(self) -> PublisherStatistics:
        """Return an immutable snapshot."""
        return PublisherStatistics(
            self._log.epoch,
            self._log.last,
            self._heartbeats,
            self._replays,
            self._snapshots,
            self._bad_requests,
            self._given_up,
        )

    async def publish(
        self,
        books: Mapping[str, KeyBook[Any]],
        name_of: NameOf = same_name,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Publish the keys of these books, as a new epoch, until cancelled.

        Then it may be called again, with other books. No reader is answered in between: a mirror is not current before
        the first call, nor long after one has ended.

        Args:
            books: the books to publish, by medium.
            name_of: the block hash of a key, or None for a key that is not published.
            task_status: started when the initial keys of the books were published.
        """
        self._log, self._news = self._new_log(), trio.Event()
        self._books, self._name_of = books, name_of
        with ExitStack() as stack:
            self._early = deque()
            held: dict[str, KeyList[Any]] = {}
            for medium, book in books.items():
                held[medium] = list_lazily(book)
                stack.callback(book.watch_keys(_Collector(self, medium)))
            await self._tell_held(held)
            task_status.started()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_telling)
                nursery.start_soon(self._answer_requests)

    async def _tell_held(self, held: Mapping[str, KeyList[Any]]) -> None:
        """Publish the initial keys, a part at a time; then the changes.

        Changes during the publication are kept back until its end.
        """
        self._tell()
        for medium, keys in held.items():
            for start in range(0, len(keys), MOST_HASHES):
                self._log.stored(medium, self._names(keys[start : start + MOST_HASHES]))
                self._tell()
                await trio.lowlevel.checkpoint()
        early = self._early
        assert early is not None
        while early:
            record, medium, names = early.popleft()
            record(medium, names)
            self._tell()
            await trio.lowlevel.checkpoint()
        self._early = None

    def _collect(self, record: Callable[[str, Sequence[BlockHash]], None], medium: str, keys: Sequence[Any]) -> None:
        """Record a change in the log, or keep it back.

        It is kept back while the log lacks the initial keys.
        """
        names = self._names(keys)
        if self._early is None:
            record(medium, names)
        else:
            self._early.append((record, medium, names))
        self._news.set()

    # --- publishing -----------------------------------------------------------------------------------------------

    async def _keep_telling(self) -> None:
        while True:
            with trio.move_on_after(self._heartbeat) as silence:
                await self._news.wait()
                await trio.sleep(_GATHER_TIME)
            if silence.cancelled_caught and not self._news.is_set():
                self._heartbeats += 1
                self._send(self._log.heartbeat(time.time()).frames(self._topic))
            self._news = trio.Event()
            self._tell()

    def _tell(self) -> None:
        for message in self._log.take(time.time()):
            self._send(message.frames(self._topic))

    def _send(self, frames: Sequence[bytes]) -> None:
        self._events.send_nowait(frames)  # a PUB drops messages for a reader that does not read, and never raises

    def _names(self, keys: Iterable[Any]) -> list[BlockHash]:
        return [name for name in map(self._name_of, keys) if name is not None]

    # --- answering ------------------------------------------------------------------------------------------------

    async def _answer_requests(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                for reader, request in self._last_requests(await self._answers.receive_batch(_MOST_REQUESTS)).items():
                    before = self._answering.pop(reader, None)
                    if before is not None:
                        before.is_replaced = True
                        before.scope.cancel()
                    await self._wait_for_a_place()
                    one = self._answering[reader] = _Answering()
                    nursery.start_soon(self._answer, reader, request, one)

    async def _wait_for_a_place(self) -> None:
        """Wait until one more reader may be answered.

        A reader that reads nothing loses its place.
        """
        while len(self._answering) >= _MOST_READERS:
            slowest = min(self._answering.values(), key=lambda one: one.since)
            patience = slowest.since + _PATIENCE - trio.current_time()
            if patience <= 0:
                slowest.scope.cancel()
                patience = math.inf
            with trio.move_on_after(min(patience, _PATIENCE)):
                await self._place.park()

    def _last_requests(self, messages: Iterable[Message]) -> dict[bytes, Request]:
        """Return the last request of each reader.

        It has given up those before.
        """
        requests: dict[bytes, Request] = {}
        for reader, *frames in messages:
            try:
                requests[reader] = unpack_request(frames)
            except BadEvent:
                self._bad_requests += 1
        return requests

    def _answers_to(self, request: Request) -> Iterable[Answer]:
        # No checkpoint between numbering the collected changes and listing the keys: a snapshot has the last number.
        self._tell()
        if isinstance(request, Replay):
            self._replays += 1
            return self._log.replay(request.start, time.time())
        self._snapshots += 1
        held = {medium: list_lazily(book) for medium, book in self._books.items()}
        return self._log.snapshot(held, time.time(), self._names)

    async def _answer(self, reader: bytes, request: Request, one: _Answering) -> None:
        """Send all of the answer, as long as the reader takes it."""
        is_whole = False
        try:
            with one.scope:
                async with self._listing:
                    began = time.perf_counter()
                    answers = self._answers_to(request)
                    await trio.sleep(_REST * (time.perf_counter() - began))
                for answer in answers:
                    one.since = trio.current_time()
                    one.scope.deadline = one.since + _ANSWER_TIMEOUT
                    if not await self._answers.send([reader, *answer.frames(self._topic)]):
                        break
                else:
                    is_whole = True
        finally:
            if self._answering.get(reader) is one:
                del self._answering[reader]
            self._place.unpark()
        self._given_up += not (is_whole or one.is_replaced)


@attrs.define(eq=False)
class _Answering:
    """A reader that is being answered."""

    since: float = math.inf
    """Time when it last took a part, or could begin to.

    The time is infinite until the keys were listed for it.
    """
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    is_replaced: bool = False
    """Whether the reader has sent another request."""


@attrs.frozen(eq=False)
class _Collector:
    """Watcher that collects the changes of one book."""

    publisher: EventPublisher
    medium: str

    def stored(self, keys: Sequence[Any]) -> None:
        self.publisher._collect(self.publisher._log.stored, self.medium, keys)

    def removed(self, keys: Sequence[Any]) -> None:
        self.publisher._collect(self.publisher._log.removed, self.medium, keys)


@asynccontextmanager
async def publish_events(
    books: Mapping[str, KeyBook[Any]],
    endpoint: str,
    answers_endpoint: str,
    *,
    name_of: NameOf = same_name,
    topic: str = "",
    heartbeat: float = 1.0,
    rank: int | None = None,
    block_size: int = 0,
    kept_bytes: int = 16 << 20,
    options: SocketOptions | None = None,
) -> AsyncIterator[EventPublisher]:
    """Publish the keys of these books as KV events, in a block.

    Each opening is a new epoch. Use it in the trio run that uses the books.

    Args:
        books: the books to publish, by medium: ``{"host": tier, ...}``. A tier is one if it has ``list_keys`` and
            ``watch_keys``.
        endpoint: address of the events: ``tcp://127.0.0.1:5557``, ``tcp://host:*``, ``ipc://path``. Readers subscribe
            here.
        answers_endpoint: address at which readers request missed events, and all keys.
        name_of: the block hash of a key, or None for a key that is not published.
        topic: see :func:`open_publisher`, as for the following arguments.
        heartbeat: see :func:`open_publisher`.
        rank: see :func:`open_publisher`.
        block_size: see :func:`open_publisher`.
        kept_bytes: see :func:`open_publisher`.
        options: see :func:`open_publisher`.

    Raises:
        OSError: an address cannot be used.
        ValueError: an address is neither ``tcp://`` nor ``ipc://``; or heartbeat is not positive.
    """
    opening = open_publisher(
        endpoint,
        answers_endpoint,
        topic=topic,
        heartbeat=heartbeat,
        rank=rank,
        block_size=block_size,
        kept_bytes=kept_bytes,
        options=options,
    )
    with raise_unwrapped():
        async with opening as publisher, trio.open_nursery() as nursery:
            await nursery.start(publisher.publish, books, name_of)
            yield publisher
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_publisher(
    endpoint: str,
    answers_endpoint: str,
    *,
    topic: str = "",
    heartbeat: float = 1.0,
    rank: int | None = None,
    block_size: int = 0,
    kept_bytes: int = 16 << 20,
    options: SocketOptions | None = None,
) -> AsyncIterator[EventPublisher]:
    """Open the sockets of a publisher, for an ``async with`` block.

    For books that do not exist yet, or change: :meth:`EventPublisher.publish` publishes.

    Args:
        endpoint: address of the events.
        answers_endpoint: address at which readers send requests.
        topic: the first frame of each message; llm-d's routers expect ``kv@<pod>@<model>``.
        heartbeat: seconds without a change after which an empty batch is published.
        rank: the engine's data-parallel rank, if it has one.
        block_size: tokens in a block, if known.
        kept_bytes: most bytes of published batches that can be requested again. A reader that missed more requests a
            snapshot.
        options: bounds and CURVE keys of both sockets. Every process that can connect may read the keys: without CURVE
            keys, use addresses of this host.

    Raises:
        OSError: an address cannot be used.
        ValueError: an address is neither ``tcp://`` nor ``ipc://``; or heartbeat is not positive.
    """
    if not 0 < heartbeat < float("inf"):
        raise ValueError(f"heartbeat = {heartbeat!r}: must be positive and finite")

    def new_log() -> EventLog:
        return EventLog(secrets.randbits(63) | 1, rank=rank, block_size=block_size, kept_bytes=kept_bytes)

    async with (
        open_socket("pub", bind=[endpoint], options=options) as events,
        open_socket("router", bind=[answers_endpoint], options=options) as answers,
    ):
        yield EventPublisher(new_log, events, answers, topic.encode(), heartbeat)
