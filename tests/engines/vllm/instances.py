"""Engines of a real vLLM on a CPU, each in a process of its own, and what they are started with.

`nox -s vllm` makes the environment. With ``OFFLOAD_VLLM_PYTHON`` set to the interpreter of one that has vLLM, the tests run
from any.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PYTHON = os.environ.get("OFFLOAD_VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else "")
ROOT = Path(__file__).parents[3]
SOON = 600.0

Answer = dict[str, Any]


def run(said: dict[str, Any], program: str = "program.py", **environment: str) -> Answer:
    """Run a program beside this file."""
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", **environment}
    done = subprocess.run(
        ["nice", PYTHON, str(Path(__file__).with_name(program))],
        input=json.dumps(said),
        capture_output=True,
        text=True,
        timeout=SOON,
        env=environ,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    answer: Answer = json.loads(done.stdout.strip().splitlines()[-1])
    answer["log"] = done.stdout + done.stderr
    return answer


@contextmanager
def started(said: dict[str, Any], log: Path) -> Iterator[subprocess.Popen[str]]:
    """An engine that does not end by itself: it is killed with the block."""
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = ["nice", PYTHON, str(Path(__file__).with_name("program.py"))]
    with log.open("w") as said_by_it:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=said_by_it, stderr=said_by_it, text=True, env=environ
        )
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(said))
        process.stdin.close()
        yield process
    finally:
        process.kill()
        process.wait()


def read_events(answers: str) -> Answer:
    """What a router knows that asks at this address, by vLLM's own structs."""
    return run({"answers": answers}, program="reader.py")


class Server:
    """A page store."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.url = f"ipc://{directory}/maru.sock"
        self.start()

    def start(self) -> None:
        options = ["--pool-path", str(self.directory), "--capacity-bytes", "256MiB", "--zmq-socket"]
        command = [sys.executable, "-c", "from maru.server_cli import main; main()", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        assert "ready" in self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def wait_until_used(self, nbytes: int) -> None:
        """Wait until so many bytes of pages hold keys."""
        command = [sys.executable, "-m", "maru", "usage", "--server", self.url, "--json"]
        deadline = time.monotonic() + SOON
        while True:
            usage = json.loads(subprocess.run(command, capture_output=True, check=True, cwd=ROOT).stdout)
            if sum(one["used_bytes"] for one in usage["instances"]) >= nbytes:
                return
            assert time.monotonic() < deadline, usage
            time.sleep(0.1)

    def corrupt(self, instances: int | None = None) -> None:
        """Turn over one byte of every 1,000 in the regions of all instances, or of so many of them."""
        for path in self.regions()[:instances]:
            with path.open("r+b") as file:
                data = bytearray(file.read())
                data[::1000] = bytes(byte ^ 0x40 for byte in data[::1000])
                file.seek(0)
                file.write(data)

    def regions(self) -> list[Path]:
        """The files that instances have their pages in."""
        return sorted(self.directory.glob("maru_*.dat"))


def maru(server: Server, **more: Any) -> dict[str, Any]:
    return {
        "kv_connector": "MaruKVConnector",
        "kv_connector_module_path": "offload.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "maru_server_url": server.url,
            "maru_pool_size": "64M",
            "maru_kv_chunk_tokens": 128,
            **more,
        },
    }


def any_tiers(**tiers: Any) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadConnector",
        "kv_connector_module_path": "offload.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"chunk_tokens": 128, "engine": {"tiers": tiers}},
    }


def spec(cpu_bytes: str = "64 MiB", **tiers: Any) -> dict[str, Any]:
    """vLLM's own connector, with our tiers behind its host memory."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "OffloadSpec",
            "spec_module_path": "offload.engines.vllm",
            "blocks_per_chunk": 4,
            "cpu_bytes_to_use": cpu_bytes,
            "offload": {"engine": {"tiers": tiers}},
        },
    }


def spec_over_daemon(url: str) -> dict[str, Any]:
    """As :func:`spec`, with one line in place of the tiers."""
    transfer = spec()
    transfer["kv_connector_extra_config"]["offload"] = {"daemon_url": url}
    return transfer


def over_daemon(url: str, **engine: Any) -> dict[str, Any]:
    """As :func:`any_tiers`, with one line in place of the tiers."""
    transfer = any_tiers()
    transfer["kv_connector_extra_config"].update(daemon_url=url, engine=engine)
    return transfer


def store_of(server: Server) -> dict[str, Any]:
    return {"type": "maru", "server_url": server.url, "pool_size": "64M"}


RNG = random.Random(20)
SHARED = [RNG.randrange(3, 512) for _ in range(1024)]


def prompt(shared: int, own: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return SHARED[:shared] + [rng.randrange(3, 512) for _ in range(own)]


def generate(prompts: list[list[int]], **more: Any) -> dict[str, Any]:
    return {"do": "generate", "prompts": prompts, **more}


def external_hits(answer: Answer) -> int:
    hits: int = answer["metrics"]["vllm:external_prefix_cache_hits"]
    return hits


def when_told(tell: Path, wait: Path, act: Callable[[], None]) -> None:
    """Act on the world once an engine has said that it waits, and say so."""
    deadline = time.monotonic() + SOON
    while not tell.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    act()
    wait.touch()


def nothing_is_left(answer: Answer) -> None:
    assert (answer["counts"]["unreleased_hits"], answer["counts"]["in_flight_blocks"]) == (0, 0)
