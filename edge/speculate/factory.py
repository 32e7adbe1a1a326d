"""Create drafters from user options, and reserve the memory for verification."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from edge.errors import EngineError, NotEnoughMemory
from edge.llm.engine import Engine
from edge.llm.generate import GreedyDrafter
from edge.llm.info import ModelInfo
from edge.llm.interface import TextEngine
from edge.llm.model import Model
from edge.llm.options import EngineOptions, PrefixOptions, reproducible
from edge.models.paths import PathLike, model_path
from edge.quantization.gguf import model_in_type
from edge.speculate.choice import MOST_ROWS
from edge.speculate.mtp import Predictor, check_mtp, mtp_bytes, mtp_drafts, open_predictor
from edge.speculate.ngrams import NgramDrafts
from edge.speculate.small_model import DraftPace, ModelDrafts, check_vocabulary
from edge.speculate.speculation import Speculation
from edge.tasks import SILENT, Steps
from partition.architectures.table import RULES
from partition.model.file import ModelFile
from partition.predict.drafts import FREE, KINDS, MTP, ROLLBACK_ROWS, SELF
from quant.text import bytes_text

T = TypeVar("T")


class Enter(Protocol):
    """Signature of `ExitStack.enter_context`, which closes its argument later."""

    def __call__(self, opened: AbstractContextManager[T], /) -> T: ...


@dataclass(frozen=True)
class WorkerDraft:
    """Draft model on a worker."""

    file: ModelFile
    worker: str  # worker address
    insecure: bool = False  # allow a worker without encryption


@dataclass(frozen=True)
class MtpDraft:
    """Multi-token prediction layers of the model itself."""

    file: ModelFile
    is_auto: bool = False  # True: not requested explicitly, so n-grams replace them if they cannot be used


Draft = str | ModelFile | WorkerDraft | MtpDraft
"""Source of drafts: one of KINDS, a model file on this device, a model on a worker, or layers of the model itself."""

_FEWER_BITS = "q2_k"
_SMALLER = 0.9  # maximum size relative to the model; a larger draft model cannot be faster


def drafts(
    source: PathLike,
    model: ModelFile,
    steps: Steps = SILENT,
    *,
    worker: str | None = None,
    insecure: bool = False,
) -> Draft:
    """Return one of KINDS or a draft model.

    source: one of KINDS, a model file, REPO:FILE on the hub, which is downloaded, or "self". "self" is `model` in fewer
    bits, which is created once and cached.
    worker: address of the worker for the draft model; None: this device.
    insecure: allow a worker without encryption.
    Raises ModelFileError or HubError; ValueError for a worker without a draft model; and EngineError if the model
    cannot be made much smaller, or if "mtp" is requested and the model has no such layers.
    """
    if str(source) in KINDS:
        if worker is not None:
            raise ValueError(f'a worker drafts by a model, not by {source}: name a small model, or "self"')
        return _own_layers(str(source), model)
    file = ModelFile.open(model_path(source)) if str(source) != SELF else _fewer_bits(model, steps)
    return file if worker is None else WorkerDraft(file, worker, insecure)


def _own_layers(kind: str, model: ModelFile) -> Draft:
    """Return MtpDraft if it is requested, or optional and possible. Otherwise return the kind itself."""
    if kind not in (MTP, "auto"):
        return kind
    try:
        check_mtp(model)
    except EngineError:
        if kind == MTP:
            raise
        return kind
    return MtpDraft(model, kind == "auto")


def _fewer_bits(model: ModelFile, steps: Steps) -> ModelFile:
    """Return the file of the same model in Q2_K, which is created once."""
    smaller = model_in_type(model, _FEWER_BITS, steps)
    if smaller.size_bytes > _SMALLER * model.size_bytes:
        raise EngineError(
            f"{model.path.name} cannot draft for itself: in {_FEWER_BITS} its size would still be"
            f" {bytes_text(smaller.size_bytes)}; use --draft {FREE[0]}, or the file of a smaller model"
        )
    return smaller


def with_room(options: EngineOptions, draft: Draft) -> EngineOptions:
    """Return the options with rows for verification, and with memory for a draft model on this device.

    Raises the errors of `ModelInfo.from_file`.
    """
    if draft == "off":
        return options
    outputs = max(min(MOST_ROWS, options.rows), options.outputs or options.sequences)
    draft_rows = outputs - (options.outputs or options.sequences)
    draft_bytes = 0
    if isinstance(draft, ModelFile) and options.memory is not None:
        need = ModelInfo.from_file(draft, EngineOptions(context=options.context)).need
        draft_bytes = need.total - need.parts["runtime"]
    if isinstance(draft, MtpDraft) and not draft.is_auto and options.memory is not None:
        draft_bytes = mtp_bytes(draft.file, options.sequences)
    reserved = options.reserved + draft_bytes
    # With rollback rows, recurrent layers compute each sequence separately. Several sequences need no drafts.
    rollback = ROLLBACK_ROWS if options.sequences == 1 else 0
    return replace(
        options,
        outputs=outputs,
        draft_rows=draft_rows,
        rollback=min(rollback, outputs - 1),
        reserved=reserved,
        draft_bytes=draft_bytes,
    )


def with_draft_and_cache(
    options: EngineOptions, draft: Draft, *, prefix_cache: int | None, reproducible: bool
) -> EngineOptions:
    """Return the options with rows for drafts and with a prefix cache.

    prefix_cache: bytes on disk; None: the default; 0: no cache.
    Raises EngineError if an option conflicts with reproducible answers.
    """
    options = replace(options, prefixes=PrefixOptions.from_limit(prefix_cache))
    return with_room(reproducible_options(options, draft) if reproducible else options, draft)


def reproducible_options(options: EngineOptions, draft: Draft) -> EngineOptions:
    """Return the options for reproducible answers, as `reproducible` of edge/llm/options.py does.

    Raises EngineError if drafts are on. Pass times decide the number of drafts, and this number changes the last bits.
    """
    if draft != "off":
        raise EngineError('drafts depend on how long passes take; reproducible answers need draft="off"')
    return reproducible(options)


def model_with(draft: Draft, engine: TextEngine, close: Callable[[], None], steps: Steps = SILENT) -> Model:
    """Return a model with this drafter for single answers.

    close: closes the engine, also if this function fails.
    Raises the errors of `speculation`.
    """
    with ExitStack() as stack:
        stack.callback(close)
        drafter = speculation(draft, engine, stack.enter_context, steps)
        return Model(engine, stack.pop_all().close, drafter)


_FREE = {"ngram": NgramDrafts}


def speculation(
    draft: Draft,
    engine: TextEngine,
    enter: Enter,
    steps: Steps = SILENT,
    clock: Callable[[], float] = time.perf_counter,
) -> Speculation | None:
    """Return the drafter of an engine that was made with `with_room`, or None for no drafts.

    A draft model drafts only while a single request runs.
    enter: registers objects to close later.
    steps: shows a worker's loading and loss.
    clock: clock in seconds.
    Raises EngineError if the engine cannot roll back a wrong draft (unless "auto"), or if a draft model has another
    vocabulary. Also raises the errors of Engine, `DraftDevice` and `open_predictor`.
    """
    is_auto = draft == "auto" or (isinstance(draft, MtpDraft) and draft.is_auto)
    if draft == "off" or (is_auto and engine.rollback == 0):
        return None
    if engine.rollback == 0:
        raise EngineError(
            f"{engine.path.name} has recurrent layers, which cannot roll back a wrong draft {_why_not(engine)};"
            " use --draft off"
        )
    if isinstance(draft, MtpDraft):
        predictor = _predictor(draft, engine, enter, steps)
        if predictor is not None:
            own = Speculation(mtp_drafts(predictor, clock), MTP, clock=clock)
            if engine.paging is None:  # a pass that reads weights from disk may take as long as an answer
                own.profile(engine)
            return own
        draft = "auto"
    if isinstance(draft, str):
        kind = FREE[0] if draft == "auto" else draft
        return Speculation(_FREE[kind], kind, clock=clock)
    file = draft.file if isinstance(draft, WorkerDraft) else draft
    check_vocabulary(engine.file, file)
    device = None
    if isinstance(draft, WorkerDraft):
        from edge.cluster.draft_worker import DraftDevice  # imports gRPC

        n_vocab, insecure = engine.model.n_vocab, draft.insecure
        device = enter(DraftDevice(draft.worker, file.path, engine.context, n_vocab, insecure=insecure, steps=steps))
    else:
        options = EngineOptions(
            context=engine.context,
            threads=engine.threads,
            repack=None if engine.paging is None else False,
            gpu_layers=0 if engine.gpu_layers and engine.gpu_layers.budget else None,
        )
        small = GreedyDrafter(enter(Engine(file, options)))
    drafts_of_model = partial(ModelDrafts, device or small, DraftPace(), clock)
    return Speculation(drafts_of_model, file.path.name, 1, device=device, clock=clock)


def _why_not(engine: TextEngine) -> str:
    """Return the reason why an engine's recurrent layers cannot roll back, as the end of a sentence."""
    rules = RULES.get(engine.file.architecture)
    if rules is None or not rules.rolls_back:
        return f"with {engine.file.architecture} models"
    if engine.sequences > 1:
        return "with several requests at once"
    is_thin = engine.gpu_layers is None and engine.memory.parts.get("weights") == 0  # a memory budget has other parts
    return "on a device without layers" if is_thin else "in the memory there is"


def _predictor(draft: MtpDraft, engine: TextEngine, enter: Enter, steps: Steps) -> Predictor | None:
    """Return the predictor of an engine. If it was not requested, return None on failure or under a memory budget.

    Raises the errors of `open_predictor`.
    """
    if draft.is_auto and engine.paging is not None:
        return None
    try:
        return enter(open_predictor(engine, steps))
    except (EngineError, NotEnoughMemory) as error:
        if not draft.is_auto:
            raise
        steps.say(f"drafting from the text by n-grams instead: {error}")
        return None
