"""The knobs of a server and of a client. What loading does in general is tested in test_config; here what is maru's own."""

import math
import os
import subprocess
import sys

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maru import ConfigError, MaruConfig, MaruError, ServerConfig
from maru._config import client_config, from_mapping, is_loopback, knobs, server_config
from maru.base.errors import KnobError
from maru.configuration import as_bytes, as_size
from offload import ConfigError as OffloadConfigError

EVERY = [*knobs(ServerConfig, section="server"), *knobs(MaruConfig, section="client")]


KEYS = {"curve_key_file": "key", "curve_clients_file": "clients"}


def refused(make, *args, **kwargs):
    with pytest.raises(ConfigError) as error:
        make(*args, **kwargs)
    return str(error.value)


# --- the knobs ----------------------------------------------------------------------------------------------------


def test_by_default_nothing_is_said_over_tcp():
    server, client = ServerConfig(), MaruConfig()
    assert (server.host, server.rm_host, server.relayed) == ("", "", False)
    assert client.server_url == f"ipc:///dev/shm/maru-{os.getuid()}/maru.sock"
    assert MaruConfig(server_url="") == MaruConfig(server_url=None) == client


def test_where_there_is_a_host_it_is_relayed_unless_it_has_keys():
    asked = ServerConfig(host="127.0.0.1")
    assert (asked.relayed, asked.rm_host, asked.rm_port) == (True, "127.0.0.1", 0)
    assert ServerConfig(host="127.0.0.1", rm_address="").rm_host == ""
    assert not ServerConfig(host="127.0.0.1", curve_key_file="key", curve_clients_file="clients").relayed


def test_defaults_are_those_that_published_clients_expect():
    server = ServerConfig()
    assert (server.port, server.v1_read_grace) == (5555, 30.0)
    client = MaruConfig()
    assert (
        attrs.asdict(client).items()
        >= {
            "pool_size": 100 << 20,
            "chunk_size_bytes": 1 << 20,
            "timeout_ms": 2000,
            "max_inflight": 64,
        }.items()
    )


def test_published_none_means_not_set():
    assert MaruConfig(instance_id=None, rm_address=None) == MaruConfig()


@pytest.mark.parametrize("knob", EVERY, ids=lambda knob: knob.name)
def test_every_knob_has_a_reason_and_is_set_by_its_variable(knob):
    assert knob.bound
    assert knob.reason.endswith(".") and "\n" not in knob.reason
    load = server_config if knob.name.startswith("server.") else client_config
    text = ",".join(knob.default) if isinstance(knob.default, tuple) else str(knob.default)
    assert load(environ={knob.variable: text}) == load(environ={})
    assert knob.variable == f"MARU_{knob.name.upper().replace('.', '__')}"


@pytest.mark.parametrize(
    "knob", [knob for knob in EVERY if not isinstance(knob.default, str | tuple)], ids=lambda knob: knob.name
)
@pytest.mark.parametrize("value", [None, "no such value", -1, math.nan, 1e99, [], {}])
def test_a_knob_refuses_what_it_cannot_be(knob, value):
    cls = ServerConfig if knob.name.startswith("server.") else MaruConfig
    name = knob.name.partition(".")[2]
    if isinstance(knob.default, bool) and value is None:
        value = 1
    message = refused(cls, **{name: value})
    assert message.startswith(f"{name} = ")
    assert knob.bound in message


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("host", "a b"),
        ("host", "tcp://*"),
        ("port", 65_536),
        ("rm_address", "127.0.0.1"),
        ("rm_address", "somewhere:"),
        ("log_level", "loud"),
        ("journal_sync", "always"),
        ("pool_path", "a\0b"),
        ("instance_quotas", ["one"]),
        ("instance_quotas", ["one=many"]),
        ("tenant_quotas", "blue=1GiB,red"),
        ("max_keys", 1 << 20),
    ],
)
def test_a_server_refuses(knob, value):
    assert refused(ServerConfig, **{knob: value}).startswith(f"{knob} = ")


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("server_url", "localhost:5555"),
        ("server_url", "http://localhost:5555"),
        ("server_url", "tcp://localhost"),
        ("pool_size", "many"),
        ("chunk_size_bytes", 0),
        ("curve_server_key", "short"),
    ],
)
def test_a_client_refuses(knob, value):
    assert refused(MaruConfig, **{knob: value}).startswith(f"{knob} = ")


def test_sizes_may_have_units():
    assert MaruConfig(pool_size="4G", chunk_size_bytes="4M").pool_size == 4 << 30
    assert server_config("[server]\ncapacity_bytes = '64 MiB'", environ={}).capacity_bytes == 64 << 20
    assert server_config(environ={"MARU_SERVER__CAPACITY_BYTES": "500m"}).capacity_bytes == 500 << 20
    assert [as_bytes(text) for text in ("0", "7", "1k", "2 KiB", "3MB", "4GiB", "5t")] == [
        0,
        7,
        1 << 10,
        2 << 10,
        3 << 20,
        4 << 30,
        5 << 40,
    ]
    for text in ("", "x", "1.5G", "-1", "1 PiB", "G", 7, None):
        assert as_bytes(text) is text
    assert [as_size(size) for size in (0, 1, 1024, 1536, 1 << 20, 5 << 40, 1 << 60)] == [
        "0",
        "1",
        "1 KiB",
        "1536",
        "1 MiB",
        "5 TiB",
        "1048576 TiB",
    ]


@given(st.integers(0, 1 << 59))
def test_a_size_is_read_as_it_is_written(size):
    assert as_bytes(as_size(size)) == size


def test_quotas_are_told_by_name():
    config = server_config(
        "[server]\ninstance_quotas = ['a=1GiB', 'b = 2k']", environ={"MARU_SERVER__TENANT_QUOTAS": "t=5"}
    )
    assert config.quotas == ({"a": 1 << 30, "b": 2048}, {"t": 5})


# --- knobs that hang together -------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["", "127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]"])
def test_this_host_may_be_listened_on_without_keys(host):
    assert is_loopback(host)
    assert ServerConfig(host=host).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "10.0.0.1", "::", "example.org", "127.0.0.1.example.org", "127.evil"])
def test_any_other_host_needs_keys_or_insecure(host):
    assert not is_loopback(host)
    assert "curve_key_file or insecure" in refused(ServerConfig, host=host)
    assert ServerConfig(host=host, curve_key_file="key", curve_clients_file="clients").host == host
    assert ServerConfig(host=host, insecure=True).host == host


def test_the_resource_manager_needs_insecure_since_it_knows_no_keys():
    assert "insecure" in refused(ServerConfig, rm_address="0.0.0.0:1")
    assert "insecure" in refused(ServerConfig, rm_address="0.0.0.0:1", host="0.0.0.0", **KEYS)
    config = ServerConfig(rm_address="0.0.0.0:1", insecure=True)
    assert (config.rm_host, config.rm_port) == ("0.0.0.0", 1)
    assert (ServerConfig(rm_address="[::1]:9").rm_host, ServerConfig(rm_address="").rm_host) == ("::1", "")


def test_who_may_come_in_is_named_where_keys_decide():
    assert "needs curve_key_file" in refused(ServerConfig, curve_clients_file="clients")
    for host in ("127.0.0.1", "0.0.0.0"):
        assert "must name the clients" in refused(ServerConfig, host=host, curve_key_file="key")
        assert ServerConfig(host=host, curve_key_file="key", insecure=True).host == host
    assert not ServerConfig(curve_key_file="key").host  # whoever reaches the Unix socket is this user anyway


def test_a_server_that_nobody_could_reach_is_refused():
    assert "no client could reach" in refused(ServerConfig, host="", ipc=False)


def test_a_lease_lies_between_the_least_and_the_most():
    assert refused(ServerConfig, session_lease=0.5).startswith("session_lease")
    assert refused(ServerConfig, session_lease=100.0).startswith("session_lease")
    assert ServerConfig(session_lease=0.5, min_lease=0.5).session_lease == 0.5


def test_the_low_watermark_is_not_above_the_high_one():
    assert refused(ServerConfig, low_watermark=0.5, high_watermark=0.4).startswith("low_watermark")


def test_a_client_has_both_curve_keys_or_none():
    assert refused(MaruConfig, curve_key_file="key").startswith("curve_server_key")
    assert MaruConfig(curve_key_file="key", curve_server_key="x" * 40)


def test_a_pool_holds_at_least_a_page_unless_it_is_none():
    assert refused(MaruConfig, pool_size=1000).startswith("pool_size")
    assert MaruConfig(pool_size=0).pool_size == 0


# --- where they come from -----------------------------------------------------------------------------------------

FILE = """\
[server]
port = 1
log_level = "debug"

[client]
lease = 3.0
"""


def test_one_file_may_have_both_and_an_option_wins_over_a_variable_over_the_file(tmp_path):
    path = tmp_path / "maru.toml"
    path.write_text(FILE)
    environ = {"MARU_SERVER__PORT": "2", "MARU_CLIENT__TENANT": "blue"}
    assert server_config(path, environ={}).port == 1
    assert server_config(path, environ=environ).port == 2
    config = server_config(path, environ=environ, options={"server.port": ("--port", "3")})
    assert (config.port, config.log_level) == (3, "debug")
    assert client_config(path, environ=environ) == MaruConfig(lease=3.0, tenant="blue")
    assert from_mapping({"port": 4}, ServerConfig) == ServerConfig(port=4)


def test_an_error_names_the_option_the_variable_or_the_line(tmp_path):
    path = tmp_path / "maru.toml"
    path.write_text("[server]\n\nport = 70000")
    assert refused(server_config, path, environ={}).endswith(f"({path}, line 3)")
    assert refused(server_config, path, environ={"MARU_SERVER__PORT": "x"}).startswith("MARU_SERVER__PORT = 'x': must")
    options = {"server.port": ("--port", "y")}
    assert refused(server_config, path, environ={}, options=options).startswith("--port = 'y': must be an integer")
    assert "did you mean port?" in refused(server_config, "[server]\nprot = 1", environ={})
    assert "did you mean server?" in refused(server_config, "[sever]", environ={})


def test_an_error_is_one_of_this_package_and_of_knobs_in_general():
    with pytest.raises(MaruError):
        ServerConfig(port=-1)
    with pytest.raises(KnobError):
        ServerConfig(port=-1)
    assert issubclass(OffloadConfigError, KnobError)
    assert not issubclass(OffloadConfigError, MaruError)


def test_reading_a_configuration_imports_nothing_slow():
    program = (
        "import sys; from maru._config import server_config; server_config(environ={});"
        "unwanted = {'trio', 'zmq', 'torch', 'tomllib', 'difflib', 'rich', 'click', 'asyncio'};"
        "sys.exit(', '.join(unwanted & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
