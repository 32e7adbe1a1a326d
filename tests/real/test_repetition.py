"""Test that endless repetitions of a trained model end soon and are reported, and that other answers are unchanged; the
samplers are llama.cpp's.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge.llm.chat import Chat
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.generate import Response, generate
from edge.llm.sampler import SamplingParams
from edge.speculate.ngrams import NgramDrafts
from edge.speculate.speculation import Speculation
from edge.text.json_arrays import MAX_ITEMS
from edge.text.repetition import LEAST_TOKENS
from tests.conftest import OPTIONS
from tests.support import ROOT
from tests.support.drafting import one_slot
from tests.support.helpers import run_edge
from tests.support.llama_cpp_chain import BareLlama
from tests.support.repetition import first_loop
from tests.support.thorough import some, thorough

CONTEXT = 2048
GREEDY = SamplingParams(temperature=0)
LOOPS = "What is the capital of France?"  # its answer repeats seven tokens
COLOURS = {
    "type": "object",
    "properties": {"colours": {"type": "array", "items": {"type": "string"}}},
    "required": ["colours"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[Engine]:
    with Engine(smollm2, replace(OPTIONS, context=CONTEXT, outputs=16)) as engine:
        yield engine


def repeated_answer(
    engine: Engine, question: str, sampling: SamplingParams, **more: Any
) -> tuple[str, list[int], Response]:
    """The text, the tokens and the last response of a greedy answer, with drafts, which change no token."""
    chat = Chat(engine, when_full="forget", drafter=Speculation(NgramDrafts, "ngram"))
    responses = list(chat.ask(question, sampling, **more))
    text = "".join(response.text for response in responses)
    return text, [r.token_id for r in responses if r.token_id is not None], responses[-1]


@pytest.mark.parametrize("question", [LOOPS, *thorough("Write a poem about the sea.", "Tell me a story about a dog.")])
def test_an_answer_that_loops_is_ended(engine: Engine, question: str) -> None:
    _, tokens, last = repeated_answer(engine, question, GREEDY)
    assert last.finish_reason == "repetition"
    assert len(tokens) < CONTEXT // 2
    assert first_loop(tokens) == (len(tokens), last.repetition)


def test_it_goes_on_where_that_is_asked_for(engine: Engine) -> None:
    tokens, last = repeated_answer(engine, LOOPS, replace(GREEDY, allow_repetition=True), max_tokens=LEAST_TOKENS + 20)[
        1:
    ]
    assert (len(tokens), last.finish_reason, last.repetition) == (LEAST_TOKENS + 20, "length", None)


def test_dry_keeps_it_from_looping(engine: Engine) -> None:
    assert repeated_answer(engine, LOOPS, replace(GREEDY, dry_multiplier=0.8))[2].finish_reason == "stop"


@pytest.mark.parametrize(
    "question", ["Write a Python function that prints hello ten times.", *thorough("List 50 names of animals.")]
)
def test_an_answer_that_ends_by_itself_is_untouched(engine: Engine, question: str) -> None:
    text, _, last = repeated_answer(engine, question, GREEDY)
    assert last.finish_reason == "stop"
    assert repeated_answer(engine, question, replace(GREEDY, allow_repetition=True))[0] == text


def test_an_array_without_a_bound_ends_and_is_json(engine: Engine) -> None:
    # On some processors the model repeats one colour, which would end the answer before the bound of arrays does.
    sampling = replace(GREEDY, json_schema=json.dumps(COLOURS), allow_repetition=True)
    text, _, last = repeated_answer(engine, "Give names of colours.", sampling)
    assert last.finish_reason == "stop"
    assert len(json.loads(text)["colours"]) == MAX_ITEMS


@pytest.mark.thorough
def test_a_number_that_never_ends_is_ended(engine: Engine) -> None:
    """No bound of arrays helps here: its digits repeat."""
    sampling = replace(GREEDY, json_schema='{"type": "number"}')
    assert repeated_answer(engine, "How many people live in Berlin?", sampling)[2].finish_reason == "repetition"


def test_the_command_says_why_it_ended(smollm2: Path) -> None:
    done = run_edge(
        "chat", smollm2, "-p", LOOPS, "--temperature", "0", "--threads", "1", "--context", str(CONTEXT),
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"edge chat: the answer repeats the same \d+ tokens, \d+ times", done.stderr), done.stderr


def test_texts_are_no_loops(engine: Engine) -> None:
    """In the tokens of a trained vocabulary, of which each holds several characters."""
    paths = [*(ROOT / "docs").glob("*.md"), *(ROOT / "edge").rglob("*.py")]
    for path in (ROOT / "edge" / "quantization" / "calibration.txt", *paths[:: some(8, 1)]):
        text = path.read_text()[: some(40_000, 1_000_000)]
        assert first_loop(engine.model.tokenize(text, add_special=False, parse_special=False)) is None, path


# What is tried, and beside what it must make a difference.
HOT = {"temperature": 1.2, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 11}
DRY = {"temperature": 0, "dry_multiplier": 0.8}
SAMPLERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "typical_p": ({**HOT, "typical_p": 0.5}, HOT),
    "dry": (DRY, {"temperature": 0}),
    "dry_base": ({**DRY, "dry_multiplier": 0.1, "dry_base": 9.0}, {**DRY, "dry_multiplier": 0.1}),
    "dry_allowed_length": ({**DRY, "dry_allowed_length": 12}, DRY),
    "dry_penalty_last_n": ({**DRY, "dry_penalty_last_n": 6}, DRY),
    "dry_sequence_breakers": ({**DRY, "dry_sequence_breakers": (",", "\n")}, DRY),
    "xtc": ({**HOT, "xtc_probability": 0.5, "xtc_threshold": 0.1}, HOT),
    "xtc_threshold": ({**HOT, "xtc_probability": 1.0, "xtc_threshold": 0.4}, {**HOT, "xtc_probability": 1.0}),
}


@pytest.fixture(scope="module")
def bare(smollm2: Path) -> Iterator[BareLlama]:
    llama = BareLlama(smollm2, CONTEXT)
    yield llama
    llama.close()


@pytest.mark.parametrize("case", SAMPLERS)
def test_samplers_draw_what_llama_cpp_draws(engine: Engine, bare: BareLlama, case: str) -> None:
    chat = Chat(engine)
    chat.messages.append({"role": "user", "content": LOOPS})
    prompt = chat.prompt_tokens()

    def answer(options: dict[str, Any]) -> list[int]:
        responses = generate(one_slot(engine), Request(prompt, 40, SamplingParams(**options)))
        return [response.token_id for response in responses if response.token_id is not None]

    options, baseline = SAMPLERS[case]
    assert answer(options) == bare.answer(prompt, 40, options)
    assert answer(options) != answer(baseline)
