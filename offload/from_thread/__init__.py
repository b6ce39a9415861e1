"""Drive an engine from a thread that knows no trio: the embedding face, for an inference engine's own threads.

:func:`open_engine` starts a thread that runs trio, and in it the engine of :func:`offload.open_engine`. Everything here may be
used in any thread but that one, by several threads at once, and keeps four rules:

Rule 1. What an inference engine calls in its step never blocks: ``store``, ``begin_lookup``, ``begin_load``, ``poll``,
        ``request_cancel``, ``release``, and whatever has no ``timeout`` and is not ``start``. The others wait, and each of them
        has a bound. A call that waits is one that is begun, and then waited for.
Rule 2. A wait that runs out raises :class:`WaitTimeout`. It is never an answer: not a miss, not a failure.
Rule 3. Every future ends, and no thread waits for ever: when the trio side crashes, all futures are done, and every later call
        raises.
Rule 4. An engine belongs to the process that started it. In a forked child every call raises :class:`EngineForked`, and
        nothing of the engine is touched.

``_engine`` is what a thread calls, ``_future`` and ``_calls`` what it gets back, ``_mailbox`` how messages cross between the
threads without a wait, ``_worker`` the thread that runs trio.
"""

from typing import TypeAlias

from ..preconditions import ThreadEvent

from ._engine import open_engine as open_engine
from ._engine import Engine as Engine
from ._future import StoreFuture as StoreFuture
from ._calls import LookupFuture as LookupFuture
from ._calls import Hit as Hit
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
