"""The published page store, of a checkout on this machine: its client in this process, its server in another one.

Its client's packages have names of their own, so they are imported beside ours; its server is started in the checkout, where
``maru`` is theirs. Regions come from the resource manager of a server of ours, which speaks its protocol and needs no device.
The published store evicts nothing: the client deletes what is used least recently when there is no room.
"""

from __future__ import annotations

import ctypes
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import trio

from offload.replay import make_places

from .ours import server
from .setting import Opened, Setting, Unavailable

NEEDED = ("maru_handler/handler.py", "maru_common/config.py", "maru_server/__main__.py")
"""Files of a checkout without which it is none."""
_PATIENCE = 20.0


def why_no_checkout(path: str) -> str:
    """Why a directory is no checkout of the published page store; empty if it is one."""
    missing = [name for name in NEEDED if not (Path(path) / name).is_file()]
    if not missing:
        return ""
    return f"there is no {missing[0]} in {path!r}: name the root of a checkout of the published Maru (xcena-dev/maru)"


class PublishedStore:
    """A published handler, and the order in which its keys were used."""

    def __init__(self, handler: Any, setting: Setting) -> None:
        self._handler = handler
        self._kind = ctypes.c_char * setting.block_bytes
        self._size = setting.block_bytes
        self._blocks = setting.blocks
        self._order: OrderedDict[str, None] = OrderedDict()

    def _memory(self, address: int) -> memoryview:
        return memoryview(self._kind.from_address(address)).cast("B")

    async def load(self, keys: Sequence[bytes], to: Sequence[int]) -> int:
        """batch_retrieve of the prefix, and a copy of each."""
        names = [bytes(key).hex() for key in keys]
        found = next((at for at, name in enumerate(names) if name not in self._order), len(names))
        if not found:
            return 0
        for at, info in enumerate(self._handler.batch_retrieve(names[:found])):
            if info is None:
                return at
            self._memory(to[at])[:] = info.view
        for name in reversed(names[:found]):
            self._order.move_to_end(name)
        return found

    async def store(self, keys: Sequence[bytes], at: Sequence[int]) -> int:
        """delete of what is used least recently, alloc of a page for what is new and a copy of each, batch_store."""
        addresses = dict(zip([bytes(key).hex() for key in keys], at, strict=True))
        new = [name for name in addresses if name not in self._order]
        for _ in range(len(self._order) + len(new) - self._blocks):
            self._handler.delete(self._order.popitem(last=False)[0])
        pages = [self._handler.alloc(self._size) for _ in new]
        for name, page in zip(new, pages, strict=True):
            page.buf[:] = self._memory(addresses[name])
        stored = [
            name for name, done in zip(new, self._handler.batch_store(new, pages) if new else [], strict=True) if done
        ]
        for name in reversed(stored):
            self._order[name] = None
        return len(stored)


@contextmanager
def _published_server(checkout: str, rm_address: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--host", "127.0.0.1", "--port", str(port), "--rm-address", rm_address, "--log-level", "WARNING"]
    with subprocess.Popen([sys.executable, "-m", "maru_server", *options], cwd=checkout) as process:
        try:
            yield f"tcp://127.0.0.1:{port}"
        finally:
            process.terminate()


async def _connect(checkout: str, url: str, setting: Setting) -> Any:
    """A handler of the checkout, connected: its server may need a moment to come up."""
    sys.path.append(checkout)
    try:
        from maru_common import MaruConfig  # type: ignore[import-not-found, unused-ignore]
        from maru_handler import MaruHandler  # type: ignore[import-not-found, unused-ignore]
    finally:
        sys.path.remove(checkout)
    config = MaruConfig(
        server_url=url, pool_size=setting.capacity_bytes, chunk_size_bytes=setting.block_bytes, auto_expand=False
    )
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        handler = MaruHandler(config)
        if handler.connect():
            return handler
        await trio.sleep(0.1)
    raise Unavailable(f"the server of {checkout} did not answer within {_PATIENCE:g} s; what it said is above")


@asynccontextmanager
async def open_published(setting: Setting) -> AsyncIterator[Opened]:
    """A server of the checkout with this capacity, and one client."""
    if not setting.checkout:
        raise Unavailable("--maru-checkout PATH: a checkout of the published Maru (xcena-dev/maru)")
    if why := why_no_checkout(setting.checkout):
        raise Unavailable(why)
    with (
        server(setting, "--host", "127.0.0.1", "--port", "0") as ready,
        _published_server(setting.checkout, ready["rm_address"]) as url,
    ):
        handler = await _connect(setting.checkout, url, setting)
        try:
            yield PublishedStore(handler, setting), make_places(1, setting.most_blocks, setting.block_bytes)
        finally:
            handler.close()
