"""Routers of random mixtures of experts that choose some experts more often than others.

In a file of `edge.models.synth` all tokens look alike to a router behind the first layers, so that the same experts are
chosen again and again. A louder token table lets a layer choose by token, and longer rows let a router prefer experts.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from quant.gguf.file import GgufFile

_LOUDNESS = 4.0  # root of the mean square of a token's values; what the layers add to them is less
_Q4_0 = np.dtype([("scale", "<f2"), ("values", "u1", 16)])
_SAMPLE = 4096  # blocks


def plant_routers(path: Path, exponent: float, seed: int = 0) -> None:
    """Write routers of F32 whose rows are as long as their rank to the power of -`exponent`, in another order in each
    layer, and a token table of Q4_0 that is loud, to the file in place. 0: all experts are chosen alike often."""
    tensors = GgufFile.open(path).tensors
    table = tensors["token_embd.weight"]
    with path.open("r+b") as file:
        for name, tensor in tensors.items():
            if name.endswith(".ffn_gate_inp.weight"):
                columns, experts = tensor.shape[:2]
                rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
                rows = rng.standard_normal((experts, columns))
                norms = rng.permutation(np.arange(1.0, experts + 1) ** -exponent)
                norms /= np.sqrt((norms**2).mean())
                file.seek(tensor.offset)
                file.write(
                    (rows / np.linalg.norm(rows, axis=1, keepdims=True) * norms[:, None]).astype("<f4").tobytes()
                )
        file.seek(table.offset)
        blocks = np.frombuffer(file.read(table.n_bytes), _Q4_0).copy()
        sample = blocks[:_SAMPLE]
        halves = np.concatenate([sample["values"] & 15, sample["values"] >> 4], axis=1).astype(np.float64) - 8
        loudness = np.sqrt(((halves * sample["scale"][:, None].astype(np.float64)) ** 2).mean())
        blocks["scale"] = (blocks["scale"].astype(np.float64) * _LOUDNESS / loudness).astype("<f2")
        file.seek(table.offset)
        file.write(blocks.tobytes())
