"""Steps: passes, `no_sync`, `synchronize`, weights, plans that are pinned, the end of an optimizer."""

import contextlib
import warnings

import numpy as np
import pytest
from training import Recorder, assert_equal, counted, gradient, mean, process_sets, rotated, zeros

pytestmark = pytest.mark.mpi(min_size=1)


# ---- passes and no_sync ------------------------------------------------------------------------


def test_ranks_may_differ_in_their_number_of_passes(hvd):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(
        inner, zeros("ab"), backward_passes_per_step=3, fusion_threshold=0
    )
    for step in range(4):
        passes = {r: {"a": (r + step) % 4, "b": (r + 2 * step) % 3 + 1} for r in ranks}
        for number in range(3):
            for k, name in enumerate("ab"):
                if number < passes[rank][name]:
                    opt.grad_ready(name, gradient(k, rank, number))
        opt.step()
        expected = {}
        for k, name in enumerate("ab"):
            if any(passes[r][name] for r in ranks):
                expected[name] = sum(
                    (gradient(k, r, number) for r in ranks for number in range(passes[r][name])),
                    np.zeros(3),
                ) / len(ranks)
        assert_equal(inner.last, expected)


def test_no_sync_communicates_nothing_and_its_gradients_count(hvd):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("abc"), fusion_threshold=0)
    for step in range(3):

        def accumulate(step=step):
            with opt.no_sync():
                for number in range(rank + 1):
                    opt.grad_ready("a", gradient(0, rank, step))
                    opt.grad_ready("b", gradient(1, rank, step))
                    if number == 0:
                        opt.grad_ready("c", None)

        assert set(counted(hvd, accumulate).values()) == {0}
        opt.grad_ready("a", gradient(0, rank, step))
        with pytest.raises(ValueError, match="'a'.*more often"):
            opt.grad_ready("a", gradient(0, rank, step))
        opt.grad_ready("c", gradient(2, rank, step))
        opt.step()
        assert_equal(inner.last, {  # "b", announced inside no_sync alone, is had
            "a": sum((r + 2) * gradient(0, r, step) for r in ranks) / len(ranks),
            "b": sum((r + 1) * gradient(1, r, step) for r in ranks) / len(ranks),
            "c": mean(2, ranks, step),
        })


def test_no_sync_on_some_ranks_alone_is_fine(hvd):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("ab"))
    for step in range(3):
        with opt.no_sync() if rank % 2 else contextlib.nullcontext():
            opt.grad_ready("a", gradient(0, rank, step))
        opt.grad_ready("b", gradient(1, rank, step))
        opt.step()
        assert_equal(inner.last, {name: mean(k, ranks, step) for k, name in enumerate("ab")})


def test_no_end_of_a_step_inside_no_sync(hvd):
    opt = hvd.DistributedOptimizer(Recorder(), zeros("a"))
    with opt.no_sync():
        with pytest.raises(RuntimeError, match="inside no_sync"):
            opt.step({"a": gradient(0, hvd.rank())})
        with pytest.raises(RuntimeError, match="inside no_sync"):
            opt.synchronize()
        with pytest.raises(RuntimeError, match="inside no_sync"), opt.no_sync():
            pass
    opt.step()
    assert opt._wrapped.last == {}  # the refused step stored nothing


# ---- synchronize and skip_synchronize ----------------------------------------------------------


def test_clip_between_synchronize_and_step(hvd):
    rank, ranks = hvd.rank(), range(hvd.size())
    params = zeros("ab")
    inner = Recorder(params, lr=1.0)
    opt = hvd.DistributedOptimizer(inner, params)
    clipped = zeros("ab")
    for step in range(3):
        for k, name in enumerate("ab"):
            opt.grad_ready(name, gradient(k, rank, step))
        reduced = opt.synchronize()
        for k, name in enumerate("ab"):
            np.clip(reduced[name], 0, 20 + k, out=reduced[name])
            clipped[name] -= np.clip(mean(k, ranks, step), 0, 20 + k)
        with opt.skip_synchronize():
            assert opt.step() == step + 1
        assert_equal(params, clipped)


def test_step_after_synchronize_applies_reduces_nothing_again_and_warns_once(hvd):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("a"))
    for step in range(3):
        opt.grad_ready("a", gradient(0, rank, step))
        reduced = opt.synchronize()
        reduced["a"] += 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            counts = counted(hvd, opt.step)
        assert len(caught) == (step == 0)
        assert all("skip_synchronize" in str(warning.message) for warning in caught)
        assert counts["collectives"] == counts["bytes"] == 0
        assert_equal(inner.last, {"a": mean(0, ranks, step) + 1})


def test_a_failed_step_does_not_swallow_that_warning(hvd):
    opt = hvd.DistributedOptimizer(Recorder(), zeros("a"), missing="error")
    with pytest.raises(hvd.MissingGradientError):
        opt.step()
    opt.grad_ready("a", gradient(0, hvd.rank()))
    opt.synchronize()
    with pytest.warns(UserWarning, match="after synchronize"):
        opt.step()


def test_what_belongs_to_the_next_step_is_refused_between_synchronize_and_step(hvd):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    for views in (False, True):
        opt = hvd.DistributedOptimizer(inner, zeros("ab"), gradient_as_bucket_view=views)
        opt.step({"a": gradient(0, rank)})
        opt.grad_ready("a", gradient(0, rank, 1))
        opt.synchronize()
        for name in "ab":
            with pytest.raises(RuntimeError, match="synchronized"):
                opt.grad_ready(name, gradient(0, rank))
        with opt.skip_synchronize():
            opt.step()
        assert_equal(inner.last, {"a": mean(0, ranks, 1)})
        opt.step({"b": gradient(1, rank)})  # and the next one works
        assert_equal(inner.last, {"b": mean(1, ranks)})


def test_skip_synchronize_needs_a_synchronize_and_is_not_nested(hvd):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("a"))
    opt.grad_ready("a", gradient(0, rank))
    with opt.skip_synchronize():
        with pytest.raises(RuntimeError, match="synchronize"):
            opt.step()
        with pytest.raises(RuntimeError, match="skip_synchronize"), opt.skip_synchronize():
            pass
    opt.step()
    assert_equal(inner.last, {"a": mean(0, ranks)})


def test_the_dict_of_synchronize_may_be_given_to_step(hvd):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("ab"))
    for step in range(3):
        if rank == 0:
            opt.grad_ready("b", gradient(1, rank, step))
        opt.grad_ready("a", gradient(0, rank, step))
        reduced = opt.synchronize()
        with opt.skip_synchronize():
            opt.step(reduced)
        assert_equal(inner.last, {"a": mean(0, ranks, step), "b": mean(1, [0], step) / len(ranks)})


def test_an_error_of_the_wrapped_optimizer_ends_the_step(hvd):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()

    def update(grads):
        inner.step(grads)
        if len(inner.given) == 1:
            raise FloatingPointError("too steep")

    opt = hvd.DistributedOptimizer(update, zeros("a"))
    with pytest.raises(FloatingPointError):
        opt.step({"a": gradient(0, rank)})
    opt.step({"a": gradient(0, rank, 1)})
    assert_equal(inner.last, {"a": mean(0, ranks, 1)})


# ---- weights -----------------------------------------------------------------------------------


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
    opt = hvd.DistributedOptimizer(
        inner, params, fusion_threshold=0, gradient_as_bucket_view=views
    )
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
        assert_equal(inner.last, {
            name: mean(k, range(n - 1), step) for k, name in enumerate("ab" if n > 1 else "")
        })


def test_weights_of_sum_zero_are_as_had_by_none(hvd):
    n, rank, inner = hvd.size(), hvd.rank(), Recorder()
    with process_sets(hvd, [n - 1]) as (one,):
        groups = [
            {"params": zeros("a")}, {"params": zeros("b"), "process_set": one},
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


# ---- plans that are pinned ---------------------------------------------------------------------


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


# ---- the end -----------------------------------------------------------------------------------


def test_a_closed_optimizer_says_so(hvd):
    rank, inner = hvd.rank(), Recorder()
    with hvd.DistributedOptimizer(inner, zeros("ab")) as opt:
        opt.step({"a": gradient(0, rank)})
    plan = opt.plan
    for call in (
        lambda: opt.grad_ready("a", gradient(0, rank)), opt.step, opt.synchronize, opt.zero_grad,
        lambda: opt.add_param_group({"params": zeros("c")}),
    ):
        with pytest.raises(hvd.ShutDownError, match="close"):
            call()
    opt.close()  # again
    assert opt.plan == plan
    assert opt.lr == 0.0
    assert len(inner.given) == 1


def test_shutdown_closes_every_optimizer(hvd):
    inner = Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("a"))
    hvd.shutdown()
    with pytest.raises(hvd.ShutDownError, match="shutdown"):
        opt.step({"a": np.zeros(3)})
    hvd.init()
    with pytest.raises(hvd.ShutDownError):
        opt.grad_ready("a", np.zeros(3))


def test_a_dropped_optimizers_grad_ready_says_what_happened(hvd):
    ready = hvd.DistributedOptimizer(Recorder(), zeros("a")).grad_ready
    with pytest.raises(hvd.ShutDownError, match="dropped"):
        ready("a", np.zeros(3))


@pytest.mark.parametrize("backend", ["shm", "mpi"], ids="backend={}".format)
@pytest.mark.parametrize("how", ["close", "drop"])
def test_who_waits_for_a_closed_optimizer_is_told(hvd, backend, how):
    hvd.shutdown()
    hvd.init(config={"backend": backend})
    rank, n = hvd.rank(), hvd.size()
    opt = hvd.DistributedOptimizer(Recorder(), zeros("a"))
    opt.step({"a": gradient(0, rank)})
    if rank == n - 1 and how == "close":
        opt.close()
    elif rank == n - 1:
        del opt
    else:
        opt.grad_ready("a", gradient(0, rank))
        with pytest.raises(hvd.RankFailedError, match=rf"\[{n - 1}\].*closed or dropped"):
            opt.step()
    hvd.barrier()
    again = Recorder()
    opt = hvd.DistributedOptimizer(again, zeros("a"))
    opt.step({"a": gradient(0, rank)})
    assert_equal(again.last, {"a": mean(0, range(n))})


# ---- N ranks are as good as one ----------------------------------------------------------------


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
    batches = [(rng.standard_normal((batch, 5)), rng.standard_normal((batch, 2))) for _ in range(40)]
    alone = network(0)
    serial = Momentum(alone)
    params = network(rank)  # different: rank 0's are broadcast
    opt = hvd.DistributedOptimizer(
        Momentum(params), params, fusion_threshold=256, first_bucket=64,
        gradient_as_bucket_view=views, backward_passes_per_step=passes,
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
