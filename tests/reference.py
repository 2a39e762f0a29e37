"""The arithmetic of a reduction, computed element by element: what every backend must come to.

Independent of the library: whole numbers are Python's, the others NumPy's scalars.
"""

from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np

from hvdlite.types import Average, Max, Min, Product, ReduceOp, Sum

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", BFLOAT16, "float32", "float64", "longdouble"]
COMPLEX = ["complex64", "complex128"]
DTYPES = [np.dtype(d) for d in ("bool", *INTEGERS, *FLOATS, *COMPLEX)]
OPS = [Average, Sum, Min, Max, Product]


def has_meaning(op: ReduceOp, dtype: np.dtype[Any]) -> bool:
    """Whether `op` can reduce `dtype`."""
    if dtype.kind == "b":
        return op is not Average
    return dtype.kind != "c" or op not in (Min, Max)


def wrap(value, dtype):
    """A whole number as an integer type holds it."""
    info = np.iinfo(dtype)
    return (value - int(info.min)) % 2**info.bits + int(info.min)


def scaled_integer(value, factor, dtype, divisor=1):
    """By a fractional factor in float64, toward zero; by a whole one exactly."""
    is_whole = factor.is_integer() and np.iinfo(dtype).min <= factor <= np.iinfo(dtype).max
    if is_whole and divisor == 1:
        return wrap(value * int(factor), dtype)
    return int(float(value) * factor / divisor)


def toward_zero(numerator, denominator):
    return abs(numerator) // denominator * (-1 if numerator < 0 else 1)


def reference_integer(op, dtype, values, prescale, postscale):
    values = [scaled_integer(int(v), prescale, dtype) for v in values]
    if op in (Sum, Average):
        total = wrap(sum(values), dtype)
        if op is Average and postscale == 1.0:
            return toward_zero(total, len(values))
        if op is Average:
            return scaled_integer(total, postscale, dtype, len(values))
    elif op is Product:
        total = wrap(reduce(lambda a, b: a * b, values), dtype)
    else:
        total = (min if op is Min else max)(values)
    return scaled_integer(total, postscale, dtype)


def reference_inexact(op, dtype, values, prescale, postscale):
    """In the compute type, rank by rank, one factor, rounded once."""
    wide = np.dtype(np.float32) if dtype in (np.float16, BFLOAT16) else dtype
    real = wide.type(0).real.dtype.type
    values = [wide.type(v) for v in values]
    if op in (Sum, Average):
        factor = prescale * postscale / (len(values) if op is Average else 1)
        total = reduce(lambda a, b: a + b, values)
    else:
        if prescale != 1.0:
            values = [scaled(v, real(prescale)) for v in values]
        factor = postscale
        if op is Product:
            total = reduce(lambda a, b: a * b, values)
        elif any(np.isnan(v) for v in values):
            total = wide.type(np.nan)
        else:
            total = (min if op is Min else max)(values)
    if factor != 1.0:
        total = scaled(total, real(factor))
    return dtype.type(total)


def scaled(value, factor):
    """Part by part: a complex product would make 0 * inf of an infinite part."""
    if isinstance(value, np.complexfloating):
        return type(value)(complex(value.real * factor, value.imag * factor))
    return value * factor


def reference(op, dtype, blocks, prescale=1.0, postscale=1.0):
    columns = list(zip(*(b.tolist() if dtype.kind in "biu" else b for b in blocks), strict=True))
    if dtype.kind == "b":
        combine = any if op in (Sum, Max) else all
        return np.array([combine(column) for column in columns], dtype)
    one = reference_integer if dtype.kind in "iu" else reference_inexact
    with np.errstate(all="ignore"):
        return np.array([one(op, dtype, c, prescale, postscale) for c in columns], dtype)


def assert_same(found, expected):
    """Equal bit for bit, but for what a NaN carries."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if found.dtype.kind == "c":
        assert_same(found.real, expected.real)
        assert_same(found.imag, expected.imag)
        return
    if found.dtype == BFLOAT16:  # NumPy's comparison does not know its NaN
        found, expected = found.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_array_equal(found, expected)
    if found.dtype.kind not in "biu":
        numbers = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(found[numbers]), np.signbit(expected[numbers]))


def assert_reduced(found, expected, op):
    """Equal, but for what NumPy's vector loops choose freely: the zero of Min, complex rounding."""
    if op is Product and found.dtype.kind == "c":
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    elif op in (Min, Max):
        assert_same(
            found + found.dtype.type(0), expected + found.dtype.type(0)
        )  # -0.0 + 0.0 is 0.0
    else:
        assert_same(found, expected)


def operands(dtype, num_ranks, size, seed, *, limit=None):
    """Numbers of every magnitude, with the special ones among them."""
    rng = np.random.default_rng(seed)
    blocks = []
    for _ in range(num_ranks):
        if dtype.kind == "b":
            block = rng.integers(0, 2, size).astype(bool)
        elif dtype.kind in "iu":
            info = np.iinfo(dtype)
            low, high = (int(info.min), int(info.max)) if limit is None else (-limit, limit)
            low = max(low, int(info.min))
            block = rng.integers(low, high, size, endpoint=True, dtype=dtype)
            special = rng.random(size) < 0.3
            block[special] = rng.choice(np.array([low, high, 0, 1], dtype), special.sum())
        else:
            wide = rng.normal(size=size) * 2.0 ** rng.integers(-6, 6, size)
            block = wide.astype(dtype)
            if dtype.kind == "c":
                block += (1j * rng.normal(size=size)).astype(dtype)
            else:
                special = rng.random(size) < 0.3
                values = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 60000.0, 3e38]
                with np.errstate(over="ignore"):
                    block[special] = rng.choice(values, special.sum()).astype(dtype)
        blocks.append(block)
    return blocks
