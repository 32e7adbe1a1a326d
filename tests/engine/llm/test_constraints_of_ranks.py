"""Answers held to a constraint over ranks and stages: those of one device, and only a few logits cross."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from edge.errors import EngineError
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.interface import Drafter
from edge.llm.requests import Event
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.parallel.engine import DistributedEngine
from edge.parallel.masks import MOST_BYTES
from edge.speculate.speculation import Speculation
from tests.support import ROOT
from tests.support.deployments import EXACT, pipeline, tensor
from tests.support.drafting import Known, always, ids, run
from tests.support.ranks_here import ranks_here

MODEL = ROOT / "tests" / "data" / "edge-demo-f16.gguf"
ROOM = replace(EXACT, context=512, sequences=4)
SCHEMA = """{"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
 "required": ["city", "n"], "additionalProperties": false}"""
GREEDY = SamplingParams(temperature=0)
N_VOCAB = 2048

# The few suffice for each of these.
FEW = (
    replace(GREEDY, json_schema=SCHEMA),
    SamplingParams(temperature=1.2, seed=3, json_schema=SCHEMA),
    SamplingParams(temperature=1.5, top_k=7, min_p=0.01, repeat_penalty=1.3, seed=4, json_schema=SCHEMA),
    SamplingParams(temperature=0, presence_penalty=1.0, lark='start: /[a-m ]+/ "."'),
    replace(GREEDY, regex="[0-9]{9}"),
    GREEDY,
    SamplingParams(temperature=1.2, top_k=5, seed=6),
)
# One of these, and all cross.
ALL = (
    replace(GREEDY, json_schema=SCHEMA),
    SamplingParams(temperature=1.0, top_k=0, seed=7, json_schema=SCHEMA),
    replace(GREEDY, json_schema=SCHEMA, logit_bias={300: 2.0}),
    replace(GREEDY, grammar='root ::= [a-z ]+ "."'),
)
# Samplers that look at more than the few likeliest, or at what came before.
XTC = {"xtc_probability": 0.5, "xtc_threshold": 0.05}
SAMPLERS = (
    SamplingParams(temperature=1.1, top_k=12, typical_p=0.8, **XTC, seed=8),
    SamplingParams(temperature=0, top_k=6, **XTC, seed=1),
    replace(GREEDY, dry_multiplier=2.0, dry_allowed_length=1),
    SamplingParams(temperature=1.1, top_k=9, dry_multiplier=2.0, **XTC, seed=9),
    SamplingParams(temperature=1.3, top_k=9, **XTC, seed=9, json_schema=SCHEMA),
)


@pytest.fixture(scope="module")
def single() -> Iterator[Engine]:
    with Engine(MODEL, ROOM) as engine:
        yield engine


@pytest.fixture(scope="module", params=[tensor(1, 1), pipeline(1, 1)], ids=["ranks", "stages"])
def spread(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DistributedEngine]:
    """The same on two ranks, or two stages."""
    with ranks_here(MODEL, request.param, ROOM, tmp_path_factory.mktemp("s")) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompt(single: Engine) -> list[int]:
    return single.model.tokenize("Tell me of a city.", add_special=True, parse_special=False)


def answered(
    engine: Engine | DistributedEngine, requests: list[Request], drafter: Drafter | None = None
) -> list[list[Event]]:
    """Return the events of each request, all of them at once."""
    with Scheduler(engine, drafter=drafter) as scheduler:
        reported: dict[int, list[Event]] = {scheduler.add(request): [] for request in requests}
        while scheduler.busy:
            for event in scheduler.step():
                reported[event.request].append(event)
        return list(reported.values())


@pytest.mark.parametrize("samplings", [FEW, ALL], ids=["few", "all"])
def test_answers_are_those_of_one_device(
    single: Engine, spread: DistributedEngine, prompt: list[int], samplings: tuple[SamplingParams, ...]
) -> None:
    requests = [Request(prompt, 24, sampling) for sampling in samplings]
    expected, result = answered(single, requests), answered(spread, requests)
    for item, other in zip(expected, result, strict=True):
        assert [(e.token_id, e.text, e.finish_reason) for e in item] == [
            (e.token_id, e.text, e.finish_reason) for e in other
        ]
    plain = answered(single, [Request(prompt, 24)])
    assert "".join(e.text for e in plain[0]) != "".join(e.text for e in expected[0])


@pytest.mark.parametrize("sampling", SAMPLERS, ids=range(len(SAMPLERS)))
def test_samplers_draw_what_they_draw_on_one_device(
    single: Engine, spread: DistributedEngine, prompt: list[int], sampling: SamplingParams
) -> None:
    """One request at a time: a step of several adds up in another order, and what is drawn may hang on the last bit."""
    request = Request(prompt * 2, 24, sampling)
    (expected,), (result,) = answered(single, [request]), answered(spread, [request])
    assert [event.token_id for event in result] == [event.token_id for event in expected]
    assert ids(run(spread, request.prompt, None, sampling)) == [e.token_id for e in expected if e.token_id is not None]


@pytest.mark.parametrize("wrong", [0, 2])
def test_drafts_change_no_answer(single: Engine, spread: DistributedEngine, wrong: int) -> None:
    """Right ones, and ones of which each second is wrong: the rows behind each have masks of their own."""
    texts = ("Tell me of a city.", "How many are there?")
    prompts = [single.model.tokenize(text, add_special=True, parse_special=False) for text in texts]
    samplings = (replace(GREEDY, regex="([0-9][a-z]){12}"), FEW[2])
    requests = [Request(item, 20, sampling) for item, sampling in zip(prompts, samplings, strict=True)]
    expected = [[e.token_id for e in events if e.token_id is not None] for events in answered(single, requests)]
    known = {tuple(item): tokens for item, tokens in zip(prompts, expected, strict=True)}
    drafter = Speculation(lambda: Known(known, wrong), "known", choice=always())
    result = answered(spread, requests, drafter)
    assert [[e.token_id for e in events if e.token_id is not None] for events in result] == expected
    assert drafter.stats.drafted > 0 or spread.stages > 1


def test_probabilities_are_those_of_all_logits(single: Engine, spread: DistributedEngine, prompt: list[int]) -> None:
    request = Request(prompt, 8, FEW[0], logprobs=3)
    (expected,), (result,) = answered(single, [request]), answered(spread, [request])
    for item, other in zip(expected, result, strict=True):
        assert item.token_id == other.token_id
        assert (item.logprobs is None) == (other.logprobs is None)
        if item.logprobs is not None and other.logprobs is not None:
            assert other.logprobs.chosen == pytest.approx(item.logprobs.chosen, abs=0.01)
            values = [value for _, value in item.logprobs.alternatives]
            assert [value for _, value in other.logprobs.alternatives] == pytest.approx(values, abs=0.01)


def moved(engine: DistributedEngine, prompt: list[int], sampling: SamplingParams) -> tuple[float, float]:
    """Bytes that rank 0 sends and receives for a token, as most tokens have it."""
    engine.times(clear=True)
    assert len(run(engine, prompt, None, sampling)) > 9
    own = engine.times()[0]["decode"]
    return own.sent_bytes.median, own.received_bytes.median


def test_few_bytes_cross_and_no_message_more(spread: DistributedEngine, prompt: list[int]) -> None:
    """Beside what crosses without a constraint: the mask, and as many logits again."""
    sent, received = moved(spread, prompt, GREEDY)
    for sampling, most in ((replace(GREEDY, regex="[0-9]{40}"), 4 * 40), (FEW[0], N_VOCAB // 8)):
        masked_sent, masked_received = moved(spread, prompt, sampling)
        assert masked_received - received == 8
        heads = len(spread.heads)
        assert 0 < masked_sent - sent - 4 * (heads + 1) - 8 <= most
    everything = moved(spread, prompt, replace(GREEDY, grammar="root ::= [0-9] root"))
    assert everything[0] == sent
    assert everything[1] - received == 4 * N_VOCAB // (1 + (spread.stages == 1)) - 8


def test_masks_without_room_leave_all_logits(spread: DistributedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = np.arange(N_VOCAB) % 2 == 0
    spread.kv_clear()
    full = spread.decode([5], 0).copy()
    spread.kv_clear()
    few = spread.decode([5], 0, top=2, masks=[mask]).copy()
    other = slice(N_VOCAB // 2, None) if spread.stages == 1 else slice(None)  # what another rank has
    known = np.flatnonzero(np.isfinite(few[other]))
    assert set(known) == {*np.argsort(full[other])[-2:], *np.argsort(np.where(mask, full, -np.inf)[other])[-2:]}
    np.testing.assert_array_equal(few[other][known], full[other][known])
    monkeypatch.setattr("edge.parallel.logits.MOST_BYTES", N_VOCAB // 8)
    assert N_VOCAB // 8 < MOST_BYTES
    spread.kv_clear()
    np.testing.assert_array_equal(spread.decode([5], 0, top=2, masks=[mask]), full)
    with pytest.raises(EngineError, match="2 masks were given for 1 rows that give logits"):
        spread.decode([5], 1, top=2, masks=[mask, None])
    spread.kv_clear()
