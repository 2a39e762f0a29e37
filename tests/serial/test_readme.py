"""The README is true: its programs run, and its tables have what the package has."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hvdlite
from hvdlite import errors
from hvdlite.config import Config
from launch import job_environment, launch

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

# Runs the programs of a folder one after the other, each in a job of its own.
DRIVER = """\
import runpy, sys
from pathlib import Path
import hvdlite
for path in sorted(Path(sys.argv[1]).glob("*.py")):
    runpy.run_path(str(path), run_name="__main__")
    hvdlite.barrier()
    hvdlite.shutdown()
    sys.stdout.write(f"{path.name} done\\n")
    sys.stdout.flush()
"""


def section(title):
    """The text below one heading, up to the next."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", README, re.M | re.S)
    assert found, f"README.md has no section {title!r}"
    return found[1]


def programs():
    """Every fenced block of Python, by the number of its first line."""
    blocks = re.finditer(r"^```python\n(.*?)^```$", README, re.M | re.S)
    return {README.count("\n", 0, block.start()) + 2: block[1] for block in blocks}


def first_column(table):
    """The names in backquotes that begin the rows of a table."""
    return re.findall(r"^\| `(\w+)`", table, re.M)


@pytest.mark.parametrize("line", programs(), ids="line={}".format)
def test_a_program_runs_alone(line, tmp_path):
    (tmp_path / "program.py").write_text(programs()[line])
    done = subprocess.run(
        [sys.executable, "-W", "error", "program.py"],
        cwd=tmp_path,
        env=job_environment({"PYTHONPATH": str(ROOT)}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ranks", [2, 3], ids="ranks={}".format)
def test_the_programs_run_on_several_ranks(ranks, tmp_path):
    for line, program in programs().items():
        (tmp_path / f"line{line:04}.py").write_text(program)
    driver = tmp_path / "driver"
    driver.write_text(DRIVER)
    env = {"PYTHONPATH": str(ROOT)}
    result = launch(ranks, ["-W", "error", driver, tmp_path], env=env, cwd=tmp_path)
    assert result.returncode == 0, result.text
    assert result.stdout.count(" done\n") == ranks * len(programs()), result.text


def test_the_smallest_trainer_learns(tmp_path):
    program = next(iter(programs().values()))
    (tmp_path / "train.py").write_text(program)
    result = launch(2, tmp_path / "train.py", env={"PYTHONPATH": str(ROOT)})
    loss, ranks = re.fullmatch(r"loss (\S+) on (\d) ranks\n", result.stdout).groups()
    assert float(loss) < 1e-9, result.text
    assert ranks == "2"


def test_the_settings_are_those_of_config():
    marks = r"<!-- settings:.*?-->\n(.*?)<!-- end of settings -->\n"
    found = re.search(marks, README, re.S)
    assert found
    assert found[1].strip() == Config.table().strip(), "paste the output of Config.table()"


def test_every_error_class_has_a_row():
    classes = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert set(first_column(section("Errors"))) == classes


def test_the_builtin_that_a_row_names_catches_the_error():
    rows = re.findall(r"^\| `(\w+)` \((.*?)\)", section("Errors"), re.M)
    assert len(rows) > 3
    for name, text in rows:
        for builtin in re.findall(r"[A-Z]\w+Error", text):
            assert issubclass(getattr(errors, name), eval(builtin)), f"{name} is no {builtin}"


def test_every_public_name_is_mentioned():
    missing = [name for name in hvdlite.__all__ if not re.search(rf"\b{name}\b", README)]
    assert missing == []


def test_every_name_that_is_not_there_yet_is_listed_as_such():
    listed = set(re.findall(r"`(\w+)`", section("Not in this version")))
    lacking = {name for name in hvdlite._LATER if name not in listed}
    assert lacking == set()
    assert listed.isdisjoint(hvdlite.__all__)
    for name in listed & hvdlite._LATER:
        with pytest.raises(errors.HvdliteError, match="later version"):
            getattr(hvdlite, name)()


def test_the_arguments_in_the_table_of_calls_are_those_of_the_functions():
    rows = re.findall(r"`(\w+)\(([^`]*)\)`", section("The calls"))
    checked = 0
    for name, written in rows:
        function = getattr(hvdlite, name, None)
        if not written or function is None or inspect.isclass(function):
            continue
        parameters = inspect.signature(function).parameters
        for word in re.split(r",\s*", written):
            argument, _, default = word.partition("=")
            if argument in ("*", "ps", "ranks"):
                continue
            assert argument in parameters, f"{name}() has no argument {argument!r}"
            if default and default != "Average":
                assert parameters[argument].default == eval(default), f"{name}({word})"
            checked += 1
    assert checked > 15


def test_the_targets_that_it_names_are_in_the_makefile():
    named = set(re.findall(r"(?:^|`)make (\w+)", README, re.M))
    targets = set(re.findall(r"^([\w%-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert named
    assert named <= targets


def test_the_files_that_it_names_exist():
    named = set(re.findall(r"\b(?:scripts|tests)/[\w/]+\.py\b|\b[A-Z]+\.md\b", README))
    assert {"scripts/train_digits.py", "ARCHITECTURE.md"} <= named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
