"""A real vLLM on a CPU with two groups of KV caches, one of which sees a window: a Gemma 3 with random weights."""

from __future__ import annotations

from typing import Any

import pytest

from .instances import Server, external_hits, generate, maru, nothing_is_left, prompt, run

HYBRID = {"disable_hybrid_kv_cache_manager": False}
"""Without a word of it vLLM decides by itself; said so, it refuses to start with a connector that cannot."""


def test_a_second_process_hits_in_both_groups(hybrid: str, server: Server) -> None:
    first, second = prompt(1024, 40, 1), prompt(1024, 40, 2)
    asked = [generate([second], logprobs=0), generate([prompt(512, 200, 3), prompt(130, 500, 4), prompt(0, 300, 5)])]
    reference = run({"model": hybrid, "options": HYBRID, "steps": asked})
    once = {"model": hybrid, "options": HYBRID, "transfer": maru(server)}
    producer = run({**once, "steps": [generate([first])]})
    consumer = run({**once, "steps": asked})
    assert [one["tokens"] for one in consumer["answers"]] == [one["tokens"] for one in reference["answers"]]
    for mine, wanted in zip(consumer["answers"][0]["logprobs"][0], reference["answers"][0]["logprobs"][0], strict=True):
        assert mine == pytest.approx(wanted, abs=1e-4)
    assert consumer["answers"][0]["cached"] == [1024]
    assert (producer["counts"]["worker"]["chunks stored"], external_hits(producer)) == (8, 0)
    assert external_hits(consumer) >= 1024
    nothing_is_left(producer)
    nothing_is_left(consumer)


def test_chunks_that_the_window_has_passed_while_they_were_computed_are_used(hybrid: str, server: Server) -> None:
    """Chunks of 256 tokens, a window of 128, and prompts that come in parts of 96: no chunk has all of its blocks at once."""
    narrow = {**HYBRID, "max_num_batched_tokens": 96, "max_num_seqs": 4}
    asked = [generate([prompt(shared, 40, shared)]) for shared in (1024, 512, 256)]
    reference = run({"model": hybrid, "options": HYBRID, "steps": asked})
    transfer = maru(server, maru_kv_chunk_tokens=256)
    once = [generate([prompt(1024, 40, 1)]), {"do": "settle"}, {"do": "reset"}]
    # A store is cancelled where the machine is slower with it than vLLM with its next steps: then it is offered once more.
    producer = run({"model": hybrid, "options": narrow, "transfer": transfer, "steps": once * 4})
    assert producer["counts"]["worker"]["chunks stored"] == 4
    apart = [one for step in asked for one in (step, {"do": "settle"}, {"do": "reset"})]
    consumer = run({"model": hybrid, "options": HYBRID, "transfer": transfer, "steps": apart})
    assert [consumer["answers"][at]["tokens"] for at in (0, 3, 6)] == [one["tokens"] for one in reference["answers"]]
    assert [consumer["answers"][at]["cached"] for at in (0, 3, 6)] == [[1024], [512], [256]]
    nothing_is_left(consumer)


def test_of_what_vllm_had_in_its_own_cache_only_what_it_has_whole_is_stored(hybrid: str, server: Server) -> None:
    """Tiers in which nothing is found, and a request that takes over the last window of a prefix from vLLM's own cache."""
    wanted = [prompt(1024, 200, 2), prompt(512, 40, 3)]
    reference = run({"model": hybrid, "options": HYBRID, "steps": [generate([one]) for one in wanted]})
    steps: list[dict[str, Any]] = [
        generate([prompt(1024, 0, 1)], max_tokens=1),
        {"do": "settle"},
        {"do": "forget"},
        generate([wanted[0]]),
        {"do": "settle"},
        {"do": "reset"},
        generate([wanted[1]]),
    ]
    offloaded = run({"model": hybrid, "options": HYBRID, "transfer": maru(server), "steps": steps})
    assert [offloaded["answers"][at]["tokens"] for at in (3, 6)] == [one["tokens"] for one in reference["answers"]]
    assert offloaded["answers"][3]["cached"][0] > 512 and offloaded["answers"][6]["cached"] == [0]


def test_a_corrupted_page_has_the_request_computed_from_its_start(hybrid: str, server: Server) -> None:
    first, second = prompt(1024, 40, 1), prompt(1024, 40, 2)
    reference = run({"model": hybrid, "options": HYBRID, "steps": [generate([second])]})
    once = {"model": hybrid, "options": HYBRID, "transfer": maru(server)}
    run({**once, "steps": [generate([first])]})
    server.corrupt()
    again = [generate([second]), {"do": "settle"}, {"do": "reset"}]
    # A store is cancelled where the machine is slower with it than vLLM with its next steps: then it is offered once more.
    answer = run({**once, "steps": again * 4})
    assert [one["tokens"] for one in answer["answers"][::3]] == [reference["answers"][0]["tokens"]] * 4
    assert answer["counts"]["worker"]["chunks not loaded, and computed instead"] > 0
    assert answer["answers"][9]["cached"] == [1024]  # it was stored anew
    nothing_is_left(answer)


def test_preempted_requests_give_the_same_tokens(hybrid: str, server: Server) -> None:
    narrow = {
        **HYBRID,
        "num_gpu_blocks_override": 40,
        "max_num_batched_tokens": 128,
        "max_model_len": 512,
        "max_num_seqs": 8,
    }
    asked = generate([prompt(160, 40 + 8 * number, number) for number in range(6)], max_tokens=120)
    reference = run({"model": hybrid, "options": narrow, "steps": [asked, asked]})
    offloaded = run({"model": hybrid, "options": narrow, "transfer": maru(server), "steps": [asked, asked]})
    assert offloaded["preemptions"] > 0
    assert [one["tokens"] for one in offloaded["answers"]] == [one["tokens"] for one in reference["answers"]]
    assert offloaded["counts"]["worker"]["chunks loaded"] > 0
    nothing_is_left(offloaded)


def test_aborted_requests_leave_the_others_alone_and_nothing_behind(hybrid: str, server: Server) -> None:
    prompts = [prompt(1024, 64, number) for number in range(8)]
    few = {**HYBRID, "max_num_seqs": 2, "max_num_batched_tokens": 256}
    reference = run({"model": hybrid, "options": few, "steps": [generate([prompts[1]], max_tokens=24)]})
    steps = [generate([prompts[0]]), {"do": "settle"}]
    for after in (4, 1):
        steps += [
            {"do": "reset"},
            {"do": "abort", "prompts": prompts, "after": after, "abort": [0, 2, 3, 7], "max_tokens": 24},
        ]
    offloaded = run({"model": hybrid, "options": few, "transfer": maru(server), "steps": steps})
    for at in (3, 5):
        assert set(offloaded["answers"][at]) == {"1", "4", "5", "6"}
        assert [offloaded["answers"][at]["1"]] == reference["answers"][0]["tokens"]
    nothing_is_left(offloaded)
