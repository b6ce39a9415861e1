"""The instruments of a daemon's pipelines.

There are stage times, a flight recorder, and instruments from the settings. Only a daemon that has them imports them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .._errors import ConfigError
from ._config import DaemonConfig


@contextmanager
def open_instruments(config: DaemonConfig) -> Iterator[list[object]]:
    """Open the instruments that the settings ask for.

    The flight recorder is closed when the block is left; its file stays.

    Raises:
        offload.ConfigError: a name in ``instruments`` is none.
        offload.recorder.RecorderBusy: another process records into the file.
        OSError: the file of the recorder cannot be made, or the disk has no room for it.
    """
    named = [make_instrument(name) for name in config.instruments]
    if not config.flight_recorder:
        yield named
        return
    from ..recorder import FlightRecorder

    with FlightRecorder(config.flight_recorder, ring_bytes=config.flight_recorder_bytes) as recorder:
        yield [*named, recorder]


def make_instrument(name: str) -> Any:
    """Make an instrument by calling ``module:attribute`` without arguments.

    Raises:
        offload.ConfigError: there is no such name, or it cannot be called so.
    """
    from backends.plugins.finding import find_module, find_name

    module, _, attribute = name.partition(":")
    try:
        return find_name(find_module(module), attribute, "an instrument")()
    except Exception as error:  # from foreign code
        raise ConfigError("daemon.instruments", name, f"does not make an instrument: {error}") from error
