"""Which data this rank trains on, and how its metrics become everybody's."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvdlite.context import current
from hvdlite.errors import MismatchError
from hvdlite.negotiation import check_words, word_of
from hvdlite.process_set import ProcessSet, global_process_set
from hvdlite.types import Array


def shard(
    n_or_array: Any,
    *,
    shuffle: bool = True,
    seed: int = 0,
    epoch: int = 0,
    tail: str = "drop",
    process_set: ProcessSet = global_process_set,
) -> Array:
    """This rank's part of a data set; all parts are equally long.

    Communicates nothing: with equal arguments the ranks' parts fit together.

    Args:
        n_or_array: Number of samples, or an array or sequence whose first dimension counts them.
        shuffle: Whether to permute the samples, equally on all ranks, by `seed` and `epoch`.
        seed: Seed of the permutation.
        epoch: Another permutation for each.
        tail: What becomes of n mod size left-over samples: "drop" leaves them out (others in each
            epoch), "pad" fills up with samples from the start.
        process_set: Who shares the data.
    Returns:
        Indices (int64) for a number; the rows of an array. Rank r has places r, r + size, ... of
        the permutation, so the k-th samples of all ranks together are its k-th `size` samples.
    Raises:
        ValueError: A negative number, or a tail that is neither.
        TypeError: Neither a number nor an array.
    """
    context = current()
    _, ranks = context.members(process_set, "shard")
    if tail not in ("drop", "pad"):
        raise ValueError(f'shard: tail is "drop" or "pad", got {tail!r}')
    rows: Array | None = None
    if isinstance(n_or_array, bool):
        raise TypeError("shard: a number of samples or an array, got a bool")
    if hasattr(n_or_array, "__index__") and not isinstance(n_or_array, np.ndarray):
        count = int(n_or_array)
    elif isinstance(n_or_array, np.ndarray | Sequence) and not isinstance(n_or_array, str):
        rows = np.asarray(n_or_array)
        if rows.ndim == 0:
            raise TypeError("shard: a 0-d array has no samples")
        count = len(rows)
    else:
        raise TypeError(f"shard: a number of samples or an array, got {type(n_or_array).__name__}")
    if count < 0:
        raise ValueError(f"shard: the number of samples is {count}")
    order = np.arange(count)
    if shuffle:
        np.random.default_rng([seed, epoch]).shuffle(order)
    size = len(ranks)
    if tail == "pad" and count % size:
        order = np.resize(order, -(-count // size) * size)
    order = order[: len(order) // size * size]
    mine = order[ranks.index(context.rank) :: size]
    return mine if rows is None else rows[mine]


def average_metrics(
    metrics: Mapping[str, Any], *, process_set: ProcessSet = global_process_set
) -> dict[str, float]:
    """Average numbers over the ranks, in float64 and rank order, in one message.

    Collective:
        All ranks of the process set; blocks until the averages are there.
    Args:
        metrics: Name -> real number (Python, NumPy scalar, 0-d array).
        process_set: Who takes part.
    Returns:
        A new dict in this rank's order.
    Raises:
        TypeError: A value is no real number.
        HorovodInternalError: On the other ranks then; quotes it.
        MismatchError: On every rank: the names differ.
    """
    context = current()
    set_id, ranks = context.members(process_set, "average_metrics")
    own: dict[str, float] = {}
    error: Exception | None = None
    try:
        own = _real_numbers(metrics)
    except Exception as exc:
        error = exc  # raised below, once all ranks know
    said = context.matcher.exchange(set_id, ranks, "average_metrics", (word_of(error), own))
    if error is not None:
        raise error
    check_words("average_metrics", ranks, [text for text, _ in said])
    everything = [metrics for _, metrics in said]
    for r, others in zip(ranks, everything, strict=True):
        if others.keys() != everything[0].keys():
            raise MismatchError(
                f"average_metrics: rank {ranks[0]} has {sorted(everything[0])}, "
                f"rank {r} has {sorted(others)}"
            )
    return {name: sum(others[name] for others in everything) / len(ranks) for name in own}


def _real_numbers(metrics: object) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise TypeError(f"average_metrics: a mapping name -> number, got {type(metrics).__name__}")
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        number = np.asarray(value)
        if number.ndim or number.dtype.kind not in "biuf":
            raise TypeError(f"average_metrics: {name!r} is no real number: {value!r}")
        numbers[str(name)] = float(number)
    return numbers
