"""Plans from measured figures: shares that let all ranks end at once, and the choice between tensor and pipeline."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.arrangement import pipeline_seconds, speeds, tensor_seconds, tensor_shares
from edge.survey import Speed, Survey
from partition.arrange import make_plan
from partition.plan import Sizes
from partition.tensor import Limits

MS = 1e-3
# TinyLlama-1.1B at Q4_0.
LIMITS = Limits(Sizes(22, 32, 4, 5632, 32000), 1, 32, 147456.0, 147456.0, 3456.0, 1680.0, (24_772_608.0,) * 22)


def survey(*decode_s: float, hop_s: float = 20e-6) -> Survey:
    return Survey(tuple(Speed(f"device-{i}", one, 20 * one) for i, one in enumerate(decode_s)), hop_s)


@given(st.lists(st.floats(0.5 * MS, 5 * MS), min_size=1, max_size=8))
def test_shares_and_sums_end_at_once(decode_s: list[float]) -> None:
    found = survey(*decode_s)
    shares = tensor_shares(found)
    k = 180e-6 / min(decode_s)
    ends = [(share + k) * one for share, one in zip(shares, decode_s, strict=True)]
    if min(shares) > 0.021 * max(shares):  # else a rank is left with the least it can have
        assert sum(shares) == pytest.approx(1)
        assert ends == pytest.approx([ends[0]] * len(ends))
    assert min(shares) > 0
    assert sorted(shares, reverse=True) == [share for _, share in sorted(zip(decode_s, shares, strict=True))]


def test_equal_devices_share_equally_and_slow_ones_do_less_than_their_speed() -> None:
    assert tensor_shares(survey(MS, MS)) == pytest.approx([0.5, 0.5])
    fast, slow = tensor_shares(survey(MS, 2 * MS))
    assert slow / fast < 0.5  # its sums take twice as long, too
    assert speeds(survey(MS, 2 * MS)) == pytest.approx([1000, 500])


def test_a_hop_that_takes_long_makes_stages_the_better_choice() -> None:
    def both(hop_s: float) -> tuple[float, float]:
        found = survey(1.2 * MS, 1.2 * MS, hop_s=hop_s)
        tensor, pipeline = (make_plan(LIMITS, "m", "", ["local", "b:1"], kind) for kind in ("tensor", "pipeline"))
        return tensor_seconds(tensor, LIMITS, found), pipeline_seconds(pipeline, LIMITS, found)

    tensor_s, pipeline_s = both(20e-6)
    assert 16 * MS < tensor_s < 22 * MS < 25 * MS < pipeline_s < 32 * MS
    tensor_s, pipeline_s = both(1 * MS)
    assert tensor_s - both(20e-6)[0] == pytest.approx(44 * (MS - 20e-6))
    assert pipeline_s < tensor_s
