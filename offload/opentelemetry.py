"""Spans of OpenTelemetry for what is stored. Needs the extra ``otel``; nothing else of the package imports it."""

from ._tracing.spans import SpanInstrument as SpanInstrument
