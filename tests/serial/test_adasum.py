"""Adasum as a function: the rule for two, the tree over many, its types and its limits."""

import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.adasum import adasum, check_adasum
from reference import BFLOAT16

FLOATS = ["float16", BFLOAT16, "float32", "float64", "longdouble"]
TOLERANCES = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5}


def of_two(a, b):
    """The rule in exact fractions."""
    dot, norm_a, norm_b = (
        sum(x * y for x, y in zip(*pair, strict=True)) for pair in ((a, b), (a, a), (b, b))
    )
    for_a = 1 - dot / (2 * norm_a) if norm_a else Fraction(1)
    for_b = 1 - dot / (2 * norm_b) if norm_b else Fraction(1)
    return [for_a * x + for_b * y for x, y in zip(a, b, strict=True)]


def tree(gradients):
    """Neighbours first, then pairs of pairs; what is beyond a power of two joins the first ones."""
    gradients = [[Fraction(float(x)) for x in g.ravel()] for g in gradients]
    power = 1 << int(math.log2(len(gradients)))
    for k, extra in enumerate(gradients[power:]):
        gradients[k] = of_two(gradients[k], extra)
    gradients = gradients[:power]
    while len(gradients) > 1:
        gradients = [of_two(a, b) for a, b in zip(gradients[::2], gradients[1::2], strict=True)]
    return np.array([float(x) for x in gradients[0]])


def gradients(num_ranks, shape, dtype, seed):
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.normal(size=shape) + 0.5).astype(dtype) for _ in range(num_ranks)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 6, 7, 8, 9, 13])
def test_the_tree_is_that_of_the_formula(dtype, num_ranks):
    given = gradients(num_ranks, 12, dtype, num_ranks)
    before = [g.copy() for g in given]
    found = adasum(given)
    assert found.dtype == np.dtype(dtype)
    tolerance = TOLERANCES.get(np.dtype(dtype).name, 1e-12)
    np.testing.assert_allclose(
        found.astype(np.float64), tree(before), rtol=tolerance, atol=tolerance
    )
    for g, old in zip(given, before, strict=True):
        assert g.tobytes() == old.tobytes()
        assert not np.shares_memory(found, g)


def test_of_two_by_hand():
    found = adasum([np.array([1.0, 0.0]), np.array([1.0, 1.0])])
    # dot 1, norms 1 and 2: half of the first and three quarters of the second.
    assert found.tolist() == [1.25, 0.75]


def test_three_ranks_fold_the_last_into_the_first():
    a, b, c = np.array([1.0, 0.0]), np.array([0.0, 1.0]), np.array([1.0, 0.0])
    # a and c are equal, so they stay as one; with b, which is orthogonal, they add up.
    assert adasum([a, b, c]).tolist() == [1.0, 1.0]
    assert adasum([a, c, b]).tolist() == pytest.approx(tree([a, c, b]).tolist())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("num_ranks", range(1, 10))
def test_orthogonal_gradients_add_up_and_equal_ones_stay(dtype, num_ranks):
    unit = [np.eye(num_ranks, dtype=dtype)[k] * (k + 1) for k in range(num_ranks)]
    found = adasum(unit)
    np.testing.assert_array_equal(found, np.arange(1, num_ranks + 1).astype(dtype))
    same = np.array([1, -2, 0.5, 8], dtype)
    np.testing.assert_array_equal(adasum([same] * num_ranks), same)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 20))
def test_the_length_lies_between_that_of_mean_and_sum_of_equals(seed, num_ranks, size):
    given = gradients(num_ranks, size, "float64", seed)
    found = adasum(given)
    assert np.linalg.norm(found) <= sum(np.linalg.norm(g) for g in given) * (1 + 1e-9)
    for factor in (2.0, -0.25):  # scales as its operands do
        scaled = adasum([factor * g for g in given])
        np.testing.assert_allclose(scaled, factor * found, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 3), (2, 0, 3)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_shape_is_kept_and_the_result_is_an_array(shape, dtype):
    for num_ranks in (1, 2, 3):
        found = adasum(gradients(num_ranks, shape, dtype, 1))
        assert type(found) is np.ndarray
        assert found.shape == shape
        assert found.dtype == np.dtype(dtype)


def test_zero_gradients_take_no_part():
    some, nothing = np.array([3.0, -4.0]), np.zeros(2)
    assert adasum([some, nothing]).tolist() == [3, -4]
    assert adasum([nothing, some]).tolist() == [3, -4]
    assert adasum([nothing, some, nothing]).tolist() == [3, -4]
    assert adasum([nothing] * 4).tolist() == [0, 0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("magnitude", [1e-30, 1e-200, 1e30])
def test_tiny_and_huge_gradients_are_finite(dtype, magnitude):
    if not np.isfinite(np.float64(magnitude)) or magnitude < np.finfo(dtype).tiny:
        return
    same = np.array([1, 2], dtype) * np.dtype(dtype).type(magnitude)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = adasum([same, same])
    assert np.isfinite(found).all()
    assert (abs(found) <= 2.0001 * abs(same)).all()
    assert (abs(found) >= 0.9999 * abs(same)).all()


def test_scalar_products_of_16_bits_do_not_overflow():
    large = np.full(4, 30_000, np.float16)
    np.testing.assert_array_equal(adasum([large, large]), large)
    wide = np.full(3, 1e30, np.float32)
    np.testing.assert_array_equal(adasum([wide, wide]), wide)


def test_what_is_not_finite_spreads_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(adasum([np.array([np.nan, 1]), np.ones(2)])).any()
        assert not np.isfinite(adasum([np.array([np.inf, 1]), np.ones(2)])).all()
        found = adasum([np.full(2, 6e4, np.float16)], postscale=2.0)
        assert np.isinf(found).all()


def test_factors_multiply_the_operands_and_the_result():
    given = gradients(3, 5, "float64", 1)
    plain = adasum(given)
    np.testing.assert_allclose(adasum(given, 2.0), 2 * plain)
    np.testing.assert_allclose(adasum(given, 1.0, 0.5), plain / 2)
    assert adasum([np.ones(2)], 0.0).tolist() == [0, 0]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_real_floats_are_fine(dtype):
    check_adasum(np.dtype(dtype), "allreduce 'w'")


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "complex64", "complex128", "O", "U1"])
def test_other_types_are_a_type_error_that_names_the_call(dtype):
    dtype = np.dtype(dtype)
    with pytest.raises(TypeError, match=rf"allreduce 'w': Adasum.*{dtype}"):
        check_adasum(dtype, "allreduce 'w'")
