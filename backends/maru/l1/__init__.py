"""Maru as the first level of an engine: no tier before it, none behind.

:class:`MaruL1` reserves pages that the caller fills by himself, commits them, and lends views of what is there, wherever it
was stored. :class:`MaruL1Dispatcher` has the same under the names that LMCache's integration of Maru uses, by key, and
:class:`BlockingMaruL1` for threads that know no trio.
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
