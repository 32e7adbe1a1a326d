"""Chosen plan for one model, which can be saved, loaded and deployed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from devices.files import write_whole
from devices.names import parse_address
from edge.arguments import checked
from edge.llm.options import MAX_THREADS
from edge.models.paths import PathLike, model_path
from edge.planning.plan_options import DEFAULTS, PlanOptions, is_onnx
from partition.errors import PlanError
from partition.plan.formats import plan_in
from partition.plan.onnx_plan import OnnxPlan
from partition.plan.plan import LOCAL, Plan
from partition.predict.prediction import Prediction

if TYPE_CHECKING:
    from edge.planning.encoder_place import EncoderPlace
    from partition.model.file import ModelFile
    from partition.search.planner import Planner

AnyPlan = TypeVar("AnyPlan", Plan, OnnxPlan)
_NUMBERS = re.compile(r"\[[\d,\s]+\]")


@dataclass(frozen=True)
class PlanChoice:
    """Plan for one model, and the reason for it. `edge.deploy` and `edge.deploy_onnx` run it.

    After a loss, a plan from the planner is planned again from the same measurements and for the same objective. A plan
    that a user wrote or picked keeps its shares as far as possible.
    """

    model: Path
    plan: Plan | OnnxPlan
    why: str  # reason in one line
    predicted: Prediction | None = None  # None for a saved plan
    options: PlanOptions = DEFAULTS  # workload of the plan; defaults for a saved plan
    figures: Mapping[str, Any] = field(default_factory=dict, repr=False)  # figures for `edge simulate` in a saved plan
    planner: Planner | None = field(default=None, repr=False)  # planner that chose the plan; None: the user chose it
    objective: str = "latency"  # objective that the plan optimizes, within `limits`
    limits: Mapping[str, float] = field(default_factory=dict)
    encoder: EncoderPlace | None = None  # place of the image and audio encoder
    file: ModelFile | None = field(default=None, repr=False, compare=False)  # opened `model`; None: not opened
    is_given: bool = False  # True: the user chose the shares or the kind of parallelism
    parallel: str = "auto"  # kind of parallelism that the user chose, which later plans keep; "auto": any
    keeps_off: bool = False  # True: this device never has a stage of the network

    @classmethod
    @checked
    def load(cls, model: PathLike | None, plan: PathLike, *, options: PlanOptions = DEFAULTS) -> PlanChoice:
        """Return a saved plan for a model.

        options: the workload, which the file does not contain.
        Raises PlanError if the file is not a plan for this kind of model, or OSError if it cannot be read.
        """
        path = model_path(model)
        file = Path(plan)
        chosen = read_plan(file, OnnxPlan) if is_onnx(path) else read_plan(file, Plan)
        return cls(path, chosen, f"as {file} says", options=options, is_given=True)

    def open(self) -> ModelFile:
        """Return the file of the language model, which is opened unless it was before. Raises ModelFileError."""
        from partition.model.file import ModelFile

        return ModelFile.open(self.file or self.model)

    def with_own(self, **values: Any) -> PlanChoice:
        """Return the plan of a language model with a user's options for this device, so that a saved plan contains
        them.

        values: fields of this device's shard; None: as planned.
        """
        assert isinstance(self.plan, Plan)
        changes = {name: value for name, value in values.items() if value is not None}
        return replace(
            self,
            plan=self.plan.with_shards(lambda shard: replace(shard, **changes) if shard.device == LOCAL else shard),
        )

    @checked
    def save(self, path: PathLike) -> None:
        """Write the plan as JSON, for `load` and the commands' `--plan`. Raises OSError if writing fails."""
        save_plan(Path(path), self.plan, self.figures)


def read_plan(path: Path, kind: type[AnyPlan]) -> AnyPlan:
    """Return the plan in a file.

    Raises PlanError with the file's name if the file lacks a plan of this kind, or its plan cannot run.
    """
    try:
        plan = kind.from_json(plan_in(json.loads(path.read_text(encoding="utf-8"))))
        for device, count in _threads(plan):
            if device != LOCAL:
                parse_address(device)
            if (count or 1) > MAX_THREADS:
                raise PlanError(f"{device} has {count} threads; the maximum is {MAX_THREADS}")
    except (ValueError, RecursionError) as error:  # includes PlanError and JSON errors
        raise PlanError(f"{path} cannot be used as a plan: {error}; make one with edge plan") from None
    return plan


def save_plan(path: Path, plan: Plan | OnnxPlan, figures: Mapping[str, Any] | None = None) -> None:
    """Write an editable plan with additional figures. Raises OSError if writing fails."""
    text = json.dumps({**plan.to_json(), **(figures or {})}, indent=1, ensure_ascii=False)
    text = _NUMBERS.sub(lambda match: " ".join(match[0].split()), text)  # keep each range on one line
    write_whole(path, (text + "\n").encode())


def _threads(plan: Plan | OnnxPlan) -> list[tuple[str, int | None]]:
    """Return the device and the threads of each part of a plan."""
    if isinstance(plan, OnnxPlan):
        return [(stage.device, stage.threads) for stage in plan.stages]
    stages = [stage for copy in plan.copies for placement in copy.placements for stage in placement.stages]
    return [(shard.device, shard.threads) for stage in stages for shard in stage.shards]
