"""Faults of a daemon and of its client, which random programs over pages find (`tests/daemon/test_page_programs.py`)."""

from __future__ import annotations

from typing import Any

from offload.client import Pages
from offload.client._connection import DaemonConnection
from offload.daemon._onward import OnwardCommits


def pages_are_committed_under_a_session_that_is_over(patch: Any) -> None:
    patch.setattr(Pages, "_is_current", lambda self, session: True)


def a_release_is_dropped_if_the_channel_is_full(patch: Any) -> None:
    tell_due = DaemonConnection._tell_due

    def drop(self: Any) -> None:
        tell_due(self)
        self._due.clear()

    patch.setattr(DaemonConnection, "_tell_due", drop)


def commits_wait_for_copies_under_way(patch: Any) -> None:
    patch.setattr(OnwardCommits, "has_room", property(lambda self: not self._under_way))
    patch.setattr(OnwardCommits, "wait_room", OnwardCommits.wait_over)
