"""Tools for tests of places and of moving blocks.

* :func:`check_tier`: the contract of a place as one async test, for yours too.
* :class:`FakeTier`: a place with a dial for every failure, in virtual time: it starts no thread.
* :class:`PacedTier`: a place in front of another one, whose loads take a set time, in virtual time or for real.
* :class:`NullExecutor`: a place that copies nothing, to measure everything else.
* :func:`payload_of`: the content of a block, as a function of its key, so that any copy of it can be judged.
"""

from typing import TYPE_CHECKING

from maru.base.lazy import lazily

from ._fake import FakeTier as FakeTier
from ._fake import Faults as Faults
from ._fake import NullExecutor as NullExecutor
from ._fake import payload_of as payload_of
from ._paced import PacedTier as PacedTier

if TYPE_CHECKING:
    from ._check_tier import check_tier as check_tier

# It imports `trio.testing`, and that imports pytest if it is installed: a tenth of a second, which every command and
# every worker process of the harness would pay for a fake tier.
lazily(__name__, {"check_tier": "._check_tier"})
