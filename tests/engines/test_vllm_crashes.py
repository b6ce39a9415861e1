"""An instance of vLLM that is killed: after its lease it has left nothing behind but what it had stored."""

import os
import signal
import tempfile
from contextlib import contextmanager

import pytest
import torch

from offload import from_thread
from offload.engines.vllm._chunks import ChunkSource, GroupCaches
from offload.engines.vllm._settings import MaruSettings
from tests.engines.test_vllm_halves import BLOCK, BLOCKS, CHUNK, SOON, Loop, blocks_from
from tests.support.maru_processes import Server, eventually, forge, temporary_pool


@contextmanager
def instance(server_url):
    cache = torch.zeros(2, BLOCKS, 2, BLOCK, 4)
    source = ChunkSource([GroupCaches({f"layer {at}": cache[at] for at in range(2)}, BLOCKS, CHUNK // BLOCK)])
    said = {
        "maru_server_url": server_url,
        "maru_pool_size": "2M",
        "maru_kv_chunk_tokens": CHUNK,
        "lookup_timeout": SOON,
    }
    settings = MaruSettings.read(said, BLOCK, source.block_bytes * BLOCK // CHUNK)
    settings.engine["tiers"]["maru"]["lease"] = 0.5
    with from_thread.open_engine(source, settings.engine_config(), when_full="drop") as engine:
        yield Loop(engine, source, cache)


def hold(channel, server_url, round_):
    """In a child: have a prompt pinned for a request, which the first one has stored, and wait to be killed."""
    with instance(server_url) as loop:
        if not round_:
            assert loop.matched("shared", 256) == 0
            loop.scheduler.allocated("shared", [blocks_from(0)], 0)
            loop.compute("shared", 256, blocks_from(0))
            loop.worker.engine.drain(SOON)
        assert loop.matched("shared", 256, name="a request that waits") == 192
        os.write(channel, b"!")
        signal.pause()


def crash(server, round_):
    ours, theirs = os.pipe()
    with tempfile.TemporaryFile() as log:
        child = forge().start(f"{__name__}:hold", server.ipc, round_, channel=theirs, errors=log.fileno())
        os.close(theirs)
        told = os.read(ours, 1)
        log.seek(0)
        assert told == b"!", log.read().decode()
        child.kill()
    os.close(ours)


@pytest.mark.parametrize("crashes", [3, pytest.param(50, marks=pytest.mark.long)])
def test_crashes_leave_no_pin_and_no_region_behind_and_what_was_stored_stays(crashes):
    with temporary_pool() as pool, Server(pool, "--session-lease", "0.5") as server:
        for round_ in range(crashes):
            crash(server, round_)
            eventually(lambda: server.facts()["pinned"] == 0)
        # The region of the first one is kept for what it has stored, those of the others are given back.
        eventually(lambda: server.facts()["regions"] == 1)
        with instance(server.ipc) as loop:
            assert loop.matched("shared", 256) == 192
            loop.scheduler.close()
