"""The published peers, as the specification describes them: two clients, a resource manager's client, and a server.

Written from the protocol alone, with plain pyzmq, msgspec's msgpack and struct, so that what works against these does not
work because both sides share a mistake. They are as naive as the published ones: no heartbeat, no session, no check of an
offset. Each starts and ends only what it started, and every wait in here has a bound.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.support.published_clients import PublishedAsyncClient as PublishedAsyncClient
from tests.support.published_clients import PublishedClient as PublishedClient
from tests.support.published_clients import PublishedRmClient as PublishedRmClient
from tests.support.published_server import PublishedServer as PublishedServer
from tests.support.published_wire import Ask as Ask
from tests.support.published_wire import Ipc as Ipc
from tests.support.published_wire import IpcError as IpcError


@contextlib.contextmanager
def published(directory: Path) -> Iterator[tuple[PublishedServer, PublishedClient, PublishedRmClient]]:
    """A server, a client that has shaken hands, and the client of its resource manager."""
    with (
        PublishedServer(directory) as server,
        PublishedClient(server.address) as client,
        PublishedRmClient(client.ask(Ask.HANDSHAKE)["rm_address"]) as rm,
    ):
        yield server, client, rm
