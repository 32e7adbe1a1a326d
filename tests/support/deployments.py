"""Deployments on one real worker that holds all ranks except the owner's, and a single engine for comparison."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.cluster.fleet import Fleet
from edge.cluster.llm_ranks import DEFAULT_EXCHANGE, Exchange, LlmRanks
from edge.deployment.deploy import DEFAULT_RESILIENCE, Resilience, deploy
from edge.deployment.deployed import DeployedModel
from edge.llm.chat import Chat
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.models.demo import MODEL_PATH
from edge.parallel.engine import DistributedEngine
from edge.planning.choice import PlanChoice
from edge.planning.choose import arrange, work_options
from edge.profiling.cluster import Cluster
from edge.tasks import SILENT, Steps
from partition.model.file import ModelFile
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from partition.slices.gguf_slice import limits
from tests.support.helpers import until
from tests.support.thorough import some
from tests.support.workers import Worker, worker
from tools.demo_model.grammar import held_out

QUESTIONS = some(60, 200)  # held-out ones, for the bundled model

Floats = NDArray[np.float32]

# Ranks share two cores with whatever else runs.
ONE_THREAD = ("--threads", "1")
OPTIONS = EngineOptions(threads=1, context=512, batch=64)
EXACT = replace(OPTIONS, context=128, batch=32, kv_type="f32", flash_attention="off", outputs=32)


def own_folders(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let this process keep its slices, digests and credentials there."""
    for name in ("CACHE", "CONFIG", "STATE"):
        patch.setenv(f"XDG_{name}_HOME", str(folder / name.lower()))


@contextmanager
def shared_workers(factory: pytest.TempPathFactory, *names: str) -> Iterator[list[Worker]]:
    """Workers that the tests of a file share. What this process keeps is in a folder of its own."""
    folder = factory.mktemp("w")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        own_folders(patch, folder / "own")
        yield [stack.enter_context(worker(folder / name, "--name", name, *ONE_THREAD)) for name in names]


class Heard(Steps):
    """Record of messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, words: str) -> None:
        self.lines.append(words)


@contextmanager
def supervised(
    workers: Sequence[Worker],
    plan: Plan | None,
    options: EngineOptions = OPTIONS,
    resilience: Resilience = DEFAULT_RESILIENCE,
    *,
    steps: Steps = SILENT,
    path: Path = MODEL_PATH,
    measures: bool = True,
) -> Iterator[DeployedModel]:
    """A model on this device and workers, as commands and programs have it. plan: None: by measurement, or by estimates
    if `measures` is False."""
    with Cluster([item.address for item in workers], needs_all=True) as cluster:
        if plan is not None:
            choice = PlanChoice(path, plan, "as the plan says")
        else:
            file = ModelFile.open(path)
            work = work_options(file, options, "auto", "f32")
            choice = arrange(file, cluster, work if measures else replace(work, survey_seconds=0))
        with deploy(choice, cluster, options, resilience=resilience, steps=steps) as model:
            yield model


@contextmanager
def two_workers_to_end(folder: Path) -> Iterator[list[Worker]]:
    """Two workers that a test may end."""
    with ExitStack() as stack:
        yield [stack.enter_context(worker(folder / name, "--name", name, *ONE_THREAD)) for name in ("one", "two")]


def greedy_answers(
    engine: TextEngine, questions: Sequence[str], max_tokens: int, at: Mapping[int, Callable[[], None]]
) -> list[str]:
    """Greedy answers to the questions of one conversation. At a number of tokens, in all, something happens."""
    chat, seen, said = Chat(engine), 0, []
    for question in questions:
        text = ""
        for response in chat.ask(question, SamplingParams(temperature=0), max_tokens=max_tokens):
            text += response.text
            seen += 1
            at.get(seen, lambda: None)()
        said.append(text)
    return said


def tensor(*shares: float) -> dict[str, Any]:
    """One stage, its work shared so."""
    return {"parallel": "tensor", "shares": shares}


def pipeline(*shares: float) -> dict[str, Any]:
    """A stage for each rank, the layers shared so."""
    return {"parallel": "pipeline", "shares": shares}


def stages(*ranks: int) -> dict[str, Any]:
    """Stages of so many ranks."""
    return {"stages_of": ranks, "shares": (1,) * sum(ranks)}


def plan_for(path: Path, workers: Sequence[Worker], how: dict[str, Any], digest: str = "") -> Plan:
    """Rank 0 here, and the others on the workers in turn."""
    devices = [LOCAL, *(workers[i % len(workers)].address for i in range(len(how["shares"]) - 1))]
    return make_plan(limits(ModelFile.open(path)), path.stem, digest, devices, **how)


def with_gpu_layers(plan: Plan, layers: int) -> Plan:
    """The plan with so many layers on the GPU of each worker."""
    parts = [[s if s.device == LOCAL else replace(s, gpu_layers=layers) for s in stage.shards] for stage in plan.stages]
    stages = (replace(stage, shards=tuple(shards)) for stage, shards in zip(plan.stages, parts, strict=True))
    return replace(plan, stages=tuple(stages))


@contextmanager
def deployed(
    workers: Worker | Sequence[Worker],
    path: Path,
    how: dict[str, Any],
    options: EngineOptions = OPTIONS,
    exchange: Exchange = DEFAULT_EXCHANGE,
    workers_gpu_layers: int | None = None,
    plan: Plan | None = None,
) -> Iterator[LlmRanks]:
    """A model on this process and workers. At the end those that still run must have no session any more. plan: None:
    as `how` says."""
    workers = [workers] if isinstance(workers, Worker) else workers
    plan = plan or plan_for(path, workers, how)
    if workers_gpu_layers is not None:
        plan = with_gpu_layers(plan, workers_gpu_layers)
    with Fleet([item.address for item in workers]) as fleet:
        with LlmRanks(fleet, plan, ModelFile.open(path), options, exchange) as deployment:
            yield deployment
        idle(workers, fleet)


def survey_is_over(workers: Sequence[Worker]) -> None:
    """Wait until workers have no engine processes, and this process no threads of a survey."""
    until(lambda: not any(item.children() for item in workers), "the end of the sessions")
    until(lambda: not any(t.name.startswith("survey") for t in threading.enumerate()), "the end of threads")


def idle(workers: Sequence[Worker], fleet: Fleet) -> None:
    """Wait until workers have no sessions and no engine processes, and this process nobody who waits for them."""
    for item in workers:
        if item.process.poll() is None:
            remote = fleet.workers[item.address]
            until(lambda: not remote.describe()[1].sessions, "the end of the sessions")  # noqa: B023
            until(lambda: not item.children(), "the end of the engine processes")  # noqa: B023
    until(lambda: not waiting(), f"the end of {waiting()}")


def waiting() -> list[str]:
    """Threads of deployments."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("deploy", "events of"))]


class Grouped(Engine):
    """One device that takes requests in the groups and chunks that so many stages would make of them."""

    def __init__(self, path: Path, options: EngineOptions, stages: int) -> None:
        super().__init__(path, options)
        self.stages = stages

    def chunk(self, n: int) -> int:
        return DistributedEngine.chunk(self, n)  # type: ignore[arg-type]


@cache
def questions(n: int) -> tuple[Request, ...]:
    """The `n` shortest of twice as many held-out questions for the bundled model, to be answered greedily."""
    with Engine(MODEL_PATH, OPTIONS) as engine:
        chat = Chat(engine)
        prompts = []
        for messages, _ in held_out(2 * n, seed=41):
            chat.messages = [dict(message) for message in messages]
            prompts.append(chat.prompt_tokens())
    return tuple(Request(prompt, 24) for prompt in sorted(prompts, key=len)[:n])


def deviations(result: Floats, expected: Floats) -> float:
    """The largest difference in standard deviations of what was expected."""
    return float(np.abs(result - expected).max() / expected.std())


@dataclass(frozen=True)
class Difference:
    """Where two answers part, and how far apart the single engine has the two tokens, in deviations of its logits."""

    prompt: int
    at: int
    gap: float


def differences(
    single: TextEngine, requests: Sequence[Request], expected: Sequence[list[int]], results: Sequence[list[int]]
) -> list[Difference]:
    """The first token of each answer that is another one."""
    parted = []
    for i, (request, ours, theirs) in enumerate(zip(requests, expected, results, strict=True)):
        if ours == theirs:
            continue
        at = next(
            (k for k, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        single.kv_clear()
        logits = single.decode([*request.prompt, *ours[:at]], 0)
        ends = [token for token in range(len(logits)) if single.model.is_end(token)]
        first, other = (
            answer[at] if at < len(answer) else max(ends, key=logits.__getitem__) for answer in (ours, theirs)
        )
        parted.append(Difference(i, at, float(abs(logits[first] - logits[other]) / logits.std())))
    return parted


def noise(single: TextEngine, other: TextEngine, prompts: Sequence[Sequence[int]], steps: int = 8) -> float:
    """Return how far the logits of two engines are apart, in deviations: the most over prompts and a few greedy
    steps."""
    most = 0.0
    for prompt in prompts:
        tokens, position = list(prompt), 0
        single.kv_clear()
        other.kv_clear()
        for _ in range(steps):
            expected = single.decode(tokens, position)
            most = max(most, deviations(other.decode(tokens, position), expected))
            position += len(tokens)
            tokens = [int(expected.argmax())]
    return most
