"""One engine process of the demo: a model in its own thread, its KV cache offloaded from there, and what came of it.

    python -m offload._demo.engine_process '{"role": "a", ...}'

writes one JSON object per line: progress, then the outcome. The model knows nothing of offloading, and offloading nothing of
the model; :class:`Server` is all that an inference engine has to add, and where to look for how that is done.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
"""What a forward pass of a prefill computes."""
_BLOCKS_IN_A_STORE = 4  # in the run that cancels: small ones, so that there are many


@attrs.frozen
class Job:
    """What a process is to do."""

    role: str
    """``a``: prefill, store and answer. ``b``: find, load, answer, and compare. ``c``: cancel half of the stores."""
    directory: str
    """Of C's file tier."""
    store: str
    """The page store that A and B share: its endpoint."""
    document: str
    """The file with the text that every prompt begins with."""
    questions: list[str]
    """What each prompt ends with."""
    answer_tokens: int
    """Tokens to generate."""
    checksums: bool
    """Whether tiers verify what they load."""
    region_bytes: int
    """What A and B each take of the page store."""


@attrs.frozen
class Answer:
    """What became of one question."""

    question: str
    tokens: list[int]
    first_token: float
    """Seconds from the question to the first token."""
    blocks: int
    """Full blocks of the prompt."""
    hit_blocks: int
    """Found."""
    loaded_blocks: int
    """Loaded and verified: so much of the prompt was not computed."""
    load: float
    """Seconds of the load."""
    kv: str
    """A digest of all KV, of the prompt and the answer."""


class CopyClock:
    """An instrument: how long copies took, by the kind of place they read from."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began: dict[int, float] = {}

    def xfer_start(self, batch: OffloadBatch) -> None:
        """A copy begins."""
        self._began[id(batch)] = time.perf_counter()

    def xfer_end(self, batch: OffloadBatch) -> None:
        """It is over."""
        source = type(batch.containers[0].blocks.source).__name__
        took = time.perf_counter() - self._began.pop(id(batch))
        self.seconds[source] = self.seconds.get(source, 0.0) + took


class Server:
    """A model whose prefixes outlive it."""

    def __init__(self, job: Job, config: ModelConfig) -> None:
        self.job = job
        self.model = ReferenceEngine(config)
        self.clock = CopyClock()
        self.device = DeviceTier(self.model.kv_caches, block_axis=1)
        self.fingerprint = f"{config.fingerprint()} {self.device.fingerprint}"
        self.closing = contextlib.ExitStack()
        self.local: list[Tier] = self.in_files() if job.role == "c" else []
        self.tiers: list[ReadableTier] = [*self.local] or [self.in_shared_pages()]
        self.canceller = Canceller()
        self.engine = from_thread.open_engine(self.device, self.tiers, instruments=[self.clock, self.canceller])
        self.stored_blocks = 0

    def in_shared_pages(self) -> MaruTier:
        """Pages of shared memory, which other processes read in place. The engine opens it, in its own thread."""
        self.handler = MaruHandler(
            server_url=self.job.store,
            chunk_size_bytes=self.model.block_bytes,
            pool_size=self.job.region_bytes,
            namespace=self.fingerprint,
            checksums=self.job.checksums,
        )
        return MaruTier(self.handler)

    def in_files(self) -> list[Tier]:
        """Host memory, and behind it a directory."""
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

    def __enter__(self) -> Server:
        self.engine.start()
        self.engine.fileno()  # from now on, what settles is polled
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
        tickets = [ticket for step in self.prefill(sequence, keys) for ticket in step]
        tokens = model.generate(sequence, 1)
        first_token = time.perf_counter() - start
        tokens += model.generate(sequence, self.job.answer_tokens - 1)
        kv = model.kv_digest(sequence).hex()
        for ticket in tickets:
            ticket.result()
        model.free(sequence)  # not before: what is in flight is read from these blocks
        self.tell_progress()
        return Answer(question, tokens, first_token, len(keys), len(hit), loaded, load, kv)

    def prefill(
        self, sequence: Generation, keys: Sequence[bytes], blocks_in_a_store: int = CHUNK_TOKENS
    ) -> Iterator[list[from_thread.StoreFuture]]:
        """Compute what is missing, chunk by chunk; the blocks that each will fill are stored before it begins.

        Yields twice for each chunk: the tickets before it is computed, and nothing before it is said that it is.
        """
        size = self.model.config.block_size
        steps = self.model.prefill(sequence, chunk_tokens=CHUNK_TOKENS)
        while sequence.computed < len(sequence.tokens):
            stop = min(sequence.computed + CHUNK_TOKENS, len(sequence.tokens))
            full = range(sequence.computed // size, stop // size)
            forward_pass = from_thread.Event()
            tickets = []
            for at in range(full.start, full.stop, blocks_in_a_store):
                some = slice(at, min(at + blocks_in_a_store, full.stop))
                blocks = self.device.external(sequence.block_ids[some], keys[some], depths=range(some.start, some.stop))
                tickets.append(self.engine.store(blocks, precondition=forward_pass))
            yield tickets
            next(steps)
            yield []
            forward_pass.set()
            self.tell_progress(sequence)

    def tell_progress(self, sequence: Generation | None = None) -> None:
        """Look what has settled, and tell how far it is."""
        for ticket in self.engine.poll():
            assert isinstance(ticket, from_thread.StoreFuture)  # no other call is begun here
            self.stored_blocks += len(ticket.result(0).completed)
        if sequence is not None:
            tell(event="prefill", computed=sequence.computed, total=len(sequence.tokens))
        tell(event="stored", blocks=self.stored_blocks)

    def figures(self) -> dict[str, Any]:
        """The books, once everything has settled."""
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
        """The books of the shared pages, for A and B."""
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
    """The same questions, asked of a model that has nothing but itself."""
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
    """Store a prompt in small pieces and cancel every second one, in turn at four points of its way."""
    model, points = server.model, itertools.cycle(("at once", "waiting", "batching", "xfer_start"))
    sequence = model.add_sequence(prompt)
    keys = model.prefix_keys(sequence.tokens)
    tickets: list[from_thread.StoreFuture] = []
    asked: list[from_thread.StoreFuture] = []
    waiting: list[from_thread.StoreFuture] = []
    for step in server.prefill(sequence, keys, _BLOCKS_IN_A_STORE):
        tickets += step
        for ticket in step[1::2]:
            asked.append(ticket)
            match next(points):
                case "at once":
                    ticket.request_cancel()
                case "waiting":
                    waiting.append(ticket)
                case hook:
                    server.canceller.plan[ticket.keys[0]] = (hook, ticket)
        if not step:  # computed, but it is not said yet: these wait for it
            for ticket in waiting:
                ticket.request_cancel()
            waiting.clear()
    confirmed = 0
    for ticket in asked[::-1]:
        ticket.cancel()  # returns once it is confirmed
        confirmed += 1
    for ticket in tickets:
        ticket.result()
    model.free(sequence)
    statuses = [ticket.status for ticket in asked]
    gone = [key for ticket in asked if ticket.status is Status.CANCELLED for key in ticket.keys]
    stored = [key for ticket in tickets for key in ticket.result().completed]
    found = {key for tier in server.local for key in server.engine.call(tier.contains_nowait, keys)}
    return {
        "stores": len(tickets),
        "asked": len(asked),
        "confirmed": confirmed,
        "cancelled": statuses.count(Status.CANCELLED),
        "too_late": statuses.count(Status.COMPLETE),
        "cancelled_but_found": len(found.intersection(gone)),
        "stored_but_missing": len(set(stored) - found),
    }


class Canceller:
    """An instrument: cancels chosen stores when they come to a chosen point."""

    def __init__(self) -> None:
        self.plan: dict[bytes, tuple[str, from_thread.StoreFuture]] = {}
        """By the first key of a store: at which hook, and what."""

    def batching(self, container: OffloadContainer) -> None:
        """It is ready to be copied."""
        self._look("batching", container)

    def xfer_start(self, batch: OffloadBatch) -> None:
        """It is being copied."""
        for container in batch.containers:
            self._look("xfer_start", container)

    def _look(self, hook: str, container: OffloadContainer) -> None:
        wanted, ticket = self.plan.get(container.blocks.keys[0], ("", None))
        if hook == wanted and ticket is not None:
            ticket.request_cancel()


def tell(**event: object) -> None:
    """A line for whoever started this process."""
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        tell(event="outcome", **main(Job(**json.loads(sys.argv[1]))))
