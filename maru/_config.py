"""Knobs of a server and of a client. Pure.

Each has its default, its bound, and the reason for both.

A server is the table ``[server]`` of a file and the variables ``MARU_SERVER__...``, a client ``[client]`` and
``MARU_CLIENT__...``. :mod:`maru.configuration` has the rules. The command line's help and the documentation's tables are made
from :func:`knobs`.
"""

# ruff: noqa: RUF009  # the functions called in the class bodies make fields
from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any, Final, Literal, TypeAlias, TypeVar

import attrs

from ._wire.frames import MAX_FRAME_BYTES, MAX_KEY_BYTES, MAX_KEYS
from .base.addresses import IPC_NAME, is_loopback
from .base.errors import ConfigError
from .configuration import Knob as Knob
from .configuration import Knobs, as_bytes, as_size

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
KeyForm: TypeAlias = Literal["hex", "text"]
JournalSync: TypeAlias = Literal["never", "second", "each"]
IndexUse: TypeAlias = Literal["auto", "off"]
Protocol: TypeAlias = Literal["auto", "own", "published"]

C = TypeVar("C", bound=attrs.AttrsInstance)

_DAY = 86_400.0
LEAST_CAPACITY: Final = 2 << 20
"""Bytes of one step of a pool; every region is a multiple."""
_TIB = 1 << 40
_ANY = r"(?s).*"
_PATH = r"[^\x00]*"
_QUOTA = r"[^=]+=\s*[0-9]{1,18}\s*([KMGTkmgt]([iI]?[bB])?)?"

HOW_TO_REACH: Final = (
    "start a server (maru-server; for published clients: --host 127.0.0.1 or --zmq-socket), or say where it is (--server or "
    "server_url, or MARU_CLIENT__SERVER_URL)"
)
"""Advice for a client that finds no server."""

_knob: Final = Knobs("MARU", ConfigError)


def default_pool_path() -> str:
    """Return the default directory of a pool and its sockets.

    There is one for each user.
    """
    return f"/dev/shm/maru-{os.getuid()}"


def default_server_url() -> str:
    """Return the default address of a client's server."""
    return f"ipc://{default_pool_path()}/{IPC_NAME}"


@_knob.checks_names
@attrs.frozen
class ServerConfig:
    """The settings of a server.

    The reason for each bound and default is in :func:`knobs`.
    """

    # addresses
    host: str = _knob.text(
        "",
        "a host name or an address, or empty",
        r"[\w.:%\[\]*-]*",
        "Where to listen for TCP. Empty: nowhere. Published clients expect 127.0.0.1, where only this user's processes may "
        "connect. Any host but this one needs CURVE keys, or insecure.",
    )
    port: int = _knob.integer(
        5555,
        0,
        65_535,
        "The port, where there is a host: published clients expect this one. 0: any free one, told when ready.",
    )
    ipc: bool = _knob.flag(True, "Listen on a Unix socket in runtime_dir, which only this user can reach.")
    zmq_socket: bool = _knob.flag(
        False,
        "Speak ZeroMQ at maru.sock there, for published clients on this host; clients of ours come over channel.sock. Its "
        "connections cannot be bounded: a process of this user that opens too many ends the server.",
    )
    runtime_dir: str = _knob.text(
        "",
        "a path",
        _PATH,
        "Directory of the sockets, made with mode 0700. Empty: pool_path, so that two servers never meet there. At most "
        "97 bytes, since a Unix socket's name has 107.",
    )
    rm_address: str = _knob.text(
        "auto",
        "host:port, auto, or empty",
        r"(?:[\w.%-]+|\[[\w.:%]+\]):[0-9]{1,5}|auto|",
        "Where the resource manager that published clients map regions through listens, over TCP; port 0: any free one, told "
        "at handshake. auto: 127.0.0.1:0 where there is a host, otherwise nowhere, as empty says. It knows no keys: any host "
        "but this one needs insecure.",
    )
    # clients that may connect
    curve_key_file: str = _knob.text(
        "", "a path", _PATH, "The server's CURVE key pair. Empty: no CURVE, so loopback and Unix sockets only."
    )
    curve_clients_file: str = _knob.text(
        "",
        "a path",
        _PATH,
        "Public keys of the clients that may come in, one a line. Empty: any that knows the server's, which over TCP needs "
        "insecure.",
    )
    insecure: bool = _knob.flag(
        False, "Listen beyond this host without CURVE: every host that reaches the port may read, drop and map. Warns."
    )
    allow_shutdown: bool = _knob.flag(False, "Whether a SHUTDOWN message ends the server, as SIGTERM does.")
    # events of its keys
    kv_events: str = _knob.text(
        "",
        "ipc, host:port, or empty",
        r"ipc|(?:[\w.%-]+|\[[\w.:%]+\]):[0-9]{1,5}|",
        "Where to publish KV events, which routers follow. ipc: at kv-events.sock and kv-answers.sock in runtime_dir, which "
        "only this user can reach. host:port: there, and for what readers ask at the next port; needs curve_key_file or "
        "kv_events_insecure. Empty: nowhere.",
    )
    kv_events_topic: str = _knob.text("", "a text", _ANY, "The first frame of each event; llm-d expects kv@pod@model.")
    kv_events_keys: KeyForm = _knob.choice(
        "hex",
        KeyForm,
        "How a key becomes a block hash. hex: the bytes that it is the hexadecimal text of; other keys are not told. "
        "text: its UTF-8 bytes.",
    )
    kv_events_insecure: bool = _knob.flag(
        False,
        "Publish over TCP without CURVE: every process that reaches the port may read which keys there are, and nothing else.",
    )
    # output
    log_level: LogLevel = _knob.choice("info", LogLevel, "The least urgent line that is written.")
    json_logs: bool = _knob.flag(False, "One JSON object a line instead of text, the ready line included.")
    # the pool
    pool_path: str = _knob.text(
        "",
        "a path",
        _PATH,
        "Directory of the regions' files, the journal, the secret and the sockets, made with mode 0700; one server has "
        "it at a time. Empty: /dev/shm/maru-UID.",
    )
    dax_path: str = _knob.text(
        "",
        "a path",
        _PATH,
        "A DAX device, a file taken for one, or a directory, that holds the regions instead; or memfd: files without a "
        "name, which no restart finds again. pool_path keeps the rest.",
    )
    capacity_bytes: int = _knob.size(
        0,
        0,
        1 << 50,
        "Most bytes in regions. 0: all that is free at the start but for a tenth. Reserved region by region.",
    )
    huge_pages: bool = _knob.flag(
        True,
        "Reserve regions in pages of 2 MiB where the kernel makes them when told to (Linux 6.1, in a tmpfs): fewer "
        "faults and faster copies. Off: small pages.",
    )
    high_watermark: float = _knob.fraction(
        0.95, 0.01, 1.0, "An owner's regions are fuller than this: its least recently used keys go ahead of need."
    )
    low_watermark: float = _knob.fraction(
        0.9, 0.0, 1.0, "Down to here, so that evictions come in batches. At most high_watermark."
    )
    watermark_interval: float = _knob.seconds(
        0.1,
        0.01,
        1.0,
        "How often watermarks and leases are checked. An owner fills about a GiB in that time. If a check is late by as much "
        "again, the server stood still, and that time counts for no lease.",
    )
    quota_instance_bytes: int = _knob.size(
        0,
        0,
        1 << 50,
        "Most bytes of values under keys of one instance; beyond, its own least recently used go. Pages and regions "
        "do not count. 0: no quota.",
    )
    quota_tenant_bytes: int = _knob.size(0, 0, 1 << 50, "The same for all instances of a tenant together. 0: no quota.")
    instance_quotas: tuple[str, ...] = _knob.texts(
        (), "names with sizes, as name=64GiB", _QUOTA, "Exceptions from quota_instance_bytes, by instance_id."
    )
    tenant_quotas: tuple[str, ...] = _knob.texts(
        (), "names with sizes, as name=64GiB", _QUOTA, "Exceptions from quota_tenant_bytes, by tenant."
    )
    # sessions
    session_lease: float = _knob.seconds(
        10.0,
        0.1,
        3_600.0,
        "How long a client of ours may be silent. Its pins and regions outlive it by so much; so does quiet time.",
    )
    min_lease: float = _knob.seconds(
        1.0, 0.05, 3_600.0, "Least lease a client may ask for: it renews at a third of it."
    )
    max_lease: float = _knob.seconds(60.0, 0.05, 3_600.0, "Most a client may ask for: a restart may wait that long.")
    lease_grace: float = _knob.seconds(
        1.0, 0.0, 600.0, "How much later than told a lease ends, so that the client knows before its pages go."
    )
    v1_read_grace: float = _knob.seconds(
        30.0, 0.0, _DAY, "How long a key that a published client looked up is kept: it reads without a pin."
    )
    max_sessions: int = _knob.integer(
        4_096, 1, 1 << 20, "Sessions at once, some kB each. Further handshakes are refused."
    )
    # durability
    journal: bool = _knob.flag(True, "Write down what is acknowledged, so that a restart finds it again.")
    journal_sync: JournalSync = _knob.choice(
        "never",
        JournalSync,
        "When the journal is fsynced. never: it survives a kill, which is all /dev/shm can; second: a crash of the "
        "machine costs a second; each: replies wait for it.",
    )
    segment_bytes: int = _knob.size(
        512 << 10,
        64 << 10,
        4 << 30,
        "A journal segment's size; full ones are folded into the snapshot by a process beside. What is in the last one is "
        "replayed at the start: up to 10 ms of batches, 30 ms of single keys.",
    )
    index: IndexUse = _knob.choice(
        "auto",
        IndexUse,
        "Whether clients on this host may look keys up in shared memory, without a message. auto: where the machine keeps "
        "loads and stores in order (x86). A file in pool_path for each tenant that reads: 96 to 400 bytes a key, "
        "at least 1.5 MiB; all together at most 192 bytes for each of max_entries, or 96 MiB.",
    )
    # limits
    max_message_bytes: int = _knob.size(
        MAX_FRAME_BYTES, 4 << 10, 256 << 20, "Largest message; ZeroMQ disconnects a peer that sends a larger one."
    )
    max_keys: int = _knob.integer(
        MAX_KEYS, 64, MAX_KEYS, "Keys in a batch: a context of a million tokens, which hold the loop for some 10 ms."
    )
    max_key_bytes: int = _knob.integer(
        MAX_KEY_BYTES, 32, MAX_KEY_BYTES, "Length of a key in UTF-8; those of vLLM and LMCache have about 100."
    )
    max_entries: int = _knob.integer(4_000_000, 1, 1 << 30, "Keys in all, about half a kB of the server's memory each.")
    max_in_flight: int = _knob.integer(
        256, 1, 65_536, "Requests of one client that wait for memory at once. Four times what published clients send."
    )
    high_water_mark: int = _knob.integer(
        256,
        64,
        1 << 20,
        "Replies that ZeroMQ queues for one client: four times what it has under way. Those beyond are dropped, and counted.",
    )
    max_unread_bytes: int = _knob.size(
        64 << 20,
        64 << 10,
        1 << 40,
        "Bytes of replies that wait for one client. A client with more that does not read is disconnected. A client of ours "
        "has at most 28 MiB under way.",
    )
    max_unread_bytes_together: int = _knob.size(
        256 << 20, 1 << 20, 1 << 40, "The same for all clients together. The client with the most goes first."
    )
    max_regions: int = _knob.integer(
        16_384, 1, 65_536, "Regions in all: a list of them is a message of about a MiB. Further ones are no room."
    )
    max_connections: int = _knob.integer(
        1_000,
        1,
        1 << 16,
        "Connections at once over TCP, and as many to the resource manager; fewer where the process may not have four times as "
        "many descriptors.",
    )
    linger: float = _knob.seconds(0.2, 0.0, 10.0, "How long replies may still leave after the socket was closed.")
    drain_timeout: float = _knob.seconds(
        0.5, 0.0, 60.0, "How long SIGTERM waits for what is being allocated. With linger it stays below a second."
    )

    def __attrs_post_init__(self) -> None:
        if 0 < self.capacity_bytes < LEAST_CAPACITY:
            least = as_size(LEAST_CAPACITY)
            raise ConfigError(
                "capacity_bytes", self.capacity_bytes, f"must be 0 or at least {least}: a region has no less"
            )
        if self.low_watermark > self.high_watermark:
            raise ConfigError(
                "low_watermark", self.low_watermark, f"must be at most high_watermark, {self.high_watermark}"
            )
        if not self.min_lease <= self.session_lease <= self.max_lease:
            raise ConfigError(
                "session_lease",
                self.session_lease,
                f"must be from min_lease, {self.min_lease}, to max_lease, {self.max_lease}",
            )
        if not self.host and not self.ipc:
            raise ConfigError("host", self.host, "must not be empty without ipc: no client could reach the server")
        if self.zmq_socket and not self.ipc:
            raise ConfigError("zmq_socket", self.zmq_socket, "needs ipc: it is one of the Unix sockets")
        if self.curve_clients_file and not self.curve_key_file:
            raise ConfigError(
                "curve_clients_file",
                self.curve_clients_file,
                "needs curve_key_file: without it, any client may connect",
            )
        port = self.kv_events.rpartition(":")[2]
        if port.isdecimal() and not 0 < int(port) < 65_535:
            raise ConfigError(
                "kv_events", self.kv_events, "the port must be from 1 to 65534: the next one is taken, too"
            )
        if port.isdecimal() and not (self.curve_key_file or self.kv_events_insecure):
            raise ConfigError(
                "kv_events", self.kv_events, "must be ipc, unless curve_key_file or kv_events_insecure is set"
            )
        if port.isdecimal() and not (self.curve_clients_file or self.kv_events_insecure):
            raise ConfigError(
                "curve_clients_file",
                self.curve_clients_file,
                "must name the readers of KV events that may connect over TCP, unless kv_events_insecure is set: without the "
                "file, every reader that knows the server's public key may, and can end the server",
            )
        if self.insecure:
            return
        if not is_loopback(self.host) and not self.curve_key_file:
            raise ConfigError(
                "host", self.host, "must be of this host (127.0.0.1), unless curve_key_file or insecure is set"
            )
        if self.host and self.curve_key_file and not self.curve_clients_file:
            raise ConfigError(
                "curve_clients_file",
                self.curve_clients_file,
                "must name the clients that may connect over TCP, unless insecure is set: without the file, every client "
                "that knows the server's public key may, and can end the server",
            )
        if not is_loopback(self.rm_host):
            raise ConfigError("rm_address", self.rm_address, "must be of this host (127.0.0.1), unless insecure is set")

    @property
    def quotas(self) -> tuple[dict[str, int], dict[str, int]]:
        """Quotas of ``instance_quotas`` and ``tenant_quotas``, in bytes by name."""
        first, second = (
            {name.strip(): as_bytes(size) for name, _, size in (text.partition("=") for text in texts)}
            for texts in (self.instance_quotas, self.tenant_quotas)
        )
        return first, second

    @property
    def zmq_on_unix(self) -> bool:
        """Whether ZeroMQ listens at a Unix socket.

        It does if configured, and with CURVE keys, which a channel does not use.
        """
        return self.ipc and (self.zmq_socket or bool(self.curve_key_file))

    @property
    def relayed(self) -> bool:
        """Whether a child process accepts TCP connections, without keys."""
        return bool(self.host) and not self.curve_key_file

    @property
    def kv_events_relayed(self) -> bool:
        """Whether child processes accept the TCP connections for KV events.

        They do if the events are published over TCP without keys.
        """
        return self.kv_events not in ("", "ipc") and not self.curve_key_file

    @property
    def rm_host(self) -> str:
        """Host of the resource manager; empty if there is none."""
        return self._rm_place.rpartition(":")[0].strip("[]")

    @property
    def rm_port(self) -> int:
        """Port of the resource manager."""
        return int(self._rm_place.rpartition(":")[2] or 0)

    @property
    def _rm_place(self) -> str:
        if self.rm_address == "auto":
            return "127.0.0.1:0" if self.host else ""
        return self.rm_address


@_knob.checks_names
@attrs.frozen
class MaruConfig:
    """The settings of a client.

    The reason for each bound and default is in :func:`knobs`. The first block has the published names and defaults; the
    second is ours.
    """

    server_url: str = _knob.text(
        "",
        "tcp://host:port or ipc://path, or empty",
        r"(tcp://[^\x00\s]+:[0-9]{1,5}|ipc://[^\x00]+)",
        "Where the server is. Empty: the Unix socket of this user's server, ipc:///dev/shm/maru-UID/maru.sock. A published "
        "deployment says tcp://localhost:5555.",
        default_server_url,
    )
    instance_id: str = _knob.text(
        "", "a text", _ANY, "The owner of the regions. Empty: a new random name at each connect."
    )
    pool_size: int = _knob.size(100 << 20, 0, _TIB, "Bytes of the first region. 0: only read, and own none.")
    chunk_size_bytes: int = _knob.size(1 << 20, 1, 1 << 34, "Bytes of a page: one key's largest value.")
    timeout_ms: int = _knob.integer(2_000, 1, 3_600_000, "Milliseconds to wait for an answer of the server.")
    max_inflight: int = _knob.integer(64, 1, 65_536, "Requests without an answer at once; further ones wait.")
    eager_map: bool = _knob.flag(True, "Map other owners' regions when connecting; otherwise when first read.")
    auto_expand: bool = _knob.flag(True, "Take another region when no page is free and none could be reclaimed.")
    expand_size: int = _knob.size(0, 0, _TIB, "Bytes of such a further region. 0: as many as pool_size.")
    auto_connect: bool = _knob.flag(
        False, "Connect when first used: without a call of connect, or where a block of trio was entered."
    )
    rm_address: str = _knob.text(
        "", "host:port, or empty", r"(\S+:[0-9]{1,5})?", "The resource manager of a published server; a handshake wins."
    )
    enable_stats: bool = _knob.flag(False, "Report what this client does to the server's statistics.")
    use_async_rpc: bool = _knob.flag(True, "Accepted and not used: every call here is pipelined.")

    tenant: str = _knob.text("", "a text", _ANY, "Whose quota this instance's bytes count against.")
    namespace: str = _knob.text(
        "", "a text", _ANY, "Model, dtype and rank: salts every key, so that equal tokens of two models never meet."
    )
    checksums: bool = _knob.flag(
        True, "Store a checksum with each page and verify it when it is loaded: 0.3 of a memcpy."
    )
    lease: float = _knob.seconds(
        10.0, 0.05, 3_600.0, "How long this client may be silent before the server takes back its pins and regions."
    )
    max_regions: int = _knob.integer(256, 1, 65_536, "Regions of its own at most: auto_expand stops there.")
    dax_path: str = _knob.text(
        "",
        "a path",
        _PATH,
        "The DAX device, or the file taken for one, that regions may lie in. Empty: in none; what is mapped is a file of "
        "this user, closed to others.",
    )
    protocol: Protocol = _knob.choice(
        "auto",
        Protocol,
        "What is spoken: own, published, or auto: own, and published only over a Unix socket that a process of this user "
        "serves in a directory closed to others. A published server names the files that are mapped and written.",
    )
    index: IndexUse = _knob.choice(
        "auto",
        IndexUse,
        "Whether keys are looked up and loaded over the server's index in shared memory, without a message. auto: where a "
        "server of ours on this host offers one.",
    )
    curve_key_file: str = _knob.text("", "a path", _PATH, "This client's CURVE key pair. Empty: no CURVE.")
    curve_server_key: str = _knob.text(
        "", "40 characters of Z85, or empty", r"([0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40})?", "The server's public key."
    )

    def __attrs_post_init__(self) -> None:
        if bool(self.curve_key_file) != bool(self.curve_server_key):
            raise ConfigError("curve_server_key", self.curve_server_key, "must be set together with curve_key_file")
        if 0 < self.pool_size < self.chunk_size_bytes:
            raise ConfigError(
                "pool_size", self.pool_size, f"must hold a page of chunk_size_bytes, {self.chunk_size_bytes}"
            )


def knobs(cls: type[attrs.AttrsInstance] = ServerConfig, *, section: str = "server") -> tuple[Knob, ...]:
    """Return every setting of a configuration class, in declaration order."""
    return tuple(_knob.of(cls, section))


def from_mapping(mapping: Mapping[str, Any], cls: type[C], *, section: str = "") -> C:
    """Make a configuration from a parsed TOML or JSON mapping.

    Missing names keep their defaults.

    Args:
        mapping: knobs by name.
        cls: the configuration class.
        section: the path of this mapping in its file, put before names in errors.

    Raises:
        ConfigError: an unknown name, or a value out of its bound.
    """
    return _knob.from_mapping(mapping, cls, section=section)


def server_config(
    source: str | os.PathLike[str] = "",
    *,
    others: Collection[str] = ("client",),
    environ: Mapping[str, str] | None = None,
    options: Mapping[str, tuple[str, object]] | None = None,
) -> ServerConfig:
    """Load a server's configuration from a file, the environment and options.

    The last one wins. The file is TOML; its table ``[server]`` is read.

    Args:
        source: a path (``pathlib.Path``), or TOML as a text.
        others: tables of the file that are read elsewhere. Any further one is an error.
        environ: the environment; by default that of this process.
        options: by the name of the knob (``server.port``), its name in an error (``--port``) and its value.

    Raises:
        ConfigError: not TOML, an unknown name, or a value out of its bound; with file and line, variable, or option.
        OSError: the file cannot be read.
    """
    _knob.check_variables(("server", *others), environ)
    return _knob.load(ServerConfig, source, section="server", others=others, environ=environ, options=options)


def client_config(
    source: str | os.PathLike[str] = "",
    *,
    others: Collection[str] = ("server",),
    environ: Mapping[str, str] | None = None,
    options: Mapping[str, tuple[str, object]] | None = None,
) -> MaruConfig:
    """Load a client's configuration from a file, the environment and options.

    The last one wins. The file is TOML; its table ``[client]`` is read.

    Args:
        source: a path (``pathlib.Path``), or TOML as a text.
        others: tables of the file that are read elsewhere. Any further one is an error.
        environ: the environment; by default that of this process.
        options: by the name of the knob (``client.lease``), its name in an error (``--lease``) and its value.

    Raises:
        ConfigError: not TOML, an unknown name, or a value out of its bound; with file and line, variable, or option.
        OSError: the file cannot be read.
    """
    _knob.check_variables(("client", *others), environ)
    return _knob.load(MaruConfig, source, section="client", others=others, environ=environ, options=options)
