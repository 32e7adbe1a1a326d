"""Plans in files: JSON that a person may edit."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from devices.files import write_whole
from edge.llm.options import MAX_THREADS
from edge.net.channel import parse_address
from partition.errors import PlanError
from partition.plan.formats import plan_in
from partition.plan.onnx_plan import OnnxPlan
from partition.plan.plan import LOCAL, Plan

AnyPlan = TypeVar("AnyPlan", Plan, OnnxPlan)
_NUMBERS = re.compile(r"\[[\d,\s]+\]")


def read_plan(path: Path, kind: type[AnyPlan]) -> AnyPlan:
    """The plan in a file. PlanError, with the file's name, where it holds none of this kind, or one that cannot run."""
    try:
        plan = kind.from_json(plan_in(json.loads(path.read_text(encoding="utf-8"))))
        threads = _threads(plan)
        for device, count in zip(plan.devices, threads, strict=True):
            if device != LOCAL:
                parse_address(device)
            if (count or 1) > MAX_THREADS:
                raise PlanError(f"{device} is to have {count} threads, {MAX_THREADS} are the most")
    except (ValueError, RecursionError) as error:  # among them PlanError, and what is not JSON
        raise PlanError(f"{path} cannot be used as a plan: {error}") from None
    return plan


def save_plan(path: Path, plan: Plan | OnnxPlan, beside: Mapping[str, Any] | None = None) -> None:
    """Write a plan for people to read and edit, and what is to be beside it. OSError where it cannot be written."""
    text = json.dumps({**plan.to_json(), **(beside or {})}, indent=1, ensure_ascii=False)
    text = _NUMBERS.sub(lambda found: " ".join(found[0].split()), text)  # a range on one line
    write_whole(path, (text + "\n").encode())


def _threads(plan: Plan | OnnxPlan) -> list[int | None]:
    """Return the threads of each device in the order of `plan.devices`."""
    if isinstance(plan, OnnxPlan):
        return [stage.threads for stage in plan.stages]
    return [plan.shard(rank).threads for rank in range(plan.world_size)]
