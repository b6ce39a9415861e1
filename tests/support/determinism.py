"""Runs in virtual time that go the same way every time: see :mod:`offload.testing.scenarios._determinism`."""

from offload.testing.scenarios._determinism import ALL as ALL
from offload.testing.scenarios._determinism import deterministic as deterministic
from offload.testing.scenarios._determinism import run as run
