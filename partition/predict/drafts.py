"""Cost model of speculative decoding: one pass over the weights verifies several draft tokens, and stages work on
several windows of them at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from partition import fields
from partition.errors import PlanError
from partition.fields import Bounds
from quant.text import counted

FREE = ("ngram",)  # drafts from the text itself, without a model; "auto" takes the first
MTP = "mtp"  # layers of the model itself that predict further tokens; "auto" takes them where it has some
KINDS = ("auto", "off", *FREE, MTP)  # that need no other model
SELF = "self"  # self-drafting: by the model itself, in fewer bits
ACCEPTANCE = {
    "ngram": 0.4,
    SELF: 0.8,
    MTP: 0.8,
}  # of each, where none is given; docs/planning.md says whose figures these are
MODEL_ACCEPTANCE = 0.7  # of any other model
ROLLBACK_ROWS = 7  # that recurrent layers can forget: for each, all that they hold is held once more
ROWS = (1, 2, 4, 8, 16)  # rows of a pass: the last token, and the draft tokens behind it
WINDOWS = (1, 2, 4, 8, 16)  # windows of rows in flight over stages
_A_STAGE = 2  # windows: one that is computed, and one on its way over a link


def most_windows(stages: int) -> int:
    """Return the most windows in flight for a number of stages."""
    return _A_STAGE * stages if stages > 1 else 1


def tokens_a_pass(acceptance: float, rows: int) -> float:
    """Return the mean number of tokens of a pass of `rows`, if each draft token is accepted with probability
    `acceptance`, independently: 1 + a + ... + a^(rows - 1) = (1 - a^rows) / (1 - a) (Leviathan and others, 2023). Below
    1 / (1 - a)."""
    return sum(acceptance**i for i in range(rows))


@dataclass(frozen=True)
class Draft:
    """Speculative decoding as a plan assumes it."""

    name: str  # source of the draft tokens: "ngram", or a model file
    acceptance: Annotated[float, Bounds(1.0)]  # the part of them that is right, as it is assumed
    rows: Annotated[int, Bounds(64, 1)]  # of a pass
    guess_s: Annotated[float, Bounds(3600.0)] = 0.0  # seconds that one draft takes the device that drafts
    held_bytes: Annotated[int, Bounds(fields.MOST_BYTES)] = 0  # memory of the draft model
    windows: Annotated[int, Bounds(WINDOWS[-1], 1)] = 1  # windows of `rows` rows in flight
    worker: str | None = None  # the address of the device that drafts; None: this one
    ask_s: Annotated[float, Bounds(3600.0)] = 0.0  # seconds of the ways to it and back
    # Rows that the model's recurrent layers can forget, of one window at a time and not with a thin owner; None: any.
    rollback: Annotated[int | None, Bounds(ROLLBACK_ROWS, 1)] = None

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise PlanError(f"an acceptance of {self.acceptance:g}; needed is a part of drafts, from 0 to 1")

    @property
    def possible_rows(self) -> tuple[int, ...]:
        """Numbers of rows that a pass can have."""
        return ROWS if self.rollback is None else tuple(rows for rows in ROWS if rows <= 1 + self.rollback)

    @property
    def possible_windows(self) -> tuple[int, ...]:
        """Numbers of windows that can be in flight over any number of stages."""
        return WINDOWS if self.rollback is None else WINDOWS[:1]

    @property
    def tokens(self) -> float:
        """Mean number of tokens of a pass."""
        return tokens_a_pass(self.acceptance, self.rows)

    @property
    def pass_s(self) -> float:
        """Return seconds of drafting for one pass. A window behind others begins with a draft token, too."""
        return self.waiting_s(self.rows - (self.windows == 1))

    def waiting_s(self, drafts: int) -> float:
        """Return seconds until this many draft tokens are there."""
        return self.ask_s + drafts * self.guess_s if drafts else 0.0

    def token_s(self, checking_s: Any, busy_s: Any = 0.0) -> Any:
        """Seconds of a token, or of several plans', in arrays.

        checking_s: a pass of `rows` rows takes so long, over all stages and links. busy_s: it keeps the busiest of
        these so long; the first stage drafts, too. With w windows of r rows, all drafts of one being right with the
        probability q = a^r,

            first = max(checking_s + pass_s, w busy_s)
            a token = (first + busy_s (1 - q) (q + 2 q^2 + ... + (w - 1) q^(w - 1))) / tokens_a_pass(a, w r)

        first: from when w windows are submitted until the oldest comes back. Those that a wrong draft cancelled are
        before it, and keep the busiest stage as long as those that were right would have. The others follow busy_s
        apart, up to the one whose draft is wrong: i behind the oldest with the probability (1 - q) q^i. So w windows
        give as many tokens as one of w r rows.
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
        """Plain values for JSON, with what follows from them."""
        return {**fields.encoded(self), "tokens_per_pass": self.tokens}

    @classmethod
    def from_json(cls, values: Any, where: str) -> Draft:
        """Read what `to_json` wrote; PlanError names what is wrong. where: the name of the value in errors."""
        return fields.decoded(cls, values, where, derived=("tokens_per_pass",))

    def describe(self, names: Mapping[str, str]) -> str:
        """Describe the draft for people. names: of devices, by address."""
        where = "" if self.worker is None else f" on {names.get(self.worker, self.worker)}"
        windows = f", {self.windows} windows at once" if self.windows > 1 else ""
        return (
            f"{counted(self.rows, 'row')} a pass, drafted by {self.name}{where}, {self.acceptance:g} of the drafts"
            f" right{windows}"
        )
