"""Drafts for tests, and answers with them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.generate import Response, generate
from edge.llm.interface import Drafter, TextEngine, VerifyResult
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.llm.slot import Slot
from edge.models.demo import MODEL_PATH
from edge.speculate.choice import MOST_ROWS, SIZES, RowChoice
from edge.speculate.speculation import Drafts, Speculation
from edge.speculate.windows import Shape, WindowChoice
from tests.conftest import OPTIONS

GREEDY = SamplingParams(temperature=0)
ROOM = replace(OPTIONS, context=256, batch=64, outputs=MOST_ROWS)
NEAR_TIE = 1e-3  # difference of two logits, in standard deviations of all of them
Answers = dict[tuple[int, ...], list[int]]
"""Tokens, by those of the prompt."""


class Always(RowChoice):
    """As many rows as there may be, in every pass; at most as many as are given."""

    def __init__(self, most: int = MOST_ROWS) -> None:
        super().__init__()
        self._most = most

    def rows(self, most: int) -> int:
        return max(size for size in SIZES if size <= min(most, self._most))

    def pays(self, seconds: float) -> bool:
        """A draft model takes in the whole text, however long that takes beside other work."""
        return True


def always(most: int = MOST_ROWS) -> Callable[[], WindowChoice]:
    """Makes choices of so many rows."""
    return lambda: WindowChoice(Always(most))


class AlwaysWindows(WindowChoice):
    """Windows of one shape, as far as there may be such. It counts those that followed others, and those cancelled."""

    def __init__(self, rows: int, windows: int) -> None:
        super().__init__(RowChoice())
        self._fixed, self.cancelled, self.behind = (rows, windows), 0, 0

    def shape(self, most_rows: int, most_windows: int) -> Shape:
        rows, windows = self._fixed
        return max(size for size in SIZES if size <= min(rows, most_rows)), min(windows, most_windows)

    def verified(self, window: VerifyResult, seconds: float) -> None:
        self.cancelled += len(window.cancelled)
        self.behind += not window.is_first


class Known(Drafts):
    """Drafts what is told beforehand, of which each `wrong`th token is another one; 0: none. at: places of others that
    are wrong."""

    free = False  # as those of a model

    def __init__(self, answers: Answers, wrong: int = 0, at: Sequence[int] = ()) -> None:
        self.answers, self.wrong, self.places, self.at = answers, wrong, at, 0

    def begin(self, prompt: Sequence[int]) -> None:
        self.answer, self.at = self.answers.get(tuple(prompt), []), 0

    def extend(self, tokens: Sequence[int]) -> None:
        self.at += len(tokens)

    def draft(self, n: int, assumed: Sequence[int] = ()) -> list[int]:
        start = self.at + len(assumed)
        return [self.answer[i] ^ self._is_wrong(i) for i in range(start, min(start + n, len(self.answer)))]

    def _is_wrong(self, place: int) -> bool:
        return place in self.places or (self.wrong > 0 and place % self.wrong == self.wrong - 1)


def ids(responses: Sequence[Response]) -> list[int]:
    """The tokens of an answer."""
    return [r.token_id for r in responses if r.token_id is not None]


def one_slot(engine: TextEngine, drafter: Drafter | None = None) -> Scheduler:
    """A conversation: one request at a time, which continues what the one before left."""
    return Scheduler(engine, slots=1, keep=True, drafter=drafter)


def tokens_of(scheduler: Scheduler) -> list[int]:
    """Those that its only slot holds."""
    [slot] = scheduler.slots.all
    return list(slot.tokens)


def speculate(drafts: Drafts, name: str = "known", **how: Any) -> Speculation:
    """Drafts of one kind for all requests, in every pass unless something else is chosen."""
    return Speculation(lambda: drafts, name, **{"choice": always(), **how})


def run(
    engine: TextEngine,
    prompt: Sequence[int],
    drafter: Drafter | None,
    sampling: SamplingParams = GREEDY,
    **more: Any,
) -> list[Response]:
    """An answer."""
    return list(generate(one_slot(engine, drafter), Request(prompt, sampling=sampling, **{"max_tokens": 24, **more})))


def plain_answers(prompts: Sequence[Sequence[int]]) -> Answers:
    """The greedy answers of one device, one token at a time."""
    with Engine(MODEL_PATH, ROOM) as engine:
        return {tuple(prompt): ids(run(engine, prompt, None)) for prompt in prompts}


def same_but_for_ties(engine: TextEngine, request: Request, expected: Sequence[int], result: Sequence[int]) -> None:
    """Assert that two greedy answers are the same, at least up to a near tie of the two likeliest tokens.

    Where a processor's sums depend on the rows of a pass, random weights turn such near ties.
    """
    differ = next((i for i, (a, b) in enumerate(zip(expected, result, strict=True)) if a != b), None)
    if differ is not None:
        logits = Slot(engine).prefill([*request.prompt, *expected[:differ]])
        gap = abs(float(logits[expected[differ]] - logits[result[differ]]))
        assert gap < NEAR_TIE * float(logits.std()), (differ, gap)


def same_distribution(item: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]]) -> None:
    """Assert that two samples are of one distribution: a chi-square test of equality, at the 99.9th percentile."""
    kinds = sorted(item | other)
    table = np.array([[count[kind] for kind in kinds] for count in (item, other)], float)
    table = table[:, table.sum(axis=0) >= 10]
    expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0) / table.sum()
    freedom = table.shape[1] - 1
    assert freedom >= 4
    chi_square = float(((table - expected) ** 2 / expected).sum())
    # By the approximation of Wilson and Hilferty.
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
