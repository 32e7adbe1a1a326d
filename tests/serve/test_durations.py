"""Test durations in requests: each is within the range of the clock, and infinity means no limit."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from edge.serve.ollama.fields import EmbedRequest

DIGITS = "9" * 400


@pytest.mark.parametrize(
    "raw", ["NaN", "Infinity", "-Infinity", "1e999", f"1{'0' * 400}", '"NaN"', '"inf"', '"1e9s"', "true"]
)
def test_no_number_is_no_duration(raw: str) -> None:
    with pytest.raises(ValidationError):
        EmbedRequest.model_validate_json(f'{{"input": "x", "keep_alive": {raw}}}')


@given(
    st.one_of(
        st.floats(allow_nan=False, allow_infinity=False), st.from_regex(r"-?(\d{1,400}(\.\d{1,9})?(ns|ms|s|m|h))+")
    )
)
def test_duration_is_a_time_from_0_on(keep_alive: float | str) -> None:
    try:
        keep_s = EmbedRequest.model_validate({"input": "x", "keep_alive": keep_alive}).keep_s
    except ValidationError:
        return
    assert keep_s is not None
    assert keep_s >= 0
    assert not math.isnan(keep_s)
