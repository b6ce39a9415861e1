"""``offload demo``: the main job on real input, with every token verified.

A page store, and three engine processes, one after the other, over one document:

A  prefills it, stores its KV blocks (from the device straight into pages of shared memory, the end of each forward pass as the
   precondition), and answers questions about it;
B  finds the prefix in A's pages, and loads it from there instead of computing it: no byte was copied in between. It answers
   other questions, and what it stores itself lies in pages of its own;
C  stores it anew somewhere else (device -> host memory -> files) and cancels half of the stores, at once, while they wait, and
   in the middle of a copy.

The page store runs in this process, over a pool in /dev/shm that is removed afterwards.

The weights of the model are random, so that its answers are gibberish; but each hangs on every byte before it. B and C also ask
a model without any cache, and compare tokens and every bit of KV. A difference, a cancellation that is not confirmed or a page
that leaks is a failure. What an engine process does is in ``_demo_process.py``; this one starts them, and judges.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click
import trio
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from maru._commands import output_directory
from maru._console import console
from maru._ending import EnvironmentFault, lacking

if TYPE_CHECKING:
    from rich.console import Console

    from maru import MaruServer

QUESTIONS = {
    "a": ["What is a block?", "Who may cancel a store, and until when?"],
    "b": ["When may the bytes be read?", "What is left behind by a transfer that failed?"],
    "c": ["Is a cancelled store really over?"],
}
_WORTH_A_RATE = 1 << 20  # bytes: what takes less time says more about the clock than about the copy

_BLOCK_TOKENS, _BLOCK_BYTES = 16, 64 << 10
"""Of the model. Its module imports torch, which takes seconds."""
_SPARE = 1.25
"""So much more memory than blocks: the page store evicts ahead of need from a region that is nearly full."""
_REGION_STEP = 2 << 20
_POOL_BYTES = 1 << 30
"""What the page store may take: more than it needs, or it would evict ahead of need. It takes what the regions have."""
_SHARING = 2
"""Engine processes that have a region each."""

PROCESS_TIMEOUT = 300.0
"""How long one engine process may take, in seconds. A healthy one takes some ten."""


class DemoFailed(EnvironmentFault):
    """An engine process did not come to its end."""


@attrs.frozen
class Options:
    """What can be chosen."""

    document_bytes: int = 6000
    answer_tokens: int = 24
    damage: int = 0
    checksums: bool = True
    keep: Path | None = None


@click.command
@click.option(
    "--document-bytes",
    type=click.IntRange(256, 32_000),
    default=6000,
    show_default=True,
    help="How much of it to read.",
)
@click.option(
    "--answer-tokens", type=click.IntRange(1, 256), default=24, show_default=True, help="Length of each answer."
)
@click.option(
    "--damage",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Flip a bit in N stored blocks before B starts: they must be missed, never used.",
)
@click.option(
    "--checksums/--no-checksums", default=True, help="Verify what is loaded. Without, --damage must fail the demo."
)
@click.option(
    "--keep",
    type=output_directory,
    metavar="DIR",
    help="Work in this directory and leave it; by default a temporary one, which is removed.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object, and nothing else.")
def command(
    document_bytes: int, answer_tokens: int, damage: int, checksums: bool, keep: str | None, as_json: bool
) -> None:
    """Offload the KV cache of a small model, find it again, and verify every token.

    Exits with 1 if a token, a bit of KV, a confirmation or a page is not what and where it should be.
    """
    options = Options(document_bytes, answer_tokens, damage, checksums, Path(keep) if keep else None)
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentFault(lacking("torch"))
    sheet = console(stderr=True, quiet=as_json)
    report = trio.run(run, options, sheet, restrict_keyboard_interrupt_to_checkpoints=True)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        show(report, console())
    if not report["verified"]:
        sys.exit(1)


async def run(options: Options, sheet: Console) -> dict[str, Any]:
    """Run the three processes and judge what they say."""
    start = time.perf_counter()
    with _directory(options.keep) as directory:
        text, source = document(options.document_bytes)
        (directory / "document.txt").write_bytes(text)
        pool = directory / "pool" if options.keep else None
        home = place_of(pool, _SHARING * region_bytes(options), sheet)
        with _progress(sheet) as bars:
            async with page_store(home, pool) as server:
                a = await _engine_process("a", directory, server, options, bars)
                damaged = damage(server, options.damage, a["block_bytes"])
                b = await _engine_process("b", directory, server, options, bars)
                held = books(server)
                c = await _engine_process("c", directory, server, options, bars)
        temporaries = len(list(directory.rglob("*.tmp")))
    checks = judge(a, b, c) | judge_pages(a, b, held, damaged) | {"no temporary file is left": not temporaries}
    return {
        "document": {"bytes": len(text), "source": source},
        "damaged": damaged,
        "page_store": held,
        "a": a,
        "b": b,
        "c": c,
        "checks": checks,
        "verified": all(checks.values()),
        "seconds": time.perf_counter() - start,
    }


def judge(a: dict[str, Any], b: dict[str, Any], c: dict[str, Any]) -> dict[str, bool]:
    """What must hold, by name."""

    def same(what: str, engine: dict[str, Any]) -> bool:
        return [answer[what] for answer in engine["answers"]] == [answer[what] for answer in engine["uncached"]]

    return {
        "B's tokens are those computed without a cache": same("tokens", b),
        "B's KV is that computed without a cache, to the bit": same("kv", b),
        "C's tokens are those computed without a cache": same("tokens", c),
        "C's KV is that computed without a cache, to the bit": same("kv", c),
        "A stored what it computed": a["stored_blocks"] >= a["answers"][0]["blocks"],
        "B found what A had stored": b["hit_blocks"] > 0,
        "every cancellation was confirmed": c["cancel"]["confirmed"] == c["cancel"]["asked"] > 0,
        "each ended CANCELLED or COMPLETE": c["cancel"]["cancelled"] + c["cancel"]["too_late"] == c["cancel"]["asked"],
        "what was cancelled in time is nowhere": not c["cancel"]["cancelled_but_found"],
        "what was stored is there": not c["cancel"]["stored_but_missing"],
        "nothing leaked": not any(leak for engine in (a, b, c) for leak in engine["at_rest"].values()),
    }


def judge_pages(a: dict[str, Any], b: dict[str, Any], held: dict[str, int], damaged: int) -> dict[str, bool]:
    """What must hold of the pages that A and B share."""
    stored = a["stored_blocks"] + b["stored_blocks"]
    return {
        "B read from A's pages, in place": b["pages"]["regions_of_others"] > 0,
        # Had B kept a copy of what it loaded, there would be more; what was found damaged is stored anew.
        "each block lies in one page": held["keys"] == stored if not damaged else held["keys"] <= stored,
        "no page is held any more": not held["pinned"],
    }


# --- the document -------------------------------------------------------------------------------------------------


_ROOT = Path(__file__).resolve().parent.parent


def document(nbytes: int, root: Path = _ROOT) -> tuple[bytes, str]:
    """The project's own documentation, and where it was found: in a checkout, or else in the docstrings of the packages."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    if all(page.is_file() for page in pages) and len(pages) > 1:
        parts, source = [page.read_text(encoding="utf-8") for page in pages], "README and docs"
    else:
        files = [file for package in ("offload", "backends", "maru") for file in sorted((root / package).rglob("*.py"))]
        parts, source = [text for file in files for text in _docstrings(file)], "docstrings"
    text = "\n".join(parts).encode()
    while len(text) < nbytes:  # a small installation
        text += text
    return text[:nbytes], source


def _docstrings(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


# --- processes ----------------------------------------------------------------------------------------------------


async def _engine_process(
    role: str, directory: Path, server: MaruServer, options: Options, bars: _Bars
) -> dict[str, Any]:
    """Start an engine process, show how far it is, and return its outcome."""
    job = {
        "role": role,
        "directory": str(directory / "files"),
        "store": server.endpoints[-1],
        "document": str(directory / "document.txt"),
        "questions": QUESTIONS[role],
        "answer_tokens": options.answer_tokens,
        "checksums": options.checksums,
        "region_bytes": region_bytes(options),
    }
    command = [sys.executable, "-m", "offload._demo_process", json.dumps(job)]
    outcome: dict[str, Any] | None = None
    status: int | None = None
    with trio.move_on_after(PROCESS_TIMEOUT) as scope:
        async with trio.open_nursery() as nursery:  # leaving it, in whatever way, ends the process
            process: trio.Process = await nursery.start(
                partial(trio.run_process, command, stdout=subprocess.PIPE, check=False, process_group=0)
            )
            async for line in _lines(process):
                event: dict[str, Any] = json.loads(line)
                kind = event.pop("event")
                if kind == "outcome":
                    outcome = event
                else:
                    bars(role, kind, event)
            status = await process.wait()
    if scope.cancelled_caught:
        raise DemoFailed(f"engine process {role.upper()} took more than {PROCESS_TIMEOUT:g} s")
    if outcome is None:
        raise DemoFailed(f"engine process {role.upper()} ended with status {status}, without an outcome")
    return outcome


async def _lines(process: trio.Process) -> AsyncIterator[bytes]:
    assert process.stdout is not None
    rest = b""
    async for part in process.stdout:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line


def region_bytes(options: Options) -> int:
    """Memory for the blocks of one engine process, those of the same prompts computed anew beside them."""
    longest = max(len(question) for questions in QUESTIONS.values() for question in questions)
    blocks = -(-(options.document_bytes + longest + options.answer_tokens) // _BLOCK_TOKENS)
    nbytes = int(_SPARE * (2 * blocks + 8) * _BLOCK_BYTES)
    return -(-nbytes // _REGION_STEP) * _REGION_STEP


def place_of(pool: Path | None, nbytes: int, sheet: Console) -> str:
    """The directory for what is temporary. Says so where a pool is not in memory.

    Raises:
        DemoFailed: there is no room for a pool anywhere.
    """
    from maru._errors import PoolUnusable
    from maru._pool.placement import find_place

    try:
        place = find_place(nbytes, [str(pool.parent)] if pool else ())
    except PoolUnusable as error:
        raise DemoFailed(str(error)) from error
    if place.note:
        sheet.print(place.note, soft_wrap=True)
    return place.parent if pool is None else tempfile.gettempdir()


@contextlib.asynccontextmanager
async def page_store(parent: str, pool: Path | None = None) -> AsyncIterator[MaruServer]:
    """A page store in this process, over a temporary pool in a directory, or over one that stays."""
    from maru import ServerConfig, open_server

    with tempfile.TemporaryDirectory(prefix=f"offload-demo-{os.getpid()}-", dir=parent) as home:
        config = ServerConfig(
            host="",  # a Unix socket is enough
            rm_address="",
            runtime_dir=home,
            pool_path=str(pool or home),
            capacity_bytes=_POOL_BYTES,
            log_level="error",
        )
        async with open_server(config) as server:
            yield server


def damage(server: MaruServer, n: int, page_bytes: int) -> int:
    """Flip a bit in each of the first ``n`` pages of A's region, behind everybody's back; in how many there were."""
    if not n:
        return 0
    [region] = Path(server.config.pool_path).glob("maru_*.dat")
    n = min(n, books(server)["keys"])
    with region.open("r+b") as file:
        for page in range(n):  # pages are handed out ascending
            file.seek((page + 1) * page_bytes - 1)
            last = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([last ^ 1]))
    return n


def books(server: MaruServer) -> dict[str, int]:
    """What the page store holds."""
    directory = server.statistics().service.directory
    return {
        "keys": directory.entries,
        "bytes": directory.used_bytes,
        "regions": directory.regions,
        "pinned": directory.pinned,
    }


@contextlib.contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix=f"offload-demo-{os.getpid()}-") as directory:
            yield Path(directory)
    else:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise click.UsageError(f"--keep: {keep} is not empty")
        yield keep


# --- what is shown ------------------------------------------------------------------------------------------------


class _Bars:
    """Progress of the engine processes, on a terminal."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, role: str, kind: str, event: dict[str, Any]) -> None:
        """One line that a process wrote."""
        name = role.upper()
        match kind:
            case "ready":
                self._show(f"{name}: blocks stored", 0, event["blocks"])
            case "stored":
                self._show(f"{name}: blocks stored", event["blocks"], None)
            case "prefill":
                self._show(f"{name}: tokens computed", event["computed"], event["total"])
            case _:
                self._show(f"{name}: the same without a cache", event["computed"], event["total"])

    def _show(self, what: str, completed: int, total: int | None) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        task = self._tasks[what]
        if total is None:
            total = max(completed, int(self._progress.tasks[task].total or 0))
        self._progress.update(task, completed=completed, total=total)


@contextlib.contextmanager
def _progress(sheet: Console) -> Iterator[_Bars]:
    columns = (
        TextColumn("{task.description:34}"),
        BarColumn(),
        TextColumn("{task.completed:>6.0f} of {task.total:.0f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=sheet, disable=not sheet.is_terminal) as progress:
        yield _Bars(progress)


def show(report: dict[str, Any], sheet: Console) -> None:
    """The tables."""
    a, b, c = report["a"], report["b"], report["c"]
    size = a["block_bytes"]
    sheet.print(
        f"\nA document of {report['document']['bytes']:,} tokens ({report['document']['source']}), "
        f"in blocks of {size // 1024} KiB.\n"
    )
    sheet.print(_answers(report))
    table = Table("", "A: computes and stores", "B: finds and loads", title="What moved", title_justify="left")
    for row in zip(_figures(a, size), _figures(b, size), strict=True):
        table.add_row(row[0][0], row[0][1], row[1][1])
    sheet.print(table)
    cancel = c["cancel"]
    held = report["page_store"]
    sheet.print(
        f"\nThe page store held {held['keys']:,} pages, {_bytes(held['bytes'])}: B loaded from {a['stored_blocks']:,} that "
        "A had written, and kept no copy."
    )
    sheet.print(
        f"\nC cancelled {cancel['asked']} of {cancel['stores']} stores: {cancel['confirmed']} confirmed, of which "
        f"{cancel['cancelled']} in time and {cancel['too_late']} after the commit, when the copy drains."
        f"\nAt rest: {', '.join(f'{name} {count}' for name, count in c['at_rest'].items())}.\n"
    )
    for check, holds in report["checks"].items():
        word = Text("yes  ", "green") if holds else Text("NO   ", "bold red")
        sheet.print(word.append(check, "none"))
    verdict = Text("\nverified", "bold green") if report["verified"] else Text("\nNOT VERIFIED", "bold red")
    sheet.print(verdict.append(f" in {report['seconds']:.1f} s", "none"))


def _answers(report: dict[str, Any]) -> Table:
    table = Table(
        "", "question", "answer, bytes", "loaded", "first token", "without", title="Answers", title_justify="left"
    )
    for role in "abc":
        engine = report[role]
        uncached = engine.get("uncached", [None] * len(engine["answers"]))
        for answer, bare in zip(engine["answers"], uncached, strict=True):
            table.add_row(
                role.upper(),
                answer["question"],
                " ".join(f"{token:02x}" for token in answer["tokens"][:4]) + "..",
                f"{answer['loaded_blocks']}/{answer['blocks']}",
                f"{answer['first_token'] * 1000:,.0f} ms",
                f"{bare['first_token'] * 1000:,.0f} ms" if bare else "",
            )
    return table


def _figures(engine: dict[str, Any], size: int) -> list[tuple[str, str]]:
    return [
        ("blocks stored in shared pages", f"{engine['stored_blocks']:,}"),
        ("blocks loaded", f"{engine['loaded_blocks']:,}"),
        ("hit rate", f"{engine['hit_blocks'] / engine['asked_blocks']:.1%}"),
        ("bytes stored", _bytes(engine["stored_bytes"])),
        ("bytes loaded", _bytes(engine["loaded_blocks"] * size)),
        ("device to pages, registered", _rate(engine["copies"]["maru"])),
        ("loads", _rate(loads(engine))),
        ("found, but not loaded", ", ".join(f"{n} {why}" for why, n in engine["load_failures"].items()) or "0"),
    ]


def loads(engine: dict[str, Any]) -> dict[str, float]:
    """Bytes and seconds of all loads of a process."""
    return {
        "bytes": sum(answer["loaded_blocks"] for answer in engine["answers"]) * engine["block_bytes"],
        "seconds": sum(answer["load"] for answer in engine["answers"] if answer["loaded_blocks"]),
    }


def _bytes(n: float) -> str:
    return f"{n / 2**20:,.1f} MiB"


def _rate(copied: dict[str, float]) -> str:
    if copied["bytes"] < _WORTH_A_RATE:
        return "-"
    return f"{copied['bytes'] / copied['seconds'] / 1e9:.2f} GB/s"
