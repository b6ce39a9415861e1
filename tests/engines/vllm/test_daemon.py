"""A real vLLM whose tiers are a daemon's: blocks outlive the engine, and the engine outlives the daemon."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import KillableDaemon, directory

from .instances import external_hits, generate, nothing_is_left, over_daemon, prompt, run, spec_over_daemon, when_told


@pytest.fixture
def daemon() -> Iterator[KillableDaemon]:
    with directory() as path:
        daemon = KillableDaemon(path, block_bytes=0)  # the first engine says how large a chunk is
        yield daemon
        daemon.kill()


@pytest.mark.parametrize("transfer_over", [over_daemon, spec_over_daemon])
def test_a_second_process_hits_what_a_daemon_has(model: str, daemon: KillableDaemon, transfer_over: Any) -> None:
    first, second = prompt(1024, 40, 1), prompt(1024, 40, 2)
    reference = run({"model": model, "steps": [generate([second], logprobs=0)]})
    storing = {"model": model, "transfer": transfer_over(daemon.url), "steps": [generate([first])]}
    producer = run(storing)
    consumer = run({**storing, "steps": [generate([second], logprobs=0)]})
    (ours,), (theirs,) = consumer["answers"], reference["answers"]
    assert ours["tokens"] == theirs["tokens"]
    assert ours["logprobs"][0] == pytest.approx(theirs["logprobs"][0], abs=1e-4)
    assert (external_hits(producer), external_hits(consumer)) == (0, 1024)
    nothing_is_left(producer)
    nothing_is_left(consumer)


def test_a_daemon_killed_and_restarted_costs_no_token_and_is_used_again(
    model: str, daemon: KillableDaemon, tmp_path: Path
) -> None:
    prompts = [prompt(1024, 40, number) for number in range(3)]
    reference = run({"model": model, "steps": [generate([one]) for one in prompts]})
    run({"model": model, "transfer": over_daemon(daemon.url), "steps": [generate([prompts[0]])]})
    told, done = [[tmp_path / f"{name}-{at}" for at in range(2)] for name in ("told", "done")]
    waits = [{"do": "wait", "tell": str(told[at]), "wait": str(done[at])} for at in range(2)]
    settled = [{"do": "settle"}, {"do": "reset"}]
    # The daemon that has come back has nothing at first: the prompt is stored there, and loaded from there.
    back = {**generate([prompts[2]]), "do": "generate until cached", "cached": [1024]}
    steps = [generate([prompts[0]]), *settled, waits[0], generate([prompts[1]]), *settled, waits[1], back]

    def of_the_world() -> None:
        for at, act in enumerate((daemon.kill, daemon.start)):
            when_told(told[at], done[at], act)

    world = threading.Thread(target=of_the_world)
    world.start()
    transfer = over_daemon(daemon.url, breaker={"first_wait": 0.05, "longest_wait": 1.0})
    answer = run({"model": model, "transfer": transfer, "steps": steps})
    world.join()
    got = [one for step, one in zip(steps, answer["answers"], strict=True) if "prompts" in step]
    assert [one["tokens"] for one in got] == [one["tokens"] for one in reference["answers"]]
    assert all(tokens == got[2]["tokens"] for tokens in got[2]["rounds"])
    assert [one["cached"] for one in got] == [[1024], [0], [1024]]
    assert answer["counts"]["scheduler"]["lookups without daemon, which is unavailable"] >= 1
    nothing_is_left(answer)


@pytest.mark.parametrize("ranks", [1, 2])
def test_workers_in_other_processes_and_their_scheduler_share_a_daemon(
    model: str, daemon: KillableDaemon, ranks: int
) -> None:
    parallel = {"distributed_executor_backend": "mp", "tensor_parallel_size": ranks}
    bound = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))}  # else it wants a NUMA node for each
    first, second = prompt(1024, 40, 1), prompt(1024, 40, 2)
    reference = run({"model": model, "options": parallel, "steps": [generate([second])]}, **bound)
    storing: dict[str, Any] = {"model": model, "options": parallel, "transfer": over_daemon(daemon.url)}
    producer = run({**storing, "steps": [generate([first])]}, **bound)
    consumer = run({**storing, "steps": [generate([second])]}, **bound)
    assert consumer["answers"][0]["tokens"] == reference["answers"][0]["tokens"]
    assert (external_hits(producer), external_hits(consumer)) == (0, 1024)
