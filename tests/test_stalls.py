"""Ranks that keep others waiting: each is named, and given up if the settings say so.

Each test starts jobs of its own, by the fixture of test_faults.py.
"""

import os
import re

import pytest

from launch import launched_rank
from test_faults import PRELUDE, job

__all__ = ["job"]

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        launched_rank(os.environ) is not None, reason="a rank does not start a job of its own"
    ),
]

CHECK = {"HVDLITE_STALL_CHECK_TIME_SECONDS": "1"}
GIVE_UP = {**CHECK, "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "3"}
BACKENDS = ["shm", "mpi"]

TOOLS = (
    PRELUDE
    + """
pids = hvd.allgather_object(os.getpid())

def give_up(call):
    try:
        call()
    except hvd.CollectiveTimeoutError as exc:
        assert isinstance(exc, hvd.HorovodInternalError) and isinstance(exc, TimeoutError)
        say(f"rank {rank}: " + " / ".join(str(exc).splitlines()))
    else:
        say(f"rank {rank}: nothing happened")

def refused(call):
    try:
        call()
    except hvd.ShutDownError as exc:
        return "shutdown() and init()" in str(exc)
    return False

def until(name):
    while not (HERE / name).exists():
        time.sleep(0.01)
"""
)


def warned(ended, rank):
    """What a rank has logged, its tag taken off."""
    tag = re.compile(rf"\[hvdlite rank {rank}/\d+\] ?(.*)")
    return "\n".join(m[1] for m in map(tag.search, ended.result.stderr.splitlines()) if m)


def test_a_rank_that_never_steps_is_named_with_its_gradients_and_its_stack(job):
    ended = job(
        2,
        """
        def compute_for_ever():
            until("reported")

        class Tell(hvd_log.logging.Handler):
            def emit(self, record):
                (HERE / "reported").touch()

        big = {f"w{k}": np.zeros(1000) for k in range(4)}
        opt = hvd.DistributedOptimizer(Recorder(), big, fusion_threshold=0)
        opt.step(big)
        if rank == 0:
            hvd_log.logger.addHandler(Tell())
            opt.step(big)
        else:
            opt.grad_ready("w3", big["w3"])
            opt.grad_ready("w2", big["w2"])
            compute_for_ever()
            opt.step({name: big[name] for name in ("w0", "w1")})
        say("went on")
        """,
        prelude=TOOLS + "from hvdlite import log as hvd_log\n",
        env=CHECK,
    )
    ended.assert_code(0)
    assert ended.said == ["went on"] * 2
    text = warned(ended, 0)
    assert re.search(r"step 1 of an optimizer has waited 1\.\d s for rank 1$", text, re.M), text
    assert re.search(r"bucket \d of 4 \('w\d'\): not all gradients have come on rank 1", text), text
    assert re.search(r"rank 1 \(pid \d+\) has been in its own code for", text), text
    assert "its last call" in text
    assert "step 1 of an optimizer" in text
    assert "in compute_for_ever" in ended.result.stderr, ended.text
    assert warned(ended, 1) == ""


def test_stacks_can_be_turned_off_and_a_users_own_handler_is_left_alone(job):
    ended = job(
        2,
        """
        if rank == 0:
            hvd.barrier()
        else:
            time.sleep(2)
            hvd.barrier()
        say("went on")
        """,
        prelude="""
import os, signal, sys, time
if os.environ["HANDLED"] == "1":
    signal.signal(signal.SIGRTMAX - 3, lambda *_: os._exit(9))
"""
        + TOOLS,
        env=CHECK | {"HANDLED": "1"},
    )
    ended.assert_code(0)
    assert "has waited" in ended.result.stderr
    assert "Current thread" not in ended.result.stderr, ended.text
    ended = job(
        2,
        """
        assert signal.getsignal(signal.SIGRTMAX - 3) is signal.SIG_DFL
        if rank == 0:
            hvd.barrier()
        else:
            time.sleep(2)
            hvd.barrier()
        """,
        prelude=TOOLS,
        env=CHECK | {"HVDLITE_STALL_STACKS": "0"},
    )
    ended.assert_code(0)
    assert "has waited" in ended.result.stderr
    assert "Current thread" not in ended.result.stderr, ended.text


@pytest.mark.parametrize("backend", BACKENDS, ids="backend={}".format)
def test_different_names_are_both_told_and_given_up(job, backend):
    ended = job(
        2,
        """
        give_up(lambda: hvd.allreduce(np.ones(3), name="grad.a" if rank == 0 else "grad.b"))
        """,
        prelude=TOOLS,
        env=GIVE_UP | {"HVDLITE_BACKEND": backend},
    )
    ended.assert_code(0)
    for rank, (mine, other) in enumerate([("grad.a", "grad.b"), ("grad.b", "grad.a")]):
        error = ended.said[rank]
        assert error.startswith(f"rank {rank}: allreduce '{mine}'"), ended.text
        assert re.search(rf"\brank {1 - rank}\b", error), ended.text
        text = warned(ended, rank)
        assert f"allreduce '{mine}' has waited 1." in text, ended.text
        assert f"rank {1 - rank} has called what this rank has not: allreduce '{other}'" in text
    assert any("stall_shutdown_time_seconds=3" in line for line in ended.said), ended.text
    recent = r"error: the last collectives of this rank, \d+:"
    assert re.search(recent, ended.result.stderr), ended.text


@pytest.mark.parametrize("backend", BACKENDS, ids="backend={}".format)
def test_a_collective_of_one_rank_only_and_a_gradient_that_one_rank_lacks(job, backend):
    ended = job(
        3,
        """
        opt = hvd.DistributedOptimizer(Recorder(), {"a": np.zeros(9), "b": np.zeros(9)})
        if rank == 0:
            hvd.broadcast(np.ones(2), 0, name="only rank 0")
        opt.grad_ready("a", np.ones(9))
        if rank != 0:
            opt.grad_ready("b", np.ones(9))
            opt.step()
        """,
        prelude=TOOLS,
        env=GIVE_UP | {"HVDLITE_BACKEND": backend},
    )
    ended.assert_code(1)
    text = warned(ended, 0)
    assert "broadcast 'only rank 0' has waited 1." in text, ended.text
    assert "for ranks 1, 2" in text
    texts = warned(ended, 1) + warned(ended, 2)
    assert "step 0 of an optimizer has waited 1." in texts, ended.text
    assert "not all gradients have come on rank 0" in texts
    assert "has called what this rank has not: broadcast 'only rank 0'" in texts
    assert any("CollectiveTimeoutError" in text for _, text in ended.blocks), ended.text
    if backend == "shm":
        assert "in broadcast 'only rank 0'" in texts, ended.text
        assert re.search(r"of an optimizer has waited .*; rank 1 says more", texts), ended.text


@pytest.mark.parametrize("backend", BACKENDS, ids="backend={}".format)
def test_what_a_rank_has_open_is_told_by_those_that_wait_for_it(job, backend):
    ended = job(
        2,
        """
        opt = hvd.DistributedOptimizer(Recorder(), {"a": np.zeros(9), "b": np.zeros(9)})
        opt.grad_ready("a", np.ones(9))
        if rank == 0:
            opt.grad_ready("b", np.ones(9))
            give_up(opt.step)
        else:
            give_up(hvd.barrier)
        """,
        prelude=TOOLS,
        env=GIVE_UP | {"HVDLITE_BACKEND": backend},
    )
    ended.assert_code(0)
    text = warned(ended, 0)
    assert "bucket 0 of 1 ('b', 'a'): not all gradients have come on rank 1" in text, ended.text
    assert "has called what this rank has not: barrier" in text
    if backend == "shm":
        assert "step 0 of an optimizer is open there, without 'b'" in text, ended.text
    else:
        assert "what it did last is not known" in text, ended.text


def test_a_stopped_rank_is_named_and_given_up(job):
    ended = job(
        3,
        """
        if rank == 1:
            fault()
            os.kill(os.getpid(), signal.SIGSTOP)
        opt.step({"w": np.ones(3)})
        """,
        prelude=TOOLS,
        env=GIVE_UP,
    )
    ended.assert_code(1)
    ended.assert_within(10)
    text = warned(ended, 0) + warned(ended, 2)
    assert "step 0 of an optimizer has waited 1." in text, ended.text
    assert re.search(r"rank 1 \(pid (\d+)\) is stopped by a signal; kill -CONT \1", text), (
        ended.text
    )
    assert "asked rank 1" not in text
    assert any("CollectiveTimeoutError" in text for _, text in ended.blocks), ended.text


@pytest.mark.parametrize("backend", BACKENDS, ids="backend={}".format)
def test_a_rank_that_wakes_up_after_it_was_given_up_gets_an_error_and_all_start_again(job, backend):
    ended = job(
        3,
        """
        n = 200_000  # large enough for every path of the data
        params = {f"w{k}": np.zeros(n) for k in range(3)}
        grads = {name: np.full(n, rank + 1.0) for name in params}
        opt = hvd.DistributedOptimizer(
            Recorder(), params, fusion_threshold=0, gradient_as_bucket_view=True
        )
        opt.step(grads)
        if rank == 1:
            opt.grads["w2"][...] = grads["w2"]
            opt.grad_ready("w2")
            os.kill(os.getpid(), signal.SIGSTOP)
            give_up(lambda: opt.step({name: grads[name] for name in ("w0", "w1")}))
        else:
            give_up(lambda: opt.step(grads))
            for view in opt.grads.values():
                view.fill(np.nan)  # nobody may get this
            handle = lambda: hvd.allreduce_async(np.ones(2))
            assert refused(hvd.barrier) and refused(handle) and refused(opt.step)
            assert refused(lambda: opt.grad_ready("w0"))
            assert refused(lambda: hvd.add_process_set([0, 1]))
            (HERE / f"gave up {rank}").touch()
        if rank == 0:
            until("gave up 2")
            os.kill(pids[1], signal.SIGCONT)
        hvd.shutdown()
        hvd.init()
        recorder = Recorder()
        opt = hvd.DistributedOptimizer(recorder, params, fusion_threshold=0)
        for _ in range(3):
            opt.step(grads)
            assert all((grad == 2).all() for grad in recorder.last.values())
        assert (hvd.allreduce(np.ones(n), op=hvd.Sum) == 3).all()
        say(f"rank {rank} is well")
        """,
        prelude=TOOLS,
        env=GIVE_UP | {"HVDLITE_BACKEND": backend},
    )
    ended.assert_code(0)
    assert [line for line in ended.said if line.endswith("well")] == [
        f"rank {rank} is well" for rank in range(3)
    ], ended.text
    errors = [line for line in ended.said if ": step 1 of an optimizer" in line]
    assert len(errors) == 3, ended.text
    assert all("for rank 1" in line for line in errors if not line.startswith("rank 1")), ended.text
    assert "takes part in nothing any more" in errors[1], ended.text


def test_a_rank_that_comes_late_but_in_time_is_waited_for(job):
    ended = job(
        2,
        """
        if rank == 1:
            time.sleep(2)
        assert (hvd.allreduce(np.ones(3), op=hvd.Sum) == 2).all()
        recent = hvd.describe()["recent"][-1]
        assert recent["kind"] == "allreduce" and recent["state"] == "done"
        assert recent["bytes"] == 24 and recent["ended"] >= recent["matched"]
        say("right")
        """,
        prelude=TOOLS,
        env=CHECK | {"HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "30"},
    )
    ended.assert_code(0)
    assert ended.said == ["right"] * 2
    assert "allreduce 'allreduce.noname.0' has waited 1." in warned(ended, 0), ended.text


def test_a_check_time_of_zero_says_nothing(job):
    ended = job(
        2,
        """
        if rank == 1:
            time.sleep(1.5)
        hvd.barrier()
        """,
        prelude=TOOLS,
        env={"HVDLITE_STALL_CHECK_TIME_SECONDS": "0"},
    )
    ended.assert_code(0)
    assert ended.result.stderr == "", ended.text


def test_an_exception_shows_what_its_rank_did_last(job):
    ended = job(
        2,
        """
        hvd.allreduce(np.ones(3), name="loss")
        if rank == 1:
            raise ValueError("no such sample")
        hvd.barrier()
        """,
        prelude=TOOLS,
    )
    ended.assert_code(1)
    texts = [text for who, text in ended.blocks if who == 1]
    assert texts[0].startswith("the last collectives of this rank")
    assert texts[-1] == "ValueError: no such sample"
    assert any("done after" in text and "allreduce 'loss', 24 B" in text for text in texts)
