"""What is read of a peer before the server meets it, how many there may be, and whose they are. Pure."""

from __future__ import annotations

import os
import socket
import struct

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from maru.base.relay.handshake import MAX_READY_BYTES, BadHandshake, Handshake, Introduction, greeting, ready
from maru.base.relay.limits import ConnectionQuota, PendingHandshakes
from maru.base.relay.lookup import find_user, may_enter
from maru.base.relay.users import user_in

CLIENTS = {b"REQ", b"DEALER"}


def command(name: bytes, *properties: tuple[bytes, bytes], long: bool = False) -> bytes:
    body = bytes([len(name)]) + name
    for key, value in properties:
        body += bytes([len(key)]) + key + struct.pack(">I", len(value)) + value
    return (b"\x06" + struct.pack(">Q", len(body)) if long else b"\x04" + bytes([len(body)])) + body


def read(data: bytes, step: int = 0) -> Introduction | None:
    """Handed over whole, or in steps."""
    handshake = Handshake(CLIENTS)
    found = None
    for start in range(0, len(data), step or len(data) or 1):
        assert found is None, "there was more than it needed"
        found = handshake.receive(data[start : start + (step or len(data))])
    return found


DEALER = (b"Socket-Type", b"DEALER")
GOOD = greeting() + command(b"READY", DEALER, (b"Identity", b"\0\1\2\3\4"))


# --- handshakes ---------------------------------------------------------------------------------------------------


def test_a_handshake_is_read_byte_by_byte_as_it_is_whole():
    assert read(GOOD) == read(GOOD, 1) == Introduction(b"DEALER", 1, b"")
    for cut in range(len(GOOD)):
        assert read(GOOD[:cut]) is None
        assert read(GOOD[:cut], 1) is None


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (greeting(0) + command(b"READY", DEALER), Introduction(b"DEALER", 0, b"")),
        (greeting(9) + command(b"READY", DEALER), Introduction(b"DEALER", 1, b"")),
        (b"\xff" * 9 + b"\x7f\x04\x00" + greeting()[12:] + command(b"READY", DEALER), Introduction(b"DEALER", 1, b"")),
        (greeting() + command(b"READY", (b"socket-type", b"REQ")), Introduction(b"REQ", 1, b"")),
        (greeting() + command(b"READY", (b"X-Any", b"x" * 300), DEALER, long=True), Introduction(b"DEALER", 1, b"")),
        (GOOD + b"\x00\x01x", Introduction(b"DEALER", 1, b"\x00\x01x")),
    ],
)
def test_what_zmtp_3_allows_is_taken(said, found):
    assert read(said) == found


@pytest.mark.parametrize(
    "said",
    [
        b"G",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 64,
        b"\xff" * 1000,
        b"\x01\x00" + b"\x01\x01" + b"\x05\x00abcd",
        greeting()[:10] + b"\x00",
        greeting()[:10] + b"\x01",
        greeting()[:10] + b"\x02",
        greeting()[:12] + b"CURVE".ljust(20, b"\0"),
        greeting()[:12] + b"NULLX".ljust(20, b"\0"),
        greeting() + b"\x00",
        greeting() + b"\x05",
        greeting() + command(b"ERROR"),
        greeting() + command(b"PING", DEALER),
        greeting() + command(b"READY"),
        greeting() + command(b"READY", DEALER, DEALER),
        greeting() + command(b"READY", (b"Socket-Type", b"ROUTER")),
        greeting() + command(b"READY", (b"Socket-Type", b"PUB")),
        greeting() + command(b"READY", (b"Socket-Type", b"")),
        greeting() + b"\x04\x00",
        greeting() + b"\x04\x01\x09",
        greeting() + b"\x04\x07\x05READY\x01",
        greeting() + b"\x04\x08\x05READY\x01x",
        greeting() + b"\x04\x0d\x05READY\x01x\xff\xff\xff\xffy",
        greeting() + b"\x06" + struct.pack(">Q", MAX_READY_BYTES + 1),
        greeting() + b"\x06" + b"\xff" * 8,
    ],
)
def test_anything_else_is_refused_as_soon_as_it_is_seen(said):
    with pytest.raises(BadHandshake):
        read(said)
    with pytest.raises(BadHandshake):
        read(said, 1)


def test_nothing_that_a_peer_said_is_said_again():
    for kind in (b"DEALER", b"REQ", b"ROUTER"):
        said = ready(kind)
        assert said == command(b"READY", (b"Socket-Type", kind), (b"Identity", b""))
    assert len(greeting()) == 64


@given(st.binary(max_size=300), st.lists(st.integers(1, 50), max_size=20))
def test_whatever_comes_is_a_handshake_is_not_one_yet_or_is_refused(tail, cuts):
    """And the same, however it is cut."""

    def outcome(pieces: list[bytes]) -> object:
        handshake = Handshake(CLIENTS)
        for number, piece in enumerate(pieces):
            try:
                found = handshake.receive(piece)
            except BadHandshake:
                return "refused"
            if found is not None:
                return found.socket_type, found.minor, found.rest + b"".join(pieces[number + 1 :])
        return None

    for said in (tail, greeting() + tail, greeting() + command(b"READY") + tail, GOOD[: len(tail)] + tail):
        pieces, rest = [], said
        for cut in cuts:
            pieces.append(rest[:cut])
            rest = rest[cut:]
        assert outcome([*pieces, rest]) == outcome([said])


@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_no_byte_of_a_handshake_can_be_changed_into_a_fault(at, by):
    changed = bytearray(GOOD)
    changed[at] ^= by
    try:
        found = read(bytes(changed))
    except BadHandshake:
        return
    assert found is None or found.socket_type in CLIENTS


# --- places -------------------------------------------------------------------------------------------------------


def test_one_peer_has_at_most_half_of_the_places():
    places = ConnectionQuota(10)
    assert [places.take("a") for _ in range(6)] == [True] * 5 + [False]
    assert [places.take(name) for name in "bcdefg"] == [True] * 5 + [False]
    assert len(places) == 10
    for name in "aaaaabcdef":
        places.give_back(name)
    assert len(places) == 0 and places.take("a")


def test_a_single_place_is_one():
    places = ConnectionQuota(1)
    assert places.take("a") and not places.take("b")


def test_the_oldest_newcomer_goes_where_there_are_too_many():
    handshakes: PendingHandshakes[str] = PendingHandshakes(2)
    assert (handshakes.admit("a"), handshakes.admit("b")) == (None, None)
    assert handshakes.admit("c") == "a"
    handshakes.release("a")  # which it is told, and is of no use
    handshakes.release("b")
    assert handshakes.admit("d") is None and len(handshakes) == 2


# --- users --------------------------------------------------------------------------------------------------------


def answer(state: int = 1, user: int = 1001, inode: int = 626) -> bytes:
    """Of the kernel: an `inet_diag_msg` of a socket in this state."""
    body = struct.pack("=BBBB", socket.AF_INET, state, 0, 0) + bytes(48) + struct.pack("=IIIII", 0, 0, 0, user, inode)
    return struct.pack("=IHHII", 16 + len(body), 20, 0, 0, 0) + body


def test_a_connection_that_both_ends_hold_is_its_users():
    assert user_in(answer()) == 1001


@pytest.mark.parametrize("says", [answer(state=4, user=0), answer(user=0, inode=0), answer(state=6, user=0, inode=0)])
def test_who_has_closed_a_connection_is_not_taken_for_root(says):
    assert user_in(says) is None


def test_a_connection_that_the_kernel_does_not_know_is_nobodys():
    assert user_in(struct.pack("=IHHII", 36, 2, 0, 0, 0) + struct.pack("=i", -2) + bytes(16)) is None


@pytest.mark.parametrize("says", [b"", answer()[:-1], struct.pack("=IHHII", 16, 3, 0, 0, 0)])
def test_what_is_no_answer_is_an_error(says):
    with pytest.raises(ValueError, match="an answer of"):
        user_in(says)


def test_who_may_enter():
    assert may_enter(os.geteuid()) and may_enter(0)
    assert not may_enter(None) and not may_enter(os.geteuid() + 1)


@pytest.mark.parametrize("ours_is", [socket.AF_INET, socket.AF_INET6])
@pytest.mark.parametrize("theirs_is", [socket.AF_INET, socket.AF_INET6])
async def test_the_kernel_tells_of_a_real_connection_while_both_ends_hold_it(ours_is, theirs_is):
    """Also where a socket of IPv6 is at one end of a connection of IPv4, or at both."""
    try:
        listener = (
            socket.create_server(("::", 0), family=ours_is, dualstack_ipv6=True)
            if ours_is == socket.AF_INET6
            else (socket.create_server(("127.0.0.1", 0)))
        )
    except OSError:
        pytest.skip("no IPv6 here")
    host = "127.0.0.1" if theirs_is == socket.AF_INET else "::ffff:127.0.0.1"
    with listener, socket.socket(theirs_is) as theirs:
        theirs.connect((host, listener.getsockname()[1]))
        accepted, _ = listener.accept()
        async with trio.SocketStream(trio.socket.from_stdlib_socket(accepted)) as stream:
            assert find_user(stream) == os.geteuid()
            theirs.close()
            assert find_user(stream) is None
