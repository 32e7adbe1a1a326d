"""Check for LoRA adapter files on which llama.cpp would abort, read out of bounds, or ignore a part.

An adapter adds B(A x) * scale * alpha / rank to the product W x of each weight that it changes. For a weight NAME [in,
out], its file has the tensors NAME.lora_a [in, rank] and NAME.lora_b [rank, out], in ggml's order. For a weight with
several experts, both have a matrix for each expert. For the token table, whose rows are looked up, they are [rank,
tokens] and [rank, values].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from quant.errors import ModelFileError
from quant.gguf.file import GgufFile, TensorInfo

A, B = ".lora_a", ".lora_b"
TOKEN_TABLE = "token_embd.weight"
ALPHA = "adapter.lora.alpha"
TYPES = ("f32", "f16", "bf16", "q8_0")
_INVOCATION = "adapter.alora.invocation_tokens"
_NORM = "_norm.weight"  # suffix of vectors that llama.cpp ignores in an adapter, as this module does
_NEEDED = (("general.type", "adapter"), ("adapter.type", "lora"))


class Pair(NamedTuple):
    """The two matrices of an adapter that change one weight."""

    a: TensorInfo
    b: TensorInfo


def open_adapter(path: Path, model: GgufFile) -> tuple[GgufFile, Mapping[str, Pair]]:
    """Open the adapter at `path`, and return its file and the result of `adapter_pairs`."""
    adapter = GgufFile.open(path)
    return adapter, adapter_pairs(adapter, model)


def adapter_pairs(adapter: GgufFile, model: GgufFile) -> Mapping[str, Pair]:
    """Return the matrices of an adapter by the name of the weight that they change.

    model: a model, or a slice of one

    Raises ModelFileError if llama.cpp would not use all of the adapter for this model.
    """
    _check_metadata(adapter, model)
    names = [name for name in adapter.tensors if not name.endswith(_NORM)]
    pairs: dict[str, Pair] = {}
    for name in names:
        weight = name.removesuffix(A).removesuffix(B)
        if name not in (weight + A, weight + B):
            raise _error(adapter, f"tensor {name!r:.80} is not the {A} or {B} of a weight; convert the adapter again")
        if weight not in model.tensors:
            raise _error(
                adapter,
                f"it changes {weight!r:.80}, which {model.path.name} does not have; use an adapter of this model",
            )
        a, b = adapter.tensors.get(weight + A), adapter.tensors.get(weight + B)
        if a is None or b is None:
            raise _error(adapter, f"{weight!r} has one of {A} and {B}, both are needed; convert the adapter again")
        if weight not in pairs:
            _check_pair(adapter, model, model.tensors[weight], a, b)
            pairs[weight] = Pair(a, b)
    return pairs


def _check_metadata(adapter: GgufFile, model: GgufFile) -> None:
    if len(adapter.paths) > 1:
        raise _error(adapter, f"it is split over {len(adapter.paths)} files; make it one with llama-gguf-split --merge")
    for key, needed in _NEEDED:
        value = adapter.metadata.get(key)
        if value != needed:
            raise _error(adapter, f"{key} is {value!r:.80}, expected {needed!r}: this is not a LoRA adapter")
    if adapter.architecture != model.architecture:
        raise _error(
            adapter,
            f"it is an adapter of a {adapter.architecture!r:.80} model, and {model.path.name} is a"
            f" {model.architecture!r} model; use one that was trained for it",
        )
    if _INVOCATION in adapter.metadata:
        raise _error(
            adapter,
            "it is an activated LoRA, which acts only behind its invocation tokens, so that one text would have keys"
            " and values of two kinds; that is not done here: use an adapter without them",
        )
    alpha = adapter.metadata.get(ALPHA, 0.0)
    kind = adapter.value_type(ALPHA) if ALPHA in adapter.metadata else "f32"
    if kind != "f32" or not isinstance(alpha, float) or not math.isfinite(alpha):
        raise _error(adapter, f"{ALPHA} is {alpha!r:.80} ({kind}), expected a finite f32; convert the adapter again")


def _check_pair(adapter: GgufFile, model: GgufFile, weight: TensorInfo, a: TensorInfo, b: TensorInfo) -> None:
    for tensor in (a, b):
        if tensor.type.name not in TYPES:
            raise _error(
                adapter, f"{tensor.name!r} is {tensor.type.name}, known are {', '.join(TYPES)}; convert it again"
            )
    if len(weight.shape) < 2 or not weight.name.endswith(".weight"):
        raise _error(adapter, f"it changes {weight.name!r}, which is not a matrix, so llama.cpp would ignore it")
    rank = b.shape[0]
    n_in, n_out, *matrices = weight.shape
    if weight.name == TOKEN_TABLE:
        if "output.weight" not in model.tensors:
            raise _error(
                adapter,
                f"it changes {TOKEN_TABLE}, which is the output matrix of {model.path.name}, too, and llama.cpp would"
                " end the process; use an adapter without it",
            )
        needed: tuple[tuple[int, ...], tuple[int, ...]] = (rank, n_out), (rank, n_in)
    else:
        needed = (n_in, rank, *matrices), (rank, n_out, *matrices)
    if (_trimmed(a.shape), _trimmed(b.shape)) != (_trimmed(needed[0]), _trimmed(needed[1])):
        raise _error(
            adapter,
            f"{weight.name!r} is {list(weight.shape)} and its {A} and {B} are {list(a.shape)} and {list(b.shape)};"
            f" expected {list(needed[0])} and {list(needed[1])}; use an adapter of this very model",
        )


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without trailing dimensions of 1, which files may omit."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _error(adapter: GgufFile, problem: str) -> ModelFileError:
    return ModelFileError(f"{adapter.path.name}: {problem}")
