"""An instance of vLLM that is killed: after its lease it has left nothing behind but what it had stored."""

from contextlib import contextmanager

from offload import from_thread
from offload.engines.vllm._settings import MaruSettings
from tests.engines.crashes import LEASE, a_few_and_fifty, crash_often, object_counts, page_store, wait_to_be_killed
from tests.engines.test_vllm_halves import BLOCK, CHUNK, SOON, Loop, blocks_from, new_cache
from tests.support.maru_processes import eventually
from tests.support.object_counts import grown


@contextmanager
def instance(server_url):
    cache, source = new_cache()
    said = {
        "maru_server_url": server_url,
        "maru_pool_size": "2M",
        "maru_kv_chunk_tokens": CHUNK,
        "lookup_timeout": SOON,
    }
    settings = MaruSettings.read(said, BLOCK, source.block_bytes * BLOCK // CHUNK)
    settings.engine["tiers"]["maru"]["lease"] = LEASE
    with from_thread.open_engine(source, settings.engine_config(), when_full="drop") as engine:
        yield Loop(engine, source, cache)


def hold(channel, server_url, round_):
    """In a child: have a prompt pinned for a request, which the first one has stored, and wait to be killed."""
    with instance(server_url) as loop:
        if not round_:
            assert loop.matched("shared", 256) == 0
            loop.scheduler.allocated("shared", [blocks_from(0)], 0)
            loop.compute("shared", 256, blocks_from(0))
            loop.worker.engine.drain(SOON)
        assert loop.matched("shared", 256, name="a request that waits") == 192
        wait_to_be_killed(channel)


@a_few_and_fifty
def test_crashes_leave_no_pin_and_no_region_behind_and_what_was_stored_stays(crashes):
    with page_store() as server:
        counts = []

        def count(number):
            if number in (1, crashes - 1):
                # The region of the first one is kept for what it has stored, those of the others are given back.
                eventually(lambda: (server.facts()["regions"], server.facts()["sessions"]) == (1, 0))
                counts.append(object_counts(server))

        crash_often(server, crashes, f"{__name__}:hold", count)
        assert grown(*counts) == {}, "the server keeps something of each client that is killed"
        with instance(server.ipc) as loop:
            assert loop.matched("shared", 256) == 192
            loop.scheduler.close()
