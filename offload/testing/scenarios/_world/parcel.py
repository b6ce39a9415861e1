"""One container as those see it who store it: what was asked, what came of it so far, and who waits for it."""

from __future__ import annotations

from typing import Any

import trio

from backends.abc import Key
from offload.abc import Precondition

from .._contract import Outcome, Ticket
from .._program import StoreStep


class Parcel:
    """One container, as those see it who store it."""

    __slots__ = (
        "after", "asked_at", "cancelled", "ended_at", "in_time", "keys", "label", "outcome", "pipeline", "result", "state",
        "store", "storing", "ticket", "waiting",
    )  # fmt: skip

    def __init__(self, label: str, keys: tuple[Key, ...], store: StoreStep, pipeline: str) -> None:
        self.label: str = label
        self.keys: tuple[Key, ...] = keys
        self.store: StoreStep = store
        self.pipeline: str = pipeline
        self.after: Precondition | None = None
        """What it waits for, as our own pipelines have it."""
        self.state: str = ""
        """``asked``, then ``taken``, ``refused`` or ``abandoned``."""
        self.asked_at: float = 0.0
        self.storing: trio.CancelScope | None = None
        """What it waits in to be taken in, while it does."""
        self.ticket: Ticket | None = None
        self.waiting: list[trio.CancelScope] = []
        """Those who wait for its result or for the confirmation of its cancel."""
        self.result: Any = None
        """What the ticket showed first."""
        self.outcome: Outcome | None = None
        self.ended_at: float = 0.0
        self.cancelled: bool = False
        """Its cancel was asked for."""
        self.in_time: bool = False
        """It was, and came before the commit and before any other end."""

    @property
    def alive(self) -> bool:
        """Whether it was taken in and has not ended."""
        return self.ticket is not None and self.ticket.result is None
