"""Test recipes for stages of ONNX models: weights are copied from the model's file, and the bytes equal the stage's."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import ModelProto, helper, numpy_helper

from edge.models.slice_cutting import chunks
from edge.onnx.model import OnnxSource
from partition.model.onnx_graph import OnnxGraph
from partition.slices.onnx_recipe import stage_recipe
from partition.slices.onnx_slice import slice_model
from partition.slices.recipe import Copy, Literal, Recipe
from tests.support.onnx_graphs import mlp
from tests.support.onnx_networks import mobilenet_v2, model_of
from tests.support.onnx_pipelines import at, owned
from tests.support.thorough import some

Weights = dict[str, np.ndarray]


def recipe_of(stage: ModelProto, model: ModelProto) -> Recipe:
    """The recipe of a stage by the file of a model."""
    data = model.SerializeToString()
    return stage_recipe(stage.SerializeToString(deterministic=True), data, hashlib.sha256(data).hexdigest())


def cut(recipe: Recipe, path: Path, start: int = 0, chunk_bytes: int = 1 << 20) -> bytes:
    """Return what it makes of a file."""
    return b"".join(chunks(recipe, path, start, chunk_bytes))


def copied(recipe: Recipe) -> int:
    """Bytes that come from the model."""
    return sum(segment.n_bytes for segment in recipe.segments if isinstance(segment, Copy))


def adding(weights: Weights, width: int) -> ModelProto:
    """x plus one weight after the other, each [rows, width]; the last one is added twice."""
    names = [*weights, list(weights)[-1]]
    nodes, last = [], "x"
    for i, name in enumerate(names):
        nodes.append(helper.make_node("ReduceSum", [name, "axes"], [f"s{i}"], keepdims=0))
        nodes.append(helper.make_node("Add", [last, f"s{i}"], [f"t{i}"], f"add{i}"))
        last = f"t{i}"
    return model_of(nodes, {"x": [width]}, [last], weights | {"axes": np.array([0], np.int64)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes")


@settings(max_examples=some(20, 40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_recipe_makes_the_stage(folder: Path, data: st.DataObject) -> None:
    width = data.draw(st.sampled_from([1, 7, 64]))
    sizes = data.draw(st.lists(st.sampled_from([1, 15, 16, 17, 64, 300, 1024, 1025]), min_size=2, max_size=6))
    model = adding({f"w{i}": np.full((n, width), i, np.float32) for i, n in enumerate(sizes)}, width)
    for name in data.draw(st.sets(st.sampled_from([f"w{i}" for i in range(len(sizes))]))):  # in the longer form
        [tensor] = [t for t in model.graph.initializer if t.name == name]
        values = numpy_helper.to_array(tensor).reshape(-1).tolist()
        tensor.ClearField("raw_data")
        tensor.float_data.extend(values)
    graph = OnnxGraph.from_model(model)
    start = data.draw(st.integers(0, len(graph.nodes) - 1))
    stop = data.draw(st.integers(start + 1, len(graph.nodes)))
    stage = slice_model(model, graph, start, stop)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    expected = stage.SerializeToString(deterministic=True)
    recipe = Recipe.from_bytes(recipe_of(stage, model).to_bytes())
    assert recipe.n_bytes == len(expected)
    begin, piece = data.draw(st.integers(0, len(expected))), data.draw(st.sampled_from([1 << 20, 4099]))
    assert cut(recipe, path, begin, piece) == expected[begin:]
    large = sum(len(t.raw_data) for t in stage.graph.initializer if len(t.raw_data) >= 4096)
    assert copied(recipe) == large


def test_weights_that_stages_share_are_copied_by_each(folder: Path) -> None:
    model = adding({"w0": np.ones((100, 64), np.float32), "w1": np.ones((200, 64), np.float32)}, 64)
    graph = OnnxGraph.from_model(model)
    n = len(graph.nodes)
    stages = [slice_model(model, graph, *bounds) for bounds in ((0, n - 1), (n - 1, n))]
    assert [copied(recipe_of(stage, model)) for stage in stages] == [300 * 64 * 4, 200 * 64 * 4]


def test_what_is_not_the_models_is_written_out() -> None:
    ones, twos = (np.full((100, 64), value, np.float32) for value in (1, 2))
    model = adding({"w": ones}, 64)
    for other in (adding({"w": twos}, 64), adding({"v": ones}, 64), adding({"w": ones[:99]}, 64)):
        recipe = recipe_of(other, model)
        assert recipe.segments == (Literal(other.SerializeToString(deterministic=True)),)
    assert copied(recipe_of(model, model)) == ones.nbytes


def test_a_damaged_last_byte_is_not_copied() -> None:
    weight = np.ones((100, 64), np.float32)
    other = weight.copy()
    other.view(np.uint8)[-1, -1] ^= 1
    assert copied(recipe_of(adding({"w": other}, 64), adding({"w": weight}, 64))) == 0


@pytest.mark.parametrize("junk", [b"\x0b", b"\xff" * 12, b"\x3a\x7f", b"\x3a\x80"])
def test_bytes_that_are_no_message(junk: bytes) -> None:
    with pytest.raises(ValueError, match=r"a field of|a number that"):
        stage_recipe(mlp().SerializeToString(), junk, "0" * 64)


def test_the_recipe_of_a_large_stage_is_small() -> None:
    model = mobilenet_v2(batch=1, size=64)
    graph = OnnxGraph.from_model(model)
    stage = slice_model(model, graph, 0, len(graph.nodes))
    recipe = recipe_of(stage, model)
    assert recipe.n_bytes > 13e6
    assert len(recipe.to_bytes()) < 0.03 * recipe.n_bytes
    model = mlp((1024, 1024, 1024))
    assert len(recipe_of(model, model).to_bytes()) < 15_000 < model.ByteSize() / 500


def cut_from_itself(model: OnnxSource, *positions: int) -> list[bool]:
    """Return whether each stage is copied from the model's own file. The copy must be what was cut."""
    own = []
    for part in model.parts(model.plan(["w"] * (len(positions) + 1), at(model, *positions))):
        with model.recipe(part) as (recipe, path):
            built = cut(recipe, path)
            own.append(path == model.file.path)
        assert path.exists() == own[-1]
        assert built == part.content
        assert hashlib.sha256(built).hexdigest() == part.digest
    return own


def test_stages_by_the_models_file_and_by_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = owned(mlp((64, 200, 200, 10)), tmp_path / "inside.onnx")
    assert cut_from_itself(model, 3, 6) == [True] * 3
    external = {"save_as_external_data": True, "location": "weights", "size_threshold": 0}
    model = owned(mlp((64, 200, 200, 10)), tmp_path / "beside.onnx", **external)
    assert cut_from_itself(model, 3, 6) == [True] * 3  # all is written out
    monkeypatch.setattr("edge.onnx.model._MOST_RECIPE", 20_000)  # what is more does not travel in one message
    assert cut_from_itself(model, 3, 6) == [False, False, True]
