"""Plan for an ONNX model: the device that computes each node of its graph."""

from dataclasses import dataclass
from typing import Any

from partition import fields
from partition.errors import PlanError
from partition.plan.plan import LOCAL, Range, check_device, check_model, tiles

FORMAT = "edge-onnx-plan-1"
MOST_STAGES = 63  # limit of workers in a group


@dataclass(frozen=True, slots=True)
class OnnxStage:
    """Consecutive nodes of the graph on one device."""

    device: str  # a worker's HOST or HOST:PORT; LOCAL for the owner's own device
    nodes: Range
    until: str = ""  # label of the cut after the stage; "" for the last stage
    threads: int | None = None  # number of threads; None: the device's default
    affinity: tuple[int, ...] = ()  # processors to run on; empty: the device's default
    provider: str | None = None  # ONNX Runtime's execution provider; None: the best one of the device

    def __post_init__(self) -> None:
        check_device(self.device, self.threads, self.affinity)
        fields.text(self.until, f"{self.device}: until")

    def to_json(self) -> dict[str, Any]:
        """Return plain values, without values that are the device's default."""
        return fields.encoded(self, without=("until", "threads", "affinity", "provider"))


@dataclass(frozen=True)
class OnnxPlan:
    """A whole model as a pipeline. Raises PlanError unless every node is in exactly one stage.

    LOCAL can be the first device only, because inputs come from the owner's process.
    """

    model: str  # name for people
    model_digest: str  # SHA-256 of the model's file; "" if unknown
    n_nodes: int  # number of nodes of the graph
    stages: tuple[OnnxStage, ...]

    def __post_init__(self) -> None:
        check_model(self.model, self.model_digest)
        if len(self.stages) > MOST_STAGES:
            raise PlanError(f"{len(self.stages)} stages; the maximum is {MOST_STAGES}")
        tiles("nodes of the stages", [stage.nodes for stage in self.stages], self.n_nodes)
        for i, device in enumerate(self.devices[1:], 1):
            if device == LOCAL:
                raise PlanError(f"stage {i} is on {LOCAL!r}; only the first one can be")

    @property
    def devices(self) -> tuple[str, ...]:
        """Device of each stage."""
        return tuple(stage.device for stage in self.stages)

    @property
    def all_devices(self) -> tuple[str, ...]:
        """Devices of the stages, each once."""
        return tuple(dict.fromkeys(self.devices))

    @property
    def remote(self) -> tuple[OnnxStage, ...]:
        """Stages on workers, which have the ranks 1 and up."""
        return tuple(stage for stage in self.stages if stage.device != LOCAL)

    @property
    def own(self) -> OnnxStage | None:
        """Stage that the owner's process, rank 0, computes; None if it only sends inputs and receives outputs."""
        return self.stages[0] if self.stages[0].device == LOCAL else None

    @property
    def cuts(self) -> tuple[int, ...]:
        """Number of nodes before each cut."""
        return tuple(stage.nodes.stop for stage in self.stages[:-1])

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values for people to read and edit. Default values of stages are left out."""
        return {"format": FORMAT, **fields.encoded(self)}

    @classmethod
    def from_json(cls, values: Any) -> "OnnxPlan":
        """Return the plan that `to_json` wrote or a person edited. Raises PlanError, which names the wrong field."""
        return fields.decoded(cls, values, "plan", inside="", format=FORMAT)
