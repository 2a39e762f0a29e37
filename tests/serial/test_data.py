"""`shard` and `average_metrics`: who trains on what, on one rank and on ranks that are made up."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvdlite
from fakes import Network, together
from hvdlite import data
from hvdlite.errors import HorovodInternalError, MismatchError, NotInitializedError


class Rank(threading.local):
    """The Context of a rank of a made-up world; another rank in each thread.

    Args:
        matchers: The matching layers of all ranks.
    """

    def __init__(self, matchers):
        self.matchers = matchers
        self.rank = 0

    @property
    def matcher(self):
        return self.matchers[self.rank]

    def members(self, process_set, _what):
        return 0, tuple(process_set)


@contextmanager
def world(size):
    """A made-up world in place of the one that `init()` makes."""
    made = Rank(Network(size).matchers())
    before, data.current = data.current, lambda: made
    try:
        yield made
    finally:
        data.current = before


def on_all_ranks(size, function, members=None):
    """`function(process_set)` on each member, in turn."""
    results = []
    with world(size) as current:
        for current.rank in members or range(size):
            results.append(function(tuple(members or range(size))))
    return results


def shards(size, what, *, members=None, **kwargs):
    return on_all_ranks(size, lambda ps: data.shard(what, process_set=ps, **kwargs), members)


counts = st.integers(0, 200)
sizes = st.integers(1, 7)
options = st.fixed_dictionaries(
    {"shuffle": st.booleans(), "seed": st.integers(0, 99), "epoch": st.integers(0, 9)}
)


@given(sizes, counts, options)
def test_dropping_parts_are_disjoint_equally_long_and_lack_less_than_one_round(size, count, kwargs):
    parts = shards(size, count, **kwargs)
    everything = np.concatenate(parts)
    assert {len(part) for part in parts} == {count // size}
    assert len(set(everything.tolist())) == len(everything) == count // size * size
    assert set(everything.tolist()) <= set(range(count))
    assert all(part.dtype == np.int64 for part in parts)


@given(sizes, counts, options)
def test_padded_parts_are_equally_long_and_cover_everything(size, count, kwargs):
    parts = shards(size, count, tail="pad", **kwargs)
    everything = np.concatenate(parts)
    assert {len(part) for part in parts} == {-(-count // size)}
    times = np.bincount(everything.astype(int), minlength=count)
    assert len(times) == count
    assert (times >= 1).all()
    surplus = -(-count // size) * size - count
    assert times.sum() == count + surplus
    if count >= size:
        assert (times <= 2).all()  # padded from the start, not by one sample over and over


@given(sizes, counts, options)
def test_the_kth_samples_of_all_ranks_are_the_kth_round_of_the_permutation(size, count, kwargs):
    (whole,) = shards(1, count, **kwargs)
    parts = shards(size, count, **kwargs)
    rounds = np.stack(parts, axis=1).reshape(-1) if count >= size else np.empty(0, int)
    np.testing.assert_array_equal(rounds, whole[: len(rounds)])


@given(sizes, counts, options, st.sampled_from(["drop", "pad"]))
def test_rows_are_those_of_the_indices(size, count, kwargs, tail):
    rows = np.arange(3 * count).reshape(count, 3)
    for part, indices in zip(
        shards(size, rows, tail=tail, **kwargs),
        shards(size, count, tail=tail, **kwargs),
        strict=True,
    ):
        np.testing.assert_array_equal(part, rows[indices])


def test_without_shuffling_samples_stay_in_order():
    assert [p.tolist() for p in shards(3, 8, shuffle=False)] == [[0, 3], [1, 4], [2, 5]]
    assert [p.tolist() for p in shards(3, 8, shuffle=False, tail="pad")] == [
        [0, 3, 6],
        [1, 4, 7],
        [2, 5, 0],
    ]
    assert [p.tolist() for p in shards(4, 1, shuffle=False, tail="pad")] == [[0], [0], [0], [0]]


def test_shuffling_differs_by_seed_and_epoch_and_repeats_itself():
    (first,), (again,) = shards(1, 100, seed=1), shards(1, 100, seed=1)
    assert first.tolist() == again.tolist()
    assert sorted(first.tolist()) == list(range(100))
    others = [
        shards(1, 100, seed=s, epoch=e)[0].tolist() for s, e in ((1, 1), (2, 0), (0, 1), (0, 0))
    ]
    assert len({tuple(order) for order in [first.tolist(), *others]}) == 5


def test_what_is_dropped_changes_with_the_epoch():
    dropped = {
        frozenset(set(range(10)) - set(np.concatenate(shards(4, 10, epoch=e)).tolist()))
        for e in range(20)
    }
    assert len(dropped) > 5


def test_only_the_members_of_a_set_share():
    parts = shards(6, 10, members=(1, 4), shuffle=False)
    assert [p.tolist() for p in parts] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


@pytest.mark.parametrize("samples", [["a", "b", "c"], ("a", "b", "c"), np.array(["a", "b", "c"])])
def test_sequences_are_taken_by_their_first_dimension(samples):
    assert shards(1, samples, shuffle=False)[0].tolist() == ["a", "b", "c"]


def test_numbers_of_samples_may_be_numpys():
    assert len(shards(1, np.int32(5))[0]) == 5
    assert len(shards(1, range(5, 10), shuffle=False)[0]) == 5


@pytest.mark.parametrize(
    ("what", "kwargs", "error", "words"),
    [
        (-1, {}, ValueError, "-1"),
        (5, {"tail": "keep"}, ValueError, "'keep'"),
        (True, {}, TypeError, "bool"),
        (2.0, {}, TypeError, "float"),
        (np.array(5), {}, TypeError, "0-d"),
        ("text", {}, TypeError, "str"),
        (None, {}, TypeError, "NoneType"),
        ({"x": 1}, {}, TypeError, "dict"),
        (5, {"seed": -1}, ValueError, "non-negative"),
    ],
    ids=str,
)
def test_what_cannot_be_shared_is_an_error(what, kwargs, error, words):
    with pytest.raises(error, match=words):
        shards(1, what, **kwargs)


def test_in_a_world_of_one_everything_is_this_ranks():
    hvdlite.init()
    try:
        assert hvdlite.shard(4, shuffle=False).tolist() == [0, 1, 2, 3]
        assert sorted(hvdlite.shard(np.array([3.5, 1.5]), epoch=2).tolist()) == [1.5, 3.5]
        assert hvdlite.average_metrics({"loss": np.float32(2), "n": 3}) == {"loss": 2.0, "n": 3.0}
    finally:
        hvdlite.shutdown()


def test_before_init_there_is_nobody_to_share_with():
    hvdlite.shutdown()
    with pytest.raises((NotInitializedError, hvdlite.ShutDownError)):
        hvdlite.shard(4)


# --- metrics


def averaged(*metrics):
    """What each rank gets, or what it raises; one mapping a rank."""

    def one(rank):
        current.rank = rank
        return data.average_metrics(metrics[rank], process_set=tuple(range(len(metrics))))

    with world(len(metrics)) as current:
        return together(len(metrics), one)


def test_metrics_are_averaged_in_float64_in_rank_order_and_in_each_ranks_own_order():
    found = averaged({"b": np.float32(1), "a": 2}, {"a": 4.0, "b": 0.5})
    assert found == [{"b": 0.75, "a": 3.0}] * 2
    assert [list(f) for f in found] == [["b", "a"], ["a", "b"]]
    assert {type(v) for f in found for v in f.values()} == {float}
    assert averaged({"x": 1e16}, {"x": 1.0}, {"x": -1e16}) == [{"x": 0.0}] * 3
    assert averaged({"x": np.array(True)}, {"x": 0.0}) == [{"x": 0.5}] * 2
    assert averaged({}) == [{}]


@pytest.mark.parametrize("value", [1j, np.zeros(1), "1", None, [1]], ids=repr)
def test_a_metric_that_is_no_real_number_is_a_type_error_that_all_hear_of(value):
    own, told = averaged({"loss": value}, {"loss": 1.0})
    assert isinstance(own, TypeError)
    assert "'loss'" in str(own)
    assert isinstance(told, HorovodInternalError)
    assert "rank 0: TypeError" in str(told)


def test_other_names_on_another_rank_are_a_mismatch_on_all():
    for error in averaged({"a": 1}, {"b": 1.0, "a": 1.0}):
        assert isinstance(error, MismatchError)
        assert "rank 0 has ['a'], rank 1 has ['a', 'b']" in str(error)
