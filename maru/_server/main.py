"""Body of ``maru-server``: logging, signals, the ready line, and the end."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time

import trio

from .._config import ServerConfig
from ..base.commands import age, raise_descriptor_limit
from ..base.console import identifier
from ..base.printable import JsonFormatter, LineFormatter, as_json
from .garbage import short_collections
from .server import MaruServer, open_server

_log = logging.getLogger("maru.server")


def configure_logging(config: ServerConfig) -> None:
    """Write the package's log to the standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.json_logs else LineFormatter())
    root = logging.getLogger("maru")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(config.log_level.upper())


async def serve(config: ServerConfig) -> None:
    """Serve until SIGTERM, SIGINT, or an allowed SHUTDOWN message.

    Prints one line once all sockets answer.
    """
    configure_logging(config)
    raise_descriptor_limit()
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with open_server(config) as server:
            print(ready_line(server), flush=True)
            with short_collections(time.monotonic):
                gc.enable()  # until here garbage collection was off
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_until_asked, server, nursery.cancel_scope)
                    async for number in signals:
                        _log.info("%s: leaving", signal.Signals(number).name)
                        nursery.cancel_scope.cancel()
                        break


async def _until_asked(server: MaruServer, scope: trio.CancelScope) -> None:
    await server.wait_stopping()
    _log.info("asked to end: leaving")
    scope.cancel()


def ready_line(server: MaruServer) -> str:
    """Return the line about the server's addresses and recovered keys."""
    directory = server.statistics().service.directory
    facts = {
        "endpoints": list(server.endpoints),
        "rm_address": server.rm_address,
        "channel": server.channel_path,
        "descriptors": server.descriptors_path,
        "kv_events": ", ".join(server.kv_events or ()),
        "pid": os.getpid(),
        "epoch": identifier(server.epoch),
        "keys": directory.entries,
        "regions": directory.regions,
        "start": round(age(), 3),
    }
    if server.config.json_logs:
        return as_json({"event": "ready", **facts})
    where = " ".join(server.endpoints)
    return (
        f"maru-server is ready at {where} (channel {'on' if server.channel_path else 'off'}, "
        f"ZeroMQ on a Unix socket {'on' if server.config.zmq_on_unix else 'off'}, resource manager "
        f"{server.rm_address or 'off'}, {directory.entries} keys in {directory.regions} regions, after {facts['start']} s, "
        f"pid {facts['pid']})"
    )
