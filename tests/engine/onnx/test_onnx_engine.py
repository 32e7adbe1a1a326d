"""A model on ONNX Runtime: the same outputs as without us, its memory, what does not fit, stopping, and providers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from edge.errors import EngineError, Interrupted, NotEnoughMemory
from edge.onnx.bench import measure, sequential
from edge.onnx.engine import OnnxEngine
from edge.onnx.file import check_model
from edge.onnx.pipeline import Result
from edge.onnx.runtime import runtime
from edge.onnx.samples import ANY_SHAPE, Array, SamplesError
from quant.errors import ModelFileError
from tests.support.helpers import TIMEOUT_S, until
from tests.support.onnx_files import external, saved, vectors
from tests.support.onnx_graphs import conv_net, images, light, mlp, run, with_random_weights
from tests.support.onnx_tiny import F32, F64, I64, Shape, Value, counting, graph, node


@pytest.fixture(scope="module", name="squeezenet")
def real_graph() -> ModelProto:
    return with_random_weights(light("squeezenet"))


@pytest.fixture(name="engine")
def small_engine() -> Iterator[OnnxEngine]:
    with OnnxEngine(mlp().SerializeToString(), 1) as engine:
        yield engine


def test_outputs_are_those_of_the_model(tmp_path: Path, squeezenet: ModelProto) -> None:
    x, other = images(1, 3), images(1, 4)
    [expected] = run(squeezenet, x)
    name = squeezenet.graph.input[0].name
    for model in (saved(squeezenet, tmp_path / "m.onnx"), squeezenet.SerializeToString()):
        with OnnxEngine(model, 1, buffers=1) as engine:
            [result] = engine.run({name: x}).values()
            assert np.array_equal(result, expected)
            engine.run({name: other})
            assert not np.array_equal(result, expected)  # it lies in the only buffer, which was used again
            assert engine.threads == 1
    assert [output.shape for output in engine.outputs] == [expected.shape]


def test_weights_beside_the_model(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    model = external(path)
    with OnnxEngine(path, 1) as engine:
        assert np.array_equal(engine.run({"x": vectors()})["y"], run(path, vectors())[0])
        assert engine.files == {path, tmp_path / "m.onnx.data"}
    with pytest.raises(ModelFileError, match=r"tensor 'w0' has its data in a file; give the model as a file"):
        OnnxEngine(model.SerializeToString())
    (tmp_path / "m.onnx.data").unlink()
    with pytest.raises(ModelFileError, match=r"tensor 'w0' has its data in 'm\.onnx\.data', which does not exist"):
        OnnxEngine(path)


def test_the_batch_is_the_callers(engine: OnnxEngine) -> None:
    for n in (1, 6, 0, 6):
        result = engine.run({"x": vectors(n)})["y"]
        assert result.shape == (n, 10)
        assert np.allclose(result, run(mlp(), vectors(n))[0], atol=1e-6)
    with OnnxEngine(mlp().SerializeToString(), 1, dims={"batch": 4}) as fixed:
        assert (fixed.inputs[0].shape, fixed.outputs[0].shape) == ((4, 64), (4, 10))
        with pytest.raises(SamplesError, match=r"'x' takes the shape \(4, 64\), got \(6, 64\)"):
            fixed.run({"x": vectors(6)})
    with OnnxEngine(mlp().SerializeToString(), 1, dims={"x[0]": 4}) as fixed:
        assert (fixed.inputs[0].shape, fixed.outputs[0].shape) == ((4, 64), (4, 10))
    for nameless in (None, "?"):
        unnamed = mlp()
        for value in (unnamed.graph.input[0], unnamed.graph.output[0]):
            value.type.tensor_type.shape.dim[0].Clear()
            if nameless:
                value.type.tensor_type.shape.dim[0].dim_param = nameless
        with OnnxEngine(unnamed.SerializeToString(), 1, dims={"x[0]": 4}) as fixed:
            assert fixed.run({"x": vectors(4)})["y"].shape == (4, 10)
            with pytest.raises(SamplesError, match=r"'x' takes the shape \(4, 64\), got \(6, 64\)"):
                fixed.run({"x": vectors(6)})
        with pytest.raises(SamplesError, match=r"for '\?', which no input has; open are x\[0\]"):
            OnnxEngine(unnamed.SerializeToString(), dims={"?": 4})
    with pytest.raises(SamplesError, match="a size is given for 'n', which no input has; open are batch"):
        OnnxEngine(mlp().SerializeToString(), dims={"n": 4})


@pytest.mark.parametrize("sets", [0, 1, 3])
def test_how_long_outputs_are_valid(sets: int) -> None:
    with OnnxEngine(mlp().SerializeToString(), 1, buffers=sets) as engine:
        feeds = [vectors(n + 1)[n:] for n in range(8)]
        expected = [engine.run({"x": x})["y"].copy() for x in feeds]
        results = [engine.run({"x": x})["y"] for x in feeds]
    remaining = sets or len(feeds)
    assert len({array.ctypes.data for array in results}) == remaining
    for a, b in zip(results[-remaining:], expected[-remaining:], strict=True):
        assert np.array_equal(a, b)


TYPES = [kind for kind in range(1, 14) if kind not in (TensorProto.STRING,)]


@pytest.mark.parametrize("kind", TYPES, ids=TensorProto.DataType.Name)
@pytest.mark.parametrize("shape", [(2, 3), ("n", 3), (None, 3), ()], ids=str)
def test_all_types_of_numbers(kind: int, shape: Shape) -> None:
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    x = np.arange(6).reshape(2, 3).astype(dtype) if shape else np.array(1, dtype)
    with OnnxEngine(graph([node("Identity", ["x"], ["y"])], [("x", kind, shape)], [("y", kind, shape)]), 1) as engine:
        y = engine.run({"x": x})["y"]
    assert y.dtype == dtype
    assert y.shape == x.shape
    assert np.array_equal(x, y)


def test_arrays_are_taken_as_they_lie(engine: OnnxEngine) -> None:
    x = vectors()
    expected = engine.run({"x": x})["y"]
    read_only = np.frombuffer(x.tobytes(), np.float32).reshape(x.shape)
    shifted = np.frombuffer(b"\0" + x.tobytes(), np.float32, offset=1).reshape(x.shape)
    assert not read_only.flags.writeable
    assert not shifted.flags.aligned
    for same in (read_only, shifted, np.asfortranarray(x), np.repeat(x, 2, 0)[::2]):
        assert np.array_equal(engine.run({"x": same})["y"], expected)
    assert np.isnan(engine.run({"x": x * np.float32(np.nan)})["y"]).all()


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({}, r"the model takes 'a', 'b'; nothing given"),
        ({"a": 0, "c": 0}, r"the model takes 'a', 'b'; 'a', 'c' given"),
        ({"a": np.zeros((2, 3)), "b": 0}, r"'a' takes values of type float32, got float64"),
        ({"a": [[1.0]], "b": 0}, r"'a' takes values of type float32, got list"),
        ({"a": np.zeros((2, 4), np.float32), "b": 0}, r"'a' takes the shape \(n, 3\), got \(2, 4\)"),
        ({"a": np.zeros(3, np.float32), "b": 0}, r"'a' takes the shape \(n, 3\), got \(3\)"),
        (
            {"a": np.zeros((2, 3), np.float32), "b": np.zeros((4, 3), np.float32)},
            r"the dimension 'n' is one number for all inputs; it is 2 in 'a' and 4 in 'b'",
        ),
    ],
)
def test_inputs_that_do_not_fit(feeds: Any, message: str) -> None:
    values: list[Value] = [("a", F32, ("n", 3)), ("b", F32, ("n", 3))]
    with (
        OnnxEngine(graph([node("Add", ["a", "b"], ["y"])], values, [("y", F32, ("n", 3))]), 1) as engine,
        pytest.raises(SamplesError, match=message),
    ):
        engine.run(feeds)


def test_shapes_that_nobody_knows_before() -> None:
    result = graph([node("NonZero", ["x"], ["y"])], [("x", F32, (4,))], [("y", I64, (1, "n"))])
    # Declared as one row for each of x, which is wrong, and which ONNX Runtime does not notice.
    wrong = graph(
        [node("Compress", ["x", "c"], ["y"], axis=0)],
        [("x", F32, ("n", 2)), ("c", TensorProto.BOOL, ("m",))],
        [("y", F32, ("n", 2))],
    )
    with OnnxEngine(result, 1, buffers=1) as engine:
        assert engine.run({"x": np.float32([0, 1, 0, 2])})["y"].tolist() == [[1, 3]]
        assert engine.run({"x": np.float32([0, 0, 0, 2])})["y"].tolist() == [[3]]
    with OnnxEngine(wrong, 1, buffers=1) as engine:
        x = np.arange(6, dtype=np.float32).reshape(3, 2)
        for chosen in ([True, False, True], [False, True, False], [True, True, True]):
            assert engine.run({"x": x, "c": np.array(chosen)})["y"].tolist() == x[chosen].tolist()


@pytest.mark.parametrize(
    ("operator", "kind", "words"),
    [
        (("Foo", F32, {}), EngineError, "no operator .*Foo, which node 'my_foo' uses"),
        (("Bar", F32, {"domain": "my.ops"}), EngineError, "no operator my.ops:Bar, which node 'my_bar' uses"),
        (("Acosh", F64, {}), EngineError, r"an implementation for Acosh\(9\) node with name 'my_acosh'"),
    ],
)
def test_operators_that_are_not_there(
    tmp_path: Path, operator: tuple[str, int, Any], kind: type[Exception], words: str
) -> None:
    op, total, attributes = operator
    content = graph([node(op, ["x"], ["y"], **attributes)], [("x", total, (2, 2))], [("y", total, (2, 2))])
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    for model in (content, path):
        with pytest.raises(kind, match=words):
            OnnxEngine(model)


def test_inputs_and_outputs_without_a_shape() -> None:
    """They are no scalars, though ONNX Runtime says so."""
    with OnnxEngine(graph([node("Neg", ["x"], ["y"])], [("x", F32, None)], [("y", F32, None)]), 1, buffers=2) as engine:
        assert engine.inputs[0].shape == engine.outputs[0].shape == ANY_SHAPE
        for shape in ((), (3,), (2, 0, 1), (1, 2, 3, 4)):
            x = np.ones(shape, np.float32)
            assert np.array_equal(engine.run({"x": x})["y"], -x)


def test_what_is_no_model() -> None:
    for content in (b"", b"text", mlp().SerializeToString()[:-50]):
        with pytest.raises(ModelFileError):
            OnnxEngine(content)
    unreadable = mlp().SerializeToString().replace(b"batch", b"bat\xff\xfe")
    with pytest.raises(ModelFileError, match=r"a name in it is not UTF-8"):
        OnnxEngine(unreadable)
    text = graph([node("Identity", ["x"], ["y"])], [("x", TensorProto.STRING, (1,))], [("y", TensorProto.STRING, (1,))])
    with pytest.raises(ModelFileError, match=r"'x' is a tensor\(string\)"):
        OnnxEngine(text)
    listed = onnx.load_from_string(graph([node("SequenceConstruct", ["x"], ["y"])], [("x", F32, (1,))], []))
    listed.graph.output.append(helper.make_tensor_sequence_value_info("y", F32, (1,)))
    with pytest.raises(ModelFileError, match=r"output 'y' is a seq\(tensor\(float\)\), which cannot be read"):
        OnnxEngine(listed.SerializeToString())


def classifier(labels: dict[str, Any]) -> bytes:
    """A linear classifier as scikit-learn exports it: a label, maps of probabilities, and a tensor beside them."""
    kind = TensorProto.STRING if "classlabels_strings" in labels else I64
    ml = {"domain": "ai.onnx.ml"}
    nodes = [
        node(
            "LinearClassifier",
            ["x"],
            ["label", "scores"],
            coefficients=[1.0, 0, 0, 1.0],
            intercepts=[0.0, 0],
            **labels,
            **ml,
        ),
        node("ZipMap", ["scores"], ["probabilities"], **labels_of_maps(labels), **ml),
    ]
    model = onnx.load_from_string(
        graph(nodes, [("x", F32, ("n", 2))], [("label", kind, ("n",)), ("scores", F32, ("n", 2))])
    )
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    maps = model.graph.output.add(name="probabilities").type.sequence_type.elem_type.map_type
    maps.key_type = kind
    maps.value_type.tensor_type.elem_type = F32
    return model.SerializeToString()


def labels_of_maps(labels: dict[str, Any]) -> dict[str, Any]:
    """The labels under the names that ZipMap has for them."""
    return {name.replace("ints", "int64s"): value for name, value in labels.items()}


@pytest.mark.parametrize("labels", [{"classlabels_ints": [3, 7]}, {"classlabels_strings": ["cat", "dog"]}], ids=str)
def test_outputs_of_text_and_of_maps_become_arrays(labels: dict[str, Any]) -> None:
    [names] = labels.values()
    x = np.array([[2.0, 1.0], [0.5, 3.0], [1.0, 0.0]], np.float32)
    with OnnxEngine(classifier(labels), 1) as engine:
        outputs = engine.run({"x": x})
    assert list(outputs) == ["label", "scores", "probabilities"]
    assert outputs["label"].tolist() == [names[0], names[1], names[0]]
    assert np.array_equal(outputs["probabilities"], outputs["scores"])
    with OnnxEngine(classifier(labels), 1, outputs=["scores"]) as engine:
        assert list(engine.run({"x": x})) == ["scores"]
    with pytest.raises(ModelFileError, match=r"no output 'score'; it has 'label', 'scores', 'probabilities'"):
        OnnxEngine(classifier(labels), 1, outputs=["score"])


def test_operator_that_onnx_runtime_alone_knows_is_run() -> None:
    """ONNX Runtime's optimizer writes it under the name of the standard, in which there is no such operator."""
    model = onnx.load_from_string(
        graph(
            [node("SimplifiedLayerNormalization", ["x", "scale"], ["y"], axis=-1, epsilon=1e-5)],
            [("x", F32, (2, 4)), ("scale", F32, (4,))],
            [("y", F32, (2, 4))],
        )
    )
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    with OnnxEngine(model.SerializeToString(), 1) as engine:
        y = engine.run({"x": x, "scale": np.ones(4, np.float32)})["y"]
    assert np.allclose(y, x / np.sqrt(np.square(x).mean(1, keepdims=True) + 1e-5), atol=1e-5)


@pytest.mark.parametrize("scale", ["scale", "nothing makes it"], ids=["valid", "refused"])
def test_check_leaves_operators_and_their_domains_as_they_were(scale: str) -> None:
    model = onnx.load_from_string(
        graph(
            [node("SimplifiedLayerNormalization", ["x", scale], ["y"], axis=-1), node("Relu", ["y"], ["z"])],
            [("x", F32, (2, 4)), ("scale", F32, (4,))],
            [("z", F32, (2, 4))],
        )
    )

    def said() -> tuple[list[tuple[str, str]], list[str]]:
        return [(own.op_type, own.domain) for own in model.graph.node], [own.domain for own in model.opset_import]

    before = said()
    with pytest.raises(ModelFileError) if scale != "scale" else nullcontext():
        check_model(model, "it")
    assert said() == before


def test_a_node_that_fails_and_memory_that_runs_out() -> None:
    values: list[Value] = [("a", F32, ("n", "k")), ("b", F32, ("l", "m"))]
    with OnnxEngine(graph([node("MatMul", ["a", "b"], ["y"])], values, [("y", F32, ("n", "m"))]), 1) as engine:
        with pytest.raises(EngineError, match="my_matmul"):
            engine.run({"a": np.zeros((2, 3), np.float32), "b": np.zeros((4, 2), np.float32)})
        assert (
            engine.run({"a": np.ones((2, 3), np.float32), "b": np.ones((3, 1), np.float32)})["y"].tolist() == [[3]] * 2
        )
    large = graph([node("ConstantOfShape", ["n"], ["y"])], [("n", I64, (1,))], [("y", F32, ("n",))])
    with OnnxEngine(large, 1) as engine, pytest.raises(NotEnoughMemory):
        engine.run({"n": np.array([1 << 46])})


def test_stop_ends_a_run_of_another_thread() -> None:
    with OnnxEngine(counting(), 1) as engine:
        ended: list[BaseException] = []
        began = threading.Event()

        def compute() -> None:
            began.set()
            try:
                engine.run({"n": np.array(1 << 50)})
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=compute, daemon=True)
        thread.start()
        began.wait()
        turns = count()
        until(lambda: next(turns) > 3, "this thread's turns: Python's lock is free")
        engine.stop()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
        assert [type(error) for error in ended] == [Interrupted]
        with pytest.raises(Interrupted):
            engine.run({"n": np.array(3)})
        engine.resume()
        assert engine.run({"n": np.array(3)})["y"] == 3


def test_after_closing(engine: OnnxEngine) -> None:
    result = engine.run({"x": vectors()})["y"]
    engine.close()
    engine.close()
    assert np.allclose(result, run(mlp(), vectors())[0], atol=1e-6)
    with pytest.raises(EngineError, match="closed"):
        engine.run({"x": vectors()})


def test_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = conv_net().SerializeToString()
    x = {"x": images(2, size=16)}
    best = OnnxEngine(model, 1)
    assert (best.provider, best.fell_back_from) == ("cpu", ())
    available = [name.removesuffix("ExecutionProvider").lower() for name in runtime().get_available_providers()]
    for name in available:
        with OnnxEngine(model, 1, name) as engine:
            assert engine.provider == name
            assert np.allclose(engine.run(x)["y"], best.run(x)["y"], atol=1e-4)
    with pytest.raises(EngineError, match=r"no provider 'abacus' in this build of ONNX Runtime; there is .*cpu"):
        OnnxEngine(model, 1, "abacus")
    if "cuda" not in available:  # a build that has it, on a device that does not
        names = ["CUDAExecutionProvider", "CPUExecutionProvider"]
        monkeypatch.setattr(runtime(), "get_available_providers", lambda: names)
        engine = OnnxEngine(model, 1)
        assert (engine.provider, len(engine.fell_back_from)) == ("cpu", 1)
        assert engine.fell_back_from[0].startswith("cuda: ")
        with pytest.raises(EngineError, match=r"cuda|CUDA"):
            OnnxEngine(model, 1, "cuda")


@pytest.mark.parametrize("window", [1, 3])
def test_latency_and_throughput_are_measured_apart(window: int) -> None:
    """A pipeline of as many stages as its window, each of which takes a second of a clock made for this."""

    def flow(feeds: Iterable[Mapping[str, Array]], in_flight: int) -> Iterator[Result]:
        stages, clock = float(window), 0.0
        for i, _ in enumerate(feeds):
            clock = (i + 1) * stages if in_flight == 1 else stages + i
            yield Result({}, clock - stages, clock, (1.0,) * window)

    speed = measure(flow, {}, 5, window)
    assert (speed.latency_ms_median, speed.latency_ms_p90) == (1e3 * window, 1e3 * window)
    assert speed.throughput_per_s == pytest.approx(1)
    assert (speed.window, speed.repeats) == (window, 5)
    assert measure(flow, {}, 5).window == window + 1  # enough for the slowest stage, and one more


def test_one_engine_is_measured_in_turn(engine: OnnxEngine) -> None:
    steps: list[tuple[int, int]] = []
    used: list[object] = []

    def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
        used.append(feeds)
        return engine.run(feeds)

    speed = measure(sequential(run), {"x": vectors()}, 4, 1, lambda done, total: steps.append((done, total)))
    assert 0 < speed.latency_ms_median <= speed.latency_ms_p90
    assert speed.throughput_per_s > 0
    assert len(used) == 10
    assert steps == [(n + 1, 10) for n in range(10)]
