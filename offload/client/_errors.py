"""What a client of a daemon raises, each saying who must act."""

from __future__ import annotations

from .._errors import OffloadError, TierBehindFailed


class DaemonUnavailable(OffloadError, ConnectionError):
    """The daemon cannot be reached, has ended, or holds no longer what was asked for: never a miss. It may be back soon."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"the daemon at {url}: {why}")
        self.why = why
        """What became of it, in words."""


class DaemonTierFailed(DaemonUnavailable, TierBehindFailed):
    """The daemon answers that a tier of its failed: the daemon is there, and what its other tiers have can be loaded."""


class DaemonRefused(OffloadError, ValueError):
    """The daemon refuses what this client asks for: another version, a credential, a layout. The caller must change it."""


class NoPageStore(DaemonRefused):
    """The daemon has no page store whose pages engines may write. Its operator changes the setting that the text names."""


class DaemonBusy(OffloadError):
    """The daemon has as much of this session under way as may be, or this process no descriptor or memory to ask with.

    The caller releases something, or tries again.
    """
