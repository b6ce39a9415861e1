"""Storage of a server: locked pool, recovered directory, and journal.

Rule 1. Nothing is served before the directory and the pool agree: a region without its memory is dropped with its keys,
        and memory without a region is removed. Dropped regions are journaled before anything else is.
Rule 2. On any failure the pool is released.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import attrs

from .._config import ServerConfig, default_pool_path
from .._directory import Directory
from .._directory.lazy_order import LazyOrder
from .._directory.limits import Limits
from .._directory.records import encode
from .._journal.journal import ROOM_BYTES, Journal
from .._journal.recovery import Recovered, recover
from .._journal.segments import current_boot_id
from .._pool.index_files import retire_left
from .._pool.pool import Pool, open_pool
from ..base.errors import PoolUnusable
from ..base.threads import run_in_thread

_PATIENCE: Final = 0.1
"""Seconds to wait for stuck threads of the pool.

They release the pool when they are done, or with the process.
"""

_log = logging.getLogger("maru.server")


@attrs.define(eq=False)
class Storage:
    """The open pool, directory and journal of a server, in agreement."""

    pool: Pool
    directory: Directory
    order: LazyOrder
    """Eviction order of each owner's keys; to be settled after each step."""
    journal: Journal | None
    """The journal; ``None`` if none is written."""
    recovered: Recovered | None
    """Result of the recovery; ``None`` without a journal."""

    @property
    def begins_anew(self) -> bool:
        """Whether something acknowledged before this start may be unknown."""
        return self.recovered is None or bool(self.recovered.lost)


@asynccontextmanager
async def open_storage(config: ServerConfig) -> AsyncIterator[Storage]:
    """Lock the pool, recover the directory, and make both agree.

    Afterwards all are released. Regions and journal stay.

    Raises:
        PoolInUse: another server has the pool.
        PoolUnusable: it cannot be used.
        ForeignJournal: the journal is of another version, or of another pool.
        JournalFailed: the journal cannot be read or written.
    """
    limits = limits_of(config)
    home = config.pool_path or default_pool_path()
    # Next to the journal, regions leave it room: else they fill its disk, and nothing can be acknowledged any more.
    keep_free = ROOM_BYTES if config.journal and not config.dax_path else 0
    async with await open_pool(
        config.dax_path or home,
        config.capacity_bytes or None,
        home=home,
        huge_pages=config.huge_pages,
        keep_free=keep_free,
    ) as pool:
        try:
            # Before anything else: from here on an index left by an earlier server would be out of date.
            await run_in_thread(retire_left, pool.home)
        except OSError as exc:
            raise PoolUnusable(f"the index of an earlier server cannot be retired: {exc}") from exc
        recovered = journal = None
        order = LazyOrder()
        directory = Directory(limits, order.policy)
        if config.journal:
            # In a thread, since there may be much to read; no other work is to be done meanwhile.
            recovered = await run_in_thread(
                functools.partial(
                    recover,
                    pool.home,
                    pool_id=pool.pool_id,
                    limits=limits,
                    eviction=order.policy,
                    region=pool.peek,
                    suspect=pool.rebooted,
                )
            )
            directory = recovered.directory
            journal = Journal(
                pool.home,
                recovered.tail,
                pool_id=pool.pool_id,
                boot_id=current_boot_id(),
                segment_bytes=config.segment_bytes,
                fsync=config.journal_sync != "never",
            )
        try:
            await _agree(pool, directory)
            if journal is not None:
                journal.append([encode(record) for record in directory.take_records()])
            if pool.rebooted:
                await pool.remember_boot()
            yield Storage(pool, directory, order, journal, recovered)
        finally:
            if journal is not None:
                journal.close()
            await pool.aclose(_PATIENCE)


def limits_of(config: ServerConfig) -> Limits:
    """Return the directory's settings."""
    instance_quotas, tenant_quotas = config.quotas
    return Limits(
        lease_grace=config.lease_grace,
        published_lease=config.session_lease,
        v1_read_grace=config.v1_read_grace,
        instance_quota_bytes=config.quota_instance_bytes,
        tenant_quota_bytes=config.quota_tenant_bytes,
        instance_quotas=instance_quotas,
        tenant_quotas=tenant_quotas,
        high_watermark=config.high_watermark,
        low_watermark=config.low_watermark,
        max_entries=config.max_entries,
        max_key_bytes=config.max_key_bytes,
    )


async def _agree(pool: Pool, directory: Directory) -> None:
    known = {region_id: directory.region(region_id) for region_id in directory.region_ids()}
    adoption = await pool.adopt((region_id, there[0]) for region_id, there in known.items() if there is not None)
    for region_id in (*adoption.missing, *adoption.short):
        keys = directory.drop_region(region_id)
        _log.warning("region %d has lost its memory: %d keys were dropped", region_id, keys)
    if adoption.swept:
        _log.info("%d unknown regions were removed", adoption.swept)
    directory.take_dropped()  # all of these are gone already
