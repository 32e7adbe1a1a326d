"""Open dimensions of a network's inputs, and the sizes that people give them: `batch=8`, or `x[2]=48` for one axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partition.errors import PlanError

NAMELESS = "", "?"  # names that exporters write where there is none: two dimensions called so need not be equal

Shape = Sequence[int | str]  # of an input; an open dimension is its name


def dim_key(name: str, axis: int, dim: str) -> str:
    """The key of an open dimension in a mapping of sizes: its name, or "input[axis]" where it has none."""
    return f"{name}[{axis}]" if dim in NAMELESS else dim


def dim_keys(shapes: Mapping[str, Shape]) -> dict[str, list[str]]:
    """The open dimensions by key, each with the axes that it is: "input[axis]"."""
    keys: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        for axis, dim in enumerate(shape):
            if isinstance(dim, str):
                keys.setdefault(dim_key(name, axis, dim), []).append(f"{name}[{axis}]")
    return keys


def dim_sizes(shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes by key, where `sizes` may also name one axis of a dimension with a name: "input[axis]".

    PlanError for a dimension that no input leaves open, for one with two sizes, and for a size below 0.
    """
    keys = dim_keys(shapes)
    key_of = {axis: key for key, axes in keys.items() for axis in axes} | {key: key for key in keys}
    by_name: dict[str, int] = {}
    for name, size in sizes.items():
        if name not in key_of:
            there = f"open are {', '.join(keys)}" if keys else "the inputs have no open dimension"
            raise PlanError(f"a size is given for {name!r}, which no input has; {there}")
        if size < 0:
            raise PlanError(f"the size of {name!r} is {size}; needed is 0 or more")
        key = key_of[name]
        if by_name.setdefault(key, size) != size:
            raise PlanError(f"the dimension {key!r} has one size for all inputs; {by_name[key]} and {size} are given")
    return by_name
