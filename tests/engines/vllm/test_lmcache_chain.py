"""A real vLLM over LMCache's MP server, behind which our adapter keeps what is stored in a page store."""

from __future__ import annotations

from pathlib import Path

from .instances import PYTHON, Server, external_hits, generate, prompt, run
from .lmcache_chain import MPServer

TOKEN_BYTES = 2 << 10
"""Of KV of the small Llama."""
ENVIRONMENT = {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false"}


def test_what_one_vllm_has_stored_another_one_loads_behind_another_mp_server(
    model: str, server: Server, tmp_path: Path
) -> None:
    """All that has served the first one is gone but the page store."""
    first, second = prompt(1024, 40, 1), prompt(1024, 40, 2)
    reference = run({"model": model, "steps": [generate([second])]})
    answers = []
    for at, tokens in enumerate((first, second)):
        middle = MPServer(
            server.url, tmp_path / f"mp-{at}.log", chunk_tokens=128, l1_gb=0.25, pool_gb=0.0625, python=PYTHON
        )
        try:
            steps = [generate([tokens])]
            answers.append(run({"model": model, "transfer": middle.transfer, "steps": steps}, **ENVIRONMENT))
            server.wait_until_used(1024 * TOKEN_BYTES)
        finally:
            middle.close()
    producer, consumer = answers
    assert consumer["answers"][0]["tokens"] == reference["answers"][0]["tokens"]
    assert consumer["answers"][0]["cached"] == [1024]
    assert (external_hits(producer), external_hits(consumer)) == (0, 1024)
