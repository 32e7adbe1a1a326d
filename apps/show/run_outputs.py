"""What `edge run` says: figures of outputs, the likeliest classes, latency and throughput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from apps.show.table import print_columns, print_note, print_table
from quant.text import number_text

if TYPE_CHECKING:
    from edge.onnx.bench import Speed
    from edge.onnx.outputs import Summary, Top


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
                (
                    "latency",
                    f"{number_text(speed.latency_ms_median)} ms (median), {number_text(speed.latency_ms_p90)} ms (p90)",
                )
            )
            rows.append(
                ("throughput", f"{number_text(speed.throughput_per_s)} inputs a second, {speed.window} in flight")
            )
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
