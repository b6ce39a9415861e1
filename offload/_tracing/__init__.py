"""Traces of live pipelines: for Perfetto (``perfetto``), and as spans of OpenTelemetry (``spans``)."""
