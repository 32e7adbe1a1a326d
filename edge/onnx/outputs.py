"""Outputs of an ONNX model: summaries, the top classes, and a .npz file with all of them."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from devices.files import temporary_beside
from edge.errors import TextError
from edge.onnx.samples import Array, Feeds

_MOST_LABELS = 64 << 20  # limit of the size of a file with labels


@dataclass(frozen=True)
class OutputSummary:
    """Summary statistics of one output."""

    name: str
    shape: tuple[int, ...]
    type: str  # numpy's name of the type
    min: float | None  # minimum of the finite values; None, like the next two, if no value is finite
    max: float | None
    mean: float | None
    not_finite: int  # number of values that are infinite or NaN

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"shape": list(self.shape)}


@dataclass(frozen=True)
class TopClasses:
    """The top classes of every row of an output, best first."""

    output: str
    rows: tuple[tuple[tuple[int, str, float], ...], ...]  # (class, label, value) for each class of each row

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with null instead of values that are not finite."""
        rows = [[{"class": i, "label": label, "value": _finite(v)} for i, label, v in row] for row in self.rows]
        return {"output": self.output, "rows": rows}


def summaries(outputs: Feeds) -> list[OutputSummary]:
    """Return the summary of every output."""
    return [_summary(name, array) for name, array in outputs.items()]


def read_labels(path: Path) -> list[str]:
    """Return the lines of a file, without empty lines at its end.

    Raises OSError if the file cannot be read, and TextError if it is not UTF-8 text of a permitted size.
    """
    size = path.stat().st_size
    if size > _MOST_LABELS:
        raise TextError(f"{path} has {size} bytes; labels are text, one a line, of at most {_MOST_LABELS} bytes")
    try:
        labels = path.read_bytes().decode("utf-8-sig").rstrip().splitlines()
    except UnicodeDecodeError as exc:
        raise TextError(f"{path} is not UTF-8; labels are text, one a line") from exc
    if not labels:
        raise TextError(f"{path} holds no labels; expected one a line")
    return [label.strip() for label in labels]


def top_classes(outputs: Feeds, labels: Sequence[str], n: int) -> TopClasses:
    """Return the `n` largest values in each row of the first output that has a value for each label.

    Such an output has the shape (classes) or (rows, classes), possibly followed by axes of size 1. Raises TextError if
    no output has such a shape.
    """
    for name, array in outputs.items():
        rows = _rows(array, len(labels))
        if rows is not None and array.dtype.kind in "biuf":
            best = np.argsort(-rows.astype(np.float64), axis=1, kind="stable")[:, :n]  # NaN values come last
            return TopClasses(
                name,
                tuple(
                    tuple((int(i), labels[i], float(row[i])) for i in order)
                    for row, order in zip(rows, best, strict=True)
                ),
            )
    shapes = ", ".join(f"{name!r} has the shape {array.shape}" for name, array in outputs.items())
    raise TextError(f"there are {len(labels)} labels, and no output has so many classes: {shapes}")


def write(path: Path, outputs: Feeds) -> None:
    """Write a .npz file of the outputs by name. The file appears only when it is complete. Raises OSError on
    failure."""
    with temporary_beside(path) as temporary:
        # numpy.savez takes the arrays as keyword arguments, so an output could not be named like its own parameters.
        with zipfile.ZipFile(temporary, "w") as archive:
            for name, array in outputs.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        os.replace(temporary, path)


def _summary(name: str, array: Array) -> OutputSummary:
    if array.dtype.kind not in "biuf":  # text
        return OutputSummary(name, array.shape, "str", None, None, None, 0)
    finite = np.isfinite(array)
    count = int(finite.sum())
    values = array if count == array.size else array[finite]
    figures: tuple[float | None, float | None, float | None] = (None, None, None)
    if count:
        figures = float(values.min()), float(values.max()), _finite(float(values.mean(dtype=np.float64)))
    return OutputSummary(name, array.shape, str(array.dtype), *figures, array.size - count)


def _rows(array: Array, classes: int) -> Array | None:
    """Return the output in the shape (rows, classes); None if its shape does not fit this number of classes."""
    shape = array.shape
    while len(shape) > 1 and shape[-1] == 1 and shape[-1] != classes:
        shape = shape[:-1]
    if len(shape) not in (1, 2) or shape[-1] != classes:
        return None
    return array.reshape(-1, classes)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
