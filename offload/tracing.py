"""Traces of live pipelines and engines, for ui.perfetto.dev. Spans of OpenTelemetry: :mod:`offload.opentelemetry`."""

from ._tracing.perfetto import PerfettoTrace as PerfettoTrace
