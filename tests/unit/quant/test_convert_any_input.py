"""Test the conversion of folders with arbitrary content: the result is one error line, or a file that llama.cpp can
load.
"""

import json
import random
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from partition.model.check import check_loadable
from quant.checkpoint.convert import convert
from quant.errors import ModelFileError
from quant.gguf.file import GgufFile
from tests.support.checkpoints import DATA, copy
from tests.support.thorough import some

JSON = st.sampled_from([None, True, -1, 0, 1, 2, 3.5, float("inf"), 10**40, "", "x", [], [1], {}, {"a": 1}, ["x", {}]])
FILES = ["config.json", "tokenizer.json", "tokenizer_config.json"]


def converts_or_says_why(folder: Path) -> None:
    """One line, or a file that llama.cpp can be given."""
    out = folder.parent / "model.gguf"
    line = ""
    try:
        convert(folder, out)
    except ModelFileError as exc:
        line = str(exc)
    assert "\n" not in line
    if not line:
        check_loadable(GgufFile.open(out))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container with a key of it, in what a JSON file holds."""
    keys = list(value) if isinstance(value, dict) else range(min(3, len(value))) if isinstance(value, list) else []
    return [place for key in keys for place in [(value, key), *_places(value[key])]]


@settings(max_examples=some(37, 150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from(["llama3", "gemma2", "gemma3-vision", "mistral", "qwen3moe"]),
    file=st.sampled_from(FILES), seed=st.integers(0, 2**32), new=JSON,
)  # fmt: skip
def test_any_value_in_a_json_file(tmp_path: Path, family: str, file: str, seed: int, new: Any) -> None:
    folder = tmp_path / family
    if not folder.exists():
        copy(family, tmp_path)
    original = (DATA / family / file).read_text()
    values = json.loads(original)
    top = list(values)  # short lists of settings as often as the long vocabulary
    key = random.Random(seed).choice(top)
    container, inner = random.Random(seed + 1).choice([(values, key), *_places(values[key])])
    container[inner] = new
    (folder / file).write_text(json.dumps(values))
    converts_or_says_why(folder)
    (folder / file).write_text(original)


@settings(max_examples=some(25, 100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 2000), byte=st.integers(0, 255))
def test_any_byte_of_a_header(tmp_path: Path, at: int, byte: int) -> None:
    folder = tmp_path / "llama"
    if not folder.exists():
        copy("llama", tmp_path)
    content = bytearray((DATA / "llama" / "model.safetensors").read_bytes())
    content[at] = byte
    (folder / "model.safetensors").write_bytes(content)
    converts_or_says_why(folder)


@settings(max_examples=some(25, 100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 6000), byte=st.integers(0, 255))
def test_any_byte_of_a_sentencepiece_model(tmp_path: Path, at: int, byte: int) -> None:
    folder = tmp_path / "llama"
    if not folder.exists():
        copy("llama", tmp_path)
    content = bytearray((DATA / "llama" / "tokenizer.model").read_bytes())
    content[at % len(content)] = byte
    (folder / "tokenizer.model").write_bytes(content)
    converts_or_says_why(folder)
