"""Fixtures of the tests that run on several ranks."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder of this rank's own; pytest's removes old ones, and N ranks at once trip over it."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture(scope="module", params=["shm", "mpi"], ids="backend={}".format)
def backend(request: Any) -> Any:
    """Each backend between ranks, one after the other."""
    return request.param


@pytest.fixture
def hvd_on_each_backend(hvd: Any, backend: str) -> Any:
    """As `hvd`, on that backend."""
    if hvd.describe()["backend"] != backend:
        hvd.shutdown()
        hvd.init(config={"backend": backend})
    return hvd
