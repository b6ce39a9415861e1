"""The client's operations against the server's pure half, over a wire that fails at every place."""

import contextlib
import gc
import itertools
import weakref

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from xxhash import xxh3_64_intdigest

from maru import CannotMap, HandlerClosed, LeaseLost, MaruConfig, NoAnswer, ServerLost, ServerRefused
from maru._client import handler_operations
from maru._client.answers import Deleted, Loaded, Stored
from maru._client.correlation import Correlation
from maru._client.operations import (
    Call,
    Work,
    allocate,
    beat,
    close,
    connect,
    delete,
    exist,
    exists,
    hold,
    hold_first,
    pin,
    release,
    restore,
    settle,
    store,
    unpin,
)
from maru._client.operations.state import salt_of
from maru._client.page_states import PageState
from maru._wire import Code
from tests.support.maru_world import PAGE, Client, PublishedWorld, World
from tests.support.planted import maru as planted

PATIENCE = MaruConfig().timeout_ms / 1e3


def value_of(key):
    """A key's bytes are its own, so that another key's are noticed."""
    return (f"{key}|" * PAGE).encode()[:PAGE]


def values_of(keys):
    return [value_of(key) for key in keys]


def joined(*names, capacity=8, **config):
    world = World(capacity)
    clients = [Client(world, name, **config) for name in names]
    for client in clients:
        client.run(connect(client.s))
    return world, *clients


def keys_of(n, prefix="k"):
    return [f"{prefix}{at}" for at in range(n)]


def at_rest(*clients):
    """Nobody holds what should be free, and both sides say the same of every page."""
    world = clients[0].world
    for client in clients:
        client.fates.clear()
        client.fate = lambda call: None
        for late in client.late:
            late()
        client.late.clear()
    world.late_requests()
    world.now += (
        PATIENCE + 1e-3
    )  # then no answer will come; more than it, since a sum of floats may be less than its parts
    for _ in range(3):  # after a restart nothing is handed back before everybody is there again
        for client in clients:
            client.run(beat(client.s))
    for client in clients:
        pages, s = client.s.pages, client.s
        statistics = pages.statistics()
        assert (statistics.allocated, statistics.registering, statistics.in_doubt, statistics.returning) == (0, 0, 0, 0)
        assert (statistics.quarantined, statistics.strays, pages.behind) == (0, 0, False)
        here = {
            (region.region_id, (page - region.first) * PAGE)
            for region in pages.regions
            for page in pages.registered(region.region_id)
        }
        there = {
            (location.region_id, location.offset)
            for location in world.service.directory._state.located.values()
            if location.region_id in {region.region_id for region in pages.regions}
        }
        assert here == there
        assert len(s.pinned) == 0
        assert s.pinned.due == []
    assert world.service.directory.statistics().pinned == 0


# --- the way of a key -------------------------------------------------------------------------------------------------


def test_a_store_is_one_round_trip_and_a_load_two_of_which_none_is_waited_for():
    _, writer, reader = joined("a", "b")
    keys = keys_of(5)
    writer.put(keys[:1], values_of(keys[:1]))
    writer.calls.clear()
    assert writer.put(keys[1:], values_of(keys[1:])) == [Stored.NEW] * 4
    assert writer.calls == [Code.STORE]
    reader.get(keys[:1])
    reader.calls.clear()
    assert reader.get(keys) == values_of(keys)
    assert reader.calls == [Code.FIND, Code.UNPIN]
    at_rest(writer, reader)


def test_a_handle_freed_while_a_batch_is_summed_refuses_the_batch():
    """Another thread may do that. No other page of the batch is lost by it."""
    _, client = joined("a")
    s = client.s
    handles = client.run(handler_operations.batch_alloc(s, 3, PAGE))
    perform = client.perform

    def disturbed(effect):
        if isinstance(effect, Work):
            handler_operations.free(s, handles[1:2])
        return perform(effect)

    client.perform = disturbed
    with pytest.raises(HandlerClosed):
        client.run(handler_operations.batch_store(s, keys_of(3), handles))
    client.perform = perform
    assert client.run(handler_operations.batch_store(s, ["x", "y"], handles[::2])) == [Stored.NEW] * 2
    at_rest(client)


def test_allocating_asks_nobody_while_pages_are_free():
    _, client = joined("a")
    client.run(allocate(client.s, 1))
    client.calls.clear()
    pages = client.run(allocate(client.s, 7))
    assert client.calls == []
    client.s.pages.cancel(pages)


def test_a_reader_takes_no_region():
    world, writer, reader = joined("a", "b")
    writer.put(["k"], [value_of("k")])
    assert reader.get(["k", "x"]) == [value_of("k"), Loaded.MISSING]
    assert len(world.memory) == 1
    assert reader.s.pages.regions == []
    never = Client(world, "c", pool_size=0)
    never.run(connect(never.s))
    with pytest.raises(ValueError, match="is read-only"):
        never.put(["x"], [b"x"])


def test_duplicate_keys_leak_no_page():
    _, client = joined("a")
    answers = client.put(["x", "y", "x", "x"], values_of("xyxx"))
    assert answers == [Stored.NEW, Stored.NEW, Stored.DUPLICATE, Stored.DUPLICATE]
    assert client.put(["y", "z"], values_of("yz")) == [Stored.DUPLICATE, Stored.NEW]
    assert client.s.pages.free == 5
    at_rest(client)


def test_a_batch_beyond_the_servers_limit_goes_in_parts():
    world = World(max_keys=64)
    client = Client(world, pool_size=400 * PAGE)
    client.run(connect(client.s))
    keys = keys_of(200)
    assert client.put(keys, values_of(keys)) == [Stored.NEW] * 200
    assert client.get(keys) == values_of(keys)
    assert client.run(exist(client.s, [*keys, "x"])) == [True] * 200 + [False]
    assert client.run(pin(client.s, [*keys[:150], "x", "k1"])) == [True] * 150 + [False] * 2
    assert all(client.run(unpin(client.s, keys[:150])))
    assert client.run(delete(client.s, keys)) == [Deleted.DELETED] * 200
    assert client.calls.count(Code.STORE) == 4
    at_rest(client)


def test_keys_of_two_layouts_never_meet():
    salts = {salt_of(tenant, space) for tenant in ("", "a", "ab", "1:a", "a1:") for space in ("", "a", "b", "1:a")}
    assert len(salts) == 20
    assert all(not one.startswith(other) for one, other in itertools.permutations(salts - {""}, 2))
    world = World()
    plain = Client(world, "p")
    fp8, fp16 = (Client(world, dtype, tenant="t", namespace=dtype) for dtype in ("fp8", "fp16"))
    for client, value in ((plain, b"plain"), (fp8, b"8"), (fp16, b"16")):
        client.run(connect(client.s))
        assert client.put(["k"], [value]) == [Stored.NEW]
    assert [client.get(["k"]) for client in (plain, fp8, fp16)] == [[b"plain"], [b"8"], [b"16"]]
    assert "k" in world.service.directory._state.located  # as a published peer would ask for it


def test_a_page_whose_bytes_have_changed_is_damaged_and_counted():
    world, writer, reader = joined("a", "b")
    writer.put(["k", "l"], values_of("kl"))
    world.memory[1][3] ^= 1
    assert reader.get(["k", "l"]) == [Loaded.DAMAGED, value_of("l")]
    assert reader.s.counters.damaged == 1
    trusting = Client(world, "c", checksums=False)
    trusting.run(connect(trusting.s))
    assert trusting.get(["l"]) == [value_of("l")]
    assert trusting.get(["k"]) != [value_of("k")]
    at_rest(writer, reader, trusting)


def test_what_does_not_fit_its_destination_is_refused_and_nothing_stays_pinned():
    _, client = joined("a")
    client.put(["k"], [value_of("k")])
    with pytest.raises(ValueError, match="a stored value has 64 bytes"):
        client.get(["k"], size=PAGE - 1)
    at_rest(client)


def test_what_is_copied_stays_mapped_although_the_session_is_lost_meanwhile():
    """Another thread may reattach, and let go of every region, while this one copies into one of them."""
    _, client, other = joined("a", "b")
    client.put(["k"], [value_of("k")])
    other.put(["o"], [value_of("o")])
    perform = client.perform
    seen = []

    def disturbed(effect):
        if isinstance(effect, Work):
            spans = [weakref.ref(span) for span in client.s.spans.values()]
            client.s.lose_session(forgotten=True)
            gc.collect()
            seen.append([span() is not None for span in spans])
        return perform(effect)

    client.perform = disturbed
    with contextlib.suppress(LeaseLost):
        client.get(["o"])
    with contextlib.suppress(ServerLost):
        client.put(["l"], [value_of("l")])
    assert [all(kept) for kept in seen if kept] == [True] * len([kept for kept in seen if kept])
    assert sum(map(bool, seen)) >= 2


# --- room -------------------------------------------------------------------------------------------------------------


def test_a_full_owner_reclaims_its_least_recently_used_keys_that_nobody_reads():
    world, client, reader = joined("a", "b", auto_expand=False)
    keys = keys_of(8)
    client.put(keys, values_of(keys))
    held = reader.run(hold(reader.s, ["k0"]))
    reader.get(["k1"])
    assert client.put(["new", "newer"], values_of(["new", "newer"])) == [Stored.NEW] * 2
    assert client.run(exist(client.s, keys)) == [True] * 6 + [False] * 2  # of a prefix the end goes first
    assert len(world.memory) == 1
    reader.run(release(reader.s, held))
    at_rest(client, reader)


def test_no_more_is_reclaimed_than_is_missing():
    _, client = joined("a", capacity=256, pool_size=256 * PAGE, auto_expand=False)
    keys = keys_of(255)
    client.put(keys, values_of(keys))
    assert client.put(["new", "newer"], values_of(["new", "newer"])) == [Stored.NEW] * 2
    assert sum(client.run(exist(client.s, keys))) == 254
    at_rest(client)


def test_what_cannot_be_reclaimed_takes_another_region_and_then_the_answer_is_full():
    world, client, reader = joined("a", "b", capacity=2, expand_size=2 * PAGE)
    keys = keys_of(8)
    client.put(keys, values_of(keys))
    held = reader.run(hold(reader.s, keys))
    more = keys_of(3, "m")
    assert client.put(more[:2], values_of(more[:2])) == [Stored.NEW] * 2
    assert len(world.memory) == 2
    held += reader.run(hold(reader.s, more[:2]))
    assert client.put(more, values_of(more)) == [Stored.FULL] * 3
    assert client.run(allocate(client.s, 1)) is None
    reader.run(release(reader.s, held))
    assert client.put(more[2:], values_of(more[2:])) == [Stored.NEW]
    at_rest(client, reader)


def test_as_much_of_a_batch_as_there_is_room_for_is_stored():
    _, client = joined("a", auto_expand=False)
    client.put(["k"], [value_of("k")])
    keys = keys_of(11)
    assert client.put(keys, values_of(keys)) == [Stored.NEW] * 8 + [Stored.FULL] * 3
    at_rest(client)


def test_a_region_whose_answer_was_lost_is_found_again():
    world, client = joined("a", capacity=1)
    client.fate = lambda call: "cut" if call.code == Code.REQUEST_ALLOC else None
    with pytest.raises(NoAnswer):
        client.put(["k"], [value_of("k")])
    client.fate = lambda call: None
    assert client.put(["k"], [value_of("k")]) == [Stored.NEW]
    assert len(world.memory) == 1
    at_rest(client)


def test_another_client_of_the_same_name_keeps_its_regions():
    world = World()
    one, other = Client(world, "same"), Client(world, "same")
    other.identity = b"other"
    for client in (one, other):
        client.run(connect(client.s))
    one.put(["k"], [value_of("k")])
    other.fate = lambda call: "lost" if call.code == Code.REQUEST_ALLOC else None
    with pytest.raises(NoAnswer):
        other.put(["l"], [value_of("l")])
    other.fate = lambda call: None
    other.put(["l"], [value_of("l")])
    assert [[region.region_id for region in client.s.pages.regions] for client in (one, other)] == [[1], [2]]
    at_rest(one, other)


# --- no answer --------------------------------------------------------------------------------------------------------


def test_a_timeout_is_an_error_and_never_a_miss():
    _, client = joined("a")
    client.put(["k"], [value_of("k")])
    s = client.s
    for ask in (
        lambda: client.get(["k"]),
        lambda: client.put(["l"], [b"l"]),
        lambda: client.run(exists(s, "k")),
        lambda: client.run(exist(s, ["k"])),
        lambda: client.run(pin(s, ["k"])),
        lambda: client.run(hold(s, ["k"])),
        lambda: client.run(delete(s, ["k"])),
        lambda: client.run(beat(s)),
    ):
        for fate in ("unsent", "lost"):
            client.fates = [fate]
            with pytest.raises(NoAnswer):
                ask()
    at_rest(client)


@pytest.mark.parametrize("fate", ["lost", "cut", "late", "delayed"])
def test_a_page_is_used_again_only_once_the_fate_of_its_registration_is_known(fate):
    world, client, reader = joined("a", "b", auto_expand=False)
    keys = keys_of(7)
    client.put(keys, values_of(keys))
    client.fates = [fate]
    with pytest.raises(NoAnswer):
        client.put(["gone"], [value_of("gone")])
    [[page]] = client.s.pages.in_doubt.values()
    assert client.s.pages.state(page) is PageState.IN_DOUBT
    assert client.s.pages.allocate(1) is None
    client.calls.clear()
    assert client.put(["next"], [value_of("next")]) == [Stored.NEW]
    assert client.calls[0] == Code.RESOLVE
    world.late_requests()  # too late: that attempt is fenced
    expected = value_of("gone") if fate in ("cut", "late") else Loaded.MISSING
    assert reader.get(["gone", "next"]) in ([expected, value_of("next")], [Loaded.MISSING, value_of("next")])
    at_rest(client, reader)


def test_a_timed_out_batch_leaks_no_page_and_neither_does_a_cancelled_one():
    for fate, error in itertools.product(["unsent", "lost", "cut", "late", "delayed"], [NoAnswer, KeyboardInterrupt]):
        _, client = joined("a")
        client.put(["first"], [value_of("first")])
        client.fates, client.error = [fate], error
        with pytest.raises(error):
            client.put(keys_of(5), values_of(keys_of(5)))
        at_rest(client)
        assert client.s.pages.free in (7, 2)
        assert (client.s.pages.free == 2) == (fate in ("cut", "late", "delayed"))


def test_a_late_answer_of_a_find_gives_back_what_it_pinned():
    world, writer, reader = joined("a", "b")
    writer.put(["k", "l"], values_of("kl"))
    for ask in (lambda: reader.get(["k", "x"]), lambda: reader.run(pin(reader.s, ["k", "x"]))):
        reader.fates = ["late"]
        with pytest.raises(NoAnswer):
            ask()
        assert world.service.directory.statistics().pinned == 1
        reader.late.pop()()
        reader.run(settle(reader.s))
        assert world.service.directory.statistics().pinned == 0
    at_rest(writer, reader)


def test_deleting_again_after_a_lost_answer_gives_the_pages_back_once():
    _, client = joined("a")
    client.put(["k", "l"], values_of("kl"))
    client.fates = ["cut"]
    with pytest.raises(NoAnswer):
        client.run(delete(client.s, ["k"]))
    assert client.run(delete(client.s, ["k"])) == [Deleted.MISSING]
    assert client.run(delete(client.s, ["l"])) == [Deleted.DELETED]
    at_rest(client)
    assert client.s.pages.free == 8


# --- at every call ----------------------------------------------------------------------------------------------------


class Cancelled(BaseException):
    """As trio's: no Exception."""


def scenario_store(client, other):
    client.put(["s1", "k1", "s2", "s2"], values_of(["s1", "k1", "s2", "s2"]))


def scenario_reclaim(client, other):
    keys = keys_of(12, "r")
    client.put(keys, values_of(keys))


def scenario_expand(client, other):
    held = other.run(hold(other.s, keys_of(4)))
    try:
        client.put(keys_of(9, "e"), values_of(keys_of(9, "e")))
    finally:
        other.fates.clear()
        other.run(release(other.s, held))


def scenario_load(client, other):
    client.get(["k1", "x", "k2"])


def scenario_pin(client, other):
    assert client.run(pin(client.s, ["k1", "k2", "x"])) == [True, True, False]
    client.run(unpin(client.s, ["k1", "k2"]))


def scenario_hold(client, other):
    held = client.run(hold(client.s, ["o1", "x", "k2"]))
    client.run(release(client.s, [one for one in held if one is not None]))


def scenario_delete(client, other):
    client.run(delete(client.s, ["k1", "x", "o1"]))


def scenario_beat(client, other):
    client.run(beat(client.s))


def scenario_restart(client, other):
    client.world.restart()
    client.put(["s1", "k1"], values_of(["s1", "k1"]))
    client.get(["s1", "k2"])


def scenario_session_over(client, other):
    client.world.now += 1_000
    client.get(["k1"])
    client.put(["s1", "k1"], values_of(["s1", "k1"]))
    client.run(restore(client.s))


def scenario_forgotten(client, other):
    client.world.restart(forgets=True)
    client.put(["s1", "k1"], values_of(["s1", "k1"]))
    client.run(restore(client.s))


SCENARIOS = [
    scenario_store,
    scenario_reclaim,
    scenario_expand,
    scenario_load,
    scenario_pin,
    scenario_hold,
    scenario_delete,
    scenario_beat,
    scenario_restart,
    scenario_session_over,
    scenario_forgotten,
]


def play(scenario, fate, error, k):
    """Whether the k-th call of the scenario existed, and failed so."""
    _, client, other = joined("a", "b")
    client.put(keys_of(4), values_of(keys_of(4)))
    other.put(["o1"], [value_of("o1")])
    other.get(["k1"])
    count = itertools.count()
    client.error = lambda: error("cut off")
    client.fate = lambda call: fate if next(count) == k else None
    try:
        scenario(client, other)
    except error:
        pass
    except ServerLost:
        assert scenario in (scenario_session_over, scenario_forgotten)
    disturbed = next(count) > k
    client.fate = lambda call: None
    client.run(beat(client.s))
    other.run(beat(other.s))
    at_rest(client, other)
    reader = Client(client.world, "reader")
    reader.run(connect(reader.s))
    keys = [*keys_of(4), "o1", "s1", "s2", *keys_of(12, "r"), *keys_of(9, "e")]
    for key, got in zip(keys, reader.get(keys), strict=True):
        assert got in (value_of(key), Loaded.MISSING), key
    return disturbed


@pytest.mark.parametrize("error", [NoAnswer, ServerLost, Cancelled], ids=lambda error: error.__name__)
@pytest.mark.parametrize("fate", ["unsent", "lost", "cut", "late", "delayed"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_cut_off_at_every_call_it_leaves_no_page_and_no_pin_behind(scenario, fate, error):
    for k in range(100):
        try:
            if not play(scenario, fate, error, k):
                assert k > 0
                return
        except BaseException as exc:
            exc.add_note(f"at call {k}")
            raise
    raise AssertionError("it never ended")


# --- views ------------------------------------------------------------------------------------------------------------


def test_what_is_pinned_needs_no_further_request_and_is_given_back_once():
    world, client = joined("a")
    client.put(["k", "l"], values_of("kl"))
    assert client.run(pin(client.s, ["k", "l", "k"])) == [True] * 3
    client.calls.clear()
    held = client.run(hold(client.s, ["k", "l"]))
    assert client.calls == []
    assert client.run(delete(client.s, ["k"])) == [Deleted.PINNED]
    assert client.run(unpin(client.s, ["k", "l", "k", "k"])) == [True, True, True, False]
    assert client.run(delete(client.s, ["k"])) == [Deleted.PINNED]
    client.run(release(client.s, held))
    assert world.service.directory.statistics().pinned == 0
    assert client.run(delete(client.s, ["k", "l"])) == [Deleted.DELETED] * 2
    at_rest(client)


def test_a_forgotten_view_is_unpinned_by_the_next_call():
    _, client = joined("a")
    client.put(["k"], [value_of("k")])
    [view] = client.run(hold(client.s, ["k"]))
    client.s.pinned.dropped.append(view)  # what a finalizer does
    assert client.run(delete(client.s, ["k"])) == [Deleted.DELETED]


def test_a_view_is_lost_with_its_lease_and_asks_nobody():
    world, client = joined("a", lease=5.0)
    client.put(["k"], [value_of("k")])
    [view] = client.run(hold(client.s, ["k"]))
    client.calls.clear()
    world.now += 4.9
    client.s.check(view)
    world.now += 0.2
    with pytest.raises(LeaseLost, match="no answer from the server for"):
        client.s.check(view)
    assert client.calls == []
    client.run(beat(client.s))  # the server had not let go yet
    client.s.check(view)
    client.run(release(client.s, [view]))
    at_rest(client)


def test_after_a_restart_pins_are_taken_again_and_views_checked():
    world, writer, reader = joined("a", "b")
    writer.put(["k", "l"], values_of("kl"))
    kept, lost = reader.run(hold(reader.s, ["k", "l"]))
    world.restart()
    world.service.directory.forget(["l"])  # damaged, say
    reader.s.check(kept)  # nothing goes in the quiet time, and the restart was not heard of
    assert reader.run(exists(reader.s, "k"))
    with pytest.raises(LeaseLost, match="restarted"):
        reader.s.check(kept)
    reader.run(beat(reader.s))
    reader.s.check(kept)
    with pytest.raises(LeaseLost):
        reader.s.check(lost)
    assert world.service.directory.statistics().pinned == 1
    assert reader.s.counters.views_lost == 1
    reader.run(release(reader.s, [kept, lost]))
    writer.run(beat(writer.s))
    at_rest(reader)


def test_a_view_of_a_key_stored_anew_is_not_taken_for_the_old_one():
    world, writer, reader = joined("a", "b")
    writer.put(["k"], [value_of("k")])
    [view] = reader.run(hold(reader.s, ["k"]))
    world.restart()
    world.service.directory.forget(["k"])
    writer.put(["k"], [value_of("k")])
    reader.run(beat(reader.s))
    with pytest.raises(LeaseLost):
        reader.s.check(view)
    reader.run(release(reader.s, [view]))
    writer.run(beat(writer.s))
    assert world.service.directory.statistics().pinned == 0


def test_a_view_is_lost_with_a_server_that_stands_over_another_pool():
    """There, the same region, offset and generation are other bytes."""
    world, client = joined("a")
    client.put(["k"], [value_of("k")])
    [view] = client.run(hold(client.s, ["k"]))
    world.restart(forgets=True)
    world._regions = itertools.count(1)
    other = Client(world, "b")
    other.run(connect(other.s))
    other.put(["k"], [value_of("anew")])
    for _ in range(2):
        client.run(beat(client.s))
        with contextlib.suppress(LeaseLost):
            client.s.check(view)
            raise AssertionError
    assert client.get(["k"]) == [value_of("anew")]
    client.run(release(client.s, [view]))
    at_rest(client, other)


def test_a_region_of_another_pool_is_not_taken_for_the_one_of_the_same_number():
    world, writer, reader = joined("a", "b")
    writer.put(["k"], [value_of("k")])
    assert reader.get(["k"]) == [value_of("k")]
    world.restart(forgets=True)
    world._regions = itertools.count(1)
    another = Client(world, "c")
    another.run(connect(another.s))
    another.put(["k"], [value_of("anew")])
    assert reader.get(["k"]) == [value_of("anew")]


def test_a_copy_during_which_the_server_restarts_is_made_again():
    world, client = joined("a")
    client.put(["k"], [value_of("k")])
    seen = []

    def restart(call):
        if call.code == Code.FIND:
            seen.append(call)
        return None

    client.fate = restart
    perform = client.perform

    def disturbed(effect):
        result = perform(effect)
        if len(seen) == 1 and isinstance(effect, Work):  # the copy is over
            world.restart()
            client.call(type(seen[0])(Code.HEARTBEAT, None))  # and another thread hears of it
        return result

    client.perform = disturbed
    assert client.get(["k"]) == [value_of("k")]
    assert len(seen) == 2
    client.perform = perform
    at_rest(client)


# --- coming back ------------------------------------------------------------------------------------------------------


def test_what_was_acknowledged_is_there_after_a_restart_and_the_session_goes_on():
    world, client = joined("a")
    keys = keys_of(5)
    client.put(keys, values_of(keys))
    token = client.s.token
    world.restart()
    assert client.put(["new"], [value_of("new")]) == [Stored.NEW]
    assert client.get(keys) == values_of(keys)
    assert client.s.token == token
    assert (client.s.counters.restarts, client.s.counters.sessions_lost) == (1, 0)
    assert client.s.epoch == world.service.epoch
    at_rest(client)


def test_a_store_cut_off_by_a_restart_is_resolved_by_the_new_server():
    for fate in ("cut", "lost"):
        world, client = joined("a", auto_expand=False)
        client.put(keys_of(7), values_of(keys_of(7)))
        client.fates = [fate]
        with pytest.raises(NoAnswer):
            client.put(["k"], [value_of("k")])
        world.restart()
        client.run(beat(client.s))
        client.run(beat(client.s))
        assert client.s.pages.free == (0 if fate == "cut" else 1)
        assert client.get(["k"]) == [value_of("k") if fate == "cut" else Loaded.MISSING]
        at_rest(client)


def test_returns_that_a_restart_cut_off_come_again():
    world, client, other = joined("a", "b")
    client.put(["k", "l"], values_of("kl"))
    assert other.run(delete(other.s, ["k"])) == [Deleted.DELETED]
    client.fates = ["cut"]
    with pytest.raises(NoAnswer):
        client.run(beat(client.s))
    world.restart()
    other.run(beat(other.s))
    at_rest(client, other)
    assert client.s.pages.free == 7


def test_a_session_that_is_over_is_opened_anew_and_its_handles_are_void():
    world, client, reader = joined("a", "b")
    client.put(["k"], [value_of("k")])
    filled = client.run(allocate(client.s, 2))
    world.now += 100
    reader.run(beat(reader.s))
    with pytest.raises(ServerLost, match="ended the session"):
        client.run(store(client.s, ["x", "y"], filled, PAGE, None))
    assert client.put(["x"], [value_of("x")]) == [Stored.NEW]  # its bytes are the caller's: done again
    assert client.s.counters.sessions_lost == 1
    assert reader.get(["k", "x", "y"]) == [value_of("k"), value_of("x"), Loaded.MISSING]
    with pytest.raises(ServerLost, match="ended the session"):
        client.run(store(client.s, ["z"], filled[:1], PAGE, None))
    at_rest(client, reader)


def test_a_put_into_a_session_that_is_over_is_made_again_in_the_next_one():
    world, client = joined("a")
    client.put(["k"], [value_of("k")])
    world.now += 100
    assert client.put(["l"], [value_of("l")]) == [Stored.NEW]
    assert client.get(["k", "l"]) == values_of("kl")
    at_rest(client)


def test_what_a_server_has_forgotten_is_registered_again():
    world, client, reader = joined("a", "b", pool_size=200 * PAGE)
    keys = keys_of(150)
    client.put(keys, values_of(keys))
    world.restart(forgets=True)
    client.run(beat(client.s))
    assert client.s.counters.sessions_lost == 1
    client.run(restore(client.s))
    assert (client.s.counters.keys_kept, client.s.counters.keys_lost, client.s.former) == (150, 0, [])
    assert reader.get(keys) == values_of(keys)
    assert len(world.memory) == 1
    at_rest(client, reader)


@pytest.mark.parametrize("restarts", [None, "remembers", "forgets"])
def test_a_key_deleted_meanwhile_stays_deleted(restarts):
    world, owner, other = joined("a", "b")
    owner.put(["doc", "kept"], values_of(["doc", "kept"]))
    if restarts is not None:
        world.restart(forgets=restarts == "forgets")
    world.now += 100  # the owner stands still past its lease, and longer than a forgetful server waits for owners
    answer = Deleted.MISSING if restarts == "forgets" else Deleted.DELETED
    assert other.run(delete(other.s, ["doc"])) == [answer]
    for _ in range(2):
        owner.run(beat(owner.s))
        owner.run(restore(owner.s))
    assert owner.s.counters.sessions_lost == 1
    assert other.get(["doc"]) == owner.get(["doc"]) == [Loaded.MISSING]
    assert other.put(["doc"], [b"new"]) == [Stored.NEW]
    assert owner.get(["doc"]) == [b"new"]
    if restarts != "forgets":  # it is found in the region that was the owner's
        assert owner.get(["kept"]) == [value_of("kept")]
    at_rest(owner, other)


def test_keys_not_restored_yet_go_with_the_next_session():
    world, owner, other = joined("a", "b")
    owner.put(["doc"], [value_of("doc")])
    world.restart(forgets=True)
    owner.run(beat(owner.s))
    assert len(owner.s.former) == 1
    world.now += 100  # it stands still before it restores
    other.put(["doc"], [b"new"])
    other.run(delete(other.s, ["doc"]))
    owner.run(beat(owner.s))
    owner.run(restore(owner.s))
    assert owner.get(["doc"]) == [Loaded.MISSING]
    assert (owner.s.counters.keys_lost, owner.s.counters.sessions_lost) == (1, 2)
    at_rest(owner, other)


@pytest.mark.parametrize("code", [Code.BATCH_EXISTS_KV, Code.REQUEST_ALLOC])
def test_restore_ends_with_a_session_lost_meanwhile(code):
    world, owner, other = joined("a", "b")
    owner.put(["doc"], [value_of("doc")])
    world.restart(forgets=True)
    owner.run(beat(owner.s))
    ask = owner.call

    def ask_and_stand_still(call):
        if call.code != code:
            return ask(call)
        owner.call = ask
        try:
            return ask(call)
        finally:
            world.now += 100
            other.put(["doc"], [b"new"])
            other.run(delete(other.s, ["doc"]))
            owner.run(beat(owner.s))

    owner.call = ask_and_stand_still
    with contextlib.suppress(ServerRefused):
        owner.run(restore(owner.s))
    assert owner.call == ask
    owner.run(restore(owner.s))
    assert owner.get(["doc"]) == [Loaded.MISSING]
    assert (owner.s.counters.keys_lost, owner.s.counters.keys_kept) == (1, 0)
    at_rest(owner, other)


def test_restore_drops_a_page_that_was_damaged():
    world, client, reader = joined("a", "b")
    keys = keys_of(4)
    client.put(keys, values_of(keys))
    [span] = client.s.spans.values()
    span.memory[PAGE + 5] ^= 0xFF
    assert reader.get(keys)[1] is Loaded.DAMAGED
    world.restart(forgets=True)
    client.run(beat(client.s))
    client.run(restore(client.s))
    counters = client.s.counters
    assert (counters.keys_kept, counters.keys_lost, counters.damaged) == (3, 1, 1)
    assert reader.get(keys) == [value_of("k0"), Loaded.MISSING, value_of("k2"), value_of("k3")]
    at_rest(client, reader)


@pytest.mark.parametrize("fate", ["lost", "late"])
@pytest.mark.parametrize("failing", [1, 2])
def test_restore_that_fails_counts_each_key_once(fate, failing):
    world, client = joined("a")
    pages = client.run(allocate(client.s, 4))
    sums = [xxh3_64_intdigest(bytes(PAGE)), 1]  # the second one is damaged
    client.run(store(client.s, ["whole", "damaged"], pages[:2], PAGE, sums))
    client.run(store(client.s, ["plain", "other"], pages[2:], PAGE, None))
    world.restart(forgets=True)
    client.run(beat(client.s))
    stores = []

    def fate_of(call):
        if call.code is Code.STORE:
            stores.append(call)
            if len(stores) == failing:
                return fate
        return None

    client.fate = fate_of
    with pytest.raises(NoAnswer):
        client.run(restore(client.s))
    client.run(beat(client.s))
    client.run(restore(client.s))
    counters = client.s.counters
    assert (counters.keys_kept, counters.keys_lost, counters.damaged) == (3, 1, 1)
    at_rest(client)


def test_restore_registers_the_first_checksum_and_depth():
    world, client = joined("a")
    right = xxh3_64_intdigest(bytes(PAGE))  # the pages are zeros; a sum made again would be this one
    pages = client.run(allocate(client.s, 4))
    client.run(store(client.s, ["deep", "other"], pages[:2], PAGE, [right, right + 1], [3, 4]))
    client.run(store(client.s, ["first"], pages[2:3], PAGE, [right], [None]))
    client.run(store(client.s, ["plain"], pages[3:], PAGE, None, [7]))
    world.restart(forgets=True)
    client.run(beat(client.s))
    client.run(restore(client.s))
    located = world.service.directory._state.located
    found = {key: (location.checksum, location.depth) for key, location in located.items()}
    assert found == {"deep": (right, 3), "first": (right, None), "plain": (None, 7)}
    at_rest(client)


def test_what_cannot_be_registered_again_is_counted():
    world, client = joined("a")
    client.put(keys_of(8), values_of(keys_of(8)))
    world.restart(forgets=True)
    world.capacity = 0
    client.run(beat(client.s))
    client.run(restore(client.s))
    assert (client.s.counters.keys_kept, client.s.counters.keys_lost, client.s.former) == (0, 8, [])


def test_keys_of_a_region_lost_by_a_restart_are_missed():
    world, client, other = joined("a", "b")
    client.put(["k", "deleted"], values_of(["k", "deleted"]))
    other.run(delete(other.s, ["deleted"]))  # its owner has not heard of it, and never will: the region is gone before
    directory = world.service.directory
    directory.drop_region(1)
    world.restart()
    world.memory.clear()
    client.run(beat(client.s))
    client.run(beat(client.s))
    assert client.s.pages.regions == []
    client.run(restore(client.s))
    assert client.get(["k", "deleted"]) == [Loaded.MISSING] * 2
    assert client.put(["k"], [value_of("k")]) == [Stored.NEW]


@pytest.mark.parametrize("how", ["hold", "hold_first", "load"])
def test_a_region_forgotten_while_another_is_mapped_is_mapped_again(how):
    _, one, other, reader = joined("a", "b", "c")
    one.put(["k0"], [value_of("k0")])
    other.put(["k1"], [value_of("k1")])
    keys, mapping, forgotten = ["k0", "k1"], reader.map, []

    def forgetting(effect):
        span = mapping(effect)
        if reader.s.spans and not forgotten:
            forgotten.append(reader.s.spans.popitem())
        return span

    reader.map = forgetting
    if how == "load":
        assert reader.get(keys) == values_of(keys)
    else:
        held = reader.run(hold(reader.s, keys)) if how == "hold" else reader.run(hold_first(reader.s, keys))[0]
        assert {pin.region_id for pin in held} <= reader.s.spans.keys()
        assert len(held) == 2
        reader.run(release(reader.s, held))
    assert forgotten
    at_rest(one, other, reader)


def test_a_prefix_ends_before_a_region_that_cannot_be_mapped():
    _, one, other, reader = joined("a", "b", "c")
    one.put(["k0"], [value_of("k0")])
    other.put(["k1"], [value_of("k1")])
    mapping = reader.map

    def refusing(effect):
        if reader.s.spans:
            reader.s.spans.clear()
            raise CannotMap("a test")
        return mapping(effect)

    reader.map = refusing
    held, behind, why = reader.run(hold_first(reader.s, ["k0", "k1"]))
    assert [len(held), len(behind), type(why)] == [1, 1, CannotMap]
    assert held[0].region_id in reader.s.spans
    reader.run(release(reader.s, [*held, *behind]))
    at_rest(one, other, reader)


def test_foreign_regions_that_are_gone_are_let_go_of():
    world, writer, reader = joined("a", "b")
    writer.put(["k"], [value_of("k")])
    reader.get(["k"])
    writer.run(delete(writer.s, ["k"]))
    writer.run(close(writer.s))
    assert list(reader.s.spans) == [1]
    for _ in range(8):
        reader.run(beat(reader.s))
    assert world.memory == {}
    assert reader.s.spans == {}


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fate", [None, "unsent", "lost", "cut"])
def test_closing_is_silent_bounded_and_final(fate):
    _, client = joined("a")
    client.put(["k"], [value_of("k")])
    client.fates = [fate]
    seen = []
    client.fate = lambda call: seen.append(call) or fate
    client.run(close(client.s))
    client.run(close(client.s))
    assert [call.code for call in seen] == [Code.CLOSE]
    assert seen[0].patience <= 0.5
    for ask in (exists(client.s, "k"), beat(client.s), allocate(client.s, 1), delete(client.s, ["k"])):
        with pytest.raises(HandlerClosed):
            client.run(ask)


def test_no_page_is_in_doubt_after_reattaching():
    world, client = joined("a")
    client.fates = [None, None, "cut"]
    with pytest.raises(NoAnswer):
        client.put(["k"], [value_of("k")])
    assert client.s.pages.in_doubt
    world.restart()
    for _ in range(2):
        client.run(exists(client.s, "k"))
    assert not client.s.pages.in_doubt
    at_rest(client)


@pytest.mark.parametrize("k", range(5))
def test_a_reattachment_that_was_cut_off_is_made_again(k):
    world, client, other = joined("a", "b")
    client.put(["k"], [value_of("k")])
    [view] = client.run(hold(client.s, ["k"]))
    world.restart()
    client.run(exists(client.s, "k"))
    client.fates = [None] * k + ["cut"]
    for _ in range(3):
        with contextlib.suppress(NoAnswer):
            client.run(exists(client.s, "k"))
    client.s.check(view)
    client.run(release(client.s, [view]))
    if k != 3:  # the pin of a FIND whose answer is lost stays until the session ends
        at_rest(client, other)


def test_a_late_answer_of_a_session_that_is_over_is_not_heard():
    """Its returns are numbered like those of the new session, and are not of it."""
    world, client, other = joined("a", "b")
    client.put(["k", "l"], values_of("kl"))
    other.run(delete(other.s, ["k"]))
    client.fates = ["late"]
    with pytest.raises(NoAnswer):
        client.run(beat(client.s))
    world.now += 100
    client.put(["m"], [value_of("m")])
    client.late.pop()()
    assert (client.s.pages.acknowledged, client.s.pages.statistics().strays) == (0, 0)
    assert other.run(delete(other.s, ["m"])) == [Deleted.DELETED]
    at_rest(client, other)
    assert client.s.pages.free == 8


def test_a_late_answer_of_a_server_that_is_gone_is_no_news():
    world, client = joined("a")
    client.put(["k"], [value_of("k")])
    client.fates = ["late"]
    with pytest.raises(NoAnswer):
        client.run(beat(client.s))
    world.restart()
    client.run(beat(client.s))
    client.run(beat(client.s))
    assert not client.s.unsettled
    client.late.pop()()
    assert not client.s.unsettled
    assert client.s.epoch == world.service.epoch


def test_a_server_that_a_late_answer_made_look_gone_is_told_what_is_still_held():
    """The answer is of a server between two restarts, which nobody here had met. Back at the last one, all is pinned again."""
    world, client = joined("a")
    client.put(["k"], [value_of("k")])
    [view] = client.run(hold(client.s, ["k"]))
    world.restart()
    client.fates = ["late"]
    with pytest.raises(NoAnswer):
        client.run(beat(client.s))
    world.restart()
    client.run(beat(client.s))
    client.late.pop()()
    client.run(beat(client.s))
    client.s.check(view)
    client.run(release(client.s, [view]))
    at_rest(client)


def test_what_was_due_to_a_server_that_is_gone_is_not_given_back_to_the_next():
    world, client = joined("a")
    client.put(["k"], [value_of("k")])
    [view] = client.run(hold(client.s, ["k"]))
    client.fates = ["unsent"]
    with pytest.raises(NoAnswer):
        client.get(["k"])
    client.fates = [None, "unsent"]
    client.get(["k"])
    assert client.s.pinned.due == ["k"]
    world.restart()
    client.call(Call(Code.HEARTBEAT, None))
    client.run(beat(client.s))
    assert client.s.pinned.due == []
    assert world.service.directory.statistics().pinned == 1
    client.s.check(view)
    client.run(release(client.s, [view]))
    at_rest(client)


def test_what_is_closed_stays_readable():
    _, writer, reader = joined("a", "b")
    writer.put(["k"], [value_of("k")])
    writer.run(close(writer.s))
    assert reader.get(["k"]) == [value_of("k")]


def test_nothing_is_asked_before_connecting():
    client = Client(World())
    with pytest.raises(HandlerClosed, match="connect"):
        client.get(["k"])
    assert client.calls == []


def test_a_refused_handshake_is_an_error():
    _, client, _ = joined("a", "b")
    world = World(max_sessions=1)
    for name in "ab":
        client = Client(world, name)
        if name == "a":
            client.run(connect(client.s))
        else:
            with pytest.raises(ServerRefused):
                client.run(connect(client.s))


# --- with a published server ------------------------------------------------------------------------------------------


def published(*names, **config):
    world = PublishedWorld()
    clients = [Client(world, name, checksums=False, **config) for name in names]
    for client in clients:
        client.run(connect(client.s))
    world.asked.clear()
    return world, *clients


def test_a_published_server_is_asked_in_three_phases_and_for_nothing_it_does_not_know():
    world, writer, reader = published("a", "b")
    writer.put(["k0"], [value_of("k0")])
    world.asked.clear()
    keys = ["k1", "k0", "k2", "k1"]
    assert writer.put(keys, values_of(keys)) == [Stored.NEW, Stored.DUPLICATE, Stored.NEW, Stored.DUPLICATE]
    assert world.asked == [Code.BATCH_EXISTS_KV, Code.BATCH_REGISTER_KV]
    assert writer.s.pages.free == 5
    assert writer.put(["k0"], [value_of("k0")]) == [Stored.DUPLICATE]
    world.asked.clear()
    assert reader.get(["k0", "x", "k1", "y", "k2"]) == [
        value_of("k0"),
        Loaded.MISSING,
        value_of("k1"),
        Loaded.MISSING,
        value_of("k2"),
    ]
    assert set(world.pins.values()) == {0}
    assert reader.run(pin(reader.s, ["k0", "x", "k1"])) == [True, False, False]
    assert writer.run(delete(writer.s, ["k0", "x"])) == [Deleted.MISSING_OR_PINNED] * 2
    assert reader.run(unpin(reader.s, ["k0", "k1"])) == [True, False]
    assert writer.run(delete(writer.s, ["k0"])) == [Deleted.DELETED]
    assert writer.s.pages.free == 6
    writer.run(beat(writer.s))
    writer.run(close(writer.s))
    assert world.handles == {}


@pytest.mark.parametrize("fate", ["lost", "cut", "late", "delayed"])
def test_what_a_published_server_did_not_answer_is_quarantined_until_its_region_ends(fate):
    world, client = published("a", auto_expand=False)
    client.put(keys_of(5), values_of(keys_of(5)))
    client.fates = [None, fate]
    with pytest.raises(NoAnswer):
        client.put(["x", "y"], values_of("xy"))
    assert client.s.pages.statistics().quarantined == 2
    assert client.put(["u", "v", "w"], values_of("uvw")) == [Stored.NEW, Stored.FULL, Stored.FULL]
    world.late_requests()
    assert client.get(["x"]) in ([value_of("x")], [Loaded.MISSING])
    for _ in range(3):
        client.run(beat(client.s))
    assert client.s.pages.statistics().quarantined == 2


def test_what_another_client_deleted_at_a_published_server_is_noticed_when_it_is_stored_again():
    world, writer, other = published("a", "b")
    writer.put(["k"], [value_of("k")])
    assert other.run(delete(other.s, ["k"])) == [Deleted.DELETED]
    assert writer.s.pages.free == 7
    assert writer.put(["k"], [value_of("k")]) == [Stored.NEW]
    assert writer.s.pages.free == 7
    assert other.get(["k"]) == [value_of("k")]
    assert world.keys["k"][1] == PAGE


def test_a_pin_may_be_undone_by_another_client_of_a_published_server():
    world, one, other = published("a", "b")
    one.put(["k"], [value_of("k")])
    assert one.run(pin(one.s, ["k"])) == [True]
    assert other.run(unpin(other.s, ["k", "k"])) == [True, False]
    assert world.pins["k"] == 0


def test_a_published_server_that_has_forgotten_a_region_gets_its_keys_again():
    world, client = published("a")
    client.put(keys_of(5), values_of(keys_of(5)))
    world.handles.clear()
    world.keys.clear()
    client.run(beat(client.s))
    assert client.s.pages.regions == []
    client.run(restore(client.s))
    assert client.get(keys_of(5)) == values_of(keys_of(5))


def test_a_server_of_ours_may_be_replaced_by_a_published_one_and_back():
    world, client = joined("a")
    client.put(["k"], [value_of("k")])
    client.world = other = PublishedWorld()
    other.now = world.now
    with pytest.raises(NoAnswer):  # a published server cannot say that it does not know what it was asked
        client.run(beat(client.s))
    assert client.put(["l"], [value_of("l")]) == [Stored.NEW]
    assert client.get(["k", "l"]) == [Loaded.MISSING, value_of("l")]
    client.run(restore(client.s))
    assert client.get(["k", "l"]) == values_of("kl")
    client.world = world
    client.run(beat(client.s))  # its answer has an epoch
    assert client.get(["k", "l"]) == [value_of("k"), Loaded.MISSING]
    assert client.put(["m"], [value_of("m")]) == [Stored.NEW]


def test_closing_gives_a_published_server_its_pins_back():
    world, client = published("a")
    client.put(["k"], [value_of("k")])
    client.run(pin(client.s, ["k", "k"]))
    client.run(hold(client.s, ["k"]))
    client.run(close(client.s))
    assert set(world.pins.values()) == {0}


# --- which call an answer belongs to ----------------------------------------------------------------------------------


def test_sequences_start_at_one_and_wrap_without_meeting_one_that_waits():
    calls = Correlation(4)
    assert [calls.begin(name) for name in "abc"] == [1, 2, 3]
    calls = Correlation(4, first=0xFFFF_FFFE)
    assert [calls.begin(name) for name in "abc"] == [0xFFFF_FFFE, 0xFFFF_FFFF, 1]
    calls._next = 0xFFFF_FFFE
    calls.give_up(1)
    assert calls.begin("d") == 2


def test_an_answer_goes_to_its_call_or_to_nobody():
    calls = Correlation(3)
    a, b, c = (calls.begin(name) for name in "abc")
    assert calls.is_full
    calls.give_up(b)
    assert not calls.is_full
    assert (calls.answered(c), calls.answered(a), calls.answered(b)) == ("c", "a", None)
    assert calls.late(b) == "b"
    assert (calls.answered(b), calls.late(b), calls.late(99)) == (None, None, None)
    statistics = calls.statistics()
    assert (statistics.waiting, statistics.given_up, statistics.late, statistics.unknown) == (0, 0, 1, 2)
    calls.unsent(calls.begin("d"))
    e = calls.begin("e")
    calls.give_up(calls.begin("f"))
    assert calls.lost() == ["e"]
    assert calls.answered(e) is None
    assert len(calls) == 0


def test_calls_given_up_are_remembered_within_a_bound():
    calls = Correlation(1)
    for _ in range(10_000):
        calls.give_up(calls.begin("x"))
    assert calls.statistics().given_up <= 4_096


# --- all of it at once ------------------------------------------------------------------------------------------------

NAMES = keys_of(12)
FATES = [None, None, None, "unsent", "lost", "cut", "late", "delayed"]


def test_a_region_of_an_ended_session_that_is_only_read_is_not_adopted():
    """It would be written by way of a read-only mapping, which ends the process."""
    world = World()
    client = Client(world)
    client.run(connect(client.s))
    client.put(["k"], [value_of("k")])
    world.now += 20.0  # the lease is over
    assert client.get(["k"]) == [
        value_of("k")
    ]  # by way of a new session: the region is an orphan, and mapped to be read
    client.fate = lambda call: "unsent" if call.code == Code.REQUEST_ALLOC else None
    with pytest.raises(NoAnswer):  # whether there is a region, which was asked for, is not known
        client.run(allocate(client.s, 1))
    client.fate = lambda call: None
    assert client.run(allocate(client.s, 1))
    assert [region.region_id for region in client.s.pages.regions] == [2]


class Machine(RuleBasedStateMachine):
    """Two clients and a server, with losses, late arrivals, restarts and leases that end.

    What is read is always what was stored under that key; what was acknowledged is there until somebody deletes it, or it
    makes room; what was deleted stays deleted until somebody stores it; and in the end nobody holds what should be free.
    """

    index = "off"

    def __init__(self):
        super().__init__()
        self.world = World(capacity_regions=6)
        self.clients = [
            Client(self.world, name, pool_size=4 * PAGE, auto_expand=name == "a", index=self.index) for name in "ab"
        ]
        for client in self.clients:
            client.run(connect(client.s))
        self.held = [[], []]
        self.memory = {}
        self.gone = set()  # deleted, and not stored since
        self.unsure = set()  # a store without an answer may be done late
        self.has_forgotten = False  # then owners may register again what was deleted before they had heard of it

    def storing(self, keys):
        self.gone.difference_update(keys)
        self.unsure.update(keys)

    def with_fates(self, who, data):
        client = self.clients[who]
        client.fates = data.draw(st.lists(st.sampled_from(FATES), max_size=4))
        client.error = lambda: NoAnswer("no answer")
        client.fate = lambda call: client.fates.pop(0) if client.fates else None
        return client

    def attempt(self, client, do):
        try:
            return do()
        except NoAnswer:
            return None
        except (
            ServerLost,
            ServerRefused,
            LeaseLost,
        ) as exc:  # the session was lost, twice in one call, or while copying
            known = isinstance(exc, LeaseLost) or "ended the session" in str(exc) or exc.word == "no_session"
            if not known:
                raise
            return None
        finally:
            client.fates.clear()

    who = st.integers(0, 1)
    some = st.lists(st.sampled_from(NAMES), max_size=5)

    @rule(who=who, keys=some, data=st.data())
    def put(self, who, keys, data):
        self._put(self.with_fates(who, data), keys)

    def _put(self, client, keys):
        known = {*keys} - self.unsure
        self.storing(keys)
        answers = self.attempt(client, lambda: client.put(keys, values_of(keys)))
        if answers is not None:
            self.unsure -= known
            assert len(answers) == len(keys)
            assert set(answers) <= {Stored.NEW, Stored.DUPLICATE, Stored.FULL}

    @rule(who=who, keys=some, data=st.data())
    def get(self, who, keys, data):
        client = self.with_fates(who, data)
        for key, got in zip(keys, self.attempt(client, lambda: client.get(keys)) or (), strict=False):
            assert got in (value_of(key), Loaded.MISSING)

    @rule(who=who, keys=some, between=st.sampled_from(["delete", "restart", "forget", "sleep"]), data=st.data())
    def get_while_something_happens(self, who, keys, between, data):
        client, other = self.clients[who], self.clients[1 - who]
        keys = list(dict.fromkeys(keys))
        self.storing([*keys, *NAMES] if between == "delete" else keys)
        self.attempt(other, lambda: other.put(keys, values_of(keys)))
        self.attempt(client, lambda: client.get(keys))  # its regions are mapped
        self.with_fates(who, data)
        perform = client.perform

        def disturbed(effect):
            if isinstance(effect, Work):
                client.perform = perform
                if between == "delete":  # and write into the pages that came back
                    self.attempt(other, lambda: other.run(delete(other.s, NAMES)))
                    self.attempt(other, lambda: other.put(NAMES[::-1], values_of(NAMES[::-1])))
                elif between == "sleep":
                    self.world.now += 20.0
                else:
                    self.has_forgotten |= between == "forget"
                    self.world.restart(forgets=between == "forget")
            return perform(effect)

        client.perform = disturbed
        for key, got in zip(keys, self.attempt(client, lambda: client.get(keys)) or (), strict=False):
            assert got in (value_of(key), Loaded.MISSING)
        client.perform = perform

    @rule(who=who, keys=some, data=st.data())
    def exist(self, who, keys, data):
        client = self.with_fates(who, data)
        there = self.attempt(client, lambda: client.run(exist(client.s, keys)))
        if there is not None:
            assert there == self.world.service.directory.exists(client.s.names(keys))

    @rule(who=who, keys=some, data=st.data())
    def hold(self, who, keys, data):
        client = self.with_fates(who, data)
        got = self.attempt(client, lambda: client.run(hold(client.s, keys)))
        self.held[who] += [one for one in got or () if one is not None]
        self.memory.update({one: client.s.spans[one.region_id].memory for one in got or () if one is not None})

    @rule(who=who, data=st.data())
    def release(self, who, data):
        client = self.with_fates(who, data)
        held, self.held[who] = self.held[who], []
        self.attempt(client, lambda: client.run(release(client.s, held)))

    @rule(who=who, keys=some, data=st.data())
    def delete(self, who, keys, data):
        self._delete(self.with_fates(who, data), keys)

    def _delete(self, client, keys):
        answers = self.attempt(client, lambda: client.run(delete(client.s, keys))) or ()
        deleted = {key for key, answer in zip(keys, answers, strict=False) if answer is Deleted.DELETED}
        self.gone |= deleted - self.unsure

    def _know_again(self):
        """Have nothing left that may be done late, or registered again."""
        self.world.late_requests()
        for client in self.clients * 3:
            self.attempt(client, lambda client=client: client.run(beat(client.s)))
            self.attempt(client, lambda client=client: client.run(restore(client.s)))
        is_anew = self.world.now < self.world.service.anew_until
        if not is_anew and not any(client.s.former or client.s.pages.in_doubt for client in self.clients):
            self.has_forgotten = False
            self.gone.clear()
            self.unsure.clear()

    @rule(who=who, keys=some, restarts=st.booleans(), data=st.data())
    def stand_still_while_another_deletes(self, who, keys, restarts, data):
        self._know_again()
        self._put(self.clients[who], keys)
        self.world.now += 20.0
        if restarts:
            self.world.restart()
            self.world.now += 20.0
        self._delete(self.clients[1 - who], keys)
        self.beat(who, data)
        self.restore(who, data)

    @rule(who=who, n=st.integers(1, 3), keep=st.booleans(), data=st.data())
    def fill_by_hand(self, who, n, keep, data):
        client = self.with_fates(who, data)
        pages = self.attempt(client, lambda: client.run(allocate(client.s, n)))
        if pages and not keep:
            client.s.pages.cancel(pages)
        elif pages:
            keys = data.draw(st.lists(st.sampled_from(NAMES), min_size=n, max_size=n))
            self.storing(keys)
            for page, key in zip(pages, keys, strict=True):
                region = client.s.pages.region_of(page)
                offset = (page - region.first) * PAGE
                client.s.spans[region.region_id].memory[offset : offset + PAGE] = value_of(key)
            self.attempt(client, lambda: client.run(store(client.s, keys, pages, PAGE, None)))

    @rule(who=who, data=st.data())
    def beat(self, who, data):
        client = self.with_fates(who, data)
        self.attempt(client, lambda: client.run(beat(client.s)))

    @rule(who=who, data=st.data())
    def restore(self, who, data):
        client = self.with_fates(who, data)
        self.attempt(client, lambda: client.run(restore(client.s)))

    @rule(seconds=st.floats(0.0, 8.0))
    def time_passes(self, seconds):
        self.world.now += seconds

    @rule()
    def restart(self):
        self.world.restart()

    @rule()
    def restart_with_nothing(self):
        self.has_forgotten = True
        self.world.restart(forgets=True)

    @rule()
    def late_requests(self):
        self.world.late_requests()

    @rule()
    def another_pool(self):
        """Region numbers begin anew."""
        self.has_forgotten = True
        self.world.restart(forgets=True)
        self.world._regions = itertools.count(1)

    @precondition(lambda self: any(client.late for client in self.clients))
    @rule(who=who)
    def late_answers(self, who):
        client = self.clients[who]
        while client.late:
            client.late.pop(0)()

    @invariant()
    def a_deleted_key_stays_deleted(self):
        assert self.has_forgotten or self.gone.isdisjoint(self.world.service.directory.list_keys())

    @invariant()
    def a_view_that_is_valid_shows_its_key(self):
        for client, held in zip(self.clients, self.held, strict=True):
            for view in held:
                try:
                    client.s.check(view)
                except LeaseLost:
                    continue
                memory = self.memory[view]
                assert bytes(memory[view.offset : view.offset + view.length]) == value_of(view.key)

    def teardown(self):
        for who, client in enumerate(self.clients):
            client.fate = lambda call: None
            for late in client.late:
                late()
            client.late.clear()
            self.world.late_requests()
            client.run(beat(client.s))
            client.run(release(client.s, self.held[who]))
        at_rest(*self.clients)
        for client in self.clients:
            for key, got in zip(NAMES, client.get(NAMES), strict=True):
                assert got in (value_of(key), Loaded.MISSING)


class MachineOverAnIndex(Machine):
    """The same, with lookups and loads that ask nobody where the index tells."""

    index = "auto"


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestMachineOverAnIndex = MachineOverAnIndex.TestCase
TestMachineOverAnIndex.settings = TestMachine.settings


def test_the_machine_finds_deleted_keys_registered_again(monkeypatch):
    planted.deleted_keys_are_registered_again(monkeypatch)
    few = settings(TestMachine.settings, derandomize=True, database=None, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Machine, settings=few)


@pytest.mark.long
class TestMachineLong(Machine.TestCase):
    settings = settings(max_examples=2_000, stateful_step_count=50, deadline=None)


@pytest.mark.long
class TestMachineOverAnIndexLong(MachineOverAnIndex.TestCase):
    settings = settings(max_examples=2_000, stateful_step_count=50, deadline=None)
