"""A real vLLM on a CPU whose own OffloadingConnector has our tiers behind its host memory."""

from __future__ import annotations

from .instances import Server, external_hits, generate, nothing_is_left, prompt, run, spec, store_of


def test_a_spec_behind_vllms_own_connector_hits_in_a_second_process(model: str, server: Server) -> None:
    first, second = prompt(1024, 40, 1), prompt(1024, 40, 2)
    others = [prompt(512, 200, 3), prompt(130, 500, 4), prompt(0, 300, 5)]
    asked = [generate([second]), generate(others)]
    reference = run({"model": model, "steps": asked})
    transfer = spec(maru=store_of(server))
    producer = run({"model": model, "transfer": transfer, "steps": [generate([first])]})
    assert producer["counts"]["host memory"]["chunks stored"] == 8
    consumer = run({"model": model, "transfer": transfer, "steps": asked})
    assert [one["tokens"] for one in consumer["answers"]] == [one["tokens"] for one in reference["answers"]]
    assert consumer["answers"][0]["cached"] == [1024]
    assert external_hits(consumer) >= 1024 and external_hits(producer) == 0
    nothing_is_left(consumer)


def test_a_spec_recomputes_corrupted_pages_and_stores_them_anew(model: str, server: Server) -> None:
    first, second = prompt(1024, 40, 1), prompt(1024, 40, 2)
    reference = run({"model": model, "steps": [generate([second])]})
    transfer = spec(maru=store_of(server))
    run({"model": model, "transfer": transfer, "steps": [generate([first])]})
    server.corrupt()
    once = {"model": model, "transfer": transfer, "steps": [generate([second])]}
    computed, loaded = run(once), run(once)
    assert computed["answers"][0]["tokens"] == loaded["answers"][0]["tokens"] == reference["answers"][0]["tokens"]
    assert computed["counts"]["host memory"]["chunks found, and not loaded"] > 0
    assert (computed["answers"][0]["cached"], loaded["answers"][0]["cached"]) == ([0], [1024])


def test_a_spec_with_little_memory_and_preempted_requests_gives_the_same_tokens(model: str, server: Server) -> None:
    """Host memory of four chunks, blocks for two requests: everything comes and goes again and again, and is reset."""
    narrow = {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 128, "max_model_len": 512, "max_num_seqs": 8}
    prompts = [prompt(160, 40 + 8 * number, number) for number in range(6)]
    asked = generate(prompts, max_tokens=120)
    steps = [asked, {"do": "reset"}, asked, {"do": "reset", "connector": True}, asked]
    reference = run({"model": model, "options": narrow, "steps": [asked]})
    transfer = spec("1 MiB", maru=store_of(server))
    transfer["kv_connector_extra_config"]["offload_prompt_only"] = False
    offloaded = run({"model": model, "options": narrow, "transfer": transfer, "steps": steps})
    assert offloaded["preemptions"] > 0
    for at in (0, 2, 4):
        assert offloaded["answers"][at]["tokens"] == reference["answers"][0]["tokens"]
    assert [offloaded["answers"][at] for at in (1, 3)] == [True, True]
    assert offloaded["counts"]["host memory"]["chunks read in place"] > 0
    nothing_is_left(offloaded)


def test_workers_in_other_processes_share_host_memory_with_the_scheduler(model: str, server: Server) -> None:
    parallel = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
    first, second = prompt(1024, 40, 1), prompt(1024, 40, 2)
    bound = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}  # else it wants a NUMA node for each
    reference = run({"model": model, "options": parallel, "steps": [generate([second])]}, **bound)
    storing = {"model": model, "options": parallel, "transfer": spec(maru=store_of(server))}
    producer = run({**storing, "steps": [generate([first])]}, **bound)
    consumer = run({**storing, "steps": [generate([second])]}, **bound)
    assert consumer["answers"][0]["tokens"] == reference["answers"][0]["tokens"]
    assert (external_hits(producer), external_hits(consumer)) == (0, 1024)


def test_a_spec_serves_a_hybrid_model(hybrid: str, server: Server) -> None:
    """Two groups of KV caches: of one all chunks are loaded, of the other those that its window reaches."""
    first, second = prompt(1024, 40, 1), prompt(1024, 40, 2)
    options = {"disable_hybrid_kv_cache_manager": False}
    asked = [generate([second]), generate([prompt(512, 200, 3), prompt(0, 300, 5)])]
    reference = run({"model": hybrid, "options": options, "steps": asked})
    once = {"model": hybrid, "options": options, "transfer": spec(maru=store_of(server))}
    producer = run({**once, "steps": [generate([first])]})
    consumer = run({**once, "steps": asked})
    assert [one["tokens"] for one in consumer["answers"]] == [one["tokens"] for one in reference["answers"]]
    assert consumer["answers"][0]["cached"] == [1024]
    assert producer["counts"]["host memory"]["chunks stored"] > 8
    nothing_is_left(consumer)
