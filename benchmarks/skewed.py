"""Random mixtures of experts that choose as trained ones do: some experts often, and others for other tokens.

In a file of `edge.models.synth` that is not so. Its tokens are quiet: behind the first layers, what attention gathers
from all of them is louder, every token looks the same to a router, and the same experts are chosen again and again. So
the token table is made louder, which lets a layer choose by token, and rows of the router longer, which has it prefer
some.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quant.gguf.file import GgufFile

EXPONENT = 0.5  # of the experts' ranks; of 128, a quarter then gets three quarters of what is chosen
LOUDNESS = 4.0  # root of the mean square of a token's values; what 48 layers add to them is less
_Q4_0_BYTES = 18  # of a block: a scale of 16 bits, and 32 values of 4
_SAMPLE = 4096  # blocks
_CHUNK = _Q4_0_BYTES << 20  # bytes


def scales(experts: int, exponent: float = EXPONENT) -> NDArray[np.float64]:
    """The norms of router rows by rank: 1, 2, 3, ... to the power of -`exponent`, with a mean square of 1."""
    found = np.arange(1.0, experts + 1) ** -exponent
    return found / math.sqrt((found**2).mean())


def order(name: str, experts: int, seed: int) -> NDArray[np.int64]:
    """Which rank each expert of a router has: another order in every layer."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())]).permutation(experts)


def skew_router(path: Path, seed: int = 0, exponent: float = EXPONENT) -> list[str]:
    """Give the rows of every router in the file, in place, the norms of `scales`; the names of those tensors.

    A row's direction stays as it is, so doing it again changes nothing. An expert's logit varies from token to token as
    much as its row is long, so those with long rows are the largest, and are chosen, most often. ValueError where the
    file has no routers, or one that is not F32; nothing is written then.
    """
    routers = [t for name, t in GgufFile.open(path).tensors.items() if name.endswith(".ffn_gate_inp.weight")]
    if not routers or any(t.type.name != "f32" for t in routers):
        raise ValueError(f"{path.name} has no routers of F32")
    for t in routers:
        with t.path.open("r+b") as file:
            file.seek(t.offset)
            rows = np.frombuffer(file.read(t.n_bytes), "<f4").reshape(t.shape[1], t.shape[0]).astype(np.float64)
            norms = scales(len(rows), exponent)[order(t.name, len(rows), seed)]
            factors = norms / np.linalg.norm(rows, axis=1)
            if np.allclose(factors, 1, atol=1e-3):
                continue
            rows *= factors[:, None]
            file.seek(t.offset)
            file.write(rows.astype("<f4").tobytes())
    return [t.name for t in routers]


def louder_tokens(path: Path, loudness: float = LOUDNESS) -> float:
    """Scale the token table of the file, in place, so that its values have this root mean square; the factor.

    Doing it again changes nothing. ValueError for a table that is not Q4_0; nothing is written then.
    """
    t = GgufFile.open(path).tensors["token_embd.weight"]
    if t.type.name != "q4_0":
        raise ValueError(f"the token table of {path.name} is {t.type.name}, not q4_0")
    with t.path.open("r+b") as file:
        file.seek(t.offset)
        factor = loudness / _root_mean_square(_blocks(file.read(min(t.n_bytes, _SAMPLE * _Q4_0_BYTES))))
        if abs(factor - 1) < 0.01:
            return 1.0
        for at in range(t.offset, t.offset + t.n_bytes, _CHUNK):
            file.seek(at)
            blocks = _blocks(file.read(min(_CHUNK, t.offset + t.n_bytes - at)))
            scale = blocks[:, :2].copy().view("<f2").astype(np.float32) * factor
            blocks[:, :2] = scale.astype("<f2").view(np.uint8)
            file.seek(at)
            file.write(blocks.tobytes())
    return factor


def _blocks(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8).reshape(-1, _Q4_0_BYTES).copy()


def _root_mean_square(blocks: NDArray[np.uint8]) -> float:
    """Of the values of Q4_0 blocks."""
    scale = blocks[:, :2].copy().view("<f2").astype(np.float64)
    values = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1).astype(np.float64) - 8
    return float(np.sqrt(((values * scale) ** 2).mean()))
