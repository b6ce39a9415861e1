"""Maru as the first and only level of an engine.

:class:`MaruL1` reserves pages that the caller fills, commits them, and lends views of stored blocks, whoever stored
them. :class:`MaruL1Dispatcher` finds reservations and leases by key, under the names that LMCache's integration of Maru
uses, and :class:`BlockingMaruL1` is for threads that do not use trio.
"""

from ._maru_l1 import MaruL1 as MaruL1
from ._writing import WriteReservation as WriteReservation
from ._reading import ViewLease as ViewLease
from ._dispatcher import MaruL1Dispatcher as MaruL1Dispatcher
from ._blocking import BlockingMaruL1 as BlockingMaruL1
from ._layout import KVLayout as KVLayout
from ._layout import TensorPlace as TensorPlace
from ._status import L1Status as L1Status
from ._errors import NoLayout as NoLayout
from ._errors import LayoutMismatch as LayoutMismatch
from ._errors import ReservationOver as ReservationOver
