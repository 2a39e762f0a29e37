"""What conftest.py and ranks.py promise: tests that fail on one rank, or run in the wrong job."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch import job_environment, launch, launched_rank

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        launched_rank(os.environ) is not None, reason="a rank does not start a job of its own"
    ),
]


@pytest.fixture
def suite(tmp_path):
    """Writes files beside a copy of conftest.py; returns the arguments that run them."""

    def write(**sources):
        shutil.copy(HERE / "conftest.py", tmp_path)
        for name, source in sources.items():
            path = tmp_path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(source)
        config = ["-c", HERE.parent / "pyproject.toml", "--rootdir", tmp_path]
        return ["-m", "pytest", *config, "-o", f"pythonpath={HERE}", tmp_path]

    return write


def plain(args):
    command = [sys.executable, *map(str, args)]
    env = job_environment()
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


UNEVEN = """
import time
import pytest

pytestmark = pytest.mark.mpi(min_size=2)

def test_at_the_end(comm):
    comm.Barrier()
    assert comm.rank != 1, "rank one alone"

def test_level_1(comm):
    assert comm.allgather(comm.rank) == [0, 1]

def test_while_the_other_waits(comm):
    if comm.rank == 1:
        raise ValueError("too early")
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.001)

def test_level_2(comm):
    assert comm.allgather(comm.rank) == [0, 1]

@pytest.fixture
def broken(comm):
    if comm.rank == 0:
        raise KeyError("no fixture")

def test_fixture(broken):
    pass

def test_level_3(comm):
    assert comm.allgather(comm.rank) == [0, 1]

def test_skipped_by_one(comm):
    if comm.rank == 1:
        pytest.skip("not here")

def test_level_4(comm):
    assert comm.allgather(comm.rank) == [0, 1]
"""


def test_a_failure_of_one_rank_is_everybodys_and_the_next_test_starts_level(suite):
    result = launch(2, [*suite(test_uneven=UNEVEN), "--only-mpi"], timeout=120)
    assert not result.timed_out, result.text
    assert result.returncode != 0, result.text
    assert "3 failed, 4 passed, 1 error" in result.stdout, result.text
    for failure in ("AssertionError: rank one alone", "ValueError: too early", "Skipped: not here"):
        assert f"failed on rank 1: {failure}" in result.stdout, result.text
    assert re.search(r"\[rank 1\] E +ValueError: too early", result.stderr), result.text
    assert "PeerFailed" not in result.stderr, result.text  # rank 1 says only what it did itself
    assert result.stdout.count("test session starts") == 1, result.text


STUCK = """
import pytest

@pytest.mark.mpi(min_size=2)
@pytest.mark.timeout(4)
def test_stuck(comm):
    assert comm.rank != 0, "rank zero gave up"
    comm.Barrier()
"""


def test_a_rank_stuck_in_mpi_shows_its_stack_and_why_and_ends_the_job(suite):
    result = launch(2, [*suite(test_stuck=STUCK), "--only-mpi"], timeout=120)
    assert not result.timed_out, result.text
    assert result.returncode != 0, result.text
    assert "[rank 0] AssertionError: rank zero gave up" in result.stderr, result.text
    assert "in test_stuck" in result.stderr, result.text
    assert result.seconds < 60


BOTH = """
import pytest

def test_serial():
    pass

@pytest.mark.mpi(min_size=1)
def test_marked():
    pass
"""


def test_which_tests_run_depends_on_the_job(suite):
    args = suite(test_both=BOTH)
    assert "1 passed, 1 deselected" in plain(args).stdout
    assert "2 passed" in plain([*args, "--with-mpi"]).stdout
    launched = launch(2, [*args, "--with-mpi"])
    assert "1 passed" in launched.stdout, launched.text
    assert "1 deselected" in launched.stdout, launched.text
    forgotten = launch(2, args)
    assert forgotten.returncode != 0
    assert "needs --with-mpi" in forgotten.stderr, forgotten.text


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (
            {
                "test_id": "import pytest\n@pytest.mark.parametrize('x', [1], ids=['mpi'])\n"
                "def test_x(x): pass\n"
            },
            "bare word mpi",
        ),
        ({"mpi__test_folder": "def test_x(): pass\n"}, "bare word mpi"),
        ({"parallel__test_unmarked": "def test_x(): pass\n"}, "add @pytest.mark.mpi"),
    ],
    ids=["id", "folder", "unmarked"],
)
def test_a_test_that_would_silently_not_run_is_refused(suite, sources, message):
    done = plain(suite(**sources))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert message in done.stderr
