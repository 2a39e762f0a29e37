"""Floats that travel with 16 bits; sums are taken in float32 and rounded once."""

from typing import Any

import numpy as np

from hvdlite.arithmetic import is_half
from hvdlite.arrays import bfloat16
from hvdlite.compression.base import Compressor
from hvdlite.types import Array


class FP16Compressor(Compressor):
    """float32 and float64 travel as float16 (range 6e-5 .. 65504); others as they are."""

    @staticmethod
    def compress(array: Array) -> tuple[Array, Any]:
        """See `Compressor.compress`."""
        return _cast(array, np.dtype(np.float16))

    @staticmethod
    def decompress(array: Array, context: Any) -> Array:
        """See `Compressor.decompress`."""
        return array if context is None else array.astype(context)


class BF16Compressor(Compressor):
    """float32 and float64 travel as bfloat16 (8 bits of precision, float32's range).

    Needs the package ml_dtypes, which JAX brings.
    """

    @staticmethod
    def compress(array: Array) -> tuple[Array, Any]:
        """See `Compressor.compress`."""
        return _cast(array, bfloat16("Compression.bf16"))

    @staticmethod
    def decompress(array: Array, context: Any) -> Array:
        """See `Compressor.decompress`."""
        return array if context is None else array.astype(context)


def _cast(array: Array, dtype: np.dtype[Any]) -> tuple[Array, Any]:
    if array.dtype.kind != "f" or is_half(array.dtype):
        return array, None
    with np.errstate(over="ignore"):  # becomes inf, as the sum of such values would
        return array.astype(dtype), array.dtype
