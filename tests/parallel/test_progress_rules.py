"""Nothing blocks (rule 1): waits serve every stream, and a signal handler may end any of them.

The programs differ from rank to rank in the order of their calls.  A rank that has announced its
gradients owes the others nothing more, wherever it waits.
"""

import random
import signal
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from ranks import assert_all
from training import Recorder, assert_equal, gradient, mean, process_sets, rotated, total, zeros

pytestmark = pytest.mark.mpi(min_size=2)

SOON_S = 2.0  # half a second is the promise; the machine may be busy


@pytest.fixture(params=["shm", "mpi"], ids="backend={}".format)
def hvd(request, hvd):
    hvd.shutdown()
    hvd.init(config={"backend": request.param})
    return hvd


@pytest.fixture(params=[False, True], ids="views={}".format)
def views(request):
    return request.param


class Alarm(Exception):
    """What the handler raises."""


@contextmanager
def alarm(after_s, handler=None):
    """Raise `Alarm` (or run `handler`) that many seconds after the start, if that is inside."""

    def raise_alarm(_number, _frame):
        raise Alarm

    previous = signal.signal(signal.SIGALRM, handler or raise_alarm)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def meet(comm):
    """Wait for all ranks without hvdlite."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.001)


def announce(hvd, opt, names, step, first=0):
    """Announce all gradients, the last name first, written into the views where there are some."""
    is_view = hasattr(opt, "grads")
    for k, name in reversed(list(enumerate(names, first))):
        value = gradient(k, hvd.rank(), step)
        if is_view:
            opt.grads[name][...] = value
            opt.grad_ready(name)
        else:
            opt.grad_ready(name, value)


def means(names, ranks, step, first=0):
    return {name: mean(k, ranks, step) for k, name in enumerate(names, first)}


def in_order_of_rank(hvd, *calls):
    """Make the calls in another order on every rank."""
    for call in rotated(calls, hvd.rank()):
        call()


# ---- orders of calls -------------------------------------------------------------------------


def test_bucket_then_metric_against_metric_then_bucket(hvd, views):
    ranks, inner = range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("abc"), gradient_as_bucket_view=views)
    metrics = []

    def metric():
        metrics.append(hvd.allreduce(float(hvd.rank() + step), name="loss", op=hvd.Sum))

    for step in range(5):
        announce(hvd, opt, "abc", step)
        in_order_of_rank(hvd, opt.step, metric)
        assert_equal(inner.last, means("abc", ranks, step))
        assert metrics[-1] == sum(r + step for r in ranks)


def test_a_metric_between_two_gradients_against_one_before_all(hvd):
    ranks, inner = range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("abc"), fusion_threshold=0, first_bucket=0)
    for step in range(5):
        where = (hvd.rank() + step) % 3
        for k, name in enumerate("abc"):
            if k == where:
                assert hvd.allreduce(1, name="loss", op=hvd.Sum) == hvd.size()
            opt.grad_ready(name, gradient(k, hvd.rank(), step))
        opt.step()
        assert_equal(inner.last, means("abc", ranks, step))


@pytest.mark.parametrize(
    "options",
    [{}, {"fusion_threshold": 0, "first_bucket": 0}, {"bcast_period": 1}, {"missing": "error"}],
    ids=lambda options: ",".join(options) or "defaults",
)
def test_step_then_barrier_against_barrier_then_step(hvd, views, options):
    ranks, inner = range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("abc"), gradient_as_bucket_view=views, **options)
    for step in range(4):
        announce(hvd, opt, "abc", step)
        in_order_of_rank(hvd, opt.step, hvd.barrier)
        assert_equal(inner.last, means("abc", ranks, step))


@pytest.mark.parametrize("world_first", [True, False])
def test_step_then_barrier_against_barrier_then_step_with_groups(hvd, views, world_first):
    # The last bucket of the plan is not everybody's, so the step record goes on its own.
    size, rank = hvd.size(), hvd.rank()
    low, high = list(range(size - 1)), list(range(1, size))
    with process_sets(hvd, low, high) as (ps_low, ps_high):
        groups = [
            {"params": zeros("ab")},
            {"params": zeros("cd"), "process_set": ps_low},
            {"params": zeros("ef"), "process_set": ps_high},
            {"params": zeros("g"), "process_set": None},
        ]
        inner = Recorder()
        opt = hvd.DistributedOptimizer(
            inner,
            groups if world_first else groups[::-1],
            gradient_as_bucket_view=views,
        )
        parts = [("ab", range(size), 0), ("cd", low, 2), ("ef", high, 4), ("g", [rank], 6)]
        for step in range(4):
            expected = {}
            for names, members, first in rotated(parts, rank):
                if rank in members:
                    announce(hvd, opt, names, step, first)
                    expected |= means(names, members, step, first)
            in_order_of_rank(hvd, opt.step, hvd.barrier)
            assert_equal(inner.last, expected)


def test_step_then_barrier_against_barrier_then_step_without_a_gradient_to_send(hvd):
    inner = Recorder()
    opt = hvd.DistributedOptimizer(
        inner, [{"params": zeros("a"), "process_set": None}], bcast_period=-1
    )
    for step in range(3):
        opt.grad_ready("a", gradient(0, hvd.rank(), step))
        in_order_of_rank(hvd, opt.step, hvd.barrier)
        assert_equal(inner.last, {"a": gradient(0, hvd.rank(), step)})


@pytest.mark.parametrize("bcast_period", [0, 2])
def test_optimizers_stepped_in_another_order_on_every_rank(hvd, views, bcast_period):
    ranks, rank = range(hvd.size()), hvd.rank()
    letters = ["abc", "de", "fghi"]
    # Parameters start apart and must be rank 0's after each broadcast.
    params = [{n: np.full(3, 100.0 * rank) for n in names} for names in letters]
    inner = [Recorder(p, lr=1.0) for p in params]
    opts = [
        hvd.DistributedOptimizer(
            i,
            p,
            gradient_as_bucket_view=views,
            bcast_period=bcast_period,
            first_bucket=0,
        )
        for i, p in zip(inner, params, strict=True)
    ]
    for step in range(6):
        for j in rotated(range(3), rank + step):
            announce(hvd, opts[j], letters[j], step, 10 * j)
        for j in rotated(range(3), 2 * rank + step):
            opts[j].step()
        for j, names in enumerate(letters):
            assert_equal(inner[j].last, means(names, ranks, step, 10 * j))
        if step == 2:  # local changes, to be undone by the broadcast before step 3's update
            for p in params:
                for array in p.values():
                    array += rank
    for p in params:
        same = hvd.allgather_object({name: array.tolist() for name, array in p.items()})
        if bcast_period:
            assert same == [same[0]] * hvd.size()
        else:
            shift = [[same[r][n][0] - same[0][n][0] for n in p] for r in ranks]
            assert shift == [[float(r)] * len(p) for r in ranks]


def test_optimizers_of_overlapping_sets_stepped_in_another_order(hvd):
    size, rank = hvd.size(), hvd.rank()
    low, high = list(range(size - 1)), list(range(1, size))
    with process_sets(hvd, low, high) as sets:
        made = []
        for names, ps in zip(["ab", "cd", "ef"], [hvd.global_process_set, *sets], strict=True):
            if rank in ps.ranks:
                inner = Recorder()
                opt = hvd.DistributedOptimizer(inner, zeros(names), process_set=ps)
                made.append((names, ps, inner, opt))
        for step in range(5):
            for names, _, _, opt in rotated(made, rank):
                announce(hvd, opt, names, step)
            for _, _, _, opt in rotated(made, rank + step):
                opt.step()
            for names, ps, inner, _ in made:
                assert_equal(inner.last, means(names, ps.ranks, step))


def test_named_calls_submitted_and_awaited_in_any_order_over_overlapping_sets(hvd):
    from hvdlite.arithmetic import Reduction
    from hvdlite.ticket import Terms, Ticket, even_segment

    size, rank, matcher = hvd.size(), hvd.rank(), hvd.current().matcher
    low, high = list(range(size - 1)), list(range(1, size))
    rng = random.Random(rank)
    with process_sets(hvd, low, high) as sets:
        for turn in range(5):
            calls = []
            for ps in (hvd.global_process_set, *sets):
                if rank not in ps.ranks:
                    continue
                for k, count in enumerate((0, 1, 100, 5000, 40_000)):  # inline, and in pieces
                    data = gradient(k, rank, turn, np.zeros(count))
                    reduction = Reduction(hvd.ReduceOp.SUM, data.dtype, len(ps.ranks))
                    segments = [even_segment(reduction, 0, data.nbytes)]
                    ticket = Ticket(
                        Terms(ps.process_set_id, ps.ranks, (("count", count),), segments=segments),
                        f"{turn}.{k}",
                        data.view(np.uint8),
                        lambda parts: parts[0],
                    )
                    calls.append((k, ps, ticket))
            rng.shuffle(calls)
            for _, _, ticket in calls:
                matcher.submit(ticket)
            rng.shuffle(calls)
            for k, ps, ticket in calls:
                expected = total(k, ps.ranks, turn, np.zeros(ticket.data.size // 8))
                np.testing.assert_array_equal(matcher.wait(ticket), expected)


def test_unnamed_calls_of_two_sets_need_no_common_order(hvd):
    size, rank = hvd.size(), hvd.rank()
    low, high = list(range(size - 1)), list(range(1, size))
    with process_sets(hvd, low, high) as (ps_low, ps_high):
        calls = [ps for ps in (ps_low, ps_high) if rank in ps.ranks]
        for turn in range(10):
            # The chain resolves itself from one end, which alternates.
            for ps in calls if turn % 2 else calls[::-1]:
                value = hvd.allreduce(float(rank + turn), op=hvd.Sum, process_set=ps)
                assert value == sum(r + turn for r in ps.ranks)


# ---- a rank that has not announced -----------------------------------------------------------


def test_a_rank_that_has_announced_half_is_waited_for_and_nothing_is_lost(hvd, comm):
    ranks, inner = range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("abcd"), fusion_threshold=0, first_bucket=0)
    last = hvd.size() - 1
    for step in range(2):
        if hvd.rank() == last:
            announce(hvd, opt, "cd", step, 2)
            with alarm(0.1), pytest.raises(Alarm):
                hvd.barrier()  # the others wait for a and b in their step()
            announce(hvd, opt, "ab", step)
            opt.step()  # the barrier that was broken off counts
        else:
            announce(hvd, opt, "abcd", step)
            opt.step()
            hvd.barrier()
        assert_equal(inner.last, means("abcd", ranks, step))
    hvd.barrier()


# ---- signals and waits -----------------------------------------------------------------------


def test_alarm_gets_out_of_step_and_the_same_step_goes_on(hvd, views, comm):
    ranks, inner = range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("abc"), gradient_as_bucket_view=views)
    for step in range(3):
        late = (step + 1) % hvd.size()
        elapsed = 0.0
        if hvd.rank() == late:
            meet(comm)
            announce(hvd, opt, "abc", step)
        else:
            announce(hvd, opt, "abc", step)
            for broken_off in (opt.step, opt.synchronize, opt.step):
                start = time.monotonic()
                with alarm(0.05), pytest.raises(Alarm):
                    broken_off()
                elapsed = max(elapsed, time.monotonic() - start)
            meet(comm)
        opt.step()
        assert len(inner.given) == step + 1
        assert_equal(inner.last, means("abc", ranks, step))
        assert_all(comm, elapsed < SOON_S, f"left a wait after {elapsed:.2f} s")


def test_alarm_gets_out_of_a_step_that_was_given_its_gradients(hvd, comm):
    ranks, rank, inner = range(hvd.size()), hvd.rank(), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("ab"))
    for step in range(2):
        grads = {name: gradient(k, rank, step) for k, name in enumerate("ab")}
        if rank == 0:
            with alarm(0.05), pytest.raises(Alarm):
                opt.step(grads)
        meet(comm)
        opt.step(grads)
        assert_equal(inner.last, means("ab", ranks, step))


@pytest.mark.parametrize("count", [1, 100_000], ids="count={}".format)
def test_alarm_gets_out_of_allreduce_and_later_calls_are_right(hvd, comm, count):
    size, rank = hvd.size(), hvd.rank()
    for turn in range(3):
        waits = turn % size
        mine = np.full(count, float(rank + turn))
        elapsed = 0.0
        if rank == waits:
            start = time.monotonic()
            with alarm(0.05), pytest.raises(Alarm):
                hvd.allreduce(mine, op=hvd.Sum)
            elapsed = time.monotonic() - start
            meet(comm)
        else:
            meet(comm)
            # The call that was broken off counts: this one meets it.
            summed = hvd.allreduce(mine, op=hvd.Sum)
            assert (summed == sum(r + turn for r in range(size))).all()
        again = hvd.allreduce(10 * mine, op=hvd.Sum)
        assert (again == sum(10 * (r + turn) for r in range(size))).all()
        assert_all(comm, elapsed < SOON_S, f"left the wait after {elapsed:.2f} s")


@pytest.mark.parametrize(
    "kind", ["barrier", "broadcast", "allgather", "allgather_object", "broadcast_object"]
)
def test_alarm_gets_out_of_other_calls_and_later_ones_are_right(hvd, comm, kind):
    size, rank, last = hvd.size(), hvd.rank(), hvd.size() - 1

    def call(value):
        if kind == "barrier":
            return hvd.barrier()
        if kind == "broadcast":
            return hvd.broadcast(np.full(9, value), last)[4]
        if kind == "allgather":
            return hvd.allgather(np.full(rank + 1, value)).tolist()
        if kind == "allgather_object":
            return hvd.allgather_object([value])
        return hvd.broadcast_object(value, last)

    def expected(first):
        values = [first + r for r in range(size)]
        return {
            "barrier": None,
            "broadcast": values[last],
            "allgather": [v for r, v in enumerate(values) for _ in range(r + 1)],
            "allgather_object": [[v] for v in values],
            "broadcast_object": values[last],
        }[kind]

    elapsed = 0.0
    if rank == 0:
        start = time.monotonic()
        with alarm(0.05), pytest.raises(Alarm):
            call(rank)
        elapsed = time.monotonic() - start
        meet(comm)
    else:
        meet(comm)
        assert call(rank) == expected(0)
    assert call(50 + rank) == expected(50)
    assert hvd.allreduce(1, op=hvd.Sum) == size
    assert_all(comm, elapsed < SOON_S, f"left the wait after {elapsed:.2f} s")


def test_handlers_run_during_every_wait(hvd, comm):
    ticks = []

    def tick(_number, _frame):
        ticks.append(time.monotonic())
        signal.setitimer(signal.ITIMER_REAL, 0.01)

    inner = Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("a"))
    for wait in (hvd.barrier, lambda: opt.step({"a": gradient(0, hvd.rank())})):
        ticks.clear()
        if hvd.rank() == 0:
            with alarm(0.01, tick):
                wait()
            assert len(ticks) >= 5
        else:
            deadline = time.monotonic() + 0.3
            while time.monotonic() < deadline:
                time.sleep(0.01)
            wait()


@pytest.mark.parametrize("seed", range(2))
def test_alarms_at_any_moment_lose_nothing_of_a_step(hvd, seed):
    size, rank = hvd.size(), hvd.rank()
    rng = random.Random(1000 * seed + rank)
    shapes = {name: np.zeros(50 * (k + 1)) for k, name in enumerate("abcdef")}
    other = {"x": np.zeros(30), "y": np.zeros(3)}
    inner = Recorder()
    opts = [
        hvd.DistributedOptimizer(inner, shapes, fusion_threshold=1000, first_bucket=0),
        hvd.DistributedOptimizer(inner, other),
    ]
    is_armed = False
    hits = 0

    def handler(_number, _frame):
        nonlocal hits
        if is_armed:
            hits += 1
            raise Alarm

    def persist(call):
        nonlocal is_armed
        while True:
            try:
                is_armed = True
                signal.setitimer(signal.ITIMER_REAL, rng.choice((2e-5, 5e-5, 1e-4, 3e-4)))
                result = call()
                is_armed = False
            except Alarm:
                continue
            finally:
                is_armed = False
            return result

    with alarm(0, handler):
        for step in range(60):
            for opt, params in zip(opts, (shapes, other), strict=True):
                for k, (name, like) in enumerate(params.items()):
                    opt.grad_ready(name, gradient(k, rank, step, like))
            for opt, params in rotated(list(zip(opts, (shapes, other), strict=True)), rank):
                got = persist(opt.synchronize)
                expected = {
                    name: mean(k, range(size), step, like)
                    for k, (name, like) in enumerate(params.items())
                }
                assert_equal(got, expected)
                with opt.skip_synchronize():
                    opt.step()
    assert hits


# ---- one caller at a time --------------------------------------------------------------------


@pytest.mark.parametrize("who", ["handler", "thread"])
def test_a_call_beside_a_wait_is_refused_before_anything_is_sent(hvd, comm, who):
    size, rank, refused = hvd.size(), hvd.rank(), []
    opt = hvd.DistributedOptimizer(Recorder(), zeros("a"))

    def beside(*_):
        calls = (
            hvd.barrier,
            lambda: hvd.allreduce(1.0),
            lambda: hvd.allreduce(1.0, name="named"),
            lambda: hvd.allgather_object(rank),
            lambda: hvd.broadcast_parameters(zeros("b")),
            lambda: hvd.DistributedOptimizer(Recorder(), zeros("c")),
            lambda: hvd.add_process_set([0]),
            lambda: opt.step({"a": np.zeros(3)}),
        )
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                refused.append(str(error))
        refused.append("end")

    def intrude():
        time.sleep(0.1)  # the others come to the barrier after half a second
        beside()

    if rank == 0:
        if who == "handler":
            with alarm(0.05, beside):
                hvd.barrier()
        else:
            thread = threading.Thread(target=intrude)
            thread.start()
            hvd.barrier()
            thread.join()
        assert refused[-1] == "end"
        assert len(refused) == 9, refused
        assert all("barrier" in text for text in refused[:-1]), refused
    else:
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            time.sleep(0.01)
        hvd.barrier()
    # All counts of unnamed calls are level still, and the optimizer has kept nothing.
    for turn in range(2):
        hvd.barrier()
        assert hvd.allreduce(float(turn), op=hvd.Sum) == size * turn
        assert hvd.allgather_object(rank) == list(range(size))
        opt.step({"a": gradient(0, rank, turn)})
        hvd.DistributedOptimizer(Recorder(), zeros("c"))
