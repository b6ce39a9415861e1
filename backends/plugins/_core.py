"""What storing, reading and deleting share: the line, the books, the memory, and what is hidden."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from ..abc import Key
from ._correlation import Kind, Operation
from ._hidden import Hidden
from ._ledger import Ledger
from ._line import Line
from ._staging import Staging


@attrs.define(eq=False)
class Core:
    """The inside of one host."""

    name: str
    """For errors."""
    block_bytes: int
    """Size of every block."""
    checksums: bool
    """Whether blocks are summed and verified."""
    line: Line
    """To the plugin."""
    books: Ledger
    """What was stored through it."""
    staging: Staging
    """What it reads from and writes into."""
    hidden: Hidden = attrs.field(factory=Hidden)
    """What is not to be found."""

    async def find(self, keys: Sequence[Key]) -> list[bool]:
        """Which of these the plugin has, hidden or not. It may have locked them: the caller unlocks.

        Cancelled, or without an answer, they are unlocked when the answer comes.
        """
        return await self.line.ask(Kind.FIND, keys, undo=self.unlock_found)

    async def present(self, keys: Sequence[Key]) -> list[bool]:
        """The same, and nothing stays locked; the books forget what the plugin does not have."""
        bits = await self.find(keys)
        self.line.unlock([key for key, bit in zip(keys, bits, strict=True) if bit])
        self.books.gone(key for key, bit in zip(keys, bits, strict=True) if not bit)
        return bits

    def unlock_found(self, operation: Operation) -> None:
        """Nobody wants what was found."""
        self.line.unlock([key for key, bit in zip(operation.keys, operation.bits or (), strict=False) if bit])
