"""The ten defects of the system that hvdlite grew from; none may come back."""

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


def test_defect_1_a_broadcast_period_steps_from_the_first_step_on(hvd):
    """The counter of steps was used and never initialised: AttributeError at the first step."""
    rank, ranks = hvd.rank(), range(hvd.size())
    for period in (1, 2, 500):
        params = {"w": np.full(3, float(rank))}
        inner = Recorder(params, lr=1.0)
        opt = hvd.DistributedOptimizer(inner, params, bcast_period=period)
        assert opt.comm_state()["num_steps"] == 0
        for step in range(3):
            opt.step({"w": gradient(0, rank, step)})
            assert opt.comm_state()["num_steps"] == step + 1
        assert_equal(params, {"w": np.zeros(3) - sum(mean(0, ranks, step) for step in range(3))})


def test_defect_2_groups_do_not_share_a_readiness_order(hvd):
    """All groups shared one list of indices, and gradients of one were packed with another's."""
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    groups = [
        {"params": {f"a{i}": np.zeros(i + 1) for i in range(4)}},
        {"params": {f"b{i}": np.zeros(9 - i) for i in range(7)}},
    ]
    shapes = groups[0]["params"] | groups[1]["params"]
    k = numbers(list(shapes))
    opt = hvd.DistributedOptimizer(inner, groups, fusion_threshold=256, first_bucket=128)
    for step in range(4):
        for name in rotated(list(shapes), 3 + step + rank):
            opt.grad_ready(name, gradient(k[name], rank, step, shapes[name]))
        opt.step()
        assert_equal(inner.last, {n: mean(k[n], ranks, step, shapes[n]) for n in shapes})


@pytest.mark.parametrize("backend", ["shm", "mpi"], ids="backend={}".format)
def test_defect_3_plans_of_groups_and_of_optimizers_do_not_overwrite_each_other(hvd, comm, backend):
    """Every group's plan was published under the ranks of its set, the same for all of them."""
    hvd.shutdown()
    hvd.init(config={"backend": backend})
    n, rank = hvd.size(), hvd.rank()
    with process_sets(hvd, range(max(n - 1, 1))) as (some,):
        opts, inners = [], []
        for number in range(3):
            groups = [
                {"params": zeros("ab"), "process_set": some},
                {"params": zeros("cdef"[number:]), "process_set": some},
                {"params": zeros("xy")},
            ]
            inners.append(Recorder())
            opts.append(hvd.DistributedOptimizer(inners[-1], groups, fusion_threshold=64 * number))
        for step in range(3):
            for number, opt in enumerate(opts):
                mine = "ab" + "cdef"[number:] + "xy" if rank in some.ranks else "xy"
                for name in rotated(mine, number + rank + step):
                    opt.grad_ready(name, gradient(ord(name) % 11, rank, step + number))
            for number in sorted(range(3), key=lambda number: (number * (rank + 1)) % 3):
                opts[number].step()
                mine = "ab" + "cdef"[number:] + "xy" if rank in some.ranks else "xy"
                expected = {}
                for name in mine:
                    who = range(n) if name in "xy" else some.ranks
                    expected[name] = mean(ord(name) % 11, who, step + number)
                assert_equal(inners[number].last, expected)
        digests = [opt.plan.digest for opt in opts]
        assert len(set(digests)) == 3
        assert set(map(tuple, comm.allgather(digests))) == {tuple(digests)}


@pytest.mark.parametrize("missing", ["zero", "skip"])
def test_defect_4_a_bucket_whose_last_member_never_comes_is_reduced_all_the_same(hvd, missing):
    """It fired on the last member of the plan alone: without it the replicas diverged."""
    rank, ranks = hvd.rank(), range(hvd.size())
    params = zeros("abc")
    inner = Recorder(params, lr=1.0)
    opt = hvd.DistributedOptimizer(inner, params, missing=missing)
    orders = ["cba", "cb", "ab", "acb", "a", "bca"]  # the plan's last member is "a"
    for step, order in enumerate(orders):
        for name in order:
            opt.grad_ready(name, gradient(ord(name) % 7, rank, step))
        opt.step()
        assert_equal(inner.last, {name: mean(ord(name) % 7, ranks, step) for name in order})
    for name in "abc":
        np.testing.assert_array_equal(params[name], hvd.broadcast(params[name], root_rank=0))


def test_defect_5_opposite_launch_orders_neither_hang_nor_mix(hvd):
    """Nothing saw to it that all ranks launch in the same order."""
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    names = "abcdefgh"
    opt = hvd.DistributedOptimizer(inner, zeros(names), fusion_threshold=0)
    for step in range(30):
        order = names if (rank + step) % 2 else names[::-1]
        for name in order:
            opt.grad_ready(name, gradient(ord(name) % 13, rank, step))
        opt.step()
        assert_equal(inner.last, {n: mean(ord(n) % 13, ranks, step) for n in names})


def test_defect_6_a_local_group_is_legal_together_with_broadcasts(hvd):
    """`None` as a group's set ran into an assertion of the broadcast."""
    rank, ranks = hvd.rank(), range(hvd.size())
    for period in (-1, 0, 1, 2):
        shared, local = {"w": np.full(3, 1.0 + rank)}, {"v": np.full(3, 5.0 + rank)}
        inner = Recorder()
        opt = hvd.DistributedOptimizer(
            inner, [{"params": local, "process_set": None}, {"params": shared}], bcast_period=period
        )
        for step in range(3):
            opt.step({"w": gradient(0, rank, step), "v": gradient(1, rank, step)})
            assert_equal(inner.last, {"w": mean(0, ranks, step), "v": gradient(1, rank, step)})
        assert_equal(local, {"v": np.full(3, 5.0 + rank)})
        assert_equal(shared, {"w": np.full(3, 1.0 + (rank if period == -1 else 0))})


def test_defect_7_messages_name_the_argument_at_fault_and_sets_compare_by_their_ranks(hvd):
    """The message on a wrong device told the type of another argument; sets compared by a text."""
    for wrong in (5, "0,1", [0]):
        words = f"process_set must be a ProcessSet, got {type(wrong).__name__}"
        with pytest.raises(TypeError, match=words):
            hvd.DistributedOptimizer(Recorder(), zeros("a"), process_set=wrong)
    with pytest.raises(TypeError, match=r"optimizer must have step.*update.*callable.*got int"):
        hvd.DistributedOptimizer(5, zeros("a"))
    assert hvd.ProcessSet([1, 0]) == hvd.ProcessSet([0, 1])
    assert hvd.ProcessSet([1, 0]) != hvd.ProcessSet([10])
    assert hvd.ProcessSet([0]) != "0"
    assert len({hvd.ProcessSet([2, 1]), hvd.ProcessSet([1, 2])}) == 1


def test_defect_8_half_floats_do_not_overflow_and_integers_truncate_as_told(hvd):
    """Sums were made in the type of the storage."""
    rank, n, inner = hvd.rank(), hvd.size(), Recorder()
    params = {
        "large": np.zeros(3, np.float16),
        "small": np.zeros(3, np.float16),
        "whole": np.zeros(3, np.int8),
        "below": np.zeros(3, np.int64),
    }
    opt = hvd.DistributedOptimizer(inner, params)
    for _ in range(2):
        opt.step(
            {
                "large": np.full(3, 40000, np.float16),
                "below": np.full(3, -3 * rank - 1),
                "small": np.full(3, 2048 if rank == 0 else 1, np.float16),
                "whole": np.full(3, 7 + rank, np.int8),
            }
        )
        assert_equal(
            inner.last,
            {
                "large": np.full(3, 40000, np.float16),
                "small": np.full(3, np.float32(2048 + n - 1) / np.float32(n), np.float16),
                "whole": np.full(3, (7 * n + n * (n - 1) // 2) // n, np.int8),
                "below": np.full(3, -((3 * n * (n - 1) // 2 + n) // n)),  # toward zero
            },
        )


def test_defect_9_meeting_again_and_again_is_harmless(hvd):
    """A server on an open port met the ranks, and a second barrier of its kind did not."""
    n = hvd.size()
    context = hvd.init()
    for number in range(20):
        hvd.barrier()
        assert hvd.init() is context
        assert hvd.allgather_object(number) == [number] * n


def test_defect_10_accumulation_communicates_once(hvd):
    """Every micro-batch was reduced."""
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("ab"), op=hvd.Sum)

    def micro_batches(count):
        for number in range(count - 1):
            with opt.no_sync():
                for k, name in enumerate("ab"):
                    opt.grad_ready(name, gradient(k, rank, number))
        for k, name in enumerate("ab"):
            opt.grad_ready(name, gradient(k, rank, count - 1))
        opt.step()
        assert_equal(
            inner.last,
            {
                name: sum(total(k, ranks, number) for number in range(count))
                for k, name in enumerate("ab")
            },
        )

    once = counted(hvd, lambda: micro_batches(1))
    assert counted(hvd, lambda: micro_batches(5)) == once
    assert once["collectives"] == (hvd.size() > 1)
