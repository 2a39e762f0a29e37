"""The fusion buffer: the memory that a plan's buckets are packed into, and its persistent views."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvdlite.bucket import Plan, TensorSpec
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
        self, plan: Plan, rank: int, regions: Sequence[Array], specs: Mapping[str, TensorSpec],
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
