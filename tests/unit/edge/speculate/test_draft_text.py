"""Test how much text a draft model reads, and its cost limit, with a simulated clock."""

import random
from collections.abc import Sequence
from functools import partial

import pytest

from edge.llm.interface import VerifyResult
from edge.llm.slot import common_prefix
from edge.speculate.small_model import DraftPace, ModelDrafts
from edge.speculate.speculation import Speculation

PROMPT = list(range(1000, 1240))
PLAIN_S = 0.1  # of a pass of one row
STEEP = {1: 1.0, 2: 1.9, 4: 2.8, 8: 6.0, 16: 12.0}  # weights in memory, one thread: passes of one row
FAR = {1: 1.0, 2: 1.06, 4: 1.15, 8: 1.37, 16: 1.9}


class Small:
    """A draft model: it computes what is new of a text, and drafts the answer where it saw the prompt's beginning."""

    n_vocab = 10_000

    def __init__(self, context: int = 4096, token_s: float = 0.003, draft_s: float = 0.03) -> None:
        self.context, self._token_s, self._draft_s = context, token_s, draft_s
        self.now, self.computed, self.computed_tokens = 0.0, 0, list[int]()
        self.texts: list[int] = []  # lengths of all that it was asked to continue
        self.answer: list[int] = []

    def clock(self) -> float:
        return self.now

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        assert 0 < len(tokens) <= self.context - n
        new = len(tokens) - min(common_prefix(self.computed_tokens, tokens), len(tokens) - 1)
        self.computed += new
        self.now += new * self._token_s + n * self._draft_s
        self.texts.append(len(tokens))
        place = tokens[-1] + 1
        drafted = [place + i for i in range(n)]
        self.computed_tokens = [*tokens, *drafted[:-1]]
        return drafted


class TextSlot:
    """A request whose first token was chosen."""

    left, sequence = 1 << 20, 0

    def __init__(self, prompt: list[int]) -> None:
        self.prompt, self.answer = prompt, [prompt[-1] + 1]
        self.tokens = self.prompt


class Answering:
    """Answers that count on from the prompt's end, of whose drafts a fraction is right."""

    def __init__(self, small: Small, costs: dict[int, float], right: float, prompt: Sequence[int] = PROMPT) -> None:
        self.small, self._costs, self._right = small, costs, right
        self.drafts = ModelDrafts(small, clock=small.clock)
        self.speculation = Speculation(lambda: self.drafts, "small", clock=small.clock)
        self.prompt, self._random = list(prompt), random.Random(3)

    def answer(self, tokens: int) -> float:
        """Return how many times as fast as without drafts an answer of so many tokens came."""
        speculation, request = self.speculation, TextSlot(self.prompt)
        speculation.begin()
        began, built = self.small.now, 0
        while built < tokens:
            rows, _ = speculation.shape([request], 16, 1)
            window = speculation.draft(request, request.answer[-1:], rows)
            used = 1
            while used < len(window) and self._random.random() < self._right:
                used += 1
            self.small.now += PLAIN_S * self._costs[len(window)]
            speculation.verified([VerifyResult(len(window), used)])
            request.answer += [request.answer[-1] + 1 + i for i in range(used)]
            built += used
        speculation.ended(request)
        return built * PLAIN_S / (self.small.now - began)


@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("token_s", [0.003, 0.03])
def test_where_drafts_do_not_pay_the_prompt_is_not_taken_in(right: float, token_s: float) -> None:
    """A prompt of 240 tokens would take as long as 7 or 72 passes; a first trial sees 12 of them, and answers after it
    lose a hundredth in the long run."""
    answering = Answering(Small(token_s=token_s, draft_s=0.05), STEEP, right)
    answering.answer(128)
    small = answering.small
    assert 0 < small.computed <= 40
    assert max(small.texts) <= 40
    speeds = [answering.answer(128) for _ in range(6)]
    assert sum(1 / speed for speed in speeds) / len(speeds) <= 1 / 0.98
    assert max(small.texts) < len(PROMPT)


def test_the_price_of_a_trial_is_saved_before_the_next() -> None:
    """Text for a trial takes as long as 4 passes here: a hundredth of 400 tokens, after the first was paid for."""
    answering = Answering(Small(token_s=0.03), STEEP, 0.0)
    answering.answer(100)
    first = answering.small.computed
    answering.answer(550)
    assert answering.small.computed == first
    answering.answer(550)
    assert answering.small.computed > first


@pytest.mark.parametrize("right", [0.5, 0.8, 1.0])
def test_where_drafts_pay_the_whole_prompt_is_taken_in_once(right: float) -> None:
    answering = Answering(Small(draft_s=0.005), FAR, right)
    speed = answering.answer(128)
    small = answering.small
    assert speed > {0.5: 1.05, 0.8: 1.5, 1.0: 3.5}[right]
    assert max(small.texts) > len(PROMPT)
    assert small.computed < len(PROMPT) + 2 * 128 + 40


def test_a_long_prompt_is_taken_in_where_the_answer_makes_up_for_it() -> None:
    """2,000 tokens take as long as 60 passes: drafts win that in 256 tokens, and not in 32."""
    answering = Answering(Small(draft_s=0.005), FAR, 0.7, list(range(2000)))
    answering.answer(32)
    assert max(answering.small.texts) < 100
    answering.answer(256)
    assert max(answering.small.texts) > 2000


def test_the_next_turn_takes_in_what_is_new() -> None:
    answering = Answering(Small(), FAR, 1.0)
    answering.answer(64)
    before = answering.small.computed
    answering.prompt += range(answering.prompt[-1] + 1, answering.prompt[-1] + 81)
    answering.answer(1)
    assert answering.small.computed - before < 40


def test_passes_are_charged_without_the_text_and_answers_with_it() -> None:
    """The seconds of two rows are those of a pass and one draft, however much text came before."""
    answering = Answering(Small(token_s=0.02), FAR, 1.0)
    answering.answer(4)
    choice, stats = answering.speculation._choices[1].rows, answering.speculation.stats
    assert choice.cost(2) * PLAIN_S == pytest.approx(PLAIN_S * FAR[2] + 0.02 + 0.03)
    assert sum(passes.seconds for passes in stats._measured.values()) == pytest.approx(answering.small.now)
    assert answering.drafts.behind_s < 0.02 * 20


def sometimes(step: int, _seconds: float) -> bool:
    return bool(step % 3)


@pytest.mark.parametrize("context", [8, 48, 100])
def test_texts_fit_a_small_context(context: int) -> None:
    """Also with drafts assumed, and where a text goes on beyond it."""
    small = Small(context)
    drafts = ModelDrafts(small, clock=small.clock)
    drafts.begin(PROMPT)
    for step in range(300):
        drafts.catch_up(partial(sometimes, step))
        assumed = list(range(5000, 5000 + step % (context // 2)))
        assert len(drafts.draft(1 + step % 16, assumed)) == min(1 + step % 16, context // 2)
        drafts.extend([6000 + step] * (1 + step % 3))


def test_who_shares_a_model_does_not_count_on_what_the_other_left() -> None:
    small, pace = Small(), DraftPace()
    first, other = (ModelDrafts(small, pace, small.clock) for _ in range(2))
    for drafts, prompt in ((first, PROMPT), (other, list(range(5000, 5100)))):
        drafts.begin(prompt)
        drafts.catch_up(lambda _: True)
        drafts.draft(2)
    assert first.behind_s == pytest.approx(12 * pace.token_s)  # its end would be taken in again
    assert other.behind_s == pytest.approx(0.0)
