"""The chain vLLM -> LMCache's MP server -> our adapter -> page store: the server, and what vLLM is started with."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
LONGEST_START = 180.0


class MPServer:
    """A process of LMCache's server. It stores into the page store at ``url``, beside what it keeps itself.

    Args:
        url: of the page store.
        log: where it writes.
        chunk_tokens: tokens in a chunk.
        l1_gb: what it keeps itself.
        pool_gb: pages of the adapter.
    """

    def __init__(
        self, url: str, log: Path, *, chunk_tokens: int, l1_gb: float, pool_gb: float, python: str = sys.executable
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        adapter = {
            "type": "plugin",
            "module_path": "offload.engines.lmcache",
            "class_name": "MaruL2Adapter",
            "adapter_params": {"server_url": url, "pool_size_gb": pool_gb},
        }
        options = {
            "--host": "127.0.0.1",
            "--port": self.port,
            "--chunk-size": chunk_tokens,
            "--l1-size-gb": l1_gb,
            "--eviction-policy": "LRU",
            # Without a name of shared memory it copies by pickle, which is five times as slow on a CPU.
            "--shm-name": f"offload-chain-{os.getpid()}-{self.port}",
            "--supported-transfer-mode": "auto",
            "--l2-adapter": json.dumps(adapter),
        }
        said = [str(one) for pair in options.items() for one in pair]
        command = [python, "-m", "lmcache.v1.multiprocess.server", "--no-l1-use-lazy", "--disable-observability", *said]
        environ = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "PYTHONPATH": str(ROOT)}
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environ)
        deadline = time.monotonic() + LONGEST_START
        while not self._listens():
            assert self.process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.1)

    def _listens(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
            return True
        return False

    @property
    def transfer(self) -> dict[str, Any]:
        """What vLLM is started with."""
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.port},
        }

    def forget(self) -> None:
        """Empty its own memory."""
        import zmq
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        client = RequestClientFactory.create(f"tcp://127.0.0.1:{self.port}", context=zmq.Context.instance())
        try:
            client.clear().result(timeout=60)
        finally:
            client.close()

    def close(self) -> None:
        """End it as an operator does."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def let_vllm_look_at_every_module() -> None:
    """Leave nothing in the modules that LMCache imports which breaks vLLM on a CPU.

    vLLM looks through all modules for kernels, and takes what has a ``__dict__`` for an object with attributes. The library of
    llvmlite has every attribute that it is asked for.
    """
    from llvmlite.binding import ffi

    library: Any = type(ffi.lib)
    symbol = library.__getattr__

    def attribute(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return symbol(self, name)

    library.__getattr__ = attribute
