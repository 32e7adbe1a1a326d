"""Draft models in plans: acceptance rate and drafting time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from devices.cluster_file import Cluster, ClusterDevice
from edge.cluster.fleet import Fleet, device
from edge.llm.info import ModelInfo
from edge.llm.options import EngineOptions
from edge.planning.arrange import measured_speeds, name_of, work_of
from edge.planning.plan_options import PlanOptions
from edge.speculate.factory import MtpDraft, WorkerDraft, drafts
from edge.speculate.hidden_states import MOST_TOKENS
from edge.speculate.mtp import mtp_bytes
from edge.speculate.small_model import check_vocabulary
from edge.tasks import Steps
from partition.architectures.recurrent import RECURRENT_ARCHITECTURES
from partition.architectures.table import RULES
from partition.errors import PlanError
from partition.model.file import ModelFile
from partition.plan.plan import LOCAL
from partition.predict.cost import Work
from partition.predict.drafts import ACCEPTANCE, FREE, MODEL_ACCEPTANCE, MTP, ROLLBACK_ROWS, SELF, Draft
from partition.predict.speeds import DeviceSpeed, Links
from partition.search.planner import Planner

_WHAT = "the draft"  # name of the measured model in progress lines


def draft_of(
    options: PlanOptions, file: ModelFile, cluster: Cluster, work: Work, steps: Steps, *, insecure: bool = False
) -> Draft | None:
    """Return the draft for a model, with the number of rows still open, or None without drafts.

    insecure: allow a drafting worker without encryption.
    A draft model is measured on the device that will draft.
    Raises PlanError if the acceptance rate is invalid, or if the model cannot roll back drafts of this many requests.
    Also raises the errors of `drafts`, of differing vocabularies, of measuring, and of Fleet.
    """
    what, rules = str(options.draft), RULES.get(file.architecture)
    is_recurrent = file.architecture in RECURRENT_ARCHITECTURES
    forgets = rules is None or (rules.rolls_back and not (is_recurrent and work.concurrency > 1))
    if what == "off" or (what == "auto" and not forgets):
        return None
    if not forgets:
        several = rules is not None and rules.rolls_back
        raise PlanError(
            f"{file.path.name} has recurrent layers, which cannot roll back a wrong draft"
            + (
                " with several requests at once; use --draft off, or --concurrency 1"
                if several
                else "; use --draft off"
            )
        )
    draft = _measured_draft(options, file, cluster, work, steps, insecure=insecure)
    return replace(draft, rollback=ROLLBACK_ROWS) if is_recurrent else draft


def _measured_draft(
    options: PlanOptions, file: ModelFile, cluster: Cluster, work: Work, steps: Steps, *, insecure: bool
) -> Draft:
    """Return the draft for a model that can roll back drafts, as `draft_of` does."""
    what = str(options.draft)
    drafts_of_model = drafts(options.draft, file, steps, worker=options.draft_worker, insecure=insecure)
    own_layers = isinstance(drafts_of_model, MtpDraft) and not (drafts_of_model.is_auto and options.memory)
    kind = MTP if own_layers else FREE[0] if what == "auto" else what
    acceptance = ACCEPTANCE.get(kind, MODEL_ACCEPTANCE) if options.acceptance is None else options.acceptance
    here = replace(cluster, devices=tuple(entry for entry in cluster.devices if entry.is_local), links={})
    if own_layers:
        [speed] = measured_speeds(file, here, None, (), options, steps, _WHAT)[1].speeds
        return Draft(MTP, acceptance, 1, _own_layer_s(speed, work), mtp_bytes(file, work.concurrency))
    if isinstance(drafts_of_model, str | MtpDraft):
        return Draft(kind, acceptance, 1)
    drafting = drafts_of_model.file if isinstance(drafts_of_model, WorkerDraft) else drafts_of_model
    check_vocabulary(file, drafting)
    need = ModelInfo.from_file(drafting, EngineOptions(context=work.context)).need
    name = SELF if what == SELF else drafting.path.name
    if options.draft_worker is None:
        [speed] = measured_speeds(drafting, here, None, (), options, steps, _WHAT)[1].speeds
        drafting_s = _drafting_s(drafting, speed, work, "this device")
        return Draft(name, acceptance, 1, drafting_s, need.total - need.parts["runtime"])
    drafter = device(options.draft_worker)
    same = [entry.address for entry in cluster.workers if entry.address and device(entry.address) == drafter]
    with Fleet(same or [drafter], insecure=insecure) as fleet:
        known = measured_speeds(drafting, _with_worker(cluster, fleet), fleet, (), options, steps, _WHAT)[1]
    speed = known.speeds[-1]
    drafting_s = _drafting_s(drafting, speed, work, speed.name)
    ask_s = sum(known.links.get(*way).latency_s for way in ((LOCAL, speed.device), (speed.device, LOCAL)))
    return Draft(name, acceptance, 1, drafting_s, need.total, worker=speed.device, ask_s=ask_s)


def assumed_text(draft: Draft, acceptance: float | None) -> str:
    """Return a sentence about the acceptance rate behind plans with drafts. acceptance: rate from the user."""
    whose = "usual for such drafts" if acceptance is None else "as given"
    return f"of the drafts of {draft.name}, {draft.acceptance:g} are assumed to be right ({whose}; --acceptance A)"


def with_drafts(work: Work, draft: Draft | None, devices: int = 1) -> list[Work]:
    """Return the workload without drafts, then one copy of it for each useful number of draft rows.

    If the plan can have stages on several devices, several windows of one row are useful, too.
    """
    if draft is None or not draft.acceptance:
        return [work]
    sizes = [rows for rows in draft.possible_rows if rows > 1 or (devices > 1 and len(draft.possible_windows) > 1)]
    return [work, *(replace(work, draft=replace(draft, rows=rows)) for rows in sizes)]


def with_draft_held(speeds: Sequence[DeviceSpeed], draft: Draft | None) -> list[DeviceSpeed]:
    """Return the devices, with the memory for drafting added to the drafting device."""
    if draft is None:
        return list(speeds)
    owner, n_bytes = draft.worker or LOCAL, draft.held_bytes
    return [
        replace(speed, runtime_bytes=speed.runtime_bytes + n_bytes) if speed.device == owner else speed
        for speed in speeds
    ]


def _with_worker(cluster: Cluster, fleet: Fleet) -> Cluster:
    """Return this device and the only worker of `fleet`, with the cluster's settings for them and their link."""
    ((address, worker),) = fleet.workers.items()
    said = [entry for entry in cluster.devices if entry.is_local or entry.address == address]
    new = [] if any(entry.address == address for entry in said) else [ClusterDevice(worker.label, address)]
    return replace(cluster, devices=(*said, *new))


def _own_layer_s(speed: DeviceSpeed, work: Work) -> float:
    """Return the seconds for drafting a token with the model's own draft layer, including attention and the head."""
    attention_s = speed.token_s * min(work.depth, MOST_TOKENS)
    return speed.step_s.at(1) + speed.layer_s.at(1) + attention_s + speed.head_s.at(1)


def _drafting_s(file: ModelFile, speed: DeviceSpeed, target: Work, where: str) -> float:
    """Return the seconds per token of a draft model on one device. where: name of the device for errors."""
    work = work_of(file, EngineOptions(context=target.context))
    placed = Planner(work, [replace(speed, device=LOCAL)], Links(), name_of(file), "").best("latency", {})
    if placed is None:
        raise PlanError(f"{file.path.name} does not fit on {where}; use a smaller model, or --draft {FREE[0]}")
    return placed.objectives[0]
