"""Replay a request trace through an engine and report: ``offload replay TRACE``.

    trace -> requests -> [lookup, load, compare, store] each -> a table, or JSON

The times are those of the cache alone; ``offload bench replay`` sets them beside a plain dictionary with the same copies.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import attrs
import click
import trio

from backends.abc import RemoteTier, Tier, TierStatistics
from backends.file import FileTier
from backends.memory import MemoryTier
from maru.eviction import LRU, AdaptiveLRFU

from ._engine import EngineStatistics, presence_filter
from ._errors import OffloadError
from ._eviction_comparison import compare, simulations
from ._eviction_report import capacities_of, picture, show
from ._replay_recording import Recorded, not_empty, not_recordable, scenario_of
from ._replayer import Played, TraceKeys, open_replayer
from ._trace import Request as Request
from ._trace import TraceError as TraceError
from ._trace import parse_request as parse_request
from ._trace import read_trace as read_trace
from ._what_if import simulate
from .abc import AsyncPolicy, Key, Policy
from .policies import FrequencyFilter

if TYPE_CHECKING:
    from .testing.scenarios._program import Scenario

UNLIMITED: Final = math.inf
_REGION_STEP: Final = 2 << 20
"""A page store's regions are whole multiples of it, so that its capacity is rounded up."""


class ReplayError(OffloadError, ValueError):
    """What was asked for cannot be replayed; the text says what would do."""


# --- what is asked for --------------------------------------------------------------------------------------------


@attrs.frozen
class TierSpec:
    """A tier to replay against."""

    kind: str
    """``memory``, ``file`` or ``maru``."""
    directory: str | None
    """Of a file tier."""
    capacity_bytes: float
    """How much it holds; ``inf`` for all of the trace."""

    @property
    def name(self) -> str:
        """As it was written."""
        return self.kind if self.directory is None else f"{self.kind}:{self.directory}"

    def blocks(self, block_bytes: int, unique: int, factor: float = 1.0) -> int:
        """How many blocks of the trace it holds, with so many times its capacity. Unlimited is room for all of them."""
        if self.capacity_bytes == UNLIMITED:
            return int(unique * factor)
        return int(self.capacity_bytes * factor) // block_bytes


@attrs.frozen
class ReplayOptions:
    """How to replay."""

    tiers: Sequence[TierSpec] = (TierSpec("memory", None, UNLIMITED),)
    """From the fastest to the slowest; each is fed what the one before it has stored."""
    block_bytes: int = 4096
    """Size of every block."""
    policy: str = "presence"
    """``pass-all``, ``presence``, or ``frequency:N``: present or seen N times at most stays out."""
    speed: float = math.inf
    """1.0 for the trace's own pace, N for N times as fast, ``inf`` for as fast as possible."""
    checksums: bool = True
    """Whether tiers sum what they store and verify it when it is loaded."""
    what_if: Sequence[float] = ()
    """Factors of capacity to give hit rates for."""

    def __attrs_post_init__(self) -> None:
        name, colon, threshold = self.policy.partition(":")
        if not (self.policy in ("pass-all", "presence") or (name == "frequency" and colon and threshold.isdecimal())):
            raise ReplayError(f"policy {self.policy!r}: must be pass-all, presence, or frequency:N")
        try:
            self.further_policies()
        except ValueError as error:
            raise ReplayError(f"policy {self.policy!r}: {error}") from error

    def policies(self, first: Tier | RemoteTier) -> list[Policy | AsyncPolicy]:
        """What the policy's name stands for."""
        return [] if self.policy == "pass-all" else [presence_filter(first), *self.further_policies()]

    def further_policies(self) -> list[Policy]:
        """What is asked behind presence."""
        _, counted, threshold = self.policy.partition(":")
        return [FrequencyFilter(int(threshold))] if counted else []


# --- what comes of it ---------------------------------------------------------------------------------------------


@attrs.frozen
class Percentiles:
    """Of some times, in seconds; 0.0 where there are none."""

    p50: float
    p99: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Percentiles:
        """The nearest ranks."""
        if not times:
            return cls(0.0, 0.0)
        ordered = sorted(times)
        return cls(*(ordered[max(0, math.ceil(len(ordered) * share) - 1)] for share in (0.5, 0.99)))


@attrs.frozen
class ReplayReport:
    """What a replay came to."""

    requests: int
    """Requests played."""
    blocks: int
    """Blocks of their prompts."""
    unique_blocks: int
    """Different ones of these."""
    hit_blocks: int
    """Blocks found and loaded, each as a part of its request's gapless prefix."""
    hit_rate: float
    """``hit_blocks / blocks``."""
    wrong: int
    """Loaded blocks that were not what had been stored. Anything but 0 is a bug, and fails the command."""
    load_failures: Mapping[str, int]
    """Blocks found and not loaded, by reason."""
    stored: int
    """Blocks stored in the first tier."""
    evicted: int
    """Blocks that left the first tier to make room."""
    filtered: int
    """Blocks that the policy kept out of it."""
    dropped: int
    """Blocks that were to be stored and were not: no room, or an error."""
    bytes: int
    """Bytes stored in tiers and loaded from them, in all."""
    lookup: Percentiles
    """Of each request: finding its prefix."""
    load: Percentiles
    """Of each request that hit: loading it."""
    store: Percentiles
    """Of each request that missed: storing what it missed, until that had settled in all tiers."""
    request: Percentiles
    """Of each request: all three."""
    cache_time: float
    """All of it, in all requests, in seconds."""
    wall_time: float
    """From the first request to the last, with the writing and comparing of blocks and any waiting, in seconds."""
    tiers: Mapping[str, TierStatistics]
    """Each tier at the end."""
    what_if: Mapping[str, float]
    """Hit rates that other capacities of all tiers would have given, by factor."""

    def as_json(self) -> dict[str, Any]:
        """For machines; times in seconds."""
        return attrs.asdict(self)


# --- doing it -----------------------------------------------------------------------------------------------------


async def replay(
    requests: Sequence[Request],
    options: ReplayOptions,
    progress: Callable[[int], None] = lambda done: None,
    record: Callable[[Scenario], None] | None = None,
    name: str = "a replay",
) -> ReplayReport:
    """Play requests one after another through an engine over new tiers, and compare every loaded block.

    Args:
        requests: as :func:`read_trace` gives them.
        options: how.
        progress: told how many requests are done, after each.
        record: told what was done, as a scenario (see :mod:`offload.testing.scenarios`).
        name: of that scenario.

    Raises:
        ReplayError: the options do not go together, or there is too little memory; to be recorded, the tiers must be empty.
    """
    names = TraceKeys()
    keys = [names.of(request) for request in requests]
    simulated = {f"{factor:g}x": _what_if(keys, len(names), options, factor) for factor in options.what_if}
    if record is not None and (other := not_recordable([spec.kind for spec in options.tiers])):
        raise ReplayError(f"--record: a tier of {other} cannot be written down as a scenario: say memory or file:DIR")
    async with _tiers(options, len(names)) as tiers:
        if record is not None and (full := not_empty(tiers)):
            raise ReplayError(f"--record: {full} has blocks already, and nobody knows how they came there: empty it")
        played: list[Played] = []
        policies = options.policies(next(iter(tiers.values())))
        most = max(map(len, keys), default=1)
        async with open_replayer(list(tiers.values()), options.block_bytes, most, policies=policies) as player:
            began = perf_counter()
            start = trio.current_time()
            for request, wanted in zip(requests, keys, strict=True):
                if options.speed != math.inf:
                    await trio.sleep_until(start + (request.timestamp - requests[0].timestamp) / 1e3 / options.speed)
                played.append(await player.play(wanted))
                progress(len(played))
            wall_time = perf_counter() - began
            statistics = player.engine.statistics()
        at_the_end = {name: tier.statistics() for name, tier in tiers.items()}
        if record is not None:
            scenario = scenario_of(
                name,
                requests,
                keys,
                played,
                [Recorded(spec.kind, spec.blocks(options.block_bytes, len(names))) for spec in options.tiers],
                statistics.tiers,
                block_bytes=options.block_bytes,
                checksums=options.checksums,
                presence=options.policy != "pass-all",
            )
            record(scenario)
    return _report(played, len(names), options, statistics, at_the_end, wall_time, simulated)


def _report(
    played: Sequence[Played],
    unique: int,
    options: ReplayOptions,
    statistics: EngineStatistics,
    tiers: Mapping[str, TierStatistics],
    wall_time: float,
    simulated: Mapping[str, float],
) -> ReplayReport:
    blocks, hits = sum(each.blocks for each in played), sum(each.hit for each in played)
    first = next(iter(tiers.values()))
    moved = sum(tier.stored + tier.loaded for tier in tiers.values())
    return ReplayReport(
        requests=len(played),
        blocks=blocks,
        unique_blocks=unique,
        hit_blocks=hits,
        hit_rate=hits / blocks if blocks else 0.0,
        wrong=sum(each.wrong for each in played),
        load_failures=statistics.load_failures,
        stored=first.stored,
        evicted=first.evicted,
        filtered=sum(each.filtered for each in played),
        dropped=sum(each.dropped for each in played),
        bytes=moved * options.block_bytes,
        lookup=Percentiles.of([each.lookup_time for each in played]),
        load=Percentiles.of([each.load_time for each in played if each.load_time]),
        store=Percentiles.of([each.store_time for each in played if each.store_time]),
        request=Percentiles.of([each.time for each in played]),
        cache_time=sum(each.time for each in played),
        wall_time=wall_time,
        tiers=tiers,
        what_if=simulated,
    )


def _what_if(keys: Sequence[Sequence[Key]], unique: int, options: ReplayOptions, factor: float) -> float:
    capacities = [spec.blocks(options.block_bytes, unique, factor) for spec in options.tiers]
    if 0 in capacities:
        raise ReplayError(f"what-if {factor:g}x: a tier would hold less than one block")
    hits = simulate(
        keys,
        capacities,
        options.further_policies(),
        presence=options.policy != "pass-all",
        eviction=[LRU if spec.kind == "maru" else AdaptiveLRFU for spec in options.tiers],
    )
    return hits / (sum(map(len, keys)) or 1)


@asynccontextmanager
async def _tiers(options: ReplayOptions, unique: int) -> AsyncIterator[dict[str, Tier | RemoteTier]]:
    """The tiers asked for, closed afterwards."""
    tiers: dict[str, Tier | RemoteTier] = {}
    async with AsyncExitStack() as stack:
        for spec in options.tiers:
            blocks = spec.blocks(options.block_bytes, unique)
            if not blocks and unique:
                raise ReplayError(f"capacity of {spec.name}: less than one block of {options.block_bytes} bytes")
            nbytes = max(1, blocks) * options.block_bytes
            tier: Tier | RemoteTier
            if spec.kind == "maru":
                _check_memory(spec, nbytes)
                tier = await stack.enter_async_context(_page_store(nbytes, options))
            elif spec.directory is None:
                _check_memory(spec, nbytes)
                tier = memory = MemoryTier(nbytes, options.block_bytes, checksums=options.checksums)
                stack.callback(memory.close)
            else:
                tier = files = FileTier(
                    spec.directory,
                    nbytes,
                    block_bytes=options.block_bytes,
                    fingerprint="offload.replay",
                    checksums=options.checksums,
                )
                stack.callback(files.close)
            tiers[spec.name if spec.name not in tiers else f"{spec.name} ({len(tiers) + 1})"] = tier
        yield tiers


@asynccontextmanager
async def _page_store(nbytes: int, options: ReplayOptions) -> AsyncIterator[RemoteTier]:
    """A tier over a page store in this process, with one region, of which nothing is evicted ahead of need."""
    from backends.maru import MaruTier
    from maru import MaruHandler, ServerConfig, open_server

    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=f"offload-replay-{os.getpid()}-", dir=memory) as home:
        config = ServerConfig(
            host="",
            rm_address="",
            pool_path=home,
            capacity_bytes=nbytes + _REGION_STEP,
            high_watermark=1.0,
            log_level="error",
        )
        async with open_server(config) as server:
            handler = MaruHandler(
                server_url=server.endpoints[-1],
                chunk_size_bytes=options.block_bytes,
                pool_size=nbytes,
                auto_expand=False,
                checksums=options.checksums,
            )
            async with MaruTier(handler) as tier:
                yield tier


def _check_memory(spec: TierSpec, nbytes: int) -> None:
    """Too much memory taken is not an error but an end: the system kills somebody."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):  # not Linux, or not as we know it
        return
    if nbytes > available:
        raise ReplayError(
            f"{spec.name} would take {_size(nbytes)} of memory, of which {_size(available)} is free: "
            "give it a --capacity, or choose smaller --block-bytes"
        )


# --- the command --------------------------------------------------------------------------------------------------

_UNITS: Final = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("", 1024), ("IB", 1024), ("B", 1000))
}


def _size_of(text: str) -> float:
    """A number of bytes: 4096, 64KiB, 1.5GB."""
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = _UNITS.get(text.strip()[len(number) :].upper(), 0)
    try:
        nbytes = float(number) * unit
    except ValueError:
        nbytes = 0.0
    if not 1 <= nbytes < 1 << 60:
        raise click.BadParameter(f"{text!r}: a size such as 4096, 64KiB or 1.5GB")
    return float(int(nbytes))


def _capacity_of(text: str) -> float:
    """A size, or ``unlimited``."""
    return UNLIMITED if text.strip().lower() == "unlimited" else _size_of(text)


def _speed_of(text: str) -> float:
    """``realtime``, ``10x`` or ``max``."""
    word = text.strip().lower()
    speed = {"max": math.inf, "realtime": 1.0}.get(word) or _factor(word)
    if speed is None:
        raise click.BadParameter(f"{text!r}: realtime, a factor such as 10x, or max")
    return speed


def _factors_of(text: str) -> list[float]:
    """Factors of capacity: ``2x,4x``."""
    factors = [_factor(part) for part in text.lower().split(",")]
    if None in factors:
        raise click.BadParameter(f"{text!r}: factors such as 0.5x,2x,4x")
    return [factor for factor in factors if factor is not None]


def _factor(text: str) -> float | None:
    try:
        factor = float(text.strip().removesuffix("x"))
    except ValueError:
        return None
    return factor if 0 < factor < math.inf else None


@click.command(name="replay", short_help="Replay a request trace.")
@click.argument("trace", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    metavar="memory|maru|file:DIR",
    help="Where blocks are kept; repeated, from the fastest to the slowest.  [default: memory]",
)
@click.option(
    "--capacity",
    "capacities",
    multiple=True,
    type=_capacity_of,
    metavar="SIZE|unlimited",
    help="Of each tier, in the same order.  [default: unlimited]",
)
@click.option(
    "--block-bytes", type=_size_of, default="4096", show_default=True, metavar="SIZE", help="Size of a block."
)
@click.option(
    "--policy",
    default="presence",
    show_default=True,
    metavar="pass-all|presence|frequency:N",
    help="What may be stored: all that was missed, what is not there, or what was missed more than N times, too.",
)
@click.option("--limit", type=click.IntRange(1), help="Play only so many requests.")
@click.option(
    "--speed",
    type=_speed_of,
    default="max",
    show_default=True,
    metavar="realtime|Nx|max",
    help="The pace: the trace's own, N times as fast, or as fast as possible.",
)
@click.option("--checksums/--no-checksums", default=True, show_default=True, help="Verify blocks by checksums, too.")
@click.option("--what-if", type=_factors_of, default=None, metavar="2x,4x", help="Hit rates at other capacities.")
@click.option(
    "--record",
    type=click.Path(dir_okay=False),
    metavar="OUT.scenario.toml",
    help="Write down what was done as a scenario, for `offload scenario run`.",
)
@click.option(
    "--compare-eviction",
    is_flag=True,
    help="Do not move bytes, but compare the hit rates of all eviction policies over TRACE, and what was possible.",
)
@click.option(
    "--capacities",
    "compared",
    metavar="1%,5%,4096",
    help="Where --compare-eviction does so: shares of the different blocks, or blocks.  [default: 1%,5%,10%,25%,50%]",
)
@click.option(
    "--picture",
    "picture_file",
    type=click.Path(dir_okay=False, writable=True),
    metavar="OUT.svg",
    help="Where --compare-eviction draws hit rate against capacity.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def command(
    trace: str,
    tiers: Sequence[str],
    capacities: Sequence[float],
    block_bytes: float,
    policy: str,
    limit: int | None,
    speed: float,
    checksums: bool,
    what_if: Sequence[float] | None,
    record: str | None,
    compare_eviction: bool,
    compared: str | None,
    picture_file: str | None,
    as_json: bool,
) -> None:
    """Replay the requests of TRACE and report hit rates, times and bytes.

    TRACE has a JSON object per line, as Mooncake publishes them (timestamp, input_length, output_length, hash_ids), and
    may be compressed by gzip. For each request the longest prefix is looked up and loaded, and what is missing is
    stored. Every loaded block is compared with what was stored; a difference ends with exit code 1.
    """
    if (compared or picture_file) and not compare_eviction:
        raise click.UsageError("--capacities and --picture go with --compare-eviction")
    try:
        if compare_eviction:
            _compare_eviction(trace, limit, compared, picture_file, as_json)
            return
        options = ReplayOptions(
            tiers=_specs(tiers, capacities),
            block_bytes=int(block_bytes),
            policy=policy,
            speed=speed,
            checksums=checksums,
            what_if=what_if or (),
        )
        requests = read_trace(trace, limit)
        if not requests:
            raise ReplayError(f"{trace}: no request")
        with _progress(len(requests)) as progress:
            write = None if record is None else partial(_write, record)
            report = trio.run(replay, requests, options, progress, write, f"a replay of {os.path.basename(trace)}")
    except (OffloadError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=2))
    else:
        _show(report, trace)
        if record is not None:
            click.echo(f"recorded: {record}")
    if report.wrong:
        click.echo(f"offload replay: {report.wrong} loaded blocks were not what had been stored", err=True)
        sys.exit(1)


def _write(path: str, scenario: Scenario) -> None:
    from .testing.scenarios._files.writing import to_toml

    Path(path).write_text(to_toml(scenario))


def _compare_eviction(
    trace: str, limit: int | None, compared: str | None, picture_file: str | None, as_json: bool
) -> None:
    if picture_file is not None and not picture_file.lower().endswith(".svg"):
        raise ReplayError(f"{picture_file}: a picture is SVG, so its name must end in .svg")
    requests = read_trace(trace, limit)
    names = TraceKeys()
    keys = [names.of(request) for request in requests]
    if not names:
        raise ReplayError(f"{trace}: no block")
    capacities = capacities_of(compared, len(names))
    with _progress(simulations(capacities), "simulating") as progress:
        comparison = compare(keys, capacities, progress)
    if picture_file is not None:
        Path(picture_file).write_text(picture(comparison, os.path.basename(trace)), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(comparison.as_json(), indent=2))
    else:
        show(comparison, f"eviction policies over {os.path.basename(trace)}")


def _specs(tiers: Sequence[str], capacities: Sequence[float]) -> list[TierSpec]:
    tiers = tiers or ("memory",)
    capacities = capacities or (UNLIMITED,) * len(tiers)
    if len(capacities) != len(tiers):
        raise ReplayError(f"{len(tiers)} tiers, but {len(capacities)} capacities")
    specs = []
    for tier, capacity in zip(tiers, capacities, strict=True):
        kind, colon, directory = tier.partition(":")
        if (kind, colon) == ("memory", ""):
            specs.append(TierSpec("memory", None, capacity))
        elif (kind, colon) == ("maru", ""):
            specs.append(TierSpec("maru", None, capacity))
        elif kind == "file" and directory:
            specs.append(TierSpec("file", directory, capacity))
        else:
            raise ReplayError(f"tier {tier!r}: must be memory, maru or file:DIR")
    return specs


@contextmanager
def _progress(steps: int, what: str = "replaying") -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=steps)

        def told(done: int) -> None:
            if done % 64 == 0 or steps < 1000:  # the bar costs more than a request does
                bar.update(task, completed=done)

        yield told


def _show(report: ReplayReport, trace: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"replay of {os.path.basename(trace)}", show_header=False, title_justify="left", title_style="bold"
    )
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in _lines(report):
        table.add_row(name, value)
    console = Console()
    console.print(table)
    if len(report.tiers) > 1:
        tiers = Table(
            "tier", "blocks", "stored", "loaded", "evicted", title="tiers", title_justify="left", title_style="bold"
        )
        for name, tier in report.tiers.items():
            tiers.add_row(name, *(f"{n:,}" for n in (tier.blocks, tier.stored, tier.loaded, tier.evicted)))
        console.print(tiers)


def _lines(report: ReplayReport) -> Iterator[tuple[str, str]]:
    yield "requests", f"{report.requests:,}"
    yield "blocks", f"{report.blocks:,} ({report.unique_blocks:,} different)"
    yield "hit_blocks", f"{report.hit_blocks:,}"
    yield "hit_rate", f"{report.hit_rate:.5f}"
    for factor, rate in report.what_if.items():
        yield f"hit_rate at {factor}", f"{rate:.5f}"
    yield "stored", f"{report.stored:,}"
    yield "evicted", f"{report.evicted:,}"
    if report.filtered:
        yield "filtered", f"{report.filtered:,}"
    yield "dropped", f"{report.dropped:,}"
    for reason, blocks in report.load_failures.items():
        yield f"not loaded: {reason}", f"{blocks:,}"
    yield "compared, wrong", f"{report.wrong:,}"
    yield "bytes", _size(report.bytes)
    for name in ("lookup", "load", "store", "request"):
        times: Percentiles = getattr(report, name)
        yield f"{name} p50 / p99", f"{times.p50 * 1e3:.3f} / {times.p99 * 1e3:.3f} ms"
    yield "cache time", f"{report.cache_time:.3f} s"
    yield "wall time", f"{report.wall_time:.3f} s"


def _size(nbytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            break
        nbytes /= 1024
    return f"{nbytes:,.0f} {unit}" if unit == "bytes" else f"{nbytes:,.1f} {unit}"
