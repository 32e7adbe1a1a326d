"""Output of `edge run`: figures of outputs, top classes, latency and throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from apps.show.table import figure, print_columns, print_notes, print_table
from quant.text import number_text

if TYPE_CHECKING:
    from edge.onnx.bench import FlowSpeed
    from edge.onnx.inputs import ReadInputs
    from edge.onnx.outputs import TopClasses
    from edge.onnx.samples import Feeds


@dataclass(frozen=True)
class RunResult:
    """Outputs of one run of a model, and how they were computed."""

    inputs: ReadInputs
    outputs: Feeds
    speed: FlowSpeed | None  # None if it was not measured
    about: Mapping[str, Any]  # description of the engine, for --json
    rows: Sequence[tuple[str, str]]  # the same for people, by name
    further: Sequence[str] = ()  # notes of the engine, without full stop

    @property
    def notes(self) -> list[str]:
        """Notes as sentences."""
        return [f"{note}." for note in (*self.inputs.notes, *self.further)]

    def to_json(self, top: TopClasses | None) -> dict[str, Any]:
        """Return plain values. top: the top classes, if there are labels."""
        from edge.onnx.bench import speed_json
        from edge.onnx.outputs import summaries

        speed = self.speed
        return {
            **self.inputs.to_json(),
            **self.about,
            "outputs": [summary.to_json() for summary in summaries(self.outputs)],
            "top": top.to_json() if top else None,
            **speed_json(speed),
            "latency_ms_p90": speed.latency_ms_p90 if speed else None,
            "repeats": speed.repeats if speed else 0,
            "notes": self.notes,
        }

    def show(self, title: str, top: TopClasses | None) -> None:
        """Print the result for people."""
        from edge.onnx.outputs import summaries

        rows, outputs = list(self.rows), summaries(self.outputs)
        if self.speed:
            speed = self.speed
            median, p90 = number_text(speed.latency_ms_median), number_text(speed.latency_ms_p90)
            throughput = f"{number_text(speed.throughput_per_s)} inputs a second, {speed.window} in flight"
            rows += [("latency", f"{median} ms (median), {p90} ms (p90)"), ("throughput", throughput)]
        print_table(title, rows)
        figures = [[figure(value, ".5g") for value in (o.min, o.max, o.mean)] for o in outputs]
        shapes = [" x ".join(map(str, o.shape)) or "scalar" for o in outputs]
        table = [(o.name, shape, o.type, *values) for o, shape, values in zip(outputs, shapes, figures, strict=True)]
        print_columns(("output", "shape", "type", "min", "max", "mean"), table)
        classes = top.rows if top else ()
        for i, row in enumerate(classes):
            print_columns(
                (f"class, row {i}" if len(classes) > 1 else "class", "label", "value"),
                [(str(number), label, figure(value, ".5g")) for number, label, value in row],
            )
        not_finite = (o for o in outputs if o.not_finite)
        print_notes(f"{o.not_finite} values of {o.name} are infinite or not a number." for o in not_finite)
        print_notes(self.notes)
