"""What a compression is, and the one that leaves everything as it is."""

from typing import Any

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
