"""Small models of nine layers, on one device and on ranks that share them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from tests.support.deployments import pipeline, tensor
from tests.support.ranks_here import ranks_here
from tests.support.slices import synthetic

SPREAD: dict[str, dict[str, Any]] = {"stages": pipeline(5, 4), "thin": pipeline(0, 5, 4), "tensor": tensor(2, 1)}


def model_of(arch: str, folder: Path) -> Path:
    """Its attention windows, where it has any, are of 16 tokens."""
    return synthetic(folder / f"{arch}.gguf", arch, layers=9, vocab=320, embd=64, ff=96)


@contextmanager
def engine_of(model: Path, how: str, options: EngineOptions, folder: Path) -> Iterator[TextEngine]:
    """One device ("alone"), or ranks as SPREAD has them."""
    if how == "alone":
        with Engine(model, options) as engine:
            yield engine
    else:
        with ranks_here(model, SPREAD[how], options, folder) as ranks:
            yield ranks
