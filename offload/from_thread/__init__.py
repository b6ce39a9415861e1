"""An engine for threads that do not run trio.

The threads of an inference engine are such ones. :func:`open_engine` starts a thread that runs trio, and in it the
engine of :func:`offload.open_engine`. Everything here may be used in any thread but that one, by several threads at
once, and keeps four rules:

Rule 1. Calls of an inference engine's step never block: ``store``, ``begin_lookup``, ``begin_load``, ``poll``,
        ``request_cancel``, ``release``, and every call without a ``timeout`` except ``start``. All other calls wait for
        a bounded time. A call that waits begins the operation, and then waits for its future.
Rule 2. A wait that runs out raises :class:`WaitTimeout`. It is never an answer: not a miss, not a failure.
Rule 3. Every future ends, and no thread waits for ever: when the trio thread crashes, all futures are done, and every
        later call raises.
Rule 4. An engine belongs to the process that started it. In a forked child every call raises :class:`EngineForked` and
        leaves the engine as it is.

``_engine`` has the methods that a thread calls; ``_future`` and ``_calls`` have the futures that they return;
``_mailbox`` passes messages between the threads without a wait; ``_worker`` is the thread that runs trio; ``_reads``
and ``_loop_lock`` let another thread read and store by itself.
"""

from typing import TypeAlias

from ..preconditions import ThreadEvent

from ._engine import open_engine as open_engine
from ._engine import Engine as Engine
from ._future import StoreFuture as StoreFuture
from ._calls import LookupFuture as LookupFuture
from ._calls import Hit as Hit
from .._engine import BlocksInPlace as BlocksInPlace
from ._calls import LoadFuture as LoadFuture
from ._engine import AnyFuture as AnyFuture
from ._future import Future as Future
from ._cancellation import CancellationToken as CancellationToken
from ._engine import Statistics as Statistics
from ._engine import WhenFull as WhenFull
from ._engine import DEFAULT_TIMEOUT as DEFAULT_TIMEOUT
from .._errors import WaitTimeout as WaitTimeout
from .._errors import CallCancelled as CallCancelled
from .._errors import EngineClosed as EngineClosed
from .._errors import EngineCrashed as EngineCrashed
from .._errors import EngineForked as EngineForked

Event: TypeAlias = ThreadEvent
