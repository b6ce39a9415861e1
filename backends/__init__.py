"""Places a block of KV cache can live: one module for each place.

Importing this package imports no torch: :class:`DeviceTier` does, when one is made.
"""

from ._errors import BackendError as BackendError
from ._errors import BlockSizeError as BlockSizeError
from ._errors import CapacityError as CapacityError
from ._errors import DuplicateKeys as DuplicateKeys
from ._errors import MissingKeys as MissingKeys
from ._errors import PlaceClosed as PlaceClosed
from ._errors import PlaceInUse as PlaceInUse
from ._errors import StrayPath as StrayPath
from ._errors import Unproven as Unproven
