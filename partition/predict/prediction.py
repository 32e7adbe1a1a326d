"""Prediction of a plan, part by part, for language models and ONNX models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from partition import fields
from partition.errors import PlanError
from partition.fields import Bounds
from partition.predict.drafts import Draft
from partition.predict.speeds import Curve
from quant.text import number_text

NO_LAYERS = "tokens only"  # what the stage of a thin owner holds


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """Prediction of one stage. Seconds are of one step, or one input; `busy_s` is with all that is in flight."""

    devices: tuple[str, ...]  # as in the plan
    what: Annotated[str, Bounds(4096)]  # names are the model's: "layers 0-13", "up to features.6"
    compute_s: float  # alone, for latency
    busy_s: float  # seconds the stage is busy with one microbatch, or one input
    transfer_s: float  # until what it makes has arrived at the next stage, or at the owner
    transfer_busy_s: float  # seconds the link is busy with it
    memory_bytes: Mapping[str, Annotated[int, Bounds(fields.MOST_BYTES)]]  # by device
    rows_s: Curve  # of a language model: a step by its rows, the longest one its whole prompt. Else: one input
    sums_s: float = 0.0  # of compute_s: sums over the stage's ranks
    # Weights read from the disk again for every step, by the rank that reads the longest.
    paged_bytes: Annotated[int, Bounds(fields.MOST_BYTES)] = 0
    crowding: float = 1.0  # it takes so many times as long while other stages of its machine compute

    def __post_init__(self) -> None:
        if not self.devices:
            raise PlanError("devices is empty; needed is one device or more")

    @property
    def computes(self) -> bool:
        """True if it is not that of a thin owner."""
        return self.what != NO_LAYERS


@dataclass(frozen=True, slots=True)
class Prediction:
    """A plan at work."""

    latency_s: float  # of a language model: between two tokens of one request alone. Else: one input alone
    throughput_per_s: float  # tokens, or inputs, with all of them in flight
    ttft_s: float | None  # of a language model: from a prompt to its first token, alone
    prompt: Annotated[int | None, Bounds(fields.MOST, 1)]  # tokens of that prompt
    energy_j: float | None  # a token, or an input; None where a device's power is not known
    enter_s: float  # until what the owner sends has arrived at the first stage
    stages: tuple[StagePrediction, ...]
    in_flight: Annotated[int, Bounds(fields.MOST, 1)]  # for the throughput: requests, or inputs
    microbatches: Annotated[int, Bounds(fields.MOST, 1)]  # groups that the requests form
    enter_busy_s: float = 0.0  # seconds the link to the first stage is busy with one input
    draft: Draft | None = None  # assumed by the latency, and the throughput of one request; None: no drafting
    divergence: float | None = None  # nats a token of the type from the model it was made from; None: not measured
    prefill: Prediction | None = None  # of the placement that computes prompts, where it is another; ttft_s is of both
    hand_over_s: float = 0.0  # from the end of a prompt there until its keys and values are here

    def __post_init__(self) -> None:
        if not self.stages:
            raise PlanError("stages is empty; needed is one stage or more")
        if (self.ttft_s is None) != (self.prompt is None):
            raise PlanError("ttft_s and prompt are of language models; needed are both of them, or none")

    @property
    def n_stages(self) -> int:
        """Number of stages that compute: as many steps are in flight, where there are several."""
        return sum(stage.computes for stage in self.stages)

    @property
    def plain_s(self) -> float:
        """Latency without speculative decoding."""
        return self.enter_s + sum(stage.compute_s + stage.transfer_s for stage in self.stages)

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Peak memory of each device, for both placements where there are two."""
        most: dict[str, int] = {}
        for stage in self.stages:
            for name, n in stage.memory_bytes.items():
                most[name] = max(n, most.get(name, 0))
        for name, n in (self.prefill.memory_bytes if self.prefill else {}).items():
            most[name] = n + most.get(name, 0)
        return most

    @property
    def bound(self) -> str:
        """Describe the largest part of a pass of one row, or of one input."""
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
        """The same with other names of devices; those that are not among `names` keep theirs."""
        stages = tuple(
            replace(
                stage,
                devices=tuple(names.get(device, device) for device in stage.devices),
                memory_bytes={names.get(device, device): n for device, n in stage.memory_bytes.items()},
            )
            for stage in self.stages
        )
        return replace(self, stages=stages, prefill=self.prefill and self.prefill.renamed(names))

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON, as `edge plan --json` and `edge pareto --json` have them."""
        plain = fields.encoded(self, without=("prefill", "hand_over_s"))
        if self.prefill is not None:
            plain["prefill"] = self.prefill.to_json()
        return {**plain, "memory_bytes": self.memory_bytes, "bound": self.bound}

    @classmethod
    def from_json(cls, values: Any, where: str = "predicted") -> Prediction:
        """The prediction that `to_json` wrote; PlanError names what is wrong. where: what the error calls it.

        What follows from the rest ("memory_bytes" of all stages, "bound") is not looked at.
        """
        prefill = values.get("prefill") if isinstance(values, dict) else None
        if isinstance(prefill, dict) and prefill.get("prefill") is not None:  # it may be nested a thousand deep
            raise PlanError(f"{where}.prefill: it has a prefill of its own; leave that out")
        return fields.decoded(cls, values, where, derived=("memory_bytes", "bound"))
