"""Wire types of activations: unchanged, float16, or 8-bit integers with a scale for each block of 32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

BLOCK = 32
_F16_MAX = 65504.0


class F16:
    """Half the bytes; relative error 2^-11. Values beyond +-65504 become that."""

    name = "f16"

    def n_bytes(self, n: int) -> int:
        """Bytes of `n` floats."""
        return 2 * n

    def encode(self, x: Floats, out: Bytes) -> None:
        """Write `x` [n] to `out` [n_bytes(n)]."""
        np.copyto(out.view(np.float16), x.clip(-_F16_MAX, _F16_MAX), casting="same_kind")

    def decode(self, data: Bytes, out: Floats) -> None:
        """Read it back."""
        np.copyto(out, data.view(np.float16))


class Q8:
    """A bit more than a quarter of the bytes; error at most 1/254 of the largest value in the block.

    First a float32 scale for each block, then the integers. A block with a value that is not finite decodes to NaN;
    values below 4e-37 may become 0.
    """

    name = "q8"

    def n_bytes(self, n: int) -> int:
        """Bytes of `n` floats."""
        return 4 * _blocks(n) + n

    def encode(self, x: Floats, out: Bytes) -> None:
        """Write `x` [n] to `out` [n_bytes(n)]."""
        n, blocks = x.size, _blocks(x.size)
        rows = np.zeros((blocks, BLOCK), np.float32)
        rows.reshape(-1)[:n] = x
        largest = np.abs(rows).max(axis=1)
        finite = np.isfinite(largest)
        scales = np.where(finite, np.minimum(largest / np.float32(127), _MOST), np.float32(np.nan))
        inverse = np.divide(127, largest, out=np.zeros_like(largest), where=finite & (largest > _TINY))
        rows[~finite] = 0  # or infinity times 0 would warn
        rows *= inverse[:, None]
        out[: 4 * blocks] = scales.view(np.uint8)
        out[4 * blocks :] = np.rint(rows, out=rows).astype(np.int8).reshape(-1)[:n].view(np.uint8)

    def decode(self, data: Bytes, out: Floats) -> None:
        """Read it back."""
        n, blocks = out.size, _blocks(out.size)
        # A copy: within a frame the scales may lie at any address.
        scales = np.frombuffer(data[: 4 * blocks].tobytes(), np.float32)
        np.copyto(out, data[4 * blocks :].view(np.int8))
        whole = n // BLOCK * BLOCK
        with np.errstate(over="ignore", invalid="ignore"):  # scales from a peer may be anything
            out[:whole].reshape(-1, BLOCK)[:] *= scales[: n // BLOCK, None]
            out[whole:] *= scales[n // BLOCK :]


_MOST = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))  # 127 times more is no float32
_TINY = np.float32(4e-37)  # 127 divided by less is no float32


def _blocks(n: int) -> int:
    return -(-n // BLOCK)


WIRES: dict[str, F16 | Q8 | None] = {"f32": None, "f16": F16(), "q8": Q8()}
"""By name; None: float32 as it is."""
WIRE_IDS = {"f32": 0, "f16": 1, "q8": 2}
"""As one byte says them. An id stays with its type, whatever comes and goes: devices of two versions must agree."""
