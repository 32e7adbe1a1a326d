"""The groups that requests form are part of a plan: it is saved with them, and runs with them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge.api.config import EngineConfig
from edge.cluster.preflight import groups_of
from edge.demo import MODEL_PATH
from edge.llm.options import MAX_GROUPS, EngineOptions
from edge.llm.scheduler import Scheduler
from edge.planning.arrange import work_of
from edge.planning.choice import PlanChoice
from edge.planning.llm_space import LlmSpace
from edge.planning.plan_options import PlanOptions
from edge.survey.profile import ClusterProfile
from edge.tasks import SILENT, Steps
from partition.errors import PlanError
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from partition.predict.speeds import Links, LinkSpeed
from partition.search import turns
from partition.simulate.arrivals import closed
from partition.simulate.simulate import simulate
from partition.simulate.times import parts
from partition.slices.gguf_slice import limits
from quant.gguf.file import GgufFile
from tests.support.deployments import OPTIONS, deployed, pipeline, plan_for, questions
from tests.support.planning import MS, device, linked
from tests.support.workers import Worker

FAR = LinkSpeed(20 * MS, 1e9)  # so that two groups do not fill two stages


def space(concurrency: int) -> LlmSpace:
    file = GgufFile.open(MODEL_PATH)
    speeds = tuple(device(name, 2 * MS, by_row=True) for name in (LOCAL, "a:1"))
    known = ClusterProfile(speeds, linked([LOCAL, "a:1"], FAR), ())
    return LlmSpace(MODEL_PATH, file, "", work_of(file, concurrency=concurrency), known)


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
    """Its engine has one step at a time, so groups would run one behind the other."""
    thin = make_plan(limits(GgufFile.open(MODEL_PATH)), "m", "", [LOCAL, "a:1"], **pipeline(0, 1))
    point = space(8).point(thin, 8)
    assert isinstance(point.plan, Plan)
    assert point.plan.microbatches is None


def test_microbatches_that_cannot_be_are_refused() -> None:
    values = space(8).best("throughput", {})[0].plan.to_json()
    for number, words in ((0, "microbatches is 0, needed is 1 or more"), ("2", "microbatches: '2'; needed is a whole")):
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


def shared_space(concurrency: int, delay_s: float = 0.5 * MS, room: int = 1 << 40, *, turns: bool = True) -> LlmSpace:
    """Four devices, the nearer the more worth to share every layer."""
    file, names = GgufFile.open(MODEL_PATH), [LOCAL, "a:1", "b:1", "c:1"]
    speeds = tuple(
        replace(device(name, 4 * MS, by_row=True), runtime_bytes=1 << 20, memory_bytes=room) for name in names
    )
    known = ClusterProfile(speeds, linked(names, LinkSpeed(delay_s, 1e9)), ())
    options = PlanOptions(groups=None if turns else 1)
    return LlmSpace(MODEL_PATH, file, "", work_of(file, concurrency=concurrency), known, options)


def replace_links(space: LlmSpace, links: Links) -> LlmSpace:
    """Return the plans of the same devices over other links."""
    return LlmSpace(space.path, space.file, "", space.work, replace(space.known, links=links))


def test_two_groups_by_turns_are_chosen_where_they_are_clearly_faster(tmp_path: Path) -> None:
    point, why = shared_space(4).best("latency", {})
    assert isinstance(point.plan, Plan)
    one_group = shared_space(4).point(replace(point.plan, microbatches=None))
    assert (point.parallel, point.plan.microbatches, point.plan.turns) == ("tensor", 2, 2)
    assert point.predicted.throughput_per_s > 1.1 * one_group.predicted.throughput_per_s
    assert point.predicted.latency_s == one_group.predicted.latency_s
    assert "two groups of requests by turns: 125 tokens/s, 98.5 tokens/s without" in why
    PlanChoice(MODEL_PATH, point.plan, why).save(tmp_path / "plan.json")
    saved = PlanChoice.load(MODEL_PATH, tmp_path / "plan.json").plan
    assert [groups_of(saved, replace(OPTIONS, sequences=n)) for n in (1, 4)] == [1, 2]
    assert groups_of(saved, replace(OPTIONS, sequences=4, groups=1)) == 1  # as a person says
    assert groups_of(replace(saved, microbatches=8), replace(OPTIONS, sequences=8)) == MAX_GROUPS
    assert replace(saved, microbatches=8).turns == MAX_GROUPS  # and so it is predicted


@pytest.mark.parametrize("link", [LinkSpeed(0.5 * MS, 1e9), LinkSpeed(20 * MS, 1e9), LinkSpeed(2 * MS, 2e6)])
def test_two_groups_are_simulated_as_they_are_predicted(link: LinkSpeed) -> None:
    """Where computing is the longest, where sums travel far, and where their bytes fill the link."""
    space = shared_space(8)
    names = [speed.device for speed in space.known.speeds]
    space = replace_links(space, linked(names, link))
    plan = make_plan(space.work.limits, "m", "", names, "tensor")
    for groups in (1, 2):
        predicted = space.point(replace(plan, microbatches=groups)).predicted
        assert predicted.microbatches == groups
        simulated = simulate(predicted, closed(8, 64, 1, 200))
        assert simulated.throughput_per_s == pytest.approx(predicted.throughput_per_s, rel=0.03)
        assert simulated.capacity_per_s == pytest.approx(predicted.throughput_per_s / 200, rel=0.03)
    cases: list[dict[str, Any]] = [{"turn_s": 0.0}, {"devices": (LOCAL,)}]  # of an older version; edited
    for missing in cases:
        with pytest.raises(PlanError, match="turn_s, or a second device, is missing; plan again"):
            parts(replace(predicted, stages=(replace(predicted.stages[0], **missing),)))


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_one_group_stays_where_two_have_nothing_to_give(objective: str) -> None:
    tight = shared_space(4).best("latency", {})[0].predicted.memory_bytes
    for space in (
        shared_space(1),
        shared_space(4, turns=False),  # as a person says, and beside drafts
        shared_space(8, 0.1 * MS),  # sums are soon there
        shared_space(4, room=max(tight.values())),  # no room for the buffers of a second context
    ):
        point, why = space.best(objective, {})
        assert isinstance(point.plan, Plan)
        assert point.plan.turns == 1
        assert "by turns" not in why


def test_recurrent_layers_keep_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups keep none of their states, so every turn would be computed from its beginning."""
    monkeypatch.setattr(turns, "RECURRENT_ARCHITECTURES", {"llama"})
    point, _ = shared_space(4).best("latency", {})
    assert (point.parallel, point.plan.turns) == ("tensor", 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("draft", "own", "groups"), [("off", None, None), ("ngram", None, 1), ("ngram", 2, 2)])
def test_drafts_keep_one_group(
    draft: str, own: int | None, groups: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of two groups have no drafts together; a person may choose them all the same."""
    seen = []

    @contextmanager
    def deployed(self: EngineConfig, options: EngineOptions, steps: Steps) -> Iterator[Any]:
        seen.append(options.groups)
        yield SimpleNamespace(engine=None)

    monkeypatch.setattr(EngineConfig, "deployed", deployed)
    config = EngineConfig(str(MODEL_PATH), {"groups": own, "sequences": 4}, workers=("there:1",), draft=draft)
    with config.loaded(SILENT):
        assert seen == [groups]


def test_a_front_has_plans_with_two_groups_and_with_one() -> None:
    shared = [point for point in shared_space(4).points(("latency", "throughput")) if point.parallel == "tensor"]
    assert {point.plan.turns for point in shared if isinstance(point.plan, Plan)} == {1, 2}
