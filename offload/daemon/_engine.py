"""The engine of a daemon: its tiers and pipelines.

Its one source are the caches of all engines. Tiers hold blocks of one size. If the configuration does not set it, the
first cache that is registered does, and opens them; any other size is refused from then on.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Final, Literal

import attrs
import trio

from backends.abc import Key
from backends.base.threads import run_in_thread
from backends.memory import MemoryTier
from maru.base.machine import memory_limit
from maru.base.memory.pinning import expect_cuda
from maru.configuration import as_bytes
from maru.kv_events import KeyBook

from .._engine import Engine, EngineConfig, TierLike, open_engine
from .._engine.config import TierTable
from .._engine.lookup import Place, ask_each
from .._pipeline.container import OffloadContainer
from .._pipeline.marks import innermost
from .._pipeline.page_hold import held_pages_of
from ._layout import BadLayout
from ._memory import Caches
from ._messages import Refusal
from ._page_keys import PageKeys

if TYPE_CHECKING:
    from backends.maru import MaruTier
    from maru import MaruServer

_LEAST_BYTES: Final = 512
"""Least size of a block that an engine may decide.

The entry of a block in the tables takes as much.
"""

_log = logging.getLogger("offload.daemon")


class CannotOpen(Exception):
    """The tiers, or a hosted server, could not be opened.

    The cause has the reason.
    """


@attrs.define(eq=False)
class _Attempt:
    """One attempt to open the tiers."""

    over: trio.Event = attrs.field(factory=trio.Event)
    error: Exception | None = None


class DaemonEngine:
    """Keeps the tiers open while :meth:`run` runs.

    Args:
        config: of the tiers and routes; its source is replaced.
        block_bytes: size of every block; 0: the first cache determines it.
        instruments: of its pipelines.

    Attributes:
        config: the current configuration.
        instruments: those that :meth:`run` will give to the pipelines.
        caches: the registered caches of engines.
        page_store: the page store that the daemon runs itself, if it does.
        engine: ``None`` until the tiers are open.
        opened: set when they are.
        before_opened: awaited when they are, before anything is looked up or stored. Must not raise.
        on_opened: called when they are, before anything is stored. Must not raise.
        on_settled: called for each container of the first pipeline that has settled. Must not raise.
    """

    def __init__(self, config: EngineConfig, block_bytes: int, instruments: Sequence[object] = ()) -> None:
        self.instruments: list[object] = list(instruments)
        self.caches: Caches = Caches(block_bytes)
        self.page_store: MaruServer | None = None
        self.engine: Engine | None = None
        self.opened: trio.Event = trio.Event()
        self.on_opened: Callable[[Engine], None] = lambda engine: None
        self.before_opened: Callable[[Engine], Awaitable[None]] | None = None
        self.on_settled: Callable[[OffloadContainer], None] = lambda container: None
        self.config: EngineConfig = config
        self._halves: dict[str, int] = {}  # blocks of half of a tier, once it was asked
        self._wanted = trio.Event()
        self._attempt = _Attempt()
        if block_bytes:
            self._wanted.set()

    def set_thresholds(self, config: EngineConfig) -> None:
        """Set the thresholds of a configuration: see :meth:`offload.Engine.set_thresholds`."""
        self.config = config
        if self.engine is not None:
            self.engine.set_thresholds(
                lookup_timeout=config.lookup_timeout,
                breaker=config.breaker,
                load_or_recompute=config.load_or_recompute,
            )

    def require(self) -> Engine:
        """Return the engine.

        Raises:
            Refusal: no cache was registered yet, so its tiers are not made.
        """
        if self.engine is None:
            raise Refusal(
                "unavailable",
                "the tiers are not open yet: register a cache, which sets the size of a block, or set block_bytes "
                "in [daemon], or block_bytes of the tier that is this daemon",
            )
        return self.engine

    @property
    def block_bytes(self) -> int:
        """Size of every block in bytes; 0: not known yet."""
        return self.caches.block_bytes

    @property
    def state(self) -> Literal["starting", "ready"]:
        """State: ready if it accepts stores, at least after a registration."""
        return "ready" if self.engine is not None or not self._wanted.is_set() else "starting"

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the tiers open until cancelled, once the block size is known.

        Started at once if the first cache determines the size, and otherwise when they are open.

        Raises:
            CannotOpen: the tiers of a configured size cannot be opened. If an engine asks for them, its request is
                refused instead.
        """
        configured = self._wanted.is_set()
        if not configured:
            task_status.started()
        while True:
            await self._wanted.wait()
            try:
                await self._open(task_status if configured else trio.TASK_STATUS_IGNORED)
            except Exception as exc:
                if configured or self.engine is not None:
                    raise CannotOpen("; ".join([str(exc), *getattr(exc, "__notes__", ())])) from exc
                _log.exception("the tiers cannot be opened for blocks of %d bytes", self.block_bytes)
                self._refuse(exc)
            finally:
                self.engine = None

    async def _open(self, task_status: trio.TaskStatus[None]) -> None:
        """Open the tiers, and keep them open until cancelled."""
        expect_cuda()  # nothing has imported torch: that is for the first cache on a device
        # Before they are made: those with populate = true have all of their memory then.
        _check_limit(self.config.tiers, self.page_store)
        if any(_is_page_store(tier) for tier in self.config.tiers.values()):
            # Importing takes a tenth of a second of the loop, and other engines wait. An error is raised when the tier
            # is made.
            with suppress(ImportError, OSError, RuntimeError):
                await run_in_thread(import_module, "backends.maru")
        config = attrs.evolve(self.config, source=self.caches, block_bytes=0, tiers=unpopulated(self.config.tiers))
        async with open_engine(config, instruments=self.instruments) as engine:
            engine.pipelines[0].add_instrument(_SettlementWatch(self))
            if self.before_opened is not None:
                await self.before_opened(engine)
            self.engine = engine
            self.opened.set()
            self.on_opened(engine)
            self._attempt.over.set()
            task_status.started()
            # Afterwards: to touch and pin 64 GiB takes half a minute, in which engines can already be served.
            await _populate(engine)
            await trio.sleep_forever()

    def _refuse(self, error: Exception) -> None:
        """Report to waiting callers that the tiers cannot be opened.

        The next cache may have blocks that they can hold.
        """
        self._attempt.error = error
        self._attempt.over.set()
        self.caches.block_bytes = 0
        self._wanted, self._attempt = trio.Event(), _Attempt()

    async def wait_open(self, block_bytes: int) -> None:
        """Wait until the tiers are open for blocks of this size.

        The first call without a configured size opens them.

        Raises:
            BadLayout: they hold blocks of another size, or cannot be opened for this one; or it is too small.
        """
        if not self.block_bytes:
            if block_bytes < _LEAST_BYTES:
                raise BadLayout(
                    f"blocks of {block_bytes} bytes: must be at least {_LEAST_BYTES} bytes in the first cache, which sets "
                    "the size of a block (block_bytes in [daemon] may be less)"
                )
            self.caches.block_bytes = block_bytes
            self._wanted.set()
        elif self.block_bytes != block_bytes:
            raise BadLayout(
                f"blocks of {block_bytes} bytes, but this daemon holds blocks of {self.block_bytes}: "
                "start another daemon for them (block_bytes in [daemon])"
            )
        attempt = self._attempt
        await attempt.over.wait()
        if attempt.error is not None:
            raise BadLayout(f"the tiers cannot hold blocks of {block_bytes} bytes: {attempt.error}")

    def listers(self, engine: Engine) -> dict[str, MaruTier]:
        """Return the tiers that only list their keys on request.

        These are page stores of other processes, which announce no changes.
        """
        if "backends.maru" not in sys.modules:  # it brings ZeroMQ, and is here already if there is such a tier
            return {}
        from backends.maru import MaruTier

        own = () if self.page_store is None else self.page_store.endpoints
        return {
            name: tier
            for name, tier in engine.tiers.items()
            if isinstance(tier, MaruTier) and not tier.capabilities.lists_keys and _url_of(tier) not in own
        }

    def books(self) -> dict[str, KeyBook[Key]]:
        """Return the tiers that announce the keys they hold.

        A page store that the daemon runs itself does, for all of its keys.
        """
        books: dict[str, KeyBook[Key]] = {}
        for name, tier in self.require().tiers.items():
            if tier.capabilities.lists_keys:
                books[name] = tier
            elif self.page_store is not None and _url_of(tier) in self.page_store.endpoints:
                books[name] = PageKeys(self.page_store.keys)
        return books

    def most_held(self, name: str, wanted: int) -> int | None:
        """Return the blocks of a tier that one session may hold: half.

        ``None`` if it may hold ``wanted`` blocks, and leaves room for others. A page store has room of other processes
        as well, and looks after its pins itself.
        """
        engine = self.require()
        if name not in self._halves:
            is_counted = held_pages_of(engine.tiers[name]) is None
            capacity = engine.statistics().tiers[name].capacity_bytes if is_counted else 0
            self._halves[name] = capacity // self.block_bytes // 2 or sys.maxsize
        half = self._halves[name]
        if wanted <= half or engine.statistics().tiers[name].held_blocks <= half:
            return None
        return half

    async def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Return which of these keys are in a tier.

        Nothing has changed when it is cancelled.

        Raises:
            Refusal: the tiers are not open yet; or one did not answer, and no other has all of the keys.
        """
        places = self.require()._places
        # First those that cost no wait: if they have all, a slow tier behind them delays nobody.
        there, silent = await self._there([place for place in places if place[1].capabilities.answers_at_once], keys)
        if missing := [key for key in keys if key not in there]:
            slow, errors = await self._there(
                [place for place in places if not place[1].capabilities.answers_at_once], missing
            )
            there, silent = there | slow, silent | errors
        present = [key in there for key in keys]
        if silent and not all(present):
            why = "; ".join(f"{name}: {type(error).__name__}: {error}" for name, error in silent.items())
            raise Refusal("unavailable", f"{present.count(False)} of {len(keys)} keys may be in a silent tier ({why})")
        return present

    async def _there(self, places: Sequence[Place], keys: Sequence[Key]) -> tuple[set[Key], dict[str, Exception]]:
        """Ask these tiers concurrently; return their keys and the errors.

        Each may take as long as in a lookup. Errors are those of silent tiers.
        """
        found, silent = await ask_each(places, keys, within=self.config.lookup_timeout)
        return set().union(*found.values()), silent


async def _populate(engine: Engine) -> None:
    """Touch the memory of all tiers, so that first writes are fast.

    Without a thread for it, first writes are.
    """
    try:
        for tier in map(innermost, engine.tiers.values()):
            if isinstance(tier, MemoryTier):
                for start in tier.unpopulated():
                    await run_in_thread(tier.populate, start)
    except (OSError, RuntimeError) as exc:
        _log.warning("memory of the tiers is not populated, so the first stores into it are slow: %s", exc)


def _is_page_store(tier: TierLike) -> bool:
    """Return whether a tier is to be made of the type ``maru``."""
    return tier == "maru" or (isinstance(tier, Mapping) and tier.get("type") == "maru")


def _check_limit(tiers: Mapping[str, TierLike], page_store: MaruServer | None) -> None:
    """Warn of memory beyond this container's limit, before it is populated.

    Populating it would end the daemon.
    """
    wanted = {name: size for name, tier in tiers.items() if (size := _memory_of(tier))}
    if page_store is not None and wanted:  # Alone, it has warned itself.
        wanted["the embedded page store"] = page_store.memory_bytes
    limit = memory_limit()
    if limit is not None and sum(wanted.values()) > limit:
        _log.warning(
            "capacity_bytes of %s: %d bytes, and this container may use %d: the kernel kills its processes beyond that; lower "
            "capacity_bytes (host_bytes of the daemon), or raise the memory limit",
            " and ".join(wanted), sum(wanted.values()), limit,
        )  # fmt: skip


def _memory_of(tier: TierLike) -> int:
    """Return the bytes of host memory that a tier takes.

    It may be wrapped.
    """
    if isinstance(tier, MemoryTier):
        return tier.statistics().capacity_bytes
    size = as_bytes(tier.get("capacity_bytes")) if isinstance(tier, Mapping) and tier.get("type") == "memory" else 0
    return size if isinstance(size, int) else 0  # anything else is an error when the tier is made


def _url_of(tier: object) -> str:
    """Return the server URL of a page store's client; otherwise empty."""
    handler = getattr(tier, "handler", None)
    return "" if handler is None else str(handler.config.server_url)


class _SettlementWatch:
    """An instrument that reports each settled container."""

    def __init__(self, daemon_engine: DaemonEngine) -> None:
        self._daemon_engine = daemon_engine

    def settled(self, container: OffloadContainer) -> None:
        self._daemon_engine.on_settled(container)


def unpopulated(tiers: Mapping[str, TierLike]) -> dict[str, TierLike]:
    """Return the tiers, with memory not populated when they are made.

    Populating would delay the loop.
    """
    return {name: _with_populate(tier) for name, tier in tiers.items()}


def _with_populate(tier: TierLike) -> TierLike:
    if not isinstance(tier, Mapping) or tier.get("type") != "memory" or "populate" in tier:
        return tier
    table = {**tier, "populate": False}
    return TierTable(table, tier.document, tier.section) if isinstance(tier, TierTable) else table
