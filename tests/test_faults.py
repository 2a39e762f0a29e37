"""How jobs end when a rank fails, leaves or cannot have what it asks for."""

import os
import subprocess
import sys
import textwrap

import pytest

from launch import launch, launched_rank

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        launched_rank(os.environ) is not None, reason="a rank does not start a job of its own"
    ),
]

HEAD = """
import os, signal, sys, threading, time
import numpy as np
import hvdlite as hvd
hvd.init()
rank, size = hvd.rank(), hvd.size()
hvd.barrier()
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # one piece, whoever else writes
"""


def run(body, n=3, timeout=60, env=None, head=HEAD):
    return launch(n, ["-c", head + textwrap.dedent(body)], timeout=timeout, env=env)


DEATHS = {
    "raise": ("raise ValueError('boom')", 1),
    "raise in a thread": ("threading.Thread(target=lambda: 1 / 0).start(); time.sleep(30)", 1),
    "sys.exit(3)": ("sys.exit(3)", 3),
    "sys.exit(text)": ("sys.exit('no more')", 1),
}


@pytest.mark.parametrize("who_waits", ["in a collective", "in a step", "asleep"])
@pytest.mark.parametrize("death", DEATHS)
def test_a_failing_rank_ends_the_job_at_once_with_its_code_and_words_last(death, who_waits):
    code, expected = DEATHS[death]
    waits = {
        "in a collective": "hvd.allreduce(np.ones(3))",
        "in a step": "opt.step({'w': np.ones(3)})",
        "asleep": "time.sleep(30)",
    }[who_waits]
    result = run(f"""
        opt = hvd.DistributedOptimizer(lambda grads: None, {{'w': np.zeros(3)}})
        if rank == 1:
            time.sleep(0.3)
            {code}
        else:
            {waits}
    """)
    assert not result.timed_out, result.text
    assert result.returncode == expected, result.text
    assert result.seconds < 20, result.text  # the others would wait for 30 seconds, or for ever
    tagged = [line for line in result.stderr.splitlines() if line.startswith("[hvdlite rank")]
    assert tagged, result.text
    assert all(line.startswith("[hvdlite rank 1/3 ") for line in tagged), result.text
    words = {"raise": "ValueError: boom", "raise in a thread": "ZeroDivisionError"}
    assert words.get(death, "exit code") in tagged[-1], result.text


def test_a_silent_exit_is_named_by_those_who_wait_after_the_grace():
    result = run("""
        if rank == 1:
            raise SystemExit(3)
        hvd.allreduce(np.ones(3))
    """)
    assert not result.timed_out, result.text
    assert result.returncode != 0, result.text
    assert "waits for rank 1, which has left" in result.stderr, result.text


def test_a_killed_rank_ends_the_job():
    result = run("""
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(np.ones(3))
    """)
    assert not result.timed_out, result.text
    assert result.returncode != 0, result.text
    assert result.seconds < 20, result.text


def test_a_caught_exit_and_a_clean_end_are_no_failures():
    result = run("""
        try:
            sys.exit(3)
        except SystemExit:
            pass
        assert hvd.allreduce(1.0, op=hvd.Sum) == size
        if rank == 1:
            time.sleep(0.5)
    """)
    assert result.returncode == 0, result.text


def test_shutdown_waits_for_nobody():
    result = run("""
        if rank == 1:
            start = time.monotonic()
            hvd.shutdown()
            say("left after", time.monotonic() - start)
            assert time.monotonic() - start < 1
        else:
            time.sleep(2)
    """)
    assert result.returncode == 0, result.text
    assert "left after" in result.stdout


def test_a_closed_optimizer_is_named_by_those_who_step_theirs():
    result = run("""
        opt = hvd.DistributedOptimizer(lambda grads: None, {'w': np.zeros(3)})
        opt.step({'w': np.ones(3)})
        if rank == 1:
            opt.close()
            hvd.barrier()
        else:
            try:
                opt.step({'w': np.ones(3)})
            except hvd.RankFailedError as error:
                assert "[1]" in str(error), error
                say("named")
            hvd.barrier()
    """)
    assert result.returncode == 0, result.text
    assert result.stdout.count("named") == 2, result.text


def test_a_forked_child_is_refused_and_the_parent_goes_on():
    result = run("""
        opt = hvd.DistributedOptimizer(lambda grads: grads['w'].copy(), {'w': np.zeros(3)})
        child = os.fork()
        if not child:
            refused = 0
            for call in (hvd.rank, hvd.barrier, lambda: opt.step({'w': np.ones(3)})):
                try:
                    call()
                except RuntimeError as error:
                    refused += "forked" in str(error)
            os._exit(refused)
        assert os.waitpid(child, 0)[1] >> 8 == 3
        assert (opt.step({'w': np.full(3, float(rank))}) == (size - 1) / 2).all()
    """)
    assert result.returncode == 0, result.text


NO_ROOM = """
import os
import hvdlite.backends.segment as segment
fallocate = os.posix_fallocate
def full(fd, offset, nbytes):
    if nbytes >= {limit}:
        raise OSError(28, "No space left on device")
    fallocate(fd, offset, nbytes)
segment.os.posix_fallocate = full
"""
TRAIN = """
opt = hvd.DistributedOptimizer(lambda grads: grads['w'].copy(), {'w': np.zeros(2_000_000)})
for turn in range(3):
    opt.grad_ready('w', np.full(2_000_000, rank + float(turn)))
    assert (opt.step() == (size - 1) / 2 + turn).all()
say("backend", hvd.describe()["backend"], opt._reducer.stream.name)
"""


@pytest.mark.parametrize(
    ("limit", "expected"), [(1, "backend mpi mpi"), (30_000_000, "backend shm mpi")]
)
def test_without_room_in_dev_shm_all_ranks_fall_back_together_and_say_so(limit, expected):
    result = run(TRAIN, head=NO_ROOM.format(limit=limit) + HEAD)
    assert result.returncode == 0, result.text
    assert result.stdout.count(expected) == 3, result.text
    assert "no room for" in result.stderr, result.text
    assert "mpi" in result.stderr, result.text


def test_backend_shm_that_was_asked_for_and_cannot_be_had_raises_on_every_rank():
    head = NO_ROOM.format(limit=1) + HEAD.replace(
        "hvd.init()",
        """
try:
    hvd.init(config={"backend": "shm"})
except hvd.BackendUnavailableError as error:
    os.write(1, f"unavailable {error}\\n".encode())
    sys.exit(0)
""",
    )
    result = run("", head=head)
    assert result.stdout.count("unavailable") == 3, result.text


def test_settings_that_differ_or_are_wrong_on_one_rank_end_init_on_all():
    head = """
import os
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    os.environ["HVDLITE_{name}"] = "{value}"
import hvdlite as hvd
try:
    hvd.init()
except hvd.HvdliteError as error:
    os.write(1, f"{{type(error).__name__}} {{error}}\\n".encode())
"""
    result = run("", head=head.format(name="FUSION", value="1"))
    assert result.stdout.count("unknown setting HVDLITE_FUSION") == 3, result.text
    assert result.stdout.count("ConfigError unknown") == 1, result.text
    result = run("", head=head.format(name="BACKEND", value="mpi"))
    assert result.stdout.count("MismatchError") == 3, result.text
    assert "mpi on ranks [1]" in result.stdout, result.text


@pytest.mark.parametrize(
    "names",
    [
        {"PMI_SIZE": "4", "PMI_RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"},
    ],
)
def test_a_launcher_of_another_mpi_is_refused_and_both_are_named(names):
    ask = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    ask += "print(MPI.get_vendor()[0])"
    vendor = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, check=True
    ).stdout.strip()
    if ("OMPI" in str(names)) == (vendor == "Open MPI"):
        return  # its own launcher: it would look for the other three
    result = subprocess.run(
        [sys.executable, "-c", "import hvdlite; hvdlite.init()"],
        capture_output=True,
        text=True,
        env={**os.environ, **names},
        timeout=60,
        check=False,
    )
    assert result.returncode != 0
    assert "started 4 processes" in result.stderr, result.stderr
    assert vendor.split()[0] in result.stderr, result.stderr
