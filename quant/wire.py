"""Wire types of activations: unchanged, float16, or 8-bit integers with a scale for each block of 32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

BLOCK = 32
_F16_MAX = 65504.0


class F16:
    """Float16: half the bytes, relative error 2^-11. Larger values become +-65504."""

    name = "f16"

    def n_bytes(self, n: int) -> int:
        """Return the bytes of `n` floats."""
        return 2 * n

    def encode(self, x: Floats, out: Bytes) -> None:
        """Write `x` [n] to `out` [n_bytes(n)]."""
        np.copyto(out.view(np.float16), x.clip(-_F16_MAX, _F16_MAX), casting="same_kind")

    def decode(self, data: Bytes, out: Floats) -> None:
        """Decode `data` [n_bytes(n)] into `out` [n]."""
        np.copyto(out, data.view(np.float16))


class Q8:
    """8-bit integers, a bit more than a quarter of the bytes. A block of 32 has a scale and a largest value of 16 bits.

    Trained models have sums in which one value is many times larger than its neighbours. It would spoil the scale of
    its block, so the scale here is that of the second largest value. An error is at most 1/253 of that value, or
    1/65,000 of the largest. A block with a value that is not finite decodes to NaN. Larger values become +-3e38; values
    below 6e-39 may become 0.
    """

    name = "q8"

    def n_bytes(self, n: int) -> int:
        """Return the bytes of `n` floats."""
        whole, rest = divmod(n, BLOCK)
        return whole * _Q8_BLOCK.itemsize + (_Q8_HEAD + rest if rest else 0)

    def encode(self, x: Floats, out: Bytes) -> None:
        """Write `x` [n] to `out` [n_bytes(n)]."""
        if x.size % BLOCK == 0:
            _encode_blocks(x, out.view(_Q8_BLOCK))
            return
        blocks = np.empty(-(-x.size // BLOCK), _Q8_BLOCK)
        padded = np.zeros(BLOCK * blocks.size, np.float32)
        padded[: x.size] = x
        _encode_blocks(padded, blocks)
        out[:] = blocks.view(np.uint8)[: out.size]

    def decode(self, data: Bytes, out: Floats) -> None:
        """Decode `data` [n_bytes(n)] into `out` [n]."""
        if out.size % BLOCK == 0:
            _decode_blocks(data.view(_Q8_BLOCK), out)
            return
        blocks = np.zeros(-(-out.size // BLOCK), _Q8_BLOCK)
        blocks.view(np.uint8)[: data.size] = data
        padded = np.empty(BLOCK * blocks.size, np.float32)
        _decode_blocks(blocks, padded)
        out[:] = padded[: out.size]


# The scale is a bfloat16. `values` are the low bytes of the integers; the integer at `index` also has a high byte.
_Q8_BLOCK = np.dtype([("scale", "<u2"), ("index", np.uint8), ("high", np.int8), ("values", np.int8, BLOCK)])
_Q8_HEAD = _Q8_BLOCK.itemsize - BLOCK
_Q8_MOST = np.float32(3e38)  # its rounded value is a float32, too
_LEAST_SCALE = np.float32(2**-126)  # the inverse of a smaller scale may not be a float32
_NAN_SCALE = 0x7FC0
_INT8_MOST, _INT16_MOST = np.float32(127), np.float32(127 * 256 + 127)  # largest signed low byte, and low + high byte


def _encode_blocks(x: Floats, blocks: NDArray[np.void]) -> None:
    """Encode whole blocks. Maxima are found with argmax, which is much faster along an axis than max."""
    starts = np.arange(0, x.size, BLOCK)
    sizes = np.abs(x)
    index = sizes.reshape(-1, BLOCK).argmax(axis=1)
    at = starts + index
    largest = sizes[at]  # NaN if the block contains one
    if not (largest <= _Q8_MOST).all():
        finite = np.isfinite(largest)
        _encode_blocks(np.where(np.repeat(finite, BLOCK), x.clip(-_Q8_MOST, _Q8_MOST), 0), blocks)
        blocks["scale"][~finite] = _NAN_SCALE
        return
    sizes[at] = 0
    second = sizes[starts + sizes.reshape(-1, BLOCK).argmax(axis=1)]
    scales = np.maximum(second / _INT8_MOST, largest / _INT16_MOST)
    # The upper half of a float32 is a bfloat16. It is rounded up, so that all integers fit.
    halves = (np.maximum(scales, _LEAST_SCALE, out=scales).view(np.uint32) + 0xFFFF) >> 16
    integers = x.reshape(-1, BLOCK) * (1 / (halves << 16).view(np.float32))[:, None]
    integers = np.rint(integers, out=integers).astype(np.int16)
    low = integers.astype(np.int8)
    blocks["scale"] = halves
    blocks["index"] = index
    blocks["high"] = (integers.reshape(-1)[at] - low.reshape(-1)[at]) >> 8
    blocks["values"] = low


def _decode_blocks(blocks: NDArray[np.void], out: Floats) -> None:
    rows = out.reshape(-1, BLOCK)
    rows[:] = blocks["values"]
    # A peer can send any index and any scale.
    at = np.arange(0, out.size, BLOCK)
    at += blocks["index"] & (BLOCK - 1)
    out[at] += blocks["high"] * np.float32(256)
    scales = blocks["scale"].astype(np.uint32)
    scales <<= 16
    with np.errstate(over="ignore", invalid="ignore"):
        rows *= scales.view(np.float32)[:, None]


WIRES: dict[str, F16 | Q8 | None] = {"f32": None, "f16": F16(), "q8": Q8()}
"""Wire types by name; None sends float32 unchanged."""
WIRE_IDS = {"f32": 0, "f16": 1, "q8": 3}
"""Ids of wire types, in one byte. An id is never reused, because devices of two versions must agree. Id 2 was q8 with a
float32 scale and 8-bit integers, in versions 1 to 3 of the protocol."""
