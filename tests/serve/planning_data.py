"""Made-up results of planning, whose plans a server accepts."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest

from edge.models.demo import MODEL_PATH
from edge.serve.planning import advice as advising
from partition.model.file import ModelFile
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL
from partition.slices.gguf_slice import limits
from tests.support.pareto_results import pareto_result

DEVICES = ("laptop", "pi")


def front_of_plans(n_points: int = 40) -> dict[str, Any]:
    """The front of `pareto_result` with plans for the bundled model, all different."""
    result, can = pareto_result(n_points), limits(ModelFile.open(MODEL_PATH))
    result["points"] = [point for point in result["points"] if point["on_front"]]
    cuts = product(DEVICES, ("pipeline", "tensor"), range(1, 8))
    for point, (device, parallel, share) in zip(result["points"], cuts, strict=False):
        point["plan"] = make_plan(can, "edge demo", "", [LOCAL, device], parallel, (share, 8 - share)).to_json()
    return result


def row(name: str, **changes: Any) -> dict[str, Any]:
    """A row of advice."""
    return {
        "model": name, "type": "q8_0", "tokens_per_s": 20.0, "size_bytes": 600 << 20, "pull": name, "on_front": True,
        "memory_bytes": {"local": 800 << 20}, "licence": "apache-2.0", "placement": "resident", "source": name,
        "why": "", **changes,
    }  # fmt: skip


ADVICE = {
    "rows": [row("small"), row("medium", tokens_per_s=9.0), row("large", placement="none", tokens_per_s=None)],
    "devices": ["local"],
    "memory_bytes": {"local": 8 << 30},
    "notes": [],
}


@contextmanager
def advised(result: Any = ADVICE) -> Iterator[None]:
    """Let servers of this process answer with this advice instead of planning."""

    async def planned(*_: object) -> Any:
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advising, "planned", planned)
        yield
