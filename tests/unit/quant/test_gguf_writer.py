"""Both readers read what the writer writes."""

import math
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quant.gguf.file import GgufFile
from quant.gguf.header import GgufArray
from quant.gguf.writer import ALIGNMENT, NewTensor, encoded, header
from quant.types import TYPES
from tests.support.thorough import some
from tests.unit.quant.test_gguf_file import NAMES, PAIRS

FAST = settings(max_examples=some(20, 60), suppress_health_check=[HealthCheck.function_scoped_fixture])
TENSORS = st.dictionaries(
    st.from_regex(r"[a-z][a-z0-9_.]{0,40}", fullmatch=True),
    st.tuples(st.lists(st.integers(1, 4), max_size=2), st.sampled_from(["f32", "f16", "q4_0", "q6_k", "mxfp4"])),
    max_size=5,
)


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, GgufArray) else value


@FAST
@given(pairs=PAIRS, shapes=TENSORS, seed=st.binary(min_size=1, max_size=9))
def test_written_and_read(
    tmp_path: Path, pairs: dict[str, tuple[str, Any]], shapes: dict[str, Any], seed: bytes
) -> None:
    tensors = [NewTensor(name, (TYPES[kind].block, *rows), TYPES[kind]) for name, (rows, kind) in shapes.items()]
    data = {t.name: (seed * t.n_bytes)[: t.n_bytes] for t in tensors}
    head = header({key: encoded(kind, value) for key, (kind, value) in pairs.items()}, tensors)
    assert len(head) % ALIGNMENT == 0
    path = tmp_path / "file.gguf"
    path.write_bytes(head + b"".join(data[t.name] + bytes(t.padding) for t in tensors))
    file = GgufFile.open(path)
    assert {key: (file.value_type(key), plain(value)) for key, value in file.metadata.items()} == pairs
    assert [(t.name, t.shape, t.type) for t in file.tensors.values()] == [(t.name, t.shape, t.type) for t in tensors]
    for name in file.tensors:
        assert bytes(file.data(name)) == data[name]
    reader = gguf.GGUFReader(path)
    assert {t.name: t.data.tobytes() for t in reader.tensors} == data
    for key, (kind, value) in pairs.items():
        field = reader.fields[key]
        names = ["ARRAY", NAMES[kind[4:-1]]] if kind.startswith("arr[") else [NAMES[kind]]
        assert [t.name for t in field.types[:2]] == names
        assert field.contents() == value


@FAST
@given(pairs=PAIRS)
def test_a_value_copied_is_the_same(tmp_path: Path, pairs: dict[str, tuple[str, Any]]) -> None:
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    first.write_bytes(header({key: encoded(kind, value) for key, (kind, value) in pairs.items()}, []))
    file = GgufFile.open(first)
    second.write_bytes(header({key: file.raw_value(key) for key in file.metadata}, []))
    assert second.read_bytes() == first.read_bytes()


@pytest.mark.parametrize(
    ("type_name", "value"),
    [
        ("u8", 256),
        ("u32", -1),
        ("u32", "3"),
        ("str", 3),
        ("str", None),
        ("arr[u32]", 3),
        ("arr[str]", [1]),
        ("arr[i8]", [128]),
        ("arr[u128]", [1]),
        ("f16", 1.0),
    ],
)
def test_what_cannot_be_written(type_name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"cannot be written as"):
        encoded(type_name, value)


def test_flags_and_rows() -> None:
    assert encoded("arr[bool]", [True, False]).endswith(b"\x01\x00")
    tensor = NewTensor("a", (64, 3, 2), TYPES["q4_0"])
    assert tensor.n_bytes == 2 * 18 * math.prod((3, 2))
    assert (tensor.n_bytes + tensor.padding) % ALIGNMENT == 0
    with pytest.raises(ValueError, match="whole blocks of 32"):
        header({}, [NewTensor("a", (33, 2), TYPES["q4_0"])])
