"""Test prompts with pictures and sounds on one device: the results equal libmtmd's, and nothing is computed twice."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge.errors import MediaError
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions, PrefixOptions
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.llm.slot import Slot
from tests.support import projectors
from tests.support.multimodal import BATCH, CONTEXT, encoded, open_projector, own_run, prompt_around

GREEDY = SamplingParams(temperature=0, allow_repetition=True)
OPTIONS = EngineOptions(context=CONTEXT, batch=BATCH, threads=1)


class Kind:
    """A text model, its projector and an engine."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.text, self.projector = projectors.write(name, folder)
        self.native, self._model = open_projector(self.text, self.projector)
        self.engine = Engine(self.text, OPTIONS)

    def prompt(self, seed: int = 1) -> tuple[list[int], list]:
        tokens, media = encoded(self.name, self.native, seed)
        return prompt_around(self.engine.model, tokens), media

    def close(self) -> None:
        self.engine.close()
        self.native.close()
        self._model.close()


@pytest.fixture(scope="module", params=projectors.KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kind]:
    with closing(Kind(request.param, tmp_path_factory.mktemp(request.param))) as kind:
        yield kind


def test_logits_are_those_of_libmtmd_itself(kind: Kind) -> None:
    prompt, media = kind.prompt()
    expected = own_run(kind.name, kind.text, kind.native)
    kind.engine.kv_clear()
    logits = Slot(kind.engine).prefill(prompt)
    assert media
    assert np.array_equal(logits, expected)


def test_another_picture_gives_other_logits(kind: Kind) -> None:
    slot = Slot(kind.engine)
    kind.engine.kv_clear()
    (first, current), (second, also_held) = kind.prompt(1), kind.prompt(2)
    item = slot.prefill(first).copy()
    two = slot.prefill(second).copy()
    assert current
    assert also_held
    assert not np.array_equal(item, two)
    assert np.array_equal(slot.prefill(first), item)


def answers(scheduler: Scheduler, *prompts: tuple[list[int], list], n: int = 6) -> tuple[list[list[int]], list[int]]:
    """Tokens of an answer to each of these at once, and how many of each prompt's were in the cache."""
    numbers = [scheduler.add(Request(prompt, n, GREEDY, ends=False, media=media)) for prompt, media in prompts]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    cached = dict.fromkeys(numbers, 0)
    while scheduler.busy:
        for event in scheduler.step():
            if event.token_id is not None:
                tokens[event.request].append(event.token_id)
            cached[event.request] = event.cached_tokens
    return [tokens[number] for number in numbers], [cached[number] for number in numbers]


def test_a_second_turn_computes_nothing_of_the_picture_again(kind: Kind) -> None:
    with Scheduler(kind.engine, keep=True) as scheduler:
        prompt, media = kind.prompt()
        (first,), (cached,) = answers(scheduler, (prompt, media))
        longer = [*prompt, *first, *kind.engine.model.tokenize("and now", add_special=False, parse_special=False)]
        (second,), (cached_again,) = answers(scheduler, (longer, media))
        assert (cached, cached_again) == (0, len(prompt) + len(first) - 1)
        (_,), (cached_other,) = answers(scheduler, kind.prompt(2))
        assert cached_other == next(i for i, token in enumerate(prompt) if token < 0)
    with Scheduler(kind.engine, keep=False) as scheduler:
        assert answers(scheduler, (longer, media))[0] == [second]


def test_several_requests_at_once_are_answered_as_each_alone(kind: Kind, tmp_path: Path) -> None:
    text = [kind.engine.model.tokenize("w1 w2 w3", add_special=True, parse_special=False)]
    prompts = [kind.prompt(1), (text[0], []), kind.prompt(2)]
    with Scheduler(kind.engine) as scheduler:
        alone = [answers(scheduler, prompt)[0][0] for prompt in prompts]
    options = replace(OPTIONS, sequences=3, context=3 * CONTEXT)
    with Engine(kind.text, options) as engine, Scheduler(engine) as scheduler:
        assert answers(scheduler, *prompts)[0] == alone


def test_a_prompt_is_kept_on_disk_under_the_hash_of_its_picture(kind: Kind, tmp_path: Path) -> None:
    """Where places are no positions, only what is in front of the picture."""
    options = replace(OPTIONS, prefixes=PrefixOptions(1 << 26, tmp_path / "kept", _private(tmp_path)))
    prompt, media = kind.prompt()
    with Engine(kind.text, options) as engine, Scheduler(engine, keep=True) as scheduler:
        (first,), _ = answers(scheduler, (prompt, media))
    with Engine(kind.text, options) as engine, Scheduler(engine, keep=True) as scheduler:
        (again,), (cached,) = answers(scheduler, (prompt, media))
        _, (cached_other,) = answers(scheduler, kind.prompt(2))
        before = next(i for i, token in enumerate(prompt) if token < 0)
        assert again == first
        assert cached_other <= before
        assert cached > before if kind.name not in ("mrope", "deepstack") else cached in range(before - 8, before + 1)


def test_a_full_context_drops_a_picture_as_a_whole(kind: Kind) -> None:
    if not kind.engine.can_shift:
        pytest.skip("its context does not shift")
    prompt, media = kind.prompt()
    options = replace(OPTIONS, context=len(prompt) + 8)
    with Engine(kind.text, options) as engine, Scheduler(engine) as scheduler:
        number = scheduler.add(Request(prompt, 24, GREEDY, ends=False, media=media, stays=lambda: 1))
        while scheduler.busy:
            scheduler.step()
            for slot in scheduler.slots.all:
                rows = [token for token in slot.tokens if token < 0]
                assert len(rows) in (0, len(media[0].ids)) or not scheduler.queues.running[0].answer
        assert number == 0


def test_a_picture_that_must_be_in_one_batch_is_refused_where_it_is_not(tmp_path: Path) -> None:
    text, projector = projectors.write("non_causal", tmp_path)
    native, model = open_projector(text, projector)
    with closing(native), closing(model), Engine(text, replace(OPTIONS, batch=3)) as engine:
        tokens, media = encoded("non_causal", native)
        with (
            Scheduler(engine) as scheduler,
            pytest.raises(MediaError, match="4 rows, which must fit into one batch of 3"),
        ):
            scheduler.add(Request(tokens, 1, media=media))


def _private(folder: Path) -> Path:
    (key := folder / "key").mkdir(mode=0o700)
    return key


def test_a_beginning_that_ends_inside_a_picture_is_held_without_it(kind: Kind) -> None:
    """A prompt that was computed in part, such as one whose request was cancelled."""
    prompt, media = kind.prompt()
    start = next(i for i, token in enumerate(prompt) if token < 0)
    kind.engine.kv_clear()
    expected = Slot(kind.engine).prefill(prompt).copy()
    slot = Slot(kind.engine)
    kind.engine.kv_clear()
    slot.prefill(prompt[:start])
    if media[0].causal:
        slot.decode(prompt[start : start + 3], "none")
    slot.begin(prompt)
    assert len(slot.tokens) == start
    assert np.array_equal(slot.prefill(prompt), expected)
