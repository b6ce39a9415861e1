"""Checkpoints that are replaced or copied, with a real vLLM."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from .instances import any_tiers, generate, prompt, run, spec

ASKED = [generate([prompt(1024, 40, 1)])]


def replace_middle_tensor(model: Path) -> None:
    """Give one tensor in the middle of the file other numbers. Sizes, names and the header stay as they are."""
    [path] = model.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    spans = sorted(one["data_offsets"] for name, one in header.items() if name != "__metadata__")
    first, stop = (start + at for at in spans[len(spans) // 2])
    data[first:stop] = bytes(reversed(data[first:stop]))[3:] + data[first : first + 3]  # other floats, each of them one
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["connector", "spec"])
def test_replaced_weights_miss_and_a_copy_hits(model: str, tmp_path: Path, kind: str) -> None:
    mine, copy = tmp_path / "mine", tmp_path / "elsewhere" / "copy"
    shutil.copytree(model, mine)
    shutil.copytree(model, copy)
    disk = {"type": "file", "directory": str(tmp_path / "kv"), "capacity_bytes": "256MiB"}
    transfer: dict[str, Any] = any_tiers(disk=disk) if kind == "connector" else spec(disk=disk)

    def answered(path: Path, transfer: dict[str, Any] | None) -> dict[str, Any]:
        said = {"model": str(path), "steps": [*ASKED, {"do": "settle"}]}
        answer, *_ = run(said if transfer is None else {**said, "transfer": transfer})["answers"]
        return dict(answer)

    first = answered(mine, transfer)
    elsewhere = answered(copy, transfer)
    assert elsewhere["cached"] == [1024]
    assert elsewhere["tokens"] == first["tokens"]
    replace_middle_tensor(mine)
    replaced = answered(mine, transfer)
    assert replaced["cached"] == [0]
    assert replaced["tokens"] == answered(mine, None)["tokens"]


def test_blocks_of_another_configuration_are_missed(model: str, tmp_path: Path) -> None:
    config, other = json.loads((Path(model) / "config.json").read_text()), tmp_path / "other"
    other.mkdir()
    config["rope_theta"] = config.setdefault("rope_parameters", {})["rope_theta"] = 500.0
    (other / "config.json").write_text(json.dumps(config))
    transfer = any_tiers(disk={"type": "file", "directory": str(tmp_path / "kv"), "capacity_bytes": "256MiB"})

    def cached(**options: str) -> Any:
        said = {"model": model, "transfer": transfer, "options": options, "steps": [*ASKED, {"do": "settle"}]}
        return run(said)["answers"][0]["cached"]

    assert cached() == [0]
    assert cached(hf_config_path=str(other)) == [0]
    assert cached() == [1024]
