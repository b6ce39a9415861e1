"""Everything this package raises on its own account, and who must act."""

from __future__ import annotations

import trio

from maru._errors import KnobError


class OffloadError(Exception):
    """Base of every error of this package."""


class ConfigError(OffloadError, KnobError):
    """The caller set a knob to what it cannot be; the text names the knob, the value, and the bound."""


class PipelineFull(OffloadError, trio.WouldBlock):
    """There is no room in the pipeline's budget now. The caller waits (``await enqueue``), drops, or tries again."""


class PipelineClosed(OffloadError):
    """The pipeline is shutting down or has shut down. As a handle's error: it ended before this container's commit."""


class PolicyFailed(OffloadError):
    """A policy raised or overran ``policy_timeout`` and ``on_policy_error`` is ``fail``; the cause is its error."""


class PreconditionFailed(OffloadError):
    """A precondition raised, or did not hold within ``precondition_timeout``: nothing was read. The cause says why."""


class DestinationFull(OffloadError):
    """The destination had no room, by the rule of ``on_destination_full``: nothing was written."""


class TransferFailed(OffloadError):
    """The executor failed the whole batch, or broke its contract; its cause is what it raised. The copy is over."""


class DrainUnproven(OffloadError):
    """The end of a copy could not be proven in time: what it touches is quarantined, named, and not reused.

    It is the error of the handle, and what ``await handle.cancel()`` raises: quiescence was not reached.
    """
