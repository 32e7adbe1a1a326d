"""Error feedback: what a lossy wire type rounds off a rank's partial sum is added to the next one.

All sums of a step are added to the same hidden states, a layer after the other. So what one sum lacks the next one
makes up for, and hidden states lack what the last sum lost in place of what all of them did. That holds where nothing
is between a sum and the hidden states: models that have a norm there go without.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_NORMS_OF_SUMS = ("post_attention_norm", "post_ffw_norm", "post_ffn_norm", "attn_output_norm", "layer_output_norm")


def adds_sums(tensors: Iterable[str]) -> bool:
    """Return whether a model with these tensors adds its sums to the hidden states as they are."""
    return not any(norm in name for name in tensors for norm in _NORMS_OF_SUMS)


class ErrorFeedback:
    """Rounding error of a rank's partial sums in one step, carried from each sum to the next."""

    def __init__(self) -> None:
        self._lost: Floats | None = None  # by the last sum

    def begin(self) -> None:
        """Begin a step: what sums of the step before have lost is of other rows, and is dropped."""
        self._lost = None

    def add(self, part: Floats, outputs: NDArray[np.int8]) -> Floats:
        """Add to a rank's part of a sum [rows, n_embd], in place, what the sum before lost. Return an array like
        `part`, to be filled with what this one loses. outputs: of the rows of the step, those that the last layer goes
        on with.
        """
        lost = self._lost
        if lost is not None and len(lost) != len(part):
            lost = lost[outputs != 0]
        if lost is not None and lost.shape == part.shape:
            part += lost
        self._lost = np.empty_like(part)
        return self._lost
