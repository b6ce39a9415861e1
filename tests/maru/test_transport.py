"""Messages through real sockets: nothing lost, nothing misdelivered, nobody left waiting."""

from __future__ import annotations

import random
import threading
import time

import pytest
import trio
import trio.testing
import zmq

from maru.transport import Link, SocketOptions, open_socket
from tests.support.held_by_process import nothing_new_since, open_descriptors, zmq_is_idle, zmq_threads
from tests.support.maru_sockets import PATIENCE, Calls, call_often, echo, echo_server, eventually, open_calls


@pytest.fixture(params=["tcp", "ipc"])
def address(request, tmp_path):
    """Where to listen."""
    return "tcp://127.0.0.1:*" if request.param == "tcp" else f"ipc://{tmp_path}/socket"


@pytest.fixture
def ipc(tmp_path):
    return f"ipc://{tmp_path}/socket"


# --- there and back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("busy_poll", [0.0, 100e-6])
@pytest.mark.parametrize("window", [1, 8, 64])
async def test_every_call_gets_its_own_reply(address, window, busy_poll):
    options = SocketOptions(busy_poll=busy_poll)
    with echo_server(address, options) as place, trio.fail_after(5 * PATIENCE):
        async with open_calls(place, options) as calls:
            await call_often(calls, 1_000, window)
            statistics = calls.socket.statistics()
    assert (statistics.sent, statistics.received, statistics.waiting) == (1_000, 1_000, 0)
    assert not calls.strays


async def many_calls(address, count, window):
    with echo_server(address) as place, trio.fail_after(5 * PATIENCE + count / 10):
        async with open_calls(place) as calls:
            await call_often(calls, count, window)
            assert calls.socket.statistics().received == count
    assert not calls.strays and not calls.waiting


@pytest.mark.parametrize("window", [1, 8, 64])
async def test_many_calls_without_a_stall_or_a_wrong_reply(ipc, window):
    await many_calls(ipc, 6_667, window)


@pytest.mark.long
@pytest.mark.parametrize("window", [1, 8, 64])
async def test_a_million_calls_without_a_stall_or_a_wrong_reply(ipc, window):
    await many_calls(ipc, 333_334, window)


async def cancelled_calls(address, count, seed):
    """Each call is cancelled after some steps; in between go calls that are not."""
    chance = random.Random(seed)
    with echo_server(address) as place, trio.fail_after(PATIENCE + count / 10):
        async with open_calls(place) as calls:
            cancelled = 0

            async def hasty():
                nonlocal cancelled
                while cancelled < count:
                    with trio.CancelScope() as scope:
                        async with trio.open_nursery() as nursery:

                            @nursery.start_soon
                            async def cancel():
                                for _ in range(chance.randrange(6)):
                                    await trio.lowlevel.checkpoint()
                                if chance.randrange(4) == 0:
                                    await trio.sleep(chance.random() * 200e-6)
                                scope.cancel()

                            await calls.call()
                            nursery.cancel_scope.cancel()
                    cancelled += scope.cancelled_caught

            async def steady():
                while cancelled < count:
                    await calls.call()

            async with trio.open_nursery() as nursery:
                for _ in range(7):
                    nursery.start_soon(hasty)
                nursery.start_soon(steady)
            for _ in range(10):
                await calls.call()
            sent = calls.socket.statistics().sent
            await_strays = sent - calls.socket.statistics().received
            assert await_strays >= 0
            await calls.call()
            # On one connection replies come in order: the last one is there, so all are.
            statistics = calls.socket.statistics()
            assert statistics.received == statistics.sent
            assert statistics.waiting == 0
    assert cancelled >= count
    assert not calls.waiting
    assert set(calls.strays.values()) <= {1}  # no reply came twice, none was lost
    return cancelled


async def test_cancelled_calls_take_nobody_elses_reply(ipc):
    await cancelled_calls(ipc, 500, 1)


@pytest.mark.long
async def test_ten_thousand_cancelled_calls_take_nobody_elses_reply(ipc):
    await cancelled_calls(ipc, 10_000, 2)


async def test_messages_are_received_in_order_one_by_one_and_in_batches(address):
    with trio.fail_after(PATIENCE):
        async with (
            open_socket("router", bind=[address]) as router,
            open_socket("dealer", connect=router.endpoints) as dealer,
        ):
            for number in range(100):
                assert await dealer.send([b"%d" % number])
            received = [await router.receive() for _ in range(10)]
            while len(received) < 100:
                batch = await router.receive_batch(30)
                assert 1 <= len(batch) <= 30
                received += batch
            with pytest.raises(trio.WouldBlock):
                router.receive_nowait()
            await dealer.send([b"last", b"", b"frame"])
            await eventually(lambda: router._is_there(router._raw_events(zmq.EVENTS)))
            received.append(router.receive_nowait())
    peers = {message[0] for message in received}
    assert len(peers) == 1
    assert [message[1:] for message in received] == [[b"%d" % n] for n in range(100)] + [[b"last", b"", b"frame"]]


async def test_waiting_receivers_are_served_in_turn(ipc):
    got = {}

    async def receive(name):
        got[name] = (await router.receive())[1]

    async with (
        open_socket("router", bind=[ipc]) as router,
        open_socket("dealer", connect=[ipc]) as dealer,
        trio.open_nursery() as nursery,
    ):
        for name in "abc":
            nursery.start_soon(receive, name)
            await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.WouldBlock):
            router.receive_nowait()
        for number in range(3):
            dealer.send_nowait([b"%d" % number])
    assert got == {"a": b"0", "b": b"1", "c": b"2"}


async def test_a_message_that_nobody_wants_waits_in_zeromq(ipc):
    """Also while another task leads, and although its signal was swallowed."""
    async with open_socket("router", bind=[ipc]) as router, open_socket("dealer", connect=[ipc]) as dealer:
        dealer.send_nowait([b"x"])
        await eventually(lambda: router._raw_events(zmq.EVENTS) & zmq.POLLIN)
        with trio.fail_after(PATIENCE):
            assert (await router.receive())[1] == b"x"


@pytest.mark.parametrize("kind", ["REQ", "DEALER"])
async def test_published_kinds_of_clients_are_answered(address, kind):
    async with open_socket("router", bind=[address]) as router, trio.open_nursery() as nursery:
        nursery.start_soon(echo, router)

        def talk():
            with zmq.Context() as context, context.socket(getattr(zmq, kind)) as client:
                client.linger = 0
                client.connect(router.endpoints[0])
                for number in range(20):
                    request = [b"%d" % number] if kind == "REQ" else [b"", b"%d" % number]
                    client.send_multipart(request)
                    assert client.poll(PATIENCE * 1_000)
                    assert client.recv_multipart() == request

        with trio.fail_after(PATIENCE):
            await trio.to_thread.run_sync(talk)
        nursery.cancel_scope.cancel()


async def test_two_loops_in_two_threads(tmp_path):
    """Each serves the other."""
    both_done = threading.Barrier(2, timeout=5 * PATIENCE)

    async def serve_and_call(here, there):
        async with open_socket("router", bind=[here]) as router, trio.open_nursery() as nursery:
            nursery.start_soon(echo, router)
            async with open_calls(there) as calls:
                await call_often(calls, 300, 4)
            await trio.to_thread.run_sync(both_done.wait)
            nursery.cancel_scope.cancel()

    places = [f"ipc://{tmp_path}/one", f"ipc://{tmp_path}/two"]
    with trio.fail_after(5 * PATIENCE):
        async with trio.open_nursery() as nursery:
            for here, there in (places, reversed(places)):
                nursery.start_soon(trio.to_thread.run_sync, trio.run, serve_and_call, here, there)


# --- room ---------------------------------------------------------------------------------------------------------

LARGE = bytes(1 << 18)
NARROW = SocketOptions(send_high_water_mark=2, receive_high_water_mark=1)


def fill(socket, *peer):
    """Send until there is no room. How many messages that took."""
    for count in range(1_000):
        try:
            assert socket.send_nowait([*peer, b"%d" % count, LARGE])
        except trio.WouldBlock:
            return count
    raise AssertionError("no bound")


_STAYS_FULL = 10
"""Looks in a row that find no room, 2 ms apart: on a busy machine a thread of ZeroMQ that has work may not run for longer."""


async def fill_up(socket, *peer):
    """The same, until it stays full: the threads of ZeroMQ hand on some more, in their time."""
    count, full = 0, 0
    while full < _STAYS_FULL:
        idle = zmq_is_idle()
        try:
            assert socket.send_nowait([*peer, b"%d" % count, LARGE])
            count, full = count + 1, 0
        except trio.WouldBlock:
            full = full + 1 if idle else 0
            await trio.sleep(0.002)  # more often than each millisecond a socket does not look whether room was made
    return count


@pytest.mark.parametrize("leads", ["the first sender", "a receiver"])
async def test_waiting_senders_go_in_turn_and_a_cancelled_one_sends_nothing(ipc, leads):
    scopes = {name: trio.CancelScope() for name in "abcd"}
    went = []

    async def send(name):
        with scopes[name]:
            assert await dealer.send([name.encode(), LARGE])
            went.append(name)

    with trio.fail_after(PATIENCE):
        async with (
            open_socket("router", bind=[ipc], options=NARROW) as router,
            open_socket("dealer", connect=[ipc], options=NARROW) as dealer,
            trio.open_nursery() as nursery,
        ):
            count = await fill_up(dealer)
            if leads == "a receiver":
                nursery.start_soon(dealer.receive)
                await trio.testing.wait_all_tasks_blocked()
            for name in "abcd":
                nursery.start_soon(send, name)
                await trio.testing.wait_all_tasks_blocked()
            assert dealer.statistics().waiting_senders == 4
            with pytest.raises(trio.WouldBlock):
                dealer.send_nowait([b"nobody passes those who wait"])
            scopes["a"].cancel()
            scopes["c"].cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert dealer.statistics().waiting_senders == 2
            received = [(await router.receive())[1] for _ in range(count + 2)]
            assert received == [b"%d" % number for number in range(count)] + [b"b", b"d"]
            await eventually(lambda: len(went) == 2 and zmq_is_idle())
            with pytest.raises(trio.WouldBlock):
                router.receive_nowait()
            nursery.cancel_scope.cancel()
    assert sorted(went) == ["b", "d"]


async def test_many_tasks_send_and_every_message_is_whole(ipc):
    async def send(name):
        for number in range(20):
            await dealer.send([name, b"%d" % number, LARGE[:4096], name])

    received = []
    with trio.fail_after(PATIENCE):
        async with (
            open_socket("router", bind=[ipc], options=NARROW) as router,
            open_socket("dealer", connect=[ipc], options=NARROW) as dealer,
            trio.open_nursery() as nursery,
        ):
            names = [b"%d" % number for number in range(20)]
            for name in names:
                nursery.start_soon(send, name)
            while len(received) < 400:
                received += await router.receive_batch(5)
    assert all(first == last for _, first, _, _, last in received)
    for name in names:
        assert [number for _, first, number, _, _ in received if first == name] == [b"%d" % n for n in range(20)]


async def test_a_router_waits_for_room_for_one_peer_and_serves_the_others(ipc):
    went = []

    async def send(peer, text):
        went.append((text, await router.send([peer, text, LARGE])))

    with trio.fail_after(PATIENCE):
        async with (
            open_socket("router", bind=[ipc], options=NARROW) as router,
            open_socket("dealer", connect=[ipc], options=NARROW) as slow,
            open_socket("dealer", connect=[ipc]) as quick,
        ):
            await slow.send([b"hello"])
            slow_peer, _ = await router.receive()
            await quick.send([b"hello"])
            quick_peer, _ = await router.receive()
            count = await fill_up(router, slow_peer)
            async with trio.open_nursery() as nursery:
                for text in (b"first", b"second"):
                    nursery.start_soon(send, slow_peer, text)
                    await trio.testing.wait_all_tasks_blocked()
                with pytest.raises(trio.WouldBlock):
                    router.send_nowait([slow_peer, b"passes"])
                for number in range(10):
                    assert await router.send([quick_peer, b"%d" % number])
                    assert await quick.receive() == [b"%d" % number]
                assert not went
                received = [(await slow.receive())[0] for _ in range(count + 2)]
                assert received[count:] == [b"first", b"second"]
    assert sorted(went) == [(b"first", True), (b"second", True)]


async def test_a_peer_that_is_gone_is_an_answer_also_for_who_waits(ipc):
    answers = []

    async def send():
        answers.append(await router.send([peer, b"x", LARGE]))

    with trio.fail_after(PATIENCE):
        async with open_socket("router", bind=[ipc], options=NARROW) as router, trio.open_nursery() as nursery:
            assert router.send_nowait([b"nobody", b""]) is False
            assert await router.send([b"nobody", b""]) is False
            async with open_socket("dealer", connect=[ipc], options=NARROW) as dealer:
                await dealer.send([b"hello"])
                peer, _ = await router.receive()
                await fill_up(router, peer)
                nursery.start_soon(send)
                await trio.testing.wait_all_tasks_blocked()
                assert not answers
            await eventually(lambda: answers)
            assert answers == [False]
            assert router.statistics().unreachable == 3


async def test_a_router_that_is_not_mandatory_drops_silently(ipc):
    async with open_socket("router", bind=[ipc], options=SocketOptions(router_mandatory=False)) as router:
        assert router.send_nowait([b"nobody", b"x"])
        assert router.statistics().unreachable == 0


async def test_what_is_no_message_leaves_the_socket_whole(ipc):
    async with open_socket("router", bind=[ipc]) as router, open_socket("dealer", connect=[ipc]) as dealer:
        for wrong in ([b"half", "a message"], [b"half", None], [b"half", bytearray(b"x")]):
            with pytest.raises(TypeError, match="a frame is bytes"):
                dealer.send_nowait(wrong)
        with pytest.raises(ValueError, match="at least one frame"):
            await dealer.send([])
        dealer.send_nowait((b"whole",))
        with trio.fail_after(PATIENCE):
            assert (await router.receive())[1:] == [b"whole"]


# --- closing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["receive", "send", "expect", "run"])
async def test_closing_wakes_everybody(ipc, first):
    calls = Calls()
    ended = []

    async def wait(name, call, *args):
        with pytest.raises(trio.ClosedResourceError):
            await call(*args)
        ended.append(name)

    pulls = first == "receive"
    with trio.fail_after(PATIENCE):
        async with (
            open_socket(
                "dealer", connect=[ipc], options=NARROW, on_messages=None if pulls else calls.on_messages
            ) as socket,
            trio.open_nursery() as nursery,
        ):
            fill(socket)
            waits = {"send": (socket.send, [b"x"]), "expect": (socket.expect().wait,), "run": (socket.run,)}
            if pulls:
                waits["receive"] = (socket.receive,)
            for name in sorted(waits, key=lambda name: name != first):
                nursery.start_soon(wait, name, *waits[name])
                await trio.testing.wait_all_tasks_blocked()
            assert socket.statistics().waiting == len(waits)
            await socket.aclose()
            await trio.testing.wait_all_tasks_blocked()
            assert set(ended) == set(waits)
            assert socket.statistics().waiting == 0


async def test_a_closed_socket_says_so(ipc):
    async with open_socket("dealer", connect=[ipc]) as socket:
        expected = socket.expect()
    await socket.aclose()
    assert repr(socket) == "<TrioSocket dealer: closed>"
    with pytest.raises(trio.ClosedResourceError):
        socket.send_nowait([b"x"])
    with pytest.raises(trio.ClosedResourceError):
        socket.receive_nowait()
    for call in (expected.wait, socket.receive, socket.run, lambda: socket.send([b"x"])):
        with pytest.raises(trio.ClosedResourceError):
            await call()


async def test_whoever_closes_second_waits_until_the_addresses_are_free(address):
    async with open_socket("router", bind=[address]) as socket:
        [place] = socket.endpoints
        async with trio.open_nursery() as nursery:
            nursery.start_soon(socket.aclose)
            nursery.start_soon(socket.aclose)
        async with open_socket("router", bind=[place]):
            pass


async def test_leaving_gives_back_threads_and_descriptors(address):
    before = open_descriptors(collect=True), zmq_threads()
    for _ in range(3):
        async with open_socket("router", bind=[address], on_gone=print, on_link=lambda event: None) as router:
            async with open_socket("dealer", connect=router.endpoints) as dealer:
                await dealer.send([b"x"])
                await router.receive()
            assert open_descriptors() - before[0]
            await eventually(lambda: zmq_threads() - before[1])  # a thread takes its name itself, in its time
    await eventually(lambda: nothing_new_since(*before))


async def test_what_goes_wrong_in_the_body_leaves_as_it_came(ipc):
    with pytest.raises(KeyError, match="mine"):
        async with open_socket("router", bind=[ipc], on_gone=print):
            raise KeyError("mine")


async def test_a_callback_that_raises_closes_the_socket_and_is_heard_where_somebody_waits(ipc):
    def on_messages(batch):
        raise RuntimeError("from the callback")

    async def follow():
        with pytest.raises(trio.ClosedResourceError):
            await dealer.expect().wait()

    with trio.fail_after(PATIENCE):
        async with (
            open_socket("router", bind=[ipc]) as router,
            open_socket("dealer", connect=[ipc], on_messages=on_messages) as dealer,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(echo, router)
            dealer.send_nowait([b"x"])
            expected = dealer.expect()
            nursery.start_soon(trio.testing.wait_all_tasks_blocked)
            with pytest.raises(RuntimeError, match="from the callback"):
                await expected.wait()
            await follow()
            nursery.cancel_scope.cancel()


async def test_a_link_callback_that_raises_ends_the_block(ipc):
    def on_link(event):
        raise RuntimeError("from the callback")

    with trio.fail_after(PATIENCE), pytest.raises(RuntimeError, match="from the callback"):
        async with open_socket("router", bind=[ipc], on_link=on_link), open_socket("dealer", connect=[ipc]):
            await trio.sleep_forever()


async def test_a_cancelled_user_may_still_say_goodbye(ipc):
    """The socket lives until its block is left, whatever happens to the scope around it."""
    with echo_server(ipc) as place, trio.CancelScope() as scope:
        async with open_calls(place, on_link=lambda event: None) as calls:
            await calls.call()
            scope.cancel()
            try:
                await trio.sleep_forever()
            finally:
                with trio.fail_after(PATIENCE, shield=True):
                    assert (await calls.call(b"goodbye")).endswith(b"goodbye")
    assert scope.cancelled_caught


async def test_lingering_lets_the_last_word_out_and_is_bounded(ipc):
    async with open_socket("router", bind=[ipc]) as router:
        async with open_socket("dealer", connect=[ipc], options=SocketOptions(linger=10.0)) as dealer:
            dealer.send_nowait([b"last"])
        with trio.fail_after(PATIENCE):
            assert (await router.receive())[1] == b"last"
    began = trio.current_time()
    async with open_socket("dealer", connect=[f"{ipc}-nobody"], options=SocketOptions(linger=0.1)) as dealer:
        dealer.send_nowait([b"to nobody"])
    assert 0.05 < trio.current_time() - began < PATIENCE


# --- connections --------------------------------------------------------------------------------------------------


async def test_a_client_finds_its_server_again(address):
    links = []
    with trio.fail_after(PATIENCE):
        with echo_server(address) as place:
            pass
        async with open_calls(place, on_link=lambda event: links.append(event.link)) as calls:
            for _ in range(3):
                links.clear()
                with echo_server(place):
                    await calls.call()
                    await eventually(lambda: Link.READY in links)
                await eventually(lambda: Link.DISCONNECTED in links)
                assert links.index(Link.CONNECTED) < links.index(Link.READY) < links.index(Link.DISCONNECTED)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(calls.call)  # waits in ZeroMQ for the server that is to come
                await eventually(lambda: calls.waiting and Link.RETRIED in links)
                with echo_server(place):
                    await eventually(lambda: not calls.waiting)


async def test_with_immediate_nothing_is_queued_for_nobody(ipc):
    async with open_socket("dealer", connect=[ipc], options=SocketOptions(immediate=True)) as dealer:
        with pytest.raises(trio.WouldBlock):
            dealer.send_nowait([b"x"])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dealer.send, [b"y"])
            await trio.testing.wait_all_tasks_blocked()
            async with open_socket("router", bind=[ipc]) as router:
                with trio.fail_after(PATIENCE):
                    assert (await router.receive())[1] == b"y"


# --- turns --------------------------------------------------------------------------------------------------------


async def test_the_other_tasks_of_the_loop_have_their_turns(ipc):
    """However quick the replies are."""
    options = SocketOptions(busy_poll=0.01)
    with echo_server(ipc, options) as place, trio.fail_after(5 * PATIENCE):
        async with open_calls(place, options) as calls, trio.open_nursery() as nursery:
            turns = 0

            async def other():
                nonlocal turns
                while True:
                    turns += 1
                    await trio.lowlevel.checkpoint()

            for _ in range(100):
                await calls.call()
            nursery.start_soon(other)
            began = time.thread_time()  # of this thread: while others compute, nobody here has a turn
            for _ in range(500):
                await calls.call()
            assert turns > (time.thread_time() - began) / 0.02
            nursery.cancel_scope.cancel()


async def test_a_loop_that_is_never_idle_can_be_cancelled(ipc):
    options = SocketOptions(busy_poll=0.01)
    with trio.fail_after(PATIENCE), echo_server(ipc, options) as place:
        async with open_calls(place, options) as calls:
            with trio.move_on_after(0.1) as scope:
                while True:
                    await calls.call()
            assert scope.cancelled_caught
            assert await calls.call()


async def test_glances_stop_where_they_are_of_no_use(ipc):
    async with open_socket("router", bind=[ipc]) as router, open_calls(ipc, SocketOptions(busy_poll=1e-3)) as calls:
        with trio.fail_after(PATIENCE):
            for _ in range(200):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(calls.call)
                    message = await router.receive()
                    await trio.sleep(0.002)
                    router.send_nowait(message)
        statistics = calls.socket.statistics()
    assert statistics.busy_polls - statistics.hits < 30
    assert statistics.sleeps > 150
