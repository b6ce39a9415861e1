"""The pipeline that copies victims: its settings and its policy.

The policy keeps back the blocks that the next tier has. See :mod:`offload._pipeline.spill`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import attrs
import trio

from backends.abc import Key, Tier

from .._config import PipelineConfig
from .._errors import ConfigError
from ..abc import AsyncPolicy, Policy, Reasons
from ..policies import PresenceFilter

_SHARE: Final = 0.5
"""The wait for room below, relative to a store's wait here.

See rule 2 of :mod:`offload._pipeline.spill`.
"""
_log = logging.getLogger("offload.spilling")


def config_below(config: PipelineConfig, said: PipelineConfig | None = None) -> PipelineConfig:
    """Return the settings of a pipeline that copies victims.

    They are those configured for it (``said``), or else those of the pipeline that needs the room (``config``). In
    either case no block waits for others to fill a batch, and none waits for room for more than half as long as the
    store that needs its own: see rule 2.
    """
    knobs = config if said is None else said
    shorter = max(0.001, min(knobs.destination_timeout, _SHARE * config.destination_timeout))
    return attrs.evolve(
        knobs,
        batch_config=attrs.evolve(knobs.batch_config, flush_interval=0.0),
        destination_timeout=shorter,
        on_overflow="wait",
    )


def check_config(config: PipelineConfig) -> None:
    """Check that the tier evicts at all.

    Otherwise no block would ever leave by a chain on eviction.

    Raises:
        ConfigError: ``on_destination_full`` is not ``evict``.
    """
    if config.on_destination_full != "evict":
        raise ConfigError(
            "on_destination_full",
            config.on_destination_full,
            "must be evict with chain='on_evict': otherwise a full tier evicts nothing, and nothing reaches the next tier",
        )


def what_is_new(tier: Tier, config: PipelineConfig) -> Policy | AsyncPolicy:
    """Return a policy that rejects blocks that the next tier has.

    A block about which the next tier does not answer in time is copied, and its first writer wins.
    """
    if tier.capabilities.answers_at_once:
        return PresenceFilter(tier)
    # Half of the policy's time, so that it is always this that answers, never the deadline: if both are over, too.
    return _AskInTime(tier, config.policy_timeout / 2)


class _AskInTime(AsyncPolicy):
    """A presence filter that rejects nothing if the tier does not answer.

    A block that is filtered here would be lost.
    """

    def __init__(self, place: Tier, patience: float) -> None:
        self._place = place
        self._patience = patience

    def __repr__(self) -> str:
        return f"what is new in {self._place!r}"

    async def evaluate(self, keys: Sequence[Key]) -> Reasons:
        # Shielded: if the event loop stood still beyond both deadlines, the policy's would win, and filter the block. A
        # cancellation waits for the shorter one at most.
        with trio.move_on_after(self._patience, shield=True):
            try:
                return dict.fromkeys(await self._place.contains(keys), "present")
            except Exception as error:
                _log.debug("%r could not list its blocks: %r", self._place, error)
        return {}
