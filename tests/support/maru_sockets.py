"""What the tests of the sockets share: an echo in another thread, and a client that knows whose reply it got."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from contextlib import asynccontextmanager, contextmanager

import trio

from maru.transport import open_socket

PATIENCE = 60.0
"""Seconds until a test that hangs fails; nothing here takes a tenth of it."""


async def echo(socket):
    while True:
        for message in await socket.receive_batch():
            socket.send_nowait(message)


@contextmanager
def echo_server(address, options=None, **more):
    """An echo in a trio loop of its own, in another thread. Gives where it listens."""
    ready = threading.Event()
    places, failures = [], []
    scope = trio.CancelScope()
    token = None

    async def main():
        nonlocal token
        token = trio.lowlevel.current_trio_token()
        with scope:
            async with open_socket("router", bind=[address], options=options, **more) as socket:
                places.extend(socket.endpoints)
                ready.set()
                await echo(socket)

    def run():
        try:
            trio.run(main)
        except BaseException as error:
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    try:
        if places:
            yield places[0]
    finally:
        with contextlib.suppress(trio.RunFinishedError):
            token.run_sync_soon(scope.cancel)
        thread.join()
    if failures:
        raise failures[0]


class Calls:
    """A client: numbered requests, and who expects their replies."""

    def __init__(self):
        self.socket = None
        self.numbers = itertools.count(1)
        self.waiting = {}
        self.strays = Counter()

    def on_messages(self, batch):
        for delimiter, reply in batch:
            assert delimiter == b""
            number = int.from_bytes(reply[:8], "big")
            expected = self.waiting.pop(number, None)
            if expected is None:
                self.strays[number] += 1
            else:
                expected.deliver(reply)

    async def call(self, payload=b""):
        number = next(self.numbers)
        request = number.to_bytes(8, "big") + payload
        self.waiting[number] = expected = self.socket.expect()
        try:
            await self.socket.send([b"", request])
            reply = await expected.wait()
        except BaseException:
            if self.waiting.pop(number, None) is None:
                self.strays[number] += 1  # it came, and nobody wanted it any more
            raise
        assert reply == request
        return reply


@asynccontextmanager
async def open_calls(place, options=None, **more):
    calls = Calls()
    async with open_socket(
        "dealer", connect=[place], options=options, on_messages=calls.on_messages, **more
    ) as calls.socket:
        yield calls


async def call_often(calls, count, window):
    left = count

    async def caller():
        nonlocal left
        while left > 0:
            left -= 1
            with trio.fail_after(PATIENCE):  # for each: how long all of them take is the machine's business
                await calls.call()

    async with trio.open_nursery() as nursery:
        for _ in range(window):
            nursery.start_soon(caller)


async def eventually(condition):
    """Real sockets: the other end is a thread that nobody can step."""
    with trio.fail_after(PATIENCE):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.001)
