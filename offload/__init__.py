"""trio-offload: move KV-cache blocks between memory tiers without losing any.

The rules: no block is lost, leaked or corrupted, whatever is cancelled or fails. A *pipeline* (:func:`open_pipeline`)
copies blocks from one tier to another: it asks the policies which blocks may leave, waits until their bytes are
written, collects batches and copies them. An *engine* (:func:`open_engine`) joins tiers and pipelines into a cache: it
stores blocks, looks them up in all tiers, loads them, and deletes them. The package ``backends`` has the tiers;
:mod:`offload.from_thread` has the same engine for callers that do not use trio.

The names below are in the order in which a user meets them. Each is imported at its first use, for two reasons: pytest
imports this package in every run of an environment that has it (our pytest plugin is in it), and ``offload --help``
needs none of them.
"""

from typing import TYPE_CHECKING

from maru.base.lazy import lazily

if TYPE_CHECKING:
    from ._keys import block_key as block_key
    from ._keys import prefix_keys as prefix_keys
    from ._keys import BlockKey as BlockKey
    from ._keys import KeyPrefix as KeyPrefix
    from ._pipeline.opening import open_pipeline as open_pipeline
    from ._pipeline.pipeline import Pipeline as Pipeline
    from ._pipeline.statistics import PipelineStatistics as PipelineStatistics
    from ._config import PipelineConfig as PipelineConfig
    from ._config import BatchConfig as BatchConfig
    from ._config import config_from_toml as config_from_toml
    from ._config import knobs as knobs
    from .preconditions import NO_WAIT as NO_WAIT
    from .preconditions import all_of as all_of
    from .preconditions import any_of as any_of
    from backends.abc import TransferExecutor as TransferExecutor
    from ._pipeline.handle import TransferHandle as TransferHandle
    from ._pipeline.cancellation import CancellationToken as CancellationToken
    from ._pipeline.lifecycle import Status as Status
    from ._pipeline.result import TransferResult as TransferResult
    from ._pipeline.result import Progress as Progress
    from .policies import PassAll as PassAll
    from .policies import PresenceFilter as PresenceFilter
    from .policies import FrequencyFilter as FrequencyFilter
    from .policies import PriorityPrefixFilter as PriorityPrefixFilter
    from .policies import AllOf as AllOf
    from .policies import AnyOf as AnyOf
    from .policies import in_thread as in_thread
    from ._engine import open_engine as open_engine
    from ._engine import EngineConfig as EngineConfig
    from ._engine import LoadOrRecompute as LoadOrRecompute
    from ._engine import Route as Route
    from ._engine import Engine as Engine
    from ._engine import Hit as Hit
    from ._engine import LoadResult as LoadResult
    from ._engine import Advice as Advice
    from ._engine import LeftOut as LeftOut
    from ._engine import EngineStatistics as EngineStatistics
    from ._engine import ShadowStatistics as ShadowStatistics
    from ._engine import ChoiceStatistics as ChoiceStatistics
    from ._engine import LoadRate as LoadRate
    from ._engine import ComputeRate as ComputeRate
    from ._engine import LayoutCheck as LayoutCheck
    from ._pipeline.spill import SpillStatistics as SpillStatistics
    from ._engine.explain import Explanation as Explanation
    from ._health.breaker_tier import with_breaker as with_breaker
    from ._health.breaker_tier import BreakerTier as BreakerTier
    from ._health.breaker import Health as Health
    from ._health.breaker import HealthState as HealthState
    from ._config import BreakerConfig as BreakerConfig
    from ._pipeline.priority import LoadPriority as LoadPriority
    from ._pipeline.priority import LoadPriorityStatistics as LoadPriorityStatistics
    from ._pipeline.quarantine import Quarantined as Quarantined
    from ._pipeline.container import OffloadContainer as OffloadContainer
    from ._pipeline.container import OffloadBatch as OffloadBatch
    from ._errors import OffloadError as OffloadError
    from ._errors import ConfigError as ConfigError
    from ._errors import PipelineFull as PipelineFull
    from ._errors import PipelineClosed as PipelineClosed
    from ._errors import PolicyFailed as PolicyFailed
    from ._errors import PreconditionFailed as PreconditionFailed
    from ._errors import DestinationFull as DestinationFull
    from ._errors import TransferFailed as TransferFailed
    from ._errors import TransferCancelled as TransferCancelled
    from ._errors import TierUnavailable as TierUnavailable
    from ._errors import TierTooSlow as TierTooSlow
    from ._errors import TierNotEntered as TierNotEntered
    from ._engine import LoadFailed as LoadFailed
    from ._errors import LayoutCheckFailed as LayoutCheckFailed
    from ._errors import DrainUnproven as DrainUnproven

_HOMES = {
    "block_key": "._keys",
    "prefix_keys": "._keys",
    "BlockKey": "._keys",
    "KeyPrefix": "._keys",
    "open_pipeline": "._pipeline.opening",
    "Pipeline": "._pipeline.pipeline",
    "PipelineStatistics": "._pipeline.statistics",
    "PipelineConfig": "._config",
    "BatchConfig": "._config",
    "config_from_toml": "._config",
    "knobs": "._config",
    "NO_WAIT": ".preconditions",
    "all_of": ".preconditions",
    "any_of": ".preconditions",
    "TransferExecutor": "backends.abc",
    "TransferHandle": "._pipeline.handle",
    "CancellationToken": "._pipeline.cancellation",
    "Status": "._pipeline.lifecycle",
    "TransferResult": "._pipeline.result",
    "Progress": "._pipeline.result",
    "PassAll": ".policies",
    "PresenceFilter": ".policies",
    "FrequencyFilter": ".policies",
    "PriorityPrefixFilter": ".policies",
    "AllOf": ".policies",
    "AnyOf": ".policies",
    "in_thread": ".policies",
    "open_engine": "._engine",
    "EngineConfig": "._engine",
    "LoadOrRecompute": "._engine",
    "Route": "._engine",
    "Engine": "._engine",
    "Hit": "._engine",
    "LoadResult": "._engine",
    "Advice": "._engine",
    "LeftOut": "._engine",
    "EngineStatistics": "._engine",
    "ShadowStatistics": "._engine",
    "ChoiceStatistics": "._engine",
    "LoadRate": "._engine",
    "ComputeRate": "._engine",
    "LayoutCheck": "._engine",
    "SpillStatistics": "._pipeline.spill",
    "Explanation": "._engine.explain",
    "with_breaker": "._health.breaker_tier",
    "BreakerTier": "._health.breaker_tier",
    "Health": "._health.breaker",
    "HealthState": "._health.breaker",
    "BreakerConfig": "._config",
    "LoadPriority": "._pipeline.priority",
    "LoadPriorityStatistics": "._pipeline.priority",
    "Quarantined": "._pipeline.quarantine",
    "OffloadContainer": "._pipeline.container",
    "OffloadBatch": "._pipeline.container",
    "OffloadError": "._errors",
    "ConfigError": "._errors",
    "PipelineFull": "._errors",
    "PipelineClosed": "._errors",
    "PolicyFailed": "._errors",
    "PreconditionFailed": "._errors",
    "DestinationFull": "._errors",
    "TransferFailed": "._errors",
    "TransferCancelled": "._errors",
    "TierUnavailable": "._errors",
    "TierTooSlow": "._errors",
    "TierNotEntered": "._errors",
    "LoadFailed": "._engine",
    "LayoutCheckFailed": "._errors",
    "DrainUnproven": "._errors",
}

lazily(__name__, _HOMES)
