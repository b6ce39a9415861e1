import inspect
import logging
from types import SimpleNamespace

import pytest
import trio

from backends.abc import WeakBlocks
from offload import OffloadBatch, OffloadContainer
from offload._instruments import Hooks
from offload.abc import CALLS, CallInstrument, Instrument
from offload.instruments import HOOKS, Counting, Every, Log, Trace, numbers_of


def container(number):
    blocks = WeakBlocks(None, [b"key %d" % number], None)
    return OffloadContainer(number, blocks, None, blocks.keys)


def everything_once(hooks):
    one, two = container(1), container(2)
    batch = OffloadBatch([one, two])
    for name, argument in inspect_hooks().items():
        subject = {"container": one, "batch": batch, "containers": [one, two]}[argument]
        hooks.fire(name, subject)


def inspect_hooks():
    return {name: list(inspect.signature(getattr(Instrument, name)).parameters)[1] for name in HOOKS}


def test_hooks_has_a_slot_for_every_hook_of_the_protocol_and_no_other():
    declared = set(Hooks.__annotations__) - {"names"}
    assert declared == {*HOOKS, *CALLS}
    assert set(HOOKS) == {name for name in vars(Instrument) if not name.startswith("_")}
    assert set(CALLS) == {name for name in vars(CallInstrument) if not name.startswith("_")}
    assert not hasattr(Hooks(), "__dict__")


def test_an_unused_hook_is_an_empty_tuple():
    hooks = Hooks([SimpleNamespace(settled=print)])
    assert hooks.settled == (print,)
    assert [name for name in HOOKS if getattr(hooks, name)] == ["settled"]


def test_a_method_inherited_from_the_protocol_is_no_hook():
    class Watcher(Instrument):
        def xfer_end(self, batch):
            pass

    hooks = Hooks([Watcher()])
    assert [name for name in HOOKS if getattr(hooks, name)] == ["xfer_end"]


def test_hooks_are_called_in_the_order_of_adding():
    seen = []
    first, second = (SimpleNamespace(settled=lambda c, n=n: seen.append((n, c))) for n in (1, 2))
    Hooks([first, second]).fire("settled", "c")
    assert seen == [(1, "c"), (2, "c")]


def test_instruments_come_and_go_at_run_time():
    hooks, counting = Hooks(), Counting()
    hooks.add(counting)
    hooks.fire("settled", container(1))
    hooks.add(counting)  # again: nothing
    hooks.fire("settled", container(1))
    hooks.remove(counting)
    assert not hooks.settled
    hooks.fire("settled", container(1))
    assert counting.statistics()["settled"] == 2
    with pytest.raises(KeyError):
        hooks.remove(counting)


def test_an_instrument_that_raises_is_removed_and_logged_and_the_others_go_on(caplog):
    class Broken:
        def settled(self, container):
            raise ValueError("broken on purpose")

        def admission(self, container):
            raise AssertionError("called after it was removed")

    before, after = Counting(), Counting()
    hooks = Hooks([before, Broken(), after])
    with caplog.at_level(logging.ERROR, "offload.abc.Instrument"):
        hooks.fire("settled", container(1))
        hooks.fire("settled", container(1))
    hooks.fire("admission", container(1))
    assert before.statistics()["settled"] == after.statistics()["settled"] == 2
    (record,) = caplog.records
    assert "settled" in record.getMessage()
    assert "Broken" in record.getMessage()
    assert "broken on purpose" in caplog.text


def test_an_instrument_may_remove_itself_and_still_raise(caplog):
    hooks = Hooks()

    class Once:
        def settled(self, container):
            hooks.remove(self)
            raise ValueError("on purpose")

    hooks.add(Once())
    with caplog.at_level(logging.ERROR, "offload.abc.Instrument"):
        hooks.fire("settled", None)
        hooks.fire("settled", None)
    assert len(caplog.records) == 1


def test_an_instrument_added_by_a_hook_is_not_called_for_the_same_event():
    counting = Counting()
    hooks = Hooks([SimpleNamespace(settled=lambda c: hooks.add(counting))])
    hooks.fire("settled", container(1))
    assert counting.statistics()["settled"] == 0
    hooks.fire("settled", container(1))
    assert counting.statistics()["settled"] == 1


@pytest.mark.parametrize("leaves", [KeyboardInterrupt, SystemExit])
def test_what_is_no_exception_goes_through(leaves):
    def settled(container):
        raise leaves

    hooks = Hooks([SimpleNamespace(settled=settled)])
    with pytest.raises(leaves):
        hooks.fire("settled", None)
    assert hooks.settled


def test_equal_and_unhashable_instruments_are_told_apart():
    class Equal:
        __hash__ = None

        def __init__(self):
            self.calls = 0

        def __eq__(self, other):
            return True

        def settled(self, container):
            self.calls += 1

    one, two = Equal(), Equal()
    hooks = Hooks([one, two])
    hooks.remove(one)
    hooks.fire("settled", None)
    assert (one.calls, two.calls) == (0, 1)


async def _async_hook(container):
    raise AssertionError


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (SimpleNamespace(setled=print), "none of the hooks"),
        (object(), "none of the hooks"),
        (Counting, "not a class"),
        (SimpleNamespace(settled=3), "not callable"),
        (SimpleNamespace(settled=_async_hook), "async"),
    ],
)
def test_what_cannot_watch_is_refused_and_nothing_is_added(bad, message):
    hooks = Hooks()
    with pytest.raises(TypeError, match=message):
        hooks.add(bad)
    assert not any(getattr(hooks, name) for name in HOOKS)
    assert repr(hooks) == "<Hooks of 0 instruments>"


def test_counting_counts_each_hook_in_a_snapshot():
    counting = Counting()
    hooks = Hooks([counting])
    nothing = counting.statistics()
    everything_once(hooks)
    assert nothing == dict.fromkeys(HOOKS, 0)
    assert counting.statistics() == dict.fromkeys(HOOKS, 1)
    with pytest.raises(TypeError):
        nothing["settled"] = 3


def test_log_writes_a_line_for_each_event_to_the_given_logger(caplog):
    logger = logging.getLogger("test.pipeline")
    with caplog.at_level(logging.INFO, "test.pipeline"):
        everything_once(Hooks([Log(logger, logging.INFO)]))
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == list(HOOKS)
    assert caplog.messages[0] == "admission: container 1"
    assert "post_claim: container 1, 2" in caplog.messages


def test_log_costs_no_text_below_the_level_of_its_logger(caplog):
    with caplog.at_level(logging.WARNING, "offload"):
        Log().saw("settled", None)  # would raise if it looked at its subject
    assert not caplog.records


def test_trace_keeps_time_hook_and_numbers():
    now = iter(range(100))
    trace = Trace(clock=lambda: float(next(now)))
    everything_once(Hooks([trace]))
    assert [(event.time, event.hook) for event in trace.events] == [(float(i), name) for i, name in enumerate(HOOKS)]
    assert trace.of(1) == list(HOOKS)
    assert trace.of(2) == [name for name, argument in inspect_hooks().items() if argument != "container"]


async def test_trace_takes_the_time_of_trio(autojump_clock):
    trace = Trace()
    started = trio.current_time()
    trace.saw("admission", container(1))
    await trio.sleep(3)
    trace.saw("settled", container(1))
    assert [event.time - started for event in trace.events] == [0, 3]


def test_trace_keeps_the_latest_events_only():
    trace = Trace(limit=2, clock=lambda: 0.0)
    for number in range(5):
        trace.saw("settled", container(number))
    assert [event.numbers for event in trace.events] == [(3,), (4,)]
    with pytest.raises(ValueError, match="limit"):
        Trace(limit=0)


def test_numbers_of_reads_a_container_a_batch_and_a_sequence():
    one, two = container(1), container(2)
    assert numbers_of(one) == (1,)
    assert numbers_of(OffloadBatch([one, two])) == (1, 2)
    assert numbers_of([two, one]) == (2, 1)
    assert numbers_of([]) == ()


def test_every_must_be_derived_from():
    with pytest.raises(TypeError, match="abstract method"):
        Every()
