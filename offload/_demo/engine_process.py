"""One engine process of the demo: a model in its own thread, whose KV cache is offloaded from that thread.

    python -m offload._demo.engine_process '{"role": "a", ...}'

writes one JSON object per line: progress, then the outcome. The model and the offloading do not know each other;
:class:`Server` is all that an inference engine has to add, and the place to look up how.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import attrs
import torch

from backends.abc import ReadableTier, Tier
from backends.device import DeviceTier
from backends.file import FileTier
from backends.maru import MaruTier
from backends.memory import MemoryTier
from maru import MaruHandler

from .. import from_thread
from .._pipeline.container import OffloadBatch, OffloadContainer
from .._pipeline.lifecycle import Status
from ..testing.reference_engine import ModelConfig, ReferenceEngine
from ..testing.reference_engine import Sequence as Generation

CHUNK_TOKENS = 256
"""Tokens that one forward pass of a prefill computes."""
_BLOCKS_IN_A_STORE = 4  # of the process that cancels: small stores, so that there are many


@attrs.frozen
class Job:
    """The job of an engine process."""

    role: str
    """``a``: prefill, store and answer. ``b``: find, load, answer, and compare. ``c``: cancel half of the stores."""
    directory: str
    """The directory of C's file tier."""
    store: str
    """The endpoint of the page store that A and B share."""
    document: str
    """The file with the text that every prompt begins with."""
    questions: list[str]
    """Each prompt ends with one of these."""
    answer_tokens: int
    """Tokens to generate."""
    checksums: bool
    """Whether tiers verify the checksums of loads."""
    region_bytes: int
    """Bytes of the region that A and B each take from the page store."""


@attrs.frozen
class Answer:
    """The result of one question."""

    question: str
    tokens: list[int]
    first_token: float
    """Seconds from the question to the first token."""
    blocks: int
    """Full blocks of the prompt."""
    hit_blocks: int
    """Blocks that were found."""
    loaded_blocks: int
    """Blocks that were loaded and verified, and so not computed."""
    load: float
    """Duration of the load, in seconds."""
    kv: str
    """A digest of all KV of the prompt and the answer."""


class CopyClock:
    """An instrument that measures how long copies take, by the kind of their source."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began: dict[int, float] = {}

    def xfer_start(self, batch: OffloadBatch) -> None:
        """Take the time at which a copy begins."""
        self._began[id(batch)] = time.perf_counter()

    def xfer_end(self, batch: OffloadBatch) -> None:
        """Add its duration."""
        source = type(batch.containers[0].blocks.source).__name__
        took = time.perf_counter() - self._began.pop(id(batch))
        self.seconds[source] = self.seconds.get(source, 0.0) + took


class Server:
    """A model with offloading: prefixes are stored, and loaded by later processes."""

    def __init__(self, job: Job, config: ModelConfig) -> None:
        self.job = job
        self.model = self.make_model(config)
        self.clock = CopyClock()
        self.device = DeviceTier(self.model.kv_caches, block_axis=1)
        self.fingerprint = f"{config.fingerprint()} {self.device.fingerprint}"
        self.closing = contextlib.ExitStack()
        self.local: list[Tier] = self.in_files() if job.role == "c" else []
        self.tiers: list[ReadableTier] = [*self.local] or self.elsewhere()
        self.canceller = Canceller()
        self.engine = from_thread.open_engine(self.device, self.tiers, instruments=[self.clock, self.canceller])
        self.stored_blocks = 0

    def make_model(self, config: ModelConfig) -> ReferenceEngine:
        """The model, with its cache."""
        return ReferenceEngine(config)

    def elsewhere(self) -> list[ReadableTier]:
        """Tiers that other processes have as well."""
        return [self.in_shared_pages()]

    def in_shared_pages(self) -> MaruTier:
        """A tier of pages in shared memory, which other processes read in place. The engine opens it in its own thread."""
        self.handler = MaruHandler(
            server_url=self.job.store,
            chunk_size_bytes=self.model.block_bytes,
            pool_size=self.job.region_bytes,
            namespace=self.fingerprint,
            checksums=self.job.checksums,
        )
        return MaruTier(self.handler)

    def in_files(self) -> list[Tier]:
        """A memory tier, and a file tier behind it."""
        config, size = self.model.config, self.model.block_bytes
        host = MemoryTier(config.num_blocks * size, size, checksums=self.job.checksums)
        disk = FileTier(
            self.job.directory,
            4 * config.num_blocks * size,
            fingerprint=self.fingerprint,
            checksums=self.job.checksums,
            block_bytes=size,
        )
        self.closing.callback(host.close)
        self.closing.callback(disk.close)
        return [host, disk]

    def __enter__(self) -> Self:
        self.engine.start()
        self.engine.fileno()  # from now on the thread polls for settled stores
        self.model.generate(self.model.add_sequence(b"warm-up"), 1)
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.close()
        self.closing.close()

    def answer(self, prompt: bytes, question: str) -> Answer:
        """Find what is stored of a prompt, load it, compute and store the rest, and generate."""
        start = time.perf_counter()
        model, size = self.model, self.model.config.block_size
        sequence = model.add_sequence(prompt)
        keys = model.prefix_keys(sequence.tokens)
        with self.engine.lookup(keys) as hit:
            before = time.perf_counter()
            loaded = self.engine.load(hit, self.device.into(sequence.block_ids[: len(hit)])).loaded
            load = time.perf_counter() - before
        model.adopt_prefix(sequence, loaded * size)
        futures = [future for step in self.prefill(sequence, keys) for future in step]
        tokens = model.generate(sequence, 1)
        first_token = time.perf_counter() - start
        tokens += model.generate(sequence, self.job.answer_tokens - 1)
        kv = model.kv_digest(sequence).hex()
        for future in futures:
            future.result()
        model.free(sequence)  # only now: stores in flight read from these blocks
        self.tell_progress()
        return Answer(question, tokens, first_token, len(keys), len(hit), loaded, load, kv)

    def prefill(
        self, sequence: Generation, keys: Sequence[bytes], blocks_in_a_store: int = CHUNK_TOKENS
    ) -> Iterator[list[from_thread.StoreFuture]]:
        """Compute what is missing, chunk by chunk; each chunk's blocks are stored before it is computed.

        Yields twice for each chunk: the futures before it is computed, and an empty list before its event is set.
        """
        size = self.model.config.block_size
        steps = self.model.prefill(sequence, chunk_tokens=CHUNK_TOKENS)
        while sequence.computed < len(sequence.tokens):
            stop = min(sequence.computed + CHUNK_TOKENS, len(sequence.tokens))
            full = range(sequence.computed // size, stop // size)
            forward_pass = from_thread.Event()
            futures = []
            for at in range(full.start, full.stop, blocks_in_a_store):
                some = slice(at, min(at + blocks_in_a_store, full.stop))
                blocks = self.device.external(sequence.block_ids[some], keys[some], depths=range(some.start, some.stop))
                futures.append(self.engine.store(blocks, precondition=forward_pass))
            yield futures
            next(steps)
            yield []
            forward_pass.set()
            self.tell_progress(sequence)

    def tell_progress(self, sequence: Generation | None = None) -> None:
        """Collect the settled stores, and report progress."""
        for future in self.engine.poll():
            assert isinstance(future, from_thread.StoreFuture)  # this process begins no other calls
            self.stored_blocks += len(future.result(0).completed)
        if sequence is not None:
            tell(event="prefill", computed=sequence.computed, total=len(sequence.tokens))
        tell(event="stored", blocks=self.stored_blocks)

    def figures(self) -> dict[str, Any]:
        """The figures of the outcome, once everything has settled."""
        self.engine.drain()
        self.tell_progress()
        statistics = self.engine.statistics()
        pipelines, tiers = statistics.engine.pipelines, statistics.engine.tiers
        *_, to_last = pipelines.values()
        places = [self.device, *self.tiers]
        return {
            "stored_blocks": to_last.blocks_completed,
            "stored_bytes": to_last.copied_bytes,
            "copies": {
                name: {"bytes": pipeline.copied_bytes, "seconds": self.clock.seconds.get(type(place).__name__, 0.0)}
                for place, (name, pipeline) in zip(places, pipelines.items(), strict=False)
            },
            "asked_blocks": statistics.engine.asked_blocks,
            "hit_blocks": statistics.engine.hit_blocks,
            "loaded_blocks": statistics.engine.loaded_blocks,
            "load_failures": dict(statistics.engine.load_failures),
            "at_rest": {
                "budget_used": sum(pipeline.used_blocks for pipeline in pipelines.values()),
                "pending_marks": sum(pipeline.pending_marks for pipeline in pipelines.values()),
                "quarantined": sum(pipeline.quarantined for pipeline in pipelines.values()),
                "reserved": sum(tier.reserved_blocks for tier in tiers.values()),
                "held": sum(tier.held_blocks for tier in tiers.values()),
                "in_flight": statistics.in_flight_blocks,
                "hits": statistics.unreleased_hits,
            },
        }

    def page_figures(self) -> dict[str, Any]:
        """The figures of the shared pages, for A and B."""
        statistics = self.engine.call(self.handler.statistics)
        pages = statistics.pages
        return {
            "registered": pages.registered,
            "regions_of_others": statistics.regions - pages.regions,
            "neither_free_nor_registered": pages.pages - pages.free - pages.registered,
            "pinned": statistics.pinned,
        }


# --- the three roles ----------------------------------------------------------------------------------------------


def main(job: Job) -> dict[str, Any]:
    """Do the job and return the outcome."""
    # One thread computes, another core copies. Two that compute wait for each other at every step, which on a busy machine
    # takes ten times as long.
    torch.set_num_threads(1)
    document = Path(job.document).read_bytes()
    prompts = [document + question.encode() for question in job.questions]
    tokens = max(map(len, prompts)) + job.answer_tokens
    blocks = -(-tokens // ModelConfig().block_size)
    config = ModelConfig(num_blocks=2 * blocks + 8, max_context=tokens)
    with Server(job, config) as server:
        tell(event="ready", blocks=len(document) // config.block_size)
        outcome: dict[str, Any] = {"block_bytes": server.model.block_bytes}
        if job.role == "c":
            outcome["cancel"] = cancel_half(server, prompts[0])
        answers = [server.answer(*pair) for pair in zip(prompts, job.questions, strict=True)]
        outcome["answers"] = [attrs.asdict(answer) for answer in answers]
        outcome |= server.figures()
        if job.role != "c":
            outcome["pages"] = server.page_figures()
            for leak in ("neither_free_nor_registered", "pinned"):
                outcome["at_rest"][leak] = outcome["pages"].pop(leak)
    if job.role != "a":
        outcome["uncached"] = [attrs.asdict(answer) for answer in without_cache(job, config, prompts)]
    return outcome


def without_cache(job: Job, config: ModelConfig, prompts: Sequence[bytes]) -> list[Answer]:
    """Answer the same questions with a model without any cache."""
    model = ReferenceEngine(config)
    answers = []
    for prompt, question in zip(prompts, job.questions, strict=True):
        start = time.perf_counter()
        sequence = model.add_sequence(prompt)
        for step in model.prefill(sequence, chunk_tokens=CHUNK_TOKENS):
            tell(event="uncached", computed=step.computed, total=step.total)
        tokens = model.generate(sequence, 1)
        first_token = time.perf_counter() - start
        tokens += model.generate(sequence, job.answer_tokens - 1)
        kv = model.kv_digest(sequence).hex()
        answers.append(Answer(question, tokens, first_token, 0, 0, 0, 0.0, kv))
        model.free(sequence)
    return answers


def cancel_half(server: Server, prompt: bytes) -> dict[str, Any]:
    """Store a prompt in small pieces and cancel every second one, in turn at four points of the path."""
    model, points = server.model, itertools.cycle(("at once", "waiting", "batching", "xfer_start"))
    sequence = model.add_sequence(prompt)
    keys = model.prefix_keys(sequence.tokens)
    futures: list[from_thread.StoreFuture] = []
    asked: list[from_thread.StoreFuture] = []
    waiting: list[from_thread.StoreFuture] = []
    for step in server.prefill(sequence, keys, _BLOCKS_IN_A_STORE):
        futures += step
        for future in step[1::2]:
            asked.append(future)
            match next(points):
                case "at once":
                    future.request_cancel()
                case "waiting":
                    waiting.append(future)
                case hook:
                    server.canceller.plan[future.keys[0]] = (hook, future)
        if not step:  # computed, but the event is not set yet: these wait for it
            for future in waiting:
                future.request_cancel()
            waiting.clear()
    confirmed = 0
    for future in asked[::-1]:
        future.cancel()  # returns once it is confirmed
        confirmed += 1
    for future in futures:
        future.result()
    model.free(sequence)
    statuses = [future.status for future in asked]
    gone = [key for future in asked if future.status is Status.CANCELLED for key in future.keys]
    stored = [key for future in futures for key in future.result().completed]
    found = {key for tier in server.local for key in server.engine.call(tier.contains_nowait, keys)}
    return {
        "stores": len(futures),
        "asked": len(asked),
        "confirmed": confirmed,
        "cancelled": statuses.count(Status.CANCELLED),
        "too_late": statuses.count(Status.COMPLETE),
        "cancelled_but_found": len(found.intersection(gone)),
        "stored_but_missing": len(set(stored) - found),
    }


class Canceller:
    """An instrument that cancels chosen stores at a chosen hook."""

    def __init__(self) -> None:
        self.plan: dict[bytes, tuple[str, from_thread.StoreFuture]] = {}
        """By the first key of a store: the hook, and the store's future."""

    def batching(self, container: OffloadContainer) -> None:
        """Cancel stores chosen for the time before the copy."""
        self._look("batching", container)

    def xfer_start(self, batch: OffloadBatch) -> None:
        """Cancel stores chosen for the middle of the copy."""
        for container in batch.containers:
            self._look("xfer_start", container)

    def _look(self, hook: str, container: OffloadContainer) -> None:
        wanted, future = self.plan.get(container.blocks.keys[0], ("", None))
        if hook == wanted and future is not None:
            future.request_cancel()


def tell(**event: object) -> None:
    """Write an event as a JSON line to the standard output, for the parent process."""
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        tell(event="outcome", **main(Job(**json.loads(sys.argv[1]))))
