"""Networks that are larger than their budget: outputs are those of the whole network, whatever is read from disk."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, helper, numpy_helper

from edge.api.onnx import OnnxModel
from edge.errors import EngineError, Interrupted, NotEnoughMemory, WeightsError
from edge.llama.address_space import PAGE
from edge.onnx import paged, part_weights
from edge.onnx.engine import OnnxEngine
from edge.onnx.lean import load_lean
from edge.onnx.paged import PagedNetwork
from edge.onnx.samples import Feeds, SamplesError
from edge.weights.direct_file import DirectFile
from partition.slices.onnx_recipe import weight_places, without_weights
from quant.errors import ModelFileError
from tests.support.onnx_graphs import TOLERANCES, mlp
from tests.support.onnx_networks import mobilenet_v2, resnet18

KIB = 1 << 10
LEAST = 256  # bytes; nearly all weights of these networks are large
RUNTIME = 8 << 20
NETWORKS = {
    "mlp": lambda: mlp((64, 256, 300, 8, 513, 256, 256, 128, 10)),
    "gemm": lambda: mlp((64, 256, 300, 256, 10), gemm=True),
    "resnet18": lambda: resnet18(size=32),
    "mobilenet": lambda: mobilenet_v2(size=32, narrower=4, classes=10),
}


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the memory of the process, which grows from test to test. Weights and reads are small."""
    monkeypatch.setattr(paged, "own_rss", lambda: RUNTIME)
    for module, name, value in (
        (part_weights, "_CHUNK", 10_000),
        (part_weights, "_STAGING", 10_000 + 2 * PAGE),
        (paged, "_MARGIN", 0),
        (paged, "_MIB", KIB),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.fixture(scope="module", params=[*NETWORKS])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("paged") / f"{request.param}.onnx"
    onnx.save(NETWORKS[request.param](), path)
    return path


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine layers of equal size."""
    path = tmp_path_factory.mktemp("paged") / "layers.onnx"
    onnx.save(mlp((128,) * 10), path)
    return path


def sample(engine: OnnxEngine | PagedNetwork, batch: int = 1, seed: int = 0) -> Feeds:
    rng = np.random.default_rng(seed)
    return {
        tensor.name: rng.standard_normal((batch, *tensor.concrete_shape[1:]), dtype=np.float32)
        for tensor in engine.inputs
    }


def opened(path: Path, memory: int, **options: object) -> PagedNetwork:
    return PagedNetwork(load_lean(path, LEAST), memory, 1, **options)  # type: ignore[arg-type]


def least(path: Path) -> int:
    """The least budget, as the error names it."""
    with pytest.raises(NotEnoughMemory) as caught:
        opened(path, 1)
    assert caught.value.least is not None
    return caught.value.least


def budgets(path: Path) -> Iterator[int]:
    """From the least one to one that holds everything."""
    smallest = least(path)
    with opened(path, 1 << 40) as network:
        assert not network.streamed
        largest = sum(network.uses.values())
    for part in (0.0, 0.2, 0.6, 1.0):
        yield smallest + round(part * max(0, largest - smallest))


def assert_close(result: Feeds, expected: Feeds) -> None:
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(1e-30, float(np.abs(value).max()))
        assert np.abs(result[name] - value).max() <= TOLERANCES[str(value.dtype)] * scale


@pytest.mark.parametrize("external", [False, True])
def test_outputs_are_those_of_the_whole_network(path: Path, external: bool, tmp_path: Path) -> None:
    if external:
        model = onnx.load(path)
        path = tmp_path / "external.onnx"
        onnx.save_model(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    streamed = []
    with OnnxEngine(path, 1) as whole:
        for memory in budgets(path):
            with opened(path, memory) as network:
                assert sum(network.uses.values()) <= memory
                streamed.append(len(network.streamed))
                for batch, seed in ((1, 0), (3, 1), (1, 2), (1, 2)):
                    feeds = sample(whole, batch, seed)
                    assert_close(network.run(feeds), whole.run(feeds))
                assert [tensor.name for tensor in network.outputs] == [tensor.name for tensor in whole.outputs]
    assert streamed[0] > 0
    assert streamed[-1] == 0


def test_each_streamed_part_is_read_once_a_run_and_others_once(layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[tuple[int, int]] = []
    read, lock = DirectFile.read, threading.Lock()

    def noted(file: DirectFile, offset: int, n_bytes: int, into: memoryview) -> int:
        with lock:
            reads.append((offset, n_bytes))
        return read(file, offset, n_bytes, into)

    monkeypatch.setattr(DirectFile, "read", noted)
    for memory in (least(layers), least(layers) + 150_000):
        reads.clear()
        with opened(layers, memory) as network:
            feeds = sample(network)
            streamed_bytes = sum(
                place.n_bytes for i in network.streamed for place in network._parts[i].weights.values()
            )
            resident_bytes = network.to_json()["paging"]["resident_bytes"]
            for _ in range(4):
                network.run(feeds)
            for arriving in network._weights._arriving:
                network._weights._finish(arriving)
            # The first parts of a fifth run have been read ahead.
            total = sum(n for _, n in reads) - resident_bytes
            assert 4 * streamed_bytes <= total <= 5 * streamed_bytes
            assert len(network.streamed) > 2
            assert all(part.weights for part in network._parts)  # nodes without weights need no session of their own


def test_a_failed_read_ends_the_run_and_the_next_run_reads_again(layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, fails = DirectFile.read, list[bool]()

    def failing(file: DirectFile, offset: int, n_bytes: int, into: memoryview) -> int:
        if fails:
            raise WeightsError("the disk failed")
        return read(file, offset, n_bytes, into)

    monkeypatch.setattr(DirectFile, "read", failing)
    with OnnxEngine(layers, 1) as whole, opened(layers, least(layers)) as network:
        for seed in range(4):
            fails.append(True)
            twice = [sample(whole, seed=seed)] * 2
            with pytest.raises(WeightsError, match="the disk failed"):
                list(map(network.run, twice))  # the first run may have all that it needs
            fails.clear()
            feeds = sample(whole, seed=seed)
            assert_close(network.run(feeds), whole.run(feeds))


def test_a_file_that_changes_is_not_computed_with(layers: Path, tmp_path: Path) -> None:
    path = tmp_path / "changing.onnx"
    path.write_bytes(layers.read_bytes())
    with opened(path, least(path)) as network:
        feeds = sample(network)
        network.run(feeds)
        path.write_bytes(layers.read_bytes()[:-1] + b"x")
        with pytest.raises(WeightsError, match="changed while in use"):
            list(map(network.run, [feeds, feeds]))  # the first run may have all that it needs


def test_a_stopped_run_is_interrupted_and_later_runs_are_right(layers: Path) -> None:
    with OnnxEngine(layers, 1) as whole, opened(layers, least(layers)) as network:
        feeds = sample(whole)
        network.stop()
        with pytest.raises(Interrupted):
            network.run(feeds)
        network.resume()
        assert_close(network.run(feeds), whole.run(feeds))


def test_runs_of_several_threads_are_computed_one_after_the_other(layers: Path) -> None:
    results: dict[int, Feeds] = {}
    with OnnxEngine(layers, 1) as whole, opened(layers, least(layers)) as network:
        threads = [
            threading.Thread(target=lambda i=i: results.update({i: network.run(sample(whole, seed=i))}))
            for i in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for i in range(6):
            assert_close(results[i], whole.run(sample(whole, seed=i)))


def test_the_least_budget_runs_and_a_mebibyte_less_does_not(path: Path) -> None:
    memory = least(path)
    opened(path, memory).close()
    with pytest.raises(NotEnoughMemory, match=r"needs a budget of at least .* weights .* Use a larger --memory"):
        opened(path, memory - KIB)


def test_a_network_without_large_weights_runs_in_its_least_budget(tmp_path: Path) -> None:
    path = tmp_path / "small.onnx"
    onnx.save(mlp((4, 6, 4)), path)
    with OnnxEngine(path, 1) as whole, opened(path, least(path)) as network:
        assert_close(network.run(sample(network)), whole.run(sample(whole)))


def test_an_input_that_does_not_fit_is_refused_and_nothing_is_left_behind(layers: Path) -> None:
    with opened(layers, least(layers)) as network:
        with pytest.raises(SamplesError):
            network.run({"x": np.zeros((1, 3), np.float32)})
        network.run(sample(network))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("edge-onnx-read")]


def test_the_python_api_and_its_limits(layers: Path) -> None:
    with OnnxEngine(layers, 1) as whole, OnnxModel(layers, threads=1, memory=1 << 33) as network:
        feeds = sample(whole)
        assert_close(network.run(feeds), whole.run(feeds))
    with pytest.raises(EngineError, match="memory goes with the provider cpu alone"):
        OnnxModel(layers, memory="1GiB", provider="cuda")


# --- the model without its weights ---


def small_model(sizes: list[int], names: list[str]) -> ModelProto:
    weights = [
        numpy_helper.from_array(np.arange(n, dtype=np.float32), f"{name}{i}")
        for i, (n, name) in enumerate(zip(sizes, names, strict=False))
    ]
    nodes = [helper.make_node("Identity", [tensor.name], [f"o{i}"]) for i, tensor in enumerate(weights)]
    outputs = [helper.make_tensor_value_info(f"o{i}", TensorProto.FLOAT, [None]) for i in range(len(weights))]
    graph = helper.make_graph(nodes, "g", [], outputs, weights, doc_string="text")
    return helper.make_model(graph, producer_name="p" * 200)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=6),
    st.lists(st.text(max_size=200), min_size=6, max_size=6),
    st.integers(0, 1300),
)
def test_the_lean_model_and_the_places_make_the_whole_model(sizes: list[int], names: list[str], least: int) -> None:
    model = small_model(sizes, names)
    content = model.SerializeToString()
    lean = ModelProto.FromString(without_weights(content, least))
    places = weight_places(content)
    for tensor in lean.graph.initializer:
        offset, n_bytes = places.get(tensor.name, (0, 0))
        assert tensor.HasField("raw_data") == (n_bytes < least)
        tensor.raw_data = content[offset : offset + n_bytes]
    assert lean == model


@settings(deadline=None)
@given(st.data())
def test_damaged_models_are_one_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = bytearray(small_model([40, 3], ["a", "b"]).SerializeToString())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.onnx"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with suppress(ModelFileError):
        load_lean(path, 64)


def test_weights_of_other_types_stay_in_the_model(tmp_path: Path) -> None:
    weight = helper.make_tensor("w", TensorProto.BFLOAT16, [400], np.arange(400).astype(np.float32))
    weight.raw_data = bytes(800)
    weight.ClearField("int32_data")
    node = helper.make_node("Cast", ["w"], ["y"], to=TensorProto.FLOAT)
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [400])
    path = tmp_path / "bf16.onnx"
    onnx.save(helper.make_model(helper.make_graph([node], "g", [], [output], [weight])), path)
    lean = load_lean(path, 64)
    assert not lean.places
    assert lean.file.model.graph.initializer[0].raw_data == bytes(800)


@pytest.mark.parametrize("n_bytes", [0, 64, 396, 399, 401, 404, 800])
def test_a_weight_with_another_number_of_bytes_than_its_values_is_refused(tmp_path: Path, n_bytes: int) -> None:
    weight = helper.make_tensor("w", TensorProto.FLOAT, [100], bytes(400), raw=True)
    node = helper.make_node("Identity", ["w"], ["y"])
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [100])
    model = helper.make_model(helper.make_graph([node], "g", [], [output], [weight]))
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    [place] = load_lean(path, 64).places.values()
    assert (place.n_bytes, place.shape) == (400, (100,))
    model.graph.initializer[0].raw_data = bytes(n_bytes)
    onnx.save(model, path)
    words = f"'w' needs 400 bytes; the file has {n_bytes}" if n_bytes >= 64 else "is not a valid ONNX model"
    with pytest.raises(ModelFileError, match=words):
        load_lean(path, 64)
