"""How jobs end when one rank goes wrong (rule 8), and what they do where memory cannot be shared.

Each test starts jobs of its own.  `fault()` in a script marks the moment from which the limits
count; they are a few seconds more than what is promised, for busy machines.
"""

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

from launch import job_environment, launch, launched_rank

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        launched_rank(os.environ) is not None, reason="a rank does not start a job of its own"
    ),
]

SLACK_S = 4.0

BEFORE_INIT = """
import os, pathlib, signal, sys, threading, time
import numpy as np
import hvdlite as hvd
from hvdlite.backends import segment

HERE = pathlib.Path(sys.argv[1])
segment.DIRECTORY = HERE / "shm"  # of this job alone
launched = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK"))

def say(text):
    os.write(1, f"{text}\\n".encode())

def fault():
    (HERE / "fault").write_text(str(time.time()))

class Recorder:
    def step(self, grads):
        self.last = {name: grad.copy() for name, grad in grads.items()}
"""
PRELUDE = (
    BEFORE_INIT
    + """
hvd.init()
rank, size = hvd.rank(), hvd.size()
opt = hvd.DistributedOptimizer(Recorder(), {"w": np.zeros(3)})

def wait():
    if rank == 0:
        hvd.barrier()
    opt.step({"w": np.ones(3)})
"""
)


@dataclass
class Ended:
    """A job's end: `result` is launch.py's, `after_s` counts from `fault()`."""

    result: object
    after_s: float

    @property
    def text(self):
        return self.result.text

    @property
    def said(self):
        """What the ranks said, as `say()` lines, sorted."""
        return sorted(self.result.stdout.splitlines())

    @property
    def blocks(self):
        """Lines with hvdlite's tag: (rank, text)."""
        tag = re.compile(r"\[hvdlite rank (\d+)/\d+ \S+ \d+ [^\]]+\] ?(.*)")
        found = map(tag.search, self.result.stderr.splitlines())
        return [(int(match[1]), match[2]) for match in found if match]

    def assert_code(self, *codes):
        assert not self.result.timed_out, self.text
        assert self.result.returncode in codes, self.text

    def assert_within(self, limit_s):
        assert self.after_s < limit_s + SLACK_S, self.text

    def assert_last_words(self, rank, *words):
        """The last block of the job is this rank's, and has these words."""
        assert self.blocks, self.text
        assert self.blocks[-1][0] == rank, self.text
        own = "\n".join(text for who, text in self.blocks if who == rank)
        for word in words:
            assert word in own, self.text


@pytest.fixture
def job(tmp_path):
    """Runs a script on some ranks, each time in a folder of its own."""
    # Where the real segments would be: tmp_path may lie on a file system without fallocate.
    shm = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    made = []

    def run(ranks, code, *, prelude=PRELUDE, timeout=60, env=None):
        here = tmp_path / f"job{len(made)}"
        here.mkdir()
        private = shm / f"test-{os.getpid()}-{len(made)}"
        private.mkdir()
        made.append(private)
        (here / "shm").symlink_to(private)
        script = here / "script.py"
        script.write_text(prelude + dedent(code))
        result = launch(ranks, [script, here], timeout=timeout, env=env)
        end = time.time()
        marked = here / "fault"
        start = float(marked.read_text()) if marked.exists() else end
        ended = Ended(result, end - start)
        left = [path.name for path in private.iterdir()]
        assert left == [], f"left in shared memory: {left}\n{ended.text}"
        return ended

    yield run
    for path in made:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()


@pytest.fixture(scope="module")
def library():
    """The MPI library of this interpreter, as it names itself."""
    ask = [sys.executable, "-m", "mpi4py", "--mpi-lib-version"]
    return subprocess.run(
        ask, capture_output=True, text=True, env=job_environment(), check=True
    ).stdout


# ---- one rank ends, the others wait ----------------------------------------------------------


def test_an_exception_ends_the_job_with_its_traceback_last(job):
    ended = job(
        3,
        """
        def compute():
            raise ValueError("no such sample")

        if rank == 1:
            fault()
            compute()
        wait()
        """,
    )
    ended.assert_code(1)
    ended.assert_within(3)
    ended.assert_last_words(1, "Traceback", "in compute", "ValueError: no such sample")
    assert {who for who, _ in ended.blocks} == {1}, ended.text


def test_an_exception_between_two_gradients_ends_the_job(job):
    ended = job(
        2,
        """
        big = {f"w{k}": np.zeros(1000) for k in range(5)}
        opt = hvd.DistributedOptimizer(Recorder(), big, fusion_threshold=0)
        for name in big:
            if rank == 1 and name == "w3":
                fault()
                big["w9"]
            opt.grad_ready(name, big[name])
        opt.step()
        """,
    )
    ended.assert_code(1)
    ended.assert_within(3)
    ended.assert_last_words(1, "KeyError: 'w9'")


def test_an_exception_in_a_thread_ends_the_job_and_names_the_thread(job):
    ended = job(
        3,
        """
        def load():
            fault()
            raise OSError("the data is gone")

        if rank == 2:
            threading.Thread(target=load, name="loader").start()
        wait()
        """,
    )
    ended.assert_code(1)
    ended.assert_within(3)
    ended.assert_last_words(2, "in load", "OSError: the data is gone")
    assert re.search(r"\[hvdlite rank 2/3 \S+ \d+ loader\]", ended.result.stderr), ended.text


def test_a_helper_that_imports_the_script_again_is_no_rank_and_the_ranks_go_on(job):
    ended = job(
        2,
        """
        import multiprocessing

        if __name__ == "__main__":
            child = multiprocessing.get_context("spawn").Process(target=abs, args=(1,))
            child.start()
            child.join(30)
            assert child.exitcode == 1
            hvd.barrier()
        """,
    )
    ended.assert_code(0)
    assert ended.result.stderr.count("it is no rank of the job") == 2, ended.text


def test_no_memory_ends_the_job(job):
    ended = job(
        2,
        """
        import resource

        if rank == 1:
            fault()
            resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
            hoard = [np.ones(2**20)]
            while True:
                hoard.append(np.ones(2**20))
        wait()
        """,
    )
    ended.assert_code(1)
    ended.assert_within(3)
    ended.assert_last_words(1, "MemoryError")


def test_exit_with_a_code_ends_the_job_with_it(job):
    ended = job(
        3,
        """
        if rank == 1:
            fault()
            sys.exit(3)
        wait()
        """,
    )
    ended.assert_code(3)
    ended.assert_within(3)
    ended.assert_last_words(1, "exit code 3")


def test_exit_with_a_text_ends_the_job_with_code_1(job):
    ended = job(
        2,
        """
        if rank == 1:
            fault()
            sys.exit("the validation set is empty")
        wait()
        """,
    )
    ended.assert_code(1)
    ended.assert_within(3)
    ended.assert_last_words(1, "the validation set is empty")


def test_raised_system_exit_is_waited_for_and_then_named(job):
    ended = job(
        3,
        """
        if rank == 1:
            fault()
            raise SystemExit(3)
        wait()
        """,
    )
    ended.assert_code(1)
    ended.assert_within(10)
    ended.assert_last_words(ended.blocks[-1][0], "RankFailedError")
    assert re.search(r"ranks? \[?1\b", ended.blocks[-1][1]), ended.text


def test_a_rank_that_comes_to_its_end_is_waited_for_and_then_named(job):
    ended = job(
        3,
        """
        if rank != 1:
            hvd.broadcast_object(None, root_rank=2)
        fault()
        """,
        env={"HVDLITE_EXIT_GRACE_SECONDS": "1"},
    )
    ended.assert_code(1)
    ended.assert_within(3)
    ended.assert_last_words(ended.blocks[-1][0], "broadcast_object", "rank 1", "has left")


def test_a_killed_rank_ends_the_job(job):
    ended = job(
        3,
        """
        if rank == 1:
            fault()
            os.kill(os.getpid(), signal.SIGKILL)
        wait()
        """,
    )
    ended.assert_code(9, 137)
    ended.assert_within(3)


def test_a_rank_that_exits_without_python_ends_the_job(job):
    ended = job(
        2,
        """
        if rank == 1:
            fault()
            os._exit(7)
        wait()
        """,
    )
    ended.assert_code(7)
    ended.assert_within(3)


def test_interrupting_the_launcher_ends_the_job(job):
    ended = job(
        2,
        """
        def launcher():
            pid = os.getpid()
            while True:
                stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
                name, fields = stat[stat.index("(") + 1 : stat.rindex(")")], stat.rpartition(")")[2]
                if name.startswith(("mpiexec", "mpirun", "prterun", "prun")):
                    return pid
                pid = int(fields.split()[1])

        if rank == 1:
            time.sleep(0.2)  # rank 0 waits by now
            fault()
            os.kill(launcher(), signal.SIGINT)
        wait()
        """,
    )
    assert not ended.result.timed_out, ended.text
    assert ended.result.returncode != 0, ended.text
    ended.assert_within(3)


def test_a_setting_that_one_rank_misspells_ends_the_job_with_advice(job):
    ended = job(
        3,
        """
        if launched == 2:
            os.environ["HVDLITE_FUSION_TRESHOLD"] = "0"
        fault()
        hvd.init()
        """,
        prelude=BEFORE_INIT,
    )
    ended.assert_code(1)
    ended.assert_within(3)
    advice = "unknown setting HVDLITE_FUSION_TRESHOLD"
    assert re.search(advice + ".*; did you mean HVDLITE_FUSION_THRESHOLD", ended.result.stderr), (
        ended.text
    )


def test_without_abort_on_error_the_others_are_told_by_their_waits(job):
    ended = job(
        2,
        """
        if rank == 1:
            fault()
            sys.exit(0)
        try:
            hvd.barrier()
        except hvd.RankFailedError as error:
            say(error)
        """,
        env={"HVDLITE_ABORT_ON_ERROR": "0", "HVDLITE_EXIT_GRACE_SECONDS": "0.5"},
    )
    ended.assert_code(0)
    ended.assert_within(3)
    assert len(ended.said) == 1, ended.text
    assert "rank 1" in ended.said[0]


# ---- what does not end the job ---------------------------------------------------------------


def test_caught_exits_and_errors_leave_a_job_that_ends_well(job):
    ended = job(
        3,
        """
        try:
            sys.exit(3)
        except SystemExit:
            pass
        errors = []

        def expect(kind, call):
            try:
                call()
            except kind as error:
                errors.append(type(error).__name__)

        def alarm(*_):
            raise TimeoutError("nobody came")

        signal.signal(signal.SIGALRM, alarm)
        expect(hvd.MismatchError, lambda: hvd.allreduce(np.zeros(rank)))
        expect(TypeError, lambda: hvd.allreduce(object()))
        expect(KeyError, lambda: opt.grad_ready("v", np.zeros(3)))
        if rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            expect(TimeoutError, lambda: hvd.allreduce(np.zeros(100_000)))
        opt.step({"w": np.full(3, float(rank))})
        assert opt.last["w"].tolist() == [1.0] * 3
        say(f"{rank} {errors}")
        """,
    )
    ended.assert_code(0)
    seen = ["MismatchError", "TypeError", "UnknownNameError"]
    assert ended.said == [f"0 {[*seen, 'TimeoutError']}", f"1 {seen}", f"2 {seen}"], ended.text
    assert ended.blocks == [], ended.text


def test_shutdown_waits_for_nobody_and_the_others_are_told(job):
    ended = job(
        3,
        """
        hvd.barrier()
        if rank == 1:
            start = time.monotonic()
            hvd.shutdown()
            say(f"left after {time.monotonic() - start:.0f} s")
            fault()
        else:
            time.sleep(1.0)  # far from any call
            try:
                hvd.barrier()
            except hvd.RankFailedError as error:
                say(f"{rank}: {error}")
        """,
        env={"HVDLITE_EXIT_GRACE_SECONDS": "0.5"},
    )
    ended.assert_code(0)
    assert ended.said[2] == "left after 0 s", ended.text
    for who, line in zip((0, 2), ended.said, strict=False):
        assert re.match(rf"{who}: .*rank 1.*has left", line), ended.text


def test_no_hook_is_left_after_shutdown(job):
    ended = job(
        2,
        """
        hvd.shutdown()
        say(sys.excepthook is sys.__excepthook__)
        say(threading.excepthook is threading.__excepthook__)
        say(sys.exit.__module__)
        """,
    )
    ended.assert_code(0)
    assert ended.said == ["True"] * 4 + ["sys"] * 2, ended.text


@pytest.mark.parametrize("backend", ["shm", "mpi"], ids="backend={}".format)
def test_a_forked_child_is_refused_and_the_parent_goes_on(job, backend):
    ended = job(
        2,
        """
        views = hvd.DistributedOptimizer(
            Recorder(), {"v": np.zeros(4)}, gradient_as_bucket_view=True)

        def refusals():
            calls = [
                hvd.rank, hvd.init, hvd.barrier, lambda: hvd.allreduce(1.0), opt.step,
                lambda: opt.grad_ready("w", np.ones(3)), opt.synchronize, hvd.stats,
                lambda: views.grad_ready("v"), lambda: hvd.add_process_set([0]),
            ]
            for call in calls:
                try:
                    call()
                    return f"a call worked: {call}"
                except RuntimeError as error:
                    if "fork" not in str(error):
                        return f"{call}: {error}"
            return "refused" if not hvd.is_initialized() else "initialized"

        views.grads["v"][...] = rank

        def refused_handle():
            try:
                under_way.wait(5)
            except RuntimeError as error:
                return under_way.done() and "fork" in str(error)

        for turn in range(2):
            under_way = hvd.allreduce_async(np.ones(3), op=hvd.Sum, name="under way")
            child = os.fork()
            if not child:
                words = refusals() if refused_handle() else "the handle worked"
                opt.close()
                hvd.shutdown()
                say(words)
                del opt, views
                os._exit(0)
            # Both step while the child lives, so that it has the chance to do harm.
            opt.step({"w": np.full(3, float(rank + turn))})
            assert opt.last["w"].tolist() == [0.5 + turn] * 3
            assert os.waitpid(child, 0)[1] == 0
            assert under_way.wait().tolist() == [2.0] * 3
        views.grad_ready("v")
        views.step()
        assert views.last["v"].tolist() == [0.5] * 4
        say("parent")
        """,
        env={"HVDLITE_BACKEND": backend},
    )
    ended.assert_code(0)
    assert ended.said == ["parent"] * 2 + ["refused"] * 4, ended.text


def test_forked_workers_that_do_not_call_are_fine(job):
    ended = job(
        2,
        """
        import multiprocessing

        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(abs, [-1, -2, -3]) == [1, 2, 3]
        hvd.barrier()
        say("fine")
        """,
    )
    ended.assert_code(0)
    assert ended.said == ["fine"] * 2, ended.text


# ---- memory that cannot be shared ------------------------------------------------------------

NO_ROOM = """
import errno

def no_room(fd, offset, length):
    raise OSError(errno.ENOSPC, "No space left on device")

def break_memory(how):
    if how == "full" and launched == 0:
        segment.os.posix_fallocate = no_room
    if how == "elsewhere" and launched == 2:  # a mount namespace of its own
        segment.DIRECTORY = pathlib.Path("/nonexistent")
        segment.Segment.attach = classmethod(
            lambda cls, path, nbytes: open("/nonexistent/" + path.name))
"""


@pytest.mark.parametrize("how", ["full", "elsewhere"])
def test_without_shared_memory_all_ranks_take_mpi_and_say_so(job, how):
    ended = job(
        3,
        f"""
        break_memory({how!r})
        try:
            hvd.init(config={{"backend": "shm"}})
        except hvd.BackendUnavailableError:
            say("refused")
        hvd.init()
        rank = hvd.rank()
        assert hvd.allreduce(float(rank)) == 1.0
        opt = hvd.DistributedOptimizer(Recorder(), {{"w": np.zeros(3)}})
        opt.step({{"w": np.full(3, float(rank))}})
        assert opt.last["w"].tolist() == [1.0] * 3
        say(hvd.describe()["backend"])
        """,
        prelude=BEFORE_INIT + NO_ROOM,
    )
    ended.assert_code(0)
    assert ended.said == ["mpi"] * 3 + ["refused"] * 3, ended.text
    assert "backend shm is not available" in ended.result.stderr, ended.text
    assert "using mpi instead" in ended.result.stderr, ended.text


@pytest.mark.parametrize("how", ["full", "elsewhere"])
def test_without_memory_for_an_optimizer_all_ranks_take_mpi_for_it_and_say_so(job, how):
    ended = job(
        3,
        f"""
        hvd.init()
        rank = hvd.rank()
        whole, inner = segment.os.posix_fallocate, Recorder()
        before = hvd.DistributedOptimizer(Recorder(), {{"w": np.zeros(3)}})
        attach = segment.Segment.__dict__["attach"]
        break_memory({how!r})
        opt = hvd.DistributedOptimizer(inner, {{"w": np.zeros(3)}}, gradient_as_bucket_view=True)
        for step in range(3):
            opt.grads["w"][...] = rank + step
            opt.grad_ready("w")
            before.grad_ready("w", np.full(3, 10.0 * rank))
            for one in (opt, before) if rank else (before, opt):
                one.step()
            assert inner.last["w"].tolist() == [1.0 + step] * 3
            assert before.last["w"].tolist() == [10.0] * 3
        try:
            before.add_param_group({{"params": {{"v": np.zeros(2)}}}})
        except hvd.BackendUnavailableError:
            say("no group")
        before.step({{"w": np.full(3, 20.0 * rank)}})  # as it was
        assert before.last["w"].tolist() == [20.0] * 3
        segment.os.posix_fallocate, segment.Segment.attach = whole, attach
        segment.DIRECTORY = HERE / "shm"
        before.add_param_group({{"params": {{"v": np.zeros(2)}}}})
        before.step({{"w": np.full(3, 30.0 * rank), "v": np.full(2, 1.0 * rank)}})
        assert before.last["v"].tolist() == [1.0] * 2
        say(hvd.describe()["backend"])
        hvd.shutdown()
        hvd.init(config={{"backend": "shm"}})
        break_memory({how!r})
        try:
            hvd.DistributedOptimizer(inner, {{"w": np.zeros(3)}})
        except hvd.BackendUnavailableError:
            say("refused")
        assert hvd.allreduce(float(rank)) == 1.0
        """,
        prelude=BEFORE_INIT + NO_ROOM,
    )
    ended.assert_code(0)
    assert ended.said == ["no group"] * 3 + ["refused"] * 3 + ["shm"] * 3, ended.text
    assert "using backend mpi for it" in ended.result.stderr, ended.text


# ---- launchers and libraries -----------------------------------------------------------------


def alone(code, env):
    """Run Python without a launcher."""
    return subprocess.run(
        [sys.executable, "-c", "import hvdlite as hvd\n" + dedent(code)],
        capture_output=True,
        text=True,
        env=job_environment(env),
        timeout=60,
        check=False,
    )


def test_a_launcher_of_another_mpi_is_refused_naming_both(library):
    is_open = "Open MPI" in library
    foreign = {"PMI_SIZE": "4", "PMI_RANK": "0"} if is_open else {"OMPI_COMM_WORLD_SIZE": "4"}
    done = alone("hvd.init()", foreign)
    assert done.returncode == 1, done
    last = done.stderr.splitlines()[-1]
    assert "hvdlite.errors.HvdliteError" in last
    assert "4 processes" in last
    assert "mpiexec of " + ("MPICH" if is_open else "Open MPI") in last
    assert ("Open MPI" if is_open else "MPICH") in last.partition("but the MPI library")[2]


def test_a_launcher_of_one_process_may_be_any(library):
    foreign = {"PMI_SIZE": "1"} if "Open MPI" in library else {"OMPI_COMM_WORLD_SIZE": "1"}
    done = alone("hvd.init(); print(hvd.size(), hvd.allreduce(2.0))", foreign)
    assert (done.returncode, done.stdout) == (0, "1 2.0\n"), done


WITHOUT_MPI = {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}


def test_where_no_mpi_can_be_loaded_a_world_of_one_works_and_one_line_says_so():
    done = alone(
        """
        hvd.init()
        print(hvd.rank(), hvd.size(), hvd.mpi_enabled(), hvd.describe()["backend"])
        hvd.barrier()
        hvd.shutdown()
        hvd.init()
        print(hvd.allreduce(3))
        """,
        WITHOUT_MPI,
    )
    assert (done.returncode, done.stdout) == (0, "0 1 False local\n3\n"), done
    lines = done.stderr.splitlines()
    assert len(lines) <= 2, done
    assert all("no MPI library can be loaded" in line for line in lines)


def test_where_no_mpi_can_be_loaded_a_launcher_of_several_is_refused():
    done = alone("hvd.init()", {**WITHOUT_MPI, "PMI_SIZE": "2"})
    assert done.returncode == 1, done
    assert "started 2 processes, but no MPI library can be loaded" in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("HVDLITE_FUSION_TRESHOLD", "1", "did you mean HVDLITE_FUSION_THRESHOLD"),
        ("HVDLITE_BACKEND", "gloo", "auto, shm, mpi"),
        ("HVDLITE_FIRST_BUCKET", "12 parsecs", "HVDLITE_FIRST_BUCKET"),
        ("HVDLITE_EXIT_GRACE_SECONDS", "-1", "HVDLITE_EXIT_GRACE_SECONDS"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_with_advice(name, value, words):
    done = alone("hvd.init()", {name: value})
    assert done.returncode == 1, done
    assert "ConfigError" in done.stderr
    assert words in done.stderr
