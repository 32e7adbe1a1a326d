"""Converts a Hugging Face folder of safetensors to one GGUF file.

Weights pass through a buffer of a few MiB, so memory grows only with the vocabulary.
"""

import math
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from quant.checkpoint.checkpoint import Checkpoint
from quant.checkpoint.families import read_model
from quant.checkpoint.metadata import general_pairs, model_pairs
from quant.checkpoint.rope import rope_factors
from quant.checkpoint.rows import chunks
from quant.checkpoint.tensors import Target, targets
from quant.checkpoint.vocabulary import vocabulary_pairs
from quant.errors import ModelFileError, UnknownTypeError
from quant.gguf.writer import ALIGNMENT, NewTensor, header
from quant.types import TYPES
from quant.whole_file import whole_file

Progress = Callable[[int, int], None]  # called with bytes written so far and bytes in total

CONVERTED_TYPES = ("f32", "f16", "bf16")


def convert(folder: Path, out: Path, progress: Progress | None = None, type_name: str | None = None) -> int:
    """Write the model of a Hugging Face folder to `out` as GGUF; return its number of bytes.

    The file appears under its name only when it is complete.

    type_name: f32, f16 or bf16 for all matrices; None keeps each stored type. Vectors (norms, biases) and routers are
        always F32.

    Raises ModelFileError if the folder cannot be converted, UnknownTypeError for another type, and OSError if the file
    cannot be written or the disk has no room.
    """
    if type_name is not None and type_name not in CONVERTED_TYPES:
        raise UnknownTypeError(f"a checkpoint can be converted to {', '.join(CONVERTED_TYPES)}, not to {type_name!r}")
    with Checkpoint.open(folder) as checkpoint:
        _check_out(out, checkpoint)
        model = read_model(checkpoint.json("config.json"))
        pairs = model_pairs(model)
        plan = [
            (target, "f32" if target.keeps_f32 else type_name or target.stored)
            for target in targets(model, checkpoint.tensors)
        ]
        factors = rope_factors(model)
        tensors = [NewTensor(t.name, tuple(reversed(t.shape)), TYPES[kind]) for t, kind in plan]
        if factors:
            tensors.insert(0, NewTensor("rope_freqs.weight", (len(factors),), TYPES["f32"]))
        pairs = general_pairs(model, _name(folder), _most(plan)) | pairs | vocabulary_pairs(model, checkpoint)
        head = header(pairs, tensors)
        total = len(head) + sum(tensor.n_bytes + tensor.padding for tensor in tensors)
        with whole_file(out, total) as file:
            file.write(head)
            if factors:
                file.write(struct.pack(f"<{len(factors)}f", *factors) + bytes(tensors[0].padding))
            for target, kind in plan:
                for chunk in chunks(checkpoint, target, kind):
                    file.write(chunk)
                    if progress:
                        progress(file.tell(), total)
                file.write(bytes(-file.tell() % ALIGNMENT))
            return file.tell()


def _most(plan: list[tuple[Target, str]]) -> str:
    """Return the type of most values in matrices."""
    values: Counter[str] = Counter()
    for target, kind in plan:
        if not target.keeps_f32:
            values[kind] += math.prod(target.shape)
    return values.most_common(1)[0][0]


def _name(folder: Path) -> str:
    """Return the name of the model: that of its folder or, in the hub's cache, of its repository."""
    path = folder.resolve()
    name = path.parent.parent.name.split("--")[-1] if path.parent.name == "snapshots" else path.name
    return name.encode(errors="replace").decode()


def _check_out(out: Path, checkpoint: Checkpoint) -> None:
    """Raise ModelFileError if `out` is a folder, or a file of the checkpoint."""
    if out.is_dir():
        raise ModelFileError(f"{out}: this is a folder; give the name of the file to write")
    inside = out.resolve().parent == checkpoint.folder.resolve() and out.suffix != ".gguf"
    if out.exists() and (inside or any(out.samefile(path) for path in checkpoint.paths)):
        raise ModelFileError(f"{out}: this is a file of the checkpoint; give another name to write to")
