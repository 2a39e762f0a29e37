"""Horovod's questions about ranks and builds, process sets, the counters, and the timeline."""

import os
from collections.abc import Iterable

from hvdlite.context import current
from hvdlite.process_set import ProcessSet


def rank() -> int:
    """This process's index among all, 0..size()-1.

    Raises:
        NotInitializedError: Before `init()` (also a ValueError).
    """
    return current().topology.rank


def size() -> int:
    """Number of processes of the job."""
    return current().topology.size


def local_rank() -> int:
    """This process's index among those of its machine."""
    return current().topology.local_rank


def local_size() -> int:
    """Number of processes on this machine."""
    return current().topology.local_size


def cross_rank() -> int:
    """Index of this machine among those that have a process with this local rank."""
    return current().topology.cross_rank


def cross_size() -> int:
    """Number of machines that have a process with this local rank."""
    return current().topology.cross_size


def is_homogeneous() -> bool:
    """Whether all machines have equally many processes."""
    return current().topology.is_homogeneous


def mpi_built() -> bool:
    """True: MPI is what hvdlite runs on."""
    return True


def mpi_enabled() -> bool:
    """Whether an MPI library was loaded by `init()`."""
    return current().mpi is not None


def mpi_threads_supported() -> bool:
    """Whether MPI was initialized at THREAD_MULTIPLE."""
    return current().threads_multiple


def nccl_built() -> int:
    """0: this version has no NCCL backend."""
    return 0


def cuda_built() -> bool:
    """False: this version has no GPU backend."""
    return False


def rocm_built() -> bool:
    """False."""
    return False


def gloo_built() -> bool:
    """False: there is no Gloo here."""
    return False


def gloo_enabled() -> bool:
    """False."""
    return False


def ddl_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False."""
    return False


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a set of ranks.

    Collective:
        All ranks of the world, members or not.
    Args:
        process_set: A `ProcessSet`, or its ranks.
    Returns:
        The set, ready for use.
    Raises:
        ValueError: On every rank: an equal set is registered already, or ranks are wrong.
        MismatchError: On every rank: the ranks pass different sets.
    """
    return current().add_process_set(process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a set.

    Collective:
        All ranks of the world.
    Returns:
        False for the global set and for one that is not registered.
    Raises:
        MismatchError: On every rank: the ranks pass different sets.
    """
    return current().remove_process_set(process_set)


def stats() -> dict[str, int]:
    """Counts since `init()`.

    Returns:
        `collectives` issued to a backend, `bytes` of this rank in them, `buckets` reduced for
        optimizers, `negotiations` (calls matched by name, constructors included), `steps`.
    """
    return current().progress.counters.as_dict()


def start_timeline(
    path: str | os.PathLike[str],
    mark_cycles: bool = False,
    *,
    all_ranks: bool = False,
    steps: str | tuple[int, int] | range | None = None,
    max_bytes: int | str = "64MiB",
) -> None:
    """Record from now on what happens when, in a file for https://ui.perfetto.dev.

    Local; every rank may call it, and those that record must. Rank 0 writes `path`; without
    `all_ranks` the others write nothing. The file is valid JSON and may be read at any moment.

    Args:
        path: The file. One that is there is replaced.
        mark_cycles: Also mark the passes of the progress loop that moved something.
        all_ranks: Rank N writes too, the file `path` + ".rankN".
        steps: Only these steps of an optimizer and what lies between them: "10:30" or (10, 30) is
            steps 10 to 29, counted from 0. A step that has begun is not recorded.
        max_bytes: At this size of its file a rank says so and records nothing more.
    Raises:
        NotInitializedError: Before `init()` (also a ValueError).
        ValueError: A wrong argument, or there is something at `path` that is no regular file.
        OSError: The file cannot be made.
        RuntimeError: A timeline is being recorded already.
    """
    current().start_timeline(path, mark_cycles, all_ranks, steps, max_bytes)


def stop_timeline() -> None:
    """Close the file of the timeline, complete; harmless when there is none.

    Raises:
        NotInitializedError: Before `init()` (also a ValueError).
    """
    current().stop_timeline()
