"""Caches of ours beside other projects' stores, each driven alike: see docs/how-to/compare-with-others.md. Not shipped.

setting    what is asked of a store: bytes, blocks, requests; what opens one
subjects   the table of stores, and the environment that each needs
ours, redis_store, mooncake_store, lmcache_store, lmcache_tasks, published_store    how each is opened
measure    drives one store and the floor in turn, in a process of its own, and writes JSON
report     a table and a picture of what was written
"""
