"""Runs one MPI job from a test, and never leaves a process of it behind.

    from launch import launch
    result = launch(2, "train.py", timeout=30)
    assert result.returncode == 0, result.text

The mpiexec is the one that $MPIEXEC names, else the one beside this interpreter, else PATH's.
"""

import contextlib
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

# What a launcher sets in its ranks; a job that a test starts must not inherit it.
RANK_NAMES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
SIZE_NAMES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "HYDI_", "MPI_LOCAL")
_JOB_NAME = "TEST_JOB"  # in the environment of every process of a job: how it is found again


@dataclass(frozen=True, slots=True)
class Result:
    """How one job ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False

    @property
    def text(self) -> str:
        """Everything a failed assertion should show."""
        end = "was killed after its time limit" if self.timed_out else f"exit {self.returncode}"
        return f"{end}, {self.seconds:.1f} s\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def launched_rank(env: Mapping[str, str]) -> int | None:
    """The rank that a launcher gave this process; None where no launcher started it."""
    return next((int(env[name]) for name in RANK_NAMES if name in env), None)


def mpiexec() -> list[str]:
    """The command of the launcher that belongs to this interpreter's MPI."""
    if named := os.environ.get("MPIEXEC"):
        program, *arguments = shlex.split(named)
        found = shutil.which(program)
        if found is None:
            raise FileNotFoundError(f"MPIEXEC={named!r}: there is no such program")
        return [str(Path(found).absolute()), *arguments]
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise FileNotFoundError(
            f"no mpiexec beside {sys.executable} nor on PATH: install mpich, or set MPIEXEC"
        )
    return [found]


def job_environment(extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """The environment of a job: this one less its launcher's marks, plus what small machines need.

    Args:
        extra: Variables to add; one whose value is None is taken out.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER_PREFIXES)}
    defaults = {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "NO_COLOR": "1",  # Open MPI gives its ranks a terminal
        "PYTHONFAULTHANDLER": "1",  # SIGABRT prints the stacks
        # Open MPI only: more ranks than cores, none pinned to a core, waiting gives the core away.
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    if os.geteuid() == 0:
        defaults |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env = defaults | env
    for name, value in (extra or {}).items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def launch(
    n: int,
    script_or_args: str | Path | Sequence[str | Path],
    timeout: float = 60,
    env: Mapping[str, str | None] | None = None,
    *,
    cwd: str | Path | None = None,
) -> Result:
    """Run Python on `n` ranks and wait for the end of all of them.

    After `timeout` seconds every rank is asked for its stacks (they are in `stderr`), and then each
    process of the job is killed, those too that made a session of their own.

    Args:
        n: Number of ranks.
        script_or_args: A script, or the arguments of the interpreter, e.g. `["-m", "pytest"]`.
        timeout: Limit for the whole job, in seconds.
        env: Variables to add to the environment; None as a value takes one out.
        cwd: Where to run; default: here.

    Returns:
        Exit code and output, also after a time-out (`timed_out`).
    """
    args = [script_or_args] if isinstance(script_or_args, str | Path) else script_or_args
    command = [*mpiexec(), "-n", str(n), sys.executable, *map(str, args)]
    job = uuid.uuid4().hex
    environment = job_environment(env) | {_JOB_NAME: job}
    # An aborted rank leaves no core file, and neither do this process's other children.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # Files, not pipes: a process that outlives its job cannot keep the reader waiting.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.monotonic()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            cwd=cwd,
            start_new_session=True,
        )
        timed_out = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
            _signal_all(job, signal.SIGABRT, ranks_only=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        finally:
            seconds = time.monotonic() - start
            _kill(process, job)
        return Result(process.returncode, _text(out), _text(err), seconds, timed_out)


def processes_of(job: str, *, ranks_only: bool = False) -> list[int]:
    """The pids of what still runs of a job, by a variable that all its processes inherit."""
    return [pid for pid, env in _environments() if _belongs(env, job, ranks_only)]


def _belongs(env: bytes, job: str, ranks_only: bool) -> bool:
    words = env.split(b"\0")
    if f"{_JOB_NAME}={job}".encode() not in words:
        return False
    return not ranks_only or any(w.partition(b"=")[0].decode() in RANK_NAMES for w in words)


def _environments() -> Iterator[tuple[int, bytes]]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is somebody else's
            yield int(folder.name), (folder / "environ").read_bytes()


def _signal_all(job: str, number: signal.Signals, *, ranks_only: bool = False) -> bool:
    pids = processes_of(job, ranks_only=ranks_only)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return bool(pids)


def _kill(process: subprocess.Popen[bytes], job: str) -> None:
    """End the launcher's process group, and every process of the job that left the group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 5
    while _signal_all(job, signal.SIGKILL) and time.monotonic() < deadline:
        time.sleep(0.01)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
