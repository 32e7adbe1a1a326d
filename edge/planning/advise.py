"""Rank published models by their predicted answer time on the available devices, and by size.

Nothing is downloaded. A model's size (parameters x bits per parameter) stands for its quality: among models of the same
year a larger one is usually better, and fewer bits reduce quality. The output calls this a rule of thumb.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from devices.probe import available_memory
from edge.llm.options import DEFAULT_CONTEXT, DEFAULTS, EngineOptions
from edge.models.catalog import KnownModel
from edge.planning.advised_speeds import ESTIMATED, PRESET, CandidateSpeeds, Profile, speeds_of_all
from edge.planning.arrange import work_of
from edge.planning.candidates import Candidate, candidates
from edge.planning.llm_space import LlmSpace
from edge.planning.plan_options import PlanOptions, plan_options
from edge.planning.type_files import TypeFile
from edge.profiling.cluster import Cluster
from edge.profiling.llm_survey import Estimator, estimated, llm_speeds, overrides
from edge.profiling.profile import profiled
from edge.tasks import SILENT, Steps
from partition.errors import CannotSlice, PlanError
from partition.plan.plan import LOCAL
from partition.predict.pareto import Point
from quant.front import non_dominated
from quant.mixes import mix_by_name

FORMAT = "edge-advice-1"
ANSWER_TOKENS = 200  # length of the timed answer
LINES_S = (10.0, 30.0)  # an answer feels quick below the first limit, and acceptable below the second


@dataclass(frozen=True)
class Task:
    """Typical use of a model, with its prompt length."""

    prompt_tokens: int  # prompt tokens computed before the first answer token
    context: int  # KV cache in tokens


TASKS: Mapping[str, Task] = {
    "chat": Task(128, 4096),  # a question and the part of the conversation that is not cached
    "code": Task(1024, 8192),  # a file and the requested change
    "long": Task(6000, 8192),  # a document
}


@dataclass(frozen=True)
class AdviceOptions:
    """Options of `edge advise`. Limits apply to this device."""

    task: str = "chat"
    types: Sequence[str] = ()  # quantization types to consider instead of the published ones
    min_tokens_per_s: float = 0.0
    measure: bool = False  # measure the devices instead of estimating them
    every: bool = False  # measure each model instead of interpolating
    engine: EngineOptions = DEFAULTS  # its memory is that of this device
    fresh: bool = False


@dataclass(frozen=True)
class Row:
    """One model in one type on the devices."""

    candidate: Candidate
    speeds: CandidateSpeeds
    point: Point | None  # best plan; None if no plan fits
    why: str  # one line: the reason for the plan, or the reason why no plan fits
    command: str  # shell command that runs the model; "" if no plan fits
    on_front: bool = False

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of a single request."""
        assert self.point is not None
        return 1 / self.point.predicted.latency_s

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token for the task's prompt."""
        assert self.point is not None
        return float(self.point.predicted.ttft_s or 0.0)

    @property
    def answer_s(self) -> float:
        """Seconds to the end of an answer of ANSWER_TOKENS tokens."""
        assert self.point is not None
        return self.ttft_s + (ANSWER_TOKENS - 1) * self.point.predicted.latency_s

    @property
    def placement(self) -> str:
        """One of "resident", "paged", "spread" and "none"."""
        if self.point is None:
            return "none"
        predicted = self.point.predicted
        if any(stage.paged_bytes for stage in predicted.stages):
            return "paged"
        return "spread" if len(predicted.memory_bytes) > 1 else "resident"

    def to_json(self) -> dict[str, Any]:
        """Return the JSON values that docs/advise.md describes."""
        model, shape = self.candidate.model, self.candidate.shape
        names = {speed.device: speed.name for speed in self.speeds.profile.speeds}
        values: dict[str, Any] = {
            "model": model.name,
            "type": self.candidate.mix.name,
            "parameters": shape.n_params,
            "bits_per_weight": 8 * shape.weight_bytes / shape.n_params,
            "size_bytes": shape.weight_bytes,
            "context": shape.context_length,
            "licence": model.licence,
            "source": model.source,
            "scores": [score.to_json() for score in model.scores],
            "placement": self.placement,
            "figures": self.speeds.figures,
            "measured": list(self.speeds.sources),
            "why": self.why,
            "on_front": self.on_front,
            "command": self.command,
            "pull": "" if model.types and self.candidate.mix.name not in model.types else _source(self.candidate),
        }
        figures: dict[str, Any] = dict.fromkeys(("memory_bytes", "tokens_per_s", "ttft_s", "answer_s", "within_s"))
        if self.point is not None:
            memory = self.point.predicted.memory_bytes
            figures = {
                "memory_bytes": {names[device]: n for device, n in memory.items()},
                "tokens_per_s": self.tokens_per_s,
                "ttft_s": self.ttft_s,
                "answer_s": self.answer_s,
                "within_s": next((line for line in LINES_S if self.answer_s <= line), None),
            }
        return values | figures


@dataclass(frozen=True)
class Advice:
    """All rows: first the models that fit, sorted by answer time, then the models that do not fit."""

    options: AdviceOptions
    devices: Mapping[str, int]  # memory in bytes by device name
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the JSON values that docs/advise.md describes."""
        task = TASKS[self.options.task]
        return {
            "format": FORMAT,
            "task": self.options.task,
            "prompt_tokens": task.prompt_tokens,
            "answer_tokens": ANSWER_TOKENS,
            "context": task.context,
            "devices": list(self.devices),
            "memory_bytes": dict(self.devices),
            "rows": [row.to_json() for row in self.rows],
            "notes": list(self.notes),
        }


def advise(models: Sequence[KnownModel], cluster: Cluster, options: AdviceOptions, steps: Steps = SILENT) -> Advice:
    """Predict each model in each of its types on the devices of an open cluster.

    Raises PlanError if no model fits or is fast enough, and the errors of `candidates` and of measuring.
    """
    if options.task not in TASKS:
        raise PlanError(f"the task {options.task[:40]!r} is unknown; choose one of {', '.join(TASKS)}")
    task = TASKS[options.task]
    least = task.prompt_tokens + ANSWER_TOKENS
    with candidates(models, options.types, steps) as known:
        fitting = [candidate for candidate in known if candidate.shape.context_length >= least]
        if not fitting:
            raise PlanError(
                f"no model has a context of {least} tokens, which the task"
                f" {options.task!r} needs; choose another --task, or other models"
            )
        speeds = _speeds(fitting, cluster, options, steps)
        rows = [_row(candidate, own, cluster, options) for candidate, own in zip(fitting, speeds, strict=True)]
    running = sorted((row for row in rows if row.point is not None), key=lambda row: row.answer_s)
    if not running:
        raise PlanError(f"no model fits: {min(rows, key=lambda row: row.candidate.shape.weight_bytes).why}")
    quick = [row for row in running if row.tokens_per_s >= options.min_tokens_per_s]
    if not quick:
        best = max(running, key=lambda row: row.tokens_per_s)
        raise PlanError(
            f"no model makes {options.min_tokens_per_s:g} tokens a second here; the most is {best.tokens_per_s:.3g}, by"
            f" {best.candidate.name}: use a lower --min-speed"
        )
    front = non_dominated(quick, lambda row: (row.answer_s, -row.candidate.shape.weight_bytes))
    ordered = [replace(row, on_front=row in front) for row in quick]
    ordered += [row for row in rows if row.point is None]
    profile = speeds[0].profile
    notes = dict.fromkeys(note for of_one in speeds for note in of_one.profile.notes)
    busy = sorted({speed.name for of_one in speeds for speed in of_one.profile.speeds if speed.busy})
    if busy:
        notes[f"measured while busy: {', '.join(busy)}; it may be faster, and is measured again next time"] = None
    return Advice(options, {speed.name: speed.memory_bytes for speed in profile.speeds}, tuple(ordered), tuple(notes))


def _speeds(
    fitting: Sequence[Candidate], cluster: Cluster, options: AdviceOptions, steps: Steps
) -> list[CandidateSpeeds]:
    """Return the speeds of the devices for each candidate: of presets, estimated, or measured."""
    own = cluster.devices.local
    if cluster.fleet is None and own is not None and own.preset is not None:
        return [CandidateSpeeds(_profile(candidate, cluster, options, steps), PRESET) for candidate in fitting]
    if options.measure:
        return speeds_of_all(
            fitting,
            lambda candidate: _profile(candidate, cluster, options, steps),
            memory_bytes=_memory_bytes(cluster, options),
            every=options.every,
        )
    with steps.step("Estimating devices"):
        estimator = Estimator(cluster.fleet, *overrides(cluster.devices, options.engine.threads, options.engine.memory))
        profiles = [
            profiled(
                cluster.devices,
                estimator.survey(candidate.file, remembered=False),
                lambda device, file=candidate.file: estimated(device, file),  # type: ignore[misc]
                cluster.notes,
            )
            for candidate in fitting
        ]
    return [CandidateSpeeds(profile, ESTIMATED) for profile in profiles]


def _memory_bytes(cluster: Cluster, options: AdviceOptions) -> int:
    """Return the total memory of the devices in bytes."""
    workers = cluster.fleet.workers if cluster.fleet else ()
    others = sum(cluster.fleet.memory_of(address) for address in workers) if cluster.fleet else 0
    return min(available_memory(), options.engine.memory or available_memory()) + others


def _profile(candidate: Candidate, cluster: Cluster, options: AdviceOptions, steps: Steps) -> Profile:
    with steps.step(f"Measuring {candidate.name}", unit="steps") as show:
        return llm_speeds(
            cluster.devices,
            cluster.fleet,
            cluster.notes,
            candidate.file,
            candidate.digest,
            threads=options.engine.threads,
            memory=options.engine.memory,
            fresh=options.fresh,
            seconds=PlanOptions().survey_s,
            on_step=show,
        )


def _row(candidate: Candidate, speeds: CandidateSpeeds, cluster: Cluster, options: AdviceOptions) -> Row:
    """Plan one candidate as `edge plan` plans a file."""
    task = TASKS[options.task]
    engine = replace(options.engine, context=min(task.context, candidate.shape.context_length))
    depth = task.prompt_tokens + ANSWER_TOKENS // 2
    work = work_of(candidate.file, engine, prompt=task.prompt_tokens, depth=depth)
    space = LlmSpace(
        candidate.file, candidate.digest, work, speeds.profile,
        plan_options(engine), TypeFile(candidate.mix.name, candidate.file), phases=False,
    )  # fmt: skip
    try:
        point, why = space.best("latency", {})
    except (PlanError, CannotSlice) as error:
        return Row(candidate, speeds, None, str(error), "")
    return Row(candidate, speeds, point, why, _command(candidate, point, speeds.profile, work.context, cluster))


def _command(candidate: Candidate, point: Point, profile: Profile, context: int, cluster: Cluster) -> str:
    """Return the command line that downloads and runs a candidate, or "" if its model is not published.

    If the type is not published, the command line first quantizes a published file. For preset devices, the names of
    the presets stand in for addresses.
    """
    source, first = _source(candidate), ""
    if not source:
        return ""
    if candidate.mix.name not in candidate.model.types and candidate.model.types:
        file_name = f"{candidate.model.name}-{candidate.mix.name}.gguf"
        first, source = f"edge quantize {_widest(candidate)} {file_name} --type {candidate.mix.name} && ", file_name
    words = ["edge", "chat", source]
    if context != DEFAULT_CONTEXT:
        words += ["--context", str(context)]
    own = next(speed for speed in profile.speeds if speed.device == LOCAL)
    on_gpu = sum((stage.gpu_bytes or {}).get(LOCAL, 0) for stage in point.predicted.stages)
    in_memory = point.predicted.memory_bytes.get(LOCAL, 0) - on_gpu
    if in_memory >= own.memory_bytes:  # this device is full, so the rest is paged
        words += ["--memory", f"{own.memory_bytes >> 20}MiB"]
    addresses = [device for device in dict.fromkeys(point.plan.devices) if device != LOCAL]
    if addresses:
        words += ["--workers", ",".join(addresses)]
        words += ["--insecure"] if cluster.insecure else []
    return first + shlex.join(words)


def _source(candidate: Candidate) -> str:
    """Return the name under which `edge chat` finds the file of this type."""
    model = candidate.model
    if not model.source:
        return ""
    if candidate.mix.name in model.types[:1] or not model.repo:
        return model.name
    return f"{model.repo}:{candidate.mix.name}"


def _widest(candidate: Candidate) -> str:
    """Return the published file with the most bits per weight, as the source for quantization."""
    best = max(candidate.model.types, key=lambda name: mix_by_name(name).type.bits_per_weight)
    return f"{candidate.model.repo}:{best}" if candidate.model.repo else candidate.model.name
