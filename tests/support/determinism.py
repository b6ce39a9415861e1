"""Runs in virtual time that go the same way every time: see :mod:`offload.testing.scenarios._clock`."""

from offload.testing.scenarios import deterministic as deterministic
from offload.testing.scenarios import run as run
from offload.testing.scenarios._clock import ALL as ALL
