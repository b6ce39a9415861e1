"""Locations of keys, with their readers and owners.

Pure: facts and the time go in, answers come out.
"""

from .directory import Directory as Directory
from .statistics import DirectoryStatistics as DirectoryStatistics
from .statistics import InstanceUsage as InstanceUsage
from .statistics import KeyFacts as KeyFacts
from .image import DirectoryImage as DirectoryImage
from .limits import Limits as Limits
from .pool_map import PoolMap as PoolMap
from .pool_map import RegionMap as RegionMap
from .locations import Columns as Columns
from .locations import GivenBack as GivenBack
from .locations import Location as Location
from .locations import Registration as Registration
from .._wire.messages_own import DropAnswer as DropAnswer
from .._wire.messages_own import Returns as Returns
from .._wire.messages_own import StoreStatus as StoreStatus
