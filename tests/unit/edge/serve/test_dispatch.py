"""Tests of the choice of a replica, with measured speeds and without running processes."""

import pytest

from edge.api.config import EngineConfig
from edge.serve.answer import ProcessAnswer
from edge.serve.dispatch import Dispatcher, Replica, _Prompt
from edge.serve.process import EngineProcess
from edge.serve.served import Generation
from edge.serve.speeds import Speeds

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


def test_a_conversation_stays_where_its_prefix_is_unless_that_is_clearly_slower() -> None:
    for token_s, expected in ((0.1, 0), (0.12, 0), (0.15, 1)):
        first, second = replica(token_s, 0.0001), replica(0.1, 0.0001)
        first.blocks.add(BLOCKS)
        assert chosen(first, second) == expected


def test_a_replica_that_was_not_measured_counts_as_fast_as_the_best() -> None:
    unknown = replica(0.1, 0.01)
    unknown.process.answers.speeds = Speeds(Clock())
    assert chosen(replica(0.1, 0.01, n_answers=2), unknown, replica(0.9, 0.01)) == 1
