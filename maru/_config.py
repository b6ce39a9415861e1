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
    "start a server (maru-server; for published clients: --host 127.0.0.1 or --zmq-socket), or set its address (--server or "
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
        "TCP address to listen on. Empty: no TCP. Published clients expect 127.0.0.1, which only this user's "
        "processes may connect to. An address beyond this host needs CURVE keys, or insecure.",
    )
    port: int = _knob.integer(
        5555, 0, 65_535, "TCP port; published clients expect 5555. 0: any free port, printed in the ready line."
    )
    ipc: bool = _knob.flag(True, "Listen on a Unix socket in runtime_dir, which only this user can reach.")
    zmq_socket: bool = _knob.flag(
        False,
        "Speak ZeroMQ at maru.sock in runtime_dir, for published clients on this host; this package's clients use "
        "channel.sock. Its connections cannot be bounded: a process of this user that opens too many ends the server.",
    )
    runtime_dir: str = _knob.text(
        "",
        "a path",
        _PATH,
        "Directory of the sockets, made with mode 0700. Empty: pool_path, so that two servers never share it. At most "
        "97 bytes, since the name of a Unix socket has at most 107.",
    )
    rm_address: str = _knob.text(
        "auto",
        "host:port, auto, or empty",
        r"(?:[\w.%-]+|\[[\w.:%]+\]):[0-9]{1,5}|auto|",
        "TCP address of the resource manager, through which published clients map regions. Port 0: any free port, "
        "sent in the handshake. auto: 127.0.0.1:0 if host is set, otherwise none. Empty: none. It has no CURVE keys, "
        "so an address beyond this host needs insecure.",
    )
    # clients that may connect
    curve_key_file: str = _knob.text(
        "", "a path", _PATH, "File with the server's CURVE key pair. Empty: no CURVE, only loopback and Unix sockets."
    )
    curve_clients_file: str = _knob.text(
        "",
        "a path",
        _PATH,
        "File with the public keys of the allowed clients, one per line. Empty: every client that knows the server's "
        "key, which needs insecure over TCP.",
    )
    insecure: bool = _knob.flag(
        False,
        "Listen beyond this host without CURVE, and log a warning: every host that reaches the port may read and "
        "drop keys, and map regions.",
    )
    allow_shutdown: bool = _knob.flag(False, "End the server on a SHUTDOWN message, as on SIGTERM.")
    # events of its keys
    kv_events: str = _knob.text(
        "",
        "ipc, host:port, or empty",
        r"ipc|(?:[\w.%-]+|\[[\w.:%]+\]):[0-9]{1,5}|",
        "Address of the KV events for routers. ipc: kv-events.sock and kv-answers.sock in runtime_dir, which only "
        "this user can reach. host:port: that port, and the next one for requests of readers; needs curve_key_file or "
        "kv_events_insecure. Empty: no events.",
    )
    kv_events_topic: str = _knob.text("", "a text", _ANY, "First frame of each event; llm-d expects kv@pod@model.")
    kv_events_keys: KeyForm = _knob.choice(
        "hex",
        KeyForm,
        "Conversion of a key to a block hash. hex: the key is decoded as hexadecimal; other keys are not published. "
        "text: the UTF-8 bytes of the key.",
    )
    kv_events_insecure: bool = _knob.flag(
        False, "Publish over TCP without CURVE: every process that reaches the port may read the names of keys."
    )
    # output
    log_level: LogLevel = _knob.choice("info", LogLevel, "Lowest level that is logged.")
    json_logs: bool = _knob.flag(False, "Log one JSON object per line instead of text, including the ready line.")
    # the pool
    pool_path: str = _knob.text(
        "",
        "a path",
        _PATH,
        "Directory of the region files, the journal, the secret and the sockets, made with mode 0700; for one server "
        "at a time. Empty: /dev/shm/maru-UID.",
    )
    dax_path: str = _knob.text(
        "",
        "a path",
        _PATH,
        "DAX device, file used as one, or directory for the regions; memfd: unnamed files, which are lost on a "
        "restart. Other files stay in pool_path. Empty: pool_path.",
    )
    capacity_bytes: int = _knob.size(
        0,
        0,
        1 << 50,
        "Largest size of all regions, reserved one by one. 0: nine tenths of the space free at the start.",
    )
    huge_pages: bool = _knob.flag(
        True,
        "Reserve regions in pages of 2 MiB if the kernel allows it (Linux 6.1, in a tmpfs): fewer faults and faster "
        "copies. Off: small pages.",
    )
    high_watermark: float = _knob.fraction(
        0.95, 0.01, 1.0, "Use of an owner's regions above which its least recently used keys are evicted early."
    )
    low_watermark: float = _knob.fraction(
        0.9, 0.0, 1.0, "Use of an owner's regions down to which eviction goes, in batches. At most high_watermark."
    )
    watermark_interval: float = _knob.seconds(
        0.1,
        0.01,
        1.0,
        "Time between checks of watermarks and leases. An owner fills about 1 GiB in that time. If a check is late by "
        "as much again, the server was stopped, and that time does not count against leases.",
    )
    quota_instance_bytes: int = _knob.size(
        0,
        0,
        1 << 50,
        "Largest total size of the values of one instance; beyond it, its own least recently used keys are evicted. "
        "Pages and regions do not count. 0: no quota.",
    )
    quota_tenant_bytes: int = _knob.size(0, 0, 1 << 50, "Quota of all instances of a tenant together. 0: no quota.")
    instance_quotas: tuple[str, ...] = _knob.texts(
        (), "names with sizes, as name=64GiB", _QUOTA, "Exceptions to quota_instance_bytes, by instance_id."
    )
    tenant_quotas: tuple[str, ...] = _knob.texts(
        (), "names with sizes, as name=64GiB", _QUOTA, "Exceptions to quota_tenant_bytes, by tenant."
    )
    # sessions
    session_lease: float = _knob.seconds(
        10.0,
        0.1,
        3_600.0,
        "Longest silence of clients that request no lease. Their pins and regions, and quiet time, last as long.",
    )
    min_lease: float = _knob.seconds(
        1.0, 0.05, 3_600.0, "Shortest lease that a client may request; it renews after a third of it."
    )
    max_lease: float = _knob.seconds(60.0, 0.05, 3_600.0, "Longest lease of a client; a restart may wait that long.")
    lease_grace: float = _knob.seconds(
        1.0, 0.0, 600.0, "Time added to each lease, so that the client notices its end before its pages are reused."
    )
    v1_read_grace: float = _knob.seconds(
        30.0, 0.0, _DAY, "Time that a published client's lookup keeps a key, since that client reads without a pin."
    )
    max_sessions: int = _knob.integer(
        4_096, 1, 1 << 20, "Largest number of sessions at once, some kB each. Further handshakes are refused."
    )
    # durability
    journal: bool = _knob.flag(True, "Record acknowledged changes in a journal, so that a restart restores them.")
    journal_sync: JournalSync = _knob.choice(
        "never",
        JournalSync,
        "Time of the journal's fsync. never: the journal survives a killed server, but no crash of the machine, as "
        "all of /dev/shm; second: a crash of the machine loses up to a second; each: replies wait for it.",
    )
    segment_bytes: int = _knob.size(
        512 << 10,
        64 << 10,
        4 << 30,
        "Size of a journal segment. A separate process folds full segments into the snapshot. The last segment is "
        "replayed at the start: up to 10 ms for batches, 30 ms for single keys.",
    )
    index: IndexUse = _knob.choice(
        "auto",
        IndexUse,
        "Lookup of keys in shared memory by clients on this host, without a message. auto: if the machine keeps loads "
        "and stores in order (x86). Each reading tenant has a file in pool_path: 96 to 400 bytes per key, at least "
        "1.5 MiB; all files have at most 192 bytes per key of max_entries, or 96 MiB.",
    )
    # limits
    max_message_bytes: int = _knob.size(
        MAX_FRAME_BYTES, 4 << 10, 256 << 20, "Largest message. ZeroMQ disconnects a peer that sends a larger one."
    )
    max_keys: int = _knob.integer(
        MAX_KEYS, 64, MAX_KEYS, "Keys in a batch: a context of a million tokens, which blocks the loop for some 10 ms."
    )
    max_key_bytes: int = _knob.integer(
        MAX_KEY_BYTES, 32, MAX_KEY_BYTES, "Longest key in bytes of UTF-8; keys of vLLM and LMCache have about 100."
    )
    max_entries: int = _knob.integer(
        4_000_000, 1, 1 << 30, "Maximum keys, each about half a kB of the server's memory."
    )
    max_in_flight: int = _knob.integer(
        256, 1, 65_536, "Requests of one client that may wait for memory at once: four times a published client's."
    )
    high_water_mark: int = _knob.integer(
        256, 64, 1 << 20, "ZeroMQ replies queued for one client: four times its requests. More are dropped and counted."
    )
    max_unread_bytes: int = _knob.size(
        64 << 20,
        64 << 10,
        1 << 40,
        "Unread bytes of replies to one client. A client that exceeds this and does not read is disconnected. This "
        "package's clients have at most 28 MiB in flight.",
    )
    max_unread_bytes_together: int = _knob.size(
        256 << 20,
        1 << 20,
        1 << 40,
        "Unread bytes to all clients. Beyond it, the client with the most is disconnected first.",
    )
    max_regions: int = _knob.integer(
        16_384, 1, 65_536, "Largest number of regions, a list of about 1 MiB. Beyond it, the pool counts as full."
    )
    max_connections: int = _knob.integer(
        1_000,
        1,
        1 << 16,
        "Largest number of TCP connections, and as many to the resource manager; fewer if the process may not open "
        "four times as many descriptors.",
    )
    linger: float = _knob.seconds(0.2, 0.0, 10.0, "Time to send queued replies after the socket is closed.")
    drain_timeout: float = _knob.seconds(
        0.5, 0.0, 60.0, "Time that SIGTERM waits for allocations in progress. With linger it stays below a second."
    )

    def __attrs_post_init__(self) -> None:
        if 0 < self.capacity_bytes < LEAST_CAPACITY:
            least = as_size(LEAST_CAPACITY)
            raise ConfigError(
                "capacity_bytes", self.capacity_bytes, f"must be 0 or at least {least}, the size of the smallest region"
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
                "file, every reader that knows the server's public key may connect, and can end the server",
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
                "that knows the server's public key may connect, and can end the server",
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
        "URL of the server. Empty: the Unix socket of this user's server, ipc:///dev/shm/maru-UID/maru.sock. "
        "Published deployments use tcp://localhost:5555.",
        default_server_url,
    )
    instance_id: str = _knob.text(
        "", "a text", _ANY, "Name of the instance that owns the regions. Empty: a new random name at each connect."
    )
    pool_size: int = _knob.size(100 << 20, 0, _TIB, "Bytes of the first region. 0: only read, without a region.")
    chunk_size_bytes: int = _knob.size(1 << 20, 1, 1 << 34, "Bytes of a page: the largest value of one key.")
    timeout_ms: int = _knob.integer(2_000, 1, 3_600_000, "Time to wait for an answer of the server, in milliseconds.")
    max_inflight: int = _knob.integer(64, 1, 65_536, "Largest number of requests in flight; further ones wait.")
    eager_map: bool = _knob.flag(True, "Map the regions of other owners when connecting. Off: when first read.")
    auto_expand: bool = _knob.flag(True, "Take another region if no page is free and none can be reclaimed.")
    expand_size: int = _knob.size(0, 0, _TIB, "Bytes of each further region. 0: pool_size.")
    auto_connect: bool = _knob.flag(
        False, "Connect on the first request, instead of in connect() or on entering the handler's async block."
    )
    rm_address: str = _knob.text(
        "",
        "host:port, or empty",
        r"(\S+:[0-9]{1,5})?",
        "Resource manager of a published server; the handshake takes precedence.",
    )
    enable_stats: bool = _knob.flag(False, "Report this client's operations to the server's statistics.")
    use_async_rpc: bool = _knob.flag(True, "Accepted and ignored: every call here is pipelined.")

    tenant: str = _knob.text("", "a text", _ANY, "Tenant whose quota the bytes of this instance count against.")
    namespace: str = _knob.text(
        "", "a text", _ANY, "Model, dtype and rank, as a salt of keys: equal tokens of two models never share a key."
    )
    checksums: bool = _knob.flag(True, "Store a checksum with each page and verify it on load; costs 0.3 of a memcpy.")
    lease: float = _knob.seconds(
        10.0, 0.05, 3_600.0, "Longest silence of this client before the server takes back its pins and regions."
    )
    max_regions: int = _knob.integer(256, 1, 65_536, "Largest number of own regions; auto_expand stops there.")
    dax_path: str = _knob.text(
        "",
        "a path",
        _PATH,
        "DAX device, or file used as one, that may hold regions. Empty: none; only files of this user that are closed "
        "to others are mapped.",
    )
    protocol: Protocol = _knob.choice(
        "auto",
        Protocol,
        "Protocol to use: own, published, or auto: own, and published only over a Unix socket that a process of this "
        "user serves in a directory closed to others. A published server names the files that are mapped and written.",
    )
    index: IndexUse = _knob.choice(
        "auto",
        IndexUse,
        "Lookup and load of keys through the server's index in shared memory, without a message. auto: if a server of "
        "this package on this host offers one.",
    )
    curve_key_file: str = _knob.text("", "a path", _PATH, "File with this client's CURVE key pair. Empty: no CURVE.")
    curve_server_key: str = _knob.text(
        "", "40 characters of Z85, or empty", r"([0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40})?", "Server's public key."
    )

    def __attrs_post_init__(self) -> None:
        if bool(self.curve_key_file) != bool(self.curve_server_key):
            raise ConfigError("curve_server_key", self.curve_server_key, "must be set together with curve_key_file")
        if 0 < self.pool_size < self.chunk_size_bytes:
            raise ConfigError(
                "pool_size", self.pool_size, f"must be 0 or at least chunk_size_bytes, {self.chunk_size_bytes}"
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
