"""Every collective on arrays, against NumPy alone: dtypes, sizes, layouts, sets, ways to call.

Operands repeat a pattern that holds special values too, so the reference, which computes element by
element, has to reduce one period only.
"""

import gc
import itertools
import random
import time
from functools import lru_cache

import numpy as np
import pytest

from ranks import assert_all
from reference import (
    BFLOAT16,
    DTYPES,
    OPS,
    assert_reduced,
    assert_same,
    has_meaning,
    operands,
    reference,
)
from training import counted, process_sets

pytestmark = pytest.mark.mpi(min_size=1)

LARGE_BYTES = 40_000  # more than travels with the call itself
PERIOD = 29
BY_NAME = {op.name.title(): op for op in OPS}
BOTH = ["", "_async"]
ALL_FOUR = ["", "_async", "_", "_async_"]


@pytest.fixture(scope="module", params=["shm", "mpi"], ids="backend={}".format)
def backend(request):
    return request.param


@pytest.fixture
def hvd(hvd, backend):
    if hvd.size() > 1 and hvd.describe()["backend"] != backend:
        hvd.shutdown()
        hvd.init(config={"backend": backend})
    return hvd


@pytest.fixture
def sets(hvd):
    """The world, its first two ranks, all but the first: they overlap where there are enough."""
    ranks = list(range(hvd.size()))
    members = [ranks, ranks[:2], ranks[1:] or ranks]
    with process_sets(hvd, *members) as made:
        yield list({id(ps): ps for ps in made}.values())


# Bytes are bytes to a backend: all dtypes with one, and one of each size with the other.
MATRIX = pytest.mark.parametrize(
    ("backend", "dtype"),
    [("shm", dtype) for dtype in DTYPES]
    + [("mpi", np.dtype(name)) for name in ("int8", BFLOAT16, "uint32", "complex64", "complex128")],
    ids=lambda value: value.name if isinstance(value, np.dtype) else f"backend={value}",
    scope="module",
)


def mine_among(sets, rank):
    return [ps for ps in sets if rank in ps.ranks]


def waited(result):
    """What an async call promised, or what a blocking one returned."""
    return result.wait() if hasattr(result, "wait") else result


def meet(comm):
    """Wait for all ranks without hvdlite."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.001)


@lru_cache(4096)
def patterns(dtype, num_ranks, seed):
    return operands(dtype, num_ranks, PERIOD, seed)


@lru_cache(4096)
def reduced_pattern(op, dtype, num_ranks, ranks, seed, *factors):
    blocks = patterns(dtype, num_ranks, seed)
    return reference(op, dtype, [blocks[r] for r in ranks], *factors)


def operand(hvd, dtype, shape, seed, rank=None):
    rank = hvd.rank() if rank is None else rank
    return np.resize(patterns(dtype, hvd.size(), seed)[rank], shape)


def expected_of(hvd, op, dtype, shape, ranks, seed, *factors):
    pattern = reduced_pattern(op, dtype, hvd.size(), tuple(ranks), seed, *factors)
    return np.resize(pattern, shape)


def shapes(dtype):
    large = LARGE_BYTES // dtype.itemsize + 3
    return [(), (0,), (1,), (7,), (3, 5), (4, 0, 2), (large,), (5, large // 5 + 1)]


def with_rows(dtype):
    return [shape for shape in shapes(dtype) if shape]


def legal_ops(dtype):
    return [op for op in OPS if has_meaning(op, dtype)]


def arange(shape, dtype="float64", start=0):
    return np.arange(start, start + np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


def rows_of(num_rows, ranks, rank):
    """The slice of rows that a member gets by reducescatter."""
    n, k = len(ranks), list(ranks).index(rank)
    counts = [num_rows // n + (j < num_rows % n) for j in range(n)]
    return slice(sum(counts[:k]), sum(counts[: k + 1]))


class Cells:
    """Calls of the cells of one test, in the ways of a common die: blocking ones at once."""

    def __init__(self, hvd, verb, ways):
        self.hvd, self.verb, self.ways = hvd, verb, ways
        self.die = random.Random(verb)
        self.pending = []
        self.count = 0

    def over(self, sets):
        """The sets that this rank is in; the others use up a throw of the die, too."""
        for ps in sets:
            self.count += 1
            self.way = self.die.choice(self.ways)
            self.name = self.die.choice([None, None, f"cell {self.count}"])
            if self.hvd.rank() in ps.ranks:
                yield ps

    def add(self, array, check, *args, **options):
        """Call; `check` is given the result."""
        way, options["name"] = self.way, self.name
        is_list = isinstance(array, list)
        before = [a.copy() for a in array] if is_list else [array.copy()]
        result = getattr(self.hvd, self.verb + way)(array, *args, **options)
        in_place = way.endswith("_")

        def finish(result):
            given = array if is_list else [array]
            got = result if is_list else [result[0] if isinstance(result, tuple) else result]
            assert type(got) is list
            assert len(got) == len(given)
            for a, b, old in zip(given, got, before, strict=True):
                assert (a is b) == in_place
                if not in_place:
                    assert a.tobytes() == old.tobytes()
                    assert not np.shares_memory(a, b)
                    assert b.flags.writeable
            check(result)

        if "async" in way:
            self.pending.append((result, finish))
        else:
            finish(result)

    def finish(self):
        """Wait for the others, the last one first."""
        for handle, finish in reversed(self.pending):
            result = handle.wait()
            assert handle.wait() is result
            assert handle.done()
            finish(result)
        assert self.count


# ---- the matrix --------------------------------------------------------------------------------


@MATRIX
def test_allreduce(hvd, sets, dtype):
    cells = Cells(hvd, "allreduce", ALL_FOUR)
    for (i, shape), op in itertools.product(enumerate(shapes(dtype)), legal_ops(dtype)):
        for ps in cells.over(sets):
            expected = expected_of(hvd, op, dtype, shape, ps.ranks, i)
            cells.add(
                operand(hvd, dtype, shape, i),
                lambda found, expected=expected, op=op: assert_reduced(found, expected, op),
                op=op,
                process_set=ps,
            )
    cells.finish()


@MATRIX
def test_reducescatter(hvd, sets, dtype):
    cells = Cells(hvd, "reducescatter", BOTH)
    for (i, shape), op in itertools.product(enumerate(with_rows(dtype)), legal_ops(dtype)):
        for ps in cells.over(sets):
            expected = expected_of(hvd, op, dtype, shape, ps.ranks, i)
            expected = expected[rows_of(shape[0], ps.ranks, hvd.rank())]
            cells.add(
                operand(hvd, dtype, shape, i),
                lambda found, expected=expected, op=op: assert_reduced(found, expected, op),
                op=op,
                process_set=ps,
            )
    cells.finish()


@MATRIX
def test_allgather(hvd, sets, dtype):
    cells = Cells(hvd, "allgather", BOTH)
    for i, (rows, *rest) in enumerate(with_rows(dtype)):
        for ps in cells.over(sets):
            # The first dimension differs from rank to rank, and is 0 on some.
            parts = {
                r: operand(hvd, dtype, (max(0, rows + (r + i) % 3 - 1), *rest), i, r)
                for r in ps.ranks
            }
            expected = np.concatenate(list(parts.values()))
            cells.add(
                parts[hvd.rank()],
                lambda found, expected=expected: assert_same(found, expected),
                process_set=ps,
            )
    cells.finish()


@MATRIX
def test_broadcast(hvd, sets, dtype):
    cells = Cells(hvd, "broadcast", ALL_FOUR)
    for i, shape in enumerate(shapes(dtype)):
        for root in range(hvd.size()):
            for ps in cells.over([ps for ps in sets if root in ps.ranks]):
                expected = operand(hvd, dtype, shape, i, root)
                cells.add(
                    operand(hvd, dtype, shape, i),
                    lambda found, expected=expected: assert_same(found, expected),
                    root,
                    process_set=ps,
                )
    cells.finish()


@MATRIX
def test_alltoall(hvd, sets, dtype):
    cells = Cells(hvd, "alltoall", BOTH)
    for i, (rows, *rest) in enumerate(with_rows(dtype)):
        for ps in cells.over(sets):
            shape = (rows * len(ps.ranks), *rest)
            at = slice(rows * ps.rank(), rows * (ps.rank() + 1))
            expected = np.concatenate([operand(hvd, dtype, shape, i, r)[at] for r in ps.ranks])
            cells.add(
                operand(hvd, dtype, shape, i),
                lambda found, expected=expected: assert_same(found, expected),
                process_set=ps,
            )
    cells.finish()


@MATRIX
def test_alltoall_with_splits(hvd, sets, dtype):
    cells = Cells(hvd, "alltoall", BOTH)
    for i, (rows, *rest) in enumerate(with_rows(dtype)):
        for ps in cells.over(sets):

            def splits(r, i=i, rows=rows, ps=ps):
                """Zeros among them; more for oneself and for the next member than for others."""
                return [rows * ((r + k + i) % 3) // 2 for k in range(len(ps.ranks))]

            parts, k = [], ps.rank()
            for r in ps.ranks:
                left_over = (r + i) % 2
                sent = operand(hvd, dtype, (sum(splits(r)) + left_over, *rest), i, r)
                start = sum(splits(r)[:k])
                parts.append(sent[start : start + splits(r)[k]])
                if r == hvd.rank():
                    mine = sent

            def check(found, parts=parts):
                array, received = found
                assert_same(array, np.concatenate(parts))
                assert_same(received, np.array([len(part) for part in parts], np.int32))

            cells.add(mine, check, splits(hvd.rank()), process_set=ps)
    cells.finish()


def group_shapes(dtype):
    """Groups that end at odd places, small and large, one array alone, and many."""
    large = (LARGE_BYTES // dtype.itemsize + 3,)
    return [
        [(3,)],
        [(1,), (0,), (7,)],
        [(5,), (2, 3), (4,), (1,)],
        [(3,), large, (2, 5)],
        [(1 + k % 3,) for k in range(20)],
    ]


@MATRIX
def test_grouped_allreduce(hvd, sets, dtype):
    cells = Cells(hvd, "grouped_allreduce", ALL_FOUR)
    for (i, group), op in itertools.product(enumerate(group_shapes(dtype)), legal_ops(dtype)):
        for ps in cells.over(sets):
            expected = [expected_of(hvd, op, dtype, shape, ps.ranks, i) for shape in (*group, ())]

            def check(found, expected=expected, op=op):
                for one, other in zip(found, expected, strict=True):
                    assert_reduced(one, other, op)

            cells.add(
                [operand(hvd, dtype, shape, i) for shape in (*group, ())],
                check,
                op=op,
                process_set=ps,
            )
    cells.finish()


@MATRIX
def test_grouped_reducescatter(hvd, sets, dtype):
    cells = Cells(hvd, "grouped_reducescatter", BOTH)
    for (i, group), op in itertools.product(enumerate(group_shapes(dtype)), legal_ops(dtype)):
        for ps in cells.over(sets):
            expected = [
                expected_of(hvd, op, dtype, s, ps.ranks, i)[rows_of(s[0], ps.ranks, hvd.rank())]
                for s in group
            ]

            def check(found, expected=expected, op=op):
                for one, other in zip(found, expected, strict=True):
                    assert_reduced(one, other, op)

            cells.add(
                [operand(hvd, dtype, shape, i) for shape in group], check, op=op, process_set=ps
            )
    cells.finish()


@MATRIX
def test_grouped_allgather(hvd, sets, dtype):
    cells = Cells(hvd, "grouped_allgather", BOTH)
    for i, group in enumerate(group_shapes(dtype)):
        for ps in cells.over(sets):
            parts = {
                r: [
                    operand(hvd, dtype, (s[0] + (r + k) % 3, *s[1:]), i, r)
                    for k, s in enumerate(group)
                ]
                for r in ps.ranks
            }
            expected = [np.concatenate(found) for found in zip(*parts.values(), strict=True)]

            def check(found, expected=expected):
                for one, other in zip(found, expected, strict=True):
                    assert_same(one, other)

            cells.add(parts[hvd.rank()], check, process_set=ps)
    cells.finish()


ILLEGAL = [
    *((dtype, op) for dtype in DTYPES for op in OPS if not has_meaning(op, dtype)),
    *((dtype, "adasum") for dtype in DTYPES if dtype.kind in "biuc"),
]


def test_what_an_op_cannot_reduce_is_a_type_error_of_the_rank_alone(hvd):
    last = hvd.size() - 1
    for dtype, op in ILLEGAL:
        array = np.zeros(3, dtype)
        if hvd.rank() == last:
            for verb in ("allreduce", "allreduce_async", "allreduce_"):
                with pytest.raises(TypeError, match="allreduce 'x'"):
                    getattr(hvd, verb)(array, op=op, name="x")
            with pytest.raises(TypeError, match="grouped_allreduce 'x'"):
                hvd.grouped_allreduce([np.zeros(3), array], op=op, name="x")
            if op != "adasum":
                with pytest.raises(TypeError, match="reducescatter 'x'"):
                    hvd.reducescatter(array, op=op, name="x")
        assert hvd.allreduce(1, op=hvd.Sum, name="x") == hvd.size()


@pytest.mark.parametrize("dtype", ["O", "U3", "S3", "M8[s]", "m8[s]", "V4", "i4,f4"])
def test_what_cannot_travel_is_a_type_error_of_the_rank_alone(hvd, dtype):
    array = np.zeros(hvd.size(), dtype)
    if hvd.rank() == hvd.size() - 1:
        for verb in ("allreduce", "allgather", "alltoall", "reducescatter"):
            with pytest.raises(TypeError, match=verb):
                getattr(hvd, verb)(array)
        with pytest.raises(TypeError, match="broadcast"):
            hvd.broadcast(array, 0)
        with pytest.raises(TypeError, match="grouped_allgather"):
            hvd.grouped_allgather([array])
    assert hvd.allgather(np.array([hvd.rank()])).tolist() == list(range(hvd.size()))


# ---- layouts and kinds -------------------------------------------------------------------------


def view(kind, values):
    """The values, in two dimensions, in another layout."""
    if kind == "strided":
        rows, columns = values.shape
        found = np.zeros((2 * rows, 3 * columns), values.dtype)[::2, 1::3]
    elif kind == "reversed":
        found = np.zeros_like(values)[::-1, ::-1]
    elif kind == "fortran":
        found = np.zeros_like(values, order="F")
    elif kind == "big-endian":
        found = np.zeros(values.shape, values.dtype.newbyteorder(">"))
    elif kind == "unaligned":
        raw = np.zeros(values.nbytes + 1, np.uint8)[1:]
        found = raw.view(values.dtype).reshape(values.shape)
    else:
        found = np.zeros_like(values)
    found[...] = values
    if kind == "read-only":
        found.flags.writeable = False
    return found


LAYOUTS = ["strided", "reversed", "fortran", "big-endian", "unaligned", "read-only"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_of_any_layout_give_what_plain_ones_give(hvd, layout):
    size, rank = hvd.size(), hvd.rank()
    parts = [arange((12, 4), "int32", 100 * r) for r in range(size)]
    mine = view(layout, parts[rank])
    before = mine.copy()
    summed = np.sum(parts, axis=0)
    results = {
        "allreduce": (hvd.allreduce(mine, op=hvd.Sum), summed),
        "allgather": (hvd.allgather(mine), np.concatenate(parts)),
        "broadcast": (hvd.broadcast(mine, size - 1), parts[-1]),
        "alltoall": (
            hvd.alltoall(mine, [2] * size)[0],
            np.concatenate([part[2 * rank : 2 * rank + 2] for part in parts]),
        ),
        "reducescatter": (
            hvd.reducescatter(mine, op=hvd.Sum),
            summed[rows_of(12, range(size), rank)],
        ),
        "group": (hvd.grouped_allreduce([mine, parts[rank]], op=hvd.Sum)[0], summed),
        "gathered group": (
            hvd.grouped_allgather([parts[rank], mine])[1],
            np.concatenate(parts),
        ),
    }
    for name, (found, expected) in results.items():
        assert type(found) is np.ndarray, name
        assert found.dtype == mine.dtype, name
        np.testing.assert_array_equal(found, expected, err_msg=name)
    np.testing.assert_array_equal(mine, before)


@pytest.mark.parametrize("layout", [kind for kind in LAYOUTS if kind != "read-only"])
def test_arrays_of_any_layout_are_overwritten_in_place(hvd, layout):
    size, rank = hvd.size(), hvd.rank()
    parts = [arange((6, 4), "float32", 100 * r) for r in range(size)]
    summed = np.sum(parts, axis=0)
    array = view(layout, parts[rank])
    for _ in range(2):
        assert hvd.allreduce_(array, op=hvd.Sum) is array
        np.testing.assert_array_equal(array, summed)
        array[...] = parts[rank]
        assert hvd.broadcast_(array, size - 1) is array
        np.testing.assert_array_equal(array, parts[-1])
        array[...] = parts[rank]
        handles = [
            hvd.allreduce_async_(array, op=hvd.Sum),
            hvd.grouped_allreduce_async_([other := view(layout, parts[rank])], op=hvd.Sum),
        ]
        assert handles[0].wait() is array
        assert handles[1].wait()[0] is other
        np.testing.assert_array_equal(array, summed)
        np.testing.assert_array_equal(other, summed)
        array[...] = parts[rank]
    if layout == "strided":  # what lies between the elements is not ours
        array[...] = 0
        assert not array.base.any()


def test_a_result_stays_in_the_place_of_an_array_without_dimensions(hvd):
    array = np.array(hvd.rank() + 1.0)
    assert hvd.allreduce_(array, op=hvd.Sum) is array
    assert array == sum(r + 1 for r in range(hvd.size()))
    assert hvd.broadcast_(array, 0) is array
    assert hvd.grouped_allreduce_([array], op=hvd.Max)[0] is array


def test_numbers_come_back_as_numbers_of_the_same_type(hvd):
    size, rank = hvd.size(), hvd.rank()
    total = sum(r + 1 for r in range(size))
    for kind in (int, float, complex, np.int8, np.uint64, np.float16, np.float32, np.complex64):
        for found in (
            hvd.allreduce(kind(rank + 1), op=hvd.Sum),
            hvd.allreduce_async(kind(rank + 1), op=hvd.Sum).wait(),
            hvd.grouped_allreduce([kind(rank + 1), np.zeros(2)], op=hvd.Sum)[0],
        ):
            assert type(found) is kind
            assert found == total
        found = hvd.broadcast(kind(rank + 1), size - 1)
        assert type(found) is kind
        assert found == size
    for kind in (bool, np.bool_):
        found = hvd.allreduce(kind(rank == 0), op=hvd.Sum)
        assert type(found) is kind
        assert found
        assert type(hvd.allreduce(kind(rank == 0), op=hvd.Min)) is kind
    assert type(hvd.allreduce(BFLOAT16.type(1))) is BFLOAT16.type
    assert hvd.allreduce(-rank) == -((size - 1) // 2)  # truncates toward zero
    assert hvd.allreduce(rank + 0.5) == (size - 1) / 2 + 0.5


@pytest.mark.parametrize("op", ["Average", "Sum", "Min", "Max", "Product", "Adasum"])
def test_arrays_without_dimensions_come_back_as_such(hvd, op):
    for found in (
        hvd.allreduce(np.array(2.0), op=op),
        hvd.allreduce_async(np.array(2.0), op=op).wait(),
        *hvd.grouped_allreduce([np.array(2.0), np.array(2.0)], op=op),
    ):
        assert type(found) is np.ndarray
        assert found.shape == ()
        assert found.flags.writeable


@pytest.mark.parametrize("verb", ["allreduce_", "allreduce_async_", "broadcast_"])
def test_what_cannot_be_overwritten_is_refused_before_anything_is_sent(hvd, verb):
    call = getattr(hvd, verb)
    args = (0,) if verb == "broadcast_" else ()
    if hvd.rank() == hvd.size() - 1:
        with pytest.raises(ValueError, match=r"'x'.*read-only"):
            call(view("read-only", np.ones((6, 4))), *args, name="x")
        for wrong in (1.0, 1, True, np.float32(1), [1.0, 2.0], (1.0,), None, "x"):
            with pytest.raises(TypeError, match=verb.partition("_")[0]):
                call(wrong, *args, name="x")
    assert hvd.allreduce(1, op=hvd.Sum, name="x") == hvd.size()


def test_a_group_with_one_array_that_cannot_be_overwritten_is_refused_as_a_whole(hvd):
    arrays = [np.ones(3), np.ones(2)]
    if hvd.rank() == hvd.size() - 1:
        with pytest.raises(ValueError, match="read-only"):
            hvd.grouped_allreduce_([arrays[0], view("read-only", np.ones((6, 4)))], op=hvd.Sum)
        with pytest.raises(TypeError, match="overwritten"):
            hvd.grouped_allreduce_([arrays[0], 1.0], op=hvd.Sum)
        with pytest.raises(TypeError, match="list"):
            hvd.grouped_allreduce_([arrays[0], [1.0]], op=hvd.Sum)
    found = hvd.grouped_allreduce_(arrays, op=hvd.Sum)
    assert all(a is b for a, b in zip(found, arrays, strict=True))
    assert all((a == hvd.size()).all() for a in arrays)


# ---- rules of single verbs ---------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 20_000], ids="count={}".format)
def test_allgather_where_only_one_rank_has_rows(hvd, count):
    for owner in range(hvd.size()):
        rows = count if hvd.rank() == owner else 0
        found = hvd.allgather(arange((rows, 2)))
        np.testing.assert_array_equal(found, arange((count, 2)))
    assert hvd.allgather(np.zeros((0, 3), np.int16)).shape == (0, 3)


@pytest.mark.parametrize("rows", [1, 9_000], ids="rows={}".format)
def test_alltoall_in_a_ring_and_with_nothing_to_send(hvd, rows):
    size, rank = hvd.size(), hvd.rank()
    splits = [0] * size
    splits[(rank + 1) % size] = rows
    array, received = hvd.alltoall(
        arange((rows + 2, 3), start=rank),
        np.array(splits, np.uint8) if rows == 1 else tuple(splits),
    )
    source = (rank - 1) % size
    np.testing.assert_array_equal(array, arange((rows, 3), start=source))
    assert received.tolist() == [rows * (r == source) for r in range(size)]
    array, received = hvd.alltoall(arange((rows, 3)), [0] * size)
    assert array.shape == (0, 3)
    assert received.tolist() == [0] * size
    assert hvd.alltoall(np.zeros((0, 2), np.int8)).shape == (0, 2)


@pytest.mark.parametrize("rows", range(6), ids="rows={}".format)
def test_reducescatter_gives_the_first_members_one_row_more(hvd, rows):
    size, rank = hvd.size(), hvd.rank()
    summed = size * arange((rows, 2), "int64")
    expected = np.array_split(summed, size)[rank]
    found = hvd.reducescatter(arange((rows, 2), "int64"), op=hvd.Sum)
    assert_same(found, expected)
    (grouped, other) = hvd.grouped_reducescatter(
        [arange((rows, 2), "int64"), np.ones(rows, np.float32)], op=hvd.Sum
    )
    assert_same(grouped, expected)
    assert_same(other, np.full(len(expected), size, np.float32))


SCALES = [(0.5, 1.0), (1.0, 0.25), (2.0, 3.0), (-1.0, 0.5), (0.0, 1.0)]


@pytest.mark.parametrize(
    "dtype", ["int32", "uint8", "float16", BFLOAT16, "float64", "complex64"], ids=str
)
def test_factors_multiply_the_operands_and_the_result(hvd, dtype):
    dtype, ranks, rank = np.dtype(dtype), range(hvd.size()), hvd.rank()
    for prescale, postscale in SCALES:
        if dtype.kind == "u":  # what a negative number becomes there is nobody's promise
            prescale = abs(prescale)
        counts = [5, LARGE_BYTES // dtype.itemsize] if prescale > 1 or postscale < 1 else [5]
        for op, count in itertools.product(legal_ops(dtype), counts):
            if op is hvd.Product and dtype.kind == "c":
                continue  # the reference rounds otherwise
            step = 1 if dtype.kind in "iu" else 12  # beyond a type's range nothing is promised
            blocks = [(step * (arange(7) % 5 + r)).astype(dtype) for r in ranks]
            if op is hvd.Product:
                blocks = [(arange(7) % 3 + 1).astype(dtype) for _ in ranks]
            mine = np.resize(blocks[rank], count)
            factors = {"prescale_factor": prescale, "postscale_factor": postscale}
            pattern = reference(op, dtype, blocks, prescale, postscale)
            expected = np.resize(pattern, count)
            in_place = mine.copy()
            handles = [
                hvd.allreduce_async(mine, op=op, **factors),
                hvd.grouped_allreduce_async([mine, mine], op=op, **factors),
                hvd.allreduce_async_(in_place, op=op, **factors),
            ]
            scattered = hvd.reducescatter(mine, op=op, **factors)
            assert_reduced(scattered, expected[rows_of(count, ranks, rank)], op)
            whole, group, same = [handle.wait() for handle in handles]
            assert same is in_place
            for found in (whole, *group, in_place):
                assert_reduced(found, expected, op)


# ---- groups ------------------------------------------------------------------------------------


@pytest.mark.parametrize("large", [False, True], ids="large={}".format)
def test_a_group_may_mix_dtypes_shapes_and_kinds(hvd, large):
    size, rank = hvd.size(), hvd.rank()
    count = LARGE_BYTES if large else 3
    dtypes = ["float32", "int8", "float64", BFLOAT16, "int8", "bool", "bool", "complex128", ">i2"]
    group = [np.ones(count + k, dtype) for k, dtype in enumerate(dtypes)]
    group += [2.5, np.uint16(7), np.array(3.0), np.zeros((0, 4))]
    found = hvd.grouped_allreduce(group, op=hvd.Sum)
    for one, given in zip(found, group, strict=True):
        assert type(one) is type(given)
        expected = given if getattr(given, "dtype", None) == np.bool_ else size * given
        np.testing.assert_array_equal(one, expected)
        assert getattr(one, "dtype", None) == getattr(given, "dtype", None)
    arrays = group[: len(dtypes)]
    for one, given in zip(hvd.grouped_allgather(arrays), arrays, strict=True):
        assert_same(one, np.concatenate([given] * size).astype(given.dtype))
    numbers = [array for array in arrays if array.dtype != bool]
    scattered = hvd.grouped_reducescatter(numbers, op=hvd.Average)
    for one, given in zip(scattered, numbers, strict=True):
        assert_same(one, given[rows_of(len(given), range(size), rank)])


def test_an_empty_group_gives_an_empty_list(hvd):
    for verb in ("allreduce", "allgather", "reducescatter"):
        assert getattr(hvd, f"grouped_{verb}")([]) == []
        assert getattr(hvd, f"grouped_{verb}_async")(()).wait() == []
    assert hvd.grouped_allreduce_([]) == []
    assert hvd.grouped_allreduce([], op=hvd.Adasum) == []


@pytest.mark.parametrize("num_arrays", [100, 4000], ids="arrays={}".format)
def test_a_group_may_have_thousands_of_arrays(hvd, num_arrays):
    group = [np.full(1 + k % 3, k + hvd.rank(), np.int64) for k in range(num_arrays)]
    expected = [hvd.size() * k + sum(range(hvd.size())) for k in range(num_arrays)]
    for found in (
        hvd.grouped_allreduce(group, op=hvd.Sum),
        hvd.grouped_allreduce_async(group, op=hvd.Sum, name="many").wait(),
    ):
        assert [array.tolist() for array in found] == [
            [total] * (1 + k % 3) for k, total in enumerate(expected)
        ]
    gathered = hvd.grouped_allgather(group)
    assert [len(array) for array in gathered] == [len(array) * hvd.size() for array in group]


def test_results_of_a_group_are_arrays_of_their_own(hvd):
    found = hvd.grouped_allreduce([np.ones(4), np.ones(4), np.ones(4)], op=hvd.Sum)
    found[0][:] = 7
    assert (found[1] == hvd.size()).all()
    assert (found[2] == hvd.size()).all()
    assert all(a.base is None or a.base.nbytes <= a.nbytes for a in found)  # one kept keeps one


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", ["_", "_async_"])
@pytest.mark.parametrize("count", [3, LARGE_BYTES], ids="count={}".format)
def test_a_mismatch_leaves_all_arrays_of_a_group_unchanged(hvd, way, count):
    is_last = hvd.rank() == hvd.size() - 1
    wrong = [
        np.ones(count + is_last),
        np.ones(count, np.float32 if is_last else np.float64),
        np.ones((count, 1) if is_last else count),
    ]
    for other in wrong:
        arrays = [np.ones(count), other, np.ones(2, np.int8)]
        with pytest.raises(hvd.MismatchError, match="array 1"):
            waited(getattr(hvd, f"grouped_allreduce{way}")(arrays, op=hvd.Sum))
        assert all((array == 1).all() for array in arrays)
    arrays = [np.ones(count)] * (2 + is_last)
    with pytest.raises(hvd.MismatchError, match="number of arrays"):
        hvd.grouped_allreduce_(arrays, op=hvd.Sum)
    assert (arrays[0] == 1).all()
    array = np.ones(count)
    assert (hvd.grouped_allreduce_([array], op=hvd.Sum)[0] == hvd.size()).all()


@pytest.mark.mpi(min_size=2)
def test_a_mismatch_leaves_an_array_unchanged(hvd):
    is_last = hvd.rank() == hvd.size() - 1
    array = np.full(3 + is_last, 5.0)
    for call in (
        lambda: hvd.allreduce_(array, op=hvd.Sum),
        lambda: hvd.allreduce_async_(array, op=hvd.Sum).wait(),
        lambda: hvd.broadcast_(array, 0),
        lambda: hvd.broadcast_async_(array, hvd.size() - 1).wait(),
    ):
        with pytest.raises(hvd.MismatchError, match="shape"):
            call()
        assert (array == 5).all()


# ---- handles -----------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [3, LARGE_BYTES], ids="count={}".format)
def test_a_wait_with_a_timeout_ends_and_the_call_goes_on(hvd, comm, count):
    size, rank = hvd.size(), hvd.rank()
    for late in range(size):
        elapsed = 0.0
        if rank == late:
            meet(comm)
            handle = hvd.allreduce_async(np.full(count, 1.0), op=hvd.Sum, name="x")
        else:
            handle = hvd.allreduce_async(np.full(count, 1.0), op=hvd.Sum, name="x")
            start = time.monotonic()
            for _ in range(2):
                with pytest.raises(TimeoutError, match=rf"allreduce 'x'.*rank {late}"):
                    handle.wait(timeout=0.05)
            elapsed = time.monotonic() - start
            assert not handle.done()
            assert not hvd.poll(handle)
            with pytest.raises(ValueError, match=r"'x'.*under way"):
                hvd.allreduce_async(1.0, name="x")
            meet(comm)
        found = handle.wait(timeout=30)
        assert (found == size).all()
        assert handle.wait(timeout=0) is found
        assert handle.wait() is found
        assert hvd.synchronize(handle) is found
        assert_all(comm, elapsed < 5, f"waited {elapsed:.2f} s for 0.1 s")


@pytest.mark.parametrize("count", [3, LARGE_BYTES], ids="count={}".format)
def test_done_is_false_right_after_the_start_and_true_in_the_end(hvd, count):
    handles = [
        hvd.allreduce_async(np.ones(count), op=hvd.Sum),
        hvd.allgather_async(np.ones(count)),
        hvd.broadcast_async(np.ones(count), 0),
        hvd.alltoall_async(np.ones(count * hvd.size())),
        hvd.reducescatter_async(np.ones(count)),
        hvd.grouped_allreduce_async([np.ones(count)]),
    ]
    assert not handles[-1].done()
    for handle in handles:
        assert isinstance(handle, hvd.Handle)
        while not hvd.poll(handle):
            pass
        assert handle.done()
        assert handle.wait() is hvd.synchronize(handle)
    assert (handles[0].wait() == hvd.size()).all()


def test_an_array_is_overwritten_once_its_handle_is_done(hvd):
    array = np.ones(3)
    handle = hvd.allreduce_async_(array, op=hvd.Sum)
    while not handle.done():
        pass
    assert (array == hvd.size()).all()
    array[:] = 7
    assert handle.wait() is array  # and not a second time
    assert (array == 7).all()


@pytest.mark.mpi(min_size=2)
def test_the_error_of_a_call_is_raised_by_each_wait(hvd):
    size, is_last = hvd.size(), hvd.rank() == hvd.size() - 1
    for way in ("_async", "_async_"):
        array = np.ones(3 + is_last)
        handle = getattr(hvd, "allreduce" + way)(array, op=hvd.Sum, name="x")
        good = hvd.allreduce_async(1, op=hvd.Sum, name="y")
        texts = set()
        for wait in (handle.wait, handle.wait, lambda h=handle: hvd.synchronize(h)):
            with pytest.raises(hvd.MismatchError, match=r"allreduce 'x'") as caught:
                wait()
            texts.add(str(caught.value))
        assert len(texts) == 1
        assert handle.done()
        assert hvd.poll(handle)
        assert (array == 1).all()
        assert good.wait() == size
        assert hvd.allreduce(1, op=hvd.Sum, name="x") == size


@pytest.mark.parametrize("wrong", [3, None, "allreduce", 1.0, len], ids=repr)
def test_what_is_no_handle_is_a_type_error(hvd, wrong):
    with pytest.raises(TypeError, match="poll: expected the Handle"):
        hvd.poll(wrong)
    with pytest.raises(TypeError, match="synchronize: expected the Handle"):
        hvd.synchronize(wrong)


@pytest.mark.parametrize("count", [3, LARGE_BYTES], ids="count={}".format)
def test_a_dropped_handle_does_no_harm_and_its_name_can_be_used_again(hvd, count):
    size, rank = hvd.size(), hvd.rank()
    with process_sets(hvd, *[[r] for r in range(size)]) as alone:

        def let_all_go_on():
            assert hvd.allreduce(1, process_set=alone[rank]) == 1

        for turn in range(3):
            for k in range(10):
                hvd.allreduce_async(np.full(count, float(k)), op=hvd.Sum, name=f"dropped {k}")
            array = np.ones(count)
            hvd.allreduce_async_(array, name="dropped in place", op=hvd.Sum)
            gc.collect()
            hvd.barrier()
            for k in range(10):
                while True:  # until the call that nobody waits for is over on this rank
                    try:
                        handle = hvd.allreduce_async(turn + k, op=hvd.Sum, name=f"dropped {k}")
                        break
                    except ValueError:
                        let_all_go_on()
                assert handle.wait() == size * (turn + k)
            while True:
                try:
                    assert hvd.broadcast(turn, 0, name="dropped in place") == turn
                    break
                except ValueError:
                    let_all_go_on()
            assert (array == 1).all()


def test_hundreds_of_calls_are_under_way_and_waited_for_in_any_order(hvd):
    size, rank = hvd.size(), hvd.rank()
    rng = random.Random(rank)
    calls = []
    for k in range(400):
        count = (1, 10, 500, 6000)[k % 4]
        mine = (arange(count, "int64") + k) * (rank + 1)
        expected = (arange(count, "int64") + k) * sum(range(1, size + 1))
        if k % 5 == 4:
            handle = hvd.allgather_async(mine[:3], name=f"call {k}")
            expected = np.concatenate([(arange(count)[:3] + k) * (r + 1) for r in range(size)])
        else:
            handle = hvd.allreduce_async(mine, op=hvd.Sum, name=f"call {k}")
        assert handle.name == f"call {k}"
        calls.append((handle, expected))
    rng.shuffle(calls)
    for handle, expected in calls:
        np.testing.assert_array_equal(handle.wait(), expected)
    assert all(handle.done() for handle, _ in calls)


def test_operands_may_be_dropped_while_their_call_is_under_way(hvd):
    handles = [hvd.allreduce_async(np.full(LARGE_BYTES, k, "int64"), op="sum") for k in range(5)]
    gc.collect()
    junk = [np.full(LARGE_BYTES, -1, "int64") for _ in range(5)]
    for k, handle in enumerate(handles):
        assert (handle.wait() == k * hvd.size()).all()
    del junk


# ---- compression -------------------------------------------------------------------------------


def halves(hvd):
    return [(hvd.Compression.fp16, np.dtype("float16")), (hvd.Compression.bf16, BFLOAT16)]


@pytest.mark.parametrize("which", [0, 1], ids=["fp16", "bf16"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("count", [PERIOD, LARGE_BYTES // 2], ids="count={}".format)
def test_compressed_floats_are_reduced_as_the_smaller_type(hvd, which, dtype, count):
    compression, small = halves(hvd)[which]
    size, ranks, rank = hvd.size(), range(hvd.size()), hvd.rank()
    rng = np.random.default_rng(1)
    blocks = [(10 * rng.normal(size=PERIOD)).astype(dtype) for _ in ranks]
    mine = np.resize(blocks[rank], count)
    before = mine.copy()
    travels = [block.astype(small) for block in blocks]
    options = {"compression": compression}
    for op in OPS:
        expected = np.resize(reference(op, small, travels).astype(dtype), count)
        assert_same(hvd.allreduce(mine, op=op, **options), expected)
        assert_same(hvd.allreduce_async(mine, op=op, **options).wait(), expected)
        for found in hvd.grouped_allreduce([mine, mine], op=op, **options):
            assert_same(found, expected)
        in_place = mine.copy()
        assert hvd.allreduce_(in_place, op=op, **options) is in_place
        assert_same(in_place, expected)
        assert_same(mine, before)
    if size > 1:
        sent = counted(hvd, lambda: hvd.allreduce(mine, **options))["bytes"]
        assert sent == count * 2


@pytest.mark.parametrize("which", [0, 1], ids=["fp16", "bf16"])
@pytest.mark.parametrize("count", [PERIOD, LARGE_BYTES // 2], ids="count={}".format)
def test_reducescatter_can_be_compressed(hvd, which, count):
    compression, _ = halves(hvd)[which]
    ranks, rank = range(hvd.size()), hvd.rank()
    mine = (arange(count) % 7 + rank).astype(np.float32)
    total = sum(arange(count) % 7 + r for r in ranks).astype(np.float32)
    expected = total[rows_of(count, ranks, rank)]
    assert_same(hvd.reducescatter(mine, op=hvd.Sum, compression=compression), expected)
    for found in hvd.grouped_reducescatter([mine, mine], op=hvd.Sum, compression=compression):
        assert_same(found, expected)


@pytest.mark.parametrize("which", [0, 1], ids=["fp16", "bf16"])
def test_what_is_not_a_wide_float_travels_as_it_is(hvd, which):
    compression, _ = halves(hvd)[which]
    size = hvd.size()
    for dtype in ("int64", "uint8", "complex64", "float16", BFLOAT16):
        found = hvd.allreduce(np.full(3, 3, dtype), op=hvd.Sum, compression=compression)
        assert_same(found, np.full(3, 3 * size, dtype))
    assert hvd.allreduce(True, op=hvd.Min, compression=compression) is True
    assert hvd.allreduce(2**53 + 1, op=hvd.Max, compression=compression) == 2**53 + 1
    found = hvd.allreduce(0.5, compression=compression)
    assert type(found) is float
    assert found == 0.5
    big_endian = np.full(3, 0.5, ">f8")
    assert_same(hvd.allreduce(big_endian, compression=compression), big_endian)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_compress_differently_are_told(hvd):
    kind = hvd.Compression.fp16 if hvd.rank() else hvd.Compression.none
    with pytest.raises(hvd.MismatchError, match="float16"):
        hvd.allreduce(np.ones(3), compression=kind)
    assert hvd.allreduce(1.0) == 1.0


def fixed_point(hvd):
    class FixedPoint(hvd.Compressor):
        """Sums of multiples of 1/256 as integers: exact, whatever the order."""

        @staticmethod
        def compress(array):
            return np.rint(array * 256).astype(np.int32), array.dtype

        @staticmethod
        def decompress(array, context):
            return (array / 256).astype(context)

    return FixedPoint


@pytest.mark.parametrize("count", [7, LARGE_BYTES], ids="count={}".format)
def test_a_compression_may_be_of_the_users_own(hvd, count):
    kind, size, rank = fixed_point(hvd), hvd.size(), hvd.rank()
    mine = (arange(count) % 9 + rank).astype(np.float32) / 8
    expected = sum((arange(count) % 9 + r).astype(np.float32) / 8 for r in range(size))
    options = {"op": hvd.Sum, "compression": kind}
    assert_same(hvd.allreduce(mine, **options), expected)
    assert_same(hvd.allreduce_async(mine, **options).wait(), expected)
    for found in hvd.grouped_allreduce([mine, mine[:3]], **options):
        assert_same(found, expected[: len(found)])
    assert_same(hvd.reducescatter(mine, **options), expected[rows_of(count, range(size), rank)])
    assert hvd.allreduce_(mine, **options) is mine
    assert_same(mine, expected)


def test_a_compression_may_change_the_shape(hvd):
    class Ends(hvd.Compressor):
        @staticmethod
        def compress(array):
            return np.array([array.flat[0], array.flat[-1]]), array.shape

        @staticmethod
        def decompress(array, context):
            found = np.zeros(context, array.dtype)
            found.flat[0], found.flat[-1] = array
            return found

    found = hvd.allreduce(arange((3, 4)) + 1, op=hvd.Sum, compression=Ends)
    expected = np.zeros((3, 4))
    expected[0, 0], expected[-1, -1] = hvd.size(), 12 * hvd.size()
    assert_same(found, expected)


def test_a_compression_that_fails_changes_no_array_of_the_group(hvd):
    class Second(hvd.Compressor):
        """Fails to decompress arrays of two elements."""

        @staticmethod
        def compress(array):
            return array, None

        @staticmethod
        def decompress(array, context):  # noqa: ARG004 - as the base class says
            if array.size == 2:
                raise ArithmeticError("not this one")
            return array

    arrays = [np.ones(3), np.ones(2), np.ones(4)]
    with pytest.raises(ArithmeticError, match="not this one"):
        hvd.grouped_allreduce_(arrays, op=hvd.Sum, compression=Second, postscale_factor=5)
    assert all((array == 1).all() for array in arrays)
    assert hvd.allreduce(1, op=hvd.Sum) == hvd.size()


def test_a_compression_that_returns_something_else_is_an_error(hvd):
    class NoArray(hvd.Compressor):
        @staticmethod
        def compress(array):
            return array.tolist(), None

    class Wrong(hvd.Compressor):
        @staticmethod
        def compress(array):
            return array, None

        @staticmethod
        def decompress(array, context):  # noqa: ARG004 - as the base class says
            return array.astype(np.float16)

    with pytest.raises(TypeError, match=r"allreduce 'x'.*NoArray.compress"):
        hvd.allreduce(np.ones(3), compression=NoArray, name="x")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"allreduce 'x'.*Wrong.decompress.*float16"):
            hvd.allreduce(np.ones(3), compression=Wrong, name="x")
    assert hvd.allreduce(1, op=hvd.Sum, name="x") == hvd.size()


# ---- Adasum ------------------------------------------------------------------------------------


def adasum_of_two(a, b):
    dot, norm_a, norm_b = np.sum(a * b), np.sum(a * a), np.sum(b * b)
    return (1 - dot / (2 * norm_a) if norm_a else 1) * a + (
        1 - dot / (2 * norm_b) if norm_b else 1
    ) * b


def adasum_of(gradients):
    """By the formula: ranks beyond the power of two into the first ones, then pairs of halves."""
    gradients = [np.asarray(g).astype(np.float64) for g in gradients]
    power = 2 ** int(np.log2(len(gradients)))
    for k, extra in enumerate(gradients[power:]):
        gradients[k] = adasum_of_two(gradients[k], extra)

    def tree(part):
        if len(part) == 1:
            return part[0]
        half = len(part) // 2
        return adasum_of_two(tree(part[:half]), tree(part[half:]))

    return tree(gradients[:power])


TOLERANCES = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-12}


@pytest.mark.parametrize("dtype", ["float16", BFLOAT16, "float32", "float64"], ids=str)
def test_adasum_is_the_formula(hvd, sets, comm, dtype):
    dtype, rank = np.dtype(dtype), hvd.rank()
    for i, shape in enumerate([(), (1,), (0,), (13,), (3, 4), (LARGE_BYTES // 2,)]):
        rng = np.random.default_rng(i)
        blocks = [rng.normal(size=shape) + 0.5 for _ in range(hvd.size())]
        blocks = [np.asarray(block).astype(dtype) for block in blocks]
        for ps in mine_among(sets, rank):
            expected = adasum_of([blocks[r] for r in ps.ranks])
            mine = blocks[rank].copy()
            results = [
                hvd.allreduce(mine, op=hvd.Adasum, process_set=ps),
                hvd.allreduce_async(mine, op="adasum", process_set=ps).wait(),
                *hvd.grouped_allreduce([mine, mine], op=hvd.Adasum, process_set=ps),
            ]
            assert_same(mine, blocks[rank])
            results.append(hvd.allreduce_(mine, op=hvd.Adasum, process_set=ps))
            assert results[-1] is mine
            for found in results:
                assert found.dtype == dtype
                assert found.shape == shape
                tolerance = TOLERANCES[dtype.name]
                np.testing.assert_allclose(
                    found.astype(np.float64), expected, rtol=tolerance, atol=tolerance
                )
        whole = results[0].tobytes() if len(ps.ranks) == hvd.size() else b""
        everybody = set(hvd.allgather_object(whole))
        assert len(everybody) == 1 or b"" in everybody


def test_adasum_gives_every_rank_the_same_bits(hvd):
    rng = np.random.default_rng(hvd.rank())
    for count in (3, 1000, LARGE_BYTES):
        for dtype in (np.float32, np.float64):
            found = hvd.allreduce(rng.normal(size=count).astype(dtype), op=hvd.Adasum)
            assert len(set(hvd.allgather_object(found.tobytes()))) == 1


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_adasum_adds_what_is_orthogonal_and_keeps_what_is_equal(hvd, dtype):
    size, rank = hvd.size(), hvd.rank()
    mine = np.zeros((size, 3), dtype)
    mine[rank] = [1, 2, rank + 1]
    expected = np.array([[1, 2, r + 1] for r in range(size)], dtype)
    assert_same(hvd.allreduce(mine, op=hvd.Adasum), expected)
    same = np.array([1, -2, 0.5, 8], dtype)
    assert_same(hvd.allreduce(same, op=hvd.Adasum), same)
    nothing = np.zeros(4, dtype)
    assert_same(hvd.allreduce(nothing, op=hvd.Adasum), nothing)
    only_first = same if rank == 0 else nothing
    assert_same(hvd.allreduce(only_first, op=hvd.Adasum), same)
    factors = {"prescale_factor": 2.0, "postscale_factor": 0.25}
    assert_same(hvd.allreduce(same, op=hvd.Adasum, **factors), same / 2)


def test_adasum_of_a_group_takes_each_array_on_its_own(hvd):
    rng = np.random.default_rng(3)
    blocks = [[rng.normal(size=3), rng.normal(size=5)] for _ in range(hvd.size())]
    found = hvd.grouped_allreduce(blocks[hvd.rank()], op=hvd.Adasum)
    for k, one in enumerate(found):
        np.testing.assert_allclose(one, adasum_of([b[k] for b in blocks]), rtol=1e-12)


def test_adasum_can_be_compressed(hvd):
    same = np.array([1, -2, 0.5, 8])
    assert_same(hvd.allreduce(same, op=hvd.Adasum, compression=hvd.Compression.fp16), same)


def test_reducescatter_has_no_adasum(hvd):
    if hvd.rank() == hvd.size() - 1:
        with pytest.raises(ValueError, match=r"reducescatter.*Adasum"):
            hvd.reducescatter(np.ones(3), op=hvd.Adasum)
        with pytest.raises(ValueError, match=r"grouped_reducescatter.*Adasum"):
            hvd.grouped_reducescatter([np.ones(3)], op=hvd.Adasum)
    assert hvd.allreduce(1, op=hvd.Sum) == hvd.size()
