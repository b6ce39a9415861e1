"""Errors of a daemon's client, each naming who must act."""

from __future__ import annotations

from .._errors import OffloadError, TierBehindFailed


class DaemonUnavailable(OffloadError, ConnectionError):
    """The daemon cannot be reached, has ended, or lost a held block.

    Never a miss. It may be back soon.
    """

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"the daemon at {url}: {why}")
        self.why = why
        """The reason, in words."""


class DaemonTierFailed(DaemonUnavailable, TierBehindFailed):
    """A tier of the daemon failed.

    The daemon is there, and the blocks of its other tiers can be loaded.
    """


class DaemonRefused(OffloadError, ValueError):
    """The daemon refuses this client's version, credential or layout.

    The caller must change it.
    """


class NoPageStore(DaemonRefused):
    """The daemon has no page store whose pages engines may write.

    Its operator changes the setting that the text names.
    """


class DaemonBusy(OffloadError):
    """The session's requests or this process's resources are used up.

    The daemon allows no more requests of this session, or this process has no descriptor or memory to ask with. The
    caller releases something, or tries again.
    """
