"""Tests that run LMCache itself: `nox -s lmcache` makes an environment for them. Elsewhere there is nothing to collect."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("lmcache") else ["test_*.py"]
