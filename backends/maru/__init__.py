"""The page store as a tier.

Its blocks lie in pages of shared memory that every process of this machine can read in place. A block takes one hop:
from its source straight into a page of this process's own region, and one STORE message registers the whole batch.
Reading it back, here or in another process, takes a copy, and no message while the server's index is mapped and its
lease lasts; else one FIND. The bytes are never sent.

One page holds one block. The index may not be able to answer, so this tier asks the server questions that other tiers
answer at once: there is no ``contains_nowait``, and a ``reserve_nowait`` that would have to ask raises
:class:`trio.WouldBlock`.
"""

from ._answers import NotStored as NotStored
from ._lease import MaruLease as MaruLease
from ._names import KeyNames as KeyNames
from ._names import KeyNaming as KeyNaming
from ._reservation import MaruReservation as MaruReservation
from ._tier import MaruTier as MaruTier
from ._tier import PageSizeError as PageSizeError
