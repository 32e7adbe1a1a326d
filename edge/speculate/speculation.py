"""Guesses at the next tokens, as many at a time as pays, and what came of them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edge.llm.interface import VerifyResult
from edge.speculate.choice import SIZES, RowChoice
from edge.speculate.windows import WindowChoice

DRAFTED_ROW = 1.5  # passes of one row that a row costs at most, with its guess
_LEAST_PLAIN = 3  # passes of one row in an answer, for a mean


class Drafts(Protocol):
    """Where guesses come from. They decide how fast an answer comes, never what it says."""

    free: bool  # whether a guess takes next to no time

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget what was, and take in a prompt."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in tokens that follow."""

    @property
    def behind_s(self) -> float:
        """Seconds that `catch_up` would take for a trial, as far as that is known."""
        return 0.0

    def catch_up(self, pays: Callable[[float], bool]) -> float:
        """Compute what the next guess needs of the text: more of it where the seconds for that pay. Return the seconds
        that this took."""
        return 0.0

    def draft(self, n: int, assumed: Sequence[int] = ()) -> list[int]:
        """At most `n` tokens that may follow all these and then `assumed`; fewer, or none, where there is no guess."""


def row_choice(drafts: Drafts) -> RowChoice:
    """A choice of rows for passes with such drafts."""
    return RowChoice() if drafts.free else RowChoice(DRAFTED_ROW)


def watch(drafts: Drafts, tokens: Sequence[int], choice: RowChoice) -> None:
    """A pass of one row gave these tokens. Where guessing is free, a guess would have been right or not: that is
    learned at no cost."""
    if drafts.free and len(tokens) == 1 and (guess := drafts.draft(1)):
        choice.watched(guess[0] == tokens[0])


class GuessingDevice(Protocol):
    """`edge.cluster.drafting.DraftDevice`: a worker that guesses."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def is_lost(self) -> bool:
        """Whether it guesses no more."""


def worker_json(device: GuessingDevice | None) -> dict[str, Any]:
    """Where guesses are made, as docs/cli.md says. device: None for this one."""
    return {"draft_worker": device and device.name, "draft_worker_lost": device is not None and device.is_lost}


@dataclass
class DraftStats(ABC):
    """What came of guesses."""

    drafted: int = 0  # tokens that were guessed and checked
    accepted: int = 0  # of these: that were chosen
    passes: int = 0  # of one row an answer, or more
    rows: int = 0  # in all passes

    @property
    @abstractmethod
    def gain(self) -> float | None:
        """How many times as fast the tokens came as in passes of one row; None where nothing can be compared."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, as docs/cli.md and docs/serve.md say."""
        return {
            "drafted": self.drafted,
            "accepted": self.accepted,
            "passes": self.passes,
            "rows_per_pass": self.rows / self.passes if self.passes else None,
            "gain": self.gain,
        }


@dataclass
class SpeculationStats(DraftStats):
    """What came of the guesses in one answer. The prompt and its first token are not in it."""

    tokens: int = 0  # that all passes gave
    seconds: float = 0.0  # that all passes took, with the guessing
    plain_passes: int = 0  # of one row
    plain_s: float = 0.0  # that these took
    usual_plain_s: float = 0.0  # of one such pass, also of earlier answers; 0 where there was none

    @property
    def gain(self) -> float | None:
        """As `DraftStats`."""
        enough = self.plain_passes >= _LEAST_PLAIN
        plain_s = self.plain_s / self.plain_passes if enough else self.usual_plain_s
        return self.tokens * plain_s / self.seconds if self.seconds and plain_s else None

    def __str__(self) -> str:
        if not self.drafted:
            return "no token was guessed: it did not pay, or nothing was to be guessed"
        gain = "" if self.gain is None else f", {self.gain:.2f} times as fast as one at a time"
        return (
            f"{self.accepted} of {self.drafted} guesses right, {self.passes} passes of {self.rows / self.passes:.1f}"
            f" rows{gain}"
        )


class Speculation:
    """A `Drafter` for one conversation: it goes on with what it learned from answer to answer."""

    def __init__(
        self,
        drafts: Drafts,
        name: str,
        *,
        device: GuessingDevice | None = None,
        choice: RowChoice | None = None,
        windows: WindowChoice | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """name: of the drafts, for people. device: that guesses; None: this one. choice: how many rows a pass has.
        windows: how many rows and windows there are, instead. clock: in seconds."""
        self.name, self.device = name, device
        if windows is None:
            windows = WindowChoice(row_choice(drafts) if choice is None else choice)
        self.windows = windows
        self.choice = self.windows.rows
        self.stats = SpeculationStats()
        self._drafts, self._clock = drafts, clock
        self._began = 0.0  # guessing; or the window before ended, where others were under way behind it
        self._caught_up_s = 0.0  # of that time, spent on text
        self._goes_on = False  # such others are under way
        self._was_plain = False  # the last pass had one row

    def begin(self, prompt: Sequence[int]) -> None:
        """An answer to these tokens begins."""
        self.stats, self._goes_on, self._was_plain = SpeculationStats(), False, False
        self._caught_up_s = 0.0
        self._drafts.begin(prompt)

    def shape(self, chosen: Sequence[int], most_rows: int, most_windows: int) -> tuple[int, int]:
        """Rows of the next windows, and how many of these are to be under way: what pays. chosen: tokens of the answer
        since the last call, or since `begin`."""
        if self._was_plain:
            watch(self._drafts, chosen, self.choice)
        self._drafts.extend(chosen)
        if not self._goes_on:
            self._began = self._clock()
        self.choice.behind_s = self._drafts.behind_s
        return self.windows.shape(most_rows, most_windows)

    def draft(self, first: Sequence[int], rows: int, assumed: Sequence[int] = ()) -> Sequence[int]:
        """A window of at most `rows` tokens: `first`, which was chosen, or nothing where the window is behind others;
        then guesses at what follows the text and `assumed`. Empty where there is nothing to guess."""
        guesses: Sequence[int] = ()
        if rows > len(first):
            self._caught_up_s += self._drafts.catch_up(self.choice.pays)
            guesses = self._drafts.draft(rows - len(first), assumed)
        tokens = [*first, *guesses]
        return tokens[: max((size for size in SIZES if size <= len(tokens)), default=0)]  # of which times are known

    def checked(self, window: VerifyResult) -> None:
        """A window is over."""
        now = self._clock()
        seconds, self._began = now - self._began, now
        self._goes_on = window.right == window.used
        self.choice.paid(self._caught_up_s)
        self.windows.checked(window, seconds - self._caught_up_s)
        self._caught_up_s = 0.0
        stats, is_plain = self.stats, window.is_alone and window.rows == 1
        self._was_plain = is_plain
        stats.drafted += window.rows - window.is_first + sum(window.cancelled)
        stats.accepted += window.used - window.is_first
        stats.passes += 1 + len(window.cancelled)
        stats.rows += window.rows + sum(window.cancelled)
        stats.tokens += window.used
        stats.seconds += seconds
        stats.plain_passes += is_plain
        stats.plain_s += seconds if is_plain else 0.0
        stats.usual_plain_s = self.choice.plain_s

    def to_json(self) -> dict[str, Any]:
        """Figures of the last answer, as docs/cli.md says."""
        return {"draft": self.name, **worker_json(self.device), **self.stats.to_json()}

    def describe(self) -> str:
        """The same in a line for people."""
        where = f" on {self.device.name}{', which is lost' if self.device.is_lost else ''}" if self.device else ""
        return f"{self.name}{where}: {self.stats}"
