"""Every setting of a pinned pool's server, with its bounds.

Each has a default, a bound, and the reason for both. Pure, except for reading a file.

The table ``[pinned_pool]`` of a TOML file, the variables ``OFFLOAD_PINNED_POOL__...``, the options of ``offload pinned-pool``:
the last one wins. :mod:`maru.configuration` has the rules.
"""

# ruff: noqa: RUF009  # the functions called in the class bodies make fields
from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Final, Literal, TypeAlias

import attrs

from maru.base.addresses import is_loopback
from maru.configuration import Document, Knobs
from maru.configuration import Knob as Knob

from ._errors import PinnedPoolConfigError

Pin: TypeAlias = Literal["auto", "cuda", "lock", "none"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

SECTION: Final = "pinned_pool"
MIB: Final = 1 << 20

_knob: Final = Knobs("OFFLOAD", PinnedPoolConfigError)


@_knob.checks_names
@attrs.frozen
class PinnedPoolConfig:
    """All settings of a pinned pool's server.

    :func:`knobs` has the reason for each bound and default.
    """

    host: str = _knob.text(
        "127.0.0.1", "a host name or an address", r"[\w.:%-]+", "TCP address to listen on, if insecure is set."
    )
    port: int = _knob.integer(
        8073, 0, 65_535, "TCP port, and part of the Unix socket's name; clients expect 8073. 0: any free port."
    )
    insecure: bool = _knob.flag(
        False,
        "Also listen over TCP, for other users and hosts, and log a warning. Clients are not identified: every "
        "process that reaches the port may take a pool.",
    )
    pool_memory_size: int = _knob.integer(
        4096, 1, 1 << 24, "Total size of all clients' pools, in MiB. Taken as clients request their pools."
    )
    chunk_size: int = _knob.size(
        4 * MIB,
        4096,
        1 << 30,
        "Size of a chunk, a power of two; allocations use whole chunks. Small ones waste less, large ones make "
        "shorter lists.",
    )
    pin: Pin = _knob.choice(
        "auto",
        Pin,
        "Method of pinning. cuda: cudaHostRegister; lock: mlock; none: no pinning; auto: cuda if there is a device, "
        "else lock, with a warning if the limit allows neither.",
    )
    huge_pages: bool = _knob.flag(
        True, "Allocate pools in pages of 2 MiB if the kernel allows it (Linux 6.1). Off: small pages."
    )
    shared_memory: bool = _knob.flag(
        True, "Let clients of this host and user map their pool. Off: all bytes go through the socket."
    )
    runtime_dir: str = _knob.text(
        "",
        "a path",
        r"[^\x00]*",
        "Directory of the Unix sockets, made with mode 0700. Empty: /dev/shm/pinned-pool-UID, the clients' default.",
    )
    max_clients: int = _knob.integer(256, 1, 65_536, "Maximum clients at once; further ones are refused.")
    log_level: LogLevel = _knob.choice("info", LogLevel, "Lowest level that is logged.")
    json_logs: bool = _knob.flag(False, "Log one JSON object per line instead of text, including the ready line.")

    def __attrs_post_init__(self) -> None:
        if not self.insecure and not is_loopback(self.host):
            raise PinnedPoolConfigError("host", self.host, "must be of this host (127.0.0.1), unless insecure is set")
        if self.chunk_size & (self.chunk_size - 1):
            raise PinnedPoolConfigError("chunk_size", self.chunk_size, "must be a power of two")
        if self.chunk_size > self.pool_memory_size * MIB:
            raise PinnedPoolConfigError("chunk_size", self.chunk_size, "must be at most pool_memory_size")

    @property
    def total_chunks(self) -> int:
        """Number of chunks of all clients' pools together."""
        return self.pool_memory_size * MIB // self.chunk_size


def default_directory() -> str:
    """Return the directory of this user's server sockets."""
    return f"{'/dev/shm' if os.access('/dev/shm', os.W_OK) else '/tmp'}/pinned-pool-{os.geteuid()}"


def knobs() -> tuple[Knob, ...]:
    """Return every knob, in the order of declaration."""
    return tuple(_knob.of(PinnedPoolConfig, SECTION))


def pinned_pool_config(
    source: str | os.PathLike[str] | Document = "",
    *,
    others: Collection[str] = ("pipeline", "server", "client"),
    environ: Mapping[str, str] | None = None,
    options: Mapping[str, tuple[str, object]] | None = None,
) -> PinnedPoolConfig:
    """Load a configuration from a file, the environment and options.

    The last one wins. The file is TOML, and its ``[pinned_pool]`` table is read.

    Args:
        source: a path (``pathlib.Path``), TOML as a text, or a file that was read.
        others: tables of the file that are read elsewhere. Any further one is an error.
        environ: the environment; by default that of this process.
        options: by the name of the knob (``pinned_pool.port``), its name in an error (``--port``) and its value.

    Raises:
        PinnedPoolConfigError: not TOML, an unknown name, or a value out of its bound.
        OSError: the file cannot be read.
    """
    return _knob.load(PinnedPoolConfig, source, section=SECTION, others=others, environ=environ, options=options)
