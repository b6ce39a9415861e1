"""Small inference engine with a real paged KV cache, for any machine.

It serves demos, scenarios and tests. A Llama-style decoder (RMSNorm, rotary positions, grouped-query attention, SwiGLU)
with seeded random weights over bytes: its output is meaningless, but its KV comes from a real forward pass and its
greedy output depends on the whole prefix. The engine knows nothing of offloading: it owns the blocks, computes into
them, and reports which of them became full; the caller reports which blocks were filled from outside.

**The layout.** All KV lies in one storage of shape ``(layers, 2, num_blocks, block_size, kv_heads, head_dim)``;
``kv_caches[layer]`` is one layer of it: ``(2, num_blocks, block_size, kv_heads, head_dim)``, index 0 of the first axis
is keys (rotated), 1 is values. A block id names the same slot in every layer, so one block is ``2 * layers`` pieces,
``ModelConfig.block_shape`` once they are gathered.

**The rule of bits.** *The KV and the logits at position p are a function of tokens 0..p, to the last bit*: not of how
the prompt was chunked, which prefix was restored from a cache, whether a token was part of the prompt or generated,
which block ids were used, or their earlier contents. So "loaded equals computed" is tested with ``==``.
``_reference_model.py`` describes how the forward pass keeps the rule; the engine's part is that a position is written
once, so that a restored prefix is only read.

**Faults that tokens do not show.** A foreign, stale or missing block changes the generated tokens. Two exchanged whole
blocks of a prefix do not: a key carries its position in its rotation, and attention ignores where in memory the key is.
A check that a load put every block in its place compares `ReferenceEngine.kv_digest`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Column
from typing import Final

import attrs
import torch

from backends.abc import Destination, Key
from backends.base.planes import TensorPlanes

from .._errors import OffloadError
from .._keys import prefix_keys
from ._reference_model import BOS as BOS
from ._reference_model import EOS as EOS
from ._reference_model import PAD as PAD
from ._reference_model import SEP as SEP
from ._reference_model import VOCABULARY as VOCABULARY
from ._reference_model import Model
from ._reference_model import ModelConfig as ModelConfig

PLANE_AXES: Final = {"kv": 0, "head": 3}
"""Axes of a layer that distinguish planes, for ``DeviceTier``'s ``plane_axes``.

``DeviceTier(kv_caches, block_axis=1, plane_axes=PLANE_AXES)``.
"""


class OutOfBlocks(OffloadError):
    """Too few free blocks for a request; nothing was allocated.

    The caller frees a sequence, or waits until one is freed.
    """

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} blocks wanted, {free} free")
        self.wanted = wanted
        self.free = free


class BlockAllocator:
    """Allocator of free blocks.

    The block freed last is reused first, which exposes reads that come too late.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def free_blocks(self) -> int:
        """Number of blocks that can be allocated now."""
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Take ``n`` blocks.

        Raises:
            OutOfBlocks: fewer are free; none was taken.
        """
        if n > len(self._free):
            raise OutOfBlocks(n, len(self._free))
        block_ids = [self._free.pop() for _ in range(n)]
        self._taken.update(block_ids)
        return block_ids

    def free(self, block_ids: Iterable[int]) -> None:
        """Return blocks to the allocator.

        Raises:
            ValueError: a block is not allocated, or is named twice; none was freed.
        """
        block_ids = list(block_ids)
        if len(set(block_ids)) != len(block_ids) or not self._taken.issuperset(block_ids):
            raise ValueError(f"block_ids = {block_ids}: must be taken blocks, each once")
        self._taken.difference_update(block_ids)
        self._free.extend(block_ids)


@attrs.define(eq=False)
class Sequence:
    """One prompt and its generated tokens.

    `ReferenceEngine.add_sequence` builds it; read it, do not write.
    """

    tokens: list[int]
    """Prompt, then the generated tokens."""
    block_ids: list[int]
    """Block table: entry i holds the tokens from ``i * block_size`` on."""
    computed: int = 0
    """Number of leading tokens whose KV is present."""
    _logits: torch.Tensor | None = attrs.field(default=None, init=False, repr=False)


@attrs.frozen
class PrefillProgress:
    """Result of one chunk of a prefill."""

    computed: int
    """Tokens of the sequence whose KV is present."""
    total: int
    """Tokens of the sequence."""
    full_blocks: tuple[int, ...]
    """Ids of the blocks filled to the end, in table order.

    They will not be written again.
    """


@attrs.frozen
class EngineStatistics:
    """A snapshot of a `ReferenceEngine`."""

    sequences: int
    """Number of sequences added and not freed."""
    free_blocks: int
    """Number of blocks that can be allocated now."""
    tokens_computed: int
    """Number of positions whose KV a forward pass wrote, since the start."""
    tokens_adopted: int
    """Number of positions whose KV came from outside, since the start."""
    forward_passes: int
    """Number of tiles computed, since the start."""


class ReferenceEngine:
    """Model, paged cache and blocks of an inference engine.

    Calls block while they compute; from trio, make them through ``trio.to_thread.run_sync``. One thread at a time. On a
    CPU the KV is present when a call returns; on CUDA, when the current stream gets there. The process chooses the
    number of busy cores (``torch.set_num_threads``), the same in all processes that share a cache.
    """

    config: ModelConfig
    """Sizes of the model and of its cache."""
    device: torch.device
    """Device of weights and caches."""
    kv_caches: list[torch.Tensor]
    """One tensor for each layer, laid out as described above."""
    planes: TensorPlanes
    """Keys and values of each head in each layer, read separately."""

    def __init__(
        self,
        config: ModelConfig | None = None,
        device: str | torch.device = "cpu",
        *,
        allocate: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
    ) -> None:
        """Build the model and its cache.

        Args:
            config: sizes of the model and of its cache.
            device: device of both.
            allocate: returns the storage of the cache, filled with zeros; by default on the device.
        """
        config = self.config = ModelConfig() if config is None else config
        self.device = torch.device(device)
        shape = (config.layers, 2, config.num_blocks, config.block_size, config.kv_heads, config.head_dim)
        dtype = getattr(torch, config.dtype)
        storage = torch.zeros(shape, dtype=dtype, device=self.device) if allocate is None else allocate(shape, dtype)
        self.kv_caches = list(storage.unbind(0))
        self.planes = TensorPlanes(
            {f"layer {at}": cache for at, cache in enumerate(self.kv_caches)}, block_axis=1, plane_axes=PLANE_AXES
        )
        self._model = Model(config, self.device)
        self._allocator = BlockAllocator(config.num_blocks)
        self._sequences: set[Sequence] = set()
        self._tokens_computed = self._tokens_adopted = self._forward_passes = 0

    @property
    def block_bytes(self) -> int:
        """Size of one block over all layers, keys and values, in bytes."""
        return self.config.block_bytes

    def statistics(self) -> EngineStatistics:
        """Return counts of computed tokens and free blocks."""
        return EngineStatistics(
            sequences=len(self._sequences),
            free_blocks=self._allocator.free_blocks,
            tokens_computed=self._tokens_computed,
            tokens_adopted=self._tokens_adopted,
            forward_passes=self._forward_passes,
        )

    def prefix_keys(self, tokens: Iterable[int]) -> list[bytes]:
        """Return one content key for each full block of ``tokens``.

        A key names the block's tokens and all before them, and the fingerprint of the model: equal in every process.
        """
        return prefix_keys(_checked(tokens), self.config.block_size, salt=self.config.fingerprint())

    def add_sequence(self, tokens: Iterable[int]) -> Sequence:
        """Allocate the blocks for a prompt, and compute nothing yet.

        ``bytes`` are tokens.

        Raises:
            OutOfBlocks: too few blocks are free; nothing changed.
            ValueError: no token, not a token, or more than ``max_context``.
        """
        tokens = _checked(tokens)
        if not tokens:
            raise ValueError("a sequence needs at least one token")
        self._check_context(len(tokens))
        sequence = Sequence(tokens, self._allocator.allocate(self._blocks_for(len(tokens))))
        self._sequences.add(sequence)
        return sequence

    def adopt_prefix(self, sequence: Sequence, n_tokens: int) -> None:
        """Mark the KV of the first ``n_tokens`` as present.

        It was written into the sequence's blocks from outside.

        Raises:
            ValueError: ``n_tokens`` is not a whole number of blocks, exceeds the tokens, or is less than the present
                KV.
        """
        self._check_live(sequence)
        if n_tokens % self.config.block_size or not sequence.computed <= n_tokens <= len(sequence.tokens):
            raise ValueError(
                f"n_tokens = {n_tokens}: must be whole blocks of {self.config.block_size} tokens, "
                f"from {sequence.computed} to {len(sequence.tokens)}"
            )
        self._tokens_adopted += n_tokens - sequence.computed
        sequence.computed = n_tokens

    def prefill(self, sequence: Sequence, *, chunk_tokens: int = 512) -> Iterator[PrefillProgress]:
        """Compute the missing KV, chunk by chunk, as the iterator is advanced.

        The iterator may be abandoned anywhere.

        Args:
            chunk_tokens: the most that one step computes. Any size gives the same bits; multiples of ``tile_tokens``
                waste no work.
        """
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens = {chunk_tokens}: must be at least 1")
        size = self.config.block_size
        while sequence.computed < len(sequence.tokens):
            before = sequence.computed
            self._compute(sequence, min(before + chunk_tokens, len(sequence.tokens)))
            full = sequence.block_ids[before // size : sequence.computed // size]
            yield PrefillProgress(sequence.computed, len(sequence.tokens), tuple(full))

    def next_logits(self, sequence: Sequence) -> torch.Tensor:
        """Return the scores of the next token, shape (VOCABULARY,).

        Missing KV of the sequence is computed first.
        """
        self._compute(sequence, len(sequence.tokens))
        if sequence._logits is None:  # every position was adopted: compute the last row again, and write nothing
            self._forward(sequence, len(sequence.tokens))
        assert sequence._logits is not None
        return sequence._logits

    def generate(self, sequence: Sequence, max_new_tokens: int) -> list[int]:
        """Append ``max_new_tokens`` greedy tokens and return them.

        Missing KV of the prompt is computed first. As in any engine, the KV of the newest token is not present yet: it
        is computed with the token that follows.

        Raises:
            OutOfBlocks: too few blocks are free for all of them; nothing changed.
            ValueError: the sequence would exceed ``max_context``.
        """
        self._check_live(sequence)
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens = {max_new_tokens}: must be at least 0")
        length = len(sequence.tokens) + max_new_tokens
        self._check_context(length)
        sequence.block_ids += self._allocator.allocate(self._blocks_for(length) - len(sequence.block_ids))
        for _ in range(max_new_tokens):
            token = int(self.next_logits(sequence).argmax())
            sequence.tokens.append(token)
            sequence._logits = None
        return sequence.tokens[length - max_new_tokens :]

    def kv_digest(self, sequence: Sequence) -> bytes:
        """Return a digest of all KV that is present.

        Two digests are equal if and only if every bit is, whichever blocks hold the KV.
        """
        self._check_live(sequence)
        digest = hashlib.blake2b(digest_size=32)
        for cache in self.kv_caches:
            present = cache[:, sequence.block_ids].flatten(1, 2)[:, : sequence.computed]
            digest.update(present.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return digest.digest()

    def free(self, sequence: Sequence) -> None:
        """Return the sequence's blocks to the allocator.

        No read of them may be in progress: they may be reused at once.
        """
        self._check_live(sequence)
        self._sequences.remove(sequence)
        self._allocator.free(sequence.block_ids)
        sequence.block_ids = []

    def _compute(self, sequence: Sequence, stop: int) -> None:
        """Make the KV of tokens before ``stop`` present, tile by tile."""
        self._check_live(sequence)
        tile = self.config.tile_tokens
        while sequence.computed < stop:
            self._forward(sequence, min((sequence.computed // tile + 1) * tile, stop))

    def _forward(self, sequence: Sequence, stop: int) -> None:
        """Compute the tile that ends at ``stop``, and write its missing KV."""
        write = range(min(sequence.computed, stop), stop)
        rows = self._model.forward(self.kv_caches, sequence.tokens, sequence.block_ids, write)
        if stop == len(sequence.tokens):
            sequence._logits = self._model.logits(rows)[(stop - 1) % self.config.tile_tokens]
        sequence.computed = max(sequence.computed, stop)
        self._tokens_computed += len(write)
        self._forward_passes += 1

    def _check_live(self, sequence: Sequence) -> None:
        if sequence not in self._sequences:
            raise ValueError("the sequence was freed, or belongs to another engine")

    def _check_context(self, n_tokens: int) -> None:
        if n_tokens > self.config.max_context:
            raise ValueError(f"{n_tokens} tokens exceed max_context = {self.config.max_context}")

    def _blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.config.block_size)


class Recomputation:
    """Callable that recomputes blocks in an engine of its own.

    It is the argument ``recompute`` of ``offload.open_engine``. It knows the blocks of the prompts given to `remember`,
    and computes those of one prompt at a time: a prefill for each check.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._engine = ReferenceEngine(config)
        self._blocks: dict[Key, tuple[list[int], int]] = {}  # the prompt of each block, and its index in the prompt

    def remember(self, tokens: Iterable[int]) -> None:
        """Remember a prompt, so that its blocks can be recomputed."""
        prompt = _checked(tokens)
        self._blocks.update((key, (prompt, at)) for at, key in enumerate(self._engine.prefix_keys(prompt)))

    def __call__(
        self, keys: Column[Key], destination: Destination, positions: Column[int]
    ) -> list[array[float] | None]:
        """Return samples of the blocks of the last known block's prompt.

        Other blocks get ``None``; see :class:`offload.abc.Recompute`.
        """
        known = [self._blocks.get(key) for key in keys]
        last = next((one for one in reversed(known) if one is not None), None)
        if last is None:
            return [None] * len(keys)
        prompt, size = last[0], self._engine.config.block_size
        sequence = self._engine.add_sequence(prompt[: (last[1] + 1) * size])
        try:
            for _ in self._engine.prefill(sequence):
                pass
            return [
                None
                if one is None or one[0] is not prompt
                else self._engine.planes.samples([sequence.block_ids[one[1]]])[0]
                for one in known
            ]
        finally:
            self._engine.free(sequence)


def _checked(tokens: Iterable[int]) -> list[int]:
    tokens, vocabulary = list(tokens), range(VOCABULARY)
    for position, token in enumerate(tokens):
        if token not in vocabulary:
            raise ValueError(f"token {position} is {token!r}: must be an integer from 0 to {VOCABULARY - 1}")
    return [int(token) for token in tokens]
