"""Predictions about a picture: classes, boxes, or areas, if the outputs of a network say which of these they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge.errors import TextError
from edge.onnx.images import Picture
from edge.onnx.metadata import Metadata
from edge.onnx.samples import Array, Feeds, shape_text

LEAST_SCORE = 0.25  # smallest score of a box
AREA = 0.3  # smallest value of a map that belongs to an area, as in PaddleOCR's text detector
MOST_BOXES = 300
_OVERLAP = 0.45  # intersection over union above which the box with the lower score is dropped
_MOST_SUPPRESSED = 5000  # boxes with the highest scores, which non-maximum suppression compares
_MOST_RUNS = 1 << 18  # rows of all areas together
_LEAST_AREA = 9  # pixels of an area
_MASKS = 32  # values of a box for its mask, in YOLO networks for segmentation
_SUM_ERROR = 1e-2

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels of the picture


@dataclass(frozen=True)
class Prediction:
    """One class, box or area."""

    label: str
    class_number: int
    score: float
    box: Box | None = None  # None for the class of the whole picture

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        box = None if self.box is None else [round(side, 2) for side in self.box]
        return {"label": self.label, "class": self.class_number, "score": self.score, "box": box}


@dataclass(frozen=True)
class Predictions:
    """All predictions about a picture, the highest score first."""

    kind: str  # "classes", "boxes" or "areas"
    rows: tuple[Prediction, ...]
    map: Array | None = None  # for areas: probability of each pixel of the input (height, width)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"kind": self.kind, "predictions": [row.to_json() for row in self.rows]}


@dataclass(frozen=True)
class _Boxes:
    """Boxes in pixels of the network's input."""

    corners: Array  # (n, 4): left, top, right, bottom
    scores: Array  # (n,)
    classes: Array  # (n,)


def predictions(
    outputs: Feeds, its_picture: Picture, metadata: Metadata, labels: Sequence[str] = (), top: int = 5
) -> Predictions:
    """Return the predictions that a network's outputs contain.

    labels: names of the classes; empty: those of the metadata.
    top: number of classes of the whole picture.

    These outputs are understood:

    - `boxes`, `scores` and `labels` or `classes` in the names of three outputs, as torchvision and TensorFlow do;
    - rows of left, top, right, bottom, score, class: (n, 6) or (1, n, 6);
    - YOLO's boxes, if the metadata have `names`: (1, 4 + classes, n) or (1, n, 5 + classes);
    - a map with the size of the input and values from 0 to 1: (1, 1, height, width);
    - a value for each class: (classes) or (1, classes). Without labels the values must be probabilities.

    Raises TextError if the outputs are none of these.
    """
    names = tuple(labels) or metadata.labels
    numbers = {name: array for name, array in outputs.items() if array.dtype.kind in "biuf"}
    boxes = _named_boxes(numbers, its_picture) or _rows_of_six(numbers, names) or _yolo(numbers, metadata)
    if boxes is not None:
        rows = _predicted(_in_picture(boxes, its_picture), names)
        return Predictions("boxes", rows)
    numbers = {name: array for name, array in numbers.items() if array.size}
    probabilities = _map(numbers, its_picture)
    if probabilities is not None:
        rows = _predicted(_in_picture(_areas(probabilities), its_picture), names or ("area",))
        return Predictions("areas", rows, probabilities)
    scores = _class_scores(numbers, names)
    if scores is not None:
        best = np.argsort(-scores, kind="stable")[:top]
        return Predictions("classes", tuple(Prediction(_label(names, i), int(i), float(scores[i])) for i in best))
    shapes = ", ".join(f"{name!r} {shape_text(array.shape)}" for name, array in outputs.items())
    about = f"; the labels name {len(names)} classes" if names else "; --labels names the classes"
    raise TextError(
        f"the outputs do not say whether they are classes, boxes or a map of the picture: {shapes}{about}."
        " docs/onnx.md lists the outputs that can be drawn"
    )


def _label(names: Sequence[str], number: int) -> str:
    return names[number] if 0 <= number < len(names) else f"class {number}"


def _predicted(boxes: _Boxes, names: Sequence[str]) -> tuple[Prediction, ...]:
    """Return boxes as predictions. Their corners are in pixels of the picture."""
    order = np.argsort(-boxes.scores, kind="stable")[:MOST_BOXES]
    return tuple(
        Prediction(
            _label(names, int(boxes.classes[i])),
            int(boxes.classes[i]),
            float(boxes.scores[i]),
            tuple(map(float, boxes.corners[i])),  # type: ignore[arg-type]
        )
        for i in order
    )


def _in_picture(boxes: _Boxes, its_picture: Picture) -> _Boxes:
    """Return the boxes with corners in pixels of the picture, without boxes that are empty there."""
    area, (width, height) = its_picture.area, its_picture.size
    start = np.array([area.left, area.top] * 2)
    scale = np.array([width / area.width, height / area.height] * 2)
    corners = np.clip((boxes.corners - start) * scale, 0, np.array([width, height] * 2))
    full = (corners[:, 2] > corners[:, 0]) & (corners[:, 3] > corners[:, 1])
    return _Boxes(corners[full], boxes.scores[full], boxes.classes[full])


def _likely(boxes: _Boxes) -> _Boxes:
    """Return the boxes with a sufficient, finite score and finite corners."""
    likely = (boxes.scores >= LEAST_SCORE) & np.isfinite(boxes.scores) & np.isfinite(boxes.corners).all(axis=1)
    return _Boxes(boxes.corners[likely], boxes.scores[likely], boxes.classes[likely])


def _named_boxes(outputs: Mapping[str, Array], its_picture: Picture) -> _Boxes | None:
    """Return the boxes of three outputs with telling names; None if there are no such outputs."""

    def named(ndim: int, *words: str) -> tuple[str, Array] | None:
        """Return the first output with one of these words in its name, and its values for the first picture."""
        return next(
            (
                (name, values)
                for name, array in outputs.items()
                if any(word in name.lower() for word in words) and (values := _of_first(array, ndim)) is not None
            ),
            None,
        )

    boxes, scores, classes = named(2, "boxes"), named(1, "scores"), named(1, "labels", "classes")
    if boxes is None or scores is None or classes is None:
        return None
    n = len(boxes[1])
    if boxes[1].shape[1] != 4 or not len(scores[1]) == len(classes[1]) == n:
        return None
    corners = boxes[1].astype(np.float64)
    if boxes[0].lower().startswith("detection_"):  # TensorFlow: top, left, bottom, right
        corners = corners[:, [1, 0, 3, 2]]
    if np.abs(np.nan_to_num(corners)).max(initial=0) <= 2:  # parts of the input's sides instead of pixels
        corners = corners * np.array(its_picture.input_size * 2)
    return _likely(_Boxes(corners, scores[1].astype(np.float64), _whole(classes[1])))


def _rows_of_six(outputs: Mapping[str, Array], names: Sequence[str]) -> _Boxes | None:
    """Return the boxes of an output with rows of left, top, right, bottom, score, class; None if there is none."""
    for array in outputs.values():
        rows = _of_first(array, 2)
        if rows is None or rows.shape[1] != 6 or rows.dtype.kind != "f":
            continue
        rows = rows.astype(np.float64)
        if array.shape == (1, 6) and (len(names) == 6 or abs(rows.sum() - 1) <= _SUM_ERROR):
            continue  # six classes
        rows = rows[np.isfinite(rows).all(axis=1)]
        likely, classes = rows[rows[:, 4] >= LEAST_SCORE], rows[:, 5]
        are_classes = bool((classes == np.round(classes)).all() and (classes >= -1).all())
        are_corners = bool((likely[:, 2:4] >= likely[:, :2]).all() and (likely[:, 4] <= 1).all())
        if are_classes and are_corners:
            return _likely(_Boxes(rows[:, :4], rows[:, 4], _whole(classes)))
    return None


def _yolo(outputs: Mapping[str, Array], metadata: Metadata) -> _Boxes | None:
    """Return the boxes of a YOLO network whose metadata name the classes; None if no output has their shape."""
    n, more = len(metadata.labels), {"segment": (_MASKS,), "pose": None}.get(metadata.task, (0,))
    if not n or metadata.task not in ("", "detect", "segment", "pose"):
        return None
    for array in outputs.values():
        rows = _of_first(array, 2)
        if rows is None or rows.dtype.kind != "f":
            continue
        columns = rows.shape[0]
        transposed = columns >= 4 + n if more is None else columns - 4 - n in more
        if transposed and rows.shape[1] > columns:
            values = rows.T.astype(np.float64)
            scores = values[:, 4 : 4 + n]
        elif rows.shape[1] in (5 + n, 5 + n + _MASKS):
            values = rows.astype(np.float64)
            scores = values[:, 5 : 5 + n] * values[:, 4:5]
        else:
            continue
        center, size = values[:, :2], values[:, 2:4]
        corners = np.concatenate([center - size / 2, center + size / 2], axis=1)
        return _suppressed(_likely(_Boxes(corners, scores.max(axis=1), scores.argmax(axis=1))))
    return None


def _suppressed(boxes: _Boxes) -> _Boxes:
    """Return the boxes that no box of the same class with a higher score overlaps: non-maximum suppression."""
    order = np.argsort(-boxes.scores, kind="stable")[:_MOST_SUPPRESSED]
    remaining: list[int] = []
    while len(order) and len(remaining) < MOST_BOXES:
        best, order = order[0], order[1:]
        remaining.append(best)
        first, others = boxes.corners[best], boxes.corners[order]
        common = np.clip(np.minimum(first[2:], others[:, 2:]) - np.maximum(first[:2], others[:, :2]), 0, None).prod(1)
        union = (first[2:] - first[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(1) - common
        overlaps = (common > _OVERLAP * union) & (boxes.classes[order] == boxes.classes[best])
        order = order[~overlaps]
    return _Boxes(boxes.corners[remaining], boxes.scores[remaining], boxes.classes[remaining])


def _map(outputs: Mapping[str, Array], its_picture: Picture) -> Array | None:
    """Return the first output that has a probability for each pixel of the input; None if there is none."""
    width, height = its_picture.input_size
    for array in outputs.values():
        pixels = array[0] if array.ndim > 2 else array
        while pixels.ndim > 2 and pixels.shape[0] == 1:
            pixels = pixels[0]
        if pixels.shape == (height, width) and pixels.dtype.kind == "f" and min(width, height) > 1:
            values = pixels.astype(np.float32)
            if values.min() >= 0 and values.max() <= 1:  # False for NaN
                return values
    return None


def _areas(probabilities: Array) -> _Boxes:
    """Return the boxes around connected pixels of at least AREA. The score is the mean probability."""
    parents: list[int] = []  # an earlier run of the same area, or the run itself

    def first(i: int) -> int:
        while parents[i] != i:
            parents[i] = parents[parents[i]]
            i = parents[i]
        return i

    runs: list[tuple[int, int, int]] = []  # row, start and end of connected pixels in one row
    above: list[int] = []
    sums = np.concatenate([np.zeros((len(probabilities), 1)), probabilities.cumsum(axis=1, dtype=np.float64)], axis=1)
    for y, row in enumerate(probabilities >= AREA):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], row.view(np.int8), [0]))))
        if len(runs) > _MOST_RUNS:
            break
        now = []
        for start, end in edges.reshape(-1, 2).tolist():
            i = len(runs)
            runs.append((y, start, end))
            parents.append(i)
            now.append(i)
        at = 0
        for i in now:
            _, start, end = runs[i]
            while at < len(above) and runs[above[at]][2] < start:  # runs that meet in a corner are connected, too
                at += 1
            j = at
            while j < len(above) and runs[above[j]][1] <= end:
                parents[first(above[j])] = first(i)
                j += 1
            at = max(at, j - 1)
        above = now
    areas: dict[int, list[float]] = {}  # left, top, right, bottom, pixels, sum of the probabilities
    if len(runs) > _MOST_RUNS:
        raise TextError(f"the map has more than {_MOST_RUNS} areas, which is noise rather than an answer")
    for i, (y, start, end) in enumerate(runs):
        own = areas.setdefault(first(i), [start, y, end, y + 1, 0, 0])
        own[0], own[2], own[3] = min(own[0], start), max(own[2], end), y + 1
        own[4] += end - start
        own[5] += sums[y, end] - sums[y, start]
    rows = np.array([own for own in areas.values() if own[4] >= _LEAST_AREA], np.float64).reshape(-1, 6)
    return _Boxes(rows[:, :4], rows[:, 5] / np.maximum(rows[:, 4], 1), np.zeros(len(rows), np.int64))


def _class_scores(outputs: Mapping[str, Array], names: Sequence[str]) -> Array | None:
    """Return the score of each class in the first output that has a value for each label, or that is probabilities.

    Other values than probabilities become probabilities by a softmax.
    """
    for array in outputs.values():
        row = array[0] if array.ndim > 1 else array
        row = row.reshape(-1) if row.size == max(row.shape, default=0) else row
        if row.ndim != 1 or len(row) < 2 or (row.dtype.kind != "f" and not names):
            continue
        values = row.astype(np.float64)
        in_range = bool(np.isfinite(values).all() and values.min() >= 0 and values.max() <= 1 + _SUM_ERROR)
        is_distribution = in_range and abs(values.sum() - 1) <= _SUM_ERROR
        if len(values) != len(names) and (names or not is_distribution):
            continue
        if not np.isfinite(values).all():
            raise TextError("an output has values for classes that are infinite or not a number")
        if in_range:
            return values
        powers: Array = np.exp(values - values.max())
        shares: Array = powers / powers.sum()
        return shares
    return None


def _whole(values: Array) -> Array:
    """Return numbers of classes as integers."""
    return np.clip(np.nan_to_num(values.astype(np.float64)), -1, 1 << 30).astype(np.int64)


def _of_first(array: Array, ndim: int) -> Array | None:
    """Return the values for the first picture; None if they do not have this number of dimensions."""
    if array.ndim == ndim + 1 and len(array):
        first: Array = array[0]
        return first
    return array if array.ndim == ndim else None
