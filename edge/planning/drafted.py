"""What a plan may count on where tokens are guessed: how many guesses are right, and what guessing takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from devices.cluster_file import Cluster
from edge.llm.info import ModelInfo
from edge.models.paths import PathLike
from edge.planning.arrange import name_of, work_of
from edge.slices.local import OwnSlices
from edge.speculate.opened import KINDS, SELF, drafts
from edge.speculate.small_model import check_vocabulary
from edge.survey.llm_survey import llm_speeds
from edge.tasks import Steps
from partition.architectures.recurrent import RECURRENT_ARCHITECTURES
from partition.errors import PlanError
from partition.plan.plan import LOCAL
from partition.predict.cost import Work
from partition.predict.drafts import ROWS, Draft
from partition.predict.speeds import DeviceSpeed
from partition.search.planner import Planner
from quant.gguf.file import GgufFile

NGRAM = "ngram"
ACCEPTANCE = {NGRAM: 0.4, SELF: 0.8}  # where none is given; docs/planning.md says whose figures these are
OF_A_MODEL = 0.7


def draft_of(
    draft: PathLike,
    acceptance: float | None,
    file: GgufFile,
    cluster: Cluster,
    work: Work,
    *,
    threads: int | None,
    memory: int | None,
    fresh: bool,
    steps: Steps,
) -> Draft | None:
    """What guesses for a model, as it is asked for, with the rows still to be chosen; None where nothing does.

    acceptance: None is what is usual for such guesses. A drafting model is measured on this device, as other models
    are. PlanError for a model that cannot forget guesses and for an acceptance that cannot be; the errors of `drafts`,
    of vocabularies that differ, and of measuring.
    """
    asked = str(draft)
    recurrent = str(file.metadata.get("general.architecture")) in RECURRENT_ARCHITECTURES
    if asked == "off" or (asked == "auto" and recurrent):
        return None
    if recurrent:
        raise PlanError(
            f"{file.path.name} has recurrent layers, which cannot forget a guess that was wrong; use --draft off"
        )
    if acceptance is None:
        acceptance = ACCEPTANCE.get(NGRAM if asked in KINDS else asked, OF_A_MODEL)
    if asked in KINDS:
        return Draft(NGRAM, acceptance, 1)
    path = drafts(draft, file.path, steps)
    assert isinstance(path, Path)
    drafting = GgufFile.open(path)
    check_vocabulary(file, drafting)
    need = ModelInfo.of(path, work.context, work.kv.name).need
    name = SELF if asked == SELF else path.name
    guess_s = _guess_s(drafting, cluster, work, threads, memory, fresh, steps)
    return Draft(name, acceptance, 1, guess_s, need.total - need.parts["runtime"])


def assumed_text(draft: Draft, acceptance: float | None) -> str:
    """What a person is to know of plans with guesses, in a sentence. acceptance: that was given."""
    whose = "usual for such guesses" if acceptance is None else "as given"
    return f"of the guesses of {draft.name}, {draft.acceptance:g} are taken to be right ({whose}; --acceptance A)"


def with_drafts(work: Work, draft: Draft | None, devices: int = 1) -> list[Work]:
    """The same work, plain and with each number of rows that can be better; stages on several devices may have several
    windows of one row."""
    if draft is None or not draft.acceptance:
        return [work]
    sizes = ROWS if devices > 1 else ROWS[1:]
    return [work, *(replace(work, draft=replace(draft, rows=rows)) for rows in sizes)]


def with_draft_held(speeds: Sequence[DeviceSpeed], draft: Draft | None) -> list[DeviceSpeed]:
    """The devices where this one, the first, holds what guesses, too."""
    first, *others = speeds
    held = 0 if draft is None else draft.held_bytes
    return [replace(first, runtime_bytes=first.runtime_bytes + held), *others]


def _guess_s(
    file: GgufFile,
    cluster: Cluster,
    target: Work,
    threads: int | None,
    memory: int | None,
    fresh: bool,
    steps: Steps,
) -> float:
    """Seconds of a token of a drafting model on this device."""
    own = replace(cluster, devices=tuple(one for one in cluster.devices if one.address == LOCAL), links=())
    with steps.step(f"Reading {file.path.name}") as show:
        digest = OwnSlices().model_digest(file.path, show)
    with steps.step("Measuring the draft", unit="steps") as show:
        known = llm_speeds(own, None, (), file, digest, threads=threads, memory=memory, fresh=fresh, on_step=show)
    work = work_of(file, context=target.context, kv_type=target.kv.name)
    found, _ = Planner(work, known.speeds, known.links, name_of(file), digest).front(("latency",))
    if not found:
        raise PlanError(f"{file.path.name} has no room on this device; use a smaller one, or --draft ngram")
    return found[0].objectives[0]
