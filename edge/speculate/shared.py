"""Guesses for requests that are answered together: while they are few, and where checking them pays."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edge.llm.interface import Answer
from edge.speculate.choice import MOST_ROWS, SIZES, RowChoice
from edge.speculate.speculation import Drafts, DraftStats, GuessingDevice, watch, worker_json

FEW = 4  # requests: of more, their own rows share the pass, and guesses bring little


@dataclass
class SharedStats(DraftStats):
    """What came of the guesses so far, in steps of few requests."""

    measured_s: float = 0.0  # that passes took, with the guessing
    plain_s: float = 0.0  # that the same tokens would have taken in passes of one row, as these are measured

    @property
    def gain(self) -> float | None:
        """As `DraftStats`."""
        return self.plain_s / self.measured_s if self.measured_s else None


class SharedSpeculation:
    """A `StepDrafter`: each request has its own text to guess from, and all of so many requests one choice of rows."""

    def __init__(
        self,
        drafts: Callable[[], Drafts],
        name: str,
        few: int = FEW,
        *,
        device: GuessingDevice | None = None,
        choice: Callable[[], RowChoice] = RowChoice,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """drafts: makes those of a request. name: of them, for people. few: requests at once that have guesses.
        device: that guesses; None: this one. clock: in seconds."""
        self.name, self.device, self.stats = name, device, SharedStats()
        self._make, self._few, self._clock = drafts, few, clock
        self._drafts: dict[int, tuple[Drafts, int]] = {}  # by the number of a request, and how much of it they know
        self._choices: dict[int, RowChoice] = defaultdict(choice)  # by how many requests there are
        self._choice: RowChoice | None = None  # of the pass that is measured
        self._began = 0.0
        self._caught_up_s = 0.0  # of the pass, spent on text
        self._was_plain = False  # the last pass had no guesses

    def draft(self, answers: Sequence[Answer], most: int) -> list[Sequence[int]]:
        """Tokens that may follow each of these answers, which are all that run; none where it does not pay. most: rows
        of the pass, in all. What guesses is not to take longer than it is worth, so that counts as a part of it."""
        self._choice, self._began, self._caught_up_s = None, self._clock(), 0.0
        none: list[Sequence[int]] = [() for _ in answers]
        if len(answers) > self._few or not answers:
            return none
        self._choice = self._choices[len(answers)]
        known = [self._drafts[answer.number][0] for answer in answers if answer.number in self._drafts]
        self._choice.behind_s = sum(drafts.behind_s for drafts in known)
        rows = self._choice.rows(max(1, min(most, MOST_ROWS) // len(answers)))
        was_plain, self._was_plain = self._was_plain, rows == 1
        if rows == 1:
            for answer in answers:
                if was_plain and (drafts := self._drafts.get(answer.number)):
                    watch(drafts[0], self._news(answer), self._choice)
                self._of(answer)
            return none
        drafted = [self._drafted(answer, min(rows, answer.left) - 1, self._choice) for answer in answers]
        if len(answers) > 1:
            return list(drafted)
        size = max(size for size in SIZES if size <= len(drafted[0]) + 1)  # of which times are known
        return [drafted[0][: size - 1]]

    def checked(self, rows: Sequence[int], used: Sequence[int]) -> None:
        """The pass that `draft` was for is over. Of each answer: its rows, and how many of them gave a token."""
        stats, n = self.stats, len(rows)
        stats.drafted += sum(rows) - n
        stats.accepted += sum(used) - n
        stats.passes += 1
        stats.rows += sum(rows)
        if self._choice is None:
            return
        seconds, tokens = self._clock() - self._began, sum(used) / n
        self._choice.paid(self._caught_up_s)
        size = next(size for size in SIZES if size * n >= sum(rows))
        # Where an answer had fewer guesses than others, those that it lacked were wrong.
        tried = sum(min(one, size - 1) for one in used) / n
        self._choice.checked(size, tokens, seconds - self._caught_up_s, tried)
        if self._choice.plain_s:
            stats.measured_s += seconds
            stats.plain_s += tokens * self._choice.plain_s

    def disturbed(self) -> None:
        """Something else is computed beside the pass: how long it takes says nothing."""
        self._choice = None

    def ended(self, number: int) -> None:
        """A request has ended."""
        self._drafts.pop(number, None)

    def to_json(self) -> dict[str, Any]:
        """Figures so far, as docs/serve.md says."""
        return {"draft": self.name, **worker_json(self.device), **self.stats.to_json()}

    def _drafted(self, answer: Answer, n: int, choice: RowChoice) -> list[int]:
        """At most `n` tokens that may follow an answer."""
        drafts = self._of(answer)
        self._caught_up_s += drafts.catch_up(choice.pays) if n else 0.0
        return drafts.draft(n)

    def _news(self, answer: Answer) -> Sequence[int]:
        """Tokens of a request that what guesses for it does not know."""
        _, known = self._drafts[answer.number]
        return answer.part(known, answer.length - known)

    def _of(self, answer: Answer) -> Drafts:
        """What guesses for a request, with all of its text."""
        if answer.number not in self._drafts:
            self._drafts[answer.number] = self._make(), len(answer.prompt)
            self._drafts[answer.number][0].begin(answer.prompt)
        drafts, _ = self._drafts[answer.number]
        drafts.extend(self._news(answer))
        self._drafts[answer.number] = drafts, answer.length
        return drafts
