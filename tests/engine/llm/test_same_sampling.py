"""Each sampler draws what llama.cpp's own chain draws, and does something."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edge.errors import SamplingError
from edge.llm.continuation import Continuation, Request
from edge.llm.engine import Engine
from edge.llm.generate import generate
from edge.llm.sampler import MAX_DRY_BREAKERS, MAX_DRY_LAST_N, PENALTY_LAST_N, SamplingParams, TokenSampler
from edge.models.demo import MODEL_PATH
from tests.conftest import OPTIONS
from tests.support.drafting import one_slot
from tests.support.llama_cpp_chain import BareLlama

CONTEXT = 512
TEXT = "Tell me of a city. Tell me of a river. Tell me of"
HOT = {"temperature": 1.3, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5}
DRY = {"dry_multiplier": 3.0, "dry_allowed_length": 1}
# What is tried, and beside what it must make a difference.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "typical_p": ({**HOT, "typical_p": 0.4}, HOT),
    "typical_p, greedy": ({"temperature": 0, "typical_p": 0.05}, {"temperature": 0}),
    "dry_multiplier": ({"temperature": 0, **DRY}, {"temperature": 0}),
    "dry_base": ({"temperature": 0, "dry_multiplier": 0.3, "dry_base": 9.0}, {"temperature": 0, "dry_multiplier": 0.3}),
    "dry_allowed_length": ({"temperature": 0, **DRY, "dry_allowed_length": 9}, {"temperature": 0, **DRY}),
    "dry_penalty_last_n": ({"temperature": 0, **DRY, "dry_penalty_last_n": 8}, {"temperature": 0, **DRY}),
    "dry_sequence_breakers": ({"temperature": 0, **DRY, "dry_sequence_breakers": (" of",)}, {"temperature": 0, **DRY}),
    "dry, drawn": ({**HOT, **DRY, "dry_sequence_breakers": ()}, HOT),
    "xtc_probability": ({**HOT, "xtc_probability": 0.5, "xtc_threshold": 0.02}, HOT),
    "xtc_threshold": ({**HOT, "xtc_probability": 1.0, "xtc_threshold": 0.3}, {**HOT, "xtc_probability": 1.0}),
    "xtc, greedy": ({"temperature": 0, "xtc_probability": 1.0, "xtc_threshold": 0.05}, {"temperature": 0}),
    "all": (
        {**DRY, "temperature": 1.1, "top_k": 20, "typical_p": 0.9, "top_p": 0.9, "min_p": 0.02, "seed": 3}
        | {"repeat_penalty": 1.1, "xtc_probability": 0.5, "xtc_threshold": 0.1},
        {"temperature": 1.1, "seed": 3},
    ),
}


@pytest.fixture(scope="module")
def bare() -> Iterator[BareLlama]:
    llama = BareLlama(MODEL_PATH, CONTEXT)
    yield llama
    llama.close()


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    with Engine(MODEL_PATH, replace(OPTIONS, context=CONTEXT)) as engine:
        yield engine


def answer(engine: Engine, options: dict[str, Any], n_tokens: int = 48) -> list[int]:
    prompt = engine.model.tokenize(TEXT, add_special=True, parse_special=False)
    responses = generate(one_slot(engine), Request(prompt, n_tokens, SamplingParams(**options)))
    return [response.token_id for response in responses if response.token_id is not None]


@pytest.mark.parametrize("case", CASES)
def test_it_is_that_of_llama_cpp_and_does_something(demo: Engine, bare: BareLlama, case: str) -> None:
    options, baseline = CASES[case]
    prompt = demo.model.tokenize(TEXT, add_special=True, parse_special=False)
    assert answer(demo, options) == bare.answer(prompt, 48, options)
    assert answer(demo, options) != answer(demo, baseline)


def test_typical_p_counts_what_a_constraint_leaves(llama: Engine) -> None:
    """Among three allowed tokens it chooses the one whose surprise is nearest to what is expected: not the
    likeliest."""
    letters: dict[bytes, int] = {}
    logits = np.full(llama.model.n_vocab, 9.0, np.float32)
    for token in range(llama.model.n_vocab):
        piece = llama.model.piece(token)
        if piece in (b"a", b"b", b"c"):
            logits[token] = -20  # another token of the same letter, which hardly counts
            letters[piece] = token
    for letter, probability in ((b"a", 0.5), (b"b", 0.3), (b"c", 0.2)):
        logits[letters[letter]] = np.log(probability)
    options = SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0, typical_p=0.1, regex="[abc]")
    sampler = TokenSampler(llama.model, options)
    assert sampler.choose(logits) == letters[b"b"]  # entropy 1.03; 0.69, 1.20 and 1.61 nats
    sampler.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"typical_p": 1.1}, "typical_p must be from 0 to 1, got 1.1"),
        ({"dry_multiplier": -1.0}, "dry_multiplier must be from 0"),
        ({"dry_base": 0.5}, "dry_base must be from 1"),
        ({"dry_allowed_length": -1}, "dry_allowed_length must be from 0"),
        ({"dry_penalty_last_n": -2}, f"dry_penalty_last_n must be from -1 to {MAX_DRY_LAST_N}"),
        ({"dry_penalty_last_n": 1 << 40}, "dry_penalty_last_n must be"),
        ({"dry_sequence_breakers": ("",)}, "dry_sequence_breakers takes"),
        ({"dry_sequence_breakers": ("a\0b",)}, "dry_sequence_breakers takes"),
        ({"dry_sequence_breakers": ("x" * 41,)}, "dry_sequence_breakers takes"),
        ({"dry_sequence_breakers": ("x",) * (MAX_DRY_BREAKERS + 1)}, "dry_sequence_breakers takes"),
        ({"xtc_probability": float("nan")}, "xtc_probability must be from 0 to 1"),
        ({"xtc_threshold": 2.0}, "xtc_threshold must be from 0 to 1"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SamplingError, match=words):
        SamplingParams(**options)


def test_dry_remembers_the_whole_prompt(demo: Engine) -> None:
    """The repeated text stood far before: more tokens ago than penalties look back."""
    first = [300, 301, 302]
    prompt = [*first, *range(10, 10 + 2 * PENALTY_LAST_N), *first[:2]]
    logits = np.zeros(demo.model.n_vocab, np.float32)
    logits[[302, 350]] = 2.0, 1.0
    chosen = []
    for options in ({}, {**DRY, "dry_sequence_breakers": ()}):
        sampling = SamplingParams(temperature=0, **options)
        continuation = Continuation(demo.model, Request(prompt, 1, sampling))
        continuation.choose(logits)
        chosen += continuation.tokens
        continuation.close()
    assert chosen == [302, 350]
