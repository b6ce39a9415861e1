"""Decoder of the reference engine, with bit-reproducible forward passes.

*The KV and the logits at position p are a function of tokens 0..p, to the last bit.* Floating-point sums make that a
design decision: a matrix product may order its sums by its shape, so that a row computed alone differs in its last bits
from the same row among 32. Three things keep the rule here:

1. Every forward pass has one shape. It computes a *tile*: ``tile_tokens`` rows, from a position that is a multiple of
   ``tile_tokens``. Position p is always row ``p % tile_tokens``. Rows that are not needed (not known yet, or cached
   already) are computed and dropped; so one generated token costs a tile, which a small model can afford.
2. A row sees other positions only through the paged cache, and always as many of them: all up to the end of its tile.
3. Positions of that window after the query count exactly 0: their weight is ``exp(-inf)``, and everything past the last
   written position is first replaced by zeros (0 times a stale NaN would not be 0).

The alternative was to prefill in chunks of one fixed size, resumed at whole chunks only. It drops fewer rows, but a
generated token would have different bits than the same token in a prompt, and every hit would be rounded down to a
chunk.

The rule holds within one version of torch, one kind of processor or GPU, and one number of threads: a change of any of
them may change the order of the sums (bfloat16 with tiles of 64 does, at 4 threads against 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import attrs
import torch
import torch.nn.functional as F

from .._errors import ConfigError

VOCABULARY = 260
"""Number of tokens: the 256 bytes, then the four specials."""
BOS, EOS, SEP, PAD = range(256, VOCABULARY)
"""Special tokens, for prompts that use them.

The model neither adds them nor stops at them.
"""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ROPE_BASE = 10_000.0
_NORM_EPS = 1e-5
# Random weights of the usual size give a model that attends to its last token only and soon repeats itself. With these
# gains, attention picks few positions (queries and keys) and the attended values count more than the token itself
# (output): one early byte still changes the output thousands of tokens later. The tests check that.
_QUERY_KEY_GAIN = 3.0
_OUTPUT_GAIN = 2.0


@attrs.frozen
class ModelConfig:
    """Sizes of the model and of its cache.

    The default prefills some thousand tokens a second on two cores.
    """

    layers: int = 4
    """Number of decoder layers."""
    hidden: int = 256
    """Width of the residual stream."""
    heads: int = 8
    """Number of query heads; a multiple of ``kv_heads``."""
    kv_heads: int = 4
    """Number of key and value heads."""
    head_dim: int = 32
    """Width of one head; even, because rotary positions rotate pairs."""
    ffn: int = 704
    """Width of the feed-forward part."""
    block_size: int = 16
    """Number of tokens in one block."""
    tile_tokens: int = 32
    """Rows of every forward pass.

    A larger tile makes prefill cheaper per token, and one generated token more expensive.
    """
    num_blocks: int = 1024
    """Blocks in the paged cache, shared by all sequences."""
    max_context: int = 8192
    """Length of the longest sequence, in tokens."""
    seed: int = 0
    """Seed of the weights."""
    dtype: str = "float32"
    """Data type of weights and KV: float32, bfloat16 or float16."""

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(ModelConfig):
            value = getattr(self, field.name)
            if field.name not in ("seed", "dtype") and not (type(value) is int and value >= 1):
                raise ConfigError(field.name, value, "must be an integer of at least 1")
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise ConfigError("seed", self.seed, "must be an integer from 0 to 2**63 - 1")
        if self.heads % self.kv_heads:
            raise ConfigError("heads", self.heads, f"must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim % 2:
            raise ConfigError("head_dim", self.head_dim, "must be even")
        if self.dtype not in _DTYPES:
            raise ConfigError("dtype", self.dtype, f"must be one of {', '.join(_DTYPES)}")

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one gathered block: (layers, 2, block_size, kv_heads, head_dim)."""
        return (self.layers, 2, self.block_size, self.kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Size of one block over all layers, keys and values, in bytes."""
        return 2 * self.layers * self.block_size * self.kv_heads * self.head_dim * _DTYPES[self.dtype].itemsize

    def fingerprint(self) -> str:
        """Return a stable text of everything that decides a block's bits.

        Two models never share a key. The version of torch is part of the text, because weights and sums depend on it;
        capacities are not.
        """
        fields = attrs.asdict(self, filter=lambda field, _: field.name not in ("num_blocks", "max_context"))
        facts = fields | {"vocabulary": VOCABULARY, "torch": torch.__version__.partition("+")[0]}
        return "reference-llama-1 " + " ".join(f"{name}={value}" for name, value in facts.items())


@attrs.frozen
class _Layer:
    """Weights of one decoder layer; projections of one input share a matrix."""

    qkv: torch.Tensor
    output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Model:
    """Model weights and the forward pass of one tile."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._dtype = _DTYPES[config.dtype]
        self._make_weights()
        self._make_tables()

    def forward(
        self, kv_caches: Iterable[torch.Tensor], tokens: list[int], block_ids: list[int], write: range
    ) -> torch.Tensor:
        """Compute the tile with the position before ``write.stop``; return its rows.

        The rows are the input of `logits`.

        Args:
            kv_caches: one layer each, (2, num_blocks, block_size, kv_heads, head_dim). The KV of the positions before
                ``write`` is read from there, that of ``write`` is written there.
            tokens: tokens of the sequence, at least up to ``write.stop``.
            block_ids: block table of the sequence, which covers ``write.stop``.
            write: positions in the tile; may be empty, if only the rows are needed.
        """
        config, stop = self._config, write.stop
        first = (stop - 1) // config.tile_tokens * config.tile_tokens
        end = first + config.tile_tokens  # the tile's positions are first .. end, the window it sees is 0 .. end
        known = tokens[first:stop]
        x = F.embedding(self._indices(known + [PAD] * (end - stop)), self._embedding)
        slots = self._indices(
            block_ids[p // config.block_size] * config.block_size + p % config.block_size for p in write
        )
        in_window = -(-end // config.block_size)
        # The window may end beyond the allocated blocks: any id will do for the rest, since its rows are zeroed.
        table = self._indices((block_ids + block_ids[:1] * in_window)[:in_window])
        mask = torch.zeros(config.tile_tokens, end, dtype=self._dtype, device=self._device)
        mask[:, first:] = self._causal
        for layer, cache in zip(self._layers, kv_caches, strict=True):
            q, k, v = self._project(layer, x, first)
            written = torch.stack((k, v))[:, write.start - first : stop - first]
            cache.flatten(1, 2).index_copy_(1, slots, written)
            window = cache.index_select(1, table).flatten(1, 2)[:, :end]
            window[:, stop:] = 0
            x = x + F.linear(self._attend(q, window, mask), layer.output)
            gate, up = F.linear(self._norm(x), layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return x

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the scores of each row's next token, (tile_tokens, VOCABULARY)."""
        return F.linear(self._norm(rows), self._head)

    def _attend(self, q: torch.Tensor, window: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        keys, values = window.transpose(1, 2).unbind(0)
        seen = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
        )
        return seen[0].transpose(0, 1).flatten(1)

    def _project(self, layer: _Layer, x: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values of a tile, each (row, head, dim).

        Queries and keys are rotated.
        """
        config = self._config
        qkv = F.linear(self._norm(x), layer.qkv).view(config.tile_tokens, -1, config.head_dim)
        qk, v = qkv[:, : -config.kv_heads], qkv[:, -config.kv_heads :]
        cos, sin = self._rotations[:, first : first + config.tile_tokens, None]
        left, right = qk.chunk(2, -1)
        qk = torch.cat((left * cos - right * sin, right * cos + left * sin), -1)
        return qk[:, : config.heads], qk[:, config.heads :], v

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = F.rms_norm(x, (self._config.hidden,), eps=_NORM_EPS)
        return normed

    def _indices(self, numbers: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64, device=self._device)

    def _make_weights(self) -> None:
        """Draw the weights on the CPU, the same on every device."""
        config = self._config
        source = torch.Generator().manual_seed(config.seed)

        def draw(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
            matrix = torch.randn(rows, columns, generator=source) * (gain / math.sqrt(columns))
            return matrix.to(self._device, self._dtype)

        width = config.heads * config.head_dim
        kv_width = config.kv_heads * config.head_dim
        self._embedding = draw(VOCABULARY, config.hidden, math.sqrt(config.hidden))
        self._layers = [
            _Layer(
                qkv=torch.cat((draw(width + kv_width, config.hidden, _QUERY_KEY_GAIN), draw(kv_width, config.hidden))),
                output=draw(config.hidden, width, _OUTPUT_GAIN),
                gate_up=draw(2 * config.ffn, config.hidden),
                down=draw(config.hidden, config.ffn),
            )
            for _ in range(config.layers)
        ]
        self._head = draw(VOCABULARY, config.hidden)

    def _make_tables(self) -> None:
        """Tabulate rotations for all tiles, and the mask within a tile."""
        config = self._config
        tile = config.tile_tokens
        positions = torch.arange(-(-config.max_context // tile) * tile, dtype=torch.float64)
        speeds = _ROPE_BASE ** -(torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
        angles = torch.outer(positions, speeds)
        self._rotations = torch.stack((angles.cos(), angles.sin())).to(self._device, self._dtype)
        self._causal = torch.full((tile, tile), float("-inf")).triu(1).to(self._device, self._dtype)
