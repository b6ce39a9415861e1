"""Whatever keeps a server from starting, the doctor says before: the same bad inputs, given to both."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner

from maru import ConfigError, MaruError, open_server
from maru._config import server_config
from maru._directory.records import RegionAdded, SessionOpened, encode
from maru._journal.journal import Journal
from maru._journal.segments import Header, current_boot_id, pack_header
from maru._pool.state_directory import identity_of
from maru.cli import main
from maru.exception_groups import leaves
from maru.server_cli import main as server_main
from maru.transport import new_key_pair, save_key_pair, save_public_key
from tests.support.maru_processes import PATIENCE, Server, temporary_pool

NOBODY = "tcp://127.0.0.1:1"


@pytest.fixture
def place() -> Iterator[Path]:
    """An empty directory with a short name; the pool is to be below it."""
    with temporary_pool() as path:
        yield path.parent


def doctor(config: Path, server: str = NOBODY) -> tuple[int, str, list[dict[str, Any]]]:
    """Its exit code, what it says, and its findings."""
    timeout = "0.1" if server == NOBODY else f"{PATIENCE:g}"
    done = CliRunner().invoke(
        main, ["doctor", "--server", server, "--timeout", timeout, "--config", str(config), "--json"]
    )
    findings = json.loads(done.output)["findings"] if done.output.startswith("{") else []
    return done.exit_code, done.output, findings


def start(config: Path) -> str:
    """What keeps a server from starting; empty if nothing does."""

    async def serve() -> None:
        with trio.fail_after(PATIENCE):
            async with open_server(server_config(config)):
                pass

    try:
        trio.run(serve)
    except (MaruError, OSError, BaseExceptionGroup) as error:
        return str(leaves(error)[0])
    return ""


def write(place: Path, **knobs: object) -> Path:
    path = place / "maru.toml"
    knobs = {"pool_path": str(place / "pool"), "capacity_bytes": "8 MiB", **knobs}
    path.write_text("[server]\n" + "\n".join(f"{name} = {json.dumps(value)}" for name, value in knobs.items()))
    return path


# --- each of them: what is there, and the knobs that meet it -----------------------------------------------------------

Case = Callable[[Path], "contextlib.AbstractContextManager[dict[str, object]]"]
CASES: dict[str, tuple[Case, str]] = {}


def case(said: str) -> Callable[[Callable[[Path], Iterator[dict[str, object]]]], None]:
    def note(make: Callable[[Path], Iterator[dict[str, object]]]) -> None:
        CASES[make.__name__] = contextlib.contextmanager(make), said

    return note


@case("there is no directory")
def a_pool_whose_parent_is_not_there(place):
    yield {"pool_path": str(place / "mount" / "pool")}


@case("cannot be used as the directory of a pool")
def a_pool_that_is_a_file(place):
    (place / "pool").write_text("")
    yield {}


@case("cannot be used as the directory of a pool")
def a_pool_where_nothing_can_be_made(place):
    yield {"pool_path": "/proc/nowhere"}


@case("others may enter")
def a_pool_that_others_may_enter(place):
    (place / "pool").mkdir(mode=0o755)
    (place / "pool" / "somebody's").touch()
    yield {}


@case("is of format 9")
def a_pool_of_another_format(place):
    (place / "pool").mkdir(mode=0o700)
    (place / "pool" / "maru.pool").write_text('{"format": 9, "pool_id": "", "secret": ""}')
    yield {}


@case("belongs to the pool")
def a_journal_of_another_pool(place):
    assert start(write(place)) == ""
    (place / "pool" / "journal.1").write_bytes(pack_header("journal", Header(bytes(16), bytes(16), 1, 0, 0)))
    yield {}


@case("belongs to the pool")
def a_pool_whose_identity_is_cut_off(place):
    with Server(place / "pool"):
        pass
    os.truncate(place / "pool" / "maru.pool", 10)
    (place / "pool" / "journal.9").write_bytes(pack_header("journal", Header(bytes(16), bytes(16), 9, 0, 0)))
    yield {}


@case("belongs to the pool")
def a_pool_whose_identity_is_lost(place):
    with Server(place / "pool"):
        pass
    (place / "pool" / "maru.pool").unlink()
    (place / "pool" / "journal.9").write_bytes(pack_header("journal", Header(bytes(16), bytes(16), 9, 0, 0)))
    yield {}


@case("is in use by another server")
def a_pool_that_another_server_has(place):
    with Server(place / "pool"):
        yield {}


@case("there is no device")
def a_device_that_is_not_there(place):
    yield {"dax_path": str(place / "dax0.0")}


@case("there is no device")
def a_dax_device_that_is_not_there(place):
    yield {"dax_path": "/dev/dax99.9"}


@case("neither a DAX device nor a file")
def a_socket_for_a_device(place):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(place / "dax0.0"))
        fifo = place / "fifo"
        os.mkfifo(fifo)
        yield {"dax_path": str(fifo)}


@case("not a DAX device")
def another_device_for_a_device(place):
    yield {"dax_path": "/dev/null"}


@case("usable bytes")
def a_device_without_room(place):
    (place / "dax0.0").write_bytes(b"small")
    yield {"dax_path": str(place / "dax0.0"), "capacity_bytes": 0}


@case("No such file")
def a_key_file_that_is_not_there(place):
    yield {"curve_key_file": str(place / "key")}


@case("must have 0600")
def a_key_file_that_others_may_read(place):
    save_key_pair(place / "key", new_key_pair())
    (place / "key").chmod(0o644)
    yield {"curve_key_file": str(place / "key")}


@case("must hold one public-key and one secret-key")
def a_key_file_without_a_key(place):
    (place / "key").write_text("nothing")
    (place / "key").chmod(0o600)
    yield {"curve_key_file": str(place / "key")}


@case("No such file")
def a_list_of_clients_that_is_not_there(place):
    save_key_pair(place / "key", new_key_pair())
    yield {
        "curve_key_file": str(place / "key"),
        "curve_clients_file": str(place / "clients"),
        "host": "127.0.0.1",
        "port": 0,
    }


@case("must hold public keys")
def a_list_of_no_clients(place):
    save_key_pair(place / "key", new_key_pair())
    (place / "clients").write_text("# nobody\n")
    yield {"curve_key_file": str(place / "key"), "curve_clients_file": str(place / "clients")}


@case("must be shorter")
def a_name_too_long_for_a_socket(place):
    (place / ("x" * 100)).mkdir(mode=0o700)
    yield {"runtime_dir": str(place / ("x" * 100))}


@case("others may enter")
def sockets_where_others_may_enter(place):
    (place / "run").mkdir(mode=0o755)
    (place / "run" / "somebody's").touch()
    yield {"runtime_dir": str(place / "run")}


@case("a server already listens at")
def a_socket_where_another_server_listens(place):
    (place / "run").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(place / "run" / "maru.sock"))
        other.listen()
        yield {"runtime_dir": str(place / "run"), "zmq_socket": True}


@case("a server already listens at")
def a_channel_of_another_server(place):
    (place / "run").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(str(place / "run" / "channel.sock"))
        other.listen()
        yield {"runtime_dir": str(place / "run")}


@case("and is not a socket")
def a_file_in_place_of_a_socket(place):
    (place / "run").mkdir(mode=0o700)
    (place / "run" / "maru.sock").touch()
    yield {"runtime_dir": str(place / "run"), "zmq_socket": True}


@case("exists, and is not a socket")
def a_file_in_place_of_the_other_socket(place):
    (place / "run").mkdir(mode=0o700)
    (place / "run" / "descriptors.sock").touch()
    yield {"runtime_dir": str(place / "run")}


@case("Address already in use")
def a_port_that_is_taken(place):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield {"host": "127.0.0.1", "port": taken.getsockname()[1]}


@case("Address already in use")
def a_port_of_the_resource_manager_that_is_taken(place):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield {"rm_address": f"127.0.0.1:{taken.getsockname()[1]}"}


@case("Address already in use")
def a_port_with_keys_that_is_taken(place):
    pair = new_key_pair()
    save_key_pair(place / "key", pair)
    save_public_key(place / "clients", pair.public)
    keys = {"curve_key_file": str(place / "key"), "curve_clients_file": str(place / "clients")}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield {"host": "127.0.0.1", "port": taken.getsockname()[1], "rm_address": "", **keys}


@pytest.mark.parametrize("name", CASES)
def test_what_keeps_a_server_from_starting_the_doctor_says_before(place, name):
    make, said = CASES[name]
    with make(place) as knobs:
        config = write(place, **knobs)
        reason = start(config)
        assert said in reason
        code, output, findings = doctor(config)
        assert code == 1, output
        assert reason in [one["found"] for one in findings if one["verdict"] == "fail"]
        assert all(one["way_out"] for one in findings if one["verdict"] == "fail")


def damaged_pool(place: Path) -> Path:
    """A pool with a region of a session that lives, and a flipped bit in its journal behind that; its directory."""
    home = place / "pool"
    assert start(write(place)) == ""
    for path in home.glob("snapshot.*"):
        path.unlink()
    (home / "maru_1.dat").write_bytes(bytes(2 << 20))
    journal = Journal(home, pool_id=identity_of(home), boot_id=current_boot_id(), segment_bytes=300)
    journal.append([encode(SessionOpened(1, b"t" * 16, "i", "", False, 60.0)), encode(RegionAdded(1, 2 << 20, 1, "i"))])
    for number in range(2, 12):
        journal.append([encode(SessionOpened(number, b"%016d" % number, "i", "", False, 60.0))])
    journal.close()
    data = bytearray((home / "journal.2").read_bytes())
    data[150] ^= 4
    (home / "journal.2").write_bytes(data)
    return home


def test_what_a_start_would_give_up_the_doctor_says_before(place, caplog):
    home = damaged_pool(place)
    files = {path.name: path.read_bytes() for path in home.iterdir()}
    code, output, findings = doctor(write(place))
    assert code == 0, output  # a server starts
    [said] = [one for one in findings if one["name"] == "start: journal"]
    assert said["verdict"] == "warn" and "lost.*" in said["way_out"]
    loss, _, cost = said["found"].partition("; ")
    assert loss.startswith(f"{home}/journal.2 is damaged at byte")
    assert cost == "a start discards 1 of 1 regions, and 0 of 0 keys"
    assert [one["verdict"] for one in findings if one["name"] == "start"] == ["ok"]
    assert {path.name: path.read_bytes() for path in home.iterdir()} == files
    assert (start(write(place)), loss in caplog.text) == ("", True)
    assert not (home / "maru_1.dat").exists()
    assert "start: journal" not in [one["name"] for one in doctor(write(place))[2]]


def test_what_cannot_be_read_for_want_of_memory_the_doctor_says_too(place, monkeypatch):
    damaged_pool(place)

    def refuse(*args: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("maru._journal.replay.decode", refuse)
        code, _, findings = doctor(write(place))
        reason = start(write(place))
    assert (code, "no memory is left" in reason) == (1, True)
    assert reason in [one["found"] for one in findings if one["verdict"] == "fail"]


@pytest.mark.parametrize(
    "knobs",
    [
        {"prot": 1},
        {"port": 70_000},
        {"host": "0.0.0.0"},
        {"host": "0.0.0.0", "curve_key_file": "key"},
        {"host": "127.0.0.1", "curve_key_file": "key"},
        {"curve_clients_file": "clients"},
        {"ipc": False},
        {"rm_address": "0.0.0.0:0"},
        {"low_watermark": 0.99},
        {"session_lease": 3_000.0},
        {"capacity_bytes": "much"},
        {"tenant_quotas": ["a"]},
    ],
    ids=str,
)
def test_a_configuration_that_cannot_be_is_refused_by_both_in_the_same_words(place, knobs):
    config = write(place, **knobs)
    with pytest.raises(ConfigError) as error:
        server_config(config)
    code, output, _ = doctor(config)
    served = CliRunner().invoke(server_main, ["--config", str(config)])
    assert code == served.exit_code == 2
    assert f"Error: {error.value}" in output and f"Error: {error.value}" in served.output


def test_where_nothing_is_wrong_the_doctor_says_so_and_leaves_nothing(place):
    config = write(place, host="127.0.0.1", port=0)
    before = sorted(place.rglob("*"))
    code, output, findings = doctor(config)
    assert code == 0, output
    assert [one["verdict"] for one in findings if one["name"] == "start"] == ["ok"]
    assert sorted(place.rglob("*")) == before
    assert start(config) == ""
    assert doctor(config)[0] == 0  # over what a server has left


def test_a_server_that_runs_is_no_reason_for_another_one_not_to(place):
    with Server(place / "pool") as server:
        code, output, findings = doctor(write(place), server.ipc)
        assert code == 0, output
        assert "start" in [one["name"] for one in findings]


def test_an_empty_directory_that_a_server_would_close_is_no_failure(place):
    (place / "pool").mkdir(mode=0o755)
    config = write(place)
    code, output, _ = doctor(config)
    assert (code, start(config)) == (0, ""), output
