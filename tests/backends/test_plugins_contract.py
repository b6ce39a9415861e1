"""The published contract test on every host, with real plugins: threads, descriptors, files."""

import shutil

import pytest
import trio

from backends.abc import Capabilities
from backends.plugins import HostConfig, LMCacheTier, NativeTier
from backends.plugins._native import published_name
from backends.testing import check_tier
from tests.support.plugin_peers import CConnector, DeletingCConnector, DeletingConnector, LoopAdapter, ThreadConnector

HAS_COMPILER = any(shutil.which(name) for name in ("cc", "gcc", "clang"))
in_c = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")


@pytest.fixture
def new_directory(tmp_path):
    """A fresh directory at each call."""
    numbers = iter(range(1000))

    def make():
        directory = tmp_path / f"{next(numbers)}"
        directory.mkdir()
        return directory

    return make


def in_memory(connector):
    return lambda directory: connector()


HOSTS = [
    pytest.param(NativeTier, in_memory(ThreadConnector), id="native"),
    pytest.param(NativeTier, in_memory(DeletingConnector), id="native that deletes"),
    pytest.param(NativeTier, CConnector, id="native in C", marks=in_c),
    pytest.param(NativeTier, DeletingCConnector, id="native in C that deletes", marks=in_c),
    pytest.param(LMCacheTier, lambda directory: LoopAdapter({"directory": directory}), id="L2 adapter"),
]


def behind(name):
    """Do something to a block in the plugin, which its tier is not told of."""

    def hook(tier, key):
        if isinstance(tier, NativeTier):
            getattr(tier.connector, name)(published_name(key))
        else:
            getattr(tier.adapter, name)(key.hex())

    return hook


@pytest.mark.parametrize(("host", "make_plugin"), HOSTS)
@pytest.mark.parametrize("submit_in_thread", [False, True], ids=["", "submitted in a thread"])
async def test_every_host_keeps_what_it_declares(host, make_plugin, submit_in_thread, new_directory):
    tiers = []

    def make_tier(blocks, block_bytes):
        config = HostConfig(capacity_bytes=blocks * block_bytes, submit_in_thread=submit_in_thread)
        tiers.append(host(make_plugin(new_directory()), block_bytes, config))
        return tiers[-1]

    with trio.fail_after(60):
        await check_tier(
            make_tier,
            damage=behind("damage"),
            spoil=behind("spoil"),
            take_away=behind("take_away"),
        )
    for tier in tiers:
        after = tier.host_statistics()
        assert (after.outstanding, after.quarantined_bytes, after.failed_unlocks) == (0, 0, 0), after
        assert (after.unknown, after.twice, after.raised, after.wrong_bits, after.rescues) == (0, 0, 0, 0, 0), after


def test_hosts_declare_what_their_plugins_can(tmp_path):
    def declared(host, plugin):
        try:
            return host(plugin, 64).capabilities
        finally:
            plugin.close()

    assert declared(NativeTier, ThreadConnector()) == Capabilities(pins=False, deletes=False, per_key_outcomes=False)
    assert declared(NativeTier, DeletingConnector()) == Capabilities(pins=False, deletes=True, per_key_outcomes=False)
    adapter = LoopAdapter({"directory": tmp_path})
    assert declared(LMCacheTier, adapter) == Capabilities(pins=True, deletes=True, per_key_outcomes=False)


# --- planted: what is declared and not so is found ------------------------------------------------------------------


class SaysItDeletes(NativeTier):
    def __init__(self, *args):
        super().__init__(*args)
        self.capabilities = Capabilities(pins=False, per_key_outcomes=False)


class SaysItPins(NativeTier):
    def __init__(self, *args):
        super().__init__(*args)
        self.capabilities = Capabilities(deletes=False, per_key_outcomes=False)


class SaysItFailsAlone(NativeTier):
    def __init__(self, *args):
        super().__init__(*args)
        self.capabilities = Capabilities(pins=False, deletes=False)


class TakesAHitForAPromise(NativeTier):
    async def load(self, lease, destination):
        outcomes = await super().load(lease, destination)
        return [outcomes[0]] * len(outcomes)


class DeletesAllTheSame(NativeTier):
    async def delete(self, keys):
        await trio.lowlevel.checkpoint()
        for key in keys:
            self.connector.blocks.pop(published_name(key), None)
        return await super().delete(keys)


@pytest.mark.parametrize(
    "faulty", [SaysItDeletes, SaysItPins, SaysItFailsAlone, TakesAHitForAPromise, DeletesAllTheSame]
)
async def test_what_is_declared_and_not_kept_is_found(faulty):
    with pytest.raises(Exception) as info, trio.fail_after(30):  # whichever promise comes first
        await check_tier(
            lambda blocks, size: faulty(ThreadConnector(), size, HostConfig(capacity_bytes=blocks * size)),
            spoil=behind("spoil"),
            take_away=behind("take_away"),
        )
    assert not isinstance(info.value, trio.TooSlowError)
    assert "the promise: " in info.value.__notes__[-1]
