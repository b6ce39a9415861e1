"""A real vLLM on a CPU, each engine in a process of its own, with blocks that come and go through a page store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.ties import equal_but_for_ties

from .instances import (
    Server,
    any_tiers,
    external_hits,
    generate,
    maru,
    nothing_is_left,
    prompt,
    run,
    spec,
    store_of,
    when_told,
)


def test_a_second_process_hits_and_gives_the_same_tokens(model: str, server: Server) -> None:
    first, second = prompt(1024, 40, 1), prompt(1024, 40, 2)
    others = [prompt(512, 200, 3), prompt(130, 500, 4), prompt(0, 300, 5)]  # partial prefixes, and none
    asked = [generate([second], logprobs=0), generate(others)]
    reference = run({"model": model, "steps": asked})
    producer = run({"model": model, "transfer": maru(server), "steps": [generate([first])]})
    assert producer["counts"]["worker"]["chunks stored"] == 8
    consumer = run({"model": model, "transfer": maru(server), "steps": asked})
    (ours, ours_of_others), (theirs, theirs_of_others) = consumer["answers"], reference["answers"]
    assert ours["tokens"] == theirs["tokens"]
    for mine, wanted in zip(ours["logprobs"][0], theirs["logprobs"][0], strict=True):
        assert mine == pytest.approx(wanted, abs=1e-4)
    assert ours["cached"] == [1024]  # every full chunk of what is shared
    assert ours_of_others["tokens"] == theirs_of_others["tokens"]
    assert consumer["counts"]["worker"]["chunks loaded"] >= 8
    assert external_hits(consumer) >= 1024 and external_hits(producer) == 0
    assert (
        consumer["sources"]["host"] == external_hits(consumer) == consumer["counts"]["scheduler"]["tokens hit in maru"]
    )
    nothing_is_left(producer)
    nothing_is_left(consumer)


def test_in_bfloat16_tokens_are_equal_but_for_ties(model: str, server: Server) -> None:
    options = {"dtype": "bfloat16", "logprobs_mode": "raw_logits"}
    steps = []
    for number in range(4):  # each of them is loaded, and none is what vLLM has itself
        steps += [generate([prompt(1024, 40, number)], logprobs=5, max_tokens=48), {"do": "settle"}, {"do": "reset"}]
    reference = run({"model": model, "options": options, "steps": steps})
    storing = {"model": model, "options": options, "transfer": maru(server)}
    run({**storing, "steps": [generate([prompt(1024, 40, 99)])]})
    consumer = run({**storing, "steps": steps})
    for ours, theirs in zip(consumer["answers"][::3], reference["answers"][::3], strict=True):
        assert (ours["cached"], theirs["cached"]) == ([1024], [0])
        assert equal_but_for_ties(
            ours["tokens"][0], theirs["tokens"][0], ours["candidates"][0], theirs["candidates"][0]
        )
    nothing_is_left(consumer)


@pytest.mark.parametrize("store", [maru, lambda server: spec(maru=store_of(server))], ids=["connector", "spec"])
def test_a_cache_salt_shares_with_no_other_one(
    model: str, server: Server, store: Callable[[Server], dict[str, Any]]
) -> None:
    def salted(salt: str) -> dict[str, Any]:
        return generate([prompt(1024, 40, 2)], more={"cache_salt": salt} if salt else {})

    reference = run({"model": model, "steps": [salted("")]})
    run({"model": model, "transfer": store(server), "steps": [salted("one")]})
    consumer = run({"model": model, "transfer": store(server), "steps": [salted("other"), salted(""), salted("one")]})
    assert [one["cached"] for one in consumer["answers"]] == [[0], [0], [1024]]
    assert [one["tokens"] for one in consumer["answers"]] == [reference["answers"][0]["tokens"]] * 3


def test_preempted_requests_give_the_same_tokens(model: str, server: Server) -> None:
    """So few blocks that requests are preempted again and again, while prompts come in parts of 128 tokens."""
    narrow = {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 128, "max_model_len": 512, "max_num_seqs": 8}
    prompts = [prompt(160, 40 + 8 * number, number) for number in range(6)]
    steps = [generate(prompts, max_tokens=120), generate(prompts, max_tokens=120)]
    reference = run({"model": model, "options": narrow, "steps": steps})
    offloaded = run({"model": model, "options": narrow, "transfer": maru(server), "steps": steps})
    assert offloaded["preemptions"] > 0
    assert [answer["tokens"] for answer in offloaded["answers"]] == [
        answer["tokens"] for answer in reference["answers"]
    ]
    assert offloaded["counts"]["worker"]["chunks loaded"] > 0
    nothing_is_left(offloaded)


def test_aborted_requests_leave_the_others_alone_and_nothing_behind(model: str, server: Server) -> None:
    prompts = [prompt(1024, 64, number) for number in range(8)]
    few = {"max_num_seqs": 2, "max_num_batched_tokens": 256}
    reference = run({"model": model, "options": few, "steps": [generate([prompts[1]], max_tokens=24)]})
    steps = [
        generate([prompts[0]]),
        {"do": "settle"},
        {"do": "reset"},
        {"do": "abort", "prompts": prompts, "after": 4, "abort": [0, 2, 3, 7], "max_tokens": 24},
        {"do": "reset"},
        {"do": "abort", "prompts": prompts, "after": 1, "abort": [0, 2, 3, 7], "max_tokens": 24},
        generate([prompts[1]], max_tokens=24),
    ]
    offloaded = run({"model": model, "options": few, "transfer": maru(server), "steps": steps})
    for at in (3, 5):
        assert set(offloaded["answers"][at]) == {"1", "4", "5", "6"}
        assert [offloaded["answers"][at]["1"]] == reference["answers"][0]["tokens"]
    assert offloaded["answers"][6]["tokens"] == reference["answers"][0]["tokens"]
    nothing_is_left(offloaded)


def test_what_a_killed_server_has_indexed_is_loaded_and_it_is_used_again_when_it_is_back(
    model: str, server: Server, tmp_path: Path
) -> None:
    # The last one shares nothing with the others: it can be loaded only if it was stored in the server that came back.
    prompts = [prompt(1024, 40, 0), prompt(1024, 40, 1), prompt(0, 1064, 2)]
    asked = [generate([one]) for one in prompts]
    reference = run({"model": model, "steps": asked})
    tell, wait = [str(tmp_path / f"told-{at}") for at in range(2)], [str(tmp_path / f"done-{at}") for at in range(2)]
    steps = [
        asked[0],
        {"do": "settle"},
        {"do": "reset"},
        {"do": "wait", "tell": tell[0], "wait": wait[0]},
        asked[1],
        {"do": "reset"},
        {"do": "wait", "tell": tell[1], "wait": wait[1]},
        {"do": "generate until cached", "prompts": [prompts[2]], "cached": [1024]},
    ]

    def of_the_world() -> None:
        for at, act in enumerate((server.kill, server.start)):
            when_told(Path(tell[at]), Path(wait[at]), act)

    world = threading.Thread(target=of_the_world)
    world.start()
    answer = run({"model": model, "transfer": maru(server, lookup_timeout=5.0), "steps": steps})
    world.join()
    got = [answer["answers"][at]["tokens"] for at in (0, 4, 7)]
    assert got == [one["tokens"] for one in reference["answers"]]
    assert [answer["answers"][at]["cached"] for at in (4, 7)] == [[1024], [1024]]  # the first: pages stay for a lease
    consumer = run({"model": model, "transfer": maru(server), "steps": [asked[2]]})
    assert (consumer["answers"][0]["cached"], external_hits(consumer)) == ([1024], 1024)


def test_a_server_that_was_never_there_is_named_and_costs_no_answer(model: str, tmp_path: Path) -> None:
    absent = {
        "kv_connector": "MaruKVConnector",
        "kv_connector_module_path": "offload.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"maru_server_url": f"ipc://{tmp_path}/none.sock"},
    }
    answer = run({"model": model, "transfer": absent, "steps": [generate([prompt(600, 0, 1)])]})
    assert answer["answers"][0]["reasons"] == ["length"]
    assert answer["counts"]["scheduler"]["lookups without maru, which is unavailable"] == 1
    assert answer["counts"]["worker"] == {"chunks offered": 2, "chunks not stored": 2}
    assert "No server answers at ipc://" in answer["log"]  # the address alone is in the arguments, which vLLM prints
    nothing_is_left(answer)


def test_a_corrupted_page_is_computed_and_never_used(model: str, server: Server) -> None:
    first, second = prompt(1024, 40, 1), prompt(1024, 40, 2)
    reference = run({"model": model, "steps": [generate([second])]})
    run({"model": model, "transfer": maru(server), "steps": [generate([first])]})
    server.corrupt()
    steps = [generate([second]), {"do": "settle"}, {"do": "reset"}, generate([second])]
    answer = run({"model": model, "transfer": maru(server), "steps": steps})
    assert answer["answers"][0]["tokens"] == reference["answers"][0]["tokens"]
    assert answer["counts"]["worker"]["chunks not loaded, and computed instead"] > 0
    assert answer["answers"][3]["tokens"] == reference["answers"][0]["tokens"]
    assert answer["answers"][3]["cached"] == [1024]  # it was stored anew
    nothing_is_left(answer)


def test_any_tiers_in_one_process_and_a_reset_that_is_honest(model: str, tmp_path: Path) -> None:
    tiers = any_tiers(
        host={"type": "memory", "capacity_bytes": "2 MiB"},
        disk={"type": "file", "directory": str(tmp_path / "kv"), "capacity_bytes": "64 MiB"},
    )
    first, second = prompt(1024, 40, 1), prompt(1024, 40, 2)
    reference = run({"model": model, "steps": [generate([second])]})
    steps = [
        generate([first]),
        {"do": "settle"},
        {"do": "reset"},
        generate([second]),
        {"do": "reset", "connector": True},
        generate([second]),
    ]
    answer = run({"model": model, "transfer": tiers, "steps": steps})
    assert [answer["answers"][at]["tokens"] for at in (3, 5)] == [reference["answers"][0]["tokens"]] * 2
    assert [answer["answers"][at]["cached"] for at in (3, 5)] == [[1024], [0]]
    hits = [answer["counts"]["scheduler"].get(f"tokens hit in {tier}", 0) for tier in ("host", "disk")]
    assert [answer["sources"].get(source, 0) for source in ("host", "disk")] == hits
    assert sum(hits) == 1024 and hits[0]
    nothing_is_left(answer)


def test_after_sleep_the_cache_comes_from_the_tiers(model: str, server: Server) -> None:
    one = generate([prompt(1024, 40, 1)])
    reference = run({"model": model, "steps": [one]})
    steps = [one, {"do": "settle"}, one, {"do": "sleep"}, one]
    answer = run({"model": model, "transfer": maru(server), "steps": steps})
    assert [answer["answers"][at]["tokens"] for at in (0, 2, 4)] == [reference["answers"][0]["tokens"]] * 3
    assert (answer["answers"][3], answer["answers"][4]["cached"]) == (True, [1024])
    nothing_is_left(answer)


@pytest.mark.parametrize("ranks", [1, 2])
def test_workers_in_other_processes_hit_in_a_second_instance(model: str, server: Server, ranks: int) -> None:
    """The scheduler looks up by a client of its own, and a chunk counts only if each rank has its part of it."""
    parallel = {"distributed_executor_backend": "mp", "tensor_parallel_size": ranks}
    first, second = prompt(1024, 40, 1), prompt(1024, 40, 2)
    bound = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))}  # else it wants a NUMA node for each
    reference = run({"model": model, "options": parallel, "steps": [generate([second])]}, **bound)
    storing = {"model": model, "options": parallel, "transfer": maru(server), "steps": [generate([first])]}
    producer = run(storing, **bound)
    consumer = run({**storing, "steps": [generate([second])]}, **bound)
    assert consumer["answers"][0]["tokens"] == reference["answers"][0]["tokens"]
    assert (external_hits(producer), external_hits(consumer)) == (0, 1024)


def test_what_one_of_two_ranks_cannot_load_is_computed_by_both(model: str, server: Server) -> None:
    parallel = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
    bound = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}  # as above
    first, second = prompt(1024, 40, 1), prompt(1024, 40, 2)
    running = {"model": model, "options": parallel, "transfer": maru(server)}
    reference = run({"model": model, "options": parallel, "steps": [generate([second])]}, **bound)
    run({**running, "steps": [generate([first])]}, **bound)
    assert len(server.regions()) == 2
    server.corrupt(instances=1)
    until_cached = {"do": "generate until cached", "prompts": [second], "cached": [1024]}  # it is stored anew meanwhile
    answer = run({**running, "steps": [until_cached]}, **bound)["answers"][0]
    assert answer["cached"] == [1024] and len(answer["rounds"]) > 1
    assert answer["rounds"] == [reference["answers"][0]["tokens"]] * len(answer["rounds"])
