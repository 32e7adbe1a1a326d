"""A plan for an ONNX model: which device computes which nodes of its graph."""

from dataclasses import dataclass
from typing import Any

from partition import fields
from partition.errors import PlanError
from partition.plan.plan import LOCAL, Range, check_device, check_model, tiles

FORMAT = "edge-onnx-plan-1"
MOST_STAGES = 63  # as many workers as a group can have


@dataclass(frozen=True, slots=True)
class OnnxStage:
    """Nodes in a row, in the graph's order, on one device."""

    device: str  # a worker's HOST or HOST:PORT; LOCAL for the owner's own
    nodes: Range
    until: str = ""  # the cut behind it, as a person knows it; for the last stage nothing
    threads: int | None = None  # None, and no affinity: as the device has it
    affinity: tuple[int, ...] = ()  # the processors to run on
    provider: str | None = None  # ONNX Runtime's execution provider; None: the best that the device has

    def __post_init__(self) -> None:
        check_device(self.device, self.threads, self.affinity)
        fields.text(self.until, f"{self.device}: until")

    def to_json(self) -> dict[str, Any]:
        """Plain values. What is as the device has it is left out."""
        return fields.encoded(self, without=("until", "threads", "affinity", "provider"))


@dataclass(frozen=True)
class OnnxPlan:
    """A whole model as a pipeline. PlanError unless every node has its one place.

    LOCAL can be the first device only: the owner's own process is where inputs come from.
    """

    model: str  # its name, for people
    model_digest: str  # SHA-256 of its file; "" where it is not known
    n_nodes: int  # of its graph
    stages: tuple[OnnxStage, ...]

    def __post_init__(self) -> None:
        check_model(self.model, self.model_digest)
        if len(self.stages) > MOST_STAGES:
            raise PlanError(f"{len(self.stages)} stages; the most are {MOST_STAGES}")
        tiles("nodes of the stages", [stage.nodes for stage in self.stages], self.n_nodes)
        for i, device in enumerate(self.devices[1:], 1):
            if device == LOCAL:
                raise PlanError(f"stage {i} is on {LOCAL!r}; only the first one can be")

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each stage."""
        return tuple(stage.device for stage in self.stages)

    @property
    def remote(self) -> tuple[OnnxStage, ...]:
        """The stages on workers: those of ranks 1 and up."""
        return tuple(stage for stage in self.stages if stage.device != LOCAL)

    @property
    def own(self) -> OnnxStage | None:
        """The stage that the owner's process, rank 0, computes; None if it only hands over and takes back."""
        return self.stages[0] if self.stages[0].device == LOCAL else None

    @property
    def cuts(self) -> tuple[int, ...]:
        """Number of nodes before each cut."""
        return tuple(stage.nodes.stop for stage in self.stages[:-1])

    def to_json(self) -> dict[str, Any]:
        """The plan as values that json.dumps takes, for people to read and edit. What a stage leaves open, it lacks."""
        return {"format": FORMAT, **fields.encoded(self)}

    @classmethod
    def from_json(cls, values: Any) -> "OnnxPlan":
        """The plan that `to_json` wrote or a person edited. PlanError names the field that is wrong."""
        return fields.decoded(cls, values, "plan", inside="", format=FORMAT)
