"""`edge evaluate`: the order of types, the table, JSON, picture, what each option does, and bad input."""

import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import namedtuple
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.errors import Interrupted
from edge.llm.options import EngineOptions
from edge.pictures.quality import ModelPoint, _figure, size_against_divergence, without_common_start
from edge.quantization.comparison import ModelSpeed, measure_speeds, speed_notes
from edge.quantization.evaluate import evaluate, temporary
from edge.quantization.imatrix import collect
from edge.quantization.text_file import BUNDLED, read_text
from quant.errors import ModelFileError
from quant.gguf.file import GgufFile
from tests.conftest import Synthetic
from tests.support.commands import Run, assert_refused, runner, said
from tests.support.helpers import ROOT, assert_one_line_error, run_edge
from tests.support.small_disk import small_disk
from tools.demo_model.grammar import statements

F16 = ROOT / "tests" / "data" / "edge-demo-f16.gguf"
TEXT = " ".join(islice(statements(random.Random(7)), 80))
ONE = EngineOptions(threads=1)
TYPES = ("q8_0", "q4_0", "q2_k")

QUANTIZE = """
import sys, llama_cpp as L
source, folder, *types = sys.argv[1:]
for name in types:
    params = L.llama_model_quantize_default_params()
    params.ftype, params.nthread = getattr(L, f"LLAMA_FTYPE_MOSTLY_{name.upper()}"), 1
    if L.llama_model_quantize(source.encode(), f"{folder}/{name}.gguf".encode(), params):
        sys.exit(name)
"""

Models = dict[str, Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The bundled model in TYPES, by llama.cpp's own quantizer."""
    folder = tmp_path_factory.mktemp("types")
    subprocess.run([sys.executable, "-c", QUANTIZE, F16, folder, *TYPES], check=True, capture_output=True, timeout=120)
    return {name: folder / f"{name}.gguf" for name in TYPES}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`edge evaluate` with these arguments: exit code, standard output, standard error."""
    return runner(capsys, "evaluate")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_fewer_bits_are_farther_away(models: Models) -> None:
    seen: list[tuple[int, int]] = []
    paths = [F16, *models.values()]
    results = evaluate(F16, paths, TEXT, ONE, chunk_tokens=256, progress=lambda *at: seen.append(at))
    assert [result.path for result in results] == [F16, *paths]
    reference, same, q8_0, q4_0, q2_k = (result.summary for result in results)
    assert same == reference
    assert (same.mean_divergence, same.max_divergence, same.top_1_agreement) == (0, 0, 1)
    assert 0 < 10 * q8_0.mean_divergence < q4_0.mean_divergence < q2_k.mean_divergence / 3
    assert q8_0.divergence_99 < q4_0.divergence_99 < q2_k.divergence_99 <= q2_k.max_divergence
    assert q8_0.top_1_agreement > q4_0.top_1_agreement > q2_k.top_1_agreement > 0.5
    assert reference.perplexity < q2_k.perplexity
    assert 0 < reference.perplexity_error < reference.perplexity / 5
    chunks = reference.tokens // 127
    assert reference.tokens == 127 * chunks
    assert seen == [(i + 1, 5 * chunks) for i in range(5 * chunks)]
    for result in results:
        file = GgufFile.open(result.path)
        assert result.size_bytes == result.path.stat().st_size
        values = sum(tensor.n_values for tensor in file.tensors.values())
        assert result.bits_per_weight == pytest.approx(8 * sum(t.n_bytes for t in file.tensors.values()) / values)


def test_other_vocabularies_are_refused_before_anything_is_computed(synthetic: Synthetic) -> None:
    done: list[int] = []
    other = synthetic("llama")
    with pytest.raises(ModelFileError, match=r"llama-f16.gguf: its vocabulary \(512 tokens\) is not that of edge-demo"):
        evaluate(F16, [F16, other], TEXT, ONE, chunk_tokens=64, progress=lambda *_: done.append(1))
    assert done == []


def test_the_temporary_file_has_no_name_and_is_gone_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def interrupt(done: int, total: int) -> None:
        assert list(tmp_path.iterdir()) == []
        if 2 * done > total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(F16, [F16], TEXT, ONE, chunk_tokens=64, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_stops_it() -> None:
    done: list[int] = []

    def interrupt(*_: int) -> None:
        done.append(1)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        evaluate(F16, [], TEXT, ONE, chunk_tokens=64, progress=interrupt)
    with pytest.raises(Interrupted):
        collect(F16, TEXT, ONE, chunk_tokens=64, progress=interrupt)
    assert len(done) == 2


def test_room_on_the_disk_is_checked_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 30, 0, 70 << 20))
    evaluate(F16, [], TEXT, ONE, chunk_tokens=64, most=1)  # nothing has to be kept
    evaluate(F16, [F16], TEXT, ONE, chunk_tokens=64, most=1)
    with pytest.raises(OSError, match=r"no room in .*: [\d.]+ [KM]iB needed, [\d.]+ MiB free; .*TMPDIR"):
        evaluate(F16, [F16], TEXT * 2, ONE, chunk_tokens=64, progress=lambda *_: pytest.fail("computed"))


def test_a_disk_that_fills_up_meanwhile(text: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    done = run_edge("evaluate", F16, F16, "--text", text, "--no-speed", "--threads", "1", preexec=limit)
    assert_one_line_error(done, 4, "no room in", "TMPDIR")


def test_room_is_reserved_before_anything_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may fill the disk meanwhile, and whoever writes to a mapped file then is killed."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 30, 0, 1 << 29))
    with small_disk(tmp_path / "small", "size=2m") as folder:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with pytest.raises(OSError, match=r"no room in .*small.*: 4\.\d+ MiB needed"), temporary(4 << 20):
            pytest.fail("computed")


# Speeds.


def test_all_are_measured_before_any_is_measured_again(synthetic: Synthetic) -> None:
    seen: list[tuple[int, int]] = []
    paths = [synthetic("llama"), synthetic("qwen2")]
    speeds = measure_speeds(paths, ONE, rounds=2, prompt_tokens=8, gen_tokens=4, progress=lambda *at: seen.append(at))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    for speed in speeds:
        assert len(speed.prefill_rounds) == len(speed.decode_rounds) == 2
        assert min(*speed.prefill_rounds, *speed.decode_rounds) > 0


def test_a_smaller_model_that_is_always_slower_is_told() -> None:
    def speed(*decode: float) -> ModelSpeed:
        return ModelSpeed((1.0,) * len(decode), decode)

    names, sizes = ["f16", "q4_0", "q2_k"], [16, 4, 2]
    slow = [speed(5, 5, 5), speed(12, 10, 12), speed(10, 8, 10)]
    assert speed_notes(names, sizes, slow) == ["q2_k is smaller than q4_0 and decodes slower: 1.20x"]
    once_faster = [speed(5, 5, 5), speed(12, 10, 12), speed(10, 11, 10)]
    assert speed_notes(names, sizes, once_faster) == []
    hardly = [speed(5, 5, 5), speed(10.1, 10.1, 10.1), speed(10, 10, 10)]
    assert speed_notes(names, sizes, hardly) == []
    two = [speed(20, 20, 20), speed(12, 10, 12), speed(10, 8, 10)]
    assert speed_notes(names, sizes, two) == [
        "q4_0 is smaller than f16 and decodes slower: 1.67x",
        "q2_k is smaller than f16 and decodes slower: 2.00x",
    ]


# The command.

MODEL_KEYS = {
    "model": str,
    "size_bytes": int,
    "bits_per_weight": float,
    "perplexity": float,
    "perplexity_error": float,
    "mean_divergence": float,
    "median_divergence": float,
    "divergence_99": float,
    "max_divergence": float,
    "top_1_agreement": float,
    "decode_tokens_per_s": float,
    "prefill_tokens_per_s": float,
}


def test_json_has_the_documented_keys(run: Run, text: Path, models: Models) -> None:
    result = said(run, F16, models["q4_0"], "--text", text, "--chunk-tokens", "128", "--tokens", "300")
    first, second = result.pop("models")
    for model in (first, second):
        assert {key: type(value) for key, value in model.items()} == MODEL_KEYS
    assert (first["model"], second["model"]) == (str(F16), str(models["q4_0"]))
    assert first["mean_divergence"] == 0 < second["mean_divergence"]
    notes = result.pop("notes")
    assert all(isinstance(note, str) for note in notes)
    assert result == {
        "reference": str(F16),
        "text": str(text),
        "chunk_tokens": 128,
        "scored_tokens": 2 * 63,
        "png": None,
    }


def test_the_table_and_its_picture(run: Run, text: Path, models: Models, tmp_path: Path) -> None:
    png = tmp_path / "picture.png"
    args = (F16, *models.values(), "--text", text, "--chunk-tokens", "64", "--tokens", "64", "--no-speed")
    code, out, error = run(*args, "--png", png)
    assert code == 0, error
    names, *rows, note = out.splitlines()
    assert re.split("  +", names)[:6] == ["model", "size", "bits/weight", "perplexity", "mean KL", "99 % KL"]
    assert [row.split()[0] for row in rows] == [F16.name, "q8_0.gguf", "q4_0.gguf", "q2_k.gguf"]
    assert all(row.endswith("-  -") or re.search(r"-\s+-$", row) for row in rows)
    assert note == f"31 predictions on {text}; KL divergence in nats from {F16.name}"
    assert png.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["picture.png", "text.txt"]


def test_each_option_changes_what_is_done(run: Run, text: Path) -> None:
    def result(*args: str | Path) -> dict[str, Any]:
        return said(run, F16, "--text", text, "--chunk-tokens", "64", "--no-speed", *args)

    usual = result("--tokens", "128")
    assert usual["scored_tokens"] == 62
    assert usual["models"][0]["decode_tokens_per_s"] is None
    assert result("--tokens", "191")["scored_tokens"] == 62
    assert result()["scored_tokens"] > 300
    other_cache = result("--tokens", "128", "--kv-type", "q4_0", "--flash-attention", "on")
    assert other_cache["models"][0]["perplexity"] != usual["models"][0]["perplexity"]
    assert said(run, F16, "--tokens", "512", "--no-speed")["text"] == str(BUNDLED)


def test_names_that_are_alike_are_told_apart(run: Run, text: Path, tmp_path: Path) -> None:
    copy = tmp_path / F16.name
    copy.symlink_to(F16)
    _, out, _ = run(F16, copy, "--text", text, "--chunk-tokens", "64", "--tokens", "64", "--no-speed")
    assert [row.split()[0] for row in out.splitlines()[1:3]] == [str(F16), str(copy)]


def test_bad_input(run: Run, text: Path, tmp_path: Path, synthetic: Synthetic) -> None:
    provided = ("--text", text, "--no-speed")
    assert_refused(run(F16, tmp_path / "none.gguf", *provided), 3, "none.gguf")
    assert_refused(run(F16, synthetic("llama"), *provided, "--chunk-tokens", "64"), 3, "vocabulary")
    assert_refused(run(F16, "--text", tmp_path / "none.txt"), 3, "none.txt: cannot be read: No such file")
    assert_refused(run(F16, "--text", tmp_path), 3, "cannot be read: Is a directory")
    assert_refused(run(F16, *provided, "--chunk-tokens", "20000"), 3, "20000 tokens is needed, this one has")
    assert_refused(run(F16, *provided, "--tokens", "100"), 2, "--tokens 100 is less than one chunk of 512")
    assert_refused(run(F16, *provided, "--context", "100"), 2, "use --chunk-tokens instead")
    assert_refused(run(F16, F16, *provided, "--png", tmp_path / "a.jpg"), 2, "must end in .png")
    assert_refused(run(F16, F16, *provided, "--png", tmp_path / "none" / "a.png"), 2, "a folder that exists")
    assert_refused(run(F16, *provided, "--png", tmp_path / "a.png"), 2, "name one, or leave --png out")
    text.write_bytes(TEXT.encode("utf-16"))
    assert_refused(run(F16, *provided), 3, "text.txt: not UTF-8, byte 0 is 0xff")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


def test_the_bundled_text_is_long_enough_and_varied() -> None:
    text = read_text(BUNDLED)
    assert 30_000 < len(text.encode()) < 40_000
    for part in ("def ", "#include", "SELECT", "fn ", '"readings"', "Uhrmacher", "marché", "туман", "電車"):
        assert part in text


# The picture.

POINTS = [
    ModelPoint("q8_0", 7_880_736, 0.00035, uniform=True),
    ModelPoint("q6_k", 6_103_072, 0.00202, uniform=True),
    ModelPoint("q5_k_m", 5_319_712, 0.00428, uniform=True),
    ModelPoint("q5_k_s", 5_219_712, 0.0050, uniform=True),
    ModelPoint("q4_k_m", 4_582_432, 0.01347, uniform=True),
    ModelPoint("q4_k_s", 4_482_432, 0.0157, uniform=True),
    ModelPoint("q4_0", 4_345_888, 0.02287, uniform=True),
    ModelPoint("iq4_nl", 4_355_888, 0.0210, uniform=True),
    ModelPoint("q2_k", 2_988_064, 0.1886, uniform=True),
    ModelPoint("4.4 MB", 4_400_000, 0.0140),
    ModelPoint("copy", 14_000_000, 0.0),
    ModelPoint("broken", 3_000_000, np.inf),
]


def test_each_point_has_a_number_and_a_row_by_size() -> None:
    axes, below = _figure(POINTS, "4.4 MB", "f16").axes
    numbers = [text.get_text() for text in axes.texts]
    assert numbers == [text.get_text() for text in below.texts[::2]] == [str(n) for n in range(1, len(POINTS) + 1)]
    rows = [text.get_text() for text in below.texts[1::2]]
    by_size = sorted(POINTS, key=lambda point: point.size_bytes)
    assert [row.partition(":")[0] for row in rows] == [point.label for point in by_size]
    bold = [row.get_text() for row in below.texts[1::2] if row.get_fontweight() == "bold"]
    assert bold == ["4.4 MB: 4.4 MB, 0.014 nats"]
    assert axes.get_yscale() == "log"
    assert [line.get_label() for line in axes.lines if not line.get_label().startswith("_")] == ["uniform types"]


@pytest.mark.parametrize("divergences", [[3e-4], [7.4e-4, 2.8e-4], [2.1e-4, 2.2e-4], [9e-4, 1e-4], [1e-5, 0.1], [0.0]])
def test_the_divergence_has_numbers_however_alike_models_are(divergences: list[float]) -> None:
    axes, _ = _figure(
        [ModelPoint(f"m{i}", 10**6 + i, divergence) for i, divergence in enumerate(divergences)], None, "f16"
    ).axes
    low, high = axes.get_ylim()
    ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
    assert len([tick.get_text() for place, tick in ticks if low <= place <= high and tick.get_text()]) >= 3
    assert all(low < line.get_ydata()[0] < high for line in axes.lines)


def test_labels_leave_out_what_all_names_begin_with() -> None:
    assert without_common_start(["big-1.5-f16", "big-1.5-q4_0", "big-1.5-q4_k"]) == ["f16", "q4_0", "q4_k"]
    assert without_common_start(["f16", "q4_0", "q4_k"]) == ["f16", "q4_0", "q4_k"]
    assert without_common_start(["q4_0", "q4_0-new"]) == ["q4_0", "q4_0-new"]
    assert without_common_start(["a-", "a-b"]) == ["a-", "b"]


def test_a_picture_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "p.png"
    size_against_divergence(POINTS[:1], None, path)
    assert path.read_bytes()[-8:-4] == b"IEND"
    assert [item.name for item in tmp_path.iterdir()] == ["p.png"]


def test_without_matplotlib_the_message_says_what_to_install(text: Path) -> None:
    code = f"""
import sys, apps.cli
sys.modules["matplotlib"] = None
sys.exit(apps.cli.main(["evaluate", {str(F16)!r}, {str(F16)!r}, "--text", {str(text)!r}, "--png", "p.png"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert_one_line_error(done, 2, 'pip install "edge-runtime[quantize]"')
