"""Signature of an ONNX model: types and shapes of its inputs and outputs, and whether arrays fit them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from edge.onnx.samples import ANY_SHAPE, Array, Input, Output, SamplesError, shape_text
from partition.errors import PlanError
from partition.model.onnx_shapes import dim_key, dim_sizes


def fit(inputs: tuple[Input, ...], feeds: Mapping[str, Array]) -> dict[str, int]:
    """Return the values of the named open dimensions, if every input has an array that fits.

    SamplesError for names, types and shapes that the model does not take, and for dimensions of one name that differ.
    """
    names = [input_.name for input_ in inputs]
    if sorted(feeds) != sorted(names):
        raise SamplesError(f"the model takes {listed(names)}; {listed(feeds)} given")
    dims: dict[str, tuple[int, str]] = {}
    for input_ in inputs:
        array = feeds[input_.name]
        have = getattr(array, "dtype", type(array).__name__)
        if not isinstance(array, np.ndarray) or have != input_.dtype:
            raise SamplesError(f"input {input_.name!r} takes values of type {input_.dtype}; it has {have}")
        shape = array.shape
        if input_.shape == ANY_SHAPE:
            continue
        named = list(zip(input_.shape, shape, strict=False))
        if len(shape) != len(input_.shape) or any(isinstance(need, int) and need != got for need, got in named):
            raise SamplesError(
                f"input {input_.name!r} takes the shape {shape_text(input_.shape)}; it has {shape_text(shape)}"
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
    """Return the output's shape with these values of the open dimensions; None if they do not determine it."""
    if output.shape == ANY_SHAPE:
        return None
    known = tuple(dims.get(dim) if isinstance(dim, str) else dim for dim in output.shape)
    return None if None in known else tuple(dim for dim in known if dim is not None)


def open_sizes(inputs: Sequence[Input], dims: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes that a person gives to open dimensions, by name or as "input[axis]", under the key that the
    graph has for them. SamplesError for a dimension that no input leaves open, and for two sizes of one dimension."""
    try:
        return dim_sizes({input_.name: input_.shape for input_ in inputs if input_.shape != ANY_SHAPE}, dims)
    except PlanError as error:
        raise SamplesError(str(error)) from None


def with_dims(inputs: Sequence[Input], dims: Mapping[str, int]) -> tuple[Input, ...]:
    """Return the same inputs with these sizes for open dimensions. Errors as of `open_sizes`."""
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
    """Return the sizes that these arrays give to open dimensions, by their keys."""
    return {
        dim_key(input_.name, axis, dim): feeds[input_.name].shape[axis]
        for input_ in inputs
        for axis, dim in enumerate(input_.shape)
        if isinstance(dim, str) and input_.shape != ANY_SHAPE
    }


def listed(names: Any) -> str:
    """Return names for an error."""
    return ", ".join(map(repr, names)) or "nothing"
