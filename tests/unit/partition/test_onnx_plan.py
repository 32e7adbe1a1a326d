"""Test plans for ONNX models: every node has one place; JSON round trips; invalid plans are refused."""

import copy
import json
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partition.errors import PlanError
from partition.plan.onnx_plan import MOST_STAGES, OnnxPlan, OnnxStage
from partition.plan.plan import LOCAL, Range

DIGEST = "ab" * 32
FULL = {
    "format": "edge-onnx-plan-1",
    "model": "resnet.onnx",
    "model_digest": DIGEST,
    "n_nodes": 9,
    "stages": [
        {"device": LOCAL, "nodes": [0, 4], "until": "layer1.0", "threads": 2, "affinity": [0, 3], "provider": "cpu"},
        {"device": "pi:7070", "nodes": [4, 9]},
    ],
}


def edited(value: Any, *path: Any) -> dict[str, Any]:
    """FULL with another value at a place."""
    values = copy.deepcopy(FULL)
    inner: Any = values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return values


def without(*path: Any) -> dict[str, Any]:
    """FULL without what is at a place."""
    values = copy.deepcopy(FULL)
    inner: Any = values
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return values


texts = st.text(st.characters(categories=["L", "N", "P", "S"]), max_size=40)


@st.composite
def plans(draw: st.DrawFn) -> OnnxPlan:
    """Any plan that is one."""
    bounds = [0, *sorted(draw(st.sets(st.integers(1, 5000), min_size=1, max_size=8)))]
    stages = [
        OnnxStage(
            LOCAL if not i and draw(st.booleans()) else draw(st.sampled_from(["pi", "[::1]:80", "Ålesund:1"])),
            Range(start, stop),
            draw(texts),
            draw(st.none() | st.integers(1, 64)),
            tuple(draw(st.lists(st.integers(0, 9), unique=True, max_size=3))),
            draw(st.none() | texts),
        )
        for i, (start, stop) in enumerate(pairwise(bounds))
    ]
    return OnnxPlan(draw(texts), draw(st.sampled_from(["", DIGEST])), bounds[-1], tuple(stages))


@given(plans())
def test_json_and_back(plan: OnnxPlan) -> None:
    assert OnnxPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@given(plans())
def test_each_node_has_one_place(plan: OnnxPlan) -> None:
    nodes = [node for stage in plan.stages for node in range(stage.nodes.start, stage.nodes.stop)]
    assert nodes == list(range(plan.n_nodes))
    assert len(plan.cuts) == len(plan.stages) - 1
    assert [stage.device for stage in plan.stages] == list(plan.devices)
    assert len(plan.remote) + (plan.own is not None) == len(plan.stages)
    assert (plan.own is not None) == (plan.devices[0] == LOCAL)


def test_what_people_read() -> None:
    plan = OnnxPlan.from_json(FULL)
    assert plan.to_json() == FULL
    assert plan.cuts == (4,)
    assert plan.own is plan.stages[0]
    assert plan.remote == plan.stages[1:]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "plan: None; expected an object with format, model"),
        ([], "plan: a list; expected an object"),
        ({}, "plan: format is None, known is 'edge-onnx-plan-1'"),
        (edited("edge-plan-1", "format"), "plan: format is 'edge-plan-1', known is 'edge-onnx-plan-1'"),
        (edited(1, "format"), "plan: format is 1"),
        *((without(name), f"plan: {name} is missing") for name in ("model", "model_digest", "n_nodes", "stages")),
        (edited(1, "more"), "plan: unknown field 'more'"),
        (edited(1, "model"), "model: 1; expected printable text"),
        (edited("x" * 256, "model"), "model: 'xxx"),
        (edited("a\nb", "model"), "model: 'a\\nb'; expected printable text"),
        (edited(DIGEST.upper(), "model_digest"), "model_digest is 'ABAB"),
        (edited(None, "model_digest"), "model_digest: None; expected printable text"),
        (edited("9", "n_nodes"), "n_nodes: '9'; expected a whole number"),
        (edited(True, "n_nodes"), "n_nodes: True; expected a whole number"),
        (edited(-1, "n_nodes"), "n_nodes: -1; expected a whole number"),
        (edited(10**30, "n_nodes"), "n_nodes: a number of more than 20 digits"),
        (edited(8, "n_nodes"), "nodes of the stages: the parts end at 9, expected 8"),
        (edited(10, "n_nodes"), "nodes of the stages: the parts end at 9, expected 10"),
        (edited({}, "stages"), "stages: a dict; expected a list"),
        (edited([], "stages"), "nodes of the stages: the parts end at 0, expected 9"),
        (edited("x", "stages", 1), "stages[1]: 'x'; expected an object with device, nodes"),
        (without("stages", 1, "device"), "stages[1]: device is missing"),
        (without("stages", 0, "nodes"), "stages[0]: nodes is missing"),
        (edited(0, "stages", 1, "layers"), "stages[1]: unknown field 'layers'"),
        (edited(7, "stages", 1, "device"), "stages[1].device: 7; expected printable text"),
        (edited("", "stages", 1, "device"), "the device ''; expected an address or a name"),
        (edited(LOCAL, "stages", 1, "device"), "stage 1 is on 'local'; only the first one can be"),
        (edited([4], "stages", 1, "nodes"), "stages[1].nodes: 1 numbers; expected two"),
        (edited([9, 4], "stages", 1, "nodes"), "stages[1].nodes: [9, 4]; expected start <= stop"),
        (edited([4, 9.0], "stages", 1, "nodes"), "stages[1].nodes: 9.0; expected a whole number"),
        (edited([5, 9], "stages", 1, "nodes"), "part 1 is [5, 9], expected one that starts at 4"),
        (edited([3, 9], "stages", 1, "nodes"), "part 1 is [3, 9], expected one that starts at 4"),
        (edited([0, 0], "stages", 0, "nodes"), "part 0 is [0, 0], which is empty"),
        (edited(1, "stages", 1, "until"), "stages[1].until: 1; expected printable text"),
        (edited("x\0", "stages", 1, "until"), "stages[1].until: 'x\\x00'; expected printable text"),
        (edited("2", "stages", 1, "threads"), "stages[1].threads: '2'; expected a whole number"),
        (edited(0, "stages", 1, "threads"), "pi:7070: threads is 0, expected 1 or more"),
        (edited(3, "stages", 1, "affinity"), "stages[1].affinity: 3; expected a list"),
        (edited([0, "1"], "stages", 1, "affinity"), "stages[1].affinity[1]: '1'; expected a whole number"),
        (edited([1, 1], "stages", 1, "affinity"), "pi:7070: affinity is [1, 1]"),
        (edited(5, "stages", 1, "provider"), "stages[1].provider: 5; expected printable text"),
    ],
)
def test_json_that_is_no_plan(values: Any, message: str) -> None:
    with pytest.raises(PlanError) as raised:
        OnnxPlan.from_json(values)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
PLACES = [(key,) for key in FULL] + [("stages", 0)] + [("stages", 0, key) for key in FULL["stages"][0]]  # type: ignore[index, misc]


@given(st.sampled_from(PLACES), json_values)
def test_any_value_anywhere_is_taken_or_refused(path: tuple[Any, ...], value: Any) -> None:
    with suppress(PlanError):
        plan = OnnxPlan.from_json(edited(value, *path))
        assert OnnxPlan.from_json(plan.to_json()) == plan


def test_as_many_stages_as_a_group_has_workers() -> None:
    def plan(n: int) -> OnnxPlan:
        return OnnxPlan("m", "", n, tuple(OnnxStage("b", Range(i, i + 1)) for i in range(n)))

    assert len(plan(MOST_STAGES).remote) == MOST_STAGES
    with pytest.raises(PlanError, match="64 stages; the maximum is 63"):
        plan(MOST_STAGES + 1)
