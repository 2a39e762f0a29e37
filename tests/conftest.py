"""Which tests run in which kind of job, and the fixtures of the parallel ones.

Plain pytest runs the tests without the mark `mpi`; test_launch.py runs the rest on 1 to 4 ranks.
Under a launcher, `mpirun -np 2 python -m pytest --with-mpi`, the marked ones run, and only they.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from launch import job_environment, launched_rank
from ranks import Together, shut_down, watch

if TYPE_CHECKING:
    from mpi4py import MPI

RANK = launched_rank(os.environ)  # None: no launcher started this process
PARALLEL = Path(__file__).parent / "parallel"


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Refuse what would run the wrong tests; under a launcher, bring the ranks together."""
    os.environ.setdefault("HVDLITE_POISON_GRADS", "1")  # a stale gradient shows as NaN
    if not hasattr(config.option, "with_mpi"):
        raise pytest.UsageError(
            "pytest-mpi is missing, or hidden by mpi-pytest, whose module has the same name: "
            "pip uninstall mpi-pytest, then pip install --force-reinstall pytest-mpi"
        )
    if RANK is None:
        return
    if not _with_mpi(config):
        raise pytest.UsageError("under a launcher pytest needs --with-mpi; without one, neither")
    config.pluginmanager.register(Together(config, RANK), "together")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what belongs to another kind of job, before pytest-mpi would skip it."""
    marked = {item for item in items if item.get_closest_marker("mpi")}
    for item in items:
        if "mpi" in item.keywords and item not in marked:
            raise pytest.UsageError(
                f"{item.nodeid}: pytest-mpi takes the bare word mpi in a name for its mark; "
                "write backend=mpi in ids, and call no folder mpi"
            )
        if PARALLEL in item.path.parents and item not in marked:
            raise pytest.UsageError(f"{item.nodeid}: add @pytest.mark.mpi(min_size=...)")
    drop = set()
    if not _with_mpi(config):
        drop = marked
    elif RANK is not None:
        drop = set(items) - marked
    config.hook.pytest_deselected(items=[item for item in items if item in drop])
    items[:] = [item for item in items if item not in drop]
    if RANK is not None:
        for item in items:
            watch(item)


def pytest_report_header() -> list[str]:
    """Name the MPI that the tests run on; a process of its own asks, so that MPI starts in none."""
    if RANK:
        return []
    ask = [sys.executable, "-m", "mpi4py", "--mpi-lib-version"]
    answer = subprocess.run(ask, capture_output=True, text=True, env=job_environment(), check=False)
    library = " ".join((answer.stdout or answer.stderr).partition("\n")[0].split())
    return [f"mpi: {library}; {'no launcher' if RANK is None else 'under a launcher'}"]


@pytest.fixture
def hvd() -> Iterator[ModuleType]:
    """The module hvdlite, initialized; a Context lives until a test fails or replaces it."""
    import hvdlite

    context = hvdlite.init()
    yield hvdlite
    if hvdlite.is_initialized() and hvdlite.init() is not context:
        shut_down()


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Iterator["MPI.Intracomm"]:
    """A private copy of the world."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    yield comm
    together = request.config.pluginmanager.get_plugin("together")
    if together is None or not together.failed:  # else a rank may have left a call on it unmatched
        comm.Free()


def _with_mpi(config: pytest.Config) -> bool:
    return bool(config.option.with_mpi or config.option.only_mpi)
