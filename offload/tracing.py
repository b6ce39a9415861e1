"""Traces of live pipelines and engines, for ui.perfetto.dev.

:mod:`offload.opentelemetry` has spans for OpenTelemetry.
"""

from ._tracing.perfetto import PerfettoTrace as PerfettoTrace
