"""What a rank makes of the limits it runs under."""

import pytest

from edge.net import rendezvous
from transport.tcp_link import POLL_S


@pytest.mark.parametrize(
    ("quota", "threads", "polls"),
    [(None, 4, True), (4.0, 4, True), (1.0, 1, True), (0.5, 1, False), (1.5, 2, False)],
)
def test_a_rank_polls_unless_its_quota_is_for_computing(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, threads: int, polls: bool
) -> None:
    monkeypatch.setattr(rendezvous, "cpu_quota", lambda: quota)
    assert rendezvous.polling_s(threads) == (POLL_S if polls else 0.0)
