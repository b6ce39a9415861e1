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
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import attrs

from ._plans import LoadPlan, StorePlan


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

    def move(self, state: State) -> None:
        """Go to another state.

        Raises:
            RuntimeError: there is no such way; nothing has changed.
        """
        if state not in MOVES[self.state]:
            raise RuntimeError(f"a request that is {self.state.value} cannot become {state.value}")
        self.state = state


@attrs.define(eq=False)
class RequestTable:
    """All requests of a scheduler."""

    block_size: int
    """Tokens in a block."""
    chunk_tokens: int
    """Tokens in a chunk, a multiple of ``block_size``."""
    hash_tokens: int
    """Tokens that one of vLLM's hashes stands for; ``block_size`` is a multiple of it."""
    records: dict[str, RequestRecord] = attrs.Factory(dict)

    def __attrs_post_init__(self) -> None:
        if self.chunk_tokens % self.block_size or self.block_size % self.hash_tokens:
            raise ValueError(
                f"chunks of {self.chunk_tokens} tokens, blocks of {self.block_size}, hashes of {self.hash_tokens}"
            )

    def add(self, request_id: str, hashes: Sequence[bytes]) -> RequestRecord:
        """A request, which may be there already."""
        record = self.records.get(request_id)
        if record is None:
            record = self.records[request_id] = RequestRecord(request_id, hashes)
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

    def allocated(self, record: RequestRecord, blocks: Sequence[int], external: int) -> LoadPlan | None:
        """Take in that vLLM has given blocks to a request, and wants so many tokens loaded into them.

        Args:
            record: the request.
            blocks: all its block numbers, in order.
            external: tokens behind those that it has computed; 0: none.
        """
        if record.state is State.FAILED or (not external and record.state is State.LOADING):
            return None
        if not external or record.state is not State.FOUND:
            record.move(State.ADMITTED)
            return None
        per_chunk, size = self.chunk_tokens // self.block_size, self.block_size
        wanted = range(record.computed // size, (record.computed + external) // size)
        first, stop = wanted.start // per_chunk, -(-wanted.stop // per_chunk)
        columns = [
            [blocks[at] if at in wanted else None for at in range(chunk * per_chunk, (chunk + 1) * per_chunk)]
            for chunk in range(first, stop)
        ]
        # What was found need not be stored again. What vLLM has before it may not be in any tier, and is offered to them.
        record.stored = stop if not first else record.stored
        record.move(State.LOADING)
        return LoadPlan(record.request_id, self._hashes(record, first, stop), columns)

    def loaded(self, record: RequestRecord, complete: bool) -> None:
        """The load of a request is over."""
        if record.state is State.LOADING:
            record.move(State.ADMITTED if complete else State.FAILED)
        if not complete:
            record.stored = 0  # what could not be loaded is to be stored anew

    def store(self, record: RequestRecord, computed: int, blocks_of: Callable[[], Sequence[int]]) -> StorePlan | None:
        """The chunks of a request that will be whole, and were not stored yet, when it has computed so many tokens.

        ``blocks_of`` gives all its block numbers; it is called only where there are such chunks.
        """
        first, stop = record.stored, min(computed // self.chunk_tokens, self._hashed(record))
        if stop <= first:
            return None
        per_chunk = self.chunk_tokens // self.block_size
        blocks = blocks_of()
        columns = [blocks[chunk * per_chunk : (chunk + 1) * per_chunk] for chunk in range(first, stop)]
        record.stored = stop
        return StorePlan(record.request_id, self._hashes(record, first, stop), columns, first)

    def _hashed(self, record: RequestRecord) -> int:
        """Whole chunks that have a hash."""
        return len(record.hashes) * self.hash_tokens // self.chunk_tokens

    def _hashes(self, record: RequestRecord, first: int, stop: int) -> list[bytes]:
        step = self.chunk_tokens // self.hash_tokens
        return [bytes(record.hashes[(chunk + 1) * step - 1]) for chunk in range(first, stop)]
