"""Tests of the choice of a replica, with measured speeds and without running processes."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from edge.api.config import EngineConfig
from edge.errors import EngineGone
from edge.serve.answer import ProcessAnswer
from edge.serve.dispatch import Dispatcher, Replica, _Prompt
from edge.serve.process import EngineProcess
from edge.serve.served import Generation
from edge.serve.speeds import Speeds
from tests.unit.edge.serve.test_speeds import measured

BLOCKS = [b"1", b"2", b"3", b"4"]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def replica(token_s: float, prefill_s: float, n_answers: int = 0) -> Replica:
    """A loaded replica with these speeds for one answer, and with so many answers."""
    config = EngineConfig("model.gguf")
    process = EngineProcess("demo", config, say=lambda line: None)
    process.about = {"sequences": 4}
    process._ready.set()
    clock = Clock()
    speeds = process.answers.speeds = Speeds(clock)
    speeds.begun(1)
    clock.now += prefill_s * 100
    speeds.token(1, 100)
    clock.now += token_s
    speeds.token(1, 0)
    speeds.ended(1)
    for number in range(n_answers):
        process.answers[number] = ProcessAnswer(Generation(prompt="other"))
    return Replica(config, process)


def chosen(*replicas: Replica, chars: int = 1024, limit: int = 10) -> int:
    dispatcher, answer = Dispatcher(), ProcessAnswer(Generation(prompt="new"))
    dispatcher.replicas += replicas
    dispatcher._prompts[answer] = _Prompt(chars, BLOCKS, limit)
    return replicas.index(dispatcher._best(answer))


@pytest.mark.parametrize("order", [1, -1])
def test_the_clearly_faster_replica_is_chosen(order: int) -> None:
    replicas = [replica(0.1, 0.01), replica(0.3, 0.03)][::order]
    assert chosen(*replicas) == (0 if order == 1 else 1)


def test_a_replica_with_many_answers_is_slower() -> None:
    assert chosen(replica(0.1, 0.001, n_answers=3), replica(0.1, 0.001)) == 1
    assert chosen(replica(0.1, 0.001, n_answers=8), replica(0.2, 0.001)) == 1
    assert chosen(replica(0.1, 0.001, n_answers=1), replica(0.9, 0.001)) == 0


def crowded(*token_s: float, n_answers: int) -> Replica:
    """A loaded replica with the measured seconds of a token of 1, 2, ... answers, and with so many answers."""
    result = replica(token_s[0], 0.0, n_answers)
    result.process.answers.speeds = measured(*enumerate(token_s, 1))
    return result


@pytest.mark.parametrize(
    ("token_s", "n_answers", "other_s", "expected"),
    [
        ((0.2, 0.2, 0.2), 2, 0.21, 0),  # the others are not delayed
        ((0.2, 0.3, 0.4), 2, 0.7, 1),  # 0.4 * (4 / 3) ** 2 = 0.711
        ((0.2, 0.3, 0.4), 2, 0.72, 0),
        ((0.2, 0.3, 0.4), 1, 0.44, 1),  # 0.3 * 1.5
        ((0.2, 0.3, 0.4), 1, 0.46, 0),
        ((0.3, 0.2), 1, 0.21, 0),  # noise: more answers are no faster
        ((0.2, 0.3), 3, 0.51, 0),  # the delay by a fourth answer was not measured: 0.3 * 5 / 3
    ],
)
def test_delays_of_other_answers_count(
    token_s: tuple[float, ...], n_answers: int, other_s: float, expected: int
) -> None:
    assert chosen(crowded(*token_s, n_answers=n_answers), replica(other_s, 0.0), chars=0) == expected


def divided(*token_s: tuple[float, ...], rounds: int = 3, tokens: int = 12) -> list[int]:
    """Answer one request and then eight together, several times. Return how the last eight were divided.

    token_s: for each replica, the seconds of a token of 1, 2, ... 8 answers.
    """
    dispatcher, clocks = Dispatcher(), [Clock() for _ in token_s]
    for clock in clocks:
        there = replica(1.0, 1.0)
        there.process.about = {"sequences": 8}
        there.process.answers.speeds = Speeds(clock)
        dispatcher.replicas.append(there)
    result: list[int] = []
    for n_requests in (1, 8) * rounds:
        for number in range(n_requests):
            answer = ProcessAnswer(Generation(prompt="new"))
            dispatcher._prompts[answer] = _Prompt(16, (), tokens, tokens)
            best = dispatcher._best(answer).process.answers
            best[number] = answer
            best.speeds.begun(number)
        result = [len(there.process.answers) for there in dispatcher.replicas]
        for there, clock, times in zip(dispatcher.replicas, clocks, token_s, strict=True):
            answers = there.process.answers
            for i in range(tokens):
                clock.now += times[len(answers) - 1] if answers else 0.0
                for number in [*answers]:  # the answers of a step end one after another
                    answers.speeds.token(number, 0 if i else 4)
                    if i + 1 == tokens:
                        answers.pop_answer(number)
    return result


PIPELINES = [  # of 2 and 3 devices; the last is one device
    (0.67, 0.67, 0.676, 0.677, 0.782, 0.893, 1.004, 1.109),
    (0.822, 0.823, 0.83, 0.84, 1.1, 1.199, 1.342, 1.484),
    (0.216, 0.216, 0.232, 0.246, 0.243, 0.248, 0.285, 0.322),
    (0.189, 0.21, 0.297, 0.384, 0.473, 0.562, 0.65, 0.739),
]


@pytest.mark.parametrize(("first", "second", "expected"), [(0, 1, [4, 4]), (0, 0, [4, 4]), (3, 2, [2, 6])])
def test_requests_are_divided_so_that_all_stages_are_busy(first: int, second: int, expected: list[int]) -> None:
    """A pipeline answers several requests as fast as one, but no more."""
    assert divided(PIPELINES[first], PIPELINES[second]) == expected


def test_a_full_replica_counts_the_delay_of_its_last_slot() -> None:
    full = crowded(0.2, 0.3, 0.4, 0.5, n_answers=4)
    assert Dispatcher()._delay(full) == pytest.approx((0.5 / 0.4) ** 3)


def test_a_conversation_stays_where_its_prefix_is_unless_that_is_clearly_slower() -> None:
    for token_s, expected in ((0.1, 0), (0.12, 0), (0.15, 1)):
        first, second = replica(token_s, 0.0001), replica(0.1, 0.0001)
        first.blocks.add(BLOCKS)
        assert chosen(first, second) == expected


def test_a_replica_that_was_not_measured_counts_as_fast_as_the_best() -> None:
    unknown = replica(0.1, 0.01)
    unknown.process.answers.speeds = Speeds(Clock())
    assert chosen(replica(0.1, 0.01, n_answers=2), unknown, replica(0.9, 0.01)) == 1


class Balanced:
    """A dispatcher with a replica that has room, and a replica with five answers for four places, which all wait."""

    def __init__(self, token_s: float = 0.1, n_free: int = 3) -> None:
        self.dispatcher = Dispatcher()
        self.free, self.full = replica(token_s, 0.001), replica(0.1, 0.001)
        self.dispatcher.replicas += [self.free, self.full]
        self.moves: list[tuple[ProcessAnswer, Replica | None]] = []
        self.cancelled: list[int] = []
        self.dispatcher._move = self._move  # type: ignore[method-assign]
        for number in range(n_free):
            self.add(self.free, number, begun=True)
        for number in range(4):
            self.add(self.full, number, begun=True)
        self.waiting = self.add(self.full, 4, tag=4.0)

    def _move(self, answer: ProcessAnswer, replica: Replica | None = None) -> None:
        self.moves.append((answer, replica))

    def add(self, where: Replica, number: int, *, begun: bool = False, tag: float = 0.0) -> ProcessAnswer:
        answer = ProcessAnswer(Generation(prompt="x", tag=tag))
        answer.use_process(number, self.cancelled.append)
        answer.accepted, answer.begun = True, begun
        where.process.answers[number] = answer
        self.dispatcher._prompts[answer] = _Prompt(10, (), 10)
        return answer


def test_waiting_answer_goes_to_a_replica_with_a_free_place() -> None:
    case = Balanced()
    case.dispatcher._balance()
    assert case.moves == [(case.waiting, case.free)]
    assert case.waiting not in case.full.process.answers.values()
    assert (case.waiting.accepted, case.cancelled) == (False, [4])
    case.dispatcher._balance()
    assert len(case.moves) == 1


def test_oldest_waiting_answer_goes_first() -> None:
    case = Balanced()
    oldest = case.add(case.full, 5, tag=3.0)
    case.dispatcher._balance()
    assert case.moves == [(oldest, case.free)]


def _begin(case: Balanced) -> None:
    case.waiting.begun = True


def _cancel(case: Balanced) -> None:
    case.waiting.cancelled = True


def _refuse(case: Balanced) -> None:
    case.waiting.accepted = False


def _end_one(case: Balanced) -> None:
    case.full.process.answers.pop_answer(0)


def _fail(case: Balanced) -> None:
    case.free.process.failed = EngineGone("lost")


@pytest.mark.parametrize("change", [_begin, _cancel, _refuse, _end_one, _fail])
def test_answers_that_do_not_wait_stay_at_their_replica(change: Callable[[Balanced], None]) -> None:
    case = Balanced(token_s=0.01)
    change(case)
    case.dispatcher._balance()
    assert case.moves == []


@pytest.mark.parametrize("case", [Balanced(token_s=0.01, n_free=4), Balanced(token_s=9.0)], ids=["full", "slow"])
def test_answers_do_not_go_to_a_full_or_slow_replica(case: Balanced) -> None:
    case.dispatcher._balance()
    assert case.moves == []


def test_an_answer_that_ends_makes_room_for_one_that_waits() -> None:
    case = Balanced(n_free=4)
    ended = case.free.process.answers.pop_answer(0)
    assert ended is not None
    case.dispatcher.ended(ended)
    assert ended not in case.dispatcher._prompts
    assert case.moves == [(case.waiting, case.free)]


def test_tokens_and_blocks_that_exist_shorten_an_answer() -> None:
    dispatcher, answer, single = Dispatcher(), ProcessAnswer(Generation(prompt="new")), replica(0.1, 0.01)
    dispatcher.replicas.append(single)

    def seconds(chars: int) -> float:
        dispatcher._prompts[answer] = _Prompt(chars, BLOCKS, 10)
        return dispatcher._finish_s(single, answer)

    whole = seconds(8192)
    answer.tokens += [1] * 4
    assert whole - seconds(8192) == pytest.approx(0.4)
    rest = seconds(0)
    single.blocks.add(BLOCKS)
    assert rest < seconds(8192) < whole - 0.4
    assert seconds(10) == pytest.approx(rest)


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("n_lost", [0, 1, 2])
def test_answers_go_on_elsewhere_only_after_a_loss_and_before_the_end(n_lost: int, closes: bool) -> None:
    case = Balanced()
    for lost in (case.free, case.full)[:n_lost]:
        lost.process.failed = EngineGone("lost")
    case.dispatcher.is_closing = closes
    assert case.dispatcher.goes_on_elsewhere(case.free) == (n_lost == 1 and not closes)
    assert case.dispatcher.goes_on_elsewhere(case.full) is False
    assert case.dispatcher.moved(case.waiting) == (n_lost < 2 and not closes)
    assert len(case.moves) == (n_lost < 2 and not closes)


def test_a_process_without_replicas_keeps_the_plans_of_the_others() -> None:
    dispatcher, plan = Dispatcher(), {"format": "x"}
    dispatcher.loaded([plan])
    assert dispatcher.changes.is_set()
    dispatcher.changes.clear()
    dispatcher.loaded([])
    assert dispatcher.copies == [plan]
    dispatcher.replanned([])
    assert dispatcher.copies == []
    dispatcher.changes.clear()
    dispatcher.failed()
    assert dispatcher.changes.is_set()


def test_a_request_that_fails_leaves_nothing_behind() -> None:
    async def run() -> None:
        dispatcher, single = Dispatcher(), replica(0.1, 0.01)
        dispatcher.replicas.append(single)

        async def refuse(answer: Any) -> None:
            raise EngineGone("it ended")

        single.process.generate = refuse  # type: ignore[method-assign]
        with pytest.raises(EngineGone):
            await dispatcher.generate(Generation(prompt="x"))
        assert dispatcher._prompts == {}
        moved = ProcessAnswer(Generation(prompt="x"))
        dispatcher._prompts[moved] = _Prompt(10, (), 10)
        dispatcher._move(moved)
        await asyncio.gather(*dispatcher.moves)
        assert dispatcher._prompts == {}
        with pytest.raises(EngineGone, match="it ended"):
            await anext(aiter(moved))

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize(
    ("sampling", "limit", "least"),
    [
        ({}, 50, 0), ({"ignore_eos": True}, 50, 50), ({"ignore_eos": False, "min_tokens": 7}, 50, 7),
        ({"ignore_eos": True, "min_tokens": 7}, None, 7),
    ],
)  # fmt: skip
def test_lengths_that_a_request_sets_are_known(sampling: dict[str, Any], limit: int | None, least: int) -> None:
    dispatcher, prompts = Dispatcher(), list[_Prompt]()

    async def place(answer: ProcessAnswer, replica: Replica | None = None) -> None:
        prompts.append(dispatcher._prompts[answer])

    dispatcher._place = place  # type: ignore[method-assign]
    for _ in range(40):
        dispatcher._lengths.ended(5, 0, 0)  # other answers are short
    costs = list[float]()

    def tag(client: str, cost: float, weight: float = 1.0) -> float:
        costs.append(cost)
        return 0.0

    dispatcher._order.tag = tag  # type: ignore[method-assign]
    asyncio.run(dispatcher.generate(Generation(prompt="", max_tokens=limit, sampling=sampling)))
    assert [(prompt.limit, prompt.least) for prompt in prompts] == [(limit, least)]
    assert costs == [pytest.approx(max(5, least), abs=0.1)]
    answer, single = ProcessAnswer(Generation(prompt="")), replica(0.1, 0.0)
    dispatcher.replicas.append(single)
    dispatcher._prompts[answer] = prompts[0]
    assert dispatcher._finish_s(single, answer) == pytest.approx(0.1 * max(5, least), abs=0.01)
