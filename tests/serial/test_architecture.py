"""ARCHITECTURE.md is true: what it names exists, and its floors are those that are kept."""

import ast
import re
from pathlib import Path

import test_floors

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()


def names_in(path):
    """Every class and function of a file; methods as `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (child for child in node.body if isinstance(child, ast.FunctionDef))
            found |= {f"{node.name}.{child.name}" for child in methods}
    return found


def test_every_test_that_it_names_exists():
    named = re.findall(r"\b(tests/[\w/]+\.py)::([\w.]+)", TEXT)
    assert len(named) > 20
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).exists() or name not in names_in(ROOT / file)
    ]
    assert missing == []


def test_every_function_that_it_names_exists():
    named = re.findall(r"`([\w/]+\.py):([\w.]+)`", TEXT)
    assert len(named) > 20
    package = ROOT / "hvdlite"
    missing = [
        f"{file}:{name}"
        for file, name in named
        if not (package / file).exists() or name not in names_in(package / file)
    ]
    assert missing == []


def test_every_file_that_it_names_exists():
    named = re.findall(r"`((?:tests/)?[\w/]+(?:\.py|/))`", TEXT)
    folders = (ROOT, ROOT / "hvdlite", ROOT / "hvdlite" / "backends")
    missing = [name for name in named if not any((f / name).exists() for f in folders)]
    assert missing == []


def test_the_table_of_floors_is_the_one_that_is_kept():
    section = TEXT.partition("## Floors")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \| ([\w. \\]+?) \|", section, re.M)
    table = {floor: files.replace("\\", "").split() for floor, files in rows if floor != "floor"}
    assert table == {floor: files.split() for floor, files in test_floors.FLOORS.items()}
    assert list(table) == list(test_floors.FLOORS)


def test_the_invariants_are_numbered_and_each_is_kept_by_a_test():
    rows = re.findall(r"^\| I(\d+) \|(.*)\|(.*)\|$", TEXT, re.M)
    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    assert all("`tests/" in tests for _, _, tests in rows)
