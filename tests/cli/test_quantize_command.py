"""`edge quantize` from the command line: what each option does, JSON, the report, and what is refused."""

import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from apps.commands import quantize
from apps.errors import EXIT_CODES
from apps.show import progress as progress_module
from edge.llm.options import EngineOptions
from edge.models import shapes, synth
from edge.quantization.imatrix import collect
from quant.errors import DoesNotFit, QuantError
from quant.gguf.file import GgufFile
from quant.gguf.imatrix import Entry, ImportanceMatrix
from quant.types import BROWSER_TYPES, TYPES
from tests.engine.quantize.test_evaluate import MODEL_KEYS
from tests.engine.quantize.test_kernel_speed import device
from tests.support.commands import Run, assert_refused, runner, said
from tests.support.helpers import ROOT, run_edge
from tests.support.quantizing import ask_types_once, measure_less
from tools.demo_model.grammar import statements

F16 = ROOT / "tests" / "data" / "edge-demo-f16.gguf"
HF = ROOT / "tests" / "data" / "hf"
TEXT = " ".join(islice(statements(random.Random(7)), 60))
KEYS = {
    "input", "output", "type", "source_bytes", "size_bytes", "bits_per_weight", "type_bytes", "types", "misfits",
    "imatrix", "budget_bytes", "expected_divergence", "measured_divergence", "exact_tensors", "gap", "slow_types",
    "duration_s", "report",
}  # fmt: skip
KERNEL_KEYS = {
    "type", "bits_per_weight", "decode_gweights_per_s", "prefill_gweights_per_s", "repacked", "slower_than",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        measure_less(patch)
        device(tmp_path_factory.mktemp("cache"), patch)
        ask_types_once(patch)
        yield


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`edge quantize` with these arguments: exit code, standard output, standard error."""
    return runner(capsys, "quantize")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer with rows of 256 columns, and one of 96."""
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    figures = {"layers": 1, "embd": 256, "ff": 96, "heads": 4, "kv": 2, "vocab": 300, "context": 4096}
    synth.synthesize(path, shapes.shape("llama", **figures), "f16")
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out" / "out.gguf"


@pytest.fixture(autouse=True)
def folder(out: Path) -> None:
    out.parent.mkdir()


def kinds(path: Path) -> set[str]:
    """Types of matrices."""
    return {tensor.type.name for tensor in GgufFile.open(path).tensors.values()} - {"f32"}


# By type.


def test_json_has_the_documented_keys(run: Run, small: Path, out: Path) -> None:
    result = said(run, small, out, "--type", "q4_k")
    assert set(result) == KEYS
    written = GgufFile.open(out).tensors
    assert result["types"] == {name: tensor.type.name for name, tensor in written.items()}
    assert (result["input"], result["output"], result["type"]) == (str(small), str(out), "q4_k_m")
    assert result["size_bytes"] == out.stat().st_size
    assert result["source_bytes"] == small.stat().st_size
    sizes = {name: sum(t.n_bytes for t in written.values() if t.type.name == name) for name in result["type_bytes"]}
    assert result["type_bytes"] == sizes
    assert sum(sizes.values()) == sum(tensor.n_bytes for tensor in written.values())
    values = sum(tensor.n_values for tensor in written.values())
    assert result["bits_per_weight"] == pytest.approx(8 * sum(sizes.values()) / values)
    [misfit] = result["misfits"]
    assert (misfit["tensor"], misfit["columns"]) == ("blk.0.ffn_down.weight", 96)
    assert misfit["used"] == result["types"]["blk.0.ffn_down.weight"]
    assert TYPES[misfit["wanted"]].block == 256
    nothing = ("imatrix", "budget_bytes", "expected_divergence", "measured_divergence", "gap", "report")
    assert [result[key] for key in nothing] == [None] * len(nothing)
    assert result["slow_types"] == {}
    assert 0 < result["duration_s"] < 60


def test_people_are_told(run: Run, small: Path, out: Path) -> None:
    code, output, error = run(small, out, "--type", "Q4_K_M")
    assert (code, error) == (0, "")
    title, *rows = output.splitlines()
    assert title == f"{out}: q4_k_m"
    assert [re.split("  +", row.strip())[0] for row in rows[:3]] == ["size", "bits per weight", "types"]
    assert "tensors that do not divide into blocks of the type and use another type: 1; " in output
    assert "blk.0.ffn_down.weight has 96 columns" in output


def test_quantizing_again_is_warned_of(run: Run, small: Path, tmp_path: Path, out: Path) -> None:
    said(run, small, tmp_path / "q8_0.gguf", "--type", "q8_0")
    code, _, error = run(tmp_path / "q8_0.gguf", out, "--type", "q4_0")
    assert code == 0
    assert error == (
        "edge quantize: q8_0.gguf is quantized already, mostly to q8_0, and loses once more; better start from F16,"
        " BF16 or F32\n"
    )


def test_off_a_terminal_progress_is_lines(run: Run, small: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "PLAIN_INTERVAL_S", 0)
    code, output, error = run(small, out, "--type", "q4_0", "--json")
    assert code == 0
    assert set(json.loads(output)) == KEYS
    lines = error.splitlines()
    assert len(lines) > 5
    *some, last = [re.fullmatch(r"Quantizing to q4_0: .+ of .+, \d+ %(?:, ([\w.]+))?", line) for line in lines]
    assert {line and line[1] for line in some} == set(GgufFile.open(small).tensors)
    assert len(some) == len(GgufFile.open(small).tensors)
    assert last
    assert lines[-1].endswith("100 %")


def test_without_a_type_the_device_decides(
    run: Run, small: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said(run, small, out)["type"] == "q4_k_m"
    device(tmp_path / "cache", monkeypatch, q4_k=10.0)
    assert said(run, small, out, "--force")["type"] == "iq4_nl"
    device(tmp_path / "cache", monkeypatch, q4_k=10.0, iq4_nl=9.0)
    assert said(run, small, out, "--force")["type"] == "q4_0"


def test_an_importance_matrix_is_used(run: Run, small: Path, tmp_path: Path, out: Path) -> None:
    matrix = tmp_path / "m.gguf"
    collect(small, TEXT, EngineOptions(threads=1), chunk_tokens=64, most=1).write(matrix)
    without = said(run, small, out, "--type", "q4_0")
    before = out.read_bytes()
    result = said(run, small, out, "--type", "q4_0", "--imatrix", matrix, "--force")
    assert result["imatrix"] == str(matrix)
    assert result["types"] == without["types"]
    assert out.read_bytes() != before
    assert_refused(run(small, out, "--type", "q4_0", "--force", "--imatrix", tmp_path / "none"), 3, "no such file")
    assert_refused(run(small, out, "--type", "q4_0", "--force", "--imatrix", small), 3, "this is a model")
    assert out.exists()


# By size.


def test_by_size(run: Run, small: Path, out: Path, text: Path) -> None:
    provided = ("--text", text, "--minutes", "0.001", "--force")
    result = said(run, small, out, "--size", "350000B", "--types", "q4_0,q8_0", *provided)
    assert set(result) == KEYS
    assert (result["type"], result["budget_bytes"]) == ("fitted", 350_000)
    assert 0.995 * 350_000 < out.stat().st_size == result["size_bytes"] <= 350_000
    assert kinds(out) <= {"q4_0", "q8_0", "f16"}
    assert result["expected_divergence"] > 0 < result["measured_divergence"]
    assert 0 <= result["gap"] < 0.01
    other = said(run, small, out, "--size", "0.3MiB", "--types", "Q5_K, q6_k,q5_0,q8_0", *provided)
    assert other["budget_bytes"] == 314_572
    assert kinds(out) <= {"q5_k", "q6_k", "q5_0", "q8_0", "f16"}
    code, output, error = run(small, out, "--size", "350000B", "--types", "q4_0,q8_0", *provided)
    assert code == 0, error
    assert re.search(r"share of budget +99\.\d\d %", output)
    assert re.search(r"KL divergence +\d\.\d+ nats per token, expected \d\.\d+", output)


def test_fast_does_without_types_that_are_slow_here(
    run: Run, small: Path, out: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device(tmp_path / "cache", monkeypatch, q5_0=1.0)
    provided = ("--size", "290000B", "--types", "q4_0,q5_0,q8_0", "--text", text, "--minutes", "0.001", "--force")
    assert said(run, small, out, *provided)["slow_types"].keys() == {"q5_0"}
    assert "q5_0" in kinds(out)
    assert said(run, small, out, *provided, "--fast")["slow_types"] == {}
    assert "q5_0" not in kinds(out)
    code, output, error = run(small, out, *provided)
    assert code == 0, error
    assert re.search(r"q5_0 \(q8_0 is faster\); --fast avoids them", output)


def test_for_browsers_only_types_with_vector_kernels_are_used(run: Run, small: Path, out: Path, text: Path) -> None:
    provided = ("--for", "browser", "--force")
    assert said(run, small, out, *provided)["type"] == "q4_k_m"
    assert said(run, small, out, *provided, "--type", "q8_0")["type"] == "q8_0"
    assert_refused(run(small, out, *provided, "--type", "q4_1"), 2, "browsers compute q4_1 slowly")
    assert_refused(run(small, out, *provided, "--size", "300000B", "--types", "iq4_nl"), 2, "iq4_nl slowly")
    said(run, small, out, *provided, "--size", "290000B", "--text", text, "--minutes", "0.001")
    assert kinds(out) <= {*BROWSER_TYPES, "f16"}


def test_by_memory(run: Run, small: Path, out: Path, text: Path) -> None:
    provided = ("--fit", "1GiB", "--text", text, "--minutes", "0.001", "--types", "q8_0", "--force")
    usual = said(run, small, out, *provided)
    assert said(run, small, out, *provided, "--context", "4096")["budget_bytes"] == pytest.approx(
        usual["budget_bytes"], abs=4 << 20
    )
    code, _, error = run(small, out, *provided, "--context", "512", "--kv-type", "q8_0")
    assert code == 0
    assert re.match(r"edge quantize: of 1.00 GiB, \d+ MiB are left: runtime [\d.]+ MiB, KV cache", error)


def test_too_small_is_refused_with_the_least(run: Run, small: Path, out: Path, text: Path) -> None:
    answer = run(small, out, "--size", "1000B", "--types", "q4_0,q8_0", "--text", text)
    assert_refused(answer, 4, "cannot be smaller than", "1000B", "smaller types")
    least = re.search(r"smaller than (\d+B)", answer[2])
    assert least
    provided = ("--types", "q4_0,q8_0", "--text", text, "--minutes", "0.001")
    assert f"{said(run, small, out, '--size', least[1], *provided)['size_bytes']}B" == least[1]


# The report.


def test_a_report_compares_with_uniform_types(run: Run, small: Path, out: Path, text: Path) -> None:
    png = out.with_name("picture.png")
    provided = ("--report", "--compare", "q4_0, q2_k", "--png", png, "--text", text)
    result = said(run, small, out, "--type", "q8_0", *provided)
    report = result["report"]
    assert set(report) == {"scored_tokens", "models", "notes"}
    assert report["scored_tokens"] > 200
    assert [model["model"] for model in report["models"]] == ["small.gguf", "out.gguf", "q4_0", "q2_k"]
    assert all({key: type(value) for key, value in model.items()} == MODEL_KEYS for model in report["models"])
    losses = [model["mean_divergence"] for model in report["models"]]
    assert losses == sorted(losses)
    assert losses[0] == 0 < losses[1]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in out.parent.iterdir()) == ["out.gguf", "picture.png"]


@pytest.mark.thorough
def test_a_report_is_a_table_too(run: Run, small: Path, out: Path, text: Path) -> None:
    code, output, error = run(small, out, "--type", "q8_0", "--report", "--text", text)
    assert code == 0, error
    rows = output.splitlines()
    start = next(i for i, row in enumerate(rows) if row.startswith("model"))
    assert [row.split()[0] for row in rows[start + 1 : start + 3]] == ["small.gguf", "out.gguf"]


def test_kernels(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "_KERNELS", ("q4_0", "q8_0", "f16"))  # all take half a minute
    result = said(run, "--kernels")
    assert set(result) == {"threads", "types", "default"}
    assert result["threads"] == 1
    assert all(set(item) == KERNEL_KEYS for item in result["types"])
    assert [item["type"] for item in result["types"]] == ["q4_0", "q8_0", "f16"]
    assert all(item["decode_gweights_per_s"] > 0 < item["prefill_gweights_per_s"] for item in result["types"])
    assert result["default"] in ("q4_k_m", "iq4_nl", "q4_0")


# Hugging Face folders.


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_folder_of_safetensors(run: Run, out: Path, family: str) -> None:
    result = said(run, HF / family, out, "--type", "q8_0")
    assert result["input"] == str(HF / family)
    assert result["source_bytes"] == (HF / family / "model.safetensors").stat().st_size
    assert "q8_0" in kinds(out)
    assert [path.name for path in out.parent.iterdir()] == ["out.gguf"]


def test_a_folder_is_converted_and_no_more(run: Run, out: Path) -> None:
    result = said(run, HF / "llama", out, "--type", "F16")
    assert (result["type"], kinds(out)) == ("f16", {"f16"})
    assert result["source_bytes"] == (HF / "llama" / "model.safetensors").stat().st_size
    assert result["size_bytes"] == out.stat().st_size != result["source_bytes"]


@pytest.mark.parametrize("kind", ["q8_0", "f16"])
def test_files_of_a_folder_are_never_written_over(run: Run, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(HF / "llama", folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    (tmp_path / "link").symlink_to(folder / "model.safetensors")
    for output in (*before, tmp_path / "link"):
        answer = run(folder, output, "--type", kind, "--force")
        assert_refused(answer, 2, f"{output} is read by this command and cannot be overwritten; give another name")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    (folder / "old.gguf").write_bytes(b"made before")
    assert said(run, folder, folder / "old.gguf", "--type", kind, "--force")["type"] == kind
    assert {path.name for path in folder.iterdir()} == {path.name for path in before} | {"old.gguf"}


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--size", "1MiB", "--types", "q4_0,q9_9"), 2, "'q9_9'"),
        (("--size", "1MiB", "--types", "q8_1"), 2, "'q8_1'"),
        (("--type", "iq2_xxs"), 2, "iq2_xxs needs an importance matrix; make one with edge imatrix"),
        (("--type", "q8_0", "--imatrix", "/none"), 3, "/none: no such file"),
        (("--type", "q8_0", "--report", "--text", "/none"), 3, "/none: cannot be read"),
        (("--type", "q8_0", "--report", "--compare", "q4_0,iq2_m"), 2, "iq2_m needs an importance matrix"),
        (("--type", "f16", "--imatrix", "/none"), 2, "--imatrix is for types of fewer bits than f16; leave it out"),
    ],
)
def test_what_can_be_known_is_said_before_a_folder_is_read(
    run: Run, tmp_path: Path, out: Path, args: tuple[str, ...], code: int, words: str
) -> None:
    folder = tmp_path / "empty"  # it cannot be converted
    folder.mkdir()
    assert_refused(run(folder, out, *args), code, words)
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("mix", ["iq2_m", "iq3_xs", "q2_k_s"])
def test_types_that_need_a_matrix_are_not_compared_without(run: Run, small: Path, out: Path, mix: str) -> None:
    assert_refused(run(small, out, "--type", mix), 5, "needs an importance matrix")
    answer = run(small, out, "--type", "q8_0", "--report", "--compare", mix)
    assert_refused(answer, 2, f"{mix} needs an importance matrix; make one", "--imatrix FILE")
    assert list(out.parent.iterdir()) == []


def test_a_folder_that_is_no_model(run: Run, tmp_path: Path, out: Path) -> None:
    (tmp_path / "empty").mkdir()
    answer = run(tmp_path / "empty", out, "--type", "q8_0")
    assert_refused(answer, 3, "empty")
    assert list(out.parent.iterdir()) == []


# What is refused.


def test_files_that_cannot_be(run: Run, small: Path, tmp_path: Path, out: Path) -> None:
    out.write_bytes(b"mine")
    link = tmp_path / "link.gguf"
    link.symlink_to(small)
    truncated, other = tmp_path / "truncated.gguf", tmp_path / "other.gguf"
    truncated.write_bytes(small.read_bytes()[:-100])
    other.write_bytes(b"no model at all")
    provided = ("--type", "q8_0")
    assert_refused(run(small, out, *provided), 2, f"{out} exists; --force overwrites it")
    assert_refused(
        run(small, small, *provided, "--force"),
        2,
        "is read by this command and cannot be overwritten; give another name",
    )
    assert_refused(run(link, small, *provided, "--force"), 2, "small.gguf is read")
    matrix, pipe = tmp_path / "m.gguf", tmp_path / "pipe.gguf"
    ImportanceMatrix({"a": Entry(np.ones((1, 1), np.float32), np.ones(1, np.int64))}).write(matrix)
    assert_refused(run(small, matrix, *provided, "--force", "--imatrix", matrix), 2, "m.gguf is read")
    os.mkfifo(pipe)
    assert_refused(run(small, pipe, *provided, "--force"), 2, "is not a regular file")
    assert_refused(run(small, tmp_path, *provided), 2, "is a folder; name a file in it")
    assert_refused(run(small, tmp_path / "none" / "out.gguf", *provided), 2, "there is no folder", "create it first")
    assert_refused(run(tmp_path / "none.gguf", out, *provided), 3, "none.gguf")
    assert_refused(run(other, tmp_path / "new.gguf", *provided), 3, "other.gguf")
    assert_refused(run(truncated, tmp_path / "new.gguf", *provided), 3, "truncated.gguf", "ends before its weights")
    assert out.read_bytes() == b"mine"
    assert not (tmp_path / "new.gguf").exists()
    assert said(run, small, out, *provided, "--force")["size_bytes"] == out.stat().st_size


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--type", "q4_z"), "; did you mean q4_"),
        (("--type", "q4_0", "--size", "1MiB"), "--type and --size contradict each other"),
        (("--size", "1MiB", "--fit", "1GiB"), "--size and --fit contradict each other"),
        (("--type", "q4_0", "--types", "q4_0"), "--types is for --size, --fit and --elastic"),
        (("--minutes", "1"), "--minutes is for --size, --fit and --elastic"),
        (("--size", "1MiB", "--context", "512"), "--context is for --fit"),
        (("--type", "q4_0", "--kv-type", "q8_0"), "--kv-type is for --fit"),
        (("--type", "q4_0", "--compare", "q2_k"), "--compare is for --report"),
        (("--type", "q4_0", "--png", "a.png"), "--png is for --report"),
        (("--type", "q4_0", "--text", "a.txt"), "--text is for --size, --fit and --elastic, and --report"),
        (("--type", "q4_0", "--calibration", "a.npz"), "--calibration is for ONNX models"),
        (("--type", "q4_0", "--block-size", "32"), "--block-size is for ONNX models"),
        (("--size", "1MiB", "--types", "q4_0,q9_9"), "'q9_9' is not a type for weights; known: "),
        (("--type", "q8_0,q4_0"), "unknown type 'q8_0,q4_0'"),
        (("--type", "f32", "--imatrix", "m.gguf"), "--imatrix is for types of fewer bits than f32"),
        (("--type", "q8_0", "--report", "--compare", "q9_9"), "unknown type 'q9_9'"),
        (("--type", "q8_0", "--report", "--png", "a.jpg"), "must end in .png"),
        (("--size", "much"), "much"),
        (("--size", "0B"), "0"),
        (("--fit", "1GiB", "--context", "-1"), "-1"),
        (("--size", "1MiB", "--minutes", "nan"), "needs a number, got"),
        (("--size", "1MiB", "--minutes", "0"), "needs a number from 0.001 to 10000"),
    ],
)
def test_wrong_usage_is_one_line(
    run: Run, small: Path, out: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], words: str
) -> None:
    try:
        answer = run(small, out, *args)
    except SystemExit as ended:  # argparse
        answer = int(str(ended.code)), *capsys.readouterr()
    assert_refused(answer, 2, words)
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("args", [(), (F16,)])
def test_in_and_out_are_needed(run: Run, args: tuple[Path, ...]) -> None:
    assert_refused(run(*args), 2, "needs IN, the model, and OUT, the file to write; or --kernels")


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (("in.gguf",), "IN and OUT"),
        (("in.gguf", "out.gguf"), "IN and OUT"),
        (("--type", "q4_0"), "--type"),
        (("--size", "1MiB"), "--size"),
        (("--kv-type", "f16"), "--kv-type"),
        (("--report",), "--report"),
        (("--block-size", "32"), "--block-size"),
        (("--force",), "--force"),
    ],
)
def test_kernels_are_of_no_model(run: Run, args: tuple[str, ...], name: str) -> None:
    assert_refused(run("--kernels", *args), 2, name, "--kernels measures this device")


def test_errors_of_quantizing_have_an_exit_code() -> None:
    for error in QuantError.__subclasses__():
        assert any(parent.__name__ in EXIT_CODES for parent in error.__mro__), error
    assert DoesNotFit(70).least == 70
    assert "70 bytes" in str(DoesNotFit(70))


def test_the_command_as_people_run_it(small: Path, out: Path) -> None:
    done = run_edge("quantize", small, out, "--type", "q5_k_m")
    assert (done.returncode, done.stderr) == (0, "")
    assert "q5_k_m" in done.stdout
    assert kinds(out) == {"q5_k", "q6_k", "q8_0"}
