"""What the tests of the optimizer share: gradients with exact averages, and a recorder of steps."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

Array = npt.NDArray[Any]


def needs(module: str) -> pytest.MarkDecorator:
    """Skip where a library is missing: at collection, for ranks cannot skip a test one by one."""
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")


def gradient(k: int, rank: int, step: int = 0, like: Array | None = None) -> Array:
    """The gradient of parameter number `k` on a rank in a step, different for each.

    Small multiples of 12, so that sums over any ranks, and averages over 1, 2, 3 or 4 of them, are
    exact in every type of 16 bits and more.
    """
    like = np.zeros(3) if like is None else like
    pattern = np.arange(like.size, dtype=np.int64).reshape(like.shape) % 5
    grad: Array = 12 * (pattern + 2 * k + 3 * rank * (k % 3 + 1) + step % 7)
    return grad.astype(like.dtype)


def total(k: int, ranks: Sequence[int], step: int = 0, like: Array | None = None) -> Array:
    """The sum of `gradient()` over ranks."""
    grads = [gradient(k, r, step, like) for r in ranks]
    summed: Array = np.sum(grads, axis=0)
    return summed.astype(grads[0].dtype)


def mean(k: int, ranks: Sequence[int], step: int = 0, like: Array | None = None) -> Array:
    """The average of `gradient()` over ranks."""
    summed = total(k, ranks, step, like)
    return (summed / len(ranks)).astype(summed.dtype)


def zeros(
    names: Iterable[str], shape: tuple[int, ...] = (3,), dtype: Any = np.float64
) -> dict[str, Array]:
    """Parameters of these names; of a string each letter is one."""
    return {name: np.zeros(shape, dtype) for name in names}


class Recorder:
    """An optimizer that keeps a copy of every gradient it is given, and may descend along it.

    Args:
        params: The parameters to be changed.
        lr: How far to go.
    """

    def __init__(self, params: Mapping[str, Array] | None = None, lr: float = 0.0) -> None:
        self.params: Mapping[str, Array] = {} if params is None else params
        self.lr = lr
        self.given: list[dict[str, Array]] = []

    def step(self, grads: Mapping[str, Array]) -> int:
        """Take one step; returns how many there were."""
        self.given.append({name: grad.copy() for name, grad in grads.items()})
        if self.lr:
            for name, grad in grads.items():
                self.params[name][...] -= self.lr * grad
        return len(self.given)

    @property
    def last(self) -> dict[str, Array]:
        """What the latest step was given."""
        return self.given[-1]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"lr": self.lr, "steps": len(self.given)}


def assert_equal(given: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    """Assert that two dicts hold the same names, shapes, types and values, exactly."""
    assert sorted(given) == sorted(expected)
    for name, array in expected.items():
        assert given[name].dtype == array.dtype, name
        assert given[name].shape == array.shape, name
        np.testing.assert_array_equal(given[name], array, err_msg=name)


def counted(hvd: ModuleType, what: Callable[[], object]) -> dict[str, int]:
    """By how much `stats()` grows while `what` runs."""
    before = hvd.stats()
    what()
    return {name: count - before[name] for name, count in hvd.stats().items()}


@contextlib.contextmanager
def process_sets(hvd: ModuleType, *ranks: Sequence[int]) -> Iterator[list[Any]]:
    """Register process sets, and forget them in the end; the world has one already."""
    world = list(range(hvd.size()))
    made: list[Any] = []
    for members in ranks:
        known = [ps for ps in made if list(ps.ranks) == sorted(members)]
        if sorted(members) == world:
            known = [hvd.global_process_set]
        made.append(known[0] if known else hvd.add_process_set(members))
    yield made
    for ps in {id(ps): ps for ps in made}.values():
        if ps is not hvd.global_process_set:
            hvd.remove_process_set(ps)


def rotated(names: Sequence[str], by: int) -> list[str]:
    """`names`, beginning with another one."""
    by %= max(len(names), 1)
    return [*names[by:], *names[:by]]


def numbers(names: Sequence[str]) -> dict[str, int]:
    """The `k` of `gradient()` for each name."""
    return {name: k for k, name in enumerate(names)}


def nbytes(shape: Sequence[int], itemsize: int) -> int:
    """Bytes of a gradient in its slot, which is a multiple of 64."""
    return -(-math.prod(shape) * itemsize // 64) * 64
