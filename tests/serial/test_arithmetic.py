"""The one formula: every dtype and op against a reference that computes element by element."""

import ctypes
import signal
import warnings
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.arithmetic import Reduction, blocked_steps, check_reducible, is_half, run
from hvdlite.types import Average, Max, Min, Product, Sum
from reference import (
    BFLOAT16,
    COMPLEX,
    DTYPES,
    FLOATS,
    INTEGERS,
    OPS,
    assert_reduced,
    assert_same,
    has_meaning,
    operands,
    reference,
)

CASES = [
    pytest.param(dtype, op, id=f"{dtype.name}-{op.name.lower()}")
    for dtype in DTYPES
    for op in OPS
    if has_meaning(op, dtype)
]


def reduced(reduction, blocks, *, in_place=False, num_outs=1, block_elements=7, weights=None):
    """Run a reduction as a backend does; operands that are not to change did not."""
    before = [block.copy() for block in blocks]
    outs = blocks if in_place else [np.full_like(blocks[0], 1) for _ in range(num_outs)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(blocked_steps(reduction, blocks, outs, block_elements, weights))
    if not in_place:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(blocks, before, strict=True))
    assert len({out.tobytes() for out in outs}) == 1  # all of the result, into each
    return outs[0]


sizes = st.integers(0, 30)
seeds = st.integers(0, 2**32 - 1)
ranks = st.integers(1, 4)
block_sizes = st.sampled_from([1, 2, 7, 1000])


@pytest.mark.parametrize(("dtype", "op"), CASES)
@settings(max_examples=20)
@given(ranks, sizes, seeds, block_sizes, st.booleans(), st.integers(1, 3))
def test_reduction_is_the_reference(dtype, op, num_ranks, size, seed, piece, in_place, num_outs):
    blocks = operands(dtype, num_ranks, size, seed)
    expected = reference(op, dtype, blocks)
    found = reduced(
        Reduction(op, dtype, num_ranks),
        blocks,
        in_place=in_place,
        num_outs=num_outs,
        block_elements=piece,
    )
    assert_reduced(found, expected, op)


@pytest.mark.parametrize(("dtype", "op"), [c for c in CASES if c.values[0].kind != "b"])
@settings(max_examples=20)
@given(
    ranks,
    sizes,
    seeds,
    block_sizes,
    st.booleans(),
    st.sampled_from([1.0, 0.5, 2.0, -1.0, 0.0, 0.3]),
    st.sampled_from([1.0, 0.25, 3.0, -2.0, 0.7]),
)
def test_scaled_reduction_is_the_reference(
    dtype, op, num_ranks, size, seed, piece, in_place, prescale, postscale
):
    if dtype.kind == "u":  # what a negative number becomes there is nobody's promise
        prescale, postscale = abs(prescale), abs(postscale)
    small = 2 if op is Product else 8  # what overflows in float64 has no defined value either
    blocks = operands(dtype, num_ranks, size, seed, limit=small)
    expected = reference(op, dtype, blocks, prescale, postscale)
    found = reduced(
        Reduction(op, dtype, num_ranks, prescale, postscale),
        blocks,
        in_place=in_place,
        block_elements=piece,
    )
    assert_reduced(found, expected, op)


# --- the rules, one by one


def both(op, dtype, *values, **kwargs):
    """One element a rank, reduced in place and not; the common result as a NumPy scalar."""
    scale = [kwargs.pop(k, 1.0) for k in ("prescale", "postscale")]
    dtype = np.dtype(dtype)
    results = []
    for in_place in (False, True):
        blocks = [np.array([value], dtype) for value in values]
        reduction = Reduction(op, dtype, len(values), *scale)
        results.append(reduced(reduction, blocks, in_place=in_place, **kwargs)[0])
    assert_same(np.array([results[0]]), np.array([results[1]]))
    return results[0]


def test_sum_runs_over_the_ranks_in_ascending_order():
    assert both(Sum, "float32", 1e8, 1, -1e8) == 0
    assert both(Sum, "float32", 1e8, -1e8, 1) == 1
    assert both(Sum, "float32", 1, 1e8, -1e8) == 0


def test_average_is_the_sum_times_one_factor():
    assert both(Average, "float64", 1, 1, 3) == 5 * (1 / 3)
    assert both(Average, "float32", 1, 1, 3, prescale=0.1, postscale=10.0) == (
        np.float32(5) * np.float32(0.1 * 10.0 / 3)
    )


def test_integer_sums_wrap():
    assert both(Sum, "int8", 100, 100) == -56
    assert both(Sum, "uint8", 200, 100) == 44
    assert both(Sum, "int64", 2**63 - 1, 1) == -(2**63)
    assert both(Sum, "uint64", 2**64 - 1, 2) == 1
    assert both(Product, "int16", 200, 200) == 40000 - 65536


def test_integer_average_truncates_toward_zero():
    assert both(Average, "int32", 3, 4) == 3
    assert both(Average, "int32", -3, -4) == -3
    assert both(Average, "int8", -1, 0) == 0
    assert both(Average, "int64", 1, 1, 0) == 0
    assert both(Average, "int64", -5, -3, 0) == -2
    assert both(Average, "uint8", 255, 0) == 127


def test_integer_average_is_exact_in_64_bits():
    a, b = 2**62 - 1, 2**62 - 3
    assert both(Average, "int64", a, b) == (a + b) // 2
    assert both(Average, "int64", -a, -b) == -((a + b) // 2)
    assert both(Average, "int64", a, 0, 0) == a // 3
    assert both(Average, "int64", -a, 0, 0) == -(a // 3)
    assert both(Average, "int64", 2**63 - 1) == 2**63 - 1
    assert both(Average, "int64", -(2**63)) == -(2**63)
    assert both(Average, "uint64", 2**63 + 5, 2**63 - 7) == 2**63 - 1
    assert both(Average, "uint64", 2**64 - 1, 0, 0) == (2**64 - 1) // 3


def test_integer_average_over_more_ranks_than_the_type_can_count():
    assert both(Average, "int8", *[1] * 200) == 0  # 200 wraps to -56
    assert both(Average, "int8", *[-1] * 128) == -1
    assert both(Average, "uint8", *[255] * 256) == 0


def test_fractional_factors_scale_integers_in_float64_and_truncate():
    assert both(Sum, "int32", -3, -3, prescale=0.5) == -2  # each before the sum
    assert both(Sum, "int32", -3, -4, postscale=0.5) == -3  # once, after it
    assert both(Sum, "int32", 7, 8, prescale=0.5, postscale=0.5) == 3
    assert both(Max, "int32", 7, 9, prescale=0.5, postscale=0.5) == 2
    assert both(Average, "int32", 3, 4, postscale=0.5) == 1
    assert both(Average, "int32", 4, 5, postscale=2.0) == 9
    assert both(Average, "int32", 9, 9, 9, postscale=13.0) == 117  # 27 * (13 / 3) is below it
    assert both(Product, "int32", 3, 5, prescale=0.5, postscale=1.5) == 3
    assert both(Sum, "int32", 2**30, 0, postscale=0.25) == 2**28


def test_a_whole_factor_that_the_type_cannot_hold_is_no_error():
    assert both(Max, "int8", 0, 0, postscale=300.0) == 0
    assert both(Sum, "uint8", 0, 0, prescale=-1.0) == 0
    assert both(Sum, "int8", 1, 0, prescale=200.0, postscale=0.5) in (100, -28)  # 200 wraps or not


def test_whole_factors_scale_64_bit_integers_exactly():
    assert both(Sum, "int64", 2**60 + 1, 0, prescale=3.0) == 3 * (2**60 + 1)
    assert both(Max, "int64", 2**60 + 1, 0, postscale=-2.0) == -2 * (2**60 + 1)


def test_half_floats_are_summed_in_float32_and_rounded_once():
    assert is_half(np.dtype("float16"))
    assert is_half(BFLOAT16)
    assert not is_half(np.dtype("float32"))
    assert both(Average, "float16", 60000, 60000, 60000) == 60000  # 180000 is beyond float16
    assert both(Sum, "float16", 60000, 60000, -60000) == 60000
    assert both(Sum, "float16", 60000, 60000, postscale=0.5) == 60000
    assert both(Sum, "float16", 2048, 1, 1) == 2050  # in float16 2048 + 1 is 2048
    assert both(Sum, BFLOAT16, 256, 1, 1) == 258
    assert both(Average, BFLOAT16, 1e38, 1e38, 1e38) == np.array(1e38, BFLOAT16)
    assert both(Product, "float16", 300, 300, 0.5) == 45000
    assert both(Max, "float16", 40000, 3, prescale=2.0, postscale=0.5) == 40000


@pytest.mark.parametrize("op", [Min, Max], ids=["min", "max"])
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: np.dtype(d).name)
def test_nan_wins(op, dtype):
    for values in ([np.nan, 1, 2], [1, np.nan, 2], [1, 2, np.nan]):
        assert np.isnan(both(op, dtype, *values))
        assert np.isnan(both(op, dtype, *values, prescale=2.0))


def test_infinities_and_signed_zeros():
    assert both(Sum, "float32", np.inf, 1) == np.inf
    assert np.isnan(both(Sum, "float32", np.inf, -np.inf))
    assert both(Average, "float64", -np.inf, 1, 1) == -np.inf
    assert both(Min, "float32", -np.inf, np.inf) == -np.inf
    zero = both(Sum, "float32", -0.0, -0.0)
    assert (zero, np.signbit(zero)) == (0, True)
    assert not np.signbit(both(Sum, "float16", -0.0, 0.0))
    assert both(Sum, "float32", 3e38, 3e38) == np.inf  # and no warning
    assert both(Sum, "float16", 60000, 60000) == np.inf


@pytest.mark.parametrize("dtype", COMPLEX)
def test_an_infinite_part_of_a_complex_average_leaves_the_other_part_alone(dtype):
    result = both(Average, dtype, complex(np.inf, 1), 0)
    assert (result.real, result.imag) == (np.inf, 0.5)


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64"])
@pytest.mark.parametrize("op", [Sum, Average, Product], ids=["sum", "average", "product"])
@pytest.mark.parametrize("which", ["prescale", "postscale"])
def test_no_warning_escapes_from_a_factor_that_the_type_cannot_hold(dtype, op, which):
    assert not np.isfinite(both(op, dtype, 2, 3, **{which: 1e300}))
    assert both(op, dtype, 2, 3, **{which: 1e-300}) == 0


def test_bool_is_any_or_all():
    for op, expected in (
        (Sum, [0, 1, 1, 1]),
        (Max, [0, 1, 1, 1]),
        (Min, [0, 0, 0, 1]),
        (Product, [0, 0, 0, 1]),
    ):
        blocks = [np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)]
        found = reduced(Reduction(op, np.dtype(bool), 2), blocks)
        assert found.tolist() == [bool(x) for x in expected]


# --- weights

WEIGHTED = [np.dtype(d) for d in (*FLOATS, *COMPLEX)]


@pytest.mark.parametrize("dtype", WEIGHTED, ids=lambda d: d.name)
@settings(max_examples=40)
@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0, 1e-3, 12345.0]), min_size=1, max_size=4),
    seeds,
    block_sizes,
    st.booleans(),
)
def test_weighted_average_is_that_of_the_joint_batch(dtype, weights, seed, piece, in_place):
    rng = np.random.default_rng(seed)
    blocks = [rng.integers(-8, 8, 12).astype(dtype) for _ in weights]
    total = sum(map(Fraction, weights))
    rows = [[int(x.real) * Fraction(w) for x in b] for w, b in zip(weights, blocks, strict=True)]
    expected = [complex(sum(column) / (total or 1)) for column in zip(*rows, strict=True)]
    for weight, block in zip(weights, blocks, strict=True):
        if not weight:
            block[:] = np.nan  # it may hold anything
            block[::2] = np.inf
    found = reduced(
        Reduction(Average, dtype, len(weights)),
        blocks,
        in_place=in_place,
        block_elements=piece,
        weights=weights,
    )
    tolerance = 8 * 16 * max(float(ml_dtypes.finfo(dtype).eps), 2.0**-52)
    np.testing.assert_allclose(found.astype(complex), expected, rtol=0, atol=tolerance)


def test_weights_of_zero_alone_give_zeros():
    blocks = [np.array([np.nan, 1], "float32"), np.array([2, np.inf], "float32")]
    found = reduced(Reduction(Average, np.dtype("float32"), 2), blocks, weights=[0.0, 0.0])
    assert found.tolist() == [0, 0]


def test_equal_weights_are_the_plain_average():
    for weight in (1.0, 2.0, 0.25):
        assert both(Average, "float64", 1, 2, 6, weights=[weight] * 3) == 3
        assert both(Average, "float16", 60000, 60000, weights=[weight] * 2) == 60000


def test_weights_go_with_the_factors():
    assert both(Average, "float64", 1, 5, prescale=4.0, postscale=0.5, weights=[3.0, 1.0]) == 4


@pytest.mark.parametrize("weight", [1e-50, 1e50, 1e-300, 1e308])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_weights_of_any_magnitude(dtype, weight):
    tolerance = 8 * float(np.finfo(dtype).eps)
    found = both(Average, dtype, 1, 3, weights=[weight, weight])
    assert float(found) == pytest.approx(2, rel=tolerance)
    assert both(Average, dtype, 1, np.nan, weights=[weight, 0.0]) == pytest.approx(1, rel=tolerance)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_weights_count_for_integers_too(dtype):
    assert both(Average, dtype, 10, 20, weights=[1.0, 0.0]) == 10
    assert both(Average, dtype, 10, 20, weights=[3.0, 1.0]) == 12  # 12.5, toward zero
    assert both(Average, dtype, 10, 20, weights=[0.0, 0.0]) == 0


# --- what cannot be reduced


@pytest.mark.parametrize(
    ("op", "dtype", "words"),
    [
        (Average, "bool", "Average of bool"),
        (Min, "complex64", "no Min"),
        (Max, "complex128", "no Max"),
        (Sum, "O", "object"),
        (Sum, "U3", "U3"),
        (Max, "S3", "S3"),
        (Sum, "M8[s]", "datetime64"),
        (Sum, [("a", "f4")], "'a'"),
        (Sum, ml_dtypes.float8_e4m3fn, "float8_e4m3fn"),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_a_type_error_that_names_the_call(op, dtype, words):
    with pytest.raises(TypeError, match=r"allreduce 'w'.*" + words):
        check_reducible(op, np.dtype(dtype), "allreduce 'w'")


def test_bool_cannot_be_scaled():
    check_reducible(Sum, np.dtype(bool), "x", 1.0, 1.0)
    for factors in ((2.0, 1.0), (1.0, 0.5)):
        with pytest.raises(TypeError, match="scaled"):
            check_reducible(Sum, np.dtype(bool), "x", *factors)


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_everything_else_can(dtype, op):
    check_reducible(op, dtype, "x")


# --- running


def test_a_signal_handler_meets_a_reduction_not_begun_or_finished():
    class Interrupted(Exception):
        pass

    def handler(*_):
        raise Interrupted

    raise_in_c = ctypes.CDLL(None)["raise"]  # unlike signal.raise_signal, it runs no handler itself
    done = []
    steps = [
        (done.append, 1),
        (raise_in_c, int(signal.SIGUSR1)),
        (done.append, 2),
        (done.append, 3),
    ]
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Interrupted):
            run(steps)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert done == [1, 2, 3]


def test_error_state_of_the_caller_is_as_before():
    with np.errstate(all="raise"):
        before = np.geterr()
        assert both(Sum, "float32", 3e38, 3e38) == np.inf
        assert np.geterr() == before


def test_compiled_steps_can_be_run_again_on_new_numbers():
    for dtype in ("float32", "float16", "int64"):
        blocks = [np.zeros(10, dtype) for _ in range(3)]
        steps = blocked_steps(Reduction(Average, np.dtype(dtype), 3), blocks, blocks, 4)
        for k in (1, 2, 3):
            for rank, block in enumerate(blocks):
                block[:] = np.arange(10) * k + 3 * rank
            run(steps)
            for block in blocks:
                assert block.tolist() == [i * k + 3 for i in range(10)]
