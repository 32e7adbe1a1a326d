"""Error feedback: the rounding error of a rank's partial sum under a lossy wire type is added to its next partial sum.

All partial sums of a step are added to the same hidden states, layer after layer. So the next sum compensates for the
error of the previous one, and hidden states lack only the error of the last sum. This requires that nothing lies
between a sum and the hidden states, so models with a norm in between do without it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_NORMS_OF_SUMS = ("post_attention_norm", "post_ffw_norm", "post_ffn_norm", "attn_output_norm", "layer_output_norm")


def adds_sums(tensors: Iterable[str]) -> bool:
    """Return True if a model with these tensors adds sums directly to the hidden states."""
    return not any(norm in name for name in tensors for norm in _NORMS_OF_SUMS)


class ErrorFeedback:
    """Rounding error of a rank's partial sums in one step, carried from each sum to the next."""

    def __init__(self) -> None:
        self._lost: Floats | None = None  # rounding error of the last sum

    def begin(self) -> None:
        """Begin a step. The error of the previous step belongs to other rows and is dropped."""
        self._lost = None

    def add(self, part: Floats, outputs: NDArray[np.int8]) -> Floats:
        """Add the error of the previous sum to a rank's partial sum [rows, n_embd], in place.

        outputs: [rows of the step]; marks the rows that the last layer continues with.

        Returns an array like `part`, which the caller fills with the rounding error of this sum.
        """
        lost = self._lost
        if lost is not None and len(lost) != len(part):
            lost = lost[outputs != 0]
        if lost is not None and lost.shape == part.shape:
            part += lost
        self._lost = np.empty_like(part)
        return self._lost
