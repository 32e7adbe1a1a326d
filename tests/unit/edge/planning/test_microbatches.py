"""Test that a plan contains its number of microbatches: it is saved and used with the plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge.llm.options import EngineOptions
from edge.llm.scheduler import Scheduler
from edge.models.demo import MODEL_PATH
from edge.planning.arrange import work_of
from edge.planning.choice import PlanChoice
from edge.planning.llm_space import LlmSpace
from edge.profiling.profile import ClusterProfile
from partition.errors import PlanError
from partition.model.file import ModelFile
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from partition.predict.speeds import LinkSpeed
from partition.slices.gguf_slice import limits
from tests.support.deployments import OPTIONS, deployed, pipeline, plan_for, questions
from tests.support.planning import MS, device, linked
from tests.support.workers import Worker

FAR = LinkSpeed(20 * MS, 1e9)  # so that two microbatches do not fill two stages


def space(concurrency: int) -> LlmSpace:
    file = ModelFile.open(MODEL_PATH)
    speeds = tuple(device(name, 2 * MS, by_row=True) for name in (LOCAL, "a:1"))
    known = ClusterProfile(speeds, linked([LOCAL, "a:1"], FAR), ())
    return LlmSpace(file, "", work_of(file, EngineOptions(sequences=concurrency)), known)


def test_a_plan_has_the_microbatches_that_it_was_chosen_with(tmp_path: Path) -> None:
    point, why = space(8).best("throughput", {})
    assert isinstance(point.plan, Plan)
    assert point.predicted.microbatches > len(point.plan.stages) == 2
    assert point.plan.microbatches == point.predicted.microbatches
    choice = PlanChoice(MODEL_PATH, point.plan, why)
    choice.save(tmp_path / "plan.json")
    assert PlanChoice.load(MODEL_PATH, tmp_path / "plan.json").plan == point.plan
    alone, _ = space(1).best("latency", {})
    assert isinstance(alone.plan, Plan)
    assert alone.plan.microbatches is None  # as a scheduler has it anyway
    assert "microbatches" not in alone.plan.to_json()


def test_a_plan_with_one_stage_that_computes_has_none() -> None:
    """Its engine computes one step at a time, so microbatches would run one after the other."""
    thin = make_plan(limits(ModelFile.open(MODEL_PATH)), "m", "", [LOCAL, "a:1"], **pipeline(0, 1))
    point = space(8).point(thin, 8)
    assert isinstance(point.plan, Plan)
    assert point.plan.microbatches is None


def test_microbatches_that_cannot_be_are_refused() -> None:
    values = space(8).best("throughput", {})[0].plan.to_json()
    for number, words in ((0, "microbatches is 0, expected 1 or more"), ("2", "microbatches: '2'; expected a whole")):
        with pytest.raises(PlanError, match=words):
            Plan.from_json({**values, "microbatches": number})


@pytest.mark.parametrize(("microbatches", "rows"), [(None, 2), (1, 4), (4, 1)])
def test_a_scheduler_goes_by_the_plan(
    one_worker: Worker, microbatches: int | None, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most so many of four answers are in a step."""
    plan = replace(plan_for(MODEL_PATH, [one_worker], pipeline(1, 1)), microbatches=microbatches)
    with deployed(one_worker, MODEL_PATH, pipeline(1, 1), replace(OPTIONS, sequences=4), plan=plan) as deployment:
        usual, answering = deployment.engine.submit, list[int]()

        def submit(tokens: Any, positions: Any, sequences: Any, outputs: Any, **how: Any) -> None:
            if outputs.all():  # no prompt is among them
                answering.append(len(tokens))
            usual(tokens, positions, sequences, outputs, **how)

        monkeypatch.setattr(deployment.engine, "submit", submit)
        Scheduler(deployment.engine).run(questions(4))
    assert max(answering) == rows
