"""The knobs of a pipeline as a scenario names them, and the configuration they make. Pure.

A field of :class:`PipelineSpec` is called what the knob is called, but for times: there the last word of the knob is ``ms``
(``flush_ms`` is ``flush_interval``, ``transfer_ms`` is ``transfer_timeout``).

Rule 1. What is not said is the knob's own default, rounded to whole virtual milliseconds.
Rule 2. Of what is not said, ``max_batch_size`` adapts to the budget and ``min_batch_size`` to ``max_batch_size``: a scenario
        that makes one small need not speak of the other. And the safety net (``sweep_ms``) is a minute away, so that it hides
        nothing: what it would have to find is an error here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from offload._config import BatchConfig, PipelineConfig

from .._program import TICK, PipelineSpec

SWEEP: Final = 60.0


def _is_time(attribute: attrs.Attribute[Any]) -> bool:
    return isinstance(attribute.default, float)


def _fields(cls: type[attrs.AttrsInstance]) -> dict[str, str]:
    """The knobs of a class, each with the field that sets it."""
    return {
        one.name: f"{one.name.rpartition('_')[0]}_ms" if _is_time(one) else one.name
        for one in attrs.fields(cls)
        if not attrs.has(type(one.default))
    }


_BATCH: Final = _fields(BatchConfig)
_PIPELINE: Final = _fields(PipelineConfig)

FIELD_OF: Final[Mapping[str, str]] = {**_BATCH, **_PIPELINE}
"""The field of :class:`PipelineSpec` for each knob of ``PipelineConfig`` and of the ``BatchConfig`` in it."""


def config_of(spec: PipelineSpec) -> PipelineConfig:
    """The configuration that a scenario asks for.

    Raises:
        ConfigError: a knob is out of its bounds. Its ``knob`` is the knob's own name: see :data:`FIELD_OF`.
    """
    batch, rest = _said(BatchConfig, _BATCH, spec), _said(PipelineConfig, _PIPELINE, spec)
    rest.setdefault("sweep_interval", SWEEP)
    usual = BatchConfig()
    batch.setdefault("max_batch_size", max(1, min(usual.max_batch_size, rest.get("budget_blocks", 1 << 30))))
    batch.setdefault("min_batch_size", max(1, min(usual.min_batch_size, batch["max_batch_size"])))
    return PipelineConfig(batch_config=BatchConfig(**batch), **rest)


def _said(cls: type[attrs.AttrsInstance], names: Mapping[str, str], spec: PipelineSpec) -> dict[str, Any]:
    """What the spec says of the knobs of this class, and the rounded defaults of its times."""
    knobs: dict[str, Any] = {}
    for one in attrs.fields(cls):
        if one.name not in names:
            continue
        said = getattr(spec, names[one.name])
        if said is not None:
            knobs[one.name] = said * TICK if _is_time(one) else said
        elif _is_time(one) and one.name != "sweep_interval":
            knobs[one.name] = round(one.default / TICK) * TICK
    return knobs
