"""Rounds of measuring damages, with early stopping: each round measures one type for all tensors, and the choice is
made anew.

Once the last rounds have not improved the choice, further ones would only take time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from quant.fit import Choice, Fit
from quant.types import TYPES, TensorType

Damages = Mapping[str, Mapping[str, float]]  # nats a token, by tensor and type
Table = Mapping[str, Sequence[Choice]]

_FIRST = "q4_0"  # every tensor can have this type, and is quantized to it in a moment
_ROUNDS = 2  # rounds in a row that must not improve the choice
_AS_GOOD = 0.02  # a choice is as good if its expected damage is at most this fraction above the newest one's


def probe_order(probes: Sequence[str], bits_per_weight: float) -> list[str]:
    """Return the types to measure, first those that make up most of a file of so many bits a weight."""
    return sorted(probes, key=lambda name: (name != _FIRST, abs(TYPES[name].bits_per_weight - bits_per_weight)))


class TimePlan:
    """Deadlines of the stages, so that all of them together take no longer than allowed."""

    def __init__(self, within_s: float, clock: Callable[[], float]) -> None:
        """clock: seconds; the plan begins now."""
        self.within_s, self._clock, self._began = within_s, clock, clock()

    def left_s(self, share: float = 1.0) -> float:
        """Return the seconds until this share of the time is over; 0 if it is over."""
        return max(0.0, share * self.within_s - (self._clock() - self._began))


class EarlyStopping:
    """Early stopping: compares the choices that follow from more and more rounds."""

    def __init__(self, table: Callable[[Damages], Table], choose: Callable[[Table], Fit]) -> None:
        """table: returns bytes and damages of the types of each tensor, from the measurements. choose: returns the best
        choice."""
        self._table, self._choose = table, choose
        self._before: dict[str, TensorType] = {}
        self._same = 0  # rounds running

    def after_round(self, damages: Damages) -> bool:
        """Return whether more rounds are not worth their time: the choices before this round, and before the previous
        one, have an expected damage, by current knowledge, within 2 % of the least."""
        table = self._table(damages)
        chosen = self._choose(table)
        costs = {name: {choice.type: choice.damage for choice in row} for name, row in table.items()}
        if self._before:
            before = sum(costs[name][kind] for name, kind in self._before.items())
            self._same = self._same + 1 if before <= (1 + _AS_GOOD) * chosen.damage else 0
        self._before = {name: choice.type for name, choice in chosen.choices.items()}
        return self._same >= _ROUNDS


def is_settled(order: Sequence[str], damages: Damages, after_round: Callable[[Damages], bool]) -> bool:
    """Return whether the rounds that were measured before are enough, in this order."""
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
) -> float:
    """Measure the groups of tensors in one type after the other, until a round was enough or time is up.

    measure: adds a type of some tensors to `damages`; existing ones are not measured again. clock: seconds since the
    start. progress: steps done, steps at most, seconds left at most. Returns the seconds that were left when a round
    was enough; 0 if all rounds were made or there was no time for more.
    """
    total, done = len(order) * len(groups), 0
    for n, kind in enumerate(order, 1):
        for group in groups:
            spent_s = clock()
            if spent_s > within_s and all(damages.values()):
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
    """Return the damages of some types."""
    return {name: {kind: row[kind] for kind in kinds if kind in row} for name, row in damages.items()}
