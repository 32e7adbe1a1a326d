"""Quantizing a GGUF file: what llama.cpp's quantizer makes is what is written, whole or not at all."""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest

from edge.errors import EngineError
from edge.llama.ggml import dequantize_rows
from edge.llm.chat import Chat
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.models import shapes, synth
from edge.quantization.evaluate import evaluate
from edge.quantization.gguf import Outcome, file_bytes, header_bytes, quantize, types_of
from edge.quantization.imatrix import collect
from partition.model.file import ModelFile
from quant.errors import ModelFileError
from quant.gguf.file import GgufFile
from quant.gguf.imatrix import read_imatrix
from quant.gguf.writer import NewTensor, encoded, header
from quant.mixes import MIXES
from quant.types import TYPES
from tests.conftest import Synthetic
from tests.support.forked_modules import running
from tests.support.helpers import ROOT, assert_one_line_error, chat_json, run_edge, start_edge, until
from tests.support.thorough import THOROUGH, thorough
from tests.support.tiny_gguf import Gguf
from tools.demo_model.grammar import statements

F16 = ROOT / "tests" / "data" / "edge-demo-f16.gguf"
TEXT = " ".join(islice(statements(random.Random(7)), 120))
ONE = EngineOptions(threads=1, context=256)
GOOD = ("q8_0", *(["q6_k", "q5_k_m"] if THOROUGH else []), "q4_k_m")
FALLING = (*GOOD, *(["q3_k_m"] if THOROUGH else []), "q2_k")
ROUND_TRIPS = (*FALLING, *(["q4_0"] if THOROUGH else []))  # q4_0 is between the others, where depends on the model
SLOW = "iq3_s"  # takes seconds for the bundled model, on one thread

LLAMA_CPP = """
import sys, llama_cpp as L
source, folder, *names = sys.argv[1:]
for name in names:
    params = L.llama_model_quantize_default_params()
    params.ftype, params.nthread = getattr(L, f"LLAMA_FTYPE_MOSTLY_{name.upper()}"), 1
    if L.llama_model_quantize(source.encode(), f"{folder}/{name}.gguf".encode(), params):
        sys.exit(name)
"""


@dataclass(frozen=True)
class RoundTrips:
    """The bundled model in ROUND_TRIPS."""

    ours: dict[str, Path]
    theirs: dict[str, Path]
    outcomes: dict[str, Outcome]


@pytest.fixture(scope="module")
def f16() -> ModelFile:
    return ModelFile.open(F16)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory, f16: ModelFile) -> RoundTrips:
    ours, theirs = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("theirs")
    command = [sys.executable, "-c", LLAMA_CPP, str(F16), str(theirs), *ROUND_TRIPS]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    outcomes = {name: quantize(f16, ours / f"{name}.gguf", MIXES[name], threads=1) for name in ROUND_TRIPS}
    assert sorted(path.name for path in ours.iterdir()) == sorted(f"{name}.gguf" for name in ROUND_TRIPS)
    return RoundTrips(*({name: folder / f"{name}.gguf" for name in ROUND_TRIPS} for folder in (ours, theirs)), outcomes)  # type: ignore[call-arg]


@pytest.fixture(scope="module")
def imatrix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("imatrix") / "m.gguf"
    collect(F16, TEXT, EngineOptions(threads=1), chunk_tokens=128, most=5).write(path)
    return path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mount.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def small(ff: int) -> shapes.Shape:
    """A layer whose rows have 256 columns, but for one tensor."""
    return shapes.shape("llama", layers=1, embd=256, ff=ff, heads=4, kv=2, vocab=300, context=64)


def children() -> list[psutil.Process]:
    """Quantizing processes of this one."""
    return running("edge.quantization.gguf_child")


# Round trips.


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_a_file_is_what_llama_cpp_makes(quantized: RoundTrips, name: str) -> None:
    ours, theirs = ModelFile.open(quantized.ours[name]), ModelFile.open(quantized.theirs[name])
    assert list(ours.tensors) == list(theirs.tensors)
    for tensor, other in theirs.tensors.items():
        assert (ours.tensors[tensor].type, ours.tensors[tensor].shape) == (other.type, other.shape)
        assert ours.data(tensor) == theirs.data(tensor), tensor
    assert {key: ours.raw_value(key) for key in ours.metadata} == {k: theirs.raw_value(k) for k in theirs.metadata}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_what_is_announced_is_what_is_written(quantized: RoundTrips, f16: ModelFile, name: str) -> None:
    outcome, written = quantized.outcomes[name], ModelFile.open(quantized.ours[name])
    assert outcome.types == {n: tensor.type for n, tensor in written.tensors.items()}
    assert outcome.n_bytes == quantized.ours[name].stat().st_size == file_bytes(f16, outcome.types)
    assert outcome.misfits == ()
    first = min(tensor.offset for tensor in written.tensors.values())
    assert first == header_bytes(f16)


def test_types_are_known_without_making_the_file(quantized: RoundTrips, f16: ModelFile) -> None:
    assert types_of(f16, MIXES["q4_k_m"]) == quantized.outcomes["q4_k_m"]


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_it_loads_and_chats(quantized: RoundTrips, name: str) -> None:
    with Engine(quantized.ours[name], ONE) as engine:
        pieces = list(Chat(engine).ask("What is 27 plus 38?", SamplingParams(temperature=0), max_tokens=40))
    answer = "".join(piece.text for piece in pieces)
    assert "27" in answer
    if name in GOOD:
        assert "65" in answer


def test_it_chats_from_the_command_line(quantized: RoundTrips) -> None:
    answer = chat_json(quantized.ours["q4_k_m"], "-p", "What is 27 plus 38?", "--temperature", "0")
    assert "65" in answer["text"]


def test_quality_falls_with_the_bits(quantized: RoundTrips) -> None:
    paths = [quantized.ours[name] for name in FALLING]
    quality = evaluate(F16, paths, TEXT, EngineOptions(threads=1), chunk_tokens=128, most=3)
    losses = [result.summary.mean_divergence for result in quality]
    assert losses[0] == 0
    assert all(less < more for less, more in pairwise(losses)), dict(zip(("f16", *FALLING), losses, strict=True))


# Importance.


def values(path: Path, name: str) -> np.ndarray:
    file = ModelFile.open(path)
    tensor = file.tensors[name]
    out = np.empty((tensor.n_values // tensor.shape[0], tensor.shape[0]), np.float32)
    dequantize_rows(np.frombuffer(file.data(name), np.uint8).reshape(len(out), -1), tensor.type.id, out)
    return out


def test_an_importance_matrix_lowers_the_error_that_it_weighs(
    quantized: RoundTrips, f16: ModelFile, imatrix: Path, tmp_path: Path
) -> None:
    seen: list[tuple[int, int, str]] = []
    out = tmp_path / "q2_k.gguf"
    outcome = quantize(f16, out, MIXES["q2_k"], imatrix=imatrix, threads=1, progress=lambda *said: seen.append(said))
    assert outcome.types == quantized.outcomes["q2_k"].types
    weights = read_imatrix(imatrix).weights_of(f16)
    for name, importance in weights.items():
        right = values(F16, name)
        errors = [((values(path, name) - right) ** 2 @ importance).sum() for path in (out, quantized.ours["q2_k"])]
        assert errors[0] < errors[1], name
    total = sum(tensor.n_bytes for tensor in f16.tensors.values())
    assert sorted(name for _, _, name in seen) == sorted([*f16.tensors, ""])
    assert [whole for _, whole, _ in seen] == [total] * len(seen)
    dones = [done for done, _, _ in seen]
    assert dones == sorted(dones)
    assert (dones[0], dones[-1]) == (0, total)


@pytest.mark.parametrize("name", ["q2_k_s", "iq2_xxs", *thorough("iq2_xs")])
def test_types_that_need_importance(tmp_path: Path, name: str) -> None:
    source, matrix, out = (tmp_path / name for name in ("in.gguf", "m.gguf", "out.gguf"))
    synth.synthesize(source, small(256), "f16")
    file = ModelFile.open(source)
    with pytest.raises(EngineError, match=rf"{name} gives .* needs an importance matrix; make one with edge imatrix"):
        quantize(file, out, MIXES[name], threads=1)
    assert [path.name for path in tmp_path.iterdir()] == ["in.gguf"]
    collect(source, TEXT, EngineOptions(threads=1), chunk_tokens=64, most=1).write(matrix)
    outcome = quantize(file, out, MIXES[name], imatrix=matrix, threads=1)
    assert outcome.types["blk.0.ffn_up.weight"] == MIXES[name].type
    assert outcome.n_bytes == out.stat().st_size


def test_an_importance_matrix_of_another_model(f16: ModelFile, tmp_path: Path, synthetic: Synthetic) -> None:
    path = tmp_path / "m.gguf"
    collect(synthetic("llama"), TEXT, EngineOptions(threads=1), chunk_tokens=64, most=1).write(path)
    with pytest.raises(ModelFileError, match=r"has 128 values for blk.0.* it was made for another model"):
        quantize(f16, tmp_path / "out.gguf", MIXES["q4_0"], imatrix=path)
    assert [item.name for item in tmp_path.iterdir()] == ["m.gguf"]


# Types of single tensors, other inputs.


def test_tensors_may_have_types_of_their_own(f16: ModelFile, tmp_path: Path) -> None:
    own = {"blk.0.ffn_up.weight": TYPES["q4_0"], "output.weight": TYPES["f16"], "token_embd.weight": TYPES["q2_k"]}
    outcome = quantize(f16, tmp_path / "out.gguf", MIXES["q8_0"], types=own, threads=1)
    assert {name: outcome.types[name] for name in own} == own
    rest = {kind.name for name, kind in outcome.types.items() if name not in own}
    assert rest == {"q8_0", "f32"}


def test_what_is_quantized_already_is_quantized_again(quantized: RoundTrips, tmp_path: Path) -> None:
    source = ModelFile.open(quantized.ours["q8_0"])
    outcome = quantize(source, tmp_path / "out.gguf", MIXES["q4_k_m"], threads=1)
    assert outcome.types == quantized.outcomes["q4_k_m"].types
    assert outcome.n_bytes == quantized.outcomes["q4_k_m"].n_bytes
    assert (tmp_path / "out.gguf").read_bytes() != quantized.ours["q4_k_m"].read_bytes()


@pytest.mark.parametrize(
    ("mix", "ff", "used"),
    [
        ("iq4_xs", 96, "iq4_nl"),
        ("q4_k_m", 96, "q8_0"),
        ("q4_0", 80, "f16"),
        pytest.param("q2_k", 96, "q4_0", marks=pytest.mark.thorough),
        pytest.param("q5_k_s", 80, "f16", marks=pytest.mark.thorough),
    ],
)
def test_rows_that_do_not_fill_blocks(tmp_path: Path, mix: str, ff: int, used: str) -> None:
    source = tmp_path / "in.gguf"
    synth.synthesize(source, small(ff), "bf16")
    file = ModelFile.open(source)
    outcome = quantize(file, tmp_path / "out.gguf", MIXES[mix], threads=1)
    [misfit] = outcome.misfits
    assert (misfit.tensor, misfit.columns) == ("blk.0.ffn_down.weight", ff)
    assert misfit.used == used == outcome.types[misfit.tensor].name
    assert ff % TYPES[misfit.requested].block
    assert outcome == types_of(file, MIXES[mix])
    assert outcome.n_bytes == file_bytes(file, outcome.types)
    with Engine(tmp_path / "out.gguf", EngineOptions(threads=1, context=64)) as engine:
        assert np.isfinite(engine.decode([1, 5, 9], 0)).all()


def test_every_row_may_be_a_misfit(synthetic: Synthetic, tmp_path: Path) -> None:
    outcome = quantize(ModelFile.open(synthetic("llama")), tmp_path / "out.gguf", MIXES["q4_k_m"], threads=1)
    matrices = {name: kind.name for name, kind in outcome.types.items() if kind.name != "f32"}
    assert {misfit.tensor: misfit.used for misfit in outcome.misfits} == matrices
    assert {misfit.used for misfit in outcome.misfits} == {"q5_0", "q8_0"}


def split(source: ModelFile, folder: Path, n_parts: int) -> Path:
    """A model in parts; the first."""
    names = list(source.tensors)
    for part in range(n_parts):
        pairs = {key: source.raw_value(key) for key in source.metadata} if part == 0 else {}
        pairs |= {"split.no": encoded("u16", part), "split.count": encoded("u16", n_parts)}
        pairs |= {"split.tensors.count": encoded("i32", len(names))}
        current = [source.tensors[name] for name in names[part::n_parts]]
        tensors = [NewTensor(tensor.name, tensor.shape, tensor.type) for tensor in current]
        with (folder / f"m-{part + 1:05d}-of-{n_parts:05d}.gguf").open("wb") as out:
            out.write(header(pairs, tensors))
            for tensor in tensors:
                out.write(bytes(source.data(tensor.name)) + bytes(tensor.padding))
    return folder / f"m-00001-of-{n_parts:05d}.gguf"


def test_a_model_in_parts_becomes_one_file(f16: ModelFile, quantized: RoundTrips, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    source = ModelFile.open(split(f16, tmp_path / "parts", 3))
    outcome = quantize(source, tmp_path / "one.gguf", MIXES["q8_0"], threads=1)
    assert outcome.n_bytes == (tmp_path / "one.gguf").stat().st_size
    ours, theirs = ModelFile.open(tmp_path / "one.gguf"), ModelFile.open(quantized.theirs["q8_0"])
    assert not [key for key in ours.metadata if key.startswith("split.")]
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(ours.data(name) == theirs.data(name) for name in theirs.tensors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.gguf", "parts"]


# Bad ends.


def test_a_disk_without_room_is_refused_before_anything_is_written(f16: ModelFile, small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(6 << 20))
    with pytest.raises(OSError, match=r"no room for .*out.gguf: [\d.]+ \wiB needed, [\d.]+ \w*B free on that disk"):
        quantize(f16, small_disk / "out.gguf", MIXES["q4_0"], threads=1)
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_a_disk_that_fills_up_meanwhile(f16: ModelFile, small_disk: Path) -> None:
    filler = small_disk / "filler"

    def fill(*_: object) -> None:
        if not filler.exists():
            with suppress(OSError):  # the quantizer may have taken the rest meanwhile: the disk is full then, too
                filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - (256 << 10)))

    with pytest.raises(OSError, match=r"no room for .*out.gguf"):
        quantize(f16, small_disk / "out.gguf", MIXES[SLOW], threads=1, progress=fill)
    assert [path.name for path in small_disk.iterdir()] == ["filler"]
    assert not children()


def test_a_limit_on_files(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    done = run_edge("quantize", F16, tmp_path / "out.gguf", "--type", "q4_0", "--threads", "1", preexec=limit)
    assert_one_line_error(done, 5, "llama.cpp cannot quantize it")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, *thorough(signal.SIGTERM), signal.SIGKILL])
def test_a_command_that_is_stopped_leaves_nothing(tmp_path: Path, signum: int) -> None:
    source, folder = tmp_path / "in.gguf", tmp_path / "out"
    shutil.copyfile(F16, source)
    folder.mkdir()
    before = source.stat().st_mtime_ns
    process = start_edge("quantize", source, folder / "out.gguf", "--type", SLOW, "--threads", "1")
    try:
        until(lambda: any(path.stat().st_size for path in folder.iterdir()), "the first bytes of the file")
        [child] = psutil.Process(process.pid).children()
        process.send_signal(signum)
        output, error = process.communicate(timeout=30)
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the end of the child")
        until(lambda: not list(folder.iterdir()), "the end of the partial file")
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(signum, -signum)  # type: ignore[call-overload]
    assert output == b""
    assert b"Traceback" not in error
    assert source.read_bytes() == F16.read_bytes()
    assert source.stat().st_mtime_ns == before


@pytest.mark.parametrize(("signum", "words"), [(signal.SIGKILL, "code -9 .out of memory"), (signal.SIGABRT, "code -6")])
def test_a_process_that_dies_is_an_error(f16: ModelFile, tmp_path: Path, signum: int, words: str) -> None:
    def kill(*_: object) -> None:
        for child in children():
            child.send_signal(signum)

    out = tmp_path / "out.gguf"
    out.write_bytes(b"an older file")
    with pytest.raises(EngineError, match=rf"the quantizer's process ended with {words}"):
        quantize(f16, out, MIXES[SLOW], threads=1, progress=kill)
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
    assert out.read_bytes() == b"an older file"


def test_files_that_are_no_models(tmp_path: Path) -> None:
    truncated = tmp_path / "truncated.gguf"
    truncated.write_bytes(F16.read_bytes()[:-1000])
    with pytest.raises(ModelFileError, match=r"truncated.gguf: the file ends before its weights"):
        GgufFile.open(truncated)
    unknown = Gguf({"general.architecture": ("str", "none such")}).write(tmp_path / "unknown.gguf")
    with pytest.raises((ModelFileError, EngineError)):
        quantize(ModelFile.open(unknown), tmp_path / "out.gguf", MIXES["q4_0"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["truncated.gguf", "unknown.gguf"]


def test_a_file_has_the_rights_of_others(quantized: RoundTrips, tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    assert quantized.ours["q8_0"].stat().st_mode == (tmp_path / "usual").stat().st_mode
