"""A CUDA driver in Python, for tests without a GPU.

:class:`FakeCuda` is a driver whose functions are C function pointers with the prototypes of libcuda, so that everything
above it, :class:`maru.base.memory.cuda.Driver` included, is the code that runs on a GPU. :func:`use` puts it in the
place of libcuda.

Its copies happen as late as CUDA allows, when a synchronization needs them, or at the other moments that
:func:`every_order` tries. It refuses the calls that CUDA refuses (a table in the source has the source for each
refusal) and copies with the CPU: its speed means nothing. :data:`CHECKS` is the suite that it and a GPU must both pass.
"""

from ._check import CHECKS as CHECKS
from ._fake import FakeCuda as FakeCuda
from ._fake import use as use
from ._orders import every_order as every_order
