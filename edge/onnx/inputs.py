"""Inputs of an ONNX model from files: pictures, and arrays in .npz and .npy files."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge.onnx.images import STEPS, Picture, Scaling, picture
from edge.onnx.metadata import NOTHING, Metadata
from edge.onnx.samples import Array, Feeds, Input, SamplesError, opened_arrays
from edge.onnx.signature import listed

_SUFFIXES = (".npz", ".npy")
_MAGIC = (b"PK\x03\x04", b"PK\x05\x06", b"\x93NUMPY")  # first bytes of such files, which may have another suffix


@dataclass(frozen=True)
class ReadInputs:
    """Input arrays read from files."""

    feeds: Feeds
    pictures: dict[str, Picture]  # pictures by the input that takes them

    @property
    def notes(self) -> tuple[str, ...]:
        """Changes of pictures, for people."""
        return tuple(picture.note for picture in self.pictures.values())

    def to_json(self) -> dict[str, Any]:
        """Return type and shape of each input, and how pixels were scaled."""
        feeds = self.feeds.items()
        return {
            "inputs": [{"name": name, "type": str(array.dtype), "shape": list(array.shape)} for name, array in feeds],
            "scaling": {name: asdict(own.scaling) for name, own in self.pictures.items() if own.scaling},
        }


def read(
    inputs: tuple[Input, ...], files: Sequence[str], scaling: Scaling | None, metadata: Metadata = NOTHING
) -> ReadInputs:
    """Read a value for each input, from "FILE" or "NAME=FILE".

    A picture is used for the named input, or for the model's only input. A .npz file without a name provides an array
    for every input that it has an array of the same name for. With a name, it provides the array of that name or its
    only array. Arrays are converted to the model's type if values lose nothing but precision. Shapes are not checked
    here.

    scaling: scaling of pixels; None: that of the metadata, or else the default of `picture`.

    Raises OSError if a file cannot be read. Raises SamplesError if a file is neither a picture nor arrays, if the model
    has no input of that name, or if an input has no value or two.
    """
    by_name = {input_.name: input_ for input_ in inputs}
    feeds: Feeds = {}
    pictures: dict[str, Picture] = {}
    for text in files:
        name, path = _split(text, by_name)
        if is_arrays(path):
            arrays = {key: _typed(array, by_name[key], path) for key, array in _arrays(path, name, by_name).items()}
        else:
            if name is None and len(inputs) != 1:
                raise SamplesError(f"the model takes {listed(by_name)}; say which with NAME={path}")
            target = by_name[name] if name is not None else inputs[0]
            its_picture = picture(path, target, scaling, metadata.scaling, metadata.sides)
            arrays = {target.name: its_picture.array}
            pictures[target.name] = its_picture
        for key in arrays.keys() & feeds.keys():
            raise SamplesError(f"input {key!r} is given twice, the second time by {path}")
        feeds |= arrays
    lacking = [name for name in by_name if name not in feeds]
    if lacking:
        hint = f"give --input {lacking[0]}=FILE with a picture or a .npy file, or a .npz file with all of them"
        raise SamplesError(f"the model takes {listed(by_name)}; nothing is given for {listed(lacking)}; {hint}")
    return ReadInputs(feeds, pictures)


def preparing_ms(
    inputs: tuple[Input, ...], read_inputs: ReadInputs, repeats: int, metadata: Metadata = NOTHING
) -> dict[str, float]:
    """Return the median milliseconds of each step that makes an input from a picture, over all pictures together.

    repeats: number of further times that pictures are read; 0: only the first time counts.
    """
    rows = [_seconds(read_inputs.pictures.values())]
    by_name = {input_.name: input_ for input_ in inputs}
    rows += [
        _seconds(
            picture(own.path, by_name[name], own.scaling, None, metadata.sides)
            for name, own in read_inputs.pictures.items()
        )
        for _ in range(repeats)
    ]
    counted = rows[1:] or rows  # the first time reads the file from the disk, and starts Pillow
    return {step: 1e3 * statistics.median(times) for step, times in zip(STEPS, zip(*counted, strict=True), strict=True)}


def _seconds(pictures: Iterable[Picture]) -> tuple[float, ...]:
    """Return the time of each step over all pictures."""
    return tuple(map(sum, zip(*(own.seconds for own in pictures), strict=True)))


def path_of(text: str) -> Path:
    """Return the existing file in "FILE" or "NAME=FILE", without knowing the model. A name may contain "=" itself."""
    files = [text, *(text[i + 1 :] for i, character in enumerate(text) if character == "=")]
    return Path(next((file for file in files if file and Path(file).exists()), files[min(1, len(files) - 1)]))


def is_arrays(path: Path) -> bool:
    """Return whether a file is a .npz or .npy file, by its suffix or first bytes. Raises OSError if it cannot be
    read."""
    if path.suffix in _SUFFIXES:
        return True
    with path.open("rb") as file:
        return file.read(6).startswith(_MAGIC)


def _split(text: str, inputs: dict[str, Input]) -> tuple[str | None, Path]:
    """Return the input's name before "=" (None if there is none) and the file. Names and files may contain "=", too."""
    name = max((name for name in inputs if text.startswith(f"{name}=")), key=len, default=None)
    if name is not None:
        return name, Path(text[len(name) + 1 :])
    if "=" not in text or Path(text).exists():
        return None, Path(text)
    raise SamplesError(f"the model has no input {text.partition('=')[0]!r}; it takes {listed(inputs)}")


def _arrays(path: Path, name: str | None, inputs: dict[str, Input]) -> Feeds:
    """Return the arrays of a file by input: one input, or all inputs that the file has arrays for."""
    with opened_arrays(path, "save smaller arrays there") as archive:
        if isinstance(archive, np.ndarray):
            if name is None and len(inputs) != 1:
                raise SamplesError(f"the model takes {listed(inputs)}; say which with NAME={path}")
            return {name if name is not None else next(iter(inputs)): archive}
        if name is not None:
            if name not in archive.files and len(archive.files) != 1:
                raise SamplesError(f"{path} needs an array {name!r}, or only one; it holds {listed(archive.files)}")
            return {name: archive[name if name in archive.files else archive.files[0]]}
        names = [key for key in inputs if key in archive.files]
        if not names and inputs:
            raise SamplesError(f"{path} needs an array for {listed(inputs)}; it holds {listed(archive.files)}")
        return {key: archive[key] for key in names}


def _typed(array: Array, spec: Input, path: Path) -> Array:
    """Return the array in the model's type. Raises SamplesError if values would lose more than precision."""
    dtype = spec.dtype
    if array.dtype == dtype:
        return array
    refused = SamplesError(f"{path}: input {spec.name!r} takes values of type {dtype}, got {array.dtype}")
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise refused
    with np.errstate(over="ignore"):
        typed = array.astype(dtype)
    same = np.isfinite(typed) == np.isfinite(array) if dtype.kind == "f" else typed == array
    if not same.all():
        raise SamplesError(f"{refused}, and some values are too large for {dtype}")
    return typed
