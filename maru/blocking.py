"""The page store for threads without trio: a blocking :class:`MaruHandler`."""

from ._client.blocking import Begin as Begin
from ._client.blocking import MaruHandler as MaruHandler
from ._client.driver import PendingCall as PendingCall
