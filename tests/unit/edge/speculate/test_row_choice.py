"""Test the choice of the number of rows of a pass, with given times and drafts and without a clock."""

import random
from collections.abc import Sequence

import pytest

from edge.speculate.choice import MOST_ROWS, SIZES, RowChoice
from partition.predict.drafts import tokens_a_pass
from tests.support.thorough import each_once

FLAT = {1: 1.0, 2: 1.03, 4: 1.0, 8: 1.31, 16: 2.2}  # weights from a disk: measured up to 8, in passes of one row
STEEP = {1: 1.0, 2: 1.9, 4: 2.8, 8: 6.0, 16: 12.0}  # weights in memory, one thread

COSTS = {
    "flat": FLAT,
    "steep": STEEP,
    "free": dict.fromkeys(SIZES, 1.0),
    "far": {1: 1.0, 2: 1.06, 4: 1.15, 8: 1.37, 16: 1.9},
    "8b": {1: 1.0, 2: 1.01, 4: 1.22, 8: 2.96, 16: 5.9},  # in 1.5 GiB, from a disk, one thread
    "between": {1: 1.0, 2: 1.3, 4: 1.9, 8: 3.2, 16: 6.0},
}


class Conversation:
    """Passes that take what `costs` says, of drafts of which a fraction is right; deterministic."""

    def __init__(
        self, costs: dict[int, float], right: float, plain_s: float = 0.1, free: bool = False, seed: int = 7
    ) -> None:
        """free: it is known of passes of one row, too, whether a draft would have been right."""
        self._free = free
        self.choice = RowChoice(is_watched=free)
        self.costs, self.right, self.plain_s = costs, right, plain_s
        self.rows: list[int] = []
        self.tokens, self.seconds = 0, 0.0
        self._random = random.Random(seed)

    def go_on(self, tokens: int) -> "Conversation":
        until = self.tokens + tokens
        while self.tokens < until:
            self.one_pass()
        return self

    def one_pass(self, times_as_long: float = 1.0) -> int:
        rows = self.choice.rows(MOST_ROWS)
        used = 1
        while used < rows and self._random.random() < self.right:
            used += 1
        seconds = self.costs[rows] * self.plain_s * times_as_long
        self.choice.checked(rows, used, seconds)
        if self._free and rows == 1:
            self.choice.watched(self._random.random() < self.right)
        self.rows.append(rows)
        self.tokens += used
        self.seconds += seconds
        return rows

    @property
    def of_plain(self) -> float:
        return self.tokens * self.plain_s / self.seconds


def test_nothing_is_tried_before_plain_passes_are_known() -> None:
    assert Conversation(FLAT, 1.0).go_on(2).rows == [1, 1]


def test_where_rows_cost_next_to_nothing_they_are_used() -> None:
    conversation = Conversation(FLAT, 0.75).go_on(400)
    assert conversation.of_plain > 2.4
    assert conversation.rows.index(2) < conversation.rows.index(4) <= 6  # from small to large, soon


@pytest.mark.parametrize("right", [0.0, 0.25, 0.5, 0.75, 0.9])
@pytest.mark.parametrize("tokens", [64, 128, 512])
def test_where_rows_are_dear_nothing_is_lost(right: float, tokens: int) -> None:
    assert Conversation(STEEP, right).go_on(tokens).of_plain >= 0.98


@pytest.mark.parametrize("costs", [FLAT, STEEP, dict.fromkeys(SIZES, 1.0)], ids=["flat", "steep", "free"])
def test_drafts_that_are_never_right_turn_it_off_within_32_tokens(costs: dict[int, float]) -> None:
    conversation = Conversation(costs, 0.0).go_on(32)
    assert conversation.choice.best() == 1
    before = len(conversation.rows)
    conversation.go_on(300)
    assert sum(rows > 1 for rows in conversation.rows[before:]) <= 8  # trials, ever rarer
    assert conversation.of_plain > 0.97


@pytest.mark.parametrize(("name", "right"), each_once(COSTS, [0.0, 0.25, 0.5, 0.75, 0.9]))
def test_free_drafts_come_near_the_best_fixed_size(name: str, right: float) -> None:
    """In 2,048 tokens, what is learned first among them: at least 0.95 of the better of plain and the best size."""
    costs = COSTS[name]
    best = max(tokens_a_pass(right, size) / costs[size] for size in SIZES)
    assert Conversation(costs, right, free=True).go_on(2048).of_plain >= 0.95 * best


def test_what_is_seen_beside_single_rows_decides_whether_dear_rows_are_tried() -> None:
    conversation = Conversation(STEEP, 0.9, free=True).go_on(200)
    assert conversation.rows.index(4) < 40
    assert 4 not in Conversation(STEEP, 0.9).go_on(200).rows  # of which a trial tells one draft


def test_rows_of_unknown_cost_have_their_chance_where_few_drafts_are_right() -> None:
    choice = RowChoice()
    for _ in range(40):
        choice.watched(False)
        if (rows := choice.rows(MOST_ROWS)) > 1:
            break
        choice.checked(1, 1, 1.0)
    assert rows == 2


def test_it_comes_back_when_drafts_get_right() -> None:
    conversation = Conversation(FLAT, 0.0).go_on(200)
    assert conversation.choice.best() == 1
    conversation.right = 0.9
    conversation.go_on(1000)
    assert conversation.choice.best() > 1


@pytest.mark.parametrize("name", ["flat", "between", "far"])
def test_a_stretch_that_cannot_be_drafted_is_not_paid_for_long(name: str) -> None:
    conversation = Conversation(COSTS[name], 0.9).go_on(300)
    conversation.right = 0.0
    conversation.go_on(80)
    assert conversation.choice.best() == 1
    conversation.right = 0.9
    conversation.go_on(300)
    assert conversation.choice.best() > 1


def test_drafts_that_pay_a_little_stay() -> None:
    """Four rows are 1.12 times as fast as one: what acceptance seems to be is often less than it is."""
    costs, gains = {1: 1.0, 2: 1.6, 4: 2.45, 8: 4.5, 16: 9.0}, []
    for seed in range(6):
        conversation = Conversation(costs, 0.75, seed=seed)
        for size in SIZES * 2:
            conversation.choice.measured(size, costs[size] * conversation.plain_s)
        gains.append(conversation.go_on(3000).of_plain)
    assert sum(gains) / len(gains) > 1.035


def test_it_goes_off_when_drafts_get_wrong() -> None:
    conversation = Conversation(FLAT, 0.9).go_on(200)
    assert conversation.choice.best() > 1
    conversation.right = 0.0
    before = len(conversation.rows)
    conversation.go_on(150)
    assert conversation.choice.best() == 1
    assert sum(rows > 1 for rows in conversation.rows[before:]) <= 80


def test_a_bad_moment_is_not_remembered() -> None:
    """The first trials take 30 times as long as they should: a later one is believed."""
    conversation = Conversation(FLAT, 0.75).go_on(2)
    assert conversation.one_pass(times_as_long=30.0) == 2
    assert conversation.choice.best() == 1
    conversation.go_on(400)
    assert conversation.choice.best() > 1


def test_what_was_tried_once_is_tried_again_soon() -> None:
    """Passes of a large model take many seconds: an answer may be over before the usual wait is."""
    conversation = Conversation(dict.fromkeys(SIZES, 1.0), 1.0).go_on(2)
    assert conversation.one_pass(times_as_long=3.0) == 2
    assert conversation.choice.best() == 1
    conversation.go_on(6)
    assert conversation.choice.best() > 1


@pytest.mark.parametrize("right", [0.0, 0.25, 0.5])
def test_many_bad_moments_do_not_make_dear_rows_look_cheap(right: float) -> None:
    """Each tenth pass takes three times as long, in random places."""
    conversation, chance = Conversation(STEEP, right), random.Random(1)
    while conversation.tokens < 2048:
        conversation.one_pass(times_as_long=3.0 if chance.random() < 0.1 else 1.0)
    assert sum(conversation.costs[rows] for rows in conversation.rows) <= 1.03 * conversation.tokens


def test_a_bad_moment_in_use_changes_nothing() -> None:
    conversation = Conversation(FLAT, 0.75).go_on(200)
    assert conversation.choice.best() > 1
    costs = [conversation.choice.cost(size) for size in SIZES]
    for _ in range(2):
        conversation.one_pass(times_as_long=30.0)
    assert [conversation.choice.cost(size) for size in SIZES] == costs
    assert conversation.choice.best() > 1


@pytest.mark.parametrize("passes", [3, 8, 16, 20, 100])
@pytest.mark.parametrize("right", [0.75, 0.9])
@pytest.mark.parametrize("name", ["far", "between"])
def test_drafts_that_pay_go_on_behind_a_burst_of_stolen_time(name: str, right: float, passes: int) -> None:
    """All passes take four times as long for a while. Few of them have one row then, and those behind them are as fast
    as before."""
    costs = COSTS[name]
    conversation = Conversation(costs, right).go_on(300)
    before = len(conversation.rows)
    for _ in range(passes):
        conversation.one_pass(times_as_long=4.0)
    assert conversation.rows[before:].count(1) <= 4 + passes // 8
    tokens, before = conversation.tokens, len(conversation.rows)
    for _ in range(60):
        conversation.one_pass()
    best = max(tokens_a_pass(right, size) / costs[size] for size in SIZES)
    assert conversation.tokens - tokens >= 0.8 * best * sum(costs[rows] for rows in conversation.rows[before:])


@pytest.mark.parametrize("passes", [8, 30])
def test_time_stolen_from_one_row_makes_no_dear_rows_look_cheap(passes: int) -> None:
    """On a fast model a tenth of a second is many passes, and all of them may be slow."""
    conversation = Conversation(STEEP, 0.9)
    for size in SIZES * 2:
        conversation.choice.measured(size, STEEP[size] * conversation.plain_s)
    conversation.go_on(40)
    before = len(conversation.rows)
    for n in range(passes + 100):
        conversation.one_pass(times_as_long=4.0 if n < passes else 1.0)
    assert sum(rows > 1 for rows in conversation.rows[before:]) <= 2
    assert max(conversation.rows[before:]) <= 2


def test_a_bad_moment_of_one_row_does_not_make_many_look_cheap() -> None:
    conversation = Conversation(FLAT, 0.0).go_on(300)
    for _ in range(5):
        conversation.one_pass(times_as_long=3.0)
    assert conversation.choice.best() <= 2


def test_when_passes_of_more_rows_get_dear_they_are_left() -> None:
    conversation = Conversation(FLAT, 0.5).go_on(200)
    assert conversation.choice.best() > 1
    conversation.costs = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0, 16: 16.0}
    conversation.go_on(60)
    assert conversation.choice.best() == 1


def test_plain_passes_are_measured_now_and_then_while_it_is_on() -> None:
    conversation = Conversation(FLAT, 0.9).go_on(200)
    before = len(conversation.rows)
    conversation.plain_s = 0.2  # all is twice as slow: the gain is the same
    conversation.go_on(12_000)
    plain = conversation.rows[before:].count(1)
    assert 3 <= plain <= 0.03 * len(conversation.rows[before:])
    assert conversation.choice.plain_s == pytest.approx(0.2)


@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_no_more_rows_than_there_is_room_for(most: int) -> None:
    choice = RowChoice()
    chosen: Sequence[int] = [_taken(choice, most) for _ in range(100)]
    assert max(chosen) == max(size for size in SIZES if size <= most)


def _taken(choice: RowChoice, most: int) -> int:
    rows = choice.rows(most)
    choice.checked(rows, rows, 0.1)
    return rows


def test_winnings_that_were_paid_do_not_pay_for_more_text() -> None:
    choice = Conversation(FLAT, 0.9).go_on(400).choice
    won_s = max(tenths / 10 for tenths in range(1, 10_000) if choice.pays(tenths / 10))
    n_paid = 0
    while choice.pays(won_s / 3.5) and n_paid < 10:
        choice.paid(won_s / 3.5)
        n_paid += 1
    assert n_paid == 3
