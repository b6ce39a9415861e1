"""Scenarios that nobody wrote: drawn from a seed, unrolled from a load, recorded from a replay."""
