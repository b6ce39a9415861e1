"""One engine process of the demo, with an offloaded KV cache.

    python -m offload._demo.engine_process '{"role": "a", ...}'

reads a request from each line, and writes one JSON object per line: progress, and the replies. The model runs in its
own thread, and its cache is offloaded from that thread. The model and the offloading do not know each other;
:class:`Server` is all that an inference engine has to add, and the place to look up how. Its methods ``in_pages``,
``in_a_daemon`` and ``in_files`` are all that differs between the stores of the blocks.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import attrs
import torch

from backends.abc import Tier
from backends.device import DeviceTier
from backends.file import FileTier
from backends.maru import MaruTier
from backends.memory import MemoryTier
from maru import MaruHandler

from .. import from_thread
from .._pipeline.container import OffloadBatch, OffloadContainer
from .._pipeline.lifecycle import Status
from ..client import DaemonTier, SharedMemory
from ..testing.reference_engine import ModelConfig, ReferenceEngine
from ..testing.reference_engine import Sequence as Generation

CHUNK_TOKENS = 256
"""Tokens that one forward pass of a prefill computes."""
_BLOCKS_IN_A_STORE = 4  # small stores of process C, so that there are many to cancel
_PATIENCE = 60.0
"""Seconds to wait for a new daemon, and for its breaker.

The breaker has to try the daemon again.
"""


@attrs.frozen
class Job:
    """The job of an engine process."""

    role: str
    """Role of the process in the demo.

    ``a``: prefill, store and answer. ``b``: find, load, answer, and compare. ``c``: cancel half of the stores.
    """
    daemon: bool
    """Whether a daemon keeps the blocks of A and B.

    Otherwise a page store does.
    """
    url: str
    """Endpoint of the daemon or page store."""
    directory: str
    """The directory of C's file tier."""
    document: str
    """The file with the text that every prompt begins with."""
    questions: list[str]
    """The ends of the prompts."""
    answer_tokens: int
    """Tokens to generate."""
    checksums: bool
    """Whether tiers verify the checksums of loads."""
    region_bytes: int
    """Bytes of the region that A and B each take.

    The page store gives it to them.
    """


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
    stored_blocks: int
    """Blocks stored until then, for all questions."""
    load: float
    """Duration of the load, in seconds."""
    kv: str
    """A digest of all KV of the prompt and the answer."""


class CopyClock:
    """An instrument that measures the duration of copies.

    They are added up by the kind of their source.
    """

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
        # A daemon copies out of the cache, and into it, by itself.
        self.model = ReferenceEngine(config, allocate=in_shared_memory if job.daemon else None)
        self.clock = CopyClock()
        self.device = DeviceTier(self.model.kv_caches, block_axis=1)
        self.fingerprint = f"{config.fingerprint()} {self.device.fingerprint}"
        self.closing = contextlib.ExitStack()
        self.handler: MaruHandler | None = None
        self.local: list[Tier] = self.in_files() if job.role == "c" else []
        self.tiers: list[Tier] = [*self.local] or [self.in_a_daemon() if job.daemon else self.in_pages()]
        self.canceller = Canceller()
        self.engine = from_thread.open_engine(self.device, self.tiers, instruments=[self.clock, self.canceller])
        self.stored_blocks = 0

    def in_pages(self) -> Tier:
        """Make a tier of shared pages.

        The engine opens it in its own thread.
        """
        self.handler = MaruHandler(
            server_url=self.job.url,
            chunk_size_bytes=self.model.block_bytes,
            pool_size=self.job.region_bytes,
            namespace=self.fingerprint,
            checksums=self.job.checksums,
        )
        return MaruTier(self.handler)

    def in_a_daemon(self) -> Tier:
        """Make a tier that is a daemon."""
        return DaemonTier(self.job.url, block_bytes=self.model.block_bytes, name=f"engine {self.job.role.upper()}")

    def in_files(self) -> list[Tier]:
        """Make a memory tier, with a file tier after it."""
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
        """Find and load stored blocks of a prompt, and generate.

        The rest is computed and stored.
        """
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
        return Answer(question, tokens, first_token, len(keys), len(hit), loaded, self.stored_blocks, load, kv)

    def prefill(
        self, sequence: Generation, keys: Sequence[bytes], blocks_in_a_store: int = CHUNK_TOKENS
    ) -> Iterator[list[from_thread.StoreFuture]]:
        """Compute missing blocks by chunks, each stored before it is computed.

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

    def wait_available(self, wanted: bool) -> list[str]:
        """Wait until all tiers answer lookups, or until one does not.

        ``wanted`` chooses between these. Return the tiers that do not answer.
        """
        deadline = time.monotonic() + _PATIENCE
        while True:
            with self.engine.lookup([b"a key that is nowhere"]) as hit:
                if (not hit.unavailable) is wanted or time.monotonic() > deadline:
                    return list(hit.unavailable)
            time.sleep(0.02)

    def figures(self) -> dict[str, Any]:
        """Return the figures of the outcome, once everything has settled."""
        self.engine.drain()
        self.tell_progress()
        statistics = self.engine.statistics()
        pipelines, tiers = statistics.engine.pipelines, statistics.engine.tiers
        *_, to_last = pipelines.values()
        places = [self.device, *self.tiers]
        figures: dict[str, Any] = {
            "block_bytes": self.model.block_bytes,
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
        if self.handler is not None:
            shared = self.engine.call(self.handler.statistics)
            pages = shared.pages
            figures["pages"] = {"registered": pages.registered, "regions_of_others": shared.regions - pages.regions}
            figures["at_rest"] |= {
                "neither_free_nor_registered": pages.pages - pages.free - pages.registered,
                "pinned": shared.pinned,
            }
        return figures


def in_shared_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make a storage that a daemon can map."""
    memory = SharedMemory(math.prod(shape) * dtype.itemsize)
    return memory.tensor(shape, dtype)


# --- requests -----------------------------------------------------------------------------------------------------


def main(job: Job) -> None:
    """Do as each line of the standard input requests, and reply.

    ``answer`` the next question. ``cancel`` half of the stores of a prompt. ``reach`` the daemon: wait until it
    answers. ``miss`` it: wait until it is named as unavailable. ``finish``: report the figures, and the same answers
    without any cache.
    """
    # One thread computes, another core copies. Two computing threads wait for each other at every step, which takes
    # ten times as long on a busy machine.
    torch.set_num_threads(1)
    document = Path(job.document).read_bytes()
    prompts = [document + question.encode() for question in job.questions]
    tokens = max(map(len, prompts)) + job.answer_tokens
    blocks = -(-tokens // ModelConfig().block_size)
    config = ModelConfig(num_blocks=2 * blocks + 8, max_context=tokens)
    answered = 0
    with Server(job, config) as server:
        tell(event="ready", blocks=len(document) // config.block_size)
        for line in sys.stdin:
            match request := line.rstrip():
                case "answer":
                    answer = server.answer(prompts[answered], job.questions[answered])
                    answered += 1
                    tell(event=request, **attrs.asdict(answer))
                case "cancel":
                    tell(event=request, **cancel_half(server, prompts[0]))
                case "reach" | "miss":
                    tell(event=request, unavailable=server.wait_available(request == "reach"))
                case _:
                    break
        else:  # the demo is gone
            return
        figures = server.figures()
    if job.role != "a":
        figures["uncached"] = [attrs.asdict(answer) for answer in without_cache(job, config, prompts[:answered])]
    tell(event="finish", **figures)


def without_cache(job: Job, config: ModelConfig, prompts: Sequence[bytes]) -> list[Answer]:
    """Answer the questions of these prompts with a model without any cache."""
    model = ReferenceEngine(config)
    answers = []
    for prompt, question in zip(prompts, job.questions, strict=False):
        start = time.perf_counter()
        sequence = model.add_sequence(prompt)
        for step in model.prefill(sequence, chunk_tokens=CHUNK_TOKENS):
            tell(event="uncached", computed=step.computed, total=step.total)
        tokens = model.generate(sequence, 1)
        first_token = time.perf_counter() - start
        tokens += model.generate(sequence, job.answer_tokens - 1)
        kv = model.kv_digest(sequence).hex()
        answers.append(Answer(question, tokens, first_token, 0, 0, 0, 0, 0.0, kv))
        model.free(sequence)
    return answers


def cancel_half(server: Server, prompt: bytes) -> dict[str, Any]:
    """Store a prompt in small pieces and cancel every second one.

    They are cancelled in turn at four points of the path.
    """
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
        """Hook and future of each store, by its first key."""

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
    """Write an event as a JSON line to the standard output.

    The parent process reads it.
    """
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(Job(**json.loads(sys.argv[1])))
