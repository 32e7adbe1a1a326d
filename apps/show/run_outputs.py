"""What `edge run` says: figures of outputs, the likeliest classes, latency and throughput."""

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
class Made:
    """What one model made of one input, and where."""

    given: ReadInputs
    outputs: Feeds
    speed: FlowSpeed | None  # None where nothing was measured
    about: Mapping[str, Any]  # what ran it, for --json
    rows: Sequence[tuple[str, str]]  # the same for people, by name
    further: Sequence[str] = ()  # notes of what ran it, without their full stop

    @property
    def notes(self) -> list[str]:
        """Sentences."""
        return [f"{note}." for note in (*self.given.notes, *self.further)]

    def to_json(self, top: TopClasses | None) -> dict[str, Any]:
        """Plain values. top: the likeliest classes, where there are labels."""
        from edge.onnx.bench import speed_json
        from edge.onnx.outputs import summaries

        speed = self.speed
        return {
            **self.given.to_json(),
            **self.about,
            "outputs": [one.to_json() for one in summaries(self.outputs)],
            "top": top.to_json() if top else None,
            **speed_json(speed),
            "latency_ms_p90": speed.latency_ms_p90 if speed else None,
            "repeats": speed.repeats if speed else 0,
            "notes": self.notes,
        }

    def show(self, title: str, top: TopClasses | None) -> None:
        """Print it for people."""
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
        table = [(o.name, shape, o.type, *of) for o, shape, of in zip(outputs, shapes, figures, strict=True)]
        print_columns(("output", "shape", "type", "min", "max", "mean"), table)
        classes = top.rows if top else ()
        for i, row in enumerate(classes):
            print_columns(
                (f"class, row {i}" if len(classes) > 1 else "class", "label", "value"),
                [(str(number), label, figure(value, ".5g")) for number, label, value in row],
            )
        not_finite = (one for one in outputs if one.not_finite)
        print_notes(f"{one.not_finite} values of {one.name} are infinite or not a number." for one in not_finite)
        print_notes(self.notes)
