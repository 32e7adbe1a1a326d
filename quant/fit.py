"""Choice of a type for each tensor, so that a file fits a budget with the least damage. It is a pure function.

Damage is the mean KL divergence, in nats per token, between the model's predictions before and after a change. Errors
of different tensors are nearly independent, and small divergences are quadratic in them, so damages add up. This leaves
the multiple-choice knapsack problem: one type for each tensor, the sum of bytes within the budget, the least sum of
damages. HiGHS solves it to a stated gap.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quant.errors import DoesNotFit
from quant.front import non_dominated
from quant.types import TensorType

LEAST_FILL = 0.995  # smallest share of the budget that a file should use
_GAP = 1e-4  # relative optimality gap that the solver must prove
_LARGE = 1e3  # sum of damages after scaling for the solver
_MOST_S = 60.0  # time limit for the proof; then the best solution so far is used, with its gap
# The solver keeps constraints to 1e-6 of their unit. A large unit makes this error negligible, but then the solver
# finds no solution for some large sums. With a small unit the budget must be reduced by the possible error.
_SCALES = ((1e5, 0.0), (1.0, 2e-6))  # (unit, share of the budget left out)


@dataclass(frozen=True, slots=True)
class Choice:
    """A type that a tensor may have."""

    type: TensorType
    n_bytes: int  # bytes of the tensor in the file, with padding
    damage: float  # nats per token


@dataclass(frozen=True)
class Fit:
    """A choice for each tensor."""

    choices: Mapping[str, Choice]
    gap: float  # relative distance of the damage from a proven lower bound

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(choice.n_bytes for choice in self.choices.values())

    @property
    def damage(self) -> float:
        """Expected damage in nats per token."""
        return sum(choice.damage for choice in self.choices.values())


def fit(table: Mapping[str, Sequence[Choice]], budget: int, reserved: int = 0) -> Fit:
    """Return the choices with the least damage whose bytes, plus `reserved`, are at most `budget`.

    They fill at least LEAST_FILL of the budget if any choices do. Raises DoesNotFit if nothing is small enough.
    """
    useful = {name: undominated(choices) for name, choices in table.items()}
    least = sum(choices[0].n_bytes for choices in useful.values())
    if least + reserved > budget:
        raise DoesNotFit(least + reserved)
    if sum(choices[-1].n_bytes for choices in useful.values()) + reserved <= budget:
        return Fit({name: choices[-1] for name, choices in useful.items()}, 0.0)
    floor = int(LEAST_FILL * budget) + 1 - reserved
    solution = _solve(useful, budget - reserved, floor) or _solve(useful, budget - reserved, 0)
    return solution or Fit({name: choices[0] for name, choices in useful.items()}, math.inf)


def undominated(choices: Sequence[Choice]) -> list[Choice]:
    """Return the choices that no other choice beats in both bytes and damage, the smallest first."""
    return non_dominated(choices, lambda choice: (choice.n_bytes, choice.damage))


def _solve(table: Mapping[str, Sequence[Choice]], most: int, least: int) -> Fit | None:
    """Return the best choices with bytes from `least` to `most`, or None if there are none."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix

    flat = [choice for choices in table.values() for choice in choices]
    damages = np.array([choice.damage for choice in flat])
    share = np.array([choice.n_bytes for choice in flat]) / most
    owner = np.repeat(np.arange(len(table)), [len(choices) for choices in table.values()])
    one_each = csr_matrix((np.ones(len(flat)), (owner, np.arange(len(flat)))))

    def solved(unit: float, margin: float, scale: float) -> Fit | None:
        result = milp(
            damages / scale,
            constraints=[
                LinearConstraint(one_each, 1, 1),
                LinearConstraint(unit * share[None, :], unit * least / most, unit * (1 - margin)),
            ],
            integrality=np.ones(len(flat)),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": _GAP, "time_limit": _MOST_S},
        )
        if result.x is None:
            return None
        selected = [choice for choice, x in zip(flat, result.x, strict=True) if x > 0.5]
        solution = Fit(dict(zip(table, selected, strict=True)), float(result.mip_gap or 0.0))
        return solution if least <= solution.n_bytes <= most else None

    for unit, margin in _SCALES:
        best = solved(unit, margin, damages.max())
        if best and best.gap > _GAP and best.damage > 0:
            # The solver also stops at an absolute gap of 1e-6, so the sum of damages should be much larger.
            again = solved(unit, margin, best.damage / _LARGE)
            best = again if again and again.damage <= best.damage else best
        if best:
            return best
    return None
