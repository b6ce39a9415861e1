"""Who comes in and what of theirs: keys, limits, addresses, options."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct

import pytest
import trio

from maru import ConfigError
from maru.transport import (
    CurveClient,
    CurveServer,
    KeyPair,
    Link,
    SocketOptions,
    load_key_pair,
    load_public_keys,
    new_key_pair,
    open_socket,
    save_key_pair,
    save_public_key,
)
from tests.support.maru_sockets import PATIENCE, echo, echo_server, eventually, open_calls

SERVER, FRIEND, STRANGER = new_key_pair(), new_key_pair(), new_key_pair()


@pytest.fixture(params=["tcp", "ipc"])
def address(request, tmp_path):
    return "tcp://127.0.0.1:*" if request.param == "tcp" else f"ipc://{tmp_path}/socket"


@pytest.fixture
def ipc(tmp_path):
    return f"ipc://{tmp_path}/socket"


# --- keys ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [None, [FRIEND.public], [FRIEND.public.decode(), STRANGER.public]])
async def test_whose_key_is_good_comes_in(address, clients):
    server = SocketOptions(curve=CurveServer(SERVER, clients))
    client = SocketOptions(curve=CurveClient(SERVER.public, FRIEND))
    links = []
    with echo_server(address, server) as place, trio.fail_after(PATIENCE):
        async with open_calls(place, client, on_link=lambda event: links.append(event.link)) as calls:
            for _ in range(20):
                await calls.call(b"secret")
    assert Link.READY in links


BAD = {
    "no key": None,
    "another server's key": CurveClient(STRANGER.public, FRIEND),
    "a key that is not on the list": CurveClient(SERVER.public, STRANGER),
    "a fresh key": CurveClient(SERVER.public),
}


@pytest.mark.parametrize("curve", BAD.values(), ids=BAD)
async def test_whose_key_is_bad_is_kept_out_and_disturbs_nobody(address, curve):
    server = SocketOptions(curve=CurveServer(SERVER, [FRIEND.public]))
    friend = SocketOptions(curve=CurveClient(SERVER.public, FRIEND))
    links = []
    with trio.fail_after(PATIENCE):
        async with open_socket("router", bind=[address], options=server) as router, trio.open_nursery() as nursery:
            nursery.start_soon(echo, router)
            [place] = router.endpoints
            bad = SocketOptions(curve=curve)
            async with (
                open_calls(place, friend) as calls,
                open_socket(
                    "dealer", connect=[place], options=bad, on_link=lambda event: links.append(event.link)
                ) as other,
            ):
                other.send_nowait([b"", b"let me in"])
                await eventually(lambda: {Link.DISCONNECTED, Link.GIVEN_UP, Link.REFUSED, Link.FAILED} & set(links))
                for _ in range(20):
                    await calls.call()
                assert Link.READY not in links
                statistics = router.statistics()
                assert statistics.received == 20
                assert (statistics.refused > 0) == (curve is not None and curve.server_key == SERVER.public)
            nursery.cancel_scope.cancel()


async def test_without_a_list_who_knows_the_servers_key_comes_in_and_nobody_else(ipc):
    with echo_server(ipc, SocketOptions(curve=CurveServer(SERVER))) as place, trio.fail_after(PATIENCE):
        async with open_calls(place, SocketOptions(curve=CurveClient(SERVER.public))) as calls:
            await calls.call()
        for curve in (None, CurveClient(STRANGER.public)):
            async with open_calls(place, SocketOptions(curve=curve)) as calls:
                with trio.move_on_after(0.05) as scope:
                    await calls.call()
                assert scope.cancelled_caught


async def test_what_flows_is_not_readable(tmp_path):
    """Bytes on the wire, seen by a man in the middle."""
    seen = bytearray()
    listener = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener[0].socket.getsockname()[1]

    async def between(client):
        async with (
            client,
            await trio.open_tcp_stream("127.0.0.1", server_port) as server,
            trio.open_nursery() as nursery,
        ):

            async def copy(source, sink):
                async for data in source:
                    seen.extend(data)
                    await sink.send_all(data)
                nursery.cancel_scope.cancel()

            nursery.start_soon(copy, client, server)
            nursery.start_soon(copy, server, client)

    with trio.fail_after(PATIENCE):
        for curve_server, curve_client in ((None, None), (CurveServer(SERVER), CurveClient(SERVER.public))):
            seen.clear()
            with echo_server("tcp://127.0.0.1:*", SocketOptions(curve=curve_server)) as place:
                server_port = int(place.rpartition(":")[2])
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(trio.serve_listeners, between, listener)
                    async with open_calls(f"tcp://127.0.0.1:{port}", SocketOptions(curve=curve_client)) as calls:
                        await calls.call(b"the key of block 17")
                    nursery.cancel_scope.cancel()
                listener = await trio.open_tcp_listeners(port, host="127.0.0.1")
            assert (b"the key of block 17" in seen) == (curve_server is None)
        await listener[0].aclose()


def test_keys_are_kept_in_private_files(tmp_path):
    pair = new_key_pair()
    before = os.umask(0)
    try:
        save_key_pair(tmp_path / "mine", pair)
        save_public_key(tmp_path / "mine.pub", pair.public)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o600
    assert load_key_pair(tmp_path / "mine") == pair
    assert load_public_keys(tmp_path / "mine.pub") == {pair.public}
    assert pair.secret.decode() not in repr(pair)
    for save, key in ((save_key_pair, pair), (save_public_key, pair.public)):
        with pytest.raises(FileExistsError):
            save(tmp_path / "mine", key)
    (tmp_path / "mine").chmod(0o640)
    with pytest.raises(ConfigError, match="mode 0640"):
        load_key_pair(tmp_path / "mine")
    (tmp_path / "mine.pub").chmod(0o600)
    with pytest.raises(ConfigError, match="one secret-key"):
        load_key_pair(tmp_path / "mine.pub")


def test_a_list_of_keys_may_be_one_key_a_line(tmp_path):
    keys = [new_key_pair().public.decode() for _ in range(3)]
    (tmp_path / "list").write_text(f"# clients\n{keys[0]}\n\n  {keys[1]}  # the second\n{keys[2]}")
    assert load_public_keys(tmp_path / "list") == {key.encode() for key in keys}
    for wrong in ("", "# nobody\n", f"{keys[0]}\nno key\n"):
        (tmp_path / "list").write_text(wrong)
        with pytest.raises(ConfigError, match="must hold public keys"):
            load_public_keys(tmp_path / "list")


def test_a_key_that_ends_in_what_begins_a_comment_is_read_whole(tmp_path):
    key = SERVER.public[:-1].decode() + "#"
    for line in (key, f" {key}  # a comment", f"{key}\t#", f"{key} #{key}"):
        (tmp_path / "list").write_text(f"# clients\n#another\n{line}\n")
        assert load_public_keys(tmp_path / "list") == {key.encode()}


def test_what_is_no_key_is_said_and_no_secret_is():
    for make in (
        lambda: KeyPair("short", SERVER.secret),
        lambda: KeyPair(FRIEND.public, SERVER.secret),
        lambda: CurveClient("x" * 39),
        lambda: CurveServer(SERVER, ["x"]),
    ):
        with pytest.raises(ConfigError):
            make()
    with pytest.raises(ConfigError) as caught:
        KeyPair(SERVER.public, SERVER.secret + b"x")
    assert SERVER.secret.decode() not in str(caught.value)


# --- limits -------------------------------------------------------------------------------------------------------


async def test_a_frame_that_is_too_large_costs_its_sender_the_connection_only(address):
    limited = SocketOptions(max_message_bytes=1_000)
    links = []
    with echo_server(address, limited) as place, trio.fail_after(PATIENCE):
        async with (
            open_calls(place) as good,
            open_socket("dealer", connect=[place], on_link=lambda event: links.append(event.link)) as bad,
        ):
            await good.call(bytes(900))
            bad.send_nowait([b"", bytes(1_001)])
            await eventually(lambda: Link.DISCONNECTED in links)
            for _ in range(20):
                await good.call(bytes(900))
            bad.send_nowait([b"", bytes(1_000)])  # connected again
            assert await bad.receive() == [b"", bytes(1_000)]


async def test_a_message_of_too_many_frames_is_dropped_and_counted(ipc):
    limited = SocketOptions(max_frames=4)
    for more in ({}, {"on_gone": print}):
        async with open_socket("router", bind=[ipc], options=limited, **more) as router:
            async with open_socket("dealer", connect=[ipc]) as dealer:
                for count in (3, 4, 100, 2):
                    dealer.send_nowait([b"%d" % count] * count)
                with trio.fail_after(PATIENCE):
                    received = [await router.receive() for _ in range(2)]
            assert [message[1:] for message in received] == [[b"3"] * 3, [b"2"] * 2]
            assert router.statistics().dropped == 2


def greet(client, *, ready=True):
    """Speak as much of ZMTP 3.1 as is needed to be connected."""
    client.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32))
    got = b""
    while len(got) < 64:
        got += client.recv(64 - len(got))
    if ready:
        body = b"\x05READY" + b"\x0bSocket-Type" + struct.pack("!I", 6) + b"DEALER"
        client.sendall(b"\x04" + bytes([len(body)]) + body)


async def test_who_does_not_say_who_it_is_is_dropped(ipc):
    links = []
    options = SocketOptions(handshake_timeout=0.05)
    async with open_socket("router", bind=[ipc], options=options, on_link=lambda event: links.append(event.link)):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(ipc.removeprefix("ipc://"))
            await eventually(lambda: Link.DISCONNECTED in links)
            assert links[0] is Link.ACCEPTED


@pytest.mark.parametrize("interval", [0.0, 0.02])
async def test_who_gives_no_sign_of_life_is_dropped_where_one_is_asked_for(ipc, interval):
    links = []
    options = SocketOptions(heartbeat_interval=interval, heartbeat_timeout=0.02)
    async with open_socket("router", bind=[ipc], options=options, on_link=lambda event: links.append(event.link)):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(ipc.removeprefix("ipc://"))
            await trio.to_thread.run_sync(greet, client)
            await eventually(lambda: Link.READY in links)
            if interval:
                await eventually(lambda: Link.DISCONNECTED in links)
            else:
                await trio.sleep(0.1)
                assert Link.DISCONNECTED not in links


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\xff" * 1000, os.urandom(1000)])
async def test_noise_at_the_port_disturbs_nobody(address, noise):
    gone = []
    with trio.fail_after(PATIENCE):
        async with (
            open_socket("router", bind=[address], on_gone=gone.append) as router,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(echo, router)
            [place] = router.endpoints
            async with open_calls(place) as calls:
                for _ in range(5):
                    await calls.call()
                    if place.startswith("tcp"):
                        client = socket.create_connection(("127.0.0.1", int(place.rpartition(":")[2])))
                    else:
                        client = socket.socket(socket.AF_UNIX)
                        client.connect(place.removeprefix("ipc://"))
                    with client:
                        client.sendall(noise)
                await calls.call()
                assert router.statistics().peers >= 1
            nursery.cancel_scope.cancel()


# --- addresses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["", "tcp://", "inproc://x", "127.0.0.1:5555", "pgm://x", "ipc://" + "x" * 108])
@pytest.mark.parametrize("how", ["bind", "connect"])
async def test_what_is_no_address_is_refused(how, wrong):
    with pytest.raises(ValueError, match=r"address|too long"):
        async with open_socket("dealer", **{how: [wrong]}):
            pass


async def test_an_address_that_is_taken_is_refused_and_its_owner_goes_on(address):
    with echo_server(address) as place, trio.fail_after(PATIENCE):
        for _ in range(2):
            with pytest.raises(OSError, match="listen") as caught:
                async with open_socket("router", bind=[place]):
                    pass
            assert caught.value.errno == errno.EADDRINUSE
        async with open_calls(place) as calls:
            await calls.call()


async def test_the_file_of_a_dead_server_is_replaced_and_another_file_is_not(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    with echo_server(f"ipc://{path}") as place:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with open_calls(place) as calls:
            await calls.call()
    assert not path.exists()
    path.write_text("precious")
    with pytest.raises(FileExistsError):
        async with open_socket("router", bind=[f"ipc://{path}"]):
            pass
    assert path.read_text() == "precious"


async def test_an_abstract_name_can_be_bound_once():
    address = f"ipc://@maru-test-{os.getpid()}"
    with echo_server(address) as place:
        with pytest.raises(OSError, match="listen"):
            async with open_socket("router", bind=[place]):
                pass
        async with open_calls(place) as calls:
            await calls.call()


async def test_where_it_listens_is_told(tmp_path):
    async with open_socket("router", bind=["tcp://127.0.0.1:*", f"ipc://{tmp_path}/s"]) as router:
        tcp, unix = router.endpoints
        assert tcp.startswith("tcp://127.0.0.1:") and not tcp.endswith("*")
        assert unix == f"ipc://{tmp_path}/s"
        assert unix in repr(router)


# --- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"send_high_water_mark": 0},
        {"receive_high_water_mark": -1},
        {"max_message_bytes": 0},
        {"max_frames": 1},
        {"linger": -1.0},
        {"linger": 11.0},
        {"busy_poll": 1.0},
        {"reconnect_interval": 2.0},
        {"immediate": 1},
    ],
)
def test_an_option_out_of_its_bound_is_refused(wrong):
    with pytest.raises(ConfigError):
        SocketOptions(**wrong)


async def test_options_arrive(ipc):
    import zmq

    options = SocketOptions(
        send_high_water_mark=7,
        receive_high_water_mark=8,
        max_message_bytes=9_000,
        linger=0.0004,
        tcp_keepalive=40.0,
        heartbeat_interval=2.0,
        heartbeat_timeout=3.0,
    )
    async with open_socket("router", bind=[ipc], options=options) as router:
        get = router._port.raw.get
        expected = {
            zmq.SNDHWM: 7,
            zmq.RCVHWM: 8,
            zmq.MAXMSGSIZE: 9_000,
            zmq.LINGER: 1,  # not 0
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: 40,
            zmq.TCP_KEEPALIVE_INTVL: 10,
            zmq.HEARTBEAT_IVL: 2_000,
            zmq.HEARTBEAT_TIMEOUT: 3_000,
            zmq.IPV6: 0,
        }
        assert {option: get(option) for option in expected} == expected
