"""Cost model of speculative decoding. One pass over the weights verifies several draft tokens, and stages may work
on several draft windows at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from partition import fields
from partition.errors import PlanError
from partition.fields import Bounds
from quant.text import counted

FREE = ("ngram",)  # draft sources without any model, which use the text itself; "auto" takes the first
MTP = "mtp"  # multi-token prediction layers of the model itself; "auto" takes them if the model has some
KINDS = ("auto", "off", *FREE, MTP)  # values that need no other model
SELF = "self"  # self-drafting: the model itself in fewer bits
ACCEPTANCE = {
    "ngram": 0.4,
    SELF: 0.8,
    MTP: 0.8,
}  # default acceptance of each source; docs/planning.md names the origin of the figures
MODEL_ACCEPTANCE = 0.7  # default acceptance of any other draft model
ROLLBACK_ROWS = 7  # rows that recurrent layers can roll back; each row needs another copy of their state
ROWS = (1, 2, 4, 8, 16)  # possible rows of a pass: the last token and its draft tokens
WINDOWS = (1, 2, 4, 8, 16)  # possible numbers of draft windows in flight
_A_STAGE = 2  # windows per stage: one in computation, and one on a link


def most_windows(stages: int) -> int:
    """Return the largest number of windows in flight for a number of stages."""
    return _A_STAGE * stages if stages > 1 else 1


def tokens_a_pass(acceptance: float, rows: int) -> float:
    """Return the mean number of tokens of a pass of `rows` (Leviathan and others, 2023).

    Each draft token is accepted with probability a = `acceptance`, independently:
    1 + a + ... + a^(rows - 1) = (1 - a^rows) / (1 - a), which is below 1 / (1 - a).
    """
    return sum(acceptance**i for i in range(rows))


@dataclass(frozen=True)
class Draft:
    """Speculative decoding as a plan assumes it."""

    name: str  # source of the draft tokens: "ngram", or a model file
    acceptance: Annotated[float, Bounds(1.0)]  # assumed fraction of accepted draft tokens
    rows: Annotated[int, Bounds(64, 1)]  # rows of a pass
    guess_s: Annotated[float, Bounds(3600.0)] = 0.0  # seconds to draft one token
    held_bytes: Annotated[int, Bounds(fields.MOST_BYTES)] = 0  # memory of the draft model
    windows: Annotated[int, Bounds(WINDOWS[-1], 1)] = 1  # windows of `rows` rows in flight
    worker: str | None = None  # address of the device that drafts; None: this device
    ask_s: Annotated[float, Bounds(3600.0)] = 0.0  # seconds to reach that device and back
    # Rows that the model's recurrent layers can roll back, for one window at a time and without a thin owner. None: any
    # number.
    rollback: Annotated[int | None, Bounds(ROLLBACK_ROWS, 1)] = None

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise PlanError(f"an acceptance of {self.acceptance:g}; expected a fraction from 0 to 1")

    @property
    def possible_rows(self) -> tuple[int, ...]:
        """Possible numbers of rows of a pass."""
        return ROWS if self.rollback is None else tuple(rows for rows in ROWS if rows <= 1 + self.rollback)

    @property
    def possible_windows(self) -> tuple[int, ...]:
        """Possible numbers of windows in flight, for any number of stages."""
        return WINDOWS if self.rollback is None else WINDOWS[:1]

    @property
    def tokens(self) -> float:
        """Mean number of tokens of a pass."""
        return tokens_a_pass(self.acceptance, self.rows)

    @property
    def pass_s(self) -> float:
        """Seconds of drafting for one pass. A window behind another one starts with a draft token, too."""
        return self.waiting_s(self.rows - (self.windows == 1))

    def waiting_s(self, drafts: int) -> float:
        """Return the seconds until this many draft tokens are available."""
        return self.ask_s + drafts * self.guess_s if drafts else 0.0

    def token_s(self, checking_s: Any, busy_s: Any = 0.0) -> Any:
        """Return the seconds per token, for one plan or for several plans in arrays.

        checking_s: seconds of a pass of `rows` rows over all stages and links.
        busy_s: seconds of the busiest stage or link in such a pass; the first stage drafts, too.

        With w windows of r rows, all drafts of one window are accepted with probability q = a^r:

            first = max(checking_s + pass_s, w busy_s)
            token = (first + busy_s (1 - q) (q + 2 q^2 + ... + (w - 1) q^(w - 1))) / tokens_a_pass(a, w r)

        `first` is the time from the submission of w windows until the oldest returns. Windows cancelled by a rejected
        draft are ahead of it, and occupy the busiest stage as long as accepted ones. The other windows follow at
        intervals of busy_s, up to the one with the rejected draft: the i-th behind the oldest with probability (1 - q)
        q^i. So w windows yield as many tokens as one window of w r rows.
        """
        alone_s = checking_s + self.pass_s
        if self.windows == 1:
            return alone_s / self.tokens
        from numpy import maximum  # takes long to load, and a simulation needs none

        goes_on = self.acceptance**self.rows
        behind = (1 - goes_on) * sum(i * goes_on**i for i in range(1, self.windows))
        first_s = maximum(alone_s, self.windows * busy_s)
        return (first_s + behind * busy_s) / tokens_a_pass(self.acceptance, self.windows * self.rows)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON, including derived values."""
        return {**fields.encoded(self), "tokens_per_pass": self.tokens}

    @classmethod
    def from_json(cls, values: Any, where: str) -> Draft:
        """Read the values that `to_json` wrote.

        where: name of the value in errors.
        Raises PlanError for invalid values.
        """
        return fields.decoded(cls, values, where, derived=("tokens_per_pass",))

    def describe(self, names: Mapping[str, str]) -> str:
        """Return a description for people. names: device names by address."""
        where = "" if self.worker is None else f" on {names.get(self.worker, self.worker)}"
        windows = f", {self.windows} windows at once" if self.windows > 1 else ""
        return (
            f"{counted(self.rows, 'row')} a pass, drafted by {self.name}{where}, {self.acceptance:g} of the drafts"
            f" right{windows}"
        )
