"""A mistake of one rank is an error on all, or its alone and nothing is stored (rule 6).

After each of them all ranks go on together: counts of unnamed calls are level, sums are right.
"""

import re
from contextlib import suppress

import numpy as np
import pytest

from hvdlite import Compression, Compressor
from ranks import assert_all
from training import Recorder, assert_equal, gradient, mean, zeros

pytestmark = pytest.mark.mpi(min_size=2)


class Unpicklable:
    def __reduce__(self):
        raise ArithmeticError("this does not pickle")


class Failing:
    """An iterable that breaks off."""

    def __iter__(self):
        yield "a", np.zeros(3)
        raise LookupError("the checkpoint is broken")


def read_only():
    array = np.zeros(3)
    array.flags.writeable = False
    return array


class FailingMapping(dict):
    def items(self):
        raise LookupError("the checkpoint is broken")


@pytest.fixture
def hvd(hvd_on_each_backend):
    return hvd_on_each_backend


def params():
    return {"a": np.zeros(3), "b": np.zeros((2, 2), np.float32)}


def goes_on(hvd):
    """Whether the next calls of each kind work."""
    ranks, rank = range(hvd.size()), hvd.rank()
    assert hvd.allreduce(rank + 1, op=hvd.Sum) == sum(r + 1 for r in ranks)
    assert hvd.allgather_object(rank) == list(ranks)
    assert hvd.broadcast_object(rank, root_rank=hvd.size() - 1) == hvd.size() - 1
    assert hvd.average_metrics({"m": rank}) == {"m": (hvd.size() - 1) / 2}
    assert hvd.allgather(np.array([rank])).tolist() == list(ranks)
    assert hvd.broadcast(np.array([rank]), 0).tolist() == [0]
    hvd.broadcast_parameters(zeros("p"))
    hvd.barrier()
    inner = Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("w"))
    opt.step({"w": gradient(0, rank)})
    assert_equal(inner.last, {"w": mean(0, ranks)})


def raised(call):
    """The exception that a call raises; None if it raises none."""
    try:
        call()
    except Exception as error:
        return error
    return None


# What the last rank passes in place of what the others do; which error it gets, or MISMATCH.
MISMATCH = "MismatchError"
OPTIMIZERS = {
    "parameters None of an optimizer without": ((len, None), {}, TypeError),
    "not an optimizer": ((3, params()), {}, TypeError),
    "missing=": ((Recorder(), params()), {"missing": "maybe"}, ValueError),
    "op=Max": ((Recorder(), params()), {"op": "max"}, ValueError),
    "op=Sum": ((Recorder(), params()), {"op": "sum"}, MISMATCH),
    "op=17": ((Recorder(), params()), {"op": 17}, ValueError),
    "op=median": ((Recorder(), params()), {"op": "median"}, ValueError),
    "op=Adasum": ((Recorder(), {"i": np.zeros(3, int)}), {"op": "Adasum"}, TypeError),
    "compression=fp16": (
        (Recorder(), params()),
        {"compression": Compression.fp16, "gradient_as_bucket_view": True},
        ValueError,
    ),
    "compression=broken": (
        (Recorder(), params()),
        {"compression": Compressor},
        NotImplementedError,
    ),
    "compression=zip": ((Recorder(), params()), {"compression": "zip"}, TypeError),
    "passes=0": ((Recorder(), params()), {"backward_passes_per_step": 0}, ValueError),
    "passes=True": ((Recorder(), params()), {"backward_passes_per_step": True}, ValueError),
    "passes=2": ((Recorder(), params()), {"backward_passes_per_step": 2}, MISMATCH),
    "predivide=x": (
        (Recorder(), params()),
        {"gradient_predivide_factor": "x"},
        (ValueError, TypeError),
    ),
    "predivide=None": (
        (Recorder(), params()),
        {"gradient_predivide_factor": None},
        (ValueError, TypeError),
    ),
    "predivide=0": ((Recorder(), params()), {"gradient_predivide_factor": 0}, ValueError),
    "predivide=nan": (
        (Recorder(), params()),
        {"gradient_predivide_factor": float("nan")},
        ValueError,
    ),
    "predivide=2": ((Recorder(), params()), {"gradient_predivide_factor": 2.0}, MISMATCH),
    "threshold unit": ((Recorder(), params()), {"fusion_threshold": "12 parsecs"}, ValueError),
    "threshold<0": ((Recorder(), params()), {"fusion_threshold": -1}, ValueError),
    "threshold=1": ((Recorder(), params()), {"fusion_threshold": 1}, MISMATCH),
    "first_bucket=1": ((Recorder(), params()), {"first_bucket": 1}, MISMATCH),
    "alias of op": ((Recorder(), params()), {"op": "sum", "reduce_method": "sum"}, ValueError),
    "alias of threshold": (
        (Recorder(), params()),
        {"fusion_threshold": 1, "param_pack_thd": 1},
        ValueError,
    ),
    "param_pack": ((Recorder(), params()), {"param_pack": False, "param_pack_thd": 1}, ValueError),
    "name twice": ((Recorder(), [("a", np.zeros(3)), ("a", np.zeros(3))]), {}, ValueError),
    "set": ((Recorder(), {"a", "b"}), {}, TypeError),
    "arrays only": ((Recorder(), [np.zeros(3)]), {}, TypeError),
    "lists": ((Recorder(), {"a": [1, 2, 3], "b": 3}), {}, TypeError),
    "read-only": ((Recorder(), params() | {"a": read_only()}), {}, ValueError),
    "objects": ((Recorder(), params() | {"a": np.zeros(3, object)}), {}, TypeError),
    "texts": ((Recorder(), params() | {"a": np.array(["x"])}), {}, TypeError),
    "Average of bool": ((Recorder(), params() | {"a": np.zeros(3, bool)}), {}, TypeError),
    "other shape": ((Recorder(), params() | {"a": np.zeros(4)}), {}, MISMATCH),
    "other dtype": ((Recorder(), params() | {"a": np.zeros(3, np.int32)}), {}, MISMATCH),
    "one more": ((Recorder(), params() | {"c": np.zeros(3)}), {}, MISMATCH),
    "one less": ((Recorder(), {"a": np.zeros(3)}), {}, MISMATCH),
    "none": ((Recorder(), {}), {}, MISMATCH),
    "strided": ((Recorder(), params() | {"a": np.zeros(6)[::2]}), {}, ValueError),
    "name no str": ((Recorder(), {1: np.zeros(3)}), {}, TypeError),
    "group without params": ((Recorder(), [{"parameters": params()}]), {}, TypeError),
    "group no mapping": ((Recorder(), [{"params": params()}, 17]), {}, TypeError),
    "local group": ((Recorder(), [{"params": params(), "process_set": None}]), {}, MISMATCH),
    "group of a text": ((Recorder(), [{"params": params(), "process_set": "all"}]), {}, TypeError),
    "int": ((Recorder(), 17), {}, TypeError),
    "text": ((Recorder(), "abc"), {}, TypeError),
    "bcast_period=-2": ((Recorder(), params()), {"bcast_period": -2}, ValueError),
    "bcast_period=3": ((Recorder(), params()), {"bcast_period": 3}, MISMATCH),
    "divide_by=": ((Recorder(), params()), {"divide_by": "two"}, ValueError),
    "divide_by=size": ((Recorder(), params()), {"divide_by": "size"}, MISMATCH),
    "plan absent": ((Recorder(), params()), {"plan": "/nonexistent"}, OSError),
    "plan=3": ((Recorder(), params()), {"plan": 3}, (TypeError, ValueError)),
    "views": ((Recorder(), params()), {"gradient_as_bucket_view": True}, MISMATCH),
    "failing iterator": ((Recorder(), Failing()), {}, LookupError),
    "failing mapping": ((Recorder(), FailingMapping(a=np.zeros(3))), {}, LookupError),
}


def assert_told(hvd, comm, error, expected):
    """The last rank got its own error, the others one that quotes it; or all the same mismatch."""
    if expected == MISMATCH:
        ok = type(error) is hvd.MismatchError
        assert_all(comm, ok, f"{error!r}")
        assert len(set(comm.allgather(str(error)))) == 1
        return
    own = hvd.HvdliteError if expected == "HvdliteError" else expected
    last = hvd.size() - 1
    is_own = comm.rank == last
    quoted = comm.bcast(str(error)[:40], last)
    ok = (
        isinstance(error, own)
        if is_own
        else (
            type(error) is hvd.HorovodInternalError
            and quoted in str(error)
            and f"rank {last}" in str(error)
        )
    )
    assert_all(comm, ok, f"{error!r}, where rank {last} has {quoted!r}")


@pytest.mark.parametrize("mistake", OPTIMIZERS)
def test_an_optimizer_that_one_rank_gets_wrong_is_an_error_on_all(hvd, comm, mistake):
    args, options, expected = OPTIMIZERS[mistake]
    if hvd.rank() != hvd.size() - 1:
        args, options = (Recorder(), params()), {}
    error = raised(lambda: hvd.DistributedOptimizer(*args, **options))
    assert_told(hvd, comm, error, expected)
    goes_on(hvd)


GROUPS = {
    "taken": ({"params": {"a": np.zeros(3)}}, ValueError),
    "no group": ([1, 2], TypeError),
    "other": ({"params": {"d": np.zeros(3)}}, MISMATCH),
    "none": ({"params": {}}, MISMATCH),
    "read-only": ({"params": {"c": read_only()}}, ValueError),
    "failing": ({"params": Failing()}, LookupError),
}


@pytest.mark.parametrize("mistake", GROUPS)
def test_a_group_that_one_rank_gets_wrong_is_an_error_on_all(hvd, comm, mistake):
    ranks, rank, inner = range(hvd.size()), hvd.rank(), Recorder()
    opt = hvd.DistributedOptimizer(inner, params())
    group, expected = GROUPS[mistake]
    if rank != hvd.size() - 1:
        group = {"params": {"c": np.zeros(3)}}
    assert_told(hvd, comm, raised(lambda: opt.add_param_group(group)), expected)
    opt.add_param_group({"params": {"c": np.zeros(3)}})  # the optimizer is as it was before
    like = {**params(), "c": np.zeros(3)}
    opt.step({name: gradient(k, rank, 0, array) for k, (name, array) in enumerate(like.items())})
    assert_equal(inner.last, {n: mean(k, ranks, 0, a) for k, (n, a) in enumerate(like.items())})
    goes_on(hvd)


SETS = {
    "there already": (lambda hvd: hvd.global_process_set, ValueError),
    "beyond the world": (lambda hvd: [hvd.size()], ValueError),
    "negative": ([-1], ValueError),
    "twice": ([0, 0], ValueError),
    "empty": ([], ValueError),
    "text": ("ab", TypeError),
    "float": ([0.0], TypeError),
    "None": (None, TypeError),
    "int": (5, TypeError),
    "other": ([1], MISMATCH),
    "failing": (Failing(), LookupError),
}


@pytest.mark.parametrize("mistake", SETS)
def test_a_process_set_that_one_rank_gets_wrong_is_an_error_on_all(hvd, comm, mistake):
    wrong, expected = SETS[mistake]
    is_last = hvd.rank() == hvd.size() - 1
    ranks = wrong(hvd) if callable(wrong) else wrong
    if not is_last:
        ranks = [0]
    assert_told(hvd, comm, raised(lambda: hvd.add_process_set(ranks)), expected)
    ps = hvd.add_process_set([0])
    other = hvd.global_process_set if is_last else ps
    assert_told(hvd, comm, raised(lambda: hvd.remove_process_set(other)), MISMATCH)
    if hvd.rank() == 0:
        assert hvd.allreduce(2.0, process_set=ps) == 2.0
    assert hvd.remove_process_set(ps)
    goes_on(hvd)


OBJECTS = {
    "params read-only": ("broadcast_parameters", ({"a": read_only()},), {}, ValueError),
    "params of objects": ("broadcast_parameters", ({"a": np.zeros(3, object)},), {}, TypeError),
    "params None": ("broadcast_parameters", (None,), {}, TypeError),
    "params text": ("broadcast_parameters", ("a",), {}, TypeError),
    "params failing": ("broadcast_parameters", (Failing(),), {}, LookupError),
    "params failing mapping": ("broadcast_parameters", (FailingMapping(),), {}, LookupError),
    "params other": ("broadcast_parameters", ({"b": np.zeros(3)},), {}, MISMATCH),
    "params shape": ("broadcast_parameters", ({"a": np.zeros(2)},), {}, MISMATCH),
    "params root": ("broadcast_parameters", ({"a": np.zeros(3)}, 1), {}, MISMATCH),
    "params root absent": ("broadcast_parameters", ({"a": np.zeros(3)}, 99), {}, ValueError),
    "params root text": ("broadcast_parameters", ({"a": np.zeros(3)}, "0"), {}, TypeError),
    "gathered object": ("allgather_object", (Unpicklable(),), {}, ArithmeticError),
    "object's root": ("broadcast_object", (1, 1), {}, MISMATCH),
    "object's root absent": ("broadcast_object", (1, 99), {}, ValueError),
    "metrics text": ("average_metrics", ({"a": "x"},), {}, TypeError),
    "metrics array": ("average_metrics", ({"a": np.zeros(2)},), {}, TypeError),
    "metrics int": ("average_metrics", (3,), {}, TypeError),
    "metrics other": ("average_metrics", ({"b": 1.0},), {}, MISMATCH),
}
RIGHT_OBJECTS = {
    "broadcast_parameters": lambda: ({"a": np.zeros(3)},),
    "allgather_object": lambda: (1,),
    "broadcast_object": lambda: (1,),
    "average_metrics": lambda: ({"a": 1.0},),
}


@pytest.mark.parametrize("mistake", OBJECTS)
def test_objects_that_one_rank_gets_wrong_are_an_error_on_all(hvd, comm, mistake):
    verb, args, options, expected = OBJECTS[mistake]
    if hvd.rank() != hvd.size() - 1:
        args, options = RIGHT_OBJECTS[verb](), {}
    error = raised(lambda: getattr(hvd, verb)(*args, **options))
    assert_told(hvd, comm, error, expected)
    goes_on(hvd)


def test_an_object_of_the_root_that_does_not_pickle_is_an_error_on_all(hvd, comm):
    last = hvd.size() - 1
    obj = Unpicklable() if hvd.rank() == last else None
    error = raised(lambda: hvd.broadcast_object(obj, root_rank=last))
    assert_told(hvd, comm, error, ArithmeticError)
    goes_on(hvd)


MISMATCHES = {
    "allreduce dtype": ("allreduce", (np.zeros(3, np.float32),), {}),
    "allreduce shape": ("allreduce", (np.zeros(4),), {}),
    "allreduce dimensions": ("allreduce", (np.zeros((3, 1)),), {}),
    "allreduce op": ("allreduce", (np.zeros(3),), {"op": "sum"}),
    "allreduce prescale": ("allreduce", (np.zeros(3),), {"prescale_factor": 2}),
    "allreduce postscale": ("allreduce", (np.zeros(3),), {"postscale_factor": 2}),
    "allgather dtype": ("allgather", (np.zeros(3, np.int64),), {}),
    "allgather rest": ("allgather", (np.zeros((3, 1)),), {}),
    "broadcast root": ("broadcast", (np.zeros(3), 1), {}),
    "broadcast shape": ("broadcast", (np.zeros(2), 0), {}),
    "broadcast dtype": ("broadcast", (np.zeros(3, np.int8), 0), {}),
}


@pytest.mark.parametrize("is_named", [False, True], ids="named={}".format)
@pytest.mark.parametrize("mistake", MISMATCHES)
def test_a_call_that_one_rank_makes_differently_is_the_same_error_on_all(
    hvd, comm, mistake, is_named
):
    verb, args, options = MISMATCHES[mistake]
    if hvd.rank() != hvd.size() - 1:
        args, options = (np.zeros(3),) if verb != "broadcast" else (np.zeros(3), 0), {}
    name = {"name": "loss"} if is_named else {}
    error = raised(lambda: getattr(hvd, verb)(*args, **options, **name))
    assert_told(hvd, comm, error, MISMATCH)
    assert verb in str(error)
    assert not is_named or "'loss'" in str(error)
    assert hvd.allreduce(2.0, name="loss") == 2.0
    goes_on(hvd)


def test_kinds_of_one_name_that_differ_are_the_same_error_on_all(hvd, comm):
    last = hvd.size() - 1
    verb = hvd.allgather if hvd.rank() == last else hvd.allreduce
    error = raised(lambda: verb(np.zeros(3), name="x"))
    words = f"ranks? .*: allreduce; rank {last}: allgather"
    ok = type(error) is hvd.MismatchError and re.search(words, str(error))
    assert_all(comm, bool(ok), f"{error!r}")
    goes_on(hvd)


# What a rank sees alone: (verb, arguments, options, error, words).
ALONE = {
    "allreduce object": ("allreduce", (object(),), {}, TypeError),
    "allreduce texts": ("allreduce", (np.array(["x"]),), {}, TypeError),
    "allreduce None": ("allreduce", (None,), {}, TypeError),
    "allreduce op": ("allreduce", (1.0,), {"op": "median"}, ValueError),
    "allreduce Adasum": ("allreduce", (1,), {"op": "adasum"}, TypeError),
    "allreduce Average of bool": ("allreduce", (np.zeros(3, bool),), {}, TypeError),
    "allreduce Min of complex": ("allreduce", (np.zeros(3, complex),), {"op": "min"}, TypeError),
    "allreduce prescale": ("allreduce", (1.0,), {"prescale_factor": float("inf")}, ValueError),
    "allreduce postscale": ("allreduce", (1.0,), {"postscale_factor": "2"}, TypeError),
    "allreduce name": ("allreduce", (1.0,), {"name": 5}, (TypeError, ValueError)),
    "allreduce empty name": ("allreduce", (1.0,), {"name": ""}, ValueError),
    "allreduce inner name": ("allreduce", (1.0,), {"name": "\0replan"}, ValueError),
    "allreduce surrogate": ("allreduce", (1.0,), {"name": "\udc80"}, ValueError),
    "allreduce huge name": ("allreduce", (1.0,), {"name": "x" * 10_000}, ValueError),
    "allreduce compression": ("allreduce", (1.0,), {"compression": "fp16"}, TypeError),
    "allreduce set": ("allreduce", (1.0,), {"process_set": [0]}, TypeError),
    "allgather 0-d": ("allgather", (np.zeros(()),), {}, ValueError),
    "allgather scalar": ("allgather", (1.0,), {}, ValueError),
    "allgather objects": ("allgather", (np.zeros(3, object),), {}, TypeError),
    "broadcast root absent": ("broadcast", (1.0, 99), {}, ValueError),
    "broadcast root negative": ("broadcast", (1.0, -1), {}, ValueError),
    "broadcast root bool": ("broadcast", (1.0, True), {}, TypeError),
    "broadcast root text": ("broadcast", (1.0, "0"), {}, TypeError),
    "barrier set": ("barrier", (), {"process_set": 3}, TypeError),
    "shard tail": ("shard", (10,), {"tail": "cut"}, ValueError),
    "shard negative": ("shard", (-1,), {}, ValueError),
    "shard text": ("shard", ("abc",), {}, TypeError),
}


@pytest.mark.parametrize("mistake", ALONE)
def test_what_a_rank_sees_alone_is_its_error_alone_and_uses_up_nothing(hvd, mistake):
    verb, args, options, expected = ALONE[mistake]
    if hvd.rank() == hvd.size() - 1:
        with pytest.raises(expected, match=r"."):
            getattr(hvd, verb)(*args, **options)
    # The others have waited in their call meanwhile, which the last rank meets with its next one.
    goes_on(hvd)


@pytest.mark.mpi(min_size=3)
def test_a_set_that_a_rank_is_not_in_or_that_is_not_registered_is_its_error_alone(hvd):
    rank, last = hvd.rank(), hvd.size() - 1
    ps, foreign = hvd.add_process_set([0, 1]), hvd.ProcessSet([0, 1])
    calls = [
        lambda ps: hvd.allreduce(1.0, process_set=ps),
        lambda ps: hvd.allgather(np.zeros(3), process_set=ps),
        lambda ps: hvd.broadcast(1.0, 0, process_set=ps),
        lambda ps: hvd.barrier(process_set=ps),
        lambda ps: hvd.allgather_object(1, process_set=ps),
        lambda ps: hvd.broadcast_object(1, 0, process_set=ps),
        lambda ps: hvd.broadcast_parameters(zeros("a"), process_set=ps),
        lambda ps: hvd.average_metrics({"a": 1}, process_set=ps),
        lambda ps: hvd.shard(10, process_set=ps),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"ProcessSet\(\[0, 1\]\) is not registered"):
            call(foreign)
        if rank == last:
            with pytest.raises(ValueError, match="not a member"):
                call(ps)
        elif rank < 2:
            call(ps)
    hvd.remove_process_set(ps)
    for call in calls:
        with pytest.raises(ValueError, match="is not registered"):
            call(ps)
    with pytest.raises(ValueError, match="is not registered"):
        hvd.DistributedOptimizer(Recorder(), zeros("a"), process_set=ps)
    goes_on(hvd)


# ---- gradients -------------------------------------------------------------------------------

GRADIENTS = {
    "name": (("nowhere", np.zeros(3)), {}, KeyError),
    "shape": (("a", np.zeros(4)), {}, ValueError),
    "dtype": (("a", np.zeros(3, np.float32)), {}, ValueError),
    "list": (("a", [0.0, 0.0, 0.0]), {}, TypeError),
    "nothing": (("a",), {}, TypeError),
    "weight<0": (("a", np.zeros(3)), {"weight": -1.0}, ValueError),
    "weight nan": (("a", np.zeros(3)), {"weight": float("nan")}, ValueError),
    "weight text": (("a", np.zeros(3)), {"weight": "much"}, (TypeError, ValueError)),
}


@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.parametrize("mistake", GRADIENTS)
def test_a_gradient_that_one_rank_gets_wrong_is_its_error_alone_and_not_stored(hvd, mistake, when):
    ranks, rank, inner = range(hvd.size()), hvd.rank(), Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("abc"))
    args, options, expected = GRADIENTS[mistake]
    if when == "after" and args[0] == "a":
        expected = ValueError  # the name has had its turn

    def err():
        if rank == hvd.size() - 1:
            with pytest.raises(expected, match=r"."):
                opt.grad_ready(*args, **options)

    for step in range(2):
        for k, name in enumerate("bca"):
            if (when == "before" and k == 0) or (when == "between" and k == 1):
                err()
            opt.grad_ready(name, gradient(k, rank, step))
        if when == "after":
            if rank == 0:
                with pytest.raises(ValueError, match="more often"):
                    opt.grad_ready("b", np.zeros(3))
            err()
        opt.step()
        assert_equal(inner.last, {name: mean(k, ranks, step) for k, name in enumerate("bca")})


def test_a_wrapped_optimizer_that_raises_on_one_rank_leaves_the_next_step_usable(hvd):
    ranks, rank, given = range(hvd.size()), hvd.rank(), []

    def apply(grads):
        given.append({name: grad.copy() for name, grad in grads.items()})
        if rank == 0 and len(given) == 1:
            raise ArithmeticError("diverged")

    opt = hvd.DistributedOptimizer(apply, zeros("a"))
    for step in range(3):
        opt.grad_ready("a", gradient(0, rank, step))
        with suppress(ArithmeticError):
            opt.step()
        assert_equal(given[-1], {"a": mean(0, ranks, step)})
    goes_on(hvd)


# ---- peers that are gone ---------------------------------------------------------------------


@pytest.mark.parametrize("end", ["closed", "dropped", "dropped with gradients under way"])
def test_an_optimizer_that_one_rank_gave_up_is_named_by_the_others_and_the_job_goes_on(hvd, end):
    rank, last = hvd.rank(), hvd.size() - 1
    opt = hvd.DistributedOptimizer(Recorder(), zeros("ab"))
    grads = {"a": np.ones(3), "b": np.ones(3)}
    opt.step(grads)
    if rank == last:
        if "under way" in end:
            opt.grad_ready("a", grads["a"])
        if end == "closed":
            opt.close()
            with pytest.raises(hvd.ShutDownError, match="close"):
                opt.step(grads)
        del opt
    else:
        if "under way" in end:
            opt.grad_ready("a", grads["a"])
        with pytest.raises(hvd.RankFailedError, match=rf"\b{last}\b"):
            opt.step({"b": grads["b"]} if "under way" in end else grads)
    goes_on(hvd)


def test_a_rank_that_closes_after_the_last_step_disturbs_nobody(hvd):
    size, rank = hvd.size(), hvd.rank()
    members = list(range(1, size)) if size > 2 else [0, 1]
    sets = hvd.add_process_set(members) if size > 2 else hvd.global_process_set
    groups = [
        {"params": zeros("a")},
        {"params": {"w": np.zeros(300_000)}, "process_set": sets},
    ]
    for step in range(5):
        opt = hvd.DistributedOptimizer(
            Recorder(), groups, fusion_threshold=0, bcast_period=-1, plan=None
        )
        opt.grad_ready("a", gradient(0, rank, step))
        if rank in members:
            opt.grad_ready("w", gradient(1, rank, step, np.zeros(300_000)))
        got = opt.synchronize()
        assert (got["a"] == mean(0, range(size), step)).all()
        if rank in members:
            assert (got["w"] == mean(1, members, step, np.zeros(300_000))).all()
        opt.close()
    if size > 2:
        hvd.remove_process_set(sets)
