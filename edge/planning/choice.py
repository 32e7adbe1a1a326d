"""A plan that was chosen for one model: it can be saved, loaded and deployed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge.models.paths import PathLike, model_path
from edge.planning.plan_file import read_plan, save_plan
from edge.planning.spaces import DEFAULTS, PlanOptions, is_onnx
from partition.plan.onnx_plan import OnnxPlan
from partition.plan.plan import Plan
from partition.predict.prediction import Prediction


@dataclass(frozen=True)
class PlanChoice:
    """A plan for one model, and the reason for it. `edge.deploy` and `edge.deploy_onnx` run it."""

    model: Path
    plan: Plan | OnnxPlan
    why: str  # in one line
    predicted: Prediction | None = None  # None for a plan that was read from a file
    options: PlanOptions = DEFAULTS  # the work it was made for; the defaults for a plan that was read from a file
    beside: Mapping[str, Any] = field(default_factory=dict, repr=False)  # what a saved plan has for `edge simulate`

    @classmethod
    def load(cls, model: PathLike | None, plan: PathLike, *, options: PlanOptions = DEFAULTS) -> PlanChoice:
        """A saved plan for a model. options: the work it is to do; the file does not say. PlanError where the file
        holds no plan for this kind of model; OSError where it cannot be read."""
        path = model_path(model)
        file = Path(plan)
        chosen = read_plan(file, OnnxPlan) if is_onnx(path) else read_plan(file, Plan)
        return cls(path, chosen, f"as {file} says", options=options)

    def save(self, path: PathLike) -> None:
        """Write the plan as JSON, which `load` and the commands' `--plan` take. OSError where it cannot be written."""
        save_plan(Path(path), self.plan, self.beside)
