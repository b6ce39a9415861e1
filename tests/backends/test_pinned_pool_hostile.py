"""A server that lies: a client uses no number that it has not judged, and says who answers there.

The server is the real one, memory and all; its answers are exchanged on their way out.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.pinned_pool import (
    PinnedPoolClient,
    PinnedPoolError,
    PinnedPoolServer,
    PoolLost,
    PoolTimeout,
    PoolUntrusted,
)
from backends.pinned_pool import _connection as connection_module
from backends.pinned_pool._grants import Grants, Implausible
from backends.pinned_pool._messages import (
    VERSION,
    Allocated,
    Answer,
    Done,
    PoolAllocated,
    PoolFull,
    Refused,
    UsageInfo,
    Welcome,
    decode_answer,
    encode,
    packed,
    split,
)
from maru.base.peers import Listener
from tests.support.maru_processes import PATIENCE, within
from tests.support.other_user import UID, needs_root, other_user
from tests.support.pinned_pools import CHUNK, address_of, remote_address_of, server_in_thread, short_directory

MIB = 1 << 20
CHUNKS = MIB // CHUNK


class Liar:
    """A server whose answers go through :attr:`lie`."""

    def __init__(self, server: PinnedPoolServer) -> None:
        self.address = address_of(server)
        self.lie: Callable[[Answer], Answer] = lambda answer: answer


@pytest.fixture(scope="module")
def liar() -> Iterator[Liar]:
    with server_in_thread() as server, pytest.MonkeyPatch.context() as patch:
        liar, send = Liar(server), PinnedPoolServer._send

        def send_lie(self: PinnedPoolServer, peer: bytes, answer: bytes) -> None:
            if self is server:  # others are honest
                body, payload = split(answer)
                answer = encode(liar.lie(decode_answer(body)), payload)
            send(self, peer, answer)

        patch.setattr(PinnedPoolServer, "_send", send_lie)
        yield liar


def changed(kind: type[Answer], **fields: object) -> Callable[[Answer], Answer]:
    """A lie: in answers of this kind, these fields are different."""

    def lie(answer: Answer) -> Answer:
        return msgspec.structs.replace(answer, **fields) if isinstance(answer, kind) else answer

    return lie


def use(client: PinnedPoolClient) -> None:
    """Whatever a client can be used for."""
    client.allocate_pool_memory(MIB)
    first = client.allocate_from_pool(CHUNK + 1)
    second = client.allocate_from_pool(1)
    assert first is not None and second is not None
    client.copy_to_pool(first.allocation_id, 0, b"1" * (CHUNK + 1))
    client.copy_to_pool(second.allocation_id, 0, b"2")
    seen = bytearray(CHUNK + 1)
    client.copy_from_pool(first.allocation_id, 0, seen)
    assert seen == b"1" * (CHUNK + 1)
    client.get_usage_info()
    assert client.free_from_pool([first.allocation_id]) == 1
    third = client.allocate_from_pool(2 * CHUNK)
    assert third is not None
    client.copy_to_pool(third.allocation_id, 0, b"3" * (2 * CHUNK))
    client.copy_from_pool(second.allocation_id, 0, seen[:1])


LIES: dict[str, Callable[[Answer], Answer]] = {
    "another version": changed(Welcome, version=VERSION + 1),
    "a chunk of one byte": changed(Welcome, chunk_bytes=1),
    "a chunk of no power of two": changed(Welcome, chunk_bytes=3 << 20),
    "a chunk of a TiB": changed(Welcome, chunk_bytes=1 << 40),
    "smaller chunks than it has": changed(Welcome, chunk_bytes=CHUNK // 2),
    "larger chunks than it has": changed(Welcome, chunk_bytes=CHUNK * 2),
    "a relative path": changed(Welcome, descriptors="socket"),
    "a path with a null": changed(Welcome, descriptors="/tmp/a\0b"),
    "a name without a file": changed(Welcome, descriptors="\0abstract"),
    "a larger pool": changed(PoolAllocated, nbytes=2 * MIB),
    "a pool of 2^62 bytes": changed(PoolAllocated, nbytes=1 << 62, chunks=(1 << 62) // CHUNK),
    "a smaller pool": changed(PoolAllocated, nbytes=CHUNK, chunks=1),
    "a pool of nothing": changed(PoolAllocated, nbytes=0, chunks=0),
    "chunks that are not its bytes": changed(PoolAllocated, chunks=1),
    "a way of pinning that is none": changed(PoolAllocated, pinned="nailed"),
    "a chunk behind the end": changed(Allocated, chunk_indices=packed([CHUNKS, CHUNKS + 1])),
    "the last chunk there can be": changed(Allocated, chunk_indices=array("I", [0xFFFF_FFFF] * 2).tobytes()),
    "the same chunk twice": changed(Allocated, chunk_indices=packed([1, 1])),
    "too few chunks": changed(Allocated, chunk_indices=packed([0])),
    "no chunks": changed(Allocated, chunk_indices=b""),
    "too many chunks": changed(Allocated, chunk_indices=packed(range(3))),
    "half a number": changed(Allocated, chunk_indices=b"\0" * 7),
    "the same block twice": changed(Allocated, allocation_id=0),
    "more freed than asked for": changed(Done, count=2),
    "more chunks in use than there are": changed(UsageInfo, allocated_chunks=CHUNKS + 1, free_chunks=0),
    "more chunks than there are": changed(UsageInfo, free_chunks=CHUNKS),
    "more bytes in use than chunks have": changed(UsageInfo, allocated_bytes=1 << 40),
    "an answer to no question": changed(PoolAllocated, seq=99),
    "an answer of another kind": lambda answer: Done(answer.seq, 0) if isinstance(answer, Allocated) else answer,
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_ends_the_session_and_is_told(liar: Liar, name: str) -> None:
    liar.lie = LIES[name]
    with pytest.raises(PoolLost, match="is not a pinned pool") as told:
        client = PinnedPoolClient(liar.address, timeout=PATIENCE)
        try:
            use(client)
        finally:
            with pytest.raises(PoolLost):
                client.check()
            client.close()
    assert liar.address in str(told.value)


def test_a_chunk_of_another_block_is_not_used(liar: Liar) -> None:
    taken: list[bytes] = []

    def lie(answer: Answer) -> Answer:
        if not isinstance(answer, Allocated):
            return answer
        taken.append(answer.chunk_indices)
        return msgspec.structs.replace(answer, chunk_indices=taken[0])

    liar.lie = lie
    client = PinnedPoolClient(liar.address, timeout=PATIENCE)
    client.allocate_pool_memory(MIB)
    client.allocate_from_pool(CHUNK)
    with pytest.raises(PoolLost, match="chunk 0 was granted twice"):
        client.allocate_from_pool(CHUNK)
    client.close()


def test_an_honest_server_is_believed(liar: Liar) -> None:
    liar.lie = lambda answer: answer
    for shared in (True, False):
        client = PinnedPoolClient(liar.address, timeout=PATIENCE, shared_memory=shared)
        use(client)
        client.close()


NUMBERS = [0, 1, 2, CHUNKS - 1, CHUNKS, CHUNK, MIB, 2 * MIB, (1 << 32) - 1, 1 << 40, (1 << 63) - 1]


def twisted(rng: random.Random, answer: Answer) -> Answer:
    """One field of it is something else of its type, or it is another answer altogether."""
    name = rng.choice(answer.__struct_fields__)
    was: Any = getattr(answer, name)
    if isinstance(was, bool | int):
        value: Any = rng.choice([*NUMBERS, rng.getrandbits(63), was + rng.choice([-1, 1]) if was else 1])
        value = value & 0xFFFF_FFFF if name == "seq" else min(value, 1 << 40) if name == "chunk_bytes" else value
        value = max(1, value) if name == "chunk_bytes" else value
    elif isinstance(was, bytes):
        value = rng.randbytes(16) if name == "token" else rng.randbytes(rng.randrange(0, 24))
        if name == "chunk_indices" and rng.random() < 0.5:
            value = array("I", [rng.choice([*range(CHUNKS + 2), 1 << 31]) for _ in range(rng.randrange(4))]).tobytes()
    else:
        value = rng.choice(["", "/", "/nowhere", "\0", "x" * 512, "cuda"])
    if rng.random() < 0.1:
        return rng.choice([PoolFull(answer.seq, 3), Done(answer.seq, 1), Refused(answer.seq, "no"), Refused(0, "no")])
    return msgspec.structs.replace(answer, **{name: value})


def play(liar: Liar, seed: int) -> None:
    """One session with a server that lies now and then: it ends as it should, or with a typed error."""
    rng = random.Random(seed)
    liar.lie = lambda answer: twisted(rng, answer) if rng.random() < 0.15 else answer
    held: dict[int, tuple[int, ...]] = {}
    client = None
    try:
        client = PinnedPoolClient(liar.address, timeout=PATIENCE, shared_memory=rng.choice([None, None, False]))
        client.allocate_pool_memory(MIB)
        for _ in range(8):
            size = rng.randrange(4 * CHUNK)
            allocation = client.allocate_from_pool(size)
            if allocation is not None:
                mine = set(allocation.chunk_indices)
                assert len(mine) == -(-size // CHUNK) and mine <= set(range(CHUNKS))
                assert not any(mine & set(other) for other in held.values())
                held[allocation.allocation_id] = tuple(mine)
                client.copy_to_pool(allocation.allocation_id, 0, bytes(size))
                client.copy_from_pool(allocation.allocation_id, 0, bytearray(size))
            if held and rng.random() < 0.3:
                victim = rng.choice(list(held))
                del held[victim]
                client.free_from_pool([victim])
            client.get_usage_info()
    except PinnedPoolError:
        pass
    finally:
        if client is not None:
            client.close()


@pytest.mark.parametrize("seed", range(20))
def test_random_lies_never_hurt_a_client(liar: Liar, seed: int) -> None:
    play(liar, seed)


@pytest.mark.long
def test_many_random_lies_never_hurt_a_client(liar: Liar) -> None:
    for seed in range(20, 2_000):
        play(liar, seed)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 3), st.lists(st.integers(0, 6), max_size=4), st.integers(0, 40)),
            st.tuples(st.just("discard"), st.integers(0, 3), st.just([]), st.just(0)),
        ),
        max_size=12,
    )
)
def test_what_is_taken_in_has_its_chunks_for_itself(steps: list[tuple[str, int, list[int], int]]) -> None:
    grants, held = Grants(5, 10), dict[int, list[int]]()
    for what, name, indices, nbytes in steps:
        if what == "discard":
            grants.discard([name])
            held.pop(name, None)
            continue
        fits = len(indices) == len(set(indices)) == -(-nbytes // 10) and all(index < 5 for index in indices)
        if fits and name not in held and not set(indices) & {one for other in held.values() for one in other}:
            assert grants.add(name, indices, nbytes).chunk_indices == indices
            held[name] = indices
        else:
            with pytest.raises(Implausible):
                grants.add(name, indices, nbytes)
    assert all((found := grants.get(name)) and found.chunk_indices == indices for name, indices in held.items())


# --- another user's server --------------------------------------------------------------------------------------------

SQUATTER = """
import socket, sys
become_other_user()
with socket.create_server(("127.0.0.1", 0)) as listening:
    print(listening.getsockname()[1], flush=True)
    while True:
        peer, _ = listening.accept()
        with peer:
            print(peer.recv(100) or "nothing", flush=True)
"""


@needs_root
def test_another_users_server_is_told_nothing() -> None:
    with other_user(SQUATTER) as squatter:
        assert squatter.stdout is not None
        address = f"127.0.0.1:{squatter.stdout.readline().strip()}"
        for shared in (None, True, False):
            with pytest.raises(PoolUntrusted, match=rf"user {UID}.*server_uid"):
                PinnedPoolClient(address, timeout=PATIENCE, shared_memory=shared)
            assert squatter.stdout.readline() == "nothing\n"
        with pytest.raises(PoolTimeout):  # who is meant is talked to
            PinnedPoolClient(address, timeout=1.0, server_uid=UID)
        assert squatter.stdout.readline() == "nothing\n"  # of the connection that only looks who listens
        assert r"\xff\x00" in squatter.stdout.readline()  # ZeroMQ's greeting


CHANNEL_SQUATTER = """
import os, socket, sys
become_other_user()
directory = "/dev/shm/squatter-%d" % os.getpid()
os.mkdir(directory, 0o755)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
    listening.bind(directory + "/a.sock")
    os.chmod(directory + "/a.sock", 0o777)
    listening.listen()
    print(directory + "/a.sock", flush=True)
    peer, _ = listening.accept()
    os.unlink(directory + "/a.sock")
    os.rmdir(directory)
    print(peer.recv(100) or "nothing", flush=True)
"""


@needs_root
def test_another_users_channel_is_told_nothing() -> None:
    with other_user(CHANNEL_SQUATTER) as squatter:
        assert squatter.stdout is not None
        path = squatter.stdout.readline().strip()
        with pytest.raises(PoolUntrusted, match="belongs to another user"):
            PinnedPoolClient(f"ipc://{path}", timeout=PATIENCE)
        assert squatter.stdout.readline() == "nothing\n"


@pytest.mark.parametrize(
    ("listener", "trusted"),
    [
        (Listener(frozenset({os.geteuid()})), True),
        (Listener(frozenset({0})), True),
        (Listener(frozenset({77})), False),
        (Listener(frozenset({os.geteuid(), 77})), False),
        (Listener(unknown="the kernel shows this process no such socket"), True),
    ],
    ids=["ours", "root's", "another's", "both", "unknown"],
)
def test_who_listens_decides_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, listener: Listener, trusted: bool
) -> None:
    monkeypatch.setattr(connection_module, "find_tcp_listener", lambda host, port: listener)
    with server_in_thread(insecure=True) as server:
        address = remote_address_of(server)
        if trusted:
            PinnedPoolClient(address, timeout=PATIENCE).close()
        else:
            with pytest.raises(PoolUntrusted, match="served by user 77"):
                PinnedPoolClient(address, timeout=PATIENCE)
            if listener.uids == {77}:
                PinnedPoolClient(address, timeout=PATIENCE, server_uid=77).close()
    assert ("is unknown" in caplog.text) is bool(listener.unknown)


# --- a server that takes its time -------------------------------------------------------------------------------------


def test_answers_to_no_question_without_end_are_not_waited_out() -> None:
    with short_directory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(f"{directory}/flood.sock")
        listening.listen()

        def flood() -> None:
            peer, _ = listening.accept()
            with peer, contextlib.suppress(OSError):  # the client has hung up
                peer.recv(1000)
                while True:
                    peer.send(encode(PoolFull(77, 0)))

        thread = threading.Thread(target=flood)
        thread.start()
        with pytest.raises(PoolLost, match="answer 77 belongs to no request"):
            within(PATIENCE, lambda: PinnedPoolClient(f"ipc://{directory}/flood.sock", timeout=PATIENCE))
        thread.join(PATIENCE)
        assert not thread.is_alive()
