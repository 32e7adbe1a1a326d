"""Test the shares of work of a plan's devices, which are used again for the next plan after a loss."""

import pytest

from edge.planning.arrange import work_shares
from partition.plan.plan import LOCAL, NOTHING, Plan, Range, Shard, Sizes, Stage


def test_shares_are_of_layers_and_of_their_width() -> None:
    whole, half = Range(0, 8), (Range(0, 2), Range(2, 8))
    plan = Plan(
        "m",
        "",
        Sizes(10, 8, 8, 8, 4),
        (
            Stage(Range(0, 4), (Shard(LOCAL, half[0], half[0], NOTHING), Shard("pi:7070", half[1], half[1], NOTHING))),
            Stage(Range(4, 9), (Shard("nas:7070", whole, whole, NOTHING),)),
            Stage(Range(9, 10), (Shard("pi", whole, whole, Range(0, 4)),)),
        ),
    )
    assert work_shares(plan) == pytest.approx({LOCAL: 0.1, "pi:7070": 0.3 + 0.1, "nas:7070": 0.5})
