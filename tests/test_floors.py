"""The layout is a promise: each file imports only from files below its own."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hvdlite"
FILES = sorted(p.relative_to(PACKAGE) for p in PACKAGE.rglob("*.py"))

# Lowest first.  A file may import from the floors below, and on its own floor from those before it.
FLOORS = {
    "words": "errors types log config",
    "machine": "arrays arithmetic adasum handle timeline",
    "backends": "backends.segment backends.base backends.page backends.local backends.shm "
    "backends.mpi backends",
    "groups": "topology process_set bucket fusion compression.base compression.cast compression",
    "engine": "stall progress ticket transfer negotiation reducer",
    "root": "exits context",
    "verbs": "queries calls collectives objects data consistency join deltas optimizer state",
    "doors": "hvdlite __main__",
}
ORDER = [name for floor in FLOORS.values() for name in floor.split()]

# Libraries that load slowly or start something: who may import them, and only inside functions.
GUESTS = {
    "mpi4py": "backends.mpi topology context",
    "cupy": "arrays",
    "torch": "",
    "jax": "",
}


def name_of(path: Path) -> str:
    """The name in FLOORS: `backends/shm.py` is `backends.shm`, the top __init__.py `hvdlite`."""
    parts = [part for part in path.with_suffix("").parts if part != "__init__"]
    return ".".join(parts) or "hvdlite"


def imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[ast.stmt, str]]:
    """Every import in a file of `package`, inside functions too, as absolute dotted names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # `from .x` in hvdlite.package
                above = ("hvdlite", *package)[: len(package) + 2 - node.level]
                base = ".".join([*above, *base.split()])
            yield from ((node, f"{base}.{alias.name}") for alias in node.names)


def file_of(dotted: str) -> str:
    """The file of hvdlite that an import of `dotted` reads, as in FLOORS."""
    rest = dotted.removeprefix("hvdlite").removeprefix(".")
    while rest and rest not in ORDER:
        rest = rest.rpartition(".")[0]
    return rest or "hvdlite"


def runs_on_import(tree: ast.Module) -> set[ast.stmt]:
    """The statements that run on import: not those in functions, nor those for type checkers."""
    found: set[ast.stmt] = set()
    todo: list[ast.AST] = [tree]
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                todo.extend(node.orelse)
                found.update(node.orelse)
                continue
            if isinstance(node, ast.stmt):
                found.add(node)
            todo.append(node)
    return found


def violations(source: str, path: Path) -> list[str]:
    """What a file imports and may not."""
    here, tree = name_of(path), ast.parse(source)
    at_once = runs_on_import(tree)
    wrong = []
    for node, dotted in imports(tree, path.parent.parts):
        top = dotted.partition(".")[0]
        if top == "hvdlite":
            there = file_of(dotted)
            if ORDER.index(there) >= ORDER.index(here):
                wrong.append(f"line {node.lineno}: {here} may not import {there}")
        elif top in GUESTS:
            if here not in GUESTS[top].split():
                wrong.append(f"line {node.lineno}: {here} may not import {top}")
            elif node in at_once:
                wrong.append(f"line {node.lineno}: {here} may import {top} only inside a function")
    return wrong


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_point_down(path):
    assert name_of(path) in ORDER, f"{path} has no place in FLOORS yet"
    assert violations((PACKAGE / path).read_text(), path) == []


def test_every_name_in_floors_is_a_file():
    missing = [name for name in ORDER if name not in map(name_of, FILES)]
    assert missing == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("log.py", "from hvdlite.config import Config"),
        ("log.py", "from . import config"),
        ("log.py", "def f():\n    from .context import current"),
        ("log.py", "import hvdlite"),
        ("types.py", "from hvdlite import log"),
        ("backends/base.py", "from .shm import ShmBackend"),
        ("backends/base.py", "from .. import context"),
        ("backends/base.py", "from ..process_set import ProcessSet"),
        ("reducer.py", "def f():\n    import mpi4py"),
        ("context.py", "from mpi4py import MPI"),
        ("context.py", "class C:\n    import mpi4py.MPI"),
        ("optimizer.py", "import torch.nn"),
    ],
)
def test_an_import_that_points_up_is_found(path, source):
    assert len(violations(source, Path(path))) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("config.py", "from hvdlite.errors import ConfigError\nfrom . import log"),
        ("backends/shm.py", "from ..arithmetic import scale\nfrom .base import Backend"),
        ("context.py", "def f():\n    from mpi4py import MPI"),
        ("context.py", "if TYPE_CHECKING:\n    from mpi4py import MPI"),
        ("__init__.py", "from .context import init\nfrom .types import Sum"),
        ("__main__.py", "import hvdlite\nimport numpy"),
    ],
)
def test_an_import_that_points_down_is_allowed(path, source):
    assert violations(source, Path(path)) == []
