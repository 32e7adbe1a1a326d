"""Tests on trained weights; `make real` runs these alone."""

from pathlib import Path

import pytest

from tests.real import weights

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder as one on trained weights."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.real)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in Q4_1."""
    return weights.SMOLLM2.path()
