"""torch costs over a second and hundreds of megabytes: nothing imports it until a tensor is touched."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "modules",
    [
        "offload",
        "backends",
        "maru",
        "offload.cli",
        "offload.from_thread",
        "backends.memory",
        "backends.file",
        "backends.device",
        "backends.testing",
        "backends.wrappers",
    ],
)
def test_import_leaves_torch_alone(modules: str) -> None:
    program = f"import sys, {modules}; sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_using_a_memory_tier_leaves_torch_alone() -> None:
    program = """
import sys
from backends.memory import MemoryTier
import offload

tier = MemoryTier(capacity_bytes=1 << 16, block_bytes=1 << 12)
tier.put(offload.block_key(b"a"), bytes(1 << 12))
sys.exit('torch was imported' if 'torch' in sys.modules else 0)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_wrappers_are_there_without_what_they_need() -> None:
    program = """
import sys
import backends.wrappers

loaded = {"torch", "zstandard", "cryptography"} & set(sys.modules)
sys.exit(f"{loaded} imported" if loaded else 0)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_command_leaves_pytest_alone() -> None:
    """`trio.testing` imports it, where there is one: a tenth of a second for each command and each worker process."""
    program = """
import sys
import backends.testing, offload.scenario, offload.replay
from offload.testing.scenarios import Scenario, play

play(Scenario(name="nothing"))
sys.exit('pytest was imported' if 'pytest' in sys.modules else 0)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
