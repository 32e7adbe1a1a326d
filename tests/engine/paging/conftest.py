"""Fixtures: models whose weights are paged, and a model whose file is damaged while it is read."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edge.llm.engine import Engine
from tests.support import paging
from tests.support.paging import answer, least, paged, weight_threads

MakeModel = Callable[..., Path]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Makes the model that `paging.model` does, once."""
    return lambda *args, **figures: paging.model(tmp_path_factory, *args, **figures)


@pytest.fixture(params=["llama", "qwen3moe"])
def original(request: pytest.FixtureRequest, make_model: MakeModel) -> Path:
    """A model with experts, and one without."""
    return make_model(request.param)


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    """A model to be damaged."""
    return Path(shutil.copy(original, tmp_path / "model.gguf"))


@pytest.fixture
def engine(path: Path, original: Path) -> Iterator[Engine]:
    """It under the least budget, where nearly all is read in every pass, after the prompt."""
    with paged(path, least(original)) as engine:
        answer(engine, n=1)
        yield engine
    assert not weight_threads()
