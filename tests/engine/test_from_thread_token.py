"""A thread cancels all stores of a request together: the token of the thread face."""

import threading

import pytest

import offload
from offload import NO_WAIT, DrainUnproven, PipelineFull, Status, from_thread
from tests.engine.test_from_thread import SOON, CopyBegan, holding, tiers


def test_all_stores_of_a_request_and_no_others():
    source, destination, keys = tiers()
    token, never, later = from_thread.CancellationToken(), from_thread.Event(), from_thread.Event()
    with from_thread.open_engine(source, [destination]) as engine:
        mine = [engine.store(source.weak([key]), never, cancel_token=token) for key in keys[:5]]
        other = engine.store(source.weak(keys[5:8]), later)
        token.cancel(SOON)
        assert [future.status for future in mine] == [Status.CANCELLED] * 5
        assert token.cancel_called and not token._futures
        later.set()
        assert other.result(SOON).status is Status.COMPLETE
    assert source.statistics().held_blocks == 0


def test_two_engines_share_one():
    source, destination, keys = tiers()
    second, below, _ = tiers()
    token, never = from_thread.CancellationToken(), from_thread.Event()
    with (
        from_thread.open_engine(source, [destination]) as one,
        from_thread.open_engine(second, [below]) as two,
    ):
        futures = [
            one.store(source.weak(keys[:4]), never, cancel_token=token),
            two.store(second.weak(keys[:4]), never, cancel_token=token),
        ]
        token.cancel(SOON)
        assert [future.status for future in futures] == [Status.CANCELLED] * 2


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("kind", ["weak", "strong"])
def test_cancelled_before_no_policy_is_called_and_no_room_is_needed(full, kind):
    source, destination, keys = tiers()
    asked, never = [], from_thread.Event()

    def policy(some):
        asked.append(some)
        return {}

    config = offload.PipelineConfig(budget_blocks=4, batch_config=offload.BatchConfig(4, 4))
    with from_thread.open_engine(source, [destination], policies=[policy], config=config) as engine:
        if full:
            engine.store(source.weak(keys[:4]), never)
            engine.statistics()
        calls = len(asked)
        token = from_thread.CancellationToken()
        token.request_cancel()
        blocks = source.weak(keys[4:8]) if kind == "weak" else engine.call(source.strong, keys[4:8])
        future = engine.store(blocks, NO_WAIT, cancel_token=token)
        assert future.result(SOON).status is Status.CANCELLED
        engine.statistics()
        assert len(asked) == calls and not token._futures
        assert engine.call(source.statistics).held_blocks == 0


def test_what_is_refused_does_not_stay_in_it():
    source, destination, keys = tiers()
    token, never = from_thread.CancellationToken(), from_thread.Event()
    config = offload.PipelineConfig(budget_blocks=4, batch_config=offload.BatchConfig(4, 4))
    with from_thread.open_engine(source, [destination], config=config) as engine:
        engine.store(source.weak(keys[:4]), never)
        with pytest.raises(PipelineFull):
            engine.store(source.weak(keys[4:8]), NO_WAIT, cancel_token=token)
        assert not token._futures


def test_asked_while_the_stores_wait_in_the_mailbox():
    source, destination, keys = tiers()
    token = from_thread.CancellationToken()
    with from_thread.open_engine(source, [destination]) as engine:
        with holding(engine) as go_on:
            futures = [engine.store(source.weak([key]), NO_WAIT, cancel_token=token) for key in keys[:5]]
            token.request_cancel()
            go_on()
            token.cancel(SOON)
        assert {future.status for future in futures} == {Status.CANCELLED}
    assert not destination.contains_nowait(keys[:5])


def test_many_threads_store_while_one_cancels():
    """Whichever of join and request comes first: every store ends, and none that ended stays in the token."""
    source, destination, keys = tiers()
    token, never = from_thread.CancellationToken(), from_thread.Event()
    futures, started = [], threading.Barrier(5)
    with from_thread.open_engine(source, [destination]) as engine:

        def store(some):
            started.wait(SOON)
            for key in some:
                futures.append(engine.store(source.weak([key]), never, cancel_token=token))

        threads = [threading.Thread(target=store, args=(keys[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        started.wait(SOON)
        token.request_cancel()
        for thread in threads:
            thread.join(SOON)
        for future in futures:
            assert future.result(SOON).status is Status.CANCELLED
        assert len(futures) == len(keys) and not token._futures


@pytest.mark.parametrize("copies", [1, 2])
def test_what_is_unproven_is_raised_alone_or_as_one_group(copies):
    source, destination, keys = tiers()
    destination.faults.hang = True
    token, began = from_thread.CancellationToken(), CopyBegan()
    config = offload.PipelineConfig(
        transfer_timeout=0.2, drain_timeout=0.2, max_concurrent_transfers=2, batch_config=offload.BatchConfig(4, 4)
    )
    with from_thread.open_engine(source, [destination], config=config, instruments=[began]) as engine:
        for i in range(copies):
            began.event.clear()
            engine.store(source.weak(keys[4 * i : 4 * i + 4]), NO_WAIT, cancel_token=token)
            assert began.event.wait(SOON)
        with pytest.raises(DrainUnproven if copies == 1 else ExceptionGroup) as caught:
            token.cancel(SOON)
        if copies == 2:
            assert [type(error) for error in caught.value.exceptions] == [DrainUnproven] * 2
        assert not token._futures


def test_out_of_time_the_request_stands():
    source, destination, keys = tiers()
    token = from_thread.CancellationToken()
    with from_thread.open_engine(source, [destination]) as engine:
        with holding(engine):
            future = engine.store(source.weak(keys[:1]), NO_WAIT, cancel_token=token)
            with pytest.raises(from_thread.WaitTimeout):
                token.cancel(0.01)
        assert future.result(SOON).status is Status.CANCELLED
