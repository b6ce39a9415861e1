"""The engine: tiers joined by pipelines. What an inference engine calls.

    source --pipeline--> tiers[0] --pipeline--> tiers[1] ...        store: from each tier to the next slower one
                            ^------ promotion -----'                after a load: back into a faster tier
    destination <------- load ------- hit <------- lookup           read: each tier, the fastest first

It decides one thing: which tier a block of a prefix is read from. All else it composes: pipelines move blocks, tiers hold them.

Rule 1. A hit holds what it found: until it is released none of its blocks is evicted or deleted, wherever they lie. It ends
        with its engine at the latest: one that was forgotten is released then, and logged.
Rule 2. Only a gapless prefix is of use. What is missing or damaged at position p makes everything behind p unusable,
        unless a slower tier has it, and a load says so in one number.
Rule 3. What is pinned is given back on every path, also when the caller is cancelled at any await in here.
Rule 4. A tier that fails is never an error of the engine: a lookup names it, a load ends before its blocks, a delete answers
        ``UNAVAILABLE``.

To read it: ``config`` says what can be set, ``opening`` puts an engine together (``factories`` and ``places`` for its tiers,
``routes`` for its pipelines), ``engine`` is what is called, ``lookup``, ``loading`` and ``promotion`` are how blocks come back.
"""

from .opening import open_engine as open_engine
from .config import EngineConfig as EngineConfig
from .config import Route as Route
from .engine import Engine as Engine
from .lookup import Hit as Hit
from .loading import LoadResult as LoadResult
from .statistics import EngineStatistics as EngineStatistics
from .loading import LoadFailed as LoadFailed
from .loading import BEHIND_A_GAP as BEHIND_A_GAP
from .config import Chain as Chain
from .config import OnLoadFailure as OnLoadFailure
from .config import OnEnterFailure as OnEnterFailure
from .config import PolicyLike as PolicyLike
from .config import TierLike as TierLike
from .config import engine_knobs as engine_knobs
from .factories import presence_filter as presence_filter
