"""Copies between a CUDA device and pages: one copier per device.

:mod:`._pieces` decides which copies that takes, in numpy columns; :mod:`._copier` has the device make them.
"""

from maru.base.memory.cuda import Event as Event

from ._copier import Copier as Copier
from ._copier import DeviceLost as DeviceLost
from ._copier import close_copiers as close_copiers
from ._copier import copier_of as copier_of
from ._pieces import BlockPieces as BlockPieces
from ._pieces import Pieces as Pieces
