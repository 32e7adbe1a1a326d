"""Fixtures for many files; tests/conftest.py exports them to all tests."""

from collections.abc import Iterator

import pytest

from tests.support.deployments import shared_workers
from tests.support.workers import Worker


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker that the tests of a file share, and do not end."""
    with shared_workers(tmp_path_factory, "one") as (worker,):
        yield worker


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    """Two workers that the tests of a file share, and do not end."""
    with shared_workers(tmp_path_factory, "one", "two") as workers:
        yield workers
