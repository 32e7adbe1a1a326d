"""Constraints of an answer's form, and biases that make tokens more or less likely."""

import json
import re

import numpy as np
import pytest

from edge.errors import SamplingError
from edge.llama.sampling import Sampler
from edge.llm.engine import Engine
from edge.llm.sampler import MAX_BIASES, SamplingParams, TokenSampler

GREEDY = {"temperature": 0.0}


def text_of(engine: Engine, draw: int, **options: object) -> str:
    """Return a sampler's text for random logits, until the text ends or 60 tokens have come."""
    rng = np.random.default_rng(draw)
    sampler = TokenSampler(engine.model, SamplingParams(**{**GREEDY, **options}))  # type: ignore[arg-type]
    pieces: list[bytes] = []
    for _ in range(60):
        token = sampler.choose(rng.normal(0, 3, engine.model.n_vocab).astype(np.float32))
        if engine.model.is_end(token):
            return b"".join(pieces).decode()
        sampler.accept(token)
        pieces.append(engine.model.piece(token))
    pytest.fail(f"no end after {b''.join(pieces)!r}")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_regular_expression_is_matched_as_a_whole(llama: Engine, seed: int, temperature: float) -> None:
    regex = r"(\d{3}|[a-c]+x), ok"
    assert re.fullmatch(regex, text_of(llama, seed, regex=regex, temperature=temperature, seed=seed))


@pytest.mark.parametrize("seed", range(5))
def test_a_schema_is_fitted(llama: Engine, seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": r"^\d{2}$"},
            "big": {"type": "integer", "minimum": 10, "maximum": 12},
        },
        "required": ["id", "big"],
        "additionalProperties": False,
    }
    result = json.loads(text_of(llama, seed, json_schema=json.dumps(schema)))
    assert set(result) == {"id", "big"}
    assert re.fullmatch(r"\d{2}", result["id"])
    assert 10 <= result["big"] <= 12


def test_a_lark_grammar_is_followed(llama: Engine) -> None:
    assert text_of(llama, 1, lark='start: "a" ("b" | "c") /[0-9]/') in {f"a{x}{n}" for x in "bc" for n in range(10)}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"json_schema": '{"type": "array", "uniqueItems": true}'}, "uniqueItems"),
        ({"json_schema": '{"not": {"type": "string"}}'}, "not"),
        ({"json_schema": '{"type": "nonsense"}'}, "nonsense"),
        ({"json_schema": '{"$ref": "https://example.com/schema"}'}, "cannot be used"),
        ({"json_schema": "[" * 100_000}, "not valid JSON"),
        ({"regex": "a(b"}, "regular expression cannot be used"),
        ({"lark": "start: nowhere"}, "grammar cannot be used"),
        ({"regex": "a", "grammar": 'root ::= "a"'}, "exclude each other"),
        ({"logit_bias": {1 << 20: 1.0}}, "an unknown token"),
        ({"logit_bias": {-1: 1.0}}, "an unknown token"),
        ({"logit_bias": {1: float("nan")}}, "must be from"),
        ({"logit_bias": {1: 1e308}}, "must be from"),
        ({"logit_bias": dict.fromkeys(range(MAX_BIASES + 1), 1.0)}, str(MAX_BIASES)),
        ({"frequency_penalty": float("inf")}, "frequency_penalty"),
        ({"top_k": 2**32 + 1}, "top_k must be from 0 to 2147483647"),
        ({"presence_penalty": -1000.0}, "presence_penalty"),
    ],
)
def test_what_cannot_be_held_is_refused(llama: Engine, options: dict[str, object], reason: str) -> None:
    with pytest.raises(SamplingError, match=reason):
        TokenSampler(llama.model, SamplingParams(**options))  # type: ignore[arg-type]


def test_a_constraint_that_is_refused_leaves_no_sampler(llama: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "chain", lambda parts: pytest.fail("one was made, and nobody frees it"))
    with pytest.raises(SamplingError, match="regular expression"):
        TokenSampler(llama.model, SamplingParams(regex="("))


def test_a_constraint_that_nothing_can_follow_is_an_error_and_no_free_text(llama: Engine) -> None:
    sampler = TokenSampler(llama.model, SamplingParams(temperature=0, regex="a"))
    logits = np.zeros(llama.model.n_vocab, np.float32)
    token = sampler.choose(logits)
    sampler.accept(token)
    sampler.accept(token)
    for _ in range(2):
        with pytest.raises(SamplingError, match="regular expression cannot be used"):
            sampler.choose(logits)


def choice(engine: Engine, logits: dict[int, float], accepted: list[int], **options: object) -> int:
    """The token chosen of these logits; all others have -10."""
    row = np.full(engine.model.n_vocab, -10, np.float32)
    for token, logit in logits.items():
        row[token] = logit
    sampler = TokenSampler(engine.model, SamplingParams(**{**GREEDY, **options}))  # type: ignore[arg-type]
    for token in accepted:
        sampler.accept(token, generated=False)
    provided = row.copy()
    token = sampler.choose(row)
    assert (row == provided).all()
    return token


def test_penalties_and_biases_change_logits_by_what_they_say(llama: Engine) -> None:
    logits = {5: 3.0, 6: 2.0}
    assert choice(llama, logits, [5, 5]) == 5
    assert choice(llama, logits, [5, 5], frequency_penalty=0.4) == 5  # twice 0.4 is less than 1
    assert choice(llama, logits, [5, 5], frequency_penalty=0.6) == 6
    assert choice(llama, logits, [5, 5], presence_penalty=0.6) == 5  # once, however often it was there
    assert choice(llama, logits, [5, 5], presence_penalty=1.1) == 6
    assert choice(llama, logits, [6], presence_penalty=-1.1) == 6
    assert choice(llama, logits, [], logit_bias={6: 0.9}) == 5
    assert choice(llama, logits, [], logit_bias={6: 1.1}) == 6
    assert choice(llama, logits, [], logit_bias={5: -100, 7: 12.5}) == 7


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({"frequency_penalty": 0.5}, 65),
        ({"presence_penalty": 0.5}, 65),
        ({"frequency_penalty": -0.5}, 0),
        ({"logit_bias": {3: 1.0}}, 0),
        ({"regex": "a*"}, 1),
        ({"lark": 'start: "a"', "temperature": 1.0, "top_k": 7, "presence_penalty": 0.5}, 71),
        ({"regex": "a*", "temperature": 1.0, "top_k": 0}, 0),
        ({"regex": "a*", "logit_bias": {3: 1.0}}, 0),
        ({"grammar": 'root ::= "a"*'}, 0),
        ({"dry_multiplier": 0.8, "temperature": 1.0}, 0),
        ({"dry_multiplier": 0.8, "dry_penalty_last_n": 0}, 1),
        ({"xtc_probability": 0.5, "top_k": 9}, 9),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.6, "top_k": 9}, 1),
        ({"typical_p": 0.5, "top_k": 9, "presence_penalty": 0.5}, 73),
    ],
)
def test_enough_logits_are_asked_for(llama: Engine, options: dict[str, object], needs: int) -> None:
    assert TokenSampler(llama.model, SamplingParams(**{**GREEDY, **options})).logits_request().top == needs  # type: ignore[arg-type]


def test_masks_behind_drafts_are_those_behind_tokens(llama: Engine) -> None:
    """Behind one that cannot come there is none, and the constraint stays where it is."""
    model = llama.model
    *tokens, wrong = (
        next(i for i in range(model.n_vocab) if model.piece(i) == letter) for letter in (b"a", b"b", b"z")
    )
    sampler = TokenSampler(model, SamplingParams(**GREEDY, regex="[a-c]{2}"))
    ahead = sampler.logits_request(tokens).masks
    assert len(ahead) == len(tokens) + 1
    for token, expected in zip(tokens, ahead, strict=False):
        (mask,) = sampler.logits_request().masks
        assert mask is not None
        assert expected is not None
        np.testing.assert_array_equal(mask, expected)
        assert mask[token]
        assert not mask[wrong]
        assert [item is None for item in sampler.logits_request((wrong, token)).masks] == [False, True, True]
        sampler.accept(token)
    (mask,) = sampler.logits_request().masks
    assert mask is not None
    assert all(model.is_end(int(token)) for token in np.flatnonzero(mask))
    sampler.close()
