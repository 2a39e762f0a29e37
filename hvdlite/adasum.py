"""Adasum: a reduction between sum and mean that looks at how far gradients agree.

Two gradients become  (1 - a.b / 2|a|²) a + (1 - a.b / 2|b|²) b : orthogonal ones are added, equal
ones averaged.  The rule is symmetric but not associative, so the tree over the ranks is fixed:
pairs at distance 1, 2, 4, ...; ranks beyond the largest power of two are folded into the first
ones before.

Source:
    Maleki et al. 2020, "Scaling distributed training with adaptive summation", arXiv:2006.02924.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.arithmetic import is_half
from hvdlite.types import Array

_SMALLEST = math.sqrt(sys.float_info.min)  # a squared norm below it is none


def check_adasum(dtype: np.dtype[Any], what: str) -> None:
    """Raise TypeError unless `dtype` is one of real floats."""
    if dtype.kind != "f" and not is_half(dtype):
        raise TypeError(f"{what}: Adasum is for real floats, got {dtype}")


def adasum(operands: Sequence[Array], prescale: float = 1.0, postscale: float = 1.0) -> Array:
    """Combine one tensor of all ranks.

    Args:
        operands: One array a rank, in rank order; equal shapes and dtypes; left as they are.
        prescale: Multiplies every operand before.
        postscale: Multiplies the result.

    Returns:
        A new array of the same shape and dtype; 16-bit floats are combined in float32 and rounded
        once. Scalar products and norms are taken in float64.
    """
    dtype = operands[0].dtype
    compute = np.dtype(np.float32) if is_half(dtype) else dtype
    with np.errstate(all="ignore"):  # an overflow is part of the result, on every rank alike
        values = [np.asarray(o.astype(compute) * compute.type(prescale)) for o in operands]
        size = 1 << (len(values).bit_length() - 1)
        for k in range(len(values) - size):
            values[k] = _combine(values[k], values[size + k])
        distance = 1
        while distance < size:
            for k in range(0, size, 2 * distance):
                values[k] = _combine(values[k], values[k + distance])
            distance *= 2
        # NumPy makes scalars of arrays without dimensions.
        return np.asarray(values[0] * compute.type(postscale)).astype(dtype)


def _combine(a: Array, b: Array) -> Array:
    wide_a, wide_b = a.ravel().astype(np.float64), b.ravel().astype(np.float64)
    dot, norm_a, norm_b = (float(x @ y) for x, y in _pairs(wide_a, wide_b))
    factor_a = 1.0 if norm_a < _SMALLEST else 1.0 - dot / (2 * norm_a)
    factor_b = 1.0 if norm_b < _SMALLEST else 1.0 - dot / (2 * norm_b)
    return np.asarray(a.dtype.type(factor_a) * a + b.dtype.type(factor_b) * b)


def _pairs(a: Array, b: Array) -> tuple[tuple[Array, Array], ...]:
    return (a, b), (a, a), (b, b)
