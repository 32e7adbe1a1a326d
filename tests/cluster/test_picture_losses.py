"""Test the loss of a worker during a prompt with a picture; the next plan's first stage has too few layers for the rows
that deepstack adds to later layers.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from edge.deployment.deploy import deploy
from edge.errors import MediaError
from edge.llm.continuation import Request
from edge.llm.options import EngineOptions
from edge.llm.requests import Event
from edge.llm.scheduler import Scheduler
from edge.models.local_slices import OwnSlices
from edge.planning.arrange import work_of
from edge.planning.choice import PlanChoice
from edge.profiling.cluster import Cluster
from partition.model.file import ModelFile
from partition.plan.plan import LOCAL
from partition.search.planner import Planner
from tests.support import projectors
from tests.support.deployments import EXACT, own_folders, pipeline, plan_for, two_workers_to_end
from tests.support.multimodal import encoded, open_projector
from tests.support.planning import MS, device, linked

OPTIONS = replace(EXACT, sequences=2)


def test_a_picture_is_refused_where_the_next_plan_cannot_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner gives all layers to the worker that is left. Text beside the picture is answered."""
    own_folders(monkeypatch, tmp_path / "own")
    text, projector = projectors.write("deepstack", tmp_path, layers=4)
    native, model = open_projector(text, projector)
    tokens, media = encoded("deepstack", native)
    native.close()
    model.close()
    file, digest = ModelFile.open(text), OwnSlices().model_digest(text)
    with two_workers_to_end(tmp_path) as two, Cluster([worker.address for worker in two], needs_all=True) as cluster:
        plan = plan_for(text, two, pipeline(2, 1, 1), digest)
        names = [LOCAL, *(worker.address for worker in two)]
        speeds = [device(name, layer_s) for name, layer_s in zip(names, (100 * MS, MS, 100 * MS), strict=True)]
        work = work_of(file, EngineOptions(context=OPTIONS.context))
        planner = Planner(work, speeds, linked(names), "m", digest, tensor=False)
        choice = PlanChoice(text, plan, "chosen", planner=planner)
        with deploy(choice, cluster, OPTIONS) as deployed, Scheduler(deployed.engine) as scheduler:
            picture = scheduler.add(Request(tokens, 4, media=media, ends=False))
            other = scheduler.add(Request([5, 6, 7], 4, ends=False))
            events: list[Event] = []
            while scheduler.busy:
                events += scheduler.step()
                if events and two[1].process.poll() is None:
                    two[1].kill()
            first_layers = len(deployed.plan.stages[0].layers)
    last = {event.request: event for event in events}
    assert last[other].finish_reason == "length"
    assert first_layers == 0
    with pytest.raises(MediaError, match="first 1 layers of this model, and the first stage has 0"):
        raise last[picture].error or AssertionError(last[picture])
