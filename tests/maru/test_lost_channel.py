"""A server is killed while it is asked: whoever waits is told at once, and who asks next waits for the next server."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from maru import NoAnswer
from tests.support.held_by_process import refuse_memory
from tests.support.maru_actors import FACES, client
from tests.support.maru_processes import Server, temporary_pool, within

TIMEOUT = 60.0
"""Of a call. What is told at once comes long before."""
AT_ONCE = 10.0
"""On a busy machine."""

faces = pytest.mark.parametrize("face", FACES)


@pytest.fixture
def server():
    with temporary_pool() as pool, Server(pool) as server:
        yield server


def kill_while_asked(server, ask):
    """How long somebody waits who asks a server that stands still, from when that is killed on."""
    killed = []

    def kill():
        time.sleep(0.3)
        killed.append(time.monotonic())
        server.process.send(signal.SIGKILL)

    server.process.send(signal.SIGSTOP)
    thread = threading.Thread(target=kill)
    thread.start()
    try:
        with pytest.raises(NoAnswer, match="connection"):
            ask()
    finally:
        thread.join()
    return time.monotonic() - killed[0]


@faces
@pytest.mark.parametrize("name", ["batch_retrieve", "pin", "delete"])
def test_who_waits_for_a_server_that_is_killed_is_told_at_once(server, face, name):
    with client(face, server.ipc, timeout_ms=round(TIMEOUT * 1e3), index="off") as asking:  # with it, nobody is asked
        asking.put(["key"])
        argument = ["key"] if name.startswith("batch") else "key"
        assert within(None, lambda: kill_while_asked(server, lambda: asking.call(name, argument))) < AT_ONCE
        server.kill()
        server.start()
        assert asking.get(["key"]) == ["right"]


@faces
def test_a_store_whose_server_is_killed_is_told_at_once_and_its_fate_is_found_out(server, face):
    with client(face, server.ipc, timeout_ms=round(TIMEOUT * 1e3)) as asking:
        asking.put(["before"])
        assert within(None, lambda: kill_while_asked(server, lambda: asking.put(["key"]))) < AT_ONCE
        server.kill()
        server.start()
        assert asking.put(["key"]) in (["NEW"], ["DUPLICATE"])
        assert asking.get(["before", "key"]) == ["right", "right"]


def test_calls_that_were_begun_end_with_their_server(server):
    with client("blocking", server.ipc, timeout_ms=round(TIMEOUT * 1e3)) as asking:
        asking.put(["key"])
        server.process.send(signal.SIGSTOP)
        begun = [asking.handler.begin.exists("key") for _ in range(5)]
        server.kill()
        server.start()
        began = time.monotonic()
        assert asking.call("exists", "key")  # over a new connection, with the old ones' calls still on it
        for one in begun:
            with pytest.raises(NoAnswer, match="connection"):
                one.result()
        assert time.monotonic() - began < AT_ONCE


@faces
def test_what_is_asked_while_there_is_no_server_waits_for_one(server, face):
    with client(face, server.ipc, timeout_ms=round(TIMEOUT * 1e3)) as asking:
        asking.put(["key"])
        server.kill()
        starting = threading.Timer(0.5, server.start)
        starting.start()
        try:
            assert within(None, lambda: asking.get(["key"])) == ["right"]
        finally:
            starting.join()


@faces
def test_a_request_that_memory_is_refused_for_fails_alone(server, face, monkeypatch):
    many = [f"{number:0700}" for number in range(1_000)]
    with client(face, server.ipc, timeout_ms=round(AT_ONCE * 1e3), index="off") as asking:
        asking.put(["key"])
        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", refuse_memory)
            with pytest.raises(NoAnswer, match="bytes cannot be sent now"):
                asking.call("batch_exists", many)
            assert asking.call("exists", "key")
        assert asking.call("batch_exists", many) == [False] * len(many)


@faces
def test_a_large_request_that_waits_for_a_server_fails_when_memory_is_refused(server, face, monkeypatch):
    many = [f"{number:0700}" for number in range(1_000)]
    with client(face, server.ipc, timeout_ms=round(TIMEOUT * 1e3), index="off") as asking:
        asking.put(["key"])
        server.kill()
        thread = threading.Timer(0.3, server.start)
        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", refuse_memory)
            thread.start()
            try:
                with pytest.raises(NoAnswer, match="bytes cannot be sent now"):
                    asking.call("batch_exists", many)
            finally:
                thread.join()
        assert asking.get(["key"]) == ["right"]
