"""Runs in virtual time that go the same way every time: see :mod:`offload.testing.scenarios._clock`."""

from offload.testing.scenarios._clock import ALL as ALL
from offload.testing.scenarios._clock import deterministic as deterministic
from offload.testing.scenarios._clock import run as run
