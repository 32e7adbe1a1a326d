"""Prediction of a plan, part by part, for language models and ONNX models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from partition import fields
from partition.errors import PlanError
from partition.predict.drafts import Draft
from partition.predict.speeds import Curve, curve_of, curve_to_json
from quant.text import number_text

_LONGEST = 4096  # characters: what a stage holds is told by names that are the model's
_MOST = 1e15
_STAGE_SECONDS = ("compute_s", "busy_s", "transfer_s", "transfer_busy_s", "sums_s")


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """Prediction of one stage. Seconds are of one step, or one input; `busy_s` is with all that is in flight."""

    devices: tuple[str, ...]  # as in the plan
    what: str  # "layers 0-13", "up to features.6"
    compute_s: float  # alone, for latency
    busy_s: float  # seconds the stage is busy with one microbatch, or one input
    transfer_s: float  # until what it makes has arrived at the next stage, or at the owner
    transfer_busy_s: float  # seconds the link is busy with it
    memory_bytes: Mapping[str, int]  # by device
    rows_s: Curve  # of a language model: a step by its rows, the longest one its whole prompt. Else: one input
    sums_s: float = 0.0  # of compute_s: sums over the stage's ranks
    paged_bytes: int = 0  # weights read from the disk again for every step, by the rank that reads the longest
    crowding: float = 1.0  # it takes so many times as long while other stages of its machine compute

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "devices": list(self.devices),
            "what": self.what,
            "compute_s": self.compute_s,
            "busy_s": self.busy_s,
            "transfer_s": self.transfer_s,
            "transfer_busy_s": self.transfer_busy_s,
            "memory_bytes": dict(self.memory_bytes),
            "rows_s": curve_to_json(self.rows_s),
            "sums_s": self.sums_s,
            "paged_bytes": self.paged_bytes,
            "crowding": self.crowding,
        }

    @classmethod
    def from_json(cls, values: Any, where: str = "stage") -> StagePrediction:
        """The prediction that `to_json` wrote; PlanError names what is wrong. where: what the error calls it."""
        stage = fields.record(
            values, where, ("devices", "what", *_STAGE_SECONDS, "memory_bytes", "rows_s", "paged_bytes"), ("crowding",)
        )
        names = fields.items(stage["devices"], f"{where}.devices")
        if not names:
            raise PlanError(f"{where}.devices is empty; needed is one device or more")
        memory = stage["memory_bytes"]
        if not isinstance(memory, dict):
            raise PlanError(f"{where}.memory_bytes: {fields.short(memory)}; needed is an object with bytes by device")
        return cls(
            devices=tuple(fields.text(name, f"{where}.devices[{i}]") for i, name in enumerate(names)),
            what=fields.text(stage["what"], f"{where}.what", _LONGEST),
            memory_bytes={
                fields.text(name, f"{where}.memory_bytes"): fields.number(n, f"{where}.memory_bytes", fields.MOST_BYTES)
                for name, n in memory.items()
            },
            rows_s=curve_of(stage["rows_s"], f"{where}.rows_s"),
            paged_bytes=fields.number(stage["paged_bytes"], f"{where}.paged_bytes", fields.MOST_BYTES),
            crowding=_figure(stage.get("crowding", 1.0), f"{where}.crowding"),
            **{name: _figure(stage[name], f"{where}.{name}") for name in _STAGE_SECONDS},
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """A plan at work."""

    latency_s: float  # of a language model: between two tokens of one request alone. Else: one input alone
    throughput_per_s: float  # tokens, or inputs, with all of them in flight
    ttft_s: float | None  # of a language model: from a prompt to its first token, alone
    prompt: int | None  # tokens of that prompt
    energy_j: float | None  # a token, or an input; None where a device's power is not known
    enter_s: float  # until what the owner sends has arrived at the first stage
    stages: tuple[StagePrediction, ...]
    in_flight: int  # for the throughput: requests, or inputs
    microbatches: int  # groups that the requests form
    enter_busy_s: float = 0.0  # seconds the link to the first stage is busy with one input
    draft: Draft | None = None  # assumed by the latency, and the throughput of one request; None: no drafting

    @property
    def plain_s(self) -> float:
        """Latency without speculative decoding."""
        return self.enter_s + sum(stage.compute_s + stage.transfer_s for stage in self.stages)

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Peak memory of each device."""
        most: dict[str, int] = {}
        for stage in self.stages:
            for name, n in stage.memory_bytes.items():
                most[name] = max(n, most.get(name, 0))
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

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON, as `edge plan --json` and `edge pareto --json` have them."""
        return {
            "latency_s": self.latency_s,
            "throughput_per_s": self.throughput_per_s,
            "ttft_s": self.ttft_s,
            "prompt": self.prompt,
            "energy_j": self.energy_j,
            "memory_bytes": self.memory_bytes,
            "in_flight": self.in_flight,
            "microbatches": self.microbatches,
            "enter_s": self.enter_s,
            "enter_busy_s": self.enter_busy_s,
            "bound": self.bound,
            "draft": None if self.draft is None else self.draft.to_json(),
            "stages": [stage.to_json() for stage in self.stages],
        }

    @classmethod
    def from_json(cls, values: Any, where: str = "predicted") -> Prediction:
        """The prediction that `to_json` wrote; PlanError names what is wrong. where: what the error calls it.

        What follows from the rest ("memory_bytes" of all stages, "bound") is not looked at.
        """
        needed = ("latency_s", "throughput_per_s", "ttft_s", "prompt", "energy_j", "in_flight", "microbatches")
        record = fields.record(
            values, where, (*needed, "enter_s", "stages"), ("enter_busy_s", "memory_bytes", "bound", "draft")
        )
        stages = fields.items(record["stages"], f"{where}.stages")
        ttft, prompt, energy = record["ttft_s"], record["prompt"], record["energy_j"]
        draft = record.get("draft")
        if not stages:
            raise PlanError(f"{where}.stages is empty; needed is one stage or more")
        if (ttft is None) != (prompt is None):
            raise PlanError(f"{where}: ttft_s and prompt are of language models; needed are both of them, or none")
        return cls(
            latency_s=_figure(record["latency_s"], f"{where}.latency_s"),
            throughput_per_s=_figure(record["throughput_per_s"], f"{where}.throughput_per_s"),
            ttft_s=None if ttft is None else _figure(ttft, f"{where}.ttft_s"),
            prompt=None if prompt is None else _count(prompt, f"{where}.prompt"),
            energy_j=None if energy is None else _figure(energy, f"{where}.energy_j"),
            enter_s=_figure(record["enter_s"], f"{where}.enter_s"),
            stages=tuple(StagePrediction.from_json(stage, f"{where}.stages[{i}]") for i, stage in enumerate(stages)),
            in_flight=_count(record["in_flight"], f"{where}.in_flight"),
            microbatches=_count(record["microbatches"], f"{where}.microbatches"),
            enter_busy_s=_figure(record.get("enter_busy_s", 0.0), f"{where}.enter_busy_s"),
            draft=None if draft is None else Draft.from_json(draft, f"{where}.draft"),
        )


def _figure(value: Any, where: str) -> float:
    """A number of 0 or more."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _MOST:
        raise PlanError(f"{where}: {fields.short(value)}; needed is a number from 0 to {_MOST:g}")
    return float(value)


def _count(value: Any, where: str) -> int:
    """A whole number of 1 or more."""
    if not fields.number(value, where):
        raise PlanError(f"{where}: 0; needed is 1 or more")
    return int(value)
