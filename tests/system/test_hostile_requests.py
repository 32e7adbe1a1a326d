"""Hostile schemas, bodies and names neither stop a server nor stay in its memory.

`python -m tests.system.hostile_requests` sends 300 of them.
"""

from pathlib import Path

from tests.support.thorough import some
from tests.system.hostile_requests import attacked


def test_health_and_chats_are_answered_beside_hostile_requests_and_memory_comes_back(tmp_path: Path) -> None:
    n = some(20, 300)
    outcome = attacked(n, 1, tmp_path)
    assert outcome.failures == []
    assert outcome.statuses.total() == n
    assert outcome.statuses["400"] > 0
    assert outcome.health_failures == []
    assert outcome.health_answers > 0
    assert outcome.wrong_chats == []
    assert outcome.fewest_chats >= 1
    assert outcome.grown_bytes < 64 << 20
