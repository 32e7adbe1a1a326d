"""Converts a Hugging Face folder of safetensors to one GGUF file.

Weights pass through a buffer of a few MiB; memory does not grow with the model, only with its vocabulary.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quant.checkpoint.checkpoint import Checkpoint
from quant.checkpoint.families import Model, read_model
from quant.checkpoint.rope import rope_factors, rope_pairs
from quant.checkpoint.tensors import STORED_TYPES, Rows, Target, targets
from quant.checkpoint.vocabulary import vocabulary_pairs
from quant.errors import ModelFileError, UnknownTypeError
from quant.gguf.writer import ALIGNMENT, NewTensor, encoded, header
from quant.types import TYPES
from quant.whole_file import whole_file

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

Progress = Callable[[int, int], None]  # bytes written so far, bytes in all

CONVERTED_TYPES = ("f32", "f16", "bf16")
_QUANTIZATION_VERSION = 2  # of ggml's block layouts
_FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32}  # llama.cpp's numbers for files that are mostly of one type
_WINDOW_PERIOD = {"gemma2": 2, "gemma3": 6}  # of so many layers the last has no window, where a file does not say
_CHUNK_BYTES = 1 << 20


def convert(folder: Path, out: Path, progress: Progress | None = None, type_name: str | None = None) -> int:
    """Write the model of a Hugging Face folder as GGUF to `out`; its bytes.

    type_name: f32, f16 or bf16 for all matrices; None keeps each as it is stored. Vectors (norms, biases) and routers
    are F32 always. The file appears under its name only when it is whole.

    ModelFileError for a folder that cannot be converted, UnknownTypeError for another type, OSError when the file
    cannot be written or the disk has no room.
    """
    if type_name is not None and type_name not in CONVERTED_TYPES:
        raise UnknownTypeError(f"a checkpoint is converted to {', '.join(CONVERTED_TYPES)}, not to {type_name!r}")
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
    """The type of most values in matrices."""
    values: Counter[str] = Counter()
    for target, kind in plan:
        if not target.keeps_f32:
            values[kind] += math.prod(target.shape)
    return values.most_common(1)[0][0]


def _name(folder: Path) -> str:
    """Return the name of the model: its folder's, or the repository's in the hub's cache."""
    path = folder.resolve()
    name = path.parent.parent.name.split("--")[-1] if path.parent.name == "snapshots" else path.name
    return name.encode(errors="replace").decode()


def _check_out(out: Path, checkpoint: Checkpoint) -> None:
    """Raise ModelFileError if `out` is a folder, or belongs to what is read."""
    if out.is_dir():
        raise ModelFileError(f"{out}: this is a folder; give the name of the file to write")
    inside = out.resolve().parent == checkpoint.folder.resolve() and out.suffix != ".gguf"
    if out.exists() and (inside or any(out.samefile(path) for path in checkpoint.paths)):
        raise ModelFileError(f"{out}: this is a file of the checkpoint; give another name to write to")


def general_pairs(model: Model, name: str, type_name: str) -> dict[str, bytes]:
    """The pairs every GGUF has. `type_name` is that of most weights: f32, f16 or bf16."""
    return {
        "general.architecture": encoded("str", model.arch),
        "general.type": encoded("str", "model"),
        "general.name": encoded("str", name),
        "general.file_type": encoded("u32", _FILE_TYPES[type_name]),
        "general.quantization_version": encoded("u32", _QUANTIZATION_VERSION),
    }


def model_pairs(model: Model) -> dict[str, bytes]:
    """The pairs that say how to compute. ModelFileError for what llama.cpp would compute in another way."""
    config = model.config
    pairs = {
        "vocab_size": encoded("u32", model.vocab),
        "context_length": encoded("u32", _context(model)),
        "embedding_length": encoded("u32", model.embd),
        "block_count": encoded("u32", model.layers),
        "feed_forward_length": encoded("u32", model.ff),
        "attention.head_count": encoded("u32", model.heads),
        "attention.head_count_kv": encoded("u32", model.kv),
        "attention.key_length": encoded("u32", model.head_size),
        "attention.value_length": encoded("u32", model.head_size),
        "attention.layer_norm_rms_epsilon": encoded("f32", config.number("rms_norm_eps")),
        **rope_pairs(model),
        **_window_pairs(model),
    }
    if model.experts:
        pairs["expert_count"] = encoded("u32", model.experts)
        pairs["expert_used_count"] = encoded("u32", model.experts_used)
        pairs["expert_feed_forward_length"] = encoded("u32", model.expert_ff)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if model.arch == "gemma2" and config.is_null(key):
            raise config.error(f"{key} is null; llama.cpp always computes it for gemma2")
        if model.arch in ("gemma2", "gemma3") and key in config:
            pairs[key] = encoded("f32", config.number(key))
    return {f"{model.arch}.{key}": value for key, value in pairs.items()}


def _context(model: Model) -> int:
    """Return the context length in tokens. llama.cpp has no sliding window for Mistral and Qwen; within this length
    none has an effect."""
    config = model.config
    context = config.count("max_position_embeddings")
    if model.arch in _WINDOW_PERIOD or config.is_null("sliding_window") or "sliding_window" not in config:
        return context
    if model.arch.startswith("qwen") and not config.flag("use_sliding_window"):
        return context
    return min(context, config.count("sliding_window"))


def _window_pairs(model: Model) -> dict[str, bytes]:
    """Attention windows of Gemma 2 and 3: their length, and which layers have one where that is not the usual."""
    usual = _WINDOW_PERIOD.get(model.arch)
    if not usual:
        return {}
    has_window = _windows(model, usual)
    if not any(has_window):
        if model.arch == "gemma2":
            raise model.config.error("no layer has sliding_attention; llama.cpp computes gemma2 with a window")
        return {}
    pairs = {"attention.sliding_window": encoded("u32", model.config.count("sliding_window"))}
    if has_window != [(i + 1) % usual != 0 for i in range(model.layers)]:
        pairs["attention.sliding_window_pattern"] = encoded("arr[bool]", has_window)
    return pairs


def _windows(model: Model, usual: int) -> list[bool]:
    """Return for each layer whether it has a sliding window."""
    config = model.config
    kinds = config.items("layer_types")
    if not kinds:
        period = config.count("sliding_window_pattern", usual)
        return [(i + 1) % period != 0 for i in range(model.layers)]
    if len(kinds) != model.layers or not all(kind in ("sliding_attention", "full_attention") for kind in kinds):
        raise config.error(
            f"layer_types has {len(kinds)} entries, needed are {model.layers} of sliding_attention or full_attention"
        )
    return [kind == "sliding_attention" for kind in kinds]


def chunks(checkpoint: Checkpoint, target: Target, type_name: str) -> Iterator[bytes]:
    """The bytes of `target` as `type_name` (f32, f16, bf16), about a MiB at a time.

    ModelFileError for a value that f16 cannot hold, and for a file that has become shorter.
    """
    for source in target.sources:
        stored = STORED_TYPES[source.tensor.dtype]
        as_is = stored == type_name and not target.offset
        for raw, rows in _read(checkpoint, target, source):
            if as_is and not target.interleave:
                yield raw
                continue
            if as_is:
                yield _interleaved(_bytes_of(raw, rows), target.interleave).tobytes()
                continue
            values = _floats(raw, stored).reshape(rows, -1)
            if target.offset:
                import numpy as np

                values = values + np.float32(target.offset)
            if target.interleave:
                values = _interleaved(values, target.interleave)
            yield _stored_as(type_name, values, source)


def _read(checkpoint: Checkpoint, target: Target, source: Rows) -> Iterator[tuple[bytes, int]]:
    """(bytes, rows) in order; whole heads where rows are interleaved."""
    row_bytes = target.row * TYPES[STORED_TYPES[source.tensor.dtype]].block_bytes
    unit = target.interleave or 1
    step = max(1, _CHUNK_BYTES // (row_bytes * unit)) * unit
    for first in range(0, source.count, step):
        rows = min(step, source.count - first)
        yield checkpoint.read(source.tensor, (source.first + first) * row_bytes, rows * row_bytes), rows


def _interleaved(rows: NDArray[Any], head: int) -> NDArray[Any]:
    """Rows [n, ...] in which those of the two halves of each head take turns."""
    halves = rows.reshape(-1, 2, head // 2, *rows.shape[1:])
    turned: NDArray[Any] = halves.swapaxes(1, 2).reshape(rows.shape)
    return turned


def _bytes_of(raw: bytes, rows: int) -> NDArray[np.uint8]:
    import numpy as np

    return np.frombuffer(raw, np.uint8).reshape(rows, -1)


def _floats(raw: bytes, stored: str) -> Floats:
    import numpy as np

    if stored == "bf16":  # the upper half of a float
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, "<f4" if stored == "f32" else "<f2").astype(np.float32)


def _stored_as(type_name: str, values: Floats, source: Rows) -> bytes:
    import numpy as np

    if type_name == "f32":
        return values.astype("<f4").tobytes()
    if type_name == "bf16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16  # to nearest, ties to even
        quiet = (bits >> 16) | 64  # a NaN must stay one
        return np.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded).astype("<u2").tobytes()
    with np.errstate(over="ignore"):
        halves = values.astype("<f2")
    if np.isinf(halves).any() and np.isfinite(values[np.isinf(halves)]).any():
        raise ModelFileError(
            f"{source.tensor.path.name}: tensor {source.tensor.name!r} has values beyond the range of f16; "
            "convert to bf16 or f32"
        )
    return halves.tobytes()
