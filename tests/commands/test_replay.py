"""Replaying a trace: what is read, what is counted, what is compared, and what other capacities would have given."""

from __future__ import annotations

import gzip
import json
import math
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backends.memory import MemoryTier
from maru.eviction import LRU
from maru.testing import open_test_server
from offload._replay.replayer import Buffer, Replayer, open_replayer
from offload._replay.simulation import simulate
from offload._replay.tier_specs import specs_of
from offload.cli import main
from offload.policies import FrequencyFilter
from offload.replay import (
    Baseline,
    Driven,
    Percentiles,
    ReplayError,
    ReplayOptions,
    ReplayReport,
    Request,
    TierSpec,
    TraceError,
    TraceKeys,
    command,
    drive,
    keys_of,
    make_places,
    open_engine_cache,
    parse_request,
    read_trace,
    replay,
)
from tests.support import plugin_peers

BLOCK = 512

# Requests that share prefixes, branch off, come back, and (the last) have a gap that a small cache leaves.
TRACE = [
    [0, 1, 2, 3],
    [0, 1, 4],
    [5, 6, 7, 8, 9],
    [0, 1, 2, 3, 10],
    [5, 6, 11],
    [12],
    [0, 1, 2, 3, 10, 13],
    [5, 6, 7, 8, 9, 14],
]

PEERS = "tests.support.plugin_peers"


def line_of(hash_ids: Sequence[int], timestamp: int = 0) -> str:
    return json.dumps({"timestamp": timestamp, "input_length": 512, "output_length": 9, "hash_ids": list(hash_ids)})


MOST = max(map(len, TRACE))


def requests_of(trace: Sequence[Sequence[int]]) -> list[Request]:
    return [Request(float(10 * at), 512, 9, tuple(ids)) for at, ids in enumerate(trace)]


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{line_of(ids, 10 * at)}\n" for at, ids in enumerate(TRACE)))
    return path


# --- reading ------------------------------------------------------------------------------------------------------


def test_a_line_is_a_request() -> None:
    request = parse_request(b'{"timestamp": 27, "input_length": 6, "output_length": 5, "hash_ids": [3, 1]}', "t", 1)
    assert request == Request(27.0, 6, 5, (3, 1))


def test_fields_that_are_not_known_are_ignored() -> None:
    line = line_of([1])[:-1] + ', "session": "x"}'
    assert parse_request(line.encode(), "t", 1).hash_ids == (1,)


@pytest.mark.parametrize(
    ("line", "field", "problem"),
    [
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}', "hash_ids", "missing"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": 3}', "hash_ids", "array"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1, "a"]}', "hash_ids[1]", "int"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [-1]}', "hash_ids[0]", ">= 0"),
        (
            '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [4, 5, 4]}',
            "hash_ids",
            "4 is named twice",
        ),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": []}', "timestamp", ">= 0"),
        ('{"timestamp": 0, "input_length": 1.5, "output_length": 1, "hash_ids": []}', "input_length", "int"),
        ('{"timestamp": 0, "input_length": 1, "output_length": "1", "hash_ids": []}', "output_length", "int"),
        ("[1, 2]", "", "object"),
        ("{nonsense", "", "malformed"),
        ("\xff", "", ""),
    ],
)
def test_a_malformed_line_names_file_line_and_field(tmp_path: Path, line: str, field: str, problem: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(f"{line_of([1])}\n\n".encode() + line.encode("latin-1") + b"\n")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    error = caught.value
    assert (error.file, error.line, error.field) == (str(path), 3, field)
    assert problem in str(error)
    assert str(error).startswith(f"{path}, line 3: {field}")


def test_gzip_is_read_whatever_the_name(tmp_path: Path, trace_file: Path) -> None:
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(trace_file.read_bytes()))
    assert read_trace(packed) == read_trace(trace_file)
    assert [list(request.hash_ids) for request in read_trace(packed)] == TRACE


def test_a_broken_off_gzip_file_is_an_error(tmp_path: Path, trace_file: Path) -> None:
    packed = tmp_path / "packed.gz"
    packed.write_bytes(gzip.compress(trace_file.read_bytes())[:-12])
    with pytest.raises(TraceError, match="damaged"):
        read_trace(packed)


def test_a_trace_is_read_from_a_pipe_whole(trace_file: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "offload",
        "replay",
        "/dev/stdin",
        "--json",
        "--block-bytes",
        "64",
        "--capacity",
        "4KiB",
    ]
    lines = trace_file.read_bytes() * 2000
    done = subprocess.run(command, input=lines, capture_output=True, check=True)
    assert json.loads(done.stdout)["requests"] == lines.count(b"\n")


@pytest.mark.parametrize("options", [["--speed", "realtime"], ["--laps", "2"]], ids=" ".join)
def test_a_trace_out_of_order_is_refused_where_time_counts(tmp_path: Path, options: list[str]) -> None:
    trace = tmp_path / "unsorted.jsonl"
    trace.write_text("\n".join(line_of([number], timestamp) for number, timestamp in enumerate((0, 10**15, 10))))
    done = invoke(trace, "--capacity", "1MiB", *options)
    assert done.exit_code == 2 and "sort the trace" in done.output
    assert invoke(trace, "--capacity", "1MiB").exit_code == 0


def test_the_limit_stops_reading(trace_file: Path) -> None:
    trace_file.write_text(trace_file.read_text() + "nonsense\n")
    assert len(read_trace(trace_file, 3)) == 3
    assert len(read_trace(trace_file, len(TRACE))) == len(TRACE)


@pytest.mark.parametrize(
    ("step", "options", "says"),
    [
        (
            2,
            [],
            "read in milliseconds, its timestamps mean 526 requests a second; if they are in seconds, use --time-unit s",
        ),
        (2, ["--time-unit", "s"], ""),
        (27, [], ""),
        (0, [], ""),
    ],
)
def test_timestamps_in_seconds_are_noticed(tmp_path: Path, step: int, options: list[str], says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{line_of([at], step * at)}\n" for at in range(20)))
    result = CliRunner().invoke(main, ["replay", str(path), "--capacity", "1MiB", *options])
    assert result.exit_code == 0
    assert says in result.stderr if says else "milliseconds" not in result.stderr


def test_a_trace_in_seconds_is_read(trace_file: Path) -> None:
    stamps = [request.timestamp for request in read_trace(trace_file)]
    assert [request.timestamp for request in read_trace(trace_file, time_unit="s")] == [1000 * at for at in stamps]


def test_equal_hash_ids_are_equal_keys() -> None:
    names = TraceKeys()
    keys = [names.of(request) for request in requests_of(TRACE)]
    assert keys[0][:2] == keys[1][:2]
    assert len({key for each in keys for key in each}) == len(names) == 15


# --- what if ------------------------------------------------------------------------------------------------------


def plain_lru(requests: Sequence[Sequence[bytes]], capacity: int) -> int:
    order: OrderedDict[bytes, None] = OrderedDict()
    hits = 0
    for keys in requests:
        hit = next((at for at, key in enumerate(keys) if key not in order), len(keys))
        hits += hit
        for key in keys[:hit][::-1]:
            order.move_to_end(key)
        new = [key for key in keys[hit:] if key not in order]
        if len(new) > capacity:
            continue
        while len(order) + len(new) > capacity:
            order.popitem(last=False)
        for key in new[::-1]:
            order[key] = None
    return hits


traces = st.lists(st.lists(st.integers(0, 30), max_size=8, unique=True), max_size=25)


@given(trace=traces, capacity=st.integers(1, 35))
@example(trace=[[]], capacity=1)
def test_what_if_is_plain_lru(trace: list[list[int]], capacity: int) -> None:
    keys = [[b"%d" % hash_id for hash_id in ids] for ids in trace]
    assert simulate(keys, [capacity]) == plain_lru(keys, capacity)


@settings(max_examples=40, deadline=None)
@given(
    trace=traces,
    capacities=st.lists(st.integers(1, 35), min_size=1, max_size=3),
    policy=st.sampled_from(["presence", "pass-all", "frequency:1", "frequency:2"]),
)
# More room than different blocks: what is stored again takes a slot of it, and evicts nothing.
@example(trace=[[0, 1, 3, 4, 5, 30], [0, 2, 1], [0, 30]], capacities=[8], policy="pass-all")
def test_what_if_is_what_a_replay_gives(trace: list[list[int]], capacities: list[int], policy: str) -> None:
    options = ReplayOptions(
        tiers=[TierSpec("memory", None, blocks * BLOCK) for blocks in capacities], block_bytes=BLOCK, policy=policy
    )
    report = trio.run(replay, requests_of(trace), attrs.evolve(options, what_if=[1.0]))
    assert report.wrong == 0
    assert report.what_if["1x"] == report.hit_rate


def test_a_tier_below_catches_what_the_first_one_evicts() -> None:
    keys = [[b"%d" % hash_id for hash_id in ids] for ids in TRACE]
    assert simulate(keys, [5]) < simulate(keys, [5, 50]) == simulate(keys, [50])


def test_frequent_blocks_are_stored_later() -> None:
    keys = [[b"a", b"b"]] * 4
    assert simulate(keys, [4]) == 6
    assert simulate(keys, [4], [FrequencyFilter(2)]) == 2  # let in at the third sight


# --- the replay itself --------------------------------------------------------------------------------------------


def run(**options: Any) -> ReplayReport:
    return trio.run(replay, requests_of(TRACE), ReplayOptions(**{"block_bytes": BLOCK, **options}))


def test_an_unlimited_replay_counts_what_can_be_counted_by_hand() -> None:
    report = run()
    assert (report.requests, report.blocks, report.unique_blocks) == (8, 33, 15)
    assert report.hit_blocks == 0 + 2 + 0 + 4 + 2 + 0 + 5 + 5
    assert report.hit_rate == 18 / 33
    assert (report.stored, report.evicted, report.dropped, report.filtered, report.wrong) == (15, 0, 0, 0, 0)
    assert report.bytes == (15 + 18) * BLOCK
    assert report.tiers["memory"].held_blocks == 0
    assert report.request.p50 <= report.request.p99


def test_a_block_behind_a_gap_is_no_hit_and_is_not_stored_again() -> None:
    trace = requests_of([[0, 1, 2], [3], [0, 1, 2]])  # room for three: 3 evicts the deepest of the oldest, 2
    report = trio.run(replay, trace, ReplayOptions([TierSpec("memory", None, 3 * BLOCK)], BLOCK))
    assert (report.hit_blocks, report.stored, report.evicted, report.filtered) == (2, 5, 2, 0)
    trace = requests_of([[1, 2], [0, 1, 2]])
    report = trio.run(replay, trace, ReplayOptions(block_bytes=BLOCK))
    assert (report.hit_blocks, report.stored, report.filtered) == (0, 3, 2)
    report = trio.run(replay, trace, ReplayOptions(block_bytes=BLOCK, policy="pass-all"))
    assert (report.hit_blocks, report.filtered, report.wrong) == (0, 0, 0)


@pytest.mark.parametrize("policy", ["presence", "pass-all"])
def test_a_page_store_of_its_own_gives_the_same_and_leaves_nothing(policy: str) -> None:
    report = run(tiers=[TierSpec("maru", None, math.inf)], policy=policy)
    alike = run(policy=policy)
    figures = attrs.fields(ReplayReport)
    for same in (figures.hit_blocks, figures.stored, figures.filtered, figures.dropped, figures.wrong, figures.bytes):
        assert getattr(report, same.name) == getattr(alike, same.name), same.name
    [tier] = report.tiers.values()
    assert (tier.held_blocks, tier.reserved_blocks, tier.blocks) == (0, 0, 15)
    assert not {name for name in os.listdir("/dev/shm") if name.startswith(f"offload-replay-{os.getpid()}-")}


def test_a_directory_of_a_replay_goes_although_a_signal_comes_right_behind_its_making(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = os.mkdir

    def interrupted(path: Any, mode: int = 0o777, **rest: Any) -> None:
        make(path, mode, **rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tiers=[TierSpec("maru", None, math.inf)])
    assert not {name for name in os.listdir("/dev/shm") if name.startswith(f"offload-replay-{os.getpid()}-")}


def test_behind_host_memory_the_page_store_catches_what_that_evicts() -> None:
    report = run(tiers=[TierSpec("memory", None, 6 * BLOCK), TierSpec("maru", None, math.inf)])
    assert report.wrong == 0
    assert report.hit_blocks == run().hit_blocks
    assert report.tiers["maru"].loaded > 0


def test_a_request_larger_than_the_tier_is_dropped_and_counted() -> None:
    report = run(tiers=[TierSpec("memory", None, 4 * BLOCK)])
    assert report.dropped > 0
    assert report.wrong == 0


def test_two_tiers_hit_as_one_large_one(tmp_path: Path) -> None:
    tiers = [TierSpec("memory", None, 6 * BLOCK), TierSpec("file", str(tmp_path / "blocks"), 100 * BLOCK)]
    report = run(tiers=tiers)
    assert report.hit_blocks == 18
    assert list(report.tiers) == ["memory", f"file:{tmp_path / 'blocks'}"]
    assert report.tiers[f"file:{tmp_path / 'blocks'}"].loaded > 0
    again = run(tiers=tiers)  # the directory is still full
    assert again.hit_blocks == again.blocks == 33


async def test_a_loaded_block_that_is_not_what_was_stored_is_counted() -> None:
    tier = MemoryTier(20 * BLOCK, BLOCK, checksums=False)
    names = TraceKeys()
    keys = names.of(requests_of([[1, 2, 3]])[0])
    async with open_replayer([tier], BLOCK, 4) as player:
        await player.play(keys)
        pages = tier.views(tier.pool.slots([keys[1]]))
        assert pages is not None
        pages[0][BLOCK - 1] ^= 1
        assert (await player.play(keys)).wrong == 1


async def test_with_checksums_a_damaged_block_is_a_miss_and_stored_again() -> None:
    tier = MemoryTier(20 * BLOCK, BLOCK)
    keys = TraceKeys().of(requests_of([[1, 2, 3]])[0])
    async with open_replayer([tier], BLOCK, 4) as player:
        await player.play(keys)
        pages = tier.views(tier.pool.slots([keys[1]]))
        assert pages is not None
        pages[0][0] ^= 1
        played = await player.play(keys)
        assert (played.hit, played.wrong, played.dropped) == (1, 0, 0)
        assert player.engine.statistics().load_failures == {"damaged": 1}
        assert (await player.play(keys)).hit == 3


async def test_the_pace_of_the_trace_is_kept(autojump_clock: object) -> None:
    requests = requests_of(TRACE)  # 70 ms long
    began = trio.current_time()
    await replay(requests, ReplayOptions(block_bytes=BLOCK, speed=1.0))
    assert trio.current_time() - began >= 0.07
    began = trio.current_time()
    await replay(requests, ReplayOptions(block_bytes=BLOCK, speed=10.0))
    assert 0.007 <= trio.current_time() - began < 0.07


async def test_the_baseline_finds_the_same_blocks() -> None:
    keys = [TraceKeys().of(request) for request in requests_of(TRACE)]
    memory = bytearray(10 * BLOCK)
    from backends.base.pages import pages_of

    pages = pages_of([memoryview(memory)[at * BLOCK : (at + 1) * BLOCK] for at in range(10)])
    buffer = Buffer(pages.addresses, BLOCK)
    for capacity in (6, 8, 15):
        baseline, hits = Baseline(capacity, BLOCK), 0
        for each in keys:
            hit = await baseline.load(each, buffer.addresses)
            assert buffer.count_wrong(each[:hit]) == 0
            hits += hit
            buffer.write(each[hit:])
            await baseline.store(each[hit:], buffer.addresses[: len(each) - hit])
        assert hits == simulate(keys, [capacity])


def test_percentiles_are_nearest_ranks() -> None:
    assert Percentiles.of([]) == Percentiles(0.0, 0.0)
    assert Percentiles.of([3.0]) == Percentiles(3.0, 3.0)
    assert Percentiles.of([float(n) for n in range(1, 201)]) == Percentiles(100.0, 198.0)


@pytest.mark.parametrize(
    "policy", ["nonsense", "frequency", "frequency:", "frequency:x", "frequency:999", "presence:1"]
)
def test_an_unknown_policy_is_an_error(policy: str) -> None:
    with pytest.raises(ReplayError, match="policy"):
        ReplayOptions(policy=policy)


# --- the command --------------------------------------------------------------------------------------------------


def invoke(*args: object) -> Any:
    return CliRunner().invoke(command, [str(arg) for arg in args])


def test_the_command_prints_json(trace_file: Path) -> None:
    done = invoke(trace_file, "--json", "--block-bytes", "1KiB", "--what-if", "0.5x,2x")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert {"requests": 8, "blocks": 33, "hit_blocks": 18, "stored": 15, "dropped": 0}.items() <= report.items()
    assert report["what_if"]["2x"] == report["hit_rate"] > report["what_if"]["0.5x"]
    assert set(report["load"]) == {"p50", "p99"}


def test_the_command_prints_a_table(trace_file: Path, tmp_path: Path) -> None:
    tiers = "--tier", "memory", "--capacity", "4KiB", "--tier", f"file:{tmp_path / 'd'}", "--capacity", "unlimited"
    done = invoke(trace_file, *tiers, "--block-bytes", 512, "--limit", 3)
    assert done.exit_code == 0, done.output
    for word in ("hit_rate", "stored", "p50 / p99", "evicted", "wall time", "file:"):
        assert word in done.output


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--capacity", "nonsense"], "a size such as"),
        (["--capacity", "0"], "a size such as"),
        (["--block-bytes", "-4096"], "a size such as"),
        (["--block-bytes", "unlimited"], "a size such as"),
        (["--capacity", "100"], "must hold a block of"),
        (["--capacity", "1MiB", "--capacity", "1MiB"], "1 tiers, but 2 capacities"),
        (["--tier", "tape"], "no kind of tier is named 'tape': there are file,"),
        (["--tier", "no_such_module:Tier"], "tier no_such_module:Tier: module 'no_such_module' cannot be imported"),
        (
            ["--tier", f"{PEERS}:Tape"],
            f"module '{PEERS}' has no 'Tape', which was looked for as the tier",
        ),
        (["--tier", f"{PEERS}:Bitmap"], "cannot be called with (block_bytes=...)"),
        (["--tier", f"{PEERS}:StoreResult", "--capacity", "1MiB"], "there is no such parameter"),
        (["--tier", f"{__name__}:Raises"], "Raises: KeyError('as told')"),
        (["--tier", f"{__name__}:nothing"], "is not a plugin: a tier would derive from backends.abc.Tier"),
        (["--tier", '{ type = "plugin" }'], "lacks module_path and class_name"),
        (["--tier", '{ type = "memory", colour = 1 }'], "tier memory: "),
        (["--tier", '{ type = "memory", capacity_bytes = "1MiB" }', "--capacity", "1MiB"], "is set twice"),
        (["--tier", "{ type = "], "neither JSON nor an inline table of TOML"),
        (["--tier", '{"type": 3}'], "has no type"),
        (["--tier", "{}"], "has no type"),
        (["--tier", "file:"], "must be memory, maru or file:DIR, a name, module:attribute, or a table"),
        (["--tier", ""], "must be memory, maru or file:DIR, a name, module:attribute, or a table"),
        (["--tier", f"{__name__}:small", "--what-if", "2x"], "--what-if: the eviction of"),
        (
            ["--tier", '{ type = "memory" }', "--record", "x.scenario.toml"],
            "cannot describe a tier of memory, as specified,",
        ),
        (["--policy", "never"], "pass-all, presence, or frequency:N"),
        (["--speed", "slowly"], "realtime"),
        (["--speed", "0x"], "realtime"),
        (["--what-if", "2x,much"], "factors"),
        (["--what-if", "0.0001x", "--capacity", "1MiB"], "less than one block"),
        (["--limit", "0"], "limit"),
        (["--capacity", "900TiB"], "of memory"),
    ],
)
def test_what_cannot_be_done_is_said(trace_file: Path, args: list[str], complaint: str) -> None:
    done = invoke(trace_file, *args)
    assert done.exit_code in (1, 2)
    assert complaint in " ".join(done.output.split())
    assert "Traceback" not in done.output


def small(*, block_bytes: int, capacity_bytes: int = 6 << 12) -> MemoryTier:
    """A tier of somebody's own."""
    return MemoryTier(capacity_bytes, block_bytes)


def nothing(*, block_bytes: int) -> object:
    return object()


class Raises:
    def __init__(self, *, block_bytes: int) -> None:
        raise KeyError("as told")


SMALL = f"{__name__}:small"


@pytest.mark.parametrize(
    ("args", "capacity"),
    [
        (["--tier", SMALL], "24KiB"),
        (["--tier", SMALL, "--capacity", "unlimited"], "24KiB"),
        (["--tier", SMALL, "--capacity", "32KiB"], "32KiB"),
        (["--tier", f'{{ type = "{SMALL}", capacity_bytes = 32_768 }}'], "32KiB"),
        (["--tier", f'{{"type": "{SMALL}", "capacity_bytes": 32768}}'], "32KiB"),
        (["--tier", '{ type = "memory", capacity_bytes = "32KiB" }'], "32KiB"),
        (["--tier", "test.small"], "24KiB"),
    ],
    ids=["place", "unlimited", "sized", "TOML", "JSON", "built in", "registered"],
)
def test_any_tier_that_can_be_specified_is_replayed(
    args: list[str], capacity: str, trace_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.plugins._registry._registered", {"test.small": small})
    plain = json.loads(invoke(trace_file, "--json", "--capacity", capacity).stdout)
    done = invoke(trace_file, "--json", *args)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    for what in ("requests", "blocks", "hit_blocks", "stored", "evicted", "dropped", "wrong"):
        assert report[what] == plain[what], what
    assert report["evicted"]


@pytest.mark.parametrize("name", ["ThreadConnector", "DeletingConnector"])
def test_a_plugin_is_replayed_in_its_host_behind_memory_and_is_not_emptied(
    name: str, trace_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    kind = getattr(plugin_peers, name)
    init = kind.__init__

    def remembered(self: Any, **params: Any) -> None:
        init(self, **params)
        made.append(self)

    monkeypatch.setattr(kind, "__init__", remembered)
    done = invoke(
        trace_file, "--json", "--laps", 2, "--tier", "memory", "--capacity", "24KiB", "--tier", f"{PEERS}:{name}",
        "--capacity", "unlimited",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["dropped"], report["wrong"], report["left_over"]) == (0, 0, {})
    assert report["tiers"][f"{PEERS}:{name}"]["loaded"] > 0
    [connector] = made
    assert connector.closed and connector.blocks


async def test_a_page_store_that_is_running_is_replayed_through_and_not_emptied() -> None:
    async with open_test_server(high_watermark=1.0) as server:
        options = ReplayOptions(specs_of([f"maru:{server.endpoints[0]}"], [64 * BLOCK]), BLOCK, laps=2)
        report = await replay(requests_of(TRACE), options)
        assert (report.wrong, report.dropped, report.left_over) == (0, 0, {})
        assert report.stored == server.statistics().service.directory.entries > 0


def test_a_tier_that_cannot_be_entered_is_closed(trace_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[MemoryTier] = []
    monkeypatch.setattr(MemoryTier, "close", lambda self: closed.append(self))
    assert invoke(trace_file, "--tier", SMALL).exit_code == 0
    assert closed


def test_a_malformed_trace_ends_the_command(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"timestamp": 0}\n')
    done = invoke(path)
    assert done.exit_code == 2
    assert "line 1: input_length: missing" in " ".join(done.output.split())


def test_an_empty_trace_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    assert "has no requests" in invoke(path).output


def test_a_wrong_block_fails_the_command(trace_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Buffer, "count_wrong", lambda self, keys: 1)
    done = invoke(trace_file)
    assert done.exit_code == 1
    assert "differ from the stored ones" in done.output


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4096", 4096), ("64KiB", 65536), ("1.5GB", 1_500_000_000), ("2m", 2 << 20)]
)
def test_sizes_are_read_as_people_write_them(text: str, nbytes: int) -> None:
    from offload._replay.units import size_of

    assert size_of(text) == nbytes


# --- the real trace -----------------------------------------------------------------------------------------------

REAL = os.environ.get("OFFLOAD_TRACE", "")
real = pytest.mark.skipif(not REAL, reason="OFFLOAD_TRACE is not set")


@real
def test_what_if_on_the_real_trace() -> None:
    requests, names = read_trace(REAL), TraceKeys()
    keys = [names.of(request) for request in requests]
    blocks = sum(map(len, keys))
    assert (len(requests), blocks, len(names)) == (12_031, 288_500, 182_790)
    assert round(simulate(keys, [len(names)]) / blocks, 5) == 0.36641
    assert simulate(keys[:1_500], [16_384]) == 9_798
    assert simulate(keys[:1_500], [65_536]) == 11_068


@real
def test_the_real_trace_at_64_kib_and_1_gib() -> None:
    args = [REAL, "--limit", "1500", "--block-bytes", "64KiB", "--capacity", "1GiB", "--no-checksums", "--json"]
    done = subprocess.run([sys.executable, "-m", "offload", "replay", *args], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["hit_blocks"], report["dropped"], report["wrong"]) == (9_801, 0, 0)
    assert report["stored"] == report["evicted"] + 16_384


@real
@pytest.mark.long
@pytest.mark.parametrize(
    ("args", "hits"),
    [
        (["--limit", "1500", "--block-bytes", "64KiB", "--capacity", "4GiB"], 11_068),
        ([], 105_710),
    ],
)
def test_the_real_trace(args: list[str], hits: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "offload", "replay", REAL, *args, "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["hit_blocks"], report["dropped"], report["wrong"]) == (hits, 0, 0)


# --- several requests at once, and the driver of all comparisons ------------------------------------------------------


@pytest.mark.parametrize("in_flight", [2, 5])
async def test_requests_in_flight_find_nothing_wrong_and_lose_nothing(in_flight: int) -> None:
    requests = requests_of(TRACE)
    report = await replay(requests, ReplayOptions(block_bytes=BLOCK, in_flight=in_flight))
    alone = await replay(requests, ReplayOptions(block_bytes=BLOCK))
    assert (report.wrong, report.dropped, report.requests) == (0, 0, alone.requests)
    assert report.stored == alone.stored == report.unique_blocks  # with room for all, each block is stored once
    assert report.hit_blocks <= alone.hit_blocks  # one that is still being stored is not found


async def test_no_more_requests_are_in_flight_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seated: set[int] = set()
    most = 0
    play = Replayer.play

    async def watched(self, keys, *args, seat):
        nonlocal most
        assert seat not in seated
        seated.add(seat)
        most = max(most, len(seated))
        played = await play(self, keys, *args, seat=seat)
        seated.remove(seat)
        return played

    monkeypatch.setattr(Replayer, "play", watched)
    await replay(requests_of(TRACE), ReplayOptions(block_bytes=BLOCK, in_flight=3))
    assert most == 3


@pytest.mark.parametrize("capacity", [6, 8, 15])
async def test_a_memory_tier_in_lru_order_does_what_the_baseline_does_with_each_request(capacity: int) -> None:
    requests, ours, floor = requests_of(TRACE), Driven(), Driven()
    await drive(Baseline(capacity, BLOCK), requests, make_places(1, MOST, BLOCK), floor, keys_of)
    tier = MemoryTier(capacity * BLOCK, BLOCK, eviction=LRU())
    async with open_engine_cache(tier, BLOCK, MOST) as cache:
        await drive(cache, requests, cache.places, ours, keys_of)
    assert (ours.found, ours.stored, ours.wrong) == (floor.found, floor.stored, 0)


class Faulty:
    """A baseline with a fault: it loses the last block of what it stores, or gives another one."""

    def __init__(self, fault: str) -> None:
        self.cache, self.fault = Baseline(64, BLOCK), fault

    async def load(self, keys, to):
        return await self.cache.load(keys, to[::-1] if self.fault == "other" else to)

    async def store(self, keys, at):
        if self.fault == "lost":
            return await self.cache.store(keys[:-1], at[:-1]) + 1
        return await self.cache.store(keys, at)


async def test_a_cache_that_loses_or_confuses_blocks_is_found_out() -> None:
    right, lost, other = Driven(), Driven(), Driven()
    for driven, cache in ((right, Baseline(64, BLOCK)), (lost, Faulty("lost")), (other, Faulty("other"))):
        await drive(cache, requests_of(TRACE), make_places(1, MOST, BLOCK), driven, keys_of)
    assert (right.wrong, lost.wrong) == (0, 0)
    assert lost.hits < right.hits
    assert other.wrong > 0
