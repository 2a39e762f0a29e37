"""The array layer of eager calls: whatever the caller holds becomes a NumPy array, and back.

No array library but NumPy is imported here: an object can only be a torch tensor if its program has
imported torch, so the libraries are looked up among the modules that are loaded.  Nothing is
converted silently into something else: what is not an array of numbers is a TypeError.
"""

import sys
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any, Final

import numpy as np

from hvdlite.errors import BackendUnavailableError
from hvdlite.types import Array

Restore = Callable[[Array], Any]  # turns a result into the caller's kind, dtype and device
Store = Callable[[Array], Any]  # puts a result into the caller's array, and returns that

_ACCEPTED: Final = (
    "a NumPy array or scalar, a bool, int, float or complex, a torch tensor on the CPU, "
    "or a JAX array on the CPU"
)
_USER_DEFINED: Final = 2  # dtype.isbuiltin of a type that another library has registered


def to_numpy(array: object, what: str) -> tuple[Array, Restore]:
    """View what the caller gave as a NumPy array.

    Args:
        array: A NumPy array of any layout and byte order, read-only too, a NumPy or Python scalar,
            a torch tensor or a JAX array.
        what: Names the call and the tensor in messages.

    Returns:
        A C-contiguous, aligned array in native byte order, and the way back.  The array shares the
        caller's memory where its layout allows that (and is then only to be read), else it is a
        copy; 0-d stays 0-d.  The way back takes the result over: it may become the caller's array
        without a copy, so nobody else may keep it.  Its shape is free; a 0-d result of a scalar
        is a scalar again.

    Raises:
        TypeError: No array of numbers; the message says what is accepted.
        BackendUnavailableError: The array lives on a GPU.
    """
    if isinstance(array, np.ndarray):
        return _from_ndarray(array, what)
    if isinstance(array, np.generic):
        return _from_numpy_scalar(array, what)
    if isinstance(array, bool | int | float | complex):
        return _from_python_scalar(array, what)
    if _is_of(array, "torch", "Tensor"):
        return _from_torch(array, what)
    if _is_of(array, "jax", "Array"):
        return _from_jax(array, what)
    if _is_of(array, "cupy", "ndarray"):
        raise BackendUnavailableError(
            f"{what}: a CuPy array lives on a GPU, and this version of hvdlite has no GPU backend; "
            "use cupy.asnumpy(array)"
        )
    kind = type(array).__name__
    hint = "; numpy.asarray() makes an array of a list" if isinstance(array, list | tuple) else ""
    if array is None:
        hint = (
            "; every rank passes an array of the right shape and dtype, also where only the root's "
            "values count (broadcast_object() asks for none)"
        )
    raise TypeError(f"{what}: expected {_ACCEPTED}, got {kind}{hint}")


def is_array(value: object) -> bool:
    """Whether `value` is an array of numbers, NumPy's or torch's: what `memory_of()` takes."""
    if isinstance(value, np.ndarray):
        return type(value) in (np.ndarray, np.memmap) and _can_travel(value.dtype)
    return _is_of(value, "torch", "Tensor")


def empty(pattern: Any, shape: tuple[int, ...]) -> Any:
    """A new array of the kind and dtype of `pattern`, for which `is_array()` holds."""
    if isinstance(pattern, np.ndarray):
        return np.empty(shape, pattern.dtype)
    return pattern.detach().new_empty(shape)


def _can_travel(dtype: np.dtype[Any]) -> bool:
    is_number = dtype.kind in "biufc" and dtype.isbuiltin != _USER_DEFINED
    return is_number or dtype.name == "bfloat16"


def check_dtype(dtype: np.dtype[Any], what: str) -> None:
    """Raise TypeError unless arrays of `dtype` can travel: bool, numbers, bfloat16."""
    if not _can_travel(dtype):
        raise TypeError(
            f"{what}: arrays of dtype {dtype} cannot travel; use bool, integers, floats (bfloat16 "
            "too) or complex numbers"
        )


def bfloat16(what: str) -> np.dtype[Any]:
    """NumPy's bfloat16: a registered type of ml_dtypes, which JAX brings and torch does not.

    Raises:
        BackendUnavailableError: ml_dtypes is not installed.
    """
    try:
        scalar: type[np.generic] = import_module("ml_dtypes").bfloat16
    except ImportError as exc:
        raise BackendUnavailableError(
            f"{what}: bfloat16 needs the package ml_dtypes (pip install ml_dtypes): {exc}"
        ) from exc
    return np.dtype(scalar)


@lru_cache(256)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """`dtype.name`, which NumPy makes anew each time."""
    return dtype.name


def store_into(array: object, what: str) -> Store:
    """How to overwrite the caller's array by a result of the same shape and dtype.

    Args:
        array: A writable NumPy array of any layout and byte order, or a torch tensor on the CPU.
        what: Names the call and the tensor in messages.

    Returns:
        A function that copies a result into the array and returns the caller's object.

    Raises:
        TypeError: It cannot be overwritten: a scalar, a JAX array.
        ValueError: It is read-only.
    """
    target = memory_of(array, what)
    # NumPy sees torch's bfloat16 as int16.
    is_bits = not isinstance(array, np.ndarray) and _is_bfloat16(array)

    def store(result: Array) -> Any:
        target[...] = result.view(np.int16) if is_bits else result
        return array

    return store


def memory_of(array: object, what: str) -> Array:
    """The memory of the caller's array, to be overwritten; torch's bfloat16 as int16.

    Args:
        array: A writable NumPy array of any layout and byte order, or a torch tensor on the CPU.
        what: Names the call and the tensor in messages.

    Raises:
        TypeError: It cannot be overwritten: a scalar, a JAX array.
        ValueError: It is read-only.
    """
    if isinstance(array, np.ndarray):
        target = array
    elif _is_of(array, "torch", "Tensor"):
        tensor: Any = array
        plain, torch = tensor.detach(), sys.modules["torch"]
        if plain.is_conj() or plain.is_neg() or plain.layout != torch.strided:
            raise TypeError(f"{what}: a tensor of this kind cannot be overwritten in place")
        target = (plain.view(torch.int16) if _is_bfloat16(plain) else plain).numpy()
    else:
        raise TypeError(
            f"{what}: a {type(array).__name__} cannot be overwritten; pass a NumPy array or a "
            "torch tensor, or use the call without the underscore"
        )
    if not target.flags.writeable:
        raise ValueError(f"{what}: the array is read-only: it cannot be overwritten")
    return target


def _is_bfloat16(tensor: Any) -> bool:
    return bool(tensor.dtype == sys.modules["torch"].bfloat16)


def _is_of(array: object, module: str, name: str) -> bool:
    """Whether `array` is a `module.name`, asked without importing `module`."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(array, kind)


def _plain(array: Array) -> Array:
    """The array itself, if it is C-contiguous, aligned and native, else such a copy."""
    if not array.dtype.isnative:
        return array.astype(np.dtype(array.dtype.type), order="C")
    if not array.flags.aligned:
        return array.copy(order="C")
    return np.asarray(array, order="C")  # unlike ascontiguousarray it leaves 0-d alone


@lru_cache(256)
def _is_plain_number(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biufc" and dtype.isnative and dtype.isbuiltin == 1


def _unchanged(result: Array) -> Array:
    return result


def _from_ndarray(array: Array, what: str) -> tuple[Array, Restore]:
    flags = array.flags
    is_simple = type(array) is np.ndarray and flags.c_contiguous and flags.aligned
    if is_simple and _is_plain_number(array.dtype):  # by far the most frequent case
        return array, _unchanged
    if type(array) not in (np.ndarray, np.memmap):  # subclasses carry masks, units, other algebra
        kind = type(array).__name__
        hint = "array.filled(value)" if isinstance(array, np.ma.MaskedArray) else "np.asarray()"
        raise TypeError(
            f"{what}: got a {kind}, whose meaning beyond its numbers would be lost; "
            f"pass a plain array, e.g. {hint}"
        )
    check_dtype(array.dtype, what)
    dtype = array.dtype

    def restore(result: Array) -> Array:
        return np.asarray(result).astype(dtype, copy=False)

    return _plain(np.asarray(array)), restore


def _from_numpy_scalar(scalar: np.generic, what: str) -> tuple[Array, Restore]:
    check_dtype(scalar.dtype, what)
    dtype = np.dtype(scalar.dtype.type)

    def restore(result: Array) -> Any:
        result = np.asarray(result).astype(dtype, copy=False)
        return result[()] if result.ndim == 0 else result

    return np.asarray(scalar, dtype), restore


def _from_python_scalar(scalar: bool | int | float | complex, what: str) -> tuple[Array, Restore]:
    kind: type[Any] = next(k for k in (bool, int, float, complex) if isinstance(scalar, k))
    try:
        array = np.array(scalar, np.dtype(kind))
    except OverflowError:
        raise ValueError(f"{what}: {scalar} does not fit into 64 bits") from None

    def restore(result: Array) -> Any:
        return kind(result.item()) if result.ndim == 0 else result

    return array, restore


def _from_torch(tensor: Any, what: str) -> tuple[Array, Restore]:
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu":
        raise BackendUnavailableError(
            f"{what}: the tensor is on {tensor.device}, and this version of hvdlite moves tensors "
            "of the CPU only; use tensor.cpu()"
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        form = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise TypeError(f"{what}: a {form} tensor cannot travel; use a dense one")
    is_bfloat16 = tensor.dtype == torch.bfloat16
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    try:
        array = plain.view(torch.int16).numpy() if is_bfloat16 else plain.numpy()
    except TypeError as exc:
        raise TypeError(f"{what}: tensors of dtype {tensor.dtype} cannot travel: {exc}") from exc
    if is_bfloat16:
        array = array.view(bfloat16(what))
    check_dtype(array.dtype, what)

    def restore(result: Array) -> Any:
        result = np.require(result, requirements=["C", "W"])  # torch knows no read-only memory
        if is_bfloat16:
            return torch.from_numpy(result.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(result)

    return array, restore


def _from_jax(array: Any, what: str) -> tuple[Array, Restore]:
    jax = sys.modules["jax"]
    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"{what}: inside jit, grad or vmap an array has no value yet; "
            "call hvdlite outside the transformed function"
        )
    devices = sorted(array.devices(), key=lambda device: int(device.id))
    if len(devices) != 1 or not array.is_fully_addressable:
        raise TypeError(
            f"{what}: the array is spread over {len(devices)} devices; pass an array of one device"
        )
    if devices[0].platform != "cpu":
        raise BackendUnavailableError(
            f"{what}: the array is on {devices[0]}, and this version of hvdlite moves arrays of "
            'the CPU only; use jax.device_put(array, jax.devices("cpu")[0])'
        )
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(
            f"{what}: arrays of dtype {array.dtype} cannot travel; use jax.random.key_data()"
        )
    check_dtype(array.dtype, what)
    is_committed = bool(getattr(array, "committed", True))

    def restore(result: Array) -> Any:
        return jax.device_put(result, devices[0] if is_committed else None)

    return _plain(np.asarray(array)), restore
