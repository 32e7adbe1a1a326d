"""What guesses at the next tokens bring, by formula: one pass over the weights checks several of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from partition import fields
from partition.errors import PlanError

ROWS = (1, 2, 4, 8)  # of a pass: the token before, and the guesses behind it
_MOST_ROWS, _MOST_S = 64, 3600.0


def tokens_a_pass(acceptance: float, rows: int) -> float:
    """That a pass of so many rows gives in the mean, where a part `acceptance` of the guesses is right, each for
    itself: 1 + a + ... + a^(rows - 1) = (1 - a^rows) / (1 - a) (Leviathan and others, 2023). Never above 1 / (1 - a).
    """
    return sum(acceptance**i for i in range(rows))


@dataclass(frozen=True)
class Draft:
    """Guesses as a plan counts on them."""

    name: str  # where they come from: "ngram", or a file
    acceptance: float  # the part of them that is right, as it is assumed
    rows: int  # of a pass
    guess_s: float = 0.0  # seconds that one guess takes this device
    held_bytes: int = 0  # that the drafting model holds on this device

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise PlanError(f"an acceptance of {self.acceptance:g}; needed is a part of guesses, from 0 to 1")

    @property
    def tokens(self) -> float:
        """That a pass gives in the mean."""
        return tokens_a_pass(self.acceptance, self.rows)

    @property
    def pass_s(self) -> float:
        """Seconds that the guesses of one pass take."""
        return (self.rows - 1) * self.guess_s

    def token_s(self, checking_s: Any) -> Any:
        """Seconds of a token, where a pass of `rows` rows takes so long, or several do, in an array."""
        return (checking_s + self.pass_s) / self.tokens

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON, with what follows from them."""
        return {**asdict(self), "tokens_per_pass": self.tokens}

    @classmethod
    def from_json(cls, values: Any, where: str) -> Draft:
        """What `to_json` wrote; PlanError names what is wrong. where: what the error calls it."""
        found = fields.record(values, where, tuple(cls.__dataclass_fields__), ("tokens_per_pass",))
        for name, most in (("acceptance", 1.0), ("guess_s", _MOST_S)):
            value = found[name]
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
                raise PlanError(f"{where}.{name}: {fields.told(value)}; needed is a number from 0 to {most:g}")
        if not fields.number(found["rows"], f"{where}.rows", _MOST_ROWS):
            raise PlanError(f"{where}.rows: 0; needed is 1 or more")
        return cls(
            name=fields.text(found["name"], f"{where}.name"),
            acceptance=float(found["acceptance"]),
            rows=found["rows"],
            guess_s=float(found["guess_s"]),
            held_bytes=fields.number(found["held_bytes"], f"{where}.held_bytes", fields.MOST_BYTES),
        )

    def __str__(self) -> str:
        return f"{self.rows} rows a pass, guessed by {self.name}, {self.acceptance:g} of the guesses right"
