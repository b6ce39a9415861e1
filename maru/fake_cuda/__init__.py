"""Test code that uses a GPU where there is none: a CUDA driver in Python, behind the calls of the real one.

:class:`FakeCuda` is a driver whose functions are C function pointers with the prototypes of libcuda, so that everything above
it, :class:`maru.base.memory.cuda.Driver` included, is the code that runs on a GPU. :func:`use` puts it in the place of libcuda.

Its copies happen as late as CUDA allows, when a synchronization needs them, or at other moments that :func:`every_order` goes
through. It refuses what CUDA refuses (the source has a table that says how each refusal is known) and copies with the CPU: it
says nothing about speed. :data:`CHECKS` is the suite that it and a GPU must both pass.
"""

from ._check import CHECKS as CHECKS
from ._fake import FakeCuda as FakeCuda
from ._fake import use as use
from ._orders import every_order as every_order
