"""`edge run MODEL.onnx`: computes the outputs of a model, and measures its speed."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps import distributed
from apps.errors import UsageError
from apps.options import add, check_dimensions, check_onnx, check_output, option, refuse, set_common
from apps.show.progress import progress
from apps.show.table import figure, print_columns, print_json, print_notes, print_table
from edge.units import items, natural, number, positive, positive_int
from quant.text import counted, number_text

if TYPE_CHECKING:
    from edge.onnx.bench import Flow, FlowSpeed
    from edge.onnx.engine import OnnxEngine
    from edge.onnx.images import Scaling
    from edge.onnx.inputs import ReadInputs
    from edge.onnx.metadata import Metadata
    from edge.onnx.outputs import TopClasses
    from edge.onnx.paged import PagedNetwork
    from edge.onnx.predictions import Predictions
    from edge.onnx.samples import Feeds, Input
    from partition.plan.onnx_plan import OnnxPlan

_MOST_SHOWN = 20  # rows of predictions
HELP = "Run an ONNX model on a picture or on arrays, and measure its latency and throughput."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    set_common(parser, "--input --output --picture --labels --top --repeats --threads --json --workers")
    parser.add_argument("model", metavar="MODEL.onnx", help="ONNX file")
    add(parser, "--input", default=[])
    option(parser, "--output FILE", "write the outputs to this .npz file")
    add(parser, "--force", help="overwrite FILE")
    option(parser, "--outputs NAME,...", "compute only these outputs of the model (default: all)", items, default=[])
    option(parser, "--picture FILE", "draw the classes, boxes or areas that the outputs contain into this picture")
    option(parser, "--labels FILE", "print the likeliest classes, with names from this file (one in each line)")
    option(parser, "--top N", "with --labels or --picture: number of classes (default: 5)", positive_int, default=5)
    add(parser, "--dim", default=[])
    words = "A pixel becomes (pixel / scale - mean) / std if the input has floats."
    group = parser.add_argument_group("pictures", words)
    option(group, "--mean R,G,B", "mean of each channel (default: the model's metadata, or else ImageNet's)", _channels)
    option(group, "--std R,G,B", "standard deviation of each channel (default: as for --mean)", _divisors)
    option(group, "--scale S", "only divide by S, without mean and std: 255 gives values from 0 to 1", positive)
    option(parser, "--repeats N", "runs of each measurement; 0: do not measure (default: 10)", natural, default=10)
    add(parser, "--threads")
    words = "budget of this process: weights that do not fit are read from disk in every run"
    add(parser, "--memory", help=words)
    option(parser, "--provider NAME", "execution provider of ONNX Runtime (default: the best available)", str.lower)
    add(parser, "--json")
    distributed.add_arguments(parser, onnx=True)


def run(args: argparse.Namespace) -> int:
    scaling = _check(args)
    devices = distributed.prepare_onnx(args)
    labels = None
    if args.labels is not None:
        from edge.onnx.outputs import read_labels

        labels = read_labels(Path(args.labels))
    metadata = _metadata(args)
    if devices is not None and devices.workers:
        result = _there(args, scaling, metadata, devices)
    else:
        if devices is not None and devices.plan is not None:
            from edge.onnx.file import load
            from edge.onnx.model import OnnxSource

            OnnxSource.from_file(load(Path(args.model)), dict(args.dim)).check(devices.plan)
        result = _here(args, scaling, metadata)
    from edge.onnx.outputs import top_classes, write

    if args.picture is not None:
        result = replace(result, predictions=_draw(args, result, metadata, labels or ()))
        labels = None
    top = top_classes(result.outputs, labels, args.top) if labels is not None else None
    if args.output is not None:
        write(Path(args.output), result.outputs)
    if args.json:
        return print_json({"model": args.model, "output": args.output, **result.to_json(top)})
    result.show(args.model, top)
    return 0


def _metadata(args: argparse.Namespace) -> Metadata:
    """Return the metadata of the model if an input is a picture, and nothing otherwise."""
    from edge.onnx.inputs import is_arrays, path_of
    from edge.onnx.metadata import NOTHING, metadata_of

    if all(is_arrays(path_of(text)) for text in args.input):
        return NOTHING
    from edge.onnx.lean import load_lean
    from edge.onnx.paged import LARGE

    return metadata_of(load_lean(Path(args.model), LARGE).file.model)


def _draw(args: argparse.Namespace, result: RunResult, metadata: Metadata, labels: Sequence[str]) -> Predictions:
    """Write the picture of --picture. Raises TextError if the outputs contain no predictions."""
    from edge.onnx.predictions import predictions
    from edge.pictures.drawing import draw

    [its_picture] = result.inputs.pictures.values()
    its_predictions = predictions(result.outputs, its_picture, metadata, labels, args.top)
    draw(its_picture, its_predictions, Path(args.picture))
    return its_predictions


def _here(args: argparse.Namespace, scaling: Scaling | None, metadata: Metadata) -> RunResult:
    """Run the model on this device alone: one engine computes one input at a time, with all its threads."""
    from edge.onnx.engine import OnnxEngine
    from edge.onnx.inputs import read

    if args.memory is not None:
        return _within_memory(args, scaling, metadata)
    with OnnxEngine(Path(args.model), args.threads, args.provider, dims=dict(args.dim), outputs=args.outputs) as engine:
        if args.output is not None:
            check_output(Path(args.output), engine.files, args.force)  # external files with weights count as sources
        inputs = read(engine.inputs, args.input, scaling, metadata)
        return _run_engine(args, engine, inputs, _preparing(args, engine.inputs, inputs, metadata))


def _within_memory(args: argparse.Namespace, scaling: Scaling | None, metadata: Metadata) -> RunResult:
    """Run the model on this device within a memory budget."""
    from edge.onnx.inputs import read
    from edge.onnx.lean import load_lean
    from edge.onnx.model import declared_inputs
    from edge.onnx.paged import LARGE, PagedNetwork
    from edge.onnx.signature import with_dims

    lean, dims = load_lean(Path(args.model), LARGE), dict(args.dim)
    if args.output is not None:
        check_output(Path(args.output), [lean.file.path, *lean.file.data_files], args.force)
    declared = with_dims(declared_inputs(lean.file), dims)
    inputs = read(declared, args.input, scaling, metadata)
    preparing_ms = _preparing(args, declared, inputs, metadata)
    paged = PagedNetwork(lean, args.memory, args.threads, dims=dims, outputs=args.outputs, feeds=inputs.feeds)
    with paged as network:
        result = _run_engine(args, network, inputs, preparing_ms)
        memory = [("memory", network.describe())]
        return replace(result, about={**result.about, **network.to_json()}, rows=[*result.rows, *memory])


def _preparing(
    args: argparse.Namespace, inputs: tuple[Input, ...], read_inputs: ReadInputs, metadata: Metadata
) -> dict[str, float] | None:
    """Return the milliseconds of each step that makes an input from a picture; None without pictures."""
    from edge.onnx.inputs import preparing_ms

    if not read_inputs.pictures:
        return None
    return preparing_ms(inputs, read_inputs, args.repeats, metadata)


def _run_engine(
    args: argparse.Namespace,
    engine: OnnxEngine | PagedNetwork,
    inputs: ReadInputs,
    preparing_ms: dict[str, float] | None,
) -> RunResult:
    """Run a loaded model, and measure it."""
    from edge.llama.interrupt import interrupt_stops
    from edge.onnx.bench import sequential

    with interrupt_stops(engine):
        outputs = engine.run(inputs.feeds)
        speed = _measure(sequential(engine.run), inputs.feeds, args.repeats, 1) if args.repeats else None
    about = {
        "provider": engine.provider,
        "fell_back_from": list(engine.fell_back_from),
        "threads": engine.threads,
        "stages": None,
    }
    rows = [("provider", f"{engine.provider}, {counted(engine.threads, 'thread')}")]
    fallbacks = [f"{provider}; what runs is {engine.provider}" for provider in engine.fell_back_from]
    return RunResult(inputs, preparing_ms, outputs, speed, about, rows, fallbacks)


def _there(
    args: argparse.Namespace, scaling: Scaling | None, metadata: Metadata, devices: distributed.Devices[OnnxPlan]
) -> RunResult:
    """Run the model on several devices, as a pipeline."""
    from edge.deployment.deployed_network import stage_rows
    from edge.llama.interrupt import interrupt_stops
    from edge.onnx.file import keep_outputs, load
    from edge.onnx.inputs import path_of, read
    from edge.onnx.model import OnnxSource, declared_inputs
    from edge.onnx.signature import with_dims
    from edge.quantization.onnx_compare import errors

    file = load(Path(args.model))
    keep_outputs(file.model.graph, args.outputs)
    read_files = [file.path, *file.data_files]
    if args.output is not None:
        check_output(Path(args.output), read_files, args.force)
    if args.save_plan is not None:
        others = [Path(name) for name in (args.labels, args.output) if name is not None]
        check_output(args.save_plan, [*read_files, *map(path_of, args.input), *others], force=True)
    declared = with_dims(declared_inputs(file), dict(args.dim))
    inputs = read(declared, args.input, scaling, metadata)
    preparing_ms = _preparing(args, declared, inputs, metadata)
    model = OnnxSource.from_file(file, dict(args.dim), inputs.feeds)
    with distributed.deployed_onnx(args, devices, model) as deployed:
        pipeline, wire = deployed.pipeline, deployed.wire
        measure = partial(_measure, feeds=inputs.feeds, repeats=args.repeats, window=args.in_flight)
        with interrupt_stops(pipeline):
            outputs = pipeline.run(inputs.feeds, wire).outputs
            wire_errors = errors(pipeline.run(inputs.feeds).outputs, outputs) if wire != "f32" else ()
            speed = pipeline.measured(measure, wire) if args.repeats else None
        about = deployed.to_json(speed.compute_ms if speed else (), wire_errors)
        names = ("copy", "copies") if args.parallel == distributed.REPLICAS else ("stage", "cut")
        rows = stage_rows(about["stages"], deployed.why, wire, wire_errors, names)
        return RunResult(inputs, preparing_ms, outputs, speed, about, rows)


def _check(args: argparse.Namespace) -> Scaling | None:
    """Return how pixels are scaled, or None for the default.

    Raises UsageError for options that cannot work, before anything is loaded.
    """
    from edge.onnx.inputs import is_arrays, path_of

    files = [path_of(text) for text in args.input]
    pictures = not all(map(is_arrays, files))
    check_onnx(pictures)
    scaling_option = next((name for name in ("mean", "std", "scale") if getattr(args, name) is not None), None)
    if scaling_option and not pictures:
        raise UsageError(f"--{scaling_option} is for pictures; arrays are used unchanged: leave it out")
    if args.scale is not None and scaling_option != "scale":
        raise UsageError(f"--scale replaces --mean and --std; leave --{scaling_option} out")
    if (args.mean is None) != (args.std is None):
        raise UsageError("--mean and --std go together; give both, or none for ImageNet's")
    check_dimensions(args.dim)
    if args.picture is not None:
        _check_picture(args, files)
    if args.memory is not None:
        refuse(args, ("provider", "workers", "plan"), "does not go with --memory; leave one out")
    if args.output is not None:
        model, output = Path(args.model), Path(args.output)
        labels = [Path(args.labels)] if args.labels is not None else []
        check_output(output, [model, *files, *labels], args.force)
    if not scaling_option:
        return None
    from edge.onnx.images import Scaling

    return Scaling(args.scale) if scaling_option == "scale" else Scaling(mean=args.mean, std=args.std)


def _check_picture(args: argparse.Namespace, files: Sequence[Path]) -> None:
    """Raise UsageError if --picture cannot be written, or if the inputs are not one picture."""
    from edge.onnx.inputs import is_arrays
    from edge.pictures.drawing import check_suffix

    picture, labels = Path(args.picture), [Path(name) for name in (args.labels, args.output) if name is not None]
    check_suffix(picture)
    n_pictures = sum(not is_arrays(path) for path in files)
    if n_pictures != 1:
        raise UsageError(f"--picture draws on the picture of --input, and there are {n_pictures}; give one")
    check_output(picture, [Path(args.model), *files, *labels], args.force)


def _measure(flow: Flow, feeds: Feeds, repeats: int, window: int | None) -> FlowSpeed:
    from edge.onnx.bench import measure

    with progress("Measuring", unit="runs") as show:
        return measure(flow, feeds, repeats, window, show)


def _channels(text: str) -> tuple[float, ...]:
    """Return a number for each channel, or one number for all channels."""
    return tuple(map(number, items(text)))


def _divisors(text: str) -> tuple[float, ...]:
    """Return numbers as `_channels` does. Raises ValueError if one is 0."""
    values = _channels(text)
    if not all(values):
        raise ValueError(f"needs numbers other than 0, got {text}")
    return values


@dataclass(frozen=True)
class RunResult:
    """Outputs of one run of a model, and how they were computed."""

    inputs: ReadInputs
    preparing_ms: Mapping[str, float] | None  # time of each step from a picture to an input; None without pictures
    outputs: Feeds
    speed: FlowSpeed | None  # None if it was not measured
    about: Mapping[str, Any]  # description of the engine, for --json
    rows: Sequence[tuple[str, str]]  # description of the engine for the printed table: (name, value)
    further: Sequence[str] = ()  # notes of the engine, without a full stop
    predictions: Predictions | None = None  # drawn predictions; None without a picture for them

    @property
    def notes(self) -> list[str]:
        """All notes, as sentences."""
        return [f"{note}." for note in (*self.inputs.notes, *self.further)]

    def to_json(self, top: TopClasses | None) -> dict[str, Any]:
        """Return the result as plain values. top: the top classes, if there are labels."""
        from edge.onnx.bench import speed_json
        from edge.onnx.outputs import summaries

        speed = self.speed
        return {
            **self.inputs.to_json(),
            **self.about,
            "outputs": [summary.to_json() for summary in summaries(self.outputs)],
            "top": top.to_json() if top else None,
            "predictions": self.predictions.to_json() if self.predictions else None,
            "preparing_ms": dict(self.preparing_ms) if self.preparing_ms else None,
            **speed_json(speed),
            "latency_ms_p90": speed.latency_ms_p90 if speed else None,
            "repeats": speed.repeats if speed else 0,
            "notes": self.notes,
        }

    def show(self, title: str, top: TopClasses | None) -> None:
        """Print the result as tables."""
        from edge.onnx.outputs import summaries

        rows, outputs = list(self.rows), summaries(self.outputs)
        if self.preparing_ms:
            steps = ", ".join(f"{step} {number_text(ms)}" for step, ms in self.preparing_ms.items())
            rows.append(("picture", f"{number_text(sum(self.preparing_ms.values()))} ms ({steps})"))
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
        if self.predictions:
            self._show_predictions(self.predictions)
        not_finite = (o for o in outputs if o.not_finite)
        print_notes(f"{o.not_finite} values of {o.name} are infinite or not a number." for o in not_finite)
        print_notes(self.notes)

    def _show_predictions(self, predictions: Predictions) -> None:
        rows = predictions.rows[:_MOST_SHOWN]
        boxes = [" ".join(f"{side:.0f}" for side in row.box) if row.box else "" for row in rows]
        columns = ("label", "score") + (() if predictions.kind == "classes" else ("left top right bottom",))
        print_columns(
            columns,
            [(row.label, f"{row.score:.3f}", box)[: len(columns)] for row, box in zip(rows, boxes, strict=True)],
        )
        if len(predictions.rows) > len(rows):
            print_notes([f"{len(predictions.rows) - len(rows)} further {predictions.kind} are in the picture."])
        if not rows:
            print_notes([f"The outputs contain no {predictions.kind}."])
