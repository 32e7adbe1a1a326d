"""Test prompts with pictures and sounds on several ranks: the results are those of one device."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.errors import MediaError
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.llm.requests import Event
from edge.llm.scheduler import Scheduler
from edge.llm.slot import Slot
from edge.parallel.engine import DistributedEngine
from tests.support import projectors
from tests.support.multimodal import BATCH, CONTEXT, encoded, open_projector, prompt_around
from tests.support.ranks_here import ranks_here
from tests.support.replaceable import Mortal, replaceable

OPTIONS = EngineOptions(context=CONTEXT, batch=BATCH, threads=1)
TWO_RANKS: dict[str, Any] = {"shares": (1.0, 1.0), "parallel": "tensor"}
TWO_STAGES: dict[str, Any] = {"shares": (1.0, 1.0), "parallel": "pipeline"}
# qwen2vl's attention cannot be shared: heads and widths are of one size.
CASES = [
    *((kind, TWO_RANKS) for kind in ("plain", "non_causal", "deepstack", "audio")),
    *((kind, TWO_STAGES) for kind in projectors.KINDS),
]


@pytest.mark.parametrize(("kind", "how"), CASES, ids=[f"{kind}-{how['parallel']}" for kind, how in CASES])
def test_logits_are_those_of_one_device(kind: str, how: dict[str, Any], tmp_path: Path) -> None:
    text, projector = projectors.write(kind, tmp_path, layers=4)  # two in the last stage: rows of one reach the next
    native, model = open_projector(text, projector)
    with closing(native), closing(model):
        tokens, media = encoded(kind, native)
        prompt = prompt_around(model, tokens)
    with Engine(text, OPTIONS) as engine:
        expected = turns(engine, prompt)
    with ranks_here(text, how, OPTIONS, tmp_path) as ranks:
        logits = turns(ranks, prompt)
        is_alike = how is TWO_STAGES and len(prompt) <= ranks.chunk(len(prompt))
    assert media
    largest = np.abs(expected[0]).max()
    # Sums over ranks are taken in another order, and what is longer than a stage's chunk in other steps.
    for own, alone in zip(logits, expected, strict=True):
        assert np.abs(own - alone).max() <= (0 if is_alike else 1e-3 * largest)


def turns(engine: Engine | DistributedEngine, prompt: list[int]) -> list[np.ndarray]:
    """Logits behind a prompt, behind a longer one, and behind the first again, of which the rest is forgotten."""
    slot = Slot(engine)
    more = engine.model.tokenize("w4 w5 and", add_special=False, parse_special=False)
    return [slot.prefill(tokens).copy() for tokens in (prompt, [*prompt, *more], [*prompt[:-2], *more])]


@pytest.mark.parametrize("lost", ["before", "behind"])
def test_a_picture_for_more_layers_than_the_first_stage_has_is_refused(lost: str, tmp_path: Path) -> None:
    """Also where an engine that took it is lost: before its rows are computed, or behind them."""
    model_file = projectors.text_model("deepstack")
    model_file.pairs["qwen3vl.n_deepstack_layers"] = ("u32", 2)
    text = model_file.write(tmp_path / "text.gguf")
    projector = projectors.projector("deepstack", layers=2).write(tmp_path / "mmproj.gguf")
    native, model = open_projector(text, projector)
    with closing(native), closing(model):
        tokens, media = encoded("deepstack", native)
    refused = pytest.raises(MediaError, match="first 2 layers of this model, and the first stage has 1")
    request, two = Request(tokens, 4, media=media, ends=False), replace(OPTIONS, sequences=2)
    with ranks_here(text, {**TWO_STAGES, "shares": (1.0, 2.0)}, two, tmp_path) as ranks:
        with Scheduler(ranks) as scheduler, refused:
            scheduler.add(request)
        first = Mortal(text, two)
        first.lives = 0 if lost == "before" else 2
        with closing(first), Scheduler(replaceable(first, lambda error: ranks)) as scheduler:
            number, other = scheduler.add(request), scheduler.add(Request([5, 6, 7], 4, ends=False))
            events: list[Event] = []
            while scheduler.busy:
                events += scheduler.step()
    assert first.failed is not None
    last = {event.request: event for event in events}
    assert last[other].finish_reason == "length"
    with refused:
        raise last[number].error or AssertionError(last[number])


@pytest.mark.parametrize(
    ("deepstack_layers", "shares", "fits"), [(1, (1.0, 2.0), True), (2, (2.0, 1.0), True), (2, (1.0, 2.0), False)]
)
def test_first_stage_with_exactly_the_deepstack_layers_takes_pictures(
    deepstack_layers: int, shares: tuple[float, ...], fits: bool, tmp_path: Path
) -> None:
    model_file = projectors.text_model("deepstack")
    model_file.pairs["qwen3vl.n_deepstack_layers"] = ("u32", deepstack_layers)
    text = model_file.write(tmp_path / "text.gguf")
    with ranks_here(text, {**TWO_STAGES, "shares": shares}, OPTIONS, tmp_path) as ranks:
        assert len(ranks.plan.stages[0].layers) == round(shares[0])
        assert (ranks.media_problem == "") == fits
