"""Guesses as a person asks for them: the room that checking takes, and the drafts themselves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from edge.errors import EngineError
from edge.llm.engine import Engine
from edge.llm.info import ModelInfo
from edge.llm.interface import TextEngine
from edge.llm.model import Model
from edge.llm.options import EngineOptions
from edge.models.paths import PathLike, model_path
from edge.quantization.of_type import of_type
from edge.speculate.choice import MOST_ROWS
from edge.speculate.ngrams import NgramDrafts
from edge.speculate.shared import SharedSpeculation
from edge.speculate.small_model import ModelDrafts, check_vocabulary
from edge.speculate.speculation import Drafts, Speculation
from edge.tasks import SILENT, Steps
from partition.model.check import check_loadable
from quant.gguf.file import GgufFile
from quant.text import bytes_text

Enter = Callable[[Engine], Engine]

KINDS = ("auto", "off", "ngram")
"""Kinds of drafts that need no model file. auto: what is free, from the text itself, where the model can check it."""
SELF = "self"
_FEWER_BITS = "q2_k"
_SMALLER = 0.9  # of the model's size at most: else there is nothing to win


def drafts(asked: PathLike, model: PathLike | None, steps: Steps = SILENT) -> str | Path:
    """One of KINDS, or the file of a drafting model: REPO:FILE of the hub is fetched, and "self" is `model` in fewer
    bits, made once and kept.

    ModelFileError, HubError; EngineError where the model has so few bits that it cannot be much smaller.
    """
    if str(asked) in KINDS:
        return str(asked)
    if str(asked) != SELF:
        return model_path(asked)
    path = model_path(model)
    smaller = of_type(path, _FEWER_BITS, steps)
    if smaller.stat().st_size > _SMALLER * GgufFile.open(path).size_bytes:
        raise EngineError(
            f"{path.name} cannot guess for itself: in {_FEWER_BITS} it would still have"
            f" {bytes_text(smaller.stat().st_size)}; use --draft ngram, or the file of a smaller model"
        )
    return smaller


def with_room(options: EngineOptions, draft: str | Path) -> EngineOptions:
    """The same with room for the logits that checking takes, and under a budget for a drafting model. The errors of
    `ModelInfo.of`."""
    if draft == "off":
        return options
    outputs = max(min(MOST_ROWS, options.rows), options.outputs or options.sequences)
    reserved = options.reserved
    if isinstance(draft, Path) and options.memory is not None:
        need = ModelInfo.of(draft, options.context, options.kv_type).need
        reserved += need.total - need.parts["runtime"]
    return replace(options, outputs=outputs, reserved=reserved)


def model_with(draft: str | Path, engine: TextEngine, close: Callable[[], None]) -> Model:
    """A model whose single answers are guessed so. close: ends the engine, also where this fails. The errors of
    `speculation`."""
    with ExitStack() as stack:
        stack.callback(close)
        drafter = speculation(draft, engine, stack.enter_context)
        return Model(engine, stack.pop_all().close, drafter)


def speculation(draft: str | Path, engine: TextEngine, enter: Enter) -> Speculation | None:
    """What guesses for `engine`, which was made with `with_room`; None where nothing does. enter: is given an engine
    that is to be closed later.

    EngineError for a model whose layers cannot forget, unless it is "auto", and for a drafting model of another
    vocabulary; the errors of Engine.
    """
    opened = _opened(draft, engine, enter)
    return None if opened is None else Speculation(opened[0](), opened[1])


def shared_speculation(draft: str | Path, engine: TextEngine, enter: Enter) -> SharedSpeculation | None:
    """The same for requests that share steps. A drafting model guesses for one that is alone. The errors of
    `speculation`."""
    opened = _opened(draft, engine, enter)
    if opened is None:
        return None
    return SharedSpeculation(*opened, 1) if isinstance(draft, Path) else SharedSpeculation(*opened)


def _opened(draft: str | Path, engine: TextEngine, enter: Enter) -> tuple[Callable[[], Drafts], str] | None:
    """What makes drafts, and what they are called."""
    if draft == "off" or (draft == "auto" and engine.model.is_recurrent):
        return None
    if engine.model.is_recurrent:
        raise EngineError(
            f"{engine.path.name} has recurrent layers, which cannot forget a guess that was wrong; use --draft off"
        )
    if not isinstance(draft, Path):
        return NgramDrafts, "ngram"
    file = GgufFile.open(draft)
    check_loadable(file)
    check_vocabulary(engine.file, file)
    budgeted = engine.paging is not None
    options = EngineOptions(context=engine.context, threads=engine.threads, repack=False if budgeted else None)
    small = enter(Engine(draft, options))
    return lambda: ModelDrafts(small), draft.name
