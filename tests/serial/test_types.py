"""Reduce operations and sizes, as users write them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite import types
from hvdlite.errors import ConfigError
from hvdlite.types import ReduceOp, parse_bytes, parse_op


def test_reduce_ops_have_the_numbers_of_horovod():
    assert [(op.name, op.value) for op in ReduceOp] == [
        ("AVERAGE", 0),
        ("SUM", 1),
        ("ADASUM", 2),
        ("MIN", 3),
        ("MAX", 4),
        ("PRODUCT", 5),
    ]


@pytest.mark.parametrize("op", list(ReduceOp))
def test_module_names_are_the_members(op):
    assert getattr(types, op.name.title()) is op


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (ReduceOp.SUM, ReduceOp.SUM),
        (0, ReduceOp.AVERAGE),
        (5, ReduceOp.PRODUCT),
        ("mean", ReduceOp.AVERAGE),
        ("Average", ReduceOp.AVERAGE),
        ("SUM", ReduceOp.SUM),
        ("min", ReduceOp.MIN),
        ("Max", ReduceOp.MAX),
        (" product ", ReduceOp.PRODUCT),
        ("adasum", ReduceOp.ADASUM),
    ],
)
def test_parse_op_accepts(given, expected):
    assert parse_op(given) is expected


@pytest.mark.parametrize("given", ["avg", "", 6, -1, True, None, 1.0, "0", [1], b"sum", np.sum])
def test_parse_op_refuses_and_lists_the_known_ones(given):
    with pytest.raises(ValueError, match="unknown reduce op") as info:
        parse_op(given)
    text = str(info.value)
    assert repr(given) in text
    for word in ("Average (0)", "Product (5)", "'mean'", "'sum'"):
        assert word in text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0, 0),
        (12345, 12345),
        (2**40, 2**40),
        (np.int64(7), 7),
        ("512", 512),
        ("512B", 512),
        ("64MiB", 64 * 2**20),
        ("10MB", 10 * 10**6),
        ("10 mb", 10 * 10**6),
        (" 1.5 GiB ", 3 * 2**29),
        ("1KB", 1000),
        ("1kib", 1024),
        ("2GB", 2 * 10**9),
        ("0", 0),
        ("0.3B", 0),
    ],
)
def test_parse_bytes_accepts(given, expected):
    size = parse_bytes(given, "fusion_threshold")
    assert size == expected
    assert type(size) is int


@pytest.mark.parametrize(
    "given",
    [
        -1,
        True,
        np.True_,
        None,
        1.5,
        float("nan"),
        float("inf"),
        "",
        "MiB",
        "-1",
        "-1MiB",
        "nan",
        "inf",
        "1e6",
        "1 000",
        "10Mb/s",
        "10 TB",
        "1.5.5 MB",
        "９MB",  # noqa: RUF001 - digits of another script
        "9" * 5000,
        [1],
        np.arange(3),
    ],
    ids=lambda v: repr(v)[:20],
)
def test_parse_bytes_refuses_naming_setting_value_and_forms(given):
    with pytest.raises(ConfigError) as info:
        parse_bytes(given, "HVDLITE_FUSION_THRESHOLD")
    text = str(info.value)
    assert text.startswith("HVDLITE_FUSION_THRESHOLD must be a size >= 0")
    assert repr(given) in text
    assert '"64MiB"' in text


@given(st.integers(0, 10**17), st.sampled_from([("", 1), ("kB", 1000), ("MiB", 2**20)]))
def test_parse_bytes_of_whole_numbers_is_exact(number, unit):
    word, factor = unit
    assert parse_bytes(f"{number}{word}", "x") == number * factor
