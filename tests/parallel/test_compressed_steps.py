"""Compression and Adasum in `DistributedOptimizer`."""

import signal

import numpy as np
import pytest

from hvdlite import Compression, Compressor
from hvdlite.adasum import adasum
from ranks import assert_all
from training import Recorder, assert_equal, gradient, needs, zeros

pytestmark = pytest.mark.mpi(min_size=1)


class Halves(Compressor):
    """Every second element; the others take its value."""

    @staticmethod
    def compress(array):
        return array.reshape(-1)[::2], (array.shape, array.size)

    @staticmethod
    def decompress(array, context):
        shape, size = context
        return np.repeat(array, 2)[:size].reshape(shape)


def pairwise_equal(k, rank, step=0, like=None):
    """A gradient of which `Halves` loses nothing."""
    grad = gradient(k, rank, step, like)
    flat = grad.reshape(-1)
    flat[1::2] = flat[: len(flat) - len(flat) % 2 : 2] if len(flat) > 1 else flat[1::2]
    return grad


# ---- compression ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["shm", "mpi"])
@pytest.mark.parametrize(
    ("compression", "exact"),
    [
        (Compression.fp16, gradient),
        pytest.param(Compression.bf16, gradient, marks=needs("ml_dtypes")),
        (Halves, pairwise_equal),
    ],
    ids=["fp16", "bf16", "own"],
)
def test_gradients_travel_compressed_and_come_back_as_they_were(hvd, backend, compression, exact):
    hvd.shutdown()
    hvd.init(config={"backend": backend})
    rank, size, inner = hvd.rank(), hvd.size(), Recorder()
    params = {
        "a": np.zeros((3, 5), np.float32),
        "b": np.zeros(4),
        "i": np.zeros(6, np.int64),
        "big": np.zeros(20_000, np.float32),
    }
    opt = hvd.DistributedOptimizer(inner, params, compression=compression, fusion_threshold=10_000)
    before = hvd.stats()["bytes"]
    for step in range(3):
        grads = {n: exact(k, rank, step, p) for k, (n, p) in enumerate(params.items())}
        for name in list(grads)[:: 1 if step else -1]:
            opt.grad_ready(name, grads[name])
        opt.step()
        expected = {}
        for k, (name, p) in enumerate(params.items()):
            total = sum(exact(k, q, step, p).astype(np.float64) for q in range(size))
            expected[name] = (total / size).astype(p.dtype)  # small numbers: exact in 16 bits too
        assert_equal(inner.last, expected)
    if size > 1:
        sent = (hvd.stats()["bytes"] - before) / 3
        assert sent < 0.6 * sum(p.nbytes for p in params.values()) + 500


def test_passes_add_up_in_full_precision_before_they_are_compressed(hvd):
    rank, size, inner = hvd.rank(), hvd.size(), Recorder()
    opt = hvd.DistributedOptimizer(
        inner, {"w": np.zeros(3)}, compression=Compression.fp16, backward_passes_per_step=3
    )
    tiny = 2.0**-12  # lost if it were added to 1 in float16
    for _ in range(2):
        for part in (1.0, tiny, -1.0):
            opt.grad_ready("w", np.full(3, part * (rank + 1)))
        reduced = opt.synchronize()["w"]
        expected = tiny * (size + 1) / 2 if size > 1 else tiny
        assert (reduced == np.float16(expected)).all()
        with opt.skip_synchronize():
            opt.step()
        with opt.no_sync():
            opt.grad_ready("w", np.full(3, 2.0))
        opt.grad_ready("w", np.full(3, 1.0))  # fewer passes than there may be
        opt.step()
        assert (inner.last["w"] == 3).all()


def test_what_was_missing_is_zero_and_what_nobody_had_is_absent(hvd):
    rank, size, inner = hvd.rank(), hvd.size(), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("abc"), compression=Halves)
    for _ in range(2):
        if rank == 0:
            opt.grad_ready("a", np.full(3, 12.0))
        opt.grad_ready("b", None)
        opt.step({"c": np.full(3, 1.0)})
        assert_equal(inner.last, {"a": np.full(3, 12.0 / size), "c": np.full(3, 1.0)})


def test_a_clipped_dict_is_what_the_optimizer_gets(hvd):
    inner = Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("a"), compression=Compression.fp16)
    opt.grad_ready("a", np.full(3, 4.0))
    reduced = opt.synchronize()
    reduced["a"] /= 2
    with opt.skip_synchronize():
        opt.step(reduced)
    assert_equal(inner.last, {"a": np.full(3, 2.0)})


@pytest.mark.mpi(min_size=2)
def test_another_compression_on_one_rank_is_a_mismatch_on_all(hvd, comm):
    error = None
    compression = Compression.fp16 if hvd.rank() == 0 else Compression.none
    try:
        hvd.DistributedOptimizer(Recorder(), zeros("a"), compression=compression)
    except hvd.MismatchError as exc:
        error = exc
    ok = error is not None and "option compression: FP16Compressor on ranks [0]" in str(error)
    assert_all(comm, ok, f"{error!r}")


# ---- Adasum --------------------------------------------------------------------------------------


class Momentum:
    """A local optimizer with a state of its own."""

    def __init__(self, params):
        self.params, self.state = params, {name: np.zeros_like(p) for name, p in params.items()}

    def step(self, grads):
        for name, grad in grads.items():
            self.state[name] = 0.5 * self.state[name] + grad
            self.params[name] -= 0.25 * self.state[name]
        return len(grads)


def start(name):
    return np.arange(4.0) + ord(name)


@pytest.mark.parametrize("announces", [False, True])
def test_adasum_combines_what_the_local_optimizers_have_changed(hvd, announces):
    rank, size = hvd.rank(), hvd.size()
    params = {name: start(name) for name in "ab"}
    opt = hvd.DistributedOptimizer(Momentum(params), params, op=hvd.Adasum)
    replicas = [{name: start(name) for name in "ab"} for _ in range(size)]  # all in one process
    locals_ = [Momentum(replica) for replica in replicas]
    rng = np.random.default_rng(3)
    for _ in range(4):
        grads = rng.normal(size=(size, 2, 4))
        mine = {name: grads[rank, k] for k, name in enumerate("ab")}
        if announces:
            for name in "ba":
                opt.grad_ready(name, mine[name])
        assert opt.step(None if announces else mine) == 2
        before = {name: replicas[0][name].copy() for name in "ab"}
        for q in range(size):
            locals_[q].step({name: grads[q, k].copy() for k, name in enumerate("ab")})
        for name in "ab":
            combined = adasum([replica[name] - before[name] for replica in replicas])
            for replica in replicas:
                replica[name][:] = before[name] + combined
            np.testing.assert_array_equal(params[name], replicas[0][name])
    assert opt.comm_state()["num_steps"] == 4


def test_adasum_adds_passes_up_and_keeps_local_groups_local(hvd):
    rank, size = hvd.rank(), hvd.size()
    shared, own = {"s": np.zeros(2)}, {"o": np.zeros(2)}
    inner = Momentum(shared | own)
    opt = hvd.DistributedOptimizer(
        inner,
        [{"params": shared}, {"params": own, "process_set": None}],
        op="adasum",
        backward_passes_per_step=2,
    )
    for _ in range(2):
        opt.grad_ready("s", np.array([2.0, 0.0]))
        opt.grad_ready("o", np.full(2, rank + 1.0))
    opt.step()
    assert_equal(shared, {"s": np.array([-1.0, 0.0])})  # equal changes: their mean
    assert_equal(own, {"o": np.full(2, -0.5 * (rank + 1))})
    opt.add_param_group({"params": {"n": np.full(2, float(rank))}})
    inner.params["n"] = np.zeros(2)
    inner.state["n"] = np.zeros(2)
    with pytest.raises(RuntimeError, match="Adasum"):
        opt.synchronize()
    with pytest.raises(ValueError, match="only op=Average has weights"):
        opt.grad_ready("s", np.zeros(2), weight=2.0)
    opt.step({"s": np.array([2.0, 0.0])})
    assert size == hvd.allreduce(1, op=hvd.Sum)


@pytest.mark.mpi(min_size=2)
def test_adasum_with_a_rank_that_has_joined_is_an_error_and_changes_nothing(hvd, comm):
    params = {"w": np.zeros(2)}
    opt = hvd.DistributedOptimizer(Momentum(params), params, op=hvd.Adasum)
    error = None
    if hvd.rank() != 0:
        try:
            opt.step({"w": np.ones(2)})
        except hvd.HorovodInternalError as exc:
            error = exc
    hvd.join()
    ok = hvd.rank() == 0 or "[0] have joined" in str(error)
    assert_all(comm, ok and not params["w"].any(), f"{error!r} {params}")
    opt.step({"w": np.ones(2)})


@pytest.mark.mpi(min_size=2)
def test_an_alarm_in_the_wait_of_an_adasum_step_loses_nothing(hvd, comm):
    class Alarm(Exception):
        pass

    def ring(*_):
        raise Alarm

    params = {"w": np.zeros(2)}
    opt = hvd.DistributedOptimizer(Momentum(params), params, op=hvd.Adasum)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        for _ in range(3):
            comm.Barrier()
            if hvd.rank() == 0:
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                try:
                    opt.step({"w": np.ones(2)})
                except Alarm:
                    opt.step()
                signal.setitimer(signal.ITIMER_REAL, 0)
            else:
                import time

                time.sleep(0.15)
                opt.step({"w": np.ones(2)})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert opt.comm_state()["num_steps"] == 3
    values = hvd.allgather_object(params["w"].tolist())
    assert all(value == values[0] for value in values)
