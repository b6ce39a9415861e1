"""A storage backend for SGLang's HiCache: its pages of KV go into the tiers of an engine, and come back in another process.

SGLang loads :class:`HiCacheOffload` by its type ``dynamic``; what is set stands in
``--hicache-storage-backend-extra-config``, beside an ``engine`` table that names the tiers. SGLang is imported when the class
is asked for, not before: everything else here runs, and is tested, without it.

Rule 1. SGLang sees no fault of ours. What cannot be had is not cached, what cannot be stored is not: it is counted by its name,
        and said in the log once. Only what is set wrongly raises, when SGLang attaches the backend.
Rule 2. Every call ends within its timeout, and when it has ended nothing of ours touches SGLang's memory any more: a copy that
        is late finds its pages revoked.
Rule 3. A page is one block, whatever number of runs it has in SGLang's memory, and is copied once each way.
Rule 4. The bytes of a page are named by all that they depend on: two layouts, dtypes or ranks have no key in common.

``_naming`` says what a page is called, and is pure; ``_settings`` what can be set; ``_pages`` is SGLang's memory as source and
destination; ``_storage`` asks the engine and makes answers of what it says. Of SGLang, ``_hicache`` knows what ``_sglang`` has.
"""

from typing import TYPE_CHECKING

from maru.base.lazy import lazily

if TYPE_CHECKING:
    from ._hicache import HiCacheOffload as HiCacheOffload

lazily(__name__, {"HiCacheOffload": "._hicache"})
