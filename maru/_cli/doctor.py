"""``maru doctor``: predictions of failures on this host.

`maru._pool.facts` collects the facts, `maru._pool.doctor` judges them.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import attrs
import click

from .._config import ServerConfig, default_pool_path, server_config
from .._pool.doctor import Facts, Wanted, examine
from .._pool.facts import read_facts
from .._pool.index_files import why_not_here
from ..base.addresses import IPC_NAME, is_loopback
from ..base.errors import ConfigError, NoAnswer, ServerRefused
from ..base.findings import Finding, worst
from ..base.memory.pinning import copy_call, why_no_driver
from ..base.output import print_json, show_findings
from ._connection import ServerConnection, ServerOptions, probe_address, server_options, usage_errors
from .describe import Description, describe

Sections: TypeAlias = Mapping[str, Mapping[str, object]]


class Place(NamedTuple):
    """Location of regions, existing or planned."""

    kind: str
    """Kind of the location: ``files``, ``memfd`` or ``device``."""
    path: str
    """Directory of the files, or the device."""
    home: str
    """Directory of the files that outlive the server."""


@click.command()
@server_options
@click.option("--pool-path", metavar="DIR", help="Pool directory.  [default: the server's, or MARU_SERVER__POOL_PATH]")
@click.option(
    "--dax-path", metavar="PATH", help="DAX device or directory of regions.  [default: MARU_SERVER__DAX_PATH]"
)
@click.option("--capacity-bytes", metavar="SIZE", help="Largest total size of regions.  [default: the server's]")
@click.option("--pin", is_flag=True, help="Check locked memory too, for clients that pin for CUDA.")
def command(target: ServerOptions, pin: bool, **options: str | None) -> None:
    """Check space, memory, permissions, descriptors and sockets of a pool.

    A page without memory causes a SIGBUS in the process that touches it, instead of an error; so check before. Works with
    and without a running server. Exit code 1 if something will fail.
    """
    given = {
        f"server.{name}": (f"--{name.replace('_', '-')}", text) for name, text in options.items() if text is not None
    }
    with usage_errors(target.config_file):
        config = server_config(Path(target.config_file) if target.config_file else "", options=given)
    asked, description = _ask(target)
    # A server of another host has other directories; and with an option for another place, the server's own are
    # irrelevant.
    near = description is not None and _is_near(target.address) and not (options["pool_path"] or options["dax_path"])
    sections: Sections = description.sections if near and description is not None else {}
    place = _place_of(sections.get("pool", {})) or _place_in(config)
    facts = _facts(place, _sockets(sections.get("server", {})), config)
    if pin:
        facts = attrs.evolve(facts, why_no_driver=why_no_driver(), copy_call=copy_call())
    wanted = Wanted(
        capacity_bytes=config.capacity_bytes or _as_int(sections.get("pool", {}).get("total_bytes")),
        pin=pin,
        connections=config.max_connections,
        curve=bool(config.curve_key_file),
    )
    is_served = description is not None and _is_same(place.home, description.sections.get("pool", {}).get("home"))
    findings = [asked, *_refused(config, is_served), *examine(facts, wanted), _index(near, sections, config)]
    verdict = worst(findings)
    if target.as_json:
        every = [attrs.asdict(finding) for finding in findings]
        print_json({"address": target.address, **place._asdict(), "verdict": verdict, "findings": every})
    else:
        show_findings(findings)
    if verdict == "fail":
        sys.exit(1)


def _ask(target: ServerOptions) -> tuple[Finding, Description | None]:
    """Find whether a server answers. Returns its description too."""
    name, needed = "server", "one that answers"
    try:
        server = ServerConnection(target)
    except (ConfigError, OSError, ValueError) as error:
        return Finding(name, "fail", f"{target.address}: {error}", needed, "correct the address, or the keys"), None
    try:
        description = describe(server)
    except NoAnswer:
        absent, text = probe_address(target.address)
        if absent:
            return Finding(name, "ok", f"none at {target.address}", needed), None
        return Finding(name, "warn", f"{target.address} does not answer", needed, text), None
    except ServerRefused as error:
        return Finding(name, "warn", f"{target.address} refuses: {error}", needed, "is this a page store?"), None
    finally:
        server.close()
    return Finding(name, "ok", f"{target.address} is {description.kind}", needed), description


def _refused(config: ServerConfig, is_served: bool) -> list[Finding]:
    """Find the reasons that keep a server from starting.

    The losses of a start are found too. If there is no such reason, the first finding is "ok".
    """
    import trio

    from .._server.start_checks import refusals

    found = trio.run(functools.partial(refusals, config, is_served=is_served))
    needed = "a configuration that a server starts with"
    findings = [
        Finding(one.what, "fail", one.text, needed, one.way_out)
        if one.refuses
        else Finding(one.what, "warn", one.text, "a journal that can be read to its end", one.way_out)
        for one in found
    ]
    if worst(findings) != "fail":
        findings.insert(0, Finding("start", "ok", "nothing keeps a server from starting", needed))
    return findings


def _index(near: bool, sections: Sections, config: ServerConfig) -> Finding:
    """Find whether clients on this host have a shared index.

    With it they look keys up without a message. Without it everything works, and takes longer.
    """
    name, needed = "shared index", "one, for lookups without a message"
    if not near:
        why_not = "index = off" if config.index == "off" else why_not_here()
        if why_not:
            return Finding(name, "ok", f"a server here would have none: {why_not}", needed)
        return Finding(name, "ok", "a server here would have one", needed)
    said = sections.get("index", {"why not": "an older server"})
    if said.get("why not"):
        return Finding(name, "ok", f"not used: {said['why not']}", needed)
    if not said["tenants"]:
        return Finding(name, "ok", "used when a client asks for it; none has", needed)
    found = f"used: {said['keys']} keys in {said['slots']} slots, {said['left out']} left out"
    found += f"; {said.get('held', 0)} keys are held by {said.get('boards', 0)} boards"
    return Finding(name, "ok", found, needed)


def _is_same(path: str, other: object) -> bool:
    """Return whether a running server's place is this one."""
    return isinstance(other, str) and os.path.realpath(path) == os.path.realpath(other)


def _is_near(address: str) -> bool:
    scheme, _, rest = address.partition("://")
    return scheme == "ipc" or is_loopback(rest.rpartition(":")[0])


def _place_of(pool: Mapping[str, object]) -> Place | None:
    """Return the location of a server's pool, if it reports one."""
    kind, path, home = (pool.get(name) for name in ("kind", "path", "home"))
    return Place(str(kind), str(path), str(home)) if kind and path and home else None


def _place_in(config: ServerConfig) -> Place:
    """Return the location of the pool for this configuration."""
    home = config.pool_path or default_pool_path()
    where = config.dax_path or home
    if where == "memfd":
        return Place("memfd", where, home)
    is_device = bool(config.dax_path) and not os.path.isdir(where)
    return Place("device" if is_device else "files", where, home)


def _facts(place: Place, sockets: Iterable[str], config: ServerConfig) -> Facts:
    curve = None
    if config.curve_key_file:
        from ..transport import has_curve

        curve = has_curve()
    directory = place.path if place.kind == "files" else place.home
    device = place.path if place.kind == "device" else ""
    facts = read_facts(directory, device=device, sockets=tuple(sockets), curve=curve)
    if place.kind == "memfd":  # its regions lie in memory, even if their home does not
        facts = attrs.evolve(facts, file_system="tmpfs", free_bytes=facts.available_bytes, held_bytes=0)
    return facts


def _sockets(server: Mapping[str, object]) -> list[str]:
    """Return the Unix sockets that a server reports."""
    endpoints = str(server.get("endpoints", "")).split(", ")
    paths = [one.removeprefix("ipc://") for one in endpoints if one.startswith("ipc://")]
    if not server.get("zmq_socket", True):  # our clients get this name too, but connect to the channel in its directory
        paths = [path for path in paths if os.path.basename(path) != IPC_NAME]
    return paths + [path for name in ("channel", "descriptors") if (path := str(server.get(name, "")))]


def _as_int(value: object) -> int:
    return value if isinstance(value, int) else 0
