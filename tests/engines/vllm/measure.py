"""Time to first token in a second process beside a perfect load, and what a connector costs without a hit.

``nox -s vllm -- measure`` prints a table; with ``--json``, one document; with ``--subjects``, of these alone. All engines are
alive at once, each in a process of its own, and are asked in turn, so that whatever else the machine does meets all of them.
What is shared was computed and stored by another process; before each load an engine forgets what it has itself. A perfect load
is a memcpy of that much KV, into memory that was not used before, and a hit in vLLM's own prefix cache: in the same engine,
while vLLM has no connector, right behind the load; and in an engine that never had one. Two processes that do the same differ
by more than a connector costs.

So without a hit an engine is compared with itself, too: prompts in pairs, one with the connector and one while vLLM has none,
each of them first in turn. An engine that never had one shows what is left of noise.

``OffloadSpec, from its rows`` is vLLM's own connector over host memory that has all of it: what no spec can be faster than.

All subjects together take 20 GB of memory and, on two idle cores, some ten minutes; three engines take 8 GB.

Through LMCache, whose server has our adapter behind it, twice: from what that server has in its own memory, and with that
memory empty, so that all comes through the adapter from the page store.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from lmcache_chain import MPServer

SIZES = (512, 2048, 4096)
OWN = 20
"""Tokens of a prompt behind what it shares: less than a block, since ExampleConnector finds prompts of as many blocks only."""
TOKEN_BYTES = 16 << 10
VOCABULARY = 24_000
SUBJECTS = (
    "ExampleConnector", "LMCache", "LMCache, adapter", "MaruKVConnector", "without checksums", "OffloadSpec",
    "OffloadSpec, without checksums", "OffloadSpec, from its rows", "daemon", "OffloadSpec, daemon",
)  # fmt: skip
SHARED_ENGINES = {"LMCache, adapter": "LMCache"}
"""Subjects that are another one's engine, asked in another way."""
PRODUCERS = {
    "without checksums": "MaruKVConnector",
    "OffloadSpec, without checksums": "OffloadSpec",
    "OffloadSpec, from its rows": "OffloadSpec",
}
"""Subjects that load what another one's producer has stored, or that need none, since they have computed it themselves."""
WITHOUT_HITS = ("plain", "MaruKVConnector", "OffloadSpec")
COMPUTED = 3
"""Times that a prompt is computed: it takes seconds."""
ROOM = 32_768
"""Tokens that each instance has room for: all that it stores in a run."""
ANSWER = "@@ "
SOON = 60.0


def make_checkpoint(path: str) -> None:
    """A Llama of 56 M parameters with random weights, and 16 KiB of KV for each token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        initializer_range=0.05,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(path)


# --- an engine's process ------------------------------------------------------------------------------------------------


def serve() -> None:
    """An engine: each line is a task, and is answered by a line."""
    from program import halves, settle  # sets what vLLM reads of the environment
    from vllm import LLM, SamplingParams

    said = json.loads(sys.stdin.readline())
    if said["transfer"] is not None and "LMCache" in said["transfer"]["kv_connector"]:
        from lmcache_chain import let_vllm_look_at_every_module

        let_vllm_look_at_every_module()
    engine = LLM(
        model=said["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=32,
        max_model_len=8192,
        max_num_batched_tokens=8192,
        enforce_eager=True,
        seed=0,
        kv_transfer_config=said["transfer"],
    )
    print(ANSWER + "{}", flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        if task.get("reset"):
            forget(engine)
            for half in halves(engine):
                # Host memory forgets, too, but finds again what it has stored.
                if hasattr(half, "arena") and not task.get("keep_rows"):
                    half.table.reset()
        parameters = SamplingParams(
            temperature=0.0, max_tokens=task.get("max_tokens", 1), ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": tokens} for tokens in task["prompts"]]
        with taken_out(engine) if task.get("taken_out") else nullcontext():
            began, used = time.perf_counter(), time.process_time()
            outputs = engine.generate(prompts, parameters, use_tqdm=False)
            seconds, used = time.perf_counter() - began, time.process_time() - used
        if task.get("settle"):
            settle(engine, {})
        answer = {"seconds": seconds, "processor": used, "cached": outputs[0].num_cached_tokens}
        print(ANSWER + json.dumps(answer), flush=True)


@contextmanager
def taken_out(engine: Any) -> Iterator[None]:
    """vLLM has no connector meanwhile. Nothing of it may be under way."""
    from program import core_of
    from vllm.distributed.kv_transfer import kv_transfer_state

    core, name = core_of(engine), "_KV_CONNECTOR_AGENT"
    scheduler = core.scheduler
    core.step_fn()  # tells the connector which requests are over, before it hears nothing for a while
    beside_scheduler, in_worker = scheduler.connector, getattr(kv_transfer_state, name)
    scheduler.connector = None
    setattr(kv_transfer_state, name, None)
    try:
        yield
        core.step_fn()
    finally:
        scheduler.connector = beside_scheduler
        setattr(kv_transfer_state, name, in_worker)


def forget(engine: Any) -> None:
    """Have vLLM forget what it has itself.

    It refuses while blocks are held. LMCache's connector holds those of a finished request until a later step has been told
    that they are stored; so steps are made, by requests too short to be stored.
    """
    from program import core_of
    from vllm import SamplingParams

    deadline = time.monotonic() + SOON
    while not engine.reset_prefix_cache():
        assert time.monotonic() < deadline, "what is measured would be local hits"
        engine.generate([{"prompt_token_ids": [3, 4]}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        core_of(engine).step_fn()  # tells the connector that this request is over


class Engine:
    """An engine in a process of its own."""

    def __init__(self, model: str, transfer: dict[str, Any] | None, log: Path) -> None:
        here = Path(__file__)
        environ = {**os.environ, "PYTHONPATH": f"{here.parents[3]}{os.pathsep}{here.parent}", "PYTHONHASHSEED": "0"}
        environ["LMCACHE_TRACK_USAGE"] = "false"
        self._log = log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, str(here), "--engine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environ,
        )
        self.send({"model": model, "transfer": transfer})

    def send(self, task: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                answer: dict[str, Any] = json.loads(line[len(ANSWER) :])
                return answer
        raise RuntimeError(f"an engine has ended: {Path(self._log.name).read_text()[-4000:]}")

    def ask(self, *prompts: list[int], **more: Any) -> dict[str, Any]:
        self.send({"prompts": prompts, **more})
        return self.answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(120)
        self._log.close()


# --- what is measured ---------------------------------------------------------------------------------------------------


def transfers(server: str, daemon: str, directory: Path, tokens: int) -> dict[str, dict[str, Any]]:
    """How each subject is started, with room for so many tokens."""
    pool = (tokens * TOKEN_BYTES * 5 // 4) >> 20
    ours = {"kv_connector_module_path": "offload.engines.vllm", "kv_role": "kv_both"}
    maru = {"maru_server_url": server, "maru_pool_size": f"{pool}M"}
    tiers = {"maru": {"type": "maru", "server_url": server, "pool_size": f"{pool}M"}}

    def spec(offload: dict[str, Any]) -> dict[str, Any]:
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "OffloadSpec",
                "spec_module_path": "offload.engines.vllm",
                "blocks_per_chunk": 8,
                "cpu_bytes_to_use": 8192 * TOKEN_BYTES,
                "offload": offload,
            },
        }

    return {
        "ExampleConnector": {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(directory / "example")},
        },
        "MaruKVConnector": {**ours, "kv_connector": "MaruKVConnector", "kv_connector_extra_config": maru},
        "without checksums": {
            **ours,
            "kv_connector": "MaruKVConnector",
            "kv_connector_extra_config": {**maru, "checksums": False},
        },
        "OffloadSpec": spec({"engine": {"tiers": tiers}}),
        "OffloadSpec, without checksums": spec({"engine": {"tiers": {"maru": {**tiers["maru"], "checksums": False}}}}),
        "OffloadSpec, from its rows": spec(
            {"engine": {"tiers": {"host": {"type": "memory", "capacity_bytes": "64 MiB"}}}}
        ),
        "daemon": {
            **ours,
            "kv_connector": "OffloadConnector",
            "kv_connector_extra_config": {"daemon_url": daemon},
        },
        "OffloadSpec, daemon": spec({"daemon_url": daemon}),
    }


def tokens(n: int, *seed: object) -> list[int]:
    rng = random.Random(repr(seed))
    return [rng.randrange(3, VOCABULARY) for _ in range(n)]


def memcpy(n: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds to copy that much KV."""
    source, destination = (np.full(n * TOKEN_BYTES, fill, np.uint8) for fill in (1, 2))
    began = clock()
    np.copyto(destination, source)
    return clock() - began


def _nothing() -> None:
    """Nothing is to be done."""


def first_tokens(
    plain: Engine, subjects: dict[str, Engine], rounds: int, before: dict[str, Callable[[], None]]
) -> dict[int, dict[str, list[float]]]:
    """Times to first token: of each shared length and each subject, one for each round. ``before``: done before a subject's."""
    times: dict[int, dict[str, list[float]]] = {size: defaultdict(list) for size in SIZES}
    for size in SIZES:
        for at in range(COMPUTED):
            computed = plain.ask([*tokens(size, "shared", size), *tokens(OWN, "computed", at, size)], reset=True)
            assert computed["cached"] == 0
            times[size]["computed"].append(computed["seconds"])
        for at in range(rounds):
            prompt = [*tokens(size, "shared", size), *tokens(OWN, "own", at, size)]
            hit = plain.ask(prompt)
            assert hit["cached"] == size
            times[size]["perfect load"].append(hit["seconds"] + memcpy(size))
            times[size]["perfect load, processor"].append(hit["processor"] + memcpy(size, time.process_time))
            for name in random.Random(at).sample(sorted(subjects), len(subjects)):
                before.get(name, _nothing)()
                if name == "OffloadSpec, from its rows":
                    subjects[name].ask(prompt, reset=True, keep_rows=True)
                    got = subjects[name].ask(prompt, reset=True, keep_rows=True, settle=True)
                else:
                    got = subjects[name].ask(prompt, reset=True, settle=True)
                assert got["cached"] == size, f"{name} has loaded {got['cached']} of {size} tokens"
                times[size][name].append(got["seconds"])
                times[size][f"{name}, processor"].append(got["processor"])
                again = [*tokens(size, "shared", size), *tokens(OWN, "again", at, size)]
                own = subjects[name].ask(again, taken_out=True)
                assert own["cached"] == size
                times[size][f"{name}, perfect load"].append(own["seconds"] + memcpy(size))
    return times


def without_hits(engines: dict[str, Engine], rounds: int) -> dict[str, dict[str, list[float]]]:
    """How much longer prompts that nobody has take with a connector than without: ratios, one for each round.

    To the first token of 1,024, and for 128 more of four requests, each of which becomes a whole chunk meanwhile.
    """
    ratios: dict[str, dict[str, list[float]]] = {"first token": defaultdict(list), "decode": defaultdict(list)}

    def seconds(name: str, what: str, at: int, taken_out: bool) -> float:
        def ask(*prompts: list[int], **more: Any) -> float:
            answer = engines[name].ask(*prompts, reset=True, settle=True, taken_out=taken_out, **more)
            assert answer["cached"] == 0
            return float(answer["seconds"])

        if what == "first token":
            return ask(tokens(1024, what, at, taken_out))
        four = [tokens(192, what, at, taken_out, one) for one in range(4)]
        return ask(*four, max_tokens=129) - ask(*four)

    for at in range(rounds):
        for name in random.Random(at).sample(sorted(engines), len(engines)):
            for what, found in ratios.items():
                took = {taken_out: seconds(name, what, at, taken_out) for taken_out in (at % 2 == 0, at % 2 == 1)}
                found[name].append(took[False] / took[True])
    return ratios


@contextmanager
def page_store(directory: Path) -> Iterator[str]:
    options = ["--pool-path", str(directory), "--capacity-bytes", "6GiB", "--zmq-socket"]
    command = [sys.executable, "-c", "from maru.server_cli import main; main()", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and "ready" in process.stdout.readline()
        try:
            yield f"ipc://{directory}/maru.sock"
        finally:
            process.kill()


@contextmanager
def daemon(directory: Path) -> Iterator[str]:
    """A daemon with host memory."""
    directory.mkdir()
    settings = directory / "daemon.toml"
    settings.write_text(f'[engine.tiers.host]\ntype = "memory"\ncapacity_bytes = {ROOM * TOKEN_BYTES * 5 // 4}\n')
    command = [sys.executable, "-m", "offload", "serve", "--runtime-dir", str(directory / "run"), str(settings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as process:
        assert process.stdout is not None and "ready" in process.stdout.readline()
        try:
            yield f"ipc://{directory}/run/daemon.sock"
        finally:
            process.kill()


def measure(rounds: int, pairs: int, chosen: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="measure", dir="/dev/shm") as scratch:
        path = Path(scratch)
        model = str(path / "model")
        make_checkpoint(model)
        with page_store(path / "pool") as server, daemon(path / "d") as daemon_url, ExitStack() as ended:
            middle = MPServer(
                server, path / "mp.log", chunk_tokens=256, l1_gb=0.75, pool_gb=ROOM * TOKEN_BYTES / (1 << 30)
            )
            ended.callback(middle.close)
            ways = {
                **transfers(server, daemon_url, path, ROOM),
                "LMCache": middle.transfer,
                "LMCache, adapter": middle.transfer,
            }
            own = list(dict.fromkeys(SHARED_ENGINES.get(name, name) for name in chosen))
            for name in dict.fromkeys(PRODUCERS.get(name, name) for name in own):
                producer = Engine(model, ways[name], path / "producer.log")
                producer.answer()
                for size in SIZES:
                    producer.ask([*tokens(size, "shared", size), 3], settle=True)
                producer.close()
            engines = {"plain": Engine(model, None, path / "plain.log")}
            engines |= {name: Engine(model, ways[name], path / f"{name}.log") for name in own}
            for engine in engines.values():
                engine.answer()
                engine.ask(tokens(300, "warm"), max_tokens=4)
            subjects = {name: engines[SHARED_ENGINES.get(name, name)] for name in chosen}
            loads = first_tokens(engines["plain"], subjects, rounds, {"LMCache, adapter": middle.forget})
            alone = without_hits({name: engines[name] for name in WITHOUT_HITS if name in engines}, pairs)
            for engine in engines.values():
                engine.close()
    return {"first token": loads, "without hits": alone}


def ratios(values: list[float], limits: list[float]) -> str:
    """The median beside the median of the limit, and the middle half."""
    limit = statistics.median(limits)
    low, middle, high = statistics.quantiles([one / limit for one in values], n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def processor(times: dict[str, list[float]], name: str, limit: str) -> str:
    """The processor time of the subject's process beside that of the limit."""
    spent = times.get(f"{name}, processor")
    if not spent:
        return ""
    return f"; processor time {statistics.median(spent) / statistics.median(times[f'{limit}, processor']):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=15, help="loads of each length, at least 2")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of prompts without a hit, at least 2")
    parser.add_argument(
        "--subjects", default=";".join(SUBJECTS), help="with semicolons between: MaruKVConnector;OffloadSpec"
    )
    options = parser.parse_args()
    if options.engine:
        serve()
        return
    chosen = options.subjects.split(";")
    if unknown := sorted(set(chosen) - set(SUBJECTS)):
        parser.error(f"--subjects: there is no {', '.join(unknown)}; there are {'; '.join(SUBJECTS)}")
    found = measure(options.rounds, options.pairs, chosen)
    if options.json:
        print(json.dumps(found))
        return
    print("time to first token, as a multiple of a perfect load in the same engine, and in one without a connector:")
    print("median (middle half)")
    for size, times in found["first token"].items():
        perfect = times["perfect load"]
        print(f"{size} shared tokens, perfect load {1000 * statistics.median(perfect):.0f} ms")
        print(f"  computed: {ratios(times['computed'], perfect)}")
        for name in chosen:
            own = ratios(times[name], times[f"{name}, perfect load"])
            print(f"  {name}: {own}, {ratios(times[name], perfect)}{processor(times, name, 'perfect load')}")
    for what, pairs in found["without hits"].items():
        print(
            f"without a hit, {what}: as a multiple of the same engine while it has no connector, median of pairs (middle half)"
        )
        for name in WITHOUT_HITS:
            if name in pairs:
                low, middle, high = statistics.quantiles(pairs[name], n=4)
                print(f"  {name}: {middle:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
