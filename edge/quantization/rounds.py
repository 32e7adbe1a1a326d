"""Rounds of measuring damages, with early stopping. Each round measures one type for all tensors and chooses again.

The rounds stop when the last rounds have not improved the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from quant.fit import Choice, Fit
from quant.types import TYPES, TensorType

Damages = Mapping[str, Mapping[str, float]]  # nats per token, by tensor and type
Table = Mapping[str, Sequence[Choice]]

FIRST = "q4_0"  # every tensor can have this type, and it is fast to quantize to
_ROUNDS = 2  # consecutive rounds without improvement after which the rounds stop
# A choice counts as equally good if its expected damage is at most this fraction above the newest choice's.
_AS_GOOD = 0.02


def probe_order(probes: Sequence[str], bits_per_weight: float) -> list[str]:
    """Return the types in the order to measure them. Types near the file's bits per weight, which it uses most, come
    first.
    """
    return sorted(probes, key=lambda name: (name != FIRST, abs(TYPES[name].bits_per_weight - bits_per_weight)))


class TimePlan:
    """Deadlines of the stages, which together keep to the allowed time."""

    def __init__(self, within_s: float, clock: Callable[[], float]) -> None:
        """within_s: seconds for all stages; clock: returns seconds. The plan begins now."""
        self.within_s, self._clock, self._began = within_s, clock, clock()

    def left_s(self, share: float = 1.0) -> float:
        """Return the seconds until this share of the time has passed; 0 if it has passed."""
        return max(0.0, share * self.within_s - (self._clock() - self._began))


class EarlyStopping:
    """Early stopping: compares the choices after successive rounds."""

    def __init__(self, table: Callable[[Damages], Table], choose: Callable[[Table], Fit]) -> None:
        """table: returns bytes and damages of each tensor's types, from the measurements
        choose: returns the best choice
        """
        self._table, self._choose = table, choose
        self.types: dict[str, TensorType] = {}  # the newest choice, by tensor; empty before the first round
        self._same = 0  # consecutive rounds without improvement

    def after_round(self, damages: Damages) -> bool:
        """Return whether further rounds are not worth their time.

        This is the case if the choices before the last two rounds have an expected damage, by current knowledge, within
        2 % of the least.
        """
        table = self._table(damages)
        chosen = self._choose(table)
        costs = {name: {choice.type: choice.damage for choice in row} for name, row in table.items()}
        if self.types:
            before = sum(costs[name][kind] for name, kind in self.types.items())
            self._same = self._same + 1 if before <= (1 + _AS_GOOD) * chosen.damage else 0
        self.types = {name: choice.type for name, choice in chosen.choices.items()}
        return self._same >= _ROUNDS


def is_settled(order: Sequence[str], damages: Damages, after_round: Callable[[Damages], bool]) -> bool:
    """Return whether the earlier measured rounds, in this order, are enough."""
    measured = {kind for row in damages.values() for kind in row}
    for n, kind in enumerate(order, 1):
        if kind not in measured:
            return False
        so_far = _of_kinds(order[:n], damages)
        if all(so_far.values()) and after_round(so_far):
            return True
    return True


def measure_rounds(
    order: Sequence[str],
    groups: Sequence[Sequence[str]],
    damages: dict[str, dict[str, float]],
    measure: Callable[[str, list[str]], None],
    after_round: Callable[[Damages], bool],
    *,
    within_s: float,
    clock: Callable[[], float],
    progress: Callable[[int, int, float], None],
    is_over: Callable[[], bool] = lambda: False,
) -> float:
    """Measure the groups of tensors in one type after another, until early stopping or the end of the time.

    measure: adds one type of some tensors to `damages`; existing damages are not measured again
    clock: returns the seconds since the start
    progress: called with steps done, maximum steps, and maximum seconds left
    is_over: returns whether the remaining time is needed for something else; at least one group is measured

    Return the seconds that were left at early stopping. Return 0 if all rounds were made or the time was up.
    """
    total, done = len(order) * len(groups), 0
    for n, kind in enumerate(order, 1):
        for group in groups:
            spent_s = clock()
            if spent_s > within_s and all(damages.values()):
                return 0.0
            if any(damages.values()) and is_over():
                return 0.0
            if missing := [name for name in group if kind not in damages[name]]:
                measure(kind, missing)
            most = min(total, int(within_s * done / spent_s)) if done and spent_s > 0 else total
            done += 1
            progress(done, max(done, most), max(0.0, within_s - clock()))
        so_far = _of_kinds(order[:n], damages)
        if n < len(order) and all(so_far.values()) and after_round(so_far):
            return max(0.0, within_s - clock())
    return 0.0


def _of_kinds(kinds: Sequence[str], damages: Damages) -> dict[str, dict[str, float]]:
    """Return the damages of these types only."""
    return {name: {kind: row[kind] for kind in kinds if kind in row} for name, row in damages.items()}
