"""Steps: passes, `no_sync`, `synchronize`, and how an optimizer ends."""

import contextlib
import warnings

import numpy as np
import pytest

from training import (
    Recorder,
    assert_equal,
    counted,
    gradient,
    mean,
    zeros,
)

pytestmark = pytest.mark.mpi(min_size=1)


# ---- passes and no_sync -------------------------------------------------------------------------


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
        with pytest.raises(ValueError, match=r"'a'.*more often"):
            opt.grad_ready("a", gradient(0, rank, step))
        opt.grad_ready("c", gradient(2, rank, step))
        opt.step()
        assert_equal(
            inner.last,
            {  # "b", announced inside no_sync alone, is had
                "a": sum((r + 2) * gradient(0, r, step) for r in ranks) / len(ranks),
                "b": sum((r + 1) * gradient(1, r, step) for r in ranks) / len(ranks),
                "c": mean(2, ranks, step),
            },
        )


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


# ---- synchronize and skip_synchronize -----------------------------------------------------------


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


# ---- the end ------------------------------------------------------------------------------------


def test_a_closed_optimizer_says_so(hvd):
    rank, inner = hvd.rank(), Recorder()
    with hvd.DistributedOptimizer(inner, zeros("ab")) as opt:
        opt.step({"a": gradient(0, rank)})
    plan = opt.plan
    for call in (
        lambda: opt.grad_ready("a", gradient(0, rank)),
        opt.step,
        opt.synchronize,
        opt.zero_grad,
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
