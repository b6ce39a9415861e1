"""Traces of live pipelines for Perfetto and OpenTelemetry.

Both derive from ``stories``. ``perfetto`` writes files, ``spans`` makes spans.
"""
