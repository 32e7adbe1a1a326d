"""An answer that repeats itself ends at the same token in every loop: alone, beside others, with drafts, spread."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.generate import generate
from edge.llm.interface import TextEngine
from edge.llm.requests import Event
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.models.demo import MODEL_PATH
from edge.speculate.speculation import Speculation
from edge.text import repetition
from edge.text.repetition import Repetition
from tests.support.deployments import EXACT, pipeline, tensor
from tests.support.drafting import Known, always, one_slot, speculate
from tests.support.ranks_here import ranks_here
from tests.support.repetition import first_loop
from tests.support.thorough import some

PROMPT = [5, 6, 7, 8]
LOOP = SamplingParams(temperature=0, grammar='root ::= "x" "abcd, "*')
ROOM = replace(EXACT, context=2048, sequences=2, outputs=16)
LEAST_TOKENS = some(100, repetition.LEAST_TOKENS)
MOST_TOKENS = LEAST_TOKENS + 100


@pytest.fixture(scope="module", autouse=True)
def short_loops() -> Iterator[None]:
    """Loops of fewer tokens end an answer, so that answers are short: where they end does not depend on how many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repetition, "LEAST_TOKENS", LEAST_TOKENS)
        yield


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    with Engine(MODEL_PATH, ROOM) as engine:
        yield engine


@pytest.fixture(scope="module", params=[tensor(1, 1), pipeline(1, 1)], ids=["ranks", "stages"])
def spread(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextEngine]:
    with ranks_here(MODEL_PATH, request.param, ROOM, tmp_path_factory.mktemp("r")) as engine:
        yield engine


def tokens_of(engine: TextEngine) -> dict[tuple[int, ...], list[int]]:
    """The whole of the answer that loops, for a drafter that knows it."""
    responses = generate(one_slot(engine), Request(PROMPT, MOST_TOKENS, replace(LOOP, allow_repetition=True)))
    return {tuple(PROMPT): [response.token_id for response in responses if response.token_id is not None]}


def expected(known: dict[tuple[int, ...], list[int]]) -> tuple[list[int], Repetition]:
    """Return the token it is ended after, and why."""
    tokens = known[tuple(PROMPT)]
    loop = first_loop(tokens)
    assert loop is not None
    return tokens[: loop[0]], loop[1]


def events(
    engine: TextEngine, *requests: Request, known: dict[tuple[int, ...], list[int]] | None = None
) -> list[list[Event]]:
    drafter = None if known is None else Speculation(lambda: Known(known, 0), "known", choice=always())
    with Scheduler(engine, drafter=drafter) as scheduler:
        reported: dict[int, list[Event]] = {scheduler.add(request): [] for request in requests}
        while scheduler.busy:
            for event in scheduler.step():
                reported[event.request].append(event)
        return list(reported.values())


def check(engine: TextEngine) -> None:
    known = tokens_of(engine)
    target, loop = expected(known)
    for drafter in (None, speculate(Known(known, 0))):
        *answer, last = generate(one_slot(engine, drafter), Request(PROMPT, None, LOOP))
        assert (last.finish_reason, last.repetition) == ("repetition", loop)
        assert [item.token_id for item in answer] == target
    request = Request(PROMPT, 1000, LOOP)
    for reported in (
        *events(engine, request, request),
        *events(engine, request, known=known),
    ):
        assert [item.token_id for item in reported] == target
        assert [item.finish_reason for item in reported] == [None] * (len(target) - 1) + ["repetition"]


def test_on_one_device(demo: Engine) -> None:
    check(demo)


def test_on_several(spread: TextEngine) -> None:
    check(spread)


def test_an_answer_that_goes_on_elsewhere_ends_at_the_same_token(demo: Engine) -> None:
    """As one whose process or device was lost: what was told already counts."""
    generated = expected(tokens_of(demo))[0][:-7]
    (reported,) = events(demo, Request(PROMPT, 1000, LOOP, generated=generated))
    assert (len(reported), reported[-1].finish_reason) == (7, "repetition")


@pytest.mark.parametrize(
    "endless",
    [
        Request(PROMPT, MOST_TOKENS, replace(LOOP, allow_repetition=True)),
        Request(PROMPT, MOST_TOKENS, LOOP, ends=False),
    ],
)
def test_it_goes_on_where_that_is_asked_for(demo: Engine, endless: Request) -> None:
    (reported,) = events(demo, endless)
    assert (len(reported), reported[-1].finish_reason) == (MOST_TOKENS, "length")


def test_the_limit_of_tokens_comes_first(demo: Engine) -> None:
    target, _ = expected(tokens_of(demo))
    (reported,) = events(demo, Request(PROMPT, len(target), LOOP))
    assert (len(reported), reported[-1].finish_reason) == (len(target), "length")
