"""The page store for threads that know no trio: :class:`MaruHandler` with blocking calls."""

from ._blocking import Begin as Begin
from ._blocking import MaruHandler as MaruHandler
from ._driving import Ticket as Ticket
