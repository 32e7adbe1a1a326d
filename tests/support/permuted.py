"""A model with its neurons in another order: the same function and the same trained values, in other blocks.

Types store 32 or 256 neighbours of a row with one scale. A checkpoint that was quantized once has values on the grid of
that type, which says nothing about types in general. In another order each block holds values of many old ones, and
lies on no grid. The order of neurons of a trained network means nothing, so this one is as good as any.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quant.gguf.file import GgufFile
from quant.gguf.writer import NewTensor, header

_VALUES = {"f16": np.float16, "f32": np.float32}


def permute(source: Path, target: Path, seed: int = 0) -> None:
    """Write a model of the architecture llama, in F16 and F32, with its neurons in another order: those that layers
    pass on, those inside of each feed-forward part, and those of each head's values."""
    file, rng = GgufFile.open(source), np.random.default_rng(seed)
    embd, hidden, layers, heads, kv = (
        int(file.metadata[f"llama.{key}"])  # type: ignore[call-overload]  # checked when the model was loaded before
        for key in (
            "embedding_length",
            "feed_forward_length",
            "block_count",
            "attention.head_count",
            "attention.head_count_kv",
        )
    )
    size = embd // heads
    passed = rng.permutation(embd)
    inside = [rng.permutation(hidden) for _ in range(layers)]
    values = [[rng.permutation(size) for _ in range(kv)] for _ in range(layers)]

    def rows_and_columns(name: str) -> tuple[NDArray[np.int64] | None, NDArray[np.int64]]:
        if not name.startswith("blk."):
            return None, passed
        _, layer, part, _ = name.split(".")
        own = values[int(layer)]
        by_value = np.concatenate([head * size + own[head] for head in range(kv)])
        by_query = np.concatenate([head * size + own[head * kv // heads] for head in range(heads)])
        rows = {"ffn_gate": inside, "ffn_up": inside, "ffn_down": [passed] * layers, "attn_output": [passed] * layers}
        columns = {"ffn_down": inside[int(layer)], "attn_output": by_query}
        return by_value if part == "attn_v" else rows.get(part, [None] * layers)[int(layer)], columns.get(part, passed)

    tensors = [NewTensor(name, tensor.shape, tensor.type) for name, tensor in file.tensors.items()]
    with target.open("wb") as out:
        out.write(header({key: file.raw_value(key) for key in file.metadata}, tensors))
        for tensor in tensors:
            array = np.frombuffer(file.data(tensor.name), _VALUES[tensor.type.name]).reshape(tensor.shape[::-1])
            rows, columns = rows_and_columns(tensor.name)
            array = array if rows is None else array[rows]
            out.write(array[..., columns].tobytes() + bytes(tensor.padding))
