"""A checkout of the published page store, as far as the comparison uses one: its packages, and their interface.

What is behind that interface is ours: the published server and client of the tests, which speak its protocol.
"""

from __future__ import annotations

import argparse
import signal
import socket
import tempfile
from pathlib import Path
from typing import Any

import attrs

from tests.support.maru_actors import PublishedOwner
from tests.support.maru_processes import PATIENCE
from tests.support.published_server import PublishedServer
from tests.support.published_wire import Ask

_FILES = {
    "maru_common/__init__.py": "from tests.support.published_checkout import Config as MaruConfig",
    "maru_common/config.py": "",
    "maru_handler/__init__.py": "from .handler import MaruHandler",
    "maru_handler/handler.py": "from tests.support.published_checkout import Handler as MaruHandler",
    "maru_server/__init__.py": "",
    "maru_server/__main__.py": "import sys; sys.path.append({tests!r})\n"
    "from tests.support.published_checkout import serve; serve()",
}


def make_checkout(directory: Path) -> Path:
    """Write it there."""
    for name, text in _FILES.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(tests=str(Path(__file__).parents[2])))
    return directory


@attrs.frozen(kw_only=True)
class Config:
    server_url: str
    pool_size: int
    chunk_size_bytes: int
    auto_expand: bool = True
    instance_id: str = "published"


@attrs.frozen
class Page:
    buf: memoryview
    offset: int


@attrs.frozen
class Info:
    view: memoryview


class Handler:
    """The calls that the comparison makes, over a published client."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._at: dict[str, int] = {}

    def connect(self) -> bool:
        config = self._config
        host, _, port = config.server_url.removeprefix("tcp://").partition(":")
        try:
            socket.create_connection((host, int(port))).close()
        except ConnectionError:
            return False
        self._owner = PublishedOwner(
            config.server_url, config.instance_id, config.chunk_size_bytes, config.pool_size, timeout=PATIENCE
        )
        self._memory = memoryview(self._owner.map(self._owner.handle))
        return True

    def close(self) -> None:
        self._memory.release()
        self._owner.close()

    def _view(self, offset: int, size: int) -> memoryview:
        return self._memory[offset : offset + size]

    def alloc(self, size: int) -> Page:
        offset = self._owner.free.pop()
        return Page(self._view(offset, size), offset)

    def batch_store(self, keys: list[str], handles: list[Page]) -> list[bool]:
        region = self._owner.handle["region_id"]
        entries = [
            {"key": key, "region_id": region, "kv_offset": page.offset, "kv_length": len(page.buf)}
            for key, page in zip(keys, handles, strict=True)
        ]
        self._at |= {key: page.offset for key, page in zip(keys, handles, strict=True)}
        results: list[bool] = self._owner.ask(Ask.BATCH_REGISTER_KV, entries=entries)["results"]
        return results

    def batch_retrieve(self, keys: list[str]) -> list[Info | None]:
        entries = self._owner.ask(Ask.BATCH_LOOKUP_KV, keys=keys)["entries"]
        return [Info(self._view(one["kv_offset"], one["kv_length"])) if one["found"] else None for one in entries]

    def delete(self, key: str) -> bool:
        self._owner.free.append(self._at.pop(key))
        answer: Any = self._owner.ask(Ask.DELETE_KV, key=key)
        return bool(answer["success"])


def serve() -> None:
    parser = argparse.ArgumentParser()
    for option in ("--host", "--port", "--rm-address", "--log-level"):
        parser.add_argument(option, required=True)
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as directory,
        PublishedServer(Path(directory), f"tcp://{asked.host}:{asked.port}"),
    ):
        signal.sigwait({signal.SIGTERM})
