"""Cancellation at every step of whoever sends, receives, or waits for a reply.

Each case is played again and again; the k-th time its victim is cancelled right before its k-th step, until it ends
untouched. What must hold is the same for all: a message is at one place, always.
"""

from __future__ import annotations

from collections import Counter

import pytest
import trio
import trio.testing

from maru.transport import SocketOptions, open_socket
from tests.support import determinism
from tests.support.held_by_process import zmq_is_idle
from tests.support.maru_sockets import PATIENCE, Calls, echo
from tests.support.steps import AtStep, at_every_step

LARGE = bytes(1 << 18)
NARROW = SocketOptions(send_high_water_mark=2, receive_high_water_mark=1, busy_poll=0.0)
MOST_STEPS = 60


# --- the cases: each gets a nursery, a scope for the victim, and the sockets -----------------------------------------


async def sending(path, scope, busy_poll):
    """With room for it."""
    options = SocketOptions(busy_poll=busy_poll)
    sent = []

    async def victim():
        with scope:
            for number in range(3):
                await dealer.send([b"%d" % number])
                sent.append(b"%d" % number)

    async with (
        open_socket("router", bind=[path]) as router,
        open_socket("dealer", connect=[path], options=options) as dealer,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(victim, name="victim")
        received = []
        await trio.testing.wait_all_tasks_blocked()
        dealer.send_nowait([b"end"])
        while not received or received[-1] != b"end":
            received += [text for _, text in await router.receive_batch()]
    assert received == [*sent, b"end"]


async def fill(dealer):
    """Send until there is no room, and none comes: ZeroMQ goes on handing over to the other end for a while."""
    full = 0
    while full < 2:
        idle = zmq_is_idle()
        try:
            dealer.send_nowait([b"filling", LARGE])
            full = 0
        except trio.WouldBlock:
            full = full + 1 if idle else 0
            await trio.sleep(0.002)  # more often than each millisecond a socket does not look whether room was made


async def waiting_for_room(path, scope, busy_poll, *, follows):
    sent = []
    options = SocketOptions(send_high_water_mark=2, receive_high_water_mark=1, busy_poll=busy_poll)

    async def send(text):
        await dealer.send([text, LARGE])
        sent.append(text)

    async def victim():
        with scope:
            await send(b"victim's")

    async with (
        open_socket("router", bind=[path], options=NARROW) as router,
        open_socket("dealer", connect=[path], options=options) as dealer,
        trio.open_nursery() as nursery,
    ):
        await fill(dealer)
        if follows:
            nursery.start_soon(send, b"before")
            await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(victim, name="victim")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(send, b"after")
        received = []
        while not received or received[-1] != b"after":
            received += [text for _, text, _ in await router.receive_batch()]
    received = [text for text in received if text != b"filling"]
    assert sorted(received) == sorted(sent)
    assert received == [text for text in (b"before", b"victim's", b"after") if text in sent]


async def receiving(path, scope, busy_poll, *, follows):
    """Whatever the victim does not get, somebody else gets."""
    got = []
    options = SocketOptions(busy_poll=busy_poll)

    async def receive():
        _, text = await router.receive()
        got.append(text)

    async def victim():
        with scope:
            await receive()
            await receive()

    async with (
        open_socket("router", bind=[path], options=options) as router,
        open_socket("dealer", connect=[path]) as dealer,
        trio.open_nursery() as nursery,
    ):
        if follows:
            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(victim, name="victim")
        for number in range(4):
            await trio.testing.wait_all_tasks_blocked()  # so that nothing is there before whoever is to wait for it
            await dealer.send([b"%d" % number])
            while len(got) == number:
                await trio.sleep(0.0005)
                await trio.testing.wait_all_tasks_blocked()
                if len(got) == number and not router.statistics().waiting:  # nor will the victim any more
                    nursery.start_soon(receive)
    assert sorted(got) == [b"0", b"1", b"2", b"3"]


async def expecting(path, scope, busy_poll, *, follows):
    """The victim's reply is nobody else's."""
    calls = Calls()
    ended = Counter()

    async def others():
        for _ in range(3):
            await calls.call()
        ended["others"] += 1

    async def victim():
        with scope:
            await calls.call(b"victim")
            await calls.call(b"victim")
        ended["victim"] += 1

    options = SocketOptions(busy_poll=busy_poll)
    async with (
        open_socket("router", bind=[path]) as router,
        open_socket("dealer", connect=[path], on_messages=calls.on_messages, options=options) as calls.socket,
        trio.open_nursery() as outer,
    ):
        outer.start_soon(echo, router)
        async with trio.open_nursery() as nursery:
            if follows:
                nursery.start_soon(others)
                await trio.lowlevel.checkpoint()
            nursery.start_soon(victim, name="victim")
        await others()
        outer.cancel_scope.cancel()
    assert (ended["victim"], ended["others"], calls.waiting) == (1, 1 + follows, {})
    assert sum(calls.strays.values()) <= 1


# Which case, how many steps it has at least, and more.
CASES = {
    "sending": (sending, 3, {}),
    "waiting for room": (waiting_for_room, 2, {"follows": False}),
    "waiting for room behind another": (waiting_for_room, 2, {"follows": True}),
    "receiving": (receiving, 3, {"follows": False}),
    "receiving behind another": (receiving, 3, {"follows": True}),
    "expecting": (expecting, 3, {"follows": False}),
    "expecting behind another": (expecting, 3, {"follows": True}),
}


@pytest.mark.parametrize("busy_poll", [0.0, 1e-3], ids=["sleeps", "polls"])
@pytest.mark.parametrize("case", CASES)
def test_cancelled_at_every_step(case, busy_poll, tmp_path):
    play, least, more = CASES[case]

    def run(k):
        scope = trio.CancelScope()
        instrument = AtStep(k, scope.cancel, counts=lambda task: task.name == "victim")

        async def main():
            with trio.fail_after(PATIENCE):
                await play(f"ipc://{tmp_path}/{k}", scope, busy_poll, **more)

        with determinism.deterministic(k):
            trio.run(main, instruments=[instrument])
        return instrument.left > 0

    # While it polls, what it waits for may be there at once, on a busy machine.
    at_every_step(run, most=MOST_STEPS, least=1 if busy_poll else least, name=case)
