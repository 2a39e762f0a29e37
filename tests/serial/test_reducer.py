"""What happens between *gradient ready* and *optimizer step*, told by a stream that keeps a log."""

import gc
import threading
import weakref
from contextlib import suppress
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import LoggingStream, Network
from hvdlite import log
from hvdlite.backends.base import RankState
from hvdlite.bucket import Plan, TensorSpec, plan_buckets
from hvdlite.errors import (
    CollectiveTimeoutError,
    ConfigError,
    HorovodInternalError,
    HvdliteError,
    MissingGradientError,
    RankFailedError,
    ShutDownError,
)
from hvdlite.progress import Progress
from hvdlite.reducer import Reducer, ReducerOptions
from hvdlite.types import Sum
from interrupts import Alarm, Timeout, at_every_point


class Param(NamedTuple):
    """A parameter; its ranks are the optimizer's unless given, None: local."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    ranks: tuple[int, ...] | str | None = "all"


class World:
    """Ranks of one process, each with a reducer and a stream; they hear each other's records.

    Args:
        params: Shape, or `Param`, by name; in registration order.
        size: Number of ranks.
        plan: A pinned plan.
        **options: Fields of `ReducerOptions`.
    """

    def __init__(self, params, size=2, plan=None, **options):
        self.ranks = tuple(range(size))
        self.specs = [self.spec(name, param) for name, param in params.items()]
        options = {"fusion_threshold": 128, "first_bucket": 64, "poison": True, **options}
        self.dtypes = {spec.dtype: np.dtype(spec.dtype) for spec in self.specs}
        self.streams = [LoggingStream(r, self.ranks) for r in self.ranks]
        self.progress = [Progress(Network(1).controls[0], 5.0) for _ in self.ranks]
        self.reducers = []
        for rank, stream in enumerate(self.streams):
            stream.peers = dict(enumerate(self.streams))
            self.reducers.append(
                Reducer(
                    self.specs,
                    self.dtypes,
                    rank,
                    stream,
                    self.progress[rank],
                    ReducerOptions(**options),
                    plan,
                    lambda word: [word],
                )
            )

    def spec(self, name, param, region=0):
        shape, dtype, ranks = param if isinstance(param, Param) else Param(param)
        ranks = self.ranks if ranks == "all" else ranks
        return TensorSpec(name, shape, dtype, np.dtype(dtype).itemsize, ranks, region)

    def mine(self, rank):
        return [s for s in self.specs if s.ranks is None or rank in s.ranks]

    def gradient(self, name, value):
        spec = next(s for s in self.specs if s.name == name)
        return np.full(spec.shape, value, spec.dtype)

    def announce(self, rank, names, value=1):
        for name in names:
            self.reducers[rank].grad_ready(name, self.gradient(name, value))

    def announce_all(self, value=1):
        for rank in self.ranks:
            self.announce(rank, [s.name for s in self.mine(rank)], value)

    def synchronize(self):
        """All ranks; what each got or raised.  Each waits while the next ones come."""
        results = {}

        def run(rank):
            if rank in results:
                return
            results[rank] = None
            following = rank + 1
            if following < len(self.ranks):
                self.streams[rank].on_advance = lambda: run(following)
            try:
                results[rank] = self.reducers[rank].synchronize()
            except Exception as exc:
                results[rank] = exc
            self.streams[rank].on_advance = lambda: None

        for rank in self.ranks:
            run(rank)
        return [results[rank] for rank in self.ranks]

    def step(self, value=1):
        self.announce_all(value)
        results = self.synchronize()
        self.finish()
        return results

    def finish(self):
        for reducer in self.reducers:
            reducer.apply(lambda _: None)


def alone(params, **options):
    """One rank of two, whose peer does as it does."""
    world = World(params, **options)
    reducer, stream = world.reducers[0], world.streams[0]
    stream.peers = {0: stream}
    return world, reducer, stream


SIX = dict.fromkeys("abcdef", (16,))  # a slot of 64 bytes each


# --- the life of a gradient


def test_life_of_a_gradient():
    world, reducer, stream = alone(SIX)
    events = stream.log
    num_looks = 0

    def look():
        nonlocal num_looks
        num_looks += 1
        events.append(f"look {num_looks}")
        stream.is_released = num_looks == 3

    def ready(name):
        events.append(f"ready {name}")
        reducer.grad_ready(name, world.gradient(name, ord(name)))

    stream.is_released = False
    for name in "acfedb":
        ready(name)
    stream.on_advance = look
    result = reducer.synchronize()
    events.append(f"handed out {sorted(result)}")
    world.finish()
    stream.on_advance = lambda: None
    for name in "bacdef":
        ready(name)
    assert events == [
        "grow [384, 384]",
        "program [0, 1, 2, 3] of 4",  # f | e d | c b | a: last layer first, the first one small
        "ready a",
        "begin 0 0 1",
        "ready c",
        "ready f",
        "launch 0",
        "ready e",
        "ready d",
        "launch 1",
        "ready b",
        "launch 2",
        "launch 3 with record",  # a was ready long ago; its turn came now
        "look 1",
        "look 2",
        "look 3",  # and nothing was handed out before the record was here
        "handed out ['a', 'b', 'c', 'd', 'e', 'f']",
        "ready b",
        "program [0, 1, 2, 3] of 4",  # in the order of the first step: a | c f | e d | b
        "begin 5 1 1",
        "ready a",
        "launch 0",
        "ready c",
        "ready d",
        "ready e",
        "ready f",
        "launch 1",
        "launch 2",
        "launch 3 with record",
    ]
    assert [b.names for b in reducer.plan.buckets] == [("a",), ("c", "f"), ("e", "d"), ("b",)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.permutations(sorted(SIX)), min_size=3, max_size=3), st.booleans())
def test_buckets_leave_in_the_plans_order_as_soon_as_they_may(orders, views):
    world, reducer, stream = alone(SIX, views=views)
    for step, order in enumerate(orders):
        stream.log.clear()
        announced = set()
        for name in order:
            value = 100 * step + ord(name)
            if views:
                reducer.views[name].fill(value)
                reducer.grad_ready(name)
            else:
                reducer.grad_ready(name, world.gradient(name, value))
            announced.add(name)
            due = 0
            for bucket in world.reducers[0]._plan.buckets:
                if not announced.issuperset(bucket.names):
                    break
                due += 1
            last = " with record" if due == 4 else ""
            launches = [f"launch {k}" for k in range(due)]
            if launches:
                launches[-1] += last
            assert [line for line in stream.log if "launch" in line] == launches
        for k, bucket in enumerate(reducer._plan.buckets):
            expected = [100 * step + ord(name) for name in bucket.names for _ in range(16)]
            assert np.frombuffer(stream.sent[k], np.float32).tolist() == expected
        reducer.synchronize()
        world.finish()


def test_a_record_that_cannot_ride_follows_the_last_bucket():
    params = {"a": (16,), "local": Param((16,), ranks=None)}
    world, reducer, stream = alone(params)
    stream.log.clear()
    world.announce(0, "a")
    assert stream.log == ["begin 0 0 1", "launch 0"]
    world.announce(0, ["local"])  # everything is final: the others need not wait for synchronize()
    assert stream.log[2:] == ["conclude"]
    reducer.synchronize()
    assert stream.log[3:] == []


def test_a_record_rides_only_when_nothing_can_come_any_more():
    world, reducer, stream = alone({"local": Param((16,), ranks=None), "a": (16,)})
    for _ in range(2):
        stream.log.clear()
        world.announce(0, "a")  # full, but "local" may still come, or not: the record says which
        assert not any("launch" in line for line in stream.log)
        world.announce(0, ["local"])
        assert stream.log[-1] == "launch 1 with record"
        assert sorted(reducer.synchronize()) == ["a", "local"]
        world.finish()
    world.announce(0, "a")
    assert sorted(reducer.synchronize()) == ["a"]


def test_a_rank_without_buckets_sends_its_record_all_the_same():
    world = World({"a": Param((4,), ranks=(0, 1))}, size=3)
    assert world.streams[2].log == ["grow [64, 64, 0]", "program [] of 1"]
    results = world.step()
    assert world.streams[2].log[2:] == ["begin 0 0 1", "conclude"]
    assert [sorted(r) for r in results] == [["a"], ["a"], []]


def test_an_optimizer_without_parameters_makes_steps():
    world = World({})
    assert world.step() == [{}, {}]
    assert world.step() == [{}, {}]
    assert world.streams[0].log == [
        "grow [0, 0]",
        "program [] of 0",
        "begin 0 0 1",
        "conclude",
        "begin 1 1 1",
        "conclude",
    ]


def test_several_sets_are_one_order_of_which_each_rank_has_its_part():
    params = {
        "w": (16,),
        "x": Param((16,), ranks=(0, 1)),
        "y": Param((16,), ranks=(1, 2)),
        "z": (16,),
    }
    world = World(params, size=3, fusion_threshold=64)
    programs = [stream.log[1] for stream in world.streams]
    sets = [bucket.ranks for bucket in world.reducers[0].plan.buckets]
    for rank, program in enumerate(programs):
        own = [k for k, ranks in enumerate(sets) if rank in ranks]
        assert program == f"program {own} of 4"
    world.step()
    for rank, stream in enumerate(world.streams):
        launches = [line for line in stream.log if line.startswith("launch")]
        own = [k for k, ranks in enumerate(sets) if rank in ranks]
        assert [int(line.split()[1]) for line in launches] == own


def test_counters_count_steps_buckets_and_bytes():
    world, reducer, _ = alone(SIX)
    world.announce(0, SIX)
    reducer.synchronize()
    counters = world.progress[0].counters
    assert (counters.buckets, counters.collectives, counters.bytes, counters.steps) == (
        4,
        4,
        384,
        0,
    )
    world.finish()
    assert counters.steps == 1


# --- what is sent, what is handed out


def test_nothing_stale_is_sent_and_no_poison():
    for views in (False, True):
        world, reducer, stream = alone(SIX, views=views)
        for name in SIX:
            reducer.views[name].fill(7)
            reducer.grad_ready(name) if views else world.announce(0, name, 7)
        reducer.synchronize()
        world.finish()
        if views:
            reducer.views["b"].fill(3)
            reducer.views["c"].fill(9)  # written, never announced
            reducer.grad_ready("b")
        else:
            world.announce(0, "b", 3)
        result = reducer.synchronize()
        sent = np.frombuffer(b"".join(stream.sent.values()), np.float32)
        assert sorted(set(sent.tolist())) == [0, 3]
        assert (sent == 3).sum() == 16
        assert list(result) == ["b"]


def test_a_gradient_of_none_is_zeros_for_the_others():
    for views in (False, True):
        world, reducer, stream = alone(SIX, views=views)
        reducer.views["a"].fill(5)
        reducer.grad_ready("a", None)
        for name in "bcdef":
            reducer.views[name].fill(1)
            reducer.grad_ready(name) if views else world.announce(0, name)
        assert "launch 3 with record" in stream.log  # it completes its bucket
        result = reducer.synchronize()
        assert not np.frombuffer(stream.sent[3], np.float32).any()
        assert sorted(result) == list("bcdef")


def test_the_dict_is_new_and_mutable_its_arrays_writable_and_the_same_until_step():
    _, reducer, _ = alone(SIX)
    given_ = np.ones(16, np.float32)
    for name in SIX:
        reducer.grad_ready(name, given_)
    first = reducer.synchronize()
    assert reducer.synchronize() is first
    assert all(array.flags.writeable for array in first.values())
    assert not any(np.shares_memory(array, given_) for array in first.values())
    first["a"] *= 2
    del first["b"]
    assert reducer.synchronize() is first
    assert given_.sum() == 16
    reducer.apply(lambda _: None)
    for name in SIX:
        reducer.grad_ready(name, given_)
    second = reducer.synchronize()
    assert second is not first
    assert sorted(second) == list("abcdef")


def test_poison_fills_packed_slots_before_the_first_gradient_and_views_never():
    world, reducer, _ = alone(SIX)
    kept = None
    for _ in range(2):
        if kept is not None:
            assert not any(np.isnan(array).any() for array in kept.values())
        world.announce(0, "a")
        assert not np.isnan(reducer.views["a"]).any()
        assert np.isnan(reducer.views["b"]).all()
        world.announce(0, "bcdef")
        kept = reducer.synchronize()
        world.finish()
    assert all((array == 1).all() for array in kept.values())
    _, reducer, _ = alone(SIX, views=True)
    reducer.views["b"].fill(4)
    reducer.grad_ready("a")
    assert (reducer.views["b"] == 4).all()
    _, reducer, _ = alone(SIX, poison=False)
    reducer.views["b"].fill(4)
    reducer.grad_ready("a", np.ones(16, np.float32))
    assert (reducer.views["b"] == 4).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda g: g.astype(">f4"),
        np.asfortranarray,
        lambda g: np.repeat(g, 2, axis=1)[:, ::2],
        lambda g: g[::-1][::-1],
        lambda g: np.frombuffer(g.tobytes(), np.float32).reshape(g.shape),  # read-only
        lambda g: (
            np.frombuffer(b"\0" + g.tobytes(), np.uint8)[1:].view(np.float32).reshape(g.shape)
        ),
    ],
    ids=["byte order", "fortran", "strided", "reversed twice", "read-only", "unaligned"],
)
def test_gradients_of_any_layout_are_copied_at_once(make):
    for recording in (True, False):  # the slow path, and the fast one
        world, reducer, stream = alone({"w": (3, 4), "v": (1,)}, fusion_threshold=0)
        if not recording:
            world.announce(0, "vw")
            reducer.synchronize()
            world.finish()
        world.announce(0, "v")
        expected = np.arange(12, dtype=np.float32).reshape(3, 4)
        gradient = make(expected.copy())
        reducer.grad_ready("w", gradient)
        if gradient.flags.writeable:
            gradient[...] = -1
        reducer.synchronize()
        position = [b.names for b in reducer._plan.buckets].index(("w",))
        assert stream.sent[position][:48] == expected.tobytes()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_scalars_are_gradients_of_parameters_without_dimensions(steps):
    # From the second step on NumPy's scalars raised: they cannot be referred to weakly.
    _, reducer, _ = alone({"a": Param((), "float64"), "b": Param((), "float64")})
    for step in range(steps):
        for value in (np.float64(step), np.array(step, np.float64)):
            reducer.grad_ready("a", value)
            reducer.grad_ready("b", np.float64(step + 0.5))
            result = reducer.synchronize()
            assert (float(result["a"]), float(result["b"])) == (step, step + 0.5)
            reducer.apply(lambda _: None)


# --- bad calls

BAD_CALLS = [
    ((("nope", np.zeros(16, np.float32)), {}), (KeyError, ValueError), "no such name"),
    ((("aa", np.zeros(16, np.float32)), {}), (KeyError, ValueError), "did you mean 'a'"),
    ((("a", np.zeros(17, np.float32)), {}), ValueError, r"\(17,\).*float32.*\(16,\)"),
    ((("a", np.zeros((16, 1), np.float32)), {}), ValueError, r"\(16, 1\)"),
    ((("a", np.zeros(16)), {}), ValueError, "float64.*float32"),
    ((("a", [0.0] * 16), {}), TypeError, "got list"),
    ((("a", 1.0), {}), TypeError, "got float"),
    ((("a",), {}), TypeError, "gradient is missing"),
    ((("a", np.zeros(16, np.float32)), {"weight": -1}), ValueError, "-1"),
    ((("a", np.zeros(16, np.float32)), {"weight": float("nan")}), ValueError, "nan"),
    ((("a", np.zeros(16, np.float32)), {"weight": float("inf")}), ValueError, "inf"),
    ((("other", np.zeros(4, np.float32)), {}), ValueError, r"rank 0 is not .*\[1\]"),
]


@pytest.mark.parametrize(("call", "errors", "words"), BAD_CALLS)
@pytest.mark.parametrize("when", ["first", "in between", "in the second step"])
def test_a_bad_call_is_an_error_at_once_and_leaves_the_step_usable(call, errors, words, when):
    world, reducer, stream = alone({**SIX, "other": Param((4,), ranks=(1,))})
    (args, kwargs) = call
    if when == "in the second step":
        world.announce(0, SIX)
        reducer.synchronize()
        world.finish()
    if when != "first":
        world.announce(0, "cd", 2)
    before = list(stream.log)
    for error in errors if isinstance(errors, tuple) else (errors,):
        with pytest.raises(error, match=words):
            reducer.grad_ready(*args, **kwargs)
    assert stream.log == before  # nothing was begun
    world.announce(0, "ef" if when != "first" else "cdef", 2)
    world.announce(0, "ab", 2)
    result = reducer.synchronize()
    assert sorted(result) == list("abcdef")
    assert all((array == 2).all() for array in result.values())


def test_announcing_once_too_often_is_an_error_at_once():
    for views in (False, True):
        world, reducer, _ = alone(SIX, views=views)
        for _ in range(2):  # the slow path, then the fast one
            for name in SIX:
                args = (name,) if views else (name, world.gradient(name, 1))
                reducer.grad_ready(*args)
                with pytest.raises(ValueError, match=f"'{name}'.*more often than .*=1"):
                    reducer.grad_ready(*args)
            assert sorted(reducer.synchronize()) == sorted(SIX)
            world.finish()


def test_between_synchronize_and_step_no_gradient_may_come():
    world, reducer, _ = alone(SIX)
    for _ in range(3):  # the slow path, and the fast one
        world.announce(0, "bcdef")
        reducer.synchronize()
        for name in "ab":  # one that came, and one that did not
            with pytest.raises(RuntimeError, match="already synchronized"):
                world.announce(0, name)
        world.finish()


# --- passes


@pytest.mark.parametrize("views", [False, True])
def test_passes_add_up_and_the_last_one_launches(views):
    world, reducer, stream = alone(SIX, passes=3, views=views)
    for step in range(2):
        stream.log.clear()
        for k in range(3):
            for name in SIX:
                if views:
                    if k == 0:
                        reducer.views[name].fill(0)
                    reducer.views[name][...] += 10**k
                    reducer.grad_ready(name)
                else:
                    world.announce(0, name, 10**k)
            assert any("launch" in line for line in stream.log) == (k == 2)
        with pytest.raises(ValueError, match="=3"):
            world.announce(0, "a")
        result = reducer.synchronize()
        assert all((array == 111).all() for array in result.values()), step
        world.finish()


def test_fewer_passes_are_allowed():
    world, reducer, _ = alone(SIX, passes=3)
    world.announce(0, "aab", 2)
    result = reducer.synchronize()
    assert {name: float(array[0]) for name, array in result.items()} == {"a": 4, "b": 2}


def test_no_sync_accumulates_and_sends_nothing():
    world, reducer, stream = alone(SIX)
    for _ in range(3):  # with the slow path, and with the fast one
        stream.log.clear()
        with reducer.no_sync():
            world.announce(0, SIX, 1)
            world.announce(0, "aa", 1)
        assert not any("launch" in line for line in stream.log)
        world.announce(0, "bcdef", 10)
        result = reducer.synchronize()  # "a" was had in a pass inside no_sync
        values = {name: float(array[0]) for name, array in result.items()}
        assert values == {"a": 3, **dict.fromkeys("bcdef", 11)}
        world.finish()


def test_no_sync_ends_with_its_block_whatever_happens_in_it():
    world, reducer, stream = alone(SIX)
    with suppress(ZeroDivisionError), reducer.no_sync():
        raise ZeroDivisionError
    world.announce(0, SIX)
    assert "launch 3 with record" in stream.log
    reducer.synchronize()


def test_inside_no_sync_nothing_can_end():
    world, reducer, _ = alone(SIX)
    with reducer.no_sync():
        world.announce(0, "a")
        with pytest.raises(RuntimeError, match="no_sync"):
            reducer.synchronize()
        with pytest.raises(RuntimeError, match="no_sync"):
            reducer.check_can_step()
        with pytest.raises(RuntimeError, match="no_sync"), reducer.no_sync():
            pass
    assert list(reducer.synchronize()) == ["a"]


def test_none_inside_no_sync_says_nothing_of_the_pass_that_counts():
    world, reducer, _ = alone(SIX)
    with reducer.no_sync():
        reducer.grad_ready("a", None)
    world.announce(0, "a", 5)
    assert float(reducer.synchronize()["a"][0]) == 5


# --- missing gradients


@pytest.fixture
def said(caplog, monkeypatch):
    """The warnings so far."""
    monkeypatch.setattr(log.logger, "propagate", True)
    return lambda: [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


MIXED = {
    "all": (2,),
    "some": (2,),
    "never": (2,),
    "pair": Param((2,), ranks=(0, 2)),
    "own": Param((2,), ranks=None),
}


def announce_mixed(world):
    """`all` on all; `some` and `pair` on rank 0; `own` on rank 1; `never` on none."""
    for rank, names in enumerate((["all", "some", "pair"], ["all", "own"], ["all"])):
        world.announce(rank, names, rank + 1)


def test_missing_zero_hands_out_what_any_member_had(said):
    world = World(MIXED, size=3, missing="zero")
    for _ in range(2):
        announce_mixed(world)
        assert [sorted(r) for r in world.synchronize()] == [
            ["all", "pair", "some"],
            ["all", "own", "some"],
            ["all", "pair", "some"],
        ]
        world.finish()
    texts = sorted(said())
    assert len(texts) == 3
    assert "rank 0 had no gradient for 2 of 5 parameters: never, own (missing='zero')" in texts[0]
    assert "rank 1 had no gradient for 2 of 4 parameters: never, some" in texts[1]


def test_missing_skip_hands_out_what_every_member_had(said):
    world = World(MIXED, size=3, missing="skip")
    announce_mixed(world)
    assert [sorted(r) for r in world.synchronize()] == [["all"], ["all", "own"], ["all"]]


def test_missing_error_raises_on_every_rank_and_the_next_step_works():
    world = World(MIXED, size=3, missing="error")
    announce_mixed(world)
    results = world.synchronize()
    assert {type(r) for r in results} == {MissingGradientError}
    (text,) = {str(r) for r in results}
    for piece in (
        "step 0: no gradient for",
        "'some' on ranks [1, 2]",
        "'never' on ranks [0, 1, 2]",
        "'pair' on ranks [2]",
        "'own' on ranks [0, 2]",
    ):
        assert piece in text
    assert "'all'" not in text
    for value in (5, 6):
        results = world.step(value)  # nothing of the dropped step is left
        assert [sorted(r) for r in results] == [
            ["all", "never", "own", "pair", "some"],
            ["all", "never", "own", "some"],
            ["all", "never", "own", "pair", "some"],
        ]
        assert all((a == value).all() for r in results for a in r.values())


def test_missing_error_tells_eight_names_at_most():
    world = World({f"p{k:02d}": (1,) for k in range(11)}, missing="error")
    results = world.synchronize()
    assert str(results[0]).count("on ranks [0, 1]") == 8
    assert "and 3 more" in str(results[0])


def test_a_gradient_of_none_counts_as_missing():
    world = World(SIX, missing="error")
    world.announce_all()
    assert isinstance(world.synchronize()[0], dict)
    world.finish()
    world.announce(0, SIX)
    world.reducers[1].grad_ready("c", None)
    world.announce(1, "abdef")
    for result in world.synchronize():
        assert isinstance(result, MissingGradientError)
        assert "'c' on ranks [1]" in str(result)


def test_a_warning_comes_once_for_each_set_of_names(said):
    world = World(SIX)
    for lacking in ("a", "a", "ab", "a"):
        for rank in (0, 1):
            world.announce(rank, [n for n in SIX if n not in lacking or rank])
        world.synchronize()
        world.finish()
    assert [text.partition(" (")[0] for text in said()] == [
        "rank 0 had no gradient for 1 of 6 parameters: a",
        "rank 0 had no gradient for 2 of 6 parameters: a, b",
    ]


# --- records


def test_ranks_at_different_steps_are_told_so():
    _, reducer, stream = alone(SIX)
    stream.change_record = lambda _, record: record[:8] + (7).to_bytes(8, "little") + record[16:]
    with pytest.raises(HorovodInternalError, match=r"rank 0 at step 0.*rank 1 at step 7"):
        reducer.synchronize()
    stream.change_record = lambda _, record: record
    reducer.synchronize()


def test_ranks_with_different_plans_are_told_so():
    _, reducer, stream = alone(SIX)
    stream.change_record = lambda _, record: record[:24] + bytes(8) + record[32:]
    with pytest.raises(HorovodInternalError, match="plan 0"):
        reducer.synchronize()


@pytest.mark.parametrize("name", list(SIX))
def test_a_view_that_changed_while_it_was_the_librarys_fails_the_step_on_all(name):
    world = World(SIX, views=True, check_views=True)
    for rank in (0, 1):
        for n in SIX:
            world.reducers[rank].views[n].fill(1)
            world.reducers[rank].grad_ready(n)
    world.reducers[1].views[name][3] += 1
    own, told = world.synchronize()[::-1]
    assert type(own) is HvdliteError
    assert f"gradient {name!r} was changed" in str(own)
    assert type(told) is HorovodInternalError
    assert "failed on ranks [1]" in str(told)
    for rank in (0, 1):
        for n in SIX:
            world.reducers[rank].grad_ready(n)
    assert all(isinstance(r, dict) for r in world.synchronize())
    world.finish()
    world.reducers[0].views["a"][...] = 9  # its rank's own again


def test_checked_views_may_change_between_passes():
    _, reducer, _ = alone(SIX, views=True, check_views=True, passes=2)
    for k in range(2):
        for name in SIX:
            reducer.views[name][...] += k
            reducer.grad_ready(name)
    assert sorted(reducer.synchronize()) == sorted(SIX)


# --- weights


def test_the_weight_of_a_step_goes_with_its_first_gradient():
    world, reducer, stream = alone(SIX)
    g = world.gradient("a", 1)
    reducer.grad_ready("a", g, weight=2.5)
    assert stream.log[-1] == "begin 0 0 2.5"
    reducer.grad_ready("b", g, weight=2.5)  # the same again says nothing new
    for weight in (1.0, 2.0):
        with pytest.raises(ValueError, match=r"has 2\.5 already"):
            reducer.grad_ready("c", g, weight=weight)
    reducer.synchronize()
    world.finish()
    reducer.grad_ready("a", g)
    assert "begin 5 1 1" in stream.log
    with pytest.raises(ValueError, match="has 1 already"):
        reducer.grad_ready("b", g, weight=1.0)


def test_only_an_average_has_weights():
    world, reducer, _ = alone(SIX, op=Sum)
    with pytest.raises(ValueError, match="op=Average"):
        reducer.grad_ready("a", world.gradient("a", 1), weight=1.0)


def test_buckets_whose_ranks_all_weigh_nothing_count_as_had_by_none():
    params = {"world": (2,), "pair": Param((2,), ranks=(0, 1)), "own": Param((2,), ranks=None)}
    world = World(params, size=3)
    for rank, weight in enumerate((0.0, 0, 2)):
        for k, spec in enumerate(world.mine(rank)):
            g = world.gradient(spec.name, 1)
            world.reducers[rank].grad_ready(spec.name, g, **({"weight": weight} if k == 0 else {}))
    assert [sorted(r) for r in world.synchronize()] == [
        ["own", "world"],
        ["own", "world"],
        ["own", "world"],
    ]
    world.finish()
    for rank in range(3):
        world.reducers[rank].submit({"world": world.gradient("world", 1)}, 0.0)
    assert [sorted(r) for r in world.synchronize()] == [[], [], []]


# --- step(grads)


def test_what_step_is_given_joins_what_was_announced():
    world, reducer, _ = alone(SIX)
    kept = {name: world.gradient(name, ord(name)) for name in SIX}
    reducer.grad_ready("a", kept["a"])
    reducer.grad_ready("f", kept["f"])
    reducer.submit(kept, None)  # the same arrays again: no second pass
    result = reducer.synchronize()
    assert {name: int(array[0]) for name, array in result.items()} == {n: ord(n) for n in SIX}


def test_another_array_for_a_name_that_was_announced_is_an_error():
    # The first array is garbage by then, and the second one got its address.
    world, reducer, _ = alone(SIX)
    for _ in range(5):
        reducer.grad_ready("a", np.array([1] * 16, np.float32))
        with pytest.raises(ValueError, match=r"'a'.*another array"):
            reducer.submit({"a": np.array([5] * 16, np.float32)}, None)
        reducer.submit({"b": world.gradient("b", 2)}, None)
        result = reducer.synchronize()
        assert [float(result[n][0]) for n in "ab"] == [1, 2]
        world.finish()


def test_a_bad_gradient_in_step_stores_nothing_at_all():
    world, reducer, stream = alone(SIX)
    before = list(stream.log)
    good = world.gradient("a", 1)
    for bad, error in (
        ({"a": good, "nope": good}, KeyError),
        ({"a": good, "b": np.zeros(3)}, ValueError),
        ({"a": good, "b": [1]}, TypeError),
        ([("a", good)], TypeError),
    ):
        with pytest.raises(error):
            reducer.submit(bad, None)
    with pytest.raises(ValueError, match="weight"):
        reducer.submit({"a": good}, -1.0)
    assert stream.log == before
    reducer.submit({name: world.gradient(name, 4) for name in SIX}, 3.0)
    assert "begin 0 0 3" in stream.log
    assert all((array == 4).all() for array in reducer.synchronize().values())


# --- plans


def names_of(plan):
    return [bucket.names for bucket in plan.buckets]


def test_the_lowest_ranks_order_of_the_first_step_is_everybodys_plan():
    world = World(SIX)
    assert names_of(world.reducers[1].plan) == [("f",), ("e", "d"), ("c", "b"), ("a",)]
    world.announce(0, "badcfe")
    world.announce(1, "fedcba")
    world.synchronize()
    for reducer in world.reducers:
        assert names_of(reducer.plan) == [("b",), ("a", "d"), ("c", "f"), ("e",)]
    world.finish()
    world.announce(0, "abcdef")  # decided once and for all
    world.announce(1, "abcdef")
    results = world.synchronize()
    assert all(isinstance(r, dict) for r in results)
    assert names_of(world.reducers[0].plan) == [("b",), ("a", "d"), ("c", "f"), ("e",)]
    assert world.reducers[0].plan.digest == world.reducers[1].plan.digest


def test_names_that_the_deciding_rank_lacked_follow_in_registration_order():
    world = World(SIX)
    world.announce(0, "da")
    world.announce(1, "fedcba")
    world.synchronize()
    assert names_of(world.reducers[1].plan) == [("d",), ("a", "b"), ("c", "e"), ("f",)]


def test_each_groups_lowest_rank_decides_for_it():
    params = {n: Param((16,), ranks=(0, 1, 2)) for n in "ab"}
    params |= {n: Param((16,), ranks=(1, 2)) for n in "xy"}
    world = World(params, size=3)
    world.announce(0, "ab")
    world.announce(1, "xbay")
    world.announce(2, "yxba")
    world.synchronize()
    plans = {str(names_of(r.plan)) for r in world.reducers}
    assert plans == {str([("a",), ("x",), ("b",), ("y",)])}
    world.finish()
    assert all(isinstance(r, dict) for r in world.step())


def test_an_order_is_that_of_the_first_step_with_announcements():
    world = World(SIX)
    grads = {name: world.gradient(name, 1) for name in SIX}
    for _ in range(2):  # what step() is given has no order
        for reducer in world.reducers:
            reducer.submit(grads, None)
        world.synchronize()
        world.finish()
        assert names_of(world.reducers[0].plan) == [("f",), ("e", "d"), ("c", "b"), ("a",)]
    for rank in (0, 1):
        world.announce(rank, "abcdef")
    world.synchronize()
    assert names_of(world.reducers[1].plan) == [("a",), ("b", "c"), ("d", "e"), ("f",)]


def test_of_several_passes_the_last_one_gives_the_order():
    world = World(SIX, passes=2)
    for rank in (0, 1):
        world.announce(rank, "abcdef")
        world.announce(rank, "fabcde")
    world.synchronize()
    assert names_of(world.reducers[0].plan) == [("f",), ("a", "b"), ("c", "d"), ("e",)]


def test_views_stay_where_they_are_when_the_plan_changes():
    world = World(SIX, views=True)
    views = dict(world.reducers[0].views)
    addresses = {name: view.ctypes.data for name, view in views.items()}
    slots = world.reducers[0].plan.slots(0)
    for _ in range(2):
        for rank in (0, 1):
            for name in "acebdf":
                world.reducers[rank].grad_ready(name)
        world.synchronize()
        world.finish()
    plan = world.reducers[0].plan
    assert plan.slots(0) == slots
    assert names_of(plan) != [("f",), ("e", "d"), ("c", "b"), ("a",)]  # another order of launches
    assert sorted(chain(*names_of(plan))) == sorted(SIX)
    for name, view in world.reducers[0].views.items():
        assert view.ctypes.data == addresses[name]
        views[name].fill(3)
        assert (view == 3).all()


def test_a_pinned_plan_stays():
    specs = World(SIX).specs
    pinned = plan_buckets(specs, "cabdfe", fusion_threshold=192, first_bucket=192)
    world = World(SIX, plan=pinned)
    for _ in range(2):
        assert world.reducers[0].plan == pinned
        assert all(isinstance(r, dict) for r in world.step())


def test_a_plan_can_be_put_in_between_two_steps():
    world = World(SIX)
    world.step()
    plan = plan_buckets(world.specs, "cabdfe", fusion_threshold=192, first_bucket=192)
    for reducer in world.reducers:
        reducer.use(plan)
        assert reducer.plan == plan
    world.step()
    assert [line for line in world.streams[0].log if "program" in line][-1] == "program [0, 1] of 2"
    assert all((a == 4).all() for r in world.step(4) for a in r.values())
    world.announce(0, "a")
    with pytest.raises(RuntimeError, match="between two steps"):
        world.reducers[0].use(plan)


def test_a_plan_that_does_not_fit_is_refused():
    world = World(SIX, views=True)
    other = plan_buckets(world.specs, "cabdfe", fusion_threshold=192, first_bucket=192)
    with pytest.raises(ConfigError, match="views never move"):
        world.reducers[0].use(other)
    with pytest.raises(ConfigError, match="lacks"):
        world.reducers[0].use(Plan((), (), 0, 0))


def test_new_parameters_get_memory_of_their_own_and_old_views_stay():
    world = World(SIX, views=True)
    for _ in range(2):
        for rank in (0, 1):
            for name in "acebdf":
                world.reducers[rank].grad_ready(name)
        world.synchronize()
        world.finish()
    addresses = {name: view.ctypes.data for name, view in world.reducers[0].views.items()}
    new = [world.spec(name, (16,), region=1) for name in "gh"]
    world.specs += new
    for reducer in world.reducers:
        reducer.add(new, {"float32": np.dtype("float32")}, {})
    for name, address in addresses.items():
        assert world.reducers[0].views[name].ctypes.data == address
    assert world.streams[0].log[-2] == "grow [128, 128]"
    spans = sorted(v.ctypes.data for v in world.reducers[0].views.values())
    assert len(spans) == 8
    assert all(b - a >= 64 for a, b in pairwise(spans))
    for _ in range(2):
        for rank in (0, 1):
            for name in "hgfedcba":
                world.reducers[rank].grad_ready(name)
        assert [sorted(r) for r in world.synchronize()] == [list("abcdefgh")] * 2
        world.finish()


# --- waits that were broken off


def test_a_wait_that_an_alarm_broke_off_goes_on_where_it_was():
    world, reducer, stream = alone(SIX)
    stream.is_released = False
    world.announce(0, "bcdef", 3)

    def alarm():
        raise Timeout

    stream.on_advance = alarm
    for _ in range(3):
        with pytest.raises(Timeout):
            reducer.synchronize()
    with pytest.raises(RuntimeError, match="already synchronized"):
        world.announce(0, "a")
    stream.on_advance = lambda: None
    stream.is_released = True
    result = reducer.synchronize()
    assert sorted(result) == list("bcdef")
    assert [line for line in stream.log if "launch" in line] == [
        "launch 0",
        "launch 1",
        "launch 2",
        "launch 3 with record",
    ]
    assert world.progress[0].counters.buckets == 4


INTERRUPTED = {
    "rides": SIX,
    "concludes": {**SIX, "own": Param((4,), ranks=None)},
    "fails": SIX,
    "views": SIX,
}


@pytest.mark.parametrize("case", INTERRUPTED)
def test_an_alarm_at_every_point_of_synchronize_changes_nothing(case):
    params = INTERRUPTED[case]
    options = {"missing": "error" if case == "fails" else "zero", "views": case == "views"}

    def scenario(interrupter):
        world = World(params, **options)
        plans = []
        for step in range(2):
            order = list(params)[::-1] if step else list(params)
            for rank in (0, 1):
                names = [n for n in order if rank == 0 or n != "c"]
                for name in names:
                    if options["views"]:
                        world.reducers[rank].views[name].fill(rank + step)
                        world.reducers[rank].grad_ready(name)
                    else:
                        world.announce(rank, [name], rank + step)
            results = {}

            def peer(results=results, world=world):
                with interrupter.paused():
                    if 1 not in results:
                        results[1] = None
                        try:
                            results[1] = sorted(world.reducers[1].synchronize())
                        except MissingGradientError as exc:
                            results[1] = str(exc)

            world.streams[0].on_advance = peer
            while 0 not in results:
                with suppress(Alarm), interrupter:
                    try:
                        results[0] = sorted(world.reducers[0].synchronize())
                    except MissingGradientError as exc:
                        results[0] = str(exc)
            if case == "fails":
                assert "'c' on ranks [1]" in results[0]
                assert results[0] == results[1]
            else:
                assert results[0] == sorted(params)
                assert results[1] == sorted(params)
                world.finish()
            plans.append(world.reducers[0].plan)
            assert plans[-1].digest == world.reducers[1].plan.digest
            launches = [line for line in world.streams[0].log if "launch" in line]
            assert len(launches) == len(world.streams[0].works) * (step + 1)
        assert plans[0] == plans[1]
        assert [n for n in plans[0].names if n != "own"] == list(SIX) or case == "views"

    assert at_every_point(scenario, Alarm, "reducer.py", "progress.py") > 50


@pytest.mark.parametrize("views", [False, True])
def test_an_alarm_at_every_point_of_grad_ready_neither_loses_nor_doubles_a_pass(views):
    def scenario(interrupter):
        _, reducer, _ = alone({"a": (4,), "b": (4,)}, passes=3, views=views)
        for name in "ab":
            refused = False
            while not refused:  # a caller who does not know how often it counted
                with suppress(Alarm), interrupter:
                    try:
                        reducer.grad_ready(name, np.ones(4, np.float32))
                    except ValueError:
                        refused = True
        result = reducer.synchronize()
        assert all((array == 3).all() for array in result.values()), result
        assert sorted(result) == ["a", "b"]

    assert at_every_point(scenario, Alarm, "reducer.py") > 50


# --- one thread


@pytest.mark.parametrize("views", [False, True])
def test_a_second_thread_is_refused_and_the_first_goes_on(views):
    world, reducer, stream = alone(SIX, views=views)
    inside, leave = threading.Event(), threading.Event()

    def block():
        inside.set()
        assert leave.wait(20)

    def ready(name):
        reducer.grad_ready(name) if views else world.announce(0, name)

    ready("a")
    stream.on_advance = block  # grad_ready of the first full bucket looks at the stream
    thread = threading.Thread(target=ready, args=("f",))
    thread.start()
    assert inside.wait(20)
    with pytest.raises(RuntimeError, match=r"grad_ready\('b'\): another thread"):
        ready("b")
    leave.set()
    thread.join(20)
    assert not thread.is_alive()
    stream.on_advance = lambda: None
    for name in "bcde":
        ready(name)
    assert sorted(reducer.synchronize()) == sorted(SIX)


def test_a_handler_that_announces_inside_grad_ready_is_refused():
    world, reducer, stream = alone(SIX)
    world.announce(0, "a")
    refused = []

    def handler():
        with pytest.raises(RuntimeError, match="signal handler"):
            reducer.grad_ready("b", world.gradient("b", 1))
        refused.append(True)

    stream.on_advance = handler
    world.announce(0, "f")
    assert refused
    stream.on_advance = lambda: None
    world.announce(0, "bcde")
    assert sorted(reducer.synchronize()) == sorted(SIX)


def test_a_second_thread_cannot_wait_for_the_same_step():
    world, reducer, stream = alone(SIX)
    world.announce(0, SIX)
    stream.is_released = False
    waiting, leave = threading.Event(), threading.Event()
    results, looks = [], []

    def block():
        if threading.current_thread() is thread:
            looks.append(None)
            if len(looks) == 3:  # by then it is in the loop that waits
                waiting.set()
                assert leave.wait(20)
                stream.is_released = True

    stream.on_advance = block
    thread = threading.Thread(target=lambda: results.append(reducer.synchronize()))
    thread.start()
    assert waiting.wait(20)
    with pytest.raises(RuntimeError, match="already waiting in step 0"):
        reducer.synchronize()
    leave.set()
    thread.join(20)
    assert sorted(results[0]) == sorted(SIX)


# --- the end


def test_a_closed_reducer_refuses_everything_and_tells_its_peers_once():
    world, reducer, stream = alone(SIX)
    world.announce(0, "a")
    reducer.close()
    reducer.close()
    assert [line for line in stream.log if "close" in line] == ["close 0"]
    for call in (
        lambda: world.announce(0, "b"),
        reducer.synchronize,
        reducer.check_can_step,
        lambda: reducer.submit({}, None),
        reducer.zero_views,
    ):
        with pytest.raises(ShutDownError, match=r"close\(\) was called"):
            call()


def test_a_peer_that_closed_ends_the_wait_for_it_and_for_no_other():
    _, reducer, stream = alone(SIX)
    stream.is_released = False
    stream.late, stream.closed = [1], [1]
    with pytest.raises(RankFailedError, match=r"step 0 .*ranks \[1\] have closed or dropped"):
        reducer.synchronize()
    # Its part of the step is here: it may go.
    stream.late = []
    looks = []

    def look():
        looks.append(None)
        stream.is_released = len(looks) > 300

    stream.on_advance = look
    assert reducer.synchronize() == {}
    reducer.apply(lambda _: None)


def test_a_dropped_reducer_is_freed_at_once_and_says_so():
    gc.disable()
    try:
        world, reducer, _ = alone(SIX)
        world.announce(0, SIX)
        reducer.synchronize()
        world.finish()
        grad_ready, dead = reducer.grad_ready, weakref.ref(reducer)
        gradient = world.gradient("a", 1)
        world.reducers.clear()
        del reducer
        assert dead() is None
    finally:
        gc.enable()
    with pytest.raises(ShutDownError, match="dropped"):
        grad_ready("a", gradient)


def test_zeroed_views_are_zero_and_never_in_the_middle_of_a_step():
    _, reducer, _ = alone(SIX, views=True)
    reducer.views["a"].fill(2)
    reducer.zero_views()
    assert not any(view.any() for view in reducer.views.values())
    reducer.grad_ready("a")
    with pytest.raises(RuntimeError, match=r"zero_grad\(\)"):
        reducer.zero_views()
    reducer.synchronize()
    reducer.zero_views()
    _, reducer, _ = alone(SIX)
    reducer.views["a"].fill(2)
    reducer.zero_views()  # what is packed is the reduced gradient: left alone
    assert (reducer.views["a"] == 2).all()


# ---- ranks that keep others waiting ------------------------------------------------------------


def test_a_step_says_which_bucket_is_missing_and_what_this_rank_lacks():
    world = World({"a": (64,), "b": (64,), "c": (64,)}, fusion_threshold=0)
    reducer, stream = world.reducers[0], world.streams[0]
    assert reducer.story() == ""
    world.announce(0, ["c", "b"])
    assert reducer.story() == "step 0 of an optimizer is open there, without 'a'"
    world.announce(0, ["a"])
    assert reducer.story() == "step 0 of an optimizer is open there, with all gradients"
    stream.is_released, stream.late = False, [1]
    first, second, _ = (bucket.names[0] for bucket in reducer.plan.buckets)
    assert reducer._late_buckets() == [
        f"bucket 0 of 3 ({first!r}): not all gradients have come on rank 1"
    ]
    stream.arrivals[1] = 1
    assert reducer._late_buckets() == [
        f"bucket 1 of 3 ({second!r}): not all gradients have come on rank 1"
    ]
    stream.arrivals[1] = 3
    assert reducer._late_buckets() == [
        "all gradients of rank 1 have come, but not the end of the step"
    ]


def test_a_step_that_ends_after_a_peer_gave_up_is_an_error():
    """The peer may have written into its slots before this rank had read them."""
    world = World({"w": (4,)})
    control = world.progress[0].control
    control.states = [(RankState.ALIVE, ""), (RankState.GAVE_UP, "gave up: x")]
    world.announce_all()
    assert world.streams[0].finished()
    with pytest.raises(CollectiveTimeoutError, match="step 0 of an optimizer: rank 0 needs rank 1"):
        world.reducers[0].synchronize()
