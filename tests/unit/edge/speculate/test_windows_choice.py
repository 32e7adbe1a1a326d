"""Test the choice of the number of draft windows in flight: the answers are always the same. The model has stages that
compute nothing, and its time is simulated.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.llama import llama
from edge.llm.continuation import Request
from edge.llm.generate import generate
from edge.llm.interface import VerifyResult
from edge.models.demo import MODEL_PATH
from edge.planning import measure
from edge.speculate.choice import SIZES, RowChoice
from edge.speculate.speculation import Drafts, Speculation
from edge.speculate.windows import Shape, WindowChoice
from partition.predict.drafts import Draft
from tests.support.drafting import GREEDY, ids, one_slot, speculate, tokens_of
from tests.support.replaceable import replaceable
from tests.support.staged_model import StagedModel
from tests.support.thorough import some

PROMPT = [5, 300, 17, 401]
FLAT = {1: 1.0, 2: 1.03, 4: 1.1, 8: 1.4}
STEEP = {1: 1.0, 2: 1.9, 4: 2.8, 8: 6.0}


@pytest.fixture(scope="module")
def vocabulary() -> Iterator[llama.Model]:
    with closing(llama.Model(MODEL_PATH, vocabulary_only=True)) as model:
        yield model


def plain(n_tokens: int) -> list[int]:
    """Return the model's answer to the prompt."""
    current = list(PROMPT)
    for _ in range(n_tokens):
        current.append(StagedModel.token_after(current))
    return current[len(PROMPT) :]


ANSWER = plain(1100)


class Sometimes(Drafts):
    """Drafts the answer; of its places a fraction is right, and now and then there is no draft."""

    free = False

    def __init__(self, right: float, seed: int = 0, ends: float = 0.0) -> None:
        chosen = random.Random(seed)
        self._drafts = [token if chosen.random() < right else token ^ 1 for token in ANSWER]
        self._ends, self._chosen, self._at = ends, chosen, 0

    def begin(self, prompt: Sequence[int]) -> None:
        self._at = 0

    def extend(self, tokens: Sequence[int]) -> None:
        self._at += len(tokens)

    def draft(self, n: int, assumed: Sequence[int] = ()) -> list[int]:
        start = self._at + len(assumed)
        return self._drafts[start : start + (self._chosen.randrange(n) if self._chosen.random() < self._ends else n)]


class AnyShape(WindowChoice):
    """Other rows and windows each time."""

    def __init__(self, seed: int) -> None:
        super().__init__(RowChoice())
        self._chosen = random.Random(seed)

    def shape(self, most_rows: int, most_windows: int) -> Shape:
        size = self._chosen.choice([size for size in SIZES if size <= most_rows])
        return size, self._chosen.randint(1, most_windows)


@settings(max_examples=some(60, 1000), deadline=None)
@given(
    seed=st.integers(0, 1 << 16),
    right=st.floats(0, 1),
    ends=st.floats(0, 1),
    stages=st.integers(1, 4),
    n_tokens=st.integers(1, 60),
    left_at=st.integers(0, 80),
    lost_at=st.none() | st.integers(2, 30),
    next_stages=st.integers(1, 3),
)
def test_answers_are_the_same(
    vocabulary: llama.Model,
    seed: int,
    right: float,
    ends: float,
    stages: int,
    n_tokens: int,
    left_at: int,
    lost_at: int | None,
    next_stages: int,
) -> None:
    """Any windows and drafts give the same answers, in a context that may be too small, where the answer is left or a
    stage is lost."""
    context = 50
    engines = [StagedModel(vocabulary, n, context) for n in (stages, next_stages)]
    engines[0].lives = lost_at
    engine = replaceable(engines[0], lambda error: engines[1])  # type: ignore[arg-type, return-value]
    drafter = speculate(Sometimes(right, seed, ends), choice=lambda: AnyShape(seed))
    scheduler = one_slot(engine, drafter)
    responses = generate(scheduler, Request(PROMPT, n_tokens, GREEDY))
    result = ids([response for _, response in zip(range(left_at), responses, strict=False)])
    responses.close()  # type: ignore[attr-defined]
    most = min(n_tokens, context - len(PROMPT) + 1, left_at)
    assert result == ANSWER[:most]
    assert engine.uncollected == 0
    current = tokens_of(scheduler)
    assert current == [*PROMPT, *ANSWER][: len(current)]
    if left_at:
        assert len(current) >= len(PROMPT) + most - 1  # some may be chosen that were not told yet
        assert engine.replacements.engine.tokens == current  # type: ignore[attr-defined]
    stats = drafter.stats
    assert stats.accepted <= stats.drafted <= stats.rows


def test_windows_in_flight_are_computed_again_where_another_engine_takes_over_between_steps(
    vocabulary: llama.Model,
) -> None:
    """Logits that were taken in from the engine before belong to nothing then."""
    first, second = StagedModel(vocabulary, 3), StagedModel(vocabulary, 3)
    engine = replaceable(first, lambda error: second)  # type: ignore[arg-type, return-value]
    scheduler = one_slot(engine, speculate(Sometimes(0.7), choice=lambda: AnyShape(1)))
    responses = generate(scheduler, Request(PROMPT, 60, GREEDY))
    result = ids([next(responses)])
    while len(engine.replacements.ready) < 2:
        result += ids([next(responses)])
        engine.replacements.take_in()
    engine.replacements.switch_to(lambda: second)  # type: ignore[arg-type, return-value]
    result += ids(list(responses))
    assert result == ANSWER[:60]
    assert (engine.replacements.engine, engine.replacements.moves, engine.uncollected) == (second, 1, 0)


class Conversation:
    """One answer, in counted time."""

    def __init__(
        self,
        vocabulary: llama.Model,
        right: float,
        costs: dict[int, float],
        parts: tuple[float, ...],
        delay_s: float,
        n_tokens: int,
        seed: int = 0,
        draft_s: float = 0.0,
    ) -> None:
        """draft_s: of each draft, on the first stage."""
        self.engine = StagedModel(
            vocabulary, len(parts), 4096, lambda rows: 0.1 * costs.get(rows, rows), parts, delay_s
        )
        drafts = Sometimes(right, seed)
        compute = drafts.draft

        def timed(n: int, assumed: Sequence[int] = ()) -> list[int]:
            drafted = compute(n, assumed)
            self.engine.now_s += draft_s * len(drafted)
            return drafted

        drafts.draft = timed  # type: ignore[method-assign]
        self.drafter = Speculation(lambda: drafts, "sometimes", clock=lambda: self.engine.now_s)
        responses = generate(one_slot(self.engine, self.drafter), Request(PROMPT, n_tokens, GREEDY))
        next(responses)
        began = self.engine.now_s
        assert 1 + len(ids(list(responses))) == n_tokens
        plain_s = 0.1 + len(parts) * delay_s
        self.of_plain = (n_tokens - 1) * plain_s / (self.engine.now_s - began)


SETTINGS = {
    "two stages": ((0.5, 0.5), 0.0),
    "two stages, 20 ms round trip": ((0.5, 0.5), 0.01),
    "three stages": ((1 / 3, 1 / 3, 1 / 3), 0.0),
    "a slow last stage": ((0.2, 0.8), 0.0),
    "a slow first stage": ((0.8, 0.2), 0.0),
}


@pytest.mark.parametrize("costs", [FLAT, STEEP], ids=["flat", "steep"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_nothing_is_lost(vocabulary: llama.Model, costs: dict[int, float], setting: str) -> None:
    for right in some((0.0, 0.5), (0.0, 0.25, 0.5, 0.75, 0.9)):
        assert Conversation(vocabulary, right, costs, *SETTINGS[setting], 200).of_plain >= 0.92, right


def test_where_stages_are_alike_windows_pay(vocabulary: llama.Model) -> None:
    """Rows are dear here, so that none would be drafted in one window."""
    for setting, least in (("two stages", 1.2), ("two stages, 20 ms round trip", 1.2), ("three stages", 1.3)):
        assert Conversation(vocabulary, 0.75, STEEP, *SETTINGS[setting], 300).of_plain > least


@pytest.mark.parametrize("right", [0.0, 0.5, 0.75, 0.9])
def test_where_drafts_keep_a_stage_the_gain_is_near_the_formula(vocabulary: llama.Model, right: float) -> None:
    """In answers of 300 tokens, with what is learned first: windows that pay are found, and of more of them drafts
    would keep the first stage for longer than they are worth."""
    costs, draft_s, delay_s = {1: 1.0, 2: 1.56, 4: 2.41, 8: 5.2}, 0.047, 0.03
    plain_s = 0.1 + 2 * delay_s
    token_s = min(
        Draft("any", right, rows, draft_s, windows=windows).token_s(
            0.1 * costs[rows] + 2 * delay_s, 0.05 * costs[rows] + rows * draft_s
        )
        for rows in costs
        for windows in (1, 2, 4)
    )
    gains = [
        Conversation(vocabulary, right, costs, (0.5, 0.5), delay_s, 300, seed, draft_s).of_plain for seed in range(6)
    ]
    assert sum(gains) / len(gains) >= max(0.98, 0.9 * plain_s / token_s)


def test_drafts_that_are_never_right_turn_it_off(vocabulary: llama.Model) -> None:
    """Few are made in 300 tokens, and those are trials."""
    result = Conversation(vocabulary, 0.0, STEEP, *SETTINGS["two stages"], 300)
    assert result.drafter.stats.drafted <= 40


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("right", [0.4, 0.9, 1.0])
def test_plans_count_on_what_windows_take(
    vocabulary: llama.Model, setting: str, right: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times of any shape, as measured by these windows, are those that follow from the stages and links."""
    parts, delay_s = SETTINGS[setting]
    for rows, windows in ((1, 2), (2, 2), (4, 4)):
        pass_s = 0.1 * STEEP[rows]
        engine = StagedModel(vocabulary, len(parts), 4096, lambda n: 0.1 * STEEP.get(n, n), parts, delay_s)

        def sleep_for(seconds: float, engine: StagedModel = engine) -> None:
            engine.now_s += seconds

        monkeypatch.setattr(
            measure, "time", SimpleNamespace(perf_counter=lambda engine=engine: engine.now_s, sleep=sleep_for)
        )
        for guess_s in (0.0, 1e-3):
            draft = Draft("any", right, rows, guess_s, windows=windows)
            busy_s = max(parts[0] * pass_s + rows * guess_s, *(part * pass_s for part in parts[1:]))
            expected = draft.token_s(pass_s + len(parts) * delay_s, busy_s)
            # The first windows have nothing before them, and the last ones nothing behind.
            assert measure.windows_s(engine, 32, draft) == pytest.approx(expected, rel=0.12), (rows, windows)
            assert engine.uncollected == 0


class Short(Sometimes):
    """Has two drafts, however many are asked for."""

    def draft(self, n: int, assumed: Sequence[int] = ()) -> list[int]:
        return super().draft(n, assumed)[:2]


class FourRows(WindowChoice):
    """Windows of four rows, two in flight, once it is known what one and two rows take."""

    def _shape(self, most_rows: int, most_windows: int) -> Shape:
        return next(((size, 1) for size in (1, 2) if size not in self.rows.measured_sizes()), (4, 2))


def test_windows_of_fewer_drafts_than_chosen_are_measured(vocabulary: llama.Model) -> None:
    """Else two windows stay chosen for what they might give, whatever they take."""
    engine = StagedModel(vocabulary, 2, 4096, lambda rows: 0.1 * FLAT.get(rows, rows), (1, 1), 0.0)
    choice = FourRows(RowChoice(0.9))
    drafter = Speculation(lambda: Short(0.9), "short", choice=lambda: choice, clock=lambda: engine.now_s)
    list(generate(one_slot(engine, drafter), Request(PROMPT, 200, GREEDY)))
    assert choice._times[2, 2].next


@pytest.mark.parametrize("windows", [4, 12, 30])
def test_windows_that_pay_go_on_behind_a_burst_of_stolen_time(windows: int) -> None:
    """Windows, and passes alone, take four times as long for a while: few are alone then, or soon after."""
    choice, alone = WindowChoice(RowChoice(0.9)), []

    def one_window(times_as_long: float) -> None:
        rows, n = choice.shape(1, 2)
        alone.append(n == 1)
        seconds = times_as_long * (0.1 if n == 1 else 0.06)
        choice.verified(VerifyResult(rows, 1, n == 1, n == 1, n, 1, int(n > 1)), seconds)

    for n in range(200 + windows):
        one_window(4.0 if 100 <= n < 100 + windows else 1.0)
    assert sum(alone[100:]) <= 8
    assert not all(alone[-10:])


def test_windows_that_take_longer_are_left() -> None:
    """The first behind a wrong draft, and each next, take as long as two alone: they are tried, and left."""
    choice = WindowChoice(RowChoice())
    shapes = []
    for _ in range(60):
        rows, windows = choice.shape(1, 4)
        shapes.append(windows)
        if windows == 1:
            choice.verified(VerifyResult(rows, 1, right=0), 0.1)
        else:
            choice.verified(VerifyResult(rows, 1, False, False, windows, 1, 1), 0.2)
    assert 0 < sum(windows > 1 for windows in shapes) <= 4
    assert shapes[:2] == [1, 1]


@pytest.mark.parametrize(("next_s", "most"), [(0.05, 4), (0.07, 2)], ids=["a link is waited for", "a stage is busy"])
def test_more_windows_are_tried_where_those_in_flight_wait_for_links(next_s: float, most: int) -> None:
    """Each of two windows in flight takes half of a pass alone, or longer, as a stage has no more time."""
    choice, shapes = WindowChoice(RowChoice(0.9)), []
    for _ in range(12):
        shapes.append(choice.shape(1, 4))
        rows, windows = shapes[-1]
        alone = windows == 1
        choice.verified(VerifyResult(rows, 1, alone, alone, windows, 1, int(not alone)), 0.1 if alone else next_s)
    assert max(windows for _, windows in shapes) == most
