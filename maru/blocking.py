"""The page store for threads that know no trio: :class:`MaruHandler` with blocking calls."""

from ._client.blocking import Begin as Begin
from ._client.blocking import MaruHandler as MaruHandler
from ._client.driver import PendingCall as PendingCall
