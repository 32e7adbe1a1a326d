"""Every way a GPU is used, on one that is there.

Not collected by itself: run.sh beside it runs it with a llama.cpp that has Vulkan. Where that finds no GPU, tests fail.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge.demo import MODEL_PATH
from edge.errors import EngineError
from edge.llama import llama
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.survey.machine import gpu_backends
from partition.plan.plan import Range
from tests.support.deployments import deployed, pipeline, questions, shared_workers, tensor
from tests.support.helpers import run_edge
from tests.support.workers import Worker

STEPS = 6
ON_CPU = EngineOptions(threads=1, context=128, batch=32, gpu_layers=0)
ON_GPU = replace(ON_CPU, gpu_layers=None)


def greedy(engine: TextEngine) -> list[int]:
    """The first tokens of the answer to a question that the model was trained for. Other prompts lead to near-ties,
    which each processor decides in its way."""
    tokens = list(questions(1)[0].prompt)
    found: list[int] = []
    position = 0
    for _ in range(STEPS):
        row = engine.decode(tokens, position)
        position += len(tokens)
        tokens = [int(row.argmax())]
        found += tokens
    return found


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """What the processor answers."""
    with Engine(MODEL_PATH, ON_CPU) as engine:
        return greedy(engine)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker whose sessions use the GPU."""
    with shared_workers(tmp_path_factory, "one") as (one,):
        yield one


def test_the_probe_names_it(tmp_path: Path) -> None:
    assert llama.has_gpu()
    assert "Vulkan0 (" in str(gpu_backends())
    probed = run_edge("devices", "probe", "--folder", tmp_path)
    assert probed.returncode == 0, probed.stderr
    assert "Vulkan0" in probed.stdout


@pytest.mark.parametrize("layers", [None, 2])
def test_a_whole_model_and_some_of_its_layers(expected: list[int], layers: int | None) -> None:
    with llama.captured_log() as lines, Engine(MODEL_PATH, replace(ON_CPU, gpu_layers=layers)) as engine:
        assert greedy(engine) == expected
    assert any("offloaded" in line and "/" in line and "offloaded 0/" not in line for line in lines), lines


def test_a_state_is_saved_and_restored(expected: list[int]) -> None:
    with Engine(MODEL_PATH, ON_GPU) as engine:
        assert greedy(engine) == expected
        held = engine.kv_last(0) + 1
        block = engine.states.read(0, Range(0, held))
        wanted = engine.decode(expected[-1:], held).copy()
        engine.kv_clear()
        engine.states.write(0, block)
        assert (engine.decode(expected[-1:], held) == wanted).all()
    with Engine(MODEL_PATH, ON_CPU) as engine:  # and moved to the processor
        engine.states.write(0, block)
        assert int(engine.decode(expected[-1:], held).argmax()) == int(wanted.argmax())


@pytest.mark.parametrize("local", [None, 0], ids=["both", "worker"])
@pytest.mark.parametrize("how", [tensor(1, 1), pipeline(1, 1)], ids=str)
def test_a_rank_and_a_stage(one: Worker, expected: list[int], how: dict[str, Any], local: int | None) -> None:
    """On the GPU on both sides, or on the worker's alone."""
    with deployed(one, MODEL_PATH, how, replace(ON_GPU, gpu_layers=local)) as deployment:
        assert greedy(deployment.engine) == expected


def test_a_budget_and_layers_on_the_gpu_are_refused() -> None:
    with pytest.raises(EngineError, match="leave gpu_layers out, or the budget"):
        EngineOptions(memory=1 << 30, gpu_layers=1)


def test_a_budget_alone_computes_on_the_processor(expected: list[int]) -> None:
    with Engine(MODEL_PATH, replace(ON_GPU, memory=1 << 30)) as engine:
        assert greedy(engine) == expected
