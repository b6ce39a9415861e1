"""``offload demo``: the main job on real input, with every token verified.

Three engine processes, one after the other, work on one document:

A  prefills it, stores its KV blocks (the end of each forward pass as the precondition), and answers questions about it;
B  finds the prefix, and loads it instead of computing it. It answers other questions, and stores new blocks;
C  stores the document again, in tiers of its own (device -> host memory -> files), and cancels half of the stores: at
once,
   while they wait, and in the middle of a copy.

The blocks of A and B are kept by a page store, from whose pages B reads without a copy in between (``page_store.py``),
or by a daemon (``daemon.py``), where A and the daemon are killed in the middle.

The weights of the model are random, so its answers are gibberish; but each token depends on every byte before it. B and
C also run the model without any cache, and compare tokens and every bit of KV. A difference, a cancellation that is not
confirmed or a page that leaks is a failure. ``engine_process.py`` is one engine process, ``processes.py`` starts and
drives them, and this module verifies.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import trio

from maru.base.commands import output_directory, refuse
from maru.base.console import console, print_json
from maru.base.ending import EnvironmentFault, ExitCode, lacking

from .display import show, show_progress
from .document import document
from .processes import Options, Stage, working_directory

if TYPE_CHECKING:
    from rich.console import Console


@click.command
@click.option(
    "--document-bytes",
    type=click.IntRange(256, 32_000),
    default=6000,
    show_default=True,
    help="Length of the document, in bytes.",
)
@click.option(
    "--answer-tokens",
    type=click.IntRange(1, 256),
    default=24,
    show_default=True,
    help="Length of each answer, in tokens.",
)
@click.option(
    "--damage",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Flip a bit in N stored blocks before B starts; they must be missed, never used.",
)
@click.option(
    "--checksums/--no-checksums",
    default=True,
    help="Verify loaded blocks. With --no-checksums, --damage fails the demo.",
)
@click.option(
    "--keep",
    type=output_directory,
    metavar="DIR",
    help="Work in this directory, and keep it. By default a temporary one, which is removed.",
)
@click.option(
    "--daemon/--page-store",
    default=False,
    show_default=True,
    help="Keep the blocks in a daemon (`offload serve`), and kill an engine and the daemon midway; or in pages that the "
    "engines share.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    document_bytes: int,
    answer_tokens: int,
    damage: int,
    checksums: bool,
    keep: str | None,
    daemon: bool,
    as_json: bool,
) -> None:
    """Offload a small model's KV cache, reload it, and verify every token.

    Exit code 1 if a token, a bit of KV, a confirmation or a page is wrong or missing.
    """
    options = Options(document_bytes, answer_tokens, damage, checksums, Path(keep) if keep else None, daemon)
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentFault(lacking("torch"))
    if daemon:
        refuse(("damage", "checksums"), "goes with --page-store")
    report = trio.run(
        run, options, console(stderr=True, quiet=as_json), restrict_keyboard_interrupt_to_checkpoints=True
    )
    if as_json:
        print_json(report)
    else:
        show(report, console())
    if not report["verified"]:
        sys.exit(ExitCode.CHECK_FAILED)


async def run(options: Options, sheet: Console) -> dict[str, Any]:
    """Run the three processes and check their results."""
    if options.daemon:
        from .daemon import a_and_b
    else:
        from .page_store import a_and_b
    start = time.perf_counter()
    with working_directory(options.keep) as directory:
        text, source = document(options.document_bytes)
        (directory / "document.txt").write_bytes(text)
        with show_progress(sheet) as bars:
            stage = Stage(directory, options, sheet, bars)
            shared = await a_and_b(stage)
            async with stage.engine("c") as engine:
                cancel = await engine.ask("cancel")
                await engine.answer()
                c = await engine.finish() | {"cancel": cancel}
        temporaries = len(list(directory.rglob("*.tmp")))
    checks = verify(shared["a"], shared["b"], c) | shared["checks"] | {"no temporary file is left": not temporaries}
    return {
        "document": {"bytes": len(text), "source": source},
        **shared,
        "c": c,
        "checks": checks,
        "verified": all(checks.values()),
        "seconds": time.perf_counter() - start,
    }


def verify(a: dict[str, Any], b: dict[str, Any], c: dict[str, Any]) -> dict[str, bool]:
    """Return the checks of the three engines, by name."""

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
