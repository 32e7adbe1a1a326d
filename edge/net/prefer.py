"""Choice between two paths: the usual one, unless the other is clearly and repeatedly faster.

One measurement of each does not decide: on a shared machine the processor is gone for up to half a second at a time,
and whatever is measured then looks slow. So the usual path is the prior. The other one must be a fifth faster in each
of several rounds, which are spread over longer than such a burst lasts. A round tries the other path between two tries
of the usual one. Two of three tries are therefore of the usual path: a disturbance of at most half of the tries leaves
one of them alone, and the usual path is not left for a slower one.
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
    """The chosen path and the times of the tries."""

    other: bool  # the other way, not the usual one
    rounds: int  # that were measured; the first one that speaks for the usual way is the last
    usual_s: float  # the least of all tries
    other_s: float


def fast_end(times: list[float]) -> float:
    """Return the 10th percentile of sorted times: longer ones tell of a busy processor more than of the path."""
    return times[len(times) // 10]


def prefer(usual: Try, other: Try, pause: Callable[[float], None] = time.sleep) -> Preference:
    """Measure both paths in turn and choose one. Errors are those of the tries."""
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
