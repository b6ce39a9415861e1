"""KV events over TCP without keys: readers meet relays, and never the sockets at which they could end the server."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from maru import ConfigError, ServerConfig
from maru.kv_events import open_mirror
from tests.maru.test_relay import claim, dial, hear, routing_id
from tests.support.maru_actors import client
from tests.support.maru_processes import PATIENCE, Server, free_port, temporary_pool

REQUEST = b"\x01\0" + b"\x00\x08" + bytes(8)
"""What a reader missed from the first event on, behind a handshake."""


@pytest.fixture
def pool() -> Iterator[Path]:
    with temporary_pool() as path:
        yield path


def events(port: int) -> tuple[str, ...]:
    return ("--kv-events", f"127.0.0.1:{port}", "--kv-events-insecure")


async def follow(server: Server, keys: list[str]) -> None:
    """A mirror comes to hold what a client has stored: by a snapshot, and by events."""
    addresses = server.ready["kv_events"].split(", ")
    with client("blocking", server.ipc) as owner:
        assert await trio.to_thread.run_sync(owner.put, keys[:1]) == ["NEW"]
        async with open_mirror(*addresses) as mirror:
            with trio.fail_after(PATIENCE):
                await mirror.wait(lambda mirror: mirror.prefix([bytes.fromhex(keys[0])]) == 1)
                assert await trio.to_thread.run_sync(owner.put, keys[1:]) == ["NEW"] * len(keys[1:])
                await mirror.wait(lambda mirror: mirror.prefix(list(map(bytes.fromhex, keys))) == len(keys))


async def test_a_mirror_follows_through_the_relays(pool: Path) -> None:
    with Server(pool, *events(free_port())) as server:
        assert all(address.startswith("tcp://127.0.0.1:") for address in server.ready["kv_events"].split(", "))
        await follow(server, ["00", "01", "02"])


async def test_a_crowd_at_the_ports_of_events_takes_no_descriptor_that_the_server_needs(pool: Path) -> None:
    """ZeroMQ ends a process that cannot accept a connection for want of one."""
    limit = "tests.support.maru_setups:limit:400"
    with Server(pool, *events(free_port()), setup=limit) as server, contextlib.ExitStack() as stack:
        for address, kind in zip(server.ready["kv_events"].split(", "), (b"SUB", b"DEALER"), strict=True):
            for _ in range(450):
                with contextlib.suppress(ConnectionError):
                    stack.enter_context(dial(address)).sendall(claim(b"", kind))
        assert server.process.alive and server.process.descriptors() < 400
        with client("blocking", server.ipc) as owner:
            assert await trio.to_thread.run_sync(owner.put, ["00"]) == ["NEW"]
        stack.close()
        await follow(server, ["01", "02"])


SERVER = """
import sys, trio, maru
from maru.kv_events import _publisher

unpack, last = _publisher.EventPublisher._last_requests, set()

def told(self, messages):
    for reader, *_ in messages:
        if reader not in last:
            last.add(reader)
            print(reader.hex(), flush=True)
    return unpack(self, messages)

_publisher.EventPublisher._last_requests = told

async def main():
    config = maru.ServerConfig(
        host="", rm_address="", pool_path=sys.argv[1], capacity_bytes="16 MiB", kv_events=sys.argv[2], kv_events_insecure=True
    )
    async with maru.open_server(config) as server:
        print(server.kv_events[1], flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)

trio.run(main)
"""
"""A server that says which routing id ZeroMQ gave to each reader: a guess may take longer, and finds the same."""


def test_no_reader_of_events_takes_the_routing_id_that_is_given_next(pool: Path) -> None:
    """Nineteen connections to the port of answers were enough to end the server: assertion failed, socket_base.cpp."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(pool), f"127.0.0.1:{free_port()}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    over = threading.Timer(PATIENCE, server.kill)
    over.start()
    with server, contextlib.ExitStack() as stack:
        try:
            assert server.stdout is not None and server.stdin is not None
            address = server.stdout.readline().strip()

            def asks(identity: bytes) -> bool:
                peer = stack.enter_context(dial(address))
                peer.sendall(claim(identity))
                if not hear(peer, b"READY"):
                    return False
                peer.sendall(REQUEST)
                return hear(peer, b"\xff" * 8)  # the end of an answer

            assert asks(b"")
            first = int(server.stdout.readline()[2:], 16)
            for step in range(1, 18):
                assert asks(routing_id(first + step))
            assert asks(b"")
            assert server.poll() is None
            server.stdin.close()
            assert server.wait(PATIENCE) == 0
        finally:
            over.cancel()
            server.kill()


def test_keys_without_a_list_of_readers_are_refused() -> None:
    """Whoever knew the server's public key could end it."""
    with pytest.raises(ConfigError, match="curve_clients_file"):
        ServerConfig(kv_events="127.0.0.1:5557", curve_key_file="/k", host="")
    ServerConfig(kv_events="127.0.0.1:5557", curve_key_file="/k", curve_clients_file="/c", host="")
