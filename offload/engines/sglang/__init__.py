"""A storage backend that keeps the KV pages of SGLang's HiCache.

It stores them in the tiers of an engine.

Another process can load them from there. SGLang loads :class:`HiCacheOffload` by its type ``dynamic``; its settings are
in ``--hicache-storage-backend-extra-config``, next to an ``engine`` table that names the tiers. SGLang is imported when
the class is first accessed, not before: everything else here runs, and is tested, without it.

Rule 1. SGLang sees no fault of ours. A page that cannot be loaded counts as not cached, one that cannot be stored is
    not; the fault is counted by its name, and logged once. Only a wrong setting raises, when SGLang attaches the
    backend.
Rule 2. Every call ends within its timeout, and when it has ended nothing of ours touches SGLang's memory any more: a
    copy that is late finds its pages revoked.
Rule 3. A page is one block, whatever number of runs it has in SGLang's memory, and is copied once each way.
Rule 4. A page's key depends on everything that its bytes depend on: two layouts, dtypes or ranks have no key in common.

``_naming`` makes the keys of pages, and is pure; ``_settings`` are the settings; ``_pages`` is SGLang's memory as
source and destination; ``_storage`` asks the engine and converts its results. ``_hicache`` uses only the names of
SGLang in ``_sglang``.
"""

from typing import TYPE_CHECKING

from maru.base.lazy import lazily

if TYPE_CHECKING:
    from ._hicache import HiCacheOffload as HiCacheOffload

lazily(__name__, {"HiCacheOffload": "._hicache"})
