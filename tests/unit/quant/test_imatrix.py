"""Test files of importance matrices: other programs can read them, and damaged ones are refused."""

import io
import os
import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quant.errors import ModelFileError
from quant.gguf.imatrix import Entry, ImportanceMatrix, read_imatrix
from quant.gguf.writer import NewTensor, encoded, header
from quant.types import TYPES
from tests.support import TESTS

F16 = TESTS / "data" / "edge-demo-f16.gguf"


def entry(sums: list[list[float]], counts: list[int]) -> Entry:
    return Entry(np.array(sums, np.float32), np.array(counts, np.int64))


MATRIX = ImportanceMatrix(
    {"blk.0.attn_q.weight": entry([[1.5, 3.0]], [3]), "blk.0.ffn_up_exps.weight": entry([[4, 8], [0, 0]], [2, 0])},
    ("a text.txt",),
    chunk_count=2,
    chunk_size=512,
)


def assert_same(a: ImportanceMatrix, b: ImportanceMatrix) -> None:
    assert (a.datasets, a.chunk_count, a.chunk_size) == (b.datasets, b.chunk_count, b.chunk_size)
    assert a.entries.keys() == b.entries.keys()
    for name in a.entries:
        np.testing.assert_array_equal(a.entries[name].sums, b.entries[name].sums)
        np.testing.assert_array_equal(a.entries[name].counts, b.entries[name].counts)


@given(st.lists(st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=9), min_size=1, max_size=4), st.data())
def test_what_is_written_is_read(rows: list[list[float]], data: st.DataObject) -> None:
    columns = min(map(len, rows))
    entries = {
        f"blk.{i}.weight": entry(
            [row[:columns] for row in rows],
            data.draw(st.lists(st.integers(0, 1 << 24), min_size=len(rows), max_size=len(rows))),
        )
        for i in range(2)
    }
    matrix = ImportanceMatrix(entries, ("one", "två"), 3, 64)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "matrix.gguf"
        assert matrix.write(path) == path.stat().st_size
        assert_same(read_imatrix(path), matrix)
        assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_the_gguf_package_reads_it(tmp_path: Path) -> None:
    MATRIX.write(tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.fields["general.type"].contents() == "imatrix"
    assert reader.fields["imatrix.datasets"].contents() == ["a text.txt"]
    assert reader.fields["imatrix.chunk_count"].contents() == 2
    assert reader.fields["imatrix.chunk_size"].contents() == 512
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors["blk.0.ffn_up_exps.weight.in_sum2"].shape.tolist() == [2, 2]
    assert tensors["blk.0.ffn_up_exps.weight.counts"].shape.tolist() == [1, 2]
    assert tensors["blk.0.attn_q.weight.in_sum2"].data.tolist() == [[1.5, 3.0]]


def test_weights_are_means_and_1_where_nothing_was_seen() -> None:
    experts = MATRIX.weights("blk.0.ffn_up_exps.weight", 2, 2)
    assert experts is not None
    assert experts.dtype == np.float32
    assert experts.tolist() == [2, 4, 1, 1]
    assert MATRIX.weights("blk.9.attn_q.weight", 1, 2) is None
    assert MATRIX.unseen == {"blk.0.ffn_up_exps.weight": 1}
    with pytest.raises(ModelFileError, match=r"has 2 values for blk.0.attn_q.weight, but the tensor needs 1 x 3"):
        MATRIX.weights("blk.0.attn_q.weight", 1, 3)


def legacy(entries: dict[str, tuple[int, list[float]]], tail: bytes = b"") -> bytes:
    """An importance matrix as older tools wrote it."""
    out = io.BytesIO()
    out.write(struct.pack("<i", len(entries)))
    for name, (chunks, values) in entries.items():
        raw = name.encode()
        out.write(struct.pack("<i", len(raw)) + raw)
        out.write(struct.pack(f"<ii{len(values)}f", chunks, len(values), *values))
    return out.getvalue() + tail


def test_older_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "old.dat"
    entries = {"blk.0.attn_q.weight": (4, [8.0, 2.0]), "blk.0.ffn_up_exps.weight": (0, [3.0, 5.0, 7.0, 9.0])}
    path.write_bytes(legacy(entries, struct.pack("<ii", 12, 5) + b"a.txt"))
    matrix = read_imatrix(path)
    assert (matrix.datasets, matrix.chunk_count, matrix.chunk_size) == (("a.txt",), 12, 0)
    dense, experts = matrix.weights("blk.0.attn_q.weight", 1, 2), matrix.weights("blk.0.ffn_up_exps.weight", 2, 2)
    assert dense is not None
    assert dense.tolist() == [2, 0.5]
    assert experts is not None
    assert experts.tolist() == [3, 5, 7, 9]
    path.write_bytes(legacy(entries))
    assert read_imatrix(path).datasets == ()


@pytest.mark.parametrize("kind", ["gguf", "dat"])
def test_what_is_cut_off_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m"
    if kind == "gguf":
        MATRIX.write(path)
    else:
        path.write_bytes(legacy({"a": (1, [1.0, 2.0]), "b": (2, [3.0])}, struct.pack("<ii", 1, 1) + b"t"))
    whole = path.read_bytes()
    # Without what follows the entries an older file is whole; GGUF is padded at its end.
    ends = {len(legacy({"a": (1, [1.0, 2.0]), "b": (2, [3.0])})) + n for n in (0, 4)} if kind == "dat" else set()
    for n in range(len(whole) - (31 if kind == "gguf" else 0)):
        path.write_bytes(whole[:n])
        if n in ends:
            read_imatrix(path)
        else:
            with pytest.raises(ModelFileError) as error:
                read_imatrix(path)
            assert "\n" not in str(error.value)


GOOD = {
    "imatrix.datasets": encoded("arr[str]", ["t"]),
    "imatrix.chunk_count": encoded("u32", 1),
    "imatrix.chunk_size": encoded("u32", 8),
}


def gguf_of(tensors: dict[str, tuple[tuple[int, ...], list[float]]], pairs: dict[str, bytes] | None = None) -> bytes:
    table = [NewTensor(name, shape, TYPES["f32"]) for name, (shape, _) in tensors.items()]
    data = [struct.pack(f"<{len(values)}f", *values) for _, values in tensors.values()]
    parts = [raw + bytes(tensor.padding) for raw, tensor in zip(data, table, strict=True)]
    return header(GOOD if pairs is None else pairs, table) + b"".join(parts)


BAD = {
    "infinite sums": (gguf_of({"a.in_sum2": ((1, 1), [np.inf]), "a.counts": ((1, 1), [1])}), "not finite"),
    "negative sums": (gguf_of({"a.in_sum2": ((1, 1), [-1.0]), "a.counts": ((1, 1), [1])}), "negative"),
    "negative counts": (gguf_of({"a.in_sum2": ((1, 1), [1.0]), "a.counts": ((1, 1), [-1])}), "counts"),
    "no number of tokens": (gguf_of({"a.in_sum2": ((1, 1), [1.0]), "a.counts": ((1, 1), [np.nan])}), "counts"),
    "endless counts": (gguf_of({"a.in_sum2": ((1, 1), [1.0]), "a.counts": ((1, 1), [1e30])}), "counts"),
    "sums alone": (gguf_of({"a.in_sum2": ((1, 1), [1.0])}), "not all of them have counts"),
    "counts alone": (gguf_of({"a.counts": ((1, 1), [1.0])}), "not all of them have counts"),
    "another tensor": (
        gguf_of({"a.in_sum2": ((1, 1), [1]), "a.counts": ((1, 1), [1]), "b": ((1,), [1])}),
        "or there are others",
    ),
    "experts that do not divide": (
        gguf_of({"a.in_sum2": ((3, 1), [1, 2, 3]), "a.counts": ((1, 2), [1, 1])}),
        "3 sums for 2 experts",
    ),
    "nothing": (gguf_of({}), "0 tensors have sums"),
    "no metadata": (gguf_of({"a.in_sum2": ((1, 1), [1.0]), "a.counts": ((1, 1), [1])}, {}), "not an importance matrix"),
    "another type": (
        gguf_of(
            {"a.in_sum2": ((1, 1), [1]), "a.counts": ((1, 1), [1])}, GOOD | {"imatrix.chunk_size": encoded("i32", 8)}
        ),
        "i32, but must be u32",
    ),
    "an empty file": (b"", "not an importance matrix"),
    "a text": (b"\x89PNG and so on", "not an importance matrix"),
    "too many tensors": (struct.pack("<i", 70000), "not an importance matrix"),
    "a long name": (struct.pack("<ii", 1, 1 << 30), "needs 1073741824 bytes"),
    "a name that is none": (legacy({"a\nb": (1, [1.0])}), "impossible name"),
    "many values": (struct.pack("<ii1sii", 1, 1, b"a", 1, 1 << 29), "needs 2147483648 bytes"),
    "no values": (struct.pack("<ii1sii", 1, 1, b"a", 1, 0), "has 0 values"),
    "old infinite sums": (legacy({"a": (1, [np.inf])}), "not finite"),
}


@pytest.mark.parametrize("what", BAD)
def test_damaged_files_are_refused(tmp_path: Path, what: str) -> None:
    content, message = BAD[what]
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ModelFileError, match=message) as error:
        read_imatrix(tmp_path / "bad.gguf")
    assert str(error.value).startswith("bad.gguf: ")


def test_what_is_no_file_or_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        read_imatrix(tmp_path / "none")
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_imatrix(tmp_path)
    with pytest.raises(ModelFileError, match=r"this is a model \(llama\)"):
        read_imatrix(F16)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="pipe: cannot be read: it is not a regular file"):
        read_imatrix(tmp_path / "pipe")


def test_of_another_large_file_only_the_start_is_read(tmp_path: Path) -> None:
    """A terabyte, of which the disk holds a few bytes: reading it would end with MemoryError."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 30_000) + b'{"')  # its size looks like a number of tensors
    os.truncate(path, 1 << 40)
    with pytest.raises(ModelFileError, match=r"it has 1099511627776 bytes, more than the limit of \d+"):
        read_imatrix(path)
    path.write_bytes(b"PK\x03\x04")
    os.truncate(path, 1 << 40)
    with pytest.raises(ModelFileError, match="this is not an importance matrix"):
        read_imatrix(path)


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    for bad in ({}, {"a": entry([[np.nan]], [1])}):
        with pytest.raises(ModelFileError):
            ImportanceMatrix(bad).write(tmp_path / "m.gguf")
    with pytest.raises(OSError, match="No such file"):
        MATRIX.write(tmp_path / "missing" / "m.gguf")
    assert list(tmp_path.iterdir()) == []
