"""Scenarios as files: read, checked, written, described."""
