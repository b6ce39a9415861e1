"""Whose a block is, in the keys of a hosted plugin: the same salt whenever the block is asked for."""

import pytest
import trio

import offload
from backends import make_tier
from backends.abc import STORED, Deletion
from backends.memory import MemoryTier
from backends.plugins import HostConfig, LMCacheTier, NativeTier
from backends.plugins._salts import CacheSalts
from tests.support.plugin_faults import PlayedAdapter, PlayedConnector
from tests.support.plugin_play import KEYS, SIZE, filled_source, load, store


class Placing(PlayedAdapter):
    """Notes the salt of every key that it is given, by what it was given for."""

    def __init__(self, params=None):
        super().__init__()
        self.params = params
        self.seen = {}
        Placing.last = self

    def _noted(self, what, keys):
        self.seen.setdefault(what, set()).update((key.chunk_hash, key.cache_salt) for key in keys)

    def submit_store_task(self, keys, objects):
        self._noted("store", keys)
        return super().submit_store_task(keys, objects)

    def submit_lookup_and_lock_task(self, keys):
        self._noted("lookup", keys)
        return super().submit_lookup_and_lock_task(keys)

    def submit_load_task(self, keys, objects):
        self._noted("load", keys)
        return super().submit_load_task(keys, objects)

    def submit_unlock(self, keys):
        self._noted("unlock", keys)
        super().submit_unlock(keys)

    def delete(self, keys):
        self._noted("delete", keys)
        super().delete(keys)


ALICE = {(key, "alice") for key in KEYS}


@pytest.fixture
def adapter():
    return Placing()


def salted(adapter, **knobs):
    return LMCacheTier(adapter, SIZE, HostConfig(cache_salts=True, **knobs))


async def test_every_key_of_a_tenant_bears_its_salt_in_whatever_is_asked(adapter):
    async with salted(adapter) as tier:
        end = tier.carry(KEYS, "alice")
        assert await store(tier, filled_source()) == [STORED] * 3
        await load(tier)
        end()
        assert await tier.delete(KEYS) == [Deletion.DELETED] * 3
    assert adapter.seen == dict.fromkeys(("store", "lookup", "load", "unlock", "delete"), ALICE)


async def test_a_host_that_is_not_told_to_hands_no_salt_on(adapter):
    async with LMCacheTier(adapter, SIZE) as tier:
        assert not tier.capabilities.needs_tenants
        await store(tier, filled_source())
    assert adapter.seen["store"] == {(key, "") for key in KEYS}


async def test_an_engine_says_whose_the_blocks_are(adapter):
    source = MemoryTier(8 * SIZE, SIZE)
    for key in KEYS:
        source.put(key, bytes(SIZE))
    with trio.fail_after(60):
        async with offload.open_engine(source, [salted(adapter)]) as engine:
            handle = await engine.store(source.weak(KEYS), offload.NO_WAIT, tenant="alice")
            await handle.wait()
            async with await engine.lookup(KEYS, tenant="alice") as hit:
                assert len(hit) == 3
            assert await engine.delete(KEYS) == [Deletion.DELETED] * 3
    assert {what: salts for what, salts in adapter.seen.items() if salts != ALICE} == {}


async def test_a_native_connector_is_named_the_salt_as_well():
    connector = PlayedConnector()
    async with NativeTier(connector, SIZE, HostConfig(cache_salts=True)) as tier:
        end = tier.carry(KEYS[:1], "alice")
        await store(tier, filled_source(), KEYS[:2])
        end()
    assert set(connector.blocks) == {"trio-offload@00000000@0@61@alice", "trio-offload@00000000@0@62"}


async def test_parameters_and_salts_reach_a_plugin_that_is_only_named():
    params = {"device": "/dev/ng0n1", "fdp_nruh": 8, "placement_strategy": "by_cache_salt"}
    specification = {
        "type": "plugin",
        "module_path": __name__,
        "class_name": "Placing",
        "adapter_params": params,
        "cache_salts": True,
    }
    async with make_tier(specification, block_bytes=SIZE) as tier:
        assert tier.adapter.params == params
        tier.carry(KEYS, "alice")()
        await store(tier, filled_source())
        assert tier.adapter.seen["store"] == ALICE


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_salt_is_that_of_the_last_tenant_and_stays():
    salts = CacheSalts(8)
    salts.carry([b"a"], "alice")()
    assert salts.of(b"a") == "alice"
    salts.carry([b"a"], "bob")()
    assert salts.of(b"a") == "bob"
    salts.carry([b"a"], "")()
    assert salts.of(b"a") == ""


def test_one_tenant_may_say_it_twice_and_another_not_meanwhile():
    salts = CacheSalts(8)
    first, second = salts.carry([b"a"], "alice"), salts.carry([b"a"], "alice")
    first()
    first()
    with pytest.raises(ValueError, match="in use for another tenant than 'bob'"):
        salts.carry([b"a"], "bob")
    second()
    salts.carry([b"a"], "bob")


def test_the_oldest_salts_are_forgotten_first():
    salts = CacheSalts(2)
    for key in (b"a", b"b", b"a", b"c"):
        salts.carry([key], "alice")()
    assert [salts.of(key) for key in (b"a", b"b", b"c")] == ["alice", "", "alice"]


@pytest.mark.parametrize("tenant", ["a@b", "a/b", "a\\b", "a\0b", "a" * 129])
def test_a_tenant_whose_name_can_be_no_salt_is_refused(tenant):
    with pytest.raises(ValueError, match="cannot be a cache_salt"):
        CacheSalts(8).carry([b"a"], tenant)
