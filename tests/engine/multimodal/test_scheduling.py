"""Test pictures in requests that are preempted, wait in the background, or share steps: probabilities are those of each
request alone.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.errors import EngineError
from edge.llama import llama
from edge.llama.multimodal import NativeProjector
from edge.llm.continuation import Continuation, Request
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.media.media import EmbeddingRows, behind, embeddings_of, interned, whole
from tests.support import projectors
from tests.support.multimodal import encoded, open_projector, prompt_around
from tests.support.ranks_here import ranks_here

GREEDY = SamplingParams(temperature=0, allow_repetition=True)
OPTIONS = EngineOptions(context=1024, batch=64, threads=1, sequences=2, kv_type="f32", flash_attention="off")
N = 8  # tokens of an answer
CAUSAL = ("plain", "mrope", "deepstack")


@dataclass
class Model:
    """A text model, and its projector in this process."""

    kind: str
    text: Path
    native: NativeProjector
    model: llama.Model

    def request(self, seed: int, n_before: int = 0, **more: bool) -> Request:
        """A request with a picture behind more or less text."""
        tokens, media = encoded(self.kind, self.native, seed)
        prompt = prompt_around(self.model, tokens, before="w1 what is in" + n_before * " w2")
        return Request(prompt, N, GREEDY, ends=False, logprobs=0, media=media, **more)


@pytest.fixture(scope="module", params=(*CAUSAL, "non_causal"))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    text, projector = projectors.write(request.param, tmp_path_factory.mktemp(request.param), layers=4)
    native, vocabulary = open_projector(text, projector)
    with closing(native), closing(vocabulary):
        yield Model(request.param, text, native, vocabulary)


def probabilities(scheduler: Scheduler, *requests: Request) -> list[list[float]]:
    """Log probabilities of the tokens of each answer, which say more of what was computed than the tokens."""
    numbers = [scheduler.add(request) for request in requests]
    logs: dict[int, list[float]] = {number: [] for number in numbers}
    while scheduler.busy:
        for event in scheduler.step():
            if event.logprobs is not None:
                logs[event.request].append(event.logprobs.chosen)
    return [logs[number] for number in numbers]


def alone(model: Model, *requests: Request) -> list[list[float]]:
    """The same of each request by itself, in an empty cache."""
    with Engine(model.text, OPTIONS) as engine:
        each = []
        for request in requests:
            with Scheduler(engine, slots=1) as scheduler:
                each += probabilities(scheduler, replace(request, background=False))
        return each


def test_a_preempted_picture_is_computed_again_as_a_whole(model: Model) -> None:
    requests = [model.request(1), model.request(2)]
    n_tokens = sum(len(request.prompt) for request in requests)
    with Engine(model.text, replace(OPTIONS, context=n_tokens + 2 + N // 2)) as engine:
        engine_room = engine.context
        with Scheduler(engine) as scheduler:
            # Room for both without headroom: the second is preempted once the answers have grown.
            scheduler.slots.place = _without_headroom(scheduler.slots.place)  # type: ignore[method-assign]
            results = probabilities(scheduler, *requests)
            assert scheduler.queues.preemptions["foreground"] >= 1
    assert engine_room < n_tokens + 2 * N
    np.testing.assert_allclose(results, alone(model, *requests), atol=1e-4)


def _without_headroom(place):  # type: ignore[no-untyped-def]
    return lambda history, growth, namespace="": place(history, 0, namespace)


def test_a_picture_in_the_background_is_preempted_between_its_rows(model: Model) -> None:
    """Whatever step the next request comes behind."""
    background, foreground = model.request(1, n_before=70, background=True), model.request(2)
    expected = alone(model, background, foreground)
    for n_steps in range(6):
        with Engine(model.text, OPTIONS) as engine, Scheduler(engine, keep=True) as scheduler:
            first = scheduler.add(background)
            logs: dict[int, list[float]] = {first: []}
            for step in range(200):
                if step == n_steps:
                    logs[scheduler.add(foreground)] = []
                if not scheduler.busy:
                    break
                for event in scheduler.step():
                    if event.logprobs is not None:
                        logs[event.request].append(event.logprobs.chosen)
        np.testing.assert_allclose(list(logs.values()), expected, atol=1e-4)


def test_a_text_follows_a_picture_that_is_forgotten(model: Model) -> None:
    """In the same slot, and longer than what stood in front of the picture."""
    text = replace(
        model.request(1),
        prompt=model.model.tokenize("w3" + 60 * " w4", add_special=True, parse_special=False),
        media=(),
    )
    with Engine(model.text, OPTIONS) as engine, Scheduler(engine, slots=1, keep=True) as scheduler:
        probabilities(scheduler, model.request(1))
        results = probabilities(scheduler, text)
    np.testing.assert_allclose(results, alone(model, text), atol=1e-4)


def test_a_picture_beside_an_answer_is_in_steps_of_few_rows(model: Model) -> None:
    """Its rows in each step are as many as the budget leaves, all of them where they attend to each other."""
    answer = replace(
        model.request(1),
        prompt=model.model.tokenize("w3 w4", add_special=True, parse_special=False),
        media=(),
        max_tokens=40,
    )
    picture = model.request(2)
    with Engine(model.text, replace(OPTIONS, batch=64)) as engine, Scheduler(engine) as scheduler:
        scheduler._budget.choose = _few_rows(scheduler._budget.choose)  # type: ignore[method-assign]
        results = probabilities(scheduler, answer, picture)
    np.testing.assert_allclose(results[1], alone(model, picture)[0], atol=1e-4)


def _few_rows(choose):  # type: ignore[no-untyped-def]
    return lambda *arguments, **how: [(running, min(n_rows, 3)) for running, n_rows in choose(*arguments, **how)]


def test_pictures_beside_texts_on_tensor_ranks(tmp_path: Path, model: Model) -> None:
    if model.kind == "mrope":
        pytest.skip("attention of these models is not shared")
    requests = [model.request(1), model.request(2, n_before=20), model.request(1, n_before=3)]
    options = replace(OPTIONS, sequences=4)
    how = {"shares": (1.0, 1.0), "parallel": "tensor"}
    with ranks_here(model.text, how, options, tmp_path) as ranks, Scheduler(ranks) as scheduler:
        results = probabilities(scheduler, *requests)
    np.testing.assert_allclose(results, alone(model, *requests), atol=1e-3)


def test_rows_stay_known_while_any_request_has_them() -> None:
    """Also where the same picture was encoded once more meanwhile, and that is gone again."""
    rows = interned(EmbeddingRows(b"the same", np.zeros((2, 4), np.float32)))
    again = interned(EmbeddingRows(b"the same", np.zeros((2, 4), np.float32)))
    assert again is rows
    token = rows.ids[0]
    del again
    assert embeddings_of(token) is rows
    del rows
    with pytest.raises(EngineError, match="send the picture again"):
        embeddings_of(token)


def test_a_sampler_sees_the_text_of_a_prompt_without_its_pictures(demo: Engine) -> None:
    """Their ids are negative: llama.cpp would look for such tokens outside its vocabulary."""
    picture, sampler = EmbeddingRows(b"a picture", np.zeros((2, 4), np.float32)), Mock()
    request = Request([5, -7, -8, 6], 1, media=[picture])
    Continuation(demo.model, request, sampler=sampler)
    assert [call.args[0] for call in sampler.accept.call_args_list] == [5, 6]


@given(st.lists(st.integers(1, 4), max_size=6), st.lists(st.integers(0, 2), min_size=7, max_size=7))
def test_a_history_is_cut_only_between_pictures(n_rows: list[int], texts: list[int]) -> None:
    """This includes requested cuts directly before and behind a picture, which need no change."""
    pictures = [EmbeddingRows(bytes([i]), np.zeros((n, 4), np.float32)) for i, n in enumerate(n_rows)]
    tokens = [5] * texts[0]
    cuts = set(range(texts[0] + 1))
    for picture, n_text in zip(pictures, texts[1:], strict=False):
        tokens += [*picture.ids, *[5] * n_text]
        cuts |= set(range(len(tokens) - n_text, len(tokens) + 1))
    for at in range(len(tokens) + 1):
        assert whole(tokens, at) == max(cut for cut in cuts if cut <= at)
        assert behind(tokens, at) == min(cut for cut in cuts if cut >= at)
