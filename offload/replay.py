"""A replay of a request trace through an engine: ``offload replay TRACE``.

    trace -> laps -> requests -> [lookup, load, compare, store] each -> a table, or JSON

The times are of the cache alone; ``offload bench replay`` compares them with a plain dictionary that makes the same
copies. :func:`drive` sends the same requests to any cache, also to one of another project.
"""

from ._replay.baseline import Baseline as Baseline
from ._replay.clock import SkippingClock as SkippingClock
from ._replay.command import command as command
from ._replay.driver import Cache as Cache
from ._replay.driver import Driven as Driven
from ._replay.driver import Place as Place
from ._replay.driver import drive as drive
from ._replay.driver import make_places as make_places
from ._replay.engine_cache import EngineCache as EngineCache
from ._replay.engine_cache import engine_config as engine_config
from ._replay.engine_cache import open_engine_cache as open_engine_cache
from ._replay.engine_cache import places_in as places_in
from ._replay.engine_cache import source_of as source_of
from ._replay.laps import Laps as Laps
from ._replay.options import ReplayError as ReplayError
from ._replay.options import ReplayOptions as ReplayOptions
from ._replay.options import TierSpec as TierSpec
from ._replay.replayer import TraceKeys as TraceKeys
from ._replay.replayer import keys_of as keys_of
from ._replay.report import Percentiles as Percentiles
from ._replay.report import ReplayReport as ReplayReport
from ._replay.session import replay as replay
from ._replay.trace import Request as Request
from ._replay.trace import TraceError as TraceError
from ._replay.trace import parse_request as parse_request
from ._replay.trace import read_trace as read_trace
from ._replay.units import UNLIMITED as UNLIMITED
