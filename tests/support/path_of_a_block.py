"""The path of a block, as a page of the documentation: which files and functions each operation passes.

    python tests/support/path_of_a_block.py            write docs/path-of-a-block.md

A profile hook notes each of our functions that is called, in the calling thread and in those that copy. Each operation is
done a few times before, so that what happens once (imports, connections, the first region) does not count; then it is recorded
several times, and what was called each time is the path: a heartbeat or a flush in between is none of its. The page store's
server is a process of its own, and so not counted.

Two tasks may run in either order, so what is called differs a little from run to run. A page that is true of this run is
therefore left as it is.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import attrs
import trio

import offload
from backends.base.slots import PagesDestination
from backends.maru import MaruTier
from backends.memory import MemoryTier
from maru import MaruHandler

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = tuple(f"{ROOT / name}/" for name in ("offload", "backends", "maru"))
BLOCK_BYTES = 4096
BLOCKS = 8
WARM = 5
"""How often an operation is done before it is recorded."""
RECORDED = 40
"""How often it is recorded."""
BY_THE_CLOCK = {"BusyPoll.is_due", "BusyPoll.run", "Watch._give_turn"}
"""Called where an answer took longer than a turn of the loop, or where polling pays: each time here, never there."""
WAITS = ROOT / "maru" / "transport"
"""What is called there depends on whether an answer is there already, so a page that was written elsewhere may lack it."""
PAGE = ROOT / "docs" / "path-of-a-block.md"
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
Operation = Callable[[int], Awaitable[object]]


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


@attrs.frozen
class Recording:
    """What one operation calls."""

    always: Calls
    """Each time, in the order of the last time: what the page shows."""
    ever: Calls
    """At least once."""


async def path_of(operation: Operation) -> Recording:
    """Do it often, and note what it calls."""
    for number in range(WARM):
        await operation(number)
    each: list[Calls] = []
    for number in range(WARM, WARM + RECORDED):
        calls: Calls = {}
        with recorded(calls):
            await operation(number)
        each.append({code: None for code in calls if code.co_name[0] != "<" and code.co_qualname not in BY_THE_CLOCK})
    always = {code: None for code in each[-1] if all(code in calls for calls in each)}
    return Recording(always, {code: None for calls in each for code in calls})


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


async def measure(endpoint: str) -> dict[str, Recording]:
    """The path of each operation."""
    paths: dict[str, Recording] = {}
    source, memory = (MemoryTier(2 << 20, BLOCK_BYTES) for _ in range(2))
    handler = MaruHandler(server_url=endpoint, chunk_size_bytes=BLOCK_BYTES, pool_size=4 << 20)
    columns = [
        [offload.block_key(b"%d %d" % (number, at)) for at in range(BLOCKS)] for number in range(WARM + RECORDED)
    ]
    for keys in columns:
        for key in keys:
            source.put(key, key.ljust(BLOCK_BYTES, b"."))
    destination = PagesDestination.over([bytearray(BLOCK_BYTES) for _ in range(BLOCKS)])

    async with offload.open_pipeline(source, memory) as pipeline:

        async def enqueue(number: int) -> None:
            handle = await pipeline.enqueue(source.weak(columns[number]), precondition=offload.NO_WAIT)
            result = await handle.wait()
            assert len(result.completed) == BLOCKS, result

        paths["store in memory"] = await path_of(enqueue)

    async with offload.open_engine(source, {"maru": MaruTier(handler)}) as engine:

        async def store(number: int) -> None:
            handle = await engine.store(source.weak(columns[number]), precondition=offload.NO_WAIT)
            result = await handle.wait()
            assert len(result.completed) == BLOCKS, result

        async def load(number: int) -> None:
            async with await engine.lookup(columns[number]) as hit:
                assert (await engine.load(hit, destination)).loaded == BLOCKS

        paths["store"] = await path_of(store)
        paths["lookup and load"] = await path_of(load)
    return paths


# --- what the code says of itself -------------------------------------------------------------------------------------


@cache
def parsed(path: Path) -> ast.Module:
    """A module."""
    return ast.parse(path.read_text())


def sentence(text: str | None) -> str:
    """The first line of a docstring, without the roles of reStructuredText, which a page in Markdown does not know."""
    line = (text or "").partition("\n")[0]
    return re.sub(r":(?:\w+:)+`~?([^`]+)`", r"`\1`", line).replace("``", "`")


def first_line(code: CodeType) -> str:
    """What a function says of itself."""
    for node in ast.walk(parsed(Path(code.co_filename))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == code.co_firstlineno:
                return sentence(ast.get_docstring(node))
    return ""


def source_of(path: Path, qualname: str) -> str:
    """The text of a function, or of a method."""
    node: ast.AST = parsed(path)
    for name in qualname.split("."):
        found = [inner for inner in ast.iter_child_nodes(node) if getattr(inner, "name", None) == name]
        if not found:
            raise SystemExit(f"{path.relative_to(ROOT)} has no {qualname}; adapt WALKS")
        node = found[0]
    return ast.get_source_segment(path.read_text(), node) or ""


# --- the page ---------------------------------------------------------------------------------------------------------

TITLES = {
    "store in memory": (
        "A store into host memory",
        "`pipeline.enqueue` of eight weak blocks, and `handle.wait()`: through the four stages, one copy, and out.",
    ),
    "store": (
        "A store into the page store",
        "`engine.store` of eight blocks, with `MaruTier` as the only tier: the same pipeline, and the client of the "
        "page store behind it.",
    ),
    "lookup and load": (
        "A lookup and a load from the page store",
        "`engine.lookup` of eight keys, which pins what it finds, `engine.load` of all of them, and the release of the pins.",
    ),
}


@attrs.frozen
class Step:
    """One file on the way from the README to the line that gives a page back."""

    file: str
    function: str
    """The function in it; empty for a page."""
    line: str
    """What stands there, word for word."""
    text: str
    """What happens there."""


CANCELLED = [
    Step(
        "README.md",
        "",
        "await other.cancel()",
        "A caller changes its mind. When this returns, nothing of the container is referenced, reserved or in flight.",
    ),
    Step(
        "offload/_pipeline/handle.py",
        "TransferHandle.cancel",
        "self._container.cancel()",
        "The handle asks the container, then waits until it has settled.",
    ),
    Step(
        "offload/_pipeline/container.py",
        "OffloadContainer._close",
        "self.phase = phase",
        "The commit gate closes: from here on the container cannot be claimed. Whatever holds it is told, and takes it out at "
        "once where it only waits. A batch that is about to be copied finds it at its last sweep.",
    ),
    Step(
        "offload/_pipeline/slot.py",
        "Slot._commit",
        "if not flat.keys:",
        "The last sweep has dropped the container. Where nothing is left of its batch, the next line releases the "
        "reservation; where others are, `reservation.keep` gives back its part. It settles after that, so whoever waits in "
        "`cancel()` finds the room free.",
    ),
    Step(
        "backends/maru/_reservation.py",
        "MaruReservation.release",
        "self._batch.free()",
        "Room in this tier is a batch of pages.",
    ),
    Step(
        "maru/_client/columns.py",
        "AllocBatch.free",
        "self._state.free(pages)",
        "**Here the cancelled container gives its pages back**: nothing was sent of them, so no server is asked, and the next "
        "allocation may hand them out (`OwnedPages.cancel`).",
    ),
]


STORED = [
    Step(
        "offload/engines/vllm/_scheduler.py",
        "SchedulerHalf.plan",
        "store = self._table.store(record, computed, partial(scheduled.blocks_of, request_id))",
        "vLLM's scheduler calls `build_connector_meta` for each step. Chunks that the step completes become a `StorePlan`, "
        "which travels to the workers with vLLM's own message. A *chunk* is one block of ours: several blocks of vLLM, all "
        "layers.",
    ),
    Step(
        "offload/engines/vllm/_worker.py",
        "WorkerHalf.store",
        "computed = self._computed()",
        "A worker, in `wait_for_save`: an event behind the work of this step on the device, the precondition of the store.",
    ),
    Step(
        "offload/engines/vllm/_worker.py",
        "WorkerHalf._store",
        "future = self.engine.store(chunks, computed, tenant=self._tenant, cancel_token=token)",
        "The keys are made of vLLM's hashes (`_naming.py`), the chunks of its block numbers (`_chunks.py`).",
    ),
    Step(
        "offload/from_thread/_worker.py",
        "EngineWorker._handle_message",
        "handle = self.engine.store_nowait(message.blocks, precondition=message.precondition, tenant=message.tenant)",
        "The engine's thread takes the store out of the mailbox. From here on the stages of [the design](design.md) carry it: "
        "admission, awaiting the event, batching, transfer.",
    ),
    Step(
        "backends/maru/_tier.py",
        "MaruTier.reserve_nowait",
        "return MaruReservation(self, keys[:n], batch)",
        "A slot of the transfer takes room: pages of this process's own region, without a message if some are free.",
    ),
    Step(
        "offload/_pipeline/slot.py",
        "Slot._commit",
        "dropped += batch.claim()",
        "The last sweep and the claim: a cancel before this takes effect at once, one behind it waits for the copy.",
    ),
    Step(
        "backends/maru/_reservation.py",
        "MaruReservation._copy",
        "failed = await copy.into(self.pages, tier.in_place)",
        "The copy, in a copy thread (`backends/base/copying.py`), with a checksum of each page.",
    ),
    Step(
        "offload/engines/vllm/_chunks.py",
        "copy_chunks_out",
        "copier_of(device).store(Pieces.of_all([tier.pieces(ids, pages) for tier, ids, pages in copies]), after)",
        "**Here the bytes arrive in the page**: on a device by one batch of its copier, else by `DeviceTier.copy_out`.",
    ),
    Step(
        "backends/maru/_reservation.py",
        "MaruReservation._register",
        "answers = await tier.handler.store_pages(",
        "One STORE message for the whole batch (`maru/_client/columns.py`, `maru/_client/operations/storing.py`).",
    ),
    Step(
        "maru/_server/service_own.py",
        "store",
        "answer = directory.register(session_id, columns_of(message), now, source=(header.code, payload), later=True)",
        "The server, another process. Its directory (`maru/_directory`) decides: registered, or there already.",
    ),
    Step(
        "maru/_server/committer.py",
        "Committer.commit",
        "self._publish()",
        "The journal has the record; now the shared index shows the key, and then the answer leaves. **From here on every "
        "process of this machine finds the block.**",
    ),
]

LOADED = [
    Step(
        "offload/engines/vllm/_scheduler.py",
        "SchedulerHalf.matched",
        "matched = self._begin(record, matched, is_asked=True)",
        "vLLM's scheduler asks by `get_num_new_matched_tokens` how much of a new request is there. A lookup begins, of the "
        "keys of all ranks.",
    ),
    Step(
        "backends/maru/_tier.py",
        "MaruTier.pin_from_thread",
        "held = None if self.damaged else self.handler.hold_pages_here(self.naming.names(keys))",
        "The lookup is made in vLLM's own thread (`offload/_engine/direct.py`) as long as the index can answer.",
    ),
    Step(
        "maru/_client/operations/indexed.py",
        "hold_nowait",
        "held = board.hold(names, found, reader)",
        "The index is read in shared memory, and a note on a board holds the pages: no message.",
    ),
    Step(
        "offload/engines/vllm/_worker.py",
        "WorkerHalf._begin_load",
        "load.future = self.engine.begin_lookup(keys, tenant=self._tenant, timeout=self._lookup_timeout)",
        "The plan reaches the worker in `start_load_kv`, which looks up again and holds the chunks itself "
        "([why](decisions/vllm.md)).",
    ),
    Step(
        "offload/engines/vllm/_worker.py",
        "WorkerHalf._pinned",
        "loading = self.engine.begin_load(hit, destination, precondition=computed, timeout=self._load_timeout)",
        "The load waits until earlier work of the device on these blocks is done. It is made in the engine's thread: a "
        "destination of chunks has no addresses to be written directly.",
    ),
    Step(
        "offload/_engine/loading.py",
        "Loading._load",
        "answers = list(await tier.load(lease, destination))",
        "Segment after segment of the hit, each from its tier, through the tier's breaker.",
    ),
    Step(
        "backends/maru/_tier.py",
        "MaruTier._load",
        "sums = await load_pages(lease.pages, destination, there, summed, self.in_place)",
        "The pages are read where they lie, in a copy thread, and summed; a page whose sum is wrong is a miss.",
    ),
    Step(
        "offload/engines/vllm/_chunks.py",
        "copy_chunks_in",
        "copier_of(device).load(Pieces.of_all([tier.pieces(ids, pages) for tier, ids, pages in copies]), after)",
        "**Here the bytes arrive in vLLM's blocks.**",
    ),
    Step(
        "offload/engines/vllm/_worker.py",
        "WorkerHalf._arrive",
        "self._arrived.put((load.plan.request_id, loaded))",
        "The next `get_transfer_results` reports the request, and vLLM schedules it; chunks that are missing are computed.",
    ),
]

WALKS = [
    (
        "Where a cancelled container gives its page back",
        "From the README to that line",
        CANCELLED,
    ),
    (
        "From a vLLM step into a page",
        "The connector of [vLLM](how-to/vllm.md), with the page store as its tier,",
        STORED,
    ),
    ("From the page back into vLLM", "The load of a later request with the same prefix,", LOADED),
]


def render_opening() -> list[str]:
    """What the page is."""
    return [
        "# The path of a block",
        "",
        "Which files and functions an operation passes, on the caller's side, in the order of first calls, and what each says "
        "of itself. `make trace` writes this page from a run; [the design](design.md) says why the path is as it is.",
        "",
        "An operation is recorded once it has been done a few times, so what happens once is not here. The page store's server "
        "is a process of its own, and not here either.",
    ]


def render(paths: dict[str, Recording]) -> str:
    """The page."""
    lines = render_opening()
    shown: set[CodeType] = set()
    for name, path in paths.items():
        lines += ["", *render_path(name, path.always, shown)]
        shown |= path.always.keys()
    lines += ["", *render_walks()]
    return "\n".join(lines) + "\n"


def render_path(name: str, calls: Calls, shown: set[CodeType]) -> Iterator[str]:
    """One operation: its functions by file, but for those that were shown before."""
    title, text = TITLES[name]
    yield from (f"## {title}", "", text, "", f"{count(calls)}.")
    if again := [code for code in calls if code in shown]:
        yield from ("", f"{count(again)} of these are above. The others:")
    by_file: dict[str, list[CodeType]] = {}
    for code in calls:
        if code not in shown:
            by_file.setdefault(code.co_filename, []).append(code)
    yield ""
    for file, codes in by_file.items():
        path = Path(file)
        yield f"- `{path.relative_to(ROOT)}`: {sentence(ast.get_docstring(parsed(path)))}"
        told = [(name_of(code), first_line(code)) for code in codes]
        yield from (f"  - `{function}`: {why}" for function, why in told if why)
        if rest := ", ".join(f"`{function}`" for function, why in told if not why):
            yield f"  - and {rest}"


def render_walks() -> Iterator[str]:
    """The ways that are followed line by line."""
    for title, text, steps in WALKS:
        yield from (f"## {title}", "", f"{text} in {len({step.file for step in steps})} files:", "")
        for number, step in enumerate(steps, 1):
            source = (ROOT / step.file).read_text() if not step.function else source_of(ROOT / step.file, step.function)
            if source.count(step.line) != 1:
                raise SystemExit(
                    f"{step.file}: {step.line!r} does not stand once in {step.function or 'it'}; adapt WALKS"
                )
            where = f"`{step.file}`, `{step.function}`" if step.function else f"`{step.file}`"
            yield from (f"{number}. {where}: `{step.line}`", "", f"   {step.text}", "")


def count(calls: Collection[CodeType]) -> str:
    """How many."""
    return f"{len({code.co_filename for code in calls})} files, {len(calls)} functions"


def name_of(code: CodeType) -> str:
    """What the page calls a function."""
    return code.co_qualname.replace(".<locals>", "")


def differences(page: str, paths: dict[str, Recording]) -> list[str]:
    """What the page lacks or has too much, and what it says in other words than the code.

    What is called in some runs only (the order of tasks, how busy the machine is) may be on it or not.
    """
    opening, ending = "\n".join(render_opening()) + "\n", "\n".join(render_walks()) + "\n"
    found = [] if page.startswith(opening) and page.endswith(ending) else ["its first or its last part"]
    every = [code for path in paths.values() for code in path.always]
    always = [code for code in every if WAITS not in Path(code.co_filename).parents]
    wanted = [f"`{name_of(code)}`: {why}" if (why := first_line(code)) else f"`{name_of(code)}`" for code in always]
    found += [text for text in dict.fromkeys(wanted) if text not in page]
    named = re.findall(r"^  - (?:and )?((?:`[\w.]+`(?:, )?)+)", page.removesuffix(ending), re.MULTILINE)
    ever = {name_of(code) for path in paths.values() for code in path.ever}
    return found + [name for name in re.findall(r"[\w.]+", " ".join(named)) if name not in ever]


def main() -> None:
    """Write the page."""
    argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]).parse_args()
    with page_store() as endpoint:
        paths = trio.run(measure, endpoint)
    where = PAGE.relative_to(ROOT)
    if PAGE.exists() and not differences(PAGE.read_text(), paths):
        print(f"{where} is up to date")
    else:
        PAGE.write_text(render(paths))
        print(f"wrote {where}")


if __name__ == "__main__":
    main()
