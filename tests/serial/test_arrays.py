"""The array layer: what is accepted, in which form it travels, and what comes back."""

import os
import subprocess
import sys
import types
from enum import IntEnum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from hvdlite.arrays import check_dtype, to_numpy
from hvdlite.errors import BackendUnavailableError

DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "longdouble", "complex64", "complex128"),
]


def round_trip(array):
    """What the caller gets if the collective hands back what travelled."""
    plain, restore = to_numpy(array, "allreduce 'w'")
    return restore(plain.copy())


def assert_plain(array):
    assert type(array) is np.ndarray
    assert array.flags.c_contiguous
    assert array.flags.aligned
    assert array.dtype.isnative


# --- NumPy


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 4)])
def test_contiguous_array_is_not_copied(dtype, shape):
    array = np.ones(shape, dtype)
    plain, restore = to_numpy(array, "x")
    assert_plain(plain)
    assert plain.shape == shape
    assert plain.dtype == array.dtype
    assert array.size == 0 or np.shares_memory(plain, array)
    result = np.zeros(shape, dtype)
    assert restore(result) is result


def unaligned():
    raw = np.zeros(33, np.uint8)
    return raw[1:].view(np.float64)


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(10)[::2],
        np.arange(10)[::-1],
        np.broadcast_to(np.float32(3), (4, 2)),
        np.arange(12).reshape(3, 4)[:, 1:3],
        np.arange(5, dtype=">i4"),
        np.arange(6, dtype=">f8").reshape(2, 3).T,
        np.array(2.5, ">f4"),
        np.array(2 + 1j, ">c16"),
        np.array(1, ">g"),
        unaligned(),
    ],
    ids=["fortran", "step", "reversed", "broadcast", "block", *"abcde", "unaligned"],
)
def test_other_layouts_become_a_copy_with_equal_values(array):
    before = array.copy()
    plain, _ = to_numpy(array, "x")
    assert_plain(plain)
    assert plain.shape == array.shape
    assert not np.shares_memory(plain, array)
    np.testing.assert_array_equal(plain, before)
    back = round_trip(array)
    assert back.dtype == array.dtype
    assert back.dtype.byteorder == array.dtype.byteorder
    np.testing.assert_array_equal(back, before)


def test_read_only_array_is_accepted_and_comes_back_writable():
    array = np.arange(3.0)
    array.flags.writeable = False
    back = round_trip(array)
    assert back.flags.writeable
    np.testing.assert_array_equal(back, [0, 1, 2])


def test_memmap_is_accepted_and_comes_back_as_an_array(tmp_path):
    array = np.memmap(tmp_path / "a", np.float32, "w+", shape=(4,))
    array[:] = 3
    plain, _ = to_numpy(array, "x")
    assert_plain(plain)
    assert np.shares_memory(plain, array)
    assert type(round_trip(array)) is np.ndarray


def test_zero_dimensional_array_stays_one():
    back = round_trip(np.array(2.5))
    assert type(back) is np.ndarray
    assert back.shape == ()


def test_the_result_may_have_another_shape():
    _, restore = to_numpy(np.zeros((2, 3), ">f4"), "allgather")
    back = restore(np.ones((8, 3), np.float32))
    assert back.shape == (8, 3)
    assert back.dtype == np.dtype(">f4")


@given(
    st_np.arrays(
        st_np.integer_dtypes(endianness="?") | st_np.floating_dtypes(endianness="?"),
        st_np.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    ),
    st.booleans(),
    st.integers(1, 3),
)
def test_any_layout_comes_back_equal(array, transpose, step):
    array = array.T if transpose else array
    array = array[..., ::step] if array.ndim else array
    plain, _ = to_numpy(array, "x")
    assert_plain(plain)
    back = round_trip(array)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


class Quantity(np.ndarray):
    """Stands for the subclasses that carry a unit."""


@pytest.mark.parametrize(
    ("array", "named"),
    [
        (np.array([None, 1]), "object"),
        (np.array([[1], [1, 2]], object), "object"),
        (np.array(["a"]), "<U1"),
        (np.array([b"a"]), "|S1"),
        (np.array(["2026-01-01"], "M8[D]"), "datetime64[D]"),
        (np.array([1], "m8[s]"), "timedelta64[s]"),
        (np.zeros(2, "V4"), "|V4"),
        (np.zeros(2, [("a", "f4")]), "[('a', '<f4')]"),
        (np.str_("a"), "<U1"),
        (np.datetime64("2026-01-01"), "datetime64[D]"),
        (np.zeros(2, [("a", "f4")])[0], "[('a', '<f4')]"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), "MaskedArray"),
        (np.ma.masked, "MaskedConstant"),
        (np.zeros(2).view(Quantity), "Quantity"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_is_no_array_of_numbers_is_refused_by_name(array, named):
    with pytest.raises(TypeError) as info:
        to_numpy(array, "allgather 'w'")
    assert str(info.value).startswith("allgather 'w': ")
    assert named in str(info.value)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_matrix_is_refused():
    with pytest.raises(TypeError, match="x: got a matrix"):
        to_numpy(np.matrix([[1, 2]]), "x")


@pytest.mark.parametrize("thing", [None, [1.0], (1, 2), "text", b"bytes", {1}, range(3), object()])
def test_other_objects_are_refused_with_what_is_accepted(thing):
    with pytest.raises(TypeError) as info:
        to_numpy(thing, "broadcast 'b'")
    text = str(info.value)
    assert text.startswith("broadcast 'b': expected a NumPy array or scalar, a bool, int")
    assert f"got {type(thing).__name__}" in text
    assert ("numpy.asarray()" in text) == isinstance(thing, list | tuple)


# --- scalars


@pytest.mark.parametrize(
    ("scalar", "dtype"),
    [
        (True, "bool"),
        (-3, "int64"),
        (2**63 - 1, "int64"),
        (2.5, "float64"),
        (1 + 2j, "complex128"),
    ],
)
def test_python_scalar_comes_back_as_one(scalar, dtype):
    plain, _ = to_numpy(scalar, "x")
    assert_plain(plain)
    assert plain.shape == ()
    assert plain.dtype == dtype
    back = round_trip(scalar)
    assert type(back) is type(scalar)
    assert back == scalar


@pytest.mark.parametrize("scalar", [2**63, -(2**63) - 1, 10**30])
def test_python_int_beyond_64_bits_is_refused(scalar):
    # uint64 on one rank and int64 on another would be a mismatch that depends on the value
    with pytest.raises(ValueError, match=f"x: {scalar} does not fit into 64 bits"):
        to_numpy(scalar, "x")


def test_int_subclass_travels_as_int():
    class Colour(IntEnum):
        RED = 7

    assert round_trip(Colour.RED) == 7
    assert type(round_trip(Colour.RED)) is int


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_scalar_comes_back_as_one(dtype):
    scalar = np.dtype(dtype).type(1)
    plain, _ = to_numpy(scalar, "x")
    assert_plain(plain)
    assert plain.dtype == scalar.dtype
    back = round_trip(scalar)
    assert type(back) is type(scalar)
    assert back == scalar


@pytest.mark.parametrize("scalar", [2.5, np.float32(2.5)])
def test_a_result_with_dimensions_stays_an_array_for_a_scalar(scalar):
    plain, restore = to_numpy(scalar, "x")
    back = restore(np.ones(3, plain.dtype))
    assert back.shape == (3,)
    assert back.dtype == plain.dtype


# --- bfloat16 and other registered types


def test_bfloat16_array_is_accepted():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.arange(4).astype(ml_dtypes.bfloat16)
    plain, _ = to_numpy(array[::2], "x")
    assert_plain(plain)
    assert plain.dtype == ml_dtypes.bfloat16
    assert round_trip(array).dtype == ml_dtypes.bfloat16
    scalar = ml_dtypes.bfloat16(1.5)
    assert type(round_trip(scalar)) is ml_dtypes.bfloat16


@pytest.mark.parametrize("name", ["float8_e5m2", "float8_e4m3fn", "int4"])
def test_other_registered_types_are_refused(name):
    # float8_e5m2 says of itself that its kind is "f"
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(TypeError, match=name):
        check_dtype(np.dtype(getattr(ml_dtypes, name)), "x")


# --- torch


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize(
    "dtype",
    [
        *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"),
        *("complex64", "complex128", "bfloat16"),
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_torch_tensor_shares_memory_and_comes_back(torch, dtype, shape):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    tensor = torch.ones(shape, dtype=getattr(torch, dtype))
    plain, _ = to_numpy(tensor, "x")
    assert_plain(plain)
    assert plain.dtype.name == dtype
    assert plain.shape == shape
    assert plain.ctypes.data == tensor.data_ptr() or tensor.numel() == 0
    back = round_trip(tensor)
    assert type(back) is torch.Tensor
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_torch_bfloat16_keeps_its_values(torch):
    pytest.importorskip("ml_dtypes")
    tensor = torch.tensor([1.5, -2.0, float("inf")], dtype=torch.bfloat16)
    plain, restore = to_numpy(tensor, "x")
    assert plain.astype(np.float32).tolist() == [1.5, -2.0, float("inf")]
    assert restore((plain + plain).reshape(3, 1)).tolist() == [[3.0], [-4.0], [float("inf")]]


def test_torch_bfloat16_without_ml_dtypes_says_what_to_install(torch, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)  # an import of it fails
    tensor = torch.ones(2, dtype=torch.bfloat16)
    with pytest.raises(BackendUnavailableError, match="pip install ml_dtypes"):
        to_numpy(tensor, "x")


def test_torch_views_and_gradients(torch):
    base = torch.arange(6.0).reshape(2, 3)
    for tensor in (
        base.t(),
        base[:, ::2],
        base[0].expand(4, 3),
        torch.nn.Parameter(base),
        torch.arange(3).to(torch.complex64).mul(1j).conj(),
        torch.arange(3).to(torch.complex64).mul(1j).conj().imag,
        torch.tensor([2j]).conj().imag,  # contiguous, and negative by a flag alone
    ):
        plain, _ = to_numpy(tensor, "x")
        assert_plain(plain)
        np.testing.assert_array_equal(plain, np.array(tensor.tolist()))
        back = round_trip(tensor)
        assert type(back) is torch.Tensor
        assert not back.requires_grad
        assert torch.equal(back, tensor.detach())


def test_torch_result_in_read_only_memory_is_copied(torch):
    _, restore = to_numpy(torch.zeros(2), "x")
    result = np.ones(2, np.float32)
    result.flags.writeable = False
    back = restore(result)
    back += 1
    assert result.tolist() == [1, 1]
    assert back.tolist() == [2, 2]


def test_torch_forms_that_cannot_travel(torch):
    with pytest.raises(TypeError, match=r"x: a torch\.sparse_coo tensor"):
        to_numpy(torch.eye(2).to_sparse(), "x")
    with pytest.raises(TypeError, match=r"dtype torch\.float8_e5m2 cannot travel"):
        to_numpy(torch.ones(2).to(torch.float8_e5m2), "x")
    with pytest.raises(BackendUnavailableError, match="the tensor is on meta"):
        to_numpy(torch.ones(2, device="meta"), "x")


# --- JAX


@pytest.fixture
def jax():
    return pytest.importorskip("jax")


@pytest.mark.parametrize("dtype", ["bool", "int32", "float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_jax_array_comes_back(jax, dtype, shape):
    array = jax.numpy.ones(shape, dtype)
    plain, restore = to_numpy(array, "x")
    assert_plain(plain)
    assert plain.dtype.name == dtype
    assert plain.shape == shape
    back = restore(plain.copy())
    assert isinstance(back, jax.Array)
    assert back.dtype == array.dtype
    assert back.shape == shape
    assert back.devices() == array.devices()
    assert bool((back == array).all())


def test_jax_array_stays_committed_or_not(jax):
    free = jax.numpy.ones(2)
    bound = jax.device_put(free, jax.devices()[0])
    assert round_trip(free).committed is False
    assert round_trip(bound).committed is True


def test_jax_arrays_without_values_are_refused(jax):
    with pytest.raises(TypeError, match="x: inside jit"):
        jax.jit(lambda a: to_numpy(a, "x"))(jax.numpy.ones(2))
    with pytest.raises(TypeError, match=r"jax\.random\.key_data"):
        to_numpy(jax.random.key(0), "x")


JAX_SHARDED = """
import jax, numpy as np
from hvdlite.arrays import to_numpy
first, second = jax.devices()
mesh = jax.sharding.Mesh(np.array([first, second]), "i")
halves = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
spread = jax.device_put(np.zeros(4), halves)
try:
    to_numpy(spread, "x")
except TypeError as exc:
    print(exc)
plain, restore = to_numpy(jax.device_put(np.zeros(4), second), "x")
print(restore(plain).devices() == {second})
"""


def test_jax_array_of_several_devices_is_refused_and_the_second_one_kept(jax):
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = run_python(JAX_SHARDED, env)
    assert done == "x: the array is spread over 2 devices; pass an array of one device\nTrue\n"


# --- libraries are recognized, never imported


def run_python(code, env=()):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **dict(env)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


def test_cupy_array_says_that_there_is_no_gpu_backend(monkeypatch):
    fake = types.ModuleType("cupy")
    fake.ndarray = type("ndarray", (), {})
    monkeypatch.setitem(sys.modules, "cupy", fake)
    with pytest.raises(BackendUnavailableError, match=r"x: a CuPy array .* no GPU backend"):
        to_numpy(fake.ndarray(), "x")


@pytest.mark.parametrize("name", ["torch", "jax", "cupy"])
def test_a_half_imported_library_is_no_obstacle(name, monkeypatch):
    # another thread may be importing it: the module is there, its names are not
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    with pytest.raises(TypeError, match="got object"):
        to_numpy(object(), "x")


def test_asking_imports_no_array_library():
    code = """
import sys, numpy
from hvdlite.arrays import to_numpy
for thing in (numpy.ones(3), 1.5, numpy.float32(1)):
    to_numpy(thing, "x")
try:
    to_numpy(object(), "x")
except TypeError:
    print(sorted({"torch", "jax", "cupy", "ml_dtypes", "mpi4py"} & set(sys.modules)))
"""
    assert run_python(code) == "[]\n"
