"""Publishes KV events: a PUB socket for the events, and a ROUTER that answers readers which missed some.

Rule 1. A change of a book is collected where it happens, and published by one task a little later, so that changes of the
        same moment leave in one batch. Without changes it publishes a heartbeat.
Rule 2. A reader that does not read misses events, and never delays the publisher; it will see the gap and ask.
Rule 3. Each reader is answered by itself, a part at a time, and a bounded number at once. One that takes no part for five
        seconds gets no more, and where others wait for its place, the one that has taken none for the longest leaves it. Who
        waits for the list of what is held has been offered none, and stays.
Rule 4. What is held is listed for one reader at a time, and for a bounded share of the time: that alone grows with the books.
Rule 5. An epoch begins with what is held, named and told a part at a time. What changes meanwhile is told behind it, in its
        order, and only then is a reader answered: nobody is told that a key went, or is back, before it came.
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
"""Read at once: of each reader the last one is answered."""
_MOST_READERS: Final = 16
"""Answered at once: for each, a list of all keys is kept."""
_PATIENCE: Final = 0.1
"""Seconds without a part taken after which a reader leaves its place to others."""
_REST: Final = 4.0
"""Times what listing the books has taken, until they are listed again."""

NameOf = Callable[[Any], "BlockHash | None"]
"""The block hash of a key; None for a key that is not told."""


def same_name(key: Any) -> BlockHash:
    """The key itself."""
    name: BlockHash = key
    return name


@attrs.frozen
class PublisherStatistics:
    """A snapshot of a publisher; counters since it was opened."""

    epoch: int
    """Of this run."""
    sequence: int
    """The last number given."""
    heartbeats: int
    """Batches without events."""
    replays: int
    """Requests for what was told before that were answered."""
    snapshots: int
    """Requests for everything that were answered."""
    bad_requests: int
    """What came and was no request."""
    given_up: int
    """Answers that a reader did not take in time, or whose reader had gone."""


class EventPublisher:
    """Publishes the keys of some books. Made by :func:`open_publisher` and :func:`publish_events` only.

    Attributes:
        endpoint: the address of the events, with the port that was chosen.
        answers_endpoint: the address at which readers ask for what they missed.
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
        """Changes that came before what the books held was told; ``None`` once that is."""
        self._answering: dict[bytes, _Answering] = {}
        self._place = trio.lowlevel.ParkingLot()
        self._listing = trio.Lock()
        self._heartbeats = self._replays = self._snapshots = self._bad_requests = self._given_up = 0
        self.endpoint: str = events.endpoints[0]
        self.answers_endpoint: str = answers.endpoints[0]

    def __repr__(self) -> str:
        return f"<EventPublisher at {self.endpoint} of {', '.join(self._books)}>"

    def statistics(self) -> PublisherStatistics:
        """An immutable snapshot."""
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
        """Publish what these books hold, as a new epoch, until cancelled. Then it may be called again, with other ones.

        No reader is answered in between: a mirror is not current before the first call, nor long after one has ended.

        Args:
            books: what is published, by medium.
            name_of: the block hash of a key, or None for a key that is not published.
            task_status: started when what the books hold was published.
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
        """Tell what the books held, a part at a time; then what has changed meanwhile, which is kept back until then."""
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
        """Record a change in the log, or keep it back as long as the log lacks what it has changed."""
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
        """Wait until one more may be answered. Whoever reads nothing gives up its place."""
        while len(self._answering) >= _MOST_READERS:
            slowest = min(self._answering.values(), key=lambda one: one.since)
            patience = slowest.since + _PATIENCE - trio.current_time()
            if patience <= 0:
                slowest.scope.cancel()
                patience = math.inf
            with trio.move_on_after(min(patience, _PATIENCE)):
                await self._place.park()

    def _last_requests(self, messages: Iterable[Message]) -> dict[bytes, Request]:
        """The last request of each reader: it has given up those before."""
        requests: dict[bytes, Request] = {}
        for reader, *frames in messages:
            try:
                requests[reader] = unpack_request(frames)
            except BadEvent:
                self._bad_requests += 1
        return requests

    def _answers_to(self, request: Request) -> Iterable[Answer]:
        # No checkpoint between telling what was collected and listing what is held: a snapshot stands at the last number.
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
    """When it took a part last, or could begin to; infinite until what is held was listed for it."""
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    is_replaced: bool = False
    """It has asked for something else."""


@attrs.frozen(eq=False)
class _Collector:
    """Collects the changes of one book."""

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
    """Publish the contents of these books as KV events, for the length of an ``async with`` block.

    Each opening is a new epoch. Use it in the trio run that uses the books.

    Args:
        books: what is told, by medium: ``{"host": tier, ...}``. A tier is one where it has ``list_keys`` and ``watch_keys``.
        endpoint: where to tell: ``tcp://127.0.0.1:5557``, ``tcp://host:*``, ``ipc://path``. Readers subscribe here.
        answers_endpoint: where readers ask for what they missed, and for everything.
        name_of: the block hash of a key, or None for a key that is not published.
        topic: see :func:`open_publisher`, as for what follows.
        heartbeat: of :func:`open_publisher`.
        rank: of :func:`open_publisher`.
        block_size: of :func:`open_publisher`.
        kept_bytes: of :func:`open_publisher`.
        options: of :func:`open_publisher`.

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
    """Open the sockets of a publisher, for the length of an ``async with`` block: for books that are not there yet, or change.

    Its :meth:`EventPublisher.publish` publishes.

    Args:
        endpoint: where to tell.
        answers_endpoint: where readers ask.
        topic: the first frame of each message; llm-d's routers expect ``kv@<pod>@<model>``.
        heartbeat: seconds without a change after which an empty batch is published.
        rank: the engine's data-parallel rank, if it has one.
        block_size: tokens in a block, if known.
        kept_bytes: of published batches that can be requested again. A reader that missed more requests a snapshot.
        options: bounds and CURVE keys of both sockets. Every process that can connect may read which keys there are: without
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
