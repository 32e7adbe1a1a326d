"""Two groups of requests on a trained model: the answers of one group, to the token, and as F32 gives them alone."""

from dataclasses import replace
from pathlib import Path

import edge
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from tests.real.weights import SMOLLM2
from tests.support.deployments import tensor
from tests.support.ranks_here import ranks_here

OPTIONS = EngineOptions(threads=1, context=256, batch=64, flash_attention="off")
PROMPTS = ("The capital of France is", "Once upon a time there was a king who", "def fibonacci(n):", "2, 4, 6, 8,")


def answers(engine: TextEngine, at_once: int) -> list[list[int]]:
    """Return the answers of so many requests at once."""
    prompts = [engine.model.tokenize(text, add_special=True, parse_special=False) for text in PROMPTS]
    requests = [Request(prompt, 12, SamplingParams(temperature=0), ends=False) for prompt in prompts]
    results: list[list[int]] = []
    for first in range(0, len(requests), at_once):
        results += Scheduler(engine).run(requests[first : first + at_once])
    return results


def test_requests_in_two_groups_are_answered_as_alone(tmp_path: Path) -> None:
    """In Q4_1: a step of each group has the rows that it has alone, so not a bit differs. Keys are 16 bits."""
    with ranks_here(SMOLLM2.path(), tensor(1, 1), OPTIONS, tmp_path) as engine:
        alone = answers(engine, 1)
    two = replace(OPTIONS, sequences=2, groups=2)
    with ranks_here(SMOLLM2.path(), tensor(1, 1), two, tmp_path) as engine:
        assert engine.contexts == 2
        assert answers(engine, 2) == alone


def test_in_f32_they_are_those_of_one_device(tmp_path: Path) -> None:
    model = tmp_path / "f32.gguf"
    edge.quantize(SMOLLM2.path(), model, type="f32")
    exact = replace(OPTIONS, kv_type="f32")
    with Engine(model, exact) as single:
        alone = answers(single, 1)
    with ranks_here(model, tensor(2, 1), replace(exact, sequences=4, groups=2), tmp_path) as engine:
        assert answers(engine, 4) == alone
