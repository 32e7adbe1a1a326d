"""Signature of an ONNX model: types and shapes of its inputs and outputs, and the check of arrays against them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from edge.onnx.samples import ANY_SHAPE, Array, Input, Output, SamplesError, shape_text
from partition.errors import PlanError
from partition.model.onnx_shapes import dim_key, dim_sizes


def fit(inputs: tuple[Input, ...], feeds: Mapping[str, Array]) -> dict[str, int]:
    """Return the sizes of named open dimensions, after checking that every input has a fitting array.

    Raises SamplesError if a name, type or shape does not fit, or if one dimension has different sizes.
    """
    names = [input_.name for input_ in inputs]
    if sorted(feeds) != sorted(names):
        raise SamplesError(f"the model takes {listed(names)}; {listed(feeds)} given")
    dims: dict[str, tuple[int, str]] = {}
    for input_ in inputs:
        array = feeds[input_.name]
        have = getattr(array, "dtype", type(array).__name__)
        if not isinstance(array, np.ndarray) or have != input_.dtype:
            raise SamplesError(f"input {input_.name!r} takes values of type {input_.dtype}, got {have}")
        shape = array.shape
        if input_.shape == ANY_SHAPE:
            continue
        named = list(zip(input_.shape, shape, strict=False))
        if len(shape) != len(input_.shape) or any(isinstance(need, int) and need != got for need, got in named):
            raise SamplesError(
                f"input {input_.name!r} takes the shape {shape_text(input_.shape)}, got {shape_text(shape)}"
            )
        for need, got in named:
            if isinstance(need, str) and need != "?":
                first, where = dims.setdefault(need, (got, input_.name))
                if first != got:
                    raise SamplesError(
                        f"the dimension {need!r} is one number for all inputs; it is {first} in {where!r} and {got} in"
                        f" {input_.name!r}"
                    )
    return {name: size for name, (size, _) in dims.items()}


def shape_of(output: Output, dims: Mapping[str, int]) -> tuple[int, ...] | None:
    """Return the output's shape for these sizes of open dimensions; None if they do not determine it."""
    if output.shape == ANY_SHAPE:
        return None
    known = tuple(dims.get(dim) if isinstance(dim, str) else dim for dim in output.shape)
    return None if None in known else tuple(dim for dim in known if dim is not None)


def open_sizes(inputs: Sequence[Input], dims: Mapping[str, int]) -> dict[str, int]:
    """Return sizes of open dimensions under the keys that the graph uses.

    dims: sizes chosen by the user, by dimension name or as "input[axis]"

    Raises SamplesError if no input has such an open dimension, or if one dimension gets two sizes.
    """
    try:
        return dim_sizes({input_.name: input_.shape for input_ in inputs if input_.shape != ANY_SHAPE}, dims)
    except PlanError as error:
        raise SamplesError(str(error)) from None


def with_dims(inputs: Sequence[Input], dims: Mapping[str, int]) -> tuple[Input, ...]:
    """Return the inputs with these sizes for open dimensions. Raises the errors of `open_sizes`."""
    sizes = open_sizes(inputs, dims)
    return tuple(
        replace(
            input_,
            shape=tuple(
                sizes.get(dim_key(input_.name, axis, dim), dim) if isinstance(dim, str) else dim
                for axis, dim in enumerate(input_.shape)
            ),
        )
        for input_ in inputs
    )


def dims_of(inputs: Sequence[Input], feeds: Mapping[str, Array]) -> dict[str, int]:
    """Return the sizes that open dimensions have in these arrays, by the dimensions' keys."""
    return {
        dim_key(input_.name, axis, dim): feeds[input_.name].shape[axis]
        for input_ in inputs
        for axis, dim in enumerate(input_.shape)
        if isinstance(dim, str) and input_.shape != ANY_SHAPE
    }


def listed(names: Any) -> str:
    """Return a list of names for an error."""
    return ", ".join(map(repr, names)) or "nothing"
