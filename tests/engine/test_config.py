"""An engine from a configuration: tiers by name, routes, knobs; what is wrong is named with its way out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from backends import PlaceClosed
from backends.base.forwarding import ForwardingTier
from backends.file import FileTier
from backends.memory import MemoryTier
from backends.testing import FakeTier
from backends.wrappers import AesGcm
from offload import (
    NO_WAIT,
    ConfigError,
    Engine,
    EngineConfig,
    PipelineClosed,
    PipelineConfig,
    Route,
    knobs,
    open_engine,
)
from tests.support.engine_places import SIZE, cancelled_at_checkpoint, keys_of, payloads, room

MEMORY = {"type": "memory", "capacity_bytes": 16 * SIZE}

TEXT = """
[engine]
on_load_failure = "retry"
promote = "host"
promotion_blocks = 32
chain = true
block_bytes = "64"
source = { type = "memory", capacity_bytes = 4096 }

[engine.breaker]
max_faults = 5

[engine.pipeline]
on_destination_full = "evict"

[engine.tiers.host]
type = "memory"
capacity_bytes = "1 KiB"

[engine.tiers.disk]
type = "file"
directory = "kv"

[[engine.routes]]
to = "disk"
policies = ["presence", { type = "frequency", threshold = 0 }]

[engine.routes.pipeline]
max_concurrent_transfers = 2

[[engine.routes]]
to = "disk"
source = "source"
auto_chain = false
"""


def made_by_a_test(*, block_bytes: int, blocks: int = 4) -> FakeTier:
    """A tier that a specification names by ``module:attribute``."""
    return FakeTier(blocks, block_bytes)


# --- reading ------------------------------------------------------------------------------------------------------


def test_a_file_says_everything() -> None:
    config = EngineConfig.from_toml(TEXT, environ={"OFFLOAD_ENGINE__PIPELINE__POLICY_TIMEOUT": "2.5"})
    assert (config.on_load_failure, config.promote, config.promotion_blocks, config.chain) == (
        "retry",
        "host",
        32,
        "on_store",
    )
    assert list(config.tiers) == ["host", "disk"]  # in the order of the file: the fastest first
    assert config.tiers["disk"] == {"type": "file", "directory": "kv"}
    assert config.pipeline == PipelineConfig(on_destination_full="evict", policy_timeout=2.5)
    assert config.breaker.max_faults == 5 and config.block_bytes == 64
    assert config.routes == (
        Route(
            "disk",
            policies=("presence", {"type": "frequency", "threshold": 0}),
            pipeline=PipelineConfig(max_concurrent_transfers=2),
        ),
        Route("disk", source="source", auto_chain=False),
    )


def test_what_is_not_said_is_as_by_default() -> None:
    assert EngineConfig.from_toml("") == EngineConfig()
    assert EngineConfig.from_toml("[other]\nx = 1\n", others=["other"]) == EngineConfig()


def test_the_environment_sets_knobs_as_of_any_other_table() -> None:
    environ = {"OFFLOAD_ENGINE__PROMOTE": "true", "OFFLOAD_ENGINE__BREAKER__MAX_FAULTS": "7"}
    config = EngineConfig.from_toml("", environ=environ)
    assert config.promote is True and config.breaker.max_faults == 7
    named = EngineConfig.from_toml("", environ={"OFFLOAD_ENGINE__PROMOTE": "host"})
    assert named.promote == "host"


def test_every_knob_is_listed_with_its_bound_and_its_reason() -> None:
    listed = knobs(EngineConfig, section="engine")
    names = [knob.name for knob in listed]
    assert {"engine.promote", "engine.breaker.max_faults", "engine.pipeline.batch_config.max_batch_size"} <= set(names)
    assert all(knob.bound and knob.reason for knob in listed)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "[engine]\npromot = true",
            r"engine.promot = True: there is no such name; did you mean promote\? .TOML, line 2",
        ),
        ("[engine]\nchain = 'upwards'", "engine.chain = 'upwards': must be one of none, on_store"),
        ("[engine]\non_load_failure = 'again'", "engine.on_load_failure = 'again': must be one of miss, fail, retry"),
        ("[engine]\npromote = 3", "engine.promote = 3: must be true, false, or the name of a tier"),
        ("[engine]\npromotion_blocks = 0", "engine.promotion_blocks = 0: must be an integer from 1 to 65536"),
        (
            "[engine]\npromote = 'x'\n[engine.tiers]\nhost = 'memory'",
            "engine.promote = 'x': must be true, false, or one of host",
        ),
        ("[engine]\ntiers = ['memory']", "engine.tiers = .*: must be a table"),
        ("[engine.tiers.host]\ncapacity_bytes = 1", "engine.tiers.host.type = None: must be a name such as memory"),
        (
            "[engine.tiers]\nhost = 7",
            "engine.tiers.host = 7: must be a backends.abc.Tier, a name such as memory, module:attribute",
        ),
        ("[engine]\nsource = 7", "engine.source = 7: must be a backends.abc.Source"),
        ("[engine]\nroutes = 7", "engine.routes = 7: must be a list of Route"),
        ("[[engine.routes]]\nsource = 'source'", r"engine.routes\[0\].to = None: must be the name of a tier"),
        ("[[engine.routes]]\nto = 'x'", r"engine.routes\[0\].to = 'x': must be the name of a place: there is none"),
        (
            "[[engine.routes]]\nto = 'x'\n[engine.tiers]\nhost = 'memory'",
            r"engine.routes\[0\].to = 'x': .*: host \(TOML, line 2\)$",
        ),
        (
            "[[engine.routes]]\nto = 'host'\nsource = 'y'\n[engine.tiers]\nhost = 'memory'",
            r"engine.routes\[0\].source = 'y': must be the name of a place: source, host",
        ),
        ("[[engine.routes]]\nto = 'x'\npolicy = 1", r"engine.routes\[0\].policy = 1: .*did you mean policies"),
        ("[[engine.routes]]\nto = 7", r"engine.routes\[0\].to = 7: must be the name of a tier"),
        (
            "[[engine.routes]]\nto = 'x'\nauto_chain = 'no'",
            r"engine.routes\[0\].auto_chain = 'no': must be true or false",
        ),
        ("[[engine.routes]]\nto = 'x'\npolicies = [3]", r"engine.routes\[0\].policies = 3: must be a policy"),
        (
            "[[engine.routes]]\nto = 'x'\npolicies = {threshold = 3}",
            r"engine.routes\[0\].policies = .*: has no type",
        ),
        ("[[engine.routes]]\nto = 'x'\npipeline = 3", r"engine.routes\[0\].pipeline = 3: must be a PipelineConfig"),
        (
            "[[engine.routes]]\nto = 'x'\n[engine.routes.pipeline]\npolicy_timeout = -1",
            r"engine.routes\[0\].pipeline.policy_timeout = -1: must be seconds",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_value_and_what_it_may_be(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        EngineConfig.from_toml(text, environ={})


def test_a_name_of_a_tier_is_a_text() -> None:
    with pytest.raises(ConfigError, match="tiers = 3: must be a name"):
        EngineConfig(tiers={3: "memory"})  # type: ignore[dict-item]


# --- opening ------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "engine.toml"
    file.write_text(TEXT)
    return file


async def test_an_engine_from_a_file_alone(file: Path) -> None:
    keys = keys_of(8)
    async with open_engine(EngineConfig.from_toml(file, environ={})) as engine:
        source: Any = engine.source
        host, disk = engine.tiers.values()
        assert isinstance(source, MemoryTier) and isinstance(host, MemoryTier) and isinstance(disk, FileTier)
        for key, payload in zip(keys, payloads(keys), strict=True):
            source.put(key, payload)
        handle = await engine.store(source.weak(keys), precondition=NO_WAIT)
        await engine.drain()
        assert list((await handle.wait_routes())["disk"].completed) == keys
        await host.delete(keys)
        buffers, destination = room(8)
        async with await engine.lookup(keys) as hit:
            assert hit.runs == [("disk", 8)]
            assert (await engine.load(hit, destination)).loaded == 8
        assert buffers == payloads(keys)
        await engine.drain()
        assert host.contains_nowait(keys) == set(keys)
    assert engine.statistics().promoted_blocks == 8
    with pytest.raises(PlaceClosed):  # what was made here is closed here
        host.get(keys[0])


async def test_the_source_may_stand_beside_the_config() -> None:
    source, given = FakeTier(16, SIZE), FakeTier(16, SIZE)
    config = EngineConfig(tiers={"host": MEMORY, "given": given, "made": f"{__name__}:made_by_a_test"})
    async with open_engine(source, config) as engine:
        assert engine.source is source and engine.tiers["given"] is given
        assert isinstance(engine.tiers["made"], FakeTier) and engine.tiers["made"].pool.capacity == 4
        assert [pipeline.name for pipeline in engine.pipelines] == ["host", "given", "made"]
    given.fill(keys_of(1))  # what was given stays open


async def test_tiers_that_are_only_named_may_stand_in_a_list() -> None:
    specification = {"type": f"{__name__}:made_by_a_test", "blocks": 7}
    async with open_engine(FakeTier(16, SIZE), [MEMORY, specification, FakeTier(4, SIZE), MEMORY]) as engine:
        assert list(engine.tiers) == ["memory", "made_by_a_test", "faketier", "memory-2"]


async def test_places_that_cannot_be_joined_are_refused_also_when_they_are_made_late() -> None:
    wide = {"type": f"{__name__}:too_wide"}
    with pytest.raises(ValueError, match="blocks of"):
        async with open_engine(FakeTier(16, SIZE), {"wide": wide}):
            raise AssertionError("it opened")


def too_wide(*, block_bytes: int) -> FakeTier:
    return FakeTier(4, 2 * block_bytes)


def sealed() -> AesGcm:
    """A wrapper that a specification names by ``module:attribute``."""
    return AesGcm({"t": bytes(range(32)), "u": bytes(32)})


async def test_a_tier_that_is_named_may_be_wrapped_and_is_told_whose_blocks_it_seals() -> None:
    source, keys = FakeTier(64, SIZE), keys_of(6)
    source.fill(keys)
    wrappers = [{"type": "zstd", "level": 3}, f"{__name__}:sealed"]
    tiers = {"host": MEMORY, "below": {"type": "memory", "capacity_bytes": 1 << 14, "wrappers": wrappers}}
    async with open_engine(source, EngineConfig(tiers=tiers, promote=True)) as engine:
        host, below = engine.tiers.values()
        handle = await engine.store(source.weak(keys), precondition=NO_WAIT, tenant="t")
        await engine.drain()
        assert list((await handle.wait_routes())["below"].completed) == keys
        await host.delete(keys)
        for tenant, loaded in (("u", 0), ("t", 6)):
            async with await engine.lookup(keys, tenant=tenant) as hit:
                buffers, destination = room(len(hit))
                assert (await engine.load(hit, destination)).loaded == loaded
                assert buffers[:loaded] == payloads(keys[:loaded])
            await engine.drain()  # the promotion opens them as the same tenant
            assert set(host.contains_nowait(keys)) == set(keys[:loaded])  # type: ignore[arg-type]
        assert below.statistics().held_blocks == 0


@pytest.mark.parametrize(
    ("wrappers", "kind", "complaint"),
    [
        ("zst", ConfigError, "tiers.h.wrappers = 'zst': must be one of zstd, fp8, or module:attribute"),
        ([{"level": 3}], ConfigError, "tiers.h.wrappers = ''"),
        ("no_such_module_of_ours:x", ImportError, "no_such_module_of_ours"),
        ([], ValueError, "wrapper"),
    ],
)
async def test_a_wrapper_that_cannot_be_made_is_an_error_that_names_it(
    wrappers: object, kind: type[Exception], complaint: str
) -> None:
    with pytest.raises(kind, match=complaint):
        async with open_engine(FakeTier(16, SIZE), {"h": {**MEMORY, "wrappers": wrappers}}):
            raise AssertionError("it opened")


class Entered(ForwardingTier):
    """A tier that is entered and left, as one with a connection."""

    def __init__(self, inner: FakeTier) -> None:
        super().__init__(inner)
        self.entered = 0

    async def __aenter__(self) -> Entered:
        self.entered += 1
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.entered -= 1


async def test_what_was_entered_is_left_where_a_later_tier_cannot_be_made() -> None:
    connected = Entered(FakeTier(4, SIZE))
    with pytest.raises(ImportError) as caught:
        async with open_engine(FakeTier(16, SIZE), {"connected": connected, "lost": "no_such_module_of_ours:tier"}):  # type: ignore[dict-item]
            raise AssertionError("it opened")
    assert connected.entered == 0
    assert caught.value.__notes__ == ["while making tiers.lost of an engine, for blocks of 64 bytes"]


async def test_cancelled_at_any_await_of_opening_and_closing_everything_entered_is_left() -> None:
    caught = 0
    for nth in range(48):
        connected, opened = Entered(FakeTier(4, SIZE)), []
        tiers = {"connected": connected, "given": FakeTier(4, SIZE), "made": f"{__name__}:made_by_a_test"}

        async def body(tiers: Any = tiers, opened: list[Engine] = opened) -> None:
            async with open_engine(FakeTier(16, SIZE), tiers, promote=True) as engine:
                opened.append(engine)
                await engine.drain()

        caught += await cancelled_at_checkpoint(nth, body)
        assert connected.entered == 0
        for engine in opened:
            with pytest.raises(PipelineClosed):
                engine.store_nowait(engine.source.weak([b"k"]), precondition=NO_WAIT)  # type: ignore[attr-defined]
    assert caught >= 3


async def test_a_source_that_is_only_named_needs_the_size_of_a_block() -> None:
    config = EngineConfig(source=MEMORY, tiers={"host": MEMORY})
    with pytest.raises(ConfigError, match="block_bytes = 0: must be the size of a block"):
        async with open_engine(config):
            raise AssertionError("it opened")
    async with open_engine(attrs.evolve(config, block_bytes=SIZE)) as engine:
        assert engine.source.block_bytes == SIZE


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "complaint"),
    [
        (
            (EngineConfig(tiers={"host": MEMORY}),),
            {},
            ConfigError,
            "source = None: must be a source: open_engine.source, config",
        ),
        ((FakeTier(), EngineConfig()), {}, ValueError, "at least one tier"),
        ((FakeTier(), EngineConfig(source=FakeTier(), tiers={"h": MEMORY})), {}, TypeError, "has a source already"),
        (
            (EngineConfig(source=FakeTier(), tiers={"h": MEMORY}), [MEMORY]),
            {},
            TypeError,
            "replaces all arguments but the instruments",
        ),
        ((FakeTier(), EngineConfig(tiers={"h": MEMORY})), {"promote": True}, TypeError, "attrs.evolve"),
        (
            (FakeTier(), [FakeTier()]),
            {"policies": [], "routes": [Route("faketier")]},
            TypeError,
            "already has policies; set them there",
        ),
        ((FakeTier(), [FakeTier()]), {"on_load_failure": "again"}, ConfigError, "on_load_failure = 'again'"),
        ((FakeTier(), [FakeTier()]), {"chain": "up"}, ConfigError, "chain = 'up'"),
        ((FakeTier(), {"": FakeTier()}), {}, ConfigError, "tiers = '': must be a name"),
    ],
)
def test_what_cannot_be_opened_is_refused_at_once(
    arguments: tuple[Any, ...], options: Mapping[str, Any], kind: type[Exception], complaint: str
) -> None:
    with pytest.raises(kind, match=complaint):
        open_engine(*arguments, **options)


# --- what a file says of a tier, and cannot be ------------------------------------------------------------------------

TABLE = """
[engine]
promote = true

[engine.tiers.host]
type = "memory"
%s

[[engine.routes]]
to = "host"
%s
"""


@pytest.mark.parametrize(
    ("said", "knob", "why"),
    [
        ("capacty_bytes = 4096", ".capacty_bytes = 4096", "did you mean capacity_bytes? (TOML, line 7)"),
        (
            'capacity_bytes = "1 parsec"',
            ".capacity_bytes = '1 parsec'",
            "such as 4096, '64KiB' or '1GiB' (TOML, line 7)",
        ),
        ("capacity_bytes = 5", " = 'memory'", "must be at least block_bytes, which is 64 (TOML, line 5)"),
        ('wrappers = ["zst"]', ".wrappers = 'zst'", "one of zstd, fp8, or module:attribute (TOML, line 7)"),
        ('wrappers = [{ type = "zstd", lvel = 3 }]', ".wrappers.lvel = 3", "did you mean level? (TOML, line 7)"),
    ],
)
async def test_an_error_of_making_a_tier_says_where_the_file_says_it(said: str, knob: str, why: str) -> None:
    config = EngineConfig.from_toml(TABLE % (said, ""), environ={})
    with pytest.raises(ConfigError) as caught:
        async with open_engine(FakeTier(64, SIZE), config):
            raise AssertionError("it opened")
    assert str(caught.value).startswith(f"engine.tiers.host{knob}") and str(caught.value).endswith(why)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (TABLE.replace('"memory"', '"memry"') % ("", ""), "engine.tiers.host.type = 'memry': .*line 6"),
        (TABLE.replace('type = "memory"', "typ = 3") % ("", ""), "engine.tiers.host.type = None: .*line 5"),
        (TABLE % ("", "policis = []"), "engine.routes\\[0\\].policis = .*did you mean policies.*line 11"),
        (TABLE % ("", '[[engine.routes]]\nto = "hst"'), "engine.routes\\[1\\].to = 'hst': .*line 12"),
        (
            TABLE.replace("tiers.host", "tiers.source") % ("", ""),
            "engine.tiers = 'source': must be another name: .*line",
        ),
        (
            '[engine]\ntiers = { host = { type = "maru", timeout_ms = 0 } }',
            "engine.tiers.host.timeout_ms = 0: .*line 2",
        ),
    ],
)
async def test_an_error_says_the_line_also_of_what_is_missing_in_a_list_or_inline(text: str, where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        async with open_engine(FakeTier(64, SIZE), EngineConfig.from_toml(text, environ={})):
            raise AssertionError("it opened")


async def test_a_file_names_itself_in_an_error_of_making_a_tier(tmp_path: Path) -> None:
    path = tmp_path / "kv.toml"
    path.write_text(TABLE % ("evicton = 1", ""))
    with pytest.raises(
        ConfigError, match=r"engine.tiers.host.evicton = 1: .*did you mean eviction\? \(.*kv.toml, line 7\)"
    ):
        async with open_engine(FakeTier(64, SIZE), EngineConfig.from_toml(path, environ={})):
            raise AssertionError("it opened")


# --- names of tiers that are somebody else's --------------------------------------------------------------------------


def test_no_tier_is_called_as_the_source_is() -> None:
    with pytest.raises(ConfigError, match="tiers = 'source': must be another name"):
        EngineConfig(tiers={"host": FakeTier(64, SIZE), "source": FakeTier(64, SIZE)})


async def test_a_tier_that_calls_itself_source_gets_a_number() -> None:
    class Named(FakeTier):
        name = "source"

    async with open_engine(FakeTier(64, SIZE), [Named(64, SIZE)]) as engine:
        assert list(engine.tiers) == ["source-2"]


@pytest.mark.parametrize(
    ("names", "route", "clash"),
    [
        (["a", "b", "source-b"], Route("b", source="source"), "'source-b': .* the route from source to b has"),
        (["a", "b", "a-c", "c"], Route("c", source="a"), "'a-c': .* the route from a to c has this one"),
    ],
)
async def test_no_tier_is_called_as_a_route_is(names: list[str], route: Route, clash: str) -> None:
    tiers = {name: FakeTier(64, SIZE) for name in names}
    with pytest.raises(ConfigError, match=clash):
        async with open_engine(FakeTier(64, SIZE), tiers, routes=[route]):
            raise AssertionError("it opened")
