"""Compression: what travels may be smaller than what is reduced.  One file a kind."""

from hvdlite.compression.base import Codec, Compressor, NoneCompressor, check_compression
from hvdlite.compression.cast import BF16Compressor, FP16Compressor

__all__ = ["Codec", "Compression", "Compressor", "check_compression"]


class Compression:
    """The compressions that come with hvdlite; any subclass of `Compressor` is one too."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
