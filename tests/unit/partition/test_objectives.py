"""Test the table of objectives: options, plans, output and documentation follow it."""

import math
from typing import get_args

import pytest

from apps.commands.plan import _caps, add_arguments
from apps.options import Parser
from partition.errors import PlanError
from partition.predict.measures import _NEEDED
from partition.predict.objectives import (
    AXES,
    OBJECTIVES,
    OF_NETWORKS,
    SEARCHED,
    AxisName,
    ObjectiveName,
    check_objectives,
    default_axes,
    limited_by,
    searched,
)


def test_names_of_types_are_those_of_the_table() -> None:
    assert get_args(ObjectiveName) == SEARCHED == tuple(_NEEDED)
    assert get_args(AxisName) == AXES
    assert {*AXES} - {"divergence", "ttft"} <= {*OF_NETWORKS} < {*SEARCHED} < {*OBJECTIVES}
    assert default_axes() == ("latency", "throughput")
    assert default_axes(["q8_0"]) == ("latency", "throughput", "divergence")
    assert searched(AXES) == tuple(axis for axis in AXES if axis != "divergence")


def test_limits_become_costs() -> None:
    parser = Parser()
    add_arguments(parser)
    typed = "m.gguf --max-latency 50 --min-throughput 8 --max-ttft 2 --max-memory 1GiB --max-energy 0.5".split()
    typed += ["--max-divergence", "0.02"]
    assert _caps(parser.parse_args(typed)) == {
        "latency": 0.05, "throughput": 0.125, "ttft": 2.0, "memory": 2.0**30, "energy": 0.5,
        "divergence": 0.02,
    }  # fmt: skip
    assert limited_by("memory", {"latency": 0.05, "memory": 7.0}) == (("memory", "latency"), [7.0, 0.05])
    assert limited_by("ttft", {"energy": 1.0}) == (("ttft", "energy"), [math.inf, 1.0])


def test_figures_on_an_axis_are_small_where_they_are_good() -> None:
    assert OBJECTIVES["throughput"].on_axis(8.0) == -8.0
    assert OBJECTIVES["memory"].on_axis({"a": 1, "b": 3}) == 3.0
    assert OBJECTIVES["memory"].on_axis({}) == 0.0
    assert OBJECTIVES["energy"].on_axis(None) == math.inf
    assert OBJECTIVES["divergence"].describe(0.0213) == "0.0213 nats a token"


def test_another_name_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'speed'; known are latency, throughput, ttft, memory, energy$"):
        check_objectives(("latency", "speed"))
    with pytest.raises(PlanError, match=r"'ttft' of an ONNX model; known are latency, throughput, memory, energy$"):
        check_objectives(("ttft",), OF_NETWORKS, " of an ONNX model")
