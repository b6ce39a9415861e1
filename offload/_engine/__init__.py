"""The engine, which stores, looks up and loads blocks over several tiers.

It joins the tiers by pipelines:

    source --pipeline--> tiers[0] --pipeline--> tiers[1] ...        store: from each tier to the next slower one
                            ^------ promotion -----'                after a load: back into a faster tier
    destination <------- load ------- hit <------- lookup           read: each tier, the fastest first

It decides one thing: the tier from which each block of a prefix is read. Pipelines move blocks, and tiers hold them.
The rules:

Rule 1. A hit pins the blocks that a lookup found: until it is released none of them is evicted or deleted, in any tier.
        The end of the engine releases hits that are still held, and logs them.
Rule 2. Only a prefix without gaps is of use. A missing or damaged block at position p makes all blocks after p
        unusable, unless a slower tier has it; a load returns the usable length as one number.
Rule 3. Pins are released on every path, also when the caller is cancelled at any await in this package.
Rule 4. A failing tier is never an error of the engine: a lookup names it, a load ends before its blocks, a delete
        answers ``UNAVAILABLE``.

The modules, in the order in which to read them: ``config`` has the settings; ``opening`` puts an engine together
(``factories`` and ``places`` make its tiers, ``routes`` its pipelines); ``engine`` has the public methods; ``lookup``,
``loading`` and ``promotion`` bring blocks back; ``direct`` makes short reads in the calling thread; ``shadow`` and
``layout_check`` compare loaded blocks with the stored ones; ``rates``, ``load_or_recompute``, ``load_choice`` and
``rate_probe`` decide whether loading is faster than computing.
"""

from .opening import open_engine as open_engine
from .config import EngineConfig as EngineConfig
from .config import LoadOrRecompute as LoadOrRecompute
from .config import Route as Route
from .engine import Engine as Engine
from .lookup import Hit as Hit
from .in_place import BlocksInPlace as BlocksInPlace
from .load_or_recompute import Advice as Advice
from .load_or_recompute import LeftOut as LeftOut
from .loading import LoadResult as LoadResult
from .layout_check import LayoutCheck as LayoutCheck
from .statistics import ShadowStatistics as ShadowStatistics
from .statistics import ChoiceStatistics as ChoiceStatistics
from .rates import ComputeRate as ComputeRate
from .rates import LoadRate as LoadRate
from .statistics import EngineStatistics as EngineStatistics
from .loading import LoadFailed as LoadFailed
from .loading import BEHIND_A_GAP as BEHIND_A_GAP
from .loading import GIVEN_UP as GIVEN_UP
from .config import Chain as Chain
from .config import OnLoadFailure as OnLoadFailure
from .config import OnEnterFailure as OnEnterFailure
from .config import PolicyLike as PolicyLike
from .config import TierLike as TierLike
from .config import engine_knobs as engine_knobs
from .factories import presence_filter as presence_filter
