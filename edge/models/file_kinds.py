"""Kinds of files beside models: projectors, importance matrices and adapters are GGUF files, and no models."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from quant.gguf.part import leading_values

_PROJECTOR = re.compile(r"(?<![a-z0-9])mmproj(?![a-z0-9])|^mmproj", re.IGNORECASE)
_MATRIX = re.compile(r"(?<![a-z0-9])imatrix(?![a-z0-9])", re.IGNORECASE)
# The type of a model's weights in its file's name: such a file was made with an importance matrix, and is none.
_TYPE = re.compile(r"(?<![a-z0-9])(i?q\d\w*|tq\d\w*|bf16|fp?16|fp?32|mxfp4\w*|nvfp4)(?![a-z0-9])", re.IGNORECASE)
_PART = re.compile(r"(?P<start>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE | re.ASCII)
_USES = {
    "projector": "a projector of pictures or sounds: name it with --mmproj, beside the model that it belongs to",
    "matrix": "an importance matrix: name it with --imatrix of `edge quantize`",
    "adapter": "a LoRA adapter: name it with --lora, beside the model that it belongs to",
}


def is_gguf(name: str) -> bool:
    """Return whether a file is a GGUF file by its name, in letters of any case."""
    return name.lower().endswith(".gguf")


def parts(name: str) -> list[str]:
    """Return all parts of a split model, the first one first, from the name of any; any other file alone."""
    match = _PART.fullmatch(name)
    count = int(match["count"]) if match else 0
    if match is None or not 1 <= int(match["number"]) <= count:
        return [name]
    return [f"{match['start']}-{i:05d}-of-{match['count']}{match['suffix']}" for i in range(1, count + 1)]


def model_name(path: Path) -> str:
    """Return the name of a model: that of its file, without the number of the part and the suffix."""
    match = _PART.fullmatch(path.name)
    return match["start"] if match and parts(path.name) != [path.name] else path.stem


def models_among(names: Iterable[str]) -> list[str]:
    """Return the models among the files of a repository, each by its first part, sorted."""
    return sorted({parts(name)[0] for name in names if is_gguf(name) and not kind_by_name(name)})


def kind_by_name(name: str) -> str:
    """Return "projector" or "matrix" for a file that is no model, as far as its name tells; "" for any other."""
    stem = PurePosixPath(name).name
    if _PROJECTOR.search(stem):
        return "projector"
    return "matrix" if _MATRIX.search(stem) and not _TYPE.search(stem) else ""


def kind_of_file(path: Path) -> str:
    """Return the kind of a file as its header tells: also "adapter". OSError; ModelFileError for no GGUF file."""
    values = leading_values(path)
    if values.get("general.architecture") == "clip" or values.get("general.type") == "mmproj":
        return "projector"
    return {"imatrix": "matrix", "adapter": "adapter"}.get(str(values.get("general.type")), "")


def use_of(kind: str, name: str) -> str:
    """Return for people what a file that is no model is, and where it fits."""
    return f"{name} is {_USES[kind]}"
