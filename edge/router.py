"""Which experts a layer will choose, guessed before its attention is computed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MOST_ROWS = 4  # of a batch that a guess is made for; more rows choose nearly all experts

Floats = NDArray[np.float32]


class Router:
    """The router of one layer, applied to what the layer before has put out.

    Attention adds little to a hidden state, so the router mostly chooses the same before and after it. The norm before
    the router is applied without its division, which changes no order.
    """

    def __init__(self, weights: Floats, norm: Floats | None, used: int) -> None:
        """weights: [experts, n_embd]; norm: [n_embd]; used: experts a token passes."""
        self._weights = np.ascontiguousarray(weights if norm is None else weights * norm)
        self._used = used

    def expect(self, hidden: Floats) -> set[int]:
        """Numbers of the experts that rows [n, n_embd] are likely to choose."""
        scores = hidden @ self._weights.T
        return set(np.argpartition(scores, -self._used, axis=1)[:, -self._used :].ravel().tolist())
