"""Routes: which there are, what feeds what, and where a store goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import pytest
import trio
import trio.testing

import offload
from backends.abc import Key, Missed
from backends.base.slots import PagesDestination
from backends.testing import FakeTier
from offload import NO_WAIT, ConfigError, EngineConfig, PipelineConfig, Route, Status
from offload._engine.routes import plan
from tests.support.engine_places import SIZE, Places, keys_of

ABC = ("a", "b", "c")


def ends(routes: Sequence[Route] = (), *, sources: Sequence[str] = ABC, chain: str = "on_store") -> list[str]:
    planned = plan(ABC, sources, routes, chain)  # type: ignore[arg-type]
    return [f"{route.name}: {route.above}>{route.to} feeds {', '.join(route.feeds)}".rstrip() for route in planned]


# --- which there are ----------------------------------------------------------------------------------------------


def test_a_chain_leads_from_tier_to_tier_as_far_as_they_can_be_read() -> None:
    assert ends() == ["a: source>a feeds b", "b: a>b feeds c", "c: b>c feeds"]
    assert ends(sources=["a"]) == ["a: source>a feeds b", "b: a>b feeds"]
    assert ends(sources=["b", "c"]) == ["a: source>a feeds"]
    assert ends(chain="none") == ["a: source>a feeds"]


def test_what_is_said_replaces_the_default_or_comes_on_top() -> None:
    assert ends([Route("b", auto_chain=False)]) == ["a: source>a feeds b", "b: a>b feeds", "c: b>c feeds"]
    assert ends([Route("c", source="source")]) == [
        "a: source>a feeds b",
        "b: a>b feeds c",
        "source-c: source>c feeds",
        "c: b>c feeds",
    ]
    assert ends([Route("c", source="a")], chain="none") == ["a: source>a feeds", "a-c: a>c feeds"]
    assert ends([Route("c", source="a")]) == [
        "a: source>a feeds b, a-c",
        "b: a>b feeds c",
        "a-c: a>c feeds",
        "c: b>c feeds",
    ]


def test_behind_a_tier_that_cannot_be_read_a_route_starts_at_the_source() -> None:
    assert ends([Route("c")], sources=["a"]) == ["a: source>a feeds b", "b: a>b feeds", "c: source>c feeds"]


def test_a_route_is_behind_all_that_feed_it() -> None:
    planned = plan(
        ABC, ABC, [Route("c", source="a"), Route("c", source="source"), Route("b", source="source")], "on_store"
    )
    names = [route.name for route in planned]
    for at, route in enumerate(planned):
        assert all(names.index(fed) > at for fed in route.feeds)
    assert len(set(names)) == len(names) == 6


@pytest.mark.parametrize(
    ("routes", "sources", "complaint"),
    [
        ([Route("a", source="b")], ABC, r"routes\[0\].source = 'b': must be faster than a"),
        ([Route("b"), Route("c", source="c")], ABC, r"routes\[1\].source = 'c': must be faster than c"),
        ([Route("b", source="a")], ("b",), r"routes\[0\].source = 'a': cannot be read as a source; set 'source'"),
        ([Route("b"), Route("b", source="a")], ABC, r"routes\[1\] = 'b': there is already a route from a to b"),
    ],
)
def test_a_route_that_cannot_be_is_refused(routes: Sequence[Route], sources: Sequence[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        plan(ABC, sources, routes, "on_store")


# --- where a store goes -------------------------------------------------------------------------------------------


async def test_a_store_goes_to_the_tier_it_names_by_the_route_from_where_the_blocks_are() -> None:
    places, keys = Places(3), keys_of(8)
    places.source.fill(keys)
    async with places.open(routes=[Route("c", source="source")]) as engine:
        handle = await engine.store(places.source.weak(keys[:4]), precondition=NO_WAIT, to="c")
        assert (await handle.wait()).status is Status.COMPLETE
        assert [len(places[name]) for name in "abc"] == [0, 0, 4]
        places["a"].fill(keys[4:6])
        below = engine.store_nowait(places["a"].weak(keys[4:6]), precondition=NO_WAIT, to="b")
        assert (await below.wait()).status is Status.COMPLETE
        assert list(await below.wait_routes()) == ["c"]
        assert [len(places[name]) for name in "abc"] == [2, 2, 6]
    places.assert_at_rest()


async def test_a_route_that_does_not_chain_feeds_nobody() -> None:
    places, keys = Places(3), keys_of(4)
    places.source.fill(keys)
    async with places.open(routes=[Route("b", auto_chain=False)]) as engine:
        await engine.store(places.source.weak(keys), precondition=NO_WAIT)
        await engine.drain()
        assert [len(places[name]) for name in "abc"] == [4, 4, 0]
        await engine.store(places["b"].weak(keys), precondition=NO_WAIT, to="c")
        await engine.drain()
        assert len(places["c"]) == 4


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("to", ["c", "z"])
async def test_a_store_that_no_route_leads_to_is_refused_and_lets_go(to: str, waits: bool) -> None:
    places, keys = Places(3), keys_of(2)
    places.source.fill(keys)
    async with places.open(chain=False) as engine:
        blocks = places.source.strong(keys)
        with pytest.raises(
            ValueError, match=f"to = '{to}': there is no route to it from .* only a .from source.; declare one"
        ):
            if waits:
                await engine.store(blocks, precondition=NO_WAIT, to=to)
            else:
                engine.store_nowait(blocks, precondition=NO_WAIT, to=to)
        places.assert_at_rest()


async def test_each_route_has_its_own_policies_and_knobs() -> None:
    places, keys = Places(3), keys_of(6)
    places.source.fill(keys)

    def no_odd_ones(asked: Sequence[Key]) -> dict[Key, str]:
        return {key: "odd" for key in asked if keys.index(key) % 2}

    routes = [Route("b", policies=["presence", no_odd_ones], pipeline=PipelineConfig(max_concurrent_transfers=3))]
    async with places.open(routes=routes, policies=[lambda asked: {keys[0]: "first"}]) as engine:
        handle = await engine.store(places.source.weak(keys), precondition=NO_WAIT)
        await engine.drain()
        result = await handle.wait()
        assert result.filtered == {keys[0]: "first"}
        assert (await handle.wait_routes())["b"].filtered == dict.fromkeys(keys[1::2], "odd")
        assert places["b"].contains_nowait(keys) == places["c"].contains_nowait(keys) == {keys[2], keys[4]}
        assert [pipeline.config.max_concurrent_transfers for pipeline in engine.pipelines] == [1, 3, 1]


async def test_policies_by_name() -> None:
    places, keys = Places(2), keys_of(3)
    places.source.fill(keys)
    places["a"].fill(keys[:1])
    config = EngineConfig.from_mapping(
        {
            "routes": [
                {"to": "a", "policies": ["offload.policies:PassAll", {"type": "frequency", "threshold": 1}]},
                {"to": "b", "policies": "pass_all"},
            ],
            "tiers": places.tiers,
        }
    )
    async with offload.open_engine(places.source, config) as engine:
        first = await engine.store(places.source.weak(keys), precondition=NO_WAIT)
        assert (await first.wait()).filtered == dict.fromkeys(keys, "infrequent")
        second = await engine.store(places.source.weak(keys), precondition=NO_WAIT)
        assert (await second.wait()).filtered == {}


@pytest.mark.parametrize(
    ("policy", "kind", "complaint"),
    [
        (
            "presense",
            ConfigError,
            "routes.a.policies = 'presense': must be one of presence, pass_all, frequency, or module",
        ),
        ("no_such_module_of_ours:x", ImportError, "no_such_module_of_ours"),
        (
            "offload.policies:Nothing",
            AttributeError,
            "'offload.policies' has no 'Nothing'.*a policy for routes.a.policies",
        ),
        ("offload.policies:NOTHING_REJECTED", TypeError, "a policy is a callable or an AsyncPolicy"),
        ({"type": "frequency", "treshold": 1}, ConfigError, r"treshold = 1: .*did you mean threshold\?"),
        ({"type": "presence", "at": "b"}, ConfigError, "policies.at = 'b': presence has no parameters"),
    ],
)
async def test_a_policy_that_cannot_be_made_is_an_error_that_names_it(
    policy: object, kind: type[Exception], complaint: str
) -> None:
    places = Places()
    with pytest.raises(kind, match=complaint):
        async with places.open(routes=[Route("a", policies=[policy])]):  # type: ignore[list-item]
            raise AssertionError("it opened")


# --- whose they are -----------------------------------------------------------------------------------------------


class Ward(FakeTier):
    """A tier that must know whose blocks they are: it stores under the tenant's name, and only he finds them."""

    capabilities = attrs.evolve(FakeTier.capabilities, needs_tenants=True)

    def __init__(self, latency: float = 0.0) -> None:
        super().__init__(64, SIZE, latency=latency)
        self.carried: dict[Key, list[str]] = {}
        self.refuses = False
        self.seen: set[tuple[Key, str]] = set()

    def carry(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        if self.refuses:
            raise OSError("no book to write it in")
        for key in keys:
            self.carried.setdefault(key, []).append(tenant)

        def end() -> None:
            for key in keys:
                self.carried[key].remove(tenant)
                if not self.carried[key]:
                    del self.carried[key]

        return end

    def note(self, keys: Sequence[Key]) -> None:
        for key in keys:
            (tenant,) = set(self.carried.get(key, [""]))
            self.seen.add((key, tenant))

    async def write(self, source, refs, keys, slots):  # type: ignore[no-untyped-def]
        self.note(keys)
        return await super().write(source, refs, keys, slots)

    async def pin(self, keys):  # type: ignore[no-untyped-def]
        self.note(keys)
        return await super().pin(keys)

    async def load(self, lease, destination):  # type: ignore[no-untyped-def]
        self.note(lease.keys)
        return await super().load(lease, destination)


async def test_tenant_is_carried_until_routes_have_ended(autojump_clock: object) -> None:
    source, upper, ward, keys = FakeTier(64, SIZE), FakeTier(64, SIZE, latency=1.0), Ward(latency=1.0), keys_of(4)
    source.fill(keys)
    async with offload.open_engine(source, {"a": upper, "b": ward}) as engine:
        handle = await engine.store(source.weak(keys), precondition=NO_WAIT, tenant="t")
        await trio.sleep(0.5)
        assert set(ward.carried) == set(keys)
        await handle.wait()
        assert set(ward.carried) == set(keys)
        await handle.wait_routes()
        assert ward.carried == {} and ward.seen == {(key, "t") for key in keys}
        nobodys = await engine.store(source.weak([]), precondition=NO_WAIT, tenant="t")
        assert nobodys.status is Status.COMPLETE and ward.carried == {}


async def test_a_tenant_is_carried_until_the_hit_is_released_and_with_its_promotion(autojump_clock: object) -> None:
    source, ward, below, keys = FakeTier(64, SIZE), Ward(), Ward(latency=1.0), keys_of(4)
    below.fill(keys)
    async with offload.open_engine(source, {"a": ward, "b": below}) as engine:
        hit = await engine.lookup(keys, tenant="t")
        assert set(below.carried) == set(ward.carried) == set(keys)
        buffers = [bytearray(SIZE) for _ in keys]
        assert (await engine.load(hit, PagesDestination.over(buffers), promote=True)).loaded == 4
        await engine.release(hit)
        assert set(below.carried) == set(keys)  # by the promotion now
        await engine.drain()
        assert ward.carried == below.carried == {}
        assert ward.contains_nowait(keys) == set(keys)
        assert ward.seen == below.seen == {(key, "t") for key in keys}
        hit = await engine.lookup(keys, tenant="t")  # and the end of the engine ends what is forgotten
    assert ward.carried == {}


async def test_who_says_no_tenant_does_not_pass_for_one_who_has_the_same_keys_open(autojump_clock: object) -> None:
    source, ward, keys = FakeTier(64, SIZE), Ward(), keys_of(4)
    ward.fill(keys)
    async with offload.open_engine(source, {"a": ward}) as engine:
        async with await engine.lookup(keys, tenant="t"), await engine.lookup(keys):
            assert all(tenants == ["t", ""] for tenants in ward.carried.values()) and set(ward.carried) == set(keys)
        assert ward.carried == {}


@pytest.mark.parametrize("how", ["refused", "full", "cancelled", "closed"])
async def test_a_store_that_is_not_taken_in_carries_nothing(how: str, autojump_clock: object) -> None:
    source, ward, keys = FakeTier(64, SIZE), Ward(), keys_of(4)
    source.fill(keys)
    config = PipelineConfig(budget_blocks=4, batch_config=offload.BatchConfig(max_batch_size=4, min_batch_size=1))
    async with offload.open_engine(source, {"a": ward}, config=config) as engine:
        if how == "refused":
            with pytest.raises(TypeError):
                await engine.store(source.weak(keys), precondition=None, tenant="t")
        elif how != "closed":
            first = await engine.store(source.weak(keys), precondition=trio.Event())
            if how == "full":
                with pytest.raises(offload.PipelineFull):
                    engine.store_nowait(source.weak(keys), precondition=NO_WAIT, tenant="t")
            else:
                with trio.move_on_after(1):
                    await engine.store(source.weak(keys), precondition=NO_WAIT, tenant="t")
            first.request_cancel()
    if how == "closed":
        with pytest.raises(offload.PipelineClosed):
            await engine.store(source.weak(keys), precondition=NO_WAIT, tenant="t")
    assert ward.carried == {}


async def test_where_one_tier_cannot_carry_none_does() -> None:
    source, ward, other, keys = FakeTier(64, SIZE), Ward(), Ward(), keys_of(4)
    source.fill(keys)
    ward.fill(keys)
    async with offload.open_engine(source, {"a": ward, "b": other}) as engine:
        other.refuses = True
        blocks = source.strong(keys)
        with pytest.raises(OSError, match="no book"):
            await engine.store(blocks, precondition=NO_WAIT, tenant="t")
        with pytest.raises(OSError, match="no book"):
            await engine.lookup(keys, tenant="t")
        assert ward.carried == {} and source.statistics().held_blocks == ward.statistics().held_blocks == 0


async def test_a_promotion_that_cannot_be_carried_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    source, ward, below, keys = FakeTier(64, SIZE), Ward(), FakeTier(64, SIZE), keys_of(4)
    below.fill(keys)
    async with offload.open_engine(source, {"a": ward, "b": below}, promote=True) as engine:
        async with await engine.lookup(keys, tenant="t") as hit:
            ward.refuses = True
            result = await engine.load(hit, PagesDestination.over([bytearray(SIZE) for _ in keys]))
            assert result.loaded == 4 and Missed("behind a gap") not in result.outcomes
        await engine.drain()
        assert engine.statistics().promotions_refused == {"failed": 4}
    assert "are not promoted" in caplog.text and ward.carried == {}
