"""The collectives on arrays in a world of one: values, kinds, handles, a rank's own mistakes."""

import itertools
import weakref

import ml_dtypes
import numpy as np
import pytest

from hvdlite import Adasum, Average, Compression, Compressor, Max, Min, ProcessSet, Product, Sum
from hvdlite.calls import check_name
from reference import BFLOAT16, DTYPES, OPS, assert_reduced, has_meaning, operands, reference

REDUCES = ["allreduce", "reducescatter"]
WAYS = {
    "allreduce": ["", "_async", "_", "_async_"],
    "broadcast": ["", "_async", "_", "_async_"],
    "allgather": ["", "_async"],
    "alltoall": ["", "_async"],
    "reducescatter": ["", "_async"],
    "grouped_allreduce": ["", "_async", "_", "_async_"],
    "grouped_allgather": ["", "_async"],
    "grouped_reducescatter": ["", "_async"],
}
VERBS = [(verb, way) for verb, ways in WAYS.items() for way in ways]


def call(hvd, verb, way, array, **options):
    """One array through any verb, and back as one array."""
    args = (0,) if verb == "broadcast" else ()
    given = [array] if verb.startswith("grouped") else array
    result = getattr(hvd, verb + way)(given, *args, **options)
    if "async" in way:
        assert isinstance(result, hvd.Handle)
        result = result.wait()
    if verb.startswith("grouped"):
        assert type(result) is list
        (result,) = result
    return result


def read_only():
    array = np.ones(3)
    array.flags.writeable = False
    return array


# ---- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verb", "way"), VERBS, ids="".join)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_verb_gives_back_what_it_was_given(hvd, verb, way, dtype):
    # The average, sum, minimum, ... of one operand is the operand, and nobody else has rows.
    for shape in [(), (0,), (1,), (7,), (2, 3), (20_001,)]:
        if not shape and not any(word in verb for word in ("allreduce", "broadcast")):
            continue
        for op in [op for op in OPS if has_meaning(op, dtype)] if "reduce" in verb else [None]:
            array = np.resize(np.arange(5), shape).astype(dtype)
            before = array.copy()
            options = {} if op is None else {"op": op}
            found = call(hvd, verb, way, array, **options)
            assert type(found) is np.ndarray
            assert found.dtype == dtype
            assert found.shape == shape
            assert found.tobytes() == before.tobytes()
            assert found.flags.writeable
            assert (found is array) == way.endswith("_")
            assert way.endswith("_") or not np.shares_memory(found, array)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.kind != "b"], ids=str)
def test_factors_are_applied_as_the_reference_says(hvd, dtype):
    for op, prescale, postscale in itertools.product(OPS, (0.5, 2.0, 0.0), (1.0, 3.0)):
        if not has_meaning(op, dtype):
            continue
        (block,) = operands(dtype, 1, 20, 1, limit=8)
        expected = reference(op, dtype, [block], prescale, postscale)
        for verb in REDUCES:
            found = getattr(hvd, verb)(
                block, op=op, prescale_factor=prescale, postscale_factor=postscale
            )
            assert_reduced(found, expected, op)


@pytest.mark.parametrize("word", ["average", "mean", "SUM", " min ", "max", "product", "adasum"])
def test_an_op_may_be_a_word_or_its_number(hvd, word):
    assert hvd.allreduce(2.0, op=word) == 2.0
    for op in (Average, Sum, Min, Max, Product, Adasum):
        assert hvd.allreduce(2.0, op=op.value) == 2.0


def test_numbers_come_back_as_numbers_of_the_same_type(hvd):
    scalars = [
        True,
        3,
        -2.5,
        1 + 2j,
        np.bool_(True),
        np.int8(-3),
        np.uint64(2**63),
        np.float16(0.5),
    ]
    for scalar in [*scalars, BFLOAT16.type(1.5)]:
        op = {"op": Sum}
        for found in (
            hvd.allreduce(scalar, **op),
            hvd.allreduce_async(scalar, **op).wait(),
            hvd.grouped_allreduce([np.ones(2), scalar], **op)[1],
            hvd.broadcast(scalar, 0),
        ):
            assert type(found) is type(scalar)
            assert found == scalar


@pytest.mark.parametrize("op", [Average, Sum, Min, Max, Product, Adasum], ids=str)
@pytest.mark.parametrize("dtype", ["float64", "float16", ">f4", ml_dtypes.bfloat16])
def test_an_array_without_dimensions_comes_back_as_an_array(hvd, op, dtype):
    array = np.array(2.0, dtype)
    for found in (hvd.allreduce(array, op=op), hvd.grouped_allreduce([array], op=op)[0]):
        assert type(found) is np.ndarray
        assert found.shape == ()
        assert found.dtype == array.dtype
        assert found == 2


LAYOUTS = {
    "strided": np.arange(12.0)[::3],
    "reversed": np.arange(4.0)[::-1],
    "fortran": np.asfortranarray(np.arange(12.0).reshape(4, 3)),
    "big-endian": np.arange(4, dtype=">i2"),
    "unaligned": np.frombuffer(bytearray(33), np.uint8)[1:].view(np.float64),
}


@pytest.mark.parametrize(("verb", "way"), VERBS, ids="".join)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_verb_takes_every_layout(hvd, verb, way, layout):
    array = LAYOUTS[layout].copy() if layout == "fortran" else LAYOUTS[layout]
    before = array.copy()
    options = {"op": Sum} if "reduce" in verb else {}
    found = call(hvd, verb, way, array, **options)
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, before)
    np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_place_reaches_every_element_of_every_layout(hvd, layout):
    array = np.zeros_like(LAYOUTS[layout]) if layout == "fortran" else LAYOUTS[layout]
    before = array.copy()
    array[...] = 3
    assert hvd.allreduce_(array, op=Sum, postscale_factor=2.0) is array
    assert (array == 6).all()
    assert hvd.grouped_allreduce_([array], op=Sum, prescale_factor=2.0)[0] is array
    assert (array == 12).all()
    array[...] = before


def test_alltoall_tells_how_many_rows_came_if_it_was_told_how_many_go(hvd):
    rows = np.arange(6).reshape(3, 2)
    assert hvd.alltoall(rows).tolist() == rows.tolist()
    for splits in ([2], (2,), np.array([2], np.uint64), np.array([2], ">i2")):
        array, received = hvd.alltoall(rows, splits)
        assert array.tolist() == rows[:2].tolist()
        assert received.dtype == np.int32
        assert received.tolist() == [2]
    array, received = hvd.alltoall(rows, splits=[0])
    assert array.shape == (0, 2)
    assert received.tolist() == [0]


def test_a_group_is_any_iterable_of_arrays(hvd):
    arrays = [np.ones(2), np.zeros((1, 3), np.int8), np.ones(1, bool)]
    for group in (arrays, tuple(arrays), iter(arrays), (a for a in arrays)):
        found = hvd.grouped_allreduce(group, op=Sum)
        assert type(found) is list
        assert [a.tolist() for a in found] == [a.tolist() for a in arrays]
        assert [a.dtype for a in found] == [a.dtype for a in arrays]
    found = hvd.grouped_allreduce(np.ones((3, 2)))
    assert [a.tolist() for a in found] == [[1, 1]] * 3


@pytest.mark.parametrize("way", ["", "_async", "_", "_async_"])
def test_an_empty_group_gives_an_empty_list(hvd, way):
    for verb in ("allreduce", "allgather", "reducescatter"):
        if "_" not in way[-1:] or verb == "allreduce":
            result = getattr(hvd, f"grouped_{verb}{way}")([])
            assert (result.wait() if "async" in way else result) == []


def test_a_group_may_have_thousands_of_arrays(hvd):
    found = hvd.grouped_allreduce([np.full(1 + k % 3, k) for k in range(5000)], op=Sum)
    assert [array.tolist() for array in found] == [[k] * (1 + k % 3) for k in range(5000)]


# ---- handles -----------------------------------------------------------------------------------


def test_a_handle_is_not_done_right_after_the_start_and_is_in_the_end(hvd):
    handle = hvd.allreduce_async(np.ones(3), name="x")
    assert repr(handle) == "Handle('x')"
    assert handle.name == "x"
    assert not handle.done()
    while not hvd.poll(handle):
        pass
    found = handle.wait(timeout=0)
    assert handle.wait() is found
    assert hvd.synchronize(handle) is found
    assert hvd.poll(handle)


def test_calls_without_a_name_are_counted(hvd):
    first, second = hvd.allreduce_async(1.0), hvd.allreduce_async(2.0)
    assert first.name != second.name
    assert second.wait() == 2.0
    assert first.wait() == 1.0


def test_a_name_is_taken_until_its_call_is_over(hvd):
    handle = hvd.allreduce_async(np.ones(3), name="x")
    with pytest.raises(ValueError, match=r"allgather 'x': a call of this name is still under way"):
        hvd.allgather(np.ones(3), name="x")
    handle.wait()
    assert hvd.allgather(np.ones(3), name="x").tolist() == [1, 1, 1]


def test_a_dropped_handle_leaves_its_name_and_its_array(hvd):
    array = np.ones(3)
    hvd.allreduce_async_(array, name="x", postscale_factor=2.0)
    hvd.barrier()
    assert hvd.allreduce(1.0, name="x") == 1.0
    assert (array == 1).all()


def test_an_array_is_overwritten_once_and_not_before_its_handle_is_waited_for(hvd):
    array = np.ones(3)
    handle = hvd.allreduce_async_(array, postscale_factor=2.0)
    hvd.barrier()
    assert (array == 1).all()
    assert handle.wait() is array
    assert (array == 2).all()
    array[:] = 7
    assert handle.wait() is array
    assert (array == 7).all()


@pytest.mark.parametrize("wrong", [3, None, "x", 1.0], ids=repr)
def test_what_is_no_handle_is_a_type_error(hvd, wrong):
    kind = type(wrong).__name__
    with pytest.raises(TypeError, match=f"poll: expected the Handle.*{kind}"):
        hvd.poll(wrong)
    with pytest.raises(TypeError, match=f"synchronize: expected the Handle.*{kind}"):
        hvd.synchronize(wrong)


def test_a_call_that_was_not_over_at_the_end_raises_in_its_wait(hvd):
    over, pending = hvd.allreduce_async(1.0), None
    assert over.wait() == 1.0
    pending = hvd.allreduce_async(2.0)
    hvd.shutdown()
    assert over.wait() == 1.0
    for _ in range(2):
        with pytest.raises(hvd.ShutDownError):
            pending.wait()
    assert pending.done()


# ---- errors that a rank sees alone -------------------------------------------------------------


ARRAYS = {
    "list": ([1.0, 2.0], TypeError, "got list; numpy.asarray"),
    "None": (None, TypeError, "got NoneType"),
    "text": ("abc", TypeError, "got str"),
    "object": (object(), TypeError, "got object"),
    "objects": (np.zeros(3, object), TypeError, "dtype object"),
    "texts": (np.array(["a"]), TypeError, "dtype <U1"),
    "times": (np.zeros(3, "M8[s]"), TypeError, "dtype datetime64"),
    "records": (np.zeros(3, "i4,f4"), TypeError, "cannot travel"),
    "masked": (np.ma.ones(3), TypeError, "MaskedArray.*filled"),
}


@pytest.mark.parametrize(("verb", "way"), VERBS, ids="".join)
@pytest.mark.parametrize("wrong", ARRAYS)
def test_what_cannot_travel_is_an_error_that_names_call_and_tensor(hvd, verb, way, wrong):
    array, error, words = ARRAYS[wrong]
    with pytest.raises(error, match=f"^{verb} 'grad': .*{words}"):
        call(hvd, verb, way, array, name="grad")
    with pytest.raises(error, match=f"^{verb}: .*{words}"):
        call(hvd, verb, way, array)


# What is called, with which error and words; the message begins with the call and the tensor.
MISTAKES = {
    "op": ("allreduce", 1.0, {"op": "median"}, ValueError, "median.*average"),
    "op None": ("allreduce", 1.0, {"op": None}, ValueError, "None"),
    "prescale text": ("allreduce", 1.0, {"prescale_factor": "2"}, TypeError, "'2'"),
    "prescale None": ("allreduce", 1.0, {"prescale_factor": None}, TypeError, "None"),
    "prescale bool": ("allreduce", 1.0, {"prescale_factor": True}, TypeError, "True"),
    "prescale complex": ("allreduce", 1.0, {"prescale_factor": 2j}, TypeError, "2j"),
    "prescale complex64": (
        "allreduce",
        1.0,
        {"prescale_factor": np.complex64(2j)},
        TypeError,
        "prescale_factor is a number",
    ),
    "prescale nan": ("allreduce", 1.0, {"prescale_factor": np.nan}, ValueError, "finite, got nan"),
    "postscale inf": ("allreduce", 1.0, {"postscale_factor": np.inf}, ValueError, "finite.*inf"),
    "postscale huge": ("allreduce", 1.0, {"postscale_factor": 10**400}, ValueError, "postscale"),
    "compression": ("allreduce", 1.0, {"compression": "fp16"}, TypeError, "Compressor.*'fp16'"),
    "compression None": ("allreduce", 1.0, {"compression": None}, TypeError, "Compressor.*None"),
    "set": ("allreduce", 1.0, {"process_set": [0]}, TypeError, "ProcessSet, got list"),
    "Average of bool": ("allreduce", True, {}, TypeError, "Average of bool"),
    "scaled bool": (
        "allreduce",
        True,
        {"op": "sum", "prescale_factor": 2.0},
        TypeError,
        "cannot be scaled",
    ),
    "Min of complex": ("allreduce", 1j, {"op": "min"}, TypeError, "no order"),
    "Adasum of int": ("allreduce", 1, {"op": "adasum"}, TypeError, "Adasum is for real floats"),
    "Adasum of complex": ("allreduce", 1j, {"op": Adasum}, TypeError, "Adasum is for real floats"),
    "Adasum scattered": ("reducescatter", np.ones(3), {"op": Adasum}, ValueError, "Adasum"),
    "int of 65 bits": ("allreduce", 2**64, {"op": "sum"}, ValueError, "64 bits"),
    "scattered 0-d": ("reducescatter", np.array(1.0), {}, ValueError, "0-d.*shape"),
    "scattered scalar": ("reducescatter", 1.0, {}, ValueError, "0-d.*shape"),
    "gathered 0-d": ("allgather", np.array(1.0), {}, ValueError, "0-d.*shape"),
    "gathered scalar": ("allgather", 1.0, {}, ValueError, "0-d.*shape"),
    "exchanged 0-d": ("alltoall", np.array(1.0), {}, ValueError, "0-d.*shape"),
    "splits length": ("alltoall", np.ones(3), {"splits": [1, 1]}, ValueError, "2 entries for 1"),
    "splits empty": ("alltoall", np.ones(3), {"splits": []}, ValueError, "0 entries for 1"),
    "splits negative": ("alltoall", np.ones(3), {"splits": [-1]}, ValueError, r">= 0.*\[-1\]"),
    "splits beyond": ("alltoall", np.ones(3), {"splits": [4]}, ValueError, r"3 rows.*\[4\]"),
    "splits floats": ("alltoall", np.ones(3), {"splits": [1.0]}, ValueError, "list of integers"),
    "splits bools": ("alltoall", np.ones(3), {"splits": [True]}, ValueError, "list of integers"),
    "splits nested": ("alltoall", np.ones(3), {"splits": [[3]]}, ValueError, "list of integers"),
    "splits int": ("alltoall", np.ones(3), {"splits": 3}, ValueError, "list of integers"),
    "splits ragged": (
        "alltoall",
        np.ones(3),
        {"splits": [[1], [1, 2]]},
        (TypeError, ValueError),
        ".",
    ),
    "root absent": ("broadcast", 1.0, {"root_rank": 1}, ValueError, r"root_rank 1.*\[0\]"),
    "root negative": ("broadcast", 1.0, {"root_rank": -1}, ValueError, "root_rank -1"),
    "root bool": ("broadcast", 1.0, {"root_rank": False}, TypeError, "an int; got False"),
    "root float": ("broadcast", 1.0, {"root_rank": 0.0}, TypeError, "an int; got 0.0"),
    "root None": ("broadcast", 1.0, {"root_rank": None}, TypeError, "an int; got None"),
    "group of one array": ("grouped_allreduce", 5, {}, TypeError, "a list of arrays, got int"),
    "group of a text": ("grouped_allgather", "ab", {}, TypeError, "a list of arrays, got str"),
    "group of a dict": ("grouped_allreduce", {"a": 1.0}, {}, TypeError, "a list.*got dict"),
    "group of 0-d": ("grouped_allreduce", np.array(1.0), {}, TypeError, "."),
    "group with a text": ("grouped_allreduce", [1.0, "x"], {}, TypeError, "got str"),
    "group with a scalar": ("grouped_allgather", [np.ones(2), 1.0], {}, ValueError, "0-d"),
    "group with a bool": ("grouped_allreduce", [1.0, True], {}, TypeError, "Average of bool"),
    "in place list": ("allreduce_", [1.0], {}, TypeError, "got list"),
    "in place scalar": ("allreduce_", 1.0, {}, TypeError, "float cannot be overwritten"),
    "in place number": ("allreduce_", np.int8(1), {}, TypeError, "int8 cannot be overwritten"),
    "in place read-only": ("allreduce_", read_only(), {}, ValueError, "read-only"),
    "broadcast scalar": ("broadcast_", 1.0, {"root_rank": 0}, TypeError, "cannot be overwritten"),
    "broadcast read-only": ("broadcast_", read_only(), {"root_rank": 0}, ValueError, "read-only"),
    "group read-only": (
        "grouped_allreduce_",
        [np.ones(2), read_only()],
        {},
        ValueError,
        "read-only",
    ),
}


@pytest.mark.parametrize("way", ["", "_async"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_an_error_that_names_call_and_tensor_and_sends_nothing(hvd, mistake, way):
    verb, array, options, error, words = MISTAKES[mistake]
    verb, in_place = verb.rstrip("_"), "_" * verb.endswith("_")
    before = hvd.stats()
    with pytest.raises(error, match=words) as caught:
        getattr(hvd, verb + way + in_place)(array, name="grad", **options)
    assert hvd.stats() == before
    assert verb in str(caught.value)
    assert "process_set" in options or "grad" in str(caught.value)


@pytest.mark.parametrize("name", ["", 5, b"x", "\0x", "\udc80", "x" * 10_000, "ä" * 400], ids=ascii)
def test_a_name_that_cannot_be_sent_is_refused(hvd, name):
    for verb in ("allreduce", "allreduce_async", "allgather", "grouped_allreduce"):
        with pytest.raises(ValueError, match=r"."):
            getattr(hvd, verb)([np.ones(2)] if "grouped" in verb else np.ones(2), name=name)
    assert hvd.allreduce(1.0) == 1.0


def test_a_name_may_be_any_other_text(hvd):
    for name in ("x" * 512, "ä" * 256, "a b\n'\"", "allreduce.noname.x", " "):
        assert hvd.allreduce(1.0, name=name) == 1.0


def test_a_set_that_is_not_registered_is_refused(hvd):
    for verb, way in VERBS:
        with pytest.raises(ValueError, match=f"{verb}: .*is not registered"):
            call(hvd, verb, way, np.ones(3), process_set=ProcessSet([0]))


def test_a_call_after_shutdown_says_so(hvd):
    hvd.shutdown()
    for verb, way in VERBS:
        with pytest.raises(hvd.ShutDownError):
            call(hvd, verb, way, np.ones(3))


# ---- compression and Adasum --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("verb", ["allreduce", "reducescatter", "grouped_allreduce"])
@pytest.mark.parametrize("dtype", ["float32", "float64", ">f8"])
def test_a_compressed_array_comes_back_rounded_and_of_its_own_type(hvd, kind, verb, dtype):
    small = np.dtype("float16") if kind == "fp16" else BFLOAT16
    array = np.array([1 / 3, 1e-3, 1e5, -2.0, 0.0], dtype)
    with np.errstate(over="ignore"):
        expected = array.astype(small).astype(dtype)
    found = call(hvd, verb, "", array, compression=getattr(Compression, kind))
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, expected)


def test_a_compression_of_ones_own_is_given_plain_arrays(hvd):
    seen = []

    class Looks(Compressor):
        @staticmethod
        def compress(array):
            seen.append(array)
            return array * 2, "context"

        @staticmethod
        def decompress(array, context):
            assert context == "context"
            return array / 2

    array = np.arange(6, dtype=">f4").reshape(2, 3).T
    found = hvd.allreduce(array, op=Sum, compression=Looks)
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype
    assert seen[0].flags.c_contiguous
    assert seen[0].dtype.isnative
    assert hvd.allreduce(np.ones(2), compression=Looks()).tolist() == [1, 1]  # as good as its class


def test_a_compression_of_ones_own_may_compute_with_arrays_without_dimensions(hvd):
    # NumPy makes a scalar of them in most operations.
    class Doubles(Compressor):
        @staticmethod
        def compress(array):
            return array * 2, None

        @staticmethod
        def decompress(array, context):  # noqa: ARG004 - as the base class says
            return array / 2

    assert hvd.allreduce(1.5, compression=Doubles) == 1.5
    assert hvd.allreduce(np.array(1.5), compression=Doubles).shape == ()


def test_adasum_of_one_rank_is_its_gradient(hvd):
    for dtype in ("float16", BFLOAT16, "float32", "float64", "longdouble"):
        array = np.array([1, -2, 0.5], dtype)
        found = hvd.allreduce(array, op=Adasum)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
        found = hvd.allreduce(array, op=Adasum, prescale_factor=2.0, postscale_factor=0.25)
        np.testing.assert_array_equal(found, array / 2)


def test_a_call_that_is_remembered_keeps_no_array(hvd):
    array = np.ones(1000)
    kept = weakref.ref(array)
    hvd.allreduce(array, name="once")
    assert hvd.current().usual_calls
    del array
    assert kept() is None


def test_a_name_that_is_no_text_is_a_value_error_that_shows_it():
    for name in (["a"], 1, b"a", {}):
        with pytest.raises(ValueError, match="allreduce: name must be a non-empty string, got"):
            check_name("allreduce", name)
