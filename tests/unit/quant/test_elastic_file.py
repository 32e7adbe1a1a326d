"""Test files that hold several sizes of a model: each tensor once in each type, and broken files are refused."""

import math
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quant.errors import ModelFileError
from quant.gguf.elastic import MOST_SIZES, PREFIX, elastic_sizes, plan_elastic, write_elastic
from quant.gguf.file import GgufFile
from quant.gguf.header import GgufArray
from quant.gguf.writer import NewTensor, encoded, header
from quant.types import TYPES
from tests.support import ROOT
from tests.support.small_disk import small_disk

KINDS = ("f32", "f16", "q8_0", "q4_0", "q5_1", "iq4_nl")


def static(path: Path, types: list[str], shapes: list[tuple[int, ...]]) -> GgufFile:
    """Write a file of tensors t0, t1, ... whose bytes depend on name and type alone."""
    tensors = [
        NewTensor(f"t{i}", shape, TYPES[kind]) for i, (kind, shape) in enumerate(zip(types, shapes, strict=True))
    ]
    with path.open("wb") as out:
        out.write(header({"general.architecture": encoded("str", "llama")}, tensors))
        for tensor in tensors:
            out.write(Random(f"{tensor.name} {tensor.type.name}").randbytes(tensor.n_bytes) + bytes(tensor.padding))
    return GgufFile.open(path)


@given(data=st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_size_has_the_tensors_of_its_file_and_the_whole_is_at_most_the_sum(
    tmp_path: Path, data: st.DataObject
) -> None:
    shapes = data.draw(st.lists(st.sampled_from([(32,), (64, 3), (96, 2, 2)]), min_size=1, max_size=6))
    kinds = st.lists(st.sampled_from(KINDS), min_size=len(shapes), max_size=len(shapes))
    types = data.draw(st.lists(kinds, min_size=1, max_size=4))
    files = [static(tmp_path / f"{k}.gguf", each, shapes) for k, each in enumerate(types)]
    plan = plan_elastic(files, [0.5 * k for k in range(len(files))])
    write_elastic(plan, tmp_path / "out.gguf")
    out = GgufFile.open(tmp_path / "out.gguf")
    assert out.size_bytes == plan.n_bytes
    head = max(file.header_bytes(file.path) for file in files)
    pairs_bytes = 400 + 16 * len(files) * (len(shapes) + 4) + 40 * len(shapes)
    assert plan.n_bytes <= sum(file.size_bytes - file.header_bytes(file.path) for file in files) + head + pairs_bytes
    assert {name: t.type for name, t in out.tensors.items()} == {n: t.type for n, t in files[0].tensors.items()}
    sizes = elastic_sizes(out)
    raw = (tmp_path / "out.gguf").read_bytes()
    for k, (size, file) in enumerate(zip(sizes, files, strict=True)):
        assert (size.file_bytes, size.divergence) == (file.size_bytes, 0.5 * k)
        for name, tensor in size.tensors.items():
            assert tensor.type == file.tensors[name].type
            assert raw[tensor.offset : tensor.offset + tensor.n_bytes] == bytes(file.data(name))
    distinct = {(name, t.type.id): -(-t.n_bytes // 32) * 32 for file in files for name, t in file.tensors.items()}
    assert len(raw) == len(plan.head) + sum(distinct.values())


def three(folder: Path) -> tuple[GgufFile, list[GgufFile]]:
    files = [static(folder / f"{kind}.gguf", [kind, "f32"], [(64, 4), (32,)]) for kind in ("q8_0", "q5_1", "q4_0")]
    write_elastic(plan_elastic(files, [0.0, 0.1, 0.2]), folder / "out.gguf")
    return GgufFile.open(folder / "out.gguf"), files


def changed(file: GgufFile, path: Path, **pairs: bytes) -> GgufFile:
    """Write the file with other pairs, the weights behind them as they were."""
    all_pairs = {key: file.raw_value(key) for key in file.metadata} | {PREFIX + key: raw for key, raw in pairs.items()}
    tensors = [NewTensor(name, tensor.shape, tensor.type) for name, tensor in file.tensors.items()]
    weights = file.path.read_bytes()[file.header_bytes(file.path) :]
    path.write_bytes(header(all_pairs, tensors) + weights)
    return GgufFile.open(path)


@pytest.mark.parametrize(
    ("pairs", "problem"),
    [
        ({"version": encoded("u32", 2)}, "update edge"),
        ({"types": encoded("arr[u32]", [8, 7])}, "2 items for 3 sizes"),
        ({"types": encoded("arr[u32]", [8, 7, 99])}, "unknown tensor type"),
        ({"types": encoded("arr[u32]", [8, 7, 12])}, "multiple of 256"),
        ({"types": encoded("arr[u32]", [2, 7, 2])}, "own table"),
        ({"types": encoded("arr[f32]", [8, 7, 2])}, "not a list of u32"),
        ({"offsets": encoded("arr[u64]", [0, 1 << 62, 0])}, "would be bytes"),
        ({"offsets": encoded("arr[u64]", [0, 33, 0])}, "would be bytes"),
        ({"tensors": encoded("arr[str]", ["t9"])}, "no tensor 't9'"),
        ({"file_bytes": encoded("arr[u64]", [])}, "0 sizes"),
        ({"file_bytes": encoded("arr[u64]", [1] * (MOST_SIZES + 1))}, "17 sizes"),
        ({"divergence": encoded("arr[f32]", [0.0, math.nan, 0.0])}, "must be 0 or more"),
    ],
)
def test_a_damaged_description_is_one_clear_line(tmp_path: Path, pairs: dict[str, bytes], problem: str) -> None:
    file, _ = three(tmp_path)
    with pytest.raises(ModelFileError, match=problem) as caught:
        elastic_sizes(changed(file, tmp_path / "bad.gguf", **pairs))
    assert "\n" not in str(caught.value)


def test_a_file_cut_at_any_place_is_refused(tmp_path: Path) -> None:
    file, _ = three(tmp_path)
    whole, cut = file.path.read_bytes(), tmp_path / "cut.gguf"
    for n in range(1, len(whole), 37):
        cut.write_bytes(whole[:n])
        with pytest.raises(ModelFileError):
            elastic_sizes(GgufFile.open(cut))


def test_other_values_in_the_same_type_are_refused_and_leave_no_file(tmp_path: Path) -> None:
    _, files = three(tmp_path)
    raw = bytearray(files[1].path.read_bytes())
    raw[-64] ^= 1  # of the f32 tensor, which all sizes share
    files[1].path.write_bytes(raw)
    files[1] = GgufFile.open(files[1].path)
    out = tmp_path / "new.gguf"
    with pytest.raises(ModelFileError, match="different values of t1"):
        write_elastic(plan_elastic(files, [0.0, 0.1, 0.2]), out)
    assert not out.exists()


_WRITE = """
import resource, sys
from pathlib import Path
from quant.gguf.elastic import plan_elastic, write_elastic
from quant.gguf.file import GgufFile
out, *files = map(Path, sys.argv[1:])
plan = plan_elastic([GgufFile.open(path) for path in files], [0.0] * len(files))
resource.setrlimit(resource.RLIMIT_FSIZE, (plan.n_bytes - 1, plan.n_bytes - 1))
try:
    write_elastic(plan, out)
except OSError as error:
    sys.exit(f"refused: {error}")
"""


def test_a_disk_that_fills_up_while_it_is_written_leaves_no_file(tmp_path: Path) -> None:
    _, files = three(tmp_path)
    folder = tmp_path / "full"
    folder.mkdir()
    out = folder / "out.gguf"
    out.write_bytes(b"before")
    command = [sys.executable, "-c", _WRITE, out, *(file.path for file in files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr.startswith("refused: ")) == (1, True), done.stderr
    assert [path.name for path in folder.iterdir()] == [out.name]
    assert out.read_bytes() == b"before"


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    files = [static(tmp_path / f"{kind}.gguf", [kind], [(1024, 512)]) for kind in ("q8_0", "q4_0")]
    with small_disk(tmp_path / "full", "size=512k") as folder:
        with pytest.raises(OSError, match=r"no room for .*out\.gguf"):
            write_elastic(plan_elastic(files, [0.0, 0.1]), folder / "out.gguf")
        assert list(folder.iterdir()) == []


def test_a_file_without_sizes_has_one(tmp_path: Path) -> None:
    file = static(tmp_path / "one.gguf", ["q8_0"], [(32, 2)])
    [size] = elastic_sizes(file)
    assert size.tensors == file.tensors
    assert not any(isinstance(value, GgufArray) for value in file.metadata.values())
