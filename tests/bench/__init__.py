"""Benches for developers: what parts of the packages cost, each figure beside its limit."""
