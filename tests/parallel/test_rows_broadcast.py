"""Rows R3, R12 and R20: broadcasts of parameters, checkpoints."""

import json

import numpy as np
import pytest

from training import (
    Recorder,
    assert_equal,
    counted,
    gradient,
    mean,
    process_sets,
    rotated,
    zeros,
)

pytestmark = pytest.mark.mpi(min_size=1)


# ---- R3: bcast_period ---------------------------------------------------------------------------


class Watcher(Recorder):
    """Notes the parameters as they are just before each update; keeps a state of its own."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.seen = []
        self.momentum = np.zeros(1)

    def step(self, grads):
        self.seen.append(self.params["w"].copy())
        return super().step(grads)


@pytest.mark.parametrize("period", [-1, 0, 1, 2, 3], ids="period={}".format)
def test_r03_parameters_are_level_again_before_each_update_of_the_period(hvd, period):
    rank, ranks = hvd.rank(), range(hvd.size())
    params = {"w": np.full(3, 8.0 * rank)}
    inner = Watcher(params, lr=1.0)
    inner.momentum += rank
    opt = hvd.DistributedOptimizer(inner, params, bcast_period=period)
    level = 0.0  # rank 0's parameters
    mine = 0.0 if period >= 0 else 8.0 * rank  # what this rank should have
    for step in range(1, 8):
        if step in (2, 5):
            params["w"] += rank / 1024
            mine += rank / 1024
        opt.step({"w": gradient(0, rank, step)})
        if period > 0 and step % period == 0:
            mine = level
        np.testing.assert_array_equal(inner.seen[-1], np.full(3, 0) + mine)
        level = level - mean(0, ranks, step)
        mine = mine - mean(0, ranks, step)
        np.testing.assert_array_equal(params["w"], mine)
    assert inner.momentum[0] == rank  # an optimizer's own state is never broadcast


def test_r03_a_mapping_is_read_again_so_that_rebinding_works(hvd):
    rank = hvd.rank()
    params = {"w": np.full(3, 1.0 + rank), "v": np.zeros(2)}
    opt = hvd.DistributedOptimizer(Recorder(), params, bcast_period=1)
    first = params["w"]
    params["w"] = np.full(3, 5.0 + rank)
    opt.step({"w": gradient(0, rank), "v": np.zeros(2)})
    assert_equal(params, {"w": np.full(3, 5.0), "v": np.zeros(2)})
    assert_equal({"w": first}, {"w": np.full(3, 1.0)})


def test_r03_names_that_came_or_went_since_construction_are_an_error_on_all_ranks(hvd):
    rank, n = hvd.rank(), hvd.size()
    own, others = ValueError, (ValueError if n == 1 else hvd.HorovodInternalError)
    params = {"v": np.full(3, 1.0), "w": np.full(3, 2.0)}
    opt = hvd.DistributedOptimizer(Recorder(), params, bcast_period=1)
    grads = {name: gradient(0, rank) for name in "vw"}
    if rank == n - 1:
        params["x"] = np.zeros(2)
    with pytest.raises(own if rank == n - 1 else others, match="'x'"):
        opt.step(grads)
    if rank == n - 1:
        del params["x"]
    opt.step()
    lost = params.pop("v") if rank == n - 1 else None
    with pytest.raises(own if rank == n - 1 else others, match="'v'"):
        opt.step(grads)
    if lost is not None:
        params["v"] = lost
    opt.step()
    assert_equal(params, {"v": np.full(3, 1.0), "w": np.full(3, 2.0)})


def test_r03_opposite_orders_of_two_optimizers_do_not_mix_their_parameters(hvd):
    """Once rank 1's `b` took the value of rank 0's `a`: broadcasts were matched by a mere count."""
    rank = hvd.rank()
    params = {"a": np.full(3, 1.0 + rank), "b": np.full(3, 5.0 + rank)}
    one = hvd.DistributedOptimizer(Recorder(), {"a": params["a"]}, bcast_period=2)
    two = hvd.DistributedOptimizer(Recorder(), {"b": params["b"]}, bcast_period=3)
    for step in range(1, 13):
        params["a"] += rank
        params["b"] += rank
        for opt, name in ((one, "a"), (two, "b")):
            opt.grad_ready(name, gradient(0, rank, step))
        # The same order where one of them broadcasts, for that waits for all; else the opposite.
        flip = rank % 2 and step % 2 and step % 3
        for opt in (two, one) if flip else (one, two):
            opt.step()
        if step % 6 == 0:
            assert_equal(params, {"a": np.full(3, 1.0), "b": np.full(3, 5.0)})


# ---- R12: checkpoints ---------------------------------------------------------------------------


def test_r12_state_dict_is_the_wrapped_optimizers_alone(hvd):
    inner = Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("ab"), bcast_period=2)
    for step in range(3):
        opt.step({name: gradient(k, hvd.rank(), step) for k, name in enumerate("ab")})
    assert opt.state_dict() == inner.state_dict() == {"lr": 0.0, "steps": 3}


def test_r12_comm_state_saved_by_all_ranks_loads_on_fewer_and_on_one(hvd):
    n, rank = hvd.size(), hvd.rank()
    names = "abcdef"
    saver = hvd.DistributedOptimizer(
        Recorder(), zeros(names), fusion_threshold=128, first_bucket=64, bcast_period=4
    )
    for name in "cafebd":
        saver.grad_ready(name, gradient(0, rank))
    saver.step()
    state = json.loads(json.dumps(saver.comm_state()))
    with process_sets(hvd, range(max(n - 1, 1)), [n - 1]) as (some, one):
        for process_set in (hvd.global_process_set, some, one):
            ranks = list(process_set.ranks) if rank in process_set.ranks else [rank]
            params = {name: np.full(3, 1.0) for name in names}
            inner = Recorder(params)
            opt = hvd.DistributedOptimizer(
                inner,
                params,
                fusion_threshold=128,
                first_bucket=64,
                bcast_period=4,
                process_set=process_set,
            )
            opt.load_comm_state(state)
            if len(ranks) == n:  # the same ranks: the plan is kept
                assert opt.plan == saver.plan
            for step in range(1, 4):  # steps 2, 3 and 4 since the beginning
                for array in params.values():
                    array += rank
                for name in rotated(names, rank + step):
                    opt.grad_ready(name, gradient(ord(name) - 97, rank, step))
                opt.step()
                assert_equal(
                    inner.last, {name: mean(k, ranks, step) for k, name in enumerate(names)}
                )
            # Broadcast before the third update here, which is the fourth of all.
            assert_equal(params, {name: np.full(3, 1.0 + 3 * ranks[0]) for name in names})
            assert opt.comm_state()["num_steps"] == 4
            if len(ranks) == n:
                assert opt.plan == saver.plan


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("period", [0, 3])
def test_r12_a_state_that_one_rank_alone_has_loaded_is_an_error_on_all(hvd, period):
    opt = hvd.DistributedOptimizer(Recorder(), zeros("a"), bcast_period=period)
    fresh = opt.comm_state()
    if hvd.rank() == 0:
        opt.load_comm_state({**fresh, "num_steps": 2})
    grad = gradient(0, hvd.rank())
    with pytest.raises(hvd.HorovodInternalError, match=r"2 applied.*loaded the same state"):
        opt.step({"a": grad})
    opt.load_comm_state(fresh)
    opt.step({"a": grad})
    assert opt.comm_state()["num_steps"] == 1


def test_r12_something_else_is_no_comm_state(hvd):
    opt = hvd.DistributedOptimizer(Recorder(), zeros("a"))
    for state in (
        None,
        {},
        {"num_steps": 3},
        {"num_steps": "x", "plan": {}},
        {"num_steps": 1, "plan": 7},
    ):
        with pytest.raises(hvd.ConfigError, match="comm_state"):
            opt.load_comm_state(state)
    opt.grad_ready("a", gradient(0, hvd.rank()))
    with pytest.raises(RuntimeError, match="between two steps"):
        opt.load_comm_state(opt.comm_state())
    opt.step()


# ---- R20: fused broadcast of parameters ---------------------------------------------------------


def test_r20_parameters_of_many_kinds_take_the_roots_values_and_nan_is_healed(hvd):
    n, rank = hvd.size(), hvd.rank()
    for root in {0, n - 1}:
        params = {
            f"{dtype}{i}": np.full((i + 1, 2), rank + i).astype(dtype)
            for i in range(5)
            for dtype in ("f2", "f4", "f8", "i4", "c16", "?")
        }
        params["fortran"] = np.asfortranarray(np.full((3, 4), float(rank)))
        params["swapped"] = np.full(3, rank, ">f8")
        params["strided"] = np.full((4, 6), float(rank))[::2, ::3]
        params["zero-d"] = np.full((), float(rank))
        params["empty"] = np.zeros((0, 3))
        if rank != root:
            params["f80"][:] = np.nan
        items = list(params.items())
        given = dict(rotated(items, rank))  # the order may differ
        returned = []

        def run(given=given, root=root, returned=returned):
            returned.append(hvd.broadcast_parameters(given, root_rank=root))

        counts = counted(hvd, run)
        assert returned == [given]
        for name, array in params.items():
            assert given[name] is array
            i = int(name[-1]) if name[-1].isdigit() else 0
            expected = np.full(array.shape, root + i).astype(array.dtype)
            np.testing.assert_array_equal(array, expected, err_msg=name)
        assert counts["collectives"] <= 2 * (n > 1)  # an agreement and one message for all


def test_r20_construction_broadcasts_all_parameters_in_a_few_messages(hvd):
    rank, n = hvd.rank(), hvd.size()
    params = {f"w{i}": np.full(5, 10.0 * i + rank) for i in range(40)}
    made = []
    counts = counted(hvd, lambda: made.append(hvd.DistributedOptimizer(Recorder(), params)))
    assert_equal(params, {f"w{i}": np.full(5, 10.0 * i) for i in range(40)})
    assert counts["collectives"] <= 10 * (n > 1)


def test_r20_what_one_rank_cannot_write_is_an_error_on_all_and_changes_nothing(hvd):
    rank, n = hvd.rank(), hvd.size()
    params = {"v": np.full(3, 1.0 + rank), "w": np.full(3, 5.0 + rank)}
    params["w"].flags.writeable = rank != n - 1
    own = rank == n - 1
    with pytest.raises(ValueError if own else hvd.HorovodInternalError, match="'w' is read-only"):
        hvd.broadcast_parameters(params)
    with pytest.raises(ValueError if own else hvd.HorovodInternalError, match="'w' is read-only"):
        hvd.DistributedOptimizer(Recorder(), params)
    assert_equal(params, {"v": np.full(3, 1.0 + rank), "w": np.full(3, 5.0 + rank)})
    hvd.DistributedOptimizer(Recorder(), params, bcast_period=-1)  # it need not be written
