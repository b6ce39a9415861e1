"""LMCache's multi-process server with the adapter: what one server has stored, another one loads from L2."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from itertools import count

import pytest
import torch
import zmq
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey, RegisterEngineDrivenContextPayload
from lmcache.v1.multiprocess.transfer_context.base import EngineDrivenContextMetadata
from lmcache.v1.multiprocess.transfer_context.pickle import EngineDrivenContextPickle
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from tests.support.maru_processes import Server, eventually, free_port, temporary_pool

PATIENCE = 120.0
CHUNK = 64
CHUNKS = 6
LAYERS, HIDDEN = 4, 256
SHAPE = torch.Size([2, LAYERS, CHUNK, HIDDEN])
MODEL = "org/model"
TOKENS = list(range(1, CHUNKS * CHUNK + 1))

_requests = count(1)


class MPServer:
    """A process of LMCache's server, with one instance of an engine registered."""

    def __init__(self, adapter):
        self._port = free_port()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close
        options = [
            "--host",
            "127.0.0.1",
            "--port",
            str(self._port),
            "--chunk-size",
            str(CHUNK),
            "--l1-size-gb",
            "0.125",
        ]
        options += ["--no-l1-use-lazy", "--eviction-policy", "LRU", "--disable-observability", "--shm-name", ""]
        options += ["--supported-transfer-mode", "auto", "--l2-adapter", json.dumps(adapter)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lmcache.v1.multiprocess.server", *options],
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "LMCACHE_TRACK_USAGE": "false"},
        )
        try:
            eventually(self._listens, PATIENCE)
            self._context = zmq.Context()
            self.client = RequestClientFactory.create(f"tcp://127.0.0.1:{self._port}", context=self._context)
            self._register()
        except BaseException:
            self.close()
            raise

    def _listens(self):
        assert self._process.poll() is None, self.log()
        with socket.socket() as asking, contextlib.suppress(OSError):
            asking.connect(("127.0.0.1", self._port))
            return True
        return False

    def _register(self):
        payload = RegisterEngineDrivenContextPayload(
            instance_id=1,
            model_name=MODEL,
            world_size=1,
            block_size=CHUNK,
            num_layers=LAYERS,
            hidden_dim_size=HIDDEN,
            dtype_str="bfloat16",
            use_mla=False,
            num_physical_slots=CHUNK,
        )
        self.client.register_kv_cache_engine_driven_context(payload).result(timeout=PATIENCE)
        layout = MemoryLayoutDesc([SHAPE], [torch.bfloat16])
        metadata = EngineDrivenContextMetadata(layout_desc=layout, block_size=CHUNK, use_mla=False)
        self.transfer = EngineDrivenContextPickle(metadata, self.client, PATIENCE)

    def log(self):
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def close(self):
        with contextlib.suppress(AttributeError):
            self.client.close()
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def store(self, chunks):
        key = key_of(len(chunks))
        self.transfer.prepare_store(key, 1)
        assert self.transfer.commit_store(key, 1, chunks)

    def lookup(self, key):
        """How many chunks of the prompt are in L1 now, those that L2 had included."""
        self.client.lookup(key.no_worker_id_version(), 1).result(timeout=PATIENCE)
        found = []

        def answers():
            answer = self.client.query_prefetch_status(key.request_id).result(timeout=PATIENCE)
            found.append(answer)
            return answer is not None

        eventually(answers, PATIENCE)
        return found[-1]

    def retrieve(self, key):
        chunks = self.transfer.prepare_retrieve(key, 1)
        self.transfer.commit_retrieve(key, 1)
        return chunks


def key_of(chunks):
    return IPCCacheServerKey(
        model_name=MODEL,
        world_size=1,
        worker_id=0,
        token_ids=tuple(TOKENS[: chunks * CHUNK]),
        start=0,
        end=chunks * CHUNK,
        request_id=f"request {next(_requests)}",
        num_kv_readers=1,
    )


def load_all(server):
    """Every chunk of the prompt, once L2 has them all."""
    held = []

    def are_there():
        key = key_of(CHUNKS)
        found = server.lookup(key)
        held[:] = [key]
        return found == CHUNKS

    eventually(are_there, PATIENCE)
    return server.retrieve(held[0])


@pytest.mark.parametrize("kind", ["plugin", "native_plugin"])
def test_a_second_server_loads_what_the_first_has_stored(kind):
    chunks = [torch.randn(SHAPE).to(torch.bfloat16) for _ in range(CHUNKS)]
    page_bytes = SHAPE.numel() * 2
    with temporary_pool() as pool, Server(pool) as pages:
        adapter = {
            "type": kind,
            "module_path": "offload.engines.lmcache",
            "class_name": "MaruL2Adapter" if kind == "plugin" else "MaruConnector",
            "adapter_params": {"server_url": pages.ipc, "pool_size_gb": 0.015625, "chunk_size_bytes": page_bytes},
        }
        with MPServer(adapter) as first:
            first.store(chunks)
            with MPServer(adapter) as second:
                loaded = load_all(second)
        with MPServer(adapter) as third:  # all that has served them is gone but the page store
            again = load_all(third)
    for back in (loaded, again):
        assert back is not None
        assert len(back) == CHUNKS
        assert all(torch.equal(one, other) for one, other in zip(back, chunks, strict=True))
