"""Rows R9 and R13, and the rules for gradients that some rank lacks: zero, skip, error."""

import logging

import pytest

from training import Recorder, assert_equal, gradient, mean, process_sets, rotated, total, zeros

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.fixture(params=["shm", "mpi"], ids="backend={}".format)
def hvd(request, hvd):
    hvd.shutdown()
    hvd.init(config={"backend": request.param})
    return hvd


class Lines(logging.Handler):
    """Keeps the lines of hvdlite's log."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.fixture
def lines(hvd):
    handler = Lines()
    logging.getLogger("hvdlite").addHandler(handler)
    yield handler.lines
    logging.getLogger("hvdlite").removeHandler(handler)


@pytest.mark.parametrize("fused", [True, False], ids="fused={}".format)
@pytest.mark.parametrize("views", [False, True], ids="views={}".format)
def test_r09_a_gradient_of_even_ranks_only_counts_as_zeros_on_the_others(hvd, views, fused):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(
        inner,
        zeros("abcd"),
        gradient_as_bucket_view=views,
        **({} if fused else {"fusion_threshold": 0}),
    )
    for step in range(4):
        for k, name in enumerate("abcd"):
            if views:
                opt.grads[name][...] = gradient(k, rank)  # of "b" and "d" it is stale
            if name == "a" or (name == "b" and rank % 2 == 0) or (name == "c" and step % 2):
                opt.grad_ready(name, *([] if views else [gradient(k, rank)]))
        opt.step()
        expected = {"a": mean(0, ranks), "b": total(1, ranks[::2]) / len(ranks)}
        if step % 2:
            expected["c"] = mean(2, ranks)
        assert_equal(inner.last, expected)  # nobody ever had "d": it is absent


def test_r09_none_says_that_there_is_no_gradient_in_this_step(hvd):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("abc"))
    for given_to_step in (False, True):
        grads = {
            "a": None if rank else gradient(0, rank),
            "b": None,
            "c": gradient(2, rank),
        }
        if given_to_step:
            opt.step(grads)
        else:
            for name, grad in grads.items():
                opt.grad_ready(name, grad)
            with pytest.raises(ValueError, match="more often"):
                opt.grad_ready("b", gradient(1, rank))
            opt.step()
        assert_equal(inner.last, {"a": total(0, [0]) / len(ranks), "c": mean(2, ranks)})


def test_r09_a_rank_without_any_gradient_takes_part_in_the_step(hvd):
    rank, n, inner = hvd.rank(), hvd.size(), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("abc"), fusion_threshold=64)
    for idle in range(n):
        if rank != idle:
            for k, name in enumerate(rotated("abc", rank)):
                opt.grad_ready(name, gradient(k, rank))
        opt.step()
        who = [r for r in range(n) if r != idle]
        assert_equal(
            inner.last,
            {
                name: sum(gradient(rotated("abc", r).index(name), r) for r in who) / n
                for name in ("abc" if who else "")
            },
        )


def test_skip_drops_what_any_rank_lacks(hvd):
    rank, ranks, inner = hvd.rank(), range(hvd.size()), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("abc"), missing="skip")
    for step in range(3):
        opt.grad_ready("a", gradient(0, rank, step))
        if rank != len(ranks) - 1:
            opt.grad_ready("b", gradient(1, rank, step))
        if step == 1:
            opt.grad_ready("c", gradient(2, rank, step))
        opt.step()
        expected = {"a": mean(0, ranks, step)}
        if step == 1:
            expected["c"] = mean(2, ranks, step)
        assert_equal(inner.last, expected)


def test_error_names_what_is_missing_and_who_on_every_rank_and_the_next_step_works(hvd):
    rank, n, inner = hvd.rank(), hvd.size(), Recorder()
    params = zeros("abc")
    opt = hvd.DistributedOptimizer(inner, params, missing="error", fusion_threshold=64)
    last = n - 1
    for k, name in enumerate("abc"):
        if name != "b" or rank != last:
            opt.grad_ready(name, gradient(k, rank))
    with pytest.raises(hvd.MissingGradientError, match=rf"'b' on ranks \[{last}\]") as caught:
        opt.step()
    assert "'a'" not in str(caught.value)
    assert "'c'" not in str(caught.value)
    assert isinstance(caught.value, hvd.HorovodInternalError)
    with pytest.raises(hvd.MissingGradientError, match=r"'a' on ranks \[0"):
        opt.synchronize()  # of the next step, in which nobody had anything
    assert inner.given == []
    for step in range(2):
        for k, name in enumerate("abc"):
            opt.grad_ready(name, gradient(k, rank, step))
        opt.step()
        assert_equal(inner.last, {name: mean(k, range(n), step) for k, name in enumerate("abc")})
    assert opt.comm_state()["num_steps"] == 2  # the dropped steps count for nothing


@pytest.mark.parametrize("missing", ["zero", "skip", "error"])
def test_a_local_groups_missing_names_are_its_ranks_own_affair_but_for_error(hvd, missing):
    rank, n, inner = hvd.rank(), hvd.size(), Recorder()
    groups = [{"params": zeros("a")}, {"params": zeros("lm"), "process_set": None}]
    opt = hvd.DistributedOptimizer(inner, groups, missing=missing)
    opt.grad_ready("a", gradient(0, rank))
    opt.grad_ready("l", gradient(1, rank))
    if rank == 0:
        opt.grad_ready("m", gradient(2, rank))
    if missing == "error" and n > 1:
        lacking = ", ".join(map(str, range(1, n)))
        with pytest.raises(hvd.MissingGradientError, match=rf"'m' on ranks \[{lacking}\]"):
            opt.step()
        assert inner.given == []
        return
    opt.step()
    expected = {"a": mean(0, range(n)), "l": gradient(1, rank)}
    if rank == 0:
        expected["m"] = gradient(2, rank)
    assert_equal(inner.last, expected)


@pytest.mark.parametrize("missing", ["zero", "skip", "error"])
def test_presence_is_decided_over_the_set_of_the_group(hvd, missing):
    n, rank, inner = hvd.size(), hvd.rank(), Recorder()
    with process_sets(hvd, range(max(n - 1, 1)), [n - 1]) as (some, one):
        groups = [
            {"params": zeros("a")},
            {"params": zeros("bc"), "process_set": some},
            {"params": zeros("d"), "process_set": one},
        ]
        opt = hvd.DistributedOptimizer(inner, groups, missing=missing)
        ranks = some.ranks
        expected = {}
        if rank in ranks:  # all members have "b"; "c" only the first
            opt.grad_ready("b", gradient(1, rank))
            if rank == 0 or missing == "error":
                opt.grad_ready("c", gradient(2, rank))
            expected["b"] = mean(1, ranks)
            if missing == "error" or len(ranks) == 1:
                expected["c"] = mean(2, ranks)
            elif missing == "zero":
                expected["c"] = total(2, [0]) / len(ranks)
        opt.grad_ready("a", gradient(0, rank))
        expected["a"] = mean(0, range(n))
        if rank in one.ranks:
            opt.grad_ready("d", gradient(3, rank))
            expected["d"] = gradient(3, rank)
        opt.step()  # nobody minds what is not in a rank's sets
        assert_equal(inner.last, expected)


def test_r13_missing_names_are_told_once_for_each_set_of_them(hvd, lines):
    rank, inner = hvd.rank(), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros(["r13_a", "r13_b", "r13_c"]))

    def step(*names):
        for name in names:
            opt.grad_ready(name, gradient(0, rank))
        opt.step()

    for _ in range(3):
        step("r13_a")
    told = [line for line in lines if "r13_" in line]
    assert len(told) == 1
    assert f"rank {rank} had no gradient for 2 of 3 parameters: r13_b, r13_c" in told[0]
    step("r13_a", "r13_c")
    step("r13_a")
    step("r13_a", "r13_b", "r13_c")
    told = [line for line in lines if "r13_" in line]
    assert len(told) == 2
    assert "1 of 3 parameters: r13_b" in told[1]


def test_r13_every_optimizer_warns_for_itself(hvd, lines):
    """The key of the line was once the address of the reducer, which a later one may get again."""
    for number in range(1, 6):
        opt = hvd.DistributedOptimizer(Recorder(), zeros(["r13_x"]))
        opt.step()
        opt.close()
        del opt
        assert len([line for line in lines if "r13_x" in line]) == number
