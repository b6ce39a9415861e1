"""Traces of live pipelines for Perfetto and OpenTelemetry.

``perfetto`` writes files, ``spans`` makes spans.
"""
