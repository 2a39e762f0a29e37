"""Fixtures of the tests that run on several ranks."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder of this rank's own; pytest's removes old ones, and N ranks at once trip over it."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)
