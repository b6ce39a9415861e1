"""The command `maru`: quick to start, right about a real server and a published one, and clear where nobody answers."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from maru import MaruConfig
from maru._cli import doctor, ping, top
from maru._cli._connection import ServerOptions
from maru._cli._rates import Sample, compute_rates
from maru._server.reports import INTERVAL
from maru._wire import OWN_CODES, Code, InstanceUsage, OperationStats
from maru.blocking import MaruHandler
from maru.cli import main
from maru.transport import new_key_pair, save_key_pair
from tests.support.maru_processes import PATIENCE, Server, payload, temporary_pool
from tests.support.published import PublishedClient, PublishedServer, published
from tests.support.published_wire import Ask

LOOKING = ("describe", "ping", "query", "usage", "top", "doctor")
PAGE = 64 << 10
NOBODY = "tcp://127.0.0.1:1"
LONG_NAME = "an instance whose name is as long as the names of pods in clusters tend to be, and then some"


def maru(*arguments: str, exit_code: int = 0, columns: int | None = None, **environment: str) -> str:
    """What the command prints on its standard output."""
    # Somebody outside may have set it: pytest-xdist does for its workers.
    environ: dict[str, str | None] = {"COLUMNS": str(columns) if columns else None, **environment}
    done = CliRunner(env=environ).invoke(main, list(arguments), prog_name="maru")
    assert done.exit_code == exit_code, (done.output, done.exception)
    assert "Traceback" not in done.output
    return done.stdout


def complaint(*arguments: str, exit_code: int = 3, **environment: str) -> str:
    """What the command says when it cannot do what it should."""
    done = CliRunner(env=environment).invoke(main, list(arguments), prog_name="maru")
    assert done.exit_code == exit_code, (done.output, done.exception)
    assert "Traceback" not in done.output
    return " ".join(done.stderr.split())


def told(*arguments: str, exit_code: int = 0, **environment: str) -> dict[str, Any]:
    answer = json.loads(maru(*arguments, "--json", exit_code=exit_code, **environment))
    assert isinstance(answer, dict)
    return answer


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with temporary_pool() as pool, Server(pool) as running:
        yield running


@pytest.fixture(scope="module")
def engine(server: Server) -> Iterator[MaruHandler]:
    """An instance of ours, with two keys; the first one is pinned."""
    with MaruHandler(
        server_url=server.ipc,
        instance_id="engine-0",
        pool_size=4 << 20,
        chunk_size_bytes=PAGE,
        timeout_ms=30_000,
        index="off",  # a pin that the server counts at once
    ) as handler:
        assert all(handler.batch_put(["first", "second"], [payload("first", PAGE), payload("second", 1_000)]))
        assert handler.pin("first")
        yield handler


# --- the command itself -------------------------------------------------------------------------------------------


def test_help_lists_the_commands_without_importing_them() -> None:
    program = """
import sys
from click.testing import CliRunner
from maru.cli import main
done = CliRunner().invoke(main, ["--help"])
assert done.exit_code == 0
assert all(name in done.output for name in ("describe", "ping", "query", "usage", "top", "doctor", "bench"))
loaded = {"torch", "numpy", "rich", "zmq", "trio", "maru._wire", "maru._cli", "maru.bench", "asyncio"} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_both_commands_are_console_scripts() -> None:
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    for script in ("maru", "maru-server"):
        module, _, attribute = scripts[script].partition(":")
        assert isinstance(getattr(import_module(module), attribute), click.Command)


@pytest.mark.parametrize("name", [*LOOKING, "bench"])
def test_every_command_has_help(name: str) -> None:
    assert maru(name, "--help").startswith(f"Usage: maru {name}")


@pytest.mark.parametrize("name", [(name,) for name in LOOKING] + [("bench", "rpc"), ("bench", "data")])
def test_every_command_speaks_json(name: tuple[str, ...]) -> None:
    assert "--json" in maru(*name, "--help")


def test_unknown_command_is_an_error() -> None:
    assert "nonsense" in complaint("nonsense", exit_code=2)


# --- describe -----------------------------------------------------------------------------------------------------


def test_describe_says_what_server_it_is(server: Server, engine: MaruHandler) -> None:
    said = told("describe", "--server", server.ipc)
    assert {name: said[name] for name in ("address", "published", "epoch", "rm_address")} == {
        "address": server.ipc,
        "published": False,
        "epoch": server.ready["epoch"],
        "rm_address": server.ready["rm_address"],
    }
    assert set(said["codes"]) == {Code(code).name for code in OWN_CODES}
    sections = said["sections"]
    assert set(sections) == {"server", "pool", "huge pages", "directory", "journal", "limits", "index", "degraded"}
    assert sections["degraded"] == {}
    assert sections["huge pages"]["used"] and sections["huge pages"]["huge_bytes"] % (2 << 20) == 0
    assert sections["index"]["used"] and not sections["index"]["why not"]
    assert sections["server"]["endpoints"].split(", ") == server.ready["endpoints"]
    assert sections["server"]["pid"] == server.process.pid
    assert sections["server"]["version"][:1].isdigit()
    assert 0 < sections["server"]["up for"] < 3_600
    assert sections["pool"]["path"] == str(server.pool)
    assert sections["pool"]["total_bytes"] == 64 << 20
    assert sections["directory"]["entries"] == 2
    assert sections["journal"]["sync"] == "never"
    assert sections["limits"]["max_keys"] == 8192


def test_describe_is_readable(server: Server, engine: MaruHandler) -> None:
    page = maru("describe", "--server", server.ipc)
    assert page.startswith(f"{server.ipc} is a maru server\n")
    for words in (str(server.ready["epoch"]), "64.0 MiB", f"ipc://{server.pool}/maru.sock", "STORE FIND", "max keys"):
        assert words in page, words


def test_looking_opens_no_session_and_is_no_use_of_a_key(server: Server, engine: MaruHandler) -> None:
    before = server.facts()
    maru("describe", "--server", server.ipc)
    maru("ping", "-n", "1", "--server", server.ipc)
    maru("query", "first", "--server", server.ipc)
    maru("query", "missing", "--server", server.ipc, exit_code=1)
    maru("usage", "--server", server.ipc)
    maru("doctor", "--server", server.ipc)
    assert server.facts() == before  # sessions, connections, found, missed, and all else


# --- ping ---------------------------------------------------------------------------------------------------------


def test_ping_measures_round_trips() -> None:
    with temporary_pool() as pool, Server(pool) as server:  # of which nobody else asks anything meanwhile
        asked = server.requests()
        began = time.monotonic()
        said = told("ping", "-n", "5", "--interval", "0", "--server", server.ipc)
        assert server.requests() - asked == 1 + 1 + 5  # what asked for the number, the one that connects, and five
        took = time.monotonic() - began
        assert (said["address"], said["epoch"], said["sent"], said["lost"]) == (server.ipc, server.ready["epoch"], 5, 0)
        assert said["over"] == "channel"
        assert 0 < said["min"] <= said["p50"] <= said["p99"] <= said["max"] < took
        assert "3 round trips, 0 lost" in maru("ping", "-n", "3", "--interval", "0", "--server", server.ipc)


class Asking:
    """The server that a command asks, in this process: patiently, until a test says that nobody will answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any):
        open_connection = module.open_connection

        @contextlib.contextmanager
        def noted(options: Any) -> Iterator[Any]:
            with open_connection(options) as self.server:
                yield self.server

        monkeypatch.setattr(module, "open_connection", noted)

    def gives_up(self) -> None:
        self.server.timeout = 0.05


def test_ping_counts_what_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with PublishedServer(tmp_path) as theirs:
        asking = Asking(monkeypatch, ping)

        def mute(seconds: float) -> None:
            theirs.mute = True
            asking.gives_up()

        monkeypatch.setattr(ping.time, "sleep", mute)
        options = ("ping", "-n", "2", "--timeout", "30", "--server", theirs.address)
        assert told(*options, exit_code=1)["lost"] == 1
        theirs.mute = False
        assert f"{theirs.address} did not answer 1 of 2 within 30 s" in complaint(*options, exit_code=1)


# --- query --------------------------------------------------------------------------------------------------------


def test_query_says_where_a_key_lies_and_who_holds_it(server: Server, engine: MaruHandler) -> None:
    with engine.retrieve("second") as info:
        assert info is not None
        said = told("query", "second", "--server", server.ipc)
        assert (said["region_id"], said["offset"], said["length"]) == (info.region_id, info.offset, info.length)
        assert said["generation"] == info.generation
        assert said["pins"] == 1
    first = told("query", "first", "--server", server.ipc)
    assert (first["key"], first["found"], first["owner"], first["published"]) == ("first", True, "engine-0", False)
    assert first["pins"] == 1 and first["session"] > 0
    assert int(first["checksum"], 16) and len(first["checksum"]) == 18
    page = maru("query", "first", "--server", server.ipc)
    assert "engine-0" in page and "1 pin" in page and "64.0 KiB" in page


def test_query_of_a_missing_key_says_so_and_fails(server: Server) -> None:
    assert maru("query", "nowhere", "--server", server.ipc, exit_code=1) == "'nowhere' is not there\n"
    said = told("query", "nowhere", "--server", server.ipc, exit_code=1)
    assert said["found"] is False and said["region_id"] is None


def test_query_asks_under_the_names_of_its_namespace(server: Server) -> None:
    with MaruHandler(
        server_url=server.ipc, namespace="llama bf16", pool_size=2 << 20, chunk_size_bytes=PAGE
    ) as handler:
        assert all(handler.batch_put(["salted"], [b"x"]))
        maru("query", "salted", "--server", server.ipc, exit_code=1)
        said = told("query", "salted", "--server", server.ipc, MARU_CLIENT__NAMESPACE="llama bf16")
        assert (said["key"], said["length"]) == ("salted", 1)


def test_query_tells_an_orphan_and_a_published_owner(server: Server) -> None:
    with MaruHandler(server_url=server.ipc, instance_id="gone", pool_size=2 << 20, chunk_size_bytes=PAGE) as handler:
        assert all(handler.batch_put(["left"], [b"x"]))
    said = told("query", "left", "--server", server.ipc)
    assert (said["owner"], said["session"]) == ("gone", 0)
    assert "its session is over" in maru("query", "left", "--server", server.ipc)
    with PublishedClient(server.ipc) as client:
        region = client.ask(Ask.REQUEST_ALLOC, instance_id="theirs", size=1 << 21)["handle"]["region_id"]
        client.ask(Ask.REGISTER_KV, key="old", region_id=region, kv_offset=0, kv_length=10)
        said = told("query", "old", "--server", server.ipc)
        assert (said["owner"], said["published"], said["checksum"]) == ("theirs", True, None)
        assert "(a published client)" in maru("query", "old", "--server", server.ipc)
        client.ask(Ask.DELETE_KV, key="old")
        client.ask(Ask.RETURN_ALLOC, instance_id="theirs", region_id=region)


# --- usage --------------------------------------------------------------------------------------------------------


def test_usage_has_a_row_for_each_instance(server: Server, engine: MaruHandler) -> None:
    said = told("usage", "--server", server.ipc)
    assert said["pool_total_bytes"] == 64 << 20
    [mine] = [one for one in said["instances"] if one["instance_id"] == "engine-0"]
    assert mine == {"instance_id": "engine-0", "regions": 1, "allocated_bytes": 4 << 20, "used_bytes": PAGE + 1_000}
    assert said["pool_free_bytes"] <= (64 - 4) << 20
    [row] = [line.split() for line in maru("usage", "--server", server.ipc).splitlines() if line.startswith("engine-0")]
    assert row[1:4] == ["1", "4.0", "MiB"] and row[-1] == "2%"


def test_usage_of_an_empty_pool_is_no_empty_table(tmp_path: Path) -> None:
    with PublishedServer(tmp_path) as theirs:
        assert "no instance has a region" in maru("usage", "--server", theirs.address)


@pytest.mark.parametrize(
    "command",
    [
        ("describe",),
        ("ping", "-n", "2", "--interval", "0"),
        ("usage",),
        ("top", "--once", "--interval", "0.1"),
        ("doctor",),
    ],
)
def test_tables_fit_into_80_columns_and_into_a_pipe(
    server: Server, engine: MaruHandler, command: tuple[str, ...]
) -> None:
    with MaruHandler(server_url=server.ipc, instance_id=LONG_NAME, pool_size=2 << 20, chunk_size_bytes=PAGE) as handler:
        assert all(handler.batch_put([LONG_NAME], [b"x"]))
        narrow = maru(*command, "--server", server.ipc, columns=80)
        piped = maru(*command, "--server", server.ipc)
    assert max(map(len, narrow.splitlines())) <= 80
    for page in (narrow, piped):
        assert all(line == line.rstrip() for line in page.splitlines())
        assert "\x1b" not in page
    if command == ("usage",):
        assert LONG_NAME in piped
        assert LONG_NAME.replace(" ", "") in "".join(
            line[:34].replace(" ", "") for line in narrow.splitlines()
        )  # folded, not cut


# --- top ----------------------------------------------------------------------------------------------------------


def test_top_tells_what_happened_between_two_looks(
    server: Server, engine: MaruHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(seconds: float) -> None:
        engine.batch_put([f"{time.monotonic()}"], [b"x" * 100])
        with PublishedClient(server.ipc) as client:
            client.ask(Ask.LOOKUP_KV, key="no such key")
            entry = {"client_id": "c", "op_type": "store", "result": "none", "size": 1 << 20, "latency_us": 500.0}
            client.ask(Ask.REPORT_STATS, entries=[entry, entry])
        threading.Event().wait(INTERVAL)  # for which a table of reports stands

    monkeypatch.setattr(top.time, "sleep", work)
    said = told("top", "--once", "--server", server.ipc)
    happened = {name: round(rate * said["seconds"]) for name, rate in said["per_second"].items()}
    assert (happened["registered"], happened["missed"], happened["evicted"]) == (1, 1, 0)
    assert happened["requests"] >= 3
    assert happened["journaled_bytes"] > 0
    assert round(said["growth_per_second"]["used_bytes"] * said["seconds"]) == 100
    store = said["operations"]["store"]
    assert round(store["per_second"] * said["seconds"]) == 2
    assert round(store["bytes_per_second"] * said["seconds"]) == 2 << 20
    assert (store["average_latency"], store["hit_rate"]) == (pytest.approx(500e-6), None)
    assert said["now"]["pinned"] == 1 and said["restarted"] is False
    page = maru("top", "--once", "--server", server.ipc)
    assert "reported by clients" in page and "500 us" in page and "engine-0" in page


def sample(at: float, epoch: int = 1, found: int = 0, **stats: Any) -> Sample:
    held = {"entries": found}
    return Sample(at, epoch, at, {"found": found}, held, {"load": OperationStats(**stats)}, (), 10, 5)


def test_rates_are_differences_in_a_second() -> None:
    before = sample(10.0, found=100, count=10, hit_count=10, total_bytes=1_000, latency_sum_us=1e6)
    after = sample(12.0, found=90, count=14, hit_count=13, miss_count=1, total_bytes=5_000, latency_sum_us=1e6 + 400)
    rate = compute_rates(before, after)
    assert (rate.seconds, rate.restarted, rate.held) == (2.0, False, {"entries": -5.0})
    load = rate.operations["load"]
    assert (load.per_second, load.bytes_per_second, load.hit_rate) == (2.0, 2_000.0, 0.75)
    assert load.average_latency == pytest.approx(100e-6)
    idle = compute_rates(
        after, sample(13.0, found=90, count=14, hit_count=13, miss_count=1, latency_sum_us=1e6 + 400)
    ).operations["load"]
    assert (idle.hit_rate, idle.average_latency) == (None, None)


def test_nothing_is_said_of_what_happened_across_a_restart() -> None:
    rate = compute_rates(sample(1.0, epoch=1, found=100), sample(2.0, epoch=2, found=3))
    assert rate.restarted and not rate.counted and not rate.held and not rate.operations


def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    program = "import sys; from maru.cli import main; main(prog_name='maru')"
    return subprocess.Popen([sys.executable, "-c", program, *arguments], **options)


def test_top_prints_an_object_a_line_until_it_is_interrupted(server: Server) -> None:
    command = ("top", "--json", "--interval", "0.1", "--server", server.ipc)
    with start(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        try:
            assert running.stdout is not None and running.stderr is not None
            for _ in range(2):
                assert select.select([running.stdout], [], [], PATIENCE)[0]
                assert json.loads(running.stdout.readline())["epoch"] == server.ready["epoch"]
            running.send_signal(signal.SIGINT)
            assert running.wait(PATIENCE) == 130
            assert running.stderr.read().endswith(b"ended by SIGINT\n")
        finally:
            running.kill()


@pytest.mark.parametrize("end", [b"q", b"\x03"])
def test_top_draws_a_screen_and_ends_on_a_key(server: Server, engine: MaruHandler, end: bytes) -> None:
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
    command = ("top", "--interval", "0.1", "--server", server.ipc)
    # A session with this terminal as its own, so that its Ctrl-C is a signal.
    program = (
        "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from maru.cli import main; main(prog_name='maru')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environ,
        start_new_session=True,
    ) as running:
        os.close(theirs)
        screen = b""
        try:
            deadline = time.monotonic() + PATIENCE
            # The second frame has what it does in a second.
            while screen.count(b"q ends") < 2:
                assert select.select([ours], [], [], max(0.0, deadline - time.monotonic()))[0], screen
                screen += os.read(ours, 1 << 16)
            os.write(ours, end)
            while select.select([ours], [], [], PATIENCE)[0]:
                try:
                    more = os.read(ours, 1 << 16)
                except OSError:  # nobody is at the other end any more
                    break
                screen += more
            assert running.wait(PATIENCE) == (0 if end == b"q" else 130)
        finally:
            running.kill()
            os.close(ours)
    assert b"engine-0" in screen and b"registered" in screen
    assert b"\x1b[?1049h" in screen and b"\x1b[?1049l" in screen  # the screen it found is there again
    assert b"Traceback" not in screen


def test_top_ends_with_words_when_the_server_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    with temporary_pool() as pool, Server(pool) as running:
        asking = Asking(monkeypatch, top)

        def kill(seconds: float) -> None:
            running.kill()
            asking.gives_up()

        monkeypatch.setattr(top.time, "sleep", kill)
        said = complaint("top", "--json", "--timeout", "30", "--server", running.ipc)
        assert said.startswith(f"Error: {running.ipc} does not answer within 30 s: no server listens there")
        assert "Traceback" not in said


# --- a published server -------------------------------------------------------------------------------------------


def test_a_published_server_is_described_queried_and_measured(tmp_path: Path) -> None:
    with published(tmp_path) as (theirs, client, _):
        at = ("--server", theirs.address)
        for instance, key in (("a", "one"), ("b", "two")):
            region = client.ask(Ask.REQUEST_ALLOC, instance_id=instance, size=2 << 20)["handle"]["region_id"]
            client.ask(Ask.REGISTER_KV, key=key, region_id=region, kv_offset=4096, kv_length=10)
        said = told("describe", *at)
        assert (said["published"], said["epoch"], said["codes"]) == (True, None, [])
        assert said["rm_address"] == theirs.rm_address
        assert said["sections"]["directory"]["entries"] == 2
        assert said["sections"]["pool"]["total_bytes"] == 1 << 30
        assert "is a published server" in maru("describe", *at)
        assert told("ping", "-n", "2", "--interval", "0", *at)["epoch"] is None
        found = told("query", "two", *at)
        assert (found["owner"], found["region_id"], found["offset"], found["length"]) == ("b", region, 4096, 10)
        assert (found["generation"], found["pins"], found["session"]) == (None, None, None)
        assert "not told by a published server" in maru("query", "two", *at)
        assert maru("query", "three", *at, exit_code=1) == "'three' is not there\n"
        assert [one["instance_id"] for one in told("usage", *at)["instances"]] == ["a", "b"]
        seen = told("top", "--once", "--interval", "0.1", *at)
        assert (seen["per_second"], seen["now"]["entries"]) == ({}, 2)
        assert "keys" in maru("top", "--once", "--interval", "0.1", *at)
        # A region that was handed back with a key in it is in nobody's list.
        client.ask(Ask.RETURN_ALLOC, instance_id="b", region_id=region)
        assert told("query", "two", *at)["owner"] is None
        assert "no listed instance" in maru("query", "two", *at)
        assert not OWN_CODES & set(theirs.asked)


# --- nobody there, or somebody else -------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("describe",), ("ping",), ("query", "key"), ("usage",), ("top",)])
@pytest.mark.parametrize(
    ("address", "why"), [(NOBODY, "no server listens there"), ("ipc:///nowhere/maru.sock", "there is no such socket")]
)
def test_where_nobody_answers_it_says_so_and_what_to_check(command: tuple[str, ...], address: str, why: str) -> None:
    said = complaint(*command, "--server", address, "--timeout", "0.1")
    assert f"{address} does not answer within 0.1 s: {why}" in said
    assert "maru-server" in said and "--server" in said and "MARU_CLIENT__SERVER_URL" in said


def test_a_stopped_server_is_told_from_one_that_is_not_there() -> None:
    with temporary_pool() as pool, Server(pool) as running, running.stopped():
        for address in (running.ipc, running.ipc):
            said = complaint("ping", "--server", address, "--timeout", "0.1")
            assert "something listens there" in said and "stopped" in said and "CURVE" in said
        asked, start, *_ = told(
            "doctor", "--server", running.ipc, "--timeout", "0.1", "--pool-path", str(pool), exit_code=1
        )["findings"]
        assert (asked["name"], asked["verdict"]) == ("server", "warn")
        assert "stopped" in asked["way_out"]
        assert (start["name"], start["verdict"]) == ("start: pool", "fail")
        assert str(running.process.pid) in start["found"]


def test_a_refusal_is_told_in_the_words_of_the_server(server: Server) -> None:
    said = complaint("query", "k" * 3_000, "--server", server.ipc)
    assert said.startswith(f"Error: {server.ipc} refuses: DESCRIBE:")


def test_a_server_with_keys_is_reached_with_keys_only(tmp_path: Path) -> None:
    pairs = {}
    for name in ("server", "client"):
        pairs[name] = new_key_pair()
        save_key_pair(tmp_path / f"{name}.key", pairs[name])
    config = tmp_path / "maru.toml"
    config.write_text(
        f'[client]\ncurve_key_file = "{tmp_path}/client.key"\ncurve_server_key = "{pairs["server"].public.decode()}"\n'
    )
    with temporary_pool() as pool, Server(pool, "--curve-key-file", str(tmp_path / "server.key")) as running:
        assert told("ping", "-n", "1", "--config", str(config), "--server", running.ipc)["lost"] == 0
        assert "CURVE" in complaint("ping", "--timeout", "0.2", "--server", running.ipc)


def test_knobs_that_cannot_be_are_told_with_option_variable_or_line(tmp_path: Path) -> None:
    assert "--server = 'nonsense': must be tcp://host:port or ipc://path" in complaint(
        "ping", "--server", "nonsense", exit_code=2
    )
    assert "MARU_CLIENT__TIMEOUT_MS = 'soon'" in complaint("ping", exit_code=2, MARU_CLIENT__TIMEOUT_MS="soon")
    file = tmp_path / "maru.toml"
    file.write_text("[client]\n\nserver_ulr = 'tcp://localhost:1'\n")
    said = complaint("ping", "--config", str(file), exit_code=2)
    assert "did you mean server_url?" in said and "line 3" in said
    assert "nothing.toml" in complaint("ping", "--config", str(tmp_path / "nothing.toml"), exit_code=2)
    assert "--capacity-bytes = 'much'" in complaint("doctor", "--capacity-bytes", "much", exit_code=2)
    assert "curve_key_file" in complaint("ping", exit_code=2, MARU_CLIENT__CURVE_SERVER_KEY="x" * 40)


def test_the_variable_and_the_file_say_where_the_server_is(server: Server, tmp_path: Path) -> None:
    assert told("usage", MARU_CLIENT__SERVER_URL=server.ipc)["address"] == server.ipc
    file = tmp_path / "maru.toml"
    file.write_text(f"[client]\nserver_url = '{server.ipc}'\n[server]\nport = 1\n")
    assert told("usage", "--config", str(file))["address"] == server.ipc
    assert told("usage", "--config", str(file), "--server", server.ipc)["address"] == server.ipc


# --- doctor -------------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path) -> tuple[str, ...]:
    """A pool that is to be, and no server."""
    return ("--server", NOBODY, "--timeout", "0.1", "--pool-path", str(tmp_path / "pool"))


def test_doctor_works_without_a_server(alone: tuple[str, ...], tmp_path: Path) -> None:
    said = told("doctor", *alone, "--capacity-bytes", "2MiB")
    assert (said["kind"], said["path"], said["home"]) == ("files", f"{tmp_path}/pool", f"{tmp_path}/pool")
    assert said["verdict"] in ("ok", "warn")
    findings = {one["name"]: one for one in said["findings"]}
    assert findings["server"]["verdict"] == "ok" and findings["server"]["found"] == f"none at {NOBODY}"
    assert all(set(one) == {"name", "verdict", "found", "needed", "way_out"} for one in said["findings"])
    assert {"pool directory", "space for regions", "file descriptors"} <= set(findings)
    assert not (tmp_path / "pool").exists()  # it only looks


def test_doctor_fails_where_something_will_fail_and_says_the_way_out(alone: tuple[str, ...]) -> None:
    page = maru("doctor", *alone, "--capacity-bytes", "1024TiB", exit_code=1)
    assert "what to do" in page and "a smaller capacity" in page
    assert [
        one["verdict"] for one in told("doctor", *alone, "--capacity-bytes", "1024TiB", exit_code=1)["findings"]
    ].count("fail")


def test_doctor_finds_a_directory_that_others_may_enter(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    (tmp_path / "somebody's").touch()
    page = maru("doctor", "--server", NOBODY, "--timeout", "0.1", "--pool-path", str(tmp_path), exit_code=1)
    assert f"chmod 700 {tmp_path}" in " ".join(page.split())


def test_doctor_examines_the_pool_of_the_server_that_answers(server: Server) -> None:
    said = told("doctor", "--server", server.ipc)
    assert said["path"] == str(server.pool)
    findings = {one["name"]: one for one in said["findings"]}
    assert findings["server"]["verdict"] == "ok"
    assert findings["space for regions"]["needed"] == "64.0 MiB"
    assert findings["shared index"]["found"].startswith("used")
    assert {"socket maru.sock", "socket channel.sock", "socket descriptors.sock"} <= set(findings)
    assert "locked memory" not in findings
    assert "locked memory" in {one["name"] for one in told("doctor", "--pin", "--server", server.ipc)["findings"]}


def test_doctor_finds_a_socket_that_others_may_use() -> None:
    with temporary_pool() as pool, Server(pool) as running:
        os.chmod(pool / "descriptors.sock", 0o666)
        findings = {one["name"]: one for one in told("doctor", "--server", running.ipc, exit_code=1)["findings"]}
        assert findings["socket descriptors.sock"]["verdict"] == "fail"


def test_doctor_looks_at_memory_for_a_memfd_and_at_a_device_for_dax(alone: tuple[str, ...], tmp_path: Path) -> None:
    memfd = told("doctor", *alone, "--dax-path", "memfd", "--capacity-bytes", "2MiB")
    assert (memfd["kind"], memfd["home"]) == ("memfd", f"{tmp_path}/pool")
    findings = {one["name"]: one for one in memfd["findings"]}
    assert findings["file system"]["found"] == "tmpfs"  # whatever the home lies on
    device = tmp_path / "device"
    with device.open("wb") as file:
        file.truncate(8 << 20)
    dax = told("doctor", *alone, "--dax-path", str(device), "--capacity-bytes", "4MiB")
    assert (dax["kind"], dax["path"]) == ("device", str(device))
    assert "device" in {one["name"] for one in dax["findings"]}
    missing = told("doctor", *alone, "--dax-path", "/dev/dax99.9", exit_code=1)
    assert [one["verdict"] for one in missing["findings"] if one["name"] == "device"] == ["fail"]


def test_a_server_of_another_host_says_nothing_about_directories_here() -> None:
    assert (
        doctor._is_near("tcp://127.0.0.1:5555")
        and doctor._is_near("ipc:///run/x")
        and doctor._is_near("tcp://localhost:1")
    )
    assert not doctor._is_near("tcp://10.0.0.7:5555") and not doctor._is_near("tcp://node-7:5555")


def test_the_screen_says_how_many_instances_it_leaves_out() -> None:
    many = tuple(InstanceUsage(f"instance {number}", 1, 1 << 21, number) for number in range(40))
    look = Sample(1.0, 1, 1.0, {}, {"entries": 0}, {}, many, 1 << 30, 0)
    options = ServerOptions(MaruConfig(server_url=NOBODY), 1.0, False)
    sheet = Console(width=80, file=StringIO())
    with sheet.capture() as captured:
        for part in top._sheet(options, look, compute_rates(look, look), 2.0, 30):
            sheet.print(part)
    page = captured.get()
    assert "instance 39" in page and "instance 0 " not in page and "and 34 more" in page
