"""Client of a daemon (:mod:`offload.daemon`): its tiers as one tier.

The engine's own faces stay: ``offload.open_engine(cache, [DaemonTier()])`` for trio,
``offload.from_thread.open_engine(cache, [DaemonTier()])`` for threads and asyncio, one line other than with tiers of
its own. :func:`open_client` is shorter. For the daemon to copy in place, the tensors of the cache lie in
:class:`SharedMemory`, or on a CUDA device.

:func:`open_pages`, and :class:`BlockingPages` for threads, write and read pages of the daemon's page store in this
process.
"""

from typing import TYPE_CHECKING

from maru.base.lazy import lazily

if TYPE_CHECKING:
    from ._opening import open_client as open_client
    from ._tier import DaemonTier as DaemonTier
    from ._shared import SharedMemory as SharedMemory
    from ._shared_blocks import SharedBlocks as SharedBlocks
    from ._places import SharedPlace as SharedPlace
    from ._places import CacheDescription as CacheDescription
    from ._connection import open_connection as open_connection
    from ._connection import DaemonConnection as DaemonConnection
    from ._pages import open_pages as open_pages
    from ._pages import Pages as Pages
    from ._pages import PageReservation as PageReservation
    from ._pages import PageLease as PageLease
    from ._blocking_pages import BlockingPages as BlockingPages
    from ._errors import DaemonTierFailed as DaemonTierFailed
    from ._errors import DaemonUnavailable as DaemonUnavailable
    from ._errors import DaemonRefused as DaemonRefused
    from ._errors import DaemonBusy as DaemonBusy
    from ._errors import NoPageStore as NoPageStore
    from ..daemon._handover import CannotHandOver as CannotHandOver

_HOMES = {
    "open_client": "._opening",
    "DaemonTier": "._tier",
    "SharedMemory": "._shared",
    "SharedBlocks": "._shared_blocks",
    "SharedPlace": "._places",
    "CacheDescription": "._places",
    "open_connection": "._connection",
    "DaemonConnection": "._connection",
    "open_pages": "._pages",
    "Pages": "._pages",
    "PageReservation": "._pages",
    "PageLease": "._pages",
    "BlockingPages": "._blocking_pages",
    "DaemonTierFailed": "._errors",
    "DaemonUnavailable": "._errors",
    "DaemonRefused": "._errors",
    "DaemonBusy": "._errors",
    "NoPageStore": "._errors",
    "CannotHandOver": "..daemon._handover",
}

lazily(__name__, _HOMES)
