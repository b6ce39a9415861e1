"""Spans of OpenTelemetry for stores and loads.

Needs the extra ``otel``; nothing else of the package imports this module.
"""

from ._tracing.spans import SpanInstrument as SpanInstrument
