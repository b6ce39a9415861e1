"""The reference engine: its rule of bits, its blocks and its keys."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from collections.abc import Iterable

import attrs
import pytest

torch = pytest.importorskip("torch")

from offload import ConfigError  # noqa: E402
from offload.testing.reference_engine import (  # noqa: E402
    BOS,
    VOCABULARY,
    BlockAllocator,
    ModelConfig,
    OutOfBlocks,
    ReferenceEngine,
    Sequence,
)

TEXT = (b"A block enters by enqueue and walks downstairs; nothing calls upstairs. " * 5)[:300]
SMALL = ModelConfig(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, num_blocks=64, max_context=512)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def prefilled(engine: ReferenceEngine, tokens: Iterable[int], chunk_tokens: int = 512) -> Sequence:
    sequence = engine.add_sequence(tokens)
    for _ in engine.prefill(sequence, chunk_tokens=chunk_tokens):
        pass
    return sequence


def kv_of(engine: ReferenceEngine, sequence: Sequence) -> torch.Tensor:
    """Everything present of a sequence: (layers, 2, tokens, kv_heads, head_dim)."""
    gathered = torch.stack([cache[:, sequence.block_ids].flatten(1, 2) for cache in engine.kv_caches])
    return gathered[:, :, : sequence.computed].cpu()


def restore(engine: ReferenceEngine, sequence: Sequence, blocks: list[torch.Tensor]) -> None:
    """Write saved blocks where a sequence wants them, as a load does."""
    for block_id, block in zip(sequence.block_ids, blocks, strict=False):
        for cache, layer in zip(engine.kv_caches, block, strict=True):
            cache[:, block_id] = layer
    engine.adopt_prefix(sequence, len(blocks) * engine.config.block_size)


def saved_blocks(engine: ReferenceEngine, sequence: Sequence) -> list[torch.Tensor]:
    full = sequence.block_ids[: sequence.computed // engine.config.block_size]
    return [torch.stack([cache[:, block_id] for cache in engine.kv_caches]) for block_id in full]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    as_bytes = [tensor.contiguous().cpu().view(torch.uint8) for tensor in (left, right)]
    return left.shape == right.shape and torch.equal(*as_bytes)


def scattered(engine: ReferenceEngine) -> None:
    """Leave the free blocks out of order and full of NaN, as unkind as a long life leaves them."""
    ids = [engine.add_sequence([BOS]) for _ in range(engine.config.num_blocks)]
    for sequence in ids[::3] + ids[1::3] + ids[2::3]:
        engine.free(sequence)
    for cache in engine.kv_caches:
        cache.fill_(float("nan"))


# ---- the rule of bits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.long)])
def test_resuming_at_every_block_boundary_gives_the_bits_of_computing_all(dtype: str, device: str) -> None:
    config = ModelConfig(dtype=dtype)
    first = ReferenceEngine(config, device)
    whole = prefilled(first, TEXT)
    blocks, kv, logits = saved_blocks(first, whole), kv_of(first, whole), first.next_logits(whole)
    answer = first.generate(whole, 4)
    assert logits.isfinite().all()
    assert len(blocks) == len(TEXT) // config.block_size == 18
    second = ReferenceEngine(config, device)
    scattered(second)
    for n_blocks in range(len(blocks) + 1):
        sequence = second.add_sequence(TEXT)
        restore(second, sequence, blocks[:n_blocks])
        assert same_bits(second.next_logits(sequence), logits)
        assert same_bits(kv_of(second, sequence), kv)
        assert second.generate(sequence, 4) == answer
        second.free(sequence)


def test_a_prompt_that_was_restored_whole_is_not_written_and_gives_the_same_logits(device: str) -> None:
    first = ReferenceEngine(SMALL, device)
    for length in (16, 64, 288):  # the end of a block inside a tile, and of a tile
        whole = prefilled(first, TEXT[:length])
        second = ReferenceEngine(SMALL, device)
        sequence = second.add_sequence(TEXT[:length])
        restore(second, sequence, saved_blocks(first, whole))
        before = kv_of(second, sequence)
        assert same_bits(second.next_logits(sequence), first.next_logits(whole))
        assert same_bits(kv_of(second, sequence), before)
        assert second.statistics().tokens_computed == 0


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 31, 33, 48, 100])
def test_the_chunk_size_does_not_change_the_bits(chunk_tokens: int, device: str) -> None:
    engine = ReferenceEngine(SMALL, device)
    whole, chunked = prefilled(engine, TEXT), prefilled(engine, TEXT, chunk_tokens)
    assert same_bits(kv_of(engine, chunked), kv_of(engine, whole))
    assert same_bits(engine.next_logits(chunked), engine.next_logits(whole))


@pytest.mark.parametrize("tile_tokens", [8, 24, 32, 80])
@pytest.mark.parametrize("block_size", [1, 16, 33])
def test_tiles_and_blocks_need_not_divide_each_other(tile_tokens: int, block_size: int) -> None:
    config = attrs.evolve(SMALL, tile_tokens=tile_tokens, block_size=block_size, num_blocks=1024)
    engine = ReferenceEngine(config)
    whole = prefilled(engine, TEXT)
    blocks = saved_blocks(engine, whole)
    sequence = engine.add_sequence(TEXT)
    restore(engine, sequence, blocks[: len(blocks) // 2])
    assert same_bits(engine.next_logits(sequence), engine.next_logits(whole))
    assert same_bits(kv_of(engine, sequence), kv_of(engine, whole))


def test_generated_tokens_have_the_kv_of_the_same_tokens_in_a_prompt(device: str) -> None:
    engine = ReferenceEngine(SMALL, device)
    asked = engine.add_sequence(TEXT[:75])
    engine.generate(asked, 60)
    told = prefilled(engine, asked.tokens[: asked.computed])
    assert asked.computed == len(asked.tokens) - 1
    assert same_bits(kv_of(engine, told), kv_of(engine, asked))


def test_a_prefix_has_the_same_bits_whatever_follows(device: str) -> None:
    engine = ReferenceEngine(SMALL, device)
    long, short = prefilled(engine, TEXT), prefilled(engine, TEXT[:100])
    other = prefilled(engine, TEXT[:100] + b"?" * 120)
    for sequence in (long, other):
        assert same_bits(kv_of(engine, sequence)[:, :, :100], kv_of(engine, short))


def test_what_free_blocks_held_before_does_not_matter(device: str) -> None:
    clean, unkind = ReferenceEngine(SMALL, device), ReferenceEngine(SMALL, device)
    scattered(unkind)
    left, right = clean.add_sequence(TEXT), unkind.add_sequence(TEXT)
    assert left.block_ids != right.block_ids
    assert clean.generate(left, 40) == unkind.generate(right, 40)
    assert same_bits(kv_of(clean, left), kv_of(unkind, right))


def test_a_worker_thread_computes_the_same_bits(device: str) -> None:
    engine = ReferenceEngine(SMALL, device)
    here, there = engine.add_sequence(TEXT), engine.add_sequence(TEXT)
    engine.next_logits(here)
    thread = threading.Thread(target=engine.next_logits, args=(there,))
    thread.start()
    thread.join()
    assert engine.kv_digest(here) == engine.kv_digest(there)
    assert engine.generate(here, 8) == engine.generate(there, 8)


def test_another_process_computes_the_same_bits_and_keys() -> None:
    source = (
        "import hashlib, sys; from offload.testing.reference_engine import ReferenceEngine\n"
        "engine = ReferenceEngine(); sequence = engine.add_sequence(sys.stdin.buffer.read())\n"
        "tokens = engine.generate(sequence, 8)\n"
        "kv = b''.join(cache[:, sequence.block_ids].numpy().tobytes() for cache in engine.kv_caches)\n"
        "print(tokens, hashlib.sha256(kv).hexdigest(), engine.prefix_keys(sequence.tokens)[-1].hex())\n"
    )
    done = subprocess.run([sys.executable, "-c", source], input=TEXT, capture_output=True, check=True)
    engine = ReferenceEngine()
    sequence = engine.add_sequence(TEXT)
    tokens = engine.generate(sequence, 8)
    kv = b"".join([cache[:, sequence.block_ids].numpy().tobytes() for cache in engine.kv_caches])
    told = f"{tokens} {hashlib.sha256(kv).hexdigest()} {engine.prefix_keys(sequence.tokens)[-1].hex()}\n"
    assert done.stdout.decode() == told


def plain_logits(engine: ReferenceEngine, tokens: Iterable[int]) -> torch.Tensor:
    """The same model in the plainest way: in float64, all positions at once, without a cache."""
    model, config, ids = engine._model, engine.config, torch.tensor(list(tokens))
    norm = lambda x: x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()  # noqa: E731
    half = config.head_dim // 2
    speeds = 10_000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    turns = torch.polar(torch.ones(len(ids), half, dtype=torch.float64), torch.outer(torch.arange(len(ids)), speeds))

    def rotated(heads: torch.Tensor) -> torch.Tensor:
        turned = torch.complex(heads[..., :half], heads[..., half:]) * turns[:, None]
        return torch.cat((turned.real, turned.imag), -1)

    x = model._embedding.double()[ids]
    for layer in model._layers:
        heads = (norm(x) @ layer.qkv.double().T).view(len(ids), -1, config.head_dim)
        q, k, v = heads.split((config.heads, config.kv_heads, config.kv_heads), 1)
        k, v = (part.repeat_interleave(config.heads // config.kv_heads, 1) for part in (rotated(k), v))
        scores = torch.einsum("qhd,khd->hqk", rotated(q), k) / config.head_dim**0.5
        hidden = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
        seen = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
        x = x + seen.flatten(1) @ layer.output.double().T
        gate, up = (norm(x) @ layer.gate_up.double().T).chunk(2, -1)
        x = x + (gate * gate.sigmoid() * up) @ layer.down.double().T
    return (norm(x) @ model._head.double().T)[-1]


@pytest.mark.parametrize("length", [1, 31, 32, 100])
def test_a_plain_forward_pass_without_a_cache_agrees(length: int) -> None:
    engine = ReferenceEngine(SMALL)
    logits = engine.next_logits(engine.add_sequence(TEXT[:length]))
    torch.testing.assert_close(logits.double(), plain_logits(engine, TEXT[:length]), rtol=1e-3, atol=1e-3)


# ---- a model whose output tells -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [60, 300, 1500])
def test_changing_one_early_byte_changes_the_output(length: int) -> None:
    engine = ReferenceEngine()
    text = (TEXT * 5)[:length]
    original = engine.generate(engine.add_sequence(text), 16)
    for position in (0, 1, 20):
        changed = bytearray(text)
        changed[position] ^= 1
        sequence = engine.add_sequence(changed)
        assert engine.generate(sequence, 16) != original
        engine.free(sequence)


def test_the_output_is_no_short_cycle() -> None:
    engine = ReferenceEngine()
    output = engine.generate(engine.add_sequence(TEXT), 64)
    assert len(set(output)) > 30
    assert len(set(output[-16:])) > 8


@pytest.fixture(scope="module")
def computed() -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
    """The blocks of a text, those of another one, and the answer to the first: never written to."""
    engine = ReferenceEngine()
    whole, other = prefilled(engine, TEXT), prefilled(engine, TEXT[::-1])
    return saved_blocks(engine, whole), saved_blocks(engine, other), engine.generate(whole, 32)


@pytest.mark.parametrize("index", [0, 9, 17])
@pytest.mark.parametrize("wrong", ["foreign", "empty", "one layer", "keys for values"])
def test_a_wrong_block_shows_in_the_tokens(
    index: int, wrong: str, computed: tuple[list[torch.Tensor], list[torch.Tensor], list[int]]
) -> None:
    whole, foreign, answer = computed
    blocks = [block.clone() for block in whole]
    right = blocks[index].clone()
    match wrong:
        case "foreign":
            blocks[index] = foreign[index]
        case "empty":
            blocks[index] = torch.zeros_like(right)
        case "one layer":
            blocks[index][1] = foreign[index][1]
        case "keys for values":
            blocks[index] = right.flip(1)
    engine = ReferenceEngine()
    sequence = engine.add_sequence(TEXT)
    restore(engine, sequence, blocks)
    assert engine.generate(sequence, 32) != answer


def test_blocks_exchanged_show_in_the_digest_if_not_in_the_tokens() -> None:
    engine = ReferenceEngine(SMALL)
    whole = prefilled(engine, TEXT)
    blocks = saved_blocks(engine, whole)
    right, wrong = engine.add_sequence(TEXT), engine.add_sequence(TEXT)
    restore(engine, right, blocks)
    blocks[3], blocks[4] = blocks[4], blocks[3]
    restore(engine, wrong, blocks)
    for sequence in (right, wrong):
        engine.next_logits(sequence)
    assert right.block_ids != whole.block_ids
    assert engine.kv_digest(right) == engine.kv_digest(whole) != engine.kv_digest(wrong)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_digest_covers_what_is_present_and_no_more(dtype: str) -> None:
    engine = ReferenceEngine(attrs.evolve(SMALL, dtype=dtype))
    sequence = prefilled(engine, TEXT[:20])
    before = engine.kv_digest(sequence)
    cache = engine.kv_caches[-1]
    cache[1, sequence.block_ids[1], 4] += 1  # token 20: not present
    assert engine.kv_digest(sequence) == before
    cache[1, sequence.block_ids[1], 3] += 1
    assert engine.kv_digest(sequence) != before


def test_the_seed_chooses_the_model() -> None:
    outputs = [ReferenceEngine(attrs.evolve(SMALL, seed=seed)) for seed in (0, 1)]
    left, right = (engine.generate(engine.add_sequence(TEXT), 8) for engine in outputs)
    assert left != right


# ---- blocks and sequences -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [ModelConfig(), SMALL, ModelConfig(dtype="bfloat16")])
def test_the_caches_have_the_documented_layout(config: ModelConfig) -> None:
    engine = ReferenceEngine(config)
    assert len(engine.kv_caches) == config.layers
    assert len({cache.untyped_storage().data_ptr() for cache in engine.kv_caches}) == 1
    for cache in engine.kv_caches:
        assert cache.shape == (2, config.num_blocks, config.block_size, config.kv_heads, config.head_dim)
        assert cache.is_contiguous()
    block = saved_blocks(engine, prefilled(engine, TEXT))[0]
    assert block.shape == config.block_shape
    assert block.nbytes == engine.block_bytes == config.block_bytes


def test_a_block_of_the_default_model_is_64_kib() -> None:
    assert ModelConfig().block_bytes == 64 * 1024


def test_prefill_names_every_block_once_when_it_becomes_full() -> None:
    engine = ReferenceEngine(SMALL)
    sequence = engine.add_sequence(TEXT)  # 300 tokens: 18 full blocks and 12 tokens
    steps = list(engine.prefill(sequence, chunk_tokens=100))
    assert [step.computed for step in steps] == [100, 200, 300]
    assert [len(step.full_blocks) for step in steps] == [6, 6, 6]
    assert [block_id for step in steps for block_id in step.full_blocks] == sequence.block_ids[:18]
    assert list(engine.prefill(sequence)) == []


def test_prefill_left_off_and_taken_up_again_continues() -> None:
    engine = ReferenceEngine(SMALL)
    sequence = engine.add_sequence(TEXT)
    assert next(engine.prefill(sequence, chunk_tokens=50)).computed == 50
    assert [step.computed for step in engine.prefill(sequence, chunk_tokens=200)] == [250, 300]


def test_a_restored_prefix_saves_its_forward_passes() -> None:
    engine = ReferenceEngine(SMALL)
    blocks = saved_blocks(engine, prefilled(engine, TEXT))
    computing = engine.statistics()
    restore(engine, resumed := engine.add_sequence(TEXT), blocks[:16])
    engine.generate(resumed, 1)
    after = engine.statistics()
    assert computing.forward_passes == 10
    assert after.forward_passes - computing.forward_passes == 2
    assert (after.tokens_adopted, after.tokens_computed - computing.tokens_computed) == (256, 44)


def test_generate_reserves_its_blocks_first_or_changes_nothing() -> None:
    engine = ReferenceEngine(attrs.evolve(SMALL, num_blocks=4))
    sequence = engine.add_sequence(TEXT[:48])
    with pytest.raises(OutOfBlocks, match="2 blocks wanted, 1 free"):
        engine.generate(sequence, 32)
    assert (len(sequence.tokens), sequence.computed, len(sequence.block_ids)) == (48, 0, 3)
    assert len(engine.generate(sequence, 16)) == 16
    assert engine.generate(sequence, 0) == []
    assert engine.statistics().free_blocks == 0


def test_add_sequence_without_room_changes_nothing() -> None:
    engine = ReferenceEngine(attrs.evolve(SMALL, num_blocks=4))
    with pytest.raises(OutOfBlocks) as caught:
        engine.add_sequence(TEXT[:65])
    assert (caught.value.wanted, caught.value.free) == (5, 4)
    assert engine.statistics().sequences == 0
    assert engine.statistics().free_blocks == 4


def test_freed_blocks_are_given_out_again_and_a_freed_sequence_is_refused() -> None:
    engine = ReferenceEngine(attrs.evolve(SMALL, num_blocks=4))
    sequence = engine.add_sequence(TEXT[:64])
    steps = engine.prefill(sequence, chunk_tokens=16)
    next(steps)
    engine.free(sequence)
    assert engine.statistics().free_blocks == 4
    for use in (engine.free, engine.next_logits, lambda s: engine.generate(s, 1), lambda s: engine.adopt_prefix(s, 16)):
        with pytest.raises(ValueError, match="freed"):
            use(sequence)
    with pytest.raises(ValueError, match="freed"):
        next(steps)
    assert len(engine.add_sequence(TEXT[:64]).block_ids) == 4


def test_a_sequence_of_another_engine_is_refused() -> None:
    ours, theirs = ReferenceEngine(SMALL), ReferenceEngine(SMALL)
    with pytest.raises(ValueError, match="another engine"):
        ours.free(theirs.add_sequence(TEXT))


@pytest.mark.parametrize("n_tokens", [-16, 8, 320, 17])
def test_only_whole_blocks_of_the_prompt_can_be_adopted(n_tokens: int) -> None:
    engine = ReferenceEngine(SMALL)
    sequence = engine.add_sequence(TEXT)
    with pytest.raises(ValueError, match="whole blocks of 16"):
        engine.adopt_prefix(sequence, n_tokens)
    assert sequence.computed == 0


def test_what_is_present_cannot_be_adopted_away() -> None:
    engine = ReferenceEngine(SMALL)
    sequence = prefilled(engine, TEXT)
    with pytest.raises(ValueError, match="from 300"):
        engine.adopt_prefix(sequence, 16)


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (b"", "at least one"),
        ([1, VOCABULARY], f"token 1 is {VOCABULARY}"),
        ([-1], "token 0"),
        ("text", "token 0 is 't'"),
        (bytes(513), "513 tokens exceed max_context = 512"),
    ],
)
def test_bad_tokens_are_refused_by_name(tokens: Iterable[int], text: str) -> None:
    engine = ReferenceEngine(SMALL)
    with pytest.raises(ValueError, match=text):
        engine.add_sequence(tokens)
    assert engine.statistics().free_blocks == SMALL.num_blocks


def test_bad_numbers_are_refused() -> None:
    engine = ReferenceEngine(SMALL)
    sequence = engine.add_sequence(TEXT)
    with pytest.raises(ValueError, match="chunk_tokens = 0"):
        next(engine.prefill(sequence, chunk_tokens=0))
    with pytest.raises(ValueError, match="max_new_tokens = -1"):
        engine.generate(sequence, -1)
    with pytest.raises(ValueError, match="513 tokens"):
        engine.generate(sequence, 213)


def test_the_last_position_of_the_context_can_be_computed() -> None:
    engine = ReferenceEngine(attrs.evolve(SMALL, max_context=45, num_blocks=3))
    sequence = engine.add_sequence(TEXT[:40])
    assert len(engine.generate(sequence, 5)) == 5
    assert engine.next_logits(sequence).shape == (VOCABULARY,)
    assert sequence.computed == 45


def test_the_allocator_frees_all_or_nothing() -> None:
    allocator = BlockAllocator(4)
    taken = allocator.allocate(3)
    for wrong in ([taken[0], taken[0]], [taken[0], 3], [taken[0], -1], [taken[0], 99]):
        with pytest.raises(ValueError, match="each once"):
            allocator.free(wrong)
    allocator.free(taken)
    assert allocator.free_blocks == 4
    assert sorted(allocator.allocate(4)) == [0, 1, 2, 3]


# ---- configuration and keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("layers", 0),
        ("block_size", -1),
        ("num_blocks", 2.0),
        ("tile_tokens", True),
        ("heads", 6),
        ("head_dim", 31),
        ("dtype", "int8"),
        ("seed", -1),
        ("seed", "0"),
    ],
)
def test_a_bad_knob_is_named_with_its_value(knob: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{knob} = {value!r}: must be"):
        attrs.evolve(ModelConfig(), **{knob: value})


def test_the_fingerprint_names_what_decides_the_bits_and_no_capacity() -> None:
    base = ModelConfig()
    other = {
        "layers": 5, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 96, "block_size": 8,
        "tile_tokens": 64, "num_blocks": 7, "max_context": 99, "seed": 1, "dtype": "bfloat16",
    }  # fmt: skip
    assert set(other) == {field.name for field in attrs.fields(ModelConfig)}
    same = {
        name for name, value in other.items() if attrs.evolve(base, **{name: value}).fingerprint() == base.fingerprint()
    }
    assert same == {"num_blocks", "max_context"}


def test_keys_name_the_full_blocks_of_a_prefix() -> None:
    engine = ReferenceEngine(SMALL)
    keys = engine.prefix_keys(TEXT)
    assert len(set(keys)) == len(keys) == 18
    assert {len(key) for key in keys} == {32}
    assert engine.prefix_keys(list(TEXT[:100])) == keys[:6]
    assert engine.prefix_keys(TEXT[:15]) == []
    changed = engine.prefix_keys(TEXT[:20] + b"!" + TEXT[21:])
    assert changed[0] == keys[0]
    assert not set(changed[1:]) & set(keys)


def test_equal_tokens_after_different_prefixes_or_in_other_models_have_different_keys() -> None:
    engine, other = ReferenceEngine(SMALL), ReferenceEngine(attrs.evolve(SMALL, seed=1))
    keys = engine.prefix_keys(b"x" * 64)
    assert len(set(keys)) == 4
    assert not set(keys) & set(other.prefix_keys(b"x" * 64))


def test_importing_the_package_leaves_torch_out() -> None:
    source = "import sys, offload.testing; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", source], check=True)
