"""The check of a daemon's settings, which does not start it.

It makes the configured objects.

It drops them again, for ``--check`` and before a reload. Nothing that holds blocks is opened: a file tier would sweep
its directory, and shrink it.

Rule 1. A wrong setting is a :class:`~offload.ConfigError` that names it; a package that is not installed is the
    environment's fault, with the name of the extra.
Rule 2. A daemon that runs in this directory has its ports and directories itself: they are not tried then. Objects that
    it has already made are not made a second time.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, Final

from backends import PlaceInUse
from backends.abc import Tier
from backends.base.blockfile import check_directory
from backends.base.closing import closing
from backends.plugins import read_spec
from maru.base.addresses import CHANNEL_NAME as POOL_CHANNEL
from maru.base.addresses import IPC_NAME
from maru.base.errors import excerpt
from maru.base.packets import LONGEST_PATH, check_socket
from maru.base.private_directory import check_private_directory

from .._engine.config import EngineConfig, TierLike, TierTable
from .._engine.factories import leads_on, make_policies, make_tier
from .._engine.routes import plan
from .._errors import ConfigError
from ._admin import OwnToken, read_token
from ._config import CHANNEL_NAME, HANDOVER_NAME, STATUS_NAME, read_tenants
from ._events import ANSWERS_NAME, EVENTS_NAME
from ._instruments import make_instrument
from ._server import LOCK_NAME
from ._settings import Settings, maru_config

_OWN_NAMES: Final = (LOCK_NAME, CHANNEL_NAME, HANDOVER_NAME, STATUS_NAME, EVENTS_NAME, ANSWERS_NAME)
_LARGEST_FIRST: Final = 4_096
"""Bytes of a block, if only the first cache determines them."""


def check_settings(
    settings: Settings, *, running: Settings | None = None, tiers: Mapping[str, Tier] | None = None
) -> None:
    """Make the configured objects without entering them, and drop them. Thread-safe.

    Args:
        settings: to check.
        running: those of the daemon that runs here, whose objects are not made again.
        tiers: of that daemon, if they are open.

    Raises:
        offload.ConfigError: a directory, a port, a tenant, an instrument, a tier or a policy is invalid.
        ImportError: a package is not installed; the text names the extra.
    """
    config = settings.daemon
    served = running is not None or _is_served(config.runtime_dir)
    with _naming("daemon.tenants_file", config.tenants_file):
        read_tenants(config.tenants_file)
    if config.admin_token_file:
        with _naming("daemon.admin_token_file", config.admin_token_file):
            read_token(config.admin_token_file)
    for name in config.instruments:
        if running is None or name not in running.daemon.instruments:
            make_instrument(name)
    if not served:
        _check_places(settings)
        _check_addresses(settings)
    maru_config(settings)
    before = None if running is None else running.engine
    _check_tiers(settings.engine, config.block_bytes or _LARGEST_FIRST, before, tiers or {}, served=served)


def _check_places(settings: Settings) -> None:
    """Raise unless directories, sockets and the recorder's file can be made."""
    config = settings.daemon
    _check_directory("daemon.runtime_dir", config.runtime_dir)
    if settings.embeds_maru and os.path.isdir(config.runtime_dir):  # otherwise it is made in a directory of our own
        _check_directory("daemon.runtime_dir", settings.maru_directory)
    if settings.pinned_pool is not None:
        _check_directory("pinned_pool.runtime_dir", settings.pinned_pool.runtime_dir)
    if config.admin.startswith("ipc://"):
        _check_directory("daemon.admin", os.path.dirname(os.path.abspath(config.admin.removeprefix("ipc://"))))
    _check_sockets(settings)
    _check_names(settings)
    if config.flight_recorder:
        from .._recorder.ring import check_ring_file

        with _naming("daemon.flight_recorder", config.flight_recorder):
            check_ring_file(config.flight_recorder)


def _check_sockets(settings: Settings) -> None:
    """Raise unless other libraries' sockets have short enough names.

    Our own sockets have a way around the bound.
    """
    config, directory = settings.daemon, os.path.realpath(settings.daemon.runtime_dir)
    names = [
        *([f"{directory}/{STATUS_NAME}"] if config.status == "ipc" else []),
        *([f"{directory}/{name}" for name in (EVENTS_NAME, ANSWERS_NAME)] if config.kv_events else []),
        *([f"{os.path.realpath(settings.maru_directory)}/{IPC_NAME}"] if settings.embeds_maru else []),
    ]
    embedded = (
        [f"{settings.maru_directory}/{name}" for name in (IPC_NAME, POOL_CHANNEL)] if settings.embeds_maru else []
    )
    ours = [f"{directory}/{name}" for name in (CHANNEL_NAME, HANDOVER_NAME)]
    operators = config.admin_path(directory)
    for knob, paths in (("runtime_dir", [*names, *embedded, *ours]), ("admin", [operators] if operators else [])):
        for path in paths:
            with _naming(f"daemon.{knob}", path):
                check_socket(path)
    longest = max(names, key=len, default="")
    if len(os.fsencode(longest)) > LONGEST_PATH:
        raise ConfigError(
            "daemon.runtime_dir", config.runtime_dir, f"{longest} has over {LONGEST_PATH} bytes: choose a shorter one"
        )


def _check_names(settings: Settings) -> None:
    """Raise if two settings name one path.

    It raises as well if the token's file is a foreign one.

    The token of operators must not replace another file.
    """
    config, directory = settings.daemon, settings.daemon.runtime_dir
    operators = config.admin_path(directory)
    named: list[tuple[str, str]] = [
        *[("daemon.runtime_dir", f"{directory}/{name}") for name in _OWN_NAMES],
        ("daemon.runtime_dir", directory),
        ("daemon.runtime_dir", settings.maru_directory),
        *(
            [("daemon.admin", operators), ("daemon.admin_token_file", config.token_path(directory))]
            if operators
            else []
        ),
    ]
    if config.flight_recorder:
        named.append(("daemon.flight_recorder", config.flight_recorder))
    for name, tier in settings.engine.tiers.items():
        place = tier.get("directory") if isinstance(tier, Mapping) else None
        if isinstance(place, str) and place:
            named.append((f"engine.tiers.{name}.directory", place))
    taken: dict[str, str] = {}
    for knob, path in named:
        before = taken.setdefault(os.path.realpath(path), knob)
        if before != knob:
            raise ConfigError(knob, path, f"is already a path of {before}: choose another one")
    if operators and not config.admin_token_file:
        with _naming("daemon.admin_token_file", config.token_path(directory)):
            OwnToken(config.token_path(directory)).check()


def _check_directory(knob: str, path: str) -> None:
    check_private_directory(
        path, lambda why: ConfigError(knob, path, why.replace(path, excerpt(path))), purpose="a directory of a daemon"
    )


def _check_addresses(settings: Settings) -> None:
    """Raise unless this process can listen at all addresses.

    It must also have the packages for it.
    """
    config = settings.daemon
    with ExitStack() as listening:  # until all are tried: two may be the same
        if config.status:
            from ..status import serve_status as serve_status  # raises without the packages of its extra

            if config.status != "ipc":
                _listen(listening, "daemon.status", config.status)
        if config.kv_events not in ("", "ipc"):
            host, _, port = config.kv_events.rpartition(":")
            _listen(listening, "daemon.kv_events", config.kv_events)
            _listen(listening, "daemon.kv_events", f"{host}:{int(port) + 1}")
        pool = settings.pinned_pool
        if pool is not None and pool.host:
            _listen(listening, "pinned_pool.port", f"{pool.host}:{pool.port}")


def _listen(listening: ExitStack, knob: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, place in dict.fromkeys(where):
            probe = listening.enter_context(socket.socket(family, kind, protocol))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # next to that of IPv4
            probe.bind(place)
            probe.listen()
    except OSError as exc:
        raise ConfigError(knob, address, f"cannot listen there: {exc.strerror or exc}") from exc


def _check_tiers(
    engine: EngineConfig,
    block_bytes: int,
    before: EngineConfig | None,
    running: Mapping[str, Tier],
    *,
    served: bool,
) -> None:
    """Make the tiers that the running daemon lacks, then all routes.

    The routes are made with their policies.
    """
    if before is not None and engine.tiers == before.tiers and engine.routes == before.routes:
        return
    with ExitStack() as stack:
        tiers: dict[str, Tier] = {}
        scratch = stack.enter_context(TemporaryDirectory(prefix="offload-check-"))
        for name, tier in engine.tiers.items():
            if before is not None and tier == before.tiers.get(name):
                if name in running:
                    tiers[name] = running[name]
                continue
            with _naming(f"engine.tiers.{name}", _described(tier)):
                try:
                    tiers[name] = make_tier(f"tiers.{name}", _without_blocks(tier, scratch, served), block_bytes)
                except PlaceInUse:
                    if not served:
                        raise
                    continue  # used by the daemon that runs
                stack.enter_context(closing(tiers[name]))
        if len(tiers) < len(engine.tiers):
            return
        sources = {name for name, tier in tiers.items() if leads_on(tier, engine.chain)}
        for route in plan(list(tiers), sources, engine.routes, engine.chain):
            with _naming(f"engine.routes.{route.name}.policies", route.route.policies):
                make_policies(route.route.policies, tiers[route.to], route.name)


def _without_blocks(tier: TierLike, scratch: str, served: bool) -> TierLike:
    """Return the tier with an empty directory, or memory not touched.

    Raises:
        StrayPath: its own directory cannot be used.
        PlaceInUse: another tier owns that, and no daemon runs here that may be its owner.
    """
    if not isinstance(tier, str | Mapping):
        return tier
    try:
        kind, parameters = read_spec(tier)
    except ValueError:  # raised again when it is made, with its position in the file
        return tier
    if kind == "memory":
        if isinstance(parameters.get("populate", True), bool):
            parameters["populate"] = False
        parameters.setdefault("pin_memory", False)
    elif kind == "file" and isinstance(directory := parameters.get("directory"), str) and directory:
        try:
            check_directory(directory)
        except PlaceInUse:
            if not served:
                raise
        parameters["directory"] = mkdtemp(dir=scratch)
    table = {"type": kind, **parameters}
    return TierTable(table, tier.document, tier.section) if isinstance(tier, TierTable) else table


def _described(tier: TierLike) -> Any:
    return dict(tier) if isinstance(tier, Mapping) else tier


@contextmanager
def _naming(knob: str, value: object) -> Iterator[None]:
    """Raise the body's error as an error that names its setting.

    A missing package is raised as it is.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as exc:
        if isinstance(exc, ImportError) and "pip install" in str(exc):
            raise
        why = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise ConfigError(knob, value, f"cannot be used: {why or type(exc).__name__}") from exc


def _is_served(directory: str) -> bool:
    """Return whether a daemon runs in this directory."""
    try:
        lock = os.open(f"{directory}/{LOCK_NAME}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
