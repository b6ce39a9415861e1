"""Pages of the page store that engines write and read themselves.

    reserve_write   policies, blocks that are there already, the quota -> the rest counts as coming
    (the engine writes pages of its own region and registers them with the page store: no message of this protocol)
    commit          registered blocks count as there; nothing is coming any more; they go on to the tiers behind

This module knows the tier, and the blocks that engines have announced. A page of the page store belongs to the process
that writes it. So mappings, late writers and leases are the page store's business; here such a block becomes one of the
daemon's.

Rule 1. Announced blocks pass the policies of the first route, and the quota of the tenant, as any store.
Rule 2. Coming blocks count against the quota until the engine has reported their fates. If it cannot report any more,
    the page store is asked; if that does not answer, all of it counts as there: never too little.
Rule 3. An engine registers nothing after its lease (its clock ends it earlier than ours does), so blocks that are
    missing in rule 2 do not come later.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import attrs
import trio

from backends.abc import Key, check_keys
from backends.base.keys import distinct_keys

from .._pipeline.containment import give_back
from ._engine import DaemonEngine
from ._messages import Commit, Fate, PageStore, PageStoreAt, Refusal, Reserved, ReserveWrite, cut_all
from ._onward import OnwardCommits
from ._quotas import REASON, Account, Quotas
from ._sessions import Session, Sessions
from ._stores import Stores
from ._tenants import stored_keys

if TYPE_CHECKING:
    from backends.maru import MaruTier

_log = logging.getLogger("offload.daemon")


@attrs.define(eq=False)
class Announced:
    """Blocks that an engine writes itself, and has not committed yet."""

    tier: str
    """The name of the page store."""
    keys: Sequence[Key]
    """Keys of the blocks that were not filtered, as they are stored."""
    account: Account | None
    coming: Sequence[Key]
    """Its keys that count in the account until the end."""
    unlock: Callable[[], None] | None
    """Releases the locks of a policy for them."""
    cost: int = 0
    """Cost of its keys in its session."""


class Pages:
    """The pages that engines write and read themselves.

    Args:
        engine: the tiers and pipelines.
        quotas: of tenants.
        stores: makes room within them.
        onward: passes on committed blocks.
        sessions: has the announcements of each session.
        is_on: whether engines may.

    Attributes:
        counts: blocks, by fate.
    """

    def __init__(
        self,
        engine: DaemonEngine,
        quotas: Quotas,
        stores: Stores,
        onward: OnwardCommits,
        sessions: Sessions,
        *,
        is_on: bool = True,
    ) -> None:
        self.counts: dict[str, int] = dict.fromkeys(
            (
                "stored_blocks",
                "duplicate_blocks",
                "unknown_blocks",
                "given_up_blocks",
                "filtered_blocks",
                "read_blocks",
            ),
            0,
        )
        self._engine = engine
        self._quotas = quotas
        self._stores = stores
        self._onward = onward
        self._sessions = sessions
        self._is_on = is_on
        self._last = 0

    @property
    def tier_name(self) -> str:
        """The tier whose pages engines write.

        Raises:
            Refusal: see :meth:`place`.
        """
        return self._its_tier()[0]

    async def place(self, request: PageStore, epoch: int) -> PageStoreAt:
        """Return the place of the page store. Opens the tiers if necessary.

        Raises:
            Refusal: engines cannot write pages there; the text names the setting to change.
            BadLayout: the tiers hold blocks of another size.
        """
        if not request.block_bytes:
            raise Refusal("invalid", "block_bytes = 0: must be the size of the engine's blocks")
        await self._engine.wait_open(request.block_bytes)
        name, tier = self._its_tier()
        config = tier.handler.config
        return PageStoreAt(
            request.seq,
            epoch,
            name,
            config.server_url,
            config.namespace,
            config.tenant,
            config.dax_path,
            config.checksums,
        )

    def reserve_nowait(self, session: Session, request: ReserveWrite, epoch: int) -> Reserved | None:
        """Announce blocks like :meth:`reserve`; ``None`` if it had to wait.

        It waits for a policy, for the page store, or for room.
        """
        if not self._onward.has_room:
            return None
        name, tier, keys, account = self._asked(session, request)
        there = tier.contains_from_thread(keys)
        wanted = [key for key in keys if there is not None and key not in there]
        if there is None or (account is not None and account.shortage(wanted, self._quotas.block_bytes)):
            return None
        said = self._engine.require().pipelines[0].ask_policies_nowait(wanted)  # Last: it is asked once.
        if said is None:
            return None
        reasons = {**dict.fromkeys(there, "present"), **said[0]}
        return self._announce(session, request, epoch, name, keys, reasons, said[1])

    async def reserve(self, session: Session, request: ReserveWrite, epoch: int) -> Reserved:
        """Announce blocks, once earlier commits have room in the onward routes.

        If cancelled, nothing is announced, though blocks of the tenant may have been deleted for it.

        Raises:
            Refusal: see :meth:`place`.
            ValueError: these are no keys, or one is named twice.
        """
        name, tier, keys, account = self._asked(session, request)
        await self._onward.wait_room()
        reasons = dict.fromkeys(await self._there(tier, keys, unless=()), "present")
        said, unlock = (
            await self._engine.require().pipelines[0].ask_policies([key for key in keys if key not in reasons])
        )
        reasons.update(said)
        try:
            if account is not None:
                wanted = [key for key in keys if key not in reasons]
                await self._stores.make_room(account, wanted, staying=keys)
        except BaseException:
            if unlock is not None:
                give_back(unlock)
            raise
        # No checkpoint from here on: deleted blocks make room for these.
        return self._announce(session, request, epoch, name, keys, reasons, unlock)

    def _asked(self, session: Session, request: ReserveWrite) -> tuple[str, MaruTier, list[Key], Account | None]:
        """Return the page store, its name, the stored keys, and their account."""
        name, tier = self._its_tier()
        distinct_keys(request.keys)
        keys = stored_keys(session.tenant, request.keys)
        check_keys(keys)
        return name, tier, keys, self._quotas.of(session.tenant)

    def _announce(
        self,
        session: Session,
        request: ReserveWrite,
        epoch: int,
        tier: str,
        keys: Sequence[Key],
        reasons: dict[Key, str],
        unlock: Callable[[], None] | None,
    ) -> Reserved:
        """Announce the blocks that were not filtered, while the quota has room."""
        account = self._quotas.of(session.tenant)
        coming: Sequence[Key] = ()
        wanted = [key for key in keys if key not in reasons]
        if account is not None:
            coming, refused = account.admit(wanted, self._quotas.block_bytes)
            reasons.update((wanted[at], REASON) for at in refused)
            wanted = [key for key in wanted if key not in reasons]
        self._last += 1
        cost = session.costs.pop(request.seq, 0)
        session.announced[self._last] = Announced(tier, wanted, account, coming, unlock, cost)
        self.counts["filtered_blocks"] += len(reasons)
        filtered = cut_all((at, reasons[key]) for at, key in enumerate(keys) if key in reasons) if reasons else []
        return Reserved(request.seq, epoch, self._last, filtered)

    def commit(self, session: Session, request: Commit) -> int:
        """Record the fates of announced blocks. Returns the number of blocks.

        An unknown reservation is ignored.

        Raises:
            Refusal: there is not one fate for each of them. Nothing was changed.
        """
        announced = session.announced.get(request.reservation)
        if announced is None:
            return 0
        try:
            fates = list(map(Fate, request.fates)) or [Fate.GIVEN_UP] * len(announced.keys)
        except ValueError as exc:
            raise Refusal("invalid", str(exc)) from None
        if len(fates) != len(announced.keys):
            raise Refusal("invalid", f"{len(fates)} fates for {len(announced.keys)} blocks")
        del session.announced[request.reservation]
        self._sessions.refund(session, announced.cost)
        for fate in Fate:
            self.counts[f"{fate.name.lower()}_blocks"] += fates.count(fate)
        self._end(session, announced, [key for key, fate in zip(announced.keys, fates, strict=True) if fate])
        return len(fates)

    async def give_back(self, session: Session) -> None:
        """End the announcements of a session that is over: rule 2."""
        while session.announced:
            _, announced = session.announced.popitem()
            there: Collection[Key] = announced.keys
            try:
                if announced.account is not None or self._onward.leads_on(announced.tier):  # else nobody wants to know
                    there = await self._there(self._its_tier()[1], announced.keys, unless=announced.keys)
            except Refusal:
                pass
            finally:
                self.counts["unknown_blocks"] += len(announced.keys)
                self._end(session, announced, [key for key in announced.keys if key in there])

    def _end(self, session: Session, announced: Announced, there: Sequence[Key]) -> None:
        self._onward.begin(announced.tier, there, session.tenant)
        if announced.account is not None:
            self._quotas.settled(announced.account, announced.coming, there)
        if announced.unlock is not None:
            give_back(announced.unlock)  # from foreign code

    async def _there(self, tier: MaruTier, keys: Sequence[Key], *, unless: Collection[Key]) -> Collection[Key]:
        """Return the keys that the page store has; ``unless`` without an answer."""
        if not keys:
            await trio.lowlevel.checkpoint()
            return ()
        try:
            return await tier.contains(keys)
        except Exception as exc:
            _log.info("the page store could not be asked for %d blocks: %r", len(keys), exc)
            return unless

    def _its_tier(self) -> tuple[str, MaruTier]:
        """Return the first tier that is a page store, and its name.

        Raises:
            Refusal: there is none, or none whose pages an engine may write; the text names the setting to change.
        """
        if not self._is_on:
            raise Refusal("pages", f"engine_pool_size_gb = 0: this daemon has no room for pages of engines; {_OR_ELSE}")
        tiers = self._engine.require().tiers
        if (
            "backends.maru" in sys.modules
        ):  # otherwise no tier is one, and importing it would be 60 ms in which nobody is served
            from backends.maru import MaruTier

            for name, tier in tiers.items():
                if isinstance(tier, MaruTier):
                    _check(name, tier)
                    return name, tier
        kinds = ", ".join(f"{name} ({type(tier).__name__})" for name, tier in tiers.items())
        raise Refusal(
            "pages",
            f"no tier of this daemon is a plain page store; it has {kinds}. Give it one (type = 'maru' in [engine.tiers.NAME], "
            f"without wrappers; or no [engine.tiers], and maru_pool_size_gb above 0), {_OR_ELSE}",
        )


def _check(name: str, tier: MaruTier) -> None:
    config = tier.handler.config
    for knob, value, wanted in (
        ("key_names", "hex" if tier.naming.name == bytes.hex else "text", "hex"),
        ("protocol", config.protocol if config.protocol == "published" else "own", "own"),
        ("curve_key_file", config.curve_key_file, ""),
    ):
        if value != wanted:
            raise Refusal(
                "pages",
                f"engine.tiers.{name}.{knob} = {value!r}: must be {wanted!r} for engines to write pages; {_OR_ELSE}",
            )


_OR_ELSE = "or store from a cache in offload.client.SharedMemory, which is one copy as well"
