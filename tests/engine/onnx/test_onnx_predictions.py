"""Test predictions about pictures: each kind of output, the place of boxes, and outputs that say nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from PIL import Image

import edge
from edge.errors import TextError
from edge.onnx.images import Area, Picture, Scaling
from edge.onnx.metadata import NOTHING, Metadata, metadata_of
from edge.onnx.predictions import predictions
from edge.pictures.drawing import draw

NAMES = ("cat", "dog")
YOLO_PROPS = {"names": "{0: 'cat', 1: 'dog'}", "stride": "32"}
LISTS = {"names": '["cat", "dog"]', "mean": "[0.5]", "std": "[0.25, 0.5, 1]"}
YOLO = Metadata(NAMES, Scaling(pad=True), (100, 100), "detect")
# A picture of 200 x 100 pixels in the middle of an input of 100 x 100, at half its size.
WIDE = Picture(Path("wide.png"), np.zeros(1), None, (200, 100), (100, 100), Area(0, 25, 100, 50), (0, 0, 0), "")


def rows(outputs: dict[str, Any], metadata: Metadata = NOTHING, labels: tuple[str, ...] = ()) -> list[Any]:
    its_predictions = predictions({name: np.asarray(array) for name, array in outputs.items()}, WIDE, metadata, labels)
    return [(row.label, round(row.score, 3), row.box) for row in its_predictions.rows]


def yolo(*boxes: tuple[float, ...]) -> Any:
    """Boxes of YOLO: center, size and the score of each class, one in each column, with many empty columns."""
    values = np.zeros((1, 6, 50), np.float32)
    values[0, :, : len(boxes)] = np.array(boxes).T
    return values


def test_yolo_boxes_are_in_pixels_of_the_picture_without_duplicates() -> None:
    boxes = yolo(
        (20, 50, 20, 20, 0.1, 0.9), (21, 50, 20, 20, 0.2, 0.8), (21, 50, 20, 20, 0.7, 0), (80, 50, 40, 80, 0.5, 0)
    )
    assert rows({"output0": boxes}, YOLO) == [
        ("dog", 0.9, (20, 30, 60, 70)),
        ("cat", 0.7, (22, 30, 62, 70)),
        ("cat", 0.5, (120, 0, 200, 100)),  # the border is not a part of the picture
    ]


def test_yolo_boxes_with_an_objectness_are_recognized() -> None:
    values = np.zeros((1, 50, 7), np.float32)
    values[0, 3] = (20, 50, 20, 20, 0.5, 0.8, 0.1)
    assert rows({"output": values}, YOLO) == [("cat", 0.4, (20, 30, 60, 70))]


def test_boxes_with_infinite_values_are_dropped() -> None:
    boxes = yolo((20, 50, 20, 20, 0.9, 0), (20, 50, 20, 20, np.inf, 0), (20, 50, np.inf, 20, 0.9, 0))
    assert rows({"output0": boxes}, YOLO) == [("cat", 0.9, (20, 30, 60, 70))]
    named = {"boxes": [[10.0, 35, 20, 45]] * 2, "labels": np.array([1, 1]), "scores": [0.9, np.inf]}
    assert rows(named, labels=NAMES) == [("dog", 0.9, (20, 20, 40, 40))]


def test_masks_and_key_points_of_yolo_are_not_classes() -> None:
    values = np.full((1, 6 + 32, 50), 9.0)
    values[0, :6] = yolo((20, 50, 20, 20, 0.9, 0))
    segment, pose = (Metadata(NAMES, None, (0, 0), task) for task in ("segment", "pose"))
    assert rows({"output0": values}, segment) == [("cat", 0.9, (20, 30, 60, 70))]
    assert rows({"output0": values[:, : 6 + 21]}, pose) == [("cat", 0.9, (20, 30, 60, 70))]
    by_row = np.concatenate([values[0, :4], np.full((1, 50), 0.5), values[0, 4:]]).T
    assert rows({"output0": by_row[None]}, segment) == [("cat", 0.45, (20, 30, 60, 70))]
    for outputs, metadata in ((values, YOLO), (values[:, :5], pose)):
        with pytest.raises(TextError):
            rows({"output0": outputs}, metadata)


def test_boxes_beside_the_picture_and_empty_ones_are_dropped() -> None:
    values = np.array([[10, 0, 20, 10, 0.9, 1], [10, 35, 10, 45, 0.9, 1], [10, 35, 20, 45, 0.8, -1]], np.float32)
    assert rows({"out": values}, labels=NAMES) == [("class -1", 0.8, (20, 20, 40, 40))]
    values[2, 4] = 1.5  # no score
    with pytest.raises(TextError):
        rows({"out": values}, labels=NAMES)
    parts = {"boxes": [[0.5, 0.35, 1.5, 0.45]], "labels": np.array([2]), "scores": [0.9]}
    assert rows(parts, labels=NAMES) == [("class 2", 0.9, (100, 20, 200, 40))]


def test_noise_is_not_a_map_of_areas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.onnx.predictions._MOST_RUNS", 100)
    noise = np.indices((100, 100)).sum(0) % 2
    with pytest.raises(TextError, match="noise"):
        rows({"map": noise.astype(np.float32)})


@pytest.mark.parametrize("batch", [True, False])
def test_rows_of_six_are_boxes(batch: bool) -> None:
    values = np.array([[10, 35, 20, 45, 0.9, 1], [0, 0, 0, 0, 0, 0]], np.float32)
    assert rows({"out": values[None] if batch else values}, labels=NAMES) == [("dog", 0.9, (20, 20, 40, 40))]
    assert rows({"out": values[:0]}) == []


def test_three_named_outputs_are_boxes() -> None:
    outputs = {"boxes": [[10.0, 35, 20, 45]] * 2, "labels": np.array([1, 7]), "scores": [0.9, 0.2]}
    assert rows(outputs, labels=NAMES) == [("dog", 0.9, (20, 20, 40, 40))]
    tensorflow = {
        "detection_boxes": [[[0.35, 0.1, 0.45, 0.2]]],
        "detection_classes": [[7.0]],
        "detection_scores": [[0.75]],
        "num_detections": [1.0],
    }
    [(label, score, box)] = rows(tensorflow, labels=NAMES)
    assert (label, score) == ("class 7", 0.75)
    assert box == pytest.approx((20, 20, 40, 40))


def test_map_becomes_areas_of_connected_pixels() -> None:
    values = np.zeros((1, 1, 100, 100), np.float32)
    values[0, 0, 30:40, 10:14] = values[0, 0, 30:34, 20:24] = 0.5  # two arms of a U
    values[0, 0, 40:44, 10:24] = values[0, 0, 34:40, 20:24] = 0.5
    values[0, 0, 50:60, 50:60] = 1.0
    values[0, 0, 70, 70] = 1.0  # too small
    values[0, 0, 0, 0] = 0.29
    assert rows({"map": values}) == [("area", 1.0, (100, 50, 120, 70)), ("area", 0.5, (20, 10, 48, 38))]


def test_values_of_classes_become_probabilities() -> None:
    assert rows({"logits": [[0.0, np.log(3)]]}, labels=NAMES) == [("dog", 0.75, None), ("cat", 0.25, None)]
    assert rows({"softmax": np.array([[[[0.4]], [[0.6]]]])}) == [("class 1", 0.6, None), ("class 0", 0.4, None)]
    assert rows({"six": [[0, 0, 0, 0, 1.0, 0]]})[0] == ("class 4", 1.0, None)


@pytest.mark.parametrize(
    ("outputs", "metadata", "words"),
    [
        ({"embedding": [[0.3, -2.0, 0.1]]}, NOTHING, "'embedding' (1, 3); --labels names"),
        ({"logits": [[0.3, -2.0, 0.1]]}, YOLO, "the labels name 2 classes"),
        ({"characters": np.zeros((1, 11, 40))}, NOTHING, "do not say whether they are classes"),
        ({"output0": np.zeros((1, 7, 50))}, Metadata(NAMES, None, (0, 0), "obb"), "do not say whether they are"),
        ({"depth": np.full((1, 1, 100, 100), 7.5)}, NOTHING, "do not say whether they are classes"),
        ({"logits": [[np.nan, 1.0]]}, YOLO, "infinite or not a number"),
        ({"noise": np.indices((1, 1, 100, 100)).sum(0) % 2 * np.nan}, NOTHING, "do not say"),
        ({"detections": np.zeros((0, 7), np.float32), "masks": np.zeros((0, 1, 28, 28))}, NOTHING, "do not say"),
        ({"empty": np.zeros((1, 0), np.float32)}, YOLO, "do not say"),
    ],
)
def test_outputs_that_do_not_say_what_they_are_raise(outputs: dict[str, Any], metadata: Metadata, words: str) -> None:
    with pytest.raises(TextError) as error:
        rows(outputs, metadata)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (YOLO_PROPS | {"imgsz": "[64, 96]"}, Metadata(NAMES, Scaling(pad=True), (64, 96), "detect")),
        (YOLO_PROPS | {"imgsz": "[-1, 1e9]", "task": "classify"}, Metadata(NAMES, Scaling(), (0, 0), "classify")),
        (LISTS, Metadata(NAMES, Scaling(255, (0.5,), (0.25, 0.5, 1)))),
        ({"labels": "cat\ndog"}, Metadata(NAMES)),
        ({"labels": "\ncat\r\ndog\r\n\n"}, Metadata(NAMES)),
        ({"classes": "cat, dog"}, Metadata(NAMES)),
        ({"names": "{1: 'dog'}"}, Metadata(("class 0", "dog"))),
        ({"names": "{100000: 'dog'}"}, NOTHING),
        ({"labels": "x" * 201 + ",dog"}, Metadata(("x" * 200, "dog"))),
        ({"names": "['cat']", "classes": "['dog']"}, Metadata(("cat",))),
        ({"stride": "32", "labels": "['cat']"}, Metadata(("cat",))),
        (YOLO_PROPS | {"imgsz": "16384"}, Metadata(NAMES, Scaling(pad=True), (16384, 16384), "detect")),
        (YOLO_PROPS | {"imgsz": "[16384, 16385]"}, Metadata(NAMES, Scaling(pad=True), (0, 0), "detect")),
        ({"mean": "[0.1, 0.2]", "std": "1"}, NOTHING),
        ({"mean": "0", "std": "[1, 2]"}, NOTHING),
        ({"mean": "0", "std": "[1, 0, 1]"}, NOTHING),
        ({"mean": "0", "std": "1", "scale": "0"}, NOTHING),
        ({"mean": "NaN", "std": "1"}, NOTHING),
        ({"mean": "0", "std": "1", "scale": "2"}, Metadata((), Scaling(2.0, (0.0,), (1.0,)))),
        ({"labels": "cat," + "x" * (1 << 20)}, NOTHING),
        ({"labels": "x\n" * 100_000}, Metadata(("x",) * 100_000)),
        ({"labels": "x\n" * 100_001}, NOTHING),
        ({"names": "{99999999999: 'dog', -1: 'cat'}", "mean": "x", "std": "0"}, NOTHING),
        ({"names": "{[0]: 'cat'}", "labels": "{0: 'cat', 1: 'dog'}"}, Metadata(("{[0]: 'cat'}",))),
        ({"names": "1" + "0" * 400 + "+1j", "mean": "{[0]: 1}", "std": "1"}, Metadata(("1" + "0" * 199,))),
        ({"names": "[" * 100_000, "mean": "1" + "0" * 5000, "std": "1"}, Metadata(("[" * 200,))),
    ],
)
def test_metadata_are_read_or_ignored(values: dict[str, str], expected: Metadata) -> None:
    model = helper.make_model(helper.make_graph([], "g", [], []))
    helper.set_model_props(model, values)
    assert metadata_of(model) == expected


def test_drawing_changes_the_picture_only_at_a_box(tmp_path: Path) -> None:
    Image.new("RGB", (400, 300), "white").save(tmp_path / "white.png")
    its_picture = Picture(
        tmp_path / "white.png", np.zeros(1), None, (400, 300), (400, 300), Area(0, 0, 400, 300), (0, 0, 0), ""
    )
    outputs = {"out": np.array([[100, 100, 200, 200, 0.9, 0]], np.float32)}
    draw(its_picture, predictions(outputs, its_picture, NOTHING, NAMES), tmp_path / "drawn.png")
    with Image.open(tmp_path / "drawn.png") as image:
        changed = np.asarray(image.convert("L").point(lambda value: 255 * (value < 250))) > 0
    assert changed[100:200, 100].all()
    assert changed[199, 100:200].all()
    assert not changed[103:197, 103:197].any()
    assert not changed[:, 205:].any()
    assert changed[80:100, 100:110].any()  # the label


def test_predict_in_python_equals_the_command(tmp_path: Path) -> None:
    nodes = [helper.make_node("ReduceMean", ["x"], ["y"], axes=[2, 3], keepdims=0)]
    values = [helper.make_tensor_value_info("x", 1, (1, 3, 4, 4)), helper.make_tensor_value_info("y", 1, (1, 3))]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    helper.set_model_props(model, {"labels": "red,green,blue", "mean": "0", "std": "1"})
    onnx.save(model, str(tmp_path / "colors.onnx"))
    Image.new("RGB", (30, 20), (0, 255, 128)).save(tmp_path / "green.png")
    with edge.OnnxModel(tmp_path / "colors.onnx") as network:
        its_predictions = network.predict(tmp_path / "green.png", top=2, output=tmp_path / "drawn.png")
        assert [row.label for row in its_predictions.rows] == ["green", "blue"]
        assert its_predictions.rows[0].score == pytest.approx(1)
        first = network.predict(tmp_path / "green.png", labels=["a", "b", "c"], mean=[0, 1, 0], std=[1]).rows[0]
        assert first.label == "c"
        with pytest.raises(TextError, match=r"ends in \.png"):
            network.predict(tmp_path / "green.png", output="drawn.gif")
    with Image.open(tmp_path / "drawn.png") as image:
        assert image.size == (30, 20)


SQUARE = Picture(Path("square.png"), np.zeros(1), None, (100, 100), (100, 100), Area(0, 0, 100, 100), (0, 0, 0), "")


@pytest.mark.parametrize("seed", range(3))
def test_suppressed_boxes_overlap_a_better_box_and_no_others_do(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = 60
    boxes = np.concatenate([rng.integers(20, 80, (n, 2)), rng.integers(8, 40, (n, 2))], axis=1)
    scores, classes = rng.permutation(np.arange(25, 25 + n)) / 100, rng.integers(0, 2, n)
    values = np.zeros((1, 6, 100))
    values[0, :4, :n], values[0, 4 + classes, np.arange(n)] = boxes.T, scores

    def share(i: int, j: int) -> float:
        """Return the intersection over the union of two boxes."""
        common = 1.0
        for axis in (0, 1):
            (a, width_a), (b, width_b) = boxes[i, axis::2], boxes[j, axis::2]
            common *= max(0, min(a + width_a / 2, b + width_b / 2) - max(a - width_a / 2, b - width_b / 2))
        return float(common / (boxes[i, 2:].prod() + boxes[j, 2:].prod() - common))

    expected: list[int] = []
    for i in np.argsort(-scores).tolist():
        if all(classes[i] != classes[j] or share(i, j) <= 0.45 for j in expected):
            expected.append(i)
    result = predictions({"output0": values}, SQUARE, YOLO).rows
    assert [row.score for row in result] == [scores[i] for i in expected]
    assert 5 < len(expected) < n


def test_bounds_of_scores_and_of_the_number_of_boxes() -> None:
    values = np.array([[10, 35, 20, 45, score, 0] for score in (0.25, 0.2499)], np.float32)
    assert len(rows({"out": values})) == 1
    many = np.tile(np.array([[10, 35, 20, 45, 0.5, 0]], np.float32), (301, 1))
    many[300, 4] = 0.9
    result = rows({"out": many})
    assert (len(result), result[0][1]) == (300, 0.9)


@pytest.mark.parametrize("seed", range(5))
def test_areas_are_those_of_a_flood_fill(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = np.zeros((100, 100), np.float32)
    values[5:45, 5:45] = rng.choice([0.29, 0.3, 1.0], (40, 40), p=[0.62, 0.3, 0.08])
    left = set(map(tuple, np.argwhere(values >= np.float32(0.3)).tolist()))
    expected = []
    while left:
        todo = [left.pop()]
        pixels = []
        while todo:
            y, x = todo.pop()
            pixels.append((y, x))
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            todo += near
        if len(pixels) >= 9:
            ys, xs = zip(*pixels, strict=True)
            score = float(np.mean([values[pixel] for pixel in pixels]))
            expected.append(((min(xs), min(ys), max(xs) + 1, max(ys) + 1), pytest.approx(score)))
    result = predictions({"map": values}, SQUARE, NOTHING).rows
    assert sorted((row.box, row.score) for row in result) == sorted(expected, key=lambda area: area[0])
    assert len(expected) > 3
