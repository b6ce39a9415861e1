"""The shared page store: the ground floor of the house.

`maru` is usable alone: nothing in it knows `backends` or `offload`. What is here so far is `maru.eviction`, the one
room where it is decided which block goes when a place is full.
"""
