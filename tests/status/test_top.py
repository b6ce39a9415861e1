"""`offload top`: what is printed of a view, over TCP and over a Unix socket, and what is said where there is none."""

from __future__ import annotations

import functools
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs
import pytest
import trio
from rich.console import Console

from backends.testing import FakeTier
from offload import open_engine
from offload.instruments import StageTimes
from offload.status import ContainerView, EngineStatus, NoStatus, Rates, StatusView, fetch_view, serve_status, sheet

OFFLOAD = (sys.executable, "-m", "offload")


def printed(view: StatusView, width: int = 80, height: int = 0) -> str:
    text = io.StringIO()
    console = Console(file=text, width=width, markup=False, emoji=False, highlight=False)
    for part in sheet(view, height):
        console.print(part)
    return text.getvalue()


async def view_of_an_engine() -> StatusView:
    async with open_engine(FakeTier(8, 64), {"host": FakeTier(8, 64), "disk": FakeTier(8, 64)}) as engine:
        return EngineStatus(engine, StageTimes(), name="an engine").view()


async def test_a_view_fits_into_80_columns_and_says_what_is_found_and_what_is_stuck() -> None:
    stuck = ContainerView(7, "awaiting", 8, ["6b"], 12.5, 13.0, "its precondition, Forward(3)")
    rates = Rates(2.0, asked_blocks=100, hit_blocks=25)
    view = attrs.evolve(await view_of_an_engine(), asked_blocks=10, hit_blocks=5, oldest=[stuck], rates=rates)
    text = printed(view)
    assert max(map(len, text.splitlines())) <= 80
    for told in (
        "an engine",
        "25%",
        "50%",
        "awaiting",
        "12.5 s",
        "its precondition, Forward(3)",
        "host",
        "disk",
        "works",
    ):
        assert told in text


async def test_degradations_stand_at_the_top() -> None:
    view = attrs.evolve(await view_of_an_engine(), degraded=["/kv has 4 KiB left: free some", "\x1b[2Jgone"])
    lines = printed(view, 120, height=40).splitlines()
    assert lines[1:3] == ["degraded: /kv has 4 KiB left: free some", "degraded: \\x1b[2Jgone"]


async def test_a_tier_that_is_left_alone_says_why() -> None:
    view = await view_of_an_engine()
    broken = attrs.evolve(view.tiers[0], state="open", cause="timeout", damaged=3)
    assert "left alone: timeout, 3 damaged" in printed(attrs.evolve(view, tiers=[broken]), width=120)


async def test_a_small_screen_has_fewer_containers() -> None:
    many = [ContainerView(n, "batching", 8, ["6b"], 1.0, 2.0, "a batch") for n in range(40)]
    view = attrs.evolve(await view_of_an_engine(), oldest=many)
    assert printed(view, height=40).count("a batch") < printed(view).count("a batch") == 16


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_an_engine_is_watched_over(kind: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        bind = "127.0.0.1:0" if kind == "tcp" else f"unix:{directory}/status.sock"
        async with open_engine(FakeTier(8, 64), {"host": FakeTier(8, 64)}) as engine, trio.open_nursery() as nursery:
            status = EngineStatus(engine, StageTimes(), name="an engine")
            (address,) = await nursery.start(functools.partial(serve_status, status, bind))
            address = address if kind == "tcp" else bind
            view = await trio.to_thread.run_sync(fetch_view, address)
            assert (view.name, [tier.name for tier in view.tiers]) == ("an engine", ["host"])
            command = [*OFFLOAD, "top", address, "--once", "--interval", "0.1", "--json"]
            done = await trio.run_process(command, capture_stdout=True)
            assert json.loads(done.stdout)["name"] == "an engine"
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("address", ["host", "ftp://x:1", "http://x", "unix:relative", ""])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="is not an address"):
        fetch_view(address)


async def test_a_server_that_is_no_status_page_is_named(tmp_path: Path) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(functools.partial(trio.serve_tcp, answer, 0, host="127.0.0.1"))
        port = listener.socket.getsockname()[1]
        with pytest.raises(NoStatus, match="a format that this version cannot read"):
            await trio.to_thread.run_sync(fetch_view, f"http://127.0.0.1:{port}")
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("address", "code", "told"), [("unix:/nowhere", 3, "no status page"), ("here", 2, "is not an address")]
)
def test_the_command_ends_as_all_do(address: str, code: int, told: str) -> None:
    done = subprocess.run([*OFFLOAD, "top", address], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert told in done.stderr
