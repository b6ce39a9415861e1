"""Spans of live pipelines and engines for OpenTelemetry."""

from ._tracing.spans import SpanInstrument as SpanInstrument
