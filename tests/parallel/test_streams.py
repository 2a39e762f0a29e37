"""Streams of many optimizers at once must never take each other's messages."""

import numpy as np
import pytest

from hvdlite import context


@pytest.mark.mpi(min_size=2)
def test_two_living_optimizers_never_share_a_tag_number_on_backend_mpi(hvd):
    """Stream numbers that are equal modulo the tags' range gave silent wrong sums.

    Two optimizers, 4,096 streams apart, stepped in opposite orders: each bucket's messages went to
    whichever receive was first.
    """
    hvd.shutdown()
    hvd.init(config={"backend": "mpi"})
    rank, size = hvd.rank(), hvd.size()

    def make():
        return hvd.DistributedOptimizer(lambda grads: grads["w"].copy(), {"w": np.zeros(20_000)})

    first = make()
    for _ in range(4096 - 1):  # as if so many had been made and dropped
        next(context._stream_numbers)
    second = make()
    distance = second._reducer.stream._id - first._reducer.stream._id
    assert distance % 4096 == 0
    numbers = {opt._reducer.stream.tag_number for opt in (first, second)}
    assert len(numbers) == 2
    order = [first, second] if rank % 2 else [second, first]
    for turn in range(5):
        for opt in order:
            opt.grad_ready("w", np.full(20_000, rank + (1.0 if opt is first else 1000.0)))
        results = {id(opt): opt.step() for opt in order}
        mean = (size - 1) / 2
        np.testing.assert_array_equal(results[id(first)], mean + 1.0, err_msg=f"turn {turn}")
        np.testing.assert_array_equal(results[id(second)], mean + 1000.0, err_msg=f"turn {turn}")
