"""SGLang's own factory and controller over the backend."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sglang.srt.mem_cache.storage import StorageBackendFactory

import offload
from offload.engines.sglang import HiCacheOffload
from tests.engines.sglang.backends import extra_config, storage_config
from tests.engines.sglang.real.controllers import PAGE_TOKENS, device_pool, host_pool, instance
from tests.support.maru_processes import Server, eventually, temporary_pool

PROMPT = list(range(100, 100 + 8 * PAGE_TOKENS))
LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]


@pytest.fixture
def server():
    with temporary_pool() as directory, Server(directory) as server:
        yield server


def in_page_store(server, **more):
    tier = {"type": "maru", "server_url": server.ipc, "pool_size": "2MiB", "timeout_ms": 2_000}
    return extra_config({"maru": tier}, **more)


def made_by_the_factory(extra, pool):
    return StorageBackendFactory.create_backend("dynamic", storage_config(extra), pool)


def test_the_factory_makes_it_by_its_name():
    pool = host_pool(device_pool(), "page_first")
    backend = made_by_the_factory(extra_config(), pool)
    assert type(backend) is HiCacheOffload
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    assert backend.get_stats() is None
    backend.close()


def test_the_factory_tells_what_is_set_wrongly():
    with pytest.raises(offload.ConfigError, match="lookup_timeout"):
        made_by_the_factory(extra_config(lookup_timeout=-1), None)


@pytest.mark.parametrize("interface", [1, 0], ids=["zero copy", "generic"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_second_instance_finds_what_the_first_one_has_stored(server, layout, interface):
    extra = in_page_store(server, interface_v1=interface)
    with instance(extra, layout) as first:
        there, stored = first.backup(PROMPT)
        pages = [first.page(there, page) for page in range(8)]
        assert stored == len(PROMPT)
        # What was stored and loaded before the first request came back plane by plane.
        assert first.controller.storage_backend.report_status()["failures"] == {}
    with instance(extra, layout) as second:
        here, found, come = second.prefetch(PROMPT)
        assert found == come == len(PROMPT)
        assert all(torch.equal(second.page(here, page), pages[page]) for page in range(8))
        assert second.controller.storage_backend.report_status()["failures"] == {}


def test_only_the_shared_prefix_of_a_prompt_comes(server):
    with instance(in_page_store(server)) as both:
        both.backup(PROMPT)
        other = PROMPT[: 5 * PAGE_TOKENS] + [1, 2, 3, 4] * 3
        _, found, come = both.prefetch(other)
        assert found == come == 5 * PAGE_TOKENS


@pytest.mark.parametrize("stored_as", LAYOUTS[:2])
def test_pages_of_another_layout_are_not_found(server, stored_as):
    """They have as many bytes, in another order."""
    with instance(in_page_store(server), stored_as) as first:
        first.backup(PROMPT)
    with instance(in_page_store(server), LAYOUTS[1] if stored_as == LAYOUTS[0] else LAYOUTS[0]) as second:
        assert second.prefetch(PROMPT)[1:] == (0, 0)


def test_another_process_finds_them(server):
    there, here = (run_instance(what, server.ipc) for what in ("backup", "prefetch"))
    assert there == here != ""


def run_instance(what, server_url):
    """The digest of the pages of a prompt, in a process of its own."""
    root = Path(__file__).parents[4]
    command = [sys.executable, "-W", "ignore", "-m", "tests.engines.sglang.real.test_controller", what, server_url]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def main(what, server_url):
    tier = {"type": "maru", "server_url": server_url, "pool_size": "2MiB"}
    with instance(extra_config({"maru": tier})) as one:
        indices, *numbers = getattr(one, what)(PROMPT)
        assert set(numbers) == {len(PROMPT)}, numbers
        digest = hashlib.sha256()
        for page in range(8):
            digest.update(one.page(indices, page).view(torch.uint8).numpy().tobytes())
        print(digest.hexdigest())


def test_without_its_server_the_controller_goes_on_and_finds_it_again(server):
    extra = in_page_store(server, lookup_timeout=0.5, store_timeout=2.0, load_timeout=2.0)
    with instance(extra) as one:
        _, stored = one.backup(PROMPT)
        assert stored == len(PROMPT)
        server.kill()
        # What its index shows is loaded until the lease of this instance ends. From then on lookups are without it.
        report = one.controller.storage_backend.report_status
        absent = [token + 2_000 for token in PROMPT]
        assert eventually(
            lambda: (
                one.prefetch(absent)[1:] == (0, 0) and any(name.startswith("lookup") for name in report()["failures"])
            )
        )
        assert one.prefetch(PROMPT)[1:] == (0, 0)
        assert one.backup([token + 1_000 for token in PROMPT])[1] == 0
        failures = report()["failures"]
        assert {name.partition(": ")[2] for name in failures} <= {"unavailable", "timeout"}
        server.start()
        assert eventually(lambda: one.prefetch(PROMPT)[1:] == (len(PROMPT), len(PROMPT)))
        assert all(thread.is_alive() for thread in (one.controller.prefetch_thread, one.controller.backup_thread))


def test_clearing_is_not_pretended():
    with instance(extra_config()) as one:
        one.backup(PROMPT)
        with pytest.raises(NotImplementedError):
            one.controller.storage_backend.clear()


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_pages_of_latent_attention_are_stored_by_one_rank_and_found_by_all(server, layout):
    extra = in_page_store(server)
    with instance(extra, layout, latent=True, tp_size=2) as first:
        there, stored = first.backup(PROMPT)
        pages = [first.page(there, page) for page in range(8)]
        assert stored == len(PROMPT)
    with instance(extra, layout, latent=True, tp_size=2, tp_rank=1) as second:
        here, _, come = second.prefetch(PROMPT)
        assert come == len(PROMPT)
        assert all(torch.equal(second.page(here, page), pages[page]) for page in range(8))


def test_ranks_that_have_heads_of_their_own_share_nothing(server):
    extra = in_page_store(server)
    with instance(extra, tp_size=2) as first:
        first.backup(PROMPT)
    with instance(extra, tp_size=2, tp_rank=1) as second:
        assert second.prefetch(PROMPT)[1:] == (0, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
