"""At the end of a process modules are cleared, the last imported first: a finalizer may run behind what it calls."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EARLY = """
import sys, types
early = sys.early = sys.modules["early"] = types.ModuleType("early")  # cleared behind all that are imported below
import os, tempfile
"""
KEPT = """
sys.alive = [module for name, module in sys.modules.items() if name.split(".")[0] in ("backends", "maru", "offload")]
"""
KEEPS = {
    "pinned memory": """
from maru.base.memory.memory import Memory
from maru.base.memory.pinning import Pin
from maru.fake_cuda import FakeCuda, use
sys.fake = use(FakeCuda())
sys.fake.__enter__()
early.memory = Memory.private(8192)
Pin(early.memory).pin()
""",
    "a directory of blocks": """
from backends.file import FileTier
early.tier = FileTier(tempfile.mkdtemp(dir="."), capacity_bytes=1 << 20, fingerprint="f", block_bytes=4096)
""",
    "a journal": """
from maru._journal.journal import _File
early.file = _File(os.open(".", os.O_RDONLY))
""",
    "a hit": """
from backends.memory import MemoryTier
from offload import from_thread
cache = MemoryTier(capacity_bytes=8192, block_bytes=4096)
host = MemoryTier(capacity_bytes=8192, block_bytes=4096)
engine = early.engine = from_thread.open_engine(cache, [host]).start()
engine.call(host.put, b"key", bytes(4096))
early.hit = engine.lookup([b"key"])
assert early.hit.keys
""",
}


@pytest.mark.parametrize("kept", KEEPS)
def test_nothing_is_said_at_the_end_of_a_process(kept, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", EARLY + KEEPS[kept] + KEPT],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def finalizers():
    for package in ("backends", "maru", "offload"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if "def __del__" in (text := path.read_text()):
                for node in ast.walk(ast.parse(text)):
                    if isinstance(node, ast.FunctionDef) and node.name == "__del__":
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def may_be_gone(finalizer):
    """Yield the functions of a finalizer that may be gone at the end of a process."""
    bound = {argument.arg for argument in finalizer.args.args}
    if "is_finalizing" in bound:
        return
    for call in (node for node in ast.walk(finalizer) if isinstance(node, ast.Call)):
        match call.func:
            case ast.Name(name) if name not in {*bound, "getattr", "hasattr"}:
                yield name
            case ast.Attribute(attr=name) if name not in {"append", "extend", "pop"}:  # of lists
                yield name


def test_a_finalizer_calls_what_it_has_bound_or_asks_whether_the_process_ends():
    found = {place: list(may_be_gone(finalizer)) for place, finalizer in finalizers()}
    assert len(found) > 10
    assert not {place: names for place, names in found.items() if names}
