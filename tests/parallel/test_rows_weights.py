"""Weights, plans that are pinned, and N ranks against one."""

import numpy as np
import pytest

from training import (
    Recorder,
    assert_equal,
    gradient,
    mean,
    process_sets,
    rotated,
    zeros,
)

pytestmark = pytest.mark.mpi(min_size=1)


# ---- weights ------------------------------------------------------------------------------------


def weights_of(n):
    """Different weights whose sum is a power of two, so that dividing by it is exact."""
    weights = [float(r + 1) for r in range(n - 1)]
    return [*weights, 2.0 ** (int(sum(weights)).bit_length() + 1) - sum(weights)]


@pytest.mark.parametrize("backend", ["shm", "mpi"], ids="backend={}".format)
@pytest.mark.parametrize("views", [False, True], ids="views={}".format)
def test_weights_make_the_gradient_of_the_joint_batch(hvd, backend, views):
    hvd.shutdown()
    hvd.init(config={"backend": backend})
    rank, n, inner = hvd.rank(), hvd.size(), Recorder()
    params = {"f": np.zeros(3), "h": np.zeros(3, np.float16), "i": np.zeros(3, np.int32)}
    opt = hvd.DistributedOptimizer(inner, params, fusion_threshold=0, gradient_as_bucket_view=views)
    for step in range(4):
        weights = rotated(weights_of(n), step)
        if step == 3:
            weights = [1.0] * n
        grads = {name: gradient(k, rank, step, params[name]) for k, name in enumerate(params)}
        if step % 2:
            opt.step(grads, weight=weights[rank])
        else:
            first, *others = rotated(list(grads), step)
            opt.grad_ready(first, grads[first], weight=weights[rank])
            for name in others:
                opt.grad_ready(name, grads[name])
            opt.step()
        joint = {}
        for k, name in enumerate(params):
            parts = [weights[r] * gradient(k, r, step, params[name]) for r in range(n)]
            joint[name] = (sum(parts) / sum(weights)).astype(params[name].dtype)
        assert_equal(inner.last, joint)


def test_unequal_batches_end_as_one_batch_does(hvd):
    rank, n, inner = hvd.rank(), hvd.size(), Recorder()
    data = np.random.default_rng(3).standard_normal((8 * n, 3))
    cuts = [0, *(5 * (r + 1) + r for r in range(n - 1)), 8 * n]
    mine = data[cuts[rank] : cuts[rank + 1]]
    opt = hvd.DistributedOptimizer(inner, zeros("w"))
    opt.step({"w": mine.mean(axis=0)}, weight=len(mine))
    np.testing.assert_allclose(inner.last["w"], data.mean(axis=0), rtol=1e-13, atol=1e-15)


def test_a_rank_of_weight_zero_counts_for_nothing_not_even_its_nan(hvd):
    rank, n, inner = hvd.rank(), hvd.size(), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("ab"), fusion_threshold=64)
    idle = n - 1
    for step in range(3):
        for k, name in enumerate("ab"):
            grad = gradient(k, rank, step) if rank != idle else np.full(3, np.nan)
            opt.grad_ready(name, grad, **({} if k else {"weight": float(rank != idle)}))
        opt.step()
        # With one rank nobody is left: as had by none.
        assert_equal(
            inner.last,
            {name: mean(k, range(n - 1), step) for k, name in enumerate("ab" if n > 1 else "")},
        )


def test_weights_of_sum_zero_are_as_had_by_none(hvd):
    n, rank, inner = hvd.size(), hvd.rank(), Recorder()
    with process_sets(hvd, [n - 1]) as (one,):
        groups = [
            {"params": zeros("a")},
            {"params": zeros("b"), "process_set": one},
            {"params": zeros("l"), "process_set": None},
        ]
        opt = hvd.DistributedOptimizer(inner, groups)
        mine = "abl" if rank in one.ranks else "al"
        grads = {name: gradient(ord(name) % 5, rank) for name in mine}
        opt.step(grads, weight=0.0)
        assert_equal(inner.last, {"l": grads["l"]})  # a local group has no weights
        opt.step(grads, weight=float(rank != n - 1) if n > 1 else 1.0)
        who = range(n - 1) if n > 1 else [0]
        expected = {"a": mean(ord("a") % 5, who), "l": grads["l"]}
        if n == 1:
            expected["b"] = grads["b"]
        assert_equal(inner.last, expected)  # "b" is of the last rank alone, which had weight 0


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), -0.5])
def test_a_weight_that_is_no_finite_number_from_zero_on_is_refused(hvd, weight):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("a"))
    with pytest.raises(ValueError, match="weight"):
        opt.grad_ready("a", gradient(0, rank), weight=weight)
    with pytest.raises(ValueError, match="weight"):
        opt.step({"a": gradient(0, rank)}, weight=weight)
    opt.step({"a": gradient(0, rank, 1)})
    assert_equal(inner.last, {"a": mean(0, ranks, 1)})


def test_a_weight_goes_with_the_first_gradient_and_stays(hvd):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("ab"))
    for step in range(3):
        opt.grad_ready("a", gradient(0, rank, step), weight=2.0)
        with pytest.raises(ValueError, match="weight"):
            opt.grad_ready("b", gradient(1, rank, step), weight=3.0)
        with pytest.raises(ValueError, match="weight"):
            opt.step({"b": gradient(1, rank, step)}, weight=3.0)
        opt.step({"b": gradient(1, rank, step)})
        assert_equal(inner.last, {name: mean(k, ranks, step) for k, name in enumerate("ab")})
        opt.grad_ready("a", gradient(0, rank, step))
        with pytest.raises(ValueError, match="weight"):
            opt.grad_ready("b", gradient(1, rank, step), weight=1.0)
        opt.step()
    total = hvd.DistributedOptimizer(inner, zeros("a"), op=hvd.Sum)
    with pytest.raises(ValueError, match="Average"):
        total.grad_ready("a", gradient(0, rank), weight=1.0)
    total.step()


# ---- plans that are pinned ----------------------------------------------------------------------


def announce(opt, hvd, order, step):
    for name in order:
        opt.grad_ready(name, gradient(ord(name) - ord("a"), hvd.rank(), step))
    opt.step()


@pytest.mark.parametrize("views", [False, True], ids="views={}".format)
def test_a_plan_is_saved_loaded_and_pinned(hvd, tmp_path, views):
    ranks, inner = range(hvd.size()), Recorder()
    options = {"fusion_threshold": 128, "first_bucket": 64, "gradient_as_bucket_view": views}
    first = hvd.DistributedOptimizer(inner, zeros("abcdef"), **options)
    announce(first, hvd, "cafebd", 0)
    path = tmp_path / "plan.json"  # each rank its own
    first.plan.save(path)
    assert hvd.Plan.load(path) == first.plan
    for plan in (path, str(path), first.plan):
        opt = hvd.DistributedOptimizer(inner, zeros("abcdef"), plan=plan, **options)
        for step in range(3):
            announce(opt, hvd, rotated("bdface", step + hvd.rank()), step)
            assert_equal(inner.last, {n: mean(k, ranks, step) for k, n in enumerate("abcdef")})
            assert opt.plan == first.plan  # other readiness orders do not change it
    text = str(first.plan)
    assert "3 buckets" in text or "4 buckets" in text
    assert "6 gradients" in text


def test_a_plan_for_other_parameters_or_other_ranks_is_refused_on_all(hvd, tmp_path):
    rank, n = hvd.rank(), hvd.size()
    plan = hvd.DistributedOptimizer(Recorder(), zeros("ab")).plan
    for params in (zeros("a"), zeros("abc"), zeros("ab", (4, 4)), zeros("ab", dtype="f4")):
        with pytest.raises(hvd.ConfigError, match="plan"):
            hvd.DistributedOptimizer(Recorder(), params, plan=plan)
    if n > 1:
        other = hvd.DistributedOptimizer(Recorder(), zeros("ab"), fusion_threshold=0).plan
        with pytest.raises(hvd.MismatchError, match="option plan"):
            hvd.DistributedOptimizer(Recorder(), zeros("ab"), plan=plan if rank else other)
        with process_sets(hvd, [n - 1]) as (one,):
            if rank == n - 1:
                with pytest.raises(hvd.ConfigError, match="plan"):
                    hvd.DistributedOptimizer(Recorder(), zeros("ab"), plan=plan, process_set=one)
    broken = tmp_path / "plan.json"
    for text in ("no plan", "[]", "{}"):
        broken.write_text(text)
        with pytest.raises(hvd.ConfigError, match="plan"):
            hvd.DistributedOptimizer(Recorder(), zeros("ab"), plan=broken)
    own = FileNotFoundError if rank == n - 1 else hvd.HorovodInternalError
    path = tmp_path / "absent" if rank == n - 1 else plan
    with pytest.raises(own, match="absent"):
        hvd.DistributedOptimizer(Recorder(), zeros("ab"), plan=path)


# ---- N ranks are as good as one -----------------------------------------------------------------


def loss_gradients(params, x, y):
    """A network with one hidden layer and a mean squared error, by hand."""
    hidden = np.tanh(x @ params["w1"] + params["b1"])
    error = hidden @ params["w2"] + params["b2"] - y
    scale = 2 / error.size
    yield "w2", scale * hidden.T @ error
    yield "b2", scale * error.sum(axis=0)
    back = scale * (error @ params["w2"].T) * (1 - hidden**2)
    yield "w1", x.T @ back
    yield "b1", back.sum(axis=0)


class Momentum:
    """Stochastic gradient descent with momentum."""

    def __init__(self, params):
        self.params = params
        self.velocity = {name: np.zeros_like(array) for name, array in params.items()}

    def update(self, grads):
        for name, grad in grads.items():
            self.velocity[name] *= 0.9
            self.velocity[name] += grad
            self.params[name] -= 0.05 * self.velocity[name]


def network(seed):
    rng = np.random.default_rng(seed)
    shapes = {"w1": (5, 8), "b1": (8,), "w2": (8, 2), "b2": (2,)}
    return {name: rng.standard_normal(shape) / 2 for name, shape in shapes.items()}


@pytest.mark.parametrize("backend", ["shm", "mpi"], ids="backend={}".format)
@pytest.mark.parametrize("views", [False, True], ids="views={}".format)
@pytest.mark.parametrize("passes", [1, 3], ids="passes={}".format)
def test_n_ranks_with_a_share_of_each_batch_end_where_one_with_all_of_it_does(
    hvd, backend, views, passes
):
    hvd.shutdown()
    hvd.init(config={"backend": backend})
    rank, n = hvd.rank(), hvd.size()
    batch = 12 * n
    rng = np.random.default_rng(11)
    shapes = (batch, 5), (batch, 2)
    batches = [tuple(map(rng.standard_normal, shapes)) for _ in range(40)]
    alone = network(0)
    serial = Momentum(alone)
    params = network(rank)  # different: rank 0's are broadcast
    opt = hvd.DistributedOptimizer(
        Momentum(params),
        params,
        fusion_threshold=256,
        first_bucket=64,
        gradient_as_bucket_view=views,
        backward_passes_per_step=passes,
    )
    for x, y in batches:
        serial.update(dict(loss_gradients(alone, x, y)))
        mine = slice(rank, None, n)
        opt.zero_grad()
        for number in range(passes):
            part = slice(number, None, passes)
            for name, grad in loss_gradients(params, x[mine][part], y[mine][part]):
                if views:
                    opt.grads[name] += grad / passes
                    opt.grad_ready(name)
                else:
                    opt.grad_ready(name, grad / passes)
        opt.step()
    for name, array in alone.items():
        np.testing.assert_allclose(params[name], array, rtol=1e-11, atol=1e-13, err_msg=name)
