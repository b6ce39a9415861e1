"""One engine process of ``offload demo --daemon``: the model of the other demo, with a daemon in place of tiers of its own.

It answers a question for each line that it reads, tells what came of it, and at the end computes the same without any
cache. What is different for the engine is in :class:`DaemonServer`: its cache lies in memory that the daemon maps, and its
one tier is the daemon.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from pathlib import Path

import attrs
import torch

from backends.abc import ReadableTier

from ..client import DaemonTier, SharedMemory
from ..testing.reference_engine import ModelConfig, ReferenceEngine
from .engine_process import Job, Server, tell, without_cache

_PATIENCE = 60.0
"""Seconds for a daemon that is started anew, and for the breaker to try it again."""


class DaemonServer(Server):
    """A model whose blocks a daemon keeps."""

    def make_model(self, config: ModelConfig) -> ReferenceEngine:
        """The model, with its cache in shared memory."""
        return ReferenceEngine(config, allocate=in_shared_memory)

    def elsewhere(self) -> list[ReadableTier]:
        """The daemon."""
        name = f"engine {self.job.role.upper()}"
        return [DaemonTier(self.job.store, block_bytes=self.model.block_bytes, name=name)]

    def wait_available(self, wanted: bool) -> list[str]:
        """Look a key up until the daemon answers, or is named as unavailable. Returns the tiers that were named at last."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            with self.engine.lookup([b"a key that is nowhere"]) as hit:
                if (not hit.unavailable) is wanted or time.monotonic() > deadline:
                    return list(hit.unavailable)
            time.sleep(0.02)


def in_shared_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A storage that the daemon can map."""
    memory = SharedMemory(math.prod(shape) * dtype.itemsize)
    return memory.tensor(shape, dtype)


def main(job: Job) -> None:
    """Answer the questions, one for each line of the standard input; behind each, a second line has it look for the daemon."""
    torch.set_num_threads(1)
    document = Path(job.document).read_bytes()
    prompts = [document + question.encode() for question in job.questions]
    tokens = max(map(len, prompts)) + job.answer_tokens
    blocks = -(-tokens // ModelConfig().block_size)
    config = ModelConfig(num_blocks=2 * blocks + 8, max_context=tokens)
    with DaemonServer(job, config) as server:
        tell(event="ready", blocks=len(document) // config.block_size)
        for prompt, question in zip(prompts, job.questions, strict=True):
            server.wait_available(True)
            if not sys.stdin.readline():
                return
            answer = server.answer(prompt, question)
            tell(event="answer", stored_blocks=server.stored_blocks, **attrs.asdict(answer))
            if sys.stdin.readline() == "notice\n":
                tell(event="noticed", unavailable=server.wait_available(False))
    tell(event="outcome", uncached=[attrs.asdict(answer) for answer in without_cache(job, config, prompts)])


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(Job(**json.loads(sys.argv[1])))
