"""A real vLLM with the names and pages of published connectors: one page for each layer of a chunk."""

from __future__ import annotations

import pytest

from .instances import Server, external_hits, generate, maru, nothing_is_left, prompt, run


@pytest.mark.parametrize("names", ["published-blake2b", "published-md5"])
def test_a_second_process_hits_published_pages(model: str, server: Server, names: str) -> None:
    first, second = prompt(1024, 40, 1), prompt(1024, 40, 2)
    asked = [generate([second])]
    transfer = maru(server, maru_key_names=names)
    reference = run({"model": model, "steps": asked})
    producer = run({"model": model, "transfer": transfer, "steps": [generate([first])]})
    assert producer["counts"]["worker"]["chunks stored"] == 8
    consumer = run({"model": model, "transfer": transfer, "steps": asked})
    assert consumer["answers"][0]["tokens"] == reference["answers"][0]["tokens"]
    assert consumer["answers"][0]["cached"] == [1024]
    assert external_hits(consumer) == 1024
    nothing_is_left(producer)
    nothing_is_left(consumer)
