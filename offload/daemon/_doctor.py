"""Findings about a daemon that runs: present and future faults. Pure.

:mod:`offload.daemon._doctor_command` collects the facts. Each finding has the observation, the requirement, and the way
out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs

from maru.base.findings import Finding, PathFact, Verdict, examine_directory, examine_socket

from .._health.degradations import GRAVE
from ._admin_messages import Fact, SessionFacts, TierFacts

_SILENT: Final = 0.5
"""Share of its lease that an engine may be silent.

An engine whose client works is heard three times as often.
"""
_BATCH_CALL: Final = "cuMemcpyBatchAsync"
"""Driver's call that begins many copies."""
_USED: Final = 0.8
"""Share of its descriptors that a daemon may use."""


@attrs.frozen
class DaemonFacts:
    """The facts about a daemon."""

    directory: PathFact
    """Directory of the sockets."""
    sockets: tuple[PathFact, ...] = ()
    """Sockets that should be there."""
    token: PathFact | None = None
    """File of the operators' token; ``None`` without a listener for them."""
    state: str = ""
    """State that the daemon reports to everybody; empty without an answer."""
    why_not: str = ""
    """Reason for no answer, to this command or to its operator."""
    version: str = ""
    """Version of this command's package."""
    told: Told | None = None
    """The daemon's answers to its operator."""
    has_device: bool = False
    """Whether there is a CUDA device, for which memory is pinned."""


@attrs.frozen
class Told:
    """The answers of a daemon to its operator."""

    daemon: dict[str, Fact]
    limits: dict[str, Fact]
    tiers: Sequence[TierFacts]
    sessions: Sequence[SessionFacts]
    quarantined: int = 0
    withheld: int = 0
    pinning: Mapping[str, Fact] = attrs.field(factory=dict)
    huge_pages: Mapping[str, Fact] = attrs.field(factory=dict)
    degraded: Mapping[str, str] = attrs.field(factory=dict)
    """A sentence for each degradation, by name and subject."""


def examine_daemon(facts: DaemonFacts) -> list[Finding]:
    """Return the findings about these facts, always in the same order."""
    findings = [_answers(facts), examine_directory(facts.directory, "runtime directory")]
    findings += [examine_socket(fact) for fact in facts.sockets]
    findings.append(_token(facts.token))
    if facts.told is None:
        if facts.state:
            text = facts.why_not or "it was not asked"
            findings.append(Finding("operator", "warn", text, "what the daemon tells", "use the token of this daemon"))
        return findings
    told = facts.told
    findings += [
        _version(facts, told),
        _descriptors(told),
        _memlock(facts, told),
        _pinning(told),
        *_copies(told),
        _huge_pages(told),
        _leases(told),
    ]
    findings += [_tier(tier) for tier in told.tiers]
    findings.append(_quarantine(told))
    findings += _degraded(told)
    return findings


def _answers(facts: DaemonFacts) -> Finding:
    name, needed = "daemon", "one that answers, and is ready"
    if not facts.state:
        return Finding(name, "fail", facts.why_not, needed, "start it: offload serve; or name it: --runtime-dir")
    if facts.state == "ready":
        return Finding(name, "ok", "ready", needed)
    way_out = {
        "starting": "wait: its tiers are being opened; its log says which",
        "draining": "it is about to end: start it again",
    }
    return Finding(name, "warn", facts.state, needed, way_out.get(facts.state, "look into its log"))


def _token(fact: PathFact | None) -> Finding:
    name, needed = "token of operators", "ours, mode 0600"
    if fact is None:
        return Finding(name, "ok", "none: this daemon has no listener for operators", needed)
    if not fact.exists:
        return Finding(name, "warn", f"{fact.path} is not there", needed, "start the daemon, or set admin_token_file")
    if fact.mode & 0o077:
        return Finding(name, "fail", f"{fact.path} has mode {fact.mode:04o}", needed, f"chmod 600 {fact.path}")
    return Finding(name, "ok", f"{fact.path} has mode {fact.mode:04o}", needed)


def _version(facts: DaemonFacts, told: Told) -> Finding:
    name, theirs = "version", str(told.daemon.get("version", ""))
    if theirs == facts.version:
        return Finding(name, "ok", theirs or "unknown", facts.version)
    found = f"the daemon has {theirs or 'an unknown one'}"
    return Finding(
        name, "warn", found, facts.version or "the same", "restart the daemon: it runs what was installed before"
    )


def _descriptors(told: Told) -> Finding:
    name = "file descriptors"
    most, used = int(told.limits["descriptors"]), int(told.limits["open_descriptors"])
    sessions = int(told.limits["max_sessions"])
    needed = f"{4 * sessions} free for max_sessions = {sessions}"  # connection, process, and memory of each
    found = f"{used} of {most} are open"
    if used > _USED * most:
        return Finding(name, "fail", found, needed, f"LimitNOFILE={2 * most}, or a smaller max_sessions")
    if most - used < 4 * (sessions - len(told.sessions)):
        return Finding(name, "warn", found, needed, f"LimitNOFILE={used + 4 * sessions}, or a smaller max_sessions")
    return Finding(name, "ok", found, needed)


def _memlock(facts: DaemonFacts, told: Told) -> Finding:
    name, limit = "locked memory", told.limits["memlock_bytes"]
    needed = sum(tier.capacity_bytes for tier in told.tiers if tier.kind in ("MemoryTier", "MaruTier"))
    if not facts.has_device:
        return Finding(name, "ok", _limit(limit), "none: there is no CUDA device")
    if not isinstance(limit, int) or limit >= needed:
        return Finding(name, "ok", _limit(limit), _size(needed))
    return Finding(
        name, "warn", _limit(limit), _size(needed), "LimitMEMLOCK=infinity: copies from pageable memory are slower"
    )


def _pinning(told: Told) -> Finding:
    """Return the state of pinning.

    A refusal is among the degradations, with its reason.
    """
    wanted, pinned = (int(told.pinning.get(f"{name}_bytes") or 0) for name in ("wanted", "pinned"))
    found = f"{_size(pinned)} of {_size(wanted)} are pinned" if wanted else "none is to be pinned"
    return Finding("pinned memory", "ok", found, _size(wanted))


def _copies(told: Told) -> list[Finding]:
    """Return how the devices' copies are begun; nothing without a driver."""
    name, call = "copies of devices", str(told.pinning.get("copy_call") or "")
    needed = f"{_BATCH_CALL}: one call for many pieces"
    if call in ("", _BATCH_CALL):
        return [Finding(name, "ok", call, needed)] if call else []
    way_out = "a driver of CUDA 12.8 or later, and not in WSL2"
    return [Finding(name, "warn", f"{call}: a call for each piece", needed, way_out)]


def _huge_pages(told: Told) -> Finding:
    huge, small = (int(told.huge_pages.get(f"{name}_bytes") or 0) for name in ("huge", "small"))
    found = f"{_size(huge)} in huge pages, {_size(small)} in small ones"
    why_not = told.huge_pages.get("why_not")
    return Finding(
        "huge pages", "ok", f"{found}: {why_not}" if why_not else found, "huge ones, where the kernel has them"
    )


def _leases(told: Told) -> Finding:
    name, lease = "leases", float(told.limits["lease"])
    needed = f"every engine heard within {_SILENT * lease:g} s"
    silent = [one for one in told.sessions if one.silent > _SILENT * lease]
    if not silent:
        return Finding(name, "ok", f"{len(told.sessions)} engines, all were heard", needed)
    found = ", ".join(f"{one.name or one.number} silent for {one.silent:.1f} s" for one in silent)
    return Finding(name, "warn", found, needed, f"are these processes stopped? Their sessions end after {lease:g} s")


def _tier(tier: TierFacts) -> Finding:
    name, needed = f"tier {tier.name}", "its breaker closed, blocks that may go"
    found = f"breaker {tier.breaker}, {_size(tier.used_bytes)} of {_size(tier.capacity_bytes)} used"
    verdict: Verdict = "ok"
    way_out = ""
    if tier.breaker != "closed":
        verdict, way_out = "fail", "it is left alone since calls to it failed: the daemon's log says why"
    elif tier.blocks and tier.held_blocks == tier.blocks and tier.used_bytes >= tier.capacity_bytes:
        verdict, way_out = "warn", "engines hold all of it: is there one that does not release its hits?"
    return Finding(name, verdict, found, needed, way_out)


def _quarantine(told: Told) -> Finding:
    name, needed = "quarantine", "nothing in it"
    if not told.quarantined and not told.withheld:
        return Finding(name, "ok", "empty", needed)
    found = f"{told.quarantined} copies without a proven end, {told.withheld} keys withheld"
    return Finding(name, "warn", found, needed, "offload quarantine list")


def _degraded(told: Told) -> list[Finding]:
    """Return findings for reported degradations.

    Broken tiers have a finding already.
    """
    needed = "all that it was set up for"
    others = {name: text for name, text in told.degraded.items() if not name.startswith("broken_tier")}
    if not others:
        return [Finding("degraded", "ok", "nothing else", needed)]
    findings = []
    for name, text in others.items():
        found, _, way_out = text.rpartition(": ")
        findings.append(
            Finding(f"degraded: {name}", "fail" if name.split()[0] in GRAVE else "warn", found, needed, way_out)
        )
    return findings


def examine_pairs(findings: Sequence[Finding], prefix: str) -> Iterator[Finding]:
    """Yield the findings with a prefix to their names."""
    for finding in findings:
        yield attrs.evolve(finding, name=f"{prefix}: {finding.name}")


def _limit(limit: Fact) -> str:
    return "no limit" if isinstance(limit, str) else _size(int(limit))


def _size(count: int) -> str:
    from maru.base.output import size

    return size(count)
