"""Pinned host memory in chunks.

A server has the memory for many processes, or this process has its own. The server (``offload pinned-pool``, or
:func:`serve`) keeps a pool for each connected client. An engine's threads, which need not use trio, take blocks from it
as from their own memory::

    pool = ServerPinnedMemoryPool(torch.bfloat16, pool_size=1024)
    block = pool.alloc_same_pin_tensor(tensor)      # None if the pool is full
    block.copy_(tensor)
    again = block.to("cpu")
    pool.free(block)

On the server's host both sides map the pool, and the connection carries ids only. :class:`PinnedMemoryPool` has the same
methods without a server; ``pinned_memory_pool(..., use_server_pool=...)`` chooses. torch is imported when a tensor is touched.
"""

from ._pools import ServerPinnedMemoryPool as ServerPinnedMemoryPool
from ._pools import PinnedMemoryPool as PinnedMemoryPool
from ._pools import pinned_memory_pool as pinned_memory_pool
from ._pools import MemoryPool as MemoryPool
from ._blocks import ServerMemoryBlock as ServerMemoryBlock
from ._blocks import PinnedMemoryBlock as PinnedMemoryBlock
from ._blocks import MemoryBlock as MemoryBlock
from ._server import serve as serve
from ._server import open_server as open_server
from ._server import PinnedPoolServer as PinnedPoolServer
from ._server import PinnedPoolStatistics as PinnedPoolStatistics
from ._config import PinnedPoolConfig as PinnedPoolConfig
from ._config import Pin as Pin
from ._config import Knob as Knob
from ._config import knobs as knobs
from ._config import pinned_pool_config as pinned_pool_config
from ._client import PinnedPoolClient as PinnedPoolClient
from ._client import PoolMemoryInfo as PoolMemoryInfo
from ._table import Allocation as Allocation
from ._table import Usage as Usage
from ._errors import PinnedPoolError as PinnedPoolError
from ._errors import PoolUnreachable as PoolUnreachable
from ._errors import PoolUntrusted as PoolUntrusted
from ._errors import PoolLost as PoolLost
from ._errors import PoolTimeout as PoolTimeout
from ._errors import PoolRefused as PoolRefused
from ._errors import PoolClosed as PoolClosed
from ._errors import PoolForked as PoolForked
from ._errors import BlockFreed as BlockFreed
from ._errors import PinnedPoolConfigError as PinnedPoolConfigError
