"""Shapes of published models by name, as the catalog gives them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edge.models.catalog import catalog
from edge.models.shapes import Shape, ShapeError, shape

REQUIRED = ("layers", "embd", "ff", "heads", "vocab")  # where no known model is named
SHAPES: Mapping[str, Shape] = {model.name: model.shape for model in catalog() if model.shape is not None}


def shape_of(name: str | None, arch: str | None, figures: Mapping[str, Any]) -> Shape:
    """The shape of a known model with other `figures`, or one of an architecture (None: llama) with these figures
    alone. ShapeError if they do not make one."""
    if name is None:
        missing = [f"--{figure}" for figure in REQUIRED if figure not in figures]
        if missing:
            raise ShapeError(f"give --shape NAME, or also {' '.join(missing)}")
        return shape(arch or "llama", **figures)
    if arch is not None:
        raise ShapeError("--arch goes with single figures; --shape has an architecture already")
    if name not in SHAPES:
        raise ShapeError(f"no shape {name!r}; known: {', '.join(SHAPES)}")
    return replace(SHAPES[name], **figures)
