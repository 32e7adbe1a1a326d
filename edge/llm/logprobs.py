"""How likely tokens were, before any option of sampling changed that."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one place of an answer."""

    chosen: float  # of the token that was chosen
    alternatives: tuple[tuple[int, float], ...]  # (token id, its own), the likeliest first


def token_logprobs(logits: NDArray[np.float32], token: int, n_alternatives: int) -> TokenLogprobs:
    """Of the token chosen by logits [n_vocab], and of the `n_alternatives` likeliest ones."""
    largest = float(logits.max())
    log_sum = largest + float(np.log(np.exp(logits.astype(np.float64) - largest).sum()))
    n = min(n_alternatives, len(logits))
    likeliest = np.argpartition(-logits, n - 1)[:n] if n else np.empty(0, np.int64)
    ordered = sorted((-float(logits[i]), int(i)) for i in likeliest)
    return TokenLogprobs(float(logits[token]) - log_sum, tuple((i, -negative - log_sum) for negative, i in ordered))
