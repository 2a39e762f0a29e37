"""The parallel tests, started on 1 to 4 ranks; and what starts them."""

import os
import sys
import time
from pathlib import Path

import pytest

from launch import RANK_NAMES, job_environment, launch, launched_rank, mpiexec

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(
    launched_rank(os.environ) is not None, reason="a rank does not start a job of its own"
)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4], ids="ranks={}".format)
def test_parallel_tests_pass(ranks):
    result = launch(ranks, ["-m", "pytest", "--with-mpi", "--only-mpi"], timeout=1400, cwd=ROOT)
    assert result.returncode == 0, result.text
    sys.stdout.write(result.stdout)  # pytest -rP shows it


def test_ranks_know_each_other_and_the_exit_code_comes_back(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from mpi4py import MPI\n"
        "world = MPI.COMM_WORLD\n"
        "ranks = world.allgather(world.rank)\n"
        "sys.stdout.write(f'{world.rank} of {ranks}\\n')\n"
        "sys.stdout.flush()\n"
        "MPI.Finalize()\n"
        "sys.exit(3 if len(sys.argv) > 1 else 0)\n"
    )
    fine = launch(3, script)
    assert fine.returncode == 0, fine.text
    assert sorted(fine.stdout.splitlines()) == [f"{r} of [0, 1, 2]" for r in range(3)]
    assert not fine.timed_out
    assert launch(2, [script, "fail"]).returncode == 3


def test_a_job_that_hangs_shows_its_stacks_and_leaves_no_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, subprocess, sys, time\n"
        "from mpi4py import MPI\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "file = pathlib.Path(sys.argv[1], f'pids{MPI.COMM_WORLD.rank}')\n"
        "file.write_text(f'{os.getpid()} {child.pid}')\n"
        "def wait_for_ever():\n"
        "    time.sleep(600)\n"
        "wait_for_ever()\n"
    )
    start = time.monotonic()
    result = launch(2, [script, tmp_path], timeout=10)
    assert result.timed_out
    assert result.returncode != 0
    assert time.monotonic() - start < 35
    assert "in wait_for_ever" in result.stderr, result.text
    pids = [pid for file in tmp_path.glob("pids*") for pid in file.read_text().split()]
    assert len(pids) == 4, result.text
    assert [pid for pid in pids if alive(pid)] == []


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_environment_of_a_job_is_not_that_of_a_rank(monkeypatch):
    for name in (*RANK_NAMES, "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HYDRA_IFACE", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    env = job_environment({"ADDED": "yes", "HOME": None})
    assert launched_rank(env) is None
    assert "PMI_SIZE" not in env
    assert "OMPI_COMM_WORLD_SIZE" not in env
    assert env["HYDRA_IFACE"] == "lo"
    assert env["OMP_NUM_THREADS"] == "7"
    assert env["ADDED"] == "yes"
    assert "HOME" not in env


def test_mpiexec_is_the_one_that_was_named(monkeypatch, tmp_path):
    named = tmp_path / "my mpiexec"
    named.write_text("#!/bin/sh\n")
    named.chmod(0o755)
    monkeypatch.setenv("MPIEXEC", f"'{named}' --quiet")
    assert mpiexec() == [str(named), "--quiet"]
    monkeypatch.setenv("MPIEXEC", str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError, match="absent"):
        mpiexec()
