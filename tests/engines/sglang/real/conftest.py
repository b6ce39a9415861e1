"""Tests that run SGLang itself: `nox -s sglang` makes an environment for them. Elsewhere there is nothing to collect."""

from tests.engines.sglang import INSTALLED

collect_ignore_glob = [] if INSTALLED else ["test_*.py"]
