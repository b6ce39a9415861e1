"""Modules that the three packages share. Not for users: names may change."""
