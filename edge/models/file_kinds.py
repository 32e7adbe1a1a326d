"""Kinds of GGUF files that are not models: projectors, importance matrices and adapters."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from quant.gguf.part import leading_values

_PROJECTOR = re.compile(r"(?<![a-z0-9])mmproj(?![a-z0-9])|^mmproj", re.IGNORECASE)
_MATRIX = re.compile(r"(?<![a-z0-9])imatrix(?![a-z0-9])", re.IGNORECASE)
# Weight type in a file name. A file with such a name is a model that was made with an importance matrix.
_TYPE = re.compile(r"(?<![a-z0-9])(i?q\d\w*|tq\d\w*|bf16|fp?16|fp?32|mxfp4\w*|nvfp4)(?![a-z0-9])", re.IGNORECASE)
_PART = re.compile(r"(?P<start>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE | re.ASCII)
_USES = {
    "projector": "a projector of pictures or sounds: name it with --mmproj, together with its model",
    "matrix": "an importance matrix: name it with --imatrix of `edge quantize`",
    "adapter": "a LoRA adapter: name it with --lora, together with its model",
}


def is_gguf(name: str) -> bool:
    """Return whether a file name ends in .gguf, in any letter case."""
    return name.lower().endswith(".gguf")


def parts(name: str) -> list[str]:
    """Return all parts of a split model in order, from the name of any part. Return other names alone."""
    match = _PART.fullmatch(name)
    count = int(match["count"]) if match else 0
    if match is None or not 1 <= int(match["number"]) <= count:
        return [name]
    return [f"{match['start']}-{i:05d}-of-{match['count']}{match['suffix']}" for i in range(1, count + 1)]


def model_name(path: Path) -> str:
    """Return the name of a model: its file name without part number and suffix."""
    match = _PART.fullmatch(path.name)
    return match["start"] if match and parts(path.name) != [path.name] else path.stem


def models_among(names: Iterable[str]) -> list[str]:
    """Return the models among the files of a repository, sorted. A split model is named by its first part."""
    return sorted({parts(name)[0] for name in names if is_gguf(name) and not kind_by_name(name)})


def kind_by_name(name: str) -> str:
    """Return "projector" or "matrix" if the file name shows that the file is not a model; "" otherwise."""
    stem = PurePosixPath(name).name
    if _PROJECTOR.search(stem):
        return "projector"
    return "matrix" if _MATRIX.search(stem) and not _TYPE.search(stem) else ""


def kind_of_file(path: Path) -> str:
    """Return the kind of a file from its header, which may also be "adapter"; "" for a model.

    Raises OSError, or ModelFileError if the file is not a GGUF file.
    """
    values = leading_values(path)
    if values.get("general.architecture") == "clip" or values.get("general.type") == "mmproj":
        return "projector"
    return {"imatrix": "matrix", "adapter": "adapter"}.get(str(values.get("general.type")), "")


def use_of(kind: str, name: str) -> str:
    """Return a text for people about a file that is not a model, with the option that it belongs to."""
    return f"{name} is {_USES[kind]}"
