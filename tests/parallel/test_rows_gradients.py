"""How gradients are given and handed out: DESIGN's rules for `grad_ready`, `step` and views."""

import contextlib
import threading

import ml_dtypes
import numpy as np
import pytest

from training import Recorder, assert_equal, gradient, mean, total, zeros

pytestmark = pytest.mark.mpi(min_size=1)


# ---- given -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["grad_ready", "step"])
@pytest.mark.parametrize("views", [False, True], ids="views={}".format)
def test_any_layout_and_byte_order_is_taken_read_only_too(hvd, how, views):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    params = zeros("abcd", (4, 3))
    opt = hvd.DistributedOptimizer(inner, params, gradient_as_bucket_view=views)
    for step in range(3):
        wanted = {name: gradient(k, rank, step, params[name]) for k, name in enumerate("abcd")}
        wide = np.zeros((8, 6))
        wide[1::2, ::2] = wanted["d"]
        grads = {
            "a": np.asfortranarray(wanted["a"]),
            "b": wanted["b"].astype(">f8"),
            "c": wanted["c"],
            "d": wide[1::2, ::2],
        }
        for grad in grads.values():
            grad.flags.writeable = False
        if how == "step":
            opt.step(grads)
        else:
            for name in "abcd":  # on each rank another layout for the same parameter
                opt.grad_ready(name, grads[name] if rank % 2 else wanted[name])
            opt.step()
        assert_equal(
            inner.last, {name: mean(k, ranks, step, params[name]) for k, name in enumerate("abcd")}
        )


def test_a_gradient_is_copied_at_once_and_left_alone(hvd):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("ab"))
    buffer = np.zeros(3)
    for step in range(3):
        for k, name in enumerate("ab"):
            buffer[:] = gradient(k, rank, step)
            opt.grad_ready(name, buffer)
        opt.step()
        np.testing.assert_array_equal(buffer, gradient(1, rank, step))
        assert_equal(inner.last, {name: mean(k, ranks, step) for k, name in enumerate("ab")})


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "i8"])
def test_a_scalar_is_the_gradient_of_a_0d_parameter(hvd, dtype):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(inner, {"bias": np.zeros((), dtype)})
    for step in range(3):
        opt.grad_ready("bias", np.full(3, 4 * (rank + step), dtype).sum(dtype=dtype))
        opt.step()
        expected = np.asarray(sum(12 * (r + step) for r in ranks) // len(ranks), dtype)
        assert_equal(inner.last, {"bias": expected})
    with pytest.raises(TypeError, match="float"):
        opt.grad_ready("bias", 1.0)


@pytest.mark.parametrize("views", [False, True], ids="views={}".format)
def test_bfloat16_is_summed_in_float32(hvd, views):
    rank, n, inner = hvd.rank(), hvd.size(), Recorder()
    param = np.zeros(5, ml_dtypes.bfloat16)
    opt = hvd.DistributedOptimizer(inner, {"w": param}, op=hvd.Sum, gradient_as_bucket_view=views)
    for _ in range(2):
        grad = np.full(5, 256 if rank == 0 else 1).astype(ml_dtypes.bfloat16)
        opt.step({"w": grad})
        # In bfloat16 256 + 1 is 256: of many ranks' ones nothing would be left.
        exact = np.full(5, 256 + n - 1, np.float32).astype(ml_dtypes.bfloat16)
        assert_equal(inner.last, {"w": exact})


@pytest.mark.parametrize(
    ("name", "grad", "error", "words"),
    [
        ("a", np.zeros(4), ValueError, r"\(4,\).*\(3,\)"),
        ("a", np.zeros((3, 1)), ValueError, r"\(3, 1\).*\(3,\)"),
        ("a", np.zeros(3, np.float32), ValueError, "float32.*float64"),
        ("a", np.zeros(3, np.int64), ValueError, "int64.*float64"),
        ("a", [0.0, 0.0, 0.0], TypeError, "list"),
        ("c", np.zeros(3), KeyError, "'c'"),
    ],
    ids=["shape", "dimensions", "float32", "int64", "list", "name"],
)
@pytest.mark.parametrize("how", ["grad_ready", "step"])
def test_a_bad_gradient_is_refused_and_leaves_the_step_usable(hvd, how, name, grad, error, words):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("ab"))
    for step in range(2):
        if step:
            opt.grad_ready("b", gradient(1, rank, step))
        good = {"a" if step else "b": gradient(0, rank)}
        calls = {"step": lambda g=good: opt.step(g | {name: grad})}
        with pytest.raises(error, match=words):
            calls.get(how, lambda: opt.grad_ready(name, grad))()
        opt.step({"a": gradient(0, rank, step)} | ({} if step else {"b": gradient(1, rank, step)}))
        assert_equal(inner.last, {k: mean(i, ranks, step) for i, k in enumerate("ab")})


def test_a_wrong_name_gets_a_suggestion(hvd):
    opt = hvd.DistributedOptimizer(Recorder(), zeros(["weight", "bias"]))
    with pytest.raises(KeyError, match="did you mean 'weight'"):
        opt.grad_ready("weigh", np.zeros(3))
    opt.step()


def test_too_many_announcements_are_a_value_error_at_once(hvd):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    for passes in (1, 2):
        opt = hvd.DistributedOptimizer(inner, zeros("ab"), backward_passes_per_step=passes)
        for step in range(3):
            for _ in range(passes):
                opt.grad_ready("a", gradient(0, rank, step))
            with pytest.raises(ValueError, match=r"'a'.*more often"):
                opt.grad_ready("a", gradient(0, rank, step))
            opt.grad_ready("b", gradient(1, rank, step))
            opt.step()
            assert_equal(
                inner.last, {"a": passes * mean(0, ranks, step), "b": mean(1, ranks, step)}
            )


def test_a_name_both_announced_and_given_must_be_the_same_array(hvd):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("ab"))
    for step in range(3):
        a, b = gradient(0, rank, step), gradient(1, rank, step)
        opt.grad_ready("a", a)
        with pytest.raises(ValueError, match=r"'a'.*another array"):
            opt.step({"a": a.copy(), "b": b})
        with pytest.raises(ValueError, match="'a'"):
            opt.step({"a": None, "b": b})
        opt.step({"a": a, "b": b})
        assert_equal(inner.last, {"a": mean(0, ranks, step), "b": mean(1, ranks, step)})


def test_an_array_at_the_address_of_a_freed_one_is_another_array(hvd):
    """Once the second was taken for the first, whose id() it had, and dropped in silence."""
    inner = Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("a"))
    for _ in range(5):
        opt.grad_ready("a", np.array([1.0, 1.0, 1.0]))
        with pytest.raises(ValueError, match="another array"):
            opt.step({"a": np.array([5.0, 5.0, 5.0])})
        opt.step()
        assert_equal(inner.last, {"a": np.ones(3)})


def test_step_takes_what_was_not_announced(hvd):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("abcd"), fusion_threshold=64)
    for step in range(3):
        grads = {name: gradient(k, rank, step) for k, name in enumerate("abcd")}
        for name in "abcd"[rank:]:
            opt.grad_ready(name, grads[name])
        assert opt.step(grads) == len(inner.given)
        assert_equal(inner.last, {name: mean(k, ranks, step) for k, name in enumerate("abcd")})
    with pytest.raises(TypeError, match="mapping"):
        opt.step([("a", np.zeros(3))])


class Reentrant(np.ndarray):
    """Calls something while hvdlite looks at it."""

    call = None

    @property
    def shape(self):
        if self.call is not None:
            self.call()
        return super().shape


def test_two_threads_at_once_are_a_runtime_error(hvd):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("ab"))
    for step in range(3):
        raised = []

        def second(step=step, raised=raised):
            with pytest.raises(RuntimeError, match="another thread") as caught:
                opt.grad_ready("b", gradient(1, rank, step))
            raised.append(caught.value)

        def call(second=second):
            thread = threading.Thread(target=second)
            thread.start()
            thread.join()

        grad = gradient(0, rank, step).view(Reentrant)
        grad.call = call
        opt.grad_ready("a", grad)
        grad.call = None
        assert raised
        opt.grad_ready("b", gradient(1, rank, step))
        opt.step()
        assert_equal(inner.last, {"a": mean(0, ranks, step), "b": mean(1, ranks, step)})


# ---- handed out ------------------------------------------------------------------------------


def test_synchronize_hands_out_a_new_mutable_dict_of_writable_equal_arrays(hvd, comm):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("ab"))
    earlier = None
    for step in range(3):
        given = {name: gradient(k, rank, step) for k, name in enumerate("ab")}
        for name, grad in given.items():
            opt.grad_ready(name, grad)
        reduced = opt.synchronize()
        assert opt.synchronize() is reduced
        assert type(reduced) is dict
        assert reduced is not earlier
        for k, name in enumerate("ab"):
            assert reduced[name].flags.writeable
            assert not np.may_share_memory(reduced[name], given[name])
            assert len(set(comm.allgather(reduced[name].tobytes()))) == 1
            np.testing.assert_array_equal(given[name], gradient(k, rank, step))
            reduced[name] *= rank + 1  # a result of its own on each rank
        comm.Barrier()
        reduced["c"] = np.ones(2)
        with opt.skip_synchronize():
            opt.step()
        assert_equal(
            inner.last,
            {"c": np.ones(2)}
            | {name: mean(k, ranks, step) * (rank + 1) for k, name in enumerate("ab")},
        )
        earlier = reduced


def test_poison_shows_who_keeps_an_array_too_long(hvd):
    hvd.shutdown()
    hvd.init(config={"poison_grads": True})
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    params = {"f": np.zeros(3), "i": np.zeros(3, np.int32)}
    for views in (False, True):
        opt = hvd.DistributedOptimizer(inner, params, gradient_as_bucket_view=views)
        for step in range(3):
            for k, name in enumerate("fi"):
                grad = gradient(k, rank, step, params[name])
                if views:
                    opt.grads[name][...] = grad
                    opt.grad_ready(name)
                else:
                    opt.grad_ready(name, grad)
            kept = opt.synchronize()
            expected = {n: mean(k, ranks, step, params[n]) for k, n in enumerate("fi")}
            assert_equal(kept, expected)
            with opt.skip_synchronize():
                opt.step()
            assert_equal(kept, expected)  # valid until the first gradient of the next step
            if views:
                continue
            opt.grad_ready("i", np.zeros(3, np.int32))
            assert np.isnan(kept["f"]).all()
            opt.step()


@pytest.mark.parametrize("announces", [False, True])
def test_poison_shows_a_momentum_that_was_not_copied(hvd, announces):
    hvd.shutdown()
    hvd.init(config={"poison_grads": True})
    momentum = {}

    def sgd(grads):
        for name, grad in grads.items():
            momentum[name] = 0.9 * momentum[name] + grad if name in momentum else grad

    opt = hvd.DistributedOptimizer(sgd, zeros("w"))
    for step in range(2):
        grads = {"w": gradient(0, hvd.rank(), step)}
        if announces:
            opt.grad_ready("w", grads["w"])
        opt.step(grads)
    assert np.isnan(momentum["w"]).all()


# ---- views -----------------------------------------------------------------------------------


def test_views_stay_where_they_are_when_the_plan_changes(hvd):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    params = {name: np.zeros(k + 5) for k, name in enumerate("abcdef")}
    opt = hvd.DistributedOptimizer(
        inner, params, gradient_as_bucket_view=True, fusion_threshold=192, first_bucket=64
    )
    kept = dict(opt.grads)
    assert sorted(kept) == sorted(params)
    for step in range(4):
        for name in "cafebd":
            k = ord(name) - ord("a")
            kept[name][...] = gradient(k, rank, step, params[name])
            opt.grad_ready(name)
        opt.step()
        expected = {n: mean(k, ranks, step, params[n]) for k, n in enumerate("abcdef")}
        assert_equal(inner.last, expected)
        assert_equal(kept, expected)  # the reduced gradients lie in the views
        for name, view in kept.items():
            assert opt.grads[name].ctypes.data == view.ctypes.data
    with pytest.raises(KeyError):
        opt.grads["x"]


def test_a_view_is_zero_filled_when_it_was_not_announced_never_sent_stale(hvd):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("ab"), gradient_as_bucket_view=True)
    for step in range(3):
        for k, name in enumerate("ab"):
            opt.grads[name][...] = gradient(k, rank, step)
        opt.grad_ready("a")
        if rank == 0:
            opt.grad_ready("b")
        opt.step()
        assert_equal(inner.last, {"a": mean(0, ranks, step), "b": total(1, [0], step) / len(ranks)})


def test_over_several_passes_the_loop_adds_into_its_views(hvd):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(
        inner, zeros("ab"), gradient_as_bucket_view=True, backward_passes_per_step=3
    )
    for step in range(3):
        opt.zero_grad()
        for number in range(4):
            with opt.no_sync() if number == 0 else contextlib.nullcontext():
                for k, name in enumerate("ab"):
                    opt.grads[name] += gradient(k, rank, step + number)
                    opt.grad_ready(name)
        opt.step()
        assert_equal(
            inner.last,
            {
                name: sum(mean(k, ranks, step + number) for number in range(4))
                for k, name in enumerate("ab")
            },
        )


def test_the_view_itself_may_be_given_and_another_array_is_copied_into_it(hvd):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("abc"), gradient_as_bucket_view=True)
    for step in range(3):
        opt.grads["a"][...] = gradient(0, rank, step)
        opt.grad_ready("a", opt.grads["a"])
        opt.grad_ready("b", gradient(1, rank, step))
        opt.grads["c"][...] = gradient(2, rank, step)
        opt.step({"a": opt.grads["a"], "c": opt.grads["c"]})
        assert_equal(inner.last, {name: mean(k, ranks, step) for k, name in enumerate("abc")})


def test_without_views_there_is_no_grads_and_a_gradient_must_be_given(hvd):
    opt = hvd.DistributedOptimizer(Recorder(), zeros("a"))
    with pytest.raises(AttributeError, match="gradient_as_bucket_view=True"):
        opt.grads  # noqa: B018 - the access is what is tested
    with pytest.raises(TypeError, match="gradient_as_bucket_view=True"):
        opt.grad_ready("a")
    opt.step()


def test_check_views_finds_a_slot_that_was_written_while_it_was_the_backends(hvd):
    hvd.shutdown()
    hvd.init(config={"check_views": True})
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    last = len(ranks) - 1
    params = {"a": np.zeros(3), "h": np.zeros(2, ml_dtypes.bfloat16), "z": np.zeros(())}
    opt = hvd.DistributedOptimizer(inner, params, gradient_as_bucket_view=True)
    for step in range(4):
        for k, name in enumerate(params):
            opt.grads[name][...] = gradient(k, rank, step, params[name])
            opt.grad_ready(name)
        if step % 2:
            if rank == last:
                opt.grads["a"][0] += 1
            with pytest.raises(hvd.HvdliteError) as caught:
                opt.step()
            words = "'a' was changed" if rank == last else rf"failed on ranks \[{last}\]"
            assert caught.match(words)
        else:
            opt.step()
            assert_equal(
                inner.last, {n: mean(k, ranks, step, params[n]) for k, n in enumerate(params)}
            )
    assert len(inner.given) == 2


def test_check_views_leaves_a_slot_alone_whose_passes_are_not_complete(hvd):
    hvd.shutdown()
    hvd.init(config={"check_views": True})
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(
        inner, zeros("a"), gradient_as_bucket_view=True, backward_passes_per_step=2
    )
    for step in range(2):
        opt.grads["a"][...] = 0
        with opt.no_sync():
            opt.grads["a"] += gradient(0, rank, step)
            opt.grad_ready("a")
        opt.grads["a"] += gradient(0, rank, step)
        opt.grad_ready("a")
        opt.grads["a"] += gradient(0, rank, step)  # one of two passes: it is still this rank's
        opt.step()
        assert_equal(inner.last, {"a": 3 * mean(0, ranks, step)})
