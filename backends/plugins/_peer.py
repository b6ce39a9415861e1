"""What a host needs of a plugin, whatever its contract: to ask, to hear, to let go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ..abc import Capabilities, Key
from ._correlation import Completion, Kind


class Peer(Protocol):
    """A plugin behind its contract.

    Everything here is called on the trio thread, except :meth:`close` and :meth:`delete`, and :meth:`submit` where a host
    is told to submit in a thread.
    """

    @property
    def name(self) -> str:
        """For errors."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        ...

    @property
    def deletes_by_call(self) -> bool:
        """Whether it deletes by :meth:`delete`, and not by an operation."""
        ...

    @property
    def resets(self) -> bool:
        """Whether :meth:`hear` resets its descriptor. Otherwise it is reset before that is called."""
        ...

    def channels(self) -> Mapping[str, int]:
        """The descriptor that says when there is something to hear, for each channel.

        Raises:
            PluginTypeError: they make no sense.
        """
        ...

    def channel_of(self, kind: Kind) -> str:
        """Where the answer to such a question will be heard."""
        ...

    def submit(self, kind: Kind, keys: Sequence[Key], buffers: Sequence[memoryview]) -> object:
        """Ask, without waiting. ``buffers`` are for ``GET`` and ``SET``, one for each key. Returns the id, if it is one.

        One that raises has started nothing.
        """
        ...

    def hear(self, channel: str, outstanding: Sequence[int], heard: list[Completion]) -> None:
        """Append to ``heard`` what is to be heard, without waiting; also before an exception.

        Args:
            channel: where to listen.
            outstanding: ids that no completion was heard of.
            heard: to append to.
        """
        ...

    def unlock(self, keys: Sequence[Key]) -> None:
        """Let go of keys that were found. Never blocks."""
        ...

    def delete(self, keys: Sequence[Key]) -> None:
        """For a peer that deletes by a call instead of an operation. In a thread; returns when it is done."""
        ...

    def close(self) -> None:
        """End it. In a thread; returns when it is done."""
        ...
