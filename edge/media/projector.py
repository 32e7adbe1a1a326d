"""Projector files (mmproj): checked before native code reads them, and found next to their model."""

from __future__ import annotations

import hashlib
from pathlib import Path

from edge.errors import MediaError
from quant.gguf.file import GgufFile

_ENCODERS = ("vision", "audio")
# Maximum of each number that libmtmd allocates by or divides by. No published projector comes near.
_COMMON = {"embedding_length": 1 << 16, "attention.head_count": 1 << 10, "projection_dim": 1 << 18}
_OWN = {"vision": {"image_size": 1 << 14, "patch_size": 1 << 10}, "audio": {"num_mel_bins": 1 << 10}}
_MOST_LAYERS = 1 << 10
_SAMPLE_BYTES = 4096  # bytes of each tensor's beginning and end


def open_projector(path: Path) -> GgufFile:
    """Read and check a projector's header.

    Raises ModelFileError if the file is damaged, and MediaError if it is not a projector.
    """
    file = GgufFile.open(path)
    if file.architecture != "clip":
        raise MediaError(
            f"{path.name} is a model of the architecture {file.architecture!r} and not a projector (mmproj)"
        )
    if not encoders(file):
        raise MediaError(f"{path.name} has neither an encoder of pictures nor one of sounds")
    for name in encoders(file):
        kind = file.metadata.get("clip.projector_type") or file.metadata.get(f"clip.{name}.projector_type")
        if not isinstance(kind, str) or not kind:
            raise MediaError(f"{path.name} does not name the type of its projector (clip.projector_type)")
        sizes = {key: _number(file, f"clip.{name}.{key}", 1, most) for key, most in (_COMMON | _OWN[name]).items()}
        _number(file, f"clip.{name}.block_count", 0, _MOST_LAYERS)
        width, heads = sizes["embedding_length"], sizes["attention.head_count"]
        if width % heads:
            raise MediaError(f"{path.name}: {heads} heads cannot share {width} values")
    return file


def encoders(file: GgufFile) -> tuple[str, ...]:
    """Return the encoders of a projector: vision, audio."""
    return tuple(name for name in _ENCODERS if file.metadata.get(f"clip.has_{name}_encoder") is True)


def _number(file: GgufFile, key: str, least: int, most: int) -> int:
    value = file.metadata.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise MediaError(f"{file.paths[0].name}: {key} is {value!r:.40}; expected a number from {least} to {most}")
    return value


def projector_beside(model: Path) -> Path | None:
    """Return the projector next to a model, named mmproj- and the model's name; None if there is none."""
    path = model.with_name(f"mmproj-{model.name}")
    return path if path.is_file() else None


def identity(file: GgufFile) -> bytes:
    """Return a digest of a projector: of its header, and of samples of each tensor."""
    digest = hashlib.sha256()
    for key in sorted(file.metadata):
        digest.update(key.encode() + file.raw_value(key))
    for name, tensor in file.tensors.items():
        data = file.data(name)
        digest.update(f"{name} {tensor.type.name} {tensor.shape}\n".encode())
        digest.update(data[:_SAMPLE_BYTES])
        digest.update(data[-_SAMPLE_BYTES:])
    return digest.digest()
