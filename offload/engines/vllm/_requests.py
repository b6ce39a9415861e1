"""The scheduler half's state of each request. Pure.

It determines the chunks to look up, to load and to store.

The states of a request with regard to its cached chunks::

    NEW --ask--> ASKED --answer--> FOUND --allocated--> LOADING --loaded--> ADMITTED
                     `----------> MISSED --allocated--------------------------^
                                              LOADING --not loaded--> FAILED

Rule 1. A request is looked up once. vLLM asks again and again whether it may be scheduled; the answer is remembered.
Rule 2. A request that vLLM asks for after it was admitted was preempted: it is new again.
Rule 3. One whose load has failed is computed: it is not looked up again, or a damaged chunk could be tried for ever.
Rule 4. The number of computed tokens of a request is the one that vLLM passed when it asked. When it allocates, its own
    count is still 0 for a request that was preempted.
Rule 5. The chunk that holds the last token is never loaded: that token is computed in any case, to get the next one.
Rule 6. A chunk is stored only if it has every block that is needed by a request that goes on after it. So each prefix
    of whole chunks that is found can be loaded, whatever its length.
Rule 7. Nothing is stored of a request that runs when the cache is reset, until it was preempted: its new tokens attend
    to blocks from before.

A model may have several *groups* of KV caches, each with blocks of its own for one and the same tokens. A chunk has
those of all groups. A group whose layers see only a window gives up a block once the window has passed it: then vLLM's
table has block 0, which is none. If this request computed a chunk, blocks given up by then lie before every window that
ends with the chunk or later, since windows only move on. If vLLM had the chunk in its own cache, and took over only the
last window, they may not: that is the reason for rule 6.
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
    """The state of a request."""

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
"""The legal moves from each state."""


@attrs.frozen
class BlockGroup:
    """A group of KV caches whose layers share block numbers."""

    block_size: int
    """Tokens in a block."""
    window: int = 0
    """Tokens that its layers see, the next one among them; 0: all."""

    def first_needed(self, tokens: int) -> int:
        """Return the first block that a request of ``tokens`` tokens needs later."""
        return max(0, tokens - self.window + 1) // self.block_size if self.window else 0

    def has(self, blocks: Sequence[int], at: int) -> bool:
        """Return whether these blocks include the one at this position."""
        return not self.window or blocks[at] != _NO_BLOCK


@attrs.frozen
class Question:
    """A lookup that must come before a request's match is known."""

    hashes: Sequence[bytes]
    """One hash for each chunk, in order."""


@attrs.define(eq=False)
class RequestRecord:
    """One request."""

    request_id: str
    hashes: Sequence[bytes]
    """vLLM's own list of hashes, which grows with the request.

    It has one for each run of ``hash_tokens``.
    """
    state: State = State.NEW
    computed: int = 0
    """Tokens that vLLM had computed of it when it last asked."""
    first: int = 0
    """The first chunk of the lookup."""
    stop: int = 0
    """End of the chunks that were found."""
    stored: int = 0
    """Leading chunks that were found or given to be stored."""
    adapter: str = ""
    """Identity of the adapter that it is computed with."""
    outlived: bool = False
    """Whether the cache was reset while it ran: rule 7."""

    def move(self, state: State) -> None:
        """Go to another state.

        Raises:
            RuntimeError: there is no such move; nothing has changed.
        """
        if state not in MOVES[self.state]:
            raise RuntimeError(f"a request that is {self.state.value} cannot become {state.value}")
        self.state = state

    def ask_again(self) -> None:
        """Forget the answer, or the wait for one.

        Nothing changes once the request has got its blocks.
        """
        if self.state in (State.ASKED, State.FOUND, State.MISSED):
            self.move(State.NEW)


@attrs.define(eq=False)
class RequestTable:
    """All requests of a scheduler."""

    groups: Sequence[BlockGroup]
    """The groups of KV caches."""
    chunk_tokens: int
    """Tokens in a chunk, a multiple of each group's ``block_size``."""
    hash_tokens: int
    """Tokens for each of vLLM's hashes; divides each ``block_size``."""
    records: dict[str, RequestRecord] = attrs.Factory(dict)

    def __attrs_post_init__(self) -> None:
        sizes = [group.block_size for group in self.groups]
        if any(self.chunk_tokens % size or size % self.hash_tokens for size in sizes):
            raise ValueError(f"chunks of {self.chunk_tokens} tokens, blocks of {sizes}, hashes of {self.hash_tokens}")

    def add(self, request_id: str, hashes: Sequence[bytes], adapter: str = "") -> RequestRecord:
        """Return the record of a request; add it if it is new."""
        record = self.records.get(request_id)
        if record is None:
            record = self.records[request_id] = RequestRecord(request_id, hashes, adapter=adapter)
        return record

    def match(self, record: RequestRecord, tokens: int, computed: int) -> int | Question | None:
        """Return the number of loadable tokens after the computed ones.

        Args:
            record: the request.
            tokens: number of its tokens.
            computed: number of these that vLLM has.

        Returns:
            That number; or the lookup that must come first; or ``None`` while that is running.
        """
        if record.state is State.FAILED:
            return 0
        if record.state is State.ADMITTED:
            record.move(State.NEW)
            record.stored = 0  # its stores were cancelled, so it is offered again
            record.outlived = False
        elif record.state in (State.FOUND, State.ASKED) and computed < record.first * self.chunk_tokens:
            record.move(State.NEW)  # vLLM has evicted its blocks before the looked-up chunks.
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
        """Record the answer to the lookup: the number of leading chunks found."""
        if record.state is not State.ASKED:  # it was admitted without, or ended, meanwhile
            return
        record.stop = record.first + found
        record.move(State.FOUND if found else State.MISSED)

    def allocated(self, record: RequestRecord, blocks: Blocks, external: int) -> LoadPlan | None:
        """Record the blocks of a request. Returns the plan of its load.

        Args:
            record: the request.
            blocks: all its block numbers, of each group in order.
            external: tokens to load after those that it has computed; 0: none.
        """
        if record.state is State.FAILED or (not external and record.state is State.LOADING):
            return None
        if not external or record.state is not State.FOUND:
            record.move(State.ADMITTED)
            return None
        tokens = range(record.computed, record.computed + external)
        first, stop = tokens.start // self.chunk_tokens, -(-tokens.stop // self.chunk_tokens)
        columns = [self._column(blocks, chunk, tokens) for chunk in range(first, stop)]
        # Found chunks need not be stored again. Earlier chunks, which vLLM has, may be in no tier, and are offered to
        # them.
        record.stored = stop if not first else record.stored
        record.move(State.LOADING)
        return LoadPlan(record.request_id, self._hashes(record, first, stop), columns, record.adapter)

    def sources(self, record: RequestRecord, external: int, tiers: Sequence[str]) -> dict[str, int]:
        """Return the number of a request's tokens to load from each tier.

        Args:
            record: the request.
            external: as in :meth:`allocated`.
            tiers: the tier of each chunk that was found.
        """
        start, stop, size = record.computed, record.computed + external, self.chunk_tokens
        sources: dict[str, int] = {}
        for chunk, tier in enumerate(tiers, record.first):
            tokens = min(stop, (chunk + 1) * size) - max(start, chunk * size)
            if tokens > 0:
                sources[tier] = sources.get(tier, 0) + tokens
        return sources

    def loaded(self, record: RequestRecord, complete: bool) -> None:
        """Record the end of a request's load."""
        if record.state is State.LOADING:
            record.move(State.ADMITTED if complete else State.FAILED)
        if not complete:
            record.stored = 0  # chunks that could not be loaded must be stored again

    def store(self, record: RequestRecord, computed: int, blocks_of: Callable[[], Blocks]) -> StorePlan | None:
        """Return a plan for the newly complete chunks of a request.

        These are whole when it has computed ``computed`` tokens, and were not stored yet. ``blocks_of`` returns all its
        block numbers, of each group; it is called only if there are such chunks.
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
        """Forget the answers for waiting requests, and stop storing running ones.

        See rule 7.
        """
        for record in self.records.values():
            record.ask_again()
            record.outlived = record.state is not State.NEW

    def _has_needed(self, blocks: Blocks, chunk: int) -> bool:
        """Return whether these blocks cover all that a chunk needs: rule 6."""
        stop = (chunk + 1) * self.chunk_tokens
        return all(
            group.has(given, at)
            for group, given in zip(self.groups, blocks, strict=True)
            for at in range(
                max(chunk * self.chunk_tokens // group.block_size, group.first_needed(stop)), stop // group.block_size
            )
        )

    def _column(self, blocks: Blocks, chunk: int, tokens: range) -> list[int | None]:
        """Return the blocks of a chunk for these tokens, group by group.

        ``None`` stands for blocks of other tokens.
        """
        column: list[int | None] = []
        for group, given in zip(self.groups, blocks, strict=True):
            size, per_chunk = group.block_size, self.chunk_tokens // group.block_size
            wanted = range(tokens.start // size, tokens.stop // size)
            positions = range(chunk * per_chunk, (chunk + 1) * per_chunk)
            column += [given[at] if at in wanted and group.has(given, at) else None for at in positions]
        return column

    def _hashed(self, record: RequestRecord) -> int:
        """Return the number of whole chunks that have a hash."""
        return len(record.hashes) * self.hash_tokens // self.chunk_tokens

    def _hashes(self, record: RequestRecord, first: int, stop: int) -> list[bytes]:
        step = self.chunk_tokens // self.hash_tokens
        return [bytes(record.hashes[(chunk + 1) * step - 1]) for chunk in range(first, stop)]
