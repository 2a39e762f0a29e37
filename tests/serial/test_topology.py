"""Who started this process, which MPI it has, and the traps of its machine."""

import multiprocessing
import os
import sys
from types import SimpleNamespace

import pytest

from hvdlite import log, topology
from hvdlite.errors import HvdliteError
from hvdlite.topology import (
    Topology,
    check_one_machine,
    find_launcher,
    group_of,
    load_mpi,
    warn_of_traps,
)

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}
MPICH = {"PMI_SIZE": "3", "PMI_RANK": "0"}


# --- the launcher


@pytest.mark.parametrize(
    ("env", "name", "size", "fits", "not_fits"),
    [
        (OPEN_MPI, "the mpiexec of Open MPI", 4, "Open MPI", "MPICH"),
        (MPICH, "the mpiexec of MPICH (or Intel MPI)", 3, "MPICH", "Open MPI"),
        (MPICH, "the mpiexec of MPICH (or Intel MPI)", 3, "Intel MPI", "Open MPI"),
        (
            {
                "SLURM_PROCID": "0",
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NUM_TASKS": "8",
                "SLURM_NTASKS": "16",
            },
            "Slurm's srun",
            8,
            None,
            None,
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "16"},
            "Slurm's srun",
            16,
            None,
            None,
        ),
        ({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2"}, "torchrun", 2, None, "MPICH"),
    ],
    ids=["open mpi", "mpich", "intel", "srun", "srun without step size", "torchrun"],
)
def test_a_launcher_is_known_by_its_variables(env, name, size, fits, not_fits):
    found = find_launcher({"HOME": "/root", **env})
    assert found is not None
    assert (found.name, found.size) == (name, size)
    if fits is None and not_fits is None:
        assert found.vendors == ()  # srun serves them all
    if fits:
        assert fits in found.vendors
    assert not_fits not in found.vendors


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "16"},  # inside salloc or sbatch, not srun
        {"WORLD_SIZE": "4", "RANK": "0"},
        {"PMIX_RANK": "0"},
    ],
    ids=["nothing", "salloc", "others' names", "no size"],
)
def test_without_a_launcher_there_is_none(env):
    assert find_launcher(env) is None


@pytest.mark.parametrize("value", ["", "many", "-1"])
def test_a_launcher_that_does_not_say_how_many_has_size_0(value):
    found = find_launcher({"PMI_SIZE": value})
    assert found is not None
    assert found.size == 0


# --- loading MPI


class FakeMPI(SimpleNamespace):
    """The module mpi4py.MPI, as far as loading goes."""

    THREAD_MULTIPLE = 3

    def __init__(self, vendor, size):
        super().__init__(COMM_WORLD=SimpleNamespace(size=size), initialized=False)
        self.vendor = vendor

    def get_vendor(self):
        return self.vendor, (5, 0, 0)

    def Get_library_version(self):
        return f"{self.vendor} v5.0\0\nbuilt somewhere"

    def Is_initialized(self):
        return self.initialized

    def Init_thread(self, level):
        assert level == self.THREAD_MULTIPLE
        self.initialized = True


@pytest.fixture
def fake_mpi(monkeypatch):
    """Puts a library in place of the real one."""

    def put(vendor, size):
        mpi = FakeMPI(vendor, size)
        package = SimpleNamespace(MPI=mpi, rc=SimpleNamespace(initialize=True, finalize=None))
        monkeypatch.setitem(sys.modules, "mpi4py", package)
        monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
        return mpi

    monkeypatch.setenv("MPIR_CVAR_SUPPRESS_ABORT_MESSAGE", "1")
    return put


@pytest.fixture
def no_mpi(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # importing it is an ImportError
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setenv("MPIR_CVAR_SUPPRESS_ABORT_MESSAGE", "1")


def test_a_library_that_fits_its_launcher_is_initialized_once(fake_mpi):
    mpi = fake_mpi("Open MPI", 4)
    assert load_mpi(OPEN_MPI) == (mpi, "")
    assert mpi.initialized
    mpi.Init_thread = None
    assert load_mpi(OPEN_MPI) == (mpi, "")


def test_a_helper_that_multiprocessing_started_is_no_rank(fake_mpi, monkeypatch):
    mpi = fake_mpi("Open MPI", 4)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI")
    monkeypatch.setattr(multiprocessing.process, "parent_process", lambda: "a rank")
    with pytest.raises(HvdliteError, match=r"no rank of the job.*if __name__ == .__main__.:"):
        load_mpi(OPEN_MPI)
    assert not mpi.initialized
    load_mpi({})  # without a launcher it may be a world of its own


@pytest.mark.parametrize(
    ("env", "vendor", "launcher"),
    [(OPEN_MPI, "MPICH", "Open MPI started 4"), (MPICH, "Open MPI", "MPICH.* started 3")],
    ids=["mpich under open mpi", "open mpi under mpich"],
)
def test_a_launcher_of_another_mpi_is_refused_before_mpi_starts(env, vendor, launcher, fake_mpi):
    mpi = fake_mpi(vendor, 1)
    with pytest.raises(HvdliteError, match=f"{launcher} processes, but .*{vendor} v5.0") as caught:
        load_mpi(env)
    assert "mpiexec" in str(caught.value)
    assert "\0" not in str(caught.value)
    assert not mpi.initialized


def test_a_world_of_one_under_a_launcher_of_many_is_refused(fake_mpi):
    fake_mpi("Cray MPICH", 1)
    srun = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "16"}
    with pytest.raises(HvdliteError, match=r"srun started 16 processes.*16 jobs of one rank"):
        load_mpi(srun)


def test_torchrun_is_refused_with_what_to_type(fake_mpi):
    fake_mpi("MPICH", 1)
    with pytest.raises(HvdliteError, match="torchrun started 2"):
        load_mpi({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2"})


def test_a_launcher_of_another_mpi_may_start_one_process(fake_mpi):
    mpi = fake_mpi("MPICH", 1)
    assert load_mpi({"OMPI_COMM_WORLD_SIZE": "1"}) == (mpi, "")


def test_without_a_library_one_process_may_run_alone(no_mpi):
    mpi, reason = load_mpi({})
    assert mpi is None
    assert "mpi4py" in reason
    assert "\n" not in reason


def test_without_a_library_many_processes_are_refused(no_mpi):
    with pytest.raises(HvdliteError, match=r"started 4 processes, but no MPI.*hvdlite\[mpich\]"):
        load_mpi(OPEN_MPI)


# --- one machine


def test_ranks_on_several_machines_are_refused_with_their_hosts():
    hosts = ("node2", "node1", "node2", "node3")
    spread = Topology(rank=1, size=4, local_rank=0, local_size=1, hosts=hosts)
    with pytest.raises(HvdliteError, match=r"4 ranks.*\(node1, node2, node3\)"):
        check_one_machine(spread)
    check_one_machine(Topology(rank=1, size=4, local_rank=1, local_size=4, hosts=("node1",) * 4))
    check_one_machine(Topology())


# --- traps


@pytest.fixture
def warnings_of(monkeypatch):
    """What `warn_of_traps` says on a machine that is described by keywords."""

    def warn(env=(), *, rank=0, size=2, usable=8, cores=8, multiple=True, shm_mib=1000):
        said = {}
        monkeypatch.setattr(log, "warn_once", lambda key, text: said.setdefault(key, text))
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(usable)))
        monkeypatch.setattr(os, "cpu_count", lambda: cores)

        def statvfs(path):
            assert path == "/dev/shm"
            if shm_mib is None:
                raise FileNotFoundError(path)
            return SimpleNamespace(f_bavail=shm_mib * 256, f_frsize=4096)

        monkeypatch.setattr(os, "statvfs", statvfs)
        ranks = Topology(rank=rank, size=size, local_rank=rank, local_size=size)
        warn_of_traps(ranks, multiple, dict(env))
        return {key.removeprefix("trap."): text for key, text in said.items()}

    return warn


ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def test_a_machine_without_traps_is_praised_by_silence(warnings_of):
    assert warnings_of(ONE_THREAD) == {}
    assert warnings_of({"OMP_NUM_THREADS": "4"}) == {}  # 2 x 4 on 8


def test_more_threads_than_cores_is_a_trap_with_the_number_to_type(warnings_of):
    said = warnings_of(size=4)
    assert list(said) == ["threads"]
    assert "4 ranks x 8 BLAS threads on 8 cores" in said["threads"]
    assert "export OMP_NUM_THREADS=2" in said["threads"]
    assert "OMP_NUM_THREADS=1" in warnings_of({"OPENBLAS_NUM_THREADS": "3"}, size=6)["threads"]


def test_the_smallest_of_the_thread_settings_counts(warnings_of):
    assert warnings_of({"OMP_NUM_THREADS": "16", "MKL_NUM_THREADS": "1"}) == {}
    assert list(warnings_of({"OMP_NUM_THREADS": ""})) == ["threads"]


def test_one_core_a_rank_is_a_trap(warnings_of):
    said = warnings_of(usable=1)
    assert list(said) == ["binding"]
    assert "one core of 8" in said["binding"]
    assert "--bind-to none" in said["binding"]
    assert warnings_of(usable=1, cores=1) == {}


def test_a_low_thread_level_is_a_trap(warnings_of):
    said = warnings_of(ONE_THREAD, multiple=False)
    assert list(said) == ["thread_level"]
    assert "thread_level = 'multiple'" in said["thread_level"]


def test_little_shared_memory_is_a_trap(warnings_of):
    said = warnings_of(ONE_THREAD, shm_mib=64)
    assert list(said) == ["shm"]
    assert "64 MiB left" in said["shm"]
    assert "--shm-size" in said["shm"]
    assert warnings_of(ONE_THREAD, shm_mib=None) == {}


def test_only_rank_0_of_several_says_it(warnings_of):
    worst = {"usable": 1, "multiple": False, "shm_mib": 1}
    assert len(warnings_of(size=4, **worst)) == 3
    assert warnings_of(rank=1, size=4, **worst) == {}
    assert warnings_of(size=1, **worst) == {}


# --- some of the ranks


@pytest.mark.parametrize("ranks", [[], [0, 0], [-1, 1], [1, 4]], ids=str)
def test_ranks_that_are_not_there_are_a_value_error(ranks):
    mpi = SimpleNamespace(COMM_WORLD=SimpleNamespace(size=4, rank=1))
    with pytest.raises(ValueError, match=r"distinct ranks of 0\.\.3"):
        group_of(mpi, ranks)


def test_a_rank_that_is_not_among_them_is_a_value_error():
    mpi = SimpleNamespace(COMM_WORLD=SimpleNamespace(size=4, rank=1))
    with pytest.raises(ValueError, match="rank 1 is not among them"):
        group_of(mpi, [0, 2])


def test_namespaces_are_compared_where_they_can_be_seen(monkeypatch):
    assert topology._namespace("pid").startswith("pid:")
    assert topology._namespace("no such kind") == ""
