"""A plan that was chosen for one model: it can be saved, loaded and deployed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge.models.paths import PathLike, model_path
from edge.planning.plan_file import read_plan, save_plan
from edge.planning.plan_options import DEFAULTS, PlanOptions, is_onnx
from partition.plan.onnx_plan import OnnxPlan
from partition.plan.plan import Plan
from partition.predict.prediction import Prediction

if TYPE_CHECKING:
    from partition.search.planner import Planner


@dataclass(frozen=True)
class PlanChoice:
    """A plan for one model, and the reason for it. `edge.deploy` and `edge.deploy_onnx` run it.

    Where the planner chose it, a model that runs by it is planned again after a loss, by the same measurements and for
    the same objective. A plan that a person gave, or picked, stays as near as it can be.
    """

    model: Path
    plan: Plan | OnnxPlan
    why: str  # in one line
    predicted: Prediction | None = None  # None for a plan that was read from a file
    options: PlanOptions = DEFAULTS  # the work it was made for; the defaults for a plan that was read from a file
    beside: Mapping[str, Any] = field(default_factory=dict, repr=False)  # what a saved plan has for `edge simulate`
    planner: Planner | None = field(default=None, repr=False)  # of a language model, which chose it; None: a person did
    objective: str = "latency"  # that it is the best by, within `limits`
    limits: Mapping[str, float] = field(default_factory=dict)
    is_given: bool = False  # a person said what each device does
    keeps_off: bool = False  # of a network: this device is to have no stage, also after a loss

    @classmethod
    def load(cls, model: PathLike | None, plan: PathLike, *, options: PlanOptions = DEFAULTS) -> PlanChoice:
        """A saved plan for a model. options: the work it is to do; the file does not say. PlanError where the file
        holds no plan for this kind of model; OSError where it cannot be read."""
        path = model_path(model)
        file = Path(plan)
        chosen = read_plan(file, OnnxPlan) if is_onnx(path) else read_plan(file, Plan)
        return cls(path, chosen, f"as {file} says", options=options, is_given=True)

    def with_own(self, **values: Any) -> PlanChoice:
        """The plan of a language model with what a person said of this device, so that a saved one says it, too.
        values: fields of its shard; None: as planned."""
        assert isinstance(self.plan, Plan)
        first, *others = self.plan.stages
        own, *rest = first.shards
        own = replace(own, **{name: value for name, value in values.items() if value is not None})
        return replace(self, plan=replace(self.plan, stages=(replace(first, shards=(own, *rest)), *others)))

    def save(self, path: PathLike) -> None:
        """Write the plan as JSON, which `load` and the commands' `--plan` take. OSError where it cannot be written."""
        save_plan(Path(path), self.plan, self.beside)
