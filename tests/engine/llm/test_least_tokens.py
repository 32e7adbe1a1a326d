"""Test answers that continue past their end: up to a minimum number of tokens, or to the maximum."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import pytest

from edge.errors import SamplingError
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.requests import Event
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.speculate.speculation import Speculation
from edge.text import repetition
from edge.text.thinking_format import thinking_format
from edge.text.thinking_tracker import Thinking
from tests.support import ROOT
from tests.support.deployments import EXACT, pipeline, tensor
from tests.support.drafting import Known, always
from tests.support.ranks_here import ranks_here

MODEL = ROOT / "tests" / "data" / "edge-demo-f16.gguf"
GREEDY = SamplingParams(temperature=0)
ROOM = replace(EXACT, context=512, sequences=3, outputs=16)
SCHEMA = '{"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"], "additionalProperties": false}'


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    with Engine(MODEL, ROOM) as engine:
        yield engine


@pytest.fixture(scope="module", params=[tensor(1, 1), pipeline(1, 1)], ids=["ranks", "stages"])
def spread(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextEngine]:
    with ranks_here(MODEL, request.param, ROOM, tmp_path_factory.mktemp("r")) as engine:
        yield engine


def prompt_of(demo: Engine) -> list[int]:
    """A question with a short answer."""
    return demo.model.tokenize("<|user|>What is 27 plus 38?<|end|><|assistant|>", add_special=True, parse_special=True)


def answered(engine: TextEngine, *requests: Request, drafter: Speculation | None = None) -> list[list[Event]]:
    reported: dict[int, list[Event]] = {}
    with Scheduler(engine, drafter=drafter) as scheduler:
        numbers = [scheduler.add(request) for request in requests]
        while scheduler.busy:
            for event in scheduler.step():
                reported.setdefault(event.request, []).append(event)
    return [reported[number] for number in numbers]


def tokens_of(events: Sequence[Event]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]


def reason_of(events: Sequence[Event]) -> str | None:
    return events[-1].finish_reason


def requests_of(demo: Engine) -> list[Request]:
    """An answer as it is, one that goes on to the most, and one that has some tokens more."""
    prompt = prompt_of(demo)
    return [
        Request(prompt, 90, GREEDY),
        Request(prompt, 90, replace(GREEDY, ignore_eos=True)),
        Request(prompt, 90, replace(GREEDY, min_tokens=40)),
    ]


def test_an_answer_goes_on_past_its_end(demo: Engine) -> None:
    usual, endless, longer = answered(demo, *requests_of(demo))
    n_usual = len(tokens_of(usual))
    assert (reason_of(usual), n_usual < 40) == ("stop", True)
    assert (reason_of(endless), len(tokens_of(endless))) == ("length", 90)
    assert len(tokens_of(longer)) >= 40
    for events in (endless, longer):
        assert tokens_of(events)[:n_usual] == tokens_of(usual)
    assert not any(demo.model.is_end(token) for token in tokens_of(endless))
    assert not any(demo.model.is_end(token) for token in tokens_of(longer)[:40])


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_the_bound_is_met_exactly(demo: Engine, extra: int) -> None:
    prompt = prompt_of(demo)
    n_usual = len(tokens_of(answered(demo, Request(prompt, 90, GREEDY))[0]))
    [events] = answered(demo, Request(prompt, n_usual + 9, replace(GREEDY, min_tokens=n_usual + extra)))
    assert (len(tokens_of(events)) > n_usual) == (extra > 0)
    [whole] = answered(demo, Request(prompt, 50, replace(GREEDY, min_tokens=50)))
    assert (reason_of(whole), len(tokens_of(whole))) == ("length", 50)
    with pytest.raises(SamplingError, match="min_tokens is 51, but must not be more than max_tokens, 50"):
        answered(demo, Request(prompt, 50, replace(GREEDY, min_tokens=51)))
    with pytest.raises(SamplingError, match="min_tokens must be from 0"):
        replace(GREEDY, min_tokens=-1)


def test_answers_spread_over_devices_are_those_of_one(demo: Engine, spread: TextEngine) -> None:
    prompt, random = prompt_of(demo), SamplingParams(temperature=1.0, top_k=5, seed=3)
    requests = [
        Request(prompt, 40, replace(GREEDY, ignore_eos=True)),
        Request(prompt, 40, replace(GREEDY, min_tokens=30)),
        Request(prompt, 24, replace(random, ignore_eos=True)),
        Request(prompt, 24, replace(GREEDY, min_tokens=20, regex="[0-9]*")),
    ]
    for request in requests:  # one at a time, as what is drawn may hang on the last bit
        assert tokens_of(answered(spread, request)[0]) == tokens_of(answered(demo, request)[0])


@pytest.mark.parametrize("is_right", [True, False])
def test_drafts_change_no_answer(demo: Engine, is_right: bool) -> None:
    """Drafts of an end, which is what the model alone would choose, and right ones."""
    end = next(token for token in range(demo.model.n_vocab) if demo.model.is_end(token))
    for request in requests_of(demo):
        [expected] = answered(demo, request)
        usual = tokens_of(answered(demo, requests_of(demo)[0])[0])
        known = tokens_of(expected) if is_right else [*usual, *[end] * 90]
        drafter = Speculation(partial(Known, {tuple(request.prompt): known}, 0), "known", choice=always())
        [events] = answered(demo, request, drafter=drafter)
        assert tokens_of(events) == tokens_of(expected)
        assert reason_of(events) == reason_of(expected)


def test_stop_strings_end_nothing_before_the_least(demo: Engine) -> None:
    prompt = prompt_of(demo)
    [endless] = answered(demo, Request(prompt, 60, replace(GREEDY, ignore_eos=True)))
    text = "".join(event.text for event in endless)
    stop = text[2:4]
    [stopped] = answered(demo, Request(prompt, 60, replace(GREEDY, ignore_eos=True, stop=[stop])))
    assert (reason_of(stopped), stopped[-1].stop_string) == ("stop", stop)
    [late] = answered(demo, Request(prompt, 60, replace(GREEDY, ignore_eos=True, min_tokens=60, stop=[stop])))
    assert (tokens_of(late), "".join(event.text for event in late)) == (tokens_of(endless), text)


@pytest.mark.parametrize("behind", [-1, 0, 1])
def test_stop_string_that_the_last_of_the_least_tokens_completes_ends_the_answer(demo: Engine, behind: int) -> None:
    prompt = prompt_of(demo)
    [endless] = answered(demo, Request(prompt, 60, replace(GREEDY, ignore_eos=True)))
    stop = next(event.text for event in endless[5:] if event.text.strip())
    [stopped] = answered(demo, Request(prompt, 60, replace(GREEDY, ignore_eos=True, stop=[stop])))
    n_tokens = len(tokens_of(stopped))
    sampling = replace(GREEDY, ignore_eos=False, min_tokens=n_tokens + behind, stop=[stop])
    [answer] = answered(demo, Request(prompt, 60, sampling, ends=False))
    assert (len(tokens_of(answer)) == n_tokens) == (behind <= 0)


def test_a_repetition_ends_nothing(demo: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repetition, "LEAST_TOKENS", 60)
    loop = replace(GREEDY, grammar='root ::= "x" "abcd, "*')
    [ended] = answered(demo, Request(prompt_of(demo), 200, loop))
    n_tokens = len(tokens_of(ended))
    [endless] = answered(demo, Request(prompt_of(demo), 200, replace(loop, ignore_eos=True)))
    [longer] = answered(demo, Request(prompt_of(demo), 200, replace(loop, min_tokens=n_tokens + 9)))
    assert [reason_of(own) for own in (ended, endless, longer)] == ["repetition", "length", "repetition"]
    assert len(tokens_of(longer)) == n_tokens + 9


@pytest.mark.parametrize("kind", [{"json_schema": SCHEMA}, {"grammar": 'root ::= "{\\"n\\": 1}"'}])
def test_a_constraint_that_is_complete_ends_the_answer(demo: Engine, kind: dict[str, str]) -> None:
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 60}):
        [events] = answered(demo, Request(prompt_of(demo), 60, replace(GREEDY, **kind, **more)))
        assert ("".join(event.text for event in events), reason_of(events)) == ('{"n": 1}', "stop")


def test_a_constraint_that_may_go_on_does(demo: Engine) -> None:
    [events] = answered(demo, Request(prompt_of(demo), 60, replace(GREEDY, regex="[0-9]*", ignore_eos=True)))
    assert (reason_of(events), len(tokens_of(events))) == ("length", 60)
    assert "".join(event.text for event in events).isdigit()


def test_thoughts_count(demo: Engine) -> None:
    form = thinking_format("<think> </think>")
    assert form is not None
    thinking = Thinking(form, "thought", 10)
    for more, n_tokens in (({"ignore_eos": True}, 80), ({"min_tokens": 80}, 80)):
        [events] = answered(demo, Request(prompt_of(demo), 80, replace(GREEDY, **more), thinking=thinking))  # type: ignore[arg-type]
        assert (reason_of(events), len(tokens_of(events))) == ("length", n_tokens)
        assert events[-1].thought_tokens == 10
