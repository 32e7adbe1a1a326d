"""Test constraints that try to stop a server: chats continue during them, and nothing of them remains."""

from edge.models.demo import MODEL_PATH
from tests.serve.attack import MOST_THREADS, SUMS, attacked
from tests.support.hostile import doubling, hostile_constraints
from tests.support.thorough import some


def test_chats_go_on_and_nothing_is_left() -> None:
    grammars = [("grammar", doubling(30))] * 4
    constraints = [*grammars, *hostile_constraints()[:: some(16, 1)]]
    outcome = attacked(MODEL_PATH, constraints, SUMS)
    assert set(outcome.statuses) <= {"200", "400", "left"}
    assert outcome.statuses.total() == len(constraints)
    assert outcome.fewest_chats >= 1
    assert not outcome.left_over
    assert outcome.threads <= MOST_THREADS
    assert outcome.grown_bytes < 64 << 20
