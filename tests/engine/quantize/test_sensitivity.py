"""Test sensitivities: measurements in memory equal those of a file, and the weights are unchanged afterwards."""

import json
import random
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.errors import TextError
from edge.llama.buffers import Weight
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.quantization import sensitivity
from edge.quantization.divergence import CHUNK_TOKENS, options_for
from edge.quantization.evaluate import evaluate
from edge.quantization.gguf import quantize
from edge.quantization.imatrix import collect
from edge.quantization.pace import Pace
from edge.quantization.sensitivity import MOST_CHUNKS, _finds, _groups, _Probe, measure_damages, measure_errors, probes
from edge.quantization.tensor_rows import TensorRows
from partition.model.file import ModelFile
from quant.gguf.imatrix import read_imatrix
from quant.mixes import MIXES
from quant.sensitivity import EXACT, Sensitivity
from quant.types import TYPES, TensorType
from tests.conftest import Synthetic
from tests.support.helpers import ROOT
from tools.demo_model.grammar import statements

F16 = ROOT / "tests" / "data" / "edge-demo-f16.gguf"
TEXT = " ".join(islice(statements(random.Random(7)), 60))
AS_MEASURED = EngineOptions(threads=1, repack=False, gpu_layers=0)


def kinds(*names: str) -> list[TensorType]:
    return [TYPES[name] for name in names]


def measure(
    file: ModelFile,
    types: Mapping[str, list[TensorType]],
    importance: Mapping[str, NDArray[np.float32]],
    within_s: float,
    text: str = TEXT,
) -> tuple[Sensitivity, list[tuple[int, int]]]:
    """Measure tensors in some types; return the result, and the steps that were reported."""
    seen: list[tuple[int, int]] = []
    rows = {name: TensorRows(file, name, importance.get(name)) for name in types}
    errors = measure_errors(rows, types, 1, lambda *at: None)
    result = measure_damages(
        file,
        text,
        rows,
        errors,
        within_s=within_s,
        threads=1,
        progress=lambda done, planned, left_s: seen.append((done, planned)),
    )
    return result, seen


@pytest.fixture(scope="module")
def matrices(tmp_path_factory: pytest.TempPathFactory, synthetic: Synthetic) -> dict[str, Path]:
    """Importance matrices of synthetic models, by architecture."""
    folder = tmp_path_factory.mktemp("matrices")
    for arch in ("llama", "gemma", "qwen3moe"):
        options = EngineOptions(threads=1)
        matrix = collect(synthetic(arch), TEXT, options, chunk_tokens=64, most=2, output=True)
        matrix.write(folder / f"{arch}.gguf")
    return {arch: folder / f"{arch}.gguf" for arch in ("llama", "gemma", "qwen3moe")}


# What follows from figures.

TABLE = Sensitivity(
    {"a": {"q4_k": 0.02, "q2_k": 0.5}, "b": {}},
    {"a": {"q4_k": 1e-3, "q2_k": 1e-1, "f16": 0.0}, "b": {"f16": 1e-8}},
    9.0,
)


def test_damage_is_measured_or_follows_from_the_nearest_error() -> None:
    result = Sensitivity(
        {"a": {"q4_k": 0.02, "q2_k": 0.5}},
        {"a": {"f16": 0.0, "q4_k": 1e-3, "q2_k": 1e-1, "q5_k": 5e-4, "q3_k": 4e-2}},
        9,
    )
    assert result.damage("a", "q4_k") == 0.02
    assert result.damage("a", "q5_k") == pytest.approx(0.01)
    assert result.damage("a", "q3_k") == pytest.approx(0.2)  # from q2_k, which is nearer
    assert result.damage("a", "f16") == 0


def test_damage_where_nothing_is_known() -> None:
    assert TABLE.damage("b", "f16") == 0  # an error of no weight
    with pytest.raises(AssertionError, match="not measured"):
        Sensitivity({"a": {}}, {"a": {"q2_k": 0.1}}, 9).damage("a", "q2_k")
    with pytest.raises(KeyError):
        TABLE.damage("none", "q4_k")


def test_it_is_kept_as_json() -> None:
    for table in (TABLE, replace(TABLE, left_s=3.0, wholes=((0.02, 0.03), (0.5, 1.0)))):
        assert Sensitivity.from_json(json.loads(json.dumps(table.to_json()))) == table


def test_values_on_the_grid_of_a_type_lose_nothing() -> None:
    result = Sensitivity({"a": {"q4_0": 0.02}}, {"a": {"q4_0": 4e-3, "q4_1": 4e-8, "q5_0": 1e-3, "q8_0": 3e-5}}, 9)
    assert result.damage("a", "q4_1") == 0 < result.damage("a", "q8_0") < result.damage("a", "q5_0")


def test_a_whole_file_costs_the_sum_times_what_others_cost() -> None:
    result = replace(TABLE, wholes=((0.16, 0.28), (0.01, 0.01)))
    assert result.together(0.16) == pytest.approx(0.28)
    assert result.together(0.01) == pytest.approx(0.01)
    assert result.together(0.04) == pytest.approx(0.04 * 1.75**0.5)  # half way between them
    assert result.together(0.32) == pytest.approx(0.56)  # beyond what is known, as the nearest
    assert result.together(0.001) == pytest.approx(0.001)
    assert result.together(0.0) == 0
    assert TABLE.together(0.3) == 0.3  # nothing is known


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        "text",
        {},
        {"spent_s": 1, "damages": {}},
        {"spent_s": "long", "damages": {}, "errors": {}},
        {"spent_s": 1, "damages": {"a": 3}, "errors": {}},
        {"spent_s": 1, "damages": {"a": {"q4_k": "x"}}, "errors": {}},
        {"spent_s": 1, "damages": {"a": {"q4_k": float("nan")}}, "errors": {"a": {"q4_k": 1}}},
        {"spent_s": 1, "damages": {"a": {"q4_k": -1}}, "errors": {"a": {"q4_k": 1}}},
        {"spent_s": 1, "damages": {"a": {}}, "errors": {"a": {"q4_k": 1}}},
        {"spent_s": 1, "damages": {"a": {"q4_k": 1}}, "errors": {"a": {"q2_k": 1}}},
        {"spent_s": 1, "damages": {"a": {"q4_k": 1}}, "errors": {}},
        {"spent_s": None, "damages": {}, "errors": {}},
        {"spent_s": 1, "damages": {}, "errors": {}, "wholes": [[1]]},
        {"spent_s": 1, "damages": {}, "errors": {}, "wholes": [[1, -1]]},
    ],
)
def test_what_is_no_table_is_a_value_error(values: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        Sensitivity.from_json(values)


# Rows in another type.


@pytest.mark.parametrize("weighed", [False, True])
def test_rows_are_quantized_as_llama_cpp_does(tmp_path: Path, weighed: bool) -> None:
    names = ("q8_0", "q4_0", "iq4_nl", "q2_k", "q4_k", "q6_k", "bf16")
    assert_as_llama_cpp(F16, {f"blk.{i}.ffn_down.weight": name for i, name in enumerate(names)}, weighed, tmp_path)


@pytest.mark.parametrize("weighed", [False, True])
def test_experts_are_quantized_as_llama_cpp_does(synthetic: Synthetic, tmp_path: Path, weighed: bool) -> None:
    types = {"blk.1.ffn_up_exps.weight": "q4_0", "blk.0.ffn_down_exps.weight": "q5_1"}
    assert_as_llama_cpp(synthetic("qwen3moe"), types, weighed, tmp_path)


def assert_as_llama_cpp(source: Path, types: Mapping[str, str], weighed: bool, folder: Path) -> None:
    file = ModelFile.open(source)
    importance, matrix = {}, None
    if weighed:
        matrix = folder / "m.gguf"
        collect(source, TEXT, EngineOptions(threads=1), chunk_tokens=64, most=1).write(matrix)
        importance = read_imatrix(matrix).weights_of(file)
        assert importance.keys() >= types.keys()
    own = {name: TYPES[kind] for name, kind in types.items()}
    quantize(file, folder / "out.gguf", MIXES["q8_0"], types=own, imatrix=matrix, threads=1)
    written = ModelFile.open(folder / "out.gguf")
    with ThreadPoolExecutor(2) as pool:
        for name, kind in own.items():
            assert written.tensors[name].type == kind
            space = TensorRows(file, name, importance.get(name)).quantized(kind, pool)
            assert bytes(space.view(0, written.tensors[name].n_bytes)) == bytes(written.data(name)), name
            space.close()


def test_errors_fall_with_the_bits_and_are_weighed() -> None:
    file, name = ModelFile.open(F16), "blk.2.ffn_down.weight"
    names = ("f16", "bf16", "q8_0", "q6_k", "q5_k", "q4_k", "q3_k", "q2_k")
    errors = TensorRows(file, name, None).errors(kinds(*names))
    assert list(errors) == list(names)
    assert errors["f16"] == 0
    assert list(errors.values()) == sorted(errors.values())
    assert 1e-3 < errors["q2_k"] < 1
    importance = np.where(np.arange(768) < 32, 1, 1e-9).astype(np.float32)
    assert TensorRows(file, name, importance).errors(kinds("q4_k"))["q4_k"] < errors["q4_k"]


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q5_0", "q8_0"])
def test_the_grid_of_a_type_is_seen_in_wider_floats(tmp_path: Path, kind: str) -> None:
    """All values count: a row outside of the sample that lies elsewhere is noticed."""
    name = "blk.2.ffn_down.weight"
    quantize(ModelFile.open(F16), tmp_path / "grid.gguf", MIXES["q8_0"], types={name: TYPES[kind]}, threads=1)
    quantize(ModelFile.open(tmp_path / "grid.gguf"), tmp_path / "f16.gguf", MIXES["f16"], threads=1)
    file = ModelFile.open(tmp_path / "f16.gguf")
    assert file.tensors[name].type.name == "f16"
    rows = TensorRows(file, name, np.ones(file.tensors[name].shape[0], np.float32))
    result = rows.errors(kinds("q4_0", "iq4_nl", "q4_1", "q5_0", "q8_0"))
    first = rows.errors(kinds("q4_0"), lambda: True)  # the time is up, so only the first rows count
    assert 0.5 < first["q4_0"] / max(result["q4_0"], 1e-12) < 2 or result["q4_0"] <= EXACT
    assert result[kind] <= EXACT
    others = {other for other in result if TYPES[other].bits_per_weight <= TYPES[kind].bits_per_weight} - {kind}
    assert all(result[other] > 100 * EXACT for other in others)
    values = np.frombuffer(file.data(name), np.float16).reshape(rows.rows, -1).copy()
    values[30] = np.random.default_rng(0).standard_normal(values.shape[1])
    rows._bytes = values.view(np.uint8)
    assert rows.errors(kinds(kind))[kind] > EXACT


def test_errors_that_are_not_read_in_time_are_those_of_the_layer_before() -> None:
    file = ModelFile.open(F16)
    names = [f"blk.{i}.{what}.weight" for i in range(4) for what in ("attn_q", "ffn_up")]
    rows = {name: TensorRows(file, name, None) for name in names}
    requests: list[int] = []
    types = dict.fromkeys(names, kinds("q4_0", "q8_0"))
    result = measure_errors(rows, types, 1, lambda done, total: requests.append(done), lambda: len(requests) == 3)
    assert requests == [1, 2, 3]
    assert list(result) == names
    assert result["blk.1.attn_q.weight"] == rows["blk.1.attn_q.weight"].errors(types[names[0]])
    assert result["blk.1.attn_q.weight"] == result["blk.3.attn_q.weight"] != result["blk.0.attn_q.weight"]
    assert result["blk.0.ffn_up.weight"] == result["blk.3.ffn_up.weight"]


@pytest.mark.parametrize("n_read", [0, 1, 2, 5])
def test_one_tensor_of_each_kind_is_read_whenever_the_time_is_up(n_read: int) -> None:
    file = ModelFile.open(F16)
    names = [f"blk.{i}.{what}.weight" for i in range(4) for what in ("attn_q", "ffn_up", "ffn_down")]
    rows = {name: TensorRows(file, name, None) for name in names}
    types, done = dict.fromkeys(names, kinds("q8_0")), [0]
    result = measure_errors(rows, types, 1, lambda n, total: done.append(n), lambda: done[-1] >= n_read)
    assert done[-1] == max(3, n_read)
    assert list(result) == names


# Measured in memory, and in a file.


@pytest.mark.parametrize(
    ("arch", "name", "kind"),
    [
        ("llama", "blk.0.ffn_down.weight", "q4_0"),
        ("llama", "output.weight", "q8_0"),
        ("llama", "token_embd.weight", "q4_0"),
        ("gemma", "token_embd.weight", "q4_0"),  # which is the head, too
        ("qwen3moe", "blk.1.ffn_up_exps.weight", "q4_0"),
    ],
)
def test_it_is_what_a_file_with_that_tensor_changed_predicts(
    synthetic: Synthetic, matrices: dict[str, Path], tmp_path: Path, arch: str, name: str, kind: str
) -> None:
    source, out = synthetic(arch), tmp_path / "out.gguf"
    file = ModelFile.open(source)
    importance = read_imatrix(matrices[arch]).weights_of(file)
    result, _ = measure(file, {name: kinds("f16", kind)}, importance, 30)
    types = {n: tensor.type for n, tensor in file.tensors.items() if tensor.type.name == "f16"} | {name: TYPES[kind]}
    quantize(file, out, MIXES["q8_0"], types=types, imatrix=matrices[arch], threads=1)
    written = {n: tensor.type.name for n, tensor in ModelFile.open(out).tensors.items()}
    assert [n for n, tensor in file.tensors.items() if tensor.type.name != written[n]] == [name]
    summary = evaluate(source, [out], TEXT, AS_MEASURED, most=MOST_CHUNKS)[1].summary
    assert result.damages == {name: {kind: pytest.approx(summary.mean_divergence, rel=1e-6)}}
    assert summary.mean_divergence > 1e-9
    assert result.errors[name]["f16"] == 0 < result.errors[name][kind]


def test_weights_are_as_before_afterwards(synthetic: Synthetic) -> None:
    file = ModelFile.open(synthetic("llama"))
    names = {name: () for name, tensor in file.tensors.items() if len(tensor.shape) > 1}
    results: dict[str, list[Weight]] = {}
    options = options_for(AS_MEASURED, CHUNK_TOKENS, 512)
    with Engine(file.path, options, [_finds(names, results)]) as engine, ThreadPoolExecutor(1) as pool:
        before = engine.decode([1, 2, 3], 0, outputs="all").copy()
        assert results.keys() == names.keys()
        probe = _Probe(engine, TEXT, Pace(1), time.monotonic)
        changed = {n: (TensorRows(file, n, None), results[n], TYPES["q4_0"]) for n in names}
        losses = [probe.loss(changed, pool) for _ in range(2)]
        assert losses[0] == losses[1] > 0
        assert probe.loss({}, pool) == 0
        engine.kv_clear()
        np.testing.assert_array_equal(engine.decode([1, 2, 3], 0, outputs="all"), before)


# Time.


def test_little_time_is_spent_on_groups(synthetic: Synthetic) -> None:
    file = ModelFile.open(synthetic("llama"))
    names = [name for name, tensor in file.tensors.items() if tensor.type.name == "f16"]
    result, seen = measure(file, {name: kinds("f16", "q8_0", "q4_0", "q5_1") for name in names}, {}, 1e-3)
    assert len(seen) == 9  # seven kinds of matrices in layers, and two outside: one type
    assert all(set(row) == {"q4_0"} for row in result.damages.values())
    up = [f"blk.{i}.ffn_up.weight" for i in range(2)]
    shares = [result.damages[name]["q4_0"] / result.errors[name]["q4_0"] for name in up]
    assert shares[0] == pytest.approx(shares[1])


def test_more_time_is_spent_on_single_tensors_and_more_types(synthetic: Synthetic) -> None:
    file = ModelFile.open(synthetic("llama"))
    names = [f"blk.{i}.ffn_up.weight" for i in range(2)]
    result, seen = measure(file, {name: kinds("f16", "q8_0", "q4_0", "q5_1") for name in names}, {}, 60)
    assert all(done <= planned for done, planned in seen)
    for name in names:
        assert set(result.damages[name]) == {"q8_0", "q4_0"}
        assert result.damages[name]["q8_0"] < result.damage(name, "q5_1") < result.damages[name]["q4_0"]


def test_every_tensor_is_measured_however_little_time_there_is(tmp_path: Path) -> None:
    source = tmp_path / "q4_0.gguf"
    quantize(ModelFile.open(F16), source, MIXES["q4_0"], threads=1)
    file = ModelFile.open(source)
    [head] = [name for name, tensor in file.tensors.items() if tensor.type.name == "q6_k"]
    rows = {name: TensorRows(file, name, None) for name in ("blk.0.attn_v.weight", head)}
    result, _ = measure(file, {name: probes(row) for name, row in rows.items()}, {}, 1e-6)
    assert {name: list(row) for name, row in result.damages.items()} == {
        "blk.0.attn_v.weight": ["q3_k"],
        head: ["q4_0"],  # it is q6_k
    }


def test_probes_are_narrower_and_of_whole_blocks(synthetic: Synthetic) -> None:
    rows = TensorRows(ModelFile.open(F16), "blk.0.ffn_down.weight", None)
    names = [kind.name for kind in probes(rows)]
    assert names[:3] == ["q4_0", "q3_k", "q6_k"]
    assert "iq2_xs" not in names  # needs importance
    weighed = TensorRows(ModelFile.open(F16), "blk.0.ffn_down.weight", np.ones(768, np.float32))
    assert "iq2_xs" in [kind.name for kind in probes(weighed)]


def test_groups_are_of_neighbouring_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    file = ModelFile.open(F16)
    names = [f"blk.{i}.{what}.weight" for i in range(8) for what in ("attn_q", "ffn_up")] + ["token_embd.weight"]
    rows = {name: TensorRows(file, name, None) for name in names}
    assert _groups(rows, 100) == [[name] for name in rows]
    nine = _groups(rows, 9)
    assert len(nine) == 9
    assert ["blk.2.attn_q.weight", "blk.3.attn_q.weight"] in nine
    assert sorted(len(group) for group in _groups(rows, 1)) == [1, 8, 8]
    assert sorted(name for group in nine for name in group) == sorted(names)
    monkeypatch.setattr(sensitivity, "available_memory", lambda: 4 * 2 * 256 * 768)  # for two of the larger ones
    assert max(len(group) for group in _groups(rows, 1) if "ffn_up" in group[0]) == 2


def test_a_text_that_is_too_short(synthetic: Synthetic) -> None:
    file = ModelFile.open(synthetic("llama"))
    with pytest.raises(TextError, match="at least 512 tokens"):
        measure(file, {"output.weight": kinds("f16", "q8_0")}, {}, 1, text="short")
