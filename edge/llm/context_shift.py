"""Context shift: which tokens of a slot to drop, so that the rest need not be computed again."""

from __future__ import annotations

from collections.abc import Sequence


def dropped_stretch(cached: Sequence[int], prompt: Sequence[int], same: int, least: int) -> int:
    """Return how many held tokens are to be dropped behind the first `same`, so that most of what follows them
    continues the prompt as it is. 0 where that would be fewer than `least` tokens."""
    lengths = matches(prompt[same:], cached[same:])
    most = max(lengths, default=0)
    return lengths.index(most) if most >= least else 0


def matches(pattern: Sequence[int], text: Sequence[int]) -> list[int]:
    """Return for each place of `text` how many tokens from it on `pattern` begins with (the Z algorithm)."""
    n_pattern, joined = len(pattern), [*pattern, -1, *text]
    z, start, end = [0] * len(joined), 0, 0  # joined[start:end] is the match that reaches furthest
    for i in range(1, len(joined)):
        length = min(z[i - start], end - i) if i < end else 0
        while i + length < len(joined) and joined[length] == joined[i + length]:
            length += 1
        z[i] = length
        if i + length > end:
            start, end = i, i + length
    return z[n_pattern + 1 :]
