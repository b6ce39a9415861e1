"""The settings of a daemon: defaults, bounds, and the reasons for them.

Pure, except for reading files. A daemon's file has two tables: ``[daemon]``, which is declared here, and ``[engine]``,
its tiers and routes (:mod:`offload._engine.config`). A third, ``[pinned_pool]``, is that of a server which the daemon
may host. Without tiers there, it has two: host memory, and pages of a Maru server, which it embeds unless
``maru_server_url`` names one. The options of the command, ``OFFLOAD_DAEMON__...`` and the file set the same: the first
one wins.
"""

# ruff: noqa: RUF009  # the functions called in the class bodies make fields
from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import attrs

from maru.configuration import Document, Knob, Knobs, as_bytes

from .._config import PipelineConfig
from .._engine.config import EngineConfig
from .._errors import ConfigError
from ._messages import MAX_CREDENTIAL_BYTES
from ._sessions import Limits
from ._tenants import Tenants

if TYPE_CHECKING:
    from backends.pinned_pool import PinnedPoolConfig

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

SECTION: Final = "daemon"
POOL_SECTION: Final = "pinned_pool"
CHANNEL_NAME: Final = "daemon.sock"
"""Socket of the engines, in the runtime directory."""
HANDOVER_NAME: Final = "memory.sock"
"""Socket that takes descriptors of engines' memory."""
ADMIN_NAME: Final = "admin.sock"
"""Socket of operators."""
STATUS_NAME: Final = "status.sock"
"""Socket of the status page, with ``status = "ipc"``."""
ADMISSION: Final = 10.0
"""Seconds of silence before a connection must have been admitted.

Until then an engine must have begun a session, and an operator shown the token.
"""
MARU_NAME: Final = "maru"
"""Directory of the embedded Maru server's sockets."""

_knob: Final = Knobs("OFFLOAD", ConfigError)


def _check_gib(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 65_536:
        raise ConfigError(attribute.name, value, "must be GiB from 0 to 65536")


def _as_number(value: Any) -> Any:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


@_knob.checks_names
@attrs.frozen
class DaemonConfig:
    """The settings of a daemon.

    The reason for each bound and default is in :func:`daemon_knobs`.
    """

    runtime_dir: str = _knob.text(
        "",
        "a path",
        r"[^\x00]*",
        "Directory of the sockets, made with mode 0700; for one daemon at a time. Empty: /dev/shm/offload-daemon-UID, "
        "the engines' default.",
        lambda: default_directory(),
    )
    block_bytes: int = _knob.size(
        0,
        0,
        1 << 34,
        "Size of every block. 0: the size of the first registered cache, when the tiers are opened. All blocks of a "
        "daemon have one size.",
    )
    host_bytes: int = _knob.size(
        1 << 30,
        1 << 12,
        1 << 50,
        "Host memory for blocks, if [engine] names no tiers. Populated in the background after the start.",
    )
    maru_server_url: str = _knob.text(
        "",
        "ipc://path, tcp://host:port, or empty",
        r"(?:ipc|tcp)://.+|",
        "URL of the Maru server of the last tier, if [engine] names no tiers. Empty: a server in the daemon.",
    )
    maru_pool_size_gb: float = _knob.field(
        1.0,
        "GiB from 0 to 65536",
        "Size of this daemon's part of the Maru server's pool, if [engine] names no tiers. 0: no such tier.",
        _check_gib,
        _as_number,
    )
    maru_instance_id: str = _knob.text(
        "", "a text", r"[^\x00]*", "Instance ID of this daemon at the Maru server. Empty: host name and process."
    )
    engine_pool_size_gb: float = _knob.field(
        1.0,
        "GiB from 0 to 65536",
        "Size of the embedded Maru server's pool for pages that engines write themselves, in addition to the daemon's "
        "own. Taken region by region. 0: no engine may write pages, in any page store.",
        _check_gib,
        _as_number,
    )
    max_sessions: int = _knob.integer(
        64, 1, 4_096, "Maximum engines at once, including those whose memory is being freed. Further ones are refused."
    )
    lease: float = _knob.seconds(
        30.0,
        0.1,
        3_600.0,
        "Longest silence of an engine before its session ends and its holds are released. Its client sends a sign of "
        "life three times as often, unless its process is stopped.",
    )
    drain_timeout: float = _knob.seconds(
        10.0,
        0.0,
        3_600.0,
        "Time that shutdown waits for stores and loads in progress. Unfinished ones are dropped, and the exit code "
        "reports it.",
    )
    tenants_file: str = _knob.text(
        "",
        "a path",
        r"[^\x00]*",
        'TOML file, closed to other users, with a line NAME = "CREDENTIAL" in [tenants] for each tenant, or a table '
        "[tenants.NAME] with credential and quota. Engines show a credential. Read again at SIGHUP. Empty: one "
        "tenant, no credential.",
    )
    admin: str = _knob.text(
        "auto",
        "auto, off, ipc, or ipc://PATH",
        r"auto|off|ipc|ipc://.+",
        "Socket of the operators, who show the token: `offload describe`, `drain`, `quarantine`. ipc: admin.sock in "
        "runtime_dir. ipc://PATH: PATH, in a directory that is made with mode 0700. off: none. auto: ipc, or off if "
        "there are tenants and no admin_token_file, since engines of this user can read files in runtime_dir.",
    )
    admin_token_file: str = _knob.text(
        "",
        "a path",
        r"[^\x00]*",
        "File with the token of operators, closed to other users. Read again at SIGHUP. Empty: a file next to their "
        "socket, with its name (admin.sock: admin.token), which the daemon writes at its start.",
    )
    status: str = _knob.text(
        "",
        "ipc, host:port, or empty",
        r"ipc|(?:127\.0\.0\.1|localhost|\[::1\]):[0-9]{1,5}|",
        "Address of the status page over HTTP, with /healthz, /readyz and /metrics, without a credential. ipc: "
        "status.sock in runtime_dir. host:port: of this host only, since the page shows names of tiers and keys. "
        "Empty: none.",
    )
    kv_events: str = _knob.text(
        "",
        "ipc, host:port, or empty",
        r"ipc|(?:[\w.%-]+|\[[\w.:%]+\]):[0-9]{1,5}|",
        "Address of the KV events: which blocks enter and leave the tiers. ipc: kv-events.sock and kv-answers.sock in "
        "runtime_dir. host:port: that port, and the next one for missed events; needs kv_events_insecure. Empty: no "
        "events.",
    )
    kv_events_topic: str = _knob.text(
        "", "a text", r"[^\x00]*", "First frame of each event; llm-d expects kv@pod@model."
    )
    kv_events_insecure: bool = _knob.flag(
        False,
        "Publish over TCP: every process that reaches the port may read the names of keys; with tenants, the number "
        "of blocks.",
    )
    pinned_pool: bool = _knob.flag(
        False,
        "Serve pinned memory too, as `offload pinned-pool`, with the settings in [pinned_pool]. Its sockets are in "
        "this runtime_dir, unless another one is set there.",
    )
    # Without a default: two daemons of one user must not share it, and runtime_dir, in memory, does not outlive the host.
    flight_recorder: str = _knob.text(
        "",
        "a path",
        r"[^\x00]*",
        "File for the last minutes of the pipelines' decisions, which `offload incident save` reads while the daemon "
        "runs and after a kill. Keys are hashed. Recording takes at most one hundredth of the loop's time. Empty: no "
        "recorder.",
    )
    flight_recorder_bytes: int = _knob.size(
        16 << 20,
        1 << 20,
        64 << 20,
        "Size of the recorder's file, from the start. 16 MiB hold minutes of some hundred stores a second.",
    )
    instruments: tuple[str, ...] = _knob.texts(
        (),
        "a list of module:attribute",
        r"[^\x00:,]+:[^\x00:,]+",
        "Additional observers of the pipelines, made by calling the named objects: "
        "offload.opentelemetry:SpanInstrument, or your own.",
    )
    log_level: LogLevel = _knob.choice("info", LogLevel, "Lowest level that is logged. Read again at SIGHUP.")

    def __attrs_post_init__(self) -> None:
        port = self.status.rpartition(":")[2]
        if port.isdecimal() and int(port) > 65_535:
            raise ConfigError("daemon.status", self.status, "the port must be from 0 to 65535")
        port = self.kv_events.rpartition(":")[2]
        if port.isdecimal() and not 0 < int(port) < 65_535:
            raise ConfigError(
                "daemon.kv_events", self.kv_events, "the port must be from 1 to 65534: the next one is taken, too"
            )
        if port.isdecimal() and not self.kv_events_insecure:
            raise ConfigError("daemon.kv_events", self.kv_events, "must be ipc, unless kv_events_insecure is set")

    def admin_path(self, directory: str) -> str:
        """Return the path of the operators' socket; empty: there is none.

        ``directory`` is that of the sockets.
        """
        if self.admin == "off" or (self.admin == "auto" and self.tenants_file and not self.admin_token_file):
            return ""
        return self.admin.removeprefix("ipc://") if self.admin.startswith("ipc://") else f"{directory}/{ADMIN_NAME}"

    def token_path(self, directory: str) -> str:
        """Return the path of the operators' token.

        Without ``admin_token_file`` it is next to their socket.
        """
        return self.admin_token_file or f"{self.admin_path(directory).removesuffix('.sock')}.token"

    @property
    def status_address(self) -> str:
        """Address of the status page for a terminal.

        It is that of ``ipc`` if no other is set.
        """
        if self.status in ("", "ipc"):
            return f"unix:{os.path.realpath(self.runtime_dir)}/{STATUS_NAME}"
        return f"http://{self.status}"

    @property
    def limits(self) -> Limits:
        """The limits on engines."""
        return Limits(sessions=self.max_sessions, lease=self.lease)


RELOADED: Final = frozenset({"log_level", "lease", "tenants_file", "drain_timeout", "admin_token_file"})
"""Settings of ``[daemon]`` that SIGHUP reads again.

All others there need a restart. Of ``[engine]`` it changes thresholds:
:func:`offload.daemon._settings.keep_unreloadable_of_engine`.
"""


def default_directory() -> str:
    """Return the directory of this user's daemon, for it and its engines."""
    return f"{'/dev/shm' if os.access('/dev/shm', os.W_OK) else '/tmp'}/offload-daemon-{os.geteuid()}"


def default_url() -> str:
    """Return the URL of this user's daemon, for its engines."""
    return f"ipc://{default_directory()}/{CHANNEL_NAME}"


def daemon_knobs() -> tuple[Knob, ...]:
    """Return every setting, in the order of declaration."""
    return tuple(_knob.of(DaemonConfig, SECTION))


def read_document(path: str) -> Document:
    """Read a daemon's file; an empty document without a path.

    Raises:
        offload.ConfigError: not TOML.
        OSError: it cannot be read.
    """
    return _knob.read(Path(path) if path else "")


def daemon_config(
    document: Document,
    *,
    environ: Mapping[str, str] | None = None,
    options: Mapping[str, tuple[str, object]] | None = None,
) -> DaemonConfig:
    """Merge the ``[daemon]`` table, the environment and options; the last wins.

    Args:
        document: the file.
        environ: the environment; by default that of this process.
        options: by the name of the knob (``daemon.lease``), its name in an error (``--lease``) and its value.

    Raises:
        offload.ConfigError: an unknown name, or a value out of its bound.
    """
    _knob.check_variables((SECTION, "engine", POOL_SECTION), environ)
    return _knob.load(
        DaemonConfig, document, section=SECTION, others=("engine", POOL_SECTION), environ=environ, options=options
    )


def engine_config(
    document: Document, daemon: DaemonConfig, embedded_url: str, *, environ: Mapping[str, str] | None = None
) -> EngineConfig:
    """Merge the ``[engine]`` table and the environment.

    It has the two default tiers if none are named.

    Args:
        document: the file.
        daemon: the settings of the daemon.
        embedded_url: URL of the embedded Maru server.
        environ: the environment; by default that of this process.

    Raises:
        offload.ConfigError: an unknown name, a value out of its bound, or a source: a daemon's source are its engines.
    """
    config = EngineConfig.from_document(document, others=(SECTION, POOL_SECTION), environ=environ)
    if config.source is not None:
        raise ConfigError(
            "engine.source", config.source, "must not be set: a daemon stores from the caches of its engines"
        )
    if config.daemon_url:
        raise ConfigError(
            "engine.daemon_url",
            config.daemon_url,
            "must not be set: a daemon has the tiers itself, and only engines have a daemon_url",
        )
    config = attrs.evolve(config, pipeline=_for_a_daemon(config.pipeline, document, environ))
    if config.tiers:
        return config
    tiers: dict[str, Any] = {"host": {"type": "memory", "capacity_bytes": daemon.host_bytes}}
    if daemon.maru_pool_size_gb:
        tiers["maru"] = {
            "type": "maru",
            "server_url": daemon.maru_server_url or embedded_url,
            "pool_size": math.ceil(daemon.maru_pool_size_gb * (1 << 30)),
            **({"instance_id": daemon.maru_instance_id} if daemon.maru_instance_id else {}),
        }
    return attrs.evolve(config, tiers=tiers)


def _for_a_daemon(pipeline: PipelineConfig, document: Document, environ: Mapping[str, str] | None) -> PipelineConfig:
    """Set three pipeline defaults for a daemon, unless they are configured.

    A cache that outlives its engines is full most of the time: it evicts. Engines have put their blocks into batches
    before they come here: waiting for more would only be late. And no engine waits for the way into a page store, but
    while that is opening, or on a busy host, its answer takes longer: blocks that it is not asked about in time are not
    stored there.
    """
    said = document.parse().get("engine", {}).get("pipeline", {})
    environ = os.environ if environ is None else environ
    if "on_destination_full" not in said and "OFFLOAD_ENGINE__PIPELINE__ON_DESTINATION_FULL" not in environ:
        pipeline = attrs.evolve(pipeline, on_destination_full="evict")
    if "policy_timeout" not in said and "OFFLOAD_ENGINE__PIPELINE__POLICY_TIMEOUT" not in environ:
        pipeline = attrs.evolve(pipeline, policy_timeout=5.0)
    batch = pipeline.batch_config
    if (
        "min_batch_size" not in said.get("batch_config", {})
        and "OFFLOAD_ENGINE__PIPELINE__BATCH_CONFIG__MIN_BATCH_SIZE" not in environ
    ):
        pipeline = attrs.evolve(pipeline, batch_config=attrs.evolve(batch, min_batch_size=1))
    return pipeline


def embeds_maru(document: Document, daemon: DaemonConfig) -> bool:
    """Return whether the daemon runs its own Maru server.

    It does if neither tiers nor a server are named.
    """
    tiers = document.parse().get("engine", {}).get("tiers")
    return not tiers and not daemon.maru_server_url and bool(daemon.maru_pool_size_gb)


def pool_config(
    document: Document, daemon: DaemonConfig, *, environ: Mapping[str, str] | None = None
) -> PinnedPoolConfig | None:
    """Merge the ``[pinned_pool]`` table and the environment.

    ``None`` if no pool is served.

    Raises:
        offload.ConfigError: an unknown name, or a value out of its bound.
    """
    if not daemon.pinned_pool:
        return None
    from backends.pinned_pool import PinnedPoolConfigError, pinned_pool_config

    try:
        config = pinned_pool_config(document, others=(SECTION, "engine"), environ=environ)
    except PinnedPoolConfigError as exc:
        raise ConfigError(exc.knob, exc.value, exc.bound) from exc
    return config if config.runtime_dir else attrs.evolve(config, runtime_dir=daemon.runtime_dir)


def read_tenants(path: str) -> Tenants:
    """Read the tenants of a file; none without a path.

    Raises:
        offload.ConfigError: it is open to other users, or is no such file.
        OSError: it cannot be read.
    """
    if not path:
        return Tenants()
    if os.stat(path).st_mode & 0o077:
        raise ConfigError("daemon.tenants_file", path, f"must be closed to other users: chmod 600 {path}")
    return tenants_of(_knob.read(Path(path)), path)


def tenants_of(document: Document, path: str) -> Tenants:
    """Parse the tenants in a tenants' file.

    Raises:
        offload.ConfigError: it has none, or an invalid one.
    """
    table = document.parse().get("tenants", {})
    tenants = [_tenant(path, name, value) for name, value in table.items()] if isinstance(table, Mapping) else []
    if not tenants:
        raise ConfigError("daemon.tenants_file", path, f"must have a table [tenants]: {_TENANT}")
    if len({credential for _, credential, _ in tenants}) != len(tenants):
        raise ConfigError("daemon.tenants_file", path, "must have a different credential for each tenant")
    return Tenants(
        {name: credential.encode() for name, credential, _ in tenants},
        {name: quota for name, _, quota in tenants if quota is not None},
    )


_TENANT: Final = (
    'NAME = "CREDENTIAL" of at least 16 characters, or [tenants.NAME] with a credential and perhaps a quota ("8 GiB")'
)


def _tenant(path: str, name: str, value: object) -> tuple[str, str, int | None]:
    """Return name, credential and quota of one tenant.

    No error shows a value that may be a credential.
    """
    if not 0 < len(name) <= 256:
        raise ConfigError("daemon.tenants_file", path, f"a tenant's name of {len(name)} characters: must be 1 to 256")
    table = value if isinstance(value, Mapping) else {"credential": value}
    unknown = next((key for key in table if key not in ("credential", "quota")), None)
    if unknown is not None:
        raise ConfigError("daemon.tenants_file", path, f"tenants.{name}.{unknown}: unknown; must be {_TENANT}")
    credential, quota = table.get("credential"), as_bytes(table.get("quota"))
    if not isinstance(credential, str) or not 16 <= len(credential.encode()) <= MAX_CREDENTIAL_BYTES:
        raise ConfigError("daemon.tenants_file", path, f"tenants.{name}: must be {_TENANT}")
    if quota is not None and (isinstance(quota, bool) or not isinstance(quota, int) or not 0 <= quota <= 1 << 60):
        raise ConfigError(
            "daemon.tenants_file", path, f"tenants.{name}.quota = {quota!r}: must be bytes from 0 to 1 EiB"
        )
    return name, credential, quota
