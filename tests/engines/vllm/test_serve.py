"""Two servers of vLLM over HTTP, as docs/how-to/vllm.md starts them: the second one loads what the first one has computed."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from .instances import PYTHON, ROOT, SOON, Server, maru, prompt


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def serving(model: str, transfer: dict[str, Any], log: Path) -> Iterator[str]:
    """A server that is starting, and its address."""
    port = free_port()
    options = [*("--host", "127.0.0.1"), *("--port", str(port)), *("--dtype", "float32"), *("--block-size", "32")]
    options += [*("--max-model-len", "4096"), "--enforce-eager", *("--kv-transfer-config", json.dumps(transfer))]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    environ |= {
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [
        "nice",
        PYTHON,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        model,
        *options,
    ]  # what `vllm serve` runs
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file, env=environ) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def wait_until_healthy(url: str, log: Path) -> None:
    deadline = time.monotonic() + SOON
    while not is_healthy(url):
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.2)


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def complete(url: str, model: str, tokens: list[int]) -> str:
    asked = {"model": model, "prompt": tokens, "max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(asked).encode(), headers)
    with urllib.request.urlopen(request, timeout=SOON) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
        return text


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=SOON) as answer:
        lines = answer.read().decode()
    return sum(float(found) for found in re.findall(rf"^{name}{{.*}} (\S+)$", lines, re.MULTILINE))


def test_a_second_server_loads_what_the_first_one_has_computed(model: str, server: Server, tmp_path: Path) -> None:
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    with ExitStack() as stack:
        first, second = [stack.enter_context(serving(model, maru(server), log)) for log in logs]
        for url, log in zip((first, second), logs, strict=True):
            wait_until_healthy(url, log)
        asked = prompt(1024, 40, 2)
        complete(first, model, prompt(1024, 40, 1))
        wanted = complete(first, model, asked)  # a hit in its own cache
        deadline = time.monotonic() + SOON
        while metric(second, "vllm:external_prefix_cache_hits_total") < 1024:
            assert time.monotonic() < deadline, "what the first has stored has not arrived"
            urllib.request.urlopen(urllib.request.Request(f"{second}/reset_prefix_cache", method="POST"), timeout=SOON)
            assert complete(second, model, asked) == wanted and len(wanted.split()) == 16
        assert metric(first, "vllm:external_prefix_cache_hits_total") == 0
