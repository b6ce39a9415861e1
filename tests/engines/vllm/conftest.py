"""A checkpoint, and a page store. Where vLLM is not installed, the tests here are not collected."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .instances import PYTHON, Server, run

collect_ignore_glob = [] if PYTHON else ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with random weights."""
    path = str(tmp_path_factory.mktemp("model") / "llama")
    run({"checkpoint": path})
    return path


@pytest.fixture
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="maru") as directory:  # a socket's name is short
        served = Server(Path(directory) / "pool")
        yield served
        served.kill()


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with two groups of KV caches."""
    path = str(tmp_path_factory.mktemp("model") / "gemma")
    run({"checkpoint": path, "hybrid": True})
    return path
