"""Test the expected time to quantize."""

import pytest

from edge.quantization.pace import Pace
from quant.types import TYPES

Q4_0, Q8_0, IQ2_XS = TYPES["q4_0"], TYPES["q8_0"], TYPES["iq2_xs"]
MANY = 1 << 30


@pytest.mark.parametrize("factor", [0.1, 1, 7])
def test_every_type_takes_as_much_longer_as_the_measured_ones(factor: float) -> None:
    usual, pace = Pace(2), Pace(2)
    pace.add(Q4_0, MANY, factor * usual.seconds({Q4_0: MANY}))
    pace.add(Q8_0, MANY, factor * usual.seconds({Q8_0: MANY}))
    for values in ({Q8_0: 5}, {IQ2_XS: MANY, Q4_0: 3}):
        assert pace.seconds(values) == pytest.approx(factor * usual.seconds(values))
        assert pace.file_s(values) == pytest.approx(factor * usual.file_s(values))


def test_threads_share_the_values_but_not_the_tables() -> None:
    single, double = Pace(1), Pace(2)
    assert double.seconds({IQ2_XS: MANY}) == single.seconds({IQ2_XS: MANY}) / 2
    assert double.file_s({IQ2_XS: 0}) == single.file_s({IQ2_XS: 0}) > 1


def test_a_file_needs_two_processes() -> None:
    assert Pace(1, 1.5).file_s({}) == 3
    assert Pace(1, 1.5).seconds({Q4_0: MANY}) == Pace(1).file_s({Q4_0: MANY})
