"""The shared page store: KV cache in memory that several processes map.

`maru` is usable alone: nothing in it knows `backends` or `offload`. ``maru-server`` serves a pool; :class:`MaruHandler` is its
client for trio, :class:`maru.blocking.MaruHandler` the same for threads without trio; :func:`open_server` is the server
inside a trio program. Names are imported when they are first used: the eviction policies alone do not import
sockets.
"""

from typing import TYPE_CHECKING

from .base.lazy import lazily

from .base.errors import MaruError as MaruError
from .base.errors import NoAnswer as NoAnswer
from .base.errors import FateUnknown as FateUnknown
from .base.errors import ServerLost as ServerLost
from .base.errors import ServerRefused as ServerRefused
from .base.errors import UntrustedServer as UntrustedServer
from .base.errors import LeaseLost as LeaseLost
from .base.errors import Damaged as Damaged
from .base.errors import HandlerClosed as HandlerClosed
from .base.errors import NotOwner as NotOwner
from .base.errors import CannotMap as CannotMap
from .base.errors import PoolFull as PoolFull
from .base.errors import PoolInUse as PoolInUse
from .base.errors import PoolUnusable as PoolUnusable
from .base.errors import JournalFailed as JournalFailed
from .base.errors import ForeignJournal as ForeignJournal
from .base.errors import BadFrame as BadFrame
from .base.errors import BadMessage as BadMessage
from .base.errors import ConfigError as ConfigError

if TYPE_CHECKING:
    from ._client.handler import MaruHandler as MaruHandler
    from ._config import MaruConfig as MaruConfig
    from ._client.answers import Stored as Stored
    from ._client.answers import Loaded as Loaded
    from ._client.answers import Deleted as Deleted
    from ._client.views import AllocHandle as AllocHandle
    from ._client.views import MemoryInfo as MemoryInfo
    from ._client.columns import AllocBatch as AllocBatch
    from ._client.columns import HeldBatch as HeldBatch
    from ._server.server import open_server as open_server
    from ._server.server import MaruServer as MaruServer
    from ._server.server import ServerStatistics as ServerStatistics
    from ._directory.pool_map import PoolMap as PoolMap
    from ._directory.pool_map import RegionMap as RegionMap
    from ._config import ServerConfig as ServerConfig

_HOMES = {
    "MaruHandler": "._client.handler",
    "MaruConfig": "._config",
    "Stored": "._client.answers",
    "Loaded": "._client.answers",
    "Deleted": "._client.answers",
    "AllocHandle": "._client.views",
    "MemoryInfo": "._client.views",
    "AllocBatch": "._client.columns",
    "HeldBatch": "._client.columns",
    "open_server": "._server.server",
    "MaruServer": "._server.server",
    "ServerStatistics": "._server.server",
    "PoolMap": "._directory.pool_map",
    "RegionMap": "._directory.pool_map",
    "ServerConfig": "._config",
}

lazily(__name__, _HOMES)
