"""Whom a client believes: who listens, which protocol is spoken, and what a hostile server gets mapped, which is nothing."""

from __future__ import annotations

import logging
import os
import socket
import struct
import tempfile
from pathlib import Path

import attrs
import pytest
import trio

from maru import CannotMap, UntrustedServer
from maru._client.answers import Loaded
from maru._client.operations import beat, connect
from maru.base.listeners import find_listener, find_tcp_listener, find_unix_listener
from maru.base.peers import Listener, may_be_published, users_at, why_untrusted
from tests.support.maru_actors import FACES, client
from tests.support.maru_world import OURS, Client, Joined, PublishedWorld, World
from tests.support.other_user import UID, needs_root, other_user
from tests.support.published import PublishedServer
from tests.support.published_wire import Ipc, long, short

ME = os.geteuid()
TCP = Listener(frozenset({ME}))
"""A process of ours, at a port that anybody may have."""
FOREIGN = Listener(frozenset({ME, ME + 1}))
UNKNOWN = Listener(unknown="it is on the moon")


@pytest.fixture(params=FACES)
def face(request):
    return request.param


# --- the rules ----------------------------------------------------------------------------------------------------


def test_another_users_listener_is_not_believed_and_roots_is():
    assert not why_untrusted(Listener(frozenset({7})), 7)
    assert not why_untrusted(Listener(frozenset({7, 0})), 7)
    assert "user 8, and this process runs as 7" in why_untrusted(Listener(frozenset({7, 8})), 7)
    assert not why_untrusted(UNKNOWN, 7)


def test_the_published_protocol_needs_a_socket_that_nobody_else_can_have_put_there():
    assert may_be_published(Listener(frozenset({7}), is_private=True), 7)
    assert not may_be_published(Listener(frozenset({7})), 7)
    assert not may_be_published(Listener(frozenset({7, 0}), is_private=True), 7)
    assert not may_be_published(Listener(is_private=True), 7)


def table(*lines):
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"
    return "\n".join(
        [
            head,
            *(
                f"   0: {local} {remote} {st} 00000000:00000000 00:00000000 00000000 {uid} 0 1"
                for local, remote, st, uid in lines
            ),
        ]
    )


def kernels(text, port):
    address = socket.inet_pton(socket.AF_INET6 if ":" in text else socket.AF_INET, text)
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(address) // 4}I", address)) + f":{port:04X}"


def test_who_listens_or_has_accepted_at_an_address_is_told_from_all_others():
    here, other, far = kernels("127.0.0.1", 5555), kernels("127.0.0.2", 5555), kernels("127.0.0.1", 40000)
    packed = [socket.inet_aton("127.0.0.1")]
    assert users_at([table((here, far, "0A", 1))], packed, 5555) == {1}
    assert users_at([table((kernels("0.0.0.0", 5555), far, "0A", 2))], packed, 5555) == {2}
    assert users_at(["", table((kernels("::", 5555), far, "0A", 3))], packed, 5555) == {3}
    assert users_at(["", table((kernels("::ffff:127.0.0.1", 5555), far, "01", 4))], packed, 5555) == {4}
    # He has accepted, and listens no more: another one does, and did not answer.
    assert users_at([table((here, far, "01", 5), (here, far, "0A", 1))], packed, 5555) == {1, 5}
    # Another address, another port, and a client's own end.
    assert not users_at(
        [table((other, far, "0A", 6), (kernels("127.0.0.1", 5556), far, "0A", 7), (far, here, "01", 8))], packed, 5555
    )


# --- what the kernel says -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_the_user_of_a_tcp_listener_is_found(host):
    family = socket.AF_INET6 if host == "[::1]" else socket.AF_INET
    try:
        listening = socket.create_server((host.strip("[]"), 0), family=family)
    except OSError as exc:
        assert host == "[::1]"
        pytest.skip(f"this host has no IPv6: {exc}")
    with listening:
        port = listening.getsockname()[1]
        assert find_listener(f"tcp://{host}:{port}") == Listener(frozenset({ME}))
    assert find_tcp_listener(host, port).unknown


def test_who_has_accepted_is_found_after_he_stopped_listening():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        asking = socket.create_connection(address)
        accepted, _ = listening.accept()
    with asking, accepted:
        assert find_tcp_listener(*address).uids == {ME}


@pytest.mark.parametrize(
    "url", ["tcp://no.such.host.invalid:1", "ipc:///nowhere", "ipc://@nobody-is-there", "ipc://" + "x" * 200]
)
def test_an_address_where_nobody_is_says_so(url):
    listener = find_listener(url)
    assert listener.unknown and not listener.uids and not listener.is_private


def test_a_unix_socket_is_private_where_only_its_user_can_have_put_it(tmp_path):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        listening.listen()
        assert find_unix_listener(str(tmp_path / "socket")) == OURS
        tmp_path.chmod(0o1777)
        assert find_unix_listener(str(tmp_path / "socket")) == attrs.evolve(OURS, is_private=False)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{tmp_path}")
        listening.listen()
        assert find_unix_listener(f"@{tmp_path}") == attrs.evolve(OURS, is_private=False)


# --- whom a client greets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [World, PublishedWorld])
@pytest.mark.parametrize("protocol", ["auto", "own", "published"])
def test_a_server_of_another_user_is_refused_in_every_protocol(world, protocol):
    one = Client(world(), protocol=protocol)
    one.listener = FOREIGN
    with pytest.raises(UntrustedServer, match=f"server_url = 'ipc://.*user {ME + 1}.*curve_key_file"):
        one.run(connect(one.s))
    assert not one.s.is_connected and one.s.unsettled and not one.s.token


@pytest.mark.parametrize("listener", [TCP, UNKNOWN, OURS])
@pytest.mark.parametrize("protocol", ["auto", "own", "published"])
def test_the_published_protocol_is_never_fallen_back_to_silently(protocol, listener):
    one = Client(PublishedWorld(), protocol=protocol)
    one.listener = listener
    if protocol == "published" or (protocol == "auto" and listener is OURS):
        one.run(connect(one.s))
        assert one.s.is_connected and not one.s.own
        return
    with pytest.raises(UntrustedServer, match=f"protocol = '{protocol}'.*protocol='published'"):
        one.run(connect(one.s))
    assert not one.s.is_connected


def test_the_published_protocol_is_spoken_with_a_server_of_ours_where_it_is_asked_for():
    world = World()
    one = Client(world, protocol="published")
    one.run(connect(one.s))
    assert not one.s.own and not one.s.token


def test_a_server_that_is_known_by_its_key_is_not_asked_about():
    keys = {"curve_key_file": "/keys", "curve_server_key": "x" * 40}
    one = Client(World(), **keys)
    one.listener = FOREIGN
    one.run(connect(one.s))
    assert one.s.own
    other = Client(PublishedWorld(), **keys)
    with pytest.raises(UntrustedServer, match="protocol = 'auto'"):
        other.run(connect(other.s))


def test_that_nobody_can_tell_whose_a_server_is_is_said_once(caplog):
    world = World()
    one = Client(world)
    one.listener = UNKNOWN
    with caplog.at_level(logging.WARNING):
        one.run(connect(one.s))
        one.s.unsettled = True
        one.run(beat(one.s))
    [line] = caplog.messages
    assert "cannot be checked (it is on the moon)" in line and "curve_key_file" in line


def test_who_takes_the_port_later_is_refused_when_he_is_greeted():
    world = World()
    one = Client(world)
    one.run(connect(one.s))
    world.restart(forgets=True)
    one.listener = FOREIGN
    for _ in range(2):
        with pytest.raises(UntrustedServer):
            one.run(beat(one.s))
    one.listener = OURS
    one.run(beat(one.s))
    assert one.s.own and not one.s.unsettled


def test_who_takes_a_published_servers_port_is_refused_at_the_next_sign_of_life():
    """It has no epoch that would tell, and if no answer was missing, nobody has looked."""
    one = Client(PublishedWorld(), protocol="published", checksums=False)
    one.run(connect(one.s))
    one.listener = FOREIGN
    for _ in range(2):
        with pytest.raises(UntrustedServer):
            one.run(beat(one.s))
    with pytest.raises(UntrustedServer):
        one.get(["k"])
    one.listener = TCP
    assert one.get(["k"]) == [Loaded.MISSING]


async def test_cancelled_while_it_asks_who_listens_it_believes_nobody(autojump_clock):
    joined = Joined(World())
    asked = trio.Event()

    async def forever():
        asked.set()
        await trio.sleep_forever()

    identify, joined.handler._driver.identify = joined.handler._driver.identify, forever
    async with trio.open_nursery() as nursery:

        async def enter():
            async with joined:
                raise AssertionError("it was opened")

        nursery.start_soon(enter)
        await asked.wait()
        standing = joined.handler._state
        assert standing.unsettled and not standing.is_connected
        nursery.cancel_scope.cancel()
    joined.handler._driver.identify = identify
    joined.handler._driver.map = joined._map
    async with joined as handler:
        assert handler.connected


@needs_root
@pytest.mark.parametrize("place", ["tcp", "ipc"])
def test_the_server_of_another_user_is_refused_over_its_own_socket(face, place):
    script = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.support.published_server import PublishedServer
become_other_user()
with PublishedServer(Path(sys.argv[2]), sys.argv[3]) as server:
    print(server.address, flush=True)
    server._thread.join()
"""
    with tempfile.TemporaryDirectory() as directory:
        os.chown(directory, UID, UID)
        where = "tcp://127.0.0.1:*" if place == "tcp" else f"ipc://{directory}/squatted"
        with other_user(script, Path(__file__).parents[1] / "support", directory, where) as squatter:
            url = squatter.stdout.readline().strip()
            assert url.startswith(place)
            for protocol in ("auto", "published"):
                with (
                    pytest.raises(UntrustedServer, match=f"served by user {UID}"),
                    client(face, url, protocol=protocol),
                ):
                    pass


# --- what a hostile server gets mapped ----------------------------------------------------------------------------


class Hostile(PublishedServer):
    """A published server whose resource manager names what it likes: ``lie(path)`` of the region's file."""

    lie = staticmethod(lambda path: path)

    def _answer_ipc(self, kind, body):
        if kind != Ipc.GET_ACCESS_REQ:
            return super()._answer_ipc(kind, body)
        region = self._region_of(body[:32])
        path = self.lie(region.path)
        span = struct.pack("<QQ", 0, region.handle["length"])
        return Ipc.GET_ACCESS_RESP, struct.pack("<i", 0) + long(str(path).encode()) + span + short(b"")


def another(path: Path) -> Path:
    """A directory beside the region's, where a file may have its name."""
    there = path.parent / "elsewhere"
    there.mkdir(exist_ok=True)
    return there / path.name


def as_private_file(path):
    there = path.parent / "id_rsa"
    there.touch(0o600)
    there.write_bytes(b"secret" * (1 << 20))
    return there


def as_link(path):
    there = another(path)
    there.symlink_to(as_private_file(path))
    return there


def as_hard_link(path):
    there = another(path)
    os.link(as_private_file(path), there)
    return there


def as_file_of_another_user(path):
    os.chown(path, UID, UID)
    return path


def as_open_file(path):
    path.chmod(0o666)
    return path


def as_short_file(path):
    os.truncate(path, 4096)
    return path


def as_directory(path):
    another(path).mkdir()
    return another(path)


def as_pipe(path):
    os.mkfifo(another(path), 0o600)
    return another(path)


def as_device(path):
    return "/dev/zero"


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (as_private_file, "neither named"),
        (as_link, "symbolic link"),
        (as_hard_link, "2 hard links"),
        pytest.param(as_file_of_another_user, f"belongs to user {UID}", marks=needs_root),
        (as_open_file, "mode 0666"),
        (as_short_file, "4096 bytes, but 2097152 were promised"),
        (as_directory, "directory"),
        (as_pipe, "pipe"),
        (as_device, "neither named"),
    ],
)
def test_what_a_hostile_server_names_is_not_mapped(tmp_path, face, lie, why):
    """On what was: its secret was written over, its pages were read by others, or the process ended by SIGBUS."""
    with Hostile(tmp_path) as server:
        server.lie = lie
        with client(face, server.address) as owner:
            with pytest.raises(CannotMap, match=why):
                owner.call("batch_put", ["k"], [b"a prompt"])
            with open("/proc/self/maps") as file:
                assert str(tmp_path) not in file.read()
    secret = tmp_path / "id_rsa"
    assert not secret.exists() or secret.read_bytes() == b"secret" * (1 << 20)


def test_a_device_is_mapped_only_where_the_clients_own_configuration_names_it(tmp_path, face):
    device = tmp_path / "device"
    device.touch(0o640)  # as a device may be: its group's
    device.write_bytes(bytes(2 << 20))
    with Hostile(tmp_path) as server:
        server.lie = lambda path: device
        with client(face, server.address) as owner, pytest.raises(CannotMap, match="nor dax_path"):
            owner.put(["k"])
        with client(face, server.address, dax_path=str(device)) as owner:
            assert owner.put(["k"]) == ["NEW"]


@needs_root
def test_a_resource_manager_of_another_user_is_not_believed(tmp_path, face):
    script = """
import socket, struct
become_other_user()
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
while True:
    peer, _ = listening.accept()
    peer.recv(12, socket.MSG_WAITALL)
    peer.sendall(struct.pack("<IHHI", 0x4D415255, 2, 10, 26) + struct.pack("<iIQQH", -2, 0, 0, 0, 0))
    peer.recv(1 << 16)
"""
    with other_user(script) as squatter, PublishedServer(tmp_path) as server:
        server.rm_address = f"127.0.0.1:{squatter.stdout.readline().strip()}"
        with client(face, server.address) as owner, pytest.raises(UntrustedServer, match="rm_address"):
            owner.put(["k"])
