"""Wrappers around a tier, which encode blocks and decode them again.

They compress, quantize or encrypt. :func:`wrap` puts wrappers around any tier. zstandard, cryptography and torch are
imported when a wrapper that needs one of them is made.
"""

from ._aes_gcm import AesGcm as AesGcm
from ._aes_gcm import Secrets as Secrets
from ._chain import Chain as Chain
from ._coding import BrokenWrapper as BrokenWrapper
from ._chain import ChainError as ChainError
from ._chain import Context as Context
from ._chain import Damaged as Damaged
from ._chain import LossyNotChosen as LossyNotChosen
from ._chain import MissingExtra as MissingExtra
from ._chain import Sealing as Sealing
from ._chain import UnknownTenant as UnknownTenant
from ._chain import Wrapper as Wrapper
from ._fp8 import Fp8 as Fp8
from ._transfers import WrappedLease as WrappedLease
from ._transfers import WrappedReservation as WrappedReservation
from ._transfers import WrapperStatistics as WrapperStatistics
from ._tier import WrappedTier as WrappedTier
from ._tier import layout_of as layout_of
from ._tier import slot_bytes as slot_bytes
from ._tier import wrap as wrap
from ._zstd import Zstd as Zstd
