"""Many keys, end to end: what is asked costs the same, and is right."""

from __future__ import annotations

import random
import time

import msgspec
import pytest

from tests.support.maru_actors import client
from tests.support.maru_processes import Server, payload, temporary_pool
from tests.support.published import PublishedClient
from tests.support.published_wire import Ask

SIZE = 64
BATCH = 4_000


def assert_scale(keys: int, owners: int) -> None:
    """So many keys, by several owners in turn, in both faces; each is stored, found, read, deleted and kept by a restart."""
    each = keys // owners
    knobs = {"pool_size": each * SIZE, "chunk_size_bytes": SIZE, "timeout_ms": 60_000, "lease": 60.0}
    options = ("--capacity-bytes", "1GiB", "--high-watermark", "1.0", "--max-lease", "60")
    sizes = {}
    with temporary_pool() as pool, Server(pool, *options) as server, PublishedClient(server.ipc, timeout=60) as raw:

        def answers() -> list[int]:
            """How long the answers are that tell of all keys together."""
            return [len(msgspec.msgpack.encode(raw.ask(code))) for code in (Ask.GET_STATS, Ask.GET_USAGE, 0x49)]

        names = [f"{number:032x}" for number in range(keys)]
        began = time.monotonic()
        clients = []
        try:
            for owner in range(owners):
                clients.append(client(("blocking", "trio")[owner % 2], server.ipc, **knobs))
                for start in range(owner * each, (owner + 1) * each, BATCH):
                    some = names[start : min(start + BATCH, (owner + 1) * each)]
                    assert set(clients[-1].put(some, SIZE)) == {"NEW"}
                    if start in (0, (owners - 1) * each):
                        sizes[server.facts()["entries"]] = answers()
            stored = time.monotonic() - began
            facts = server.facts()
            assert (facts["entries"], facts["used_bytes"], facts["evicted"]) == (each * owners, each * owners * SIZE, 0)
            few, many = (sizes[number] for number in sorted(sizes)[:: len(sizes) - 1])
            assert all(abs(one - other) < 300 for one, other in zip(few, many, strict=True)), sizes
            dice = random.Random(1)
            sample = dice.sample(names[: each * owners], min(keys, 20_000))
            with client("trio", server.ipc, **{**knobs, "pool_size": 0}) as reader:
                began = time.monotonic()
                for start in range(0, len(sample), BATCH):
                    some = sample[start : start + BATCH]
                    assert set(reader.get(some, SIZE)) == {"right"}
                read = time.monotonic() - began
                assert reader.get([f"not {name}" for name in sample[:100]], SIZE) == ["missing"] * 100
                assert reader.hold(sample[0]) == [True]
                assert bytes(reader.held[sample[0]][-1][1]) == payload(sample[0], SIZE)
                gone = sample[1:1001]
                assert reader.delete(gone) == ["DELETED"] * 1000
            assert clients[0].put(gone[:10], SIZE) == ["NEW"] * 10 or clients[0].pages().free == 0
            entries = server.facts()["entries"]
            server.restart()
            assert server.ready["keys"] == entries
            for start in range(0, len(sample), BATCH):
                found = raw.ask(Ask.BATCH_EXISTS_KV, keys=sample[start : start + BATCH])["results"]
                assert sum(found) >= len(found) - 1000
            assert set(clients[1].get([name for name in sample if name not in set(gone)][:BATCH], SIZE)) == {"right"}
        finally:
            for one in clients:
                one.close()
        print(
            f"\n{each * owners} keys: stored in {stored:.1f} s, {len(sample)} read in {read:.2f} s, ready again after "
            f"{server.waited * 1e3:.0f} ms, {server.process.private_bytes() / keys / 1e3:.2f} kB of the server's for each"
        )


def test_ten_thousand_keys():
    assert_scale(10_000, owners=2)


@pytest.mark.long
def test_half_a_million_keys():
    assert_scale(500_000, owners=4)
