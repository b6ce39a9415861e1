"""State of a client: session, lease, regions, pages and pins. Pure.

One object for a handler, used by all of its operations. In the blocking face several threads step operations, one at a
time: between two effects no other thread touches this.

Rule 1. Every reply is *heard* before any operation acts on it: its epoch, the pages it brings back, and the lease's new
        end.
Rule 2. Another epoch, or a server that does not know the session, unsettles the client: the next operation settles it
        first.
Rule 3. The lease counts from when the request that renewed it was sent: on this side it ends first.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import attrs

from ..._config import MaruConfig
from ..._index import IndexReader
from ..._pool.index_files import why_not_here
from ..._wire import KEYS_AT_ONCE, MAX_KEY_BYTES, OWN_CODES, Code, Handle, HandshakeReply, OwnReply, OwnRequest, Returns
from ...base.errors import HandlerClosed, LeaseLost, PoolFull
from ..page_states import PageState
from ..pages import OwnedPages
from .board_pins import BoardCounters, BoardPins
from .effects import Call, Span
from .pin_epochs import PinEpochs
from .pinned import Pin, Pinned

_log = logging.getLogger(__name__)

USED_CODES = frozenset(OWN_CODES) - {Code.DESCRIBE, Code.PINS, Code.LIST_KEYS}
"""Our own codes, all of which a server must list.

PINS and LIST_KEYS came later, and each is used if it is listed.
"""


_PINNING = frozenset((int(Code.FIND), int(Code.UNPIN)))
"""Requests that bear the number of a pin epoch."""


def is_own(reply: HandshakeReply) -> bool:
    """Return whether the server that sent this greeting is one of ours.

    It must list all codes that are used.
    """
    return reply.session is not None and set(reply.codes) >= USED_CODES


StoredPage: TypeAlias = tuple[str, int, int | None, int | None]
"""A page as its STORE named it: key, length, checksum and depth."""


@attrs.define(eq=False)
class Former:
    """A region that was ours until its session was lost.

    Its bytes are still mapped here.
    """

    span: Span
    pages: list[tuple[int, StoredPage]]
    """Offset and stored page of each page that was registered."""


@attrs.frozen
class Shortfall:
    """A region for which the server lacked bytes."""

    wanted_bytes: int
    """Requested bytes: ``pool_size``, ``expand_size``, or more if needed at once."""
    granted_bytes: int
    """Bytes of the region granted instead; 0: none."""
    pool_bytes: int
    """Bytes of the server's pool in all."""
    free_bytes: int
    """Free bytes of the server's pool."""
    reason: str
    """The server's reason for the refusal."""


@attrs.define
class Counters:
    """Counts of events of a client, in all."""

    unanswered: int = 0
    """Calls that timed out or were cut off."""
    restarts: int = 0
    """Number of times that another epoch was met."""
    sessions_lost: int = 0
    """Number of times that the server had lost the session."""
    keys_kept: int = 0
    """Keys of lost regions that were found or registered again."""
    keys_lost: int = 0
    """Keys of lost regions that could not be registered again."""
    views_lost: int = 0
    """Pins lost by a restart or the end of a session."""
    pins_unknown: int = 0
    """Pins that the server held but this client did not know of.

    An answer was lost. They were dropped.
    """
    damaged: int = 0
    """Pages whose bytes were not those that were stored."""
    found_here: int = 0
    """Keys looked up or loaded over the shared index, without a message."""
    changed_in_copy: int = 0
    """Pages that went while they were copied without a pin.

    They were then requested by message, with a pin.
    """
    asked_anyway: int = 0
    """Keys requested by message, since the index could not decide."""


class IndexState:
    """The server's shared index, as far as this client has it."""

    def __init__(self, why_not: str) -> None:
        self.reader: IndexReader | None = None
        self.why_not = why_not
        """Reason why it is not used; empty if it is."""
        self.is_wanted = not why_not
        self.asked_at: tuple[int, float] | None = None
        """Era and time of the last request for it."""
        self.board: BoardPins | None = None
        """Board by which we hold pages in this era."""
        self.counters = BoardCounters()


class ClientState:
    """The state of one client.

    Args:
        config: its settings.
        instance_id: of the owner of its regions.
        clock: monotonic seconds.
    """

    def __init__(self, config: MaruConfig, instance_id: str, clock: Callable[[], float]) -> None:
        self.config = config
        self.instance_id = instance_id
        self.clock = clock
        self.uid = os.geteuid()
        self.salt = salt_of(config.tenant, config.namespace)
        self.is_closed = False
        # the server
        self.is_connected = False
        self.own = False
        self.epoch = 0
        self._left: set[int] = set()  # epochs that are over: a reply of theirs may still come
        self._settled = 0  # the epoch that greeted us last
        self.era = 0
        self.token = b""
        self.lease = math.inf
        self.deadline = -math.inf
        self.max_keys = 1
        self.max_key_bytes = MAX_KEY_BYTES
        self.rm_address = config.rm_address
        self.descriptors = ""
        self.doubt = ""  # why it is unknown whose process the server is
        self.unsettled = True
        # regions
        self.pages = OwnedPages(config.chunk_size_bytes)
        self.spans: dict[int, Span] = {}
        self.handles: dict[int, Handle] = {}  # handles of regions, from a published server
        self.former: list[Former] = []
        self.stored: dict[int, StoredPage] = {}  # by page, as last sent
        self.page_of: dict[str, int] = {}  # key -> page, with a published server, which returns nothing
        self.forgotten: deque[int] = deque()
        """Allocated pages whose handle was forgotten.

        Finalizers append, and the next call frees.
        """
        self.doubtful_alloc = False
        self.shortfall: Shortfall | None = None
        self.on_region_added: Callable[[int], object] | None = None
        # keys
        self.pinned = Pinned()
        self.pin_epochs = PinEpochs()
        self.settles_pins = self.lists_keys = False
        self.beats = 0
        self._attempt = self._request = 0
        self.index = IndexState("index = off" if config.index == "off" else why_not_here())
        self.counters = Counters()
        self.looked_after = 0  # number of unanswered calls at the last check of our regions at a published server
        self.reports: deque[tuple[str, str, int, float]] = deque(maxlen=4_096)

    def __repr__(self) -> str:
        where = "closed" if self.is_closed else "connected" if self.is_connected else "not connected"
        return f"{self.instance_id} at {self.config.server_url}, {where}"

    # --- requests -------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise unless this client may be used."""
        if self.is_closed:
            raise HandlerClosed(f"{self!r}")
        if not self.is_connected:
            raise HandlerClosed(f"{self!r}: call connect first")

    def is_ready(self) -> bool:
        """Return whether it may send requests at once.

        It must be connected and settled, with nothing to release first.
        """
        pinned = self.pinned
        return not (
            self.unsettled
            or self.is_closed
            or pinned.due
            or self.pin_epochs.is_lost
            or pinned.dropped
            or self.forgotten
            or not self.is_connected
            or (not self.own and self.looked_after != self.counters.unanswered)
        )

    def names(self, keys: list[str]) -> list[str]:
        """Return the keys with the salt, as the server knows them.

        Raises:
            TypeError: a key is no text.
        """
        salt = self.salt
        return [salt + key for key in keys]

    def next_attempt(self) -> int:
        """Return the number of a new STORE attempt."""
        self._attempt += 1
        return self._attempt

    def next_request(self) -> int:
        """Return the number of a request that must not be done twice."""
        self._request += 1
        return self._request

    # --- hearing --------------------------------------------------------------------------------------------------

    def heard(self, call: Call, reply: Any, sent_at: float) -> None:
        """Apply a reply to a call that is still waited for.

        ``sent_at`` is the time at which its request was sent.
        """
        epoch = getattr(reply, "epoch", 0)
        if epoch and epoch != self.epoch and (epoch not in self._left or call.code == Code.HANDSHAKE):
            self._meet(epoch)
        if isinstance(reply, OwnReply) and epoch == self.epoch and self._is_of_this_session(call):
            self.deadline = max(self.deadline, sent_at + self.lease)
            if reply.returns is not None:
                self._take_back(reply.returns)

    def gave_up(self, call: Call) -> None:
        """Record that a call was given up which may have left.

        Its answer may come late, or never.
        """
        if self.settles_pins and call.code in _PINNING:
            message: Any = call.message
            if message.session == self.token:
                self.pin_epochs.gave_up(call, message.turn)

    def heard_late(self, call: Call, reply: Any) -> None:
        """Apply a reply to a call that was given up.

        A reply of a server that is gone does not bring back its epoch. It may be the first reply of a server that has
        come up meanwhile: then that knows our session, and the keys it pinned for us are pinned until we give them
        back.
        """
        self.pin_epochs.answered(call)
        if not isinstance(reply, OwnReply):
            return
        if not self._is_of_this_session(call):
            return
        if reply.epoch != self.epoch and reply.epoch not in self._left:
            self._meet(reply.epoch)
        if reply.epoch == self.epoch:
            if reply.returns is not None:
                self._take_back(reply.returns)
            if call.late is not None:
                call.late(reply)

    def _meet(self, epoch: int) -> None:
        """Record that another server answers, or one with another epoch.

        A connected client begins a new era.
        """
        if self.is_connected:
            if epoch in self._left:  # it had not gone: its pins for us are still there
                self._left.discard(epoch)
                self.pin_epochs.is_lost = True
            self._left.add(self.epoch)
            self.counters.restarts += 1
            self._new_era()
        self.epoch = epoch

    def _is_of_this_session(self, call: Call) -> bool:
        """Return whether a call was made in the present session."""
        message = call.message
        return isinstance(message, OwnRequest) and message.session == self.token

    def _take_back(self, returns: Returns) -> None:
        self.pages.returned(returns.first_number, returns.regions, returns.offsets, returns.attempts)

    def shook_hands(self, reply: HandshakeReply, sent_at: float) -> bool:
        """Apply the server's greeting; return whether the session continues."""
        own = self.config.protocol != "published" and is_own(reply)
        goes_on = own and self.own and reply.resumed and reply.session == self.token
        if not goes_on and self.is_connected:
            # The server's answer is the truth, and our table a cache of it. A server that remembers knows which keys
            # were deleted or evicted while our session was over. Only keys that a server has forgotten may be
            # registered again.
            self.lose_session(forgotten=not own or (reply.begins_anew and reply.epoch != self._settled))
            if not own or self.epoch != self._settled:  # it may use another pool, where all numbers begin again
                self.counters.views_lost += self.pinned.lose_all()
        self.settles_pins = own and Code.PINS in reply.codes
        self.lists_keys = own and Code.LIST_KEYS in reply.codes
        self._settled = self.epoch = reply.epoch  # 0 from a published server: then any epoch means another one
        self.own = own
        self.is_connected = True
        self.rm_address = reply.rm_address or self.config.rm_address
        self.descriptors = reply.descriptors
        self.max_keys = max(1, min(reply.max_keys, KEYS_AT_ONCE))
        self.max_key_bytes = reply.max_key_bytes
        if own:
            assert reply.session is not None
            self.token = reply.session
            self.lease = reply.lease
            self.deadline = sent_at + reply.lease
        else:
            self.token = b""
            self.lease = self.deadline = math.inf
        if not self.settles_pins:
            self.pin_epochs.forget()
        return goes_on

    def doubt_server(self, why: str) -> None:
        """Log that it cannot be checked whose process the server is.

        Logged once, and again if the reason changes.
        """
        if why and why != self.doubt:
            _log.warning(
                "%r: the user of the listening process cannot be checked (%s), so it is trusted; keys (curve_key_file, "
                "curve_server_key) or a Unix socket of this user would prove its identity",
                self,
                why,
            )
        self.doubt = why

    def _new_era(self) -> None:
        self.era += 1
        self.pin_epochs.next_era()
        self.unsettled = True
        self.pinned.due.clear()
        board, self.index.board = self.index.board, None
        if board is not None:
            self.pinned.adopt(board.end())

    # --- pins at the server that are not known here ---------------------------------------------------------------

    def doubts_pins(self) -> bool:
        """Return whether the server needs a claim of the pins we hold.

        It does if an answer never came, and only a server that knows claims gets one.
        """
        patience = self.config.timeout_ms / 1e3
        return self.settles_pins and not self.unsettled and self.pin_epochs.is_due(self.clock() - patience)

    def begin_claim(self) -> tuple[int, list[str], list[int]]:
        """Begin a pin epoch by claiming the held pins.

        Returns:
            The epoch's number, the keys, and the number of pins of each.
        """
        pin_epoch = self.pin_epochs.begin_claim()
        self.pinned.due.clear()
        held = self.pinned.held(self.era)
        return pin_epoch, list(held), list(held.values())

    def disown(self, pin_epoch: int, epoch: int, names: list[str]) -> None:
        """Give back the pins of a FIND whose answer came too late.

        The answer is of that pin epoch and that server epoch; nothing here holds the pins. They are not given back if a
        claim was made since: it names all pins except these.
        """
        if epoch != self.epoch or pin_epoch < self.pin_epochs.claimed:
            return
        if pin_epoch < self.pin_epochs.current and self.settles_pins:
            self.pin_epochs.is_lost = True  # asked of an earlier server, as may be the request that undoes it
        else:
            self.pinned.due += names

    # --- validity -------------------------------------------------------------------------------------------------

    def check(self, pin: Pin) -> None:
        """Raise unless a pin still holds. Sends no message."""
        self.check_era(pin.era)

    def check_era(self, era: int) -> None:
        """Raise unless pins of that era still hold.

        Raises:
            LeaseLost: the server has restarted, or may have dropped this client's pins.
        """
        if era != self.era:
            raise LeaseLost(f"{self!r}: the server has restarted, or has ended the session")
        if self.clock() >= self.deadline:
            raise LeaseLost(f"{self!r}: no answer from the server for {self.lease:g} s")

    # --- releasing ------------------------------------------------------------------------------------------------

    def free(self, pages: Sequence[int]) -> None:
        """Free allocated pages, except those of a lost region, which are gone."""
        self.pages.cancel([page for page in pages if self.pages.state(page) is not PageState.ORPHAN])

    def collect(self) -> None:
        """Free forgotten pages, and release forgotten pins."""
        while self.forgotten:
            self.free([self.forgotten.popleft()])
        if self.pinned.dropped:
            self.pinned.collect(self.era)

    # --- sizes of the pool ----------------------------------------------------------------------------------------

    def fell_short(self, shortfall: Shortfall) -> None:
        """Record that the server had less memory than requested.

        Logged once; a full pool without a further region is normal and not logged.
        """
        if self.shortfall is None and (shortfall.granted_bytes or not self.pages.regions):
            _log.warning(
                "%r: pool_size = %d: a region of %d bytes was refused (%s), so one of %d is used; the server has %d bytes, "
                "of which %d were free. Lower pool_size, or raise the server's capacity_bytes",
                self,
                self.config.pool_size,
                shortfall.wanted_bytes,
                shortfall.reason,
                shortfall.granted_bytes,
                shortfall.pool_bytes,
                shortfall.free_bytes,
            )
        self.shortfall = shortfall

    def check_size(self, n: int) -> None:
        """Raise if so many pages can never be had at once.

        That is, not even after others have become free.

        Raises:
            PoolFull: the server had less than requested, and its pool, or without ``auto_expand`` the region that it
                gave, is smaller than that.
        """
        if self.shortfall is None:
            return
        owned = sum(region.pages for region in self.pages.regions)
        page_bytes, config = self.pages.page_bytes, self.config
        if owned and not config.auto_expand:
            most, what = owned, f"its region has {owned * page_bytes} bytes, and is not expanded (auto_expand)"
        else:
            total = self.shortfall.pool_bytes
            most, what = (
                max(owned, total // page_bytes),
                f"the server's pool has {total} bytes (capacity_bytes)",
            )
        if n > most:
            raise PoolFull(
                f"{self!r}: pool_size = {config.pool_size}: {n} pages of {page_bytes} bytes do not fit at once: {what}. "
                "Store fewer at once, or raise that limit"
            )

    # --- losing ---------------------------------------------------------------------------------------------------

    def lose_region(self, region_id: int, *, forgotten: bool) -> None:
        """Give up a region that is not ours any more.

        If the server has forgotten it, its keys are kept to be registered again.
        """
        region = next(region for region in self.pages.regions if region.region_id == region_id)
        span = self.spans.pop(region_id, None)
        if span is not None and forgotten:
            size = self.pages.page_bytes
            kept = [
                ((page - region.first) * size, self.stored[page])
                for page in self.pages.registered(region_id)
                if page in self.stored
            ]
            if kept:
                self.former.append(Former(span, kept))
        for page in range(region.first, region.first + region.pages):
            self.stored.pop(page, None)
        self.pages.end_region(region_id)

    def lose_session(self, *, forgotten: bool) -> None:
        """Give up a lost session, with all its regions and pins.

        The server does not know it any more.

        Args:
            forgotten: whether the server has forgotten our keys as well.
        """
        self.counters.sessions_lost += 1
        self._new_era()
        self.pin_epochs.forget()  # no request of that session is done any more
        for region in self.pages.regions:
            self.lose_region(region.region_id, forgotten=forgotten)
        if not forgotten:  # the same holds for pages of the ended session that were not registered again yet
            self.counters.keys_lost += sum(len(former.pages) for former in self.former)
            self.former.clear()
        self.pages.new_session()
        self.spans.clear()  # the server may use another pool now, where the same numbers mean other regions
        self.handles.clear()
        self.page_of.clear()
        self.shortfall = None
        self._attempt = 0


def salt_of(tenant: str, namespace: str) -> str:
    """Return the salt of every key, unique to tenant and layout.

    So no two of them ever name the same page. Empty without tenant and namespace: then keys are those of the published
    clients. No salt is the beginning of another one.
    """
    if not tenant and not namespace:
        return ""
    return f"\x1f{len(tenant)}:{tenant}{len(namespace)}:{namespace}\x1f"
