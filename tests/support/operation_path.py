"""Which files and functions one operation passes, on the caller's side, in the order of first calls.

    python tests/support/operation_path.py            counts
    python tests/support/operation_path.py --list     each function, with the first line of what it says of itself

A profile hook notes each of our functions that is called, in the calling thread and in those that copy. Each operation is
done a few times before, so that what happens once (imports, connections, the first region) does not count. The page store's
server is a process of its own, and so not counted.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import trio

import offload
from backends.maru import MaruTier
from backends.memory import MemoryTier
from backends.slots import PagesDestination
from maru import MaruHandler

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = tuple(f"{ROOT / name}/" for name in ("offload", "backends", "maru"))
BLOCK_BYTES = 4096
BLOCKS = 8
WARM = 5
SERVER = """
import sys, trio
from maru.testing import open_test_server

async def serve():
    async with open_test_server() as server:
        print(server.endpoints[0], flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)

trio.run(serve)
"""

Calls = dict[CodeType, None]


@contextmanager
def recorded(calls: Calls) -> Iterator[None]:
    """Note each of our functions that is called meanwhile, in the order of first calls."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGES):
            calls.setdefault(frame.f_code)

    threading.setprofile(note)  # copy threads that are started from here on
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def warmed(calls: Calls, operation: Callable[[int], Awaitable[object]]) -> None:
    """Do it a few times, and note the last time."""
    for number in range(WARM):
        await operation(number)
    with recorded(calls):
        await operation(WARM)


@contextmanager
def page_store() -> Iterator[str]:
    """A page store in a process of its own; its address."""
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdin is not None and server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.stdin.close()


async def measure(endpoint: str) -> dict[str, Calls]:
    """The calls of each operation."""
    paths: dict[str, Calls] = {name: {} for name in ("store in memory", "store", "lookup and load")}
    source, memory = (MemoryTier(1 << 20, BLOCK_BYTES) for _ in range(2))
    handler = MaruHandler(server_url=endpoint, chunk_size_bytes=BLOCK_BYTES, pool_size=4 << 20)
    columns = [[offload.block_key(b"%d %d" % (number, at)) for at in range(BLOCKS)] for number in range(WARM + 1)]
    for keys in columns:
        for key in keys:
            source.put(key, key.ljust(BLOCK_BYTES, b"."))
    destination = PagesDestination.over([bytearray(BLOCK_BYTES) for _ in range(BLOCKS)])

    async with offload.open_pipeline(source, memory) as pipeline:

        async def enqueue(number: int) -> None:
            handle = await pipeline.enqueue(source.weak(columns[number]), precondition=offload.NO_WAIT)
            assert len((await handle.wait()).completed) == BLOCKS

        await warmed(paths["store in memory"], enqueue)

    async with offload.open_engine(source, {"maru": MaruTier(handler)}) as engine:

        async def store(number: int) -> None:
            handle = await engine.store(source.weak(columns[number]), precondition=offload.NO_WAIT)
            assert len((await handle.wait()).completed) == BLOCKS

        async def load(number: int) -> None:
            async with await engine.lookup(columns[number]) as hit:
                assert (await engine.load(hit, destination)).loaded == BLOCKS

        await warmed(paths["store"], store)
        await warmed(paths["lookup and load"], load)
    return paths


def first_line(code: CodeType) -> str:
    """What a function says of itself."""
    for node in ast.walk(ast.parse(Path(code.co_filename).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == code.co_firstlineno:
                return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--list", action="store_true", help="list the functions")
    asked = parser.parse_args()
    with page_store() as endpoint:
        paths = trio.run(measure, endpoint)
    for name, calls in paths.items():
        files = {code.co_filename for code in calls}
        print(f"{name}: {len(files)} files, {len(calls)} functions")
        for code in calls if asked.list else ():
            where = Path(code.co_filename).relative_to(ROOT)
            print(f"  {where} {code.co_qualname}: {first_line(code)}")


if __name__ == "__main__":
    main()
