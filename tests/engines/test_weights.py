"""The identity of weights: equal for a copy, another for weights that were replaced."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.engines import _weights
from offload.engines._weights import (
    SAMPLE_BYTES,
    VERSIONED,
    AdapterWeights,
    Generation,
    NoWeights,
    config_text,
    fingerprint,
    hub_commit,
    weights_text,
)
from tests.support.held_by_process import no_descriptor_left

TENSOR = 64 << 10
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def safetensors(path: Path, tensors: dict[str, bytes]) -> None:
    """Write a file as safetensors has it."""
    header, at = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


def tensors(seed: int, n: int = 5) -> dict[str, bytes]:
    return {f"layers.{at}.weight": bytes([(seed * 31 + at) % 251]) * TENSOR for at in range(n)}


def checkpoint(path: Path, seed: int = 1) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"hidden_size": 64}')
    for shard in range(2):
        safetensors(path / f"model-{shard}.safetensors", tensors(seed + shard))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "model")


@pytest.mark.parametrize("check", ["sampled", "full"])
def test_copy_elsewhere_has_same_fingerprint(model: Path, tmp_path: Path, check: _weights.WeightsCheck):
    copy = tmp_path / "elsewhere" / "deep"
    shutil.copytree(model, copy)
    for path in copy.iterdir():
        os.utime(path, (1, 1))
    (copy / "README.md").write_text("of no matter")
    assert fingerprint(str(copy), check) == fingerprint(str(model), check)


def test_links_of_hub_cache_have_fingerprint_of_files(model: Path, tmp_path: Path):
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for path in model.iterdir():
        (linked / path.name).symlink_to(path)
    assert fingerprint(str(linked)) == fingerprint(str(model))


def patch(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def data_of(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


CHANGES: dict[str, Callable[[Path], object]] = {
    "config": lambda model: (model / "config.json").write_text('{"hidden_size": 65}'),
    "code": lambda model: (model / "modeling_own.py").write_text("SCALE = 2"),
    "first bytes of a middle tensor": lambda model: patch(
        model / "model-1.safetensors", data_of(model / "model-1.safetensors") + 2 * TENSOR
    ),
    "middle of a middle tensor": lambda model: patch(
        model / "model-0.safetensors", data_of(model / "model-0.safetensors") + 2 * TENSOR + TENSOR // 2
    ),
    "last tensor": lambda model: safetensors(
        model / "model-1.safetensors", {**tensors(2), "layers.4.weight": bytes(TENSOR)}
    ),
    "name of a tensor": lambda model: safetensors(
        model / "model-0.safetensors", {name.replace("0", "9"): data for name, data in tensors(1).items()}
    ),
    "name of a file": lambda model: (model / "model-0.safetensors").rename(model / "model-00.safetensors"),
    "size of a file": lambda model: os.truncate(model / "model-0.safetensors", 400 << 10),
    "another file": lambda model: safetensors(model / "model-2.safetensors", tensors(9)),
    "a file less": lambda model: (model / "model-1.safetensors").unlink(),
    "all tensors": lambda model: safetensors(model / "model-0.safetensors", tensors(77)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_replaced_weights_have_another_fingerprint(model: Path, change: str):
    before = fingerprint(str(model)), fingerprint(str(model), "full")
    CHANGES[change](model)
    assert fingerprint(str(model)) != before[0]
    assert fingerprint(str(model), "full") != before[1]


def test_change_between_samples_is_seen_by_full_check(model: Path):
    before = fingerprint(str(model)), fingerprint(str(model), "full")
    patch(model / "model-0.safetensors", data_of(model / "model-0.safetensors") + TENSOR // 4)
    assert fingerprint(str(model)) == before[0]
    assert fingerprint(str(model), "full") != before[1]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "consolidated.00.pth"])
@pytest.mark.parametrize("at", [0, 2_103_330, (4 << 20) - 1])
def test_other_formats_are_sampled(tmp_path: Path, name: str, at: int):
    path = tmp_path / name
    path.write_bytes(bytes(4 << 20))
    before, alone = fingerprint(str(tmp_path)), fingerprint(str(path))
    patch(path, at)
    assert fingerprint(str(tmp_path)) != before
    assert fingerprint(str(path)) != alone


def test_state_of_training_beside_safetensors_does_not_count(model: Path):
    before = fingerprint(str(model))
    (model / "optimizer.pt").write_bytes(b"state")
    assert fingerprint(str(model)) == before


BROKEN = {
    "empty": b"",
    "short": b"\1\2",
    "long header": (1 << 60).to_bytes(8, "little") + b"{}",
    "no json": (9).to_bytes(8, "little") + b"no header" + bytes(100),
    "a list": (2).to_bytes(8, "little") + b"[]" + bytes(100),
    "no offsets": (9).to_bytes(8, "little") + b'{"a": {}}',
    "deep": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "outside": len(b'{"a":{"data_offsets":[0,99999]}}').to_bytes(8, "little") + b'{"a":{"data_offsets":[0,99999]}}',
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_safetensors_are_sampled_as_other_files(tmp_path: Path, kind: str):
    (tmp_path / "model.safetensors").write_bytes(BROKEN[kind])
    before = fingerprint(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(BROKEN[kind] + b"\1")
    assert fingerprint(str(tmp_path)) != before


def test_small_tensors_and_scalars_are_sampled(tmp_path: Path):
    safetensors(tmp_path / "model.safetensors", {"a": b"", "b": b"\1", "c": b"\2" * SAMPLE_BYTES})
    before = fingerprint(str(tmp_path))
    safetensors(tmp_path / "model.safetensors", {"a": b"", "b": b"\3", "c": b"\2" * SAMPLE_BYTES})
    assert fingerprint(str(tmp_path)) != before


def test_weights_that_cannot_be_read_are_known_by_path(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with pytest.raises(NoWeights, match="no weights"):
        fingerprint(str(tmp_path))
    for _ in range(2):
        assert weights_text(str(tmp_path), revision="r") == f"{tmp_path}@r"
    assert len([record for record in caplog.records if "weights_version" in record.getMessage()]) == 1


def test_text_for_keys(model: Path, tmp_path: Path):
    assert weights_text(str(model)) == f"weights {fingerprint(str(model))}"
    assert weights_text(str(model), version="7") == f"{model}@/version 7"
    assert weights_text("org/model", revision="main", commit=COMMIT) == f"org/model@{COMMIT}"
    assert weights_text("org/model", revision="main") == "org/model@main"


def test_commit_comes_from_hub_cache(tmp_path: Path):
    refs = tmp_path / "hub" / "models--org--model" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(COMMIT)
    assert hub_commit("org/model", {"HF_HOME": str(tmp_path)}) == COMMIT
    assert hub_commit("org/model", {"HF_HUB_CACHE": str(tmp_path / "hub")}) == COMMIT
    assert hub_commit("org/other", {"HF_HOME": str(tmp_path)}) == ""
    assert hub_commit("../../etc/passwd", {"HF_HOME": str(tmp_path)}) == ""
    (refs / "main").write_text("no commit")
    assert hub_commit("org/model", {"HF_HOME": str(tmp_path)}) == ""


def test_reset_is_private_unless_trainer_names_weights(tmp_path: Path):
    alone, other = Generation(), Generation()
    assert alone.current() == ""
    alone.reset()
    other.reset()
    assert len({alone.current(), other.current(), ""}) == 3
    assert alone.current() == alone.current()


def test_version_file_is_read_at_first_use_after_reset(tmp_path: Path):
    path = tmp_path / "version"
    one, two = Generation(str(path)), Generation(str(path))
    path.write_text("run 3, step 100\n")
    assert one.current() == "", "the weights of the start have a fingerprint"
    one.reset()
    path.write_text("run 3, step 200\n")  # the trainer writes it before requests go on
    two.reset()
    assert one.current() == two.current()
    assert one.current().startswith(VERSIONED)
    path.write_text("run 3, step 300\n")
    assert one.current() == two.current(), "until the next reset"
    two.reset()
    assert one.current() != two.current()


@pytest.mark.parametrize("content", [None, b"", b" \n", b"x" * 5000])
def test_version_file_without_version_shares_nothing(tmp_path: Path, content: bytes | None):
    path = tmp_path / "version"
    if content is not None:
        path.write_bytes(content)
    one, two = Generation(str(path)), Generation(str(path))
    one.reset()
    two.reset()
    assert one.current() != two.current()
    assert not one.current().startswith(VERSIONED)


def test_adapter_is_known_by_its_files(model: Path, tmp_path: Path):
    adapters, copy = AdapterWeights(), tmp_path / "copy"
    shutil.copytree(model, copy)
    first = adapters.text(1, "name", str(model))
    assert adapters.text(2, "name", str(copy)) == first
    CHANGES["all tensors"](model)
    assert adapters.text(1, "name", str(model)) == first, "the engine has loaded it under this number"
    assert adapters.text(1, "name", str(model), is_replaced=True) != first
    assert AdapterWeights().text(1, "name", str(model)) != first


def test_many_tensors_are_sampled_in_little_time(tmp_path: Path):
    """Two reads for each tensor: what a start takes depends on their number, and not on their size."""
    data = {f"layers.{at}.weight": bytes(16 << 10) for at in range(1_500)}
    safetensors(tmp_path / "model.safetensors", data)
    began = time.process_time()
    fingerprint(str(tmp_path))
    assert time.process_time() - began < 2.0


def test_values_of_configurations_are_in_keys():
    plain = {"rope_theta": 1e4, "_name_or_path": "/here", "transformers_version": "5.1", "text": {"_commit_hash": "a"}}
    moved = {"text": {"_commit_hash": "b"}, "rope_theta": 1e4, "_name_or_path": "/there", "transformers_version": "5.2"}
    assert config_text(plain) == config_text(moved)
    assert config_text(plain) != config_text({**plain, "rope_theta": 5e2})
    assert config_text(plain) != config_text({**plain, "text": {"sliding_window": 16}})
    assert config_text(plain) != config_text(plain, {"sliding_window": 16})


def test_objects_in_configurations_have_the_same_text_in_each_process():
    class Nested:
        def to_dict(self) -> dict[str, Any]:
            return {"layers": 2}

    def text(key: Any) -> str:
        return config_text(
            {"dtype": torch.bfloat16, "of": Generation(), "names": {"a", "b"}, "nested": Nested(), key: 1}
        )

    assert text(3) == text("3")
    assert config_text({"nested": Nested()}) == config_text({"nested": {"layers": 2}})
    assert config_text({"of": object()}) == config_text({"of": object()})


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_positions_of_long_sequences_are_in_keys(name: str):
    long = {"text_config": {name: {"rope_type": "longrope"}, "original_max_position_embeddings": 4096}}
    assert config_text(long, tokens=2048) == config_text(long, tokens=4096)
    assert config_text(long, tokens=4096) != config_text(long, tokens=8192)
    other = {name: {"rope_type": "yarn", "original_max_position_embeddings": 4096}}
    assert config_text(other, tokens=4096) == config_text(other, tokens=8192)


def test_want_of_descriptors_is_no_identity(model: Path, tmp_path: Path):
    with no_descriptor_left(), pytest.raises(OSError, match="Too many open files"):
        weights_text(str(model))
    hub = tmp_path / "models--one--model" / "refs"
    hub.mkdir(parents=True)
    (hub / "main").write_text("a" * 40)
    with no_descriptor_left(), pytest.raises(OSError, match="Too many open files"):
        _weights.hub_commit("one/model", {"HF_HUB_CACHE": str(tmp_path)})
