"""`check_consistency`: what drifted, where, and on which ranks."""

import numpy as np
import pytest

from training import counted, needs, process_sets, rotated

pytestmark = pytest.mark.mpi(min_size=1)


def parameters():
    """Arrays of many kinds, the same on every rank."""
    return {
        "w": np.arange(12, dtype=np.float32).reshape(3, 4),
        "swapped": np.arange(3, dtype=">f8"),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "strided": np.arange(24).reshape(4, 6)[::2, ::-3],
        "zero-d": np.array(3 + 4j),
        "empty": np.zeros((0, 3), np.int8),
        "half": np.full(2, np.nan, np.float16),
        "mask": np.array([True, False]),
    }


def read_only(array):
    """The array itself, not to be written to."""
    array.flags.writeable = False
    return array


# ---- nothing differs ----------------------------------------------------------------------------


def test_equal_parameters_cost_one_small_message(hvd):
    params = parameters() | {"large": np.zeros(500_000)}
    found = []
    counts = counted(hvd, lambda: found.append(hvd.check_consistency(params)))
    assert found == [[]]
    if hvd.size() > 1:
        assert counts["collectives"] == 1
        assert counts["bytes"] < 1000


def test_order_layout_and_byte_order_do_not_count(hvd):
    rank = hvd.rank()
    params = parameters()
    if rank % 2:
        params["w"] = np.asfortranarray(params["w"])
        params["fortran"] = np.ascontiguousarray(params["fortran"])
        params["swapped"] = read_only(params["swapped"].astype("<f8"))
    pairs = rotated(list(params.items()), rank)
    assert hvd.check_consistency(dict(pairs)) == []
    assert hvd.check_consistency(pairs) == []
    assert hvd.check_consistency(iter(pairs), name="pairs") == []


def test_nothing_at_all_is_equal(hvd):
    assert hvd.check_consistency({}) == hvd.check_consistency([]) == []


def test_it_reads_only(hvd):
    params = {name: read_only(array) for name, array in parameters().items()}
    before = {name: array.tobytes() for name, array in params.items()}
    assert hvd.check_consistency(params) == []
    assert before == {name: array.tobytes() for name, array in params.items()}


# ---- values differ ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1,), (), (64,), (65,), (7, 9), (300, 5, 11), (100_003,)])
@pytest.mark.mpi(min_size=2)
def test_the_first_element_that_differs_is_found_wherever_it_is(hvd, shape):
    rank, n = hvd.rank(), hvd.size()
    size = int(np.prod(shape))
    for first in {0, size // 3, size - 1}:
        params = {"a": np.zeros(3), "w": np.zeros(shape)}
        flat = params["w"].reshape(-1)
        if rank == n - 1:
            flat[first] = 2.0
            flat[first + 1 :: 7] = 3.0  # later ones differ, too
        where = tuple(int(i) for i in np.unravel_index(first, shape))
        expected = ("w", (n - 1,), where, {r: 2.0 * (r == n - 1) for r in range(n)})
        assert hvd.check_consistency(params, raises=False) == [expected]
        with pytest.raises(hvd.MismatchError) as caught:
            hvd.check_consistency(params)
        assert f"'w': ranks [{n - 1}] differ from rank 0" in str(caught.value)
        assert f"first at index {where}: 0.0 on ranks {list(range(n - 1))}, 2.0 on ranks [" in str(
            caught.value
        )
        assert "'a'" not in str(caught.value)
    assert hvd.check_consistency({"w": np.zeros(shape)}) == []  # the next call works


@pytest.mark.mpi(min_size=3)
def test_the_first_index_is_that_of_any_rank(hvd):
    rank, n = hvd.rank(), hvd.size()
    w = np.zeros(1000, np.int32)
    w[900 - 100 * rank] = rank
    found = hvd.check_consistency({"w": w}, raises=False)
    last = 900 - 100 * (n - 1)
    values = {r: (n - 1) * (r == n - 1) for r in range(n)}
    assert found == [("w", tuple(range(1, n)), (last,), values)]
    assert found[0].ranks == tuple(range(1, n))
    assert found[0].values[0].dtype == np.int32


@pytest.mark.mpi(min_size=2)
def test_bits_are_compared_not_values(hvd):
    rank, n = hvd.rank(), hvd.size()
    nan = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert hvd.check_consistency({"nan": nan}) == []
    zero = np.array([0.0, -0.0 if rank == n - 1 else 0.0])
    with pytest.raises(hvd.MismatchError, match=r"index \(1,\): 0.0 on ranks .*-0.0 on ranks"):
        hvd.check_consistency({"zero": zero})
    mine = nan[[0, rank == n - 1]]
    with pytest.raises(hvd.MismatchError, match=r"nan \(bytes 0000c07f\) on .*bytes 0100c07f"):
        hvd.check_consistency({"nan": mine})


@pytest.mark.parametrize("count", [9, 10, 11, 40], ids="count={}".format)
@pytest.mark.mpi(min_size=2)
def test_at_most_ten_tensors_are_told_in_the_order_of_the_lowest_rank(hvd, count):
    rank, n = hvd.rank(), hvd.size()
    names = [f"layer{k}" for k in reversed(range(count))]
    params = {name: np.full(k + 1, float(rank)) for k, name in enumerate(names)}
    params = dict(rotated(list(params.items()), rank))
    found = hvd.check_consistency(params | {"same": np.zeros(3)}, raises=False)
    assert [drift.name for drift in found] == names[:10]
    assert all(drift.ranks == tuple(range(1, n)) for drift in found)
    with pytest.raises(hvd.MismatchError) as caught:
        hvd.check_consistency(params)
    assert caught.match(f"and {count - 10} more") if count > 10 else "more" not in str(caught.value)


@pytest.mark.mpi(min_size=2)
def test_every_dtype_can_differ(hvd):
    rank, n = hvd.rank(), hvd.size()
    for dtype in ("?", "i1", "u8", "f2", "f4", ">f8", "c16"):
        array = np.zeros((2, 3), dtype)
        array[1, 2] = rank == n - 1
        (drift,) = hvd.check_consistency({"x": array}, raises=False)
        assert drift.first_index == (1, 2)
        assert [drift.values[r] for r in range(n)] == [r == n - 1 for r in range(n)]
        assert drift.values[0].dtype == np.dtype(dtype).newbyteorder("=")


# ---- other differences, and errors --------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"w": np.zeros((3, 5), np.float32)}, r"'w': shape \(3, 4\), .*shape \(3, 5\)"),
        ({"w": np.zeros((3, 4))}, "'w': .*dtype float32 on ranks .*dtype float64 on ranks"),
        ({"new": np.zeros(2)}, "'new': .*missing on ranks"),
    ],
    ids=["shape", "dtype", "name"],
)
@pytest.mark.mpi(min_size=2)
def test_other_names_shapes_and_dtypes_are_an_error_on_every_rank(hvd, change, text):
    params = parameters()
    if hvd.rank() == hvd.size() - 1:
        params |= change
    for raises in (True, False):
        with pytest.raises(hvd.MismatchError, match=text):
            hvd.check_consistency(params, raises=raises)
    assert hvd.check_consistency(parameters()) == []


@pytest.mark.parametrize(
    ("params", "kind", "text"),
    [
        ({"a": np.zeros(2), "b": "text"}, TypeError, "'b': expected a NumPy array"),
        ({1: np.zeros(2)}, TypeError, "name is a str"),
        ([("a", np.zeros(2)), ("a", np.zeros(2))], ValueError, "two parameters are named 'a'"),
        ({"a": np.array([None])}, TypeError, "'a': arrays of dtype object"),
        (None, TypeError, "parameters are a mapping"),
    ],
    ids=["no-array", "no-name", "twice", "objects", "nothing"],
)
def test_what_one_rank_cannot_read_is_an_error_on_all(hvd, params, kind, text):
    own = hvd.rank() == hvd.size() - 1
    with pytest.raises(kind if own else hvd.HorovodInternalError, match=text):
        hvd.check_consistency(params if own else {"a": np.zeros(2)})
    assert hvd.check_consistency({"a": np.zeros(2)}) == []


def test_a_name_that_is_none_is_refused_at_the_call(hvd):
    for name in ("", 3):
        with pytest.raises(ValueError, match="name must be a non-empty string"):
            hvd.check_consistency({}, name=name)
    assert hvd.check_consistency({}) == []


# ---- who takes part -----------------------------------------------------------------------------


def test_process_sets_compare_among_themselves(hvd):
    rank, n = hvd.rank(), hvd.size()
    odd, even = list(range(1, n, 2)) or [0], list(range(0, n, 2))
    with process_sets(hvd, odd, even) as sets:
        for ps in sets:
            if rank in ps.ranks:
                params = {"w": np.full(4, float(rank % 2))}
                assert hvd.check_consistency(params, process_set=ps) == []
                params["w"][2] += rank == ps.ranks[-1]
                found = hvd.check_consistency(params, process_set=ps, raises=False)
                if len(ps.ranks) > 1:
                    assert [(d.ranks, d.first_index) for d in found] == [((ps.ranks[-1],), (2,))]
                    assert set(found[0].values) == set(ps.ranks)
                else:
                    assert found == []
            else:
                with pytest.raises(ValueError, match="not a member"):
                    hvd.check_consistency({}, process_set=ps)


@pytest.mark.mpi(min_size=2)
def test_broadcast_parameters_makes_them_equal(hvd):
    params = {name: np.full(50, float(hvd.rank())) for name in "abc"}
    assert len(hvd.check_consistency(params, raises=False)) == 3
    hvd.broadcast_parameters(params)
    assert hvd.check_consistency(params) == []


@needs("torch")
@pytest.mark.mpi(min_size=2)
def test_torch_tensors_are_compared_by_bits_too(hvd):
    import torch

    rank, n = hvd.rank(), hvd.size()
    params = {"w": torch.zeros(3, 4), "v": torch.nn.Parameter(torch.ones(2))}
    assert hvd.check_consistency(params) == []
    params["w"][2, 1] = float(rank == n - 1)
    (drift,) = hvd.check_consistency(params, raises=False)
    assert drift[:3] == ("w", (n - 1,), (2, 1))
