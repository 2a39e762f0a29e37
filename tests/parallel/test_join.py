"""Ranks with less data: `join()` in eager calls and in optimizers, and after it all are level."""

import random
import signal
import time

import numpy as np
import pytest

from ranks import assert_all
from training import Recorder, assert_equal, gradient, zeros

pytestmark = pytest.mark.mpi(min_size=1)

NUM_STEPS = (3, 6, 2, 4)  # of the ranks; rank 1 is the last where there is one


def lag(rng):
    time.sleep(rng.random() * 0.003)


def still_there(hvd, step):
    """The ranks that make this step."""
    return [q for q in range(hvd.size()) if NUM_STEPS[q] > step]


def last_of(hvd):
    return max(range(hvd.size()), key=lambda q: NUM_STEPS[q])


class Sgd:
    def __init__(self, params, lr):
        self.params, self.lr = params, lr

    def step(self, grads):
        for name, grad in grads.items():
            self.params[name] -= self.lr * grad


# ---- eager calls ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["shm", "mpi"])
@pytest.mark.parametrize("count", [5, 30_000], ids=["small", "in pieces"])
def test_sums_run_over_the_ranks_that_are_left(hvd, backend, count):
    hvd.shutdown()
    hvd.init(config={"backend": backend})
    rank, size, rng = hvd.rank(), hvd.size(), random.Random(hvd.rank())
    for _ in range(2):
        for step in range(NUM_STEPS[rank]):
            lag(rng)
            left = still_there(hvd, step)
            x = np.full(count, rank + 1.0)
            expected = sum(q + 1.0 for q in left)
            assert (hvd.allreduce(x, op=hvd.Sum, name="named") == expected).all()
            handle = hvd.allreduce_async(x, op=hvd.Sum)
            both = hvd.grouped_allreduce([x, np.int64(rank + 1)], op=hvd.Sum)
            assert (both[0] == expected).all()
            assert both[1] == expected
            np.testing.assert_allclose(hvd.allreduce(x), expected / size)  # by the full size
            hvd.barrier()
            assert (handle.wait() == expected).all()
        hvd.join()
        # Calls without a name meet again, though some ranks have made fewer.
        assert hvd.allreduce(1, op=hvd.Sum) == size
        assert hvd.allgather_object(rank) == list(range(size))


@pytest.mark.mpi(min_size=2)
def test_the_rank_that_came_last_is_returned_on_all(hvd):
    rank, size = hvd.rank(), hvd.size()
    for last in range(size):
        while rank == last and hvd.allreduce(1, op=hvd.Sum) > 1:
            pass  # some other rank has not joined
        with hvd.Join() as joined:
            assert joined.last_rank == -1
        assert joined.last_rank == last


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "call",
    [
        lambda hvd: hvd.allgather(np.zeros(3), name="x"),
        lambda hvd: hvd.broadcast(1.0, 0, name="x"),
        lambda hvd: hvd.alltoall(np.zeros((hvd.size(), 2)), name="x"),
        lambda hvd: hvd.reducescatter(np.zeros(8), name="x"),
        lambda hvd: hvd.allreduce(1.0, op=hvd.Max, name="x"),
        lambda hvd: hvd.allreduce(1.0, op=hvd.Adasum, name="x"),
        lambda hvd: hvd.allgather_object(1, name="x"),
        lambda hvd: hvd.broadcast_parameters(zeros("a")),
        lambda hvd: hvd.add_process_set([0]),
        lambda hvd: hvd.DistributedOptimizer(Recorder(), zeros("a")),
    ],
    ids=lambda call: call.__code__.co_names[0],
)
def test_what_needs_every_rank_is_an_error_on_those_that_are_left(hvd, comm, call):
    error = None
    if hvd.rank() != 0:
        try:
            call(hvd)
        except Exception as exc:
            error = exc
    hvd.join()
    text = str(error)
    ok = hvd.rank() == 0 or (
        isinstance(error, hvd.HorovodInternalError) and "[0] have joined" in text
    )
    assert_all(comm, ok, f"{error!r}")
    assert hvd.allreduce(1, op=hvd.Sum) == hvd.size()


@pytest.mark.mpi(min_size=3)
def test_a_set_goes_on_without_its_member_that_has_joined(hvd):
    ps = hvd.add_process_set([0, 1])
    if hvd.rank() == 1:
        for k in range(3):
            assert hvd.allreduce(np.full(4, 2.0), op=hvd.Sum, process_set=ps)[0] == 2
            assert hvd.allreduce(np.full(4, 2.0), process_set=ps, name=f"{k}")[0] == 1
    assert hvd.join() in range(hvd.size())
    if hvd.rank() < 2:
        assert hvd.allreduce(1, op=hvd.Sum, process_set=ps) == 2
    hvd.remove_process_set(ps)


# ---- optimizers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("divide_by", ["active", "size"])
def test_an_average_is_over_the_ranks_that_still_train(hvd, views, divide_by):
    rank, size, rng = hvd.rank(), hvd.size(), random.Random(hvd.rank())
    params = {"a": np.zeros(3), "i": np.zeros(2, np.int64), "big": np.zeros(40_000)}
    inner = Recorder()
    opt = hvd.DistributedOptimizer(
        inner, params, gradient_as_bucket_view=views, divide_by=divide_by, fusion_threshold=100_000
    )
    for _ in range(2):
        for step in range(NUM_STEPS[rank]):
            left = still_there(hvd, step)
            grads = {name: gradient(k, rank, step, p) for k, (name, p) in enumerate(params.items())}
            for name, grad in grads.items():
                lag(rng)
                if views:
                    opt.grads[name][...] = grad
                    opt.grad_ready(name)
                else:
                    opt.grad_ready(name, grad)
            opt.step()
            divisor = len(left) if divide_by == "active" else size
            for k, (name, p) in enumerate(params.items()):
                total = sum(gradient(k, q, step, p) for q in left)
                expected = total // divisor if p.dtype.kind == "i" else total / divisor
                np.testing.assert_allclose(inner.last[name], expected, rtol=1e-15)
        assert hvd.join() == last_of(hvd)


@pytest.mark.parametrize("seed", range(3))
def test_weights_after_unequal_epochs_are_those_of_one_process(hvd, seed):
    """Two optimizers that take turns, as of a GAN; the joint batch of each step, in one process."""
    rank, size, rng = hvd.rank(), hvd.size(), random.Random(100 * seed + hvd.rank())
    data = np.random.default_rng(seed).normal(size=(4, 6, 8, 5))  # rank, step, sample, feature
    order = list(NUM_STEPS)
    random.Random(seed).shuffle(order)

    def gradients(w, v, batch):
        """Of two small models that look at each other."""
        error = batch @ w - np.tanh(batch @ v)
        return batch.T @ error / len(batch), -batch.T @ (
            error * (1 - np.tanh(batch @ v) ** 2)
        ) / len(batch)

    def train(steps_of, batches, reduce_w, reduce_v):
        w, v = np.ones(5), np.full(5, 0.5)
        for epoch in range(2):
            for step in range(steps_of(epoch)):
                grads = gradients(w, v, batches(step))
                reduce_w(w, grads[0])
                reduce_v(v, gradients(w, v, batches(step))[1])
        return w, v

    params_w, params_v = {"w": np.ones(5)}, {"w": np.full(5, 0.5)}  # the same names on purpose
    opt_w = hvd.DistributedOptimizer(Sgd(params_w, 0.1), params_w)
    opt_v = hvd.DistributedOptimizer(Sgd(params_v, 0.05), params_v)
    for _ in range(2):
        for step in range(order[rank]):
            lag(rng)
            batch = data[rank, step]
            opt_w.grad_ready("w", gradients(params_w["w"], params_v["w"], batch)[0])
            opt_w.step()
            lag(rng)
            opt_v.step({"w": gradients(params_w["w"], params_v["w"], batch)[1]})
        last = hvd.join()
        for params in (params_w, params_v):
            hvd.broadcast_parameters(params, root_rank=last)

    def joint(step):
        return np.concatenate([data[q, step] for q in range(size) if order[q] > step])

    def sgd(lr):
        def apply(param, grad):
            param -= lr * grad

        return apply

    w, v = train(lambda _: max(order[:size]), joint, sgd(0.1), sgd(0.05))
    np.testing.assert_allclose(params_w["w"], w, rtol=1e-12)
    np.testing.assert_allclose(params_v["w"], v, rtol=1e-12)


@pytest.mark.parametrize("missing", ["zero", "skip", "error"])
def test_a_rank_that_has_joined_lacks_no_gradient(hvd, missing):
    rank, inner = hvd.rank(), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("ab"), missing=missing)
    for step in range(NUM_STEPS[rank]):
        opt.step({name: gradient(k, rank, step) for k, name in enumerate("ab")})
        left = still_there(hvd, step)
        for k, name in enumerate("ab"):
            expected = sum(gradient(k, q, step) for q in left) / len(left)
            np.testing.assert_allclose(inner.last[name], expected, rtol=1e-15)
    hvd.join()


def test_steps_stay_level_and_plans_are_made_though_ranks_were_absent(hvd):
    rank, inner = hvd.rank(), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("abcd"), fusion_threshold=64, first_bucket=64)
    for epoch in range(3):
        for step in range(NUM_STEPS[rank] if epoch else (rank + 1) % 2):  # rank 1 begins absent
            for k, name in enumerate("cabd"):
                opt.grad_ready(name, gradient(k, rank, step))
            opt.step()
        hvd.join()
    opt.step({name: gradient(k, rank) for k, name in enumerate("abcd")})
    expected = {
        n: sum(gradient(k, q) for q in range(hvd.size())) / hvd.size() for k, n in enumerate("abcd")
    }
    assert_equal(inner.last, expected)
    states = hvd.allgather_object(opt.comm_state()["num_steps"])
    assert len(set(states)) == 1


@pytest.mark.mpi(min_size=2)
def test_periodic_broadcasts_are_skipped_while_a_rank_has_joined(hvd):
    rank, params = hvd.rank(), zeros("a")
    opt = hvd.DistributedOptimizer(Recorder(), params, bcast_period=2)
    for step in range(4 if rank else 1):
        params["a"][:] = rank
        opt.step({"a": gradient(0, rank, step)})
        assert (params["a"] == rank).all()
    hvd.join()
    for step in range(2):  # steps 5 and 6 of all: the broadcast comes before the update of the 6th
        params["a"][:] = rank
        opt.step({"a": gradient(0, rank, step)})
    assert (params["a"] == 0).all()


def test_join_in_the_middle_of_a_step_is_refused(hvd):
    opt = hvd.DistributedOptimizer(Recorder(), zeros("ab"))
    opt.grad_ready("a", gradient(0, hvd.rank()))
    with pytest.raises(RuntimeError, match=r"middle of a step.*step\(\)"):
        hvd.join()
    opt.synchronize()
    with pytest.raises(RuntimeError, match="middle of a step"):
        hvd.join()
    with opt.skip_synchronize():
        opt.step()
    hvd.join()


@pytest.mark.mpi(min_size=2)
def test_a_join_that_an_alarm_broke_off_goes_on_and_refuses_everything_else(hvd):
    class Alarm(Exception):
        pass

    def ring(*_):
        raise Alarm

    rank, size, inner = hvd.rank(), hvd.size(), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("a"))
    before = signal.signal(signal.SIGALRM, ring)
    try:
        if rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(Alarm):
                hvd.join()
            for call in (
                lambda: hvd.allreduce(1.0),
                lambda: opt.step({"a": gradient(0, 0)}),
                lambda: opt.grad_ready("a", gradient(0, 0)),
            ):
                with pytest.raises(RuntimeError, match=r"has joined; call join\(\) again"):
                    call()
        else:
            time.sleep(0.3)
            for step in range(20):
                opt.step({"a": gradient(0, rank, step)})
                expected = sum(gradient(0, q, step) for q in range(1, size)) / (size - 1)
                np.testing.assert_allclose(inner.last["a"], expected, rtol=1e-15)
        hvd.join()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    opt.step({"a": gradient(0, rank)})
    assert hvd.allreduce(1, op=hvd.Sum) == size
