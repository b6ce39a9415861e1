"""Where a temporary pool goes: what was decided from sizes, and that commands go by it where /dev/shm is small."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from backends.pinned_pool import PoolRefused
from backends.pinned_pool import _memory as memory_module
from backends.pinned_pool._memory import PoolMemory
from maru import PoolUnusable
from maru._pool.doctor import Facts
from maru._pool.placement import choose_place, find_place
from maru.base.findings import PathFact
from maru.base.machine import memory_left
from tests.support.maru_processes import PATIENCE

MIB = 1 << 20
SHM = Facts(PathFact("/dev/shm/pool", exists=False), free_bytes=1024 * MIB, available_bytes=1024 * MIB)
DISK = Facts(PathFact("/tmp/pool", exists=False), "ext4", free_bytes=1024 * MIB, available_bytes=1024 * MIB)

DECISIONS = {
    "room for all": ({}, {}, "/dev/shm", ""),
    "just enough": ({"free_bytes": 100 * MIB, "available_bytes": 100 * MIB}, {}, "/dev/shm", ""),
    "a default container": ({"free_bytes": 64 * MIB}, {}, "/tmp", r"64.0 MiB free.* of 100.0 MiB .*--shm-size"),
    "nothing at all": ({"free_bytes": 0}, {}, "/tmp", r"/dev/shm has 0.0 MiB free"),
    "little memory": ({"available_bytes": 50 * MIB}, {}, "/tmp", r"50.0 MiB left of 100.0 MiB"),
    "a small group": ({"memory_left_bytes": 9 * MIB}, {}, "/tmp", r"9.0 MiB left in this control group"),
    "a full disk too": (
        {"free_bytes": MIB},
        {"free_bytes": 2 * MIB},
        None,
        r"/dev/shm has 1.0 MiB .*; /tmp has 2.0 MiB",
    ),
    "a disk of memory": (
        {"free_bytes": MIB},
        {"file_system": "tmpfs", "available_bytes": MIB},
        None,
        r"/tmp has 1.0 MiB left",
    ),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_the_first_place_with_room_is_taken_and_another_one_is_told(name: str) -> None:
    shm, disk, parent, said = DECISIONS[name]
    places = [("/dev/shm", attrs.evolve(SHM, **shm)), ("/tmp", attrs.evolve(DISK, **disk))]  # type: ignore[arg-type]
    if parent is None:
        with pytest.raises(PoolUnusable, match=said):
            choose_place(places, 100 * MIB)
        return
    place = choose_place(places, 100 * MIB)
    assert place.parent == parent
    assert bool(place.note) is bool(said)
    if said:
        assert "\n" not in place.note and place.note.startswith("the pool is in /tmp")
        assert re.search(said, place.note)


def test_no_place_at_all_is_said() -> None:
    with pytest.raises(PoolUnusable, match="no directory can be written"):
        choose_place([], MIB)


def test_what_cannot_be_written_is_no_place(tmp_path: Path) -> None:
    assert find_place(MIB, [f"{tmp_path}/missing", str(tmp_path)]).parent == str(tmp_path)


def test_memory_that_is_left_is_the_least_that_anybody_says(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable:    2048 kB\n")
    assert memory_left(str(tmp_path), str(tmp_path)) == 2 * MIB
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/\n")
    (tmp_path / "memory.max").write_text(str(5 * MIB))
    (tmp_path / "memory.current").write_text(str(4 * MIB))
    assert memory_left(str(tmp_path), str(tmp_path)) == MIB
    assert memory_left(f"{tmp_path}/nowhere", str(tmp_path)) is None


def test_a_pool_of_more_memory_than_is_left_is_refused_before_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "memory_left", lambda: MIB)
    with pytest.raises(PoolRefused, match=f"{2 * MIB} bytes: {MIB} are left"):
        PoolMemory(2 * MIB, "none")
    PoolMemory(MIB, "none").close()


# --- in a mount namespace, with a small tmpfs at /dev/shm -------------------------------------------------------------


def _can_mount() -> bool:
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0


needs_mounts = pytest.mark.skipif(not _can_mount(), reason="needs root and a mount namespace of its own")


def with_small_shm(size: str, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command of ours where /dev/shm has so much."""
    script = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && "$@"; status=$?; ls -A /dev/shm >&2; exit $status'
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        timeout=5 * PATIENCE,
        env={**os.environ, **environment},
    )


@pytest.fixture
def disk() -> Iterator[str]:
    """A directory whose path is short: a socket's name has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="p-", dir="/tmp") as path:
        yield path


@needs_mounts
@pytest.mark.parametrize("size", ["64m", pytest.param("1m", marks=pytest.mark.long)])
def test_a_replay_goes_to_a_disk_where_shared_memory_is_small(tmp_path: Path, disk: str, size: str) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = ({"timestamp": at, "input_length": 1024, "output_length": 1, "hash_ids": [at, at + 1]} for at in range(50))
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = with_small_shm(
        size,
        "offload",
        "replay",
        str(trace),
        "--tier",
        "maru",
        "--capacity",
        "100MiB",
        "--block-bytes",
        "64KiB",
        TMPDIR=disk,
    )
    assert done.returncode == 0, done.stderr
    [told] = [line for line in done.stderr.splitlines() if line.startswith("the pool is in")]
    assert disk in told and "--shm-size" in told


@needs_mounts
def test_a_replay_that_fits_stays_in_memory(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n')
    done = with_small_shm(
        "64m", "offload", "replay", str(trace), "--tier", "maru", "--capacity", "4MiB", "--block-bytes", "64KiB"
    )
    assert (done.returncode, done.stderr) == (0, "")


@needs_mounts
@pytest.mark.long
def test_a_bench_of_the_page_store_goes_to_a_disk(disk: str) -> None:
    done = with_small_shm("1m", "maru", "bench", "data", "--quick", "--repeat", "1", "--json", TMPDIR=disk)
    assert done.returncode == 0 and disk in done.stderr, done.stderr
    assert json.loads(done.stdout), done.stderr


def test_what_the_demo_needs_is_known_before_it_starts() -> None:
    pytest.importorskip("torch", reason="needs the torch extra")
    from offload._demo import processes as demo
    from offload.testing.reference_engine import ModelConfig, ReferenceEngine

    assert ModelConfig().block_size == demo._BLOCK_TOKENS
    assert ReferenceEngine(ModelConfig(num_blocks=2)).block_bytes == demo._BLOCK_BYTES
    assert demo.region_bytes(demo.Options()) == 60 * MIB
    assert demo.region_bytes(demo.Options(document_bytes=256, answer_tokens=1)) == 4 * MIB


@needs_mounts
@pytest.mark.long
@pytest.mark.parametrize("size", ["8m", "1m"])
def test_the_demo_runs_where_shared_memory_is_small(disk: str, size: str) -> None:
    """A document so short needs 12 MiB; the one that is read by default 124, and a default container has 64."""
    command = ["offload", "demo", "--document-bytes", "256", "--answer-tokens", "1"]
    done = with_small_shm(size, *command, TMPDIR=disk)
    assert done.returncode == 0, done.stderr
    assert f"the pool is in {disk}" in done.stderr
