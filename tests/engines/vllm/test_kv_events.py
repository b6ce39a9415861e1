"""KV events, as a router reads them: decoded with vLLM's own structs."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import trio

from backends.memory import MemoryTier
from maru.kv_events import publish_events

from .instances import SOON, any_tiers, generate, prompt, read_events, run, spec


async def test_what_we_publish_is_what_vllm_reads(tmp_path: Path) -> None:
    host = MemoryTier(1 << 16, 1 << 10)
    events, answers = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/answers"
    keys = [f"key-{at}".encode() for at in range(4)]
    async with publish_events({"host": host}, events, answers, topic="kv@pod@model", block_size=16):
        for key in keys:
            host.put(key, bytes(1 << 10))
        host.pool.delete(keys[:1])
        told = await trio.to_thread.run_sync(read_events, answers)
    assert told["held"] == {"host": [key.hex() for key in keys[1:]]}
    assert told["numbers"] == list(range(len(told["numbers"])))
    assert told["sizes"] == [["host", 16]]


def told_by_an_engine(model: str, transfer: dict[str, object], path: Path) -> dict[str, dict[str, list[str]]]:
    """What a router knows after a prompt of eight chunks, and after a reset of everything."""
    answers = f"ipc://{path}/answers"
    kv_events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{path}/events",
        "replay_endpoint": answers,
    }
    steps: list[dict[str, object]] = [generate([prompt(1024, 40, 1)]), {"do": "settle"}, generate([prompt(0, 40, 2)])]
    steps += [{"do": "wait", "tell": str(path / "stored"), "wait": str(path / "read")}]
    steps += [{"do": "reset", "connector": True}, generate([prompt(0, 40, 3)])]
    steps += [{"do": "wait", "tell": str(path / "reset"), "wait": str(path / "read again")}]
    told: dict[str, dict[str, list[str]]] = {}

    def router() -> None:
        for tell, wait in (("stored", "read"), ("reset", "read again")):
            deadline = time.monotonic() + SOON
            while not (path / tell).exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(
                0.5
            )  # vLLM's publisher has a thread of its own, which nobody can ask whether it has told everything
            try:
                told[tell] = read_events(answers)["held"]
            finally:
                (path / wait).touch()

    thread = threading.Thread(target=router)
    thread.start()
    run({"model": model, "transfer": transfer, "options": {"kv_events_config": kv_events}, "steps": steps})
    thread.join()
    return told


def test_the_connector_tells_of_its_tiers_through_vllms_publisher(model: str, tmp_path: Path) -> None:
    told = told_by_an_engine(model, any_tiers(host={"type": "memory", "capacity_bytes": "8 MiB"}), tmp_path)
    stored, gpu = told["stored"]["host"], told["stored"]["GPU"]
    assert len(stored) == 8
    assert set(stored) <= set(gpu), "each is the hash of a block that vLLM itself has told"
    assert told["reset"]["host"] == []


def test_the_spec_tells_of_host_memory_through_vllms_publisher(model: str, tmp_path: Path) -> None:
    told = told_by_an_engine(model, spec(host={"type": "memory", "capacity_bytes": "8 MiB"}), tmp_path)
    assert len(told["stored"]["CPU"]) == 8
    assert set(told["stored"]["CPU"]) <= set(told["stored"]["GPU"])
    assert told["reset"]["CPU"] == []
