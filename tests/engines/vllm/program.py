"""One vLLM engine in a process of its own: it reads what to do as JSON, does it, and writes what came of it as JSON.

Run by the tests beside it, with the interpreter of an environment that has vLLM. Its last line is the answer.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_DO_NOT_TRACK", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def make_checkpoint(path: str, *, hybrid: bool = False) -> None:
    """A small Llama with random weights: enough for outputs that depend on every token, which dummy weights do not give.

    ``hybrid``: a Gemma 3, every other layer of which sees 128 tokens, so that there are two groups of KV caches.
    """
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    torch.manual_seed(7)
    size: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if hybrid:
        kinds = ["sliding_attention", "full_attention"] * 2
        text = Gemma3TextConfig(**size, num_hidden_layers=4, layer_types=kinds, sliding_window=128, head_dim=32)
        text.tie_word_embeddings = False  # else a token is followed by itself, whatever comes before it
        Gemma3ForCausalLM(text).to(torch.float32).save_pretrained(path)
    else:
        LlamaForCausalLM(LlamaConfig(**size, num_hidden_layers=2)).to(torch.float32).save_pretrained(path)
    # For servers, which answer in text.
    words = Tokenizer(WordLevel({f"t{at}": at for at in range(512)}, unk_token="t0"))
    words.pre_tokenizer = WhitespaceSplit()
    names = {"unk_token": "t0", "bos_token": "t1", "eos_token": "t2"}
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(path)


NAMES = {"SchedulerHalf": "scheduler", "WorkerHalf": "worker", "HostMemory": "host memory"}
"""What a test calls them."""


def main() -> None:
    said = json.loads(sys.stdin.read())
    if "checkpoint" in said:
        if not (Path(said["checkpoint"]) / "config.json").exists():
            make_checkpoint(said["checkpoint"], hybrid=said.get("hybrid", False))
        print(json.dumps({"made": said["checkpoint"]}))
        return
    print(json.dumps(run(said)), flush=True)


def run(said: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM

    transfer = said.get("transfer")
    if transfer is not None and "LMCache" in transfer["kv_connector"]:
        from lmcache_chain import let_vllm_look_at_every_module

        let_vllm_look_at_every_module()
    options = {
        "model": said["model"],
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "block_size": 32,
        "max_model_len": 4096,
        "max_num_batched_tokens": 4096,
        "enforce_eager": True,
        "disable_log_stats": False,
        "seed": 0,
        **said.get("options", {}),
    }
    if transfer is not None:
        options["kv_transfer_config"] = transfer
    engine = LLM(**options)
    answers: list[Any] = []
    for step in said["steps"]:
        answers.append(STEPS[step["do"]](engine, step))
    counts: dict[str, Any] = {"scheduler": {}, "worker": {}}
    settle(engine, {})
    for half in halves(engine):
        if hasattr(half, "engine"):
            statistics = half.engine.statistics()
            counts["unreleased_hits"] = statistics.unreleased_hits
            counts["in_flight_blocks"] = statistics.in_flight_blocks
        counts[NAMES[type(half).__name__]] = dict(half.counts.snapshot())
    metrics = {
        metric.name: metric.value
        for metric in engine.get_metrics()
        if "prefix_cache" in metric.name and hasattr(metric, "value")
    }
    sources = {
        metric.labels["source"]: metric.value
        for metric in engine.get_metrics()
        if metric.name == "vllm:prompt_tokens_cached_by_source" and metric.value
    }
    preemptions = sum(metric.value for metric in engine.get_metrics() if metric.name == "vllm:num_preemptions")
    engine.llm_engine.engine_core.shutdown()
    return {"answers": answers, "counts": counts, "metrics": metrics, "sources": sources, "preemptions": preemptions}


def core_of(engine: Any) -> Any:
    return engine.llm_engine.engine_core.engine_core


def halves(engine: Any) -> list[Any]:
    """What of ours is in this process: the halves of a connector, or the host memory of a spec."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    connector = core_of(engine).scheduler.connector
    if connector is None:
        return []
    if hasattr(connector, "connector_scheduler"):  # vLLM's own OffloadingConnector
        return [connector.connector_scheduler.manager.memory]
    worker = getattr(get_kv_transfer_group(), "_worker", None) if has_kv_transfer_group() else None
    return [half for half in (getattr(connector, "_scheduler", None), worker) if half is not None]


def parameters(step: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=step.get("max_tokens", 16),
        ignore_eos=True,
        detokenize=False,
        logprobs=step.get("logprobs"),
    )


def generate(engine: Any, step: dict[str, Any]) -> Any:
    """Generate from all prompts at once."""
    began = time.perf_counter()
    prompts = [{"prompt_token_ids": tokens, **step.get("more", {})} for tokens in step["prompts"]]
    outputs = engine.generate(prompts, parameters(step), use_tqdm=False)
    answer: dict[str, Any] = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "reasons": [output.outputs[0].finish_reason for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "seconds": time.perf_counter() - began,
    }
    if step.get("logprobs") is not None:
        answer["logprobs"] = [
            [
                row[token].logprob
                for token, row in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
            ]
            for output in outputs
        ]
        answer["candidates"] = [
            [{token: one.logprob for token, one in row.items()} for row in output.outputs[0].logprobs]
            for output in outputs
        ]
    return answer


def generate_until_cached(engine: Any, step: dict[str, Any]) -> Any:
    """Generate and store the same again and again, until so much of it is loaded as the step says, or a while has passed."""
    deadline = time.monotonic() + 120
    rounds = []
    while True:
        answer = generate(engine, step)
        rounds.append(answer["tokens"])
        if answer["cached"] == step["cached"] or time.monotonic() > deadline:
            return {**answer, "rounds": rounds}
        settle(engine, {})
        engine.reset_prefix_cache()


def settle(engine: Any, step: dict[str, Any]) -> Any:
    """Wait until everything that was stored has arrived."""
    core = core_of(engine)
    connector = core.scheduler.connector
    while connector is not None and connector.has_pending_push_work():  # as a server's loop does
        core.step_fn()
    for half in halves(engine):
        if hasattr(half, "engine"):
            half.engine.drain(60)
        if hasattr(half, "planned"):
            half.planned(())  # takes in what has ended
    return None


def reset(engine: Any, step: dict[str, Any]) -> Any:
    """Forget what is cached locally; with ``connector``, what is cached outside as well. Whether it did."""
    return engine.reset_prefix_cache(reset_connector=bool(step.get("connector")))


def forget(engine: Any, step: dict[str, Any]) -> Any:
    """Find nothing in the tiers that was stored until now, while vLLM's own cache stays. Whether it did."""
    return core_of(engine).scheduler.connector.reset_cache()


def sleep(engine: Any, step: dict[str, Any]) -> Any:
    """What vLLM 0.33 does around sleep, where the platform refuses it: the cache loses what is in it."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    connector.unregister_kv_caches()
    for cache in core_of(engine).model_executor.driver_worker.worker.model_runner.kv_caches:
        cache.zero_()
    answer = engine.reset_prefix_cache()
    connector.restore_kv_caches()
    return answer


def wait_for_file(engine: Any, step: dict[str, Any]) -> Any:
    """Say so, and wait until the test has done something to the world."""
    Path(step["tell"]).touch()
    deadline = time.monotonic() + 120
    while not Path(step["wait"]).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return None


def abort(engine: Any, step: dict[str, Any]) -> Any:
    """Add requests, abort some of them after a number of steps, and let the others finish."""
    llm = engine.llm_engine
    for number, tokens in enumerate(step["prompts"]):
        llm.add_request(str(number), {"prompt_token_ids": tokens}, parameters(step))
    ended: dict[str, Any] = {}
    for turn in range(100_000):
        if turn == step["after"]:
            llm.abort_request([str(number) for number in step["abort"]], internal=False)
        if not llm.has_unfinished_requests():
            break
        for output in llm.step():
            if output.finished:
                ended[output.request_id] = list(output.outputs[0].token_ids)
    return ended


def run_until_killed(engine: Any, step: dict[str, Any]) -> Any:
    """Compute, store and load without end; how many rounds that were stands in a file."""
    rng = random.Random(step["seed"])
    for number in itertools.count():
        prompts = [step["shared"] + [rng.randrange(3, 512) for _ in range(256)] for _ in range(2)]
        engine.generate(
            [{"prompt_token_ids": tokens} for tokens in prompts], parameters({"max_tokens": 4}), use_tqdm=False
        )
        engine.reset_prefix_cache()
        Path(step["rounds"]).write_text(f"{number}")


STEPS = {
    "generate": generate,
    "generate until cached": generate_until_cached,
    "settle": settle,
    "reset": reset,
    "forget": forget,
    "sleep": sleep,
    "wait": wait_for_file,
    "abort": abort,
    "run until killed": run_until_killed,
}

if __name__ == "__main__":
    main()
