"""Test reasoning of a trained model: it was not trained for it, so a template opens its reasoning, and a token limit
ends it.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edge.llm.chat import Chat
from edge.llm.engine import Engine
from edge.llm.sampler import SamplingParams
from tests.conftest import OPTIONS

GREEDY = SamplingParams(temperature=0)
QUESTIONS = ("What is the capital of France?", "Name three colours.", "Why is the sky blue?")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ '<think>\\n' }}{% endif %}"
    "{# as it writes one: {{ '\\n</think>\\n\\n' }} #}"
)


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[Engine]:
    with Engine(smollm2, replace(OPTIONS, context=1024)) as engine:
        yield engine


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_budget_of_64_tokens_holds_and_an_answer_follows(engine: Engine, question: str) -> None:
    responses = list(Chat(engine, template=TEMPLATE, think=64).ask(question, GREEDY, max_tokens=200))
    thought, text = ("".join(parts) for parts in zip(*((r.thought, r.text) for r in responses), strict=True))
    assert 0 < responses[-1].usage.thought_tokens <= 64
    assert thought
    assert re.search(r"\w", text)
    assert "think>" not in thought + text


def test_json_follows_a_thought(engine: Engine) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    sampling = replace(GREEDY, json_schema=json.dumps({**schema, "additionalProperties": False}))
    responses = list(Chat(engine, template=TEMPLATE, think=64).ask(QUESTIONS[0], sampling, max_tokens=200))
    assert 0 < responses[-1].usage.thought_tokens <= 64
    assert json.loads("".join(response.text for response in responses)).keys() == {"city"}
