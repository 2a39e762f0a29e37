"""Rows R2, R16 and R18: param groups, process sets, parameters that come later."""

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


# ---- R2: process sets of groups, and local groups -----------------------------------------------


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
        assert_equal(
            inner.last, {"w": mean(0, ranks, step), "v": gradient(1, rank, step, local["v"])}
        )
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
        of = dict(zip(("cd", "ef", "g"), sets, strict=True))
        members = {"ab": range(n), **{names: ps.ranks for names, ps in of.items()}}
        groups = [{"params": zeros("ab")}]
        groups += [{"params": zeros(names), "process_set": ps} for names, ps in of.items()]
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
            assert_equal(
                inner.last, {name: total(k[name], ranks, step) for name, ranks in mine.items()}
            )
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
        hvd.DistributedOptimizer(
            Recorder(), [{"params": zeros("w")} | ({"process_set": None} if rank == n - 1 else {})]
        )
    names = "wv" if rank == n - 1 else "wu"
    with pytest.raises(hvd.MismatchError, match=r"'v'.*missing on ranks \[0"):
        hvd.DistributedOptimizer(Recorder(), zeros(names))
    with pytest.raises(hvd.MismatchError, match=r"shape \(3,\).*shape \(4,\)"):
        hvd.DistributedOptimizer(Recorder(), zeros("w", (4,) if rank == n - 1 else (3,)))
    with pytest.raises(hvd.MismatchError, match=r"float64.*float32|float32.*float64"):
        hvd.DistributedOptimizer(Recorder(), zeros("w", dtype="f4" if rank == n - 1 else "f8"))
    with pytest.raises(hvd.MismatchError, match="backward_passes_per_step"):
        hvd.DistributedOptimizer(
            Recorder(), zeros("w"), backward_passes_per_step=2 if rank == n - 1 else 1
        )
    opt = hvd.DistributedOptimizer(Recorder(), zeros(rotated("uvw", rank)))  # the order may differ
    assert set(comm.allgather(opt.plan.names)) == {("w", "v", "u")}


# ---- R16: process sets --------------------------------------------------------------------------


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


# ---- R18: more parameters later -----------------------------------------------------------------


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
        inner,
        [{"params": params}, {"params": local, "process_set": None}],
        fusion_threshold=128,
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
    new = {
        name: np.full((3, k + 1), 7.0 + rank, "f4" if k % 2 else "f8")
        for k, name in enumerate("cdef")
    }
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
