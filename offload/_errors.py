"""The exceptions of this package, each with the caller's remedy."""

from __future__ import annotations

import math

import trio

from maru.base.errors import KnobError


class OffloadError(Exception):
    """Base of every error of this package."""


class ConfigError(OffloadError, KnobError):
    """A setting has a value out of range.

    The caller must change it; the text names the setting, the value, and the bound.
    """


class PipelineFull(OffloadError, trio.WouldBlock):
    """The pipeline's budget has no room now.

    The caller waits (``await enqueue``), drops the blocks, or tries again.
    """


class PipelineClosed(OffloadError):
    """The pipeline is shutting down or has shut down.

    As a handle's error: the pipeline ended before this container's commit.
    """


class PolicyFailed(OffloadError):
    """A policy raised, or overran ``policy_timeout``.

    This is raised if ``on_policy_error`` is ``fail``; the cause is the policy's error.
    """


class PreconditionFailed(OffloadError):
    """A precondition raised, or did not hold in time; nothing was copied.

    Only the precondition of a store has a time limit. The cause has the reason.
    """


class DestinationFull(OffloadError):
    """The destination had no room, and nothing was written.

    The setting ``on_destination_full`` decides whether that is an error.
    """


class TierUnavailable(OffloadError):
    """A tier has broken and is not called now; nothing was done.

    The caller goes on without the tier. A lookup leaves the tier out and names it; the blocks of a store are rejected.
    The attributes are for an operator.
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
        """The time when it broke, on trio's clock, in seconds."""
        self.cause = cause
        """Its last fault."""
        self.next_probe = next_probe
        """The time of the next probe, on trio's clock, in seconds.

        ``None`` while a probe is under way, ``inf`` if the tier is not tried again.
        """


class TierBehindFailed(OffloadError):
    """One of the several tiers behind a tier failed.

    The tier itself works: it reported the failure, and is called again.
    """


class TierTooSlow(OffloadError, trio.TooSlowError):
    """A tier did not answer within the deadline of its breaker.

    The call was cancelled, and left nothing behind.
    """


class TierNotEntered(OffloadError, OSError):
    """A tier could not be entered when its engine opened.

    The server or device that it connects to did not answer: an operator must act. With ``on_enter_failure = "miss"`` an
    engine opens without the tier, and enters it later.
    """

    def __init__(self, tier: str, why: str) -> None:
        super().__init__(
            f"{tier} could not be entered: {why}; on_enter_failure = 'miss' opens the engine all the same, with this tier as a "
            "broken one until it can be entered"
        )
        self.tier: str = tier
        """The tier's name."""


class TransferFailed(OffloadError):
    """The executor failed the whole batch, or broke its contract.

    The cause is its exception. The copy is over.
    """


class TransferCancelled(OffloadError):
    """A transfer was cancelled before its commit; nothing was copied.

    Raised by ``result.raise_for_status()`` only.
    """


class LayoutCheckFailed(OffloadError):
    """Stored blocks come back in other planes: keys as values, for example.

    One head may also come back as another one. No block that is loaded can be used. Raised by
    :meth:`offload.Engine.check_layout`. The caller must act: its places read a layout otherwise than they write it, or
    another process uses the same name for another layout.
    """


class DrainUnproven(OffloadError):
    """The end of a copy could not be proven in time.

    The memory that it uses is named, quarantined, and not reused. This is the error of the handle, and ``await
    handle.cancel()`` raises it.
    """


class WaitTimeout(OffloadError, TimeoutError):
    """A call timed out; its outcome is unknown.

    The awaited event may still happen or not: never take this for an answer.
    """


class CallCancelled(OffloadError):
    """The caller cancelled a lookup or load before its answer.

    The call pins nothing and writes nothing any more.
    """


class EngineClosed(PipelineClosed):
    """The engine is not open: it was closed, or never started.

    The caller opens another one.
    """


class EngineCrashed(PipelineClosed):
    """The engine's trio thread ended with an error, which is the cause.

    The caller opens another one.
    """


class EngineForked(PipelineClosed):
    """The engine belongs to the parent process of this forked process.

    The caller opens another one in this process.
    """


class IncidentError(OffloadError, ValueError):
    """A file is no flight recording that this version can read.

    The caller makes another recording, or uses the version that wrote the file.
    """


class NotARecording(IncidentError):
    """The file is no flight recording, or is damaged at its beginning."""


class RecordingVersion(IncidentError):
    """The recording has another format version; the text has both numbers."""


class RecordingTruncated(IncidentError):
    """The file is shorter than its header states: it was copied incompletely."""


class RecorderBusy(OffloadError, OSError):
    """Another process records into this file; use another file."""
