"""What `edge run` says: figures of outputs, the likeliest classes, latency and throughput, and stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from apps.show.table import print_columns, print_note, print_table
from quant.text import bytes_text, ms_text

if TYPE_CHECKING:
    from edge.onnx.bench import Speed
    from edge.onnx.outputs import Summary, Top
    from edge.planning.onnx_deployed import Deployed
    from edge.quantization.onnx_compare import OutputError


@dataclass(frozen=True)
class Report:
    """What one model made of one input."""

    outputs: Sequence[Summary]
    top: Top | None  # None without labels
    speed: Speed | None  # None where nothing was measured
    notes: Sequence[str]  # sentences without their full stop

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        from edge.onnx.bench import speed_json

        speed = self.speed
        return {
            "outputs": [one.to_json() for one in self.outputs],
            "top": self.top.to_json() if self.top else None,
            **speed_json(speed),
            "latency_ms_p90": speed.latency_ms_p90 if speed else None,
            "repeats": speed.repeats if speed else 0,
            "notes": [f"{note}." for note in self.notes],
        }

    def show(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Print it for people, below `rows` of (name, value) about what it ran on."""
        rows = list(rows)
        if self.speed:
            speed = self.speed
            rows.append(
                ("latency", f"{ms_text(speed.latency_ms_median)} ms (median), {ms_text(speed.latency_ms_p90)} ms (p90)")
            )
            rows.append(("throughput", f"{speed.throughput_per_s:.4g} inputs a second, {speed.window} in flight"))
        print_table(title, rows)
        print_columns(
            ("output", "shape", "type", "min", "max", "mean"),
            [
                (o.name, " x ".join(map(str, o.shape)) or "scalar", o.type, *map(_figure, (o.min, o.max, o.mean)))
                for o in self.outputs
            ],
        )
        for i, row in enumerate(self.top.rows if self.top else ()):
            many = self.top is not None and len(self.top.rows) > 1
            print_columns(
                (f"class, row {i}" if many else "class", "label", "value"),
                [(str(number), label, _figure(value)) for number, label, value in row],
            )
        for one in self.outputs:
            if one.not_finite:
                print_note(f"{one.not_finite} values of {one.name} are infinite or not a number.")
        for note in self.notes:
            print_note(f"{note}.")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def stage_rows(
    stages: Sequence[Mapping[str, Any]], deployed: Deployed, wire_errors: Sequence[OutputError]
) -> list[tuple[str, str]]:
    """Rows of (name, value): each stage, the reason for the cuts, and what the wire type does to the outputs."""
    rows = [(f"stage {i}", _stage(stage)) for i, stage in enumerate(stages)]
    rows.append(("cut", deployed.why))
    if deployed.wire != "f32":
        rows.append(("wire", f"{deployed.wire}: {'; '.join(map(_error, wire_errors))}"))
    return rows


def _stage(stage: Mapping[str, Any]) -> str:
    start, stop = stage["nodes"]
    parts = [f"{stop - start} nodes" + (f" up to {stage['until']}" if stage["until"] else "")]
    parts.append(f"{bytes_text(stage['weight_bytes'])} of weights")
    if stage["compute_ms_median"] is not None:
        parts.append(f"{ms_text(stage['compute_ms_median'])} ms")
    many = f" in {len(stage['tensors'])} tensors" if len(stage["tensors"]) > 1 else ""
    parts.append(f"gives {bytes_text(stage['payload_bytes'])}{many}")
    return f"{stage['name']}: {', '.join(parts)}"


def _error(error: OutputError) -> str:
    """How far an output is from what it is with F32 on the wire."""
    if error.max_abs is None or error.relative_l2 is None:
        return f"{error.name} cannot be compared"
    return f"{error.name} differs by {error.max_abs:.3g} at most, {100 * error.relative_l2:.2g} % of its norm"
