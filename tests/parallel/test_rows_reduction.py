"""Rows R1, R4 to R8, R11 and R17: what is reduced, in which buckets, and when."""

import os
import random
from itertools import pairwise

import numpy as np
import pytest

from training import (
    Recorder,
    assert_equal,
    counted,
    gradient,
    mean,
    nbytes,
    numbers,
    process_sets,
    rotated,
    total,
    zeros,
)

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.fixture(params=["shm", "mpi"], ids="backend={}".format)
def hvd(request, hvd):
    hvd.shutdown()
    hvd.init(config={"backend": request.param})
    return hvd


# ---- R1: reduce_method and op ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "is_sum"),
    [
        ({}, False),
        ({"op": "Average"}, False),
        ({"reduce_method": "mean"}, False),
        ({"reduce_method": "MEAN"}, False),
        ({"op": "sum"}, True),
        ({"reduce_method": "sum"}, True),
        ({"reduce_method": "Sum"}, True),
    ],
    ids=str,
)
def test_r01_sum_and_mean_of_every_rank(hvd, arguments, is_sum):
    p, rank = hvd.size(), hvd.rank()
    inner = Recorder()
    opt = hvd.DistributedOptimizer(inner, {"w": np.zeros(4)}, **arguments)
    for c in (5.0, -7.0):
        opt.grad_ready("w", np.full(4, rank + c))
        opt.step()
        average = (p - 1) / 2 + c
        assert_equal(inner.last, {"w": np.full(4, average * p if is_sum else average)})


def test_r01_op_is_accepted_as_the_constant_of_the_module(hvd):
    ranks, inner = range(hvd.size()), Recorder()
    for op, expected in ((hvd.Average, mean(0, ranks)), (hvd.Sum, total(0, ranks))):
        opt = hvd.DistributedOptimizer(inner, {"w": np.zeros(3)}, op=op)
        opt.step({"w": gradient(0, hvd.rank())})
        assert_equal(inner.last, {"w": expected})


@pytest.mark.parametrize("method", ["median", "", "summ"])
def test_r01_unknown_method_is_a_value_error_in_a_world_of_any_size(hvd, method):
    with pytest.raises(ValueError, match="average"):
        hvd.DistributedOptimizer(Recorder(), {"w": np.zeros(3)}, reduce_method=method)


def test_r01_unknown_method_on_one_rank_is_an_error_on_all_and_the_next_works(hvd):
    ranks, last = range(hvd.size()), hvd.size() - 1
    method = "median" if hvd.rank() == last else "mean"
    error = ValueError if hvd.rank() == last else hvd.HorovodInternalError
    with pytest.raises(error, match="median"):
        hvd.DistributedOptimizer(Recorder(), {"w": np.zeros(3)}, reduce_method=method)
    inner = Recorder()
    opt = hvd.DistributedOptimizer(inner, {"w": np.zeros(3)}, reduce_method="mean")
    opt.step({"w": gradient(0, hvd.rank())})
    assert_equal(inner.last, {"w": mean(0, ranks)})


def test_r01_predivide_splits_the_division_and_keeps_the_average(hvd):
    p, inner = hvd.size(), Recorder()
    large = np.float16(60000)  # the plain sum of two would overflow in this type
    opt = hvd.DistributedOptimizer(
        inner, {"w": np.zeros(3), "h": np.zeros(3, np.float16)}, gradient_predivide_factor=4.0
    )
    opt.step({"w": gradient(0, hvd.rank()), "h": np.full(3, large)})
    assert_equal(inner.last, {"w": mean(0, range(p)), "h": np.full(3, large)})


# ---- R4 and R5: fusion and the first bucket --------------------------------------------------


def buckets_of(opt):
    return [(bucket.names, bucket.nbytes) for bucket in opt.plan.buckets]


@pytest.mark.parametrize("shape", [(16,), (128, 256), (2, 64, 64)], ids=str)
@pytest.mark.parametrize("threshold", [0, 128, "100 KB", None], ids="threshold={}".format)
def test_r04_mean_of_ones_is_exactly_one_for_every_threshold(hvd, shape, threshold):
    params = zeros("abcdefghij", shape, np.float32)
    inner = Recorder()
    opt = hvd.DistributedOptimizer(inner, params, fusion_threshold=threshold)
    for _ in range(3):
        for name in params:
            opt.grad_ready(name, np.ones(shape, np.float32))
        opt.step()
        assert_equal(inner.last, {name: np.ones(shape, np.float32) for name in params})


def test_r04_threshold_zero_is_one_bucket_a_tensor(hvd):
    for arguments in ({"fusion_threshold": 0}, {"param_pack": False}, {"param_pack_thd": 0}):
        opt = hvd.DistributedOptimizer(Recorder(), zeros("abc"), **arguments)
        assert buckets_of(opt) == [(("c",), 64), (("b",), 64), (("a",), 64)]


def test_r04_a_bucket_never_exceeds_the_threshold_unless_one_tensor_does(hvd):
    sizes = {"a": 8, "b": 24, "c": 100, "d": 8, "e": 8, "f": 16, "g": 1, "h": 7}
    params = {name: np.zeros(size) for name, size in sizes.items()}
    inner = Recorder()
    opt = hvd.DistributedOptimizer(inner, params, param_pack_thd=256, first_bucket=256)
    assert buckets_of(opt) == [
        (("h", "g", "f"), 256),
        (("e", "d"), 128),
        (("c",), 832),
        (("b", "a"), 256),
    ]
    k = numbers(list(params))
    opt.step({name: gradient(k[name], hvd.rank(), 0, params[name]) for name in params})
    ranks = range(hvd.size())
    assert_equal(inner.last, {name: mean(k[name], ranks, 0, params[name]) for name in params})
    for bucket in opt.plan.buckets:
        sizes_there = [nbytes(params[name].shape, 8) for name in bucket.names]
        assert bucket.nbytes == sum(sizes_there)
        assert bucket.nbytes <= 256 or len(bucket.names) == 1


def test_r04_fusion_is_on_by_default_and_saves_collectives(hvd):
    def step_with(threshold):
        params = zeros("abcdefghij")
        opt = hvd.DistributedOptimizer(Recorder(), params, fusion_threshold=threshold)
        grads = {name: gradient(0, hvd.rank()) for name in params}
        return counted(hvd, lambda: opt.step(grads))

    is_many = hvd.size() > 1  # one rank sends nothing
    assert step_with(0)["buckets"] == 10 * is_many
    assert step_with(None)["buckets"] == 1 * is_many


def test_r05_first_bucket_is_small_and_the_others_are_not(hvd):
    params = {f"w{i}": np.zeros(128, np.float32) for i in range(12)}  # 512 bytes each
    opt = hvd.DistributedOptimizer(Recorder(), params, fusion_threshold=2560, first_bucket="1 KiB")
    assert [size for _, size in buckets_of(opt)] == [1024, 2560, 2560]
    default = hvd.DistributedOptimizer(Recorder(), {"a": np.zeros(2**17), "b": np.zeros(2**17)})
    assert buckets_of(default) == [(("b",), 2**20), (("a",), 2**20)]
    assert default.plan.first_bucket == 2**20
    assert 16 * 2**20 <= default.plan.fusion_threshold <= 64 * 2**20


def test_r05_first_bucket_is_reduced_while_the_others_are_still_computed(hvd):
    params = zeros("abc")
    ranks, inner = range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(
        inner, params, first_bucket=64, fusion_threshold=128, gradient_as_bucket_view=True
    )
    assert buckets_of(opt) == [(("c",), 64), (("b", "a"), 128)]
    opt.grads["c"][...] = gradient(2, hvd.rank())
    opt.grad_ready("c")
    expected = mean(2, ranks)
    # Any wait of the library drives the bucket; it ends when all ranks see the result.
    while not hvd.allreduce(np.int64(np.array_equal(opt.grads["c"], expected)), op=hvd.Min):
        pass
    for k, name in enumerate("ab"):
        opt.grads[name][...] = gradient(k, hvd.rank())
        opt.grad_ready(name)
    opt.step()
    assert_equal(inner.last, {name: mean(k, ranks) for k, name in enumerate("abc")})


# ---- R6: what may share a bucket -------------------------------------------------------------


def test_r06_one_model_of_many_dtypes_has_buckets_of_one_dtype_each(hvd):
    dtypes = ["f2", "f4", "f8", "i4", "i8", "c8"]
    params = {f"{name}{i}": np.zeros((2, 3), name) for i in range(3) for name in dtypes}
    inner, ranks = Recorder(), range(hvd.size())
    opt = hvd.DistributedOptimizer(inner, params)
    assert len(opt.plan.buckets) == len(dtypes)
    for bucket in opt.plan.buckets:
        assert {params[name].dtype.name for name in bucket.names} == {bucket.dtype}
    for step in range(3):  # the second and third with a plan made anew
        for k, (name, param) in enumerate(params.items()):
            opt.grad_ready(name, gradient(k, hvd.rank(), step, param))
        opt.step()
        assert_equal(
            inner.last,
            {name: mean(k, ranks, step, param) for k, (name, param) in enumerate(params.items())},
        )
    assert len(opt.plan.buckets) == len(dtypes)


def test_r06_process_sets_do_not_share_a_bucket(hvd):
    n = hvd.size()
    with process_sets(hvd, range(n), range(max(n - 1, 1))) as (world, some):
        groups = [
            {"params": zeros("ab"), "process_set": world},
            {"params": zeros("cd"), "process_set": some},
            {"params": zeros("ef"), "process_set": None},
        ]
        opt = hvd.DistributedOptimizer(Recorder(), groups)
        found = {bucket.names: bucket.ranks for bucket in opt.plan.buckets}
        alone = (
            {("b", "a", "d", "c"): (0,)}
            if n == 1
            else {
                ("b", "a"): tuple(range(n)),
                ("d", "c"): tuple(range(n - 1)),
            }
        )
        merged = {tuple(sorted(names)): ranks for names, ranks in found.items()}
        assert merged == {tuple(sorted(k)): v for k, v in alone.items()} | {("e", "f"): None}


# ---- R7: one plan, that of the lowest rank ---------------------------------------------------


def test_r07_plan_of_the_lowest_rank_is_everybodys(hvd, comm):
    names = [f"w{i}" for i in range(9)]
    k = numbers(names)
    params = {name: np.zeros(k[name] + 1) for name in rotated(names, 2 * hvd.rank())}
    inner, ranks = Recorder(), range(hvd.size())
    opt = hvd.DistributedOptimizer(inner, params, fusion_threshold=192, first_bucket=128)
    assert opt.plan.names == tuple(reversed(names))  # rank 0's registration order, backwards
    readiness = rotated(names, 4 + 3 * hvd.rank())
    for step in range(4):
        for name in readiness:
            opt.grad_ready(name, gradient(k[name], hvd.rank(), step, params[name]))
        opt.step()
        assert_equal(inner.last, {n: mean(k[n], ranks, step, params[n]) for n in names})
        # In force from the second step on: rank 0's readiness order of the first.
        decided = rotated(names, 4) if hvd.size() > 1 else list(reversed(names))
        assert opt.plan.names == tuple(decided)
        assert len(set(comm.allgather(opt.plan.digest))) == 1


def test_r07_names_that_the_lowest_rank_lacked_follow_in_registration_order(hvd):
    inner, ranks = Recorder(), range(hvd.size())
    opt = hvd.DistributedOptimizer(inner, zeros("abcdef"))
    if hvd.rank() > 0:
        opt.grad_ready("b", gradient(1, hvd.rank()))
    for name in "dfa":
        opt.grad_ready(name, gradient(ord(name) - ord("a"), hvd.rank()))
    opt.step()
    if hvd.size() > 1:
        assert opt.plan.names == ("d", "f", "a", "b", "c", "e")
    opt.step({name: gradient(k, hvd.rank()) for k, name in enumerate("abcdef")})
    assert_equal(inner.last, {name: mean(k, ranks) for k, name in enumerate("abcdef")})


def test_r07_a_step_without_announcements_decides_nothing(hvd):
    opt = hvd.DistributedOptimizer(Recorder(), zeros("abc"))
    grads = {name: gradient(0, hvd.rank()) for name in "abc"}
    opt.step(grads)
    assert opt.plan.names == ("c", "b", "a")
    for name in "bca":
        opt.grad_ready(name, grads[name])
    opt.step()
    assert opt.plan.names == (("b", "c", "a") if hvd.size() > 1 else ("c", "b", "a"))


# ---- R8: a bucket leaves when all its members are there --------------------------------------


@pytest.mark.parametrize("views", [False, True], ids="views={}".format)
def test_r08_random_readiness_orders_neither_hang_nor_mix(hvd, views):
    rank, n = hvd.rank(), hvd.size()
    rng = random.Random(f"rank {rank}")
    names = [f"w{i}" for i in range(7)]
    inner = Recorder()
    opt = hvd.DistributedOptimizer(
        inner,
        {name: np.zeros(3) for name in names},
        op=hvd.Sum,
        fusion_threshold=128,
        first_bucket=64,
        gradient_as_bucket_view=views,
    )
    base = {name: gradient(k, rank) for k, name in enumerate(names)}
    expected = {name: total(k, range(n)) for k, name in enumerate(names)}
    for step in range(250):  # a thousand with the other ways of handing in gradients
        order = names[:]
        rng.shuffle(order)
        for name in order:
            grad = base[name] + step
            if views:
                opt.grads[name][...] = grad
                opt.grad_ready(name)
            else:
                opt.grad_ready(name, grad)
                grad[:] = np.nan  # it was copied
            if rng.random() < 0.1:
                os.sched_yield()
        opt.step()
        given = inner.given.pop()
        assert sorted(given) == names
        for name in names:
            np.testing.assert_array_equal(given[name], expected[name] + n * step)


def test_r08_announcing_never_waits_for_anybody(hvd, comm):
    inner, ranks = Recorder(), range(hvd.size())
    opt = hvd.DistributedOptimizer(inner, zeros("abc"), fusion_threshold=0)
    for step in range(3):
        for turn in ranks:  # one rank after the other announces all it has
            if turn == hvd.rank():
                for k, name in enumerate("abc"):
                    opt.grad_ready(name, gradient(k, turn, step))
            comm.Barrier()
        opt.step()
        assert_equal(inner.last, {name: mean(k, ranks, step) for k, name in enumerate("abc")})


# ---- R11: slots and views --------------------------------------------------------------------


@pytest.mark.parametrize("views", [False, True], ids="views={}".format)
def test_r11_gradients_are_aligned_disjoint_contiguous_views_of_one_buffer(hvd, views):
    shapes = {"a": (3,), "b": (2, 5), "c": (), "d": (0, 4), "e": (17,), "f": (1, 1)}
    params = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    opt = hvd.DistributedOptimizer(Recorder(), params, gradient_as_bucket_view=views)
    k = numbers(list(params))
    for name in params:
        grad = gradient(k[name], hvd.rank(), 0, params[name])
        if views:
            opt.grads[name][...] = grad
            opt.grad_ready(name)
        else:
            opt.grad_ready(name, grad)
    reduced = opt.synchronize()
    ranks = range(hvd.size())
    assert_equal(reduced, {n: mean(k[n], ranks, 0, params[n]) for n in params})
    spans = []
    for name, array in reduced.items():
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert array.flags.aligned
        start = array.ctypes.data
        assert start % 64 == 0
        spans.append((start, start + array.nbytes))
        assert not np.may_share_memory(array, params[name])
        if views:
            assert start == opt.grads[name].ctypes.data
    spans = sorted(span for span in spans if span[0] != span[1])
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] - spans[0][0] == opt.plan.buckets[0].nbytes - 64 + 12  # "a" comes last
    with opt.skip_synchronize():
        opt.step()


def test_r11_offsets_count_beyond_two_to_the_31_elements(hvd):
    from hvdlite.bucket import TensorSpec, plan_buckets

    ranks = tuple(range(hvd.size()))
    sizes = {"a": 2**31 + 5, "b": 2**32 + 1, "c": 3}
    specs = [TensorSpec(name, (size,), "float16", 2, ranks) for name, size in sizes.items()]
    plan = plan_buckets(specs, "abc", fusion_threshold=2**40, first_bucket=2**40)
    assert plan.buckets[0].offsets == (0, 2**32 + 64, 2**32 + 64 + 2**33 + 64)
    assert plan.buckets[0].nbytes == 2**32 + 64 + 2**33 + 64 + 64
    assert plan.slots(ranks[-1])["c"] == (0, 2**32 + 2**33 + 128)


# ---- R17: several passes, one communication --------------------------------------------------


def test_r17_eight_passes_send_as_many_bytes_as_one(hvd):
    ranks, names = range(hvd.size()), "abc"
    inner = Recorder()

    def train(passes, passes_in_no_sync):
        opt = hvd.DistributedOptimizer(
            inner, zeros(names), backward_passes_per_step=passes, fusion_threshold=128
        )

        def one_pass(number):
            for k, name in enumerate(names):
                opt.grad_ready(name, gradient(k, hvd.rank(), number))

        def step():
            for number in range(passes_in_no_sync):
                with opt.no_sync():
                    one_pass(number)
            for number in range(passes):
                one_pass(passes_in_no_sync + number)
            opt.step()

        counts = counted(hvd, step)
        expected = {
            name: sum(mean(k, ranks, s) for s in range(passes_in_no_sync + passes))
            for k, name in enumerate(names)
        }
        assert_equal(inner.last, expected)
        return counts["bytes"], counts["collectives"], counts["buckets"], counts["steps"]

    alone = hvd.size() == 1
    assert train(1, 0) == ((0, 0, 0, 1) if alone else (192, 2, 2, 1))
    assert train(8, 0) == train(1, 0)
    assert train(1, 7) == train(1, 0)
    assert train(4, 4) == train(1, 0)
