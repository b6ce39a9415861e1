"""Findings of the ``doctor`` commands, including those about a path. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath
from typing import Literal, TypeAlias

import attrs

Verdict: TypeAlias = Literal["ok", "warn", "fail"]


@attrs.frozen
class Finding:
    """One result of a doctor's check."""

    name: str
    """Name of the checked object."""
    verdict: Verdict
    """``fail``: certain to go wrong; ``warn``: may go wrong, or be slow."""
    found: str
    """Actual state."""
    needed: str
    """Required state."""
    way_out: str = ""
    """Advice; empty if nothing is wrong."""


@attrs.frozen
class PathFact:
    """A directory or a socket."""

    path: str
    exists: bool = True
    ours: bool = True
    """Whether it belongs to this user."""
    mode: int = 0o700
    """Permission bits."""
    has_parent: bool = True
    """Whether its parent directory exists."""
    empty: bool = False
    """Whether it is an empty directory.

    A server closes an empty directory to other users.
    """


def worst(findings: Iterable[Finding]) -> Verdict:
    """Return the worst verdict of these findings."""
    verdicts = {finding.verdict for finding in findings}
    return "fail" if "fail" in verdicts else "warn" if "warn" in verdicts else "ok"


def examine_directory(fact: PathFact, name: str = "pool directory") -> Finding:
    """Judge a directory that only its user may enter."""
    needed = "ours, mode 0700"
    if not fact.exists and not fact.has_parent:
        parent = PurePath(fact.path).parent
        found = f"{fact.path} is not there, nor is {parent}"
        return Finding(name, "fail", found, needed, f"mount its disk, or mkdir -p {parent}")
    if not fact.exists:
        return Finding(name, "ok", f"{fact.path} is not there yet", needed)
    if not fact.ours:
        return Finding(name, "fail", f"{fact.path} belongs to another user", needed, "choose another directory")
    if fact.mode & 0o077 and fact.empty:
        return Finding(name, "ok", f"{fact.path} has mode {fact.mode:04o}, and is empty: a server closes it", needed)
    if fact.mode & 0o077:
        found = f"{fact.path} has mode {fact.mode:04o}"
        shared = fact.mode & 0o1000  # as in /tmp, which must stay open to other users
        return Finding(
            name, "fail", found, needed, f"a directory inside: {fact.path}/maru" if shared else f"chmod 700 {fact.path}"
        )
    return Finding(name, "ok", f"{fact.path} has mode {fact.mode:04o}", needed)


def examine_socket(fact: PathFact) -> Finding:
    """Judge a socket that only its user may use."""
    name, needed = f"socket {PurePath(fact.path).name}", "ours, mode 0600"
    if not fact.exists:
        return Finding(name, "warn", f"{fact.path} is not there", needed, "start the server")
    if not fact.ours:
        return Finding(name, "fail", f"{fact.path} belongs to another user", needed, "do not connect to it")
    found = f"{fact.path} has mode {fact.mode:04o}"
    if fact.mode & 0o177:
        return Finding(name, "fail", found, needed, f"chmod 600 {fact.path}")
    return Finding(name, "ok", found, needed)
