"""Constraints that are made to stop a server, with a vocabulary of 49,152 tokens."""

from pathlib import Path

from tests.serve.attack import FACTS, MOST_THREADS, attacked
from tests.support.hostile import doubling, hostile_constraints
from tests.support.thorough import some


def test_chats_go_on_beside_hostile_constraints(smollm2: Path) -> None:
    constraints = [*[("grammar", doubling(30))] * 4, *hostile_constraints()[:: some(16, 1)]]
    outcome = attacked(smollm2, constraints, FACTS)
    assert set(outcome.statuses) <= {"200", "400", "left"}
    assert outcome.fewest_chats >= 1
    assert not outcome.left_over
    assert outcome.threads <= MOST_THREADS
    assert outcome.grown_bytes < 64 << 20
