"""`DistributedOptimizer` in a world of one: its arguments, what it passes through, `python -O`."""

import copy
import os
import subprocess
import sys
import textwrap
from contextlib import suppress

import numpy as np
import pytest

from hvdlite import Compression
from interrupts import Alarm, at_every_point
from launch import job_environment
from training import Recorder, assert_equal, gradient, zeros


def make(hvd, **arguments):
    return hvd.DistributedOptimizer(Recorder(), zeros("ab"), **arguments)


# ---- arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"op": "median"}, "median.*average"),
        ({"op": 17}, "17"),
        ({"reduce_method": "median"}, "median.*average"),
        ({"backward_passes_per_step": 0}, "int >= 1, got 0"),
        ({"backward_passes_per_step": 1.5}, "int >= 1, got 1.5"),
        ({"backward_passes_per_step": True}, "int >= 1, got True"),
        ({"gradient_predivide_factor": 0.0}, "> 0, got 0.0"),
        ({"gradient_predivide_factor": -2}, "> 0, got -2"),
        ({"gradient_predivide_factor": float("nan")}, "> 0, got nan"),
        ({"gradient_predivide_factor": float("inf")}, "> 0, got inf"),
        ({"fusion_threshold": -1}, "fusion_threshold.*-1"),
        ({"fusion_threshold": "10 parsecs"}, "fusion_threshold.*10 parsecs"),
        ({"first_bucket": "x"}, "first_bucket.*x"),
        ({"param_pack_thd": "x"}, "x"),
        ({"bcast_period": -2}, "never.*got -2"),
        ({"bcast_period": 1.0}, "never.*got 1.0"),
        ({"bcast_period": True}, "never.*got True"),
        ({"missing": "ignore"}, 'zero.*skip.*error.*"?ignore'),
        ({"divide_by": "two"}, "active.*size.*two"),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_a_value_error_that_shows_it(hvd, arguments, words):
    with pytest.raises(ValueError, match=words):
        make(hvd, **arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"op": "min"}, "Average or Sum"),
        ({"op": "max"}, "Average or Sum"),
        ({"op": "product"}, "Average or Sum"),
        ({"op": "sum", "gradient_predivide_factor": 2.0}, "op=Average only"),
        ({"op": "adasum", "gradient_predivide_factor": 2.0}, "op=Average only"),
        ({"op": "adasum", "gradient_as_bucket_view": True}, "Adasum.*views"),
        ({"compression": Compression.fp16, "gradient_as_bucket_view": True}, "view.*compression"),
        ({"op": "mean", "reduce_method": "mean"}, "alias of op"),
        ({"fusion_threshold": 5, "param_pack_thd": 5}, "aliases of fusion_threshold"),
        ({"fusion_threshold": 5, "param_pack": False}, "aliases of fusion_threshold"),
        ({"fusion_threshold": 5, "param_pack": True}, "aliases of fusion_threshold"),
        ({"param_pack": False, "param_pack_thd": 5}, "together with param_pack_thd"),
    ],
    ids=str,
)
def test_excluded_combinations_are_a_value_error(hvd, arguments, words):
    with pytest.raises(ValueError, match=words):
        make(hvd, **arguments)


@pytest.mark.parametrize(
    ("arguments", "threshold"),
    [
        ({"fusion_threshold": "64MiB"}, 64 * 2**20),
        ({"fusion_threshold": "10MB"}, 10**7),
        ({"fusion_threshold": 0}, 0),
        ({"param_pack": False}, 0),
        ({"param_pack": True, "param_pack_thd": 10 * 1024 * 1024}, 10 * 2**20),
        ({"param_pack_thd": "1 KiB"}, 1024),
        ({"param_pack": True}, 25 * 2**20),
        ({}, 25 * 2**20),
    ],
    ids=str,
)
def test_names_of_the_fusion_threshold(hvd, arguments, threshold):
    opt = make(hvd, **arguments)
    assert opt.plan.fusion_threshold == threshold
    assert len(opt.plan.buckets) == (1 if threshold else 2)


def test_thresholds_come_from_the_config_when_they_are_not_given(hvd):
    hvd.shutdown()
    hvd.init(config={"fusion_threshold": 4096, "first_bucket": "1 KiB"})
    assert (make(hvd).plan.fusion_threshold, make(hvd).plan.first_bucket) == (4096, 1024)
    opt = make(hvd, fusion_threshold=64, first_bucket=32)
    assert (opt.plan.fusion_threshold, opt.plan.first_bucket) == (64, 32)


def test_before_init_and_after_shutdown_there_is_no_optimizer(hvd):
    hvd.shutdown()
    with pytest.raises(hvd.ShutDownError, match="shut down"):
        make(hvd)
    script = """
        import hvdlite as hvd
        try:
            hvd.DistributedOptimizer(print, {})
        except hvd.NotInitializedError as error:
            assert isinstance(error, ValueError) and "hvdlite.init()" in str(error)
        else:
            raise SystemExit("no error")
    """
    assert run_python([], script) == ""


# ---- what is wrapped ---------------------------------------------------------------------------


class WithStep:
    def step(self, grads):
        return "step", grads

    def update(self, grads):
        raise AssertionError("step comes first", grads)


class WithUpdate:
    def update(self, grads):
        return "update", grads

    def __call__(self, grads):
        raise AssertionError("update comes before the call", grads)


def plain_function(grads):
    return "call", grads


@pytest.mark.parametrize(
    ("optimizer", "word"),
    [(WithStep(), "step"), (WithUpdate(), "update"), (plain_function, "call")],
)
def test_anything_that_applies_gradients_is_an_optimizer(hvd, optimizer, word):
    opt = hvd.DistributedOptimizer(optimizer, zeros("a"))
    called, grads = opt.step({"a": gradient(0, 3)})
    assert called == word
    assert_equal(grads, {"a": gradient(0, 3)})


def test_something_else_is_a_type_error_that_names_the_three_ways(hvd):
    class Odd:
        step = 3

    with pytest.raises(TypeError, match=r"step\(grads\).*update\(grads\).*callable.*got Odd"):
        hvd.DistributedOptimizer(Odd(), zeros("a"))


class Full(Recorder):
    """An optimizer with more than it needs."""

    def __init__(self, params):
        super().__init__(params, lr=0.5)
        self.betas = [0.9, 0.99]

    def with_lr(self, lr):
        self.lr = lr
        return self

    @property
    def rate(self):
        return self.lr

    @rate.setter
    def rate(self, value):
        self.lr = value


def test_every_other_attribute_is_the_wrapped_optimizers(hvd):
    inner = Full(zeros("a"))
    opt = hvd.DistributedOptimizer(inner)  # its `params` are the parameters
    assert opt.params is inner.params
    assert opt.lr == 0.5
    opt.lr = 0.25
    assert inner.lr == 0.25
    assert "lr" not in vars(opt)
    opt.betas[0] = 0.8
    assert inner.betas == [0.8, 0.99]
    opt.rate = 2.0
    assert (inner.lr, opt.rate) == (2.0, 2.0)
    opt.new = 7
    assert inner.new == 7
    assert opt.state_dict() == {"lr": 2.0, "steps": 0}
    with pytest.raises(AttributeError, match="absent"):
        opt.absent  # noqa: B018 - the access is what is tested
    assert not hasattr(opt, "absent")


def test_what_returns_the_wrapped_optimizer_returns_the_wrapper(hvd):
    inner = Full(zeros("a"))
    opt = hvd.DistributedOptimizer(inner)
    assert opt.with_lr(0.125) is opt
    assert inner.lr == 0.125

    class Chained:
        def step(self, grads):
            self.grads = grads
            return self

    chained = hvd.DistributedOptimizer(Chained(), zeros("a"))
    assert chained.step({"a": gradient(0, 0)}) is chained


@pytest.mark.parametrize("name", ["plan", "grads", "step", "synchronize", "no_sync", "close"])
def test_its_own_names_cannot_be_overwritten(hvd, name):
    opt = make(hvd)
    with pytest.raises(AttributeError, match=f"{name} belongs to DistributedOptimizer"):
        setattr(opt, name, None)


def test_looking_up_attributes_of_an_unfinished_copy_does_not_recurse(hvd):
    assert copy.copy(make(hvd)).lr == 0.0


def test_repr_names_the_wrapped_optimizer(hvd):
    assert repr(hvd.DistributedOptimizer(print, zeros("a"))) == (
        "DistributedOptimizer(<built-in function print>, 1 buckets)"
    )


# ---- without asserts, without MPI --------------------------------------------------------------


def run_python(options, script, **env):
    """Run a script in a process of its own; what it printed, if it ended well."""
    done = subprocess.run(
        [sys.executable, *options, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
        env=job_environment({"PYTHONPATH": os.pathsep.join(sys.path), **env}),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


TRAIN = """
    import numpy as np, hvdlite as hvd
    hvd.init()
    params = {"a": np.zeros(3), "b": np.zeros(2)}
    given = []
    opt = hvd.DistributedOptimizer(given.append, params, reduce_method="MEAN", bcast_period=1)
    opt.grad_ready("a", np.ones(3))
    opt.step({"b": np.full(2, 2.0)})
    if not ((given[0]["a"] == 1).all() and (given[0]["b"] == 2).all()):
        raise SystemExit(f"wrong gradients: {given}")
    for arguments in ({"reduce_method": "median"}, {"missing": "x"}, {"bcast_period": -2},
                      {"param_pack_thd": -1}, {"op": "min"}):
        try:
            hvd.DistributedOptimizer(given.append, params, **arguments)
        except ValueError:
            continue
        raise SystemExit(f"no error with {arguments}")
    for grad in (np.ones(4), np.ones(3, np.float32)):
        try:
            opt.grad_ready("a", grad)
        except ValueError:
            continue
        raise SystemExit("a wrong gradient was taken")
    hvd.barrier()
    print(hvd.stats()["collectives"], hvd.mpi_enabled())
"""


@pytest.mark.parametrize("options", [[], ["-O"]], ids=["plain", "optimized"])
def test_r01_errors_do_not_vanish_with_python_o(options):
    assert run_python(options, TRAIN).split()[0] == "0"


def test_r14_one_process_trains_where_mpi4py_is_not_installed(tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no mpi4py here')\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    assert run_python([], TRAIN, PYTHONPATH=path).split() == ["0", "False"]


def test_gradients_on_one_rank_are_a_copy_of_what_was_given(hvd):
    inner = Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("a"))
    grad = gradient(0, 1)
    opt.grad_ready("a", grad)
    reduced = opt.synchronize()
    assert not np.may_share_memory(reduced["a"], grad)
    grad[:] = 0
    with opt.skip_synchronize():
        opt.step()
    assert_equal(inner.last, {"a": gradient(0, 1)})


@pytest.mark.parametrize("period", [0, 1])
def test_an_alarm_at_every_point_of_step_applies_no_gradient_twice(hvd, period):
    def scenario(interrupter):
        applied = []
        with hvd.DistributedOptimizer(applied.append, zeros("ab"), bcast_period=period) as opt:
            for step in range(2):
                grads = {name: gradient(k, 0, step) for k, name in enumerate("ab")}
                while len(applied) == step:
                    with suppress(Alarm), interrupter:
                        opt.step(grads)
                    assert opt.comm_state()["num_steps"] == len(applied), "over, and to be applied"
                assert_equal(applied[step], grads)

    points = at_every_point(scenario, Alarm, "optimizer.py", "reducer.py")
    assert points > 30
