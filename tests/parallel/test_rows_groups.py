"""Rows R2, R3, R12, R16, R18 and R20: param groups, process sets, broadcasts, checkpoints."""

import json
import random

import numpy as np
import pytest
from training import (
    Recorder,
    assert_equal,
    counted,
    gradient,
    mean,
    numbers,
    process_sets,
    rotated,
    total,
    zeros,
)

pytestmark = pytest.mark.mpi(min_size=1)


# ---- R2: process sets of groups, and local groups ----------------------------------------------


def test_r02_a_local_group_differs_between_ranks_and_the_others_are_equal(hvd, comm):
    rank, ranks = hvd.rank(), range(hvd.size())
    shared = {"w": np.full(3, 100.0 + rank)}
    local = {"v": np.full(2, 200.0 + rank)}
    inner = Recorder(shared | local, lr=1.0)
    opt = hvd.DistributedOptimizer(
        inner, [{"params": shared}, {"params": local, "process_set": None}], bcast_period=2
    )
    assert_equal(shared, {"w": np.full(3, 100.0)})  # broadcast
    assert_equal(local, {"v": np.full(2, 200.0 + rank)})  # not broadcast
    for step in range(4):
        opt.grad_ready("v", gradient(1, rank, step, local["v"]))
        opt.grad_ready("w", gradient(0, rank, step))
        opt.step()
        assert_equal(inner.last, {
            "w": mean(0, ranks, step), "v": gradient(1, rank, step, local["v"])
        })
    w = 100.0 - sum(mean(0, ranks, step) for step in range(4))
    v = 200.0 + rank - sum(gradient(1, rank, step, local["v"]) for step in range(4))
    assert_equal(shared | local, {"w": w, "v": v})
    assert len(set(comm.allgather(shared["w"].tobytes()))) == 1
    assert len(set(comm.allgather(local["v"].tobytes()))) == hvd.size()


def test_r02_a_local_group_alone_sends_nothing_and_sums_its_passes(hvd):
    inner = Recorder()
    opt = hvd.DistributedOptimizer(
        inner, [{"params": zeros("v"), "process_set": None}], backward_passes_per_step=2
    )

    def step():
        opt.grad_ready("v", gradient(0, hvd.rank(), 0))
        opt.grad_ready("v", gradient(0, hvd.rank(), 1))
        opt.step()

    counts = counted(hvd, step)
    assert counts["bytes"] == counts["collectives"] == 0
    assert_equal(inner.last, {"v": gradient(0, hvd.rank(), 0) + gradient(0, hvd.rank(), 1)})


@pytest.mark.parametrize("backend", ["shm", "mpi"], ids="backend={}".format)
@pytest.mark.parametrize("views", [False, True], ids="views={}".format)
def test_r02_groups_of_overlapping_sets_are_reduced_each_over_its_own(hvd, backend, views):
    hvd.shutdown()
    hvd.init(config={"backend": backend})
    n, rank = hvd.size(), hvd.rank()
    rng = random.Random(f"rank {rank}")
    with process_sets(hvd, range(max(n - 1, 1)), range(min(1, n - 1), n), [n // 2]) as sets:
        members = {"ab": range(n), **dict(zip(("cd", "ef", "g"), [ps.ranks for ps in sets], strict=True))}
        groups = [{"params": zeros("ab")}] + [
            {"params": zeros(names), "process_set": ps}
            for names, ps in zip(("cd", "ef", "g"), sets, strict=True)
        ]
        inner = Recorder()
        opt = hvd.DistributedOptimizer(
            inner, groups, op=hvd.Sum, fusion_threshold=64, gradient_as_bucket_view=views
        )
        mine = {name: ranks for names, ranks in members.items() for name in names if rank in ranks}
        k = numbers("abcdefg")
        for step in range(30):
            order = list(mine)
            rng.shuffle(order)
            for name in order:
                if views:
                    opt.grads[name][...] = gradient(k[name], rank, step)
                    opt.grad_ready(name)
                else:
                    opt.grad_ready(name, gradient(k[name], rank, step))
            opt.step()
            assert_equal(inner.last, {
                name: total(k[name], ranks, step) for name, ranks in mine.items()
            })
        for name in set("abcdefg") - set(mine):
            with pytest.raises(ValueError, match="not in the process set"):
                opt.grad_ready(name, gradient(0, rank))


def test_r02_an_optimizer_of_some_ranks_leaves_the_others_alone(hvd):
    n, rank = hvd.size(), hvd.rank()
    with process_sets(hvd, range(max(n - 1, 1))) as (some,):
        params = {"w": np.full(3, 10.0 + rank)}
        inner = Recorder(params)
        opt = hvd.DistributedOptimizer(inner, params, process_set=some, bcast_period=1)
        together = list(some.ranks) if rank in some.ranks else [rank]
        assert_equal(params, {"w": np.full(3, 10.0 + together[0])})
        for step in range(3):
            opt.grad_ready("w", gradient(0, rank, step))
            opt.step()
            assert_equal(inner.last, {"w": mean(0, together, step)})


def test_r02_a_group_must_be_a_subset_of_the_optimizers_set(hvd):
    n = hvd.size()
    if n == 1:
        pytest.skip("one rank has no proper subset")
    with process_sets(hvd, range(1, n), [0, n - 1]) as (some, other):
        groups = [{"params": zeros("a")}, {"params": zeros("b"), "process_set": other}]
        if hvd.rank() in some.ranks and n > 2:
            with pytest.raises(ValueError, match=r"ranks \[0\]"):
                hvd.DistributedOptimizer(Recorder(), groups, process_set=some)
        opt = hvd.DistributedOptimizer(Recorder(), groups)
        opt.step()


def test_r02_groups_are_compared_across_ranks(hvd, comm):
    n, rank = hvd.size(), hvd.rank()
    if n == 1:
        pytest.skip("nothing to compare")
    with pytest.raises(hvd.MismatchError, match=r"'w'.*local"):
        hvd.DistributedOptimizer(Recorder(), [
            {"params": zeros("w")} | ({"process_set": None} if rank == n - 1 else {})
        ])
    names = "wv" if rank == n - 1 else "wu"
    with pytest.raises(hvd.MismatchError, match=rf"'v'.*missing on ranks \[0"):
        hvd.DistributedOptimizer(Recorder(), zeros(names))
    with pytest.raises(hvd.MismatchError, match=r"shape \(3,\).*shape \(4,\)"):
        hvd.DistributedOptimizer(Recorder(), zeros("w", (4,) if rank == n - 1 else (3,)))
    with pytest.raises(hvd.MismatchError, match="float64.*float32|float32.*float64"):
        hvd.DistributedOptimizer(Recorder(), zeros("w", dtype="f4" if rank == n - 1 else "f8"))
    with pytest.raises(hvd.MismatchError, match="backward_passes_per_step"):
        hvd.DistributedOptimizer(
            Recorder(), zeros("w"), backward_passes_per_step=2 if rank == n - 1 else 1
        )
    opt = hvd.DistributedOptimizer(Recorder(), zeros(rotated("uvw", rank)))  # the order may differ
    assert set(comm.allgather(opt.plan.names)) == {("w", "v", "u")}


# ---- R3: bcast_period --------------------------------------------------------------------------


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


# ---- R12: checkpoints --------------------------------------------------------------------------


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
                inner, params, fusion_threshold=128, first_bucket=64, bcast_period=4,
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
                assert_equal(inner.last, {
                    name: mean(k, ranks, step) for k, name in enumerate(names)
                })
            # Broadcast before the third update here, which is the fourth of all.
            assert_equal(params, {name: np.full(3, 1.0 + 3 * ranks[0]) for name in names})
            assert opt.comm_state()["num_steps"] == 4
            if len(ranks) == n:
                assert opt.plan == saver.plan


def test_r12_something_else_is_no_comm_state(hvd):
    opt = hvd.DistributedOptimizer(Recorder(), zeros("a"))
    for state in ({}, {"num_steps": 3}, {"num_steps": "x", "plan": {}}, {"num_steps": 1, "plan": 7}):
        with pytest.raises(hvd.ConfigError, match="comm_state"):
            opt.load_comm_state(state)
    opt.grad_ready("a", gradient(0, hvd.rank()))
    with pytest.raises(RuntimeError, match="between two steps"):
        opt.load_comm_state(opt.comm_state())
    opt.step()


# ---- R16: process sets -------------------------------------------------------------------------


def test_r16_permutations_are_one_set_and_rank_is_the_position_in_it(hvd):
    n, rank = hvd.size(), hvd.rank()
    chosen = [n - 1, 0] if n > 1 else [0]
    assert hvd.ProcessSet(chosen).ranks == tuple(sorted(chosen))
    assert hvd.ProcessSet(chosen) == hvd.ProcessSet(sorted(chosen))
    with process_sets(hvd, chosen) as (ps,):
        assert ps.ranks == tuple(sorted(chosen))
        assert ps.size() == len(chosen)
        assert ps.included() == (rank in chosen)
        if rank in chosen:
            assert ps.rank() == sorted(chosen).index(rank)
        else:
            with pytest.raises(ValueError, match="not a member"):
                ps.rank()
        with pytest.raises(ValueError, match=r"ProcessSet\(.*registered already|global"):
            hvd.add_process_set(chosen[::-1])


def test_r16_roots_are_world_ranks(hvd):
    n, rank = hvd.size(), hvd.rank()
    with process_sets(hvd, range(min(1, n - 1), n)) as (ps,):
        if rank in ps.ranks:
            for root in ps.ranks:
                got = hvd.broadcast(np.array([rank]), root_rank=root, process_set=ps)
                assert got[0] == root
                assert hvd.broadcast_object(rank, root_rank=root, process_set=ps) == root
            with pytest.raises(ValueError, match=f"root_rank {n}"):
                hvd.broadcast(np.array([rank]), root_rank=n, process_set=ps)
        else:
            with pytest.raises(ValueError, match="not a member"):
                hvd.broadcast(np.array([rank]), root_rank=0, process_set=ps)


def test_r16_an_unregistered_or_foreign_set_is_a_value_error_that_names_it(hvd):
    stranger = hvd.ProcessSet([0])
    with pytest.raises(ValueError, match=r"ProcessSet\(\[0\]\) is not registered"):
        hvd.DistributedOptimizer(Recorder(), zeros("a"), process_set=stranger)
    with pytest.raises(ValueError, match=r"ProcessSet\(\[0\]\) is not registered"):
        hvd.DistributedOptimizer(Recorder(), [{"params": zeros("a"), "process_set": stranger}])
    with pytest.raises(ValueError, match="world"):
        hvd.add_process_set([0, hvd.size()])
    with pytest.raises(ValueError, match="distinct"):
        hvd.add_process_set([0, 0])
    with process_sets(hvd, [hvd.size() - 1]) as (ps,):
        pass
    if ps is not hvd.global_process_set:
        with pytest.raises(ValueError, match="not registered"):
            ps.size()


# ---- R18: more parameters later ----------------------------------------------------------------


class Growing(Recorder):
    """Has the methods of an optimizer that can grow."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.groups, self.zeroed = [], 0

    def add_param_group(self, group):
        self.groups.append(group)
        self.params |= group["params"]

    def zero_grad(self):
        self.zeroed += 1


@pytest.mark.parametrize("views", [False, True], ids="views={}".format)
def test_r18_a_layer_added_at_step_five_is_planned_and_trained_and_views_stay(hvd, comm, views):
    rank, ranks = hvd.rank(), range(hvd.size())
    params = {"a": np.zeros(3), "b": np.zeros((2, 2), np.float32)}
    local = {"l": np.zeros(4)}
    inner = Growing(params | local, lr=1.0)
    opt = hvd.DistributedOptimizer(
        inner, [{"params": params}, {"params": local, "process_set": None}], fusion_threshold=128,
        gradient_as_bucket_view=views,
    )
    expected = {name: np.zeros_like(array) for name, array in inner.params.items()}
    kept = dict(opt.grads) if views else {}
    addresses = {name: array.ctypes.data for name, array in kept.items()}

    def train(step):
        for k, name in enumerate(rotated(list(inner.params), rank + step)):
            grad = gradient(ord(name) % 7, rank, step, inner.params[name])
            if views:
                (kept if k % 2 and name in kept else opt.grads)[name][...] = grad
                opt.grad_ready(name)
            else:
                opt.grad_ready(name, grad)
        opt.step()
        for name, array in expected.items():
            who = [rank] if name == "l" else ranks
            array -= mean(ord(name) % 7, who, step, array)
        assert_equal(inner.params, expected)

    for step in range(5):
        train(step)
    # Enough that the first group outgrows the second; dtypes old and new.
    new = {name: np.full((3, k + 1), 7.0 + rank, "f4" if k % 2 else "f8") for k, name in enumerate("cdef")}
    before = opt.plan.digest
    opt.add_param_group({"params": new})
    assert inner.groups == [{"params": new}]
    assert opt.plan.digest != before
    assert len(set(comm.allgather(opt.plan.digest))) == 1
    assert_equal(new, {name: np.full_like(array, 7.0) for name, array in new.items()})  # broadcast
    expected |= {name: array.copy() for name, array in new.items()}
    if views:
        assert {name: opt.grads[name].ctypes.data for name in kept} == addresses
        kept |= {name: opt.grads[name] for name in new}
        addresses |= {name: array.ctypes.data for name, array in kept.items()}
    for step in range(5, 8):
        train(step)
    late = {"z": np.full(2, 1.0 + rank)}
    opt.add_param_group({"params": late, "process_set": None})  # not broadcast
    assert_equal(late, {"z": np.full(2, 1.0 + rank)})
    if views:
        assert {name: opt.grads[name].ctypes.data for name in kept} == addresses
    opt.step({"z": gradient(0, rank, 0, late["z"])})
    assert_equal(inner.last, {"z": gradient(0, rank, 0, late["z"])})


def test_r18_views_stay_when_a_group_outgrows_another(hvd):
    """Buckets of two groups once swapped their places in memory, for one group had grown."""
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    groups = [{"params": zeros("ab")}, {"params": zeros("cd"), "process_set": None}]
    opt = hvd.DistributedOptimizer(inner, groups, gradient_as_bucket_view=True)
    kept = dict(opt.grads)
    opt.add_param_group({"params": zeros("ef")})
    for k, name in enumerate("abcd"):
        assert opt.grads[name].ctypes.data == kept[name].ctypes.data
        kept[name][...] = gradient(k, rank)
        opt.grad_ready(name)
    opt.step()
    expected = {name: mean(k, ranks) for k, name in enumerate("ab")}
    expected |= {name: gradient(k + 2, rank) for k, name in enumerate("cd")}
    assert_equal(inner.last, expected)


def test_r18_add_param_group_fails_on_all_ranks_or_none_and_changes_nothing(hvd):
    rank, n, inner = hvd.rank(), hvd.size(), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("ab"))
    plan = opt.plan
    with pytest.raises(ValueError, match="two parameters are named 'a'"):
        opt.add_param_group({"params": zeros("a")})
    with pytest.raises(TypeError, match="params"):
        opt.add_param_group(zeros("c"))
    last = n - 1
    group = {"params": zeros("c") if rank == last else zeros("d")}
    if n > 1:
        with pytest.raises(hvd.MismatchError, match="'c'"):
            opt.add_param_group(group)
        if rank == last:
            opt.grad_ready("a", gradient(0, rank))
        with pytest.raises(RuntimeError, match="between two steps"):
            opt.add_param_group({"params": zeros("c")})
    assert opt.plan == plan
    opt.step()
    expected = gradient(0, last) / n if n > 1 else None
    assert_equal(inner.last, {} if expected is None else {"a": expected})


def test_r18_zero_grad_zeroes_views_and_calls_the_wrapped_one(hvd):
    params = zeros("ab")
    inner = Growing(params, lr=0.0)
    opt = hvd.DistributedOptimizer(inner, params, gradient_as_bucket_view=True)
    for name in "ab":
        opt.grads[name][...] = 7.0
    opt.zero_grad()
    assert inner.zeroed == 1
    assert_equal(dict(opt.grads), zeros("ab"))
    opt.grad_ready("a")
    with pytest.raises(RuntimeError, match="under way"):
        opt.zero_grad()
    assert inner.zeroed == 1
    opt.step()
    opt.zero_grad()
    assert inner.zeroed == 2


# ---- R20: fused broadcast of parameters --------------------------------------------------------


def test_r20_parameters_of_many_kinds_take_the_roots_values_and_nan_is_healed(hvd):
    n, rank = hvd.size(), hvd.rank()
    for root in {0, n - 1}:
        params = {
            f"{dtype}{i}": np.full((i + 1, 2), rank + i).astype(dtype)
            for i in range(5) for dtype in ("f2", "f4", "f8", "i4", "c16", "?")
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
