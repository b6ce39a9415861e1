"""What a client knows of itself and of its server: session, lease, regions, pages, pins. Pure.

One value for a handler, used by all of its operations. In the blocking face several threads step operations, one at a time:
between two effects nobody else touches this.

Rule 1. Every reply is *heard* before anybody acts on it: its epoch, the pages it brings back, and how long the lease is now.
Rule 2. Another epoch, or a server that does not know the session, unsettles the client: the next operation settles it first.
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
"""Our own codes are used if the server lists all of these, and otherwise none. PINS and LIST_KEYS came later,
and each is used if it is listed."""


_PINNING = frozenset((int(Code.FIND), int(Code.UNPIN)))
"""The requests that bear the number of a pin epoch."""


def is_own(reply: HandshakeReply) -> bool:
    """Whether a server that greets like this is one of ours, with all that is used of it."""
    return reply.session is not None and set(reply.codes) >= USED_CODES


StoredPage: TypeAlias = tuple[str, int, int | None, int | None]
"""A page as its STORE named it: key, length, checksum and depth."""


@attrs.define(eq=False)
class Former:
    """A region that was ours until its session was lost. Its bytes are still mapped here."""

    span: Span
    pages: list[tuple[int, StoredPage]]
    """Offset of each page that was registered, and what was sent of it."""


@attrs.frozen
class Shortfall:
    """A region that the server had not so many bytes for."""

    wanted_bytes: int
    """What was asked for: ``pool_size``, ``expand_size``, or what was needed at once."""
    granted_bytes: int
    """What was had instead; 0: nothing."""
    pool_bytes: int
    """What the server's pool has in all."""
    free_bytes: int
    """What of it nobody had."""
    reason: str
    """The server's."""


@attrs.define
class Counters:
    """What happened to a client, in all."""

    unanswered: int = 0
    """Calls that timed out or were cut off."""
    restarts: int = 0
    """Other epochs met."""
    sessions_lost: int = 0
    """Times the server did not know the session any more."""
    keys_kept: int = 0
    """Keys of lost regions that were found or registered again."""
    keys_lost: int = 0
    """Keys of lost regions that could not be registered again."""
    views_lost: int = 0
    """Pins that a restart or the end of a session has cost."""
    pins_unknown: int = 0
    """Pins that the server held for this client, which did not know of them since an answer was lost. They were let go of."""
    damaged: int = 0
    """Pages whose bytes were not those that were stored."""
    found_here: int = 0
    """Keys that were looked up or loaded over the shared index, without a message."""
    changed_in_copy: int = 0
    """Pages that went while they were copied without a pin: asked for by message, with one."""
    asked_anyway: int = 0
    """Keys that were asked for by message, since the index could not say all about them."""


class IndexState:
    """What a client knows of the shared index of its server."""

    def __init__(self, why_not: str) -> None:
        self.reader: IndexReader | None = None
        self.why_not = why_not
        """Why it is not used; empty if it is."""
        self.is_wanted = not why_not
        self.asked_at: tuple[int, float] | None = None
        """The era in which it was asked for last, and when."""
        self.board: BoardPins | None = None
        """By which we hold, in this era."""
        self.counters = BoardCounters()


class ClientState:
    """The state of one client.

    Args:
        config: its knobs.
        instance_id: who owns its regions.
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
        self.doubt = ""  # why nobody can tell whose the server is
        self.unsettled = True
        # regions
        self.pages = OwnedPages(config.chunk_size_bytes)
        self.spans: dict[int, Span] = {}
        self.handles: dict[int, Handle] = {}  # of regions, as a published server tells them
        self.former: list[Former] = []
        self.stored: dict[int, StoredPage] = {}  # by page, as last sent
        self.page_of: dict[str, int] = {}  # key -> page, with a published server, which returns nothing
        self.forgotten: deque[int] = deque()
        """Allocated pages whose handle was forgotten: finalizers append, and the next call frees."""
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
        self.looked_after = 0  # so many calls without an answer, a published server was asked for our regions
        self.reports: deque[tuple[str, str, int, float]] = deque(maxlen=4_096)

    def __repr__(self) -> str:
        where = "closed" if self.is_closed else "connected" if self.is_connected else "not connected"
        return f"{self.instance_id} at {self.config.server_url}, {where}"

    # --- asking ---------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise unless this client may be used."""
        if self.is_closed:
            raise HandlerClosed(f"{self!r}")
        if not self.is_connected:
            raise HandlerClosed(f"{self!r}: call connect first")

    def is_ready(self) -> bool:
        """Whether it may ask at once: connected, settled, and with nothing to let go of first."""
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
        """Keys as the server knows them. TypeError unless all are texts."""
        salt = self.salt
        return [salt + key for key in keys]

    def next_attempt(self) -> int:
        """The name of one STORE."""
        self._attempt += 1
        return self._attempt

    def next_request(self) -> int:
        """The name of one request that must not be done twice."""
        self._request += 1
        return self._request

    # --- hearing --------------------------------------------------------------------------------------------------

    def heard(self, call: Call, reply: Any, sent_at: float) -> None:
        """A reply has come that somebody waits for, to what was sent at that time."""
        epoch = getattr(reply, "epoch", 0)
        if epoch and epoch != self.epoch and (epoch not in self._left or call.code == Code.HANDSHAKE):
            self._meet(epoch)
        if isinstance(reply, OwnReply) and epoch == self.epoch and self._is_of_this_session(call):
            self.deadline = max(self.deadline, sent_at + self.lease)
            if reply.returns is not None:
                self._take_back(reply.returns)

    def gave_up(self, call: Call) -> None:
        """Nobody waits any more for the answer to a call that has left, perhaps. It may come late, or never."""
        if self.settles_pins and call.code in _PINNING:
            message: Any = call.message
            if message.session == self.token:
                self.pin_epochs.gave_up(call, message.turn)

    def heard_late(self, call: Call, reply: Any) -> None:
        """A reply has come that nobody waits for any more. If it is of a server that is gone, it is no news of one.

        It may be the first that is heard of a server that has come up meanwhile: then it knows our session, and what it pinned
        for us then is pinned until we give it back.
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
        """Another server answers, or the one that is known in another epoch."""
        if self.is_connected:
            if epoch in self._left:  # it had not gone: what it has pinned for us is pinned still
                self._left.discard(epoch)
                self.pin_epochs.is_lost = True
            self._left.add(self.epoch)
            self.counters.restarts += 1
            self._new_era()
        self.epoch = epoch

    def _is_of_this_session(self, call: Call) -> bool:
        """Whether this was asked in our session as it is now, not in one that is over."""
        message = call.message
        return isinstance(message, OwnRequest) and message.session == self.token

    def _take_back(self, returns: Returns) -> None:
        self.pages.returned(returns.first_number, returns.regions, returns.offsets, returns.attempts)

    def shook_hands(self, reply: HandshakeReply, sent_at: float) -> bool:
        """The server has greeted us. Whether this session goes on."""
        own = self.config.protocol != "published" and is_own(reply)
        goes_on = own and self.own and reply.resumed and reply.session == self.token
        if not goes_on and self.is_connected:
            # The server's answer is the truth, and our table a cache of it. A server that remembers knows what was deleted or
            # evicted while our session was over. Only what a server has forgotten may be registered again.
            self.lose_session(forgotten=not own or (reply.begins_anew and reply.epoch != self._settled))
            if not own or self.epoch != self._settled:  # it may stand over another pool, where all numbers begin anew
                self.counters.views_lost += self.pinned.lose_all()
        self.settles_pins = own and Code.PINS in reply.codes
        self.lists_keys = own and Code.LIST_KEYS in reply.codes
        self._settled = self.epoch = reply.epoch  # 0 from a published server: then any epoch is news of another one
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
        """Nobody can tell whose process the server is. Said once, and again if the reason changes."""
        if why and why != self.doubt:
            _log.warning(
                "%r: whose process listens there cannot be checked (%s). Whoever does is believed; keys (curve_key_file, "
                "curve_server_key) would prove who it is, and so would a Unix socket of this user",
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

    # --- what the server may have pinned beside what is known here ------------------------------------------------

    def doubts_pins(self) -> bool:
        """Whether the server has to be told which pins we hold: an answer never came, and it can be told."""
        patience = self.config.timeout_ms / 1e3
        return self.settles_pins and not self.unsettled and self.pin_epochs.is_due(self.clock() - patience)

    def begin_claim(self) -> tuple[int, list[str], list[int]]:
        """Begin a pin epoch by claiming what is held now: its number, the keys, and how many pins each has."""
        pin_epoch = self.pin_epochs.begin_claim()
        self.pinned.due.clear()
        held = self.pinned.held(self.era)
        return pin_epoch, list(held), list(held.values())

    def disown(self, pin_epoch: int, epoch: int, names: list[str]) -> None:
        """Give back what a FIND of that pin epoch has pinned, as an answer of that server epoch says: nothing here holds it.

        Unless that is done already: the claim that was made since names all but this.
        """
        if epoch != self.epoch or pin_epoch < self.pin_epochs.claimed:
            return
        if pin_epoch < self.pin_epochs.current and self.settles_pins:
            self.pin_epochs.is_lost = True  # it was asked of the server before: so may have been what undoes it
        else:
            self.pinned.due += names

    # --- validity -------------------------------------------------------------------------------------------------

    def check(self, pin: Pin) -> None:
        """Raise unless what this pin holds is still what it was. Asks nobody."""
        self.check_era(pin.era)

    def check_era(self, era: int) -> None:
        """Raise unless nothing has ended since a time of that era at which a pin was held.

        Raises:
            LeaseLost: the server has restarted, or may have let go of this client's pins.
        """
        if era != self.era:
            raise LeaseLost(f"{self!r}: the server has restarted, or has ended the session")
        if self.clock() >= self.deadline:
            raise LeaseLost(f"{self!r}: the server was not heard for {self.lease:g} s")

    # --- letting go -----------------------------------------------------------------------------------------------

    def free(self, pages: Sequence[int]) -> None:
        """Allocated pages are not needed. Those of a region that was lost are gone already."""
        self.pages.cancel([page for page in pages if self.pages.state(page) is not PageState.ORPHAN])

    def collect(self) -> None:
        """Let go of what was forgotten."""
        while self.forgotten:
            self.free([self.forgotten.popleft()])
        if self.pinned.dropped:
            self.pinned.collect(self.era)

    # --- how much there is ----------------------------------------------------------------------------------------

    def fell_short(self, shortfall: Shortfall) -> None:
        """The server had less than was asked for. Said once; that a full pool has no further region is nothing to say."""
        if self.shortfall is None and (shortfall.granted_bytes or not self.pages.regions):
            _log.warning(
                "%r: pool_size = %d: a region of %d bytes was refused (%s), and one of %d is used; the server has %d bytes, of "
                "which %d were free. Set pool_size to what it has, or its capacity_bytes to more",
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
        """Raise if so many pages can never be had at once, whatever becomes free.

        Raises:
            PoolFull: the server had less than was asked for, and its pool, or without ``auto_expand`` the region that it
                gave, is smaller than that.
        """
        if self.shortfall is None:
            return
        owned = sum(region.pages for region in self.pages.regions)
        page_bytes, config = self.pages.page_bytes, self.config
        if owned and not config.auto_expand:
            most, what = owned, f"its region, which is not expanded (auto_expand), has {owned * page_bytes} bytes"
        else:
            total = self.shortfall.pool_bytes
            most, what = (
                max(owned, total // page_bytes),
                f"the server's pool (its capacity_bytes) has {total} bytes in all",
            )
        if n > most:
            raise PoolFull(
                f"{self!r}: pool_size = {config.pool_size}: {n} pages of {page_bytes} bytes are wanted at once, and {what}. "
                "Store fewer at once, or give the server more"
            )

    # --- losing ---------------------------------------------------------------------------------------------------

    def lose_region(self, region_id: int, *, forgotten: bool) -> None:
        """A region is not ours any more. If the server has forgotten it, its keys are kept to be registered again."""
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
        """The server does not know us any more: no region is ours, and no pin.

        Args:
            forgotten: whether the server has forgotten our keys as well.
        """
        self.counters.sessions_lost += 1
        self._new_era()
        self.pin_epochs.forget()  # nothing that was sent in it is done any more
        for region in self.pages.regions:
            self.lose_region(region.region_id, forgotten=forgotten)
        if not forgotten:  # the same goes for what was not registered again yet in the session that is over
            self.counters.keys_lost += sum(len(former.pages) for former in self.former)
            self.former.clear()
        self.pages.new_session()
        self.spans.clear()  # the server may stand over another pool now, where the same numbers mean other regions
        self.handles.clear()
        self.page_of.clear()
        self.shortfall = None
        self._attempt = 0


def salt_of(tenant: str, namespace: str) -> str:
    """What stands before every key, so that no two tenants and no two layouts ever name the same page.

    Nothing for none of both: then keys are those of the published clients. No salt is the beginning of another one.
    """
    if not tenant and not namespace:
        return ""
    return f"\x1f{len(tenant)}:{tenant}{len(namespace)}:{namespace}\x1f"
