"""The fusion buffer: the memory that a plan's buckets are packed into, and its persistent views."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np

from hvdlite.bucket import Plan, TensorSpec
from hvdlite.errors import UnknownNameError
from hvdlite.types import Array


class FusionBuffer:
    """One rank's gradients, laid out as a plan says; views are made once per plan.

    Args:
        plan: The plan.
        rank: This world rank.
        regions: This rank's bytes (uint8), one array per region of the plan.
        specs: All parameters by name.
        dtypes: NumPy dtype by its name, for types that NumPy cannot name itself (bfloat16).

    Attributes:
        views: Gradient arrays by name, C-contiguous, of the parameters' shapes and dtypes.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        regions: Sequence[Array],
        specs: Mapping[str, TensorSpec],
        dtypes: Mapping[str, np.dtype[Any]],
    ) -> None:
        self.views: dict[str, Array] = {}
        self._flat: list[Array] = []
        starts, _ = plan.layout(rank)
        for index, start in starts.items():
            bucket = plan.buckets[index]
            dtype = dtypes[bucket.dtype]
            region = regions[bucket.region]
            self._flat.append(region[start : start + bucket.nbytes].view(dtype))
            for name, offset in zip(bucket.names, bucket.offsets, strict=True):
                spec = specs[name]
                first = start + offset
                flat = region[first : first + spec.nbytes].view(dtype)
                self.views[name] = flat.reshape(spec.shape)

    def poison(self) -> None:
        """Fill with NaN (integers: their largest value): whoever reads too early will see it."""
        for flat in self._flat:
            if flat.dtype.kind in "iu":
                flat.fill(np.iinfo(flat.dtype).max)
            elif flat.dtype.kind == "b":
                flat.fill(True)
            else:
                flat.fill(float("nan"))


class GradientViews(Mapping[str, Array]):
    """`opt.grads`: the slots by name, to be written into; `grads[name] += g` works too.

    Args:
        views: Gives the slots that are valid now.
    """

    def __init__(self, views: Callable[[], Mapping[str, Array]]) -> None:
        self._views = views

    def __getitem__(self, name: str) -> Array:
        views = self._views()
        if name not in views:
            near = get_close_matches(str(name), views, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UnknownNameError(f"opt.grads: this rank has no parameter {name!r}{hint}")
        return views[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Copy into the slot; the slot itself, which `+=` puts back, is left as it is.

        Raises:
            UnknownNameError: No such name on this rank; a KeyError.
            ValueError: Another shape or dtype.
        """
        view = self[name]
        if value is view:
            return
        if np.shape(value) != view.shape or not np.can_cast(np.result_type(value), view.dtype):
            raise ValueError(
                f"grads[{name!r}] has shape {view.shape} and dtype {view.dtype}, got "
                f"{np.shape(value)} and {np.result_type(value)}"
            )
        np.copyto(view, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._views())

    def __len__(self) -> int:
        return len(self._views())

    def __repr__(self) -> str:
        return f"GradientViews({dict(self._views())!r})"
