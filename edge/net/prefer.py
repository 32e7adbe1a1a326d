"""Which of two ways to use: the usual one, unless the other is clearly and repeatedly faster.

One measurement of each does not decide. On a shared machine the processor is gone for up to half a second at a time,
and who is measured then looks slow. So the usual way is the prior. The other one must be a fifth faster in every one of
several rounds, which are spread over longer than such a burst lasts. A round tries the other way between two tries of
the usual one. So two of three tries are of the usual way: whatever hits at most half of the tries leaves one of them
alone, and the usual way is not left for a slower one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from partition.predict.hysteresis import LINK, clearly_better

ROUNDS = 5
_PAUSE_S = 0.25  # between rounds: four of them are longer than a burst of half a second, and than two in a row

Try = Callable[[], float]  # measures a way for a moment: seconds, at the fast end


@dataclass(frozen=True)
class Preference:
    """Which way to use, and what the tries took."""

    other: bool  # the other way, not the usual one
    rounds: int  # that were measured; the first one that speaks for the usual way is the last
    usual_s: float  # the least of all tries
    other_s: float


def fast_end(times: list[float]) -> float:
    """What a tenth of sorted times stay below: others tell of a busy processor more than of a way."""
    return times[len(times) // 10]


def prefer(usual: Try, other: Try, pause: Callable[[float], None] = time.sleep) -> Preference:
    """Measure both ways in turn. Errors are those of the tries."""
    usual_s, other_s = [usual()], []
    for done in range(1, ROUNDS + 1):
        other_s.append(other())
        usual_s.append(usual())
        if not clearly_better(other_s[-1], min(usual_s[-2:]), by=LINK):
            return Preference(False, done, min(usual_s), min(other_s))
        if done < ROUNDS:
            pause(_PAUSE_S)
            usual_s.append(usual())
    return Preference(True, ROUNDS, min(usual_s), min(other_s))
