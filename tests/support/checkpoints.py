"""Hugging Face folders for tests: read, change and write those of tests/data/hf without any library."""

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.llm.options import EngineOptions
from tests.support import TESTS

DATA = TESTS / "data" / "hf"  # made by make_checkpoints.py
FAMILIES = sorted(path.name for path in DATA.iterdir())
EXACT = EngineOptions(context=64, batch=32, outputs=32, threads=1, kv_type="f32", flash_attention="off")

Raw = tuple[str, tuple[int, ...], bytes]  # type, shape, values


def read_safetensors(path: Path) -> dict[str, Raw]:
    """The tensors of one file."""
    content = path.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], tuple(entry["shape"]), content[start + entry["data_offsets"][0] :][: _size(entry)])
        for name, entry in header.items()
    }


def _size(entry: Mapping[str, Any]) -> int:
    return int(entry["data_offsets"][1]) - int(entry["data_offsets"][0])


def read_folder(folder: Path) -> dict[str, Raw]:
    """The tensors of all files of a folder."""
    return {name: raw for path in folder.glob("*.safetensors") for name, raw in read_safetensors(path).items()}


def write_safetensors(path: Path, tensors: Mapping[str, Raw]) -> None:
    """One file with these tensors."""
    header, at = {}, 0
    for name, (dtype, shape, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(values)]}
        at += len(values)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(raw[2] for raw in tensors.values()))


def copy(family: str, folder: Path) -> Path:
    """A copy of a family's folder, to change."""
    return Path(shutil.copytree(DATA / family, folder / family))


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Change what is in a JSON file."""
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def change_tensors(folder: Path, change: Callable[[dict[str, Raw]], None]) -> None:
    """Change the tensors of a folder that has one file."""
    tensors = read_safetensors(folder / "model.safetensors")
    change(tensors)
    write_safetensors(folder / "model.safetensors", tensors)


def floats(raw: Raw) -> NDArray[np.float32]:
    """The values of a tensor."""
    dtype, shape, values = raw
    if dtype == "BF16":
        return (np.frombuffer(values, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.frombuffer(values, {"F16": "<f2", "F32": "<f4"}[dtype]).astype(np.float32).reshape(shape)
