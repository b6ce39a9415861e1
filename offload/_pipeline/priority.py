"""Loads go before stores: what a load tells, and how the slots of pipelines wait for it.

:mod:`offload._pipeline.right_of_way` decides.

One :class:`Precedence` is shared by all pipelines of an engine. A load says ``with precedence.loading():`` and waits for
nobody. A slot asks before it takes a batch, so that what stands back stays parked, can be cancelled, and grows into a fuller
batch. Where room was long in coming it asks again: loads may have begun meanwhile.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

import attrs
import trio

from .channel import BatchReceiver
from .container import Holder, OffloadBatch, OffloadContainer
from .right_of_way import RightOfWay, Store


@attrs.frozen
class PrecedenceStatistics:
    """A snapshot. Counters count from the start."""

    loads: int
    """Loads under way."""
    standing_back: int
    """Stores that wait for them."""
    stood_back: int
    """Stores that ever did."""
    let_go: int
    """Those of them that went before loads that were under way, since they had stood back for long enough."""


class Turn:
    """A store's leave to copy. Made by :meth:`Precedence.may_copy`."""

    __slots__ = ("_precedence", "_store")

    def __init__(self, precedence: Precedence, store: Store) -> None:
        self._precedence = precedence
        self._store = store

    def over(self) -> None:
        """Its copy is over. Idempotent; whoever has a turn must say so, since the next one may wait for it."""
        self._precedence._over(self._store)


class Precedence:
    """Loads before stores, for everything that copies between the same places.

    Args:
        patience: how long a store stands back for loads before it goes all the same, in seconds.

    Raises:
        ValueError: ``patience`` is negative, or no number.
    """

    def __init__(self, *, patience: float = 1.0) -> None:
        if not patience >= 0:
            raise ValueError(f"patience = {patience!r}: must be seconds from 0")
        self._way = RightOfWay(patience)
        self._loading = _Loading(self)
        self._news: dict[Store, trio.Event] = {}
        self._stood_back = self._let_go = 0

    def __repr__(self) -> str:
        return f"<Precedence: {self._way.loads} loads, {len(self._way.line)} stores stand back>"

    @property
    def is_clear(self) -> bool:
        """Whether no load is under way: a store may start now."""
        return not self._way.loads

    def loading(self) -> AbstractContextManager[None]:
        """A load is under way for as long as the ``with`` block lasts. Any number at a time. Never waits."""
        return self._loading

    async def may_copy(self) -> Turn:
        """Wait until a store may start to copy: no load is under way, or it has stood back for long enough.

        Always a checkpoint. Cancelled, it has left the line. Whoever gets the turn calls :meth:`Turn.over` when it is over.
        """
        await trio.lowlevel.checkpoint()
        way, store = self._way, Store(trio.current_time())
        if way.may_go(store, store.since):
            return Turn(self, store)
        way.join(store)
        self._stood_back += 1
        try:
            while not way.may_go(store, trio.current_time()):
                news = self._news[store] = trio.Event()
                at = way.looks_again(store)
                with trio.CancelScope(deadline=math.inf if at is None else at):
                    await news.wait()
        finally:
            self._news.pop(store, None)
            way.leave(store)
            self._tell_first()
        self._let_go += way.exception is store
        return Turn(self, store)

    def statistics(self) -> PrecedenceStatistics:
        """An immutable snapshot."""
        way = self._way
        return PrecedenceStatistics(way.loads, len(way.line), self._stood_back, self._let_go)

    def _begin(self) -> None:
        self._way.loads += 1

    def _end(self) -> None:
        self._way.loads -= 1
        if not self._way.loads:
            for news in self._news.values():
                news.set()

    def _over(self, store: Store) -> None:
        if self._way.exception is store:
            self._way.over(store)
            self._tell_first()

    def _tell_first(self) -> None:
        """Somebody else may be the first in line now, or the one exception is over: it decides anew."""
        first = self._way.first
        if first is not None:
            self._news[first].set()


class _Loading:
    """What every load enters."""

    __slots__ = ("_precedence",)

    def __init__(self, precedence: Precedence) -> None:
        self._precedence = precedence

    def __enter__(self) -> None:
        self._precedence._begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._precedence._end()


class _Ready(BatchReceiver, Protocol):
    async def wait_due(self) -> None: ...


@attrs.define(eq=False)
class Deference:
    """How the slots of one pipeline stand back: what stands between batching and transfer where there is a precedence."""

    precedence: Precedence
    ready: _Ready
    """Batching's receiving end."""
    _turns: dict[Holder, Turn] = attrs.Factory(dict)
    """Slots whose batch has a turn."""
    _hurried: bool = False

    async def receive(self, owner: Holder) -> OffloadBatch:
        """Wait until a batch is due and may start, and take it. Cancelled while waiting, it has taken nothing."""
        self.give_up(owner)
        while True:
            await self.ready.wait_due()
            if not self._goes_first():
                # Stand back without a batch in hand: what is parked can be cancelled, and has time to become more.
                self._turns[owner] = await self.precedence.may_copy()
            batch = self.ready.receive_nowait(owner)
            if batch is not None:
                return batch
            self.give_up(owner)

    def receive_nowait(self, owner: Holder) -> OffloadBatch | None:
        """Take a batch if one is due and may start."""
        self.give_up(owner)
        return self.ready.receive_nowait(owner) if self._goes_first() else None

    def put_back(self, container: OffloadContainer) -> None:
        """Take a container back as the first of the next batch."""
        self.ready.put_back(container)

    async def stand_back(self, owner: Holder) -> None:
        """Wait until the batch in hand may start. No checkpoint where it may at once."""
        if not self._goes_first():
            self._turns[owner] = await self.precedence.may_copy()

    def give_up(self, owner: Holder) -> None:
        """The batch of this slot is over, or waits for something else: its turn is somebody else's. Idempotent."""
        if self._turns:
            turn = self._turns.pop(owner, None)
            if turn is not None:
                turn.over()

    def hurry(self) -> None:
        """The pipeline closes: what is committed goes ahead, for its time is short."""
        self._hurried = True

    def close(self) -> None:
        """There are no slots any more."""
        while self._turns:
            self._turns.popitem()[1].over()

    def _goes_first(self) -> bool:
        return self._hurried or self.precedence.is_clear
