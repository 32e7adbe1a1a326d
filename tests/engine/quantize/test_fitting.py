"""A file of a given size: within half a percent below it, better than any uniform mix, and measured only once."""

import errno
import json
import os
import pkgutil
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.errors import SizeTooSmall, TextError
from edge.llama import ggml
from edge.llama.quantizer import quantize_model
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.models import shapes, synth
from edge.quantization.divergence import log_probabilities
from edge.quantization.evaluate import evaluate
from edge.quantization.fit import FitOptions, Fitted, file_within, fit_file
from edge.quantization.imatrix import collect
from edge.quantization.pace import Pace
from edge.quantization.sensitivity import PROBES
from partition.model.file import ModelFile
from quant.gguf.imatrix import read_imatrix
from quant.mixes import MIXES
from quant.types import TYPES, TensorType, type_by_id
from tests.conftest import Synthetic
from tests.engine.quantize.test_kernel_speed import device
from tests.support import FEW_PROBES
from tests.support.helpers import ROOT, assert_one_line_error, run_edge
from tests.support.quantizing import ask_types_once, measure_less
from tests.support.thorough import some
from tools.demo_model.grammar import statements

F16 = ROOT / "tests" / "data" / "edge-demo-f16.gguf"
TEXT = " ".join(islice(statements(random.Random(7)), 100))
MEASURE = " ".join(islice(statements(random.Random(9)), 256))
SHORT = " ".join(islice(statements(random.Random(7)), 20))
OTHER = " ".join(islice(statements(random.Random(8)), 120))  # what no choice has seen
ONE = EngineOptions(threads=1)
STEPS = 120  # comparisons that may be made: each tensor in one type and more, or in two
KINDS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0")
UNIFORM = ("q2_k", "q3_k_m", "q4_k_s", "q4_k_m", "q5_k_m")
BUDGETS = (3_300_000, 3_900_000, 4_520_000, 5_000_000, 5_700_000)
# Each budget is above one of UNIFORM and below the next.
MIB = 1 << 20

Said = list[tuple[str, int, int]]


def kinds(*names: str) -> tuple[TensorType, ...]:
    return tuple(TYPES[name] for name in names)


class Chunks:
    """Counts how many chunks of 512 tokens were computed."""

    def __init__(self) -> None:
        self.computed = 0.0

    def log_probabilities(self, engine: Engine, tokens: Any) -> Any:
        self.computed += len(tokens) / 512
        return log_probabilities(engine, tokens)


@dataclass(frozen=True)
class Setting:
    """The bundled model, made to fit BUDGETS and in UNIFORM with the same importance matrix.

    The clock of its measuring counts chunks that are computed, so that as much is measured on any machine.
    """

    file: ModelFile
    options: FitOptions
    fits: dict[int, Fitted]  # by budget
    uniform: dict[str, int]  # bytes
    losses: dict[int | str, float]  # divergence on OTHER


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where measurements are kept: what one test measured, another need not."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        measure_less(patch)
        device(folder, patch)
        ask_types_once(patch)
        patch.setattr("edge.quantization.sensitivity.PROBES", PROBES[: some(FEW_PROBES, len(PROBES))])
        yield folder


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("uniform")
    file, matrix = ModelFile.open(F16), folder / "m.gguf"
    collect(F16, TEXT, ONE).write(matrix)
    importance = read_imatrix(matrix).weights_of(file)
    chunks = Chunks()
    options = FitOptions(matrix, kinds(*KINDS), within_s=STEPS / 0.5, threads=1, clock=lambda: chunks.computed)
    paths = {name: folder / f"{name}.gguf" for name in (*UNIFORM, *BUDGETS)}  # type: ignore[misc]
    for name in UNIFORM:
        job = {"types": {}, "importance": importance, "dry": False, "on_log": lambda line: None}
        quantize_model(str(F16), str(paths[name]), MIXES[name].id, threads=1, **job)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edge.quantization.sensitivity.log_probabilities", chunks.log_probabilities)
        fits = {budget: fitted(file, paths[budget], budget, MEASURE, options)[0] for budget in BUDGETS}  # type: ignore[attr-defined]
    quality = evaluate(F16, list(paths.values()), OTHER, ONE, chunk_tokens=128, most=8)[1:]
    losses = {name: item.summary.mean_divergence for name, item in zip(paths, quality, strict=True)}
    assert {budget: paths[budget].stat().st_size for budget in BUDGETS} == {  # type: ignore[attr-defined]
        b: f.outcome.n_bytes for b, f in fits.items()
    }
    return Setting(file, options, fits, {name: paths[name].stat().st_size for name in UNIFORM}, losses)


def fitted(file: ModelFile, out: Path, budget: int, text: str, options: FitOptions) -> tuple[Fitted, list[str]]:
    """Fit a file to a size; return the result, and the stages that were gone through."""
    said: Said = []
    result = fit_file(
        file, out, budget, text, options, lambda stage, done, total, what="": said.append((stage, done, total))
    )
    assert all(0 <= done <= total for _, done, total in said)
    return result, list(dict.fromkeys(stage for stage, _, _ in said))


@pytest.mark.thorough  # as tests/real/test_quantize.py does with trained weights; with few types: `test_experts`
@pytest.mark.parametrize("budget", BUDGETS)
def test_it_fills_the_budget_and_is_no_worse_than_a_uniform_mix(setting: Setting, budget: int) -> None:
    result = setting.fits[budget]
    assert 0.995 * budget <= result.outcome.n_bytes <= budget
    assert set(result.outcome.types.values()) <= {*kinds(*KINDS, "f16", "f32")}
    assert 0 <= result.gap < 1e-3
    assert result.slow.keys() <= {kind.name for kind in result.outcome.types.values()}
    assert 0.5 < result.measured_divergence / result.expected_divergence < 2
    no_larger = {name: setting.losses[name] for name, n_bytes in setting.uniform.items() if n_bytes <= budget}
    assert 0 < setting.losses[budget] <= min(no_larger.values()), no_larger


@pytest.mark.thorough
def test_budgets_are_between_uniform_mixes(setting: Setting) -> None:
    sizes = sorted([*setting.uniform.values(), *BUDGETS])  # type: ignore[misc]
    assert sizes[1::2] == list(BUDGETS)  # type: ignore[call-overload]


@pytest.fixture
def small(tmp_path: Path) -> ModelFile:
    """A model that is measured in a moment, in a file of its own."""
    path = tmp_path / "in.gguf"
    figures = {"layers": 1, "embd": 256, "ff": 256, "heads": 4, "kv": 2, "vocab": 300, "context": 512}
    synth.synthesize(path, shapes.shape("llama", **figures), "f16")
    return ModelFile.open(path)


QUICK = FitOptions(None, kinds("q4_0", "q8_0"), within_s=0.1, threads=1)


def test_what_cannot_be_is_refused_with_the_least_that_can(small: ModelFile, tmp_path: Path) -> None:
    out, options = tmp_path / "out.gguf", replace(QUICK, kinds=kinds(*KINDS))
    with pytest.raises(SizeTooSmall, match=r"cannot be smaller than (\d+)B .* 1000B .* Allow smaller types") as raised:
        fit_file(small, out, 1000, SHORT, options)
    least = int(str(raised.value).split("smaller than ")[1].split("B")[0])
    with pytest.raises(SizeTooSmall, match=f"smaller than {least}B"):
        fit_file(small, out, least - 1, SHORT, options)
    assert list(tmp_path.iterdir()) == [small.path]
    result, _ = fitted(small, out, least, SHORT, options)
    assert out.stat().st_size == least
    assert {kind.name for kind in result.outcome.types.values()} == {"q2_k", "f32"}


def test_a_budget_of_more_than_the_model_keeps_it(small: ModelFile, tmp_path: Path) -> None:
    result, _ = fitted(small, tmp_path / "out.gguf", 1 << 30, SHORT, QUICK)
    assert result.outcome.types == {name: tensor.type for name, tensor in small.tensors.items()}
    assert result.expected_divergence == result.measured_divergence == 0


# What was measured is kept.

MEASURED = ["Calibrating", "Reading weights", "Measuring", "Quantizing", "Checking"]


def test_it_is_measured_once_and_again_where_something_has_changed(
    small: ModelFile, tmp_path: Path, cache: Path
) -> None:
    budget, matrix = small.size_bytes // 2, tmp_path / "m.gguf"

    def fit(name: str, text: str = SHORT, options: FitOptions = QUICK, part: float = 1.0) -> tuple[Fitted, list[str]]:
        return fitted(ModelFile.open(small.path), tmp_path / name, int(budget * part), text, options)

    before, stages = fit("first.gguf")
    assert stages == MEASURED
    after, stages = fit("second.gguf")
    assert stages == MEASURED[3:]
    assert after.outcome == before.outcome
    assert after.expected_divergence == pytest.approx(before.measured_divergence)  # it is known now
    assert (tmp_path / "first.gguf").read_bytes() == (tmp_path / "second.gguf").read_bytes()
    for path in (cache / "edge" / "quantize").rglob("*.json"):
        path.write_text("{}")  # damaged
    assert fit("smaller.gguf", part=0.7)[1] == MEASURED[1:]
    assert fit("first.gguf", text=SHORT + " More.")[1] == MEASURED
    collect(small.path, SHORT, ONE, chunk_tokens=64, most=1).write(matrix)
    assert fit("first.gguf", options=replace(QUICK, imatrix=matrix))[1] == MEASURED[1:]
    os.utime(small.path, ns=(1, 1))
    assert fit("first.gguf")[1] == MEASURED


# Time.


class Work:
    """A clock that goes on by what work costs, and by nothing else."""

    def __init__(self, patch: pytest.MonkeyPatch, factor: float, quantize_s: float = 0.05) -> None:
        """factor: how many times slower than on a machine that does nothing else.

        quantize_s: seconds to quantize a tensor to q4_0 in memory; in a file, each tensor costs 1.5 times as much
        """
        self.now_s, self.factor, self.quantize_s = 0.0, factor, quantize_s
        self.chunks: list[int] = []  # of each check
        self.written = 0
        self._slow(patch, "edge.quantization.sensitivity.log_probabilities", lambda engine, tokens: len(tokens) / 512)
        self._slow(patch, "edge.quantization.tensor_rows.TensorRows.errors", lambda rows, kinds, is_over: 0.1)
        self._slow(
            patch, "edge.quantization.tensor_rows.TensorRows.quantized", lambda rows, kind, pool: self._cost_s(kind)
        )
        self._slow(patch, "edge.quantization.imatrix.Squares.begin", lambda squares: 0.5)
        self._slow(patch, "edge.quantization.fit.quantize", self._writes)
        self._slow(patch, "edge.quantization.fit.evaluate", self._checks)

    def _writes(self, *args: Any, types: Mapping[str, TensorType], **more: Any) -> float:
        self.written += 1
        return 1.5 * sum(map(self._cost_s, types.values()))

    def _cost_s(self, kind: TensorType) -> float:
        pace = Pace(1)
        return self.quantize_s * pace.seconds({kind: 1}) / pace.seconds({TYPES["q4_0"]: 1})

    def _checks(
        self, reference: Path, paths: list[Path], *args: Any, most: int, chunk_tokens: int, **more: Any
    ) -> float:
        self.chunks.append(most)
        return (1 + len(paths)) * (0.5 + most * chunk_tokens / 512)

    def _slow(self, patch: pytest.MonkeyPatch, name: str, cost: Any) -> None:
        module, _, attribute = name.rpartition(".")
        real = pkgutil.resolve_name(name)

        def slow(*args: Any, **more: Any) -> Any:
            self.now_s += self.factor * cost(*args, **more)
            return real(*args, **more)

        patch.setattr(pkgutil.resolve_name(module), attribute, slow)


@pytest.mark.parametrize(
    ("factor", "within_s", "quantize_s"), [(1, 60, 0.05), (1, 300, 0.05), (4, 60, 0.05), (1, 60, 0.25)]
)
def test_all_of_it_ends_within_the_time_that_was_asked_for(
    small: ModelFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    factor: int,
    within_s: int,
    quantize_s: float,
) -> None:
    work = Work(monkeypatch, factor, quantize_s)
    device(tmp_path / "cache", monkeypatch)
    options = replace(QUICK, within_s=within_s, clock=lambda: work.now_s)
    result, _ = fitted(small, tmp_path / "out.gguf", small.size_bytes // 2, SHORT, options)
    assert result.measured_divergence > 0
    assert work.written >= 1
    assert 9 * factor < work.now_s <= within_s
    assert work.chunks[0] == 1  # tells how long more of them would take
    assert (work.chunks[-1] > 1) is (factor == 1) or quantize_s > 0.05


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the types that weights were quantized to in this process."""
    names: set[str] = set()

    def quantize_rows(values: Any, type_id: int, importance: Any = None) -> Any:
        names.add(type_by_id(type_id).name)
        return ggml.quantize_rows(values, type_id, importance)

    monkeypatch.setattr("edge.quantization.tensor_rows.quantize_rows", quantize_rows)
    return names


@pytest.mark.parametrize(
    ("share", "far"), [(0.31, {"iq2_xxs", "iq2_xs", "q2_k", "iq3_xxs"}), (0.41, {"iq4_nl", "iq4_xs", "q4_k", "q2_k"})]
)
def test_types_far_below_the_size_are_not_even_read(
    small: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: set[str], share: float, far: set[str]
) -> None:
    device(tmp_path / "cache", monkeypatch)
    budget = int(share * small.size_bytes)
    fitted(small, tmp_path / "out.gguf", budget, SHORT, FitOptions(within_s=0.1, threads=1))
    assert not read & far
    assert {"q4_0", "q6_k", "q8_0"} <= read


@pytest.mark.parametrize("quantize_s", [0.4, 0.5])
def test_types_that_take_long_to_write_are_left_out(
    small: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantize_s: float
) -> None:
    """Only the time differs: an hour is enough for a file with iq4_nl, and 30 seconds are not."""
    lines: list[str] = []
    for within_s, is_slow_used in ((3600, True), (30, False)):
        with monkeypatch.context() as patch:
            work = Work(patch, 1, quantize_s)
            device(tmp_path / f"{within_s}", patch)
            options = FitOptions(None, kinds("iq4_nl", "q4_0", "q6_k"), within_s=within_s, threads=1)
            options = replace(options, clock=lambda work=work: work.now_s, say=lines.append)  # type: ignore[misc]
            result, _ = fitted(small, tmp_path / "out.gguf", int(0.35 * small.size_bytes), SHORT, options)
        assert (TYPES["iq4_nl"] in result.outcome.types.values()) is is_slow_used
        assert work.now_s <= within_s
    assert lines == []


def test_time_that_cannot_suffice_is_told_in_a_line_and_the_quickest_types_are_used(
    small: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: set[str]
) -> None:
    lines: list[str] = []
    work = Work(monkeypatch, 1, quantize_s=20)
    device(tmp_path / "cache", monkeypatch)
    options = FitOptions(within_s=120, threads=1, clock=lambda: work.now_s, say=lines.append)
    fitted(small, tmp_path / "out.gguf", int(0.31 * small.size_bytes), SHORT, options)
    [line] = lines
    assert re.fullmatch(r"writing a file of this size takes about \d+ min, and 80 s of --minutes are left", line)
    assert read == {"q4_0", "q5_0", "q8_0"}
    assert work.chunks == [1]


@pytest.mark.thorough  # test_quantize_command.py asks for both
def test_slow_types_are_told_or_left_out_where_others_will_do(
    small: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device(tmp_path / "cache", monkeypatch, q4_k=6.0)
    options, budget = FitOptions(within_s=0.1, threads=1), int(small.size_bytes * 0.3)
    result, _ = fitted(small, tmp_path / "out.gguf", budget, SHORT, options)
    assert result.slow.keys() == {"q4_k"}
    assert TYPES[result.slow["q4_k"]].bits_per_weight > TYPES["q4_k"].bits_per_weight
    result, _ = fitted(small, tmp_path / "out.gguf", budget, SHORT, replace(options, fast=True))
    assert result.slow == {}
    assert "q4_k" not in {kind.name for kind in result.outcome.types.values()}
    assert 0.995 * budget <= result.outcome.n_bytes <= budget


def test_slow_types_are_taken_where_no_others_will_do(
    small: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device(tmp_path / "cache", monkeypatch, q2_k=1.0, q3_k=1.0)
    options = replace(QUICK, kinds=kinds("q2_k", "q3_k", "q4_k", "q4_0"), fast=True)
    with pytest.raises(SizeTooSmall) as raised:
        fit_file(small, tmp_path / "out.gguf", 1, SHORT, options)
    least = int(str(raised.value).split("smaller than ")[1].split("B")[0])
    tight, _ = fitted(small, tmp_path / "out.gguf", least, SHORT, options)
    assert tight.outcome.n_bytes == least
    assert "q2_k" in {kind.name for kind in tight.outcome.types.values()}
    assert "q2_k" in tight.slow


def test_experts_fill_a_budget(synthetic: Synthetic, tmp_path: Path) -> None:
    file, out = ModelFile.open(synthetic("qwen3moe")), tmp_path / "out.gguf"
    budget = int(file.size_bytes * 0.6)
    result, _ = fitted(file, out, budget, SHORT, QUICK)
    assert 0.995 * budget <= result.outcome.n_bytes <= budget
    assert result.measured_divergence > 0


def test_experts(synthetic: Synthetic, tmp_path: Path) -> None:
    """A file between two types in size fills its budget, and its answers are nearer than those of the smaller type."""
    file, out, smaller = ModelFile.open(synthetic("qwen3moe")), tmp_path / "out.gguf", tmp_path / "q4_0.gguf"
    job = {"types": {}, "importance": {}, "dry": False, "on_log": lambda line: None}
    quantize_model(str(file.path), str(smaller), MIXES["q4_0"].id, threads=1, **job)
    budget = int(file.size_bytes * 0.42)
    assert smaller.stat().st_size < budget < file.size_bytes * 8.5 / 16
    result, _ = fitted(file, out, budget, SHORT, QUICK)
    assert 0.98 * budget <= result.outcome.n_bytes == out.stat().st_size <= budget
    assert {*kinds("q4_0", "q8_0")} <= {*result.outcome.types.values()} <= {*kinds("q4_0", "q8_0", "f16", "f32")}
    assert 0 <= result.gap < 1e-3
    assert result.slow.keys() <= {"q4_0", "q8_0"}
    assert min(result.expected_divergence, result.measured_divergence) > 0
    nearer, farther = evaluate(file.path, [out, smaller], OTHER, ONE, chunk_tokens=128, most=2)[1:]
    assert 0 < nearer.summary.mean_divergence < farther.summary.mean_divergence
    with Engine(out, EngineOptions(threads=1, context=64)) as engine:
        assert np.isfinite(engine.decode([1, 5, 9], 0)).all()


def test_what_cannot_be_remembered_is_used_all_the_same(
    small: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("edge.quantization.fit.write_whole", full)
    out = tmp_path / "out.gguf"
    result, _ = fitted(small, out, int(small.size_bytes * 0.6), SHORT, QUICK)
    assert result.outcome.n_bytes == out.stat().st_size


def test_a_short_text_leaves_nothing(small: ModelFile, tmp_path: Path) -> None:
    with pytest.raises(TextError, match="at least 512 tokens"):
        fit_file(small, tmp_path / "out.gguf", small.size_bytes // 2, "short", QUICK)
    assert [path.name for path in tmp_path.iterdir()] == ["in.gguf"]


# Memory.


def test_what_is_left_of_the_memory(synthetic: Synthetic) -> None:
    file, engine = ModelFile.open(synthetic("llama")), EngineOptions(context=512)

    def left(memory: int = 1 << 30, context: int = 512, kv_type: str = "f16") -> int:
        budget, parts = file_within(file, memory, EngineOptions(context=context, kv_type=kv_type), least=1000)
        assert {"runtime", "KV cache", "compute buffers"} <= parts.keys()
        assert memory * 0.9 < budget + sum(parts.values()) < memory + MIB  # and the header, which is not held
        return budget

    assert left(context=128) > left()
    assert left(kv_type="q8_0") > left()
    assert left(memory=2 << 30) > left() + (1 << 29)
    with pytest.raises(
        SizeTooSmall, match=r"0 of 50 MiB are left for weights, beside runtime \d+, .*--context"
    ) as raised:
        file_within(file, 50 * MIB, engine, least=100 * MIB)
    enough = int(str(raised.value).split("--fit ")[1].split("MiB")[0])
    budget, _ = file_within(file, enough * MIB, engine, least=100 * MIB)
    assert 100 * MIB <= budget < 110 * MIB
    with pytest.raises(SizeTooSmall, match=r"smallest file has 100\.0 MiB"):
        file_within(file, (enough - 10) * MIB, engine, least=100 * MIB)


@pytest.fixture(scope="module")
def mid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 20 MB: enough that a process that holds it all is larger than one that does not."""
    path = tmp_path_factory.mktemp("mid") / "in.gguf"
    synth.synthesize(path, shapes.shape("llama", layers=1, embd=512, ff=4096, heads=8, vocab=4096, context=4096), "f16")
    return path


def test_a_model_that_is_made_to_fit_pages_nothing(mid: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(SHORT)
    options = ("--types", "q4_0,q8_0", "--minutes", "0.001", "--threads", "1", "--text", tmp_path / "text.txt")

    def fit(memory: int, context: int, *more: str) -> tuple[Path, dict[str, Any]]:
        out = tmp_path / "out.gguf"
        request = ("--fit", f"{memory}B", "--context", str(context), "--force", "--json", *more)
        done = run_edge("quantize", mid, out, *request, *options)
        assert done.returncode == 0, done.stderr
        assert "are left: runtime" in done.stderr
        return out, json.loads(done.stdout)

    refused = run_edge("quantize", mid, tmp_path / "out.gguf", "--fit", "60MiB", "--context", "1024", *options)
    assert_one_line_error(refused, 4, "0 of 60 MiB are left for weights", "--kv-type")
    parts = refused.stderr.split("beside ")[1].split(" MiB;")[0].split(", ")
    baseline = sum(int(part.split()[-1]) for part in parts) * MIB
    sizes = []
    for spare, context, more in ((12, 1024, ()), (16, 2048, ("--kv-type", "q8_0")))[: some(1, 2)]:
        memory = baseline + spare * MIB
        out, said = fit(memory, context, *more)
        # How full it is, of so few tensors, depends on the damages that were measured; tests/unit/quant/test_fit.py.
        assert 0.9 * said["budget_bytes"] < said["size_bytes"] == out.stat().st_size <= said["budget_bytes"]
        sizes.append(said["size_bytes"])
        query = ("--memory", f"{memory}B", "--context", str(context), *more)
        done = run_edge("chat", out, *query, "-p", "hello", "--max-tokens", "4", "--threads", "1", "--json")
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["paging"]["streamed_bytes"] == 0
        assert answer["memory"]["total_bytes"] <= memory
    assert sizes == sorted(set(sizes))
