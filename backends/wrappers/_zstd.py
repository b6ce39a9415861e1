"""Compression with zstd, if that makes a block smaller.

One byte before a block marks it as a zstd frame or as raw bytes, so that an incompressible block costs one byte and no
time to decode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ._chain import Context, Damaged, MissingExtra
from ._coding import Pool

if TYPE_CHECKING:
    import zstandard

_RAW: Final = 0
_FRAME: Final = 1
_SMALLEST: Final = 32
"""Least size in bytes of a block that is compressed."""
_LEVELS: Final = range(-7, 23)
_SMALLEST_WINDOW: Final = 1 << 10  # zstd's own


class Zstd:
    """Lossless compression with Zstandard.

    In a tier of fixed slots it gains no room: a slot must hold an incompressible block. It saves bytes to move and
    write if a tier writes only used bytes, as :class:`backends.file.FileTier` does.

    Args:
        level: from -7 (fastest) to 22 (smallest). Any level decodes the blocks of any other.

    Raises:
        MissingExtra: zstandard is not installed.
        ValueError: a level that zstd does not have.
    """

    def __init__(self, level: int = 1) -> None:
        try:
            import zstandard
        except ImportError as exc:
            raise MissingExtra("Zstd", "zstandard", "zstd") from exc
        if level not in _LEVELS:
            raise ValueError(f"level is {level}, but must be from {_LEVELS[0]} to {_LEVELS[-1]}")
        self._zstd = zstandard
        self.level: int = level
        """The effort of compression."""
        self._compressors: Pool[zstandard.ZstdCompressor] = Pool(
            lambda: zstandard.ZstdCompressor(level=self.level, write_checksum=False)
        )
        self._decompressors: Pool[zstandard.ZstdDecompressor] = Pool(zstandard.ZstdDecompressor)

    def __repr__(self) -> str:
        return f"Zstd(level={self.level})"

    @property
    def id(self) -> bytes:
        """Name of the format, the same for every level."""
        return b"zstd/1"

    @property
    def lossy(self) -> bool:
        """Whether decoded bytes may differ: False."""
        return False

    def bound(self, size: int) -> int:
        """Return the largest size of a compressed block.

        One byte more than the block.
        """
        return size + 1

    def encode(self, context: Context, src: memoryview, dst: memoryview) -> int:
        """Compress a block, if that makes it smaller."""
        size = src.nbytes
        if size >= _SMALLEST:
            with self._compressors.take() as compressor:
                made = _fill(compressor.stream_reader(src, size=size), dst[1:size])
            if made is not None:
                dst[0] = _FRAME
                return 1 + made
        dst[0] = _RAW
        dst[1 : 1 + size] = src
        return 1 + size

    def decode(self, context: Context, src: memoryview, dst: memoryview) -> None:
        """Decompress a block.

        Raises:
            Damaged: it is no frame, or not one of so many bytes.
        """
        kind, body = (src[0], src[1:]) if src.nbytes else (None, src)
        if kind == _RAW and body.nbytes == dst.nbytes:
            dst[:] = body
            return
        if kind != _FRAME:
            raise Damaged
        try:
            frame = self._zstd.get_frame_parameters(body)
            # A frame may ask for a window of gigabytes: allow no more than the expected size.
            if frame.content_size != dst.nbytes or frame.window_size > max(_SMALLEST_WINDOW, dst.nbytes):
                raise Damaged
            with self._decompressors.take() as decompressor:
                made = _fill(decompressor.stream_reader(body, read_across_frames=False), dst)
        except self._zstd.ZstdError as exc:
            raise Damaged from exc
        if made != dst.nbytes:
            raise Damaged


def _fill(reader: zstandard.ZstdCompressionReader | zstandard.ZstdDecompressionReader, dst: memoryview) -> int | None:
    """Read to the end. Return the number of bytes.

    None if there are more than ``dst`` has room for.
    """
    made = 0
    while made < dst.nbytes:
        n = reader.readinto(dst[made:])
        if not n:
            return made
        made += n
    return None if reader.read(1) else made
