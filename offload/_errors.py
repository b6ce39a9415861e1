"""The exceptions of this package, each saying what the caller can do about it."""

from __future__ import annotations

import math

import trio

from maru.base.errors import KnobError


class OffloadError(Exception):
    """Base of every error of this package."""


class ConfigError(OffloadError, KnobError):
    """The caller set a knob to a value out of range; the text names the knob, the value, and the bound."""


class PipelineFull(OffloadError, trio.WouldBlock):
    """There is no room in the pipeline's budget now. The caller waits (``await enqueue``), drops, or tries again."""


class PipelineClosed(OffloadError):
    """The pipeline is shutting down or has shut down. As a handle's error: it ended before this container's commit."""


class PolicyFailed(OffloadError):
    """A policy raised or overran ``policy_timeout`` and ``on_policy_error`` is ``fail``; the cause is its error."""


class PreconditionFailed(OffloadError):
    """A precondition raised, or that of a store did not hold in time: nothing was copied. The cause says why."""


class DestinationFull(OffloadError):
    """The destination had no room, by the rule of ``on_destination_full``: nothing was written."""


class TierUnavailable(OffloadError):
    """A tier has broken and is not called now: the caller goes on without it. Nothing was done.

    A lookup leaves the tier out and names it; the blocks of a store are rejected. The attributes are for an operator.
    """

    def __init__(self, tier: str, *, since: float, cause: str, next_probe: float | None, now: float) -> None:
        if next_probe is None:
            again = "is being tried again"
        elif next_probe == math.inf:
            again = "is not tried again"
        else:
            again = f"is tried again in {max(0.0, next_probe - now):.3g} s"
        super().__init__(f"{tier} has been unavailable for {now - since:.3g} s ({cause}); it {again}")
        self.tier = tier
        """The tier's name."""
        self.since = since
        """When it broke, on trio's clock."""
        self.cause = cause
        """Its last fault."""
        self.next_probe = next_probe
        """When it is tried again, on trio's clock; ``None`` while a probe is under way, ``inf`` if it is not tried again."""


class TierBehindFailed(OffloadError):
    """A tier that is several others in one has answered that one of those failed: it works itself, and is called again."""


class TierTooSlow(OffloadError, trio.TooSlowError):
    """A tier did not answer within the deadline of its breaker; the call was cancelled, and left nothing behind."""


class TierNotEntered(OffloadError, OSError):
    """A tier could not be entered when its engine opened: what it connects to did not answer. An operator must act.

    With ``on_enter_failure = "miss"`` an engine opens without the tier, and enters it later.
    """

    def __init__(self, tier: str, why: str) -> None:
        super().__init__(
            f"{tier} could not be entered: {why}; on_enter_failure = 'miss' opens the engine all the same, with this tier as a "
            "broken one until it can be entered"
        )
        self.tier: str = tier
        """The tier's name."""


class TransferFailed(OffloadError):
    """The executor failed the whole batch, or broke its contract; the cause is its exception. The copy is over."""


class TransferCancelled(OffloadError):
    """A transfer was cancelled before its commit; raised by ``result.raise_for_status()`` only. Nothing was copied."""


class LayoutCheckFailed(OffloadError):
    """What was stored comes back in other planes: keys as values, one head as another one. Nothing that is loaded can be used.

    Raised by :meth:`offload.Engine.check_layout`. The caller must act: its places read a layout otherwise than they write it,
    or another process calls a layout by the same name.
    """


class DrainUnproven(OffloadError):
    """The end of a copy could not be proven in time: the memory it uses is quarantined, named, and not reused.

    It is the error of the handle, and ``await handle.cancel()`` raises it.
    """


class WaitTimeout(OffloadError, TimeoutError):
    """A call timed out. What it waited for may still happen or not: never take this for an answer."""


class CallCancelled(OffloadError):
    """The caller cancelled a lookup or a load before it had an answer. It pins nothing and writes nothing any more."""


class EngineClosed(PipelineClosed):
    """The engine is not open: it was closed, or never started. The caller opens another one."""


class EngineCrashed(PipelineClosed):
    """The engine's trio thread ended with an error, which is the cause. The caller opens another one."""


class EngineForked(PipelineClosed):
    """The engine belongs to the process that this one was forked from. The caller opens one here."""


class IncidentError(OffloadError, ValueError):
    """A file is no flight recording that this version can read. A caller records anew, or uses the version that wrote it."""


class NotARecording(IncidentError):
    """The file is something else, or so damaged at its beginning that it cannot be told from something else."""


class RecordingVersion(IncidentError):
    """Another version of the format: the text has both numbers."""


class RecordingTruncated(IncidentError):
    """The file is shorter than it says: it was not copied to its end."""


class RecorderBusy(OffloadError, OSError):
    """Another process records into this file: it must have a file of its own."""
