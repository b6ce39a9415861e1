"""The rows of host memory: their chunks and their holders. Pure.

vLLM's own offloading asks for each chunk whether it can be loaded, and accepts no correction afterwards. So a
chunk is *here* only once all of its bytes lie in a row, verified; until then it is *coming*. The states of a row::

    free --take_for_store--> written by a worker --stored----.
    free --found-----------> filled from a tier --filled-----+--> here --evicted--> free

A chunk in memory of this process already, in pages of a tier, needs no row: it is verified there, and is *here* in
place, as long as somebody holds it (:mod:`._placed`). A *place* is a row, or a number below zero for such a page.

Rule 1. A chunk that was reported to a request as here is held for it until it loads it, is computed without, or has
    ended.
Rule 2. A request asks the tiers for a chunk once. After a miss it does not ask for it again, until it was preempted.
Rule 3. A chunk that gets no row is missing. No request waits for rows that another one holds, or two could wait for
    each other.
Rule 4. A place that a worker may be copying when vLLM resets the cache is used again only after ``WITHHELD_STEPS``:
    vLLM does not report the end of these copies, but has them end in the next step.
Rule 5. A place that a worker may be copying when the table starts over, of which vLLM knows nothing, stays with its
    chunk until that copy is reported as over. So a report never counts for another row than that which was copied.
Rule 6. No chunk of a request that is computed or loaded at a reset is stored until it was preempted: its new tokens
    attend to blocks from before, and vLLM offers all of it again.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

import attrs

from backends.abc import EVICTED, Key

from ._placed import Placed, PlacedPages

if TYPE_CHECKING:
    from backends.base.blocks import BlockPool

WITHHELD_STEPS: Final = 16
"""Steps that a place is withheld after a reset.

More than vLLM schedules ahead of its workers, with any depth of a pipeline. The workers end their copies in the first
of them.
"""


class Answer(enum.Enum):
    """The state of a chunk."""

    HERE = "here"
    """In a row, verified, and held for the request that asked."""
    COMING = "coming"
    """On its way into a row."""
    ASKED = "asked"
    """Unknown: the tiers are asked."""
    MISSING = "missing"
    """In no tier, or there is no row for it."""


@attrs.define(eq=False)
class _Request:
    """The state of one request."""

    held: dict[Key, int] = attrs.Factory(dict)
    """Places of chunks that were reported to it as here."""
    new: list[tuple[int, Key]] = attrs.Factory(list)
    """Chunks to ask the tiers for, with their positions in the sequence."""
    asked: set[Key] = attrs.Factory(set)
    """Chunks that the tiers are being asked for."""
    missing: set[Key] = attrs.Factory(set)
    """Chunks that the tiers do not have, or that got no row."""
    fills: int = 0
    """Number of its running fills."""
    runs: bool = False
    """Whether it is computed: it loads nothing more, unless it is preempted."""
    over: bool = False
    """Whether it has ended, or was preempted."""
    outlived: bool = False
    """Whether it was computed or loaded at a cache reset: rule 6."""


@attrs.frozen(eq=False)
class Question:
    """A lookup to make: consecutive chunks, of which the leading ones count."""

    request_id: str
    request: _Request
    """The asking request.

    It is another one than that of the id, once that was preempted.
    """
    keys: list[Key]
    """Keys of the chunks, in order."""
    generation: int
    """Generation of the table when it was asked."""


@attrs.frozen(eq=False)
class Fill:
    """Chunks that are to come from the tiers.

    They are loaded into rows, or verified in place.
    """

    question: Question
    """The lookup that found them."""
    keys: Sequence[Key]
    """Keys of the chunks, in order."""
    rows: Sequence[int]
    """One row for each; none if they are verified in place."""


@attrs.define(eq=False)
class RowTable:
    """The rows of one instance's host memory."""

    pool: BlockPool
    """All rows, by key if a chunk is here.

    The least recently used one makes room.
    """
    generation: int = 0
    """Number of resets."""
    refused: int = 0
    """Number of chunks that got no row."""
    placed: PlacedPages = attrs.Factory(lambda table: PlacedPages(table.pool.capacity), takes_self=True)
    """Pages of tiers in place, at most one per row."""
    _requests: dict[str, _Request] = attrs.Factory(dict)
    _coming: set[Key] = attrs.Factory(set)
    _written: dict[Key, int] = attrs.Factory(dict)
    _loading: dict[str, dict[Key, int]] = attrs.Factory(dict)
    _withheld: list[tuple[int, list[int], list[int]]] = attrs.Factory(list)  # end of each: staged rows, held places
    _steps: int = 0

    # --- chunks that a request can load ---------------------------------------------------------------------------

    def begin(self, request_id: str) -> None:
        """Forget a request that is new or was preempted."""
        self.end(request_id)
        self._requests[request_id] = _Request()

    def knows(self, request_id: str) -> bool:
        """Return whether the request has begun and not ended."""
        return request_id in self._requests

    def run(self, request_id: str) -> None:
        """Mark a request as computed from this step on.

        Chunks that were reported to it, and that it has not loaded, were in vLLM's own cache.
        """
        request = self._requests.get(request_id)
        if request is not None:
            request.runs = True
            self._let_go_of(request)

    def end(self, request_id: str) -> None:
        """End a request.

        Chunks that it is loading stay held until that is over, too.
        """
        request = self._requests.pop(request_id, None)
        if request is not None:
            request.over = True
            self._let_go_of(request)

    def where(self, request_id: str, key: Key, position: int = 0) -> Answer:
        """Return the state of a chunk; queue it for :meth:`questions` if unknown.

        ``position`` is its position in the sequence.
        """
        request = self._requests.get(request_id)
        if request is None:
            return Answer.MISSING
        place = request.held.get(key)
        if place is not None:
            if place >= 0 or self.placed.holds(place):
                return Answer.HERE
            del request.held[key]  # its tier has lost touch with it
            self.placed.release((place,))
        place = self.placed.take(key)
        if place is None:
            (place,) = self.pool.upgrade((key,))
        if place != EVICTED:
            request.held[key] = place
            return Answer.HERE
        if key in self._coming or key in self._written:
            return Answer.COMING
        if key in request.missing:
            return Answer.MISSING
        if key not in request.asked:
            request.asked.add(key)
            request.new.append((position, key))
        return Answer.ASKED

    def questions(self) -> list[Question]:
        """Return the lookups to make now.

        A window of a sequence is asked for from its end; then each chunk is a question of its own.
        """
        questions: list[Question] = []
        for request_id, request in self._requests.items():
            last = None
            for position, key in request.new:
                if last is None or position <= last:
                    questions.append(Question(request_id, request, [], self.generation))
                questions[-1].keys.append(key)
                last = position
            request.new = []
        return questions

    def found(self, question: Question, found: int, *, in_place: bool = False) -> Fill | None:
        """Record the number of leading chunks found. Returns the fill, if any.

        ``in_place``: all of them lie in memory where they can be used in place; otherwise none does.
        """
        request, keys = question.request, question.keys
        if request.over:
            return None
        request.asked.difference_update(keys)
        request.missing.update(keys[found:])
        wanted = [key for key in keys[:found] if not self._known(key)]
        if in_place and len(wanted) == found <= self.placed.room:
            return self._begin_fill(question, wanted, ()) if wanted else None
        return self._fill_rows(question, wanted)

    def filled(self, fill: Fill, loaded: int, *, safe: bool = True) -> None:
        """Record the end of a fill: the leading rows that are filled.

        ``safe``: whether no copy goes on into the others. If that is not known, these rows are never used again.
        """
        if not self._is_current(fill):
            loaded = 0
        held: list[int] = []
        self.pool.register(fill.keys[:loaded], fill.rows[:loaded], hold=held)
        if safe:
            self.pool.give_back(fill.rows[loaded:])
        fill.question.request.missing.update(fill.keys[loaded:])
        self._end_fill(fill, held)

    def verified(self, fill: Fill, blocks: Placed, loaded: int, let_go: Callable[[], None]) -> Fill | None:
        """Record the leading chunks that were verified in place.

        Returns a fill of rows for the others, if any.

        Args:
            fill: the chunks that were to be verified.
            blocks: all of them, in place.
            loaded: number of leading chunks that are verified.
            let_go: is called once nobody holds a page of them any more.
        """
        current, request = self._is_current(fill), fill.question.request
        held = self.placed.add(fill.keys[: loaded if current else 0], blocks, let_go)
        self._end_fill(fill, held)
        if not current or request.over or loaded == len(fill.keys):
            return None
        return self._fill_rows(fill.question, [key for key in fill.keys[loaded:] if not self._known(key)])

    def _fill_rows(self, question: Question, wanted: Sequence[Key]) -> Fill | None:
        rows = self._take(wanted)
        question.request.missing.update(wanted[len(rows) :])
        return self._begin_fill(question, wanted[: len(rows)], rows) if rows else None

    def _begin_fill(self, question: Question, keys: Sequence[Key], rows: Sequence[int]) -> Fill:
        self._coming.update(keys)
        question.request.fills += 1
        return Fill(question, keys, rows)

    def _end_fill(self, fill: Fill, held: Sequence[int]) -> None:
        """End a fill, and hold its places for the request that asked."""
        request = fill.question.request
        if self._is_current(fill):
            self._coming.difference_update(fill.keys)
        request.fills -= 1
        if request.over or request.runs:
            self._release(held)
        else:
            request.held.update(zip(fill.keys, held, strict=False))

    def _is_current(self, fill: Fill) -> bool:
        return fill.question.generation == self.generation

    def waits(self) -> bool:
        """Return whether all requests wait for the tiers.

        Then nothing else is to be done.
        """
        return bool(self._requests) and all(request.asked or request.fills for request in self._requests.values())

    def use(self, keys: Iterable[Key]) -> None:
        """Mark chunks as used, wherever they are loaded from."""
        self.pool.use(list(self.pool.contains(list(keys))))

    # --- loads ----------------------------------------------------------------------------------------------------

    def load(self, request_id: str, keys: Sequence[Key]) -> list[int]:
        """Return the places of chunks that count as here for a request.

        They are held until :meth:`loaded`.
        """
        places = [self.placed.take(key, looked_at=True) for key in keys]
        in_rows = [key for key, place in zip(keys, places, strict=True) if place is None]
        rows = self.pool.upgrade(in_rows)
        assert EVICTED not in rows, "a chunk that is not here is to be loaded"
        self.pool.use(in_rows)
        left = iter(rows)
        taken = [next(left) if place is None else place for place in places]
        self._loading.setdefault(request_id, {}).update(zip(keys, taken, strict=True))
        request = self._requests.get(request_id)
        if request is not None:
            self._let_go_of(request)
        return taken

    def loaded(self, request_id: str, keys: Iterable[Key]) -> None:
        """Release chunks that a worker has loaded."""
        loading = self._loading.get(request_id, {})
        self._release([loading.pop(key) for key in keys if key in loading])
        if not loading:
            self._loading.pop(request_id, None)

    # --- stores ---------------------------------------------------------------------------------------------------

    def take_for_store(self, keys: Sequence[Key], request_id: str = "") -> tuple[list[Key], list[int], list[Key]]:
        """Take rows for a worker to write a request's chunks into.

        Returns:
            The chunks that have one: those that are not here, nor coming, as far as there is room; their rows; and the
                chunks
            that were evicted for them.
        """
        request = self._requests.get(request_id)
        if request is not None and request.outlived:
            return [], [], []
        wanted = [key for key in dict.fromkeys(keys) if not self._known(key)]
        evicted: list[Key] = []
        stop = self.pool.on_evicted(evicted.extend)
        try:
            rows = self._take(wanted)
        finally:
            stop()
        self._written.update(zip(wanted, rows, strict=False))
        return wanted[: len(rows)], rows, evicted

    def rows_of(self, keys: Iterable[Key]) -> dict[Key, int]:
        """Return the rows that workers write these chunks into."""
        return {key: self._written[key] for key in keys if key in self._written}

    def stored(self, keys: Iterable[Key], success: bool = True) -> tuple[list[Key], list[int]]:
        """Record chunks that a worker has written. Returns them and their rows.

        They are here from now on, and their rows are held until :meth:`let_go`.
        """
        keys = [key for key in keys if key in self._written]
        rows = [self._written.pop(key) for key in keys]
        if not success:
            self.pool.give_back(rows)
            return [], []
        held: list[int] = []
        self.pool.register(keys, rows, hold=held)
        return keys, held

    def let_go(self, rows: Sequence[int]) -> None:
        """Release rows that were copied into the tiers, or will not be."""
        self.pool.release(rows)

    # --- all of it ------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Count a step that vLLM has planned."""
        self._steps += 1
        self.placed.step()
        while self._withheld and self._withheld[0][0] <= self._steps:
            _, staged, held = self._withheld.pop(0)
            self.pool.give_back(staged)
            self._release(held)

    def reset(self) -> None:
        """Forget all chunks, as vLLM does with cache and jobs: rule 4."""
        self.start_over()
        for request_id, request in self._requests.items():
            request.outlived |= request.runs or request_id in self._loading
        copied = [row for loading in self._loading.values() for row in loading.values()]
        self._withheld.append((self._steps + WITHHELD_STEPS, list(self._written.values()), copied))
        self._loading.clear()
        self._written.clear()

    def start_over(self) -> None:
        """Forget all chunks except those that workers copy: rule 5."""
        self.generation += 1
        for request_id, request in list(self._requests.items()):
            self.begin(request_id)
            anew = self._requests[request_id]
            anew.runs, anew.outlived = request.runs, request.outlived
        self._coming.clear()
        keys = self.pool.list_keys()
        self.pool.forget(keys, self.pool.slots(keys))
        self.placed.forget()

    def _let_go_of(self, request: _Request) -> None:
        held, request.held = request.held, {}
        self._release(held.values())

    def _release(self, places: Iterable[int]) -> None:
        places = list(places)
        self.pool.release([place for place in places if place >= 0])
        self.placed.release(place for place in places if place < 0)

    def _known(self, key: Key) -> bool:
        return key in self._coming or key in self._written or key in self.placed or bool(self.pool.contains((key,)))

    def _take(self, keys: Sequence[Key]) -> list[int]:
        """Take rows for as many of the leading keys as possible."""
        counted = self.pool.statistics()
        # Rows that are not found any more are held, too: then there is room for more than this, and at least for the
        # free rows.
        room = self.pool.free + max(0, counted.registered - counted.held)
        rows = self.pool.take_evicting(keys[:room]) or []
        self.refused += len(keys) - len(rows)
        return rows
