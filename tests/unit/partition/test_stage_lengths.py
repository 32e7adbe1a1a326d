"""Test architectures whose stages must have certain lengths and first layers: no plan has others."""

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition.architectures.table import ARCHITECTURES
from partition.errors import PlanError
from partition.plan.arrange import make_plan, stages
from partition.plan.plan import Plan
from partition.plan.tensor import Limits
from partition.search.planner import Planner
from partition.slices.gguf_slice import limits, slice_recipe
from quant.gguf.file import GgufFile
from tests.support import planning
from tests.support.random_plans import Case
from tests.support.slices import synthetic

DIGEST = "0" * 64


@st.composite
def uneven(draw: st.DrawFn) -> Limits:
    """A model of up to 9 layers with rules for its stages. It may be one stage."""
    layers = draw(st.lists(st.floats(1.0, 9.0), min_size=1, max_size=9))
    n = len(layers)
    starts = (0, *(i for i in range(1, n) if draw(st.booleans())))
    never = tuple(i for i in range(1, n) if draw(st.integers(0, 3)) == 0)
    return replace(planning.model(layers)[1], starts=starts, no_stage_of=never)


def every(limits: Limits, n: int) -> list[tuple[int, ...]]:
    """The edges of all that can be cut into n stages."""
    layers = limits.sizes.layers
    inner = [i for i in limits.begins if i > 0]
    cuts = [(0, *chosen, layers) for chosen in combinations(inner, n - 1)]
    return [cut for cut in cuts if all(b - a not in limits.no_stage_of for a, b in pairwise(cut))]


@given(uneven(), st.integers(1, 4), st.data())
def test_shares_become_the_best_stages_that_there_can_be(limits: Limits, n: int, data: st.DataObject) -> None:
    shares = [data.draw(st.floats(0.1, 5.0)) for _ in range(n)]
    possible = every(limits, n)
    if not possible:
        with pytest.raises(PlanError, match=rf"{n} stages share {limits.sizes.layers} layers"):
            stages(limits, n, shares)
        return
    result = stages(limits, n, shares)
    edges = (0, *(stage.stop for stage in result))
    assert edges in possible
    parts = [share / sum(shares) for share in shares]

    def slowest(cut: tuple[int, ...]) -> float:
        current = [sum(limits.layer_bytes[a:b]) for a, b in pairwise(cut)]
        current[-1] += limits.vocab_bytes * limits.sizes.vocab
        return max(n_bytes / part for n_bytes, part in zip(current, parts, strict=True))

    assert slowest(edges) == pytest.approx(min(map(slowest, possible)))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), uneven())
def test_the_planner_finds_only_stages_that_can_be(seed: int, rules: Limits) -> None:
    rng = np.random.default_rng(seed)
    case = Case(rng, rules.sizes.layers, 3, False)
    own = replace(case.work.limits, starts=rules.starts, no_stage_of=rules.no_stage_of)
    planner = Planner(replace(case.work, limits=own), case.speeds, case.links, "made up", DIGEST)
    for placed in planner.front(("latency", "throughput"))[0]:
        for stage in placed.plan.computing:
            assert own.can_be_stage(stage.layers.start, stage.layers.stop), placed.plan


LENGTHS = [("deepseek2", 30), ("smallthinker", 28), ("exaone4", 66), ("gemma2", 48), ("qwen35", 12), ("cohere2", 12)]


@pytest.mark.parametrize(("arch", "layers"), LENGTHS)
def test_what_is_planned_can_be_cut(arch: str, layers: int, tmp_path: Path) -> None:
    """Shares of a file ask for what cannot be, first and last."""
    file = GgufFile.open(synthetic(tmp_path / "model.gguf", arch, layers=layers))
    can = limits(file)
    rules = ARCHITECTURES[arch].rules
    # Models of these sizes take attention's scale from their heads where they have so many layers, and from the size of
    # a head where they have not.
    never = {*rules.no_stage_of, *rules.layers_of_other_kind, rules.layers_of_other_scale} - {0, layers}
    assert set(can.no_stage_of) >= never
    lengths = set()
    for request in {1, layers // 2, *can.no_stage_of, *(layers - n for n in can.no_stage_of)} & set(range(1, layers)):
        plan = make_plan(can, "model", DIGEST, ("local", "pi"), "pipeline", (request, layers - request))
        assert_can_be_cut(file, plan)
        lengths |= {len(stage.layers) for stage in plan.stages}
    assert len(lengths) > 1
    assert not lengths & set(can.no_stage_of)


def assert_can_be_cut(file: GgufFile, plan: Plan) -> None:
    """Each rank's part has a recipe."""
    for rank in range(len(plan.devices)):
        assert slice_recipe(file, DIGEST, plan.slice(rank)).n_bytes > 0


@pytest.mark.parametrize(("arch", "layers"), LENGTHS[:2])
def test_a_model_of_any_length_is_a_stage_itself(arch: str, layers: int, tmp_path: Path) -> None:
    never = limits(GgufFile.open(synthetic(tmp_path / "model.gguf", arch, layers=layers))).no_stage_of
    whole = limits(GgufFile.open(synthetic(tmp_path / "other.gguf", arch, layers=never[0])))
    assert whole.can_be_stage(0, never[0])
