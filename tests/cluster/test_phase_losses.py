"""Devices are lost at any frame while a prompt is handed over from one placement to another: no answer is lost.

The cluster is of threads over sockets (`tests.support.faulty_ranks`), with real ranks and the real code that notices a
loss. What happens to whom at which frame is random; EDGE_THOROUGH=1 tries 200 seeds.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.llm.scheduler import Scheduler
from edge.parallel.prefiller import PrefillPlacement
from partition.plan.plan import LOCAL
from tests.cluster.test_survival_schedules import LONGEST, MOST_STEPS
from tests.support.cases import Cases, clear_case, random_tokens
from tests.support.deployments import pipeline, stages, tensor
from tests.support.faulty_ranks import FAULTS, OF_LINKS, Cluster, Fault, cluster
from tests.support.slices import synthetic
from tests.support.thorough import some

OPTIONS = EngineOptions(threads=1, context=160, batch=8, sequences=2, kv_type="f32", flash_attention="off")
ALONE = pipeline(1)
# The placement that generates, and that of prompts. Three workers: the last of them are in the second.
PAIRS = [
    (ALONE, pipeline(1, 1)),
    (ALONE, pipeline(1, 1, 1)),
    (ALONE, tensor(1, 1)),
    (pipeline(1, 1), ALONE),
    (tensor(1, 1), pipeline(1, 1)),
    (pipeline(1, 1), stages(1, 2)),
    (pipeline(1, 1, 1), pipeline(1, 1, 1)),  # a worker that is in both
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic(tmp_path_factory.mktemp("model") / "llama.gguf", "llama", layers=4)


@pytest.fixture(scope="module")
def cases(model: Path) -> Cases:
    rng = random.Random(5)
    with Engine(model, OPTIONS) as whole:
        return [clear_case(whole, lambda: random_tokens(rng, rng.choice((25, 40, 60))), LONGEST) for _ in range(4)]


def answer(engine: Any, request: Cases, n: int) -> list[list[int]]:
    """The answers to the first `n` prompts, asked at once; none may be lost."""
    with Scheduler(engine, keep=True) as scheduler:
        message: dict[int, list[int]] = {
            scheduler.add(Request(first, LONGEST, ends=False)): [] for first, _ in request[:n]
        }
        ends = []
        for _ in range(MOST_STEPS):
            for event in scheduler.step() if scheduler.busy else ():
                message[event.request] += [event.token_id] if event.token_id is not None else []
                ends += [event.finish_reason] if event.finish_reason is not None else []
        assert ends == ["length"] * n
        return list(message.values())


def with_fault(here: Cluster, rng: random.Random) -> None:
    """Let something happen to one of the devices, at a frame of the hand-over or soon after it."""
    who = rng.choice([LOCAL, *here.others])
    kind = rng.choice(OF_LINKS if who == LOCAL else FAULTS)
    here.fault(who, Fault(rng.randrange(45), kind, rng.randrange(128)))


@pytest.mark.parametrize("seed", range(some(len(PAIRS), 200)))
def test_no_answer_is_lost_whoever_is(seed: int, model: Path, cases: Cases, tmp_path: Path) -> None:
    rng = random.Random(seed)
    decode, prefill = PAIRS[seed % len(PAIRS)]
    rng.shuffle(cases := list(cases))
    with cluster(model, tmp_path, 3) as here, here.running(decode, OPTIONS, prefill) as engine:
        with_fault(here, rng)
        for _ in range(2):  # again, with what is left
            n = rng.randint(1, 2)
            assert answer(engine, cases, n) == [tokens for _, tokens in cases[:n]], here.said


def test_a_lost_placement_of_prompts_is_said_and_left(
    model: Path, cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []
    begin = PrefillPlacement.begin

    def noted(placement: PrefillPlacement, *arguments: Any, **how: Any) -> Any:
        prompt = begin(placement, *arguments, **how)
        begun.append(prompt is not None)
        return prompt

    monkeypatch.setattr(PrefillPlacement, "begin", noted)
    with cluster(model, tmp_path, 1) as here, here.running(ALONE, OPTIONS, pipeline(1, 1)) as engine:
        here.fault(here.others[0], Fault(1, "kill"))
        for _ in range(2):
            assert answer(engine, cases, 1) == [cases[0][1]]
        [line] = here.said
        assert line.startswith("worker 1 was lost (")
        assert line.endswith("): prompts are computed by this device from now on")
        assert begun == [True, False]
        assert engine.replacements.recoveries == 0


def test_a_lost_device_that_generates_is_replaced(model: Path, cases: Cases, tmp_path: Path) -> None:
    """By one that was in the placement of prompts alone: the plan is made again without phases."""
    with cluster(model, tmp_path, 2) as here, here.running(pipeline(1, 1), OPTIONS, pipeline(1, 1)) as engine:
        here.fault(here.others[0], Fault(4, "kill"))
        assert answer(engine, cases, 1) == [cases[0][1]]
        assert engine.replacements.recoveries == 1
        assert "going on with this device and worker 2" in here.said[0]
