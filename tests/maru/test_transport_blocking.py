"""The socket of a thread without an event loop."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from maru import HandlerClosed
from maru.transport import BlockingDealer, CurveClient, CurveServer, SocketOptions, new_key_pair
from tests.support.held_by_process import nothing_new_since, open_descriptors, zmq_threads
from tests.support.maru_processes import eventually
from tests.support.maru_sockets import PATIENCE, echo_server

LONG = PATIENCE


@pytest.fixture(params=["tcp", "ipc"])
def address(request, tmp_path):
    return "tcp://127.0.0.1:*" if request.param == "tcp" else f"ipc://{tmp_path}/socket"


@pytest.fixture
def ipc(tmp_path):
    return f"ipc://{tmp_path}/socket"


@pytest.mark.parametrize("busy_poll", [0.0, 1e-4])
@pytest.mark.parametrize("window", [1, 8, 64])
def test_every_message_comes_back_in_order(address, window, busy_poll):
    options = SocketOptions(busy_poll=busy_poll)
    with echo_server(address, options) as place, BlockingDealer(place, options) as dealer:
        numbers = iter(range(1_000 - window))
        for number in range(window):
            assert dealer.send([b"", b"%d" % (number - window)])
        for number in range(1_000):
            assert dealer.receive(LONG) == [b"", b"%d" % (number - window)]
            for following in numbers:
                assert dealer.send((b"", b"%d" % following))
                break
        statistics = dealer.statistics()
        assert dealer.receive(0) is None
    assert (statistics.sent, statistics.received) == (1_000, 1_000)


def test_a_time_that_is_over_is_an_answer(ipc):
    with BlockingDealer(ipc) as dealer:
        began = time.monotonic()
        assert dealer.receive(0) is None
        assert dealer.receive(0.05) is None
        assert 0.05 <= time.monotonic() - began < LONG


def test_a_full_queue_is_an_answer_and_room_is_waited_for(ipc):
    options = SocketOptions(send_high_water_mark=3)
    with BlockingDealer(ipc, options) as dealer:
        for _ in range(3):
            assert dealer.send([b"", b"x"], 0)
        began = time.monotonic()
        assert not dealer.send([b"", b"y"], 0)
        assert not dealer.send([b"", b"y"], 0.05)
        assert time.monotonic() - began >= 0.05
        opened = threading.Event()
        thread = threading.Thread(target=serve_until, args=(ipc, opened))
        thread.start()
        assert dealer.send([b"", b"z"], LONG)
        assert [dealer.receive(LONG)[1] for _ in range(4)] == [b"x", b"x", b"x", b"z"]
        opened.set()
        thread.join()


def serve_until(address, event):
    time.sleep(0.05)
    with echo_server(address):
        assert event.wait(LONG)


def test_it_finds_its_server_again(address):
    with echo_server(address) as place:
        pass
    with BlockingDealer(place) as dealer:
        for _ in range(3):
            with echo_server(place):
                dealer.send([b"", b"x"])
                assert dealer.receive(LONG) == [b"", b"x"]


def test_what_is_no_message_leaves_the_socket_whole(ipc):
    with echo_server(ipc) as place, BlockingDealer(place) as dealer:
        with pytest.raises(TypeError):
            dealer.send([b"half", "text"])
        with pytest.raises(ValueError, match="at least one frame"):
            dealer.send([])
        dealer.send([b"whole"])
        assert dealer.receive(LONG) == [b"whole"]


def test_a_message_of_too_many_frames_is_dropped(ipc):
    with echo_server(ipc) as place, BlockingDealer(place, SocketOptions(max_frames=3)) as dealer:
        for count in (4, 10, 3):
            dealer.send([b"x"] * count)
        assert dealer.receive(LONG) == [b"x"] * 3
        assert dealer.statistics().dropped == 2


def test_a_closed_one_says_so_and_leaves_nothing(ipc):
    before = open_descriptors(collect=True), zmq_threads()
    with BlockingDealer(ipc) as dealer:
        dealer.send([b"to nobody"])
        assert open_descriptors() - before[0]
        assert eventually(lambda: zmq_threads() - before[1])  # a thread takes its name itself, in its time
    dealer.close()
    assert repr(dealer) == "<BlockingDealer: closed>"
    for call in (dealer.receive, lambda: dealer.send([b"x"])):
        with pytest.raises(HandlerClosed):
            call()
    with pytest.raises(ValueError, match="address"):
        BlockingDealer("nowhere")
    assert eventually(lambda: nothing_new_since(*before))


def test_keys_are_for_it_too(ipc):
    pair = new_key_pair()
    with echo_server(ipc, SocketOptions(curve=CurveServer(pair))) as place:
        with BlockingDealer([place], SocketOptions(curve=CurveClient(pair.public))) as dealer:
            dealer.send([b"", b"x"])
            assert dealer.receive(LONG) == [b"", b"x"]
        with BlockingDealer([place]) as dealer:
            dealer.send([b"", b"x"])
            assert dealer.receive(0.05) is None


def test_it_sleeps_without_the_interpreters_lock_and_through_signals(ipc):
    """Another thread goes on, and a signal's handler runs while it waits."""
    rung, answered = threading.Event(), threading.Event()

    def go_on_and_signal():
        for _ in range(100):
            time.sleep(0)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert rung.wait(LONG)
        with echo_server(ipc):  # so that the wait ends: what was sent is answered now
            assert answered.wait(LONG)

    before = signal.signal(signal.SIGUSR1, lambda *_: rung.set())
    try:
        with BlockingDealer(ipc) as dealer, ThreadPoolExecutor(1) as pool:
            assert dealer.send([b"", b"x"])
            other = pool.submit(go_on_and_signal)
            assert dealer.receive(LONG) == [b"", b"x"]
            answered.set()
            other.result(LONG)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_glances_stop_where_they_are_of_no_use(ipc):
    with BlockingDealer(ipc) as dealer:
        for _ in range(200):
            assert dealer.receive(0.0005) is None
        statistics = dealer.statistics()
    assert statistics.busy_polls < 15
    assert statistics.sleeps == 200
