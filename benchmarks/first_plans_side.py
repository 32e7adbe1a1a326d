"""The owner's process of bench_first_plans.py in a lab of sleeping devices: runs plans, and uses the first one.

It runs on a device of the lab that sleeps, and so it sleeps as well. It prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from devices.sleeping import run_first
from edge.cluster.llm_ranks import Exchange
from edge.deployment.deploy import deploy
from edge.deployment.deployed import DeployedModel
from edge.llm.continuation import Request
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.llm.scheduler import Scheduler
from edge.planning.choice import PlanChoice
from edge.planning.choose import arrange
from edge.planning.measure import token_s
from edge.planning.plan_options import PlanOptions
from edge.profiling.cluster import Cluster
from edge.tasks import Steps
from partition.model.file import ModelFile
from partition.plan.plan import Plan

DEPTH = 64  # tokens before those that are timed
_PROMPT, _ANSWER, _PAUSE_S = 8, 24, 20.0  # tokens of a prompt and of an answer, and the time in which a person reads it
_NOTHING = Steps()


class _Told(Steps):
    """Shows lines with the seconds since the start on standard error."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def say(self, line: str) -> None:
        print(f"  {time.monotonic() - self._began:.0f} s: {line}", file=sys.stderr)


def main() -> None:
    run_first(children=True)  # The ranks of sleeping devices do the same.
    target = json.loads(sys.argv[1])
    file = ModelFile.open(Path(target["model"]))
    with Cluster(file=target["cluster"], insecure=True) as cluster:
        work = PlanOptions(context=target["context"], threads=1, transport="tcp", survey_seconds=0.0)
        choice = arrange(file, cluster, work)
        assert isinstance(choice.plan, Plan)
        result: dict[str, Any] = {"first": choice.plan.to_json()}
        with _deployed(choice, cluster, target["context"], _Told()) as model:
            result["first_s"] = _seconds(model)
            _use(model.engine, target["use_s"])
            result["used"], result["used_s"] = model.plan.to_json(), _seconds(model)
        best = PlanChoice(file.path, Plan.from_json(target["best"]), "", file=file)
        with _deployed(best, cluster, target["context"], _NOTHING) as model:
            result["best_s"] = _seconds(model)
    print(json.dumps(result))


def _deployed(choice: PlanChoice, cluster: Cluster, context: int, steps: Steps) -> DeployedModel:
    return deploy(choice, cluster, EngineOptions(context=context, threads=1), Exchange("tcp"), steps=steps)


def _seconds(model: DeployedModel) -> float:
    """Return the seconds of a token. The first steps are not counted, because sleeping devices then catch up."""
    token_s(model.engine, DEPTH)
    return token_s(model.engine, DEPTH).seconds


def _use(engine: TextEngine, seconds: float) -> None:
    """Ask for an answer and read it, again and again."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with Scheduler(engine) as scheduler:
            scheduler.add(Request([3] * _PROMPT, _ANSWER, ends=False))
            while scheduler.busy:
                scheduler.step()
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
