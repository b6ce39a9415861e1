"""Events of a device, for copies that come behind its work."""

from __future__ import annotations

from typing import Any

import torch


class Capturing(RuntimeError):
    """Nothing can be stored or loaded while a graph is captured."""


def record_event() -> Any:
    """Record an event behind the work of this thread's stream.

    Raises:
        Capturing: the stream records its work into a graph. A copy that waits for the event would become a part of it, and
            not be made.
    """
    if torch.cuda.is_current_stream_capturing():
        raise Capturing("vLLM's stream captures a graph: nothing is stored or loaded meanwhile")
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
    event.record()
    return event
