"""SpanInstrument: spans of OpenTelemetry for containers and loads.

The span of a container has its stages as spans inside; each load of an engine has a span. Needs the extra ``otel``.

Rule 1. A span begins with the enqueue and ends when the container has settled. It is no child of the request that
        stored it, which does not wait for it; it has a link to that request's span, if there was a current one.
Rule 2. The stages are made when it has settled, from the recorded times, so that a container costs two calls of the
        tracer while it matters. A span that the sampler has left out costs neither times nor stages.
Rule 3. A load is a child of the request's span, which waits for it. If it was given up (``load_or_recompute``), an
        event has the place and the reason. Blocks left out by a lookup are such an event of the request's span itself.
Rule 4. Attributes are numbers and names; of an error only its class, since its text may have keys in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from time import time_ns
from typing import TYPE_CHECKING, Final

try:
    from opentelemetry.trace import (
        INVALID_SPAN,
        Link,
        Span,
        SpanKind,
        Status,
        StatusCode,
        Tracer,
        TracerProvider,
        get_current_span,
        get_tracer,
        set_span_in_context,
    )
except ImportError:  # pragma: no cover: the tests' environment has it
    raise ImportError("offload.opentelemetry needs opentelemetry-api: pip install 'trio-offload[otel]'") from None

from backends.abc import TransferExecutor

from .._pipeline.container import OffloadContainer
from .._pipeline.pipeline import Pipeline
from .stories import Mark, Stories, counts_of

if TYPE_CHECKING:
    from backends.abc import Key, TransferExecutor

    from .._engine import Engine, Hit, LeftOut, LoadResult

PREFIX: Final = "kv_offload"
"""Prefix of the name of each attribute."""
NAME: Final = "offload.store"
"""Name of the span of a container."""
LOAD: Final = "offload.load"
"""Name of the span of a load."""
LEFT: Final = "blocks left to be computed"
"""Name of the event of an abandoned load, or of a lookup."""


class SpanInstrument:
    """Makes a span for each container, and for each load.

    The containers are those of pipelines and engines. Give it as one of the ``instruments``.

    Args:
        tracer_provider: where spans are made; by default the one that the process has set.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        self._tracer = get_tracer("offload", tracer_provider=tracer_provider)

    def watch(self, opened: Pipeline | Engine) -> None:
        """Observe a pipeline, or an engine with its pipelines.

        Done by giving this as an instrument.
        """
        for pipeline in [opened] if isinstance(opened, Pipeline) else opened.pipelines:
            pipeline.add_instrument(_PipelineSpans(self._tracer, pipeline))
        if not isinstance(opened, Pipeline):
            opened.add_instrument(_EngineSpans(self._tracer))


class _PipelineSpans(Stories[Span]):
    """The hooks of one pipeline."""

    def __init__(self, tracer: Tracer, pipeline: Pipeline) -> None:
        super().__init__(time_ns)
        self._tracer = tracer
        self._attributes = {
            f"{PREFIX}.pipeline": pipeline.name,
            f"{PREFIX}.source": _name_of(pipeline.source, "device"),
            f"{PREFIX}.destination": _name_of(pipeline.destination, pipeline.name),
        }

    def begin(self, container: OffloadContainer, now: float) -> Span | None:
        request = get_current_span().get_span_context()
        span = self._tracer.start_span(
            NAME,
            context=set_span_in_context(INVALID_SPAN),
            kind=SpanKind.INTERNAL,
            links=[Link(request)] if request.is_valid else (),
            start_time=int(now),
        )
        if span.is_recording():
            return span
        span.end()
        return None

    def cancel_requested(self, container: OffloadContainer) -> None:
        inside = self.inside.get(container)
        if inside is not None:
            inside[0].add_event("cancel requested")

    def end(self, container: OffloadContainer, kept: Span, marks: Sequence[Mark]) -> None:
        within = set_span_in_context(kept)
        for (stage, began), (_, ended) in pairwise(marks):
            self._tracer.start_span(stage, context=within, start_time=int(began)).end(int(ended))
        counts = counts_of(container)
        kept.set_attributes(
            {
                **self._attributes,
                f"{PREFIX}.container": container.number,
                f"{PREFIX}.status": container.status.value,
                f"{PREFIX}.blocks": counts.pop("blocks"),
                **{f"{PREFIX}.blocks.{end}": n for end, n in counts.items()},
            }
        )
        if container.error is not None or container.failed:
            error = container.error or next(iter(container.failed.values()))
            kept.set_attribute("error.type", type(error).__name__)
            kept.set_status(Status(StatusCode.ERROR, type(error).__name__))
        kept.end(int(marks[-1][1]))


class _EngineSpans:
    """The hooks of one engine."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def looked_up(self, keys: Sequence[Key], hit: Hit) -> None:
        if hit.left_out is not None:
            get_current_span().add_event(LEFT, _told(hit.left_out))

    def loaded(self, hit: Hit, result: LoadResult, seconds: float) -> None:
        now = time_ns()
        span = self._tracer.start_span(LOAD, kind=SpanKind.INTERNAL, start_time=now - int(seconds * 1e9))
        span.set_attributes({f"{PREFIX}.blocks": len(hit.keys), f"{PREFIX}.blocks.loaded": result.loaded})
        span.set_attribute(f"{PREFIX}.tiers", [name for name, _ in hit.runs])
        if result.left_out is not None:
            span.add_event(LEFT, _told(result.left_out), now)
        span.end(now)


def _told(left: LeftOut) -> dict[str, str | int | float]:
    """Return the reason why blocks were left to be computed, as attributes.

    An unknown estimate is left out.
    """
    attributes: dict[str, str | int | float] = {
        f"{PREFIX}.why": left.why,
        f"{PREFIX}.tier": left.tier,
        f"{PREFIX}.start": left.start,
        f"{PREFIX}.blocks": left.blocks,
        f"{PREFIX}.recompute_seconds": left.recompute_seconds,
    }
    if left.load_seconds is not None:
        attributes[f"{PREFIX}.load_seconds"] = left.load_seconds
    return attributes


def _name_of(place: object, usual: str) -> str:
    return (place.name if isinstance(place, TransferExecutor) else "") or usual
