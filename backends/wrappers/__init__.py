"""Wrappers around a tier: blocks are compressed, quantized or encrypted on their way in, and back on their way out.

:func:`wrap` puts them around any tier. Nothing here imports zstandard, cryptography or torch before a wrapper that needs it is
made.
"""

from ._aes_gcm import AesGcm as AesGcm
from ._aes_gcm import Secrets as Secrets
from ._chain import Chain as Chain
from ._coding import BrokenWrapper as BrokenWrapper
from ._contract import ChainError as ChainError
from ._contract import Context as Context
from ._contract import Damaged as Damaged
from ._contract import LossyNotChosen as LossyNotChosen
from ._contract import MissingExtra as MissingExtra
from ._contract import Sealing as Sealing
from ._contract import UnknownTenant as UnknownTenant
from ._contract import Wrapper as Wrapper
from ._fp8 import Fp8 as Fp8
from ._lease import WrappedLease as WrappedLease
from ._reservation import WrappedReservation as WrappedReservation
from ._source import WrappedSourceTier as WrappedSourceTier
from ._source import WrappedSpillingTier as WrappedSpillingTier
from ._statistics import WrapperStatistics as WrapperStatistics
from ._tier import WrappedPlace as WrappedPlace
from ._tier import WrappedRemoteTier as WrappedRemoteTier
from ._tier import WrappedTier as WrappedTier
from ._wrapping import layout_of as layout_of
from ._wrapping import slot_bytes as slot_bytes
from ._wrapping import wrap as wrap
from ._zstd import Zstd as Zstd
