"""What the scheduler's half knows of each request: which chunks to look up, to load and to store. Pure.

The states of a request, as far as what is cached of it is concerned::

    NEW --ask--> ASKED --answer--> FOUND --allocated--> LOADING --loaded--> ADMITTED
                     `----------> MISSED --allocated--------------------------^
                                              LOADING --not loaded--> FAILED

Rule 1. A request is asked for once. vLLM asks again and again whether it may be scheduled; the answer is remembered.
Rule 2. A request that vLLM asks for after it was admitted was preempted: it is new again.
Rule 3. One whose load has failed is computed: it is not looked up again, or a damaged chunk could be tried for ever.
Rule 4. How many tokens a request has computed is what vLLM said when it asked. When it allocates, its own count is still 0 for
        a request that was preempted.
Rule 5. The chunk that holds the last token is never loaded: that token is computed in any case, for what follows it.
Rule 6. A chunk is stored only if it has every block that a request needs which goes on behind it. So each prefix of whole
        chunks that is found can be loaded, whatever its length.
Rule 7. Nothing is stored of a request that runs when the cache is reset, until it was preempted: what it computes attends to
        blocks of before.

A model may have several *groups* of KV caches, each with blocks of its own for one and the same tokens. A chunk has those of
all groups. A group whose layers see only a window gives up a block once the window has passed it: then vLLM's table has block
0, which is none. Where a chunk was computed by this request, what is given up by then lies before every window that ends with
the chunk or later, since windows only move on. Where vLLM had the chunk in its own cache, and took over only the last window,
it does not: that is what rule 6 is about.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Final

import attrs

from ._plans import LoadPlan, StorePlan

_NO_BLOCK: Final = 0
"""vLLM's number for a block that a window has passed."""

Blocks = Sequence[Sequence[int]]
"""All block numbers of a request, of each group."""


class State(enum.Enum):
    """How far a request is."""

    NEW = "new"
    ASKED = "asked"
    FOUND = "found"
    MISSED = "missed"
    LOADING = "loading"
    ADMITTED = "admitted"
    FAILED = "failed"


MOVES: dict[State, frozenset[State]] = {
    State.NEW: frozenset({State.ASKED, State.MISSED, State.ADMITTED}),
    State.ASKED: frozenset({State.FOUND, State.MISSED, State.ADMITTED, State.NEW}),
    State.FOUND: frozenset({State.LOADING, State.ADMITTED, State.NEW}),
    State.MISSED: frozenset({State.ADMITTED, State.NEW}),
    State.LOADING: frozenset({State.ADMITTED, State.FAILED}),
    State.ADMITTED: frozenset({State.NEW, State.ADMITTED}),
    State.FAILED: frozenset({State.FAILED}),
}
"""From each state to which."""


@attrs.frozen
class BlockGroup:
    """A group of KV caches, whose layers share the numbers of their blocks."""

    block_size: int
    """Tokens in a block."""
    window: int = 0
    """Tokens that its layers see, the next one among them; 0: all."""

    def first_needed(self, tokens: int) -> int:
        """The first block that a request needs which goes on behind so many tokens."""
        return max(0, tokens - self.window + 1) // self.block_size if self.window else 0

    def has(self, blocks: Sequence[int], at: int) -> bool:
        """Whether a request with these blocks has the one at this position."""
        return not self.window or blocks[at] != _NO_BLOCK


@attrs.frozen
class Question:
    """What has to be looked up before it is known how much of a request is cached."""

    hashes: Sequence[bytes]
    """One for each chunk, in order."""


@attrs.define(eq=False)
class RequestRecord:
    """One request."""

    request_id: str
    hashes: Sequence[bytes]
    """vLLM's own list, which grows with the request: one for each run of ``hash_tokens``."""
    state: State = State.NEW
    computed: int = 0
    """Tokens that vLLM had of it when it asked last."""
    first: int = 0
    """The chunk that was asked for first."""
    stop: int = 0
    """Behind the last chunk that was found."""
    stored: int = 0
    """Chunks, from the beginning, that were found or given to be stored."""
    adapter: str = ""
    """The identity of the adapter that it is computed with."""
    outlived: bool = False
    """Whether the cache was reset while it ran: rule 7."""

    def move(self, state: State) -> None:
        """Go to another state.

        Raises:
            RuntimeError: there is no such way; nothing has changed.
        """
        if state not in MOVES[self.state]:
            raise RuntimeError(f"a request that is {self.state.value} cannot become {state.value}")
        self.state = state

    def ask_again(self) -> None:
        """Forget the answer, or that one is awaited. Nothing changes once the request has got its blocks."""
        if self.state in (State.ASKED, State.FOUND, State.MISSED):
            self.move(State.NEW)


@attrs.define(eq=False)
class RequestTable:
    """All requests of a scheduler."""

    groups: Sequence[BlockGroup]
    """Of KV caches."""
    chunk_tokens: int
    """Tokens in a chunk, a multiple of each group's ``block_size``."""
    hash_tokens: int
    """Tokens that one of vLLM's hashes stands for; each ``block_size`` is a multiple of it."""
    records: dict[str, RequestRecord] = attrs.Factory(dict)

    def __attrs_post_init__(self) -> None:
        sizes = [group.block_size for group in self.groups]
        if any(self.chunk_tokens % size or size % self.hash_tokens for size in sizes):
            raise ValueError(f"chunks of {self.chunk_tokens} tokens, blocks of {sizes}, hashes of {self.hash_tokens}")

    def add(self, request_id: str, hashes: Sequence[bytes], adapter: str = "") -> RequestRecord:
        """A request, which may be there already."""
        record = self.records.get(request_id)
        if record is None:
            record = self.records[request_id] = RequestRecord(request_id, hashes, adapter=adapter)
        return record

    def match(self, record: RequestRecord, tokens: int, computed: int) -> int | Question | None:
        """How many tokens behind those that vLLM has computed can be loaded.

        Args:
            record: the request.
            tokens: how many it has.
            computed: how many of these vLLM has.

        Returns:
            That number; or what has to be looked up first; or ``None`` while that is under way.
        """
        if record.state is State.FAILED:
            return 0
        if record.state is State.ADMITTED:
            record.move(State.NEW)
            record.stored = 0  # what was being stored of it was cancelled, so it is offered once more
            record.outlived = False
        elif record.state in (State.FOUND, State.ASKED) and computed < record.first * self.chunk_tokens:
            record.move(State.NEW)  # vLLM has evicted what it had before the chunks that were asked for
        record.computed = computed
        if record.state is State.NEW:
            return self._ask(record, tokens)
        if record.state is State.ASKED:
            return None
        if record.state is State.MISSED:
            return 0
        return max(0, record.stop * self.chunk_tokens - computed)

    def _ask(self, record: RequestRecord, tokens: int) -> int | Question:
        first = record.computed // self.chunk_tokens
        stop = min((tokens - 1) // self.chunk_tokens, self._hashed(record))
        if stop <= first:
            record.move(State.MISSED)
            return 0
        record.first, record.stop = first, stop
        record.move(State.ASKED)
        return Question(self._hashes(record, first, stop))

    def answer(self, record: RequestRecord, found: int) -> None:
        """So many chunks of what was asked for are there."""
        if record.state is not State.ASKED:  # it was admitted without, or ended, meanwhile
            return
        record.stop = record.first + found
        record.move(State.FOUND if found else State.MISSED)

    def allocated(self, record: RequestRecord, blocks: Blocks, external: int) -> LoadPlan | None:
        """Take in that vLLM has given blocks to a request, and wants so many tokens loaded into them.

        Args:
            record: the request.
            blocks: all its block numbers, of each group in order.
            external: tokens behind those that it has computed; 0: none.
        """
        if record.state is State.FAILED or (not external and record.state is State.LOADING):
            return None
        if not external or record.state is not State.FOUND:
            record.move(State.ADMITTED)
            return None
        tokens = range(record.computed, record.computed + external)
        first, stop = tokens.start // self.chunk_tokens, -(-tokens.stop // self.chunk_tokens)
        columns = [self._column(blocks, chunk, tokens) for chunk in range(first, stop)]
        # What was found need not be stored again. What vLLM has before it may not be in any tier, and is offered to them.
        record.stored = stop if not first else record.stored
        record.move(State.LOADING)
        return LoadPlan(record.request_id, self._hashes(record, first, stop), columns, record.adapter)

    def sources(self, record: RequestRecord, external: int, tiers: Sequence[str]) -> dict[str, int]:
        """How many of the tokens that a request is to load come from each tier.

        Args:
            record: the request.
            external: as in :meth:`allocated`.
            tiers: of each chunk that was found, the tier that it is read from.
        """
        start, stop, size = record.computed, record.computed + external, self.chunk_tokens
        sources: dict[str, int] = {}
        for chunk, tier in enumerate(tiers, record.first):
            tokens = min(stop, (chunk + 1) * size) - max(start, chunk * size)
            if tokens > 0:
                sources[tier] = sources.get(tier, 0) + tokens
        return sources

    def loaded(self, record: RequestRecord, complete: bool) -> None:
        """The load of a request is over."""
        if record.state is State.LOADING:
            record.move(State.ADMITTED if complete else State.FAILED)
        if not complete:
            record.stored = 0  # what could not be loaded is to be stored anew

    def store(self, record: RequestRecord, computed: int, blocks_of: Callable[[], Blocks]) -> StorePlan | None:
        """The chunks of a request that will be whole, and were not stored yet, when it has computed so many tokens.

        ``blocks_of`` gives all its block numbers, of each group; it is called only where there are such chunks.
        """
        first, stop = record.stored, min(computed // self.chunk_tokens, self._hashed(record))
        if stop <= first or record.outlived:
            return None
        blocks = blocks_of()
        record.stored = stop
        # A window gives up blocks from the beginning on: the chunks that lack some are the first ones.
        while not self._has_needed(blocks, first):
            first += 1
            if first == stop:
                return None
        columns = [self._column(blocks, chunk, range(stop * self.chunk_tokens)) for chunk in range(first, stop)]
        return StorePlan(record.request_id, self._hashes(record, first, stop), columns, first, record.adapter)

    def reset(self) -> None:
        """Forget what was found for requests that wait, and store nothing more of those that run: rule 7."""
        for record in self.records.values():
            record.ask_again()
            record.outlived = record.state is not State.NEW

    def _has_needed(self, blocks: Blocks, chunk: int) -> bool:
        """Whether these blocks are all that is needed of a chunk: rule 6."""
        stop = (chunk + 1) * self.chunk_tokens
        return all(
            group.has(given, at)
            for group, given in zip(self.groups, blocks, strict=True)
            for at in range(
                max(chunk * self.chunk_tokens // group.block_size, group.first_needed(stop)), stop // group.block_size
            )
        )

    def _column(self, blocks: Blocks, chunk: int, tokens: range) -> list[int | None]:
        """The blocks of a chunk that hold some of these tokens, group by group; ``None`` for the others."""
        column: list[int | None] = []
        for group, given in zip(self.groups, blocks, strict=True):
            size, per_chunk = group.block_size, self.chunk_tokens // group.block_size
            wanted = range(tokens.start // size, tokens.stop // size)
            positions = range(chunk * per_chunk, (chunk + 1) * per_chunk)
            column += [given[at] if at in wanted and group.has(given, at) else None for at in positions]
        return column

    def _hashed(self, record: RequestRecord) -> int:
        """Whole chunks that have a hash."""
        return len(record.hashes) * self.hash_tokens // self.chunk_tokens

    def _hashes(self, record: RequestRecord, first: int, stop: int) -> list[bytes]:
        step = self.chunk_tokens // self.hash_tokens
        return [bytes(record.hashes[(chunk + 1) * step - 1]) for chunk in range(first, stop)]
