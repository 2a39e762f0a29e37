"""`import hvdlite` is cheap and starts nothing."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import hvdlite
from launch import job_environment

ROOT = Path(__file__).parents[1]
LIBRARIES = {"mpi4py", "cupy", "torch", "jax", "autograd", "sklearn", "matplotlib", "ml_dtypes"}


def fresh(code, **env):
    """What a new interpreter prints, started in the checkout."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=job_environment(env), check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_import_loads_no_mpi_and_no_framework():
    loaded = json.loads(fresh("import hvdlite, sys, json; print(json.dumps(list(sys.modules)))"))
    assert "hvdlite" in loaded
    assert not {name.partition(".")[0] for name in loaded}.intersection(LIBRARIES)


@pytest.mark.parametrize("path", ["", None], ids=["empty", "unset"])
def test_import_works_without_path(path):
    assert fresh("import hvdlite; print(hvdlite.__version__)", PATH=path).strip()


def test_import_leaves_signals_and_hooks_alone():
    code = """
import signal, sys, threading
def state():
    return (sys.excepthook, threading.excepthook, sys.exit, sys.getswitchinterval(),
            [signal.getsignal(s) for s in signal.valid_signals()], threading.active_count())
before = state()
import hvdlite
print(state() == before)
"""
    assert fresh(code).strip() == "True"


def test_version_is_a_literal():
    # An isolated build has no NumPy: setuptools must read the version without an import.
    body = ast.parse((ROOT / "hvdlite" / "__init__.py").read_text()).body
    values = [
        node.value
        for node in body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    ]
    assert [type(value) for value in values] == [ast.Constant]


def test_a_folder_of_the_same_name_beside_the_script_does_no_harm(tmp_path):
    (tmp_path / "hvdlite").mkdir()  # a clone of the repository
    code = "import hvdlite; print(hvdlite.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == hvdlite.__version__, done.stderr


def test_a_name_of_a_later_version_says_so_when_it_is_used():
    for use in (
        lambda: hvdlite.elastic.State(),
        lambda: hvdlite.elastic.run,
        lambda: hvdlite.elastic(),
    ):
        with pytest.raises(hvdlite.HvdliteError, match="comes with a later version"):
            use()


def test_a_name_that_is_misspelt_gets_a_suggestion():
    with pytest.raises(AttributeError, match="'allredcue'; did you mean 'allreduce'"):
        hvdlite.allredcue  # noqa: B018 - looking it up is the test
