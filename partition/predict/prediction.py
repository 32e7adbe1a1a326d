"""Prediction of a plan and of each of its stages, for language models and ONNX models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from partition import fields
from partition.errors import PlanError
from partition.fields import Bounds
from partition.predict.drafts import Draft
from partition.predict.speeds import Curve
from quant.text import number_text

NO_LAYERS = "tokens only"  # description of a thin owner's stage


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """Prediction of one stage. Times are for one step or one input."""

    devices: tuple[str, ...]  # device addresses, by rank
    what: Annotated[str, Bounds(4096)]  # contents in the model's terms, for example "layers 0-13" or "up to features.6"
    compute_s: float  # seconds of one row or input, for the latency
    busy_s: float  # seconds that one microbatch or input occupies the stage, with everything in flight
    transfer_s: float  # seconds until the output has arrived at the next stage or the owner
    transfer_busy_s: float  # seconds that one microbatch or input occupies the link
    memory_bytes: Mapping[str, Annotated[int, Bounds(fields.MOST_BYTES)]]  # by device
    # Language model: seconds of a step by its rows, and of the whole prompt as the last point; ONNX: one input.
    rows_s: Curve
    sums_s: float = 0.0  # part of compute_s for all-reduces between the stage's ranks
    # Weights read again from disk in every step, by the rank with the most.
    paged_bytes: Annotated[int, Bounds(fields.MOST_BYTES)] = 0
    crowding: float = 1.0  # slowdown factor while other stages of its host compute
    # Part of `memory_bytes` in GPU memory, by device. None: no device with a described GPU.
    gpu_bytes: Mapping[str, Annotated[int, Bounds(fields.MOST_BYTES)]] | None = None

    def __post_init__(self) -> None:
        if not self.devices:
            raise PlanError("devices is empty; expected one device or more")

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return fields.encoded(self, without=("gpu_bytes",))

    @property
    def computes(self) -> bool:
        """True unless it is the stage of a thin owner."""
        return self.what != NO_LAYERS


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted performance of a plan."""

    latency_s: float  # language model: seconds between two tokens of a lone request; ONNX: seconds of a lone input
    throughput_per_s: float  # tokens or inputs per second, with `in_flight` requests or inputs
    ttft_s: float | None  # language model: seconds from a lone request's prompt to its first token
    prompt: Annotated[int | None, Bounds(fields.MOST, 1)]  # number of prompt tokens that `ttft_s` is predicted for
    energy_j: float | None  # joules per token or input; None if a device's power is unknown
    enter_s: float  # seconds until the owner's data has arrived at the first stage
    stages: tuple[StagePrediction, ...]
    in_flight: Annotated[int, Bounds(fields.MOST, 1)]  # number of requests or inputs for the throughput
    microbatches: Annotated[int, Bounds(fields.MOST, 1)]  # groups that the requests form
    enter_busy_s: float = 0.0  # seconds that one input occupies the link to the first stage
    draft: Draft | None = None  # drafting assumed by the latency, and by the throughput of a lone request; None: none
    # Nats per token between the quantization type and its source model; None: not measured.
    divergence: float | None = None
    prefill: Prediction | None = None  # prediction of a separate prefill placement; ttft_s includes both placements
    hand_over_s: float = 0.0  # seconds from the end of prefill until the KV cache has arrived at the decode placement
    # Plan with replicas: all copies, each with its requests and its throughput beside the others. A copy without
    # requests has a throughput of 0. The first copy has the latency and the stages of the whole plan.
    copies: tuple[Prediction, ...] = ()

    def __post_init__(self) -> None:
        if not self.stages:
            raise PlanError("stages is empty; expected one stage or more")
        if (self.ttft_s is None) != (self.prompt is None):
            raise PlanError("ttft_s and prompt are for language models; expected both or neither")

    @property
    def n_stages(self) -> int:
        """Number of stages that compute. If there are several, as many steps are in flight."""
        return sum(stage.computes for stage in self.stages)

    @property
    def plain_s(self) -> float:
        """Latency without speculative decoding."""
        return self.enter_s + sum(stage.compute_s + stage.transfer_s for stage in self.stages)

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Peak memory of each device, summed over both placements if there are two, and over all copies."""
        if self.copies:
            total: Counter[str] = Counter()
            for copy in self.copies:
                total.update(copy.memory_bytes)
            return dict(total)
        most: dict[str, int] = {}
        for stage in self.stages:
            for name, n in stage.memory_bytes.items():
                most[name] = max(n, most.get(name, 0))
        for name, n in (self.prefill.memory_bytes if self.prefill else {}).items():
            most[name] = n + most.get(name, 0)
        return most

    @property
    def bound(self) -> str:
        """Sentence about the largest part of a pass of one row or input."""
        parts = []
        for i, stage in enumerate(self.stages):
            devices = " and ".join(stage.devices)
            parts.append((stage.compute_s - stage.sums_s, f"computing on {devices}"))
            if stage.sums_s:
                parts.append((stage.sums_s, f"sums between {devices}"))
            goes_to = "back" if i + 1 == len(self.stages) else f"to {self.stages[i + 1].devices[0]}"
            parts.append((stage.transfer_s, f"the way from {stage.devices[0]} {goes_to}"))
        parts.append((self.enter_s, f"the way to {self.stages[0].devices[0]}"))
        seconds, description = max(parts, key=lambda part: part[0])
        return f"{description} takes {number_text(seconds * 1e3)} of {number_text(self.plain_s * 1e3)} ms"

    def renamed(self, names: Mapping[str, str]) -> Prediction:
        """Return the prediction with other device names. Devices missing in `names` keep theirs."""
        stages = tuple(
            replace(
                stage,
                devices=tuple(names.get(device, device) for device in stage.devices),
                memory_bytes={names.get(device, device): n for device, n in stage.memory_bytes.items()},
                gpu_bytes=stage.gpu_bytes and {names.get(device, device): n for device, n in stage.gpu_bytes.items()},
            )
            for stage in self.stages
        )
        prefill, copies = (
            self.prefill and self.prefill.renamed(names),
            tuple(copy.renamed(names) for copy in self.copies),
        )
        return replace(self, stages=stages, prefill=prefill, copies=copies)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON, as `edge plan --json` and `edge pareto --json` print them."""
        plain = fields.encoded(self, without=("prefill", "hand_over_s", "copies"))
        return {**plain, "memory_bytes": self.memory_bytes, "bound": self.bound}

    @classmethod
    def from_json(cls, values: Any, where: str = "predicted") -> Prediction:
        """Read the prediction that `to_json` wrote.

        where: name of the value in errors.

        Derived values ("memory_bytes" of all stages, "bound") are ignored. Raises PlanError for invalid values.
        """
        # Nested predictions are refused before they are read, because they may be nested a thousand levels deep.
        if isinstance(values, dict):
            prefill, copies = values.get("prefill"), values.get("copies")
            if isinstance(prefill, dict) and prefill.get("prefill") is not None:
                raise PlanError(f"{where}.prefill: it has a prefill of its own; leave that out")
            nested = [("prefill", prefill)]
            nested += [(f"copies[{i}]", copy) for i, copy in enumerate(copies if isinstance(copies, list) else ())]
            for name, value in nested:
                if isinstance(value, dict) and value.get("copies"):
                    raise PlanError(f"{where}.{name}: it has copies of its own; leave those out")
        return fields.decoded(cls, values, where, derived=("memory_bytes", "bound"))
