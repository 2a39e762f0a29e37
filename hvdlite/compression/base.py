"""What a compression is, and the one that leaves everything as it is."""

from typing import Any

import numpy as np

from hvdlite.types import Array


class Compressor:
    """Base class of compressions: override both functions, and pass the class itself.

        class Halves(Compressor):
            @staticmethod
            def compress(array):
                return array[::2], array.shape

            @staticmethod
            def decompress(array, context):
                return np.repeat(array, 2)[:context[0]]

    What `compress` returns is what is reduced: it must have the same shape and dtype on all ranks,
    so it may depend on the shape and dtype of its argument, not on its values. Reducing it and
    decompressing the result must mean what reducing the arrays would have meant.
    """

    @staticmethod
    def compress(array: Array) -> tuple[Array, Any]:
        """Make what travels.

        Args:
            array: C-contiguous, of native byte order; not to be changed.

        Returns:
            The array that travels (it may be `array` itself), and whatever `decompress` needs.
        """
        raise NotImplementedError("a compression has compress(array) -> (array, context)")

    @staticmethod
    def decompress(array: Array, context: Any) -> Array:
        """Make the result.

        Args:
            array: The reduced array; it may be changed or returned.
            context: What `compress` returned beside it.

        Returns:
            An array of the shape and dtype that `compress` was given.
        """
        raise NotImplementedError("a compression has decompress(array, context) -> array")


class NoneCompressor(Compressor):
    """Everything travels as it is."""

    @staticmethod
    def compress(array: Array) -> tuple[Array, Any]:
        """See `Compressor.compress`."""
        return array, None

    @staticmethod
    def decompress(array: Array, context: Any) -> Array:  # noqa: ARG004 - as the base class says
        """See `Compressor.decompress`."""
        return array


def check_compression(compression: object, what: str) -> type[Compressor]:
    """The compression as a class.

    Raises:
        TypeError: It is no subclass of `Compressor`.
    """
    if isinstance(compression, type) and issubclass(compression, Compressor):
        return compression
    if isinstance(compression, Compressor):
        return type(compression)
    raise TypeError(
        f"{what}: compression must be Compression.none, fp16, bf16 or a subclass of "
        f"hvdlite.Compressor, got {compression!r}"
    )


class Codec:
    """One compression of arrays of one shape and dtype; tried out once, with zeros.

    Args:
        compressor: The compression.
        shape: Of the arrays.
        dtype: Of the arrays.
        what: Names the tensor in messages.

    Attributes:
        wire: An array such as those that travel.

    Raises:
        TypeError, ValueError: It does not do what `Compressor` asks for.
    """

    def __init__(
        self, compressor: type[Compressor], shape: tuple[int, ...], dtype: np.dtype[Any], what: str
    ) -> None:
        self._compressor, self.shape, self.dtype, self._what = compressor, shape, dtype, what
        self.wire, self.context = self._compress(np.zeros(shape, dtype))
        self.decompress(self.wire.copy(), self.context)

    def compress(self, array: Array) -> tuple[Array, Any]:
        """What travels, and what `decompress` needs."""
        wire, context = self._compress(array)
        if wire.shape != self.wire.shape or wire.dtype != self.wire.dtype:
            raise ValueError(
                f"{self._what}: {self._compressor.__name__}.compress gave shape {wire.shape}, dtype"
                f" {wire.dtype}, and shape {self.wire.shape}, dtype {self.wire.dtype} before; it "
                "may depend on shape and dtype alone"
            )
        return wire, context

    def _compress(self, array: Array) -> tuple[Array, Any]:
        wire, context = self._compressor.compress(array)
        if isinstance(wire, np.generic):  # what NumPy makes of arrays without dimensions
            wire = np.asarray(wire)
        if not isinstance(wire, np.ndarray):
            raise TypeError(
                f"{self._what}: {self._compressor.__name__}.compress must return (array, context), "
                f"got {type(wire).__name__}"
            )
        return np.asarray(wire, order="C"), context

    def decompress(self, wire: Array, context: Any, *, is_part: bool = False) -> Array:
        """The result, of the shape and dtype of the arrays; or some of its rows."""
        made = np.asarray(self._compressor.decompress(wire, context))
        is_like = made.shape[1:] == self.shape[1:] if is_part else made.shape == self.shape
        if not is_like or made.dtype != self.dtype:
            raise ValueError(
                f"{self._what}: {self._compressor.__name__}.decompress returned shape {made.shape},"
                f" dtype {made.dtype} for an array of shape {self.shape}, dtype {self.dtype}"
            )
        return made
