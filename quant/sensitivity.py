"""Sensitivity of a model to the types of its tensors: measured damages, and estimates for the others."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NEGLIGIBLE = 1e-5  # error of the weights, such as that of F16, that needs no measurement
# Weights that a type represents exactly come back with an error of about 4e-8, the rounding of F16. Other weights have
# an error of 3e-5 with the widest type, q8_0.
EXACT = 1e-6


@dataclass(frozen=True)
class Sensitivity:
    """Damages and errors by tensor and type."""

    damages: Mapping[str, Mapping[str, float]]  # measured mean KL divergence, nats per token
    errors: Mapping[str, Mapping[str, float]]  # squared error over squared weights, weighed by importance
    spent_s: float  # time spent on measuring, or the time allowed for it
    left_s: float = 0.0  # time budget left, if less was enough for the requested size
    # (sum of damages, measured damage) of some choices for all tensors together.
    wholes: Sequence[tuple[float, float]] = ()

    def damage(self, tensor: str, kind: str) -> float:
        """Return the damage in nats per token, measured or extrapolated from a measured type.

        A divergence is quadratic in small changes, so it grows like the squared error:
        damage(type) = damage(measured) * error(type) / error(measured), from the type with the nearest error.
        """
        measured, errors = self.damages[tensor], self.errors[tensor]
        if kind in measured:
            return measured[kind]
        error = errors[kind]
        measured_types = [name for name in measured if errors[name] > 0]
        if not measured_types or error == 0:
            assert error <= _NEGLIGIBLE, f"{tensor} was not measured"
            return 0.0
        if error <= EXACT:
            return 0.0  # the type represents the values exactly
        nearest = min(measured_types, key=lambda name: abs(math.log(errors[name] / error)))
        return measured[nearest] * error / errors[nearest]

    def together(self, damage: float) -> float:
        """Return the damage of a whole file in nats per token.

        damage: the sum of the damages of its tensors.

        The sum is too small for large damages, because errors of one tensor amplify those of the next. The factor
        depends on the model, so it is measured for some choices for all tensors together. Between these it is
        interpolated over the logarithm of the sum. Beyond them the nearest factor applies.
        """
        import numpy as np

        known = sorted((math.log(sum_), math.log(whole / sum_)) for sum_, whole in self.wholes if min(sum_, whole) > 0)
        if not known or damage <= 0:
            return damage
        sums, factors = zip(*known, strict=True)
        return damage * math.exp(float(np.interp(math.log(damage), sums, factors)))

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `from_json`."""
        wholes = [list(pair) for pair in self.wholes]
        return {
            "spent_s": self.spent_s,
            "left_s": self.left_s,
            "damages": self.damages,
            "errors": self.errors,
            "wholes": wholes,
        }

    @classmethod
    def from_json(cls, values: Any) -> "Sensitivity":
        """Read an object that `to_json` wrote. Raises ValueError for anything else."""
        try:
            damages, errors = (
                {str(tensor): {str(kind): _figure(x) for kind, x in row.items()} for tensor, row in values[key].items()}
                for key in ("damages", "errors")
            )
            wholes = tuple((_figure(sum_), _figure(whole)) for sum_, whole in values.get("wholes", ()))
            sensitivity = cls(damages, errors, _figure(values["spent_s"]), _figure(values.get("left_s", 0.0)), wholes)
            for tensor, row in damages.items():
                if (not row and max(errors[tensor].values()) > _NEGLIGIBLE) or row.keys() - errors[tensor].keys():
                    raise ValueError(f"{tensor} was not measured")
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError("not a table of sensitivities") from error
        return sensitivity


def _figure(value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{value!r} is not a damage")
    return number
