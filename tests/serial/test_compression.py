"""Compressions as functions: what travels, what comes back, and what is accepted as one."""

import sys
import warnings

import numpy as np
import pytest

from hvdlite import Compression, Compressor
from hvdlite.compression import check_compression
from hvdlite.errors import BackendUnavailableError
from reference import BFLOAT16, DTYPES

CASTS = [(Compression.fp16, np.dtype("float16")), (Compression.bf16, BFLOAT16)]
WIDE = [np.dtype(d) for d in ("float32", "float64", "longdouble")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_none_leaves_everything_as_it_is(dtype):
    array = np.ones(3, dtype)
    travels, context = Compression.none.compress(array)
    assert travels is array
    assert Compression.none.decompress(travels, context) is array


@pytest.mark.parametrize(("kind", "small"), CASTS, ids=["fp16", "bf16"])
@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3)])
def test_wide_floats_travel_with_16_bits_and_come_back(kind, small, dtype, shape):
    array = np.resize(np.array([1 / 3, -2, 1e-3, 7, 0]), shape).astype(dtype)
    before = array.copy()
    travels, context = kind.compress(array)
    assert travels.dtype == small
    assert travels.shape == shape
    found = kind.decompress(travels, context)
    assert type(found) is np.ndarray
    assert found.dtype == dtype
    assert found.shape == shape
    np.testing.assert_array_equal(found, before.astype(small).astype(dtype))
    np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize(("kind", "small"), CASTS, ids=["fp16", "bf16"])
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in WIDE], ids=str)
def test_other_types_travel_as_they_are(kind, small, dtype):
    array = np.ones(3, dtype)
    travels, context = kind.compress(array)
    assert travels is array
    assert kind.decompress(travels, context) is array


@pytest.mark.parametrize(("kind", "small"), CASTS, ids=["fp16", "bf16"])
def test_what_the_small_type_cannot_hold_becomes_infinite_without_a_warning(kind, small):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        travels, context = kind.compress(np.array([1e300, -1e300, np.inf, 1.0]))
        found = kind.decompress(travels, context)
        assert np.isnan(kind.decompress(*kind.compress(np.array([np.nan])))).all()
    assert found.tolist() == [np.inf, -np.inf, np.inf, 1.0]


def test_fp16_rounds_to_nearest_and_bf16_keeps_the_range():
    found = Compression.fp16.decompress(*Compression.fp16.compress(np.array([2049.0, 2051.0])))
    assert found.tolist() == [2048, 2052]
    found = Compression.bf16.decompress(*Compression.bf16.compress(np.array([1e38, 257.0])))
    assert found[1] == 256
    assert found[0] == pytest.approx(1e38, rel=1 / 256)


def test_bf16_without_ml_dtypes_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(BackendUnavailableError, match="pip install ml_dtypes"):
        Compression.bf16.compress(np.ones(3))


class Own(Compressor):
    """A user's."""


@pytest.mark.parametrize("kind", [Compression.none, Compression.fp16, Compression.bf16, Own])
def test_a_subclass_is_a_compression_and_so_is_an_instance(kind):
    assert issubclass(kind, Compressor)
    assert check_compression(kind, "allreduce") is kind
    assert check_compression(kind(), "allreduce") is kind


@pytest.mark.parametrize("wrong", ["fp16", None, 16, float, np.float16, Compression], ids=repr)
def test_what_is_no_compression_is_a_type_error(wrong):
    with pytest.raises(TypeError, match=r"allreduce 'w': compression must be .*Compressor, got"):
        check_compression(wrong, "allreduce 'w'")


def test_a_compression_has_to_say_both_ways():
    with pytest.raises(NotImplementedError, match="compress"):
        Own.compress(np.ones(3))
    with pytest.raises(NotImplementedError, match="decompress"):
        Own.decompress(np.ones(3), None)
