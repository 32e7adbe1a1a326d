"""Test fronts and choices over several types of one model, with divergence as an objective, against an enumeration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.planning.choose import best_of
from edge.planning.front import Front, pick
from edge.planning.plan_options import PlanOptions
from edge.planning.space import PlanSpace
from edge.profiling.profile import ClusterProfile
from partition.errors import PlanError
from partition.plan.plan import Plan
from partition.predict.objectives import OBJECTIVES, SEARCHED
from partition.predict.pareto import Point, on_front
from partition.predict.predict import predict
from partition.predict.prediction import Prediction
from partition.predict.speeds import Links
from partition.search.planner import Planner
from tests.support.planning import MS, device, work
from tests.support.random_plans import Case
from tests.support.thorough import some

DIVERGENCES = (0.0, 0.004, 0.004, 0.02, 0.3, None)
AXES = [
    ("latency", "throughput", "divergence"), ("latency", "divergence"), ("divergence", "memory", "throughput"),
    ("latency", "throughput"),
]  # fmt: skip
Vector = tuple[float, ...]


class MadeUp(PlanSpace):
    """A type of a model with these plans, none of which can run."""

    kind, cache, title = "llm", "none", "made up"

    def __init__(self, number: int, divergence: float | None, plans: Sequence[tuple[Plan, Prediction]]) -> None:
        super().__init__(Path(f"t{number}.gguf"), ClusterProfile((device(),), Links({}), ()), PlanOptions())
        self.type, self.divergence = f"t{number}", divergence
        self.every = [
            Point(
                replace(plan, model_digest=f"{number:032x}{i:032x}"),
                replace(said, divergence=divergence), "single", f"{i}", self.type, str(self.path),
            )
            for i, (plan, said) in enumerate(plans)
        ]  # fmt: skip

    def points(self, axes: Sequence[str]) -> list[Point]:
        assert {*axes} <= {*SEARCHED}  # a search knows no divergence
        on = on_front([point.objectives(axes) for point in self.every])
        return [point for point, is_on in zip(self.every, on, strict=True) if is_on]

    def best(self, objective: str, caps: Mapping[str, float]) -> tuple[Point, str]:
        assert {*caps} <= {*SEARCHED}
        within = [point for point in self.every if all(cost(point, name) <= most for name, most in caps.items())]
        if not within:
            raise PlanError("no plan is within")
        return min(within, key=lambda point: cost(point, objective)), "it is the best"

    def changes(self, objective: str, caps: Mapping[str, float]) -> Any:
        raise NotImplementedError

    measure = depends_on = fastest = cost = changes  # type: ignore[assignment]


class Searched(MadeUp):
    """A type whose plans the planner finds."""

    def __init__(
        self, number: int, divergence: float | None, case: Case, plans: Sequence[tuple[Plan, Prediction]]
    ) -> None:
        super().__init__(number, divergence, plans)
        self.case, self.number = case, number
        self.known = ClusterProfile(tuple(case.speeds), case.links, ())

    def points(self, axes: Sequence[str]) -> list[Point]:
        placed, exact = self.case.planner().front(axes)
        assert exact
        said = [(item.plan, self.case.predict(item.plan, item.microbatches)) for item in placed]
        return MadeUp(self.number, self.divergence, said).every


def cost(point: Point, name: str) -> float:
    row = OBJECTIVES[name]
    return row.cost(row.figure(getattr(point.predicted, row.key)))


def figure(divergence: float | None) -> float:
    return math.inf if divergence is None else divergence


def least(vectors: Sequence[Vector]) -> set[Vector]:
    """Those that none of the others is as good as in everything."""
    rounded = {tuple(float(f"{value:.9g}") for value in vector) for vector in vectors}
    return {a for a in rounded if not any(b != a and all(y <= x for x, y in zip(a, b, strict=True)) for b in rounded)}


@pytest.fixture(scope="module", name="one_plan")
def a_plan() -> tuple[Plan, Prediction]:
    planner = Planner(work(1), [device()], Links({}), "m", "")
    plan = planner.front(("latency",))[0][0].plan
    return plan, predict(plan, planner.work, {"local": device()}, planner.links)


def made_up(rng: np.random.Generator, one_plan: tuple[Plan, Prediction]) -> list[MadeUp]:
    """Up to five types of up to eight plans. Figures are few whole numbers, so that many are equal."""
    plan, said = one_plan

    def prediction() -> Prediction:
        latency, rate, current = (int(n) for n in rng.integers(1, 7, 3))
        stage = replace(said.stages[0], memory_bytes={"local": current})
        return replace(said, latency_s=latency * MS, throughput_per_s=float(rate), stages=(stage,))

    return [
        MadeUp(
            i, DIVERGENCES[rng.integers(len(DIVERGENCES))], [(plan, prediction()) for _ in range(rng.integers(1, 9))]
        )
        for i in range(int(rng.integers(1, 6)))
    ]


def limit(rng: np.random.Generator) -> float | None:
    return None if rng.random() < 0.5 else float(rng.choice([0.001, 0.004, 0.05, 1.0]))


def front_is_exact(spaces: Sequence[MadeUp], axes: Sequence[str], most: float | None) -> bool:
    """Hold the front against that of all plans. False where no type is within the limit, which an error says."""
    inside = [space for space in spaces if most is None or figure(space.divergence) <= most]
    every = [point.objectives(axes) for space in inside for point in space.every]
    if not every:
        with pytest.raises(PlanError):
            Front(spaces, axes, max_divergence=most)
        return False
    front = Front(spaces, axes, max_divergence=most)
    result = front.to_json()
    assert [kind["left_out"] for kind in result["types"]] == [space not in inside for space in spaces]
    points = [point for point in result["points"] if point["on_front"]]
    keys = [OBJECTIVES[axis] for axis in axes]
    results = [tuple(row.on_axis(point["predicted"][row.key]) for row in keys) for point in points]
    assert least(results) == least(every)
    assert len(results) == len(least(every))
    by_type = {space.type: space.divergence for space in inside}
    assert all(point["predicted"]["divergence"] == by_type[point["type"]] for point in points)
    is_known = "divergence" in axes and any(space.divergence is not None and space.every for space in inside)
    for which in ("latency", "knee", *(["divergence"] if is_known else [])):
        chosen = pick(result, which)
        assert chosen["on_front"]
        if which == "divergence":
            assert figure(chosen["predicted"]["divergence"]) == min(
                figure(space.divergence) for space in inside if space.every
            )
    return True


def test_the_front_of_types_is_what_trying_everything_finds(one_plan: tuple[Plan, Prediction]) -> None:
    rng, shown = np.random.default_rng(11), 0
    cases = some(600, 6000)
    for i in range(cases):
        shown += front_is_exact(made_up(rng, one_plan), AXES[i % len(AXES)], limit(rng))
    assert 0.5 < shown / cases < 0.95


def test_and_where_the_planner_searches() -> None:
    rng, shown = np.random.default_rng(12), 0
    cases = some(50, 1500)
    for i in range(cases):
        spaces: list[MadeUp] = []
        for number in range(int(rng.integers(1, 4))):
            case = Case(rng, int(rng.integers(1, 4)), int(rng.integers(1, 3)), i % 3 > 0)
            plans = []
            for plan in case.plans():
                try:
                    plans += [(plan, case.predict(plan, many)) for many in case.planner().microbatches]
                except PlanError:
                    continue  # no room for it
            spaces.append(Searched(number, DIVERGENCES[rng.integers(len(DIVERGENCES))], case, plans))
        shown += front_is_exact(spaces, AXES[i % len(AXES)], limit(rng))
    assert shown > cases / 3


def test_the_best_of_types_is_what_trying_everything_finds(one_plan: tuple[Plan, Prediction]) -> None:
    rng = np.random.default_rng(13)
    outcomes = {"a plan": 0, "no type": 0, "least within the others": 0, "nothing": 0}
    for _ in range(some(900, 6000)):
        spaces, most = made_up(rng, one_plan), limit(rng)
        objective = str(rng.choice(["latency", "throughput", "memory"]))
        caps = (
            {}
            if rng.random() < 0.3
            else {"latency": float(rng.integers(1, 5)) * MS, "memory": float(rng.integers(1, 5))}
        )
        fits = [
            (cost(point, objective), figure(space.divergence), space)
            for space in spaces
            for point in space.every
            if all(cost(point, name) <= cap for name, cap in caps.items())
        ]
        inside = [fit for fit in fits if most is None or fit[1] <= most]
        limits = caps if most is None else {**caps, "divergence": most}
        if inside:
            space, point, why = best_of(spaces, objective, limits)
            assert (cost(point, objective), figure(space.divergence)) == min(item[:2] for item in inside)
            assert why == f"{space.type}: it is the best"
            outcomes["a plan"] += 1
            continue
        with pytest.raises(PlanError) as raised:
            best_of(spaces, objective, limits)
        said, nats = str(raised.value), OBJECTIVES["divergence"]
        if not any(most is None or figure(space.divergence) <= most for space in spaces):
            nearest = min(spaces, key=lambda space: figure(space.divergence))
            assert f"lowest is {nats.describe(figure(nearest.divergence))}, of {nearest.type};" in said
            outcomes["no type"] += 1
        elif fits and len(spaces) > 1:
            _, divergence, space = min(fits, key=lambda item: item[1])
            assert said.endswith(f"within the other limits is {nats.describe(divergence)}, of {space.type}")
            outcomes["least within the others"] += 1
        else:
            assert "no plan is within" in said
            outcomes["nothing"] += 1
    assert min(outcomes.values()) > 20, outcomes


def test_an_objective_that_orders_no_plans_of_a_file_is_refused(one_plan: tuple[Plan, Prediction]) -> None:
    space = MadeUp(0, 0.1, [one_plan])
    with pytest.raises(PlanError, match="the objective 'divergence'; known are latency"):
        best_of([space], "divergence", {})
    assert best_of([space], "latency", {"divergence": 0.1})[1].predicted.divergence == 0.1
