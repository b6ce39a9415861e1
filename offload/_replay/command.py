"""The command ``offload replay``."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import click
import trio

from backends import BackendError
from maru.base.commands import FiniteRange, given, output_file, refuse, write_output
from maru.base.console import print_json
from maru.base.ending import BadInput, EnvironmentFault, ExitCode
from maru.base.files import PICTURE, SCENARIO

from .._errors import OffloadError
from .clock import SkippingClock
from .display import progressing, show
from .eviction_comparison import Storing
from .eviction_report import print_comparison
from .options import ReplayError, ReplayOptions
from .report import ReplayReport
from .session import replay
from .tier_specs import specs_of
from .trace import TimeUnit, looks_like_seconds, read_trace, requests_per_second
from .units import capacity_of, factors_of, size_of, size_text, speed_of

if TYPE_CHECKING:
    from ..testing.scenarios._program import Scenario


_OF_BYTES = (
    *(
        "tiers",
        "capacities",
        "block_bytes",
        "policy",
        "time_unit",
        "speed",
        "laps",
        "rename",
        "skip_idle",
        "in_flight",
        "checksums",
        "what_if",
    ),
    "record",
)
"""Options that do not apply to --compare-eviction."""


@click.command(name="replay", short_help="Replay a request trace.")
@click.argument("trace", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    metavar="memory|maru|file:DIR|SPEC",
    help="Tier for blocks; repeated, from the fastest to the slowest. SPEC is any other tier: a registered name, "
    "module:attribute, or a table, in TOML or JSON, such as '{ type = \"NAME\", parameter = 1 }'.  [default: memory]",
)
@click.option(
    "--capacity",
    "capacities",
    multiple=True,
    type=capacity_of,
    metavar="SIZE|unlimited",
    help="Capacity of each tier, in the order of --tier; for a SPEC it sets capacity_bytes, unless the SPEC has one.  "
    "[default: unlimited]",
)
@click.option("--block-bytes", type=size_of, default="4096", show_default=True, metavar="SIZE", help="Size of a block.")
@click.option(
    "--policy",
    default="presence",
    show_default=True,
    metavar="pass-all|presence|frequency:N",
    help="Blocks to store: all that missed, those not present, or those that missed more than N times.",
)
@click.option("--limit", type=click.IntRange(1, 1 << 40), help="Play only the first N requests.")
@click.option(
    "--time-unit",
    type=click.Choice(["ms", "s"]),
    default="ms",
    show_default=True,
    help="Unit of the trace's timestamps: milliseconds, as published by Mooncake, or seconds.",
)
@click.option(
    "--speed",
    type=speed_of,
    default="max",
    show_default=True,
    metavar="realtime|Nx|max",
    help="Pace of the replay: as in the trace, N times as fast, or as fast as possible.",
)
@click.option(
    "--laps",
    type=click.IntRange(1, 1_000_000),
    default=1,
    show_default=True,
    help="Play the trace N times, one lap after another.",
)
@click.option(
    "--rename",
    type=FiniteRange(0.0, 1.0),
    default=0.8,
    show_default=True,
    metavar="SHARE",
    help="Share of the different blocks that get new names in each lap; with --laps.",
)
@click.option(
    "--skip-idle/--no-skip-idle",
    default=None,
    help="Keep the pace of the trace, on a clock that skips the time between two requests.  [default: with --laps]",
)
@click.option(
    "--in-flight",
    type=click.IntRange(1, 1_024),
    default=1,
    show_default=True,
    metavar="N",
    help="Play N requests at once. Each begins when an earlier one has ended, and sees the blocks stored by then.",
)
@click.option("--checksums/--no-checksums", default=True, show_default=True, help="Verify blocks by checksums, too.")
@click.option(
    "--what-if",
    type=factors_of,
    default=None,
    metavar="2x,4x",
    help="Multiples of the capacities to report hit rates for.",
)
@click.option(
    "--record",
    type=output_file(SCENARIO),
    metavar="OUT.scenario.toml",
    help="Write the replay to a file, as a scenario for `offload scenario run`.",
)
@click.option(
    "--compare-eviction",
    is_flag=True,
    help="Compare the hit rates of all eviction policies over TRACE, and the highest possible one, without moving bytes.",
)
@click.option(
    "--capacities",
    "compared",
    metavar="1%,5%,4096",
    help="Capacities for --compare-eviction: shares of the different blocks, or numbers of blocks.  [default: "
    "1%,5%,10%,25%,50%]",
)
@click.option(
    "--chunk",
    type=click.IntRange(1, 1 << 40),
    help="Blocks of a request that --compare-eviction stores together.  [default: all]",
)
@click.option("--depths", is_flag=True, help="Store each block with its depth in its prefix; with --compare-eviction.")
@click.option(
    "--picture",
    "picture_file",
    type=output_file(PICTURE, ".svg"),
    metavar="OUT.svg",
    help="Draw hit rate against capacity into this file; with --compare-eviction.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    trace: str,
    tiers: Sequence[str],
    capacities: Sequence[float],
    block_bytes: float,
    policy: str,
    limit: int | None,
    time_unit: TimeUnit,
    speed: float,
    laps: int,
    rename: float,
    skip_idle: bool | None,
    in_flight: int,
    checksums: bool,
    what_if: Sequence[float] | None,
    record: str | None,
    compare_eviction: bool,
    compared: str | None,
    chunk: int | None,
    depths: bool,
    picture_file: str | None,
    as_json: bool,
) -> None:
    """Replay the requests of TRACE and report hit rates, times and bytes.

    TRACE has one JSON object per line, in the format of Mooncake (timestamp, input_length, output_length, hash_ids), and
    may be compressed by gzip. For each request the longest prefix is looked up and loaded, and missing blocks are
    stored. Every loaded block is compared with the stored one; a difference ends the command with exit code 1, and so does a
    block that is still held or missing after the laps. Exit code 3: blocks could not be stored. Exit code 2: the first tier had
    no room for a single block.
    """
    _check_combination(compare_eviction, laps, skip_idle, speed)
    with _refusals():
        if compare_eviction:
            print_comparison(trace, limit, compared, Storing(chunk, depths), picture_file, as_json)
            return
        skips = laps > 1 if skip_idle is None else skip_idle
        options = ReplayOptions(
            tiers=specs_of(tiers, capacities),
            block_bytes=int(block_bytes),
            policy=policy,
            speed=1.0 if skips and speed == math.inf else speed,
            skip_idle=skips,
            laps=laps,
            rename=rename,
            in_flight=in_flight,
            checksums=checksums,
            what_if=what_if or (),
        )
        report = _replay(trace, limit, time_unit, options, record)
    if as_json:
        print_json(report.as_json())
    else:
        show(report, trace)
        if record is not None:
            click.echo(f"recorded: {record}")
    _end(report)


def _check_combination(compare_eviction: bool, laps: int, skip_idle: bool | None, speed: float) -> None:
    """Refuse options that would be ignored next to the others."""
    if compare_eviction:
        refuse(_OF_BYTES, "is about moving bytes, which --compare-eviction does not")
    else:
        refuse(("compared", "chunk", "depths", "picture_file"), "goes with --compare-eviction")
    if laps == 1:
        refuse(("rename",), "applies to laps: set their number with --laps")
    if skip_idle and speed == math.inf and given("speed"):
        raise click.UsageError("--skip-idle: with --speed max there is no idle time to skip")


@contextmanager
def _refusals() -> Iterator[None]:
    """Translate errors into those that end a command.

    They mean wrong options, or an unsuitable machine.
    """
    try:
        yield
    except BackendError as error:
        raise EnvironmentFault(str(error)) from error
    except (OffloadError, ValueError) as error:
        raise (EnvironmentFault if isinstance(error, OSError) else BadInput)(str(error)) from error


def _replay(
    trace: str, limit: int | None, time_unit: TimeUnit, options: ReplayOptions, record: str | None
) -> ReplayReport:
    """Play the trace with a progress bar, and write any scenario.

    It is written if ``record`` names a file.
    """
    requests = read_trace(trace, limit, time_unit)
    if not requests:
        raise ReplayError(f"{trace}: has no requests")
    if time_unit == "ms" and looks_like_seconds(requests):
        click.echo(
            f"offload replay: {trace}: read in milliseconds, its timestamps mean {requests_per_second(requests):,.0f} requests "
            "a second; if they are in seconds, use --time-unit s",
            err=True,
        )
    clock = SkippingClock() if options.skip_idle else None
    with progressing(options.laps * len(requests)) as progress:
        return trio.run(
            replay,
            requests,
            options,
            progress,
            None if record is None else partial(_write, record),
            f"a replay of {os.path.basename(trace)}",
            clock,
            clock=clock,
            restrict_keyboard_interrupt_to_checkpoints=True,
        )


def _end(report: ReplayReport) -> None:
    """Print the failures, and exit with the code for them.

    Raises:
        SystemExit: a check failed, or blocks could not be stored.
    """
    if report.wrong:
        click.echo(f"offload replay: {report.wrong} loaded blocks differ from the stored ones", err=True)
    for what, left in report.left_over.items():
        click.echo(f"offload replay: at rest, {what}: {left} blocks", err=True)
    for reason, blocks in report.failures.items():
        click.echo(f"offload replay: {blocks} blocks were not stored: {reason}", err=True)
    full = report.dropped and not report.stored and not report.failures
    if full:
        holds = size_text(next(iter(report.tiers.values())).capacity_bytes)
        click.echo(
            f"offload replay: nothing was stored: the first tier holds {holds}: give it more --capacity", err=True
        )
    # A wrong block is the gravest failure, so it decides the exit code, whatever else was printed above.
    if report.wrong or report.left_over:
        sys.exit(ExitCode.CHECK_FAILED)
    if report.failures:
        sys.exit(ExitCode.ENVIRONMENT)
    if full:
        sys.exit(ExitCode.USAGE)


def _write(path: str, scenario: Scenario) -> None:
    from ..testing.scenarios._files import to_toml

    write_output(path, to_toml(scenario), SCENARIO)
