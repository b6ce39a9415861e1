"""``offload doctor``: collects the facts for :mod:`offload.daemon._doctor`."""

from __future__ import annotations

import glob
import sys

import attrs
import click

from maru.base.findings import Finding, worst
from maru.base.machine import path_fact
from maru.base.output import print_json, show_findings
from maru.doctor import examine_pool

from ._admin_messages import Describe, Described, ListQuarantine, Quarantines
from ._config import HANDOVER_NAME
from ._doctor import DaemonFacts, Told, examine_daemon, examine_pairs
from ._facts import version
from ._messages import State, Status
from ._operator import DaemonOptions, daemon_options, open_engine_side, open_operator


@click.command()
@daemon_options
def command(options: DaemonOptions) -> None:
    """Check a daemon for present and coming problems.

    Covers sockets and their modes, versions, limits, leases, tiers and quarantine, and the directory, space and memory of an
    embedded page store (`maru doctor`). Exit code 1 if something is wrong.
    """
    facts, described = _look(options)
    findings = [*examine_daemon(facts), *_page_store(described)]
    verdict = worst(findings)
    if options.as_json:
        every = [attrs.asdict(finding) for finding in findings]
        print_json({"address": f"ipc://{options.path}", "verdict": verdict, "findings": every})
    else:
        show_findings(findings)
    if verdict == "fail":
        sys.exit(1)


def _look(options: DaemonOptions) -> tuple[DaemonFacts, Described | None]:
    admin = options.admin_path
    sockets = [options.path, f"{options.directory}/{HANDOVER_NAME}", *([admin] if admin else [])]
    facts = DaemonFacts(
        directory=path_fact(options.directory),
        sockets=tuple(path_fact(path) for path in sockets),
        token=path_fact(options.config.token_path(options.directory)) if admin else None,
        version=version(),
        has_device=bool(glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/kfd")),
    )
    try:
        with open_engine_side(options) as daemon:
            facts = attrs.evolve(facts, state=daemon.ask(Status, State).state)
    except click.ClickException as why:
        return attrs.evolve(facts, why_not=why.message), None
    try:
        with open_operator(options) as operator:
            described = operator.ask(Describe, Described)
            quarantines = operator.ask(ListQuarantine, Quarantines)
    except click.ClickException as why:
        return attrs.evolve(facts, why_not=why.message), None
    told = Told(
        described.sections["daemon"],
        described.sections["limits"],
        described.tiers,
        described.sessions,
        len(quarantines.copies),
        quarantines.withheld_keys,
        described.sections.get("pinning", {}),
        described.sections.get("huge pages", {}),
        {name: str(text) for name, text in described.sections.get("degraded", {}).items()},
    )
    return attrs.evolve(facts, told=told), described


def _page_store(described: Described | None) -> list[Finding]:
    """Return the findings of `maru doctor` about the daemon's page store."""
    path = "" if described is None else str(described.sections["page store"]["pool_path"])
    if not path:
        return []
    its_own = {"file descriptors", "populating"}  # of this command, and not of the daemon
    findings = examine_pool(path, sockets=[f"{path}/channel.sock"], connections=8, regions=8)
    return list(examine_pairs([one for one in findings if one.name not in its_own], "page store"))
