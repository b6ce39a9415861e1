"""``offload demo``: the main job on real input, with every token verified.

One page store and three engine processes, one after the other, work on one document:

A  prefills it, stores its KV blocks (from the device straight into pages of shared memory, the end of each forward pass as the
   precondition), and answers questions about it;
B  finds the prefix in A's pages, and loads it from there instead of computing it, without a copy in between. It answers other
   questions, and stores new blocks in pages of its own region;
C  stores the document again, in other tiers (device -> host memory -> files), and cancels half of the stores: at once, while
   they wait, and in the middle of a copy.

The page store runs in this process, over a pool in /dev/shm that is removed afterwards.

The weights of the model are random, so its answers are gibberish; but each token depends on every byte before it. B and C also
run the model without any cache, and compare tokens and every bit of KV. A difference, a cancellation that is not confirmed or a
page that leaks is a failure. ``engine_process.py`` is one engine process, ``processes.py`` starts them, and this module
verifies.
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
from .processes import (
    SHARING,
    Options,
    damage,
    page_counts,
    page_store,
    place_of,
    region_bytes,
    run_engine_process,
    working_directory,
)

if TYPE_CHECKING:
    from rich.console import Console


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
    "--checksums/--no-checksums",
    default=True,
    help="Verify what is loaded. With --no-checksums, --damage fails the demo.",
)
@click.option(
    "--keep",
    type=output_directory,
    metavar="DIR",
    help="Work in this directory and leave it; by default a temporary one, which is removed.",
)
@click.option(
    "--daemon",
    is_flag=True,
    help="Have a daemon keep the blocks (`offload serve`), and kill an engine and the daemon in the middle.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object, and nothing else.")
def command(
    document_bytes: int,
    answer_tokens: int,
    damage: int,
    checksums: bool,
    keep: str | None,
    daemon: bool,
    as_json: bool,
) -> None:
    """Offload the KV cache of a small model, find it again, and verify every token.

    Exits with 1 if a token, a bit of KV, a confirmation or a page is wrong or missing.
    """
    options = Options(document_bytes, answer_tokens, damage, checksums, Path(keep) if keep else None)
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentFault(lacking("torch"))
    sheet = console(stderr=True, quiet=as_json)
    demo, show_report = run, show
    if daemon:
        refuse(("damage", "checksums"), "is for the demo without --daemon")
        from .daemon import run as demo
        from .daemon import show as show_report
    report = trio.run(demo, options, sheet, restrict_keyboard_interrupt_to_checkpoints=True)
    if as_json:
        print_json(report)
    else:
        show_report(report, console())
    if not report["verified"]:
        sys.exit(ExitCode.CHECK_FAILED)


async def run(options: Options, sheet: Console) -> dict[str, Any]:
    """Run the three processes and check their results."""
    start = time.perf_counter()
    with working_directory(options.keep) as directory:
        text, source = document(options.document_bytes)
        (directory / "document.txt").write_bytes(text)
        pool = directory / "pool" if options.keep else None
        home = place_of(pool, SHARING * region_bytes(options), sheet)
        with show_progress(sheet) as bars:
            async with page_store(home, pool) as server:
                a = await run_engine_process("a", directory, server, options, bars)
                damaged = damage(server, options.damage, a["block_bytes"])
                b = await run_engine_process("b", directory, server, options, bars)
                held = page_counts(server)
                c = await run_engine_process("c", directory, server, options, bars)
        temporaries = len(list(directory.rglob("*.tmp")))
    checks = verify(a, b, c) | verify_pages(a, b, held, damaged) | {"no temporary file is left": not temporaries}
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


def verify(a: dict[str, Any], b: dict[str, Any], c: dict[str, Any]) -> dict[str, bool]:
    """The checks by name, each with whether it held."""

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


def verify_pages(a: dict[str, Any], b: dict[str, Any], held: dict[str, int], damaged: int) -> dict[str, bool]:
    """The checks of the pages that A and B share, by name."""
    stored = a["stored_blocks"] + b["stored_blocks"]
    return {
        "B read from A's pages, in place": b["pages"]["regions_of_others"] > 0,
        # A second copy of a loaded block in B's region would add a page. Blocks found damaged are stored again.
        "each block lies in one page": held["keys"] == stored if not damaged else held["keys"] <= stored,
        "no page is held any more": not held["pinned"],
    }
