"""Metadata of an ONNX model about pictures: names of classes, scaling of pixels, and the size of the input.

Ultralytics writes `names`, `task`, `stride` and `imgsz`. Other exporters write `labels` or `classes`, `mean`, `std` and
`scale`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edge.onnx.images import Scaling

_LONGEST = 1 << 20  # characters of a value; longer values are ignored
_MOST_CLASSES = 100_000
_LARGEST_SIDE = 1 << 14
_LARGEST = 1e6  # limit of means, standard deviations and scales


@dataclass(frozen=True)
class Metadata:
    """Metadata of a model about pictures. All fields may be empty."""

    labels: tuple[str, ...] = ()  # names of the classes
    scaling: Scaling | None = None
    sides: tuple[int, int] = (0, 0)  # height and width for open dimensions
    task: str = ""  # Ultralytics' name of the task, such as "detect"


NOTHING = Metadata()


def metadata_of(model: Any) -> Metadata:
    """Return the metadata of a ModelProto. Values that cannot be read are ignored."""
    values = {item.key: item.value for item in model.metadata_props if len(item.value) <= _LONGEST}
    labels = next(filter(None, (_labels(values.get(key, "")) for key in ("names", "labels", "classes"))), ())
    if "stride" in values and "names" in values:
        task = values.get("task", "detect")
        scaling = Scaling(pad=task != "classify")
        return Metadata(labels, scaling, _sides(_value(values.get("imgsz", ""))), task)
    return Metadata(labels, _scaling(values))


def _value(text: str) -> Any:
    """Return the value of JSON or of a Python literal; None if the text is neither."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, TypeError, ArithmeticError, SyntaxError, RecursionError, MemoryError):
            continue
    return None


def _labels(text: str) -> tuple[str, ...]:
    value = _value(text)
    if isinstance(value, Mapping):
        by_number = {}
        for key, label in value.items():
            number = (
                int(key) if isinstance(key, int) or (isinstance(key, str) and key.isdecimal() and len(key) < 9) else -1
            )
            if not 0 <= number < _MOST_CLASSES:
                return ()
            by_number[number] = label
        value = [by_number.get(i, f"class {i}") for i in range(max(by_number, default=-1) + 1)]
    if value is None:
        text = text.strip()  # the last line of a file ends with a line break
        value = text.split("\n" if "\n" in text else ",") if text else []
    if not isinstance(value, (list, tuple)) or len(value) > _MOST_CLASSES:
        return ()
    return tuple(str(label).strip()[:200] for label in value)


def _sides(value: Any) -> tuple[int, int]:
    """Return height and width from a number or a pair."""
    pair = [value, value] if isinstance(value, int) else value
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        return (0, 0)
    if not all(isinstance(side, int) and 0 < side <= _LARGEST_SIDE for side in pair):
        return (0, 0)
    return int(pair[0]), int(pair[1])


def _scaling(values: Mapping[str, str]) -> Scaling | None:
    """Return the scaling of `mean`, `std` and `scale`; None if they are missing or not numbers."""
    mean, std, scale = (_numbers(values.get(key, "")) for key in ("mean", "std", "scale"))
    if len(mean) not in (1, 3) or len(std) not in (1, 3) or not all(std) or len(scale) > 1 or not all(scale):
        return None
    return Scaling(scale[0] if scale else 255.0, mean, std)


def _numbers(text: str) -> tuple[float, ...]:
    value = _value(text)
    several = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(number, (int, float)) and abs(number) < _LARGEST for number in several):
        return ()
    return tuple(map(float, several))
