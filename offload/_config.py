"""The settings of a pipeline and a breaker, with defaults and bounds.

The reason for each default and bound is next to it. Pure, except for reading a file. The rules:

Rule 1. A setting is checked when its class is made, wherever the value came from: a configuration that exists is valid.
Rule 2. An error is a :class:`~offload._errors.ConfigError`: it names the setting, the value, the bound, and where it
        was set.
Rule 3. An unknown name is an error that names the nearest known one. Nothing is ignored.

In a file, a pipeline is one table (``[pipeline]``), and nested classes are nested tables. The environment takes
precedence. A variable's name is ``OFFLOAD_`` and the same path in capitals, with two underscores for each dot::

    [pipeline]                                    OFFLOAD_PIPELINE__POLICY_TIMEOUT=0.5
    policy_timeout = 0.1

    [pipeline.batch_config]                       OFFLOAD_PIPELINE__BATCH_CONFIG__MAX_BATCH_SIZE=128
    max_batch_size = 64

The table of settings in the documentation and the help texts of the command line are made from :func:`knobs`.
"""

# ruff: noqa: RUF009  # the functions called in the class bodies make fields
from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any, Final, Literal, TypeAlias, TypeVar

import attrs

from backends.abc import WhenFull
from maru.configuration import Knob as Knob
from maru.configuration import Knobs

from ._errors import ConfigError

OnPolicyError: TypeAlias = Literal["filter", "fail"]
OnOverflow: TypeAlias = Literal["wait", "drop"]

C = TypeVar("C", bound=attrs.AttrsInstance)

_DAY = 86_400.0
_MOST_BLOCKS = 1 << 24
_BYTES_PER_SECOND: Final = 50_000_000
"""Half the copy rate of a hard disk."""

_knob: Final = Knobs("OFFLOAD", ConfigError)


# --- the knobs ----------------------------------------------------------------------------------------------------


@_knob.checks_names
@attrs.frozen
class BatchConfig:
    """The sizes and the time at which a batch is copied.

    :func:`knobs` has the reason for each bound and default.
    """

    max_batch_size: int = _knob.integer(
        64,
        1,
        65_536,
        "Maximum blocks in a batch: enough to pay for one copy call, few enough that a cancel rarely comes too late.",
    )
    min_batch_size: int = _knob.integer(
        8, 1, 65_536, "Minimum blocks in a batch; with fewer the batch waits for more. At most max_batch_size."
    )
    flush_interval: float = _knob.seconds(
        0.01,
        0.0,
        60.0,
        "Time that a batch with fewer blocks waits for more. 0: leave once a slot is free. Timers below 1 ms are not "
        "exact.",
    )

    def __attrs_post_init__(self) -> None:
        if self.min_batch_size > self.max_batch_size:
            raise ConfigError(
                "min_batch_size", self.min_batch_size, f"must be at most max_batch_size, {self.max_batch_size}"
            )


@_knob.checks_names
@attrs.frozen
class PipelineConfig:
    """The settings of a pipeline.

    :func:`knobs` has the reason for each bound and default.
    """

    batch_config: BatchConfig = _knob.table(BatchConfig(), "Settings of batching.")
    policy_timeout: float = _knob.seconds(
        0.1,
        0.001,
        3_600.0,
        "Time for the async policies of one container; a plain policy that blocks the loop for longer is counted.",
    )
    on_policy_error: OnPolicyError = _knob.choice(
        "filter",
        OnPolicyError,
        "Outcome of a container whose policy raises or overruns: its blocks are filtered, or it fails.",
    )
    max_waiting_policies: int = _knob.integer(
        64, 1, 4_096, "Containers whose policies wait at once, so that a slow policy delays no other; each is a task."
    )
    precondition_timeout: float = _knob.seconds(
        300.0, 0.001, _DAY, "Longest forward pass. Finite, since a waiting container holds blocks."
    )
    sweep_interval: float = _knob.seconds(
        0.01,
        0.001,
        60.0,
        "Time between searches for cancelled containers, a safety net. It counts found ones, of which there should be "
        "none.",
    )
    max_concurrent_transfers: int = _knob.integer(
        1, 1, 64, "Batches copied at once. Each takes a thread; two nearly fill a memory bus."
    )
    on_destination_full: WhenFull = _knob.choice(
        "wait", WhenFull, "Action if the destination is full: wait for room, evict, store the blocks that fit, or fail."
    )
    destination_timeout: float = _knob.seconds(
        30.0, 0.001, _DAY, "Time to wait for room in the destination. A waiting reservation holds only a transfer slot."
    )
    transfer_timeout: float = _knob.seconds(
        5.0,
        0.001,
        _DAY,
        "Time for a copy, in addition to the time for its bytes. After that its end counts as unproven, its blocks "
        "are quarantined, and its tier has a fault.",
    )
    transfer_bytes_per_second: int = _knob.size(
        _BYTES_PER_SECOND,
        0,
        1 << 50,
        "Bytes of a copy that add one second to transfer_timeout: half the speed of a hard disk. 0: no added time.",
    )
    drain_timeout: float = _knob.seconds(
        10.0,
        0.0,
        _DAY,
        "Time that shutdown waits for copies in progress. If it is shorter than transfer_timeout, it takes precedence.",
    )
    budget_blocks: int = _knob.integer(
        4_096,
        1,
        _MOST_BLOCKS,
        "Maximum blocks between enqueue and settled, which bounds all inner queues. At least max_batch_size.",
    )
    on_overflow: OnOverflow = _knob.choice(
        "wait", OnOverflow, "Action of enqueue if the budget is used up: wait, or drop new weak stores and count them."
    )

    route_share: float = _knob.fraction(
        0.5,
        0.001,
        1.0,
        "Share of its starting tier that a route may hold, if it is not required: a slow or broken tier leaves the "
        "rest to new blocks. For a route that stores evicted blocks: the share in copies that hang or are quarantined.",
    )
    route_patience: float = _knob.seconds(
        1.0,
        0.0,
        3_600.0,
        "Time that a block waits for room in that share, if the route is not required, before it is dropped and "
        "counted. It is not held meanwhile.",
    )

    def __attrs_post_init__(self) -> None:
        if self.batch_config.max_batch_size > self.budget_blocks:
            raise ConfigError(
                "batch_config.max_batch_size",
                self.batch_config.max_batch_size,
                f"must be at most budget_blocks, {self.budget_blocks}: such a batch could never fill",
            )

    def time_to_copy(self, copied_bytes: int) -> float:
        """Return the time limit of a copy, in seconds."""
        each = self.transfer_bytes_per_second
        return self.transfer_timeout + (copied_bytes // each if each else 0)


@_knob.checks_names
@attrs.frozen
class BreakerConfig:
    """The conditions under which a tier counts as broken and is retried.

    :func:`knobs` has the reason for each bound and default.
    """

    max_faults: int = _knob.integer(
        3, 1, 1_000, "Consecutive faults that break a tier. One is bad luck; each may cost a caller a timeout."
    )
    first_wait: float = _knob.seconds(
        1.0, 0.001, _DAY, "Time without calls to a tier that has just broken. It doubles with each failed probe."
    )
    longest_wait: float = _knob.seconds(
        30.0, 0.001, _DAY, "Longest time without calls to a broken tier, and for a probe. At least first_wait."
    )
    call_timeout: float = _knob.timeout(
        5.0,
        0.001,
        _DAY,
        "Time for a tier's answer (contains, pin, delete, room), after which it has a fault; longer than its own "
        "timeouts, so that its own error is seen. inf: the tier's own limit.",
    )
    load_timeout: float = _knob.timeout(
        60.0,
        0.001,
        _DAY,
        "Time for loading the blocks of a segment, in addition to a second for each 50 MB. inf: as in call_timeout.",
    )
    enter_timeout: float = _knob.timeout(
        30.0,
        0.001,
        _DAY,
        "Time for one attempt to enter a tier whose on_enter_failure is miss: to connect, and to map its memory. inf: "
        "as in call_timeout.",
    )

    def __attrs_post_init__(self) -> None:
        if self.first_wait > self.longest_wait:
            raise ConfigError("first_wait", self.first_wait, f"must be at most longest_wait, {self.longest_wait}")

    def time_to_load(self, copied_bytes: int) -> float:
        """Return the time limit of a load, in seconds."""
        return self.load_timeout + copied_bytes // _BYTES_PER_SECOND


def knobs(cls: type[attrs.AttrsInstance] = PipelineConfig, *, section: str = "pipeline") -> tuple[Knob, ...]:
    """Return every setting of a configuration class, in order of declaration.

    The settings of the classes nested in it are included.
    """
    return tuple(_knob.of(cls, section))


def from_mapping(mapping: Mapping[str, Any], cls: type[C] = PipelineConfig, *, section: str = "") -> C:  # type: ignore[assignment]
    """Load a configuration from nested mappings, as a TOML parser returns them.

    Missing names keep their defaults.

    Args:
        mapping: the settings by name.
        cls: the configuration class.
        section: the path of this mapping in its file, put before names in errors.

    Raises:
        ConfigError: an unknown name, or a value out of its bound.
    """
    return _knob.from_mapping(mapping, cls, section=section)


def config_from_toml(
    source: str | os.PathLike[str],
    *,
    section: str = "pipeline",
    others: Collection[str] = (),
    environ: Mapping[str, str] | None = None,
) -> PipelineConfig:
    """Load a configuration from a TOML file and the environment.

    The environment takes precedence.

    Args:
        source: a path (``pathlib.Path``), or TOML as a text.
        section: the table to read; may be missing.
        others: tables of the file that are allowed and not read here. Any other table is an error.
        environ: the environment; by default that of this process.

    Raises:
        ConfigError: not TOML, an unknown name, or a value out of its bound; with file and line, or the variable.
        OSError: the file cannot be read.
    """
    return _knob.load(PipelineConfig, source, section=section, others=others, environ=environ)
